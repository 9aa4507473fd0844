//! RMSNorm on the CPU: rows in parallel. Each is read twice, the second time from cache, in blocks that stay on the stack.

use std::ops::Range;

use crate::cpu::float::{BLOCK, Float, with_float};
use crate::cpu::rows::{part_of, part_of_mut};
use crate::cpu::{Cpu, Run};
use crate::error::Result;
use crate::problem::rms_norm::Problem;
use crate::tensor::{RawTensor, Scratch};

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
    with_float!(p.x.dtype, T => {
        cpu.for_each_range(p.x.layout.num_rows(), 4 * dim, |rows| {
            cpu.vectorize(#[inline(always)] || {
                let mut blocks = [[0.0f32; BLOCK]; 2];
                for row in rows.clone() {
                    // SAFETY: `row` is below the number of rows, ranges are disjoint, and the tensors were checked.
                    unsafe { normalise_row::<T>(p, row, dim, &mut blocks) };
                }
            });
        });
    });
}

/// # Safety
/// `row` is below the number of rows of `x`, which are `dim` contiguous elements of type T, as those of the residual and of the
/// outputs are; nothing else works on it.
#[inline(always)]
unsafe fn normalise_row<T: Float>(
    p: &Problem,
    row: usize,
    dim: usize,
    [sum, other]: &mut [[f32; BLOCK]; 2],
) {
    let parts = || {
        (0..dim)
            .step_by(BLOCK)
            .map(|start| start..dim.min(start + BLOCK))
    };
    let mut partial = [0.0f32; LANES];
    let mut tail = 0.0;
    for part in parts() {
        let (sum, other) = (&mut sum[..part.len()], &mut other[..part.len()]);
        // SAFETY: a part of the row.
        unsafe { load::<T>(p, row, &part, sum, other) };
        tail += add_squares(sum, &mut partial);
    }
    let mean = (partial.iter().sum::<f32>() + tail) / dim as f32;
    let scale = (mean + p.epsilon).sqrt().recip();
    for part in parts() {
        let (sum, other) = (&mut sum[..part.len()], &mut other[..part.len()]);
        // SAFETY: a part of the row; the weight was checked to be `dim` contiguous elements. An output that takes its input's place
        // is written after the last use of that part.
        unsafe {
            load::<T>(p, row, &part, sum, other);
            if let Some((_, residual_out)) = &p.residual {
                T::store(sum, part_of_mut::<T>(residual_out, row, part.clone()));
            }
            scale_columns(
                sum,
                part.clone(),
                (p.weight.as_ref(), p.weight_offset),
                scale,
                other,
            );
            T::store(sum, part_of_mut::<T>(&p.out, row, part));
        }
    }
}

/// Multiplies columns of a row by its scale and by their gains, if it has some, each with the offset
/// added. `other` is as long, and scratch.
///
/// # Safety
/// The columns are elements of the weight, which is contiguous and initialised.
#[inline(always)]
pub(super) unsafe fn scale_columns(
    values: &mut [f32],
    columns: Range<usize>,
    (weight, offset): (Option<&RawTensor>, f32),
    scale: f32,
    other: &mut [f32],
) {
    let Some(w) = weight else {
        values.iter_mut().for_each(|x| *x *= scale);
        return;
    };
    // SAFETY: the caller's promise.
    with_float!(w.dtype, W => W::load(unsafe { part_of::<W>(w, 0, columns) }, other));
    for (x, g) in values.iter_mut().zip(other.iter()) {
        *x *= scale * (g + offset);
    }
}

/// Loads a part of a row, with the residual added. `other` is as long, and scratch.
///
/// # Safety
/// As [`normalise_row`], and the part lies inside the row.
#[inline(always)]
unsafe fn load<T: Float>(
    p: &Problem,
    row: usize,
    part: &Range<usize>,
    sum: &mut [f32],
    other: &mut [f32],
) {
    // SAFETY: the part is of a row that is there and that nobody else writes, as promised.
    unsafe {
        T::load(part_of::<T>(&p.x, row, part.clone()), sum);
        if let Some((residual, _)) = &p.residual {
            T::load(part_of::<T>(residual, row, part.clone()), other);
            for (s, a) in sum.iter_mut().zip(other.iter()) {
                *s += a;
            }
        }
    }
}

/// Partial sums, so that the loop vectorises and long rows lose less to rounding.
pub(super) const LANES: usize = 16;

/// Adds squares to the partial sums; gives those of the elements left over, of which only a row's last part has some.
#[inline(always)]
pub(super) fn add_squares(part: &[f32], partial: &mut [f32; LANES]) -> f32 {
    let chunks = part.chunks_exact(LANES);
    let tail = chunks.remainder().iter().map(|x| x * x).sum();
    for chunk in chunks {
        for (p, x) in partial.iter_mut().zip(chunk) {
            *p += x * x;
        }
    }
    tail
}
