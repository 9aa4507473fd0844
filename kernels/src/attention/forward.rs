//! Flash attention on tensor cores for f16 and bf16 (FlashAttention-2, Dao 2023, arXiv:2307.08691).
//!
//! A cube owns a block of query rows of one head and walks over the keys in tiles. Each plane owns 16 (or 32) of the rows, so
//! softmax needs no exchange between planes. K and V have one buffer each: the next K arrives during the product with V, the next V
//! during the next scores.

use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

use super::arguments::*;
use super::copies::*;
use super::fragments::*;
use super::softmax::*;

/// A kernel's shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Config {
    /// Room for a head: the dimension rounded up.
    pub head_dim: u32,
    /// Keys per tile.
    pub tile_keys: u32,
    /// Planes of a cube.
    pub planes: u32,
    /// 16-row fragments per plane.
    pub fragments: u32,
    /// Whether scores have more than a scale and the limits of causality and windows.
    pub scores: bool,
}

impl Config {
    /// Threads of a cube.
    pub fn threads(&self) -> u32 {
        self.planes * 32
    }

    /// Query rows of a cube.
    pub fn rows(&self) -> u32 {
        self.planes * self.fragments * 16
    }

    /// Lines of one row in shared memory: one more than it has, so that the rows of a matrix lie in different banks.
    pub fn pitch(&self) -> u32 {
        self.head_dim / 8 + 1
    }
}

/// Starts copying rows `first..` to shared memory; rows from `end` on, and lines from `lines` on, become zero.
#[cube]
fn copy_rows<E: Float>(
    source: &Array<Vector<E, Line>>,
    table: &Array<u32>,
    tile: &mut SharedMemory<Vector<E, Line>>,
    rows: &Rows,
    first: u32,
    end: u32,
    lines: u32,
    #[comptime] count: u32,
    #[comptime] config: Config,
) {
    let per_row = comptime!(config.head_dim / 8);
    let step = comptime!(config.threads() / per_row);
    let line = UNIT_POS_X % per_row;
    let mut row = UNIT_POS_X / per_row;
    let mut to = row * comptime!(config.pitch()) + line;
    if rows.paged {
        while row < count {
            let key = first + row;
            let from = row_at(rows, table, min(key, end - 1u32)) + u64::cast_from(line);
            copy_line::<E, Line>(source, tile, from, to, key < end && line < lines);
            row += step;
            to += comptime!(step * config.pitch());
        }
    } else {
        let mut from = rows.base + u64::cast_from(first + row) * rows.token + u64::cast_from(line);
        let advance = rows.token * comptime!(step as u64);
        #[unroll]
        for i in 0..comptime!(count / step) {
            let key = first + row + comptime!(i * step);
            copy_line::<E, Line>(
                source,
                tile,
                from,
                to + comptime!(i * step * config.pitch()),
                key < end && line < lines,
            );
            from += advance;
        }
    }
}

/// Scores of a plane's rows: products of queries and keys.
#[cube]
fn score<E: Float>(
    q_tile: &SharedMemory<Vector<E, Line>>,
    k_tile: &SharedMemory<Vector<E, Line>>,
    s: &mut Parts,
    q_line: u32,
    k_line: u32,
    #[comptime] config: Config,
) {
    let pitch = comptime!(config.pitch());
    let fragments = comptime!(config.fragments as usize);
    let dim_steps = comptime!(config.head_dim as usize / 16);
    let key_steps = comptime!(config.tile_keys as usize / 16);
    #[unroll]
    for d in 0..dim_steps {
        let mut a = Sequence::<Array<Vector<E, Pair>>>::new();
        #[unroll]
        for f in 0..fragments {
            let line = q_line + comptime!(f as u32 * 16 * pitch + d as u32 * 2);
            a.push(load_matrices::<E>(q_tile, line, false));
        }
        #[unroll]
        for n in 0..key_steps {
            let line = k_line + comptime!(n as u32 * 16 * pitch + d as u32 * 2);
            let b = load_matrices::<E>(k_tile, line, false);
            let b0 = registers::<E>(&b, 0usize);
            let b1 = registers::<E>(&b, 2usize);
            #[unroll]
            for f in 0..fragments {
                mma::<E>(a.index(f), &b0, s.index_mut((f * key_steps + n) * 2));
                mma::<E>(a.index(f), &b1, s.index_mut((f * key_steps + n) * 2 + 1));
            }
        }
    }
}

/// Adds the products of a plane's exponentials and values.
#[cube]
fn accumulate<E: Float>(
    s: &Parts,
    v_tile: &SharedMemory<Vector<E, Line>>,
    acc: &mut Parts,
    v_line: u32,
    #[comptime] config: Config,
) {
    let pitch = comptime!(config.pitch());
    let fragments = comptime!(config.fragments as usize);
    let dim_steps = comptime!(config.head_dim as usize / 16);
    let key_steps = comptime!(config.tile_keys as usize / 16);
    #[unroll]
    for n in 0..key_steps {
        let mut a = Sequence::<Array<Vector<E, Pair>>>::new();
        #[unroll]
        for f in 0..fragments {
            let mut p = Array::<Vector<E, Pair>>::new(4usize);
            let left = s.index((f * key_steps + n) * 2);
            let right = s.index((f * key_steps + n) * 2 + 1);
            p[0] = Vector::cast_from(left[0]);
            p[1] = Vector::cast_from(left[1]);
            p[2] = Vector::cast_from(right[0]);
            p[3] = Vector::cast_from(right[1]);
            a.push(p);
        }
        #[unroll]
        for d in 0..dim_steps {
            let line = v_line + comptime!(n as u32 * 16 * pitch + d as u32 * 2);
            let b = load_matrices::<E>(v_tile, line, true);
            let b0 = registers::<E>(&b, 0usize);
            let b1 = registers::<E>(&b, 2usize);
            #[unroll]
            for f in 0..fragments {
                mma::<E>(a.index(f), &b0, acc.index_mut((f * dim_steps + d) * 2));
                mma::<E>(a.index(f), &b1, acc.index_mut((f * dim_steps + d) * 2 + 1));
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
    batch: u32,
    head: u32,
    q_first: u32,
    q_count: u32,
    row0: u32,
    lane: u32,
    plane_row: u32,
    group_row: u32,
    pair: u32,
    lines_v: u32,
    #[comptime] config: Config,
) {
    let pitch = comptime!(config.pitch());
    let fragments = comptime!(config.fragments as usize);
    let dim_steps = comptime!(config.head_dim as usize / 16);
    let mut staging = q_tile.to_slice_mut().with_vector_size::<Pair>();
    sync_plane();
    #[unroll]
    for i in 0..fragments * 2 {
        #[unroll]
        for n in 0..dim_steps * 2 {
            let row = plane_row + group_row + comptime!(i as u32 * 8);
            let at = row * comptime!(pitch * 4) + pair + comptime!(n as u32 * 4);
            let part = acc.index(comptime!(i / 2 * dim_steps * 2) + n);
            staging[at as usize] = Vector::cast_from(part[comptime!(i % 2)]);
        }
    }
    sync_plane();
    let per_row = comptime!(config.head_dim / 8);
    #[unroll]
    for i in 0..comptime!(fragments as u32 * 16 * per_row / 32) {
        let index = lane + comptime!(i * 32);
        let row = plane_row + index / per_row;
        let line = index % per_row;
        if row0 + row < q_count && line < lines_v {
            let to = out_at(args, batch, q_first + row0 + row, head) + u64::cast_from(line);
            out[to as usize] = q_tile[(row * pitch + line) as usize];
        }
    }
}

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
    let block_rows = comptime!(config.rows());
    let pitch = comptime!(config.pitch());
    let tile_keys = comptime!(config.tile_keys);
    let fragments = comptime!(config.fragments as usize);
    let dim_steps = comptime!(config.head_dim as usize / 16);
    let key_steps = comptime!(tile_keys as usize / 16);
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
    let lines_qk = args.head_dim / 8u32;
    let lines_v = args.head_dim_v / 8u32;
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
    // Tiles within these bounds need no mask.
    let clear_begin = last - wl + 1;
    let clear_end = min(i32::cast_from(k_count), first + wr);

    let lane = UNIT_POS_X % 32u32;
    let plane = UNIT_POS_X / 32u32;
    let group_row = lane / 4u32;
    let pair = lane % 4u32;
    let plane_row = plane * comptime!(config.fragments * 16);

    let mut q_tile = SharedMemory::<Vector<E, Line>>::new_aligned(
        comptime!((block_rows * pitch) as usize),
        128usize,
    );
    let mut k_tile = SharedMemory::<Vector<E, Line>>::new_aligned(
        comptime!((tile_keys * pitch) as usize),
        128usize,
    );
    let mut v_tile = SharedMemory::<Vector<E, Line>>::new_aligned(
        comptime!((tile_keys * pitch) as usize),
        128usize,
    );
    let k_ready = Barrier::shared(comptime!(config.threads()), UNIT_POS_X == 0u32);
    let v_ready = Barrier::shared(comptime!(config.threads()), UNIT_POS_X == 0u32);

    let k_end = u32::cast_from(end);
    if tile_begin < tile_end {
        copy_rows::<E>(
            q,
            &buffers.block_table,
            &mut q_tile,
            &q_rows,
            row0,
            q_count,
            lines_qk,
            block_rows,
            config,
        );
        copy_rows::<E>(
            k,
            &buffers.block_table,
            &mut k_tile,
            &k_rows,
            tile_begin * tile_keys,
            k_count,
            lines_qk,
            tile_keys,
            config,
        );
        arrive(&k_ready);
        copy_rows::<E>(
            v,
            &buffers.block_table,
            &mut v_tile,
            &v_rows,
            tile_begin * tile_keys,
            k_count,
            lines_v,
            tile_keys,
            config,
        );
        arrive(&v_ready);
    }

    // Where this lane's rows begin in the tiles, for the three shapes of matrix loads.
    let q_line = (plane_row + lane % 16u32) * pitch + lane / 16u32;
    let k_line = (lane % 8u32 + lane / 16u32 * 8u32) * pitch + (lane / 8u32) % 2u32;
    let v_line = lane % 16u32 * pitch + lane / 16u32;

    let mut acc = Parts::new();
    begin_parts(&mut acc, comptime!(fragments * dim_steps * 2));
    let mut row_peak = Array::<f32>::new(fragments * 2);
    let mut row_total = Array::<f32>::new(fragments * 2);
    #[unroll]
    for i in 0..fragments * 2 {
        row_peak[i] = no_peak(scores);
        row_total[i] = 0.0f32;
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
        begin_parts(&mut s, comptime!(fragments * key_steps * 2));
        score::<E>(&q_tile, &k_tile, &mut s, q_line, k_line, config);

        sync_cube();
        if more {
            copy_rows::<E>(
                k,
                &buffers.block_table,
                &mut k_tile,
                &k_rows,
                key0 + tile_keys,
                k_count,
                lines_qk,
                tile_keys,
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
                comptime!(key_steps * 2),
                false,
            );
        }
        let key0 = i32::cast_from(key0);
        if key0 < clear_begin || key0 + comptime!(tile_keys as i32) > clear_end {
            mask(
                &mut s,
                first,
                plane_row + group_row,
                wl,
                wr,
                key0,
                k_end,
                pair,
                comptime!(fragments * 2),
                comptime!(key_steps * 2),
                scores,
            );
        }

        raise_peaks(
            &s,
            &mut row_peak,
            &mut row_total,
            &mut acc,
            scale,
            comptime!(fragments * 2),
            comptime!(key_steps * 2),
            comptime!(dim_steps * 2),
        );
        exponentiate(
            &mut s,
            &row_peak,
            &mut row_total,
            scale,
            comptime!(fragments * 2),
            comptime!(key_steps * 2),
        );

        v_ready.wait_parity(phase);
        accumulate::<E>(&s, &v_tile, &mut acc, v_line, config);
        sync_cube();
        if more {
            copy_rows::<E>(
                v,
                &buffers.block_table,
                &mut v_tile,
                &v_rows,
                u32::cast_from(key0) + tile_keys,
                k_count,
                lines_v,
                tile_keys,
                config,
            );
            arrive(&v_ready);
        }
        phase = phase ^ 1u32;
        tile += 1u32;
    }

    let f32_out = has(args, flag::OUT_F32);
    #[unroll]
    for i in 0..fragments * 2 {
        let row = row0 + plane_row + group_row + comptime!(i as u32 * 8);
        let end = finish(
            args,
            buffers,
            row_peak[i] * scale,
            row_sum(row_total[i]),
            head,
            true.runtime(),
        );
        #[unroll]
        for n in 0..dim_steps * 2 {
            let part = acc.index_mut(comptime!(i / 2 * dim_steps * 2) + n);
            part[comptime!(i % 2)] = part[comptime!(i % 2)] * Vector::new(end.factor);
        }
        if has(args, flag::LSE) && pair == 0u32 && row < q_count {
            buffers.lse[lse_at(args, batch, q_first + row, head) as usize] = end.lse;
        }
        if f32_out && row < q_count {
            let at = out_at(args, batch, q_first + row, head) * 8u64;
            #[unroll]
            for n in 0..dim_steps * 2 {
                if comptime!(n as u32) < lines_v {
                    let to = (at + u64::cast_from(pair * 2u32 + comptime!(n as u32 * 8))) as usize;
                    let two = acc.index(comptime!(i / 2 * dim_steps * 2) + n)[comptime!(i % 2)];
                    buffers.out_f32[to] = two[0];
                    buffers.out_f32[to + 1] = two[1];
                }
            }
        }
    }
    if !f32_out {
        store_lines::<E>(
            &mut q_tile,
            &acc,
            out,
            args,
            batch,
            head,
            q_first,
            q_count,
            row0,
            lane,
            plane_row,
            group_row,
            pair,
            lines_v,
            config,
        );
    }
}
