//! Embedding on the CPU: rows copied or converted, in parallel.

mod backward;

use crate::cpu::float::{convert, with_float};
use crate::cpu::rows::{Integers, row_of, row_of_mut};
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
