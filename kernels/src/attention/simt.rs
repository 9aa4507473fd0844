//! Attention without tensor cores: exact products of f32, and whatever the fast kernels leave: dtypes of keys other than the
//! queries', head dimensions that are no multiple of eight, rows that are not aligned.
//!
//! A cube owns 32 packed rows (all heads that share a key head) and walks over the keys of its split in tiles of 32. Eight lanes
//! share two rows: each has every eighth key of the scores and every eighth quad of the output.

use cubecl::prelude::*;

use super::arguments::*;
use super::packed::*;

/// Four elements.
type Quad = Const<4>;

/// Threads of a cube.
pub const THREADS: u32 = 128;
/// Room for a head.
pub const HEAD_DIM: u32 = contract::attention::MAX_HEAD_DIM;
/// Packed query rows of a cube, and keys of a tile.
pub const ROWS: u32 = 32;

#[cube]
fn load_quad<T: Float, N: Size>(
    from: &Array<Vector<T, N>>,
    at: u64,
    quad: u32,
    dims: u32,
) -> Vector<f32, Quad> {
    let width = N::value();
    let mut out = Vector::<f32, Quad>::zeroed();
    if comptime!(width == 4) {
        if quad * 4u32 < dims {
            out = Vector::cast_from(from[(at + u64::cast_from(quad)) as usize]);
        }
    } else {
        #[unroll]
        for j in 0..4usize {
            let dim = quad * 4u32 + comptime!(j as u32);
            if dim < dims {
                out[j] = f32::cast_from(from[(at + u64::cast_from(dim)) as usize][0]);
            }
        }
    }
    out
}

/// Copies 32 rows of keys or values, the last one in place of those past the end. Loops are not unrolled: registers are scarce.
#[cube]
fn load_tile<T: Float, N: Size>(
    from: &Array<Vector<T, N>>,
    rows: &Rows,
    block_table: &Array<u32>,
    key0: u32,
    end: u32,
    dims: u32,
    tile: &mut SharedMemory<Vector<f32, Quad>>,
    #[comptime] pitch: u32,
) {
    let quads = (dims + 3u32) / 4u32;
    let mut row = UNIT_POS_X / 8u32;
    while row < ROWS {
        let at = row_at(rows, block_table, min(key0 + row, end - 1u32));
        let mut quad = UNIT_POS_X % 8u32;
        while quad < quads {
            tile[(row * pitch + quad) as usize] = load_quad::<T, N>(from, at, quad, dims);
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
    #[comptime] head_dim: u32,
) {
    let width = N::value();
    let pitch = comptime!(head_dim / 4 + 1);
    let columns = comptime!(head_dim as usize / 32);

    // The last rows first: under a causal mask they have the most keys.
    let block = block(args, buffers, ROWS, true);
    if is_absent(&block) {
        terminate!();
    }
    let row0 = block.row0;
    let key_head = block.key_head;
    let batch = block.batch;
    let s = block.span.clone();
    let rows_here = min(block.row_count - row0, ROWS);
    let k_rows = key_rows(args, &s, batch, key_head);
    let v_rows = value_rows(args, &s, batch, key_head);

    let wl = i32::cast_from(args.window_left);
    let wr = i32::cast_from(args.window_right);
    let seen = seen(args, &block, rows_here);
    let begin = seen.begin;
    let end = seen.end;

    let lane = UNIT_POS_X % 8u32;
    let mine = UNIT_POS_X / 8u32;
    let mut q_tile = SharedMemory::<Vector<f32, Quad>>::new_aligned(
        comptime!((ROWS * pitch) as usize),
        128usize,
    );
    let mut tile = SharedMemory::<Vector<f32, Quad>>::new_aligned(
        comptime!((ROWS * pitch) as usize),
        128usize,
    );
    let quads_qk = (args.head_dim + 3u32) / 4u32;
    let quads_v = (args.head_dim_v + 3u32) / 4u32;
    #[unroll]
    for r in 0..2u32 {
        let row = mine + comptime!(r * 16);
        let packed = row0 + min(row, rows_here - 1u32);
        let head = key_head * args.group + packed % args.group;
        let at = query_at(args, batch, s.q_first + packed / args.group, head);
        let mut quad = lane;
        while quad < quads_qk {
            q_tile[(row * pitch + quad) as usize] = load_quad::<Q, N>(q, at, quad, args.head_dim);
            quad += 8u32;
        }
    }

    let mut rows = Sequence::<ScoreRow>::new();
    #[unroll]
    for r in 0..2usize {
        let packed = row0 + min(mine + comptime!(r as u32 * 16), rows_here - 1u32);
        let head = key_head * args.group + packed % args.group;
        rows.push(score_row(
            args,
            buffers,
            &s,
            batch,
            packed / args.group,
            head,
            true,
        ));
    }
    let mut acc = Array::<Vector<f32, Quad>>::new(comptime!(2 * columns));
    #[unroll]
    for i in 0..comptime!(2 * columns) {
        acc[i] = Vector::zeroed();
    }
    let mut row_peak = Array::<f32>::new(2usize);
    let mut row_total = Array::<f32>::new(2usize);
    #[unroll]
    for r in 0..2usize {
        row_peak[r] = no_peak(true);
        row_total[r] = 0.0f32;
    }

    let mut key0 = begin;
    while key0 < end {
        sync_cube();
        load_tile::<K, N>(
            k,
            &k_rows,
            &buffers.block_table,
            u32::cast_from(key0),
            s.k_count,
            args.head_dim,
            &mut tile,
            pitch,
        );
        sync_cube();
        let mut scores = Array::<f32>::new(8usize);
        #[unroll]
        for i in 0..8usize {
            scores[i] = 0.0f32;
        }
        for d in 0..quads_qk {
            #[unroll]
            for r in 0..2usize {
                let a = q_tile[((mine + comptime!(r as u32 * 16)) * pitch + d) as usize];
                #[unroll]
                for j in 0..4usize {
                    let b = tile[((lane + comptime!(j as u32 * 8)) * pitch + d) as usize];
                    let mut x = scores[r * 4 + j];
                    #[unroll]
                    for c in 0..4usize {
                        x = fma(a[c], b[c], x);
                    }
                    scores[r * 4 + j] = x;
                }
            }
        }
        #[unroll]
        for r in 0..2usize {
            let row = rows.index(r);
            let low = max(row.position - wl + 1, begin);
            let high = min(row.position + wr, end);
            let mut peak = row_peak[r];
            #[unroll]
            for j in 0..4usize {
                let key = key0 + i32::cast_from(lane) + comptime!(j as i32 * 8);
                let mut x = hidden(true);
                if key >= low && key < high {
                    x = adjusted(
                        args,
                        buffers,
                        row,
                        scores[r * 4 + j],
                        u32::cast_from(key),
                        true,
                    );
                }
                scores[r * 4 + j] = x;
                peak = max(peak, x);
            }
            peak = over_row(peak, false);
            let shrink = precise_exp(row_peak[r] - peak);
            row_peak[r] = peak;
            let mut total = row_total[r] * shrink;
            #[unroll]
            for j in 0..4usize {
                let p = precise_exp(scores[r * 4 + j] - peak);
                scores[r * 4 + j] = p;
                total += p;
            }
            row_total[r] = total;
            #[unroll]
            for c in 0..columns {
                acc[r * columns + c] *= Vector::new(shrink);
            }
        }
        sync_cube();
        load_tile::<K, N>(
            v,
            &v_rows,
            &buffers.block_table,
            u32::cast_from(key0),
            s.k_count,
            args.head_dim_v,
            &mut tile,
            pitch,
        );
        sync_cube();
        #[unroll]
        for j in 0..4usize {
            for i in 0..8u32 {
                let from = UNIT_POS_X / 8u32 * 8u32 % 32u32 + i;
                let p0 = plane_shuffle(scores[j], from);
                let p1 = plane_shuffle(scores[j + 4], from);
                #[unroll]
                for c in 0..columns {
                    // Columns past the values' dimension hold nothing.
                    if comptime!(c as u32 * 8) < quads_v {
                        let x = tile[((i + comptime!(j as u32 * 8)) * pitch
                            + lane
                            + comptime!(c as u32 * 8))
                            as usize];
                        acc[c] += x * Vector::new(p0);
                        acc[columns + c] += x * Vector::new(p1);
                    }
                }
            }
        }
        key0 += comptime!(ROWS as i32);
    }

    let whole = args.splits == 1u32;
    #[unroll]
    for r in 0..2usize {
        let row = mine + comptime!(r as u32 * 16);
        let total = over_row(row_total[r], true);
        let packed = row0 + row;
        let token = packed / args.group;
        let head = key_head * args.group + packed % args.group;
        if row < rows_here {
            let end = finish(args, buffers, row_peak[r], total, head, whole);
            if !whole {
                let at = u64::cast_from(block.split) * u64::cast_from(args.rows)
                    + u64::cast_from((batch * args.seqlen_q + token) * args.num_heads + head);
                if lane == 0u32 {
                    buffers.partial_lse[at as usize] = end.lse;
                }
                #[unroll]
                for c in 0..columns {
                    let quad = lane + comptime!(c as u32 * 8);
                    if quad < quads_v {
                        buffers.partial
                            [(at * u64::cast_from(quads_v) + u64::cast_from(quad)) as usize] =
                            acc[r * columns + c] * Vector::new(end.factor);
                    }
                }
            } else {
                let token = s.q_first + token;
                if has(args, flag::LSE) && lane == 0u32 {
                    buffers.lse[lse_at(args, batch, token, head) as usize] = end.lse;
                }
                let at = out_at(args, batch, token, head);
                let f32_out = has(args, flag::OUT_F32);
                #[unroll]
                for c in 0..columns {
                    let quad = lane + comptime!(c as u32 * 8);
                    let value = acc[r * columns + c] * Vector::new(end.factor);
                    if f32_out {
                        #[unroll]
                        for j in 0..4usize {
                            let dim = quad * 4u32 + comptime!(j as u32);
                            if dim < args.head_dim_v {
                                buffers.out_f32[(at * comptime!(width as u64) + u64::cast_from(dim))
                                    as usize] = value[j];
                            }
                        }
                    } else if comptime!(width == 4) {
                        if quad < quads_v {
                            out[(at + u64::cast_from(quad)) as usize] = Vector::cast_from(value);
                        }
                    } else {
                        #[unroll]
                        for j in 0..4usize {
                            let dim = quad * 4u32 + comptime!(j as u32);
                            if dim < args.head_dim_v {
                                out[(at + u64::cast_from(dim)) as usize] =
                                    Vector::cast_from(value[j]);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// As accurate as f32 is.
#[cube]
fn precise_exp(x: f32) -> f32 {
    x.exp()
}
