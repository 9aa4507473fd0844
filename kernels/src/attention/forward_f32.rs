//! Flash attention on tensor cores for f32, as accurate as f32 is: what [`forward`](super::forward) does, with the products of
//! [`tf32`](super::tf32).
//!
//! As the order of the terms of a sum is free, and that of the columns of values, a lane takes neighbours where the hardware's
//! order would scatter them. What the planes share is cut in registers: in shared memory two parts would take twice the room.

use cubecl::prelude::*;

use super::arguments::*;
use super::block::*;
use super::fragments::*;
use super::softmax::*;
use super::tf32::*;
pub use super::tiles_f32::Config;
use super::tiles_f32::*;

/// Grid: row blocks × heads × sequences, the first fastest.
#[cube]
pub fn forward_f32(
    q: &Array<Vector<f32, Quad>>,
    k: &Array<Vector<f32, Quad>>,
    v: &Array<Vector<f32, Quad>>,
    out: &mut Array<Vector<f32, Quad>>,
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
    let sources = sources(args, &block, 4u32);
    let seen = seen_tiles(args, &block, comptime!(config.rows()), tile_keys);
    let lane = this_lane();
    let plane_row = lane.plane * comptime!(config.fragments * 16);
    let work = Work {
        block,
        sources,
        seen,
        lane,
        plane_row,
    };

    let mut tiles = tiles(&work, config);
    if work.seen.begin < work.seen.end {
        copy_queries(&mut tiles, q, buffers, &work, config);
        let first = work.seen.begin * tile_keys;
        copy_keys(&mut tiles, k, buffers, &work, first, config);
        let first = work.seen.begin * tile_keys;
        copy_values(&mut tiles, v, buffers, &work, first, config);
    }
    let quads = quads(&work, config);
    let v_pairs = tiles.v.to_slice().with_vector_size::<Pair>();
    let mut sums = begin_sums(comptime!(rows / 2 * dim_parts), rows);
    #[unroll]
    for i in 0..rows {
        sums.row_peak[i] = no_peak(scores);
        tiles.totals[total_of(i, config)] = 0.0f32;
    }

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
        score(&tiles, &mut s, &quads, args.head_dim, config);
        sync_cube();
        if more {
            let next = key0 + tile_keys;
            copy_keys(&mut tiles, k, buffers, &work, next, config);
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
                true,
            );
        }
        let key0 = i32::cast_from(key0);
        if key0 < tiles.kept[2] || key0 + comptime!(tile_keys as i32) > tiles.kept[3] {
            mask(
                &mut s,
                &work,
                key0,
                work.block.span.k_count,
                rows,
                key_parts,
                scores,
            );
        }
        #[unroll]
        for i in 0..rows {
            sums.row_total[i] = tiles.totals[total_of(i, config)];
        }
        update(&mut sums, &mut s, scale, rows, key_parts, dim_parts);
        #[unroll]
        for i in 0..rows {
            tiles.totals[total_of(i, config)] = sums.row_total[i];
        }

        tiles.v_ready.wait_parity(phase);
        accumulate(&s, &v_pairs, &mut sums.acc, &quads, args.head_dim_v, config);
        sync_cube();
        if more {
            let next = u32::cast_from(key0) + tile_keys;
            copy_values(&mut tiles, v, buffers, &work, next, config);
        }
        phase = phase ^ 1u32;
        tile += 1u32;
    }
    finish_rows(&sums, &tiles, out, buffers, args, &work, scale, config);
}

/// Scores of a plane's rows: products of queries and keys.
#[cube]
fn score(tiles: &Tiles, s: &mut Parts, quads: &Quads, head_dim: u32, #[comptime] config: Config) {
    let per_row = comptime!(config.head_dim / 4);
    let fragments = comptime!(config.fragments as usize);
    let chains = comptime!(config.chains());
    let key_tiles = comptime!(config.tile_keys as usize / 8);
    let mut dim = 0u32;
    while dim < head_dim {
        let step = (dim / 4u32) ^ quads.swap;
        let mut a = Sequence::<Cut16>::new();
        #[unroll]
        for f in 0..fragments {
            let at = quads.q + step + comptime!(f as u32 * 16 * per_row);
            let upper = tiles.q[at as usize];
            let lower = tiles.q[(at + comptime!(8 * per_row)) as usize];
            a.push(cut_left(upper, lower));
        }
        #[unroll]
        for n in 0..key_tiles / chains {
            let mut b = Sequence::<Cut16>::new();
            #[unroll]
            for c in 0..chains {
                let at = quads.k + step + comptime!((n * chains + c) as u32 * 8 * per_row);
                b.push(cut_right(tiles.k[at as usize]));
            }
            products(
                &a,
                &b,
                s,
                key_tiles,
                comptime!(n * chains),
                fragments,
                chains,
            );
        }
        dim += 16u32;
    }
}

/// Adds the products of a plane's exponentials and values.
#[cube]
fn accumulate(
    s: &Parts,
    v_pairs: &Slice<Vector<f32, Pair>>,
    acc: &mut Parts,
    quads: &Quads,
    head_dim_v: u32,
    #[comptime] config: Config,
) {
    let fragments = comptime!(config.fragments as usize);
    let chains = comptime!(config.chains());
    let dim_tiles = comptime!(config.head_dim as usize / 8);
    let key_tiles = comptime!(config.tile_keys as usize / 8);
    #[unroll]
    for n in 0..key_tiles / 2 {
        let mut a = Sequence::<Cut16>::new();
        #[unroll]
        for f in 0..fragments {
            let left = s.index(comptime!(f * key_tiles + n * 2));
            let right = s.index(comptime!(f * key_tiles + n * 2 + 1));
            a.push(cut_left(join(left[0], right[0]), join(left[1], right[1])));
        }
        // The next are on their way while the last are used.
        let mut held = Array::<Vector<f32, Pair>>::new(8usize);
        load_values(v_pairs, quads.v, quads.v_swap, &mut held, n, 0usize, config);
        #[unroll]
        for d in 0..comptime!(dim_tiles / 2) {
            if comptime!(d + 1 < dim_tiles / 2) {
                load_values(
                    v_pairs,
                    quads.v,
                    quads.v_swap,
                    &mut held,
                    n,
                    comptime!(d + 1),
                    config,
                );
            }
            // Columns past the values' dimension hold nothing. The branch also keeps the compiler from loading far ahead, which takes
            // more registers than there are.
            if comptime!(d as u32 * 16) < head_dim_v {
                #[unroll]
                for j in 0..comptime!(2 / chains) {
                    let mut b = Sequence::<Cut16>::new();
                    #[unroll]
                    for c in 0..chains {
                        b.push(cut_right(column(
                            &held,
                            comptime!(d % 2 * 4),
                            comptime!(j * chains + c),
                        )));
                    }
                    products(
                        &a,
                        &b,
                        acc,
                        dim_tiles,
                        comptime!(d * 2 + j * chains),
                        fragments,
                        chains,
                    );
                }
            }
        }
    }
}

/// Divides a lane's sums by the sums of their exponentials, and stores them and the logarithms of
/// these.
#[cube]
fn finish_rows(
    sums: &Sums,
    tiles: &Tiles,
    out: &mut Array<Vector<f32, Quad>>,
    buffers: &mut Buffers,
    args: &Args,
    work: &Work,
    scale: f32,
    #[comptime] config: Config,
) {
    let row0 = u32::cast_from(tiles.kept[0]);
    let q_first = u32::cast_from(tiles.kept[1]);
    let block = &work.block;
    let q_count = block.span.q_count;
    let pair = work.lane.pair;
    let quads_v = work.sources.width_v;
    #[unroll]
    for i in 0..comptime!(config.fragments as usize * 2) {
        let row = row0 + work.plane_row + work.lane.group_row + comptime!(i as u32 * 8);
        let end = finish(
            args,
            buffers,
            sums.row_peak[i] * scale,
            row_sum(tiles.totals[total_of(i, config)]),
            block.head,
            true.runtime(),
        );
        if row < q_count {
            if has(args, flag::LSE) && pair == 0u32 {
                let at = lse_at(args, block.batch, q_first + row, block.head);
                buffers.lse[at as usize] = end.lse;
            }
            let at = out_at(args, block.batch, q_first + row, block.head);
            store_row(&sums.acc, out, at, end.factor, pair, quads_v, i, config);
        }
    }
}

/// Stores a row of a plane, scaled.
#[cube]
fn store_row(
    acc: &Parts,
    out: &mut Array<Vector<f32, Quad>>,
    at: u64,
    factor: f32,
    pair: u32,
    quads_v: u32,
    #[comptime] i: usize,
    #[comptime] config: Config,
) {
    let dim_tiles = comptime!(config.head_dim as usize / 8);
    #[unroll]
    for d in 0..comptime!(dim_tiles / 2) {
        let quad = comptime!(d as u32 * 4) + pair;
        if quad < quads_v {
            let left = acc.index(comptime!(i / 2 * dim_tiles + d * 2))[comptime!(i % 2)];
            let right = acc.index(comptime!(i / 2 * dim_tiles + d * 2 + 1))[comptime!(i % 2)];
            let mut four = Vector::<f32, Quad>::empty();
            #[unroll]
            for c in 0..2usize {
                four[comptime!(c * 2)] = left[c] * factor;
                four[comptime!(c * 2 + 1)] = right[c] * factor;
            }
            out[(at + u64::cast_from(quad)) as usize] = four;
        }
    }
}
