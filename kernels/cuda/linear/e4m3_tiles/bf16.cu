#include "tiles.cuh"

UNSLOTH_LINEAR_E4M3_TILES(bf16_64, __nv_bfloat16, 64)
UNSLOTH_LINEAR_E4M3_TILES(bf16_128, __nv_bfloat16, 128)
UNSLOTH_LINEAR_E4M3_TILES(bf16_256, __nv_bfloat16, 256)
