// What blocks have of the steps of all tiles: whole tiles by turns, parts of one tile for a
// cluster, or even shares of all steps, so that every block has as much to do. Such a share may
// begin within a tile, which it does first, and end within one, which it does last. What a block
// has of the first it leaves in the workspace, for the block that begins that tile, which has been
// busy with others since, and waits for it.
//
// Blocks have shares from the last one on: they wait for none that might start after them.
#pragma once

#include <cstdint>

#include "linear/wide/arguments.h"

namespace unsloth {

// Steps of a tile.
struct Piece {
  uint32_t tile, begin, end;
};

class Pieces {
 public:
  __device__ __forceinline__ explicit Pieces(const LinearWideArguments &p)
      : p_(p),
        share_(gridDim.x - 1 - blockIdx.x),
        at_(p.share == 0 ? blockIdx.x / p.parts : begin_of(share_)),
        end_(p.share == 0 ? p.tiles : begin_of(share_ + 1)) {}

  // The next one, if there is one.
  __device__ __forceinline__ bool next(Piece &piece) {
    if (at_ >= end_) return false;
    if (p_.share == 0) {
      const uint32_t part = blockIdx.x % p_.parts;
      piece = {at_, p_.steps * part / p_.parts, p_.steps * (part + 1) / p_.parts};
      at_ += gridDim.x / p_.parts;
    } else {
      const uint32_t tile = at_ / p_.steps, begin = at_ % p_.steps;
      const uint32_t end = min(p_.steps, begin + (end_ - at_));
      piece = {tile, begin, end};
      at_ += end - begin;
    }
    return true;
  }

  // Of shares: the block's, and the last that has steps of a tile.
  __device__ __forceinline__ uint32_t share() const { return share_; }
  __device__ __forceinline__ uint32_t last_share(uint32_t tile) const {
    const uint32_t step = (tile + 1) * p_.steps - 1, longer = p_.one_more * (p_.share + 1);
    return step < longer ? step / (p_.share + 1) : p_.one_more + (step - longer) / p_.share;
  }

 private:
  // Of a share's steps, of all tiles one behind the other. The first shares have one more.
  __device__ __forceinline__ uint32_t begin_of(uint32_t share) const {
    return share * p_.share + min(share, p_.one_more);
  }

  const LinearWideArguments &p_;
  const uint32_t share_;
  uint32_t at_;
  const uint32_t end_;
};

}  // namespace unsloth
