//! Gated activations on the GPU.

pub(super) mod backward;

use crate::backend::Stream;
use crate::cuda::device::Resources;
use crate::cuda::images::swiglu::Arguments;
use crate::cuda::rows::{Divisor, Rows};
use crate::cuda::table::Table;
use crate::cuda::{Cuda, Run, VECTOR, check_blocks, codes, is_aligned};
use crate::error::Result;
use crate::problem::swiglu::Problem;
use crate::tensor::RawTensor;

const OP: &str = "swiglu";

/// By dtype, activation and elements per access.
pub(super) type Kernels = Table<Arguments, 3>;

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    Kernels::new(OP, resources, |c| [c.dtype, c.activation, c.width])
}

/// Elements that the smallest block covers: four per thread, in one load or in four.
const LEAST_PER_BLOCK: usize = 512;

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
    let (rows, length) = rows(p);
    let blocks = length
        .div_ceil(LEAST_PER_BLOCK)
        .saturating_mul(rows.rows_per_launch());
    check_blocks(OP, "gate", blocks).map(drop)
}

/// The rows, as one where there are no gaps, and their length.
fn rows(p: &Problem) -> (Rows<3>, usize) {
    let layouts = [&p.gate.layout, &p.up.layout, &p.out.layout];
    let dim = p.gate.layout.dim(p.gate.layout.rank().saturating_sub(1));
    let rows = Rows::new(layouts);
    rows.lengthened(dim)
}

pub(super) fn forward(cuda: &Cuda, p: &Problem, stream: Stream) -> Result<()> {
    if p.gate.layout.is_empty() {
        return Ok(());
    }
    let (rows, length) = rows(p);
    let vector = VECTOR / p.gate.dtype.size();
    let aligned = [&p.gate, &p.up, &p.out]
        .iter()
        .all(|t| is_aligned(t, vector));
    let width = match aligned && length.is_multiple_of(vector) && rows.aligned_to(vector) {
        true => vector,
        false => 1,
    };
    let activation = codes::activation(p.activation).code();
    let kernel = cuda
        .swiglu
        .get([p.gate.dtype as u32, activation, width as u32])?;
    let length = length / width;
    let blocks_per_row = length.div_ceil(kernel.choices.per_block as usize);
    let divisor = Divisor::new(blocks_per_row);
    for launch in rows.launches() {
        let num_rows = launch.num_rows();
        let [size_1, size_2] = launch.divisors();
        let blocks = check_blocks(OP, "gate", num_rows * blocks_per_row)?;
        let at =
            |t: &RawTensor, i: usize| (t.ptr.addr() + launch.offsets[i] * t.dtype.size()) as u64;
        let stride = |dim: usize, i: usize| (launch.strides[dim][i] / width) as u64;
        let arguments = Arguments {
            gate: at(&p.gate, 0),
            up: at(&p.up, 1),
            out: at(&p.out, 2),
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
            gate_0: stride(0, 0),
            gate_1: stride(1, 0),
            gate_2: stride(2, 0),
            up_0: stride(0, 1),
            up_1: stride(1, 1),
            up_2: stride(2, 1),
            out_0: stride(0, 2),
            out_1: stride(1, 2),
            out_2: stride(2, 2),
            ..Arguments::ZERO
        };
        // SAFETY: the problem was checked: its tensors have the rows that the arguments describe.
        unsafe { cuda.launch(OP, kernel, blocks, &arguments, stream) }?;
    }
    Ok(())
}
