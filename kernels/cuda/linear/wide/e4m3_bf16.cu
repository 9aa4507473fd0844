#include "e4m3.cuh"
#include "tiles.cuh"

UNSLOTH_LINEAR_WIDE(e4m3_bf16_64, E4m3, __nv_bfloat16, 64)
UNSLOTH_LINEAR_WIDE(e4m3_bf16_128, E4m3, __nv_bfloat16, 128)
UNSLOTH_LINEAR_WIDE(e4m3_bf16_256, E4m3, __nv_bfloat16, 256)
