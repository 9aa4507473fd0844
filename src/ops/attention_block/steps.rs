//! The block's operations on its views, as parts.

use super::views::{Heads, Views, view, view_mut};
use super::{OP, Params, Projections};
use crate::error::{Error, Result, text};
use crate::ops::linear::{Output, Weights};
use crate::ops::parts::{Names, Parts, named};
use crate::ops::rope::Positions;
use crate::ops::{attention, linear, operation::Operation, rms_norm, rope};
use crate::problem;
use crate::tensor::{InOut, RawTensor, TensorMut, TensorRef, Workspace};

// What the block calls arguments of its operations. What passes between them has no name of its own
// and is as large as `x`, or as what the cache holds, makes it.
const OF_Q: Names = &[("weight", "q_weight"), ("bias", "q_bias")];
const OF_K: Names = &[("weight", "k_weight"), ("bias", "k_bias")];
const OF_V: Names = &[("weight", "v_weight"), ("bias", "v_bias")];
const OF_QKV: Names = &[("weight", "qkv_weight"), ("bias", "qkv_bias")];
pub(super) const OF_OUT: Names = &[("weight", "out_weight"), ("bias", "out_bias")];
const OF_Q_NORM: Names = &[
    ("weight", "q_norm"),
    ("weight_offset", "norm_weight_offset"),
    ("epsilon", "norm_epsilon"),
];
const OF_K_NORM: Names = &[
    ("weight", "k_norm"),
    ("weight_offset", "norm_weight_offset"),
    ("epsilon", "norm_epsilon"),
];
pub(super) const OF_ROPE: Names = &[("q", "x"), ("k", "x")];
const OF_APPEND: Names = &[("k", "x"), ("v", "x")];
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
        let mut push = |weights: &Weights<'_>, names, out: TensorMut<'static>| {
            let linear = linear::Params {
                x: self.x,
                weights: *weights,
                output: Output::Write(views.batch_if_any(out)?),
                workspace: Workspace::none(),
            };
            parts.push(linear.problem(), names)
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

    /// The gains of queries (0) and keys (1).
    pub(super) fn norm(&self, which: usize) -> Option<TensorRef<'p>> {
        [self.q_norm, self.k_norm][which]
    }

    /// Whether queries or keys are normalised, which loses what they were.
    pub(super) fn normalises(&self) -> bool {
        self.q_norm.is_some() || self.k_norm.is_some()
    }

    /// Whether heads of queries or keys are normalised one by one, and not all of a token together.
    pub(super) fn normalises_heads(&self, heads: &Heads, which: usize) -> Result<bool> {
        let Some(weight) = self.norm(which) else {
            return Ok(false);
        };
        let (head_dim, columns) = (self.head_dim, heads.columns()[which]);
        match weight.layout().shape() {
            [n] if *n == head_dim => Ok(true),
            [n] if *n == columns => Ok(false),
            shape => {
                let problem = text!("has shape {shape:?}, allowed: [{head_dim}] or [{columns}]");
                Err(Error::invalid(OP, ["q_norm", "k_norm"][which], problem))
            }
        }
    }

    /// The rows of queries or keys that are normalised, in a tensor that has both side by side.
    pub(super) fn rows_of_norm(
        &self,
        views: &Views,
        all: &RawTensor,
        which: usize,
    ) -> Result<TensorMut<'static>> {
        match self.normalises_heads(&views.heads, which)? {
            true => views.heads_of(all, which),
            false => views.flat_of(all, which),
        }
    }

    /// The norm of queries or keys, if there is one.
    pub(super) fn norm_problem(
        &self,
        views: &Views,
        which: usize,
    ) -> Result<Option<problem::rms_norm::Problem>> {
        let Some(weight) = self.norm(which) else {
            return Ok(None);
        };
        let x = self.rows_of_norm(views, &views.qkv, which)?;
        let norm = rms_norm::Params {
            x: match &views.turned {
                None => InOut::InPlace(x),
                Some(turned) => InOut::Apart {
                    // SAFETY: as in `Views::flat_of`.
                    input: unsafe { view(&x) },
                    output: self.rows_of_norm(views, turned, which)?,
                },
            },
            residual: None,
            weight: Some(weight),
            weight_offset: self.norm_weight_offset,
            epsilon: self.norm_epsilon,
        };
        named(OP, norm.problem(), [OF_Q_NORM, OF_K_NORM][which]).map(Some)
    }

    pub(super) fn push_norms<const N: usize>(
        &self,
        views: &Views,
        parts: &mut Parts<N>,
    ) -> Result<()> {
        for (which, names) in [OF_Q_NORM, OF_K_NORM].into_iter().enumerate() {
            if let Some(norm) = self.norm_problem(views, which)? {
                parts.push(Ok(norm), names)?;
            }
        }
        Ok(())
    }

    /// Of queries, and of keys unless the cache rotates them when they are appended.
    pub(super) fn push_rope<const N: usize>(
        &self,
        views: &Views,
        parts: &mut Parts<N>,
    ) -> Result<()> {
        let pair = |which| -> Result<InOut<'static>> {
            let x = views.batch_if_any(views.heads(which)?)?;
            Ok(match &views.turned {
                None => InOut::InPlace(x),
                Some(turned) => {
                    let output = views.batch_if_any(views.heads_of(turned, which)?)?;
                    match self.norm(which) {
                        Some(_) => InOut::InPlace(output),
                        None => InOut::Apart {
                            // SAFETY: as in `Views::flat_of`.
                            input: unsafe { view(&x) },
                            output,
                        },
                    }
                }
            })
        };
        let k = self.cache.is_none().then(|| pair(1)).transpose()?;
        match self.rope_problem([Some(pair(0)?), k], false) {
            Ok(None) => Ok(()),
            Ok(Some(rope)) => parts.push(Ok(rope), OF_ROPE),
            Err(error) => Err(error),
        }
    }

    /// A rotation of queries and keys, or back, if the block rotates.
    pub(super) fn rope_problem(
        &self,
        [q, k]: [Option<InOut<'static>>; 2],
        inverse: bool,
    ) -> Result<Option<problem::rope::Problem>> {
        let Some(rotation) = self.rotation else {
            return Ok(None);
        };
        let rope = rope::Params {
            q,
            k,
            positions: match &self.cache {
                Some(layer) => Positions::PerToken(layer.batch.positions),
                None => self.positions,
            },
            rotation,
            inverse,
        };
        named(OP, rope.problem(), OF_ROPE).map(Some)
    }

    pub(super) fn push_append<const N: usize>(
        &self,
        views: &Views,
        parts: &mut Parts<N>,
    ) -> Result<()> {
        let Some(layer) = &self.cache else {
            return Ok(());
        };
        let tokens = (views.heads(1)?.raw(), views.heads(2)?.raw());
        let append = layer.append(OP, tokens, self.rotation.as_ref());
        parts.push(append, OF_APPEND)
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

    pub(super) fn out_projection(&self, views: &Views) -> Result<linear::Params<'_>> {
        // SAFETY: attention's output lies in the workspace or is kept; the caller's output is
        // described once more for a problem, while `self` keeps it lent.
        let (attended, output) = unsafe {
            let attended = view_mut(&views.attended);
            let out = self.output.out();
            let out = TensorMut::from_raw(out.ptr, out.dtype, out.layout);
            let output = match &self.output {
                Output::Write(_) => Output::Write(out),
                Output::Add(InOut::InPlace(_)) => Output::Add(InOut::InPlace(out)),
                Output::Add(InOut::Apart { input, .. }) => Output::Add(InOut::Apart {
                    input: *input,
                    output: out,
                }),
            };
            (attended, output)
        };
        let x: TensorMut<'static> = views.batch_if_any(attended)?;
        // SAFETY: as above.
        let x: TensorRef<'static> = unsafe { view(&x) };
        Ok(linear::Params {
            x,
            weights: self.out_projection,
            output,
            workspace: Workspace::none(),
        })
    }
}
