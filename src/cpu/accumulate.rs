//! Adding one tensor to another on the CPU: parts of rows, in parallel.

use crate::cpu::float::{BLOCK, Float, blocks, with_float};
use crate::cpu::rows::{part_of, part_of_mut};
use crate::cpu::{Cpu, Run};
use crate::error::Result;
use crate::problem::accumulate::Problem;
use crate::tensor::Scratch;

/// Elements of a part.
const PART: usize = 16 << 10;

impl Run for Problem {
    fn run(&self, cpu: &Cpu, _: Scratch) -> Result<()> {
        with_float!(self.x.dtype, T => with_float!(self.out.dtype, U => add::<T, U>(cpu, self)));
        Ok(())
    }
}

fn add<T: Float, U: Float>(cpu: &Cpu, p: &Problem) {
    if p.x.layout.is_empty() {
        return;
    }
    let dim = p.x.layout.dim(p.x.layout.rank() - 1);
    let parts = dim.div_ceil(PART);
    let units = p.x.layout.num_rows() * parts;
    cpu.for_each_range(units, dim.min(PART), |range| {
        cpu.vectorize(
            #[inline(always)]
            || {
                let (mut x, mut sum) = ([0.0f32; BLOCK], [0.0f32; BLOCK]);
                for i in range.clone() {
                    let (row, first) = (i / parts, i % parts * PART);
                    let columns = first..dim.min(first + PART);
                    // SAFETY: row and columns lie inside the checked tensors, and no other thread has them.
                    let (from, to) = unsafe {
                        (
                            part_of::<T>(&p.x, row, columns.clone()),
                            part_of_mut::<U>(&p.out, row, columns),
                        )
                    };
                    for block in blocks(from.len()) {
                        let (x, sum) = (&mut x[..block.len()], &mut sum[..block.len()]);
                        T::load(&from[block.clone()], x);
                        U::load(&to[block.clone()], sum);
                        for (sum, x) in sum.iter_mut().zip(&*x) {
                            *sum += *x;
                        }
                        U::store(sum, &mut to[block]);
                    }
                }
            },
        );
    });
}
