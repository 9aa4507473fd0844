//! Adding one tensor to another on the GPU.

use super::device::Resources;
use super::images::accumulate::Arguments;
use super::rows::{Divisor, Rows};
use super::table::Table;
use super::{Cuda, Run, VECTOR, check_blocks, is_aligned};
use crate::backend::Stream;
use crate::error::Result;
use crate::problem::accumulate::Problem;

const OP: &str = "accumulate";

/// By dtype of what is added, dtype of the sum, and elements per access.
pub(super) type Kernels = Table<Arguments, 3>;

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    Kernels::new(OP, resources, |c| [c.from, c.to, c.width])
}

/// Elements that the smallest block covers: one per thread and load.
const LEAST_PER_BLOCK: usize = 1024;

impl Run for Problem {
    fn check(&self) -> Result<()> {
        let (rows, length) = rows(self);
        let blocks = length
            .div_ceil(LEAST_PER_BLOCK)
            .saturating_mul(rows.rows_per_launch());
        check_blocks(OP, "x", blocks).map(drop)
    }

    fn run(&self, cuda: &Cuda, stream: Stream) -> Result<()> {
        add(cuda, self, stream)
    }
}

/// The rows, as one where there are no gaps, and their length.
fn rows(p: &Problem) -> (Rows<2>, usize) {
    let dim = p.x.layout.dim(p.x.layout.rank().saturating_sub(1));
    let rows = Rows::new([&p.x.layout, &p.out.layout]);
    rows.lengthened(dim)
}

fn add(cuda: &Cuda, p: &Problem, stream: Stream) -> Result<()> {
    if p.x.layout.is_empty() {
        return Ok(());
    }
    let (rows, length) = rows(p);
    // The wider of the two dtypes moves whole vectors.
    let vector = VECTOR / p.x.dtype.size().max(p.out.dtype.size());
    let fits = length.is_multiple_of(vector)
        && rows.aligned_to(vector)
        && is_aligned(&p.x, vector)
        && is_aligned(&p.out, vector);
    let width = if fits { vector } else { 1 };
    let of = [p.x.dtype as u32, p.out.dtype as u32, width as u32];
    let kernel = cuda.accumulate.get(of)?;
    let length = length / width;
    let blocks_per_row = length.div_ceil(kernel.choices.per_block as usize);
    let divisor = Divisor::new(blocks_per_row);
    for launch in rows.launches() {
        let [size_1, size_2] = launch.divisors();
        let blocks = check_blocks(OP, "x", launch.num_rows() * blocks_per_row)?;
        let stride = |dim: usize, i: usize| (launch.strides[dim][i] / width) as u64;
        let arguments = Arguments {
            x: (p.x.ptr.addr() + launch.offsets[0] * p.x.dtype.size()) as u64,
            out: (p.out.ptr.addr() + launch.offsets[1] * p.out.dtype.size()) as u64,
            size_1: size_1.size,
            size_1_multiplier: size_1.multiplier,
            size_1_shift: size_1.shift,
            size_2: size_2.size,
            size_2_multiplier: size_2.multiplier,
            size_2_shift: size_2.shift,
            length: length as u64,
            blocks_per_row: divisor.size,
            blocks_per_row_multiplier: divisor.multiplier,
            blocks_per_row_shift: divisor.shift,
            x_0: stride(0, 0),
            x_1: stride(1, 0),
            x_2: stride(2, 0),
            out_0: stride(0, 1),
            out_1: stride(1, 1),
            out_2: stride(2, 1),
            ..Arguments::ZERO
        };
        // SAFETY: the problem was checked: its tensors have the rows that the arguments describe.
        unsafe { cuda.launch(OP, kernel, blocks, &arguments, stream) }?;
    }
    Ok(())
}
