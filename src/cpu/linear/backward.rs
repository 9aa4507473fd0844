//! Gradients of linear layers on the CPU: products whose sums go along rows, through the tiles of
//! the forward, and sums of columns.

use std::ops::Range;

use super::many_rows::{Operand, Tiles};
use crate::cpu::float::{BLOCK, Float, with_float};
use crate::cpu::rows::{part_of, part_of_mut};
use crate::cpu::{Cpu, Run};
use crate::error::Result;
use crate::problem::linear::{Backward, Gradient};
use crate::tensor::{RawTensor, Scratch};

const OP: &str = "linear_backward";

impl Run for Backward {
    fn run(&self, cpu: &Cpu, _: Scratch) -> Result<()> {
        let adds_nothing = self.accumulate && self.dout.layout.num_rows() == 0;
        let dweight = self.dweight.as_ref().filter(|_| !adds_nothing);
        let dbias = self.dbias.as_ref().filter(|_| !adds_nothing);
        // Nothing is written before there is memory for everything.
        let by_rows = Operand::by_rows(&self.dout);
        let dx = Product::new(cpu, by_rows, self.dx.as_ref(), false)?;
        let by_columns = Operand::by_columns(&self.dout);
        let dweight = Product::new(cpu, by_columns, dweight, self.accumulate)?;
        for product in [dx, dweight].iter().flatten() {
            product.run(cpu);
        }
        if let Some(dbias) = dbias {
            column_sums(cpu, &self.dout, dbias, self.accumulate);
        }
        Ok(())
    }
}

/// A gradient that is a product, and memory for it.
struct Product<'a> {
    tiles: Tiles<'a, 1>,
    out: &'a RawTensor,
    accumulate: bool,
}

impl<'a> Product<'a> {
    /// Of a gradient that is wanted and has elements, sums over the rows of what `dout` is
    /// multiplied by.
    fn new(
        cpu: &Cpu,
        dout: Operand<'a>,
        gradient: Option<&'a Gradient>,
        accumulate: bool,
    ) -> Result<Option<Self>> {
        let wanted = gradient.filter(|gradient| !gradient.out.layout.is_empty());
        let Some(Gradient { by, out }) = wanted else {
            return Ok(None);
        };
        let tiles = Tiles::new(cpu, OP, dout, [Operand::by_columns(by)])?;
        Ok(Some(Product {
            tiles,
            out,
            accumulate,
        }))
    }

    fn run(&self, cpu: &Cpu) {
        self.tiles.run(
            cpu,
            #[inline(always)]
            |row, columns, [sums]| store(sums, self.out, row, columns, self.accumulate),
        );
    }
}

/// Rounds sums to where they belong, having added what is there if asked to.
#[inline(always)]
fn store(sums: &mut [f32], out: &RawTensor, row: usize, columns: Range<usize>, accumulate: bool) {
    with_float!(out.dtype, T => {
        // SAFETY: `row` and `columns` lie inside the checked tensor, and no other thread has them.
        let out = unsafe { part_of_mut::<T>(out, row, columns) };
        if accumulate {
            for (sum, there) in sums.iter_mut().zip(out.iter()) {
                *sum += there.widen();
            }
        }
        T::store(sums, out);
    });
}

/// Columns that are summed at a time.
const COLUMNS: usize = 64;

/// Rows that are summed before what is rounded grows.
const ROWS: usize = 256;

/// Sums every column, in the order of the rows.
fn column_sums(cpu: &Cpu, dout: &RawTensor, out: &RawTensor, accumulate: bool) {
    const { assert!(COLUMNS <= BLOCK) };
    let (rows, columns) = (dout.layout.num_rows(), out.layout.dim(0));
    let parts = columns.div_ceil(COLUMNS);
    cpu.for_each_range(parts, rows.saturating_mul(COLUMNS), |range| {
        with_float!(dout.dtype, T => {
            cpu.vectorize(#[inline(always)] || {
                for part in range.clone() {
                    let part = part * COLUMNS..columns.min((part + 1) * COLUMNS);
                    let mut sums = [0.0; COLUMNS];
                    let sums = &mut sums[..part.len()];
                    sum_columns::<T>(dout, rows, part.clone(), sums);
                    store(sums, out, 0, part, accumulate);
                }
            });
        });
    });
}

/// The sums of some columns. Those of [`ROWS`] rows at a time are added, which keeps more of the
/// bits of long sums.
#[inline(always)]
fn sum_columns<T: Float>(t: &RawTensor, rows: usize, columns: Range<usize>, sums: &mut [f32]) {
    let mut wide = [0.0f32; COLUMNS];
    let wide = &mut wide[..columns.len()];
    for start in (0..rows).step_by(ROWS) {
        let mut partial = [0.0f32; COLUMNS];
        let partial = &mut partial[..columns.len()];
        for row in start..rows.min(start + ROWS) {
            // SAFETY: a row of the checked tensor.
            T::load(unsafe { part_of::<T>(t, row, columns.clone()) }, wide);
            for (sum, value) in partial.iter_mut().zip(wide.iter()) {
                *sum += value;
            }
        }
        for (sum, partial) in sums.iter_mut().zip(partial.iter()) {
            *sum += partial;
        }
    }
}
