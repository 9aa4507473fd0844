#include "quantize.cuh"

UNSLOTH_QUANTIZE_OF(bf16, __nv_bfloat16)
