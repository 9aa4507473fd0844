// Head dim 128, keys and values being codes.
#include "decode.cuh"

UNSLOTH_ATTENTION_DECODING_16BIT(hd128_codes, kCodes128)
UNSLOTH_ATTENTION_DECODING_16BIT(hd128_codes_heads, kCodes128Heads)
