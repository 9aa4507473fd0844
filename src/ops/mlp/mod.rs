//! The gated feed-forward block of a transformer in one call:
//! `y = (act(x Wgᵀ + bg) * (x Wuᵀ + bu)) Wdᵀ + bd`, with an optional fused addition of a residual.
//!
//! Products are accumulated in f32; the activated intermediate is rounded to the dtype of `x` in
//! the workspace, which is all the scratch memory that the call needs. On the CPU gate and up are
//! never stored. On CUDA they pass through the workspace too, rounded, and the call is faster with
//! room for two intermediates, and for what products have use for as in [`super::linear`].
//!
//! With gains for it ([`Params::intermediate_norm`]) the activated intermediate passes an RMSNorm before
//! the projection back (BitNet's sub-norm). The call is then the operations [`linear`](super::linear),
//! [`swiglu`](super::swiglu), [`rms_norm`] and `linear` one after the other.
//!
//! For a [`backward`](fn@backward) pass gate and up can be kept ([`Params::gate_up_out`]). The call
//! is then the operations [`linear`](super::linear), [`swiglu`](super::swiglu) and `linear` one
//! after the other, and needs the whole workspace that it asks for, so that gate and up have the
//! same bits as those that a backward pass computes again.

pub mod backward;
mod layer;

pub use backward::backward;

use arrayvec::ArrayVec;

use crate::comm::Comm;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::layout::MAX_RANK;
use crate::ops::check::{Arg, with_last};
use crate::ops::linear::{Output, Weights};
use crate::ops::operation::{self, Operation, Tensors};
use crate::ops::parallel::{ByRows, Chunks, OF_OUT, OF_X, Parallel, rows_of};
use crate::ops::parts::{Names, Parts};
use crate::ops::rms_norm;
use crate::ops::swiglu::{Activation, GateOrder};
use crate::problem::linear;
use crate::problem::mlp::Problem;
use crate::problem::rms_norm::OfInput;
use crate::tensor::{InOut, RawTensor, TensorMut, TensorRef, Workspace};
pub(crate) use layer::Layer;
use layer::OF_DOWN;

const OP: &str = "mlp";
/// What the intermediate's norm calls its arguments, and what the block does.
const OF_NORM: Names = &[("weight", "intermediate_norm"), ("epsilon", "norm_epsilon")];

/// What the norm of the input calls its arguments.
const OF_X_NORM: [&str; 3] = ["x_norm", "x_norm_weight_offset", "x_norm_epsilon"];

/// Parts of the block that are not in chunks.
const MOST_PARTS: usize = 6;

/// Adds what comes before the parts of a chunk, told its number, its first row and its rows.
pub(crate) trait Before<'t, const N: usize>:
    FnMut(usize, (usize, usize), &mut Parts<'t, N>) -> Result<()>
{
}

impl<'t, const N: usize, F> Before<'t, N> for F where
    F: FnMut(usize, (usize, usize), &mut Parts<'t, N>) -> Result<()>
{
}

/// Arguments of [`forward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// `[.., hidden]`, f32, f16 or bf16; rows strided, contiguous in the last dimension.
    pub x: TensorRef<'a>,
    /// An RMSNorm that `x` passes before it is multiplied, for a forward pass on one rank: the bits of [`rms_norm`] and then this block.
    /// The output may then take the place of `x`, as of a residual stream. `None` for no norm.
    pub x_norm: Option<rms_norm::Norm<'a>>,
    /// The projections to the intermediate dimension.
    pub gate_up: GateUp<'a>,
    /// Applied to the gate.
    pub activation: Activation,
    /// An RMSNorm of the activated intermediate (BitNet), for a forward pass alone; `None` for no norm.
    pub intermediate_norm: Option<Norm<'a>>,
    /// The projection back, `[hidden_out, intermediate]`; usually `hidden_out` is `hidden`.
    pub down: Weights<'a>,
    /// `[.., hidden_out]`: leading dimensions and dtype of `x`.
    pub output: Output<'a>,
    /// At least one intermediate; better [`workspace_size`] bytes, which `gate_up_out` needs.
    pub workspace: Workspace<'a>,
    /// Receives gate and up, biases included, for a backward pass: `[.., 2 * intermediate]`,
    /// contiguous, of the dtype of `x`. They lie as in a packed weight; from two weights, gate is
    /// first.
    pub gate_up_out: Option<TensorMut<'a>>,
    /// The group that the intermediate dimension is divided among; `None` where a rank has all of it. The
    /// rows of gate and up and the columns of `down` are this rank's. `x` is the same on all ranks, and
    /// the output, which is contiguous, gets the sum of their products. Sequence parallel, `x`, output and
    /// residual are this rank's rows, and `gate_up_out` is of all rows.
    pub parallel: Option<Parallel<'a>>,
}

/// An RMSNorm's parameters.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// Gains `[intermediate]`, any float dtype.
    pub weight: TensorRef<'a>,
    /// Added to the mean square; above 0.
    pub epsilon: f32,
}

/// Gate and up projections.
#[expect(
    clippy::large_enum_variant,
    reason = "one value on the stack of a call; boxing would allocate"
)]
#[derive(Clone, Copy, Debug)]
pub enum GateUp<'a> {
    /// Two matrices, `[intermediate, hidden]` each.
    Apart {
        /// Its product passes the activation.
        gate: Weights<'a>,
        /// Its product multiplies the activated gate.
        up: Weights<'a>,
    },
    /// One matrix `[2 * intermediate, hidden]` with both.
    Packed {
        /// The matrix and its bias `[2 * intermediate]`.
        weights: Weights<'a>,
        /// Which half of the rows is which.
        order: GateOrder,
    },
}

impl<'a> Params<'a> {
    /// The block of another input, without what it writes.
    pub(crate) fn of_input(&self, x: TensorRef<'a>) -> Params<'a> {
        Params {
            x,
            x_norm: self.x_norm,
            gate_up: self.gate_up,
            activation: self.activation,
            intermediate_norm: self.intermediate_norm,
            down: self.down,
            output: Output::none(),
            workspace: Workspace::none(),
            gate_up_out: None,
            parallel: self.parallel,
        }
    }

    /// Weights and biases, which are read.
    pub(crate) fn weights(&self, tensors: &mut Tensors) {
        for (weights, names) in self.gate_up.weights() {
            weights.tensors(names, tensors);
        }
        self.down.tensors(("down_weight", "down_bias"), tensors);
        let norm = self.x_norm.as_ref();
        tensors.read_optional("x_norm", norm.map(|norm| &norm.weight));
        let norm = self.intermediate_norm.as_ref();
        tensors.read_optional("intermediate_norm", norm.map(|norm| &norm.weight));
    }

    /// Refuses what has no gradients: weights in blocks, and a norm of the intermediate.
    pub(crate) fn check_differentiable(&self, op: &'static str) -> Result<()> {
        for (weights, names) in self.gate_up.weights() {
            weights.check_floats(op, names.0)?;
        }
        self.down.check_floats(op, "down_weight")?;
        let norms = [
            ("x_norm", self.x_norm.is_some()),
            ("intermediate_norm", self.intermediate_norm.is_some()),
        ];
        match norms.into_iter().find(|(_, is_there)| *is_there) {
            None => Ok(()),
            Some((name, _)) => {
                let problem = "is there: gradients are those of a block without it";
                Err(Error::unsupported(op, name, problem))
            }
        }
    }

    /// Adds the block as single operations: `gate_up` receives gate and up, `activated`, which may be
    /// the gate, what comes of them. Where ranks add up whole rows all that is done in chunks of these.
    fn push_parts<const N: usize>(
        &self,
        parts: &mut Parts<'a, N>,
        layer: &Layer,
        x: RawTensor,
        [gate_up, activated]: [RawTensor; 2],
        before: &mut impl Before<'a, N>,
    ) -> Result<Chunks> {
        let down = linear::Problem {
            x: activated,
            norm: None,
            weights: layer.down,
            residual: self.output.residual(),
            out: self.output.out(),
        };
        let all = [x, gate_up, activated];
        let chunks = self.chunks(x.layout.num_rows());
        let Some(parallel) = self.parallel.as_ref().filter(|_| !chunks.is_one()) else {
            before(0, (0, x.layout.num_rows()), parts)?;
            self.push_activated(parts, layer, all)?;
            return self.push_down(parts, down, chunks);
        };
        parts.let_be_any_number();
        let part = parallel.part(down);
        let divides_down = part.of_rows(0, 0)?.is_some();
        for (i, (start, len)) in chunks.iter().enumerate() {
            before(i, (start, len), parts)?;
            match rows_of(all, (start, len))? {
                Some(rows) => self.push_activated(parts, layer, rows)?,
                // All rows together, as the first chunk.
                None if i == 0 => self.push_activated(parts, layer, all)?,
                None => {}
            }
            if divides_down && let Some(rows) = part.of_rows(start, len)? {
                parts.push(Ok(rows), OF_DOWN)?;
                parallel.push_sum_of_rows(OP, &part.out, i, (start, len), parts)?;
            }
        }
        if !divides_down {
            parts.push(Ok(part), OF_DOWN)?;
            parallel.push_sums(OP, &part.out, chunks, parts)?;
        }
        Ok(chunks)
    }

    /// The chunks in which the whole block is computed, of so many rows.
    fn chunks(&self, rows: usize) -> Chunks {
        match &self.parallel {
            Some(parallel) if !parallel.sequence => parallel.chunks(&self.output.out()),
            _ => Chunks::one(rows),
        }
    }

    /// Adds what leads to the projection back.
    fn push_activated<const N: usize>(
        &self,
        parts: &mut Parts<'a, N>,
        layer: &Layer,
        [x, gate_up, activated]: [RawTensor; 3],
    ) -> Result<()> {
        layer.push_gate_up(parts, x, &gate_up)?;
        layer.push_activation(parts, &gate_up, activated)?;
        let Some(norm) = &self.intermediate_norm else {
            return Ok(());
        };
        // SAFETY: it lies in the workspace, and is for parts of this call, which run one after the other.
        let activated =
            unsafe { TensorMut::from_raw(activated.ptr, activated.dtype, activated.layout) };
        let norm = rms_norm::Params {
            x: InOut::InPlace(activated),
            residual: None,
            weight: Some(norm.weight),
            weight_offset: 0.0,
            epsilon: norm.epsilon,
        };
        parts.push(norm.problem(), OF_NORM)
    }

    /// Adds the projection back of all rows.
    fn push_down<const N: usize>(
        &self,
        parts: &mut Parts<'a, N>,
        down: linear::Problem,
        all: Chunks,
    ) -> Result<Chunks> {
        if let Some(parallel) = &self.parallel {
            return parallel.push_product(OP, down, OF_DOWN, parts);
        }
        parts.push(Ok(down), OF_DOWN)?;
        Ok(all)
    }

    /// Refuses what ranks cannot divide.
    fn check_divided(&self, parallel: &Parallel<'_>) -> Result<()> {
        parallel.check(OP)?;
        if self.x_norm.is_some() {
            let problem = "is there together with parallel, where x is to be normalised before";
            return Err(Error::unsupported(OP, "x_norm", problem));
        }
        if self.intermediate_norm.is_some() {
            parallel.check_norm(OP, "intermediate_norm")?;
        }
        Arg::new(OP, "out", &self.output.out()).contiguous()?;
        Ok(())
    }

    /// The block's parts, with what comes before those of each chunk of rows. Sums of these chunks run beside
    /// what follows, which waits for them.
    pub(crate) fn parts(
        &self,
        mut before: impl Before<'a, MOST_PARTS>,
    ) -> Result<(Parts<'a, MOST_PARTS>, Chunks)> {
        let layer = self.layer(OP)?;
        let mut x = self.x.raw();
        let mut room = [0; MAX_RANK];
        let shape = with_last(&x, layer.down.out_features(), &mut room);
        self.output.check(OP, Arg::new(OP, "x", &x), shape)?;
        let mut parts = Parts::new(OP, &self.workspace);
        let mut divides_rows = false;
        if let Some(parallel) = &self.parallel {
            self.check_divided(parallel)?;
            parts = parts.exactly();
            divides_rows = parallel.sequence;
            if divides_rows {
                x = parallel.push_gather(OP, ("x", OF_X), x, &mut parts)?;
            }
        }
        let kept = self.gate_up_out.as_ref().map(TensorMut::raw);
        if kept.is_some() && self.x_norm.is_some() {
            let problem = "is there together with x_norm, which has no gradients";
            return Err(Error::unsupported(OP, "gate_up_out", problem));
        }
        if let (Some(norm), Some(_)) = (self.norm()?, &self.intermediate_norm) {
            let rows = layer.take(&mut parts, &x, x.layout.dim(x.layout.rank() - 1))?;
            let norm = norm.alone(x, rows.ptr)?;
            x = norm.out;
            parts.push(Ok(norm), &[])?;
        }
        let both = if let Some(kept) = kept {
            layer.check_kept(OP, "gate_up_out", &x, &kept)?;
            parts = parts.exactly();
            [kept, layer.take(&mut parts, &x, layer.intermediate)?]
        } else if self.intermediate_norm.is_some() || divides_rows {
            // A residual of some rows is added where the block is single operations.
            let gate_up = layer.take(&mut parts, &x, 2 * layer.intermediate)?;
            let [gate, _] = layer.gate_and_up(&gate_up)?;
            [gate_up, gate]
        } else {
            let chunks = self.push_fused(&mut parts, &layer, x, &mut before)?;
            return Ok((parts, chunks));
        };
        let chunks = self.push_parts(&mut parts, &layer, x, both, &mut before)?;
        Ok((parts, chunks))
    }

    /// Adds the block as one problem of a backend's; in chunks as single operations, which take no memory of
    /// the host's when others have written.
    fn push_fused<const N: usize>(
        &self,
        parts: &mut Parts<'a, N>,
        layer: &Layer,
        x: RawTensor,
        before: &mut impl Before<'a, N>,
    ) -> Result<Chunks> {
        let [gate, up] = layer.halves()?;
        let mut fused = Problem {
            x,
            norm: self.norm()?,
            gate,
            up,
            activation: self.activation,
            down: layer.down,
            residual: self.output.residual(),
            out: self.output.out(),
            intermediate: layer.intermediate,
        };
        let chunks = self.chunks(x.layout.num_rows());
        let Some(parallel) = &self.parallel else {
            before(0, (0, x.layout.num_rows()), parts)?;
            parts.push(Ok(fused), &[])?;
            return Ok(chunks);
        };
        if parallel.comm.rank() > 0 {
            fused.down.bias = None;
            fused.residual = None;
        }
        if !chunks.is_one() && fused.of_rows(0, 0)?.is_some() {
            self.push_fused_chunks(parts, layer, fused, chunks, before)?;
            return Ok(chunks);
        }
        for (i, rows) in chunks.iter().enumerate() {
            before(i, rows, parts)?;
        }
        parts.push(Ok(fused), &[])?;
        match chunks.is_one() {
            true => parallel.push_sum(OP, OF_OUT, fused.out, parts)?,
            false => parallel.push_sums(OP, &fused.out, chunks, parts)?,
        }
        Ok(chunks)
    }

    /// Adds chunks of rows that are equally spaced, over room for one of them.
    fn push_fused_chunks<const N: usize>(
        &self,
        parts: &mut Parts<'a, N>,
        layer: &Layer,
        fused: Problem,
        chunks: Chunks,
        before: &mut impl Before<'a, N>,
    ) -> Result<()> {
        parts.let_be_any_number();
        // The first is the longest.
        let longest = chunks.iter().next().map_or(0, |(_, len)| len);
        let room = parts.take(fused.x.dtype, [longest, 2 * layer.intermediate])?;
        for (i, (start, len)) in chunks.iter().enumerate() {
            before(i, (start, len), parts)?;
            let Some(rows) = fused.of_rows(start, len)? else {
                continue;
            };
            let gate_up = room.narrowed(0, 0, len)?;
            let [activated, _] = layer.gate_and_up(&gate_up)?;
            self.push_activated(parts, layer, [rows.x, gate_up, activated])?;
            let down = linear::Problem {
                x: activated,
                norm: None,
                weights: rows.down,
                residual: rows.residual,
                out: rows.out,
            };
            parts.push(Ok(down), OF_DOWN)?;
            if let Some(parallel) = &self.parallel {
                parallel.push_sum_of_rows(OP, &fused.out, i, (start, len), parts)?;
            }
        }
        Ok(())
    }

    /// The norm of `x`, checked.
    fn norm(&self) -> Result<Option<OfInput>> {
        let x = self.x.raw();
        let norm = self.x_norm.as_ref();
        norm.map(|norm| norm.problem(OP, OF_X_NORM, &x)).transpose()
    }

    /// Checks `x` and the weights.
    pub(crate) fn layer(&self, op: &'static str) -> Result<Layer> {
        let x = self.x.raw();
        Arg::new(op, "x", &x)
            .min_rank(1)?
            .dtype(DType::FLOATS)?
            .last_contiguous()?;
        Layer::new(op, &x, &self.gate_up, self.activation, &self.down)
    }
}

impl<'a> Operation for Params<'a> {
    const NAME: &'static str = OP;
    /// One problem of a backend's; where gate and up are kept or the intermediate is normalised, up to
    /// five. Where ranks divide the block it is projected back in up to three ranges of rows; in chunks there
    /// are more.
    type Problem = Parts<'a, MOST_PARTS>;

    fn problem(&self) -> Result<Self::Problem> {
        let (mut parts, chunks) = self.parts(|_, _, _| Ok(()))?;
        if let Some(parallel) = &self.parallel {
            parallel.push_join(OP, chunks, &mut parts)?;
        }
        Ok(parts)
    }

    fn tensors(&self, tensors: &mut Tensors) {
        if self.x_norm.is_none() || !self.output.is_in_place_of(&self.x) {
            tensors.read("x", &self.x);
        }
        self.weights(tensors);
        tensors.write_optional("gate_up_out", self.gate_up_out.as_ref());
        self.output.tensors(tensors);
    }

    fn workspace(&self) -> Option<&Workspace<'_>> {
        Some(&self.workspace)
    }

    fn comm(&self) -> Option<&Comm> {
        self.parallel.as_ref().map(|parallel| parallel.comm)
    }
}

impl<'a> GateUp<'a> {
    /// The matrices, by name.
    fn weights(&self) -> ArrayVec<(&Weights<'a>, (&'static str, &'static str)), 2> {
        match self {
            GateUp::Apart { gate, up } => ArrayVec::from([
                (gate, ("gate_weight", "gate_bias")),
                (up, ("up_weight", "up_bias")),
            ]),
            GateUp::Packed { weights, .. } => {
                ArrayVec::from_iter([(weights, ("gate_up_weight", "gate_up_bias"))])
            }
        }
    }
}

operation::functions!();
