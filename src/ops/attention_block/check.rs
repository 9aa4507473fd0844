//! Validation: what the block does, as one validated problem for each of its operations.

use arrayvec::ArrayVec;

use super::views::{Heads, Views, view, view_mut};
use super::{OP, Params, Projections};
use crate::context::Context;
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::layout::MAX_RANK;
use crate::ops::check::{Arg, with_last};
use crate::ops::kv_cache::{Layer, NO_BATCH};
use crate::ops::linear::{Output, Weights};
use crate::ops::operation::{Operation, Tensors};
use crate::ops::parts::{Names, Parts};
use crate::ops::rope::Positions;
use crate::ops::{attention, linear, rms_norm, rope};
use crate::tensor::{InOut, TensorMut, TensorRef, Workspace};

/// Projections to queries, keys and values, two norms, rope, the cache's append, attention, and the
/// projection of its output. What passes between them lies at the beginning of the workspace.
type Problem = Parts<9>;

impl Operation for Params<'_> {
    const NAME: &'static str = OP;
    type Problem = Problem;

    fn problem(&self) -> Result<Problem> {
        let mut parts = Parts::new(OP, &self.workspace);
        let views = self.views(&mut parts)?;
        let x = self.x.raw();
        let arg = Arg::new(OP, "x", &x);
        let hidden = x.layout.dim(x.layout.rank() - 1);
        let heads = self.heads();
        for (weights, names, rows) in self.weights() {
            let problem = weights.problem(OP, names, hidden)?;
            expect_rows(names.0, problem.out_features(), rows)?;
        }
        let names = ("out_weight", "out_bias");
        let out = self.out_projection.problem(OP, names, heads.attended())?;
        let mut room = [0; MAX_RANK];
        self.output
            .check(OP, arg, with_last(&x, out.out_features(), &mut room))?;
        self.check_sequences()?;
        if let Some(layer) = &self.cache {
            self.check_cache(layer, views.num_tokens())?;
            if layer.any_batch {
                parts.for_any_batch();
            }
        }
        self.push_projections(&views, &mut parts)?;
        self.push_norms(&views, &mut parts)?;
        self.push_rope(&views, &mut parts)?;
        self.push_append(&views, &mut parts)?;
        let attention = self.attention(&views)?.problem();
        parts.push(
            attention,
            match &self.cache {
                Some(_) => OF_CACHED_ATTENTION,
                None => OF_ATTENTION,
            },
        )?;
        parts.push(self.out_projection(&views)?.problem(), OF_OUT)?;
        // Without a cache there is nothing to do for an output without elements.
        if self.cache.is_none() && self.output.out().layout.is_empty() {
            parts.be_idle();
        }
        Ok(parts)
    }

    fn tensors(&self, tensors: &mut Tensors) {
        tensors.read("x", &self.x);
        for (weights, names, _) in self.weights() {
            weights.tensors(names, tensors);
        }
        let names = ("out_weight", "out_bias");
        self.out_projection.tensors(names, tensors);
        for (name, tensor) in [
            ("q_norm", &self.q_norm),
            ("k_norm", &self.k_norm),
            ("cu_seqlens", &self.cu_seqlens),
            ("alibi_slopes", &self.alibi_slopes),
            ("sinks", &self.sinks),
        ] {
            tensors.read_optional(name, tensor.as_ref());
        }
        if let Positions::PerToken(positions) = &self.positions
            && self.cache.is_none()
        {
            tensors.read("positions", positions);
        }
        if let Some(rotation) = &self.rotation {
            rotation.tensors(tensors);
        }
        if let Some(layer) = &self.cache {
            layer.own(tensors);
        }
        self.output.tensors(tensors);
    }

    fn workspace(&self) -> Option<&Workspace<'_>> {
        Some(&self.workspace)
    }

    fn ready(&self) -> Result<()> {
        match &self.cache {
            Some(layer) if layer.any_batch => Err(Error::invalid(OP, "cache", NO_BATCH)),
            _ => Ok(()),
        }
    }

    fn context(&self) -> Option<(&'static str, &Context)> {
        self.cache.as_ref().map(|layer| ("cache", layer.context))
    }
}

// What the block calls arguments of its operations. What passes between them has no name of its own
// and is as large as `x`, or as what the cache holds, makes it.
const OF_Q: Names = &[("weight", "q_weight"), ("bias", "q_bias")];
const OF_K: Names = &[("weight", "k_weight"), ("bias", "k_bias")];
const OF_V: Names = &[("weight", "v_weight"), ("bias", "v_bias")];
const OF_QKV: Names = &[("weight", "qkv_weight"), ("bias", "qkv_bias")];
const OF_OUT: Names = &[("weight", "out_weight"), ("bias", "out_bias")];
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
const OF_ROPE: Names = &[("q", "x"), ("k", "x")];
const OF_APPEND: Names = &[("k", "x"), ("v", "x")];
const OF_ATTENTION: Names = &[
    ("q", "x"),
    ("k", "x"),
    ("v", "x"),
    ("cu_seqlens_q", "cu_seqlens"),
    ("cu_seqlens_k", "cu_seqlens"),
    ("max_seqlen_q", "max_seqlen"),
    ("max_seqlen_k", "max_seqlen"),
    ("window_left", "window"),
    ("window_right", "window"),
];
const OF_CACHED_ATTENTION: Names = &[
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

/// A projection's weights, their names, and the rows that they must have.
type Projection<'a> = (Weights<'a>, (&'static str, &'static str), usize);

impl<'p> Params<'p> {
    fn heads(&self) -> Heads {
        Heads {
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            v_head_dim: self.v_head_dim,
        }
    }

    /// Checks `x` and the heads; gives what passes between operations.
    fn views<const N: usize>(&self, parts: &mut Parts<N>) -> Result<Views> {
        let x = self.x.raw();
        let packed = self.cache.is_some() || self.cu_seqlens.is_some();
        Arg::new(OP, "x", &x)
            .rank(if packed { &[2] } else { &[2, 3] })?
            .dtype(DType::FLOATS)?
            .last_contiguous()?;
        let heads = self.heads();
        heads.check()?;
        let batched = (x.layout.rank() == 3).then(|| (x.layout.dim(0), x.layout.dim(1)));
        Views::new(heads, x.layout.num_rows(), batched, x.dtype, parts)
    }

    /// The projections to queries, keys and values.
    fn weights(&self) -> ArrayVec<Projection<'p>, 3> {
        let columns = self.heads().columns();
        match &self.projections {
            Projections::Packed(qkv) => {
                let all = (*qkv, ("qkv_weight", "qkv_bias"), columns.iter().sum());
                ArrayVec::from_iter([all])
            }
            Projections::Apart { q, k, v } => ArrayVec::from([
                (*q, ("q_weight", "q_bias"), columns[0]),
                (*k, ("k_weight", "k_bias"), columns[1]),
                (*v, ("v_weight", "v_bias"), columns[2]),
            ]),
        }
    }

    fn check_sequences(&self) -> Result<()> {
        if self.cu_seqlens.is_none() {
            return Ok(());
        }
        if self.cache.is_some() {
            let problem = "is given together with a cache, which has its own";
            return Err(Error::invalid(OP, "cu_seqlens", problem));
        }
        if self.rotation.is_some() && matches!(self.positions, Positions::From(_)) {
            let problem = "are absent: packed sequences need them for the rotation";
            return Err(Error::invalid(OP, "positions", problem));
        }
        Ok(())
    }

    fn check_cache(&self, layer: &Layer<'_>, num_tokens: usize) -> Result<()> {
        for (name, value, held) in [
            ("num_kv_heads", self.num_kv_heads, layer.num_kv_heads),
            ("head_dim", self.head_dim, layer.head_dim),
            ("v_head_dim", self.v_head_dim, layer.v_head_dim),
        ] {
            if value != held {
                let problem = text!("is {value}, the cache has {held}");
                return Err(Error::invalid(OP, name, problem));
            }
        }
        if layer.any_batch && num_tokens > layer.max_batch_tokens {
            let problem = text!(
                "has {num_tokens} tokens, above max_batch_tokens {} of the cache",
                layer.max_batch_tokens
            );
            return Err(Error::invalid(OP, "x", problem));
        }
        if layer.batch.num_tokens != num_tokens {
            let problem = text!(
                "has {num_tokens} tokens, the cache's batch has {}",
                layer.batch.num_tokens
            );
            return Err(Error::invalid(OP, "x", problem));
        }
        let (name, problem) = match self.positions {
            Positions::From(0) => ("", ""),
            Positions::From(_) => ("position_offset", "is set: a cache has its own positions"),
            Positions::PerToken(_) => ("positions", "are there: a cache has its own"),
        };
        if !name.is_empty() {
            return Err(Error::invalid(OP, name, problem));
        }
        if self.bidirectional {
            let problem = "is set: with a cache attention is causal";
            return Err(Error::invalid(OP, "bidirectional", problem));
        }
        Ok(())
    }

    /// Queries, keys and values.
    fn push_projections<const N: usize>(&self, views: &Views, parts: &mut Parts<N>) -> Result<()> {
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
            // SAFETY: as in `Views::flat`.
            Projections::Packed(qkv) => push(qkv, OF_QKV, unsafe { view_mut(&views.qkv) }),
            Projections::Apart { q, k, v } => {
                push(q, OF_Q, views.flat(0)?)?;
                push(k, OF_K, views.flat(1)?)?;
                push(v, OF_V, views.flat(2)?)
            }
        }
    }

    fn push_norms<const N: usize>(&self, views: &Views, parts: &mut Parts<N>) -> Result<()> {
        for (which, name, weight, names) in [
            (0, "q_norm", self.q_norm, OF_Q_NORM),
            (1, "k_norm", self.k_norm, OF_K_NORM),
        ] {
            let Some(weight) = weight else { continue };
            let all = self.heads().columns()[which];
            let x = match weight.layout().shape() {
                [n] if *n == self.head_dim => views.heads(which)?,
                [n] if *n == all => views.flat(which)?,
                shape => {
                    let head_dim = self.head_dim;
                    let problem = text!("has shape {shape:?}, allowed: [{head_dim}] or [{all}]");
                    return Err(Error::invalid(OP, name, problem));
                }
            };
            let norm = rms_norm::Params {
                x: InOut::InPlace(x),
                residual: None,
                weight: Some(weight),
                weight_offset: self.norm_weight_offset,
                epsilon: self.norm_epsilon,
            };
            parts.push(norm.problem(), names)?;
        }
        Ok(())
    }

    /// Of queries, and of keys unless the cache rotates them when they are appended.
    fn push_rope<const N: usize>(&self, views: &Views, parts: &mut Parts<N>) -> Result<()> {
        let Some(rotation) = self.rotation else {
            return Ok(());
        };
        let (q, mut k) = (views.heads(0)?, None);
        let mut positions = self.positions;
        match &self.cache {
            Some(layer) => positions = Positions::PerToken(layer.batch.positions),
            None => k = Some(views.batch_if_any(views.heads(1)?)?),
        }
        let rope = rope::Params {
            q: Some(InOut::InPlace(views.batch_if_any(q)?)),
            k: k.map(InOut::InPlace),
            positions,
            rotation,
            inverse: false,
        };
        parts.push(rope.problem(), OF_ROPE)
    }

    fn push_append<const N: usize>(&self, views: &Views, parts: &mut Parts<N>) -> Result<()> {
        let Some(layer) = &self.cache else {
            return Ok(());
        };
        let tokens = (views.heads(1)?.raw(), views.heads(2)?.raw());
        let append = layer.append(OP, tokens, self.rotation.as_ref());
        parts.push(append, OF_APPEND)
    }

    fn attention<'a>(&'a self, views: &Views) -> Result<attention::Params<'a>> {
        let (q, out) = (views.heads(0)?, views.attended()?);
        let mut arguments = match &self.cache {
            // SAFETY: views lie in the workspace, whose writes are queued before, as are those of the pages.
            Some(layer) => unsafe { layer.attention(view(&q), out) },
            None => {
                let (mut q, mut k, mut v, mut out) = (q, views.heads(1)?, views.heads(2)?, out);
                if self.cu_seqlens.is_none() {
                    q = views.batch(q)?;
                    k = views.batch(k)?;
                    v = views.batch(v)?;
                    out = views.batch(out)?;
                }
                // SAFETY: as above.
                let (q, k, v) = unsafe { (view(&q), view(&k), view(&v)) };
                attention::Params {
                    cu_seqlens_q: self.cu_seqlens,
                    cu_seqlens_k: self.cu_seqlens,
                    max_seqlen_q: self.max_seqlen,
                    max_seqlen_k: self.max_seqlen,
                    causal: !self.bidirectional,
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

    fn out_projection(&self, views: &Views) -> Result<linear::Params<'_>> {
        // SAFETY: attention's output lies in the workspace; the caller's output is described once more for a
        // problem, while `self` keeps it lent.
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

fn expect_rows(name: &'static str, rows: usize, expected: usize) -> Result<()> {
    if rows == expected {
        return Ok(());
    }
    let problem = text!("has {rows} rows, {expected} are needed");
    Err(Error::invalid(OP, name, problem))
}
