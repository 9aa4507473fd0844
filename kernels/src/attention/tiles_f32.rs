//! Tiles of f32 in shared memory: how rows get there, and from there to registers.
//!
//! Quads of a row are exchanged so that lanes which read together read from all banks.

use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

use super::arguments::*;
use super::block::*;
use super::copies::*;
use super::fragments::*;
use super::tf32::*;

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

    /// Sums of a fragment that a plane has in work at once: two of them hide each other's latency.
    pub fn chains(&self) -> usize {
        2 / self.fragments as usize
    }
}

/// What a quad of a row is exchanged by.
#[cube]
fn exchange(row: u32, #[comptime] values: bool) -> u32 {
    if comptime!(values) {
        // Rows 2 t and quads g.
        (row / 2u32) % 4u32 * 2u32
    } else {
        // Rows g and quads t.
        row % 2u32 * 4u32
    }
}

/// Tiles of queries, keys and values, what tells that keys and values are there, and what is kept
/// here because registers are scarce.
#[derive(CubeType)]
pub struct Tiles {
    pub q: SharedMemory<Vector<f32, Quad>>,
    pub k: SharedMemory<Vector<f32, Quad>>,
    pub v: SharedMemory<Vector<f32, Quad>>,
    /// Sums of a lane's rows, each kept by the lane itself.
    pub totals: SharedMemory<f32>,
    /// The block's first row, its sequence's first query, and the bounds within which tiles need no
    /// mask.
    pub kept: SharedMemory<i32>,
    pub k_ready: Shared<Barrier>,
    pub v_ready: Shared<Barrier>,
}

#[cube]
pub fn tiles(work: &Work, #[comptime] config: Config) -> Tiles {
    let per_row = comptime!(config.head_dim / 4);
    let q_quads = comptime!((config.rows() * per_row) as usize);
    let quads = comptime!((config.tile_keys * per_row) as usize);
    let q = SharedMemory::<Vector<f32, Quad>>::new_aligned(q_quads, 128usize);
    let k = SharedMemory::<Vector<f32, Quad>>::new_aligned(quads, 128usize);
    let v = SharedMemory::<Vector<f32, Quad>>::new_aligned(quads, 128usize);
    let totals = SharedMemory::<f32>::new(comptime!(
        config.threads() as usize * config.fragments as usize * 2
    ));
    // The barriers begin with what makes the rest seen.
    let mut kept = SharedMemory::<i32>::new(4usize);
    if UNIT_POS_X == 0u32 {
        kept[0] = i32::cast_from(work.block.row0);
        kept[1] = i32::cast_from(work.block.span.q_first);
        kept[2] = clear_begin(&work.seen);
        kept[3] = clear_end(&work.seen, &work.block);
    }
    let k_ready = Barrier::shared(comptime!(config.threads()), UNIT_POS_X == 0u32);
    let v_ready = Barrier::shared(comptime!(config.threads()), UNIT_POS_X == 0u32);
    Tiles {
        q,
        k,
        v,
        totals,
        kept,
        k_ready,
        v_ready,
    }
}

/// Where a lane keeps what it has summed of a row.
#[cube]
pub fn total_of(#[comptime] row: usize, #[comptime] config: Config) -> usize {
    (UNIT_POS_X + comptime!(row as u32 * config.threads())) as usize
}

/// Starts copying the block's queries; they are there when the first keys are.
#[cube]
pub fn copy_queries(
    tiles: &mut Tiles,
    q: &Array<Vector<f32, Quad>>,
    buffers: &Buffers,
    work: &Work,
    #[comptime] config: Config,
) {
    copy_rows(
        q,
        &buffers.block_table,
        &mut tiles.q,
        &work.sources.q,
        work.block.row0,
        work.block.span.q_count,
        work.sources.width_qk,
        comptime!(config.rows()),
        false,
        config,
    );
}

/// Starts copying a tile of keys.
#[cube]
pub fn copy_keys(
    tiles: &mut Tiles,
    k: &Array<Vector<f32, Quad>>,
    buffers: &Buffers,
    work: &Work,
    first: u32,
    #[comptime] config: Config,
) {
    copy_rows(
        k,
        &buffers.block_table,
        &mut tiles.k,
        &work.sources.k,
        first,
        work.block.span.k_count,
        work.sources.width_qk,
        comptime!(config.tile_keys),
        false,
        config,
    );
    arrive(&tiles.k_ready);
}

/// Starts copying a tile of values.
#[cube]
pub fn copy_values(
    tiles: &mut Tiles,
    v: &Array<Vector<f32, Quad>>,
    buffers: &Buffers,
    work: &Work,
    first: u32,
    #[comptime] config: Config,
) {
    copy_rows(
        v,
        &buffers.block_table,
        &mut tiles.v,
        &work.sources.v,
        first,
        work.block.span.k_count,
        work.sources.width_v,
        comptime!(config.tile_keys),
        true,
        config,
    );
    arrive(&tiles.v_ready);
}

/// Where a lane's quads lie. A row's even and odd groups of four are exchanged in every other row
/// of queries and keys.
#[derive(CubeType, Clone)]
pub struct Quads {
    pub swap: u32,
    pub q: u32,
    pub k: u32,
    pub v: u32,
    pub v_swap: u32,
}

#[cube]
pub fn quads(work: &Work, #[comptime] config: Config) -> Quads {
    let per_row = comptime!(config.head_dim / 4);
    let group_row = work.lane.group_row;
    let pair = work.lane.pair;
    let swap = group_row % 2u32 * 4u32;
    let q = (work.plane_row + group_row) * per_row + pair;
    let k = group_row * per_row + pair;
    let v = pair * comptime!(4 * per_row) + (group_row ^ (pair % 2u32 * 4u32));
    let v_swap = pair / 2u32 * 8u32;
    Quads {
        swap,
        q,
        k,
        v,
        v_swap,
    }
}

/// Starts copying rows `first..` to shared memory; rows from `end` on, and quads from `quads` on, become zero.
#[cube]
fn copy_rows(
    source: &Array<Vector<f32, Quad>>,
    table: &Array<u32>,
    tile: &mut SharedMemory<Vector<f32, Quad>>,
    rows: &Rows,
    first: u32,
    end: u32,
    quads: u32,
    #[comptime] count: u32,
    #[comptime] values: bool,
    #[comptime] config: Config,
) {
    let per_row = comptime!(config.head_dim / 4);
    let step = comptime!(config.threads() / per_row);
    let quad = UNIT_POS_X % per_row;
    let row = UNIT_POS_X / per_row;
    if rows.paged {
        let mut row = row;
        while row < count {
            let key = first + row;
            let from = row_at(rows, table, min(key, end - 1u32)) + u64::cast_from(quad);
            let to = row * per_row + (quad ^ exchange(row, values));
            copy_line::<f32, Quad>(source, tile, from, to, key < end && quad < quads);
            row += step;
        }
    } else {
        let mut from = rows.base + u64::cast_from(first + row) * rows.token + u64::cast_from(quad);
        let advance = rows.token * comptime!(step as u64);
        #[unroll]
        for i in 0..comptime!(count / step) {
            let row = row + comptime!(i * step);
            let to = row * per_row + (quad ^ exchange(row, values));
            copy_line::<f32, Quad>(source, tile, from, to, first + row < end && quad < quads);
            from += advance;
        }
    }
}

/// Starts loading, of the keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of 16, columns 2 g and 2 g + 1 of 16.
#[cube]
pub fn load_values(
    tile: &Slice<Vector<f32, Pair>>,
    at: u32,
    swap: u32,
    to: &mut Array<Vector<f32, Pair>>,
    #[comptime] n: usize,
    #[comptime] d: usize,
    #[comptime] config: Config,
) {
    let swapped = if comptime!(d % 2 == 0) {
        at + swap
    } else {
        at - swap
    };
    #[unroll]
    for i in 0..4usize {
        let row = comptime!((n * 16 + i / 2 * 8 + i % 2) as u32);
        let offset = comptime!(row * config.head_dim / 2 + d as u32 * 8);
        to[comptime!(d % 2 * 4 + i)] = tile[(swapped + offset) as usize];
    }
}

/// Element `j` of each of four pairs.
#[cube]
pub fn column(
    pairs: &Array<Vector<f32, Pair>>,
    #[comptime] first: usize,
    #[comptime] j: usize,
) -> Vector<f32, Quad> {
    let mut four = Vector::<f32, Quad>::empty();
    #[unroll]
    for i in 0..4usize {
        four[i] = pairs[comptime!(first + i)][j];
    }
    four
}

/// Two neighbours of each of two parts of eight keys, as terms.
#[cube]
pub fn join(left: Vector<f32, Pair>, right: Vector<f32, Pair>) -> Vector<f32, Quad> {
    let mut four = Vector::<f32, Quad>::empty();
    four[0] = left[0];
    four[1] = left[1];
    four[2] = right[0];
    four[3] = right[1];
    four
}
