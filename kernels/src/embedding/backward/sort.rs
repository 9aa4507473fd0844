//! The sort: passes of a radix sort by digits of the ids. It is stable, and what it adds by atomics are
//! whole numbers, so that its result does not depend on their order.

use contract::embedding_backward::{BINS, DIGIT, TILE};
use cubecl::prelude::*;

use super::{Args, LANES};
use crate::rows::{Dims, first_row};

/// Warps of a block that sorts, whose threads have a digit each, and keys of a thread: those of a warp
/// lie behind each other.
const WARPS: u32 = BINS / LANES;
const KEYS: u32 = TILE / BINS;
/// Tiles whose counts a thread asks for before it adds them.
const UNROLL_OF_TILES: u32 = 8;

/// The key that an id is sorted by: ids that add to no row come last.
#[cube]
fn key_of(ids: &Array<i32>, ids_i64: &Array<i64>, token: u32, args: &Args, dims: &Dims) -> u32 {
    let at = first_row(token, dims) as usize;
    let id = if args.wide_ids == 1u32 {
        ids_i64[at]
    } else {
        i64::cast_from(ids[at])
    };
    // A negative id is a great one without its sign, and so is one before the first row.
    let row = u64::cast_from(id) - args.begin;
    let mut key = args.vocab;
    if row < u64::cast_from(args.vocab) && row != u64::cast_from(args.padding) {
        key = u32::cast_from(row);
    }
    key
}

#[cube]
fn digit_of(key: u32, shift: u32) -> u32 {
    (key >> shift) & comptime!(BINS - 1)
}

/// The position of a thread's key `k`.
#[cube]
fn token_of(#[comptime] k: u32) -> u32 {
    let warp = UNIT_POS_X / LANES;
    CUBE_POS_X * TILE + warp * comptime!(TILE / WARPS) + comptime!(k * LANES) + UNIT_POS_X % LANES
}

/// Loads a thread's keys, and counts in `found` how many of each digit a warp has. Gives how many of
/// a key's digit there are before it in its warp, too: lanes with the same digit find each other by
/// votes on its bits. Waits for nobody at its end.
#[cube]
fn rank(
    ids: &Array<i32>,
    ids_i64: &Array<i64>,
    keys_in: &Array<u32>,
    found: &mut SharedMemory<u32>,
    args: &Args,
    dims: &Dims,
) -> (Sequence<u32>, Sequence<u32>) {
    let mut keys = Sequence::<u32>::new();
    #[unroll]
    for k in 0..KEYS {
        let token = token_of(k);
        let mut key = 0u32;
        if token < args.tokens {
            if args.pass == 0u32 {
                key = key_of(ids, ids_i64, token, args, dims);
            } else {
                key = keys_in[token as usize];
            }
        }
        keys.push(key);
    }
    #[unroll]
    for warp in 0..WARPS {
        found[(comptime!(warp * BINS) + UNIT_POS_X) as usize] = 0u32;
    }
    sync_cube();
    let of_warp = UNIT_POS_X / LANES * BINS;
    let lane = UNIT_POS_X % LANES;
    let mut ranks = Sequence::<u32>::new();
    #[unroll]
    for k in 0..KEYS {
        let is_there = token_of(k) < args.tokens;
        let digit = digit_of(*keys.index(k as usize), args.shift);
        let mut same = plane_ballot(is_there)[0];
        #[unroll]
        for bit in 0..DIGIT {
            let is_set = (digit >> bit) & 1u32 == 1u32;
            let set = plane_ballot(is_set)[0];
            same &= select(is_set, set, !set);
        }
        let before = (same & ((1u32 << lane) - 1u32)).count_ones();
        let at = (of_warp + digit) as usize;
        let rank = found[at] + before;
        // All lanes have read before one writes, and that is written before the next keys' lanes read.
        sync_plane();
        if is_there && before == 0u32 {
            found[at] = rank + same.count_ones();
        }
        sync_plane();
        ranks.push(rank);
    }
    (keys, ranks)
}

/// Counts each of the first digits of a tile, and lets the counts of further digits begin at zero. Grid:
/// tiles.
#[cube]
pub(super) fn count(
    ids: &Array<i32>,
    ids_i64: &Array<i64>,
    keys_in: &Array<u32>,
    counts: &mut Array<u32>,
    args: &Args,
    dims: &Dims,
) {
    let mut found = SharedMemory::<u32>::new(comptime!((WARPS * BINS) as usize));
    let _ranked = rank(ids, ids_i64, keys_in, &mut found, args, dims);
    sync_cube();
    let mut total = 0u32;
    #[unroll]
    for warp in 0..WARPS {
        total += found[(comptime!(warp * BINS) + UNIT_POS_X) as usize];
    }
    let at = CUBE_POS_X * BINS + UNIT_POS_X;
    counts[at as usize] = total;
    for pass in 1..args.passes {
        counts[(pass * args.tiles * BINS + at) as usize] = 0u32;
    }
}

/// Where this thread's digit begins in the order, and the tile's first key of it goes: behind all
/// smaller digits, and behind the same digit of tiles before.
#[cube]
fn first_places(counts: &Array<u32>, totals: &mut SharedMemory<u32>, args: &Args) -> (u32, u32) {
    let mut before = 0u32;
    let mut total = 0u32;
    let mut tile = 0u32;
    while tile < args.tiles {
        let mut some = Sequence::<u32>::new();
        #[unroll]
        for k in 0..UNROLL_OF_TILES {
            let mut found = 0u32;
            if tile + k < args.tiles {
                let row = args.pass * args.tiles + tile + k;
                found = counts[(row * BINS + UNIT_POS_X) as usize];
            }
            some.push(found);
        }
        #[unroll]
        for k in 0..UNROLL_OF_TILES {
            let found = *some.index(k as usize);
            total += found;
            before += select(tile + k < CUBE_POS_X, found, 0u32);
        }
        tile += UNROLL_OF_TILES;
    }
    // The sum of a warp's digits up to each, and of all warps before.
    let lane = UNIT_POS_X % LANES;
    let warp = UNIT_POS_X / LANES;
    let mut begin = total;
    #[unroll]
    for step in 0..5u32 {
        let smaller = plane_shuffle_up(begin, comptime!(1u32 << step));
        begin += select(lane >= comptime!(1u32 << step), smaller, 0u32);
    }
    if lane == comptime!(LANES - 1) {
        totals[warp as usize] = begin;
    }
    sync_cube();
    begin -= total;
    #[unroll]
    for other in 0..WARPS {
        begin += select(warp > other, totals[other as usize], 0u32);
    }
    (begin, begin + before)
}

/// Moves a tile's keys and positions to their places by a digit, in their order, and counts the next
/// digit of the tile that each comes to. Grid: tiles.
#[cube]
pub(super) fn scatter(
    ids: &Array<i32>,
    ids_i64: &Array<i64>,
    keys_in: &Array<u32>,
    positions_in: &Array<u32>,
    keys_out: &mut Array<u32>,
    positions_out: &mut Array<u32>,
    counts: &Array<u32>,
    next_counts: &mut Array<Atomic<u32>>,
    bounds: &mut Array<u32>,
    args: &Args,
    dims: &Dims,
) {
    let mut found = SharedMemory::<u32>::new(comptime!((WARPS * BINS) as usize));
    let mut totals = SharedMemory::<u32>::new(comptime!(WARPS as usize));
    let (keys, ranks) = rank(ids, ids_i64, keys_in, &mut found, args, dims);
    // Waits for all warps' counts, too.
    let (begin, first) = first_places(counts, &mut totals, args);
    let mut place = first;
    #[unroll]
    for warp in 0..WARPS {
        let at = (comptime!(warp * BINS) + UNIT_POS_X) as usize;
        let of_warp = found[at];
        found[at] = place;
        place += of_warp;
    }
    // Those of the last pass stay.
    if CUBE_POS_X == 0u32 {
        bounds[UNIT_POS_X as usize] = begin;
        if UNIT_POS_X == 0u32 {
            bounds[comptime!(BINS as usize)] = args.tokens;
        }
    }
    sync_cube();
    #[unroll]
    for k in 0..KEYS {
        let token = token_of(k);
        if token < args.tokens {
            let key = *keys.index(k as usize);
            let of_warp = UNIT_POS_X / LANES * BINS;
            let begin = found[(of_warp + digit_of(key, args.shift)) as usize];
            let to = begin + *ranks.index(k as usize);
            keys_out[to as usize] = key;
            if args.pass == 0u32 {
                positions_out[to as usize] = token;
            } else {
                positions_out[to as usize] = positions_in[token as usize];
            }
            if args.pass + 1u32 < args.passes {
                let row = (args.pass + 1u32) * args.tiles + to / TILE;
                let at = row * BINS + digit_of(key, args.next_shift);
                next_counts[at as usize].fetch_add(1u32);
            }
        }
    }
}
