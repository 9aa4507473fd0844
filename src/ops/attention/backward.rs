//! The backward pass of attention: gradients of `q`, `k`, `v`, the sinks and the bias.
//!
//! With `s` the scores as [the forward pass](super) has them, `x = softcap * tanh(..)` before bias
//! and ALiBi, and `dout` the gradient of `out` (Dao 2023, arXiv:2307.08691, algorithm 2):
//!
//! ```text
//! delta[i]   = dout[i] · out[i] - dlse[i]                          dlse if it is given
//! p[i, j]    = exp(s[i, j] - lse[i])
//! ds[i, j]   = p[i, j] * (dout[i] · v[j] - delta[i])
//! dbias      = Σ ds                                                over the dimensions that bias repeats
//! dsinks[h]  = -Σ exp(sinks[h] - lse[i]) * delta[i]
//! dx[i, j]   = ds[i, j] * (1 - (x[i, j] / softcap)²)               ds without a softcap
//! dq[i]      = scale * Σ dx[i, j] k[j]
//! dk[j]      = scale * Σ dx[i, j] q[i]
//! dv[j]      = Σ p[i, j] dout[i]
//! ```
//!
//! Sums for `dk` and `dv` are also over the query heads that share a key head. Every gradient is
//! optional, and what is not asked for is not computed; there has to be one. ALiBi slopes get none.
//!
//! `out` and `lse` are what the forward pass gave, for the same arguments: nothing else is kept. A
//! query that sees no key (its LSE is −∞) adds nothing to any gradient.
//!
//! # Forms
//!
//! As for the forward pass, but keys are not paged: they are batched, padded (`seq_lens_k`) or packed.
//! Keys beyond the length of a padded sequence get zeros. Tokens that belong to no packed sequence
//! are left as they are, in every gradient. `dbias` is zero where a sequence is shorter.
//!
//! # On a GPU
//!
//! The CUDA backend takes lengths as the forward pass does, and says
//! [`Unsupported`](crate::Error::Unsupported) to greater ones. Of f16 and bf16, head dimensions up to 256,
//! strides and addresses that are multiples of 8 elements run on tensor cores; of f32, head dimensions up
//! to 128 and multiples of 4, as products of parts that are as accurate as f32 is. Anything else takes
//! slower kernels, the slowest where head dimensions are above 256 or `q`, `k`, `v` and `dout` are not of
//! one dtype. `dbias` computes the scores once more, on tensor cores with any head dimension.
//!
//! # Numerics
//!
//! Scores, probabilities and sums are f32 whatever the storage, and every result is rounded once. Tensor
//! cores take probabilities and their gradients rounded to the dtype, as in FlashAttention. Sums are cut
//! by shapes alone and added in a fixed order, so the same inputs give the same bits. Kernels for Hopper
//! (f16 and bf16, head dimensions in eights, the same for values; no bias or mask) are the exception
//! without softcap and ALiBi, above 128 dimensions where queries see many keys: there blocks of keys add to f32 sums of
//! `dq` as they are done, unless [`deterministic`](Params::deterministic) asks for an order. Memory is linear in the
//! number of tokens: two f32 per query and head, where there are such sums as many as `q` has elements besides
//! (with `deterministic` another four or eight bytes per 64 queries and head), and 8 MiB for `dbias` where it sums over much on a GPU.
//!
//! # Example
//!
//! The gradient of the sum of all outputs with respect to the values, which is how often each is used:
//!
//! ```
//! use unsloth::ops::attention::{self, backward};
//! use unsloth::{Buffer, Context, Stream, TensorMut, TensorRef};
//!
//! let ctx = Context::cpu()?;
//! let shape = [1, 3, 1, 2]; // three tokens, one head of two elements
//! let (q, k, v) = ([0.0f32; 6], [0.0f32; 6], [1.0f32; 6]);
//! let (mut out, mut lse) = ([0.0f32; 6], [0.0f32; 3]);
//! let mut forward = attention::Params::new(
//!     TensorRef::from_slice(&q, &shape)?,
//!     TensorRef::from_slice(&k, &shape)?,
//!     TensorRef::from_slice(&v, &shape)?,
//!     TensorMut::from_slice(&mut out, &shape)?,
//! );
//! forward.lse = Some(TensorMut::from_slice(&mut lse, &[1, 1, 3])?);
//! forward.causal = true;
//! attention::forward(&ctx, &forward, Stream::DEFAULT)?;
//!
//! let (dout, mut dv) = ([1.0f32; 6], [0.0f32; 6]);
//! let mut params = backward::Params::new(
//!     TensorRef::from_slice(&q, &shape)?,
//!     TensorRef::from_slice(&k, &shape)?,
//!     TensorRef::from_slice(&v, &shape)?,
//!     TensorRef::from_slice(&out, &shape)?,
//!     TensorRef::from_slice(&lse, &[1, 1, 3])?,
//!     TensorRef::from_slice(&dout, &shape)?,
//! );
//! params.causal = true;
//! params.dv = Some(TensorMut::from_slice(&mut dv, &shape)?);
//! let mut scratch = Buffer::new(&ctx, backward::workspace_size(&ctx, &params)?)?;
//! params.workspace = scratch.workspace();
//! backward(&ctx, &params, Stream::DEFAULT)?;
//! // The first token is used by all three, by the second with a half, by the last with a third.
//! assert!((dv[0] - (1.0 + 1.0 / 2.0 + 1.0 / 3.0)).abs() < 1e-6);
//! # Ok::<(), unsloth::Error>(())
//! ```

use super::check::Inputs;
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::ops::check::Arg;
use crate::ops::operation::{self, Operation, Tensors};
use crate::problem::attention::{Backward, PageLayout, Rows, ScoresGradient};
use crate::tensor::{RawTensor, TensorMut, TensorRef, Workspace};

const OP: &str = "attention_backward";

/// Arguments of [`backward`]. Make them with [`Params::new`], then set what the forward pass was given,
/// and the gradients that are wanted.
#[derive(Debug)]
pub struct Params<'a> {
    /// Queries, as the forward pass had them.
    pub q: TensorRef<'a>,
    /// Keys `[B, Sk, Hkv, D]`, or `[total_k, Hkv, D]` with `cu_seqlens_k`.
    pub k: TensorRef<'a>,
    /// Values like `k`, with head dimension `Dv`.
    pub v: TensorRef<'a>,
    /// What the forward pass gave: the dtype of `q`, or f32.
    pub out: TensorRef<'a>,
    /// What it gave too: f32 `[B, Hq, Sq]`, or `[Hq, total_q]` with `cu_seqlens_q`.
    pub lse: TensorRef<'a>,
    /// Gradient of `out`: its shape; the dtype of `q`, or f32.
    pub dout: TensorRef<'a>,
    /// Gradient of `lse`, where the loss depends on it: f32, its shape.
    pub dlse: Option<TensorRef<'a>>,
    /// As [`super::Params::bias`].
    pub bias: Option<TensorRef<'a>>,
    /// As [`super::Params::mask`].
    pub mask: Option<TensorRef<'a>>,
    /// As [`super::Params::alibi_slopes`].
    pub alibi_slopes: Option<TensorRef<'a>>,
    /// As [`super::Params::sinks`].
    pub sinks: Option<TensorRef<'a>>,
    /// As [`super::Params::cu_seqlens_q`].
    pub cu_seqlens_q: Option<TensorRef<'a>>,
    /// As [`super::Params::cu_seqlens_k`].
    pub cu_seqlens_k: Option<TensorRef<'a>>,
    /// The number of keys of each sequence of a padded batch: i32 `[B]`.
    pub seq_lens_k: Option<TensorRef<'a>>,
    /// Receives the gradient of `q`: like it.
    pub dq: Option<TensorMut<'a>>,
    /// Receives the gradient of `k`: like it.
    pub dk: Option<TensorMut<'a>>,
    /// Receives the gradient of `v`: like it.
    pub dv: Option<TensorMut<'a>>,
    /// Receives the gradient of `bias`, summed over the dimensions that it repeats: f32, of its shape.
    pub dbias: Option<TensorMut<'a>>,
    /// Receives the gradient of `sinks`: f32 `[Hq]`.
    pub dsinks: Option<TensorMut<'a>>,
    /// Whether `dbias` and `dsinks` are added to what is there.
    pub accumulate: bool,
    /// Whether the same inputs must give the same bits of `dq` on a GPU, which may take longer. Every
    /// other gradient, and all on the CPU, have the same bits in any case.
    pub deterministic: bool,
    /// As [`super::Params::max_seqlen_q`].
    pub max_seqlen_q: usize,
    /// As [`super::Params::max_seqlen_k`].
    pub max_seqlen_k: usize,
    /// As [`super::Params::scale`].
    pub scale: f32,
    /// As [`super::Params::softcap`].
    pub softcap: f32,
    /// As [`super::Params::causal`].
    pub causal: bool,
    /// As [`super::Params::window_left`].
    pub window_left: usize,
    /// As [`super::Params::window_right`].
    pub window_right: usize,
    /// Scratch of [`workspace_size`] bytes.
    pub workspace: Workspace<'a>,
}

impl<'a> Params<'a> {
    /// Of plain attention; no gradient is asked for yet.
    pub fn new(
        q: TensorRef<'a>,
        k: TensorRef<'a>,
        v: TensorRef<'a>,
        out: TensorRef<'a>,
        lse: TensorRef<'a>,
        dout: TensorRef<'a>,
    ) -> Self {
        Params {
            q,
            k,
            v,
            out,
            lse,
            dout,
            dlse: None,
            bias: None,
            mask: None,
            alibi_slopes: None,
            sinks: None,
            cu_seqlens_q: None,
            cu_seqlens_k: None,
            seq_lens_k: None,
            dq: None,
            dk: None,
            dv: None,
            dbias: None,
            dsinks: None,
            accumulate: false,
            deterministic: false,
            max_seqlen_q: 0,
            max_seqlen_k: 0,
            scale: 0.0,
            softcap: 0.0,
            causal: false,
            window_left: 0,
            window_right: 0,
            workspace: Workspace::none(),
        }
    }
}

impl Operation for Params<'_> {
    const NAME: &'static str = OP;
    type Problem = Backward;

    fn tensors(&self, tensors: &mut Tensors) {
        for (name, tensor) in [
            ("q", &self.q),
            ("k", &self.k),
            ("v", &self.v),
            ("out", &self.out),
            ("lse", &self.lse),
            ("dout", &self.dout),
        ] {
            tensors.read(name, tensor);
        }
        for (name, tensor) in [
            ("dlse", &self.dlse),
            ("bias", &self.bias),
            ("mask", &self.mask),
            ("alibi_slopes", &self.alibi_slopes),
            ("sinks", &self.sinks),
            ("cu_seqlens_q", &self.cu_seqlens_q),
            ("cu_seqlens_k", &self.cu_seqlens_k),
            ("seq_lens_k", &self.seq_lens_k),
        ] {
            tensors.read_optional(name, tensor.as_ref());
        }
        for (name, tensor) in self.gradients() {
            tensors.write_optional(name, tensor);
        }
    }

    fn workspace(&self) -> Option<&Workspace<'_>> {
        Some(&self.workspace)
    }

    fn problem(&self) -> Result<Backward> {
        let inputs = self.inputs();
        let forward = inputs.problem()?;
        Arg::new(OP, "dout", &self.dout.raw())
            .dtype(match inputs.q.dtype {
                DType::F32 => &[DType::F32][..],
                DType::F16 => &[DType::F16, DType::F32],
                _ => &[DType::Bf16, DType::F32],
            })?
            .shape_of(Arg::new(OP, "out", &inputs.out))?
            .last_contiguous()?;
        if self.gradients().iter().all(|(_, tensor)| tensor.is_none()) {
            let problem = "is absent, as are dk, dv, dbias and dsinks: nothing is asked for";
            return Err(Error::invalid(OP, "dq", problem));
        }
        let lse = self.lse.raw();
        let dlse = self.dlse.as_ref().map(TensorRef::raw);
        if let Some(dlse) = &dlse {
            Arg::new(OP, "dlse", dlse)
                .dtype(&[DType::F32])?
                .shape_of(Arg::new(OP, "lse", &lse))?;
        }
        let (q_packed, k_packed) = (self.cu_seqlens_q.is_some(), self.cu_seqlens_k.is_some());
        let of_queries = |t: RawTensor| rows(&t, q_packed);
        let of_keys = |t: RawTensor| rows(&t, k_packed);
        Ok(Backward {
            dout: of_queries(self.dout.raw()),
            dlse: dlse.map(|t| match q_packed {
                true => Rows::new(&t, None, 1, 0),
                false => Rows::new(&t, Some(0), 2, 1),
            }),
            dq: gradient("dq", self.dq.as_ref(), "q", &inputs.q)?.map(of_queries),
            dk: gradient("dk", self.dk.as_ref(), "k", &inputs.k)?.map(of_keys),
            dv: gradient("dv", self.dv.as_ref(), "v", &inputs.v)?.map(of_keys),
            dbias: self.dbias(inputs.bias.as_ref())?,
            dsinks: self.dsinks(inputs.sinks.as_ref())?,
            accumulate: self.accumulate,
            deterministic: self.deterministic,
            forward,
        })
    }
}

impl Params<'_> {
    fn gradients(&self) -> [(&'static str, Option<&TensorMut<'_>>); 5] {
        [
            ("dq", self.dq.as_ref()),
            ("dk", self.dk.as_ref()),
            ("dv", self.dv.as_ref()),
            ("dbias", self.dbias.as_ref()),
            ("dsinks", self.dsinks.as_ref()),
        ]
    }

    fn inputs(&self) -> Inputs {
        let raw = |tensor: &Option<TensorRef<'_>>| tensor.as_ref().map(TensorRef::raw);
        Inputs {
            op: OP,
            q: self.q.raw(),
            k: self.k.raw(),
            v: self.v.raw(),
            kv_dtypes: DType::FLOATS,
            kv_scales: [self.k.scales(), self.v.scales()],
            out: self.out.raw(),
            lse: Some(self.lse.raw()),
            bias: raw(&self.bias),
            mask: raw(&self.mask),
            alibi_slopes: raw(&self.alibi_slopes),
            sinks: raw(&self.sinks),
            cu_seqlens_q: raw(&self.cu_seqlens_q),
            cu_seqlens_k: raw(&self.cu_seqlens_k),
            seq_lens_k: raw(&self.seq_lens_k),
            block_table: None,
            page_layout: PageLayout::TokenMajor,
            max_seqlen_q: self.max_seqlen_q,
            max_seqlen_k: self.max_seqlen_k,
            scale: self.scale,
            softcap: self.softcap,
            causal: self.causal,
            window_left: self.window_left,
            window_right: self.window_right,
        }
    }

    fn dbias(&self, bias: Option<&RawTensor>) -> Result<Option<ScoresGradient>> {
        let Some(dbias) = self.dbias.as_ref().map(TensorMut::raw) else {
            return Ok(None);
        };
        let bias = given("dbias", "bias", bias)?;
        Arg::new(OP, "dbias", &dbias)
            .dtype(&[DType::F32])?
            .shape_of(Arg::new(OP, "bias", bias))?
            .last_contiguous()?
            .writable()?;
        let dims = [0, 1, 2, 3];
        Ok(Some(ScoresGradient {
            ptr: dbias.ptr.cast(),
            sizes: dims.map(|dim| dbias.layout.dim(dim)),
            strides: dims.map(|dim| dbias.layout.stride(dim)),
        }))
    }

    fn dsinks(&self, sinks: Option<&RawTensor>) -> Result<Option<*mut f32>> {
        let Some(dsinks) = self.dsinks.as_ref().map(TensorMut::raw) else {
            return Ok(None);
        };
        let sinks = given("dsinks", "sinks", sinks)?;
        Arg::new(OP, "dsinks", &dsinks)
            .dtype(&[DType::F32])?
            .shape_of(Arg::new(OP, "sinks", sinks))?
            .contiguous()?;
        Ok(Some(dsinks.ptr.cast()))
    }
}

/// The tensor whose gradient is asked for.
fn given<'a>(name: &'static str, of: &str, tensor: Option<&'a RawTensor>) -> Result<&'a RawTensor> {
    tensor.ok_or_else(|| Error::invalid(OP, name, text!("is given without {of}")))
}

/// A gradient, checked to be like the tensor that it is of.
fn gradient(
    name: &'static str,
    tensor: Option<&TensorMut<'_>>,
    of: &'static str,
    like: &RawTensor,
) -> Result<Option<RawTensor>> {
    let Some(tensor) = tensor.map(TensorMut::raw) else {
        return Ok(None);
    };
    let like = Arg::new(OP, of, like);
    Arg::new(OP, name, &tensor)
        .dtype_of(like)?
        .shape_of(like)?
        .last_contiguous()?
        .writable()?;
    Ok(Some(tensor))
}

/// Where tokens and heads are.
fn rows(t: &RawTensor, packed: bool) -> Rows {
    match packed {
        true => Rows::new(t, None, 0, 1),
        false => Rows::new(t, Some(0), 1, 2),
    }
}

operation::functions!(backward);
