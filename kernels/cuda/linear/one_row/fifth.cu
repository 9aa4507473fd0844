#include "one_row.cuh"

UNSLOTH_LINEAR_ONE_ROW(q5_0, kQ5_0)
UNSLOTH_LINEAR_ONE_ROW(q5_1, kQ5_1)
