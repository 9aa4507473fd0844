//! The block's operations on its views, as parts.

use super::views::{Views, view, view_mut};
use super::{OP, Params, Projections};
use crate::error::Result;
use crate::ops::linear::{Output, Weights};
use crate::ops::parallel::{Chunks, Parallel};
use crate::ops::parts::{Names, Parts, named};
use crate::ops::rms_norm::{self, Norm};
use crate::ops::{attention, linear, operation::Operation};
use crate::problem::attention::Step;
use crate::problem::kv_cache::Append;
use crate::problem::linear as problem;
use crate::tensor::{InOut, TensorMut, TensorRef, Workspace};

// What the block calls arguments of its operations. What passes between them has no name of its own
// and is as large as `x`, or as what the cache holds, makes it.
const OF_Q: Names = &[("weight", "q_weight"), ("bias", "q_bias")];
const OF_K: Names = &[("weight", "k_weight"), ("bias", "k_bias")];
const OF_V: Names = &[("weight", "v_weight"), ("bias", "v_bias")];
const OF_QKV: Names = &[("weight", "qkv_weight"), ("bias", "qkv_bias")];
pub(super) const OF_X_NORM: [&str; 3] = ["x_norm", "norm_weight_offset", "norm_epsilon"];
pub(super) const OF_OUT: Names = &[("weight", "out_weight"), ("bias", "out_bias")];
const OF_ATTENDED_NORM: Names = &[
    ("weight", "attended_norm"),
    ("weight_offset", "norm_weight_offset"),
    ("epsilon", "norm_epsilon"),
];
const OF_APPEND: Names = &[("q", "x"), ("k", "x"), ("v", "x")];
pub(super) const OF_ATTENTION: Names = &[
    ("q", "x"),
    ("k", "x"),
    ("v", "x"),
    ("dout", "x"),
    ("cu_seqlens_q", "cu_seqlens"),
    ("cu_seqlens_k", "cu_seqlens"),
    ("max_seqlen_q", "max_seqlen"),
    ("max_seqlen_k", "max_seqlen"),
    ("window_left", "window"),
    ("window_right", "window"),
];
pub(super) const OF_CACHED_ATTENTION: Names = &[
    ("q", "x"),
    ("k", "cache"),
    ("v", "cache"),
    ("cu_seqlens_q", "cache"),
    ("seq_lens_k", "cache"),
    ("block_table", "cache"),
    ("max_seqlen_q", "cache"),
    ("max_seqlen_k", "cache"),
    ("window_left", "window"),
    ("window_right", "window"),
];

impl<'p> Params<'p> {
    /// Queries, keys and values.
    pub(super) fn push_projections<const N: usize>(
        &self,
        views: &Views,
        parts: &mut Parts<N>,
    ) -> Result<()> {
        let mut x = self.x;
        let mut x_norm = self.x_norm.map(|weight| Norm {
            weight,
            weight_offset: self.norm_weight_offset,
            epsilon: self.norm_epsilon,
        });
        // Several products read what one norm gives.
        if let (Some(norm), Projections::Apart { .. }) = (&x_norm, &self.projections) {
            let raw = x.raw();
            let hidden = raw.layout.dim(raw.layout.rank() - 1);
            let rows = parts.take(raw.dtype, [views.num_tokens(), hidden])?;
            let norm = norm.problem(OP, OF_X_NORM, &raw)?.alone(raw, rows.ptr)?;
            // SAFETY: it lies in the workspace, which the caller lends for the parts of this call.
            x = unsafe { TensorRef::from_raw(norm.out.ptr, norm.out.dtype, norm.out.layout) };
            parts.push(Ok(norm), &[])?;
            x_norm = None;
        }
        let mut push = |weights: &Weights<'_>, names, out: TensorMut<'static>| {
            let linear = linear::Params {
                x,
                x_norm,
                weights: *weights,
                output: Output::Write(views.batch_if_any(out)?),
                workspace: Workspace::none(),
                parallel: None,
            };
            parts.push(linear.alone(), names)
        };
        match &self.projections {
            // SAFETY: as in `Views::flat_of`.
            Projections::Packed(qkv) => push(qkv, OF_QKV, unsafe { view_mut(&views.qkv) }),
            Projections::Apart { q, k, v } => {
                push(q, OF_Q, views.flat(0)?)?;
                push(k, OF_K, views.flat(1)?)?;
                push(v, OF_V, views.flat(2)?)
            }
        }
    }

    /// What puts the new tokens into the cache, if there is one.
    pub(super) fn append(&self, views: &Views) -> Result<Option<Append>> {
        let Some(layer) = &self.cache else {
            return Ok(None);
        };
        let tokens = (views.heads(1)?.raw(), views.heads(2)?.raw());
        let q = match self.rotates_with_keys(&views.heads)? {
            true => Some(InOut::InPlace(views.heads(0)?)),
            false => None,
        };
        let append = layer.append(OP, tokens, q.as_ref(), self.rotation.as_ref());
        named(OP, append, OF_APPEND).map(Some)
    }

    /// Adds attention, behind what puts the new tokens into the cache; in one where each sequence has one of them.
    pub(super) fn push_attention<const N: usize>(
        &self,
        views: &Views,
        lse: Option<TensorMut<'_>>,
        parts: &mut Parts<N>,
    ) -> Result<()> {
        let append = self.append(views)?;
        let names = match append {
            Some(_) => OF_CACHED_ATTENTION,
            None => OF_ATTENTION,
        };
        // The borrow of `lse` ends with the problem.
        let attention = self.attention(views, lse)?.problem();
        let attention = named(OP, attention, names)?;
        match append {
            Some(append) if attention.gives_each_one(append.k.layout.dim(0)) => {
                let step = Step { append, attention };
                parts.push(Ok(step), names)
            }
            Some(append) => {
                parts.push(Ok(append), OF_APPEND)?;
                parts.push(Ok(attention), names)
            }
            None => parts.push(Ok(attention), names),
        }
    }

    /// What attention reads of queries or keys: as they are in the end.
    fn attends(&self, views: &Views, which: usize) -> Result<TensorMut<'static>> {
        match &views.turned {
            Some(turned) if self.norm(which).is_some() || self.rotation.is_some() => {
                views.heads_of(turned, which)
            }
            _ => views.heads(which),
        }
    }

    /// Attention over the views; `lse` is `[num_heads, tokens]` or, of a batch, `[batch, num_heads,
    /// seq]`.
    pub(super) fn attention<'a>(
        &'a self,
        views: &Views,
        lse: Option<TensorMut<'a>>,
    ) -> Result<attention::Params<'a>> {
        let (q, out) = (self.attends(views, 0)?, views.attended(&views.attended)?);
        let mut arguments = match &self.cache {
            // SAFETY: views lie in the workspace, whose writes are queued before, as are those of
            // the pages.
            Some(layer) => unsafe { layer.attention(view(&q), out) },
            None => {
                let (mut q, mut k, mut v) = (q, self.attends(views, 1)?, views.heads(2)?);
                let mut out = out;
                let mut lse = lse;
                if self.cu_seqlens.is_none() {
                    q = views.batch(q)?;
                    k = views.batch(k)?;
                    v = views.batch(v)?;
                    out = views.batch(out)?;
                    if views.batched.is_none() {
                        let heads = [1, self.num_heads];
                        lse = lse.map(|lse| lse.unflattened(0, &heads)).transpose()?;
                    }
                }
                // SAFETY: as above.
                let (q, k, v) = unsafe { (view(&q), view(&k), view(&v)) };
                attention::Params {
                    cu_seqlens_q: self.cu_seqlens,
                    cu_seqlens_k: self.cu_seqlens,
                    max_seqlen_q: self.max_seqlen,
                    max_seqlen_k: self.max_seqlen,
                    causal: !self.bidirectional,
                    lse,
                    ..attention::Params::new(q, k, v, out)
                }
            }
        };
        arguments.scale = self.scale;
        arguments.softcap = self.softcap;
        arguments.window_left = self.window;
        if self.bidirectional {
            arguments.window_right = self.window;
        }
        arguments.alibi_slopes = self.alibi_slopes;
        arguments.sinks = self.sinks;
        Ok(arguments)
    }

    /// Adds the norm of attention's output, in place.
    pub(super) fn push_attended_norm<const N: usize>(
        &self,
        views: &Views,
        parts: &mut Parts<N>,
    ) -> Result<()> {
        let Some(weight) = self.attended_norm else {
            return Ok(());
        };
        let norm = rms_norm::Params {
            // SAFETY: it lies in the workspace, as nothing is kept that is normalised.
            x: InOut::InPlace(unsafe { view_mut(&views.attended) }),
            residual: None,
            weight: Some(weight),
            weight_offset: self.norm_weight_offset,
            epsilon: self.norm_epsilon,
        };
        parts.push(norm.problem(), OF_ATTENDED_NORM)
    }

    /// Adds the projection of attention's output, and what adds up the ranks' parts of it, in these chunks.
    pub(super) fn push_out_projection<'t, const N: usize>(
        &self,
        views: &Views,
        weights: problem::Weights,
        (output, parallel): (&Output<'_>, Option<&Parallel<'t>>),
        parts: &mut Parts<'t, N>,
    ) -> Result<Chunks> {
        // SAFETY: it lies in the workspace or is kept, and is described for a part of one call.
        let attended = views.batch_if_any(unsafe { view_mut(&views.attended) })?;
        let product = problem::Problem {
            x: attended.raw(),
            norm: None,
            weights,
            residual: output.residual(),
            out: output.out(),
        };
        if let Some(parallel) = parallel {
            return parallel.push_product(OP, product, OF_OUT, parts);
        }
        parts.push(Ok(product), OF_OUT)?;
        Ok(Chunks::one(views.num_tokens()))
    }
}
