// Programmatic dependent launch, on the host, where kernels run one after the other.
#pragma once

namespace unsloth {

inline void await_previous_kernel() {}
inline void let_next_kernel_start() {}

}  // namespace unsloth
