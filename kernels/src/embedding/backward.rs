//! The gradient of an embedding's table: positions are sorted by id, keeping their order, and each
//! row of the table sums its own.
//!
//! | kernel | what it is for |
//! |-|-|
//! | [`count`], [`scatter`] | a pass of a radix sort, of one digit: stable, and without atomics |
//! | [`starts`] | where the positions of each id begin |
//! | [`rows`] | every row that has few positions, or none; of rows of many, what pieces of the sorted order sum to |
//! | [`joins`] | rows of many positions, of their pieces |

use contract::embedding_backward::{BINS, COLUMNS, DIGIT, Kind, LONG, ROUNDS, THREADS, TILE};
use cubecl::prelude::*;

use crate::Error;
use crate::emit::{Builder, Float as Dtype, Kernel, scalars, with_vector};
use crate::rows::{Dims, first_row, second_row};

/// Lanes of a warp.
const LANES: u32 = 32;
/// Warps of a block that sorts, whose threads have a digit each, and keys of a thread: those of a warp
/// lie behind each other.
const WARPS: u32 = BINS / LANES;
const KEYS: u32 = TILE / BINS;
/// Tiles whose counts a thread asks for before it adds them.
const UNROLL_OF_TILES: u32 = 8;
/// Rows of `dout` that a thread loads before it adds them, each as far away as memory is; and pieces.
const UNROLL: u32 = 4;
const UNROLL_OF_PIECES: u32 = 8;
/// Threads that share a vector of a row whose pieces they add.
const SHARERS: u32 = THREADS / COLUMNS;

scalars! { Args, ArgsExpand {
    tokens: u32,
    /// Rows of the gradient, and the row of the vocabulary that the first of them is.
    vocab: u32,
    begin: u64,
    /// Bits below the digit.
    shift: u32,
    /// Whether this is the sort's first pass, whose keys are made of the ids.
    first: u32,
    /// Tiles of the sort.
    tiles: u32,
    /// Of the sorted order, if rows may have so many positions that they are cut.
    pieces: u32,
    /// 0 for i32, 1 for i64.
    wide_ids: u32,
    /// The row whose gradient is zero, or one that there is not.
    padding: u32,
    /// Whether what is there is added.
    accumulate: u32,
    /// Of a row, in vectors.
    length: u32,
    /// Between rows of the gradient, in vectors.
    out_stride: u64,
} }

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
fn digit_of(key: u32, args: &Args) -> u32 {
    (key >> args.shift) & comptime!(BINS - 1)
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
            if args.first != 0u32 {
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
        let digit = digit_of(*keys.index(k as usize), args);
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

/// Counts each digit of a tile. Grid: tiles.
#[cube]
fn count(
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
    counts[(CUBE_POS_X * BINS + UNIT_POS_X) as usize] = total;
}

/// Where a tile's first key of this thread's digit goes: behind all smaller digits, and behind the
/// same digit of tiles before.
#[cube]
fn first_place(counts: &Array<u32>, totals: &mut SharedMemory<u32>, args: &Args) -> u32 {
    let mut before = 0u32;
    let mut total = 0u32;
    let mut tile = 0u32;
    while tile < args.tiles {
        let mut some = Sequence::<u32>::new();
        #[unroll]
        for k in 0..UNROLL_OF_TILES {
            let mut found = 0u32;
            if tile + k < args.tiles {
                found = counts[((tile + k) * BINS + UNIT_POS_X) as usize];
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
    totals[UNIT_POS_X as usize] = total;
    sync_cube();
    // Sums of all digits up to each, which take as many steps as the digit has bits.
    let mut step = 1u32;
    while step < BINS {
        let mut smaller = 0u32;
        if UNIT_POS_X >= step {
            smaller = totals[(UNIT_POS_X - step) as usize];
        }
        sync_cube();
        totals[UNIT_POS_X as usize] += smaller;
        sync_cube();
        step *= 2u32;
    }
    before + totals[UNIT_POS_X as usize] - total
}

/// Moves a tile's keys and positions to their places by a digit, in their order. Grid: tiles.
#[cube]
fn scatter(
    ids: &Array<i32>,
    ids_i64: &Array<i64>,
    keys_in: &Array<u32>,
    positions_in: &Array<u32>,
    keys_out: &mut Array<u32>,
    positions_out: &mut Array<u32>,
    counts: &Array<u32>,
    args: &Args,
    dims: &Dims,
) {
    let mut found = SharedMemory::<u32>::new(comptime!((WARPS * BINS) as usize));
    let mut totals = SharedMemory::<u32>::new(comptime!(BINS as usize));
    let (keys, ranks) = rank(ids, ids_i64, keys_in, &mut found, args, dims);
    // Waits for all warps' counts, too.
    let mut place = first_place(counts, &mut totals, args);
    #[unroll]
    for warp in 0..WARPS {
        let at = (comptime!(warp * BINS) + UNIT_POS_X) as usize;
        let of_warp = found[at];
        found[at] = place;
        place += of_warp;
    }
    sync_cube();
    #[unroll]
    for k in 0..KEYS {
        let token = token_of(k);
        if token < args.tokens {
            let key = *keys.index(k as usize);
            let first = found[(UNIT_POS_X / LANES * BINS + digit_of(key, args)) as usize];
            let to = (first + *ranks.index(k as usize)) as usize;
            keys_out[to] = key;
            if args.first != 0u32 {
                positions_out[to] = token;
            } else {
                positions_out[to] = positions_in[token as usize];
            }
        }
    }
}

/// Finds where the positions of each id begin, and where the last end. Grid: `vocab` + 1 threads.
#[cube]
fn starts(keys_in: &Array<u32>, starts: &mut Array<u32>, args: &Args) {
    let id = CUBE_POS_X * THREADS + UNIT_POS_X;
    if id <= args.vocab {
        let mut low = 0u32;
        let mut high = args.tokens;
        while low < high {
            let middle = low + (high - low) / 2u32;
            if keys_in[middle as usize] < id {
                low = middle + 1u32;
            } else {
                high = middle;
            }
        }
        starts[id as usize] = low;
    }
}

/// Sums a column of vectors over sorted positions, in their order.
#[cube]
fn sum<E: Float, N: Size>(
    dout: &Array<Vector<E, N>>,
    positions_in: &Array<u32>,
    start: u32,
    end: u32,
    column: u32,
    dims: &Dims,
) -> Vector<f32, N> {
    let mut sums = Vector::<f32, N>::zeroed();
    let mut i = start;
    while i < end {
        let mut vectors = Sequence::<Vector<E, N>>::new();
        #[unroll]
        for k in 0..UNROLL {
            let mut vector = Vector::<E, N>::zeroed();
            if i + k < end {
                let row = second_row(positions_in[(i + k) as usize], dims);
                vector = dout[(row + u64::cast_from(column)) as usize];
            }
            vectors.push(vector);
        }
        #[unroll]
        for k in 0..UNROLL {
            sums += Vector::<f32, N>::cast_from(*vectors.index(k as usize));
        }
        i += UNROLL;
    }
    sums
}

/// Stores a vector of a row, added to what is there if that is asked for.
#[cube]
fn store<O: Float, N: Size>(
    out: &mut Array<Vector<O, N>>,
    row: u32,
    column: u32,
    sums: Vector<f32, N>,
    args: &Args,
) {
    let at = (u64::cast_from(row) * args.out_stride + u64::cast_from(column)) as usize;
    let mut y = sums;
    if args.accumulate != 0u32 {
        y += Vector::<f32, N>::cast_from(out[at]);
    }
    out[at] = Vector::cast_from(y);
}

/// Sums the rows whose positions are few. Short rows share a block, which takes [`ROUNDS`] times as
/// many as it has threads for: most have no positions, and then nothing is waited for but where they
/// begin.
#[cube]
fn few<E: Float, O: Float, N: Size>(
    block: u32,
    dout: &Array<Vector<E, N>>,
    positions_in: &Array<u32>,
    starts: &Array<u32>,
    out: &mut Array<Vector<O, N>>,
    args: &Args,
    dims: &Dims,
) {
    let at_a_time = max(THREADS / args.length, 1u32);
    let in_block = at_a_time * ROUNDS;
    let first = block * in_block;
    let mut begins = SharedMemory::<u32>::new(comptime!((THREADS * ROUNDS + 1) as usize));
    let mut i = UNIT_POS_X;
    while i <= in_block && first + i <= args.vocab {
        begins[i as usize] = starts[(first + i) as usize];
        i += THREADS;
    }
    sync_cube();
    let slot = UNIT_POS_X / args.length;
    let mut i = slot;
    if slot >= at_a_time {
        i = in_block;
    }
    while i < in_block && first + i < args.vocab {
        let start = begins[i as usize];
        let end = begins[i as usize + 1];
        let is_long = end - start > LONG;
        let is_kept = end == start && args.accumulate != 0u32;
        if !is_long && !is_kept {
            let mut column = UNIT_POS_X - slot * args.length;
            while column < args.length {
                let sums = sum::<E, N>(dout, positions_in, start, end, column, dims);
                store::<O, N>(out, first + i, column, sums, args);
                column += THREADS;
            }
        }
        i += at_a_time;
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
    starts: &Array<u32>,
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
        let start = starts[row as usize];
        let end = starts[row as usize + 1];
        if end - start > LONG {
            let at = u64::cast_from(piece * 2u32 + at_end) * u64::cast_from(args.length);
            let mut column = UNIT_POS_X;
            while column < args.length {
                partials[(at + u64::cast_from(column)) as usize] = sum::<E, N>(
                    dout,
                    positions_in,
                    max(start, begin),
                    min(end, behind),
                    column,
                    dims,
                );
                column += THREADS;
            }
        }
    }
}

/// All sums over positions. Grid: both ends of all pieces, which take the longest and so come first;
/// `vocab` rows.
#[cube]
fn rows<E: Float, O: Float, N: Size>(
    dout: &Array<Vector<E, N>>,
    keys_in: &Array<u32>,
    positions_in: &Array<u32>,
    starts: &Array<u32>,
    partials: &mut Array<Vector<f32, N>>,
    out: &mut Array<Vector<O, N>>,
    args: &Args,
    dims: &Dims,
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
            starts,
            partials,
            args,
            dims,
        );
    } else {
        few::<E, O, N>(
            CUBE_POS_X - of_pieces,
            dout,
            positions_in,
            starts,
            out,
            args,
            dims,
        );
    }
}

/// Adds the parts of the long row that begins in a piece of the sorted order, if one does: it is
/// the one that the piece ends with, and all pieces behind begin with it. Threads that share a vector
/// take pieces by turns. Grid: pieces, vectors of a row in groups of [`COLUMNS`].
#[cube]
fn joins<O: Float, N: Size>(
    keys_in: &Array<u32>,
    starts: &Array<u32>,
    partials: &Array<Vector<f32, N>>,
    out: &mut Array<Vector<O, N>>,
    args: &Args,
) {
    let begin = CUBE_POS_X * LONG;
    let behind = min(begin + LONG, args.tokens);
    let row = keys_in[(behind - 1u32) as usize];
    if row < args.vocab {
        let start = starts[row as usize];
        let end = starts[row as usize + 1];
        if end - start > LONG && start >= begin {
            let sharer = UNIT_POS_X / COLUMNS;
            let in_group = UNIT_POS_X % COLUMNS;
            let column = CUBE_POS_Y * COLUMNS + in_group;
            let at_end = select(keys_in[begin as usize] != row, 1u32, 0u32);
            let last = (end - 1u32) / LONG;
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
                store::<O, N>(out, row, column, sums, args);
            }
        }
    }
}

macro_rules! kernel {
    ($kind:ident, $e:ty, $o:ty, $n:ty, $symbol:expr, $choices:expr) => {{
        let mut b = Builder::default();
        let (ty, out_ty) = (b.type_of::<Vector<$e, $n>>(), b.type_of::<Vector<$o, $n>>());
        let (narrow, wide) = (b.type_of::<i32>(), b.type_of::<i64>());
        let (word, sums) = (b.type_of::<u32>(), b.type_of::<Vector<f32, $n>>());
        let dout = b.read("dout", ty);
        let ids = b.read("ids", narrow);
        let ids_i64 = b.read("ids_i64", wide);
        let keys_in = b.read("keys_in", word);
        let positions_in = b.read("positions_in", word);
        let keys_out = b.write("keys_out", word);
        let positions_out = b.write("positions_out", word);
        let counts = b.write("counts", word);
        let begins = b.write("starts", word);
        let partials = b.write("partials", sums);
        let out = b.write("out", out_ty);
        let args = Args::declare(&mut b);
        let dims = Dims::declare(&mut b);
        let s = b.scope();
        match $kind {
            Kind::Count => count::expand(
                s,
                ids.into(),
                ids_i64.into(),
                keys_in.into(),
                counts.into(),
                args,
                dims,
            ),
            Kind::Scatter => scatter::expand(
                s,
                ids.into(),
                ids_i64.into(),
                keys_in.into(),
                positions_in.into(),
                keys_out.into(),
                positions_out.into(),
                counts.into(),
                args,
                dims,
            ),
            Kind::Starts => starts::expand(s, keys_in.into(), begins.into(), args),
            Kind::Rows => rows::expand::<$e, $o, $n>(
                s,
                dout.into(),
                keys_in.into(),
                positions_in.into(),
                begins.into(),
                partials.into(),
                out.into(),
                args,
                dims,
            ),
            Kind::Joins => joins::expand::<$o, $n>(
                s,
                keys_in.into(),
                begins.into(),
                partials.into(),
                out.into(),
                args,
            ),
        }
        let sorts = matches!($kind, Kind::Count | Kind::Scatter);
        b.finish($symbol, $choices, if sorts { BINS } else { THREADS })
    }};
}

/// What tells the kernels apart; those that sort have no dtypes.
fn choices(kind: Kind, dtype: u32, out: u32, width: u32) -> Vec<(&'static str, u32)> {
    vec![
        ("kind", kind.code()),
        ("dtype", dtype),
        ("out", out),
        ("width", width),
    ]
}

fn sorting(kind: Kind, name: &str) -> Result<Kernel, Error> {
    let symbol = format!("embedding_backward_{name}");
    kernel!(kind, f32, f32, Const<4>, symbol, choices(kind, 0, 0, 1))
}

fn summing(kind: Kind, name: &str, dtypes: (Dtype, Dtype), vectors: bool) -> Result<Kernel, Error> {
    let (dtype, out) = dtypes;
    // Vectors of 16 bytes on the wider side.
    let vector = dtype.per_vector().min(out.per_vector());
    let width = if vectors { vector } else { 1 };
    let symbol = format!(
        "embedding_backward_{name}_{}_{}x{width}",
        dtype.name(),
        out.name()
    );
    let choices = choices(kind, dtype.code(), out.code(), width);
    with_vector!(dtype, E, _N => with_vector!(out, O, _M => match width {
        1 => kernel!(kind, E, O, Const<1>, symbol, choices),
        4 => kernel!(kind, E, O, Const<4>, symbol, choices),
        _ => kernel!(kind, E, O, Const<8>, symbol, choices),
    }))
}

/// Every form: those that sort; those that sum by the dtypes of dout and of the gradient, in
/// vectors and by element.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    let mut kernels = vec![
        sorting(Kind::Count, "count")?,
        sorting(Kind::Scatter, "scatter")?,
        sorting(Kind::Starts, "starts")?,
    ];
    for dtype in Dtype::ALL.iter().copied() {
        for out in Dtype::ALL.iter().copied() {
            for vectors in [true, false] {
                let dtypes = (dtype, out);
                kernels.push(summing(Kind::Rows, "rows", dtypes, vectors)?);
                kernels.push(summing(Kind::Joins, "joins", dtypes, vectors)?);
            }
        }
    }
    Ok(kernels)
}
