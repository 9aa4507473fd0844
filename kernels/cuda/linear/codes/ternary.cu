#include "codes.cuh"

UNSLOTH_LINEAR_CODES(ternary_8, true, 1)
UNSLOTH_LINEAR_CODES(ternary_32, true, 4)
