//! Products of many rows with weights in blocks, or of 8-bit floats: the matrix is decoded to the dtype of
//! `x`, in the workspace and in parts if it is large, and the product is one of floats then.

use super::{Epilogue, Product, blocks, e4m3, multiply_floats};
use crate::backend::Stream;
use crate::cuda::tuning::rules::products::BLOCKS_PART_BYTES;
use crate::cuda::{self, Cuda};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::problem::linear::Weights;
use crate::tensor::{RawTensor, Scratch, Workspace};

/// Columns of the output that are computed at a time from decoded weights.
fn columns_of_a_part(x: DType, weight: &RawTensor) -> usize {
    /// Tiles of all kernels for many rows are full.
    const MULTIPLE: usize = 256;
    let row = weight.layout.dim(1) * x.size();
    let most = BLOCKS_PART_BYTES.checked_div(row).unwrap_or(usize::MAX);
    let whole = (most / MULTIPLE * MULTIPLE).max(MULTIPLE);
    whole.min(weight.layout.dim(0))
}

/// Whether a weight that is not of floats is read as it is.
pub(super) fn are_few_rows(x: &RawTensor, weights: &Weights) -> bool {
    match weights.weight.dtype {
        DType::F8E4M3 => e4m3::are_few_rows(x),
        _ => blocks::are_few_rows(x, weights),
    }
}

/// Bytes for the decoded weights.
pub(super) fn bytes(x: &RawTensor, weights: &Weights) -> usize {
    if x.layout.num_rows() == 0 || are_few_rows(x, weights) {
        return 0;
    }
    let weight = &weights.weight;
    let columns = columns_of_a_part(x.dtype, weight);
    (columns * weight.layout.dim(1) * x.dtype.size()).next_multiple_of(Workspace::ALIGNMENT)
}

/// A product by the decoded weights of some columns.
struct Decoded {
    weights: Weights,
    epilogue: Epilogue,
    out: RawTensor,
}

impl Decoded {
    /// `len` columns from `start`; their weights are to lie at `memory`.
    fn new(p: &Product<'_>, start: usize, len: usize, memory: *mut u8) -> Result<Decoded> {
        let columns = |t: &RawTensor| t.narrowed(t.layout.rank() - 1, start, len);
        let in_features = p.weights.weight.layout.dim(1);
        let bias = p.weights.bias.as_ref().map(columns).transpose()?;
        Ok(Decoded {
            weights: Weights {
                weight: RawTensor {
                    ptr: memory,
                    dtype: p.x.dtype,
                    layout: Layout::contiguous(&[len, in_features])?,
                },
                scales: None,
                bias,
                ..*p.weights
            },
            epilogue: match &p.epilogue {
                Epilogue::Store => Epilogue::Store,
                Epilogue::Add(residual) => Epilogue::Add(columns(residual)?),
                Epilogue::Gate(gate, activation) => Epilogue::Gate(columns(gate)?, *activation),
                // Only of few rows.
                gated @ Epilogue::Gated(..) => *gated,
            },
            out: columns(p.out)?,
        })
    }

    fn product<'a>(&'a self, p: &Product<'a>) -> Product<'a> {
        Product {
            weights: &self.weights,
            epilogue: self.epilogue,
            out: &self.out,
            ..*p
        }
    }
}

/// As [`super::scratch_size`]: decoded weights, and behind them what their product has use for.
pub(super) fn scratch_size(cuda: &Cuda, p: &Product<'_>) -> Result<usize> {
    let weight = &p.weights.weight;
    let decoded = bytes(p.x, p.weights);
    if decoded == 0 {
        return Ok(0);
    }
    let columns = columns_of_a_part(p.x.dtype, weight);
    let part = Decoded::new(p, 0, columns, std::ptr::null_mut())?;
    Ok(decoded + super::scratch_size(cuda, &part.product(p))?)
}

/// Refuses a workspace of less than [`bytes`].
pub(super) fn check(p: &Product<'_>, scratch: Scratch) -> Result<()> {
    let needed = bytes(p.x, p.weights);
    match scratch.size < needed {
        true => Err(Error::WorkspaceTooSmall {
            op: p.op,
            required: needed,
            provided: scratch.size,
        }),
        false => Ok(()),
    }
}

/// Queues a product. `scratch` has [`bytes`], or what [`scratch_size`] said.
pub(super) fn multiply(
    cuda: &Cuda,
    p: &Product<'_>,
    scratch: Scratch,
    stream: Stream,
) -> Result<()> {
    let weight = &p.weights.weight;
    check(p, scratch)?;
    let needed = bytes(p.x, p.weights);
    let rest = Scratch {
        ptr: scratch.ptr.wrapping_add(needed),
        size: scratch.size - needed,
    };
    let out_features = weight.layout.dim(0);
    let at_once = columns_of_a_part(p.x.dtype, weight);
    for start in (0..out_features).step_by(at_once.max(1)) {
        let len = at_once.min(out_features - start);
        let part = Decoded::new(p, start, len, scratch.ptr)?;
        let (matrix, to) = (weight.narrowed(0, start, len)?, &part.weights.weight);
        match weight.dtype {
            DType::F8E4M3 => e4m3::decode(cuda, p, (start, &matrix), to, stream)?,
            _ => cuda::blocks::decode(cuda, p.op, &matrix, to, stream)?,
        }
        multiply_floats(cuda, &part.product(p), rest, stream)?;
    }
    Ok(())
}
