//! Gradients of tensors whose dtypes differ, and of large heads: a kernel for each, which is told
//! dtypes as arguments.

use contract::attention::Gradient;

use super::{OP, address, arguments, described, room, strides, tokens};
use crate::backend::Stream;
use crate::cuda::device::{Kernel, Resources};
use crate::cuda::images::attention_backward_any::Arguments;
use crate::cuda::table::Table;
use crate::cuda::{Cuda, check_blocks};
use crate::error::Result;
use crate::problem::attention::{Backward, Rows};

pub(super) struct Kernels {
    /// By gradient.
    table: Table<Arguments, 1>,
}

impl Kernels {
    pub fn new(resources: &Resources) -> Result<Kernels> {
        let table = Table::<Arguments, 1>::new(OP, resources, |c| [c.gradient])?;
        Ok(Kernels { table })
    }

    pub fn get(&self, gradient: Gradient) -> Result<&Kernel<Arguments>> {
        self.table.get([gradient.code()])
    }
}

/// The gradients of tokens that are asked for.
fn wanted(b: &Backward) -> impl Iterator<Item = (Gradient, &Rows)> {
    let all = [
        (Gradient::Queries, &b.dq),
        (Gradient::Keys, &b.dk),
        (Gradient::Values, &b.dv),
    ];
    all.into_iter()
        .filter_map(|(gradient, rows)| Some((gradient, rows.as_ref()?)))
}

/// Blocks of rows of a head or a key head of a sequence, and how many of those there are.
fn extent(b: &Backward, gradient: Gradient) -> (usize, usize) {
    let p = &b.forward;
    match gradient {
        Gradient::Queries => (p.max_seqlen_q, p.num_heads),
        _ => (room(p), p.num_kv_heads),
    }
}

fn blocks(b: &Backward, gradient: Gradient, rows: usize) -> Result<u32> {
    let (length, heads) = extent(b, gradient);
    let blocks = length.div_ceil(rows).saturating_mul(heads);
    check_blocks(OP, "q", blocks.saturating_mul(b.forward.batch))
}

/// Whether the grids are not too large.
pub(super) fn check(kernels: &Kernels, b: &Backward) -> Result<()> {
    for (gradient, _) in wanted(b) {
        blocks(b, gradient, kernels.get(gradient)?.choices.rows as usize)?;
    }
    Ok(())
}

/// Queues `dq`, `dk` and `dv`.
pub(super) fn launch(cuda: &Cuda, b: &Backward, statistics: u64, stream: Stream) -> Result<()> {
    for (gradient, to) in wanted(b) {
        let kernel = cuda.attention.backward.any.get(gradient)?;
        let rows = kernel.choices.rows as usize;
        let blocks = blocks(b, gradient, rows)?;
        tracing::trace!(
            "{OP}: gradients of {}, of any dtypes; {blocks} blocks",
            gradient.identifier(),
        );
        if blocks == 0 {
            continue;
        }
        let mut a = inputs(b, statistics);
        a.row_blocks = extent(b, gradient).0.div_ceil(rows) as u32;
        [a.to_f32, a.to_f16, a.to_bf16] = [address(to.ptr); 3];
        // SAFETY: the problem was checked: its tensors have the rows and dtypes that the arguments
        // describe, as far as lengths in device memory are what the caller promises; the statistics
        // are written by what was queued before.
        unsafe { cuda.launch(OP, kernel, blocks, &a, stream) }?;
    }
    Ok(())
}

/// What the kernels read.
pub(super) fn inputs(b: &Backward, statistics: u64) -> Arguments {
    let p = &b.forward;
    let mut a = described!(Arguments, b, 1, statistics);
    // A kernel reads the one of these that the dtype says.
    [a.q_f32, a.q_f16, a.q_bf16] = [address(p.q.ptr); 3];
    [a.k_f32, a.k_f16, a.k_bf16] = [address(p.k.ptr); 3];
    [a.v_f32, a.v_f16, a.v_bf16] = [address(p.v.ptr); 3];
    [a.dout_f32, a.dout_f16, a.dout_bf16] = [address(b.dout.ptr); 3];
    a.q_dtype = p.q.dtype as u32;
    a.k_dtype = p.k.dtype as u32;
    a.v_dtype = p.v.dtype as u32;
    a.dout_dtype = b.dout.dtype as u32;
    a
}
