// How many tiles a block takes of a row of pairs that have as many tiles each. Tested on the host
// (kernels/dev/test_even_share.py).
#pragma once

namespace unsloth {

// The least tiles from `share` on, up to so many more, that cut no pair of `of_pair` tiles, or all
// into parts as long; `share` if there are none such.
__device__ __forceinline__ int even_share(int share, int of_pair, int more) {
  const int parts = of_pair / share;
  const int even =
      parts == 0 ? (share + of_pair - 1) / of_pair * of_pair : (of_pair + parts - 1) / parts;
  const bool is_whole = parts == 0 || even * parts == of_pair;
  return is_whole && even - share <= more ? even : share;
}

}  // namespace unsloth
