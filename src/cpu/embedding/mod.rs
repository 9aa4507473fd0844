//! Embedding on the CPU: rows copied or converted, in parallel.

mod backward;

use crate::cpu::blocks::{CHUNK, Chunk, blocks_of, decode};
use crate::cpu::float::{BLOCK, Float, blocks, convert, with_float};
use crate::cpu::rows::{Integers, part_of_mut, row_of, row_of_mut};
use crate::cpu::{Cpu, Run};
use crate::error::{Error, Result, text};
use crate::problem::embedding::{Problem, Slice};
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
    let dim = p.table.layout.dim(1);
    // SAFETY: `ids` was checked, and whoever made the tensor has promised that it is initialised
    // memory which nobody writes during the call.
    let ids = unsafe { Integers::new(&p.ids) };
    check_ids(
        "embedding",
        ids,
        p.slice,
        ("the table", p.table.layout.dim(0)),
    )?;
    if p.table.dtype.is_in_blocks() {
        gather_blocks(cpu, p, ids);
        return Ok(());
    }
    with_float!(p.table.dtype, T => with_float!(p.out.dtype, U => {
        cpu.for_each_range(ids.len(), dim, |range| {
            cpu.vectorize(#[inline(always)] || {
                for i in range.clone() {
                    // SAFETY: `i` is a row of the output that no other thread has.
                    let to = unsafe { row_of_mut::<U>(&p.out, i, dim) };
                    match p.row(ids.get(i)) {
                        // SAFETY: a row of the checked table.
                        Some(row) => convert(unsafe { row_of::<T>(&p.table, row, dim) }, to),
                        None => {
                            for columns in blocks(dim) {
                                U::store(&[-0.0; BLOCK][..columns.len()], &mut to[columns]);
                            }
                        }
                    }
                }
            });
        });
    }));
    Ok(())
}

impl Problem {
    /// The row of the table that an id of the vocabulary names, if the table has it.
    #[inline(always)]
    fn row(&self, id: i64) -> Option<usize> {
        let row = (id as usize).checked_sub(self.slice.begin)?;
        (row < self.table.layout.dim(0)).then_some(row)
    }
}

/// Refuses ids that are no row of the vocabulary; `table` is what has `rows` of it.
fn check_ids(
    op: &'static str,
    ids: Integers<'_>,
    slice: Slice,
    (table, rows): (&str, usize),
) -> Result<()> {
    let Some((i, id)) = ids.find_outside(slice.vocab) else {
        return Ok(());
    };
    let problem = match slice.vocab == rows {
        true => text!("has {id} at index {i}, {table} has {rows} rows"),
        false => text!(
            "has {id} at index {i}, the vocabulary has {} rows",
            slice.vocab
        ),
    };
    Err(Error::invalid(op, "ids", problem))
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
                match p.row(ids.get(i)) {
                    Some(row) => {
                        // SAFETY: whole blocks of a row of the checked table.
                        let from = unsafe { blocks_of(&p.table, row, part.clone()) };
                        decode(cpu, p.table.dtype, from, wide, &mut chunk);
                    }
                    None => wide.fill(-0.0),
                }
                with_float!(p.out.dtype, U => cpu.vectorize(#[inline(always)] || {
                    // SAFETY: `i` is a row of the output that no other thread has.
                    U::store(wide, unsafe { part_of_mut::<U>(&p.out, i, part.clone()) });
                }));
            }
        }
    });
}
