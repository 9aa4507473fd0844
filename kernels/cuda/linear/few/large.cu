#include "blocks.cuh"
#include "few.cuh"

UNSLOTH_LINEAR_FEW_BLOCKS(q4_k, kQ4K)
UNSLOTH_LINEAR_FEW_BLOCKS(q5_k, kQ5K)
UNSLOTH_LINEAR_FEW_BLOCKS(q6_k, kQ6K)
