// Head dim 64, keys and values being codes.
#include "decode.cuh"

UNSLOTH_ATTENTION_DECODING_16BIT(hd64_codes, kCodes64)
UNSLOTH_ATTENTION_DECODING_16BIT(hd64_codes_heads, kCodes64Heads)
