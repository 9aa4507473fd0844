//! Products with weights of 8 or 2 bits whose scales lie apart: rows of `x` are rounded to 8 bits,
//! and codes are multiplied and summed as integers, exactly. So a result depends on nothing but its
//! row and its weights.

mod dot;

use std::ops::Range;

use super::parts::{self, PART};
use crate::cpu::Cpu;
use crate::cpu::blocks::{Dot, blocks_of};
use crate::cpu::float::with_float;
use crate::cpu::quantize::round_row;
use crate::cpu::rows::part_of;
use crate::cpu::scratch::Floats;
use crate::error::Result;
use crate::problem::linear::Weights;
use crate::tensor::{RawTensor, Scratch};
use dot::{Format, Row, dots};

/// Whether all weights are such. Operations refuse some among others.
pub(super) fn serve<const N: usize>(weights: [&Weights; N]) -> bool {
    weights.iter().all(|w| w.weight.dtype.is_of_integers())
}

/// As [`for_each_row_part`](super::for_each_row_part), for such weights.
pub(super) fn run<const N: usize>(
    cpu: &Cpu,
    x: &RawTensor,
    weights: [&Weights; N],
    scratch: Scratch,
    done: impl Fn(usize, Range<usize>, [&mut [f32]; N]) + Sync,
) -> Result<()> {
    let rows = x.layout.num_rows();
    let weight = &weights[0].weight;
    let (columns, depth) = (weight.layout.dim(0), weight.layout.dim(1));
    let rounded = Rounded::new(cpu, x, scratch)?;
    let dot = Dot::new();
    let cost = depth.saturating_mul(rows * N * PART) / 8;
    parts::for_each(
        cpu,
        (rows, columns),
        cost,
        || (),
        |_, i, part, sums| compute(dot, &rounded, weights[i], part, sums),
        done,
    );
    Ok(())
}

/// Some rows of `x` by the weights' rows `columns`.
fn compute(
    dot: Dot,
    x: &Rounded,
    weights: &Weights,
    (rows, columns): (Range<usize>, Range<usize>),
    sums: &mut [[f32; PART]],
) {
    let weight = &weights.weight;
    let format = Format::of(weight.dtype);
    for (at, column) in columns.enumerate() {
        // SAFETY: a whole row of the checked matrix.
        let codes = unsafe { blocks_of(weight, column, 0..x.depth) };
        let scale = scale_of(weights, column);
        let mut row = 0;
        while row < sums.len() {
            let first = rows.start + row;
            let sums = &mut sums[row..];
            row += match sums.len() {
                1 => add::<1>(dot, (format, codes, scale), x, first, at, sums),
                2 => add::<2>(dot, (format, codes, scale), x, first, at, sums),
                3 => add::<3>(dot, (format, codes, scale), x, first, at, sums),
                _ => add::<4>(dot, (format, codes, scale), x, first, at, sums),
            };
        }
    }
}

/// The products of `R` rows from `first` on and of a row of weights. Gives `R`.
fn add<const R: usize>(
    dot: Dot,
    (format, codes, scale): (Format, &[u8], f32),
    x: &Rounded,
    first: usize,
    at: usize,
    sums: &mut [[f32; PART]],
) -> usize {
    let mut rows = [Row::EMPTY; R];
    for (r, row) in rows.iter_mut().enumerate() {
        *row = x.row(first + r);
    }
    let exact = dots(dot, format, codes, rows.map(|row| (row.codes, row.sum)));
    for ((sums, exact), row) in sums.iter_mut().zip(exact).zip(rows) {
        sums[at] = (scale * row.scale) * exact as f32;
    }
    R
}

/// What a row of weights is multiplied by.
pub(super) fn scale_of(weights: &Weights, row: usize) -> f32 {
    let Some(scales) = weights.scales else {
        return 1.0;
    };
    let rows_of_one = weights.out_features() / scales.len;
    // SAFETY: their number was checked to divide that of the rows.
    unsafe { scales.ptr.add(row / rows_of_one).read() }
}

/// Every row of a tensor, rounded to 8 bits.
struct Rounded {
    memory: Floats,
    depth: usize,
}

/// Floats that codes take.
fn of_codes(depth: usize) -> usize {
    depth.div_ceil(4)
}

/// Rows, and floats of one: its codes, its scale, the sum of its codes.
fn sizes(x: &RawTensor) -> (usize, usize) {
    let depth = x.layout.dim(x.layout.rank() - 1);
    (x.layout.num_rows(), of_codes(depth) + 2)
}

/// Bytes of a workspace with which [`run`] allocates nothing.
pub(super) fn bytes(x: &RawTensor) -> usize {
    let (rows, len) = sizes(x);
    Floats::bytes(rows, len)
}

impl Rounded {
    fn new(cpu: &Cpu, x: &RawTensor, scratch: Scratch) -> Result<Rounded> {
        let depth = x.layout.dim(x.layout.rank() - 1);
        let memory = Floats::in_or_new("linear", scratch, sizes(x), 0)?;
        cpu.for_each_range(x.layout.num_rows(), depth, |rows| {
            with_float!(x.dtype, X => cpu.vectorize(#[inline(always)] || {
                for row in rows.clone() {
                    // SAFETY: a row is one thread's.
                    let floats = unsafe { memory.part(row) };
                    let (codes, factors) = floats.split_at_mut(of_codes(depth));
                    // SAFETY: the bytes of the floats, which any integers may be.
                    let codes = unsafe {
                        std::slice::from_raw_parts_mut(codes.as_mut_ptr().cast::<i8>(), depth)
                    };
                    // SAFETY: a row of the checked tensor.
                    let x = unsafe { part_of::<X>(x, row, 0..depth) };
                    let (scale, sum) = round_row(x, codes);
                    (factors[0], factors[1]) = (scale, f32::from_bits(sum.cast_unsigned()));
                }
            }));
        });
        Ok(Rounded { memory, depth })
    }

    fn row(&self, row: usize) -> Row<'_> {
        // SAFETY: nobody writes once they are made.
        let floats: &[f32] = unsafe { self.memory.part(row) };
        let (codes, factors) = floats.split_at(of_codes(self.depth));
        // SAFETY: the bytes of the floats, which are initialised and may be of any bits.
        let codes = unsafe { std::slice::from_raw_parts(codes.as_ptr().cast::<i8>(), self.depth) };
        Row {
            codes,
            scale: factors[0],
            sum: factors[1].to_bits().cast_signed(),
        }
    }
}
