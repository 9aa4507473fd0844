//! The backward pass of the gated feed-forward block. With `gate = x Wgᵀ + bg`, `up = x Wuᵀ + bu`
//! and `activated = act(gate) * up`:
//!
//! ```text
//! dactivated = dout Wd
//! dgate      = dactivated * up * act'(gate)      dup = dactivated * act(gate)
//! dx         = dgate Wg + dup Wu
//! dWg        = dgateᵀ x         dWu = dupᵀ x     dWd = doutᵀ activated
//! dbg, dbu, dbd                                  sums of the rows of dgate, dup, dout
//! ```
//!
//! Each gradient is optional, and what none of those that are asked for needs is not computed. (A
//! residual's gradient is `dout` itself.) It is a sequence of this library's operations,
//! [`linear`](crate::ops::linear) and [`swiglu`](crate::ops::swiglu) and their backward passes;
//! what passes between them is rounded to the dtype of `x`.
//!
//! Gate and up are what [the forward kept](super::Params::gate_up_out) or, where that is absent,
//! computed again: by the same products in the same way, so that every gradient has the same bits.
//! The product with the activated gate is computed again always, which costs nothing.

use arrayvec::ArrayVec;

use super::Params as Forward;
use super::layer::Layer;
use crate::comm::Comm;
use crate::error::{Error, Result, text};
use crate::layout::MAX_RANK;
use crate::ops::check::{self, Arg, described, with_last};
use crate::ops::operation::{self, Operation, Tensors};
use crate::ops::parallel::{Chunks, Parallel, Rows, push_summed, rows_of};
use crate::ops::parts::{Names, Parts};
use crate::problem::linear::{Backward, Gradient};
use crate::problem::swiglu;
use crate::tensor::{RawTensor, TensorMut, TensorRef, Workspace};

const OP: &str = "mlp_backward";

/// Arguments of [`backward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// The forward's: its input, weights, biases and activation. Its output, residual, workspace
    /// and `gate_up_out` are not looked at; [`Output::none`](crate::ops::linear::Output::none) is
    /// an output.
    pub forward: Forward<'a>,
    /// What the forward kept in `gate_up_out`: `[.., 2 * intermediate]`, contiguous. `None`: it is
    /// computed again.
    pub gate_up: Option<TensorRef<'a>>,
    /// The gradient of the output: `[.., hidden_out]`, leading dimensions and dtype of `x`; rows
    /// strided.
    pub dout: TensorRef<'a>,
    /// Receives the gradient of `x`: like it; rows strided.
    pub dx: Option<TensorMut<'a>>,
    /// Receive the gradients of weights and biases.
    pub gradients: Gradients<'a>,
    /// Adds to what the gradients of weights and biases hold, which must be f32 then. `dx` is
    /// overwritten always.
    pub accumulate: bool,
    /// [`workspace_size`] bytes, all of which are needed.
    pub workspace: Workspace<'a>,
}

/// Gradients of weights and biases: shaped like them, of any float dtype; rows of matrices strided,
/// biases contiguous. Those of weights and biases that are not there have no use.
#[derive(Debug, Default)]
pub struct Gradients<'a> {
    /// `[intermediate, hidden]`.
    pub dgate_weight: Option<TensorMut<'a>>,
    /// `[intermediate]`.
    pub dgate_bias: Option<TensorMut<'a>>,
    /// `[intermediate, hidden]`.
    pub dup_weight: Option<TensorMut<'a>>,
    /// `[intermediate]`.
    pub dup_bias: Option<TensorMut<'a>>,
    /// `[2 * intermediate, hidden]`, of the packed weight.
    pub dgate_up_weight: Option<TensorMut<'a>>,
    /// `[2 * intermediate]`.
    pub dgate_up_bias: Option<TensorMut<'a>>,
    /// `[hidden_out, intermediate]`.
    pub ddown_weight: Option<TensorMut<'a>>,
    /// `[hidden_out]`.
    pub ddown_bias: Option<TensorMut<'a>>,
}

const OF_DACTIVATED: Names = &[("dx", "down_weight"), ("weight", "down_weight")];
const OF_ACTIVATION: Names = &[("gate", "x"), ("gate_up", "x")];
const OF_DOWN: Names = &[("dweight", "ddown_weight"), ("dbias", "ddown_bias")];
const OF_GATE: Names = &[
    ("dout", "x"),
    ("weight", "gate_weight"),
    ("dweight", "dgate_weight"),
    ("dbias", "dgate_bias"),
];
const OF_UP: Names = &[
    ("dout", "x"),
    ("weight", "up_weight"),
    ("dweight", "dup_weight"),
    ("dbias", "dup_bias"),
];
const OF_GATE_UP: Names = &[
    ("dout", "x"),
    ("weight", "gate_up_weight"),
    ("dweight", "dgate_up_weight"),
    ("dbias", "dgate_up_bias"),
];

/// A matrix' gradient and its bias', checked.
#[derive(Clone, Copy, Debug, Default)]
struct Pair {
    dweight: Option<RawTensor>,
    dbias: Option<RawTensor>,
}

impl Pair {
    fn is_none(&self) -> bool {
        self.dweight.is_none() && self.dbias.is_none()
    }
}

/// Tensors of a call, which are checked against the layer.
pub(super) struct Io {
    pub x: RawTensor,
    pub gate_up: Option<RawTensor>,
    pub dout: RawTensor,
    pub dx: Option<RawTensor>,
    /// Of the forward pass.
    pub chunks: Chunks,
}

impl Gradients<'_> {
    /// The same once more, for the parameters of a part.
    pub(crate) fn again(&self) -> Gradients<'_> {
        Gradients {
            dgate_weight: described(&self.dgate_weight),
            dgate_bias: described(&self.dgate_bias),
            dup_weight: described(&self.dup_weight),
            dup_bias: described(&self.dup_bias),
            dgate_up_weight: described(&self.dgate_up_weight),
            dgate_up_bias: described(&self.dgate_up_bias),
            ddown_weight: described(&self.ddown_weight),
            ddown_bias: described(&self.ddown_bias),
        }
    }

    /// All, by name.
    pub(crate) fn list(&self) -> [(&'static str, Option<&TensorMut<'_>>); 8] {
        [
            ("dgate_weight", self.dgate_weight.as_ref()),
            ("dgate_bias", self.dgate_bias.as_ref()),
            ("dup_weight", self.dup_weight.as_ref()),
            ("dup_bias", self.dup_bias.as_ref()),
            ("dgate_up_weight", self.dgate_up_weight.as_ref()),
            ("dgate_up_bias", self.dgate_up_bias.as_ref()),
            ("ddown_weight", self.ddown_weight.as_ref()),
            ("ddown_bias", self.ddown_bias.as_ref()),
        ]
    }

    /// Those of pair `i` of the list, checked; `of` is what they are of, if it is there.
    fn pair(
        &self,
        i: usize,
        of: Option<&crate::problem::linear::Weights>,
        accumulate: bool,
    ) -> Result<Pair> {
        let weight = of.map(|of| &of.weight);
        let bias = of.and_then(|of| of.bias.as_ref());
        let all = self.list();
        let checked = |i: usize, of| check::gradient_like(OP, all[i], of, accumulate);
        Ok(Pair {
            dweight: checked(2 * i, weight)?.filter(has_elements),
            dbias: checked(2 * i + 1, bias)?.filter(has_elements),
        })
    }

    pub(super) fn is_none(&self) -> bool {
        self.list().iter().all(|(_, gradient)| gradient.is_none())
    }

    pub(super) fn tensors(&self, tensors: &mut Tensors) {
        for (name, gradient) in self.list() {
            tensors.write_optional(name, gradient);
        }
    }

    /// Adds the backward pass of a block, and the sum of its input's gradient, if ranks divide it.
    fn push<'t, const N: usize>(
        &self,
        layer: &Layer,
        io: &Io,
        accumulate: bool,
        sum: Option<(&Rows, &Parallel<'t>)>,
        parts: &mut Parts<'t, N>,
    ) -> Result<()> {
        let packed = layer.projections.len() == 1;
        let of = |i: usize| layer.projections.get(i).map(|p| &p.weights);
        let apart = [of(0), of(1)].map(|weights| weights.filter(|_| !packed));
        let of_gate = self.pair(0, apart[0], accumulate)?;
        let of_up = self.pair(1, apart[1], accumulate)?;
        let of_both = self.pair(2, of(0).filter(|_| packed), accumulate)?;
        let of_down = self.pair(3, Some(&layer.down), accumulate)?;
        let of_projections = match packed {
            true => [(of_both, OF_GATE_UP), (Pair::default(), OF_UP)],
            false => [(of_gate, OF_GATE), (of_up, OF_UP)],
        };

        // What lies behind the activation, and what the gradient of the down projection needs.
        let dx = io.dx.filter(has_elements);
        let inner = dx.is_some() || of_projections.iter().any(|(pair, _)| !pair.is_none());
        let activates = inner || of_down.dweight.is_some();
        let gate_up = match (io.gate_up, activates) {
            (Some(kept), _) => Some(kept),
            (None, false) => None,
            (None, true) => {
                let again = layer.take(parts, &io.x, 2 * layer.intermediate)?;
                push_gate_up_again(layer, io, again, parts)?;
                Some(again)
            }
        };
        let mut activated = None;
        let mut dgate_up = None;
        if let (Some(gate_up), true) = (gate_up, activates) {
            let middle = layer.take(parts, &io.x, layer.intermediate)?;
            if inner {
                let written = match io.gate_up {
                    Some(_) => layer.take(parts, &io.x, 2 * layer.intermediate)?,
                    None => gate_up,
                };
                let out = of_down.dweight.map(|_| middle);
                push_inner(parts, layer, io.dout, [gate_up, written], middle, out)?;
                dgate_up = Some(written);
            } else {
                layer.push_activation(parts, &gate_up, middle)?;
            }
            activated = Some(middle);
        }
        if !of_down.is_none() {
            let down = Backward {
                dout: io.dout,
                dx: None,
                add_dx: false,
                dweight: gradient(activated, of_down.dweight),
                dbias: of_down.dbias,
                accumulate,
            };
            parts.push(Ok(down), OF_DOWN)?;
        }
        let mut products = ArrayVec::<_, 2>::new();
        if let Some(dgate_up) = dgate_up {
            for (projection, (pair, names)) in layer.projections.iter().zip(of_projections) {
                if dx.is_none() && pair.is_none() {
                    continue;
                }
                let product = Backward {
                    dout: layer.columns(&dgate_up, &projection.columns)?,
                    dx: gradient(Some(projection.weights.weight), dx),
                    add_dx: !products.is_empty(),
                    dweight: gradient(Some(io.x), pair.dweight),
                    dbias: pair.dbias,
                    accumulate,
                };
                products.push((product, names));
            }
        }
        push_summed(OP, &products, sum, parts)
    }
}

/// Adds the products that give gate and up once more, in the chunks in which the forward pass had them.
fn push_gate_up_again<const N: usize>(
    layer: &Layer,
    io: &Io,
    gate_up: RawTensor,
    parts: &mut Parts<'_, N>,
) -> Result<()> {
    let chunks = io.chunks;
    if chunks.is_one() || rows_of([io.x], (0, 0))?.is_none() {
        return layer.push_gate_up(parts, io.x, &gate_up);
    }
    parts.let_be_any_number();
    for rows in chunks.iter() {
        if let Some([x, gate_up]) = rows_of([io.x, gate_up], rows)? {
            layer.push_gate_up(parts, x, &gate_up)?;
        }
    }
    Ok(())
}

/// Adds the gradients of gate and up: `dactivated` is computed in `middle`, and may become the
/// activated product.
fn push_inner<const N: usize>(
    parts: &mut Parts<N>,
    layer: &Layer,
    dout: RawTensor,
    [gate_up, dgate_up]: [RawTensor; 2],
    middle: RawTensor,
    out: Option<RawTensor>,
) -> Result<()> {
    let dactivated = Backward {
        dout,
        dx: gradient(Some(layer.down.weight), Some(middle)),
        add_dx: false,
        dweight: None,
        dbias: None,
        accumulate: false,
    };
    parts.push(Ok(dactivated), OF_DACTIVATED)?;
    let [gate, up] = layer.gate_and_up(&gate_up)?;
    let [dgate, dup] = layer.gate_and_up(&dgate_up)?;
    let activation = swiglu::Backward {
        gate,
        up,
        dout: middle,
        dgate,
        dup,
        out,
        activation: layer.activation,
    };
    parts.push(Ok(activation), OF_ACTIVATION)
}

/// Whether there is anything to compute.
fn has_elements(gradient: &RawTensor) -> bool {
    !gradient.layout.is_empty()
}

/// A gradient that is wanted, and what multiplies that of the output for it.
fn gradient(by: Option<RawTensor>, out: Option<RawTensor>) -> Option<Gradient> {
    by.zip(out).map(|(by, out)| Gradient { by, out })
}

impl Params<'_> {
    /// Whether gate and up are needed, and what lies behind them.
    fn needs(&self) -> (bool, bool) {
        let all = self.gradients.list();
        let inner = self.dx.is_some() || all[..6].iter().any(|(_, gradient)| gradient.is_some());
        (inner || self.gradients.ddown_weight.is_some(), inner)
    }

    /// The backward pass, with the forward's group.
    pub(crate) fn parts<'t>(&self, parallel: Option<&Parallel<'t>>) -> Result<Parts<'t, 10>> {
        self.forward.check_differentiable(OP)?;
        let layer = self.forward.layer(OP)?;
        let mut io = Io {
            x: self.forward.x.raw(),
            gate_up: self.gate_up.as_ref().map(TensorRef::raw),
            dout: self.dout.raw(),
            dx: self.dx.as_ref().map(TensorMut::raw),
            chunks: Chunks::one(0),
        };
        let x = Arg::new(OP, "x", &io.x);
        let mut room = [0; MAX_RANK];
        Arg::new(OP, "dout", &io.dout)
            .dtype_of(x)?
            .shape(with_last(&io.x, layer.down.out_features(), &mut room))?
            .last_contiguous()?;
        if let Some(dx) = &io.dx {
            Arg::new(OP, "dx", dx)
                .dtype_of(x)?
                .shape_of(x)?
                .last_contiguous()?
                .writable()?;
        }
        if io.dx.is_none() && self.gradients.is_none() {
            let problem = text!("is absent, as are all other gradients: nothing is asked for");
            return Err(Error::invalid(OP, "dx", problem));
        }
        let mut parts = Parts::new(OP, &self.workspace).exactly();
        let rows = match parallel {
            None => None,
            Some(parallel) => {
                parallel.check(OP)?;
                let x = (io.x, self.reads_x());
                Some(Rows::new(OP, parallel, x, io.dout, io.dx, &mut parts)?)
            }
        };
        if let Some(rows) = &rows {
            (io.x, io.dout, io.dx) = (rows.x, rows.dout, rows.dx);
        }
        io.chunks = match &self.forward.parallel {
            // The gradient of the output has its shape.
            Some(forward) if !forward.sequence => forward.chunks(&io.dout),
            _ => Chunks::one(io.x.layout.num_rows()),
        };
        if let Some(kept) = &io.gate_up {
            layer.check_kept(OP, "gate_up", &io.x, kept)?;
        }
        let sum = rows.as_ref().zip(parallel);
        self.gradients
            .push(&layer, &io, self.accumulate, sum, &mut parts)?;
        Ok(parts)
    }

    /// Whether the input is read.
    fn reads_x(&self) -> bool {
        let of_weights = [0, 2, 4].map(|i| self.gradients.list()[i].1.is_some());
        let (activates, _) = self.needs();
        of_weights.contains(&true) || activates && self.gate_up.is_none()
    }
}

impl<'a> Operation for Params<'a> {
    const NAME: &'static str = OP;
    /// Seven, and where ranks divide the block what gathers its input and the gradient of its output, and
    /// what adds up that of its input.
    type Problem = Parts<'a, 10>;

    fn problem(&self) -> Result<Self::Problem> {
        self.parts(self.forward.parallel.as_ref())
    }

    fn tensors(&self, tensors: &mut Tensors) {
        let (activates, inner) = self.needs();
        let forward = &self.forward;
        let again = activates && self.gate_up.is_none();
        if again || inner {
            tensors.read("x", &forward.x);
        }
        for (weights, names) in forward.gate_up.weights() {
            if again || self.dx.is_some() {
                tensors.read(names.0, &weights.weight);
            }
            if again {
                tensors.read_optional(names.1, weights.bias.as_ref());
            }
        }
        if inner {
            tensors.read("down_weight", &forward.down.weight);
        }
        if activates {
            tensors.read_optional("gate_up", self.gate_up.as_ref());
        }
        tensors.read("dout", &self.dout);
        tensors.write_optional("dx", self.dx.as_ref());
        self.gradients.tensors(tensors);
    }

    fn workspace(&self) -> Option<&Workspace<'_>> {
        Some(&self.workspace)
    }

    fn comm(&self) -> Option<&Comm> {
        self.forward.comm()
    }
}

operation::functions!(backward);
