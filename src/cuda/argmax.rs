//! The index of the greatest element of each row on the GPU: a block per row.

use super::device::Resources;
use super::images::argmax::Arguments;
use super::rows::Rows;
use super::table::Table;
use super::{Cuda, VECTOR, check_blocks, is_aligned};
use crate::context::Stream;
use crate::dtype::DType;
use crate::error::Result;
use crate::ops::argmax::Problem;

const OP: &str = "argmax";

/// By dtype and elements per access.
pub(super) type Kernels = Table<Arguments, 2>;

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    Table::new(OP, resources, ["dtype", "width"])
}

/// Whether there is a kernel for the problem.
pub(crate) fn supported(p: &Problem) -> Result<()> {
    check_blocks(OP, "x", rows(p).rows_per_launch()).map(drop)
}

/// Rows of x and elements of the output, which has a dimension less, or as many if x has but one.
fn rows(p: &Problem) -> Rows<2> {
    let leading = p.x.layout.rank().saturating_sub(1);
    Rows::of_dims(leading, [&p.x.layout, &p.out.layout])
}

pub(crate) fn forward(cuda: &Cuda, p: &Problem, stream: Stream) -> Result<()> {
    if p.x.layout.is_empty() {
        return Ok(());
    }
    let rows = rows(p);
    let length = p.x.layout.dim(p.x.layout.rank().saturating_sub(1));
    let vector = VECTOR / p.x.dtype.size();
    let fits =
        length.is_multiple_of(vector) && rows.aligned_to_of(0, vector) && is_aligned(&p.x, vector);
    let width = if fits { vector } else { 1 };
    let kernel = cuda.argmax.get([p.x.dtype as u32, width as u32])?;
    for launch in rows.launches() {
        let num_rows: usize = launch.sizes.iter().product();
        let blocks = check_blocks(OP, "x", num_rows)?;
        let out = (p.out.ptr.addr() + launch.offsets[1] * p.out.dtype.size()) as u64;
        let x_stride = |dim: usize| (launch.strides[dim][0] / width) as u64;
        let arguments = Arguments {
            x: (p.x.ptr.addr() + launch.offsets[0] * p.x.dtype.size()) as u64,
            out,
            out_i64: out,
            size_1: launch.sizes[1] as u32,
            size_2: launch.sizes[2] as u32,
            length: (length / width) as u32,
            wide_ids: u32::from(p.out.dtype == DType::I64),
            x_0: x_stride(0),
            x_1: x_stride(1),
            x_2: x_stride(2),
            out_0: launch.strides[0][1] as u64,
            out_1: launch.strides[1][1] as u64,
            out_2: launch.strides[2][1] as u64,
        };
        // SAFETY: the problem was checked: its tensors have the rows that the arguments describe.
        unsafe { cuda.launch(OP, kernel, blocks, &arguments, stream) }?;
    }
    Ok(())
}
