//! `dk` and `dv` on tensor cores, of f16 and bf16: a block of keys of one key head, past which the
//! queries go by that see any of them, of every head that shares the key head.
//!
//! Scores are transposed: each plane owns 16 of the keys, whose weights and gradients are the left sides of
//! the products with `dout` and queries as they come. Large heads have no room in registers for the sums
//! of both gradients, and get a kernel for each.

use cubecl::prelude::*;

use super::arguments::*;
use super::tiles::*;
use crate::attention::arguments::*;
use crate::attention::copies::arrive;
use crate::attention::fragments::*;
use crate::attention::products::*;
use crate::attention::softmax::{Parts, begin_parts};
use crate::attention::tiles::{Config, MatrixLines, copy_rows, lines_of};

/// Which gradients a kernel computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sums {
    pub keys: bool,
    pub values: bool,
}

/// All that a lane has to do.
#[derive(CubeType)]
pub struct Work {
    pub block: KeyBlock,
    pub lane: Lane,
    pub width_qk: u32,
    pub width_v: u32,
    /// The queries `low..high` that see each of the lane's two keys.
    low: Array<i32>,
    high: Array<i32>,
}

/// A head of those that share the block's key head.
#[derive(CubeType, Clone)]
pub struct Head {
    head: u32,
    pub q: Rows,
    pub dout: Rows,
    statistics: u64,
}

/// Grid: key blocks × key heads × sequences, the first fastest.
#[cube]
pub fn keys<E: Float>(
    q: &Lines<E>,
    k: &Lines<E>,
    v: &Lines<E>,
    dout: &Lines<E>,
    dk: &mut Lines<E>,
    dv: &mut Lines<E>,
    statistics: &Array<f32>,
    buffers: &Buffers,
    args: &Args,
    strides: &Strides,
    #[comptime] config: Config,
    #[comptime] sums: Sums,
) {
    let tile_rows = comptime!(config.tile_keys);
    let parts = comptime!(config.tile_keys as usize / 8);
    let dk_parts = comptime!(config.head_dim as usize / 8 * sums.keys as usize);
    let dv_parts = comptime!(config.head_dim as usize / 8 * sums.values as usize);
    let block = key_block(args, strides, buffers, comptime!(config.rows()));
    if block.key0 >= block.end {
        terminate!();
    }
    let work = work(args, block, 8u32);
    let block = &work.block;
    let mut tiles = tiles::<E>(config);
    let mut of_rows = SharedMemory::<f32>::new(comptime!(2 * config.tile_keys as usize));
    if block.begin < block.seen {
        copy_kept::<E>(&mut tiles, k, v, buffers, args, &work, config);
    }
    let lines = lines_of(work.lane.lane, work.lane.plane * 16u32, config);
    let mut dk_acc = Parts::new();
    begin_parts(&mut dk_acc, dk_parts);
    let mut dv_acc = Parts::new();
    begin_parts(&mut dv_acc, dv_parts);

    let mut phase = 0u32;
    let mut of_group = 0u32;
    while of_group < args.group {
        let head = head(args, strides, &work, of_group);
        let mut row0 = block.begin;
        while row0 < block.seen {
            copy_passing::<E>(&mut tiles, q, dout, buffers, &work, &head, row0, config);
            let half = half(args, strides);
            copy_statistics(
                &mut of_rows,
                statistics,
                half,
                &work,
                &head,
                row0,
                tile_rows,
            );
            arrive(&tiles.ready);
            tiles.ready.wait_parity(phase);
            sync_cube();
            let mut s = Parts::new();
            begin_parts(&mut s, parts);
            let mut d = Parts::new();
            begin_parts(&mut d, parts);
            multiply::<E>(&mut s, &mut d, &tiles, &lines, config, sums);
            differentiate(
                &mut s, &mut d, &of_rows, args, buffers, &work, &head, row0, config, false,
            );
            if comptime!(sums.values) {
                accumulate::<E>(&s, &tiles.passing_v, &mut dv_acc, lines.v, config);
            }
            if comptime!(sums.keys) {
                accumulate::<E>(&d, &tiles.passing, &mut dk_acc, lines.v, config);
            }
            sync_cube();
            phase = phase ^ 1u32;
            row0 += tile_rows;
        }
        of_group += 1u32;
    }
    if comptime!(sums.keys) {
        if has(args, flag::DK) {
            let at = dk_at(strides, &block.span, block.batch, block.key_head);
            let width = work.width_qk;
            store_keys::<E>(
                &mut tiles.kept,
                &dk_acc,
                dk,
                &at,
                &work,
                width,
                args.scale,
                config,
            );
        }
    }
    if comptime!(sums.values) {
        if has(args, flag::DV) {
            let at = dv_at(strides, &block.span, block.batch, block.key_head);
            let width = work.width_v;
            store_keys::<E>(
                &mut tiles.kept_v,
                &dv_acc,
                dv,
                &at,
                &work,
                width,
                1.0f32,
                config,
            );
        }
    }
}

/// Products of a plane's keys with queries, and of its values with `dout`, which `dv` does not need.
#[cube]
fn multiply<E: Float>(
    s: &mut Parts,
    d: &mut Parts,
    tiles: &Tiles<E>,
    lines: &MatrixLines,
    #[comptime] config: Config,
    #[comptime] sums: Sums,
) {
    let (q, k) = (lines.q, lines.k);
    score::<E>(&tiles.kept, &tiles.passing, s, q, k, config);
    if comptime!(sums.keys) {
        score::<E>(&tiles.kept_v, &tiles.passing_v, d, q, k, config);
    }
}

/// Stores a plane's keys of a gradient, and zeros for those of the padding.
#[cube]
fn store_keys<E: Float>(
    tile: &mut SharedMemory<Vector<E, Line>>,
    acc: &Parts,
    to: &mut Lines<E>,
    at: &Place,
    work: &Work,
    width: u32,
    factor: f32,
    #[comptime] config: Config,
) {
    let (first, end) = (work.block.key0, work.block.end);
    store::<E>(
        tile, acc, to, at, first, end, width, factor, &work.lane, config,
    );
}

/// What a lane has to do for a block; widths are in units of so many elements.
#[cube]
pub fn work(args: &Args, block: KeyBlock, #[comptime] unit: u32) -> Work {
    let lane = this_lane();
    let mut low = Array::<i32>::new(2usize);
    let mut high = Array::<i32>::new(2usize);
    let q_count = i32::cast_from(block.span.q_count);
    let shift = i32::cast_from(block.span.k_count) - q_count;
    #[unroll]
    for i in 0..2usize {
        let offset = comptime!(i as u32 * 8);
        let key = block.key0 + lane.plane * 16u32 + lane.group_row + offset;
        // As in `key_block`: the query at the key's own position, and those that far from it.
        let own = i32::cast_from(key) - shift;
        low[i] = own - i32::cast_from(args.window_right) + 1;
        let end = own + min(q_count - own, i32::cast_from(args.window_left));
        high[i] = select(key < block.span.k_count, end, 0);
    }
    Work {
        block,
        lane,
        width_qk: args.head_dim / unit,
        width_v: args.head_dim_v / unit,
        low,
        high,
    }
}

#[cube]
pub fn head(args: &Args, strides: &Strides, work: &Work, of_group: u32) -> Head {
    let block = &work.block;
    let head = block.key_head * args.group + of_group;
    Head {
        head,
        q: rows(&queries_at(args, &block.span, block.batch, head)),
        dout: rows(&dout_at(strides, &block.span, block.batch, head)),
        statistics: statistics_at(args, strides, &block.span, block.batch, head),
    }
}

/// Starts copying the block's keys and values; they are there when the first queries are.
#[cube]
fn copy_kept<E: Float>(
    tiles: &mut Tiles<E>,
    k: &Lines<E>,
    v: &Lines<E>,
    buffers: &Buffers,
    args: &Args,
    work: &Work,
    #[comptime] config: Config,
) {
    let block = &work.block;
    let at = rows(&keys_at(args, &block.span, block.batch, block.key_head));
    copy_rows::<E>(
        k,
        &buffers.block_table,
        &mut tiles.kept,
        &at,
        block.key0,
        block.span.k_count,
        work.width_qk,
        comptime!(config.rows()),
        config,
    );
    let at = rows(&values_at(args, &block.span, block.batch, block.key_head));
    copy_rows::<E>(
        v,
        &buffers.block_table,
        &mut tiles.kept_v,
        &at,
        block.key0,
        block.span.k_count,
        work.width_v,
        comptime!(config.rows()),
        config,
    );
}

/// Starts copying a tile of queries and their gradients.
#[cube]
fn copy_passing<E: Float>(
    tiles: &mut Tiles<E>,
    q: &Lines<E>,
    dout: &Lines<E>,
    buffers: &Buffers,
    work: &Work,
    head: &Head,
    first: u32,
    #[comptime] config: Config,
) {
    let end = work.block.span.q_count;
    copy_rows::<E>(
        q,
        &buffers.block_table,
        &mut tiles.passing,
        &head.q,
        first,
        end,
        work.width_qk,
        comptime!(config.tile_keys),
        config,
    );
    copy_rows::<E>(
        dout,
        &buffers.block_table,
        &mut tiles.passing_v,
        &head.dout,
        first,
        end,
        work.width_v,
        comptime!(config.tile_keys),
        config,
    );
}

/// Copies the statistics of a tile of rows, the last row's in place of those past the end: their LSEs,
/// then their deltas.
#[cube]
pub fn copy_statistics(
    to: &mut SharedMemory<f32>,
    statistics: &Array<f32>,
    half: u64,
    work: &Work,
    head: &Head,
    first: u32,
    #[comptime] count: u32,
) {
    if UNIT_POS_X < count {
        let row = min(first + UNIT_POS_X, work.block.span.q_count - 1u32);
        let at = head.statistics + u64::cast_from(row);
        to[UNIT_POS_X as usize] = statistics[at as usize];
        to[(UNIT_POS_X + count) as usize] = statistics[(at + half) as usize];
    }
}

/// Turns the products of keys and queries from `row0` on into weights, and those of values and `dout`
/// into gradients of the scores.
#[cube]
pub fn differentiate(
    s: &mut Parts,
    d: &mut Parts,
    of_rows: &SharedMemory<f32>,
    args: &Args,
    buffers: &Buffers,
    work: &Work,
    head: &Head,
    row0: u32,
    #[comptime] config: Config,
    #[comptime] precise: bool,
) {
    let block = &work.block;
    let scores = comptime!(config.scores);
    #[unroll]
    for n in 0..comptime!(config.tile_keys as usize / 8) {
        #[unroll]
        for c in 0..2usize {
            let column = work.lane.pair * 2u32 + comptime!((n * 8 + c) as u32);
            let lse = of_rows[column as usize];
            let delta = of_rows[(column + comptime!(config.tile_keys)) as usize];
            let query = row0 + column;
            let row = score_row(
                args,
                buffers,
                &block.span,
                block.batch,
                min(query, block.span.q_count - 1u32),
                head.head,
                scores,
            );
            #[unroll]
            for i in 0..2usize {
                let offset = comptime!(i as u32 * 8);
                let key = block.key0 + work.lane.plane * 16u32 + work.lane.group_row + offset;
                let weights = s.index_mut(n);
                let gradients = d.index_mut(n);
                let (mut x, mut y) = (weights[i], gradients[i]);
                let both = weigh(
                    args,
                    buffers,
                    &row,
                    min(key, block.span.k_count - 1u32),
                    x[c],
                    y[c],
                    lse,
                    delta,
                    scores,
                    precise,
                    true,
                );
                let at = i32::cast_from(query);
                let visible = at >= work.low[i] && at < work.high[i];
                x[c] = select(visible, both.weight, 0.0f32);
                y[c] = select(visible, both.score, 0.0f32);
                weights[i] = x;
                gradients[i] = y;
            }
        }
    }
}
