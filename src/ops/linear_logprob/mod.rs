//! Log-probabilities of given ids under a linear layer's output, as of a language model's head, and
//! the entropies of its distributions: what DPO (Rafailov et al. 2023, arXiv:2305.18290), GRPO
//! (Shao et al. 2024, arXiv:2402.03300) and distillation ask of a policy. Logits of all tokens are
//! never there at a time.
//!
//! For every token with logits `z = x weightᵀ + bias` and id `t`, which is not ignored:
//!
//! ```text
//! s       = z / temperature, or softcap tanh(z / softcap) / temperature
//! lse     = ln(sum(exp(s)))
//! logprob = s[t] - lse
//! entropy = -sum(p ln(p)), p = exp(s - lse)
//! ```
//!
//! Tokens are taken in chunks as by [`linear_cross_entropy`](super::linear_cross_entropy): logits
//! are rounded to the dtype of `x`, other arithmetic is f32, and the same inputs give the same bits.
//! Of ignored tokens all results are zero. [`backward()`] multiplies once more instead of keeping
//! logits.

pub mod backward;
mod plan;

use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::layout::Layout;
use crate::ops::check::{self, Arg};
use crate::ops::chunked::{self, merged};
use crate::ops::linear::Weights;
use crate::ops::operation::{self, Operation, Tensors};
use crate::problem::chunked::Layer;
use crate::problem::linear_logprob::Problem;
use crate::problem::logprob;
use crate::tensor::{RawTensor, TensorMut, TensorRef, Workspace};
pub use backward::backward;

const OP: &str = "linear_logprob";

/// Arguments of [`forward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// `[.., hidden]`, f32, f16 or bf16; rows strided, contiguous in the last dimension.
    pub x: TensorRef<'a>,
    /// `[vocab, hidden]`, and a bias `[vocab]` where there is one.
    pub weights: Weights<'a>,
    /// `[..]`, i32 or i64, any strides: each below `vocab`, or `ignore_index`. Where the host cannot
    /// look, on a device, the log-probability of another is NaN.
    pub ids: TensorRef<'a>,
    /// f32, contiguous, the shape of `ids`: the log-probability of each token's id.
    pub logprobs: Option<TensorMut<'a>>,
    /// As `logprobs`: the entropy of each token's distribution, in nats.
    pub entropy: Option<TensorMut<'a>>,
    /// As `logprobs`: the natural logarithm of each token's sum of exponentials.
    pub lse: Option<TensorMut<'a>>,
    /// The id of tokens that count for nothing; see
    /// [`IGNORE_INDEX`](super::cross_entropy::IGNORE_INDEX).
    pub ignore_index: i64,
    /// Divides logits, after the softcap; 0 for 1.
    pub temperature: f32,
    /// Bounds logits; 0 for none.
    pub softcap: f32,
    /// The most tokens whose logits are stored at a time; 0 for as many as
    /// [`linear_cross_entropy`](super::linear_cross_entropy::Params::chunk_tokens) takes.
    pub chunk_tokens: usize,
    /// What a call needs is refused below [`workspace_size`].
    pub workspace: Workspace<'a>,
}

/// What both passes make distributions of.
struct Fields<'p, 'a> {
    op: &'static str,
    layer: chunked::Fields<'p, 'a>,
    ids: &'p TensorRef<'a>,
    ignore_index: i64,
    temperature: f32,
    softcap: f32,
}

/// Tensors of a number for each token.
#[derive(Clone, Copy, Default)]
struct OfTokens {
    logprobs: Option<RawTensor>,
    entropy: Option<RawTensor>,
    lse: Option<RawTensor>,
    dlogprobs: Option<RawTensor>,
    dentropy: Option<RawTensor>,
}

impl Fields<'_, '_> {
    fn problem(&self, of_tokens: OfTokens) -> Result<Problem> {
        let op = self.op;
        let layer = self.layer.layer(op, false)?;
        let leading = layer.tokens();
        let ids = self.ids.raw();
        Arg::new(op, "ids", &ids)
            .dtype(&[DType::I32, DType::I64])?
            .shape(leading)?;
        for (name, tensor) in [
            ("logprobs", &of_tokens.logprobs),
            ("entropy", &of_tokens.entropy),
            ("lse", &of_tokens.lse),
            ("dlogprobs", &of_tokens.dlogprobs),
            ("dentropy", &of_tokens.dentropy),
        ] {
            if let Some(tensor) = tensor {
                let arg = Arg::new(op, name, tensor).dtype(&[DType::F32])?;
                arg.shape(leading)?.contiguous()?;
            }
        }
        for (name, value) in [("temperature", self.temperature), ("softcap", self.softcap)] {
            if check::finite(op, name, value)? < 0.0 {
                let problem = text!("is {value}, it must not be negative");
                return Err(Error::invalid(op, name, problem));
            }
        }
        let tensors = [Some(layer.x), layer.dx, Some(ids)];
        let [x, dx, merged_ids] = merged(leading, tensors)?;
        let layer = Layer {
            x: x.unwrap_or(layer.x),
            dx,
            ..layer
        };
        // In the dimensions that are left.
        let flat = |t: Option<RawTensor>| -> Result<Option<RawTensor>> {
            let layout = Layout::contiguous(layer.tokens())?;
            Ok(t.map(|t| RawTensor { layout, ..t }))
        };
        let logits = RawTensor {
            ptr: std::ptr::null_mut(),
            dtype: layer.x.dtype,
            layout: Layout::contiguous(&[layer.vocab()])?,
        };
        Ok(Problem {
            layer,
            logprob: logprob::Problem {
                logits,
                ids: merged_ids.unwrap_or(ids),
                logprobs: flat(of_tokens.logprobs)?,
                entropy: flat(of_tokens.entropy)?,
                lse: flat(of_tokens.lse)?,
                differentiate: layer.is_differentiated(),
                dlogprobs: flat(of_tokens.dlogprobs)?,
                dentropy: flat(of_tokens.dentropy)?,
                ignore_index: self.ignore_index,
                temperature: match self.temperature {
                    0.0 => 1.0,
                    temperature => temperature,
                },
                softcap: self.softcap,
            },
        })
    }
}

impl<'a> Params<'a> {
    fn fields(&self) -> Fields<'_, 'a> {
        Fields {
            op: OP,
            layer: chunked::Fields {
                x: &self.x,
                weights: &self.weights,
                dx: &None,
                dweight: &None,
                dbias: &None,
                accumulate: false,
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
        let [logprobs, entropy, lse] =
            [&self.logprobs, &self.entropy, &self.lse].map(|t| t.as_ref().map(TensorMut::raw));
        if logprobs.is_none() && entropy.is_none() && lse.is_none() {
            let problem = "is absent (rank 0), and so are entropy and lse: one is needed";
            return Err(Error::invalid(OP, "logprobs", problem));
        }
        self.fields().problem(OfTokens {
            logprobs,
            entropy,
            lse,
            ..OfTokens::default()
        })
    }

    fn tensors(&self, tensors: &mut Tensors) {
        self.fields().layer.tensors(tensors);
        tensors.read("ids", &self.ids);
        tensors.write_optional("logprobs", self.logprobs.as_ref());
        tensors.write_optional("entropy", self.entropy.as_ref());
        tensors.write_optional("lse", self.lse.as_ref());
    }

    fn workspace(&self) -> Option<&Workspace<'_>> {
        Some(&self.workspace)
    }
}

operation::functions!();
