//! `dq` on tensor cores, of f32: what [`queries`](super::queries) does, as accurate as f32 is.

use cubecl::prelude::*;

use super::arguments::*;
use super::queries::{differentiate, lane_rows};
use super::tiles::rows;
use super::tiles_f32::*;
use crate::attention::arguments::*;
use crate::attention::block::*;
use crate::attention::copies::arrive;
use crate::attention::fragments::*;
use crate::attention::softmax::{Parts, begin_parts};
use crate::attention::tiles::Config;

/// Grid: row blocks × heads × sequences, the first fastest.
#[cube]
pub fn queries_f32(
    q: &Quads,
    k: &Quads,
    v: &Quads,
    dout: &Quads,
    dq: &mut Quads,
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
    let sources = sources(args, &block, 4u32);
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

    let mut tiles = tiles(config);
    if work.seen.begin < work.seen.end {
        copy_kept(&mut tiles, q, dout, strides, &work, config);
    }
    let of_lane = lane_rows(statistics, buffers, args, strides, &work);
    let quads = lane_quads(&work.lane, config);
    let mut acc = Parts::new();
    begin_parts(&mut acc, comptime!(config.head_dim as usize / 8));

    let mut phase = 0u32;
    let mut tile = work.seen.begin;
    while tile < work.seen.end {
        let key0 = tile * tile_keys;
        copy_passing(&mut tiles, k, v, &work, key0, config);
        tiles.ready.wait_parity(phase);
        let mut s = Parts::new();
        begin_parts(&mut s, key_parts);
        score(
            &tiles.kept,
            &tiles.passing,
            &mut s,
            &quads,
            args.head_dim,
            config,
        );
        let mut d = Parts::new();
        begin_parts(&mut d, key_parts);
        score(
            &tiles.kept_v,
            &tiles.passing_v,
            &mut d,
            &quads,
            args.head_dim_v,
            config,
        );
        differentiate(
            &s, &mut d, args, buffers, &work, &of_lane, key0, config, true, true,
        );
        accumulate(&d, &tiles.passing, &mut acc, &quads, args.head_dim, config);
        sync_cube();
        phase = phase ^ 1u32;
        tile += 1u32;
    }

    let block = &work.block;
    let at = dq_at(strides, &block.span, block.batch, block.head);
    store(
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
fn copy_kept(
    tiles: &mut Tiles,
    q: &Quads,
    dout: &Quads,
    strides: &Strides,
    work: &Work,
    #[comptime] config: Config,
) {
    let (block, sources) = (&work.block, &work.sources);
    let end = block.span.q_count;
    let count = comptime!(config.rows());
    copy_quads(
        q,
        &mut tiles.kept,
        &sources.q,
        block.row0,
        end,
        sources.width_qk,
        count,
        config,
    );
    let at = rows(&dout_at(strides, &block.span, block.batch, block.head));
    copy_quads(
        dout,
        &mut tiles.kept_v,
        &at,
        block.row0,
        end,
        sources.width_v,
        count,
        config,
    );
}

/// Starts copying a tile of keys and values.
#[cube]
fn copy_passing(
    tiles: &mut Tiles,
    k: &Quads,
    v: &Quads,
    work: &Work,
    first: u32,
    #[comptime] config: Config,
) {
    let sources = &work.sources;
    let end = work.block.span.k_count;
    let count = comptime!(config.tile_keys);
    copy_quads(
        k,
        &mut tiles.passing,
        &sources.k,
        first,
        end,
        sources.width_qk,
        count,
        config,
    );
    copy_quads(
        v,
        &mut tiles.passing_v,
        &sources.v,
        first,
        end,
        sources.width_v,
        count,
        config,
    );
    arrive(&tiles.ready);
}
