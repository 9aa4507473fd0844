//! What happens to a tile of scores between the product and the softmax: softcap, bias, ALiBi, masks.

use std::ops::Range;

use super::unit::Unit;
use crate::cpu::float::{Float, with_float};
use crate::cpu::math;
use crate::problem::attention::{Problem, Scores};

/// The most keys of a tile.
pub(super) const MAX_KEYS: usize = 64;

/// A tile of scores. One of the strides is 1.
pub(super) struct Tile<'a> {
    pub scores: &'a mut [f32],
    /// Distance of neighbouring rows.
    pub row_stride: usize,
    /// Distance of neighbouring keys.
    pub key_stride: usize,
    /// Rows of the key head.
    pub rows: Range<usize>,
    /// Keys of the sequence, at most [`MAX_KEYS`].
    pub keys: Range<usize>,
}

/// Whether scores need more than windows.
pub(super) fn has_modifiers(p: &Problem) -> bool {
    p.softcap > 0.0 || p.bias.is_some() || p.mask.is_some() || p.alibi_slopes.is_some()
}

impl Tile<'_> {
    /// Softcap, bias, ALiBi and mask.
    #[inline(always)]
    pub fn modify(&mut self, unit: &Unit<'_>) {
        if unit.p.softcap > 0.0 {
            self.softcap(unit.p.softcap);
        }
        self.modify_capped(unit);
    }

    /// Bias, ALiBi and mask, which come after the softcap.
    #[inline(always)]
    pub fn modify_capped(&mut self, unit: &Unit<'_>) {
        let p = unit.p;
        if let Some(bias) = &p.bias {
            self.add_bias(unit, bias);
        }
        if let Some((slopes, stride)) = p.alibi_slopes {
            for (i, row) in self.rows.clone().enumerate() {
                let (query, head) = unit.query_head(row);
                // SAFETY: checked to have an entry for every head of every sequence.
                let slope = unsafe { *slopes.add(unit.batch * stride + head) };
                let position = unit.sequence.position(query) - self.keys.start as i64;
                self.update_row(
                    i,
                    #[inline(always)]
                    |j, s| s - slope * (position - j as i64).abs() as f32,
                );
            }
        }
        if let Some(mask) = &p.mask {
            self.apply_mask(unit, mask);
        }
    }

    /// Hides the keys outside the rows' windows.
    #[inline(always)]
    pub fn hide_outside_windows(&mut self, unit: &Unit<'_>) {
        for (i, row) in self.rows.clone().enumerate() {
            let (query, _) = unit.query_head(row);
            let sequence = unit.sequence;
            let window = sequence.window(unit.p, sequence.position(query));
            let local = |key: usize| key.clamp(self.keys.start, self.keys.end) - self.keys.start;
            let (start, end) = (local(window.start), local(window.end));
            let n = self.keys.len();
            for j in (0..start).chain(end.max(start)..n) {
                self.scores[i * self.row_stride + j * self.key_stride] = f32::NEG_INFINITY;
            }
        }
    }

    #[inline(always)]
    pub fn softcap(&mut self, softcap: f32) {
        let n = self.keys.len();
        if self.row_stride == 1 {
            cap(&mut self.scores[..n * self.key_stride], softcap);
            return;
        }
        for i in 0..self.rows.len() {
            cap(&mut self.scores[i * self.row_stride..][..n], softcap);
        }
    }

    #[inline(always)]
    fn add_bias(&mut self, unit: &Unit<'_>, bias: &Scores) {
        let mut row_bias = [0.0f32; MAX_KEYS];
        let n = self.keys.len();
        let mut loaded = None;
        for (i, row) in self.rows.clone().enumerate() {
            let offset = self.offset(unit, bias, row);
            if loaded != Some(offset) {
                load_scores(bias, offset, &mut row_bias[..n]);
                loaded = Some(offset);
            }
            self.update_row(
                i,
                #[inline(always)]
                |j, s| s + row_bias[j],
            );
        }
    }

    #[inline(always)]
    fn apply_mask(&mut self, unit: &Unit<'_>, mask: &Scores) {
        for (i, row) in self.rows.clone().enumerate() {
            let offset = self.offset(unit, mask, row);
            // SAFETY: the mask was checked to cover the scores; as bytes, any value is valid.
            let visible = |j: usize| unsafe { *mask.ptr.add(offset + j * mask.key) } != 0;
            self.update_row(
                i,
                #[inline(always)]
                |j, s| if visible(j) { s } else { f32::NEG_INFINITY },
            );
        }
    }

    /// Offset of the first key of a row of the tile in a tensor of scores.
    #[inline(always)]
    fn offset(&self, unit: &Unit<'_>, scores: &Scores, row: usize) -> usize {
        let (query, head) = unit.query_head(row);
        unit.batch * scores.batch
            + head * scores.head
            + query * scores.query
            + self.keys.start * scores.key
    }

    /// Replaces every score of row `i` of the tile by a function of the key's index in the tile and the score.
    #[inline(always)]
    fn update_row(&mut self, i: usize, f: impl Fn(usize, f32) -> f32) {
        let n = self.keys.len();
        let row = &mut self.scores[i * self.row_stride..];
        if self.key_stride == 1 {
            for (j, s) in row[..n].iter_mut().enumerate() {
                *s = f(j, *s);
            }
            return;
        }
        for (j, s) in row.iter_mut().step_by(self.key_stride).take(n).enumerate() {
            *s = f(j, *s);
        }
    }
}

#[inline(always)]
fn cap(scores: &mut [f32], softcap: f32) {
    let inverse = softcap.recip();
    for s in scores {
        *s = softcap * math::tanh(*s * inverse);
    }
}

/// Widens a row of a tensor of scores.
#[inline(always)]
fn load_scores(scores: &Scores, offset: usize, to: &mut [f32]) {
    with_float!(scores.dtype, T => {
        // SAFETY: the tensor was checked to cover the scores; a repeated key has one element.
        let from = unsafe { scores.ptr.cast::<T>().add(offset) };
        if scores.key == 0 {
            // SAFETY: as above.
            to.fill(unsafe { *from }.widen());
        } else {
            // SAFETY: as above; keys are contiguous.
            T::load(unsafe { std::slice::from_raw_parts(from, to.len()) }, to);
        }
    });
}
