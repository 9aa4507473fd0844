// Blocks of a cluster: refused on the host, where blocks run one after the other.
#pragma once

#include <cstdint>

#include "device.h"

namespace unsloth {

inline void cluster_sync() { machine::block->fail("blocks of a cluster wait for each other"); }

inline uint32_t peer_address(const void *, uint32_t) { return 0; }

inline float4 load_from_peer(uint32_t) { return {}; }

inline void store_to_peer(uint32_t, float) {}

inline void store_async(const float4 &, uint32_t, uint32_t) {}

}  // namespace unsloth
