#include "quantize.cuh"

UNSLOTH_QUANTIZE_SCALE(scale_codes, 0, 127)
UNSLOTH_QUANTIZE_SCALE(scale_ternary, 1, 1)
