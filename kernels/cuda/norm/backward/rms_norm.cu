// Of every dtype, and for both times of refilling.
#include "ring.cuh"

UNSLOTH_NORM_BACKWARD(norm_backward_ring_rms_norm_f32, float, false, false, kAfterSums)
UNSLOTH_NORM_BACKWARD(norm_backward_ring_rms_norm_f32_early, float, false, false, kBeforeSums)
UNSLOTH_NORM_BACKWARD(norm_backward_ring_rms_norm_f32_residual, float, false, true, kAfterSums)
UNSLOTH_NORM_BACKWARD(norm_backward_ring_rms_norm_f32_residual_early, float, false, true,
                      kBeforeSums)
UNSLOTH_NORM_BACKWARD(norm_backward_ring_rms_norm_f16, __half, false, false, kAfterSums)
UNSLOTH_NORM_BACKWARD(norm_backward_ring_rms_norm_f16_early, __half, false, false, kBeforeSums)
UNSLOTH_NORM_BACKWARD(norm_backward_ring_rms_norm_f16_residual, __half, false, true, kAfterSums)
UNSLOTH_NORM_BACKWARD(norm_backward_ring_rms_norm_f16_residual_early, __half, false, true,
                      kBeforeSums)
UNSLOTH_NORM_BACKWARD(norm_backward_ring_rms_norm_bf16, __nv_bfloat16, false, false, kAfterSums)
UNSLOTH_NORM_BACKWARD(norm_backward_ring_rms_norm_bf16_early, __nv_bfloat16, false, false,
                      kBeforeSums)
UNSLOTH_NORM_BACKWARD(norm_backward_ring_rms_norm_bf16_residual, __nv_bfloat16, false, true,
                      kAfterSums)
UNSLOTH_NORM_BACKWARD(norm_backward_ring_rms_norm_bf16_residual_early, __nv_bfloat16, false, true,
                      kBeforeSums)
