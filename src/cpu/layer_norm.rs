//! LayerNorm on the CPU: rows in parallel, each read three times in blocks, from cache after the first.

use std::ops::Range;

use crate::cpu::float::{BLOCK, Float, blocks, with_float};
use crate::cpu::rows::{part_of, part_of_mut};
use crate::cpu::{Cpu, Run};
use crate::error::Result;
use crate::problem::layer_norm::Problem;
use crate::tensor::{RawTensor, Scratch};

impl Run for Problem {
    fn run(&self, cpu: &Cpu, _: Scratch) -> Result<()> {
        if self.x.layout.is_empty() {
            return Ok(());
        }
        let dim = self.x.layout.dim(self.x.layout.rank() - 1);
        with_float!(self.x.dtype, T => {
            cpu.for_each_range(self.x.layout.num_rows(), 6 * dim, |rows| {
                cpu.vectorize(#[inline(always)] || {
                    for row in rows.clone() {
                        // SAFETY: rows of the checked tensors; no other thread has this one.
                        unsafe { normalise_row::<T>(self, row, dim) };
                    }
                });
            });
        });
        Ok(())
    }
}

/// # Safety
/// `row` is a row of `x` of `dim` elements of type T, and no other thread works on it.
#[inline(always)]
unsafe fn normalise_row<T: Float>(p: &Problem, row: usize, dim: usize) {
    let mut values = [0.0f32; BLOCK];
    // SAFETY: the caller's promise.
    let (mean, variance) = unsafe {
        let mean = mean_of::<T>(
            &p.x,
            row,
            dim,
            #[inline(always)]
            |x| x,
        );
        let variance = mean_of::<T>(
            &p.x,
            row,
            dim,
            #[inline(always)]
            |x| (x - mean) * (x - mean),
        );
        (mean, variance)
    };
    let scale = (variance + p.epsilon).sqrt().recip();
    let (mut gains, mut biases) = ([1.0f32; BLOCK], [0.0f32; BLOCK]);
    for columns in blocks(dim) {
        let len = columns.len();
        // SAFETY: columns of checked rows and vectors; each block is read before it is overwritten.
        unsafe {
            T::load(part_of::<T>(&p.x, row, columns.clone()), &mut values[..len]);
            load_vector(p.weight.as_ref(), columns.clone(), &mut gains[..len]);
            load_vector(p.bias.as_ref(), columns.clone(), &mut biases[..len]);
            for ((x, gain), bias) in values[..len].iter_mut().zip(&gains).zip(&biases) {
                *x = (*x - mean) * (scale * gain) + bias;
            }
            T::store(&values[..len], part_of_mut::<T>(&p.out, row, columns));
        }
    }
}

/// The mean over a row of what `f` makes of each element, by 16 partial sums.
///
/// # Safety
/// `row` is a row of `x` of `dim` elements of type T.
#[inline(always)]
unsafe fn mean_of<T: Float>(x: &RawTensor, row: usize, dim: usize, f: impl Fn(f32) -> f32) -> f32 {
    let (mut values, mut partial) = ([0.0f32; BLOCK], [0.0f32; 16]);
    for columns in blocks(dim) {
        let values = &mut values[..columns.len()];
        // SAFETY: columns of the row.
        T::load(unsafe { part_of::<T>(x, row, columns) }, values);
        for chunk in values.chunks(16) {
            for (sum, x) in partial.iter_mut().zip(chunk) {
                *sum += f(*x);
            }
        }
    }
    partial.iter().sum::<f32>() / dim as f32
}

/// Columns of gains or biases; `to` stays as it is without them.
///
/// # Safety
/// The columns lie in the vector.
#[inline(always)]
unsafe fn load_vector(vector: Option<&RawTensor>, columns: Range<usize>, to: &mut [f32]) {
    if let Some(vector) = vector {
        // SAFETY: the caller's promise; a vector is a single row.
        with_float!(vector.dtype, W => W::load(unsafe { part_of::<W>(vector, 0, columns) }, to));
    }
}
