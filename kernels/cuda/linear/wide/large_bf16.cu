#include "blocks.cuh"
#include "tiles.cuh"

UNSLOTH_LINEAR_WIDE_BLOCKS(q4_k_bf16_32, kQ4K, __nv_bfloat16, 32)
UNSLOTH_LINEAR_WIDE_BLOCKS(q4_k_bf16_64, kQ4K, __nv_bfloat16, 64)
UNSLOTH_LINEAR_WIDE_BLOCKS(q4_k_bf16_256, kQ4K, __nv_bfloat16, 256)

UNSLOTH_LINEAR_WIDE_BLOCKS(q5_k_bf16_32, kQ5K, __nv_bfloat16, 32)
UNSLOTH_LINEAR_WIDE_BLOCKS(q5_k_bf16_64, kQ5K, __nv_bfloat16, 64)
UNSLOTH_LINEAR_WIDE_BLOCKS(q5_k_bf16_256, kQ5K, __nv_bfloat16, 256)

UNSLOTH_LINEAR_WIDE_BLOCKS(q6_k_bf16_32, kQ6K, __nv_bfloat16, 32)
UNSLOTH_LINEAR_WIDE_BLOCKS(q6_k_bf16_64, kQ6K, __nv_bfloat16, 64)
UNSLOTH_LINEAR_WIDE_BLOCKS(q6_k_bf16_256, kQ6K, __nv_bfloat16, 256)
