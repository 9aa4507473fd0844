//! Attention of a few query rows to many keys, for f16 and bf16: bound by reading K and V once.
//!
//! The query rows of all heads that share a key head are packed into the 16 rows of a fragment, and the keys are split over cubes
//! (Flash-Decoding, Dao et al. 2023) and again over the planes of a cube. K and V go from memory to registers in 16-byte
//! lines that are fragments as they come: the order of dimensions inside a fragment is free as long as both sides agree, so a
//! lane takes eight neighbours where the hardware's order has pairs.

use cubecl::prelude::*;

use super::arguments::*;
use super::fragments::*;

/// When keys and values are loaded: the earlier, the more registers hold them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Loads {
    /// Right before they are used.
    Late,
    /// Together, when a step begins.
    Together,
    /// Those of the next step, while the current ones are used.
    Ahead,
}

/// A kernel's shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Config {
    /// Room for a head: the dimension rounded up.
    pub head_dim: u32,
    /// Planes of a cube.
    pub planes: u32,
    /// Times 16 keys that a plane takes at once.
    pub groups: u32,
    /// Whether scores have more than a scale and the limits of causality and windows.
    pub scores: bool,
    pub loads: Loads,
}

impl Config {
    /// Threads of a cube.
    pub fn threads(&self) -> u32 {
        self.planes * 32
    }

    /// Whether the lines of 16 queries, or of their results, are dealt out to the threads evenly, without one for what lies past them.
    pub fn deals_evenly(&self) -> bool {
        (16 * self.head_dim / 8).is_multiple_of(self.threads())
    }

    /// Lines of a query in shared memory.
    fn pitch(&self) -> u32 {
        self.head_dim / 8 + 1
    }

    /// Quads of a row of accumulators in shared memory.
    fn merge_pitch(&self) -> u32 {
        self.head_dim / 4 + 1
    }
}

/// Lines of 16 keys: for keys `g` and `g + 8` the `t`-th of each four lines.
#[cube]
fn load_keys<E: Float>(
    k: &Lines<E>,
    block_table: &Array<u32>,
    rows: &Rows,
    key0: u32,
    end: u32,
    lines: u32,
    to: &mut Array<Vector<E, Line>>,
    #[comptime] blocks: usize,
) {
    let lane = UNIT_POS_X % 32u32;
    #[unroll]
    for n in 0..2usize {
        // What is past the end is hidden later; its products only have to be finite.
        let key = min(key0 + lane / 4u32 + comptime!(n as u32 * 8), end - 1u32);
        let at = row_at(rows, block_table, key);
        #[unroll]
        for i in 0..blocks {
            let line = min(lane % 4u32 + comptime!(i as u32 * 4), lines - 1u32);
            to[n * blocks + i] = k[(at + u64::cast_from(line)) as usize];
        }
    }
}

/// Lines of 16 values: for values `2 t`, `2 t + 1`, `2 t + 8` and `2 t + 9` the `g`-th of each eight lines.
#[cube]
fn load_values<E: Float>(
    v: &Lines<E>,
    block_table: &Array<u32>,
    rows: &Rows,
    key0: u32,
    end: u32,
    lines: u32,
    to: &mut Array<Vector<E, Line>>,
    #[comptime] blocks: usize,
    #[comptime] first: usize,
    #[comptime] last: usize,
) {
    let lane = UNIT_POS_X % 32u32;
    #[unroll]
    for n in 0..4usize {
        let offset = comptime!((n as u32 % 2) + (n as u32 / 2) * 8);
        let key = min(key0 + lane % 4u32 * 2u32 + offset, end - 1u32);
        let at = row_at(rows, block_table, key);
        #[unroll]
        for i in first..last {
            let line = min(lane / 4u32 + comptime!(i as u32 * 8), lines - 1u32);
            to[n * blocks + i] = v[(at + u64::cast_from(line)) as usize];
        }
    }
}

/// Grid: splits × row blocks × key heads × sequences, the first fastest.
#[cube]
pub fn decode<E: Float>(
    q: &Lines<E>,
    k: &Lines<E>,
    v: &Lines<E>,
    out: &mut Lines<E>,
    buffers: &mut Buffers,
    args: &Args,
    #[comptime] config: Config,
) {
    let head_dim = comptime!(config.head_dim as usize);
    let pitch = comptime!(config.pitch());
    let merge_pitch = comptime!(config.merge_pitch());
    let planes = comptime!(config.planes);
    let scores = comptime!(config.scores);
    let k_blocks = comptime!(head_dim / 32);
    let v_blocks = comptime!(head_dim / 64);
    let groups = comptime!(config.groups as usize);
    let run = comptime!(config.groups * 16);

    let split = CUBE_POS_X % args.splits;
    let rest = CUBE_POS_X / args.splits;
    let block = rest % args.row_blocks;
    let rest = rest / args.row_blocks;
    let key_head = rest % args.num_kv_heads;
    let batch = rest / args.num_kv_heads;
    let s = sequence(args, buffers, batch);
    let row0 = block * 16u32;
    let row_count = s.q_count * args.group;
    let parts = cut(
        s.q_count,
        s.k_count,
        args.window_left,
        args.splits,
        args.split_keys,
    );
    let split_begin = parts.base + split * parts.keys;
    // The combining kernel leaves out the splits that begin past the keys. The first always answers, if only with zeros.
    if row0 >= row_count || (split > 0u32 && split_begin >= s.k_count) {
        terminate!();
    }
    let rows_here = min(row_count - row0, 16u32);
    let lines_qk = args.head_dim / 8u32;
    let lines_v = args.head_dim_v / 8u32;
    let k_rows = key_rows(args, &s, batch, key_head);
    let v_rows = value_rows(args, &s, batch, key_head);

    // Keys that any row sees, in this split.
    let shift = i32::cast_from(s.k_count) - i32::cast_from(s.q_count);
    let wl = i32::cast_from(args.window_left);
    let wr = i32::cast_from(args.window_right);
    let first = i32::cast_from(row0 / args.group) + shift;
    let last = i32::cast_from((row0 + rows_here - 1u32) / args.group) + shift;
    let k_end = i32::cast_from(s.k_count);
    let end = max(
        min(
            min(k_end, last + wr),
            i32::cast_from(split_begin + parts.keys),
        ),
        0,
    );
    let begin = max(max(first - wl + 1, 0), i32::cast_from(split_begin));
    let step_begin = u32::cast_from(begin) / run;
    let mut step_end = (u32::cast_from(end) + comptime!(run - 1)) / run;
    if begin >= end {
        step_end = step_begin;
    }
    let clear_begin = max(last - wl + 1, begin);
    let clear_end = min(end, first + wr);

    let lane = UNIT_POS_X % 32u32;
    let plane = UNIT_POS_X / 32u32;
    let group_row = lane / 4u32;
    let pair = lane % 4u32;

    // Queries in the order of dimensions of the keys' fragments: of each 32, pair `i` of line `t` is pair `t` of eight `i`.
    let mut q_tile =
        SharedMemory::<Vector<E, Line>>::new_aligned(comptime!(16 * pitch as usize), 128usize);
    let mut merge = SharedMemory::<Vector<f32, Const<4>>>::new_aligned(
        comptime!((planes * 16 * merge_pitch) as usize),
        128usize,
    );
    let mut peaks = SharedMemory::<f32>::new(comptime!(planes as usize * 16));
    let mut totals = SharedMemory::<f32>::new(comptime!(planes as usize * 16));
    let mut q_pairs = q_tile.to_slice_mut().with_vector_size::<Pair>();
    let per_row = comptime!(config.head_dim / 8);
    #[unroll]
    for i in 0..comptime!((16 * per_row).div_ceil(config.threads())) {
        let index = UNIT_POS_X + comptime!(i * config.threads());
        let row = index / per_row;
        let line = index % per_row;
        let mut value = Vector::<E, Line>::zeroed();
        if row < rows_here && line < lines_qk {
            let packed = row0 + row;
            let head = key_head * args.group + packed % args.group;
            value = q[(query_at(args, batch, s.q_first + packed / args.group, head)
                + u64::cast_from(line)) as usize];
        }
        let at = row * comptime!(pitch * 4) + line / 4u32 * 16u32 + line % 4u32;
        #[unroll]
        for j in 0..4usize {
            let mut two = Vector::<E, Pair>::empty();
            two[0] = value[comptime!(j * 2)];
            two[1] = value[comptime!(j * 2 + 1)];
            q_pairs[(at + comptime!(j as u32 * 4)) as usize] = two;
        }
    }
    sync_cube();
    let q_line = lane % 16u32 * pitch + lane / 16u32;

    let mut scale = args.scale;
    let mut rows = Sequence::<ScoreRow>::new();
    #[unroll]
    for h in 0..2usize {
        let packed = row0 + min(group_row + comptime!(h as u32 * 8), rows_here - 1u32);
        let head = key_head * args.group + packed % args.group;
        rows.push(score_row(
            args,
            buffers,
            &s,
            batch,
            packed / args.group,
            head,
            scores,
        ));
    }
    // Capped and adjusted scores are scaled already.
    if comptime!(scores) || args.softcap > 0.0f32 {
        scale = 1.0f32;
    }

    let mut acc = Sequence::<Array<Vector<f32, Pair>>>::new();
    #[unroll]
    for _ in 0..comptime!(head_dim / 8) {
        acc.push(zeros());
    }
    let mut row_peak = Array::<f32>::new(2usize);
    let mut row_total = Array::<f32>::new(2usize);
    #[unroll]
    for h in 0..2usize {
        row_peak[h] = no_peak(scores);
        row_total[h] = 0.0f32;
    }

    // A plane has every `planes`-th run of keys.
    let mut keys = Sequence::<Array<Vector<E, Line>>>::new();
    let mut values = Sequence::<Array<Vector<E, Line>>>::new();
    #[unroll]
    for _ in 0..groups {
        keys.push(Array::new(comptime!(2 * k_blocks)));
        values.push(Array::new(comptime!(4 * v_blocks)));
    }
    let mut step = step_begin + plane;
    if comptime!(config.loads == Loads::Ahead) {
        if step < step_end {
            #[unroll]
            for g in 0..groups {
                let from = step * run + comptime!(g as u32 * 16);
                load_keys::<E>(
                    k,
                    &buffers.block_table,
                    &k_rows,
                    from,
                    s.k_count,
                    lines_qk,
                    keys.index_mut(g),
                    k_blocks,
                );
                load_values::<E>(
                    v,
                    &buffers.block_table,
                    &v_rows,
                    from,
                    s.k_count,
                    lines_v,
                    values.index_mut(g),
                    v_blocks,
                    0usize,
                    v_blocks,
                );
            }
        }
    }
    while step < step_end {
        let key0 = step * run;
        let next = (step + planes) * run;
        let more = step + planes < step_end;
        if comptime!(config.loads != Loads::Ahead) {
            #[unroll]
            for g in 0..groups {
                let from = key0 + comptime!(g as u32 * 16);
                load_keys::<E>(
                    k,
                    &buffers.block_table,
                    &k_rows,
                    from,
                    s.k_count,
                    lines_qk,
                    keys.index_mut(g),
                    k_blocks,
                );
            }
        }
        if comptime!(config.loads == Loads::Together) {
            #[unroll]
            for g in 0..groups {
                let from = key0 + comptime!(g as u32 * 16);
                load_values::<E>(
                    v,
                    &buffers.block_table,
                    &v_rows,
                    from,
                    s.k_count,
                    lines_v,
                    values.index_mut(g),
                    v_blocks,
                    0usize,
                    v_blocks,
                );
            }
        }
        // Two fragments of eight keys for each 16.
        let mut products = Sequence::<Array<Vector<f32, Pair>>>::new();
        #[unroll]
        for _ in 0..groups * 2 {
            products.push(zeros());
        }
        #[unroll]
        for i in 0..k_blocks {
            #[unroll]
            for j in 0..2usize {
                let a =
                    load_matrices::<E>(&q_tile, q_line + comptime!((i * 4 + j * 2) as u32), false);
                #[unroll]
                for n in 0..groups * 2 {
                    let line = keys.index(comptime!(n / 2))[comptime!(n % 2 * k_blocks + i)];
                    mma::<E>(
                        &a,
                        &pairs::<E>(line, comptime!(j * 4)),
                        products.index_mut(n),
                    );
                }
            }
        }
        if comptime!(config.loads == Loads::Ahead) {
            if more {
                #[unroll]
                for g in 0..groups {
                    let from = next + comptime!(g as u32 * 16);
                    load_keys::<E>(
                        k,
                        &buffers.block_table,
                        &k_rows,
                        from,
                        s.k_count,
                        lines_qk,
                        keys.index_mut(g),
                        k_blocks,
                    );
                }
            }
        }

        if comptime!(scores) {
            #[unroll]
            for n in 0..groups * 2 {
                let part = products.index_mut(n);
                #[unroll]
                for h in 0..2usize {
                    let mut x = part[h];
                    #[unroll]
                    for c in 0..2usize {
                        let key = key0 + pair * 2u32 + comptime!((n * 8 + c) as u32);
                        x[c] = adjusted(
                            args,
                            buffers,
                            rows.index(h),
                            x[c],
                            min(key, s.k_count - 1u32),
                            false,
                        );
                    }
                    part[h] = x;
                }
            }
        } else if args.softcap > 0.0f32 {
            #[unroll]
            for n in 0..groups * 2 {
                let part = products.index_mut(n);
                #[unroll]
                for h in 0..2usize {
                    let mut x = part[h];
                    x[0] = capped(args, x[0] * args.scale, false);
                    x[1] = capped(args, x[1] * args.scale, false);
                    part[h] = x;
                }
            }
        }
        let key0 = i32::cast_from(key0);
        if key0 < clear_begin || key0 + i32::cast_from(run) > clear_end {
            #[unroll]
            for h in 0..2usize {
                let position = rows.index(h).position;
                let low = max(position - wl + 1, begin) - key0 - i32::cast_from(pair * 2u32);
                let high = min(position + wr, end) - key0 - i32::cast_from(pair * 2u32);
                #[unroll]
                for n in 0..groups * 2 {
                    let part = products.index_mut(n);
                    let mut x = part[h];
                    #[unroll]
                    for c in 0..2usize {
                        let column = comptime!((n * 8 + c) as i32);
                        if column < low || column >= high {
                            x[c] = hidden(scores);
                        }
                    }
                    part[h] = x;
                }
            }
        }

        let mut new_peak = Array::<f32>::new(2usize);
        let mut grown = false;
        #[unroll]
        for h in 0..2usize {
            let mut peak = row_peak[h];
            #[unroll]
            for n in 0..groups * 2 {
                let x = products.index(n)[h];
                peak = max(peak, max(x[0], x[1]));
            }
            peak = row_max(peak);
            new_peak[h] = peak;
            grown = grown || (peak - row_peak[h]) * scale > 6.0f32;
        }
        if plane_any(grown) {
            #[unroll]
            for h in 0..2usize {
                let shrink = fast_exp((row_peak[h] - new_peak[h]) * scale);
                row_peak[h] = new_peak[h];
                row_total[h] = row_total[h] * shrink;
                #[unroll]
                for n in 0..comptime!(head_dim / 8) {
                    let part = acc.index_mut(n);
                    part[h] = part[h] * Vector::new(shrink);
                }
            }
        }
        #[unroll]
        for h in 0..2usize {
            let offset = row_peak[h] * scale;
            let mut total = row_total[h];
            #[unroll]
            for n in 0..groups * 2 {
                let part = products.index_mut(n);
                let mut x = part[h];
                x[0] = fast_exp(fma(x[0], scale, -offset));
                x[1] = fast_exp(fma(x[1], scale, -offset));
                total += x[0] + x[1];
                part[h] = x;
            }
            row_total[h] = total;
        }

        #[unroll]
        for g in 0..groups {
            let mut p = Array::<Vector<E, Pair>>::new(4usize);
            #[unroll]
            for i in 0..4usize {
                p[i] =
                    Vector::cast_from(products.index(comptime!(g * 2 + i / 2))[comptime!(i % 2)]);
            }
            #[unroll]
            for i in 0..v_blocks {
                if comptime!(config.loads == Loads::Late && i % 2usize == 0usize) {
                    let from = u32::cast_from(key0) + comptime!(g as u32 * 16);
                    load_values::<E>(
                        v,
                        &buffers.block_table,
                        &v_rows,
                        from,
                        s.k_count,
                        lines_v,
                        values.index_mut(g),
                        v_blocks,
                        i,
                        comptime!(v_blocks.min(i + 2usize)),
                    );
                }
                #[unroll]
                for j in 0..8usize {
                    let lines = values.index(g);
                    let mut b = Array::<Vector<E, Pair>>::new(2usize);
                    b[0] = across::<E>(lines[i], lines[v_blocks + i], j);
                    b[1] = across::<E>(lines[v_blocks * 2 + i], lines[v_blocks * 3 + i], j);
                    mma::<E>(&p, &b, acc.index_mut(i * 8 + j));
                }
            }
        }
        if comptime!(config.loads == Loads::Ahead) {
            if more {
                #[unroll]
                for g in 0..groups {
                    let from = next + comptime!(g as u32 * 16);
                    load_values::<E>(
                        v,
                        &buffers.block_table,
                        &v_rows,
                        from,
                        s.k_count,
                        lines_v,
                        values.index_mut(g),
                        v_blocks,
                        0usize,
                        v_blocks,
                    );
                }
            }
        }
        step += planes;
    }

    // Merge the planes. Accumulator `8 i + j` has columns 64 i + 16 t + j and 64 i + 16 t + 8 + j.
    #[unroll]
    for h in 0..2usize {
        let row = plane * 16u32 + group_row + comptime!(h as u32 * 8);
        let total = row_sum(row_total[h]);
        if pair == 0u32 {
            peaks[row as usize] = row_peak[h];
            totals[row as usize] = total;
        }
        if group_row + comptime!(h as u32 * 8) < rows_here {
            #[unroll]
            for i in 0..comptime!(v_blocks * 4) {
                let mut four = Vector::<f32, Const<4>>::empty();
                #[unroll]
                for j in 0..4usize {
                    four[j] =
                        acc.index(comptime!(i / 4 * 8 + i % 2 * 4) + j)[h][comptime!(i / 2 % 2)];
                }
                let at = row * merge_pitch + pair * 4u32 + comptime!((i / 4 * 16 + i % 4) as u32);
                merge[at as usize] = four;
            }
        }
    }
    sync_cube();
    #[unroll]
    for i in 0..comptime!((16 * per_row).div_ceil(config.threads())) {
        let index = UNIT_POS_X + comptime!(i * config.threads());
        let row = index / per_row;
        let line = index % per_row;
        if row < rows_here && line < lines_v {
            let mut peak = no_peak(scores);
            #[unroll]
            for w in 0..planes {
                peak = max(peak, peaks[(row + comptime!(w * 16)) as usize]);
            }
            let mut total = 0.0f32;
            let mut left = Vector::<f32, Const<4>>::zeroed();
            let mut right = Vector::<f32, Const<4>>::zeroed();
            #[unroll]
            for w in 0..planes {
                let from = row + comptime!(w * 16);
                let weight = fast_exp((peaks[from as usize] - peak) * scale);
                let at = from * merge_pitch + line * 2u32;
                total += weight * totals[from as usize];
                left += merge[at as usize] * Vector::new(weight);
                right += merge[at as usize + 1] * Vector::new(weight);
            }
            let packed = row0 + row;
            let token = packed / args.group;
            let head = key_head * args.group + packed % args.group;
            let whole = args.splits == 1u32;
            let end = finish(args, buffers, peak * scale, total, head, whole);
            left *= Vector::new(end.factor);
            right *= Vector::new(end.factor);
            if !whole {
                let at = u64::cast_from(split) * u64::cast_from(args.rows)
                    + u64::cast_from((batch * args.seqlen_q + token) * args.num_heads + head);
                if line == 0u32 {
                    buffers.partial_lse[at as usize] = end.lse;
                }
                let at = (at * u64::cast_from(lines_v) + u64::cast_from(line)) * 2u64;
                buffers.partial[at as usize] = left;
                buffers.partial[at as usize + 1] = right;
            } else {
                let token = s.q_first + token;
                if has(args, flag::LSE) && line == 0u32 {
                    buffers.lse[lse_at(args, batch, token, head) as usize] = end.lse;
                }
                let at = out_at(args, batch, token, head) + u64::cast_from(line);
                if has(args, flag::OUT_F32) {
                    let at = (at * 8u64) as usize;
                    #[unroll]
                    for j in 0..4usize {
                        buffers.out_f32[at + j] = left[j];
                        buffers.out_f32[at + j + 4] = right[j];
                    }
                } else {
                    let mut eight = Vector::<E, Line>::empty();
                    #[unroll]
                    for j in 0..4usize {
                        eight[j] = E::cast_from(left[j]);
                        eight[j + 4] = E::cast_from(right[j]);
                    }
                    out[at as usize] = eight;
                }
            }
        }
    }
}

/// Elements `first..first + 4` of a line as the right-hand side of a product.
#[cube]
fn pairs<E: Float>(line: Vector<E, Line>, #[comptime] first: usize) -> Array<Vector<E, Pair>> {
    let mut out = Array::<Vector<E, Pair>>::new(2usize);
    #[unroll]
    for i in 0..2usize {
        let mut two = Vector::<E, Pair>::empty();
        two[0] = line[comptime!(first + i * 2)];
        two[1] = line[comptime!(first + i * 2 + 1)];
        out[i] = two;
    }
    out
}

/// The same element of two lines.
#[cube]
fn across<E: Float>(
    a: Vector<E, Line>,
    b: Vector<E, Line>,
    #[comptime] i: usize,
) -> Vector<E, Pair> {
    let mut two = Vector::<E, Pair>::empty();
    two[0] = a[i];
    two[1] = b[i];
    two
}
