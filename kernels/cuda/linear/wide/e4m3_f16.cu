#include "e4m3.cuh"
#include "tiles.cuh"

UNSLOTH_LINEAR_WIDE(e4m3_f16_64, E4m3, __half, 64)
UNSLOTH_LINEAR_WIDE(e4m3_f16_128, E4m3, __half, 128)
UNSLOTH_LINEAR_WIDE(e4m3_f16_256, E4m3, __half, 256)
