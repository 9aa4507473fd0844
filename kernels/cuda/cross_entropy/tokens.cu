#include "ring.cuh"

UNSLOTH_CROSS_ENTROPY(cross_entropy_ring_tokens_f32, float)
UNSLOTH_CROSS_ENTROPY(cross_entropy_ring_tokens_f16, __half)
UNSLOTH_CROSS_ENTROPY(cross_entropy_ring_tokens_bf16, __nv_bfloat16)
