// Head dims up to 192, with values up to 192 or up to 128 wide.
#include "forward.cuh"

UNSLOTH_ATTENTION_FORWARD_16BIT(hd192_full, kTile192, Mask::kNone, false, kUsual)
UNSLOTH_ATTENTION_FORWARD_16BIT(hd192_causal, kTile192, Mask::kCausal, false, kUsual)
UNSLOTH_ATTENTION_FORWARD_16BIT(hd192_window, kTile192, Mask::kWindow, false, kUsual)
UNSLOTH_ATTENTION_FORWARD_16BIT(hd192_softcap, kTile192, Mask::kWindow, true, kUsual)
UNSLOTH_ATTENTION_FORWARD_16BIT(hd192v128_full, kTile192V128, Mask::kNone, false, kUsual)
UNSLOTH_ATTENTION_FORWARD_16BIT(hd192v128_causal, kTile192V128, Mask::kCausal, false, kUsual)
UNSLOTH_ATTENTION_FORWARD_16BIT(hd192v128_window, kTile192V128, Mask::kWindow, false, kUsual)
UNSLOTH_ATTENTION_FORWARD_16BIT(hd192v128_softcap, kTile192V128, Mask::kWindow, true, kUsual)
