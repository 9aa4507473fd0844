#include "codes.cuh"

UNSLOTH_LINEAR_CODES(i8_8, false, 1)
UNSLOTH_LINEAR_CODES(i8_32, false, 4)
