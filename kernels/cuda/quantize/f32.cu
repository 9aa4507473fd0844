#include "quantize.cuh"

UNSLOTH_QUANTIZE_OF(f32, float)
