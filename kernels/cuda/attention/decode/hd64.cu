// Head dim 64.
#include "decode.cuh"

UNSLOTH_ATTENTION_DECODING_16BIT(hd64, kDecode64)
