// Head dims up to 256.
#include "forward.cuh"

UNSLOTH_ATTENTION_FORWARD_16BIT(hd256_full, kTile256, Mask::kNone, false, kUsual)
UNSLOTH_ATTENTION_FORWARD_16BIT(hd256_causal, kTile256, Mask::kCausal, false, kUsual)
UNSLOTH_ATTENTION_FORWARD_16BIT(hd256_window, kTile256, Mask::kWindow, false, kUsual)
UNSLOTH_ATTENTION_FORWARD_16BIT(hd256_softcap, kTile256Softcap, Mask::kWindow, true, kUsual)
