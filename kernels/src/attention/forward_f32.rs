//! Flash attention on tensor cores for f32, as accurate as f32 is: what [`forward`](super::forward) does, with the products of
//! [`tf32`](super::tf32).
//!
//! As the order of the terms of a sum is free, and that of the columns of values, a lane takes neighbours where the hardware's
//! order would scatter them. What the planes share is cut in registers: in shared memory two parts would take twice the room.

use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

use super::arguments::*;
use super::copies::*;
use super::fragments::*;
use super::softmax::*;
use super::tf32::*;
pub use super::tiles_f32::Config;
use super::tiles_f32::*;

/// Scores of a plane's rows: products of queries and keys.
#[cube]
fn score(
    q_tile: &SharedMemory<Vector<f32, Quad>>,
    k_tile: &SharedMemory<Vector<f32, Quad>>,
    s: &mut Parts,
    q_at: u32,
    k_at: u32,
    swap: u32,
    head_dim: u32,
    #[comptime] config: Config,
) {
    let per_row = comptime!(config.head_dim / 4);
    let fragments = comptime!(config.fragments as usize);
    let chains = comptime!(config.chains());
    let key_tiles = comptime!(config.tile_keys as usize / 8);
    let mut dim = 0u32;
    while dim < head_dim {
        let step = (dim / 4u32) ^ swap;
        let mut a = Sequence::<Cut16>::new();
        #[unroll]
        for f in 0..fragments {
            let at = q_at + step + comptime!(f as u32 * 16 * per_row);
            let upper = q_tile[at as usize];
            let lower = q_tile[(at + comptime!(8 * per_row)) as usize];
            a.push(cut_left(upper, lower));
        }
        #[unroll]
        for n in 0..key_tiles / chains {
            let mut b = Sequence::<Cut16>::new();
            #[unroll]
            for c in 0..chains {
                let at = k_at + step + comptime!((n * chains + c) as u32 * 8 * per_row);
                b.push(cut_right(k_tile[at as usize]));
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
    v_at: u32,
    v_swap: u32,
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
        load_values(v_pairs, v_at, v_swap, &mut held, n, 0usize, config);
        #[unroll]
        for d in 0..comptime!(dim_tiles / 2) {
            if comptime!(d + 1 < dim_tiles / 2) {
                load_values(
                    v_pairs,
                    v_at,
                    v_swap,
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
    let block_rows = comptime!(config.rows());
    let per_row = comptime!(config.head_dim / 4);
    let tile_keys = comptime!(config.tile_keys);
    let fragments = comptime!(config.fragments as usize);
    let dim_tiles = comptime!(config.head_dim as usize / 8);
    let key_tiles = comptime!(tile_keys as usize / 8);
    let scores = comptime!(config.scores);

    // The last rows first: under a causal mask they have the most keys.
    let block = args.row_blocks - 1u32 - CUBE_POS_X % args.row_blocks;
    let head = (CUBE_POS_X / args.row_blocks) % args.num_heads;
    let batch = CUBE_POS_X / args.row_blocks / args.num_heads;
    let s = sequence(args, buffers, batch);
    let row0 = block * block_rows;
    if row0 >= s.q_count {
        terminate!();
    }
    let q_first = s.q_first;
    let q_count = s.q_count;
    let k_count = s.k_count;
    let quads_qk = args.head_dim / 4u32;
    let quads_v = args.head_dim_v / 4u32;
    let q_rows = Rows {
        base: query_at(args, batch, s.q_first, head),
        token: args.q_token,
        page: 0u64,
        page_log2: 0u32,
        paged: false.runtime(),
        table: 0u64,
    };
    let k_rows = key_rows(args, &s, batch, head / args.group);
    let v_rows = value_rows(args, &s, batch, head / args.group);

    // Positions of the first and last query among the keys, and the keys that any row of the block sees.
    let shift = i32::cast_from(k_count) - i32::cast_from(q_count);
    let wl = i32::cast_from(args.window_left);
    let wr = i32::cast_from(args.window_right);
    let first = i32::cast_from(row0) + shift;
    let last = i32::cast_from(min(row0 + block_rows, q_count)) - 1 + shift;
    let end = max(min(i32::cast_from(k_count), last + wr), 0);
    let begin = max(first - wl + 1, 0);
    let tile_begin = u32::cast_from(begin) / tile_keys;
    let mut tile_end = (u32::cast_from(end) + comptime!(tile_keys - 1)) / tile_keys;
    if begin >= end {
        tile_end = tile_begin;
    }

    let lane = UNIT_POS_X % 32u32;
    let plane = UNIT_POS_X / 32u32;
    let group_row = lane / 4u32;
    let pair = lane % 4u32;
    let plane_row = plane * comptime!(config.fragments * 16);

    let mut q_tile = SharedMemory::<Vector<f32, Quad>>::new_aligned(
        comptime!((block_rows * per_row) as usize),
        128usize,
    );
    let mut k_tile = SharedMemory::<Vector<f32, Quad>>::new_aligned(
        comptime!((tile_keys * per_row) as usize),
        128usize,
    );
    let mut v_tile = SharedMemory::<Vector<f32, Quad>>::new_aligned(
        comptime!((tile_keys * per_row) as usize),
        128usize,
    );
    // Registers are scarce: what is wanted seldom is kept here, sums of rows by each lane itself.
    let mut totals = SharedMemory::<f32>::new(comptime!(config.threads() as usize * fragments * 2));
    // The barriers begin with what makes the rest seen.
    let mut kept = SharedMemory::<i32>::new(4usize);
    if UNIT_POS_X == 0u32 {
        kept[0] = i32::cast_from(row0);
        kept[1] = i32::cast_from(q_first);
        // Tiles within these bounds need no mask.
        kept[2] = last - wl + 1;
        kept[3] = min(i32::cast_from(k_count), first + wr);
    }
    let k_ready = Barrier::shared(comptime!(config.threads()), UNIT_POS_X == 0u32);
    let v_ready = Barrier::shared(comptime!(config.threads()), UNIT_POS_X == 0u32);

    if tile_begin < tile_end {
        copy_rows(
            q,
            &buffers.block_table,
            &mut q_tile,
            &q_rows,
            row0,
            q_count,
            quads_qk,
            block_rows,
            false,
            config,
        );
        copy_rows(
            k,
            &buffers.block_table,
            &mut k_tile,
            &k_rows,
            tile_begin * tile_keys,
            k_count,
            quads_qk,
            tile_keys,
            false,
            config,
        );
        arrive(&k_ready);
        copy_rows(
            v,
            &buffers.block_table,
            &mut v_tile,
            &v_rows,
            tile_begin * tile_keys,
            k_count,
            quads_v,
            tile_keys,
            true,
            config,
        );
        arrive(&v_ready);
    }

    // Where this lane's quads lie. A row's even and odd groups of four are exchanged in every other row of queries and keys.
    let swap = group_row % 2u32 * 4u32;
    let q_at = (plane_row + group_row) * per_row + pair;
    let k_at = group_row * per_row + pair;
    let v_at = pair * comptime!(4 * per_row) + (group_row ^ (pair % 2u32 * 4u32));
    let v_swap = pair / 2u32 * 8u32;
    let v_pairs = v_tile.to_slice().with_vector_size::<Pair>();

    let mut acc = Parts::new();
    begin_parts(&mut acc, comptime!(fragments * dim_tiles));
    let mut row_peak = Array::<f32>::new(fragments * 2);
    let mut row_total = Array::<f32>::new(fragments * 2);
    #[unroll]
    for i in 0..fragments * 2 {
        row_peak[i] = no_peak(scores);
        totals[total_of(i, config)] = 0.0f32;
    }

    // Adjusted scores are scaled already.
    let mut scale = args.scale;
    let mut rows = Sequence::<ScoreRow>::new();
    if comptime!(scores) {
        scale = 1.0f32;
        #[unroll]
        for i in 0..fragments * 2 {
            let row = row0 + plane_row + group_row + comptime!(i as u32 * 8);
            rows.push(score_row(
                args,
                buffers,
                &s,
                batch,
                min(row, q_count - 1u32),
                head,
                true,
            ));
        }
    }

    let mut phase = 0u32;
    let mut tile = tile_begin;
    while tile < tile_end {
        let key0 = tile * tile_keys;
        let more = tile + 1u32 < tile_end;

        k_ready.wait_parity(phase);
        let mut s = Parts::new();
        begin_parts(&mut s, comptime!(fragments * key_tiles));
        score(
            &q_tile,
            &k_tile,
            &mut s,
            q_at,
            k_at,
            swap,
            args.head_dim,
            config,
        );

        sync_cube();
        if more {
            copy_rows(
                k,
                &buffers.block_table,
                &mut k_tile,
                &k_rows,
                key0 + tile_keys,
                k_count,
                quads_qk,
                tile_keys,
                false,
                config,
            );
            arrive(&k_ready);
        }

        if comptime!(scores) {
            adjust(
                &mut s,
                args,
                buffers,
                &rows,
                key0,
                k_count,
                pair,
                comptime!(fragments * 2),
                key_tiles,
                true,
            );
        }
        let key0 = i32::cast_from(key0);
        if key0 < kept[2] || key0 + comptime!(tile_keys as i32) > kept[3] {
            mask(
                &mut s,
                first,
                plane_row + group_row,
                wl,
                wr,
                key0,
                k_count,
                pair,
                comptime!(fragments * 2),
                key_tiles,
                scores,
            );
        }

        #[unroll]
        for i in 0..fragments * 2 {
            row_total[i] = totals[total_of(i, config)];
        }
        raise_peaks(
            &s,
            &mut row_peak,
            &mut row_total,
            &mut acc,
            scale,
            comptime!(fragments * 2),
            key_tiles,
            dim_tiles,
        );
        exponentiate(
            &mut s,
            &row_peak,
            &mut row_total,
            scale,
            comptime!(fragments * 2),
            key_tiles,
        );
        #[unroll]
        for i in 0..fragments * 2 {
            totals[total_of(i, config)] = row_total[i];
        }

        v_ready.wait_parity(phase);
        accumulate(
            &s,
            &v_pairs,
            &mut acc,
            v_at,
            v_swap,
            args.head_dim_v,
            config,
        );
        sync_cube();
        if more {
            copy_rows(
                v,
                &buffers.block_table,
                &mut v_tile,
                &v_rows,
                u32::cast_from(key0) + tile_keys,
                k_count,
                quads_v,
                tile_keys,
                true,
                config,
            );
            arrive(&v_ready);
        }
        phase = phase ^ 1u32;
        tile += 1u32;
    }

    let row0 = u32::cast_from(kept[0]);
    let q_first = u32::cast_from(kept[1]);
    #[unroll]
    for i in 0..fragments * 2 {
        let row = row0 + plane_row + group_row + comptime!(i as u32 * 8);
        let end = finish(
            args,
            buffers,
            row_peak[i] * scale,
            row_sum(totals[total_of(i, config)]),
            head,
            true.runtime(),
        );
        if row < q_count {
            if has(args, flag::LSE) && pair == 0u32 {
                buffers.lse[lse_at(args, batch, q_first + row, head) as usize] = end.lse;
            }
            let at = out_at(args, batch, q_first + row, head);
            store_row(&acc, out, at, end.factor, pair, quads_v, i, config);
        }
    }
}

/// Where a lane keeps what it has summed of a row.
#[cube]
fn total_of(#[comptime] row: usize, #[comptime] config: Config) -> usize {
    (UNIT_POS_X + comptime!(row as u32 * config.threads())) as usize
}
