// A block for each token, and a cluster of two for each.
#include "ring.cuh"

UNSLOTH_CROSS_ENTROPY(f32, float)
UNSLOTH_CROSS_ENTROPY(f16, __half)
UNSLOTH_CROSS_ENTROPY(bf16, __nv_bfloat16)
