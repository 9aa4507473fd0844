// Of every dtype.
#include "ring.cuh"

UNSLOTH_NORM_BACKWARD(norm_backward_ring_rms_norm_f32, float, false, false)
UNSLOTH_NORM_BACKWARD(norm_backward_ring_rms_norm_f32_residual, float, false, true)
UNSLOTH_NORM_BACKWARD(norm_backward_ring_rms_norm_f16, __half, false, false)
UNSLOTH_NORM_BACKWARD(norm_backward_ring_rms_norm_f16_residual, __half, false, true)
UNSLOTH_NORM_BACKWARD(norm_backward_ring_rms_norm_bf16, __nv_bfloat16, false, false)
UNSLOTH_NORM_BACKWARD(norm_backward_ring_rms_norm_bf16_residual, __nv_bfloat16, false, true)
