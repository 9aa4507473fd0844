// Head dim 64.
#include "decode.cuh"

UNSLOTH_ATTENTION_DECODING_16BIT(hd64, kDecode64)
UNSLOTH_ATTENTION_DECODING_16BIT(hd64_heads, kDecode64Heads)
