//! The gradient of the queries: a tile of query rows, past which its keys go by.

use std::ops::Range;

use pulp::Simd;

use super::Statistics;
use super::tile::{Extent, Factors, Gradients, from_panel, into_panel, padded};
use crate::cpu::attention::panel::{BLOCK, MAX_VECTORS, accumulate, tile_keys};
use crate::cpu::attention::simd::load;
use crate::cpu::attention::unit::{Unit, carve, store_row};
use crate::problem::attention::Problem;

/// Buffers of one thread.
pub(super) struct Scratch<'a> {
    /// Per panel `[dim, lanes]`.
    q: &'a mut [f32],
    dout: &'a mut [f32],
    dq: &'a mut [f32],
    /// Per panel `[lanes]`.
    lse: &'a mut [f32],
    delta: &'a mut [f32],
    /// `[keys, dim]`.
    k: &'a mut [f32],
    v: &'a mut [f32],
    row: &'a mut [f32],
    tile: Gradients<'a>,
}

fn sizes(p: &Problem, rows: usize, lanes: usize) -> [usize; 11] {
    let rows = rows.next_multiple_of(lanes * MAX_VECTORS);
    let keys = tile_keys(p) + BLOCK;
    let (dim, dim_v) = (padded(p.head_dim), padded(p.head_dim_v));
    let [weights, scores, capped] = Gradients::sizes(p, lanes);
    [
        rows * dim,
        rows * dim_v,
        rows * dim,
        rows,
        rows,
        keys * dim,
        keys * dim_v,
        dim.max(dim_v),
        weights,
        scores,
        capped,
    ]
}

impl<'a> Scratch<'a> {
    /// Floats that [`Scratch::new`] takes, for units of at most `rows` rows.
    pub fn size(p: &Problem, rows: usize, lanes: usize) -> usize {
        sizes(p, rows, lanes).iter().sum()
    }

    /// In [`Scratch::size`] zeros: rows are loaded without their padding.
    pub fn new(p: &Problem, rows: usize, lanes: usize, floats: &'a mut [f32]) -> Self {
        let buffers = carve(sizes(p, rows, lanes), floats);
        let [q, dout, dq, lse, delta, k, v, row, weights, scores, capped] = buffers;
        Scratch {
            q,
            dout,
            dq,
            lse,
            delta,
            k,
            v,
            row,
            tile: Gradients::new(weights, scores, capped),
        }
    }
}

/// Computes the rows of `dq` of a unit.
#[inline(always)]
pub(super) fn run<S: Simd>(
    simd: S,
    unit: &Unit<'_>,
    statistics: &Statistics<'_>,
    scratch: &mut Scratch<'_>,
) {
    if unit.rows.len() <= S::F32_LANES {
        run_panels::<S, 1>(simd, unit, statistics, scratch);
    } else {
        run_panels::<S, MAX_VECTORS>(simd, unit, statistics, scratch);
    }
}

#[inline(always)]
fn run_panels<S: Simd, const N: usize>(
    simd: S,
    unit: &Unit<'_>,
    statistics: &Statistics<'_>,
    scratch: &mut Scratch<'_>,
) {
    let p = unit.p;
    let lanes = S::F32_LANES * N;
    let dim = padded(p.head_dim);
    let num_panels = unit.rows.len().div_ceil(lanes);
    for i in 0..num_panels {
        load_panel(
            unit,
            statistics,
            panel_rows(unit, lanes, i),
            (i, lanes),
            scratch,
        );
    }
    scratch.dq[..num_panels * lanes * dim].fill(0.0);
    let mut start = unit.keys.start;
    while start < unit.keys.end {
        let tile = start..unit.keys.end.min(start + tile_keys(p));
        scratch.load_tile(unit, &tile);
        for i in 0..num_panels {
            let rows = panel_rows(unit, lanes, i);
            let Some((skip, count)) = panel::<S, N>(simd, unit, (i, rows), &tile, scratch) else {
                continue;
            };
            scratch.tile.through_softcap(p, count * lanes);
            let k = &scratch.k[skip * dim..];
            let weights = &scratch.tile.scores[..count * lanes];
            let dq = &mut scratch.dq[i * lanes * dim..][..lanes * dim];
            accumulate::<S, N>(simd, k, dim, weights, [simd.splat_f32s(1.0); N], dq);
        }
        start = tile.end;
    }
    let Some(dq) = &statistics.problem.dq else {
        return;
    };
    for i in 0..num_panels {
        let panel = &scratch.dq[i * lanes * dim..][..lanes * dim];
        let row_buffer = &mut scratch.row[..p.head_dim];
        for (lane, row) in panel_rows(unit, lanes, i).enumerate() {
            from_panel(panel, lane, lanes, p.scale, row_buffer);
            let (query, head) = unit.query_head(row);
            let offset = dq.offset(unit.batch, unit.sequence.q_start + query, head);
            // SAFETY: the row exists, and belongs to this unit alone.
            unsafe { store_row(dq, offset, row_buffer) };
        }
    }
}

/// Computes weights and gradients of a panel and the keys of a tile that it sees: how many of the tile's
/// keys come before them, and how many they are. The panel and the tile have been loaded.
#[inline(always)]
pub(super) fn panel<S: Simd, const N: usize>(
    simd: S,
    unit: &Unit<'_>,
    (i, rows): (usize, Range<usize>),
    tile: &Range<usize>,
    scratch: &mut Scratch<'_>,
) -> Option<(usize, usize)> {
    let p = unit.p;
    let lanes = S::F32_LANES * N;
    let (dim, dim_v) = (padded(p.head_dim), padded(p.head_dim_v));
    let visible = unit.sequence.visible(p, &rows);
    let keys = tile.start.max(visible.start)..tile.end.min(visible.end);
    if keys.is_empty() {
        return None;
    }
    let (skip, count) = (keys.start - tile.start, keys.len());
    let scores = Factors {
        lines: &scratch.k[skip * dim..],
        panel: &scratch.q[i * lanes * dim..][..lanes * dim],
        dim,
    };
    let products = Factors {
        lines: &scratch.v[skip * dim_v..],
        panel: &scratch.dout[i * lanes * dim_v..][..lanes * dim_v],
        dim: dim_v,
    };
    let (lse, delta) = (&scratch.lse[i * lanes..], &scratch.delta[i * lanes..]);
    assert!(lse.len() >= lanes && delta.len() >= lanes);
    let extent = Extent {
        rows,
        keys,
        lines_are_keys: true,
    };
    scratch.tile.compute::<S, N>(
        simd,
        unit,
        &extent,
        scores,
        Some(products),
        #[inline(always)]
        |_, n| {
            let first = n * S::F32_LANES;
            // SAFETY: vector `n` of the panel, which has `lanes` of both.
            unsafe {
                (
                    load::<S>(lse.as_ptr().add(first)),
                    load::<S>(delta.as_ptr().add(first)),
                )
            }
        },
    );
    Some((skip, count))
}

/// Row range of a unit's panel.
#[inline(always)]
pub(super) fn panel_rows(unit: &Unit<'_>, lanes: usize, i: usize) -> Range<usize> {
    let start = unit.rows.start + i * lanes;
    start..unit.rows.end.min(start + lanes)
}

/// Transposes queries and gradients of the output into panel `i`.
#[inline(always)]
pub(super) fn load_panel(
    unit: &Unit<'_>,
    statistics: &Statistics<'_>,
    rows: Range<usize>,
    (i, lanes): (usize, usize),
    scratch: &mut Scratch<'_>,
) {
    let p = unit.p;
    let (dim, dim_v) = (padded(p.head_dim), padded(p.head_dim_v));
    let first = i * lanes;
    let q = &mut scratch.q[first * dim..][..lanes * dim];
    let dout = &mut scratch.dout[first * dim_v..][..lanes * dim_v];
    q.fill(0.0);
    dout.fill(0.0);
    // Lanes without a row have no weights.
    scratch.lse[first..][..lanes].fill(f32::INFINITY);
    scratch.delta[first..][..lanes].fill(0.0);
    for (lane, row) in rows.enumerate() {
        let buffer = &mut scratch.row[..p.head_dim];
        unit.load_query(row, buffer);
        into_panel(buffer, q, lane, lanes);
        let buffer = &mut scratch.row[..p.head_dim_v];
        unit.load_row(&statistics.problem.dout, row, buffer);
        into_panel(buffer, dout, lane, lanes);
        let (lse, delta) = statistics.of(unit, row);
        scratch.lse[first + lane] = lse;
        scratch.delta[first + lane] = delta;
    }
}

impl Scratch<'_> {
    /// Loads a tile of keys and values.
    #[inline(always)]
    pub fn load_tile(&mut self, unit: &Unit<'_>, tile: &Range<usize>) {
        let p = unit.p;
        let (dim, dim_v) = (padded(p.head_dim), padded(p.head_dim_v));
        unit.load_tile(&p.k, p.head_dim, tile.clone(), dim, self.k);
        unit.load_tile(&p.v, p.head_dim_v, tile.clone(), dim_v, self.v);
    }

    /// Gradients of the last tile's scores, `[key, lane]`.
    pub fn gradients(&self) -> &[f32] {
        self.tile.scores
    }
}
