#include "few_codes.cuh"

UNSLOTH_LINEAR_FEW_CODES(ternary_f32, true, float)
UNSLOTH_LINEAR_FEW_CODES(ternary_f16, true, __half)
UNSLOTH_LINEAR_FEW_CODES(ternary_bf16, true, __nv_bfloat16)
