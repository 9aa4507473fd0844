//! Products of a few rows: bound by reading the weights, each of which is read once and multiplies every row.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::widen;
use crate::cpu::Cpu;
use crate::cpu::float::{BLOCK, Float, with_float};
use crate::cpu::rows::row_of;
use crate::tensor::RawTensor;

/// Rows up to which this beats tiles.
pub(super) const MAX_ROWS: usize = 32;

/// Output columns that are finished at a time.
const PART: usize = 16;

/// Rows of weights that are multiplied at a time: independent sums enough to hide the latency of FMA.
const GROUP: usize = 4;

/// Sums of a part: rows of `x` by output columns.
type Sums = [[f32; PART]; MAX_ROWS];

pub(super) fn run<const N: usize>(
    cpu: &Cpu,
    x: &RawTensor,
    weights: [&RawTensor; N],
    done: impl Fn(usize, Range<usize>, [&mut [f32]; N]) + Sync,
) {
    let (columns, depth) = (weights[0].layout.dim(0), weights[0].layout.dim(1));
    let rows = x.layout.num_rows();
    let mut wide = vec![0.0f32; rows * depth];
    widen(cpu, x, 0..rows, 0..depth, &mut wide);
    let cost = depth.saturating_mul(rows * N * PART);
    cpu.for_each_range(columns.div_ceil(PART), cost, |parts| {
        cpu.arch().dispatch(Parts {
            x: &wide,
            rows,
            weights,
            parts,
            done: &done,
        });
    });
}

/// Some parts of the output's columns.
struct Parts<'a, F, const N: usize> {
    /// Rows of the weights' depth.
    x: &'a [f32],
    rows: usize,
    weights: [&'a RawTensor; N],
    parts: Range<usize>,
    done: &'a F,
}

impl<F: Fn(usize, Range<usize>, [&mut [f32]; N]), const N: usize> WithSimd for Parts<'_, F, N> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let columns = self.weights[0].layout.dim(0);
        let mut sums: [Sums; N] = [[[0.0; PART]; MAX_ROWS]; N];
        for part in self.parts {
            let part = part * PART..columns.min((part + 1) * PART);
            for (sums, weight) in sums.iter_mut().zip(self.weights) {
                with_float!(weight.dtype, W => {
                    products::<S, W>(simd, self.x, self.rows, weight, part.clone(), sums);
                });
            }
            for row in 0..self.rows {
                let sums = sums.each_mut().map(
                    #[inline(always)]
                    |sums| &mut sums[row][..part.len()],
                );
                (self.done)(row, part.clone(), sums);
            }
        }
    }
}

/// Every row of `x` by the weights' rows `columns`.
#[inline(always)]
fn products<S: Simd, W: Float>(
    simd: S,
    x: &[f32],
    rows: usize,
    weight: &RawTensor,
    columns: Range<usize>,
    sums: &mut Sums,
) {
    let depth = weight.layout.dim(1);
    let (mut column, mut at) = (columns.start, 0);
    while column + GROUP <= columns.end {
        let mut w: [&[W]; GROUP] = [&[]; GROUP];
        for (i, w) in w.iter_mut().enumerate() {
            // SAFETY: a row of the checked matrix.
            *w = unsafe { row_of::<W>(weight, column + i, depth) };
        }
        group(simd, x, rows, w, sums, at);
        (column, at) = (column + GROUP, at + GROUP);
    }
    while column < columns.end {
        // SAFETY: a row of the checked matrix.
        let w = [unsafe { row_of::<W>(weight, column, depth) }];
        group(simd, x, rows, w, sums, at);
        (column, at) = (column + 1, at + 1);
    }
}

/// Every row of `x` by `C` rows of weights, whose sums go to the columns from `at`. A sum does not depend on what is computed beside
/// it.
#[inline(always)]
fn group<S: Simd, W: Float, const C: usize>(
    simd: S,
    x: &[f32],
    rows: usize,
    w: [&[W]; C],
    sums: &mut Sums,
    at: usize,
) {
    let depth = w[0].len();
    let mut partial = [[simd.splat_f32s(0.0); C]; MAX_ROWS];
    let mut tails = [[0.0f32; C]; MAX_ROWS];
    let mut scratch = [[0.0f32; BLOCK]; C];
    for start in (0..depth).step_by(BLOCK) {
        let len = BLOCK.min(depth - start);
        let mut wide: [&[f32]; C] = [&[]; C];
        for ((wide, w), scratch) in wide.iter_mut().zip(w).zip(&mut scratch) {
            let w = &w[start..start + len];
            *wide = match W::as_f32(w) {
                Some(w) => w,
                None => {
                    let scratch = &mut scratch[..len];
                    W::load(w, scratch);
                    scratch
                }
            };
        }
        let mut row = 0;
        while row < rows {
            let x = |i: usize| &x[(row + i) * depth + start..][..len];
            let (partial, tails) = (&mut partial[row..], &mut tails[row..]);
            row += match rows - row {
                1 => step(simd, [x(0)], wide, partial, tails),
                2 => step(simd, [x(0), x(1)], wide, partial, tails),
                3 => step(simd, [x(0), x(1), x(2)], wide, partial, tails),
                _ => step(simd, [x(0), x(1), x(2), x(3)], wide, partial, tails),
            };
        }
    }
    for ((sums, partial), tails) in sums.iter_mut().zip(partial).zip(tails).take(rows) {
        for c in 0..C {
            sums[at + c] = simd.reduce_sum_f32s(partial[c]) + tails[c];
        }
    }
}

/// Adds the products of `R` rows of `x` and `C` rows of weights, all of one length, to vectors of partial sums and to the sums of
/// what is left. Gives `R`.
#[inline(always)]
fn step<S: Simd, const R: usize, const C: usize>(
    simd: S,
    x: [&[f32]; R],
    w: [&[f32]; C],
    partial: &mut [[S::f32s; C]],
    tails: &mut [[f32; C]],
) -> usize {
    let len = w[0].len();
    let whole = len / S::F32_LANES * S::F32_LANES;
    let mut sums = [[simd.splat_f32s(0.0); C]; R];
    sums.copy_from_slice(&partial[..R]);
    for i in (0..whole).step_by(S::F32_LANES) {
        let mut vectors = [simd.splat_f32s(0.0); C];
        for c in 0..C {
            // SAFETY: a vector from `i` ends within `whole`, no further than the slice, as all are of one length.
            vectors[c] = unsafe { vector::<S>(w[c], i) };
        }
        for r in 0..R {
            // SAFETY: as above.
            let x = unsafe { vector::<S>(x[r], i) };
            for c in 0..C {
                sums[r][c] = simd.mul_add_f32s(x, vectors[c], sums[r][c]);
            }
        }
    }
    partial[..R].copy_from_slice(&sums);
    for i in whole..len {
        for r in 0..R {
            for c in 0..C {
                tails[r][c] = x[r][i].mul_add(w[c][i], tails[r][c]);
            }
        }
    }
    R
}

/// # Safety
/// A vector's worth of elements from `start` lies inside the slice.
#[inline(always)]
unsafe fn vector<S: Simd>(slice: &[f32], start: usize) -> S::f32s {
    debug_assert!(start + S::F32_LANES <= slice.len());
    // SAFETY: the caller's promise; no alignment is asked for.
    unsafe { slice.as_ptr().add(start).cast::<S::f32s>().read_unaligned() }
}
