//! The sums over sorted positions. Rows of up to [`LONG`] positions are summed where they begin in the
//! sorted order; of longer ones each piece of the order is summed by itself, and then the pieces. Rows
//! without positions are zeroed.

// A condition of compile time is none beside one of run time.
#![allow(clippy::collapsible_if)]

use contract::embedding_backward::{COLUMNS, LONG, ROUNDS, ROWS, THREADS};
use cubecl::prelude::*;

use super::{Args, LANES};
use crate::rows::{Dims, second_row};

/// Rows of `dout` that a thread loads before it adds them, each as far away as memory is; and pieces.
const UNROLL: u32 = 4;
const UNROLL_OF_PIECES: u32 = 8;
/// Threads that share a vector of a row whose pieces they add.
const SHARERS: u32 = THREADS / COLUMNS;
/// Positions that a block looks at: those at which it has the rows that begin, and so many behind as such a
/// row may have, or as tell that it is long.
const NEAR: u32 = THREADS * ROUNDS + LONG;

/// Where a vector of the gradient is.
#[cube]
fn at(row: u32, column: u32, args: &Args) -> usize {
    (u64::cast_from(row) * args.out_stride + u64::cast_from(column)) as usize
}

/// Adds a column of vectors of the places from `from` to `to`, in their order.
#[cube]
fn add<E: Float, N: Size>(
    sums: &mut Vector<f32, N>,
    dout: &Array<Vector<E, N>>,
    places: &SharedMemory<u64>,
    from: u32,
    to: u32,
    column: u32,
) {
    let mut i = from;
    while i < to {
        let mut vectors = Sequence::<Vector<E, N>>::new();
        #[unroll]
        for k in 0..UNROLL {
            let mut vector = Vector::<E, N>::zeroed();
            if i + k < to {
                vector = dout[(places[(i + k) as usize] + u64::cast_from(column)) as usize];
            }
            vectors.push(vector);
        }
        #[unroll]
        for k in 0..UNROLL {
            *sums += Vector::<f32, N>::cast_from(*vectors.index(k as usize));
        }
        i += UNROLL;
    }
}

/// Sums the rows that begin at some sorted positions, and are not long. Short rows share a block; a
/// thread has [`ROUNDS`] positions, whose first vectors are on their way at once.
#[cube]
fn few<E: Float, O: Float, N: Size>(
    block: u32,
    dout: &Array<Vector<E, N>>,
    keys_in: &Array<u32>,
    positions_in: &Array<u32>,
    out: &mut Array<Vector<O, N>>,
    args: &Args,
    dims: &Dims,
    #[comptime] adds: bool,
) {
    let at_a_time = max(THREADS / args.length, 1u32);
    let in_block = at_a_time * ROUNDS;
    let first = block * in_block;
    // Of position i of the block the key is i + 1: the first is that of the position before. A key that
    // no row has stands for none.
    let mut near = SharedMemory::<u32>::new(comptime!((NEAR + 1) as usize));
    let mut places = SharedMemory::<u64>::new(comptime!(NEAR as usize));
    let mut i = UNIT_POS_X;
    while i <= in_block + LONG {
        let mut key = args.vocab;
        if first + i > 0u32 && first + i <= args.tokens {
            key = keys_in[(first + i - 1u32) as usize];
        }
        near[i as usize] = key;
        if i < in_block + LONG && first + i < args.tokens {
            places[i as usize] = second_row(positions_in[(first + i) as usize], dims);
        }
        i += THREADS;
    }
    sync_cube();
    let slot = UNIT_POS_X / args.length;
    if slot < at_a_time {
        // Of how many positions the row is that begins at each of a thread's: none if none does.
        let mut counts = Sequence::<u32>::new();
        #[unroll]
        for k in 0..ROUNDS {
            let i = slot + k * at_a_time;
            let row = near[i as usize + 1];
            let begins = first + i == 0u32 || near[i as usize] != row;
            let mut count = 0u32;
            if row < args.vocab && begins && near[(i + 1u32 + LONG) as usize] != row {
                while near[(i + 1u32 + count) as usize] == row {
                    count += 1u32;
                }
            }
            counts.push(count);
        }
        let mut column = UNIT_POS_X - slot * args.length;
        while column < args.length {
            let mut vectors = Sequence::<Vector<E, N>>::new();
            let mut held = Sequence::<Vector<O, N>>::new();
            #[unroll]
            for k in 0..ROUNDS {
                let i = slot + k * at_a_time;
                let mut vector = Vector::<E, N>::zeroed();
                let mut there = Vector::<O, N>::zeroed();
                if *counts.index(k as usize) > 0u32 {
                    vector = dout[(places[i as usize] + u64::cast_from(column)) as usize];
                    if comptime!(adds) {
                        if args.accumulate != 0u32 {
                            there = out[at(near[i as usize + 1], column, args)];
                        }
                    }
                }
                vectors.push(vector);
                if comptime!(adds) {
                    held.push(there);
                }
            }
            #[unroll]
            for k in 0..ROUNDS {
                let i = slot + k * at_a_time;
                let count = *counts.index(k as usize);
                if count > 0u32 {
                    let mut sums = Vector::<f32, N>::zeroed();
                    sums += Vector::<f32, N>::cast_from(*vectors.index(k as usize));
                    add::<E, N>(&mut sums, dout, &places, i + 1u32, i + count, column);
                    if comptime!(adds) {
                        if args.accumulate != 0u32 {
                            sums += Vector::<f32, N>::cast_from(*held.index(k as usize));
                        }
                    }
                    out[at(near[i as usize + 1], column, args)] = Vector::cast_from(sums);
                }
            }
            column += THREADS;
        }
    }
}

/// Zeroes those of a block's rows that have no positions. Keys with the same last digit lie between two
/// bounds, where the block looks for its own.
#[cube]
fn none<O: Float, N: Size>(
    block: u32,
    keys_in: &Array<u32>,
    bounds: &Array<u32>,
    out: &mut Array<Vector<O, N>>,
    args: &Args,
) {
    let first = block * ROWS;
    let behind = min(first + ROWS, args.vocab);
    let mut is_there = SharedMemory::<u32>::new(comptime!(ROWS as usize));
    if UNIT_POS_X < ROWS {
        is_there[UNIT_POS_X as usize] = 0u32;
    }
    sync_cube();
    if args.tokens > 0u32 {
        let mut low = bounds[(first >> args.shift) as usize];
        let mut high = bounds[(((behind - 1u32) >> args.shift) + 1u32) as usize];
        // Of many positions those before and behind the block's rows are left out by halves.
        let mut halves = high - low > comptime!(4 * THREADS);
        while halves {
            let middle = low + (high - low) / 2u32;
            let key = keys_in[middle as usize];
            if key < first {
                low = middle;
            }
            if key >= behind {
                high = middle;
            }
            halves = (key < first || key >= behind) && high - low > comptime!(4 * THREADS);
        }
        let mut i = low + UNIT_POS_X;
        while i < high {
            let key = keys_in[i as usize];
            if key >= first && key < behind {
                is_there[(key - first) as usize] = 1u32;
            }
            i += THREADS;
        }
    }
    sync_cube();
    let at_a_time = max(THREADS / args.length, 1u32);
    let slot = UNIT_POS_X / args.length;
    let mut row = first + slot;
    if slot >= at_a_time {
        row = behind;
    }
    while row < behind {
        if is_there[(row - first) as usize] == 0u32 {
            let mut column = UNIT_POS_X - slot * args.length;
            while column < args.length {
                out[at(row, column, args)] = Vector::zeroed();
                column += THREADS;
            }
        }
        row += at_a_time;
    }
}

/// Sums the part of a long row's positions that lies in a piece of the sorted order: of the row
/// that the piece begins with, or with `at_end` of the one that it ends with.
#[cube]
fn part<E: Float, N: Size>(
    piece: u32,
    at_end: u32,
    dout: &Array<Vector<E, N>>,
    keys_in: &Array<u32>,
    positions_in: &Array<u32>,
    partials: &mut Array<Vector<f32, N>>,
    args: &Args,
    dims: &Dims,
) {
    let begin = piece * LONG;
    let behind = min(begin + LONG, args.tokens);
    let first = keys_in[begin as usize];
    let last = keys_in[(behind - 1u32) as usize];
    let row = select(at_end == 1u32, last, first);
    let is_other = at_end == 0u32 || last != first;
    if is_other && row < args.vocab {
        // A lane has a position of the piece, and those as far before and behind: so many show
        // whether the row is long.
        let lane = UNIT_POS_X % LANES;
        let i = begin + lane;
        let end = args.tokens - 1u32;
        let before = begin > 0u32 && keys_in[(max(i, LONG) - LONG) as usize] == row;
        let inside = i < behind && keys_in[min(i, end) as usize] == row;
        let after = i + LONG <= end && keys_in[min(i + LONG, end) as usize] == row;
        let before = plane_ballot(before)[0].count_ones();
        let after = plane_ballot(after)[0].count_ones();
        let count = plane_ballot(inside)[0].count_ones();
        let mut places = SharedMemory::<u64>::new(comptime!(LONG as usize));
        if UNIT_POS_X < LONG && i < behind {
            places[lane as usize] = second_row(positions_in[i as usize], dims);
        }
        sync_cube();
        if before + count + after > LONG {
            // Of those inside the first are there, or the last.
            let from = select(at_end == 1u32, behind - begin - count, 0u32);
            let to = u64::cast_from(piece * 2u32 + at_end) * u64::cast_from(args.length);
            let mut column = UNIT_POS_X;
            while column < args.length {
                let mut sums = Vector::<f32, N>::zeroed();
                add::<E, N>(&mut sums, dout, &places, from, from + count, column);
                partials[(to + u64::cast_from(column)) as usize] = sums;
                column += THREADS;
            }
        }
    }
}

/// All sums over positions, and rows that have none. Grid: both ends of all pieces, which take the
/// longest and so come first; positions at which rows begin; rows, unless sums are added to what is there.
#[cube]
pub(super) fn rows<E: Float, O: Float, N: Size>(
    dout: &Array<Vector<E, N>>,
    keys_in: &Array<u32>,
    positions_in: &Array<u32>,
    bounds: &Array<u32>,
    partials: &mut Array<Vector<f32, N>>,
    out: &mut Array<Vector<O, N>>,
    args: &Args,
    dims: &Dims,
    #[comptime] adds: bool,
) {
    let of_pieces = args.pieces * 2u32;
    if CUBE_POS_X < of_pieces {
        let (piece, at_end) = (CUBE_POS_X / 2u32, CUBE_POS_X % 2u32);
        part::<E, N>(
            piece,
            at_end,
            dout,
            keys_in,
            positions_in,
            partials,
            args,
            dims,
        );
    } else if CUBE_POS_X < of_pieces + args.windows {
        few::<E, O, N>(
            CUBE_POS_X - of_pieces,
            dout,
            keys_in,
            positions_in,
            out,
            args,
            dims,
            adds,
        );
    } else {
        none::<O, N>(
            CUBE_POS_X - of_pieces - args.windows,
            keys_in,
            bounds,
            out,
            args,
        );
    }
}

/// The last piece of a long row that begins in `piece`: all pieces from the next to it begin with it.
#[cube]
fn last_piece(piece: u32, row: u32, keys_in: &Array<u32>, args: &Args) -> u32 {
    let lane = UNIT_POS_X % LANES;
    let mut last = piece;
    let mut goes_on = true;
    while goes_on {
        let next = last + 1u32 + lane;
        let is_of_row =
            next < args.pieces && keys_in[(min(next, args.pieces - 1u32) * LONG) as usize] == row;
        let found = plane_ballot(is_of_row)[0].count_ones();
        last += found;
        goes_on = found == LANES;
    }
    last
}

/// Adds the parts of the long row that begins in a piece of the sorted order, if one does: it is
/// the one that the piece ends with, and all pieces behind begin with it. Threads that share a vector
/// take pieces by turns. Grid: pieces, vectors of a row in groups of [`COLUMNS`].
#[cube]
pub(super) fn joins<O: Float, N: Size>(
    keys_in: &Array<u32>,
    partials: &Array<Vector<f32, N>>,
    out: &mut Array<Vector<O, N>>,
    args: &Args,
) {
    let begin = CUBE_POS_X * LONG;
    let behind = min(begin + LONG, args.tokens);
    let row = keys_in[(behind - 1u32) as usize];
    let first = keys_in[begin as usize];
    let before = keys_in[(max(begin, 1u32) - 1u32) as usize];
    let begins = begin == 0u32 || before != row;
    let lane = UNIT_POS_X % LANES;
    let inside = begin + lane < behind && keys_in[min(begin + lane, behind - 1u32) as usize] == row;
    let start = behind - plane_ballot(inside)[0].count_ones();
    let beyond = start + LONG;
    let is_long = beyond < args.tokens && keys_in[min(beyond, args.tokens - 1u32) as usize] == row;
    if row < args.vocab && begins && is_long {
        let last = last_piece(CUBE_POS_X, row, keys_in, args);
        let sharer = UNIT_POS_X / COLUMNS;
        let in_group = UNIT_POS_X % COLUMNS;
        let column = CUBE_POS_Y * COLUMNS + in_group;
        let at_end = select(first != row, 1u32, 0u32);
        let mut sums = Vector::<f32, N>::zeroed();
        let mut piece = CUBE_POS_X + sharer;
        while piece <= last {
            let mut vectors = Sequence::<Vector<f32, N>>::new();
            #[unroll]
            for k in 0..UNROLL_OF_PIECES {
                let from = piece + comptime!(k * SHARERS);
                let mut vector = Vector::<f32, N>::zeroed();
                if from <= last && column < args.length {
                    let part = from * 2u32 + select(from == CUBE_POS_X, at_end, 0u32);
                    let at = u64::cast_from(part) * u64::cast_from(args.length);
                    vector = partials[(at + u64::cast_from(column)) as usize];
                }
                vectors.push(vector);
            }
            #[unroll]
            for k in 0..UNROLL_OF_PIECES {
                sums += *vectors.index(k as usize);
            }
            piece += comptime!(UNROLL_OF_PIECES * SHARERS);
        }
        let mut shared = SharedMemory::<Vector<f32, N>>::new(comptime!(THREADS as usize));
        shared[UNIT_POS_X as usize] = sums;
        sync_cube();
        if sharer == 0u32 && column < args.length {
            #[unroll]
            for k in 1..SHARERS {
                sums += shared[(comptime!(k * COLUMNS) + in_group) as usize];
            }
            let to = at(row, column, args);
            if args.accumulate != 0u32 {
                sums += Vector::<f32, N>::cast_from(out[to]);
            }
            out[to] = Vector::cast_from(sums);
        }
    }
}
