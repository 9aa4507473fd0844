// Head dims up to 64.
#include "forward.cuh"

UNSLOTH_ATTENTION_FORWARD_16BIT(hd64_full, kTile64, Mask::kNone, false, kUsual)
UNSLOTH_ATTENTION_FORWARD_16BIT(hd64_causal, kTile64, Mask::kCausal, false, kUsual)
UNSLOTH_ATTENTION_FORWARD_16BIT(hd64_causal_short, kTile64Short, Mask::kCausal, false, kShort)
UNSLOTH_ATTENTION_FORWARD_16BIT(hd64_window, kTile64, Mask::kWindow, false, kUsual)
UNSLOTH_ATTENTION_FORWARD_16BIT(hd64_softcap, kTile64Short, Mask::kWindow, true, kUsual)
