//! The index of the greatest element of each row on the CPU: the greatest of each block by vectors, then its place if it counts.

use crate::cpu::float::{BLOCK, Float, with_float};
use crate::cpu::rows::row_of;
use crate::cpu::{Cpu, Run};
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::argmax::Problem;
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
    with_float!(p.x.dtype, T => {
        cpu.for_each_range(p.x.layout.num_rows(), dim, |rows| {
            cpu.vectorize(#[inline(always)] || {
                for row in rows.clone() {
                    // SAFETY: `row` is below the number of rows of the checked tensor.
                    let index = greatest(unsafe { row_of::<T>(&p.x, row, dim) });
                    // SAFETY: the output has an element for every row, which no other thread has.
                    unsafe { write(p, row, index) };
                }
            });
        });
    });
}

/// The index of the first of the greatest elements.
#[inline(always)]
fn greatest<T: Float>(x: &[T]) -> usize {
    let mut block = [0.0f32; BLOCK];
    let (mut best, mut index) = (i32::MIN, 0);
    for (start, x) in (0..).step_by(BLOCK).zip(x.chunks(BLOCK)) {
        let block = &mut block[..x.len()];
        T::load(x, block);
        let greatest = block.iter().fold(i32::MIN, |best, x| best.max(order(*x)));
        if greatest > best {
            best = greatest;
            index = start + block.iter().position(|x| order(*x) == best).unwrap_or(0);
        }
    }
    index
}

/// A number that grows with `x`; the greatest of all for NaN.
#[inline(always)]
fn order(x: f32) -> i32 {
    const INFINITY: i32 = 0x7f80_0000;
    let bits = x.to_bits() as i32;
    let magnitude = bits & i32::MAX;
    let signed = if bits < 0 { -magnitude } else { magnitude };
    if magnitude > INFINITY {
        i32::MAX
    } else {
        signed
    }
}

/// # Safety
/// The output has an element for the row, and nothing else accesses it.
unsafe fn write(p: &Problem, row: usize, index: usize) {
    let layout = &p.out.layout;
    let (mut offset, mut rest) = (0, row);
    for dim in (0..layout.rank()).rev() {
        offset += rest % layout.dim(dim) * layout.stride(dim);
        rest /= layout.dim(dim);
    }
    // SAFETY: the element is of the checked output; an index fits either dtype, as was checked.
    unsafe {
        match p.out.dtype {
            DType::I64 => p.out.ptr.cast::<i64>().add(offset).write(index as i64),
            DType::I32 => p.out.ptr.cast::<i32>().add(offset).write(index as i32),
            other => unreachable!("the output was checked to be of integers, not {other}"),
        }
    }
}
