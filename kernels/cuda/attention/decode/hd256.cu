// Head dim 256.
#include "decode.cuh"

UNSLOTH_ATTENTION_DECODING_16BIT(hd256, kDecode256)
