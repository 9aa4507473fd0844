// Named barriers, on the host.
#pragma once

#include "device.h"
#include "jitter.cuh"

namespace unsloth {

inline void named_barrier_sync(int id, int threads) { machine::block->sync(id, threads); }

inline void named_barrier_arrive(int id, int threads) { machine::block->arrive(id, threads); }

}  // namespace unsloth
