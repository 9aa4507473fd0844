// Head dims up to 256.
#include "backward.cuh"

UNSLOTH_ATTENTION_GRADIENTS_16BIT(APART, 256)
