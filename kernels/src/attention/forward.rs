//! Flash attention on tensor cores for f16 and bf16 (FlashAttention-2, Dao 2023, arXiv:2307.08691).
//!
//! A cube owns a block of query rows of one head and walks over the keys in tiles. Each plane owns 16 (or 32) of the rows, so
//! softmax needs no exchange between planes. K and V have one buffer each: the next K arrives during the product with V, the next V
//! during the next scores.

use cubecl::prelude::*;

use super::arguments::*;
use super::block::*;
use super::fragments::*;
use super::products::*;
use super::softmax::*;
pub use super::tiles::Config;
use super::tiles::*;

/// Grid: row blocks × heads × sequences, the first fastest.
#[cube]
pub fn forward<E: Float>(
    q: &Lines<E>,
    k: &Lines<E>,
    v: &Lines<E>,
    out: &mut Lines<E>,
    buffers: &mut Buffers,
    args: &Args,
    #[comptime] config: Config,
) {
    let tile_keys = comptime!(config.tile_keys);
    let scores = comptime!(config.scores);
    // What a lane has: of all rows, of a fragment's scores, and of a fragment's sums.
    let rows = comptime!(config.fragments as usize * 2);
    let key_parts = comptime!(config.tile_keys as usize / 8);
    let dim_parts = comptime!(config.head_dim as usize / 8);

    let block = query_block(args, buffers, comptime!(config.rows()));
    if block.row0 >= block.span.q_count {
        terminate!();
    }
    let sources = sources(args, &block, 8u32);
    let seen = seen_tiles(args, &block, comptime!(config.rows()), tile_keys);
    let clear_begin = clear_begin(&seen);
    let clear_end = clear_end(&seen, &block);
    let lane = this_lane();
    let plane_row = lane.plane * comptime!(config.fragments * 16);
    let work = Work {
        block,
        sources,
        seen,
        lane,
        plane_row,
    };

    let mut tiles = tiles::<E>(config);
    let key_end = u32::cast_from(work.seen.key_end);
    if work.seen.begin < work.seen.end {
        copy_queries::<E>(&mut tiles, q, buffers, &work, config);
        let first = work.seen.begin * tile_keys;
        copy_keys::<E>(&mut tiles, k, buffers, &work, first, config);
        let first = work.seen.begin * tile_keys;
        copy_values::<E>(&mut tiles, v, buffers, &work, first, config);
    }
    let lines = matrix_lines(&work, config);
    let mut sums = begin_sums(comptime!(rows / 2 * dim_parts), rows);
    begin_rows(&mut sums, rows, scores);

    // Adjusted scores are scaled already.
    let mut scale = args.scale;
    let mut score_rows = Sequence::<ScoreRow>::new();
    if comptime!(scores) {
        scale = 1.0f32;
        push_score_rows(&mut score_rows, args, buffers, &work, rows);
    }

    let mut phase = 0u32;
    let mut tile = work.seen.begin;
    while tile < work.seen.end {
        let key0 = tile * tile_keys;
        let more = tile + 1u32 < work.seen.end;

        tiles.k_ready.wait_parity(phase);
        let mut s = Parts::new();
        begin_parts(&mut s, comptime!(rows / 2 * key_parts));
        score::<E>(&tiles.q, &tiles.k, &mut s, lines.q, lines.k, config);
        sync_cube();
        if more {
            let next = key0 + tile_keys;
            copy_keys::<E>(&mut tiles, k, buffers, &work, next, config);
        }

        if comptime!(scores) {
            adjust(
                &mut s,
                args,
                buffers,
                &work,
                &score_rows,
                key0,
                rows,
                key_parts,
                false,
            );
        }
        let key0 = i32::cast_from(key0);
        if key0 < clear_begin || key0 + comptime!(tile_keys as i32) > clear_end {
            mask(&mut s, &work, key0, key_end, rows, key_parts, scores);
        }
        update(&mut sums, &mut s, scale, rows, key_parts, dim_parts);

        tiles.v_ready.wait_parity(phase);
        accumulate::<E>(&s, &tiles.v, &mut sums.acc, lines.v, config);
        sync_cube();
        if more {
            let next = u32::cast_from(key0) + tile_keys;
            copy_values::<E>(&mut tiles, v, buffers, &work, next, config);
        }
        phase = phase ^ 1u32;
        tile += 1u32;
    }

    let f32_out = has(args, flag::OUT_F32);
    finish_rows(&mut sums, buffers, args, &work, scale, f32_out, config);
    if !f32_out {
        store_lines::<E>(&mut tiles.q, &sums.acc, out, args, &work, config);
    }
}

/// Divides a lane's sums by the sums of their exponentials, and stores the logarithms of these; the
/// results too, if they are to be f32.
#[cube]
fn finish_rows(
    sums: &mut Sums,
    buffers: &mut Buffers,
    args: &Args,
    work: &Work,
    scale: f32,
    f32_out: bool,
    #[comptime] config: Config,
) {
    let parts = comptime!(config.head_dim as usize / 8);
    let block = &work.block;
    let lane = &work.lane;
    let lines_v = work.sources.width_v;
    #[unroll]
    for i in 0..comptime!(config.fragments as usize * 2) {
        let row = block.row0 + work.plane_row + lane.group_row + comptime!(i as u32 * 8);
        let end = finish(
            args,
            buffers,
            sums.row_peak[i] * scale,
            row_sum(sums.row_total[i]),
            block.head,
            true.runtime(),
        );
        #[unroll]
        for n in 0..parts {
            let part = sums.acc.index_mut(comptime!(i / 2 * parts) + n);
            part[comptime!(i % 2)] = part[comptime!(i % 2)] * Vector::new(end.factor);
        }
        if has(args, flag::LSE) && lane.pair == 0u32 && row < block.span.q_count {
            let token = block.span.q_first + row;
            buffers.lse[lse_at(args, block.batch, token, block.head) as usize] = end.lse;
        }
        if f32_out && row < block.span.q_count {
            let token = block.span.q_first + row;
            let at = out_at(args, block.batch, token, block.head) * 8u64;
            #[unroll]
            for n in 0..parts {
                if comptime!(n as u32) < lines_v {
                    let column = lane.pair * 2u32 + comptime!(n as u32 * 8);
                    let to = (at + u64::cast_from(column)) as usize;
                    let two = sums.acc.index(comptime!(i / 2 * parts) + n)[comptime!(i % 2)];
                    buffers.out_f32[to] = two[0];
                    buffers.out_f32[to + 1] = two[1];
                }
            }
        }
    }
}

/// Stores a plane's rows through its own rows of the queries, to write whole lines.
#[cube]
fn store_lines<E: Float>(
    q_tile: &mut SharedMemory<Vector<E, Line>>,
    acc: &Parts,
    out: &mut Lines<E>,
    args: &Args,
    work: &Work,
    #[comptime] config: Config,
) {
    let pitch = comptime!(config.pitch());
    let fragments = comptime!(config.fragments as usize);
    let dim_steps = comptime!(config.head_dim as usize / 16);
    let block = &work.block;
    let lane = &work.lane;
    let plane_row = work.plane_row;
    let lines_v = work.sources.width_v;
    let mut staging = q_tile.to_slice_mut().with_vector_size::<Pair>();
    sync_plane();
    #[unroll]
    for i in 0..fragments * 2 {
        #[unroll]
        for n in 0..dim_steps * 2 {
            let row = plane_row + lane.group_row + comptime!(i as u32 * 8);
            let at = row * comptime!(pitch * 4) + lane.pair + comptime!(n as u32 * 4);
            let part = acc.index(comptime!(i / 2 * dim_steps * 2) + n);
            staging[at as usize] = Vector::cast_from(part[comptime!(i % 2)]);
        }
    }
    sync_plane();
    let per_row = comptime!(config.head_dim / 8);
    #[unroll]
    for i in 0..comptime!(fragments as u32 * 16 * per_row / 32) {
        let index = lane.lane + comptime!(i * 32);
        let row = plane_row + index / per_row;
        let line = index % per_row;
        if block.row0 + row < block.span.q_count && line < lines_v {
            let token = block.span.q_first + block.row0 + row;
            let to = out_at(args, block.batch, token, block.head) + u64::cast_from(line);
            out[to as usize] = q_tile[(row * pitch + line) as usize];
        }
    }
}
