//! Few rows by weights in blocks: activations are rounded to 16 bits, and codes are multiplied.
//! They are unpacked in registers by the kernels of [`fused`], else into memory, from where they
//! multiply every row. A row's result depends neither on the number of threads nor on the rows
//! beside it, as long as these are few.

use std::ops::Range;

use super::parts::{self, PART};
use crate::cpu::Cpu;
use crate::cpu::blocks::fused::{COLUMNS, Kernel, Rows};
use crate::cpu::blocks::{
    self, Bits, CHUNK, Chunk, Codes, Dot, Form, Format, Row, blocks_of, with_format,
};
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::linear::Weights;
use crate::tensor::{Activations, RawTensor, Scratch};

/// Rows up to which these products take less time than those of panels: measured with AVX-512.
pub(super) const MAX_ROWS: usize = 8;

/// Rows of weights that are unpacked before they are multiplied: what was just stored in pieces is
/// slow to load as a whole.
const AT_ONCE: usize = 4;

// A kernel multiplies all columns of a part.
const _: () = assert!(COLUMNS == PART);

/// What activations are rounded for, if all weights are in blocks of equal groups and what they
/// multiply may be rounded.
#[derive(Clone, Copy)]
pub(super) struct Blocks<const N: usize> {
    /// The weights' group, and the form of activations.
    pub shape: (usize, Form),
    pub dot: Dot,
    /// All of one form, or none.
    kernels: Option<[Kernel; N]>,
}

impl<const N: usize> Blocks<N> {
    pub fn new(weights: [&Weights; N]) -> Option<Blocks<N>> {
        let dtypes = weights.map(|w| w.weight.dtype);
        if !dtypes.iter().all(|dtype| dtype.is_in_blocks()) {
            return None;
        }
        let group = blocks::group(dtypes[0]);
        let alike = dtypes.iter().all(|dtype| blocks::group(*dtype) == group);
        if !alike || weights.iter().any(|w| w.float_activations()) {
            return None;
        }
        let dot = Dot::new();
        let of_bits = |bits| kernels(dot, dtypes, bits);
        let kernels = match bits(weights) {
            Bits::Eight => of_bits(Bits::Eight).or_else(|| of_bits(Bits::Sixteen)),
            Bits::Sixteen => of_bits(Bits::Sixteen),
        };
        let form = kernels.map_or(Form::Words, |kernels| kernels[0].form());
        Some(Blocks {
            shape: (group, form),
            dot,
            kernels,
        })
    }
}

/// Kernels of the same form, if there are such.
fn kernels<const N: usize>(dot: Dot, dtypes: [DType; N], bits: Bits) -> Option<[Kernel; N]> {
    let first = Kernel::new(dot, dtypes[0], bits)?;
    let mut kernels = [first; N];
    for (kernel, dtype) in kernels.iter_mut().zip(dtypes) {
        *kernel = Kernel::new(dot, dtype, bits).filter(|kernel| kernel.form() == first.form())?;
    }
    Some(kernels)
}

/// The fewest bits of activations that all of the weights allow.
pub(super) fn bits<const N: usize>(weights: [&Weights; N]) -> Bits {
    match weights.iter().all(|w| w.activations == Activations::Eight) {
        true => Bits::Eight,
        false => Bits::Sixteen,
    }
}

/// As [`for_each_row_part`](super::for_each_row_part), for such weights.
pub(super) fn run<const N: usize>(
    cpu: &Cpu,
    x: &RawTensor,
    weights: [&Weights; N],
    blocks: Blocks<N>,
    scratch: Scratch,
    done: impl Fn(usize, Range<usize>, [&mut [f32]; N]) + Sync,
) -> Result<()> {
    let rows = x.layout.num_rows();
    let weights = weights.map(|w| &w.weight);
    let (columns, depth) = (weights[0].layout.dim(0), weights[0].layout.dim(1));
    let activations = blocks::Activations::new(cpu, "linear", x, blocks.shape, scratch)?;
    let products = Products {
        cpu,
        dot: blocks.dot,
        x: &activations,
        rows,
    };
    let cost = depth.saturating_mul(rows * N * PART) / 4;
    parts::for_each(
        cpu,
        (rows, columns),
        cost,
        // Where nothing is unpacked, not even zeros are written.
        || match blocks.kernels {
            None => Some([const { Chunk::new() }; AT_ONCE]),
            Some(_) => None,
        },
        |chunks, i, (_, columns), sums| {
            if let Some(kernels) = blocks.kernels {
                products.compute_in_registers(kernels[i], weights[i], columns, sums);
            } else if let Some(chunks) = chunks {
                products.compute(weights[i], columns, chunks, sums);
            }
        },
        done,
    );
    Ok(())
}

/// What is the same for all columns.
struct Products<'a> {
    cpu: &'a Cpu,
    dot: Dot,
    x: &'a blocks::Activations,
    rows: usize,
}

impl Products<'_> {
    /// Every row of `x` by the weights' rows `columns`.
    fn compute_in_registers(
        &self,
        kernel: Kernel,
        weight: &RawTensor,
        columns: Range<usize>,
        sums: &mut [[f32; PART]],
    ) {
        let depth = weight.layout.dim(1);
        // Rows are whole blocks apart; one alone may have any stride.
        let apart = match weight.layout.dim(0) {
            1 => 0,
            _ => weight.dtype.row_bytes(weight.layout.stride(0)),
        };
        // SAFETY: a row of the checked matrix; there is one, or no part of it would be asked for.
        let first = unsafe { blocks_of(weight, columns.start, 0..depth) };
        // SAFETY: rows of the checked matrix, as far apart as its stride says.
        let w = unsafe { Rows::new(first, apart, columns.len()) };
        let mut row = 0;
        while row < self.rows {
            row += match self.rows - row {
                1 => self.multiply::<1>(kernel, w, row, sums),
                2 => self.multiply::<2>(kernel, w, row, sums),
                3 => self.multiply::<3>(kernel, w, row, sums),
                _ => self.multiply::<4>(kernel, w, row, sums),
            };
        }
    }

    /// `R` rows from `row` on by rows of weights. Gives `R`.
    fn multiply<const R: usize>(
        &self,
        kernel: Kernel,
        w: Rows<'_>,
        row: usize,
        sums: &mut [[f32; PART]],
    ) -> usize {
        let mut x = [Codes::EMPTY; R];
        for (r, x) in x.iter_mut().enumerate() {
            *x = self.x.codes(row + r);
        }
        let products = kernel.products(w, x);
        for (sums, products) in sums[row..].iter_mut().zip(products) {
            *sums = products;
        }
        R
    }

    /// Every row of `x` by the weights' rows `columns`. It is compiled once, whatever becomes of
    /// the sums.
    fn compute(
        &self,
        weight: &RawTensor,
        columns: Range<usize>,
        chunks: &mut [Chunk; AT_ONCE],
        sums: &mut [[f32; PART]],
    ) {
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
