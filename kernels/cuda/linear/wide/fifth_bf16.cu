#include "blocks.cuh"
#include "tiles.cuh"

UNSLOTH_LINEAR_WIDE_BLOCKS(q5_0_bf16_32, kQ5_0, __nv_bfloat16, 32)
UNSLOTH_LINEAR_WIDE_BLOCKS(q5_0_bf16_64, kQ5_0, __nv_bfloat16, 64)
UNSLOTH_LINEAR_WIDE_BLOCKS(q5_0_bf16_256, kQ5_0, __nv_bfloat16, 256)

UNSLOTH_LINEAR_WIDE_BLOCKS(q5_1_bf16_32, kQ5_1, __nv_bfloat16, 32)
UNSLOTH_LINEAR_WIDE_BLOCKS(q5_1_bf16_64, kQ5_1, __nv_bfloat16, 64)
UNSLOTH_LINEAR_WIDE_BLOCKS(q5_1_bf16_256, kQ5_1, __nv_bfloat16, 256)
