//! The attention block of a transformer in one call:
//! `y = attention(rope(norm(x Wqᵀ + bq)), rope(norm(x Wkᵀ + bk)), x Wvᵀ + bv) Woᵀ + bo`, with optional norms and rotation, an
//! optional KV cache, and an optional fused addition of a residual.
//!
//! It is a sequence of this library's operations, [`linear`](super::linear), [`qk_norm_rope`](super::qk_norm_rope) where heads are
//! normalised and rotated, else [`rms_norm`](super::rms_norm) or [`rope`](super::rope), [`kv_cache`](crate::kv_cache) and
//! [`attention`](super::attention), over a workspace that holds queries, keys and values of the new tokens side by side, and
//! attention's output. Each operation rounds its result to the dtype of `x`, so the block gives the same bits as the operations called one by one (on a GPU up
//! to the order of sums, which depends on how tensors lie); with a cache keys are rotated in f32 on their way to the cache,
//! and in the same launch the queries that were not normalised with their rotation. On Hopper that launch attends as well where each
//! sequence has one new token, of which few enough are queued at a time.
//!
//! Without a cache tokens attend to those of the same call: plain self-attention, as in training or an encoder.
//! With one the new tokens of the cache's current batch are appended to a layer and attend to everything their
//! sequences hold in it; calling it twice for one layer and batch writes the same places again.
//!
//! For a [`backward`](fn@backward) pass, without a cache, queries, keys, values, attention's output and LSE can
//! be kept. The call then needs the whole workspace that it asks for, so that they have the same bits as those that a
//! backward pass computes again.

pub mod backward;
mod check;
mod gradients;
mod steps;
mod turning;
mod views;

pub use backward::backward;

use crate::error::Result;
use crate::ops::check::described;
use crate::ops::kv_cache::Layer;
use crate::ops::linear::{Output, Weights};
use crate::ops::operation;
use crate::ops::parallel::Parallel;
use crate::ops::rope::{Positions, Rotation};
use crate::tensor::{TensorMut, TensorRef, Workspace};
pub(crate) use views::{Heads, Views, view};

pub(crate) const OP: &str = "attention_block";

/// Arguments of [`forward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// `[batch, seq, hidden]` or `[tokens, hidden]`, f32, f16 or bf16; rows strided, contiguous in the last dimension. With
    /// `cu_seqlens` or a cache it is `[tokens, hidden]`.
    pub x: TensorRef<'a>,
    /// Gains of an RMSNorm of `x` before it is projected, `[hidden]`, any float dtype; for a forward pass alone, on one rank. The
    /// output may then take the place of `x`, as of a residual stream. `None` for no norm.
    pub x_norm: Option<TensorRef<'a>>,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads, a divisor of `num_heads`.
    pub num_kv_heads: usize,
    /// Components of a query or key head.
    pub head_dim: usize,
    /// Components of a value head.
    pub v_head_dim: usize,
    /// Projections to queries, keys and values.
    pub projections: Projections<'a>,
    /// Gains of an RMSNorm of the queries, any float dtype: `[head_dim]` normalises each head (Qwen 3), `[num_heads * head_dim]` all
    /// heads of a token together (OLMo 2). `None` for no norm.
    pub q_norm: Option<TensorRef<'a>>,
    /// Gains of an RMSNorm of the keys: `[head_dim]` or `[num_kv_heads * head_dim]`.
    pub k_norm: Option<TensorRef<'a>>,
    /// Added to the gains of all norms: 1 for Gemma, else 0.
    pub norm_weight_offset: f32,
    /// Added to the mean squares of all norms.
    pub norm_epsilon: f32,
    /// Rotates queries and keys, after the norms; `None` for no rotation.
    pub rotation: Option<Rotation<'a>>,
    /// Where tokens stand, for the rotation. With `cu_seqlens` they are given per token; a cache knows its own, and they are ignored.
    pub positions: Positions<'a>,
    /// The layer that takes the new tokens' keys and values, and that they attend to.
    pub cache: Option<Layer<'a>>,
    /// Where each sequence of packed tokens begins, and the last one's end: i32 `[num_sequences + 1]`. Not with a cache.
    pub cu_seqlens: Option<TensorRef<'a>>,
    /// With `cu_seqlens`: no sequence is longer; 0 for no better bound than all tokens.
    pub max_seqlen: usize,
    /// Factor of the scores; 0 for `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Bound of the scores through `softcap * tanh(s / softcap)`; 0 for none.
    pub softcap: f32,
    /// Tokens see later ones too; only without a cache.
    pub bidirectional: bool,
    /// How many tokens one sees up to and with itself (and as many from itself on, if `bidirectional`); 0 for all.
    pub window: usize,
    /// ALiBi slopes, f32 `[num_heads]`.
    pub alibi_slopes: Option<TensorRef<'a>>,
    /// A logit per query head that takes part in the softmax and has no value, f32 `[num_heads]`.
    pub sinks: Option<TensorRef<'a>>,
    /// Gains of an RMSNorm of attention's output, all heads of a token together (BitNet), any float dtype
    /// `[num_heads * v_head_dim]`; for a forward pass alone. `None` for no norm.
    pub attended_norm: Option<TensorRef<'a>>,
    /// The projection of attention's output, `[hidden_out, num_heads * v_head_dim]`; usually `hidden_out` is `hidden`.
    pub out_projection: Weights<'a>,
    /// `[.., hidden_out]`: leading dimensions and dtype of `x`.
    pub output: Output<'a>,
    /// As much as [`workspace_size`] says; what projections alone have use for may be missing, unless
    /// something is kept or weights in blocks are decoded.
    pub workspace: Workspace<'a>,
    /// Receives queries, keys and values for a backward pass: `[.., columns]`, queries first, then keys,
    /// then values; contiguous, of the dtype of `x`. They are rotated where no norm is before the
    /// rotation, which the backward pass undoes; with a norm of either they are as the projections give
    /// them. Not with a cache.
    pub qkv_out: Option<TensorMut<'a>>,
    /// Receives attention's output for a backward pass: `[.., num_heads * v_head_dim]`, contiguous, of
    /// the dtype of `x`. Together with `lse_out`.
    pub attended_out: Option<TensorMut<'a>>,
    /// Receives the logarithms of the softmax's denominators for a backward pass: f32, contiguous,
    /// `[batch, num_heads, seq]`, or `[num_heads, tokens]` where `x` has no batch.
    pub lse_out: Option<TensorMut<'a>>,
    /// The group that heads are divided among; `None` where a rank has all. Head counts, the rows of the
    /// projections to queries, keys and values, the columns of `out_projection`, sinks, slopes, cache and
    /// what is kept are this rank's; norms are of single heads. `x` is the same on all ranks, and the
    /// output, which is contiguous, gets the sum of their products. Sequence parallel, `x`, output and
    /// residual are this rank's rows; positions, `cu_seqlens`, the cache and what is kept are of all rows.
    pub parallel: Option<Parallel<'a>>,
}

/// Projections to queries, keys and values, of any float dtypes.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::large_enum_variant)] // views, made once per call; a box would only be in the caller's way
pub enum Projections<'a> {
    /// Three matrices.
    Apart {
        /// `[num_heads * head_dim, hidden]`.
        q: Weights<'a>,
        /// `[num_kv_heads * head_dim, hidden]`.
        k: Weights<'a>,
        /// `[num_kv_heads * v_head_dim, hidden]`.
        v: Weights<'a>,
    },
    /// One matrix with the rows of all query heads, then all key heads, then all value heads.
    Packed(Weights<'a>),
}

impl<'a> Params<'a> {
    /// The block of another input, without a cache and without what it writes.
    pub(crate) fn of_input(&self, x: TensorRef<'a>) -> Params<'a> {
        Params {
            x,
            x_norm: self.x_norm,
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            v_head_dim: self.v_head_dim,
            projections: self.projections,
            q_norm: self.q_norm,
            k_norm: self.k_norm,
            norm_weight_offset: self.norm_weight_offset,
            norm_epsilon: self.norm_epsilon,
            rotation: self.rotation,
            positions: self.positions,
            cache: None,
            cu_seqlens: self.cu_seqlens,
            max_seqlen: self.max_seqlen,
            scale: self.scale,
            softcap: self.softcap,
            bidirectional: self.bidirectional,
            window: self.window,
            alibi_slopes: self.alibi_slopes,
            sinks: self.sinks,
            attended_norm: self.attended_norm,
            out_projection: self.out_projection,
            output: Output::none(),
            workspace: Workspace::none(),
            qkv_out: None,
            attended_out: None,
            lse_out: None,
            parallel: self.parallel,
        }
    }

    /// Tokens that attention is of: rows of `x` or, sequence parallel, those of all ranks.
    pub(crate) fn num_rows(&self) -> Result<usize> {
        let x = self.x.raw();
        match &self.parallel {
            Some(parallel) if parallel.sequence => Ok(parallel.whole(OP, "x", &x)?.num_rows()),
            _ => Ok(x.layout.num_rows()),
        }
    }

    /// The block of the rows of all ranks, which is this one otherwise.
    fn of_all_rows<'t>(&'t self, x: TensorRef<'t>) -> Params<'t> {
        Params {
            cache: self.cache.as_ref().map(Layer::again),
            qkv_out: described(&self.qkv_out),
            attended_out: described(&self.attended_out),
            lse_out: described(&self.lse_out),
            ..self.of_input(x)
        }
    }
}

operation::functions!();
