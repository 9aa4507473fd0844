// Head dim 256, keys and values being codes.
#include "decode.cuh"

UNSLOTH_ATTENTION_DECODING_16BIT(hd256_codes, kCodes256)
