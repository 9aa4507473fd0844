#include "codes.cuh"
#include "tiles.cuh"

UNSLOTH_LINEAR_WIDE(i8_32, I8, int8_t, 32)
UNSLOTH_LINEAR_WIDE(i8_64, I8, int8_t, 64)
UNSLOTH_LINEAR_WIDE(i8_128, I8, int8_t, 128)
UNSLOTH_LINEAR_WIDE(i8_256, I8, int8_t, 256)
