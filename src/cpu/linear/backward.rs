//! Gradients of linear layers on the CPU: products whose sums go along rows, through the tiles of
//! the forward, and sums of columns.

use std::ops::Range;

use super::many_rows::{Operand, Tiles};
use crate::cpu::float::{BLOCK, Float, with_float};
use crate::cpu::rows::{part_of, part_of_mut};
use crate::cpu::scratch::Floats;
use crate::cpu::{Cpu, Run};
use crate::error::Result;
use crate::problem::linear::{Backward, Gradient};
use crate::tensor::{RawTensor, Scratch};

const OP: &str = "linear_backward";

impl Run for Backward {
    fn without_allocating(&self, cpu: &Cpu) -> usize {
        let products = self.products(cpu).into_iter().flatten();
        products
            .map(|product| product.tiles.bytes())
            .max()
            .unwrap_or(0)
    }

    fn probe(&self, cpu: &Cpu) -> Result<()> {
        let mut products = self.products(cpu).into_iter().flatten();
        products.try_for_each(|product| product.tiles.probe(OP))
    }

    fn run(&self, cpu: &Cpu, scratch: Scratch) -> Result<()> {
        let products = self.products(cpu);
        // Nothing is written before there is memory for everything. In a workspace the two take
        // turns.
        let mut memory = [None, None];
        for (memory, product) in memory.iter_mut().zip(&products) {
            if let Some(product) = product {
                *memory = Some(product.tiles.memory(OP, scratch)?);
            }
        }
        for (memory, product) in memory.iter().zip(&products) {
            if let (Some(memory), Some(product)) = (memory, product) {
                product.run(cpu, memory);
            }
        }
        if let Some(dbias) = self.dbias.as_ref().filter(|_| !self.adds_nothing()) {
            column_sums(cpu, &self.dout, dbias, self.accumulate);
        }
        Ok(())
    }
}

impl Backward {
    /// Whether parameters' gradients stay as they are: there are no rows.
    fn adds_nothing(&self) -> bool {
        self.accumulate && self.dout.layout.num_rows() == 0
    }

    /// The gradients by `x` and by the weight.
    fn products(&self, cpu: &Cpu) -> [Option<Product<'_>>; 2] {
        let dweight = self.dweight.as_ref().filter(|_| !self.adds_nothing());
        let (rows, columns) = (
            Operand::by_rows(&self.dout),
            Operand::by_columns(&self.dout),
        );
        [
            Product::new(cpu, rows, self.dx.as_ref(), self.add_dx),
            Product::new(cpu, columns, dweight, self.accumulate),
        ]
    }
}

/// A gradient that is a product.
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
    ) -> Option<Self> {
        let wanted = gradient.filter(|gradient| !gradient.out.layout.is_empty());
        let Gradient { by, out } = wanted?;
        Some(Product {
            tiles: Tiles::new(cpu, dout, [Operand::by_columns(by)]),
            out,
            accumulate,
        })
    }

    fn run(&self, cpu: &Cpu, memory: &Floats) {
        self.tiles.run(
            cpu,
            memory,
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
