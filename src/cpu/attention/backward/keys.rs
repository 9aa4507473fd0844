//! The gradients of keys and values: a tile of keys of one key head, past which the query rows that
//! see it go by, those of every query head that shares the key head.

use std::ops::Range;

use pulp::Simd;

use super::tile::{Extent, Factors, Gradients, from_panel, into_panel, padded};
use super::{Statistics, TILE_KEYS};
use crate::cpu::attention::panel::{BLOCK, MAX_VECTORS, accumulate, tile_keys};
use crate::cpu::attention::unit::{Unit, carve, store_row};
use crate::problem::attention::{Problem, Rows};

/// Buffers of one thread.
pub(super) struct Scratch<'a> {
    /// Per panel `[dim, lanes]`.
    k: &'a mut [f32],
    v: &'a mut [f32],
    dk: &'a mut [f32],
    dv: &'a mut [f32],
    /// `[rows, dim]`.
    q: &'a mut [f32],
    dout: &'a mut [f32],
    /// `[rows]`.
    lse: &'a mut [f32],
    delta: &'a mut [f32],
    row: &'a mut [f32],
    tile: Gradients<'a>,
}

fn sizes(p: &Problem, lanes: usize) -> [usize; 12] {
    let keys = TILE_KEYS.next_multiple_of(lanes * MAX_VECTORS);
    let rows = tile_keys(p) + BLOCK;
    let (dim, dim_v) = (padded(p.head_dim), padded(p.head_dim_v));
    let [weights, scores, capped] = Gradients::sizes(p, lanes);
    [
        keys * dim,
        keys * dim_v,
        keys * dim,
        keys * dim_v,
        rows * dim,
        rows * dim_v,
        rows,
        rows,
        dim.max(dim_v),
        weights,
        scores,
        capped,
    ]
}

impl<'a> Scratch<'a> {
    /// Floats that [`Scratch::new`] takes.
    pub fn size(p: &Problem, lanes: usize) -> usize {
        sizes(p, lanes).iter().sum()
    }

    /// In [`Scratch::size`] zeros: rows are loaded without their padding.
    pub fn new(p: &Problem, lanes: usize, floats: &'a mut [f32]) -> Self {
        let [
            k,
            v,
            dk,
            dv,
            q,
            dout,
            lse,
            delta,
            row,
            weights,
            scores,
            capped,
        ] = carve(sizes(p, lanes), floats);
        Scratch {
            k,
            v,
            dk,
            dv,
            q,
            dout,
            lse,
            delta,
            row,
            tile: Gradients::new(weights, scores, capped),
        }
    }
}

/// Computes a unit's keys of `dk` and `dv`; the unit's rows are those that may see any of them. The rest
/// of `written`, which is padding, gets zeros.
#[inline(always)]
pub(super) fn run<S: Simd>(
    simd: S,
    unit: &Unit<'_>,
    written: Range<usize>,
    statistics: &Statistics<'_>,
    scratch: &mut Scratch<'_>,
) {
    if unit.keys.len() <= S::F32_LANES {
        run_panels::<S, 1>(simd, unit, statistics, scratch);
    } else {
        run_panels::<S, MAX_VECTORS>(simd, unit, statistics, scratch);
    }
    let (p, problem) = (unit.p, statistics.problem);
    for (rows, dim) in [(&problem.dk, p.head_dim), (&problem.dv, p.head_dim_v)] {
        if let Some(rows) = rows {
            scratch.row[..dim].fill(0.0);
            for key in written.start.max(unit.keys.end)..written.end {
                store(unit, rows, key, &mut scratch.row[..dim]);
            }
        }
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
    let (dim, dim_v) = (padded(p.head_dim), padded(p.head_dim_v));
    let num_panels = unit.keys.len().div_ceil(lanes);
    for i in 0..num_panels {
        load_panel(unit, panel_keys(unit, lanes, i), (i, lanes), scratch);
    }
    scratch.dk[..num_panels * lanes * dim].fill(0.0);
    scratch.dv[..num_panels * lanes * dim_v].fill(0.0);
    let mut start = unit.rows.start;
    while start < unit.rows.end {
        let tile = start..unit.rows.end.min(start + tile_keys(p));
        load_rows(unit, statistics, tile.clone(), scratch);
        for i in 0..num_panels {
            let keys = panel_keys(unit, lanes, i);
            panel::<S, N>(simd, unit, statistics, (i, keys), &tile, scratch);
        }
        start = tile.end;
    }
    let problem = statistics.problem;
    for i in 0..num_panels {
        for (lane, key) in panel_keys(unit, lanes, i).enumerate() {
            if let Some(dk) = &problem.dk {
                // The queries are scaled already.
                let panel = &scratch.dk[i * lanes * dim..][..lanes * dim];
                from_panel(panel, lane, lanes, 1.0, &mut scratch.row[..p.head_dim]);
                store(unit, dk, key, &mut scratch.row[..p.head_dim]);
            }
            if let Some(dv) = &problem.dv {
                let panel = &scratch.dv[i * lanes * dim_v..][..lanes * dim_v];
                from_panel(panel, lane, lanes, 1.0, &mut scratch.row[..p.head_dim_v]);
                store(unit, dv, key, &mut scratch.row[..p.head_dim_v]);
            }
        }
    }
}

/// Adds what a tile of rows gives to a panel of keys.
#[inline(always)]
fn panel<S: Simd, const N: usize>(
    simd: S,
    unit: &Unit<'_>,
    statistics: &Statistics<'_>,
    (i, keys): (usize, Range<usize>),
    tile: &Range<usize>,
    scratch: &mut Scratch<'_>,
) {
    let p = unit.p;
    let lanes = S::F32_LANES * N;
    let (dim, dim_v) = (padded(p.head_dim), padded(p.head_dim_v));
    let seeing = unit.sequence.seeing(p, &keys);
    let rows = tile.start.max(seeing.start)..tile.end.min(seeing.end);
    if rows.is_empty() {
        return;
    }
    let (skip, count) = (rows.start - tile.start, rows.len());
    let scores = Factors {
        lines: &scratch.q[skip * dim..],
        panel: &scratch.k[i * lanes * dim..][..lanes * dim],
        dim,
    };
    let dk = statistics.problem.dk.is_some();
    let products = Factors {
        lines: &scratch.dout[skip * dim_v..],
        panel: &scratch.v[i * lanes * dim_v..][..lanes * dim_v],
        dim: dim_v,
    };
    let (lse, delta) = (&scratch.lse[skip..], &scratch.delta[skip..]);
    let extent = Extent {
        rows,
        keys,
        lines_are_keys: false,
    };
    scratch.tile.compute::<S, N>(
        simd,
        unit,
        &extent,
        scores,
        dk.then_some(products),
        #[inline(always)]
        |row, _| (simd.splat_f32s(lse[row]), simd.splat_f32s(delta[row])),
    );
    let size = count * lanes;
    let one = [simd.splat_f32s(1.0); N];
    if statistics.problem.dv.is_some() {
        let dv = &mut scratch.dv[i * lanes * dim_v..][..lanes * dim_v];
        let dout = &scratch.dout[skip * dim_v..];
        accumulate::<S, N>(simd, dout, dim_v, &scratch.tile.weights[..size], one, dv);
    }
    if dk {
        scratch.tile.through_softcap(p, size);
        let dk = &mut scratch.dk[i * lanes * dim..][..lanes * dim];
        let q = &scratch.q[skip * dim..];
        accumulate::<S, N>(simd, q, dim, &scratch.tile.scores[..size], one, dk);
    }
}

#[inline(always)]
fn panel_keys(unit: &Unit<'_>, lanes: usize, i: usize) -> Range<usize> {
    let start = unit.keys.start + i * lanes;
    start..unit.keys.end.min(start + lanes)
}

/// Transposes keys and values into panel `i`. Lanes without a key compute with zeros, and nothing is kept
/// of them.
#[inline(always)]
fn load_panel(
    unit: &Unit<'_>,
    keys: Range<usize>,
    (i, lanes): (usize, usize),
    scratch: &mut Scratch<'_>,
) {
    let p = unit.p;
    let sides = [
        (&p.k, p.head_dim, &mut *scratch.k),
        (&p.v, p.head_dim_v, &mut *scratch.v),
    ];
    for (rows, dim, panels) in sides {
        let size = lanes * padded(dim);
        let panel = &mut panels[i * size..][..size];
        panel.fill(0.0);
        let buffer = &mut scratch.row[..dim];
        for (lane, key) in keys.clone().enumerate() {
            unit.load_tile(rows, dim, key..key + 1, dim, buffer);
            into_panel(buffer, panel, lane, lanes);
        }
    }
}

/// Loads a tile of query rows, in natural order.
#[inline(always)]
fn load_rows(
    unit: &Unit<'_>,
    statistics: &Statistics<'_>,
    tile: Range<usize>,
    scratch: &mut Scratch<'_>,
) {
    let p = unit.p;
    let (dim, dim_v) = (padded(p.head_dim), padded(p.head_dim_v));
    for (i, row) in tile.enumerate() {
        unit.load_query(row, &mut scratch.q[i * dim..][..p.head_dim]);
        let dout = &mut scratch.dout[i * dim_v..][..p.head_dim_v];
        unit.load_row(&statistics.problem.dout, row, dout);
        (scratch.lse[i], scratch.delta[i]) = statistics.of(unit, row);
    }
}

/// Writes a key's row of a gradient.
#[inline(always)]
fn store(unit: &Unit<'_>, to: &Rows, key: usize, row: &mut [f32]) {
    let offset = to.offset(unit.batch, unit.sequence.k_start + key, unit.kv_head);
    // SAFETY: the row exists, within the sequence or its padding, and belongs to this unit alone.
    unsafe { store_row(to, offset, row) };
}
