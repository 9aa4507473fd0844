// Of 16 bits; up to 4096 columns. Of longer rows the ring is as fast for LayerNorm.
#include "group.cuh"

UNSLOTH_NORM_BACKWARD_GROUP(layer_norm_f16, __half, true, false, 128)
UNSLOTH_NORM_BACKWARD_GROUP(layer_norm_f16, __half, true, false, 256)
UNSLOTH_NORM_BACKWARD_GROUP(layer_norm_f16_residual, __half, true, true, 128)
UNSLOTH_NORM_BACKWARD_GROUP(layer_norm_f16_residual, __half, true, true, 256)
UNSLOTH_NORM_BACKWARD_GROUP(layer_norm_bf16, __nv_bfloat16, true, false, 128)
UNSLOTH_NORM_BACKWARD_GROUP(layer_norm_bf16, __nv_bfloat16, true, false, 256)
UNSLOTH_NORM_BACKWARD_GROUP(layer_norm_bf16_residual, __nv_bfloat16, true, true, 128)
UNSLOTH_NORM_BACKWARD_GROUP(layer_norm_bf16_residual, __nv_bfloat16, true, true, 256)
