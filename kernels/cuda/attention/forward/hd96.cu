// Head dims up to 96.
#include "forward.cuh"

UNSLOTH_ATTENTION_FORWARD_16BIT(hd96_full, kTile96, Mask::kNone, false, kUsual)
UNSLOTH_ATTENTION_FORWARD_16BIT(hd96_causal, kTile96, Mask::kCausal, false, kUsual)
UNSLOTH_ATTENTION_FORWARD_16BIT(hd96_window, kTile96, Mask::kWindow, false, kUsual)
UNSLOTH_ATTENTION_FORWARD_16BIT(hd96_softcap, kTile96, Mask::kWindow, true, kUsual)
