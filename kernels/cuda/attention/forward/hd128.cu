// Head dims up to 128.
#include "forward.cuh"

UNSLOTH_ATTENTION_FORWARD_16BIT(hd128_full, kTile128, Mask::kNone, false, kUsual)
UNSLOTH_ATTENTION_FORWARD_16BIT(hd128_causal, kTile128, Mask::kCausal, false, kUsual)
UNSLOTH_ATTENTION_FORWARD_16BIT(hd128_window, kTile128, Mask::kWindow, false, kUsual)
UNSLOTH_ATTENTION_FORWARD_16BIT(hd128_softcap, kTile128, Mask::kWindow, true, kUsual)
