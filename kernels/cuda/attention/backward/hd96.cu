// Head dims up to 96. What is apart, that of 128 does.
#include "backward.cuh"

UNSLOTH_ATTENTION_GRADIENTS_16BIT(PREPARE, hd96, 96, 96)
UNSLOTH_ATTENTION_GRADIENTS_16BIT(TOGETHER, hd96, 96, 96)
