//! Attention of the same queries over disjoint sets of keys, as attention over all of these (FlashAttention-2's and
//! FlashInfer's merge of states).
//!
//! Each part is what [`attention`](super::attention) gave for its keys, `out` and `lse`:
//!
//! ```text
//! lse[i] = ln(Σ exp(lses[p, i]))                    over parts p
//! out[i] = Σ exp(lses[p, i] - lse[i]) outs[p, i]
//! ```
//!
//! So a prefix that sequences share is attended to once for all of them, and keys may come in turn, or lie on other
//! devices. A part of which a query sees no key, its LSE being −∞, counts for nothing, whatever its output; where that
//! is so of all, the output is zeros and its LSE −∞. Arithmetic is f32 and the result rounded once: ask for f32 in the
//! parts ([`attention::Params::out`](super::attention::Params::out)), and give a sink to one of them only. Parts are
//! added up in their order.
//!
//! Its gradients are those of attention's backward pass over each part's keys, with `out` and `lse` of the whole.
//!
//! ```
//! use unsloth::ops::attention_merge::{self, Params};
//! use unsloth::{Context, Stream, TensorMut, TensorRef};
//!
//! // One query that sees one key in the first part, and three with the same scores in the second.
//! let ctx = Context::cpu()?;
//! let (outs, lses) = ([1.0f32, 5.0], [0.0f32, 3f32.ln()]);
//! let (mut out, mut lse) = ([0.0f32], [0.0f32]);
//! let mut params = Params::new(
//!     TensorRef::from_slice(&outs, &[2, 1, 1, 1, 1])?,
//!     TensorRef::from_slice(&lses, &[2, 1, 1, 1])?,
//!     TensorMut::from_slice(&mut out, &[1, 1, 1, 1])?,
//! );
//! params.lse = Some(TensorMut::from_slice(&mut lse, &[1, 1, 1])?);
//! attention_merge::forward(&ctx, &params, Stream::DEFAULT)?;
//! drop(params);
//! assert!((out[0] - 4.0).abs() < 1e-6 && (lse[0] - 4f32.ln()).abs() < 1e-6);
//! # Ok::<(), unsloth::Error>(())
//! ```

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::layout::{Layout, MAX_RANK};
use crate::ops::check::Arg;
use crate::ops::operation::{self, Operation, Tensors};
use crate::problem::attention_merge::Problem;
use crate::tensor::{RawTensor, TensorMut, TensorRef};

const OP: &str = "attention_merge";

/// Arguments of [`forward`]. Make one with [`Params::new`], then set what is needed.
#[derive(Debug)]
pub struct Params<'a> {
    /// The outputs of parts, `[parts, B, S, H, D]`, or `[parts, total, H, D]` of packed queries; f32, f16 or bf16. Any
    /// strides with a contiguous last dimension, as of `out`.
    pub outs: TensorRef<'a>,
    /// Their natural logarithms of softmax denominators: f32 `[parts, B, H, S]`, or `[parts, H, total]`, any strides.
    pub lses: TensorRef<'a>,
    /// Output `[B, S, H, D]` or `[total, H, D]`; f32, f16 or bf16.
    pub out: TensorMut<'a>,
    /// Receives the logarithm of all parts' denominators: f32 `[B, H, S]` or `[H, total]`, any strides.
    pub lse: Option<TensorMut<'a>>,
}

impl<'a> Params<'a> {
    /// Without `lse`.
    pub fn new(outs: TensorRef<'a>, lses: TensorRef<'a>, out: TensorMut<'a>) -> Self {
        Params {
            outs,
            lses,
            out,
            lse: None,
        }
    }
}

impl Operation for Params<'_> {
    const NAME: &'static str = OP;
    type Problem = Problem;

    fn problem(&self) -> Result<Problem> {
        let (outs, lses, out) = (self.outs.raw(), self.lses.raw(), self.out.raw());
        let lse = self.lse.as_ref().map(TensorMut::raw);
        Arg::new(OP, "outs", &outs)
            .rank(&[4, 5])?
            .dtype(DType::FLOATS)?
            .last_contiguous()?;
        let shape = outs.layout.shape();
        let (parts, of_out) = (shape[0], &shape[1..]);
        if parts == 0 {
            let problem = "has 0 parts, at least 1 is needed";
            return Err(Error::invalid(OP, "outs", problem));
        }
        // Heads before tokens, without their components.
        let rank = of_out.len();
        let mut of_lses = [0; MAX_RANK];
        of_lses[..rank].copy_from_slice(&shape[..rank]);
        (of_lses[rank - 2], of_lses[rank - 1]) = (of_out[rank - 2], of_out[rank - 3]);
        let of_lses = &of_lses[..rank];
        Arg::new(OP, "lses", &lses)
            .dtype(&[DType::F32])?
            .shape(of_lses)?;
        Arg::new(OP, "out", &out)
            .dtype(DType::FLOATS)?
            .shape(of_out)?
            .last_contiguous()?
            .writable()?;
        if let Some(lse) = &lse {
            Arg::new(OP, "lse", lse)
                .dtype(&[DType::F32])?
                .shape(&of_lses[1..])?
                .writable()?;
        }
        Ok(Problem {
            outs: batched(outs, 5, 1)?,
            lses: batched(lses, 4, 1)?,
            out: batched(out, 4, 0)?,
            lse: lse.map(|lse| batched(lse, 3, 0)).transpose()?,
        })
    }

    fn tensors(&self, tensors: &mut Tensors) {
        tensors.read("outs", &self.outs);
        tensors.read("lses", &self.lses);
        tensors.write("out", &self.out);
        tensors.write_optional("lse", self.lse.as_ref());
    }
}

/// A tensor of packed tokens as of one sequence, which is dimension `dim` of as many as `rank`.
fn batched(t: RawTensor, rank: usize, dim: usize) -> Result<RawTensor> {
    if t.layout.rank() == rank {
        return Ok(t);
    }
    let (mut shape, mut strides) = ([1; MAX_RANK], [0; MAX_RANK]);
    let (before, behind) = (..dim, dim..rank - 1);
    shape[before].copy_from_slice(&t.layout.shape()[before]);
    strides[before].copy_from_slice(&t.layout.strides()[before]);
    shape[dim + 1..rank].copy_from_slice(&t.layout.shape()[behind.clone()]);
    strides[dim + 1..rank].copy_from_slice(&t.layout.strides()[behind]);
    let layout = Layout::strided(&shape[..rank], &strides[..rank])?;
    Ok(RawTensor { layout, ..t })
}

operation::functions!();
