//! Few rows by weights in blocks: activations are rounded to 16 bits, and codes are multiplied. Each
//! block is read and unpacked once, and multiplies every row. A row's result depends neither on the
//! number of threads nor on the rows beside it.

use std::ops::Range;

use super::few_rows::{MAX_ROWS, PART};
use crate::cpu::Cpu;
use crate::cpu::blocks::{
    Activations, CHUNK, Chunk, Dot, Format, Row, blocks_of, group, with_format,
};
use crate::error::Result;
use crate::problem::linear::Weights;
use crate::tensor::{RawTensor, Scratch};

/// Rows of weights that are unpacked before they are multiplied: what was just stored in pieces is slow
/// to load as a whole.
const AT_ONCE: usize = 4;

/// The group of all weights, if they are in blocks of equal groups and what they multiply may be
/// rounded.
pub(super) fn group_of<const N: usize>(weights: [&Weights; N]) -> Option<usize> {
    let first = group(weights[0].weight.dtype);
    let all = weights.iter().all(|w| {
        let dtype = w.weight.dtype;
        dtype.is_in_blocks() && !w.float_activations && group(dtype) == first
    });
    all.then_some(first)
}

/// As [`for_each_row_part`](super::for_each_row_part), for weights in such groups.
pub(super) fn run<const N: usize>(
    cpu: &Cpu,
    x: &RawTensor,
    weights: [&Weights; N],
    group: usize,
    scratch: Scratch,
    done: impl Fn(usize, Range<usize>, [&mut [f32]; N]) + Sync,
) -> Result<()> {
    let rows = x.layout.num_rows();
    let weights = weights.map(|w| &w.weight);
    let (columns, depth) = (weights[0].layout.dim(0), weights[0].layout.dim(1));
    let activations = Activations::new(cpu, "linear", x, group, scratch)?;
    let products = Products {
        cpu,
        dot: Dot::new(),
        x: &activations,
        rows,
    };
    let cost = depth.saturating_mul(rows * N * PART) / 4;
    cpu.for_each_range(columns.div_ceil(PART), cost, |parts| {
        let mut chunks = [const { Chunk::new() }; AT_ONCE];
        let mut sums = [[[0.0f32; PART]; MAX_ROWS]; N];
        for part in parts {
            let part = part * PART..columns.min((part + 1) * PART);
            for (sums, weight) in sums.iter_mut().zip(weights) {
                products.compute(weight, part.clone(), &mut chunks, sums);
            }
            cpu.vectorize(
                #[inline(always)]
                || {
                    for row in 0..rows {
                        let sums = sums.each_mut().map(
                            #[inline(always)]
                            |sums| &mut sums[row][..part.len()],
                        );
                        done(row, part.clone(), sums);
                    }
                },
            );
        }
    });
    Ok(())
}

/// What is the same for all columns.
struct Products<'a> {
    cpu: &'a Cpu,
    dot: Dot,
    x: &'a Activations,
    rows: usize,
}

impl Products<'_> {
    /// Every row of `x` by the weights' rows `columns`. It is compiled once, whatever becomes of the
    /// sums.
    fn compute(
        &self,
        weight: &RawTensor,
        columns: Range<usize>,
        chunks: &mut [Chunk; AT_ONCE],
        sums: &mut [[f32; PART]; MAX_ROWS],
    ) {
        let sums = &mut sums[..self.rows];
        with_format!(weight.dtype, F => self.cpu.vectorize(#[inline(always)] || {
            self.compute_in::<F>(weight, columns.clone(), chunks, sums);
        }));
    }

    #[inline(always)]
    fn compute_in<F: Format>(
        &self,
        weight: &RawTensor,
        columns: Range<usize>,
        chunks: &mut [Chunk; AT_ONCE],
        sums: &mut [[f32; PART]],
    ) {
        let depth = weight.layout.dim(1);
        for sums in sums.iter_mut() {
            sums.fill(0.0);
        }
        for first in (0..columns.len()).step_by(AT_ONCE) {
            let here = first..columns.len().min(first + AT_ONCE);
            for start in (0..depth).step_by(CHUNK) {
                let part = start..depth.min(start + CHUNK);
                for (at, chunk) in here.clone().zip(chunks.iter_mut()) {
                    let column = columns.start + at;
                    // SAFETY: whole blocks of a row of the checked matrix.
                    chunk.unpack::<F>(unsafe { blocks_of(weight, column, part.clone()) });
                }
                for (at, chunk) in here.clone().zip(chunks.iter()) {
                    self.add_rows::<F>(chunk, &part, at, sums);
                }
            }
        }
    }

    /// Adds the products of a chunk and of all rows.
    #[inline(always)]
    fn add_rows<F: Format>(
        &self,
        chunk: &Chunk,
        part: &Range<usize>,
        at: usize,
        sums: &mut [[f32; PART]],
    ) {
        let mut row = 0;
        while row < sums.len() {
            row += match sums.len() - row {
                1 => self.add::<F, 1>(chunk, part, row, at, sums),
                2 => self.add::<F, 2>(chunk, part, row, at, sums),
                3 => self.add::<F, 3>(chunk, part, row, at, sums),
                _ => self.add::<F, 4>(chunk, part, row, at, sums),
            };
        }
    }

    /// Adds the products of a chunk and of `R` rows from `row` on. Gives `R`.
    #[inline(always)]
    fn add<F: Format, const R: usize>(
        &self,
        chunk: &Chunk,
        part: &Range<usize>,
        row: usize,
        at: usize,
        sums: &mut [[f32; PART]],
    ) -> usize {
        let (mut x, mut total) = ([Row::EMPTY; R], [0.0; R]);
        for r in 0..R {
            x[r] = self.x.row(row + r).part(part.clone(), F::GROUP);
            total[r] = sums[row + r][at];
        }
        self.dot.add(chunk, (part.len(), F::GROUP), x, &mut total);
        for (sums, total) in sums[row..].iter_mut().zip(total) {
            sums[at] = total;
        }
        R
    }
}
