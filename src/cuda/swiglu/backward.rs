//! The backward pass of gated activations on the GPU.

use crate::backend::Stream;
use crate::cuda::device::Resources;
use crate::cuda::images::swiglu_backward::Arguments;
use crate::cuda::rows::{Divisor, Rows};
use crate::cuda::table::Table;
use crate::cuda::{Cuda, Run, VECTOR, check_blocks, codes, is_aligned};
use crate::error::Result;
use crate::problem::swiglu::Backward;
use crate::tensor::RawTensor;

const OP: &str = "swiglu_backward";

/// By dtype, activation and elements per access.
pub(in crate::cuda) type Kernels = Table<Arguments, 3>;

pub(in crate::cuda) fn kernels(resources: &Resources) -> Result<Kernels> {
    Kernels::new(OP, resources, |c| [c.dtype, c.activation, c.width])
}

impl Run for Backward {
    fn check(&self) -> Result<()> {
        let (rows, length) = rows(self);
        let blocks = length.div_ceil(super::LEAST_PER_BLOCK);
        check_blocks(OP, "gate", blocks.saturating_mul(rows.rows_per_launch())).map(drop)
    }

    fn run(&self, cuda: &Cuda, stream: Stream) -> Result<()> {
        if self.gate.layout.is_empty() {
            return Ok(());
        }
        let (rows, length) = rows(self);
        let dtype = self.gate.dtype;
        let vector = VECTOR / dtype.size();
        let aligned = self.tensors().iter().all(|t| is_aligned(t, vector));
        let width = match aligned && length.is_multiple_of(vector) && rows.aligned_to(vector) {
            true => vector,
            false => 1,
        };
        let activation = codes::activation(self.activation).code();
        let choices = [dtype as u32, activation, width as u32];
        let kernel = cuda.swiglu_backward.get(choices)?;
        let length = length / width;
        let blocks_per_row = length.div_ceil(kernel.choices.per_block as usize);
        let divisor = Divisor::new(blocks_per_row);
        for launch in rows.launches() {
            let [size_1, size_2] = launch.divisors();
            let blocks = check_blocks(OP, "gate", launch.num_rows() * blocks_per_row)?;
            let at = |t: &RawTensor, i: usize| {
                (t.ptr.addr() + launch.offsets[i] * t.dtype.size()) as u64
            };
            let stride = |dim: usize, i: usize| (launch.strides[dim][i] / width) as u64;
            let arguments = Arguments {
                gate: at(&self.gate, 0),
                up: at(&self.up, 1),
                dout: at(&self.dout, 2),
                dgate: at(&self.dgate, 3),
                dup: at(&self.dup, 4),
                out: self.out.as_ref().map_or(0, |out| at(out, 5)),
                has_out: u32::from(self.out.is_some()),
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
                dout_0: stride(0, 2),
                dout_1: stride(1, 2),
                dout_2: stride(2, 2),
                dgate_0: stride(0, 3),
                dgate_1: stride(1, 3),
                dgate_2: stride(2, 3),
                dup_0: stride(0, 4),
                dup_1: stride(1, 4),
                dup_2: stride(2, 4),
                out_0: stride(0, 5),
                out_1: stride(1, 5),
                out_2: stride(2, 5),
            };
            // SAFETY: the problem was checked: its tensors have the rows that the arguments
            // describe.
            unsafe { cuda.launch(OP, kernel, blocks, &arguments, stream) }?;
        }
        Ok(())
    }
}

/// The rows, as one where there are no gaps, and their length.
fn rows(p: &Backward) -> (Rows<6>, usize) {
    let rows = Rows::new(p.tensors().map(|t| &t.layout));
    let dim = p.gate.layout.dim(p.gate.layout.rank().saturating_sub(1));
    rows.lengthened(dim)
}
