#include "rows.cuh"

UNSLOTH_LINEAR_E4M3(f32_8, float, 1, 1)
UNSLOTH_LINEAR_E4M3(f32_8_wide, float, 1, 2)
UNSLOTH_LINEAR_E4M3(f32_16, float, 2, 2)
