//! `dq` on tensor cores, of f16 and bf16: a block of queries of one head, past which its keys go by.
//!
//! Each plane owns 16 of the rows: their scores, the products of `dout` and values, and the sums of the
//! keys that the gradients of both weigh.

use cubecl::prelude::*;

use super::arguments::*;
use super::tiles::*;
use crate::attention::arguments::*;
use crate::attention::block::*;
use crate::attention::copies::arrive;
use crate::attention::fragments::*;
use crate::attention::products::*;
use crate::attention::softmax::{Parts, begin_parts};
use crate::attention::tiles::{Config, copy_rows, lines_of};

/// What a lane knows of its two rows: their statistics, and the keys `low..high` that they see.
#[derive(CubeType)]
pub struct LaneRows {
    pub rows: Sequence<ScoreRow>,
    pub lse: Array<f32>,
    pub delta: Array<f32>,
    pub low: Array<i32>,
    pub high: Array<i32>,
}

/// Grid: row blocks × heads × sequences, the first fastest.
#[cube]
pub fn queries<E: Float>(
    q: &Lines<E>,
    k: &Lines<E>,
    v: &Lines<E>,
    dout: &Lines<E>,
    dq: &mut Lines<E>,
    statistics: &Array<f32>,
    buffers: &Buffers,
    args: &Args,
    strides: &Strides,
    #[comptime] config: Config,
) {
    let tile_keys = comptime!(config.tile_keys);
    let key_parts = comptime!(config.tile_keys as usize / 8);
    let block = query_block(args, buffers, comptime!(config.rows()));
    if block.row0 >= block.span.q_count {
        terminate!();
    }
    let sources = sources(args, &block, 8u32);
    let seen = seen_tiles(args, &block, comptime!(config.rows()), tile_keys);
    let lane = this_lane();
    let plane_row = lane.plane * 16u32;
    let work = Work {
        block,
        sources,
        seen,
        lane,
        plane_row,
    };

    let mut tiles = tiles::<E>(config);
    if work.seen.begin < work.seen.end {
        copy_kept::<E>(&mut tiles, q, dout, buffers, strides, &work, config);
    }
    let of_lane = lane_rows(statistics, buffers, args, strides, &work);
    let lines = lines_of(work.lane.lane, work.plane_row, config);
    let mut acc = Parts::new();
    begin_parts(&mut acc, comptime!(config.head_dim as usize / 8));

    let mut phase = 0u32;
    let mut tile = work.seen.begin;
    while tile < work.seen.end {
        let key0 = tile * tile_keys;
        copy_passing::<E>(&mut tiles, k, v, buffers, &work, key0, config);
        tiles.ready.wait_parity(phase);
        let mut s = Parts::new();
        begin_parts(&mut s, key_parts);
        score::<E>(
            &tiles.kept,
            &tiles.passing,
            &mut s,
            lines.q,
            lines.k,
            config,
        );
        let mut d = Parts::new();
        begin_parts(&mut d, key_parts);
        score::<E>(
            &tiles.kept_v,
            &tiles.passing_v,
            &mut d,
            lines.q,
            lines.k,
            config,
        );
        differentiate(
            &s, &mut d, args, buffers, &work, &of_lane, key0, config, false, true,
        );
        accumulate::<E>(&d, &tiles.passing, &mut acc, lines.v, config);
        sync_cube();
        phase = phase ^ 1u32;
        tile += 1u32;
    }

    let block = &work.block;
    let at = dq_at(strides, &block.span, block.batch, block.head);
    store::<E>(
        &mut tiles.kept,
        &acc,
        dq,
        &at,
        block.row0,
        block.span.q_count,
        work.sources.width_qk,
        args.scale,
        &work.lane,
        config,
    );
}

/// Starts copying the block's queries and their gradients; they are there when the first keys are.
#[cube]
fn copy_kept<E: Float>(
    tiles: &mut Tiles<E>,
    q: &Lines<E>,
    dout: &Lines<E>,
    buffers: &Buffers,
    strides: &Strides,
    work: &Work,
    #[comptime] config: Config,
) {
    let block = &work.block;
    copy_rows::<E>(
        q,
        &buffers.block_table,
        &mut tiles.kept,
        &work.sources.q,
        block.row0,
        block.span.q_count,
        work.sources.width_qk,
        comptime!(config.rows()),
        config,
    );
    let at = rows(&dout_at(strides, &block.span, block.batch, block.head));
    copy_rows::<E>(
        dout,
        &buffers.block_table,
        &mut tiles.kept_v,
        &at,
        block.row0,
        block.span.q_count,
        work.sources.width_v,
        comptime!(config.rows()),
        config,
    );
}

/// Starts copying a tile of keys and values.
#[cube]
fn copy_passing<E: Float>(
    tiles: &mut Tiles<E>,
    k: &Lines<E>,
    v: &Lines<E>,
    buffers: &Buffers,
    work: &Work,
    first: u32,
    #[comptime] config: Config,
) {
    copy_rows::<E>(
        k,
        &buffers.block_table,
        &mut tiles.passing,
        &work.sources.k,
        first,
        work.block.span.k_count,
        work.sources.width_qk,
        comptime!(config.tile_keys),
        config,
    );
    copy_rows::<E>(
        v,
        &buffers.block_table,
        &mut tiles.passing_v,
        &work.sources.v,
        first,
        work.block.span.k_count,
        work.sources.width_v,
        comptime!(config.tile_keys),
        config,
    );
    arrive(&tiles.ready);
}

#[cube]
pub fn lane_rows(
    statistics: &Array<f32>,
    buffers: &Buffers,
    args: &Args,
    strides: &Strides,
    work: &Work,
) -> LaneRows {
    let block = &work.block;
    let mut rows = Sequence::<ScoreRow>::new();
    push_score_rows(&mut rows, args, buffers, work, 2usize);
    let mut lse = Array::<f32>::new(2usize);
    let mut delta = Array::<f32>::new(2usize);
    let mut low = Array::<i32>::new(2usize);
    let mut high = Array::<i32>::new(2usize);
    let first = statistics_at(args, strides, &block.span, block.batch, block.head);
    #[unroll]
    for i in 0..2usize {
        let offset = comptime!(i as u32 * 8);
        let row = block.row0 + work.plane_row + work.lane.group_row + offset;
        let at = first + u64::cast_from(min(row, block.span.q_count - 1u32));
        lse[i] = statistics[at as usize];
        delta[i] = statistics[(at + half(args, strides)) as usize];
        let position = rows.index(i).position;
        low[i] = position - work.seen.window_left + 1;
        let end = min(
            i32::cast_from(block.span.k_count),
            position + work.seen.window_right,
        );
        high[i] = select(row < block.span.q_count, end, 0);
    }
    LaneRows {
        rows,
        lse,
        delta,
        low,
        high,
    }
}

/// Turns the products of `dout` and values of keys from `key0` on into gradients of the scores, those
/// before a softcap or those behind it.
#[cube]
pub fn differentiate(
    s: &Parts,
    d: &mut Parts,
    args: &Args,
    buffers: &Buffers,
    work: &Work,
    of_lane: &LaneRows,
    key0: u32,
    #[comptime] config: Config,
    #[comptime] precise: bool,
    #[comptime] before_cap: bool,
) {
    let last = work.block.span.k_count - 1u32;
    #[unroll]
    for i in 0..2usize {
        #[unroll]
        for n in 0..comptime!(config.tile_keys as usize / 8) {
            let products = s.index(n)[i];
            let part = d.index_mut(n);
            let mut x = part[i];
            #[unroll]
            for c in 0..2usize {
                let key = key0 + work.lane.pair * 2u32 + comptime!((n * 8 + c) as u32);
                let both = weigh(
                    args,
                    buffers,
                    of_lane.rows.index(i),
                    min(key, last),
                    products[c],
                    x[c],
                    of_lane.lse[i],
                    of_lane.delta[i],
                    comptime!(config.scores),
                    precise,
                    before_cap,
                );
                let at = i32::cast_from(key);
                let visible = at >= of_lane.low[i] && at < of_lane.high[i];
                x[c] = select(visible, both.score, 0.0f32);
            }
            part[i] = x;
        }
    }
}
