//! Validation: what the block does, as one validated problem for each of its operations.

use arrayvec::ArrayVec;

use super::views::{Heads, Views};
use super::{OP, Params, Projections};
use crate::comm::Comm;
use crate::context::Context;
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::layout::{Layout, MAX_RANK};
use crate::ops::check::{Arg, with_last};
use crate::ops::kv_cache::{Layer, NO_BATCH};
use crate::ops::linear::{Output, Weights};
use crate::ops::operation::{Operation, Tensors};
use crate::ops::parallel::{Chunks, OF_X, Parallel};
use crate::ops::parts::Parts;
use crate::ops::rope::Positions;
use crate::problem::linear;
use crate::tensor::{RawTensor, TensorMut, TensorRef, Workspace};

/// A norm of the input, projections to queries, keys and values, two norms, rope, the cache's append, attention, a norm and
/// the projection of its output. What passes between them lies at the beginning of the workspace. Where
/// ranks divide the block there is no norm of the output, which is projected in up to three ranges of rows,
/// or in chunks.
pub(crate) type Problem<'a> = Parts<'a, 12>;

/// What is checked of a block that its forward and its backward pass have in common.
pub(crate) struct Checked {
    pub heads: Heads,
    /// Of a batch.
    pub batched: Option<(usize, usize)>,
    pub num_tokens: usize,
    /// Of queries, keys and values: one or three.
    pub projections: ArrayVec<linear::Weights, 3>,
    pub out_projection: linear::Weights,
}

impl<'a> Operation for Params<'a> {
    const NAME: &'static str = OP;
    type Problem = Problem<'a>;

    fn problem(&self) -> Result<Problem<'a>> {
        let mut parts = Parts::new(OP, &self.workspace);
        let chunks = self.push_to(&mut parts)?;
        if let Some(parallel) = &self.parallel {
            parallel.push_join(OP, chunks, &mut parts)?;
        }
        Ok(parts)
    }

    fn tensors(&self, tensors: &mut Tensors) {
        if self.x_norm.is_none() || !self.output.is_in_place_of(&self.x) {
            tensors.read("x", &self.x);
        }
        self.inputs(tensors);
        if let Some(layer) = &self.cache {
            layer.own(tensors);
        }
        for (name, tensor) in [
            ("qkv_out", &self.qkv_out),
            ("attended_out", &self.attended_out),
            ("lse_out", &self.lse_out),
        ] {
            tensors.write_optional(name, tensor.as_ref());
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

    fn comm(&self) -> Option<&Comm> {
        self.parallel.as_ref().map(|parallel| parallel.comm)
    }
}

impl<'a> Params<'a> {
    /// The block's parts. Sums of these chunks run beside what follows, which waits for them.
    pub(crate) fn parts(&self) -> Result<(Problem<'a>, Chunks)> {
        let mut parts = Parts::new(OP, &self.workspace);
        let chunks = self.push_to(&mut parts)?;
        Ok((parts, chunks))
    }

    /// Adds the block's parts to an empty list. A launch makes them where they stay, because moving them copies the room for as many
    /// as a block may have, however few there are.
    fn push_to(&self, parts: &mut Problem<'a>) -> Result<Chunks> {
        let x = self.x.raw();
        let checked = self.checked()?;
        let mut room = [0; MAX_RANK];
        let shape = with_last(&x, checked.out_projection.out_features(), &mut room);
        self.output.check(OP, Arg::new(OP, "x", &x), shape)?;
        let Some(parallel) = &self.parallel else {
            return self.push(&checked, (&self.output, None), parts);
        };
        parts.be_exact();
        parallel.check(OP)?;
        self.check_divided(&checked, parallel)?;
        Arg::new(OP, "out", &self.output.out()).contiguous()?;
        let output = (&self.output, Some(parallel));
        if parallel.sequence {
            let x = parallel.push_gather(OP, ("x", OF_X), x, parts)?;
            // SAFETY: it lies in the workspace, for parts of this call.
            let x = unsafe { TensorRef::from_raw(x.ptr, x.dtype, x.layout) };
            let all = self.of_all_rows(x);
            all.push(&all.checked()?, output, parts)
        } else {
            self.push(&checked, output, parts)
        }
    }
}

impl Params<'_> {
    /// Adds the operations on rows that are there, and sums of the output, which with its residual is the
    /// caller's.
    fn push<'t, const N: usize>(
        &self,
        checked: &Checked,
        output: (&Output<'_>, Option<&Parallel<'t>>),
        parts: &mut Parts<'t, N>,
    ) -> Result<Chunks> {
        self.check_sequences()?;
        let kept = self.kept(checked)?;
        if kept.any() {
            parts.be_exact();
        }
        let views = self.views(checked, &kept, parts)?;
        if let Some(layer) = &self.cache {
            self.check_cache(layer, checked.num_tokens)?;
            if layer.any_batch {
                parts.for_any_batch();
            }
        }
        self.push_projections(&views, parts)?;
        self.push_turning(&views, parts)?;
        let lse = self.lse_out.as_ref().map(|lse| {
            let raw = lse.raw();
            // SAFETY: the caller's output, described once more for a problem while `self` keeps it lent.
            unsafe { TensorMut::from_raw(raw.ptr, raw.dtype, raw.layout) }
        });
        self.push_attention(&views, lse, parts)?;
        self.push_attended_norm(&views, parts)?;
        let weights = checked.out_projection;
        // Without a cache there is nothing to do for an output without elements on any rank.
        let is_empty = checked.num_tokens == 0 || weights.out_features() == 0;
        let chunks = self.push_out_projection(&views, weights, output, parts)?;
        if self.cache.is_none() && is_empty && !kept.any() {
            parts.be_idle();
        }
        Ok(chunks)
    }

    /// Refuses norms over heads that ranks divide.
    pub(super) fn check_divided(&self, checked: &Checked, parallel: &Parallel<'_>) -> Result<()> {
        for which in 0..2 {
            if self.norm(which).is_some() && !self.normalises_heads(&checked.heads, which)? {
                parallel.check_norm(OP, ["q_norm", "k_norm"][which])?;
            }
        }
        if self.x_norm.is_some() {
            let problem = "is there together with parallel, where x is to be normalised before";
            return Err(Error::unsupported(OP, "x_norm", problem));
        }
        match &self.attended_norm {
            Some(_) => parallel.check_norm(OP, "attended_norm"),
            None => Ok(()),
        }
    }
}

/// What a block keeps for its backward pass, as rows of tokens; the LSE as it is.
#[derive(Default)]
pub(super) struct Kept {
    pub qkv: Option<RawTensor>,
    pub attended: Option<RawTensor>,
    pub lse: Option<RawTensor>,
}

impl Kept {
    fn any(&self) -> bool {
        self.qkv.is_some() || self.attended.is_some()
    }
}

/// A projection's weights and their names.
type Projection<'a> = (Weights<'a>, (&'static str, &'static str));

impl<'p> Params<'p> {
    fn heads(&self) -> Heads {
        Heads {
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            v_head_dim: self.v_head_dim,
        }
    }

    /// What is read but `x`.
    pub(crate) fn inputs(&self, tensors: &mut Tensors) {
        for (weights, names) in self.weights() {
            weights.tensors(names, tensors);
        }
        let names = ("out_weight", "out_bias");
        self.out_projection.tensors(names, tensors);
        for (name, tensor) in [
            ("x_norm", &self.x_norm),
            ("q_norm", &self.q_norm),
            ("k_norm", &self.k_norm),
            ("attended_norm", &self.attended_norm),
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
    }

    /// Refuses what has no gradients: weights in blocks, and a norm of attention's output.
    pub(crate) fn check_differentiable(&self, op: &'static str) -> Result<()> {
        for (weights, names) in self.weights() {
            weights.check_floats(op, names.0)?;
        }
        self.out_projection.check_floats(op, "out_weight")?;
        let norms = [
            ("x_norm", &self.x_norm),
            ("attended_norm", &self.attended_norm),
        ];
        match norms.into_iter().find(|(_, norm)| norm.is_some()) {
            None => Ok(()),
            Some((name, _)) => {
                let problem = "is there: gradients are those of a block without it";
                Err(Error::unsupported(op, name, problem))
            }
        }
    }

    /// Checks `x`, the heads and the weights.
    pub(crate) fn checked(&self) -> Result<Checked> {
        let x = self.x.raw();
        let packed = self.cache.is_some() || self.cu_seqlens.is_some();
        Arg::new(OP, "x", &x)
            .rank(if packed { &[2] } else { &[2, 3] })?
            .dtype(DType::FLOATS)?
            .last_contiguous()?;
        let heads = self.heads();
        heads.check()?;
        let hidden = x.layout.dim(x.layout.rank() - 1);
        let mut projections = ArrayVec::new();
        let columns = heads.columns();
        let rows = match &self.projections {
            Projections::Packed(_) => [columns.iter().sum(), 0, 0],
            Projections::Apart { .. } => columns,
        };
        for ((weights, names), rows) in self.weights().into_iter().zip(rows) {
            let problem = weights.problem(OP, names, hidden)?;
            expect_rows(names.0, problem.out_features(), rows)?;
            projections.push(problem);
        }
        for which in 0..2 {
            self.normalises_heads(&heads, which)?;
        }
        let names = ("out_weight", "out_bias");
        Ok(Checked {
            heads,
            batched: (x.layout.rank() == 3).then(|| (x.layout.dim(0), x.layout.dim(1))),
            num_tokens: x.layout.num_rows(),
            projections,
            out_projection: self.out_projection.problem(OP, names, heads.attended())?,
        })
    }

    /// Checks what is kept.
    fn kept(&self, checked: &Checked) -> Result<Kept> {
        let raw = |t: &Option<TensorMut<'_>>| t.as_ref().map(TensorMut::raw);
        let (qkv, attended, lse) = (&self.qkv_out, &self.attended_out, &self.lse_out);
        let names = ["qkv_out", "attended_out", "lse_out"];
        for (name, tensor) in names.into_iter().zip([qkv, attended, lse]) {
            if tensor.is_some() && self.x_norm.is_some() {
                let problem = "is there together with x_norm, which has no gradients";
                return Err(Error::unsupported(OP, name, problem));
            }
            if tensor.is_some() && self.cache.is_some() {
                let problem = "is there: with a cache nothing is kept for a backward pass";
                return Err(Error::invalid(OP, name, problem));
            }
        }
        if attended.is_some() && self.attended_norm.is_some() {
            let problem = "is there together with attended_norm, which has no gradients";
            return Err(Error::unsupported(OP, "attended_out", problem));
        }
        self.check_kept(checked, names, [raw(qkv), raw(attended), raw(lse)])
    }

    /// Checks tensors that a forward pass keeps or a backward pass is given.
    pub(super) fn check_kept(
        &self,
        checked: &Checked,
        names: [&'static str; 3],
        [qkv, attended, lse]: [Option<RawTensor>; 3],
    ) -> Result<Kept> {
        let (x, heads) = (self.x.raw(), &checked.heads);
        for (there, other, missing) in [(&attended, &lse, 2), (&lse, &attended, 1)] {
            if there.is_some() && other.is_none() {
                let problem = text!("is there without {}", names[missing]);
                return Err(Error::invalid(OP, names[3 - missing], problem));
            }
        }
        let rows = |name, t: Option<RawTensor>, columns| -> Result<Option<RawTensor>> {
            let Some(t) = t else {
                return Ok(None);
            };
            let mut room = [0; MAX_RANK];
            Arg::new(OP, name, &t)
                .dtype_of(Arg::new(OP, "x", &x))?
                .shape(with_last(&x, columns, &mut room))?
                .contiguous()?;
            let layout = Layout::contiguous(&[checked.num_tokens, columns])?;
            Ok(Some(RawTensor { layout, ..t }))
        };
        if let Some(lse) = &lse {
            let lse = Arg::new(OP, names[2], lse).dtype(&[DType::F32])?;
            match checked.batched {
                Some((batch, len)) => lse.shape(&[batch, self.num_heads, len])?,
                None => lse.shape(&[self.num_heads, checked.num_tokens])?,
            }
            .contiguous()?;
        }
        Ok(Kept {
            qkv: rows(names[0], qkv, heads.columns().iter().sum())?,
            attended: rows(names[1], attended, heads.attended())?,
            lse,
        })
    }

    /// What passes between operations: what is kept, and the rest in the workspace.
    fn views<const N: usize>(
        &self,
        checked: &Checked,
        kept: &Kept,
        parts: &mut Parts<N>,
    ) -> Result<Views> {
        let (heads, dtype) = (checked.heads, self.x.dtype());
        let mut views = Views::new_if(
            [kept.qkv.is_none(), kept.attended.is_none()],
            (heads, checked.num_tokens, checked.batched),
            dtype,
            parts,
        )?;
        views.qkv = kept.qkv.unwrap_or(views.qkv);
        views.attended = kept.attended.unwrap_or(views.attended);
        if kept.qkv.is_some() && self.normalises() {
            // Norms lose what the backward pass needs.
            views.turned = Some(parts.take(dtype, [checked.num_tokens, heads.turned()])?);
        }
        Ok(views)
    }

    /// The projections to queries, keys and values.
    pub(super) fn weights(&self) -> ArrayVec<Projection<'p>, 3> {
        match &self.projections {
            Projections::Packed(qkv) => ArrayVec::from_iter([(*qkv, ("qkv_weight", "qkv_bias"))]),
            Projections::Apart { q, k, v } => ArrayVec::from([
                (*q, ("q_weight", "q_bias")),
                (*k, ("k_weight", "k_bias")),
                (*v, ("v_weight", "v_bias")),
            ]),
        }
    }

    pub(super) fn check_sequences(&self) -> Result<()> {
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
}

fn expect_rows(name: &'static str, rows: usize, expected: usize) -> Result<()> {
    if rows == expected {
        return Ok(());
    }
    let problem = text!("has {rows} rows, {expected} are needed");
    Err(Error::invalid(OP, name, problem))
}
