//! Attention of a few query rows to many keys, for f16 and bf16 and for keys and values that are codes of 8-bit floats: bound by
//! reading K and V once.
//!
//! The query rows of all heads that share a key head are packed into the 16 rows of a fragment, and the keys are split over cubes
//! (Flash-Decoding, Dao et al. 2023) and again over the planes of a cube. K and V go from memory to registers in 16-byte
//! lines that are fragments as they come: the order of dimensions inside a fragment is free as long as both sides agree, so a
//! lane takes eight neighbours where the hardware's order has pairs.
//!
//! Codes become f16 in registers, and so do the queries, whose rows are scaled by powers of two for that: what a row's
//! greatest component leaves below f16's range is 2^-40 of it.

use cubecl::prelude::*;

use super::arguments::*;
use super::fragments::*;
use super::loads::*;
pub use super::loads::{Config, Loads};
use super::merge::*;
use super::packed::*;
use super::softmax::*;
use crate::e4m3::pair;

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
    let block = block(args, buffers, 16u32, false);
    if is_absent(&block) {
        terminate!();
    }
    rows_of_block::<E, E, E, Line>(q, k, v, out, buffers, args, &block, 1.0f32, 1.0f32, config);
}

/// The same of codes, whose scales are multiplied with.
#[cube]
pub fn decode_codes<E: Float, W: Size>(
    q: &Lines<E>,
    k: &Array<Vector<u32, W>>,
    v: &Array<Vector<u32, W>>,
    out: &mut Lines<E>,
    buffers: &mut Buffers,
    args: &Args,
    scales: &Scales,
    #[comptime] config: Config,
) {
    let block = block(args, buffers, 16u32, false);
    if is_absent(&block) {
        terminate!();
    }
    let k_scale = key_scale(args, scales, block.key_head);
    let v_scale = value_scale(args, scales, block.key_head);
    rows_of_block::<E, half::f16, u32, W>(
        q, k, v, out, buffers, args, &block, k_scale, v_scale, config,
    );
}

/// Products are of `H`. Keys and values lie in lines of `W` of `S`.
#[cube]
fn rows_of_block<E: Float, H: Float, S: Scalar, W: Size>(
    q: &Lines<E>,
    k: &Array<Vector<S, W>>,
    v: &Array<Vector<S, W>>,
    out: &mut Lines<E>,
    buffers: &mut Buffers,
    args: &Args,
    block: &Block,
    k_scale: f32,
    v_scale: f32,
    #[comptime] config: Config,
) {
    let scores = comptime!(config.scores);
    let parts = comptime!(config.groups as usize * 2);
    let dim_parts = comptime!(config.head_dim as usize / 8);
    let run = comptime!(config.groups * 16);
    let ahead = comptime!(config.loads == Loads::Ahead);

    let rows_here = min(block.row_count - block.row0, 16u32);
    let from = sources(args, block, config);
    let steps = steps(args, block, rows_here, run);
    let lane = this_lane();

    let mut q_tile = SharedMemory::<Vector<H, Line>>::new_aligned(
        comptime!(16 * config.pitch() as usize),
        128usize,
    );
    let mut merged = merged(config);
    load_queries::<E, H>(
        &mut q_tile,
        &mut merged,
        q,
        args,
        block,
        rows_here,
        from.lines_qk,
        config,
    );
    sync_cube();
    // What products of codes are multiplied by.
    let mut factors = Sequence::<f32>::new();
    if comptime!(config.codes) {
        #[unroll]
        for h in 0..2u32 {
            let row = lane.group_row + comptime!(h * 8);
            factors.push(merged.peaks[row as usize] * k_scale);
        }
        sync_cube();
    }
    let q_line = lane.lane % 16u32 * comptime!(config.pitch()) + lane.lane / 16u32;

    let mut scale = args.scale;
    let mut rows = Sequence::<ScoreRow>::new();
    push_packed_rows(
        &mut rows,
        args,
        buffers,
        block,
        rows_here,
        lane.group_row,
        8u32,
        scores,
    );
    // Capped and adjusted scores are scaled already.
    if comptime!(scores) || args.softcap > 0.0f32 {
        scale = 1.0f32;
    }
    let mut sums = begin_sums(dim_parts, 2usize);
    begin_rows(&mut sums, 2usize, scores);

    // A plane has every `planes`-th run of keys.
    let mut loaded = nothing_loaded::<S, W>(config);
    let mut step = steps.begin + lane.plane;
    if comptime!(ahead) {
        if step < steps.end {
            let key0 = step * run;
            load_keys::<S, W>(&mut loaded, k, buffers, block, &from, key0, config);
            let key0 = step * run;
            load_values::<S, W>(&mut loaded, v, buffers, block, &from, key0, config);
        }
    }
    while step < steps.end {
        let key0 = step * run;
        let next = (step + comptime!(config.planes)) * run;
        let more = step + comptime!(config.planes) < steps.end;
        if comptime!(!ahead) {
            load_keys::<S, W>(&mut loaded, k, buffers, block, &from, key0, config);
        }
        if comptime!(config.loads == Loads::Together) {
            load_values::<S, W>(&mut loaded, v, buffers, block, &from, key0, config);
        }
        let mut s = Parts::new();
        begin_parts(&mut s, parts);
        score::<H, S, W>(&q_tile, q_line, &loaded, &mut s, config);
        if comptime!(ahead) {
            if more {
                load_keys::<S, W>(&mut loaded, k, buffers, block, &from, next, config);
            }
        }

        if comptime!(config.codes) {
            multiply(&mut s, &factors, parts);
        }
        adjust_or_cap(&mut s, args, buffers, block, &rows, key0, &lane, config);
        let key0 = i32::cast_from(key0);
        if key0 < steps.clear_begin || key0 + i32::cast_from(run) > steps.clear_end {
            hide(&mut s, &steps, &rows, key0, &lane, config);
        }
        update(&mut sums, &mut s, scale, 2usize, parts, dim_parts);
        accumulate::<H, S, W>(
            &s,
            &mut sums.acc,
            &mut loaded,
            v,
            buffers,
            block,
            &from,
            key0,
            config,
        );
        if comptime!(ahead) {
            if more {
                load_values::<S, W>(&mut loaded, v, buffers, block, &from, next, config);
            }
        }
        step += comptime!(config.planes);
    }

    leave(&mut merged, &sums, rows_here, &lane, config);
    sync_cube();
    let lines_v = from.lines_v;
    write_rows::<E>(
        &merged, out, buffers, args, block, rows_here, lines_v, scale, v_scale, config,
    );
}

/// The scores of products of codes.
#[cube]
fn multiply(s: &mut Parts, factors: &Sequence<f32>, #[comptime] parts: usize) {
    #[unroll]
    for n in 0..parts {
        let part = s.index_mut(n);
        #[unroll]
        for h in 0..2usize {
            let mut x = part[h];
            #[unroll]
            for c in 0..2usize {
                x[c] *= *factors.index(h);
            }
            part[h] = x;
        }
    }
}

/// Runs `begin..end` of keys that any row sees, and the bounds within which they need no mask.
#[derive(CubeType, Clone)]
struct Steps {
    window_left: i32,
    window_right: i32,
    seen: Seen,
    begin: u32,
    end: u32,
    clear_begin: i32,
    clear_end: i32,
}

#[cube]
fn steps(args: &Args, block: &Block, rows_here: u32, #[comptime] run: u32) -> Steps {
    let window_left = i32::cast_from(args.window_left);
    let window_right = i32::cast_from(args.window_right);
    let seen = seen(args, block, rows_here);
    let begin = u32::cast_from(seen.begin) / run;
    let mut end = (u32::cast_from(seen.end) + comptime!(run - 1)) / run;
    if seen.begin >= seen.end {
        end = begin;
    }
    let clear_begin = max(seen.last - window_left + 1, seen.begin);
    let clear_end = min(seen.end, seen.first + window_right);
    Steps {
        window_left,
        window_right,
        seen,
        begin,
        end,
        clear_begin,
        clear_end,
    }
}

/// Queries in the order of dimensions of the keys' fragments: of each 32, pair `i` of line `t` is
/// pair `t` of eight `i`. Beside codes each row is scaled, and what takes that back is left in `merged`.
#[cube]
fn load_queries<E: Float, H: Float>(
    tile: &mut SharedMemory<Vector<H, Line>>,
    merged: &mut Merged,
    q: &Lines<E>,
    args: &Args,
    block: &Block,
    rows_here: u32,
    lines: u32,
    #[comptime] config: Config,
) {
    let mut pairs = tile.to_slice_mut().with_vector_size::<Pair>();
    let per_row = comptime!(config.head_dim / 8);
    #[unroll]
    for i in 0..comptime!((16 * per_row).div_ceil(config.threads())) {
        let index = UNIT_POS_X + comptime!(i * config.threads());
        let row = index / per_row;
        let line = index % per_row;
        let mut value = Vector::<E, Line>::zeroed();
        if row < rows_here && line < lines {
            let packed = block.row0 + row;
            let head = block.key_head * args.group + packed % args.group;
            let token = block.span.q_first + packed / args.group;
            let at = query_at(args, block.batch, token, head);
            value = q[(at + u64::cast_from(line)) as usize];
        }
        let at = if comptime!(config.is_wide()) {
            line / 8u32 * 32u32 + line / 2u32 % 4u32 + line % 2u32 * 16u32
        } else {
            line / 4u32 * 16u32 + line % 4u32
        };
        let at = row * comptime!(config.pitch() * 4) + at;
        let halves = if comptime!(config.codes) {
            let wide = Vector::<f32, Line>::cast_from(value);
            let exponent = exponent_of_row(&wide, per_row);
            let factor = f32::reinterpret((268u32 - exponent) << 23u32);
            if line == 0u32 {
                merged.peaks[row as usize] = f32::reinterpret((exponent - 14u32) << 23u32);
            }
            Vector::<H, Line>::cast_from(wide * Vector::new(factor))
        } else {
            Vector::<H, Line>::cast_from(value)
        };
        #[unroll]
        for j in 0..4usize {
            let mut two = Vector::<H, Pair>::empty();
            two[0] = halves[comptime!(j * 2)];
            two[1] = halves[comptime!(j * 2 + 1)];
            pairs[(at + comptime!(j as u32 * 4)) as usize] = two;
        }
    }
}

/// The exponent of the greatest magnitude of a row, in f32's bits, which neighbouring lanes have eight elements of each. Within
/// bounds: times 2^(141 - it) the row lies below 2^15.
#[cube]
fn exponent_of_row(x: &Vector<f32, Line>, #[comptime] lanes: u32) -> u32 {
    let mut greatest = 0u32;
    #[unroll]
    for j in 0..8usize {
        greatest = max(greatest, u32::reinterpret(x[j]) & 0x7fff_ffffu32);
    }
    #[unroll]
    for i in 0..comptime!(lanes.ilog2()) {
        greatest = max(greatest, plane_shuffle_xor(greatest, comptime!(1u32 << i)));
    }
    // From the least whose factor is a number; the greatest is that of infinity.
    max(greatest >> 23u32, 15u32)
}

/// Products of queries and keys: two fragments of eight keys for each 16.
#[cube]
fn score<H: Float, S: Scalar, W: Size>(
    q_tile: &SharedMemory<Vector<H, Line>>,
    q_line: u32,
    loaded: &Loaded<S, W>,
    s: &mut Parts,
    #[comptime] config: Config,
) {
    let blocks = comptime!(config.key_blocks());
    #[unroll]
    for i in 0..blocks {
        #[unroll]
        for j in 0..comptime!(config.line() as usize / 4) {
            let at = comptime!((i * config.line() as usize / 2 + j * 2) as u32);
            let a = load_matrices::<H>(q_tile, q_line + at, false);
            #[unroll]
            for n in 0..comptime!(config.groups as usize * 2) {
                let line = loaded.keys.index(comptime!(n / 2))[comptime!(n % 2 * blocks + i)];
                if comptime!(config.codes) {
                    mma::<H>(&a, &of_codes::<H, S>(line[j]), s.index_mut(n));
                } else {
                    let line = Vector::<H, Line>::cast_from(line);
                    mma::<H>(&a, &pairs::<H>(line, comptime!(j * 4)), s.index_mut(n));
                }
            }
        }
    }
}

/// A word of codes, as two pairs.
#[cube]
fn of_codes<H: Float, S: Scalar>(word: S) -> Array<Vector<H, Pair>> {
    let word = u32::cast_from(word);
    let mut out = Array::<Vector<H, Pair>>::new(2usize);
    out[0] = Vector::cast_from(pair(word));
    out[1] = Vector::cast_from(pair(word >> 16u32));
    out
}

/// Adjusts the scores of keys from `key0` on, if they are more than products, or caps them.
#[cube]
fn adjust_or_cap(
    s: &mut Parts,
    args: &Args,
    buffers: &Buffers,
    block: &Block,
    rows: &Sequence<ScoreRow>,
    key0: u32,
    lane: &Lane,
    #[comptime] config: Config,
) {
    if comptime!(config.scores) {
        #[unroll]
        for n in 0..comptime!(config.groups as usize * 2) {
            let part = s.index_mut(n);
            #[unroll]
            for h in 0..2usize {
                let mut x = part[h];
                #[unroll]
                for c in 0..2usize {
                    let key = key0 + lane.pair * 2u32 + comptime!((n * 8 + c) as u32);
                    x[c] = adjusted(
                        args,
                        buffers,
                        rows.index(h),
                        x[c],
                        min(key, block.span.k_count - 1u32),
                        false,
                    );
                }
                part[h] = x;
            }
        }
    } else if args.softcap > 0.0f32 {
        #[unroll]
        for n in 0..comptime!(config.groups as usize * 2) {
            let part = s.index_mut(n);
            #[unroll]
            for h in 0..2usize {
                let mut x = part[h];
                x[0] = capped(args, x[0] * args.scale, false);
                x[1] = capped(args, x[1] * args.scale, false);
                part[h] = x;
            }
        }
    }
}

/// Hides what lies outside the keys that a lane's rows see.
#[cube]
fn hide(
    s: &mut Parts,
    steps: &Steps,
    rows: &Sequence<ScoreRow>,
    key0: i32,
    lane: &Lane,
    #[comptime] config: Config,
) {
    #[unroll]
    for h in 0..2usize {
        let position = rows.index(h).position;
        let first = max(position - steps.window_left + 1, steps.seen.begin);
        let low = first - key0 - i32::cast_from(lane.pair * 2u32);
        let last = min(position + steps.window_right, steps.seen.end);
        let high = last - key0 - i32::cast_from(lane.pair * 2u32);
        let parts = comptime!(config.groups as usize * 2);
        hide_outside(s, low, high, h, parts, comptime!(config.scores));
    }
}

/// Adds the products of exponentials and values, which are loaded here if that is late.
#[cube]
fn accumulate<H: Float, S: Scalar, W: Size>(
    s: &Parts,
    acc: &mut Parts,
    loaded: &mut Loaded<S, W>,
    v: &Array<Vector<S, W>>,
    buffers: &Buffers,
    block: &Block,
    sources: &Sources,
    key0: i32,
    #[comptime] config: Config,
) {
    let blocks = comptime!(config.value_blocks());
    #[unroll]
    for g in 0..comptime!(config.groups as usize) {
        let mut p = Array::<Vector<H, Pair>>::new(4usize);
        #[unroll]
        for i in 0..4usize {
            p[i] = Vector::cast_from(s.index(comptime!(g * 2 + i / 2))[comptime!(i % 2)]);
        }
        #[unroll]
        for i in 0..blocks {
            if comptime!(config.loads == Loads::Late && i % 2usize == 0usize) {
                let first = u32::cast_from(key0) + comptime!(g as u32 * 16);
                let last = comptime!(blocks.min(i + 2usize));
                load_16_values::<S, W>(
                    loaded, v, buffers, block, sources, first, g, i, last, config,
                );
            }
            if comptime!(config.codes) {
                accumulate_codes::<H, S, W>(&p, acc, loaded, g, i, config);
            } else {
                #[unroll]
                for j in 0..8usize {
                    let lines = loaded.values.index(g);
                    let mut b = Array::<Vector<H, Pair>>::new(2usize);
                    b[0] = across_lines::<H, S, W>(lines[i], lines[blocks + i], j);
                    b[1] = across_lines::<H, S, W>(lines[blocks * 2 + i], lines[blocks * 3 + i], j);
                    mma::<H>(&p, &b, acc.index_mut(i * 8 + j));
                }
            }
        }
    }
}

/// The same element of two lines that are of `H` in memory.
#[cube]
fn across_lines<H: Float, S: Scalar, W: Size>(
    a: Vector<S, W>,
    b: Vector<S, W>,
    #[comptime] i: usize,
) -> Vector<H, Pair> {
    across::<H>(Vector::cast_from(a), Vector::cast_from(b), i)
}

/// Adds products with block `i` of the `g`-th 16 values, which are codes.
#[cube]
fn accumulate_codes<H: Float, S: Scalar, W: Size>(
    p: &Array<Vector<H, Pair>>,
    acc: &mut Parts,
    loaded: &Loaded<S, W>,
    #[comptime] g: usize,
    #[comptime] i: usize,
    #[comptime] config: Config,
) {
    let blocks = comptime!(config.value_blocks());
    let words = comptime!(config.line() as usize / 4);
    let lines = loaded.values.index(g);
    #[unroll]
    for word in 0..words {
        let mut pairs = Array::<Vector<H, Pair>>::new(8usize);
        #[unroll]
        for n in 0..4usize {
            let line = lines[comptime!(n * blocks + i)];
            let both = of_codes::<H, S>(line[word]);
            pairs[n] = both[0];
            pairs[comptime!(n + 4)] = both[1];
        }
        #[unroll]
        for j in 0..4usize {
            let mut b = Array::<Vector<H, Pair>>::new(2usize);
            #[unroll]
            for half in 0..2usize {
                let first = comptime!(j / 2 * 4 + half * 2);
                let mut two = Vector::<H, Pair>::empty();
                two[0] = pairs[first][comptime!(j % 2)];
                two[1] = pairs[comptime!(first + 1)][comptime!(j % 2)];
                b[half] = two;
            }
            mma::<H>(p, &b, acc.index_mut(comptime!((i * words + word) * 4 + j)));
        }
    }
}
