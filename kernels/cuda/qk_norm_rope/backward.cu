// The gradients, of every head dimension.
#include "launch.cuh"

UNSLOTH_QK_NORM_ROPE(qk_norm_rope_ring_backward_bf16_64, __nv_bfloat16, 64, true)
UNSLOTH_QK_NORM_ROPE(qk_norm_rope_ring_backward_bf16_128, __nv_bfloat16, 128, true)
UNSLOTH_QK_NORM_ROPE(qk_norm_rope_ring_backward_bf16_256, __nv_bfloat16, 256, true)
UNSLOTH_QK_NORM_ROPE(qk_norm_rope_ring_backward_f16_64, __half, 64, true)
UNSLOTH_QK_NORM_ROPE(qk_norm_rope_ring_backward_f16_128, __half, 128, true)
UNSLOTH_QK_NORM_ROPE(qk_norm_rope_ring_backward_f16_256, __half, 256, true)
