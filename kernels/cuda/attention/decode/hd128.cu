// Head dim 128.
#include "decode.cuh"

UNSLOTH_ATTENTION_DECODING_16BIT(hd128, kDecode128)
