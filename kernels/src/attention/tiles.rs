//! Tiles of 16-bit elements in shared memory: how rows get there, and where lanes find them.

use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

use super::arguments::*;
use super::block::Work;
use super::copies::*;
use super::fragments::*;

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

    /// Lines of one row in shared memory: one more than it has, so that the rows of a matrix lie in
    /// different banks.
    pub fn pitch(&self) -> u32 {
        self.head_dim / 8 + 1
    }
}

/// Starts copying rows `first..` to shared memory; rows from `end` on, and lines from `lines` on,
/// become zero.
#[cube]
pub fn copy_rows<E: Float>(
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

/// Tiles of queries, keys and values, and what tells that keys and values are there.
#[derive(CubeType)]
pub struct Tiles<E: Float> {
    pub q: SharedMemory<Vector<E, Line>>,
    pub k: SharedMemory<Vector<E, Line>>,
    pub v: SharedMemory<Vector<E, Line>>,
    pub k_ready: Shared<Barrier>,
    pub v_ready: Shared<Barrier>,
}

#[cube]
pub fn tiles<E: Float>(#[comptime] config: Config) -> Tiles<E> {
    let q_lines = comptime!((config.rows() * config.pitch()) as usize);
    let lines = comptime!((config.tile_keys * config.pitch()) as usize);
    let q = SharedMemory::<Vector<E, Line>>::new_aligned(q_lines, 128usize);
    let k = SharedMemory::<Vector<E, Line>>::new_aligned(lines, 128usize);
    let v = SharedMemory::<Vector<E, Line>>::new_aligned(lines, 128usize);
    let k_ready = Barrier::shared(comptime!(config.threads()), UNIT_POS_X == 0u32);
    let v_ready = Barrier::shared(comptime!(config.threads()), UNIT_POS_X == 0u32);
    Tiles::<E> {
        q,
        k,
        v,
        k_ready,
        v_ready,
    }
}

/// Starts copying the block's queries; they are there when the first keys are.
#[cube]
pub fn copy_queries<E: Float>(
    tiles: &mut Tiles<E>,
    q: &Lines<E>,
    buffers: &Buffers,
    work: &Work,
    #[comptime] config: Config,
) {
    copy_rows::<E>(
        q,
        &buffers.block_table,
        &mut tiles.q,
        &work.sources.q,
        work.block.row0,
        work.block.span.q_count,
        work.sources.width_qk,
        comptime!(config.rows()),
        config,
    );
}

/// Starts copying a tile of keys.
#[cube]
pub fn copy_keys<E: Float>(
    tiles: &mut Tiles<E>,
    k: &Lines<E>,
    buffers: &Buffers,
    work: &Work,
    first: u32,
    #[comptime] config: Config,
) {
    copy_rows::<E>(
        k,
        &buffers.block_table,
        &mut tiles.k,
        &work.sources.k,
        first,
        work.block.span.k_count,
        work.sources.width_qk,
        comptime!(config.tile_keys),
        config,
    );
    arrive(&tiles.k_ready);
}

/// Starts copying a tile of values.
#[cube]
pub fn copy_values<E: Float>(
    tiles: &mut Tiles<E>,
    v: &Lines<E>,
    buffers: &Buffers,
    work: &Work,
    first: u32,
    #[comptime] config: Config,
) {
    copy_rows::<E>(
        v,
        &buffers.block_table,
        &mut tiles.v,
        &work.sources.v,
        first,
        work.block.span.k_count,
        work.sources.width_v,
        comptime!(config.tile_keys),
        config,
    );
    arrive(&tiles.v_ready);
}

/// Where a lane's rows begin in the tiles, for the three shapes of matrix loads.
#[derive(CubeType, Clone)]
pub struct MatrixLines {
    pub q: u32,
    pub k: u32,
    pub v: u32,
}

#[cube]
pub fn matrix_lines(work: &Work, #[comptime] config: Config) -> MatrixLines {
    lines_of(work.lane.lane, work.plane_row, config)
}

/// Of a lane of a plane whose rows begin at `plane_row`.
#[cube]
pub fn lines_of(lane: u32, plane_row: u32, #[comptime] config: Config) -> MatrixLines {
    let pitch = comptime!(config.pitch());
    let q = (plane_row + lane % 16u32) * pitch + lane / 16u32;
    let k = (lane % 8u32 + lane / 16u32 * 8u32) * pitch + (lane / 8u32) % 2u32;
    let v = lane % 16u32 * pitch + lane / 16u32;
    MatrixLines { q, k, v }
}
