//! `dk` and `dv` on tensor cores, of f32: what [`keys`](super::keys) does, as accurate as f32 is.

use cubecl::prelude::*;

use super::arguments::*;
use super::keys::*;
use super::tiles::rows;
use super::tiles_f32::*;
use crate::attention::arguments::*;
use crate::attention::copies::arrive;
use crate::attention::softmax::{Parts, begin_parts};
use crate::attention::tiles::Config;

/// Grid: key blocks × key heads × sequences, the first fastest.
#[cube]
pub fn keys_f32(
    q: &Quads,
    k: &Quads,
    v: &Quads,
    dout: &Quads,
    dk: &mut Quads,
    dv: &mut Quads,
    statistics: &Array<f32>,
    buffers: &Buffers,
    args: &Args,
    strides: &Strides,
    #[comptime] config: Config,
) {
    let tile_rows = comptime!(config.tile_keys);
    let parts = comptime!(config.tile_keys as usize / 8);
    let dims = comptime!(config.head_dim as usize / 8);
    let block = key_block(args, strides, buffers, comptime!(config.rows()));
    if block.key0 >= block.end {
        terminate!();
    }
    let work = work(args, block, 4u32);
    let block = &work.block;
    let mut tiles = tiles(config);
    let mut of_rows = SharedMemory::<f32>::new(comptime!(2 * config.tile_keys as usize));
    if block.begin < block.seen {
        copy_kept(&mut tiles, k, v, args, &work, config);
    }
    let quads = lane_quads(&work.lane, config);
    let mut dk_acc = Parts::new();
    begin_parts(&mut dk_acc, dims);
    let mut dv_acc = Parts::new();
    begin_parts(&mut dv_acc, dims);

    let mut phase = 0u32;
    let mut of_group = 0u32;
    while of_group < args.group {
        let head = head(args, strides, &work, of_group);
        let mut row0 = block.begin;
        while row0 < block.seen {
            copy_passing(&mut tiles, q, dout, &work, &head, row0, config);
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
            score(
                &tiles.kept,
                &tiles.passing,
                &mut s,
                &quads,
                args.head_dim,
                config,
            );
            score(
                &tiles.kept_v,
                &tiles.passing_v,
                &mut d,
                &quads,
                args.head_dim_v,
                config,
            );
            differentiate(
                &mut s, &mut d, &of_rows, args, buffers, &work, &head, row0, config, true,
            );
            accumulate(
                &s,
                &tiles.passing_v,
                &mut dv_acc,
                &quads,
                args.head_dim_v,
                config,
            );
            accumulate(
                &d,
                &tiles.passing,
                &mut dk_acc,
                &quads,
                args.head_dim,
                config,
            );
            sync_cube();
            phase = phase ^ 1u32;
            row0 += tile_rows;
        }
        of_group += 1u32;
    }
    let (first, end) = (block.key0, block.end);
    if has(args, flag::DK) {
        let at = dk_at(strides, &block.span, block.batch, block.key_head);
        let width = work.width_qk;
        store(
            &dk_acc, dk, &at, first, end, width, args.scale, &work.lane, config,
        );
    }
    if has(args, flag::DV) {
        let at = dv_at(strides, &block.span, block.batch, block.key_head);
        let width = work.width_v;
        store(
            &dv_acc, dv, &at, first, end, width, 1.0f32, &work.lane, config,
        );
    }
}

/// Starts copying the block's keys and values; they are there when the first queries are.
#[cube]
fn copy_kept(
    tiles: &mut Tiles,
    k: &Quads,
    v: &Quads,
    args: &Args,
    work: &Work,
    #[comptime] config: Config,
) {
    let block = &work.block;
    let end = block.span.k_count;
    let count = comptime!(config.rows());
    let at = rows(&keys_at(args, &block.span, block.batch, block.key_head));
    copy_quads(
        k,
        &mut tiles.kept,
        &at,
        block.key0,
        end,
        work.width_qk,
        count,
        config,
    );
    let at = rows(&values_at(args, &block.span, block.batch, block.key_head));
    copy_quads(
        v,
        &mut tiles.kept_v,
        &at,
        block.key0,
        end,
        work.width_v,
        count,
        config,
    );
}

/// Starts copying a tile of queries and their gradients.
#[cube]
fn copy_passing(
    tiles: &mut Tiles,
    q: &Quads,
    dout: &Quads,
    work: &Work,
    head: &Head,
    first: u32,
    #[comptime] config: Config,
) {
    let end = work.block.span.q_count;
    let count = comptime!(config.tile_keys);
    copy_quads(
        q,
        &mut tiles.passing,
        &head.q,
        first,
        end,
        work.width_qk,
        count,
        config,
    );
    copy_quads(
        dout,
        &mut tiles.passing_v,
        &head.dout,
        first,
        end,
        work.width_v,
        count,
        config,
    );
}
