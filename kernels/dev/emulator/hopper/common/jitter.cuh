// The emulator draws who runs.
#pragma once

namespace unsloth {

inline void jitter() {}

}  // namespace unsloth
