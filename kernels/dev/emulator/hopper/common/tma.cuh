// TMA, on the host: boxes of up to five dimensions, the rows of which are swizzled where they are
// of 64 or 128 bytes.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <mutex>

#include "mbarrier.cuh"

namespace unsloth {

constexpr uint64_t kEvictNormal = 0;
constexpr uint64_t kEvictFirst = 0;
constexpr uint64_t kEvictLast = 0;

inline void tma_prefetch_map(const CUtensorMap *) {}

// Where a byte of rows of 64 or 128 bytes comes to lie: units of 16 bytes change places within
// eight lines of 128. Those of other rows stay.
inline uint32_t swizzle(uint32_t offset, uint32_t row_bytes) {
  if (row_bytes != 64 && row_bytes != 128) return offset;
  return offset ^ ((offset >> 3) & (row_bytes - 16));
}

// Calls `each(in shared memory, in global memory or null, bytes)` for the box's 16-byte units.
template <class Each>
void tma_box(const CUtensorMap &map, uint32_t shared, const int (&at)[5], Each each) {
  uint32_t rows = 1;
  for (int i = 1; i < map.rank; i++) rows *= map.counts[i];
  for (uint32_t row = 0; row < rows; row++) {
    bool there = true;
    char *from = static_cast<char *>(map.pointer);
    uint32_t rest = row;
    for (int i = 1; i < map.rank; i++) {
      const int64_t place = at[i] + int64_t(rest % map.counts[i]);
      rest /= map.counts[i];
      there = there && place >= 0 && place <= int64_t(map.sizes[i]);
      from += place * int64_t(map.strides[i]);
    }
    const int64_t element = map.strides[0];
    const uint32_t row_bytes = map.counts[0] * element;
    // Hardware takes that for an illegal instruction.
    if (at[0] * element % 16 != 0) machine::block->fail("a box that begins within a line");
    for (uint32_t at_byte = 0; at_byte < row_bytes; at_byte += 16) {
      const int64_t place = at[0] * element + at_byte;
      const int64_t end = (int64_t(map.sizes[0]) + 1) * element;
      const int64_t left = there && place >= 0 ? end - place : 0;
      const uint32_t to = swizzle(shared + row * row_bytes + at_byte, row_bytes);
      each(machine::block->shared_pointer(to), from + place, std::clamp<int64_t>(left, 0, 16));
    }
  }
}

inline uint32_t tma_box_bytes(const CUtensorMap &map) {
  uint32_t bytes = map.strides[0];
  for (int i = 0; i < map.rank; i++) bytes *= map.counts[i];
  return bytes;
}

inline void tma_load_5d(uint32_t destination, const CUtensorMap *map, Mbarrier *full, uint64_t,
                        int c0, int c1, int c2, int c3, int c4) {
  if (machine::block->self().rank % machine::kWarp != 0) return;
  if (destination % 128 != 0) machine::block->fail("a misaligned box");
  machine::block->engine([=] {
    const int at[5] = {c0, c1, c2, c3, c4};
    tma_box(*map, destination, at, [](char *shared, const char *global, int64_t bytes) {
      memcpy(shared, global, bytes);
      memset(shared + bytes, 0, 16 - bytes);
    });
    machine::block->deliver(full->state, tma_box_bytes(*map));
  });
}

inline void tma_load_4d(uint32_t destination, const CUtensorMap *map, Mbarrier *full,
                        uint64_t policy, int c0, int c1, int c2, int c3) {
  tma_load_5d(destination, map, full, policy, c0, c1, c2, c3, 0);
}

inline void bulk_load(uint32_t destination, const void *source, uint32_t bytes, Mbarrier *full) {
  if (machine::block->self().rank % machine::kWarp != 0) return;
  if (destination % 16 != 0 || uintptr_t(source) % 16 != 0 || bytes % 16 != 0) {
    machine::block->fail("a misaligned copy");
  }
  machine::block->engine([=] {
    memcpy(machine::block->shared_pointer(destination), source, bytes);
    machine::block->deliver(full->state, bytes);
  });
}

inline void bulk_load_by_thread(uint32_t destination, const void *source, uint32_t bytes,
                                Mbarrier *full) {
  if (destination % 16 != 0 || uintptr_t(source) % 16 != 0 || bytes % 16 != 0) {
    machine::block->fail("a misaligned copy");
  }
  machine::block->engine([=] {
    memcpy(machine::block->shared_pointer(destination), source, bytes);
    machine::block->deliver(full->state, bytes);
  });
}

inline void tma_store_5d(const CUtensorMap *map, uint32_t source, int c0, int c1, int c2, int c3,
                         int c4) {
  machine::block->store([=] {
    const int at[5] = {c0, c1, c2, c3, c4};
    tma_box(*map, source, at,
            [](const char *shared, char *global, int64_t bytes) { memcpy(global, shared, bytes); });
  });
}

inline void bulk_store(float *destination, uint32_t source, uint32_t bytes) {
  if (source % 16 != 0 || uintptr_t(destination) % 16 != 0 || bytes % 16 != 0) {
    machine::block->fail("a misaligned copy");
  }
  machine::block->store(
      [=] { memcpy(destination, machine::block->shared_pointer(source), bytes); });
}

inline void bulk_add(float *destination, uint32_t source, uint32_t bytes) {
  if (source % 16 != 0 || uintptr_t(destination) % 16 != 0 || bytes % 16 != 0) {
    machine::block->fail("a misaligned reduction");
  }
  machine::block->store([=] {
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    const float *from = reinterpret_cast<const float *>(machine::block->shared_pointer(source));
    for (uint32_t i = 0; i < bytes / sizeof(float); ++i) destination[i] += from[i];
  });
}

inline void tma_store_commit() { machine::block->commit_stores(); }

template <int kPending = 0>
void tma_store_wait_read() {
  machine::block->wait_stores(kPending);
}

inline void tma_store_wait() { machine::block->wait_stores(0); }

inline void fence_async_proxy_global() {}

}  // namespace unsloth
