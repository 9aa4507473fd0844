// Of every dtype.
#include "ring.cuh"

UNSLOTH_NORM_BACKWARD(norm_backward_ring_layer_norm_f32, float, true, false, kAsTold)
UNSLOTH_NORM_BACKWARD(norm_backward_ring_layer_norm_f32_residual, float, true, true, kAsTold)
UNSLOTH_NORM_BACKWARD(norm_backward_ring_layer_norm_f16, __half, true, false, kAsTold)
UNSLOTH_NORM_BACKWARD(norm_backward_ring_layer_norm_f16_residual, __half, true, true, kAsTold)
UNSLOTH_NORM_BACKWARD(norm_backward_ring_layer_norm_bf16, __nv_bfloat16, true, false, kAsTold)
UNSLOTH_NORM_BACKWARD(norm_backward_ring_layer_norm_bf16_residual, __nv_bfloat16, true, true,
                      kAsTold)
