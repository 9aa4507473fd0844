//! The heuristics, as data: measured on an H200.

use contract::attention::Mask;

/// Up to this many queries per sequence a kernel's sibling for short ones is faster, by head dimension and mask.
const SHORT: [(usize, Mask, usize); 2] = [(64, Mask::Causal, 1024), (128, Mask::None, 512)];

/// Whether sequences of so many queries are short for the kernels of this head dimension and mask.
pub(super) fn is_short(head_dim: usize, mask: Mask, queries: usize) -> bool {
    let mut all = SHORT.iter();
    all.any(|(dim, of, most)| (*dim, *of) == (head_dim, mask) && queries <= *most)
}

/// Whether the portable decoding kernels, which split the keys, are better: for up to 64 rows, queries times the query heads of a key head.
/// `pairs` are sequences times key heads; `tiles` is what would be launched here.
///
/// Up to 16 rows they read keys at the memory's speed. Then their time is that of as many blocks of 16 rows, spread over the device; here a
/// round of tiles takes as long as about a block for each multiprocessor does, however few its tiles are. Where lengths are on the device,
/// the longest sequence makes a round, and the others are taken to be half as long.
pub(super) fn decodes(
    rows: usize,
    pairs: usize,
    head_dim: usize,
    tiles: usize,
    multiprocessors: usize,
    ragged: bool,
) -> bool {
    const BLOCK: usize = 16;
    const MOST_ROWS: usize = 64;
    let quarters = if head_dim <= 64 { 5 } else { 3 };
    let round = multiprocessors * quarters / 4 * if ragged { 2 } else { 1 };
    let rounds = tiles.div_ceil(multiprocessors);
    let blocks = rows.div_ceil(BLOCK).saturating_mul(pairs);
    rows <= BLOCK || rows <= MOST_ROWS && blocks <= rounds * round
}

/// What L2 has room for.
const L2: usize = 32 << 20;

/// (sequence, head) pairs whose tiles are scheduled together, the longest first, so that their keys and values stay in L2. `group` pairs
/// share them.
///
/// Where a pair has few tiles, fewer pairs: a wave of tiles then reads the keys of fewer pairs for the first time, which keeps
/// memory busy more evenly.
pub(super) fn pairs_in_l2(row_blocks: usize, bytes: usize, group: usize) -> usize {
    let budget = match row_blocks {
        0..=4 => L2 / 4,
        5..=16 => L2 / 2,
        _ => L2,
    };
    let fitting = (budget / bytes.max(1)).max(1);
    (1 << fitting.ilog2()) * group
}

/// Keys of one head for which L2 has room, of `bytes` each with their values.
pub(super) fn keys_in_l2(bytes: usize) -> usize {
    L2 / bytes.max(1)
}
