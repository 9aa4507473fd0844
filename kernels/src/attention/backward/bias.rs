//! The gradient of a bias: a cube has a tile of it, and computes every score again that it was
//! added to.
//!
//! Where the bias repeats queries or keys, a tile stands for all of them: scores are summed at
//! their place in the tile, and the tile's rows or columns at the end. A bias that repeats much has
//! few tiles; then what one stands for is cut into parts, and [`join`] adds what these give.

use cubecl::prelude::*;

use super::arguments::*;
use super::queries::{differentiate, lane_rows};
use super::tiles::*;
use crate::attention::arguments::*;
use crate::attention::block::*;
use crate::attention::copies::arrive;
use crate::attention::fragments::*;
use crate::attention::products::score;
use crate::attention::softmax::{Parts, begin_parts};
use crate::attention::tiles::{Config, copy_rows, lines_of};
use crate::emit::scalars;

scalars! { Bias, BiasExpand {
    batch: u32,
    /// Sizes of the gradient. Of a dimension where it is 1 all entries are summed.
    size_batch: u32,
    size_heads: u32,
    size_q: u32,
    size_k: u32,
    /// In how many parts the sums of a tile are cut.
    parts: u32,
    /// Of what is written, in elements; keys are contiguous.
    part_stride: u64,
    dbias_outer: u64,
    dbias_head: u64,
    dbias_token: u64,
} }

/// Threads of a cube of [`join`], of which each has an element.
pub const THREADS: u32 = 256;

/// The shape of [`bias`]. Head dimensions go by in chunks, so that one kernel has room for any.
pub const CONFIG: Config = Config {
    head_dim: 64,
    tile_keys: 64,
    planes: 4,
    fragments: 1,
    scores: true,
};

/// A tile of the gradient, and which of the blocks of queries that it stands for are summed here.
#[derive(CubeType, Clone)]
pub struct Tile {
    pub part: u32,
    pub batch: u32,
    pub head: u32,
    /// In tiles.
    pub row: u32,
    pub column: u32,
    /// Blocks `begin..end` of rows, heads and sequences, the first fastest.
    pub begin: u32,
    pub end: u32,
    rows: u32,
    heads: u32,
}

/// How many tiles, of the size or of one where all are summed.
#[cube]
fn tiles_of(size: u32, #[comptime] each: u32) -> u32 {
    (size + comptime!(each - 1)) / each
}

/// How many there are to sum.
#[cube]
fn summed(size: u32, all: u32) -> u32 {
    select(size == 1u32, all, 1u32)
}

/// The cube's, in a grid of parts × tiles of keys × tiles of queries × heads × sequences, the first
/// fastest.
#[cube]
pub fn tile(args: &Args, of: &Bias, #[comptime] rows: u32, #[comptime] columns: u32) -> Tile {
    let part = CUBE_POS_X % of.parts;
    let rest = CUBE_POS_X / of.parts;
    let across = tiles_of(of.size_k, columns);
    let down = tiles_of(of.size_q, rows);
    let row_blocks = summed(of.size_q, tiles_of(args.seqlen_q, rows));
    let heads = summed(of.size_heads, args.num_heads);
    let all = u64::cast_from(summed(of.size_batch, of.batch) * heads) * u64::cast_from(row_blocks);
    let each = (all + u64::cast_from(of.parts) - 1u64) / u64::cast_from(of.parts);
    let begin = u64::cast_from(part) * each;
    Tile {
        part,
        batch: rest / across / down / of.size_heads,
        head: rest / across / down % of.size_heads,
        row: rest / across % down,
        column: rest % across,
        begin: u32::cast_from(min(begin, all)),
        end: u32::cast_from(min(begin + each, all)),
        rows: row_blocks,
        heads,
    }
}

/// A block of queries that the tile stands for.
#[cube]
pub fn block(
    args: &Args,
    buffers: &Buffers,
    tile: &Tile,
    index: u32,
    #[comptime] rows: u32,
) -> QueryBlock {
    let batch = tile.batch + index / tile.rows / tile.heads;
    let span = sequence(args, buffers, batch);
    QueryBlock {
        batch,
        head: tile.head + index / tile.rows % tile.heads,
        row0: (tile.row + index % tile.rows) * rows,
        span,
    }
}

/// The tiles of keys that the tile stands for, of those that a block sees: the first.
#[cube]
pub fn first_keys(of: &Bias, tile: &Tile, seen: &SeenTiles) -> u32 {
    select(of.size_k == 1u32, seen.begin, max(seen.begin, tile.column))
}

/// Past the last.
#[cube]
pub fn end_keys(of: &Bias, tile: &Tile, seen: &SeenTiles) -> u32 {
    select(
        of.size_k == 1u32,
        seen.end,
        min(seen.end, tile.column + 1u32),
    )
}

/// Writes a tile of sums, which have been stored to shared memory with a pitch of one more than its
/// columns, or what its rows and columns sum to where the bias repeats them.
#[cube]
pub fn store_sums(
    sums: &mut SharedMemory<f32>,
    dbias: &mut Array<f32>,
    args: &Args,
    of: &Bias,
    tile: &Tile,
    #[comptime] rows: u32,
    #[comptime] columns: u32,
    #[comptime] threads: u32,
) {
    let pitch = comptime!(columns + 1);
    sync_cube();
    if of.size_k == 1u32 {
        if UNIT_POS_X < rows {
            let mut sum = 0.0f32;
            for i in 0..columns {
                sum += sums[(UNIT_POS_X * pitch + i) as usize];
            }
            sums[(UNIT_POS_X * pitch) as usize] = sum;
        }
        sync_cube();
    }
    if of.size_q == 1u32 {
        if UNIT_POS_X < columns {
            let mut sum = 0.0f32;
            for i in 0..rows {
                sum += sums[(i * pitch + UNIT_POS_X) as usize];
            }
            sums[UNIT_POS_X as usize] = sum;
        }
        sync_cube();
    }
    let (row0, column0) = (tile.row * rows, tile.column * columns);
    let base = u64::cast_from(tile.part) * of.part_stride
        + u64::cast_from(tile.batch) * of.dbias_outer
        + u64::cast_from(tile.head) * of.dbias_head
        + u64::cast_from(column0);
    let mut index = UNIT_POS_X;
    while index < comptime!(rows * columns) {
        let (row, column) = (index / columns, index % columns);
        if row0 + row < of.size_q && column0 + column < of.size_k {
            let to_row = base + u64::cast_from(row0 + row) * of.dbias_token;
            let at = (to_row + u64::cast_from(column)) as usize;
            let mut sum = sums[(row * pitch + column) as usize];
            if has(args, flag::ACCUMULATE) {
                sum += dbias[at];
            }
            dbias[at] = sum;
        }
        index += threads;
    }
}

/// On tensor cores, of f16 and bf16. Grid: as [`tile`] says.
#[cube]
pub fn bias<E: Float>(
    q: &Lines<E>,
    k: &Lines<E>,
    v: &Lines<E>,
    dout: &Lines<E>,
    dbias: &mut Array<f32>,
    statistics: &Array<f32>,
    buffers: &Buffers,
    args: &Args,
    strides: &Strides,
    of: &Bias,
    #[comptime] config: Config,
) {
    let rows = comptime!(config.rows());
    let columns = comptime!(config.tile_keys);
    let parts = comptime!(config.tile_keys as usize / 8);
    let tile = tile(args, of, rows, columns);
    let lane = this_lane();
    let plane_row = lane.plane * 16u32;
    let lines = lines_of(lane.lane, plane_row, config);
    let chunks = (max(args.head_dim, args.head_dim_v) + comptime!(config.head_dim - 1))
        / comptime!(config.head_dim);
    let mut tiles = tiles::<E>(config);
    let mut sums = Parts::new();
    begin_parts(&mut sums, parts);

    let mut phase = 0u32;
    let mut index = tile.begin;
    while index < tile.end {
        let block = block(args, buffers, &tile, index, rows);
        if block.row0 < block.span.q_count {
            let work = Work {
                sources: sources(args, &block, 8u32),
                seen: seen_tiles(args, &block, rows, columns),
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
                let mut chunk = 0u32;
                while chunk < chunks {
                    copy_chunk::<E>(
                        &mut tiles, q, k, v, dout, buffers, strides, &work, key0, chunk, config,
                    );
                    tiles.ready.wait_parity(phase);
                    score::<E>(
                        &tiles.kept,
                        &tiles.passing,
                        &mut s,
                        lines.q,
                        lines.k,
                        config,
                    );
                    score::<E>(
                        &tiles.kept_v,
                        &tiles.passing_v,
                        &mut d,
                        lines.q,
                        lines.k,
                        config,
                    );
                    sync_cube();
                    phase = phase ^ 1u32;
                    chunk += 1u32;
                }
                differentiate(
                    &s, &mut d, args, buffers, &work, &of_lane, key0, config, false, false,
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
    store_sums(&mut staged, dbias, args, of, &tile, rows, columns, threads);
}

/// Stores a plane's sums as [`store_sums`] takes them.
#[cube]
pub fn stage(to: &mut SharedMemory<f32>, sums: &Parts, lane: &Lane, #[comptime] config: Config) {
    let pitch = comptime!(config.tile_keys + 1);
    #[unroll]
    for i in 0..2usize {
        let row = lane.plane * 16u32 + lane.group_row + comptime!(i as u32 * 8);
        #[unroll]
        for n in 0..comptime!(config.tile_keys as usize / 8) {
            #[unroll]
            for c in 0..2usize {
                let column = lane.pair * 2u32 + comptime!((n * 8 + c) as u32);
                to[(row * pitch + column) as usize] = sums.index(n)[i][c];
            }
        }
    }
}

/// Copies a chunk of the block's queries and their gradients, and of the keys from `key0` on and
/// their values.
#[cube]
fn copy_chunk<E: Float>(
    tiles: &mut Tiles<E>,
    q: &Lines<E>,
    k: &Lines<E>,
    v: &Lines<E>,
    dout: &Lines<E>,
    buffers: &Buffers,
    strides: &Strides,
    work: &Work,
    key0: u32,
    chunk: u32,
    #[comptime] config: Config,
) {
    let table = &buffers.block_table;
    let (block, sources) = (&work.block, &work.sources);
    let (row0, q_count) = (block.row0, block.span.q_count);
    let k_count = block.span.k_count;
    let row_count = comptime!(config.rows());
    let key_count = comptime!(config.tile_keys);
    let skip = chunk * comptime!(config.head_dim / 8);
    let of_qk = sources.width_qk - min(sources.width_qk, skip);
    let of_v = sources.width_v - min(sources.width_v, skip);
    let at = later(&sources.q, skip);
    copy_rows::<E>(
        q,
        table,
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
    copy_rows::<E>(
        dout,
        table,
        &mut tiles.kept_v,
        &at,
        row0,
        q_count,
        of_v,
        row_count,
        config,
    );
    let at = later(&sources.k, skip);
    copy_rows::<E>(
        k,
        table,
        &mut tiles.passing,
        &at,
        key0,
        k_count,
        of_qk,
        key_count,
        config,
    );
    let at = later(&sources.v, skip);
    copy_rows::<E>(
        v,
        table,
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

/// The same rows without their first lines.
#[cube]
pub fn later(at: &Rows, lines: u32) -> Rows {
    Rows {
        base: at.base + u64::cast_from(lines),
        token: at.token,
        page: at.page,
        page_log2: at.page_log2,
        paged: at.paged,
        table: at.table,
    }
}

/// Adds gradients to sums.
#[cube]
pub fn add(parts: &Parts, sums: &mut Parts, #[comptime] count: usize) {
    #[unroll]
    for n in 0..count {
        #[unroll]
        for i in 0..2usize {
            let part = parts.index(n)[i];
            let sum = sums.index_mut(n);
            sum[i] = sum[i] + part;
        }
    }
}

/// Adds the parts of every element, `[parts, batch, heads, q, k]` f32, in their order. Grid:
/// elements.
#[cube]
pub fn join(of_parts: &Array<f32>, dbias: &mut Array<f32>, args: &Args, of: &Bias) {
    let index = u64::cast_from(CUBE_POS_X) * comptime!(THREADS as u64) + u64::cast_from(UNIT_POS_X);
    let (size_q, size_k) = (u64::cast_from(of.size_q), u64::cast_from(of.size_k));
    let size_heads = u64::cast_from(of.size_heads);
    if index >= u64::cast_from(of.size_batch) * size_heads * size_q * size_k {
        terminate!();
    }
    let mut sum = 0.0f32;
    let mut part = 0u32;
    while part < of.parts {
        sum += of_parts[(u64::cast_from(part) * of.part_stride + index) as usize];
        part += 1u32;
    }
    let row = index / size_k;
    let at = row / size_q / size_heads * of.dbias_outer
        + row / size_q % size_heads * of.dbias_head
        + row % size_q * of.dbias_token
        + index % size_k;
    if has(args, flag::ACCUMULATE) {
        sum += dbias[at as usize];
    }
    dbias[at as usize] = sum;
}
