#include "few.cuh"
#include "floats.cuh"

UNSLOTH_LINEAR_FEW(bf16, __nv_bfloat16, Floats<__nv_bfloat16, false>)
UNSLOTH_LINEAR_FEW(f16, __half, Floats<__half, false>)
UNSLOTH_LINEAR_FEW(parts_bf16, __nv_bfloat16, Floats<__nv_bfloat16, true>)
UNSLOTH_LINEAR_FEW(parts_f16, __half, Floats<__half, true>)
