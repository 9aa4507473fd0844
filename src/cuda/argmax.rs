//! The index of the greatest element of each row on the GPU. Few rows are spread over many blocks, which settle it among themselves in
//! the output: no workspace, no second launch.

use super::device::Resources;
use super::images::argmax::Arguments;
use super::rows::{Divisor, Rows};
use super::table::Table;
use super::{Cuda, Run, VECTOR, check_blocks, is_aligned};
use crate::backend::Stream;
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::argmax::Problem;

const OP: &str = "argmax";

/// By dtype, elements per access, and accesses of a thread.
pub(super) type Kernels = Table<Arguments, 3>;

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    Kernels::new(OP, resources, |c| [c.dtype, c.width, c.unroll])
}

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
    check_blocks(OP, "x", rows(p).rows_per_launch()).map(drop)
}

/// Rows of x and elements of the output, which has a dimension less, or as many if x has but one.
fn rows(p: &Problem) -> Rows<2> {
    let leading = p.x.layout.rank().saturating_sub(1);
    Rows::of_dims(leading, [&p.x.layout, &p.out.layout])
}

fn forward(cuda: &Cuda, p: &Problem, stream: Stream) -> Result<()> {
    if p.x.layout.is_empty() {
        return Ok(());
    }
    let rows = rows(p);
    let length = p.x.layout.dim(p.x.layout.rank().saturating_sub(1));
    let vector = VECTOR / p.x.dtype.size();
    let fits =
        length.is_multiple_of(vector) && rows.aligned_to_of(0, vector) && is_aligned(&p.x, vector);
    let width = if fits { vector } else { 1 };
    let length = length / width;
    let num_rows = rows.rows_per_launch();
    let shared_out = |unroll| -> Result<_> {
        let choices = [p.x.dtype as u32, width as u32, unroll];
        let kernel = cuda.argmax.get(choices)?;
        let per_block = kernel.choices.per_block as usize;
        Ok((kernel, length.div_ceil(per_block)))
    };
    let tuning = &cuda.resources.tuning.argmax;
    let [thin, many] = contract::argmax::UNROLLS;
    let (mut kernel, mut blocks_per_row) = shared_out(thin)?;
    if num_rows.saturating_mul(blocks_per_row) > tuning.thin_blocks {
        (kernel, blocks_per_row) = shared_out(many)?;
        blocks_per_row = blocks_per_row.min(tuning.full_blocks / num_rows).max(1);
    }
    let divisor = Divisor::new(blocks_per_row);
    for launch in rows.launches() {
        let num_rows = launch.num_rows();
        let [size_1, size_2] = launch.divisors();
        let blocks = check_blocks(OP, "x", num_rows * blocks_per_row)?;
        let out = (p.out.ptr.addr() + launch.offsets[1] * p.out.dtype.size()) as u64;
        let words = p.out.dtype.size() / size_of::<u32>();
        let x_stride = |dim: usize| (launch.strides[dim][0] / width) as u64;
        let arguments = Arguments {
            x: (p.x.ptr.addr() + launch.offsets[0] * p.x.dtype.size()) as u64,
            out,
            out_plain: out,
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
            wide_ids: u32::from(p.out.dtype == DType::I64),
            x_0: x_stride(0),
            x_1: x_stride(1),
            x_2: x_stride(2),
            out_0: (launch.strides[0][1] * words) as u64,
            out_1: (launch.strides[1][1] * words) as u64,
            out_2: (launch.strides[2][1] * words) as u64,
            ..Arguments::ZERO
        };
        // SAFETY: the problem was checked: its tensors have the rows that the arguments describe.
        unsafe { cuda.launch(OP, kernel, blocks, &arguments, stream) }?;
    }
    Ok(())
}
