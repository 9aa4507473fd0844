#include "quantize.cuh"

UNSLOTH_QUANTIZE_SCALE(scale_codes, kI8)
UNSLOTH_QUANTIZE_SCALE(scale_ternary, kTernary)
UNSLOTH_QUANTIZE_SCALE(scale_e4m3, kE4m3)
