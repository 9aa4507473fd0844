//! A tile of scores recomputed, and its gradient.
//!
//! One side of a tile is a panel, transposed, whose rows or keys are the lanes of vectors; the other is
//! a tile in natural order, of which each row or key is a line. Which is which is the only difference
//! between the gradient of the queries and those of keys and values.

use std::ops::Range;

use pulp::Simd;

use crate::cpu::attention::panel::{BLOCK, MAX_VECTORS, products, tile_keys};
use crate::cpu::attention::scores::{Tile, has_modifiers};
use crate::cpu::attention::simd::{exp_nonpositive, load, store};
use crate::cpu::attention::unit::Unit;
use crate::problem::attention::Problem;

/// One of the two products that a tile needs.
#[derive(Clone, Copy)]
pub(super) struct Factors<'a> {
    /// `[lines, dim]`, with room for a block that begins at the last line.
    pub lines: &'a [f32],
    /// `[dim, lanes]`.
    pub panel: &'a [f32],
    /// A multiple of [`BLOCK`].
    pub dim: usize,
}

/// Which rows and keys, and which of the two are the lines.
pub(super) struct Extent {
    pub rows: Range<usize>,
    pub keys: Range<usize>,
    pub lines_are_keys: bool,
}

impl Extent {
    pub fn lines(&self) -> usize {
        match self.lines_are_keys {
            true => self.keys.len(),
            false => self.rows.len(),
        }
    }
}

/// What a tile becomes, `[line, lane]`.
pub(super) struct Gradients<'a> {
    /// `exp(score - lse)`.
    pub weights: &'a mut [f32],
    /// Gradients of the scores as the softmax has them.
    pub scores: &'a mut [f32],
    /// Scores behind the softcap; empty without one.
    capped: &'a mut [f32],
}

impl<'a> Gradients<'a> {
    /// Sizes of the three buffers.
    pub fn sizes(p: &Problem, lanes: usize) -> [usize; 3] {
        // Products are made in whole blocks.
        let size = (tile_keys(p) + BLOCK) * lanes * MAX_VECTORS;
        [size, size, if p.softcap > 0.0 { size } else { 0 }]
    }

    pub fn new(weights: &'a mut [f32], scores: &'a mut [f32], capped: &'a mut [f32]) -> Self {
        Gradients {
            weights,
            scores,
            capped,
        }
    }

    /// Computes `weights`, and with the factors of `dout · v` also `scores`. `statistics` gives LSE and
    /// delta for a line and the number of a vector.
    #[inline(always)]
    pub fn compute<S: Simd, const N: usize>(
        &mut self,
        simd: S,
        unit: &Unit<'_>,
        extent: &Extent,
        scores: Factors<'_>,
        products_of_dout: Option<Factors<'_>>,
        statistics: impl Fn(usize, usize) -> (S::f32s, S::f32s),
    ) {
        let (lines, lanes) = (extent.lines(), S::F32_LANES * N);
        products::<S, N>(
            simd,
            scores.lines,
            scores.panel,
            scores.dim,
            lines,
            self.weights,
        );
        self.modify(unit, extent, lanes);
        if let Some(f) = products_of_dout {
            products::<S, N>(simd, f.lines, f.panel, f.dim, lines, self.scores);
        }
        let size = lines * lanes;
        let (weights, scores) = (&mut self.weights[..size], &mut self.scores[..size]);
        for line in 0..lines {
            for n in 0..N {
                let at = line * lanes + n * S::F32_LANES;
                let (lse, delta) = statistics(line, n);
                // SAFETY: vector `n` of a line is inside both, which have `lines` times `lanes`.
                unsafe {
                    let s = load::<S>(weights.as_ptr().add(at));
                    let w = exp_nonpositive(simd, simd.sub_f32s(s, lse));
                    store::<S>(weights.as_mut_ptr().add(at), w);
                    if products_of_dout.is_some() {
                        let dw = load::<S>(scores.as_ptr().add(at));
                        let ds = simd.mul_f32s(w, simd.sub_f32s(dw, delta));
                        store::<S>(scores.as_mut_ptr().add(at), ds);
                    }
                }
            }
        }
    }

    /// Softcap, bias, ALiBi, mask and windows.
    #[inline(always)]
    fn modify(&mut self, unit: &Unit<'_>, extent: &Extent, lanes: usize) {
        let p = unit.p;
        let common = unit.sequence.common(p, &extent.rows);
        let windows = common.start > extent.keys.start || common.end < extent.keys.end;
        let modifiers = has_modifiers(p);
        if !windows && !modifiers {
            return;
        }
        let (row_stride, key_stride) = match extent.lines_are_keys {
            true => (1, lanes),
            false => (lanes, 1),
        };
        let mut tile = Tile {
            scores: &mut *self.weights,
            row_stride,
            key_stride,
            rows: extent.rows.clone(),
            keys: extent.keys.clone(),
        };
        if p.softcap > 0.0 {
            tile.softcap(p.softcap);
            let size = extent.lines() * lanes;
            self.capped[..size].copy_from_slice(&tile.scores[..size]);
        }
        if modifiers {
            tile.modify_capped(unit);
        }
        if windows {
            tile.hide_outside_windows(unit);
        }
    }

    /// Turns the gradients of the scores into those before the softcap, whose derivative is
    /// `1 - (capped / softcap)²`.
    #[inline(always)]
    pub fn through_softcap(&mut self, p: &Problem, size: usize) {
        if p.softcap > 0.0 {
            let inverse = p.softcap.recip();
            for (ds, capped) in self.scores[..size].iter_mut().zip(&self.capped[..size]) {
                let t = capped * inverse;
                *ds *= (1.0 - t) * (1.0 + t);
            }
        }
    }
}

/// Row elements of a panel or a tile: whole blocks.
pub(super) fn padded(dim: usize) -> usize {
    dim.next_multiple_of(BLOCK)
}

/// Puts a row into lane `lane` of a panel `[dim, lanes]`.
#[inline(always)]
pub(super) fn into_panel(row: &[f32], panel: &mut [f32], lane: usize, lanes: usize) {
    for (to, from) in panel[lane..].iter_mut().step_by(lanes).zip(row) {
        *to = *from;
    }
}

/// Takes the row out of lane `lane` of a panel, times a factor.
#[inline(always)]
pub(super) fn from_panel(panel: &[f32], lane: usize, lanes: usize, factor: f32, row: &mut [f32]) {
    for (to, from) in row.iter_mut().zip(panel[lane..].iter().step_by(lanes)) {
        *to = *from * factor;
    }
}
