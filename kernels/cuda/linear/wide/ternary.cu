#include "codes.cuh"
#include "tiles.cuh"

UNSLOTH_LINEAR_WIDE(ternary_16, Ternary, int8_t, 16)
UNSLOTH_LINEAR_WIDE(ternary_32, Ternary, int8_t, 32)
UNSLOTH_LINEAR_WIDE(ternary_64, Ternary, int8_t, 64)
UNSLOTH_LINEAR_WIDE(ternary_128, Ternary, int8_t, 128)
UNSLOTH_LINEAR_WIDE(ternary_256, Ternary, int8_t, 256)
