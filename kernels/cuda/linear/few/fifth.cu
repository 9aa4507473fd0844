#include "blocks.cuh"
#include "few.cuh"

UNSLOTH_LINEAR_FEW_BLOCKS(q5_0, kQ5_0)
UNSLOTH_LINEAR_FEW_BLOCKS(q5_1, kQ5_1)
