#include "few.cuh"
#include "floats.cuh"

UNSLOTH_LINEAR_FEW(bf16, __nv_bfloat16, Floats<__nv_bfloat16>)
UNSLOTH_LINEAR_FEW(f16, __half, Floats<__half>)
