//! A layer's arguments once they are checked, where it keeps what, and the parts that forward and
//! backward share.

use super::Params;
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::layout::{Layout, MAX_RANK};
use crate::ops::check::{self, Arg};
use crate::ops::linear::Output;
use crate::ops::parallel::{Chunks, Parallel, rows_of, take};
use crate::ops::parts::{Names, Parts, named};
use crate::ops::{attention_block, mlp};
use crate::problem::{norm, rms_norm};
use crate::tensor::{InOut, RawTensor, TensorMut, TensorRef};

/// One of the two norms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Norm {
    Attention,
    Mlp,
}

impl Norm {
    fn names(self) -> Names {
        match self {
            Norm::Attention => &[("weight", "attention_norm"), ("dweight", "dattention_norm")],
            Norm::Mlp => &[("weight", "mlp_norm"), ("dweight", "dmlp_norm")],
        }
    }
}

/// Queries, keys and values, and attention's output with its `lse`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attended {
    pub qkv: RawTensor,
    pub out: RawTensor,
    pub lse: RawTensor,
}

/// Where what is kept lies in the caller's memory; what is not is absent.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Saved {
    pub attention_norm: Option<RawTensor>,
    pub qkv: Option<RawTensor>,
    /// Attention's output, and its `lse`.
    pub attended: Option<(RawTensor, RawTensor)>,
    /// The sum of the input and the attention block.
    pub hidden: Option<RawTensor>,
    pub mlp_norm: Option<RawTensor>,
    pub gate_up: Option<RawTensor>,
    /// Bytes of all.
    pub size: usize,
}

/// A layer.
pub(super) struct Layer<'p, 'a> {
    pub op: &'static str,
    pub params: &'p Params<'a>,
    pub x: RawTensor,
    /// The rows that attention and the MLP are of: those of `x` or, sequence parallel, of all ranks.
    all: Layout,
    heads: attention_block::Heads,
    intermediate: usize,
    pub saved: Saved,
}

/// A view of memory that the whole call lends, for the parameters of a part.
///
/// # Safety
/// The memory is the caller's or the workspace's, and is accessed only by the parts of one call, in
/// order, or not at all.
unsafe fn view<'t>(t: RawTensor) -> TensorRef<'t> {
    // SAFETY: the caller's promise.
    unsafe { TensorRef::from_raw(t.ptr, t.dtype, t.layout) }
}

/// # Safety
/// As [`view`].
unsafe fn view_mut<'t>(t: RawTensor) -> TensorMut<'t> {
    // SAFETY: the caller's promise.
    unsafe { TensorMut::from_raw(t.ptr, t.dtype, t.layout) }
}

/// The rows that attention and the MLP are of, whose group is one.
fn all_rows(op: &'static str, params: &Params<'_>, x: &RawTensor) -> Result<Layout> {
    match (&params.attention.parallel, &params.mlp.parallel) {
        (None, None) => Ok(x.layout),
        (Some(attention), Some(mlp)) if attention.is(mlp) => match attention.sequence {
            true => attention.whole(op, "x", x),
            false => Ok(x.layout),
        },
        _ => {
            let problem =
                "of the attention block is not that of the mlp, with the same rows and chunks";
            Err(Error::invalid(op, "parallel", problem))
        }
    }
}

impl<'p, 'a> Layer<'p, 'a> {
    /// Checks everything but outputs and gradients.
    pub fn new(op: &'static str, params: &'p Params<'a>) -> Result<Self> {
        let x = params.x.raw();
        Arg::new(op, "x", &x)
            .rank(&[2, 3])?
            .dtype(DType::FLOATS)?
            .last_contiguous()?;
        let hidden = x.layout.dim(x.layout.rank() - 1);
        for (name, weight) in [
            ("attention_norm", params.attention_norm.raw()),
            ("mlp_norm", params.mlp_norm.raw()),
        ] {
            Arg::new(op, name, &weight)
                .dtype(DType::FLOATS)?
                .shape(&[hidden])?
                .last_contiguous()?;
        }
        check::finite(op, "norm_weight_offset", params.norm_weight_offset)?;
        if check::finite(op, "norm_epsilon", params.norm_epsilon)? <= 0.0 {
            let problem = text!("is {}, it must be above 0", params.norm_epsilon);
            return Err(Error::invalid(op, "norm_epsilon", problem));
        }
        if params.attention.cache.is_some() {
            let problem = "is there: a decoder layer has none";
            return Err(Error::invalid(op, "cache", problem));
        }
        // SAFETY: the input is described once more, and only shapes are looked at.
        let again = unsafe { view(x) };
        params.attention.check_differentiable(op)?;
        params.mlp.check_differentiable(op)?;
        let attention = named(op, params.attention.of_input(again).checked(), &[])?;
        let mlp = params.mlp.of_input(again).layer(op)?;
        for (name, rows) in [
            ("out_weight", attention.out_projection.out_features()),
            ("down_weight", mlp.down.out_features()),
        ] {
            if rows != hidden {
                let problem = text!("has {rows} rows, {hidden} are needed: x has as many columns");
                return Err(Error::invalid(op, name, problem));
            }
        }
        let mut layer = Layer {
            op,
            params,
            x,
            all: all_rows(op, params, &x)?,
            heads: attention.heads,
            intermediate: mlp.intermediate,
            saved: Saved::default(),
        };
        layer.saved = layer.saved()?;
        Ok(layer)
    }

    /// Checks a tensor of the shape and dtype of `x`.
    pub fn check_like_x<'t>(&self, name: &'static str, t: &'t RawTensor) -> Result<Arg<'t>> {
        let x = Arg::new(self.op, "x", &self.x);
        Arg::new(self.op, name, t)
            .dtype_of(x)?
            .shape_of(x)?
            .last_contiguous()
    }

    /// Lays out what is kept.
    fn saved(&self) -> Result<Saved> {
        let kept = self.params.checkpointing.kept();
        // Room is taken from the caller's memory as parts take it from a workspace.
        let arena = &mut Parts::<0>::new(self.op, &self.params.saved);
        let norm = |arena: &mut _| kept.norms.then(|| self.take(arena)).transpose();
        let attention_norm = norm(arena)?;
        let qkv = kept.qkv.then(|| self.take_qkv(arena)).transpose()?;
        let attended = kept.attended.then(|| self.take_attended(arena));
        let hidden = kept.attended.then(|| self.take(arena));
        let mlp_norm = norm(arena)?;
        let gate_up = kept.gate_up.then(|| self.take_gate_up(arena)).transpose()?;
        Ok(Saved {
            attention_norm,
            qkv,
            attended: attended.transpose()?,
            hidden: hidden.transpose()?,
            mlp_norm,
            gate_up,
            size: arena.taken(),
        })
    }

    /// Room for a row of so many columns for each that attention and the MLP are of, in their leading
    /// dimensions.
    fn rows<const N: usize>(&self, parts: &mut Parts<N>, columns: usize) -> Result<RawTensor> {
        let all = RawTensor {
            layout: self.all,
            ..self.x
        };
        let mut shape = [0; MAX_RANK];
        let layout = Layout::contiguous(check::with_last(&all, columns, &mut shape))?;
        take(&self.x, layout, parts)
    }

    /// Room for a tensor like `x`.
    pub fn take<const N: usize>(&self, parts: &mut Parts<N>) -> Result<RawTensor> {
        take(&self.x, Layout::contiguous(self.x.layout.shape())?, parts)
    }

    fn take_qkv<const N: usize>(&self, parts: &mut Parts<N>) -> Result<RawTensor> {
        self.rows(parts, self.heads.columns().iter().sum())
    }

    pub fn take_gate_up<const N: usize>(&self, parts: &mut Parts<N>) -> Result<RawTensor> {
        self.rows(parts, 2 * self.intermediate)
    }

    /// Room for attention's output and for its `lse`, `[heads, tokens]` or `[batch, heads, seq]`.
    fn take_attended<const N: usize>(
        &self,
        parts: &mut Parts<N>,
    ) -> Result<(RawTensor, RawTensor)> {
        let heads = self.heads.num_heads;
        let out = self.rows(parts, self.heads.attended())?;
        let tokens = self.all.num_rows();
        let lse = parts.take(DType::F32, [tokens, heads])?;
        let layout = match self.all.shape() {
            [batch, seq, _] => Layout::contiguous(&[*batch, heads, *seq])?,
            _ => Layout::contiguous(&[heads, tokens])?,
        };
        Ok((out, RawTensor { layout, ..lse }))
    }

    /// What attention leaves: where it is kept, or else in the workspace.
    pub fn attended<const N: usize>(&self, parts: &mut Parts<N>) -> Result<Attended> {
        let qkv = match self.saved.qkv {
            Some(saved) => saved,
            None => self.take_qkv(parts)?,
        };
        let (out, lse) = match self.saved.attended {
            Some(saved) => saved,
            None => self.take_attended(parts)?,
        };
        Ok(Attended { qkv, out, lse })
    }

    /// What is kept, or else room for it.
    pub fn saved_or_taken<const N: usize>(
        &self,
        saved: Option<RawTensor>,
        parts: &mut Parts<N>,
    ) -> Result<RawTensor> {
        match saved {
            Some(saved) => Ok(saved),
            None => self.take(parts),
        }
    }

    fn gains(&self, which: Norm) -> RawTensor {
        match which {
            Norm::Attention => self.params.attention_norm.raw(),
            Norm::Mlp => self.params.mlp_norm.raw(),
        }
    }

    /// Adds a norm of `x`.
    pub fn push_norm<const N: usize>(
        &self,
        which: Norm,
        x: RawTensor,
        out: RawTensor,
        parts: &mut Parts<N>,
    ) -> Result<()> {
        let problem = rms_norm::Problem {
            x,
            out,
            residual: None,
            weight: Some(self.gains(which)),
            weight_offset: self.params.norm_weight_offset,
            epsilon: self.params.norm_epsilon,
        };
        parts.push(Ok(problem), which.names())
    }

    /// The output of a norm of `x`: where it is kept, or else computed again in `room`.
    pub fn norm_again<const N: usize>(
        &self,
        which: Norm,
        x: RawTensor,
        (saved, room): (Option<RawTensor>, RawTensor),
        parts: &mut Parts<N>,
    ) -> Result<RawTensor> {
        if let Some(saved) = saved {
            return Ok(saved);
        }
        self.push_norm(which, x, room, parts)?;
        Ok(room)
    }

    /// Adds the gradient of a norm of `x`, in the place of `dout` and summed with `dresidual`.
    pub fn push_norm_backward<const N: usize>(
        &self,
        which: Norm,
        x: RawTensor,
        [dout, dresidual]: [RawTensor; 2],
        parameters: norm::Parameters,
        parts: &mut Parts<N>,
    ) -> Result<()> {
        let problem = norm::Backward {
            centered: false,
            x,
            dout,
            dx: dout,
            dresidual: Some(dresidual),
            weight: Some(self.gains(which)),
            weight_offset: self.params.norm_weight_offset,
            epsilon: self.params.norm_epsilon,
            parameters,
        };
        parts.push(Ok(problem), which.names())
    }

    /// The group in a forward pass. Its chunks cost more than they hide, unlike those of a backward pass and of
    /// blocks by themselves (`benches/results/overlap_h100_2026-11-25.json`): they have to be asked for.
    fn forward_parallel(&self) -> Option<Parallel<'a>> {
        self.params.attention.parallel.map(Parallel::in_one)
    }

    /// Adds the attention block with its residual. Sums of these chunks run beside what follows, unless they
    /// are divided.
    pub fn push_attention<const N: usize>(
        &self,
        norm: RawTensor,
        kept: &Attended,
        out: RawTensor,
        parts: &mut Parts<'a, N>,
    ) -> Result<Chunks> {
        // SAFETY: tensors of the caller's, or of the workspace, for parts of one call.
        let attention = unsafe {
            attention_block::Params {
                output: Output::Add(InOut::Apart {
                    input: view(self.x),
                    output: view_mut(out),
                }),
                qkv_out: Some(view_mut(kept.qkv)),
                attended_out: Some(view_mut(kept.out)),
                lse_out: Some(view_mut(kept.lse)),
                workspace: parts.rest(),
                parallel: self.forward_parallel(),
                ..self.params.attention.of_input(view(norm))
            }
        };
        let (block, chunks) = named(self.op, attention.parts(), &[])?;
        parts.absorb(Ok(block))?;
        let parallel = self.params.attention.parallel.as_ref();
        if parallel.is_some_and(|parallel| parallel.sequence) {
            self.push_join(chunks, parts)?;
        }
        Ok(chunks)
    }

    /// Adds that what follows waits for the sums of these chunks.
    pub fn push_join<const N: usize>(
        &self,
        chunks: Chunks,
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        match &self.params.attention.parallel {
            None => Ok(()),
            Some(parallel) => parallel.push_join(self.op, chunks, parts),
        }
    }

    /// Adds the norm of the residual and the MLP. The residual is the sum of these chunks, which go on one by
    /// one: while ranks add up one the others are computed.
    pub fn push_mlp<const N: usize>(
        &self,
        norm: RawTensor,
        gate_up: RawTensor,
        (residual, summed): (RawTensor, Chunks),
        out: RawTensor,
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        // SAFETY: as in `push_attention`.
        let mlp = unsafe {
            mlp::Params {
                output: Output::Add(InOut::Apart {
                    input: view(residual),
                    output: view_mut(out),
                }),
                gate_up_out: Some(view_mut(gate_up)),
                workspace: parts.rest(),
                parallel: self.forward_parallel(),
                ..self.params.mlp.of_input(view(norm))
            }
        };
        let parallel = self.params.attention.parallel.as_ref();
        let one_by_one = parallel.filter(|parallel| !parallel.sequence && !summed.is_one());
        if one_by_one.is_none() {
            self.push_norm(Norm::Mlp, residual, norm, parts)?;
        }
        let made = mlp.parts(|i, rows, to| {
            let Some(parallel) = one_by_one else {
                return Ok(());
            };
            parallel.push_join_of(self.op, i, to)?;
            match rows_of([residual, norm], rows)? {
                Some([x, out]) => self.push_norm(Norm::Mlp, x, out, to),
                // Both are contiguous, by what was checked and taken.
                None => Err(Error::Internal {
                    op: self.op,
                    message: text!("rows of the residual are not equally spaced"),
                }),
            }
        });
        let (block, chunks) = named(self.op, made, &[])?;
        parts.absorb(Ok(block))?;
        self.push_join(chunks, parts)
    }

    /// Adds the gradients of the MLP, that of its input `norm` to `dx`.
    pub fn push_mlp_backward<const N: usize>(
        &self,
        norm: RawTensor,
        dout: RawTensor,
        dx: RawTensor,
        (gradients, accumulate): (&mlp::backward::Gradients<'_>, bool),
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        // SAFETY: as in `push_attention`.
        let backward = unsafe {
            mlp::backward::Params {
                forward: mlp::Params {
                    parallel: self.forward_parallel(),
                    ..self.params.mlp.of_input(view(norm))
                },
                gate_up: self.saved.gate_up.map(|saved| view(saved)),
                dout: view(dout),
                dx: Some(view_mut(dx)),
                gradients: gradients.again(),
                accumulate,
                workspace: parts.rest(),
            }
        };
        parts.absorb(backward.parts(self.params.mlp.parallel.as_ref()))
    }

    /// Adds the gradients of the attention block, that of its input `norm` to `dx`.
    pub fn push_attention_backward<const N: usize>(
        &self,
        norm: RawTensor,
        (qkv, attended): (Option<RawTensor>, (RawTensor, RawTensor)),
        [dout, dx]: [RawTensor; 2],
        (gradients, accumulate, deterministic): (
            &attention_block::backward::Gradients<'_>,
            bool,
            bool,
        ),
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        // SAFETY: as in `push_attention`.
        let backward = unsafe {
            attention_block::backward::Params {
                forward: self.params.attention.of_input(view(norm)),
                qkv: qkv.map(|qkv| view(qkv)),
                attended: Some(view(attended.0)),
                lse: Some(view(attended.1)),
                dout: view(dout),
                dx: Some(view_mut(dx)),
                gradients: gradients.again(),
                accumulate,
                deterministic,
                workspace: parts.rest(),
            }
        };
        parts.absorb(backward.parts(self.params.attention.parallel.as_ref()))
    }
}
