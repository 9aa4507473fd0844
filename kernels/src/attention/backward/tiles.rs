//! Tiles of 16-bit elements for gradients on tensor cores: what a cube keeps, what goes by, and how
//! results get to memory.

use cubecl::prelude::barrier::Barrier;
use cubecl::prelude::*;

use super::arguments::Place;
use crate::attention::arguments::{Lines, Rows};
use crate::attention::fragments::*;
use crate::attention::softmax::Parts;
use crate::attention::tiles::Config;

/// Two tiles that the cube keeps, of its rows, and two that change, of `tile_keys` rows; the products
/// of the first and the third are scores, of the second and the fourth those of `dout` and values.
#[derive(CubeType)]
pub struct Tiles<E: Float> {
    pub kept: SharedMemory<Vector<E, Line>>,
    pub kept_v: SharedMemory<Vector<E, Line>>,
    pub passing: SharedMemory<Vector<E, Line>>,
    pub passing_v: SharedMemory<Vector<E, Line>>,
    pub ready: Shared<Barrier>,
}

#[cube]
pub fn tiles<E: Float>(#[comptime] config: Config) -> Tiles<E> {
    let kept_lines = comptime!((config.rows() * config.pitch()) as usize);
    let lines = comptime!((config.tile_keys * config.pitch()) as usize);
    let kept = SharedMemory::<Vector<E, Line>>::new_aligned(kept_lines, 128usize);
    let kept_v = SharedMemory::<Vector<E, Line>>::new_aligned(kept_lines, 128usize);
    let passing = SharedMemory::<Vector<E, Line>>::new_aligned(lines, 128usize);
    let passing_v = SharedMemory::<Vector<E, Line>>::new_aligned(lines, 128usize);
    let ready = Barrier::shared(comptime!(config.threads()), UNIT_POS_X == 0u32);
    Tiles::<E> {
        kept,
        kept_v,
        passing,
        passing_v,
        ready,
    }
}

/// Rows that are not paged.
#[cube]
pub fn rows(at: &Place) -> Rows {
    Rows {
        base: at.base,
        token: at.token,
        page: 0u64,
        page_log2: 0u32,
        paged: false.runtime(),
        table: 0u64,
    }
}

/// Stores a plane's 16 rows, times a factor, through its own rows of a tile that the cube keeps and no
/// longer needs, to write whole lines.
#[cube]
pub fn store<E: Float>(
    tile: &mut SharedMemory<Vector<E, Line>>,
    acc: &Parts,
    to: &mut Lines<E>,
    at: &Place,
    first: u32,
    end: u32,
    lines: u32,
    factor: f32,
    lane: &Lane,
    #[comptime] config: Config,
) {
    let pitch = comptime!(config.pitch());
    let plane_row = lane.plane * 16u32;
    let mut staging = tile.to_slice_mut().with_vector_size::<Pair>();
    sync_plane();
    #[unroll]
    for i in 0..2usize {
        let row = plane_row + lane.group_row + comptime!(i as u32 * 8);
        #[unroll]
        for n in 0..comptime!(config.head_dim as usize / 8) {
            let to = row * comptime!(pitch * 4) + lane.pair + comptime!(n as u32 * 4);
            staging[to as usize] = Vector::cast_from(acc.index(n)[i] * Vector::new(factor));
        }
    }
    sync_plane();
    let per_row = comptime!(config.head_dim / 8);
    #[unroll]
    for i in 0..comptime!(16 * per_row / 32) {
        let index = lane.lane + comptime!(i * 32);
        let row = plane_row + index / per_row;
        let line = index % per_row;
        if first + row < end && line < lines {
            let to_row = at.base + u64::cast_from(first + row) * at.token;
            to[(to_row + u64::cast_from(line)) as usize] = tile[(row * pitch + line) as usize];
        }
    }
}
