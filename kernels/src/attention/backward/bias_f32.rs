//! The gradient of a bias on tensor cores, of f32: what [`bias`](super::bias) does, as accurate as
//! f32 is.

use cubecl::prelude::*;

use super::arguments::*;
use super::bias::{Bias, add, block, end_keys, first_keys, later, stage, store_sums, tile};
use super::queries::{differentiate, lane_rows};
use super::tiles::rows;
use super::tiles_f32::*;
use crate::attention::arguments::*;
use crate::attention::block::*;
use crate::attention::copies::arrive;
use crate::attention::fragments::*;
use crate::attention::softmax::{Parts, begin_parts};
use crate::attention::tiles::Config;

/// Of twice the bytes of 16-bit tiles, half the keys.
pub const CONFIG: Config = Config {
    tile_keys: 32,
    ..super::bias::CONFIG
};

/// Grid: as [`tile`] says.
#[cube]
pub fn bias_f32(
    q: &Quads,
    k: &Quads,
    v: &Quads,
    dout: &Quads,
    dbias: &mut Array<f32>,
    statistics: &Array<f32>,
    buffers: &Buffers,
    args: &Args,
    strides: &Strides,
    of: &Bias,
    #[comptime] config: Config,
) {
    let count = comptime!(config.rows());
    let columns = comptime!(config.tile_keys);
    let parts = comptime!(config.tile_keys as usize / 8);
    let tile = tile(args, of, count, columns);
    let lane = this_lane();
    let plane_row = lane.plane * 16u32;
    let quads = lane_quads(&lane, config);
    let dims = max(args.head_dim, args.head_dim_v);
    let mut tiles = tiles(config);
    let mut sums = Parts::new();
    begin_parts(&mut sums, parts);

    let mut phase = 0u32;
    let mut index = tile.begin;
    while index < tile.end {
        let block = block(args, buffers, &tile, index, count);
        if block.row0 < block.span.q_count {
            let work = Work {
                sources: sources(args, &block, 4u32),
                seen: seen_tiles(args, &block, count, columns),
                lane: lane.clone(),
                plane_row,
                block,
            };
            let of_lane = lane_rows(statistics, buffers, args, strides, &work);
            let end = end_keys(of, &tile, &work.seen);
            let mut keys = first_keys(of, &tile, &work.seen);
            while keys < end {
                let key0 = keys * columns;
                let mut s = Parts::new();
                begin_parts(&mut s, parts);
                let mut d = Parts::new();
                begin_parts(&mut d, parts);
                let mut dim0 = 0u32;
                while dim0 < dims {
                    copy_chunk(
                        &mut tiles, q, k, v, dout, strides, &work, key0, dim0, config,
                    );
                    tiles.ready.wait_parity(phase);
                    let left = min(dims - dim0, comptime!(config.head_dim));
                    score(&tiles.kept, &tiles.passing, &mut s, &quads, left, config);
                    score(
                        &tiles.kept_v,
                        &tiles.passing_v,
                        &mut d,
                        &quads,
                        left,
                        config,
                    );
                    sync_cube();
                    phase = phase ^ 1u32;
                    dim0 += comptime!(config.head_dim);
                }
                differentiate(
                    &s, &mut d, args, buffers, &work, &of_lane, key0, config, true, false,
                );
                add(&d, &mut sums, parts);
                keys += 1u32;
            }
        }
        index += 1u32;
    }

    let pitch = comptime!(config.tile_keys + 1);
    let mut staged = SharedMemory::<f32>::new(comptime!((config.rows() * pitch) as usize));
    stage(&mut staged, &sums, &lane, config);
    let threads = comptime!(config.threads());
    store_sums(&mut staged, dbias, args, of, &tile, count, columns, threads);
}

/// Copies a chunk of the block's queries and their gradients, and of the keys from `key0` on and
/// their values.
#[cube]
fn copy_chunk(
    tiles: &mut Tiles,
    q: &Quads,
    k: &Quads,
    v: &Quads,
    dout: &Quads,
    strides: &Strides,
    work: &Work,
    key0: u32,
    dim0: u32,
    #[comptime] config: Config,
) {
    let (block, sources) = (&work.block, &work.sources);
    let (row0, q_count) = (block.row0, block.span.q_count);
    let k_count = block.span.k_count;
    let row_count = comptime!(config.rows());
    let key_count = comptime!(config.tile_keys);
    let skip = dim0 / 4u32;
    let of_qk = sources.width_qk - min(sources.width_qk, skip);
    let of_v = sources.width_v - min(sources.width_v, skip);
    let at = later(&sources.q, skip);
    copy_quads(
        q,
        &mut tiles.kept,
        &at,
        row0,
        q_count,
        of_qk,
        row_count,
        config,
    );
    let at = rows(&dout_at(strides, &block.span, block.batch, block.head));
    let at = later(&at, skip);
    copy_quads(
        dout,
        &mut tiles.kept_v,
        &at,
        row0,
        q_count,
        of_v,
        row_count,
        config,
    );
    let at = later(&sources.k, skip);
    copy_quads(
        k,
        &mut tiles.passing,
        &at,
        key0,
        k_count,
        of_qk,
        key_count,
        config,
    );
    let at = later(&sources.v, skip);
    copy_quads(
        v,
        &mut tiles.passing_v,
        &at,
        key0,
        k_count,
        of_v,
        key_count,
        config,
    );
    arrive(&tiles.ready);
}
