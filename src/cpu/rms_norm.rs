//! RMSNorm on the CPU: rows in parallel, each read once into an f32 row that stays in cache.

use crate::cpu::float::{Float, with_float};
use crate::cpu::rows::{row_of, row_of_mut};
use crate::cpu::{Cpu, Run};
use crate::error::Result;
use crate::problem::rms_norm::Problem;
use crate::tensor::Scratch;

impl Run for Problem {
    fn run(&self, cpu: &Cpu, _: Scratch) -> Result<()> {
        forward(cpu, self);
        Ok(())
    }
}

fn forward(cpu: &Cpu, p: &Problem) {
    if p.x.layout.is_empty() {
        return;
    }
    let dim = p.x.layout.dim(p.x.layout.rank() - 1);
    let gains = gains(p, dim);
    with_float!(p.x.dtype, T => {
        cpu.for_each_range(p.x.layout.num_rows(), 4 * dim, |rows| {
            let mut sum = vec![0.0f32; dim];
            let mut addend = vec![0.0f32; if p.residual.is_some() { dim } else { 0 }];
            cpu.vectorize(#[inline(always)] || {
                for row in rows.clone() {
                    // SAFETY: `row` is below the number of rows, ranges are disjoint, and the tensors were checked.
                    unsafe { normalise_row::<T>(p, row, &gains, &mut sum, &mut addend) };
                }
            });
        });
    });
}

/// `weight + weight_offset` in f32.
fn gains(p: &Problem, dim: usize) -> Vec<f32> {
    let mut gains = vec![1.0f32; dim];
    if let Some(w) = &p.weight {
        // SAFETY: `weight` was checked to be `dim` contiguous elements.
        with_float!(w.dtype, W => W::load(unsafe { row_of::<W>(w, 0, dim) }, &mut gains));
        for g in &mut gains {
            *g += p.weight_offset;
        }
    }
    gains
}

/// # Safety
/// `row` is below the number of rows of `x`, and no other thread works on it.
#[inline(always)]
unsafe fn normalise_row<T: Float>(
    p: &Problem,
    row: usize,
    gains: &[f32],
    sum: &mut [f32],
    addend: &mut [f32],
) {
    let dim = sum.len();
    // SAFETY: the caller's promise; rows were checked to be `dim` contiguous elements of dtype T.
    unsafe {
        T::load(row_of::<T>(&p.x, row, dim), sum);
        if let Some((residual, residual_out)) = &p.residual {
            T::load(row_of::<T>(residual, row, dim), addend);
            for (s, a) in sum.iter_mut().zip(addend.iter()) {
                *s += a;
            }
            T::store(sum, row_of_mut::<T>(residual_out, row, dim));
        }
        let scale = (mean_square(sum) + p.epsilon).sqrt().recip();
        for (s, g) in sum.iter_mut().zip(gains) {
            *s *= scale * g;
        }
        T::store(sum, row_of_mut::<T>(&p.out, row, dim));
    }
}

/// Mean of squares with 16 partial sums, so that the loop vectorises and long rows lose less to rounding.
#[inline(always)]
fn mean_square(row: &[f32]) -> f32 {
    let mut partial = [0.0f32; 16];
    let chunks = row.chunks_exact(16);
    let tail: f32 = chunks.remainder().iter().map(|x| x * x).sum();
    for chunk in chunks {
        for (p, x) in partial.iter_mut().zip(chunk) {
            *p += x * x;
        }
    }
    (partial.iter().sum::<f32>() + tail) / row.len() as f32
}
