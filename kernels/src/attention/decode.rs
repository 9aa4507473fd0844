//! Attention of a few query rows to many keys, for f16 and bf16: bound by reading K and V once.
//!
//! The query rows of all heads that share a key head are packed into the 16 rows of a fragment, and the keys are split over cubes
//! (Flash-Decoding, Dao et al. 2023) and again over the planes of a cube. K and V go from memory to registers in 16-byte
//! lines that are fragments as they come: the order of dimensions inside a fragment is free as long as both sides agree, so a
//! lane takes eight neighbours where the hardware's order has pairs.

use cubecl::prelude::*;

use super::arguments::*;
use super::fragments::*;
use super::loads::*;
pub use super::loads::{Config, Loads};
use super::merge::*;
use super::packed::*;
use super::softmax::*;

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
    let planes = comptime!(config.planes);
    let scores = comptime!(config.scores);
    let k_blocks = comptime!(head_dim / 32);
    let v_blocks = comptime!(head_dim / 64);
    let groups = comptime!(config.groups as usize);
    let run = comptime!(config.groups * 16);

    let block = block(args, buffers, 16u32, false);
    if is_absent(&block) {
        terminate!();
    }
    let row0 = block.row0;
    let key_head = block.key_head;
    let batch = block.batch;
    let s = block.span.clone();
    let rows_here = min(block.row_count - row0, 16u32);
    let lines_qk = args.head_dim / 8u32;
    let lines_v = args.head_dim_v / 8u32;
    let k_rows = key_rows(args, &s, batch, key_head);
    let v_rows = value_rows(args, &s, batch, key_head);

    let wl = i32::cast_from(args.window_left);
    let wr = i32::cast_from(args.window_right);
    let seen = seen(args, &block, rows_here);
    let begin = seen.begin;
    let end = seen.end;
    let step_begin = u32::cast_from(begin) / run;
    let mut step_end = (u32::cast_from(end) + comptime!(run - 1)) / run;
    if begin >= end {
        step_end = step_begin;
    }
    let clear_begin = max(seen.last - wl + 1, begin);
    let clear_end = min(end, seen.first + wr);

    let lane = UNIT_POS_X % 32u32;
    let plane = UNIT_POS_X / 32u32;
    let group_row = lane / 4u32;
    let pair = lane % 4u32;

    // Queries in the order of dimensions of the keys' fragments: of each 32, pair `i` of line `t` is pair `t` of eight `i`.
    let mut q_tile =
        SharedMemory::<Vector<E, Line>>::new_aligned(comptime!(16 * pitch as usize), 128usize);
    let mut merged = merged(config);
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
    let mut keys = Held::<E>::new();
    let mut values = Held::<E>::new();
    #[unroll]
    for _ in 0..groups {
        keys.push(Array::new(comptime!(2 * k_blocks)));
        values.push(Array::new(comptime!(4 * v_blocks)));
    }
    let mut step = step_begin + plane;
    if comptime!(config.loads == Loads::Ahead) {
        if step < step_end {
            load_keys::<E>(
                k,
                &buffers.block_table,
                &k_rows,
                step * run,
                s.k_count,
                lines_qk,
                &mut keys,
                groups,
                k_blocks,
            );
            load_values::<E>(
                v,
                &buffers.block_table,
                &v_rows,
                step * run,
                s.k_count,
                lines_v,
                &mut values,
                groups,
                v_blocks,
            );
        }
    }
    while step < step_end {
        let key0 = step * run;
        let next = (step + planes) * run;
        let more = step + planes < step_end;
        if comptime!(config.loads != Loads::Ahead) {
            load_keys::<E>(
                k,
                &buffers.block_table,
                &k_rows,
                key0,
                s.k_count,
                lines_qk,
                &mut keys,
                groups,
                k_blocks,
            );
        }
        if comptime!(config.loads == Loads::Together) {
            load_values::<E>(
                v,
                &buffers.block_table,
                &v_rows,
                key0,
                s.k_count,
                lines_v,
                &mut values,
                groups,
                v_blocks,
            );
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
                load_keys::<E>(
                    k,
                    &buffers.block_table,
                    &k_rows,
                    next,
                    s.k_count,
                    lines_qk,
                    &mut keys,
                    groups,
                    k_blocks,
                );
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
                hide_outside(&mut products, low, high, h, comptime!(groups * 2), scores);
            }
        }

        raise_peaks(
            &products,
            &mut row_peak,
            &mut row_total,
            &mut acc,
            scale,
            2usize,
            comptime!(groups * 2),
            comptime!(head_dim / 8),
        );
        exponentiate(
            &mut products,
            &row_peak,
            &mut row_total,
            scale,
            2usize,
            comptime!(groups * 2),
        );

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
                    load_16_values::<E>(
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
                load_values::<E>(
                    v,
                    &buffers.block_table,
                    &v_rows,
                    next,
                    s.k_count,
                    lines_v,
                    &mut values,
                    groups,
                    v_blocks,
                );
            }
        }
        step += planes;
    }

    leave(
        &mut merged,
        &acc,
        &row_peak,
        &row_total,
        rows_here,
        plane,
        group_row,
        pair,
        config,
    );
    sync_cube();
    write_rows::<E>(
        &merged, out, buffers, args, &block, rows_here, lines_v, scale, config,
    );
}
