//! Parts of attention as one, on the GPU: a row for each warp.

use super::device::Resources;
use super::images::attention_merge::Arguments;
use super::table::Table;
use super::{Cuda, Run, VECTOR, check_blocks, is_aligned};
use crate::backend::Stream;
use crate::error::{Error, Result, text};
use crate::problem::attention_merge::Problem;
use crate::tensor::RawTensor;

const OP: &str = "attention_merge";

/// By dtype of the parts, dtype of the output, and elements per access.
pub(super) type Kernels = Table<Arguments, 3>;

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    Kernels::new(OP, resources, |c| [c.from, c.to, c.width])
}

/// The least rows that a block has.
const LEAST_PER_BLOCK: usize = 4;

impl Run for Problem {
    fn check(&self) -> Result<()> {
        let rows = self.rows();
        let parts = self.outs.layout.dim(0);
        let dim = self.out.layout.dim(3);
        for (number, of) in [(rows, "rows"), (parts, "parts"), (dim, "elements in a row")] {
            if u32::try_from(number).is_err() {
                let problem = text!("has {number} {of}, allowed: up to {}", u32::MAX);
                return Err(Error::unsupported(OP, "outs", problem));
            }
        }
        check_blocks(OP, "outs", rows.div_ceil(LEAST_PER_BLOCK)).map(drop)
    }

    fn run(&self, cuda: &Cuda, stream: Stream) -> Result<()> {
        merge(cuda, self, stream)
    }
}

/// Whether rows can be read and written in vectors.
fn is_in(t: &RawTensor, vector: usize) -> bool {
    let rank = t.layout.rank();
    let strides = &t.layout.strides()[..rank - 1];
    let sizes = &t.layout.shape()[..rank - 1];
    let fits = |(stride, size): (&usize, &usize)| *size == 1 || stride.is_multiple_of(vector);
    t.layout.dim(rank - 1).is_multiple_of(vector)
        && strides.iter().zip(sizes).all(fits)
        && is_aligned(t, vector)
}

fn merge(cuda: &Cuda, p: &Problem, stream: Stream) -> Result<()> {
    if p.rows() == 0 {
        return Ok(());
    }
    // The wider of the two dtypes moves whole vectors.
    let vector = VECTOR / p.outs.dtype.size().max(p.out.dtype.size());
    let width = match is_in(&p.outs, vector) && is_in(&p.out, vector) {
        true => vector,
        false => 1,
    };
    let of = [p.outs.dtype as u32, p.out.dtype as u32, width as u32];
    let kernel = cuda.attention_merge.get(of)?;
    let shape = p.out.layout.shape();
    let (tokens, heads, dim) = (shape[1], shape[2], shape[3]);
    // Strides of dimensions of one entry say nothing, and are of no use.
    let stride = |t: &RawTensor, dim: usize, width: usize| match t.layout.dim(dim) {
        1 => 0,
        _ => (t.layout.stride(dim) / width) as u64,
    };
    let (outs, lses, out) = (&p.outs, &p.lses, &p.out);
    let mut arguments = Arguments {
        outs: outs.ptr.addr() as u64,
        lses: lses.ptr.addr() as u64,
        out: out.ptr.addr() as u64,
        rows: p.rows() as u32,
        tokens: tokens as u32,
        num_heads: heads as u32,
        parts: outs.layout.dim(0) as u32,
        length: (dim / width) as u32,
        outs_part: stride(outs, 0, width),
        outs_outer: stride(outs, 1, width),
        outs_token: stride(outs, 2, width),
        outs_head: stride(outs, 3, width),
        lses_part: stride(lses, 0, 1),
        lses_outer: stride(lses, 1, 1),
        lses_head: stride(lses, 2, 1),
        lses_token: stride(lses, 3, 1),
        out_outer: stride(out, 0, width),
        out_token: stride(out, 1, width),
        out_head: stride(out, 2, width),
        ..Arguments::ZERO
    };
    if let Some(lse) = &p.lse {
        arguments.has_lse = 1;
        arguments.lse = lse.ptr.addr() as u64;
        arguments.lse_outer = stride(lse, 0, 1);
        arguments.lse_head = stride(lse, 1, 1);
        arguments.lse_token = stride(lse, 2, 1);
    }
    let per_block = kernel.choices.rows as usize;
    let blocks = check_blocks(OP, "outs", p.rows().div_ceil(per_block))?;
    // SAFETY: the problem was checked: its tensors have the rows that the arguments describe.
    unsafe { cuda.launch(OP, kernel, blocks, &arguments, stream) }
}
