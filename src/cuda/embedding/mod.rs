//! Embedding on the GPU.

mod backward;

use super::device::Resources;
use super::images::embedding::Arguments;
use super::rows::{Divisor, Rows};
use super::table::Table;
use super::{Cuda, Run, VECTOR, blocks, check_blocks, is_aligned};
use crate::backend::Stream;
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::embedding::Problem;

const OP: &str = "embedding";

/// The operation's kernels, and those of its gradient.
pub(crate) struct Kernels {
    /// By dtype of the table, dtype of the output, and elements per access.
    forward: Table<Arguments, 3>,
    backward: backward::Kernels,
}

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    Ok(Kernels {
        forward: Table::<Arguments, 3>::new(OP, resources, |c| [c.table, c.dtype, c.width])?,
        backward: backward::kernels(resources)?,
    })
}

/// Elements that the smallest block covers: two per thread.
const LEAST_PER_BLOCK: usize = 256;

impl Run for Problem {
    fn check(&self) -> Result<()> {
        supported(self)
    }

    fn run(&self, cuda: &Cuda, stream: Stream) -> Result<()> {
        forward(cuda, self, stream)
    }
}

/// Whether there is a kernel for the problem.
fn supported(p: &Problem) -> Result<()> {
    if p.table.dtype.is_in_blocks() {
        return blocks::fit(OP, "ids", rows(p).rows_per_launch(), p.table.layout.dim(1));
    }
    let per_row = p.table.layout.dim(1).div_ceil(LEAST_PER_BLOCK);
    let blocks = rows(p).rows_per_launch().saturating_mul(per_row);
    check_blocks(OP, "ids", blocks).map(drop)
}

/// Ids and rows of the output: the output has one dimension more.
fn rows(p: &Problem) -> Rows<2> {
    Rows::of_dims(p.ids.layout.rank(), [&p.ids.layout, &p.out.layout])
}

fn forward(cuda: &Cuda, p: &Problem, stream: Stream) -> Result<()> {
    if p.out.layout.is_empty() {
        return Ok(());
    }
    if p.table.dtype.is_in_blocks() {
        return blocks::gather(cuda, OP, p, stream);
    }
    let rows = rows(p);
    let dim = p.table.layout.dim(1);
    // The wider of the two dtypes moves whole vectors.
    let vector = VECTOR / p.table.dtype.size().max(p.out.dtype.size());
    let fits = dim.is_multiple_of(vector)
        && p.table.layout.stride(0).is_multiple_of(vector)
        && rows.aligned_to_of(1, vector)
        && is_aligned(&p.table, vector)
        && is_aligned(&p.out, vector);
    let width = if fits { vector } else { 1 };
    let length = dim / width;
    let kernel =
        cuda.embedding
            .forward
            .get([p.table.dtype as u32, p.out.dtype as u32, width as u32])?;
    let blocks_per_row = length.div_ceil(kernel.choices.per_block as usize);
    let divisor = Divisor::new(blocks_per_row);
    for launch in rows.launches() {
        let num_rows = launch.num_rows();
        let [size_1, size_2] = launch.divisors();
        let blocks = check_blocks(OP, "ids", num_rows * blocks_per_row)?;
        let ids = (p.ids.ptr.addr() + launch.offsets[0] * p.ids.dtype.size()) as u64;
        let out = (p.out.ptr.addr() + launch.offsets[1] * p.out.dtype.size()) as u64;
        let arguments = Arguments {
            table: p.table.ptr.addr() as u64,
            ids,
            ids_i64: ids,
            out,
            size_1: size_1.size,
            size_1_multiplier: size_1.multiplier,
            size_1_shift: size_1.shift,
            size_2: size_2.size,
            size_2_multiplier: size_2.multiplier,
            size_2_shift: size_2.shift,
            length: length as u32,
            blocks_per_row: divisor.size,
            blocks_per_row_multiplier: divisor.multiplier,
            blocks_per_row_shift: divisor.shift,
            rows: p.table.layout.dim(0) as u64,
            begin: p.slice.begin as u64,
            vocab: p.slice.vocab as u64,
            table_stride: (p.table.layout.stride(0) / width) as u64,
            wide_ids: u32::from(p.ids.dtype == DType::I64),
            ids_0: launch.strides[0][0] as u64,
            ids_1: launch.strides[1][0] as u64,
            ids_2: launch.strides[2][0] as u64,
            out_0: (launch.strides[0][1] / width) as u64,
            out_1: (launch.strides[1][1] / width) as u64,
            out_2: (launch.strides[2][1] / width) as u64,
            ..Arguments::ZERO
        };
        // SAFETY: the problem was checked: its tensors have the rows that the arguments describe; ids outside the table are seen to
        // by the kernel.
        unsafe { cuda.launch(OP, kernel, blocks, &arguments, stream) }?;
    }
    Ok(())
}
