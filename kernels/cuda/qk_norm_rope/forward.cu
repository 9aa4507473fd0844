// The forward pass, of every head dimension.
#include "launch.cuh"

UNSLOTH_QK_NORM_ROPE(qk_norm_rope_ring_forward_bf16_64, __nv_bfloat16, 64, false)
UNSLOTH_QK_NORM_ROPE(qk_norm_rope_ring_forward_bf16_128, __nv_bfloat16, 128, false)
UNSLOTH_QK_NORM_ROPE(qk_norm_rope_ring_forward_bf16_256, __nv_bfloat16, 256, false)
UNSLOTH_QK_NORM_ROPE(qk_norm_rope_ring_forward_f16_64, __half, 64, false)
UNSLOTH_QK_NORM_ROPE(qk_norm_rope_ring_forward_f16_128, __half, 128, false)
UNSLOTH_QK_NORM_ROPE(qk_norm_rope_ring_forward_f16_256, __half, 256, false)
