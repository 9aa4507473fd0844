#include "quantize.cuh"

UNSLOTH_QUANTIZE_OF(f16, __half)
