// Of 16 bits; up to 8192 columns.
#include "group.cuh"

UNSLOTH_NORM_BACKWARD_GROUP(rms_norm_f16, __half, false, false, 128)
UNSLOTH_NORM_BACKWARD_GROUP(rms_norm_f16, __half, false, false, 256)
UNSLOTH_NORM_BACKWARD_GROUP(rms_norm_f16, __half, false, false, 512)
UNSLOTH_NORM_BACKWARD_GROUP(rms_norm_f16_residual, __half, false, true, 128)
UNSLOTH_NORM_BACKWARD_GROUP(rms_norm_f16_residual, __half, false, true, 256)
UNSLOTH_NORM_BACKWARD_GROUP(rms_norm_f16_residual, __half, false, true, 512)
UNSLOTH_NORM_BACKWARD_GROUP(rms_norm_bf16, __nv_bfloat16, false, false, 128)
UNSLOTH_NORM_BACKWARD_GROUP(rms_norm_bf16, __nv_bfloat16, false, false, 256)
UNSLOTH_NORM_BACKWARD_GROUP(rms_norm_bf16, __nv_bfloat16, false, false, 512)
UNSLOTH_NORM_BACKWARD_GROUP(rms_norm_bf16_residual, __nv_bfloat16, false, true, 128)
UNSLOTH_NORM_BACKWARD_GROUP(rms_norm_bf16_residual, __nv_bfloat16, false, true, 256)
UNSLOTH_NORM_BACKWARD_GROUP(rms_norm_bf16_residual, __nv_bfloat16, false, true, 512)
