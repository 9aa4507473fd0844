//! The gradient of a table on the CPU: positions sorted by their ids, then every row summed over
//! its own, in their order.

use std::ops::Range;

use super::check_ids;
use crate::cpu::float::{BLOCK, Float, with_float};
use crate::cpu::rows::{Integers, part_of, part_of_mut};
use crate::cpu::{Cpu, Run};
use crate::error::{Error, Result};
use crate::problem::embedding::Backward;
use crate::tensor::{RawTensor, Scratch};

const OP: &str = "embedding_backward";

impl Run for Backward {
    fn run(&self, cpu: &Cpu, _: Scratch) -> Result<()> {
        backward(cpu, self)
    }
}

fn backward(cpu: &Cpu, p: &Backward) -> Result<()> {
    let (vocab, dim) = (p.dweight.layout.dim(0), p.dweight.layout.dim(1));
    if dim == 0 {
        return Ok(());
    }
    // SAFETY: `ids` was checked, and whoever made the tensor has promised that it is initialised
    // memory which nobody writes during the call.
    let ids = unsafe { Integers::new(&p.ids) };
    check_ids(OP, ids, p.slice, ("dweight", vocab))?;
    let sorted = Sorted::new(ids, p.slice.begin, vocab)?;
    let blocks = dim.div_ceil(BLOCK);
    let rows_per_id = ids.len().div_ceil(vocab.max(1)) + 1;
    // Blocks of one row lie apart, so that the many positions of a frequent id are shared.
    cpu.for_each_range(vocab * blocks, rows_per_id * dim.min(BLOCK), |items| {
        with_float!(p.dout.dtype, T => with_float!(p.dweight.dtype, U => {
            cpu.vectorize(#[inline(always)] || {
                let mut room = ([0.0f32; BLOCK], [0.0f32; BLOCK]);
                for item in items.clone() {
                    let (block, row) = (item / vocab, item % vocab);
                    let columns = block * BLOCK..dim.min((block + 1) * BLOCK);
                    let positions = match p.padding_idx {
                        Some(padding) if padding == row => &[],
                        _ => sorted.of(row),
                    };
                    if positions.is_empty() && p.accumulate {
                        continue;
                    }
                    let (sums, wide) = (&mut room.0[..columns.len()], &mut room.1[..columns.len()]);
                    sum::<T>(&p.dout, positions, columns.clone(), sums, wide);
                    // SAFETY: the row and columns lie inside the checked tensor, and no other
                    // thread has them.
                    let out = unsafe { part_of_mut::<U>(&p.dweight, row, columns) };
                    if p.accumulate {
                        U::load(out, wide);
                        add(sums, wide);
                    }
                    U::store(sums, out);
                }
            });
        }));
    });
    Ok(())
}

/// Sums a part of the rows at some positions, in their order.
#[inline(always)]
fn sum<T: Float>(
    t: &RawTensor,
    positions: &[usize],
    columns: Range<usize>,
    sums: &mut [f32],
    wide: &mut [f32],
) {
    sums.fill(0.0);
    for &position in positions {
        // SAFETY: a row of the checked tensor, which has one for each id.
        T::load(unsafe { part_of::<T>(t, position, columns.clone()) }, wide);
        add(sums, wide);
    }
}

#[inline(always)]
fn add(sums: &mut [f32], addends: &[f32]) {
    for (sum, addend) in sums.iter_mut().zip(addends) {
        *sum += *addend;
    }
}

/// The positions of every id, in their order.
struct Sorted {
    /// Where those of each id begin, and where the last end.
    starts: Vec<usize>,
    positions: Vec<usize>,
}

impl Sorted {
    /// Sorts by counting, without ids that are none of the `vocab` rows from `begin` on.
    fn new(ids: Integers<'_>, begin: usize, vocab: usize) -> Result<Sorted> {
        let zeros = |len: usize| {
            let mut list = Vec::new();
            list.try_reserve_exact(len).map_err(|_| {
                Error::out_of_host_memory(OP, len.saturating_mul(size_of::<usize>()))
            })?;
            list.resize(len, 0usize);
            Ok(list)
        };
        // Without ids there are no positions to be told apart.
        let rows = if ids.len() == 0 { 0 } else { vocab };
        let mut starts = zeros(rows + 1)?;
        let mut positions = zeros(ids.len())?;
        let row_of = |i| {
            let row = (ids.get(i) as usize).checked_sub(begin)?;
            (row < rows).then_some(row)
        };
        for row in (0..ids.len()).filter_map(row_of) {
            starts[row + 1] += 1;
        }
        for row in 0..rows {
            starts[row + 1] += starts[row];
        }
        // Every start moves to its end, which is the next one's start.
        for i in 0..ids.len() {
            let Some(row) = row_of(i) else { continue };
            let start = &mut starts[row];
            positions[*start] = i;
            *start += 1;
        }
        starts.rotate_right(1);
        starts[0] = 0;
        Ok(Sorted { starts, positions })
    }

    fn of(&self, row: usize) -> &[usize] {
        match self.starts.get(row..row + 2) {
            Some(&[start, end]) => &self.positions[start..end],
            _ => &[],
        }
    }
}
