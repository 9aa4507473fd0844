//! Conversion between float dtypes on the CPU: parts of rows, in parallel.

use crate::cpu::float::{convert, with_float};
use crate::cpu::rows::{part_of, part_of_mut};
use crate::cpu::{Cpu, Run};
use crate::error::Result;
use crate::problem::cast::Problem;
use crate::tensor::Scratch;

/// Elements of a part.
const PART: usize = 16 << 10;

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
    let parts = dim.div_ceil(PART);
    with_float!(p.x.dtype, T => with_float!(p.out.dtype, U => {
        cpu.for_each_range(p.x.layout.num_rows() * parts, dim.min(PART), |range| {
            cpu.vectorize(#[inline(always)] || {
                for i in range.clone() {
                    let (row, first) = (i / parts, i % parts * PART);
                    let columns = first..dim.min(first + PART);
                    // SAFETY: row and columns lie inside the checked tensors, and no other thread has them.
                    let (from, to) = unsafe {
                        (part_of::<T>(&p.x, row, columns.clone()), part_of_mut::<U>(&p.out, row, columns))
                    };
                    convert(from, to);
                }
            });
        });
    }));
}
