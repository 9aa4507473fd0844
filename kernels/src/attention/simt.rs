//! Attention without tensor cores: exact products of f32, and whatever the fast kernels leave: dtypes of keys other than the
//! queries', head dimensions that are no multiple of eight, rows that are not aligned.
//!
//! A cube owns 32 packed rows (all heads that share a key head) and walks over the keys of its split in tiles of 32. Eight lanes
//! share two rows: each has every eighth key of the scores and every eighth quad of the output.

use cubecl::prelude::*;

use super::arguments::*;
use super::packed::*;
use crate::e4m3::widen;

/// Four elements.
type Quad = Const<4>;

/// Threads of a cube.
pub const THREADS: u32 = 128;
/// Room for a head.
pub const HEAD_DIM: u32 = contract::attention::MAX_HEAD_DIM;
/// Packed query rows of a cube, and keys of a tile.
pub const ROWS: u32 = 32;

/// Quads of a row in shared memory: one more than it has, so that the rows of a column lie in
/// different banks.
const PITCH: u32 = HEAD_DIM / 4 + 1;
/// Quads of a row of results that a lane has.
const COLUMNS: usize = HEAD_DIM as usize / 32;

/// Which of a cube's threads this is: one of eight that share rows `row` and `row + 16`.
#[derive(CubeType, Clone)]
struct Place {
    lane: u32,
    row: u32,
}

/// Sums of values of a lane's two rows, the greatest score of each, and the sum of the exponentials
/// relative to it.
#[derive(CubeType)]
struct Sums {
    acc: Array<Vector<f32, Quad>>,
    row_peak: Array<f32>,
    row_total: Array<f32>,
}

/// `codes` says that elements are those of 8-bit floats.
#[cube]
fn load_quad<T: Numeric, N: Size>(
    from: &Array<Vector<T, N>>,
    at: u64,
    quad: u32,
    dims: u32,
    #[comptime] codes: bool,
) -> Vector<f32, Quad> {
    let width = N::value();
    let mut out = Vector::<f32, Quad>::zeroed();
    if comptime!(width == 4) {
        if quad * 4u32 < dims {
            if comptime!(codes) {
                let four = from[(at + u64::cast_from(quad)) as usize];
                #[unroll]
                for j in 0..4usize {
                    out[j] = widen(u32::cast_from(four[j]));
                }
            } else {
                out = Vector::cast_from(from[(at + u64::cast_from(quad)) as usize]);
            }
        }
    } else {
        #[unroll]
        for j in 0..4usize {
            let dim = quad * 4u32 + comptime!(j as u32);
            if dim < dims {
                let element = from[(at + u64::cast_from(dim)) as usize][0];
                if comptime!(codes) {
                    out[j] = widen(u32::cast_from(element));
                } else {
                    out[j] = f32::cast_from(element);
                }
            }
        }
    }
    out
}

/// Copies 32 rows of keys or values, the last one in place of those past the end. Loops are not unrolled: registers are scarce.
#[cube]
fn load_tile<T: Numeric, N: Size>(
    from: &Array<Vector<T, N>>,
    rows: &Rows,
    block_table: &Array<u32>,
    key0: u32,
    end: u32,
    dims: u32,
    tile: &mut SharedMemory<Vector<f32, Quad>>,
    #[comptime] codes: bool,
) {
    let quads = (dims + 3u32) / 4u32;
    let mut row = UNIT_POS_X / 8u32;
    while row < ROWS {
        let at = row_at(rows, block_table, min(key0 + row, end - 1u32));
        let mut quad = UNIT_POS_X % 8u32;
        while quad < quads {
            tile[(row * PITCH + quad) as usize] = load_quad::<T, N>(from, at, quad, dims, codes);
            quad += 8u32;
        }
        row += comptime!(THREADS / 8);
    }
}

/// The largest, or the sum, over the eight lanes that share a row.
#[cube]
fn over_row(x: f32, #[comptime] sum: bool) -> f32 {
    let mut x = x;
    #[unroll]
    for i in 0..3u32 {
        let other = plane_shuffle_xor(x, 1u32 << i);
        if comptime!(sum) {
            x += other;
        } else {
            x = max(x, other);
        }
    }
    x
}

/// Grid: splits × row blocks × key heads × sequences, the first fastest. Strides count vectors of `N`.
#[cube]
pub fn simt<Q: Float, K: Float, N: Size>(
    q: &Array<Vector<Q, N>>,
    k: &Array<Vector<K, N>>,
    v: &Array<Vector<K, N>>,
    out: &mut Array<Vector<Q, N>>,
    buffers: &mut Buffers,
    args: &Args,
) {
    // The last rows first: under a causal mask they have the most keys.
    let block = block(args, buffers, ROWS, true);
    if is_absent(&block) {
        terminate!();
    }
    rows_of_block::<Q, K, N>(q, k, v, out, buffers, args, &block, 1.0f32, 1.0f32, false);
}

/// The same of codes, whose scales are multiplied with.
#[cube]
pub fn simt_codes<Q: Float, N: Size>(
    q: &Array<Vector<Q, N>>,
    k: &Array<Vector<u8, N>>,
    v: &Array<Vector<u8, N>>,
    out: &mut Array<Vector<Q, N>>,
    buffers: &mut Buffers,
    args: &Args,
    scales: &Scales,
) {
    let block = block(args, buffers, ROWS, true);
    if is_absent(&block) {
        terminate!();
    }
    let k_scale = key_scale(args, scales, block.key_head);
    let v_scale = value_scale(args, scales, block.key_head);
    rows_of_block::<Q, u8, N>(q, k, v, out, buffers, args, &block, k_scale, v_scale, true);
}

#[cube]
fn rows_of_block<Q: Float, K: Numeric, N: Size>(
    q: &Array<Vector<Q, N>>,
    k: &Array<Vector<K, N>>,
    v: &Array<Vector<K, N>>,
    out: &mut Array<Vector<Q, N>>,
    buffers: &mut Buffers,
    args: &Args,
    block: &Block,
    k_scale: f32,
    v_scale: f32,
    #[comptime] codes: bool,
) {
    let rows_here = min(block.row_count - block.row0, ROWS);
    let k_rows = key_rows(args, &block.span, block.batch, block.key_head);
    let v_rows = value_rows(args, &block.span, block.batch, block.key_head);
    let window_left = i32::cast_from(args.window_left);
    let window_right = i32::cast_from(args.window_right);
    let seen = seen(args, block, rows_here);
    let place = Place {
        lane: UNIT_POS_X % 8u32,
        row: UNIT_POS_X / 8u32,
    };

    let quads = comptime!((ROWS * PITCH) as usize);
    let mut q_tile = SharedMemory::<Vector<f32, Quad>>::new_aligned(quads, 128usize);
    let mut tile = SharedMemory::<Vector<f32, Quad>>::new_aligned(quads, 128usize);
    let quads_qk = (args.head_dim + 3u32) / 4u32;
    let quads_v = (args.head_dim_v + 3u32) / 4u32;
    load_queries::<Q, N>(&mut q_tile, q, args, block, rows_here, &place, quads_qk);
    let mut rows = Sequence::<ScoreRow>::new();
    push_packed_rows(
        &mut rows, args, buffers, block, rows_here, place.row, 16u32, true,
    );
    let mut sums = begin_sums();

    let mut key0 = seen.begin;
    while key0 < seen.end {
        sync_cube();
        load_tile::<K, N>(
            k,
            &k_rows,
            &buffers.block_table,
            u32::cast_from(key0),
            block.span.k_count,
            args.head_dim,
            &mut tile,
            codes,
        );
        sync_cube();
        let mut scores = score(&q_tile, &tile, &place, quads_qk);
        if comptime!(codes) {
            #[unroll]
            for i in 0..8usize {
                scores[i] *= k_scale;
            }
        }
        #[unroll]
        for r in 0..2usize {
            let row = rows.index(r);
            let low = max(row.position - window_left + 1, seen.begin);
            let high = min(row.position + window_right, seen.end);
            update(
                &mut sums,
                &mut scores,
                args,
                buffers,
                row,
                key0,
                low,
                high,
                &place,
                r,
            );
        }
        sync_cube();
        load_tile::<K, N>(
            v,
            &v_rows,
            &buffers.block_table,
            u32::cast_from(key0),
            block.span.k_count,
            args.head_dim_v,
            &mut tile,
            codes,
        );
        sync_cube();
        accumulate(&mut sums, &scores, &tile, &place, quads_v);
        key0 += comptime!(ROWS as i32);
    }
    write_rows::<Q, N>(
        &sums, out, buffers, args, block, rows_here, &place, quads_v, v_scale, codes,
    );
}

/// The block's queries to shared memory, the last row in place of those past the end.
#[cube]
fn load_queries<Q: Float, N: Size>(
    tile: &mut SharedMemory<Vector<f32, Quad>>,
    q: &Array<Vector<Q, N>>,
    args: &Args,
    block: &Block,
    rows_here: u32,
    place: &Place,
    quads: u32,
) {
    #[unroll]
    for r in 0..2u32 {
        let row = place.row + comptime!(r * 16);
        let packed = block.row0 + min(row, rows_here - 1u32);
        let head = block.key_head * args.group + packed % args.group;
        let token = block.span.q_first + packed / args.group;
        let at = query_at(args, block.batch, token, head);
        let mut quad = place.lane;
        while quad < quads {
            tile[(row * PITCH + quad) as usize] =
                load_quad::<Q, N>(q, at, quad, args.head_dim, false);
            quad += 8u32;
        }
    }
}

/// Sums of nothing.
#[cube]
fn begin_sums() -> Sums {
    let mut acc = Array::<Vector<f32, Quad>>::new(comptime!(2 * COLUMNS));
    #[unroll]
    for i in 0..comptime!(2 * COLUMNS) {
        acc[i] = Vector::zeroed();
    }
    let mut row_peak = Array::<f32>::new(2usize);
    let mut row_total = Array::<f32>::new(2usize);
    #[unroll]
    for r in 0..2usize {
        row_peak[r] = no_peak(true);
        row_total[r] = 0.0f32;
    }
    Sums {
        acc,
        row_peak,
        row_total,
    }
}

/// Products of a lane's two rows of queries and its four keys of the tile.
#[cube]
fn score(
    q_tile: &SharedMemory<Vector<f32, Quad>>,
    tile: &SharedMemory<Vector<f32, Quad>>,
    place: &Place,
    quads: u32,
) -> Array<f32> {
    let mut scores = Array::<f32>::new(8usize);
    #[unroll]
    for i in 0..8usize {
        scores[i] = 0.0f32;
    }
    for d in 0..quads {
        #[unroll]
        for r in 0..2usize {
            let a = q_tile[((place.row + comptime!(r as u32 * 16)) * PITCH + d) as usize];
            #[unroll]
            for j in 0..4usize {
                let b = tile[((place.lane + comptime!(j as u32 * 8)) * PITCH + d) as usize];
                let mut x = scores[r * 4 + j];
                #[unroll]
                for c in 0..4usize {
                    x = fma(a[c], b[c], x);
                }
                scores[r * 4 + j] = x;
            }
        }
    }
    scores
}

/// Adjusts the scores of row `r`, which sees keys `low..high`, and replaces them by their
/// exponentials; what was summed before shrinks.
#[cube]
fn update(
    sums: &mut Sums,
    scores: &mut Array<f32>,
    args: &Args,
    buffers: &Buffers,
    row: &ScoreRow,
    key0: i32,
    low: i32,
    high: i32,
    place: &Place,
    #[comptime] r: usize,
) {
    let mut peak = sums.row_peak[r];
    #[unroll]
    for j in 0..4usize {
        let key = key0 + i32::cast_from(place.lane) + comptime!(j as i32 * 8);
        let mut x = hidden(true);
        if key >= low && key < high {
            let product = scores[r * 4 + j];
            x = adjusted(args, buffers, row, product, u32::cast_from(key), true);
        }
        scores[r * 4 + j] = x;
        peak = max(peak, x);
    }
    peak = over_row(peak, false);
    let shrink = precise_exp(sums.row_peak[r] - peak);
    sums.row_peak[r] = peak;
    let mut total = sums.row_total[r] * shrink;
    #[unroll]
    for j in 0..4usize {
        let p = precise_exp(scores[r * 4 + j] - peak);
        scores[r * 4 + j] = p;
        total += p;
    }
    sums.row_total[r] = total;
    #[unroll]
    for c in 0..COLUMNS {
        sums.acc[r * COLUMNS + c] *= Vector::new(shrink);
    }
}

/// Adds the products of exponentials and values. A lane has every eighth key of the former and
/// needs those of the others.
#[cube]
fn accumulate(
    sums: &mut Sums,
    scores: &Array<f32>,
    tile: &SharedMemory<Vector<f32, Quad>>,
    place: &Place,
    quads: u32,
) {
    #[unroll]
    for j in 0..4usize {
        for i in 0..8u32 {
            let from = UNIT_POS_X / 8u32 * 8u32 % 32u32 + i;
            let p0 = plane_shuffle(scores[j], from);
            let p1 = plane_shuffle(scores[j + 4], from);
            #[unroll]
            for c in 0..COLUMNS {
                // Columns past the values' dimension hold nothing.
                if comptime!(c as u32 * 8) < quads {
                    let x = tile[((i + comptime!(j as u32 * 8)) * PITCH
                        + place.lane
                        + comptime!(c as u32 * 8)) as usize];
                    sums.acc[c] += x * Vector::new(p0);
                    sums.acc[COLUMNS + c] += x * Vector::new(p1);
                }
            }
        }
    }
}

/// Writes a lane's two rows: finished, or as a part of split keys.
#[cube]
fn write_rows<Q: Float, N: Size>(
    sums: &Sums,
    out: &mut Array<Vector<Q, N>>,
    buffers: &mut Buffers,
    args: &Args,
    block: &Block,
    rows_here: u32,
    place: &Place,
    quads_v: u32,
    v_scale: f32,
    #[comptime] codes: bool,
) {
    let lane = place.lane;
    let whole = args.splits == 1u32;
    #[unroll]
    for r in 0..2usize {
        let row = place.row + comptime!(r as u32 * 16);
        let total = over_row(sums.row_total[r], true);
        let packed = block.row0 + row;
        let token = packed / args.group;
        let head = block.key_head * args.group + packed % args.group;
        if row < rows_here {
            let end = finish(args, buffers, sums.row_peak[r], total, head, whole);
            let factor = if comptime!(codes) {
                end.factor * v_scale
            } else {
                end.factor
            };
            if !whole {
                let at = partial_at(args, block, token, head);
                if lane == 0u32 {
                    buffers.partial_lse[at as usize] = end.lse;
                }
                #[unroll]
                for c in 0..COLUMNS {
                    let quad = lane + comptime!(c as u32 * 8);
                    if quad < quads_v {
                        buffers.partial
                            [(at * u64::cast_from(quads_v) + u64::cast_from(quad)) as usize] =
                            sums.acc[r * COLUMNS + c] * Vector::new(factor);
                    }
                }
            } else {
                let token = block.span.q_first + token;
                if has(args, flag::LSE) && lane == 0u32 {
                    buffers.lse[lse_at(args, block.batch, token, head) as usize] = end.lse;
                }
                let at = out_at(args, block.batch, token, head);
                let f32_out = has(args, flag::OUT_F32);
                #[unroll]
                for c in 0..COLUMNS {
                    let quad = lane + comptime!(c as u32 * 8);
                    let value = sums.acc[r * COLUMNS + c] * Vector::new(factor);
                    write_quad::<Q, N>(value, out, buffers, args, at, quad, quads_v, f32_out);
                }
            }
        }
    }
}

/// Writes a quad of a row that begins at `at`.
#[cube]
fn write_quad<Q: Float, N: Size>(
    value: Vector<f32, Quad>,
    out: &mut Array<Vector<Q, N>>,
    buffers: &mut Buffers,
    args: &Args,
    at: u64,
    quad: u32,
    quads: u32,
    f32_out: bool,
) {
    let width = N::value();
    if f32_out {
        #[unroll]
        for j in 0..4usize {
            let dim = quad * 4u32 + comptime!(j as u32);
            if dim < args.head_dim_v {
                let at = at * comptime!(width as u64) + u64::cast_from(dim);
                buffers.out_f32[at as usize] = value[j];
            }
        }
    } else if comptime!(width == 4) {
        if quad < quads {
            out[(at + u64::cast_from(quad)) as usize] = Vector::cast_from(value);
        }
    } else {
        #[unroll]
        for j in 0..4usize {
            let dim = quad * 4u32 + comptime!(j as u32);
            if dim < args.head_dim_v {
                out[(at + u64::cast_from(dim)) as usize] = Vector::cast_from(value[j]);
            }
        }
    }
}

/// As accurate as f32 is.
#[cube]
fn precise_exp(x: f32) -> f32 {
    x.exp()
}
