//! The backward pass of the attention block, without a cache. With `q`, `k`, `v` the projections of
//! `x` and `attended` attention's output:
//!
//! ```text
//! dattended   = dout Wo                      dWo = doutᵀ attended
//! dq', dk', dv                               attention's gradients, and those of the sinks
//! dq, dk      = of the norms, of the rotation undone (dq', dk')
//! dx          = dq Wq + dk Wk + dv Wv        dWq = dqᵀ x     dWk = dkᵀ x     dWv = dvᵀ x
//! ```
//!
//! and the sums of the rows of `dq`, `dk`, `dv` and `dout` for the biases. Each gradient is
//! optional, and what none of those that are asked for needs is not computed. (A residual's
//! gradient is `dout` itself.) It is a sequence of this library's operations and their backward
//! passes; what passes between them is rounded to the dtype of `x`. ALiBi slopes get no gradient.
//!
//! Queries, keys and values, attention's output and LSE are what the forward kept or, where they
//! are absent, computed again: by the same operations in the same way, so that every gradient has
//! the same bits (on a GPU where [`deterministic`](Params::deterministic) is asked for). Every token belongs to a sequence of `cu_seqlens`, where that is there: of one
//! that does not, gradients are undefined, and with them those of the weights.

use arrayvec::ArrayVec;

use super::Params as Forward;
use super::check::{Checked, Kept};
pub use super::gradients::Gradients;
use super::gradients::Wanted;
use super::steps::OF_ATTENTION;
use super::views::{Views, view_mut};
use crate::comm::Comm;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::layout::{Layout, MAX_RANK};
use crate::ops::check::{Arg, with_last};
use crate::ops::operation::{self, Operation, Tensors};
use crate::ops::parallel::{Parallel, Rows, push_summed};
use crate::ops::parts::{Names, Parts, named};
use crate::ops::rope::Positions;
use crate::problem::attention;
use crate::problem::linear::{Backward, Gradient, Weights};
use crate::tensor::{RawTensor, TensorMut, TensorRef, Workspace};

const OP: &str = "attention_block_backward";

/// Arguments of [`backward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// The forward's, without a cache: its input, weights and all that says what is computed. Its
    /// output, residual, workspace and what it keeps are not looked at;
    /// [`Output::none`](crate::ops::linear::Output::none) is an output.
    pub forward: Forward<'a>,
    /// What the forward kept in `qkv_out`: contiguous. `None`: it is computed again.
    pub qkv: Option<TensorRef<'a>>,
    /// What the forward kept in `attended_out`: contiguous, together with `lse`. `None`: attention
    /// is computed again.
    pub attended: Option<TensorRef<'a>>,
    /// What the forward kept in `lse_out`.
    pub lse: Option<TensorRef<'a>>,
    /// The gradient of the output: `[.., hidden_out]`, leading dimensions and dtype of `x`; rows
    /// strided.
    pub dout: TensorRef<'a>,
    /// Receives the gradient of `x`: like it; rows strided.
    pub dx: Option<TensorMut<'a>>,
    /// Receive the gradients of weights, biases, norms and sinks. Where ranks divide the block they are of
    /// this rank's part: those of norms, which all have, are of its heads, and are to be added up.
    pub gradients: Gradients<'a>,
    /// Adds to what those hold, which must be f32 then. `dx` is overwritten always.
    pub accumulate: bool,
    /// Whether the same inputs must give the same bits on a GPU, which may take longer: see
    /// [`attention`'s](crate::ops::attention::backward::Params::deterministic). On the CPU they do in
    /// any case.
    pub deterministic: bool,
    /// [`workspace_size`] bytes, all of which are needed.
    pub workspace: Workspace<'a>,
}

const OF_DATTENDED: Names = &[("dx", "out_weight"), ("weight", "out_weight")];
const OF_OUT: Names = &[("dweight", "dout_weight"), ("dbias", "dout_bias")];
const OF_PROJECTIONS: [Names; 3] = [
    &[
        ("dout", "x"),
        ("dweight", "dq_weight"),
        ("dbias", "dq_bias"),
    ],
    &[
        ("dout", "x"),
        ("dweight", "dk_weight"),
        ("dbias", "dk_bias"),
    ],
    &[
        ("dout", "x"),
        ("dweight", "dv_weight"),
        ("dbias", "dv_bias"),
    ],
];
const OF_PACKED: Names = &[
    ("dout", "x"),
    ("dweight", "dqkv_weight"),
    ("dbias", "dqkv_bias"),
];

/// A gradient that is wanted, and what multiplies that of the output for it.
fn gradient(by: RawTensor, out: Option<RawTensor>) -> Option<Gradient> {
    out.map(|out| Gradient { by, out })
}

impl Params<'_> {
    /// The backward pass, with the forward's group.
    pub(crate) fn parts<'t>(&self, parallel: Option<&Parallel<'t>>) -> Result<Parts<'t, 20>> {
        let mut parts = Parts::new(OP, &self.workspace).exactly();
        match parallel {
            None => self.push(None, &mut parts)?,
            Some(parallel) => self.push_divided(parallel, &mut parts)?,
        }
        Ok(parts)
    }

    /// Adds the backward pass of the rows that are there, and the sum of the input's gradient, if ranks divide
    /// the block.
    fn push<'t, const N: usize>(
        &self,
        sum: Option<(&Rows, &Parallel<'t>)>,
        parts: &mut Parts<'t, N>,
    ) -> Result<()> {
        let (checked, kept) = self.checked()?;
        let dx = self.dx.as_ref().map(TensorMut::raw);
        let wanted = (self.gradients).wanted(OP, &self.forward, &checked, dx, self.accumulate)?;
        let made = Call::new(self, wanted, (&checked, &kept), parts);
        let (call, attention) = named(OP, made, &[])?;
        let mut all = None;
        if call.wanted.inner() || call.wanted.sinks.is_some() {
            let inner = call.push_inner(attention, parts);
            all = Some(named(OP, inner, &[])?);
        }
        call.push_out(parts)?;
        let products = match all {
            Some(all) => call.of_projections(&all, &checked.projections)?,
            None => ArrayVec::new(),
        };
        push_summed(OP, &products, sum, parts)
    }

    /// The same between what gathers and adds up rows of ranks.
    fn push_divided<'t, const N: usize>(
        &self,
        parallel: &Parallel<'t>,
        parts: &mut Parts<'t, N>,
    ) -> Result<()> {
        parallel.check(OP)?;
        let forward = &self.forward;
        let checked = named(OP, forward.checked(), &[])?;
        named(OP, forward.check_divided(&checked, parallel), &[])?;
        self.check_rows(&checked)?;
        let weights = &self.gradients.list()[..8];
        let reads_x = self.qkv.is_none() || weights.iter().any(|(_, gradient)| gradient.is_some());
        let (x, dout) = ((forward.x.raw(), reads_x), self.dout.raw());
        let dx = self.dx.as_ref().map(TensorMut::raw);
        let rows = Rows::new(OP, parallel, x, dout, dx, parts)?;
        // SAFETY: for the parts of this call.
        let (x, dout, dx) = unsafe { rows.views() };
        let of_rank = Params {
            forward: Forward {
                parallel: None,
                ..forward.of_input(x)
            },
            qkv: self.qkv,
            attended: self.attended,
            lse: self.lse,
            dout,
            dx,
            gradients: self.gradients.again(),
            accumulate: self.accumulate,
            deterministic: self.deterministic,
            workspace: Workspace::none(),
        };
        of_rank.push(Some((&rows, parallel)), parts)
    }

    /// Checks gradients of input and output.
    fn check_rows(&self, checked: &Checked) -> Result<()> {
        let (x, dout) = (self.forward.x.raw(), self.dout.raw());
        let arg = Arg::new(OP, "x", &x);
        let mut room = [0; MAX_RANK];
        let shape = with_last(&x, checked.out_projection.out_features(), &mut room);
        Arg::new(OP, "dout", &dout)
            .dtype_of(arg)?
            .shape(shape)?
            .last_contiguous()?;
        if let Some(dx) = &self.dx {
            Arg::new(OP, "dx", &dx.raw())
                .dtype_of(arg)?
                .shape_of(arg)?
                .last_contiguous()?
                .writable()?;
        }
        Ok(())
    }

    /// Checks everything but the gradients of parameters.
    fn checked(&self) -> Result<(Checked, Kept)> {
        let forward = &self.forward;
        if forward.cache.is_some() {
            let problem = "is there: the backward pass is of attention without a cache";
            return Err(Error::invalid(OP, "cache", problem));
        }
        forward.check_differentiable(OP)?;
        let checked = named(OP, forward.checked(), &[])?;
        named(OP, forward.check_sequences(), &[])?;
        let raw = |t: &Option<TensorRef<'_>>| t.as_ref().map(TensorRef::raw);
        let kept = [raw(&self.qkv), raw(&self.attended), raw(&self.lse)];
        let kept = forward.check_kept(&checked, ["qkv", "attended", "lse"], kept);
        let kept = named(OP, kept, &[])?;
        self.check_rows(&checked)?;
        let gradients = self.gradients.list();
        if self.dx.is_none() && gradients.iter().all(|(_, gradient)| gradient.is_none()) {
            let problem = "is absent, as are all other gradients: nothing is asked for";
            return Err(Error::invalid(OP, "dx", problem));
        }
        Ok((checked, kept))
    }
}

/// A call, and what it has of tensors.
pub(super) struct Call<'c, 'a> {
    pub forward: &'c Forward<'a>,
    pub wanted: Wanted,
    pub views: Views,
    dout: RawTensor,
    pub accumulate: bool,
    deterministic: bool,
}

impl<'c, 'a> Call<'c, 'a> {
    /// Computes again what is needed and was not kept.
    fn new<const N: usize>(
        params: &'c Params<'a>,
        wanted: Wanted,
        (checked, kept): (&Checked, &Kept),
        parts: &mut Parts<N>,
    ) -> Result<(Self, attention::Problem)> {
        let forward = &params.forward;
        let (heads, dtype, tokens) = (checked.heads, forward.x.dtype(), checked.num_tokens);
        let attends = wanted.attended() && kept.attended.is_none();
        let needs_qkv = wanted.inner() || attends;
        let projects = needs_qkv && kept.qkv.is_none();
        let sizes = (heads, tokens, checked.batched);
        let mut views = Views::new_if([projects, attends], sizes, dtype, parts)?;
        views.qkv = kept.qkv.unwrap_or(views.qkv);
        views.attended = kept.attended.unwrap_or(views.attended);
        if forward.normalises() {
            let turned = parts.take_if(needs_qkv, dtype, [tokens, heads.turned()])?;
            views.turned = Some(turned);
        }
        let lse = match kept.lse {
            Some(lse) => lse,
            None => {
                let taken = parts.take_if(attends, DType::F32, [tokens, heads.num_heads])?;
                let layout = match checked.batched {
                    Some((batch, len)) => Layout::contiguous(&[batch, heads.num_heads, len])?,
                    None => Layout::contiguous(&[heads.num_heads, tokens])?,
                };
                RawTensor { layout, ..taken }
            }
        };
        // SAFETY: the workspace covers it, or it is kept; the problem is of one call.
        let lse = unsafe { view_mut(&lse) };
        let attention = forward.attention(&views, Some(lse))?;
        let attention = named(OP, attention.problem(), OF_ATTENTION)?;
        if projects {
            forward.push_projections(&views, parts)?;
        }
        // Where there is no norm, what is kept is rotated.
        if needs_qkv && (projects || forward.normalises()) {
            forward.push_turning(&views, parts)?;
        }
        if attends {
            parts.push(Ok(attention), OF_ATTENTION)?;
        }
        let call = Call {
            forward,
            wanted,
            views,
            dout: params.dout.raw(),
            accumulate: params.accumulate,
            deterministic: params.deterministic,
        };
        Ok((call, attention))
    }

    /// A tensor of the views' tokens, with the leading dimensions of `x`.
    fn rows(&self, t: &RawTensor) -> Result<RawTensor> {
        // SAFETY: it is described again and not accessed.
        Ok(self.views.batch_if_any(unsafe { view_mut(t) })?.raw())
    }

    /// Adds what gives the gradients of queries, keys and values, side by side, and of norms and
    /// sinks.
    fn push_inner<const N: usize>(
        &self,
        attention: attention::Problem,
        parts: &mut Parts<N>,
    ) -> Result<RawTensor> {
        let (forward, views, wanted) = (self.forward, &self.views, &self.wanted);
        let (dtype, tokens) = (forward.x.dtype(), views.num_tokens());
        let dattended = parts.take(dtype, [tokens, views.heads.attended()])?;
        let columns = views.heads.columns().iter().sum();
        let all = parts.take_if(wanted.inner(), dtype, [tokens, columns])?;
        let weight = forward.out_projection.weight.raw();
        let product = Backward {
            dout: self.dout,
            dx: gradient(weight, Some(self.rows(&dattended)?)),
            add_dx: false,
            dweight: None,
            dbias: None,
            accumulate: false,
        };
        parts.push(Ok(product), OF_DATTENDED)?;
        let of_heads = |which: usize| -> Result<Option<attention::Rows>> {
            if !wanted.needs(which) {
                return Ok(None);
            }
            self.attention_rows(views.heads_of(&all, which)?).map(Some)
        };
        let gradients = attention::Backward {
            forward: attention,
            dout: self.attention_rows(views.attended(&dattended)?)?,
            dlse: None,
            dq: of_heads(0)?,
            dk: of_heads(1)?,
            dv: of_heads(2)?,
            dbias: None,
            dsinks: None,
            accumulate: self.accumulate,
            deterministic: self.deterministic,
        };
        if wanted.inner() {
            parts.push(Ok(gradients), OF_ATTENTION)?;
            self.push_rotation_back(&all, parts)?;
        }
        if let Some(dsinks) = &wanted.sinks {
            // Apart from the others, behind all that may still find no memory.
            let sinks = attention::Backward {
                dq: None,
                dk: None,
                dv: None,
                dsinks: Some(dsinks.ptr.cast()),
                ..gradients
            };
            parts.push(Ok(sinks), OF_ATTENTION)?;
        }
        self.push_norms_back(&all, parts)?;
        Ok(all)
    }

    /// Where attention finds rows of heads.
    fn attention_rows(&self, heads: TensorMut<'static>) -> Result<attention::Rows> {
        if self.forward.cu_seqlens.is_some() {
            return Ok(attention::Rows::new(&heads.raw(), None, 0, 1));
        }
        let batch = self.views.batch(heads)?.raw();
        Ok(attention::Rows::new(&batch, Some(0), 1, 2))
    }

    /// Adds the gradients of the output's projection.
    fn push_out<const N: usize>(&self, parts: &mut Parts<N>) -> Result<()> {
        let pair = self.wanted.out;
        if !pair.is_some() {
            return Ok(());
        }
        let product = Backward {
            dout: self.dout,
            dx: None,
            add_dx: false,
            dweight: gradient(self.rows(&self.views.attended)?, pair.dweight),
            dbias: pair.dbias,
            accumulate: self.accumulate,
        };
        parts.push(Ok(product), OF_OUT)
    }

    /// The gradients of the projections and of `x`.
    fn of_projections(
        &self,
        all: &RawTensor,
        weights: &[Weights],
    ) -> Result<ArrayVec<(Backward, Names), 3>> {
        let wanted = &self.wanted;
        let mut products = ArrayVec::new();
        for (i, (weights, pair)) in weights.iter().zip(&wanted.projections).enumerate() {
            if wanted.dx.is_none() && !pair.is_some() {
                continue;
            }
            let (dout, names) = match wanted.projections.len() {
                1 => (*all, OF_PACKED),
                _ => (self.views.flat_of(all, i)?.raw(), OF_PROJECTIONS[i]),
            };
            let product = Backward {
                dout: self.rows(&dout)?,
                dx: gradient(weights.weight, wanted.dx),
                add_dx: !products.is_empty(),
                dweight: gradient(self.forward.x.raw(), pair.dweight),
                dbias: pair.dbias,
                accumulate: self.accumulate,
            };
            products.push((product, names));
        }
        Ok(products)
    }
}

impl<'a> Operation for Params<'a> {
    const NAME: &'static str = OP;
    /// All that is computed again, seven parts at the most, and as many gradients as there are; where
    /// ranks divide the block two are gathered before, and one is added up behind.
    type Problem = Parts<'a, 20>;

    fn problem(&self) -> Result<Self::Problem> {
        self.parts(self.forward.parallel.as_ref())
    }

    fn tensors(&self, tensors: &mut Tensors) {
        let forward = &self.forward;
        tensors.read("x", &forward.x);
        for (weights, names) in forward.weights() {
            match self.qkv {
                None => weights.tensors(names, tensors),
                Some(_) => tensors.read(names.0, &weights.weight),
            }
        }
        tensors.read("out_weight", &forward.out_projection.weight);
        for (name, tensor) in [
            ("q_norm", &forward.q_norm),
            ("k_norm", &forward.k_norm),
            ("cu_seqlens", &forward.cu_seqlens),
            ("alibi_slopes", &forward.alibi_slopes),
            ("sinks", &forward.sinks),
            ("qkv", &self.qkv),
            ("attended", &self.attended),
            ("lse", &self.lse),
        ] {
            tensors.read_optional(name, tensor.as_ref());
        }
        if let Positions::PerToken(positions) = &forward.positions {
            tensors.read("positions", positions);
        }
        if let Some(rotation) = &forward.rotation {
            rotation.tensors(tensors);
        }
        tensors.read("dout", &self.dout);
        tensors.write_optional("dx", self.dx.as_ref());
        for (name, gradient) in self.gradients.list() {
            tensors.write_optional(name, gradient);
        }
    }

    fn workspace(&self) -> Option<&Workspace<'_>> {
        Some(&self.workspace)
    }

    fn comm(&self) -> Option<&Comm> {
        self.forward.comm()
    }
}

operation::functions!(backward);
