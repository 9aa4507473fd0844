// Blocks of a cluster, on the host.
#pragma once

#include <cstdint>

#include "jitter.cuh"
#include "memory.cuh"

namespace unsloth {

inline void cluster_arrive() { machine::block->arrive_at_cluster(); }
inline void cluster_wait() { machine::block->await_cluster(); }
inline void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

inline uint32_t peer_address(const void *mine, uint32_t rank) {
  return (rank + 1) * machine::Cluster::kPart + shared_address(mine);
}

// The block whose memory an address of another is, and where that is.
inline machine::Block &peer_of(uint32_t address) { return machine::block->cluster().of(address); }
template <class T>
T *peer_pointer(uint32_t address) {
  const uint32_t at = address % machine::Cluster::kPart;
  return reinterpret_cast<T *>(peer_of(address).shared_pointer(at));
}

inline float4 load_from_peer(uint32_t address) { return *peer_pointer<float4>(address); }

inline int load_number_from_peer(uint32_t address) { return *peer_pointer<int>(address); }

inline void store_to_peer(uint32_t address, float value) { *peer_pointer<float>(address) = value; }

inline void store_to_peer(uint32_t address, const float4 &four) {
  if (address % 16 != 0) machine::block->fail("a misaligned store");
  *peer_pointer<float4>(address) = four;
}

inline void store_async(const float4 &value, uint32_t to, uint32_t barrier) {
  machine::block->engine([=] {
    *peer_pointer<float4>(to) = value;
    peer_of(barrier).deliver(*peer_pointer<machine::Barrier>(barrier), sizeof value);
  });
}

inline void bulk_copy_to_peer(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier) {
  if (to % 16 != 0 || from % 16 != 0 || bytes % 16 != 0) {
    machine::block->fail("a misaligned copy");
  }
  machine::block->engine([=] {
    memcpy(peer_pointer<char>(to), machine::block->shared_pointer(from), bytes);
    peer_of(barrier).deliver(*peer_pointer<machine::Barrier>(barrier), bytes);
  });
}

inline void arrive_at_peer(uint32_t barrier) {
  peer_of(barrier).arrive(*peer_pointer<machine::Barrier>(barrier));
}

inline void arrive_at_peer_after_reads(uint32_t barrier) { arrive_at_peer(barrier); }

}  // namespace unsloth
