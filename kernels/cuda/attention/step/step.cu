// Both head dimensions.
#include "step.cuh"

UNSLOTH_ATTENTION_STEP(bf16_hd64, __nv_bfloat16, 64)
UNSLOTH_ATTENTION_STEP(bf16_hd128, __nv_bfloat16, 128)
UNSLOTH_ATTENTION_STEP(f16_hd64, __half, 64)
UNSLOTH_ATTENTION_STEP(f16_hd128, __half, 128)
