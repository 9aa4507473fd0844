#include "few_codes.cuh"

UNSLOTH_LINEAR_FEW_CODES(i8_f32, false, float)
UNSLOTH_LINEAR_FEW_CODES(i8_f16, false, __half)
UNSLOTH_LINEAR_FEW_CODES(i8_bf16, false, __nv_bfloat16)
