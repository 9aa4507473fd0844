//! The backward pass of [`linear_logprob`](super):
//!
//! ```text
//! ds[i]   = dlogprob ([i = t] - p[i]) - dentropy p[i] (ln(p[i]) + entropy)
//! dz      = ds (1 - (tanh(z / softcap))²) / temperature
//! dx      = dz weight
//! dweight = dzᵀ x            summed over all tokens
//! dbias   = sum of dz        over all tokens
//! ```
//!
//! Logits are multiplied once more, a chunk at a time, and overwritten by their gradient. Shares of
//! chunks are added in f32 and rounded once, in the order of chunks. Ignored tokens have no gradient.

use super::{Fields, OfTokens};
use crate::error::{Error, Result};
use crate::ops::chunked;
use crate::ops::linear::Weights;
use crate::ops::operation::{self, Operation, Tensors};
use crate::problem::linear_logprob::Problem;
use crate::tensor::{TensorMut, TensorRef, Workspace};

pub(super) const OP: &str = "linear_logprob_backward";

/// Arguments of [`backward`]. At least one of `dlogprobs` and `dentropy` is there, and at least one
/// of `dx`, `dweight` and `dbias`.
#[derive(Debug)]
pub struct Params<'a> {
    /// As the forward's.
    pub x: TensorRef<'a>,
    /// As the forward's.
    pub weights: Weights<'a>,
    /// As the forward's. On a device another id makes its token's gradient NaN, and what it is added
    /// to.
    pub ids: TensorRef<'a>,
    /// f32, contiguous, the shape of `ids`: the gradient of `logprobs`; zeros if absent.
    pub dlogprobs: Option<TensorRef<'a>>,
    /// As `dlogprobs`: the gradient of `entropy`; zeros if absent.
    pub dentropy: Option<TensorRef<'a>>,
    /// Like `x`: overwritten by its gradient; rows strided.
    pub dx: Option<TensorMut<'a>>,
    /// `[vocab, hidden]`, the weight's dtype or f32 (any float dtype is taken); rows strided.
    pub dweight: Option<TensorMut<'a>>,
    /// `[vocab]`, the bias's dtype or f32 (any float dtype is taken), contiguous.
    pub dbias: Option<TensorMut<'a>>,
    /// Adds to what `dweight` and `dbias` hold, which must be f32 then. `dx` is overwritten always.
    pub accumulate: bool,
    /// As the forward's.
    pub ignore_index: i64,
    /// As the forward's.
    pub temperature: f32,
    /// As the forward's.
    pub softcap: f32,
    /// As the forward's, which may have been another.
    pub chunk_tokens: usize,
    /// What a call needs is refused below [`workspace_size`].
    pub workspace: Workspace<'a>,
}

impl<'a> Params<'a> {
    fn fields(&self) -> Fields<'_, 'a> {
        Fields {
            op: OP,
            layer: chunked::Fields {
                x: &self.x,
                weights: &self.weights,
                dx: &self.dx,
                dweight: &self.dweight,
                dbias: &self.dbias,
                accumulate: self.accumulate,
                chunk_tokens: self.chunk_tokens,
            },
            ids: &self.ids,
            ignore_index: self.ignore_index,
            temperature: self.temperature,
            softcap: self.softcap,
        }
    }
}

impl Operation for Params<'_> {
    const NAME: &'static str = OP;
    type Problem = Problem;

    fn problem(&self) -> Result<Problem> {
        let [dlogprobs, dentropy] =
            [&self.dlogprobs, &self.dentropy].map(|t| t.as_ref().map(TensorRef::raw));
        if dlogprobs.is_none() && dentropy.is_none() {
            let problem = "is absent (rank 0), and so is dentropy: one is needed";
            return Err(Error::invalid(OP, "dlogprobs", problem));
        }
        if self.dx.is_none() && self.dweight.is_none() && self.dbias.is_none() {
            let problem = "is absent (rank 0), and so are dweight and dbias: one is needed";
            return Err(Error::invalid(OP, "dx", problem));
        }
        self.fields().problem(OfTokens {
            dlogprobs,
            dentropy,
            ..OfTokens::default()
        })
    }

    fn tensors(&self, tensors: &mut Tensors) {
        self.fields().layer.tensors(tensors);
        tensors.read("ids", &self.ids);
        tensors.read_optional("dlogprobs", self.dlogprobs.as_ref());
        tensors.read_optional("dentropy", self.dentropy.as_ref());
    }

    fn workspace(&self) -> Option<&Workspace<'_>> {
        Some(&self.workspace)
    }
}

operation::functions!(backward);
