//! Embedding on the CPU: rows copied or converted, in parallel.

mod backward;

use crate::cpu::blocks::{CHUNK, Chunk, blocks_of, decode};
use crate::cpu::float::{Float, convert, with_float};
use crate::cpu::rows::{Integers, part_of_mut, row_of, row_of_mut};
use crate::cpu::{Cpu, Run};
use crate::error::{Error, Result, text};
use crate::problem::embedding::Problem;
use crate::tensor::Scratch;

impl Run for Problem {
    fn run(&self, cpu: &Cpu, _: Scratch) -> Result<()> {
        forward(cpu, self)
    }
}

fn forward(cpu: &Cpu, p: &Problem) -> Result<()> {
    if p.out.layout.is_empty() {
        return Ok(());
    }
    let (vocab, dim) = (p.table.layout.dim(0), p.table.layout.dim(1));
    // SAFETY: `ids` was checked, and whoever made the tensor has promised that it is initialised
    // memory which nobody writes during the call.
    let ids = unsafe { Integers::new(&p.ids) };
    if let Some((i, id)) = ids.find_outside(vocab) {
        let problem = text!("has {id} at index {i}, the table has {vocab} rows");
        return Err(Error::invalid("embedding", "ids", problem));
    }
    if p.table.dtype.is_in_blocks() {
        gather_blocks(cpu, p, ids);
        return Ok(());
    }
    with_float!(p.table.dtype, T => with_float!(p.out.dtype, U => {
        cpu.for_each_range(ids.len(), dim, |range| {
            cpu.vectorize(#[inline(always)] || {
                for i in range.clone() {
                    // SAFETY: the id was checked to be a row of the table, `i` is a row of the output that no other thread has.
                    let (from, to) = unsafe {
                        (row_of::<T>(&p.table, ids.get(i) as usize, dim), row_of_mut::<U>(&p.out, i, dim))
                    };
                    convert(from, to);
                }
            });
        });
    }));
    Ok(())
}

/// Rows of a table in blocks, decoded.
fn gather_blocks(cpu: &Cpu, p: &Problem, ids: Integers<'_>) {
    let dim = p.table.layout.dim(1);
    cpu.for_each_range(ids.len(), dim, |range| {
        let (mut chunk, mut wide) = (Chunk::new(), [0.0; CHUNK]);
        for i in range {
            for start in (0..dim).step_by(CHUNK) {
                let part = start..dim.min(start + CHUNK);
                let wide = &mut wide[..part.len()];
                // SAFETY: whole blocks of a row of the table, which the id was checked to be.
                let from = unsafe { blocks_of(&p.table, ids.get(i) as usize, part.clone()) };
                decode(cpu, p.table.dtype, from, wide, &mut chunk);
                with_float!(p.out.dtype, U => cpu.vectorize(#[inline(always)] || {
                    // SAFETY: `i` is a row of the output that no other thread has.
                    U::store(wide, unsafe { part_of_mut::<U>(&p.out, i, part.clone()) });
                }));
            }
        }
    });
}
