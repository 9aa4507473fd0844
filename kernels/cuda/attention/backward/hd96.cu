// Head dims up to 96. dK and dV alone, and dQ alone, are left to the kernels for 128.
#include "backward.cuh"

UNSLOTH_ATTENTION_GRADIENTS_16BIT(PREPARE, hd96, 96, 96)
UNSLOTH_ATTENTION_GRADIENTS_16BIT(TOGETHER, hd96, 96, 96)
