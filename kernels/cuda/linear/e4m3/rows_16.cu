#include "rows.cuh"

UNSLOTH_LINEAR_E4M3(bf16_8, __nv_bfloat16, 1, 1)
UNSLOTH_LINEAR_E4M3(bf16_8_wide, __nv_bfloat16, 1, 2)
UNSLOTH_LINEAR_E4M3(bf16_16, __nv_bfloat16, 2, 2)
UNSLOTH_LINEAR_E4M3(bf16_32, __nv_bfloat16, 4, 2)
UNSLOTH_LINEAR_E4M3(f16_8, __half, 1, 1)
UNSLOTH_LINEAR_E4M3(f16_8_wide, __half, 1, 2)
UNSLOTH_LINEAR_E4M3(f16_16, __half, 2, 2)
UNSLOTH_LINEAR_E4M3(f16_32, __half, 4, 2)
