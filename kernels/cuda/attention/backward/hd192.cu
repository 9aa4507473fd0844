// Head dims up to 192.
#include "backward.cuh"

UNSLOTH_ATTENTION_GRADIENTS_16BIT(APART, 192)
