//! Parts of attention as one, on the CPU: rows in parallel.

use crate::cpu::float::{BLOCK, Float, blocks, with_float};
use crate::cpu::rows::{part_of, part_of_mut};
use crate::cpu::{Cpu, Run, math};
use crate::error::Result;
use crate::problem::attention_merge::Problem;
use crate::tensor::{RawTensor, Scratch};

impl Run for Problem {
    fn run(&self, cpu: &Cpu, _: Scratch) -> Result<()> {
        with_float!(self.outs.dtype, T => with_float!(self.out.dtype, U => merge::<T, U>(cpu, self)));
        Ok(())
    }
}

/// A logarithm, where the row of a tensor `[.., B, S, H]` is: heads lie before tokens.
///
/// # Safety
/// The row is one of the output's, and the part one of the tensor's, if it has any.
#[inline(always)]
unsafe fn lse_of(p: &Problem, t: &RawTensor, part: Option<usize>, row: usize) -> *mut f32 {
    let shape = p.out.layout.shape();
    let (tokens, heads) = (shape[1], shape[2]);
    let of = [row / heads / tokens, row % heads, row / heads % tokens];
    let first = usize::from(part.is_some());
    let mut offset = part.map_or(0, |part| part * t.layout.stride(0));
    for (dim, index) in of.into_iter().enumerate() {
        offset += index * t.layout.stride(first + dim);
    }
    // SAFETY: an element of the checked tensor, whose offsets fit an isize.
    unsafe { t.ptr.cast::<f32>().add(offset) }
}

fn merge<T: Float, U: Float>(cpu: &Cpu, p: &Problem) {
    let (rows, parts) = (p.rows(), p.outs.layout.dim(0));
    let dim = p.out.layout.dim(3);
    cpu.for_each_range(rows, dim.saturating_mul(parts), |range| {
        cpu.vectorize(
            #[inline(always)]
            || {
                for row in range.clone() {
                    // SAFETY: a row of the checked tensors, which no other thread has.
                    unsafe { merge_row::<T, U>(p, row, (rows, parts, dim)) };
                }
            },
        );
    });
}

/// # Safety
/// The row is one of so many of the checked tensors, and no other thread has it.
#[inline(always)]
unsafe fn merge_row<T: Float, U: Float>(
    p: &Problem,
    row: usize,
    (rows, parts, dim): (usize, usize, usize),
) {
    // SAFETY: the caller's promise; each part has a logarithm for every row.
    let lse = |part: usize| unsafe { *lse_of(p, &p.lses, Some(part), row) };
    // Where all are −∞ their exponentials are to be zero.
    let peak = (0..parts).map(lse).fold(f32::MIN, f32::max);
    let total: f32 = (0..parts).map(|part| math::exp(lse(part) - peak)).sum();
    // Not `> 0`: a NaN is to come through.
    let factor = if total == 0.0 { 0.0 } else { 1.0 / total };
    let (mut sums, mut block) = ([0.0f32; BLOCK], [0.0f32; BLOCK]);
    for columns in blocks(dim) {
        let sums = &mut sums[..columns.len()];
        let block = &mut block[..columns.len()];
        sums.fill(0.0);
        for part in 0..parts {
            let weight = math::exp(lse(part) - peak);
            if weight == 0.0 {
                continue;
            }
            // SAFETY: row and columns lie inside the part; what is written is not borrowed meanwhile.
            T::load(
                unsafe { part_of(&p.outs, part * rows + row, columns.clone()) },
                block,
            );
            for (sum, x) in sums.iter_mut().zip(&*block) {
                *sum = x.mul_add(weight, *sum);
            }
        }
        sums.iter_mut().for_each(|sum| *sum *= factor);
        // SAFETY: row and columns lie inside the output, and no other thread has them.
        U::store(sums, unsafe { part_of_mut(&p.out, row, columns) });
    }
    if let Some(t) = &p.lse {
        // SAFETY: the output has a logarithm for every row, which no other thread has.
        unsafe { *lse_of(p, t, None, row) = peak + total.ln() };
    }
}
