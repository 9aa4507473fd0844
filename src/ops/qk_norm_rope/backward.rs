//! The gradients of QK-norm and RoPE.
//!
//! With `r = 1 / sqrt(mean(x²) + epsilon)`, `n = x r`, the gradient of the output rotated back,
//! `g = Rᵀ dout`, and `h = g * (weight + weight_offset)`, for every head:
//!
//! ```text
//! dx      = r (h - n mean(h n))
//! dweight = sum over tokens and heads of g * n
//! ```
//!
//! `r` is computed again from `x`, which costs no memory traffic: heads are read anyway. All
//! arithmetic is f32. Sums over tokens are cut by the shape and the device alone and added in one
//! order, so the same inputs give the same bits.

use super::{Gains, NAMES};
use crate::error::{Error, Result, text};
use crate::ops::check::{self, Arg};
use crate::ops::operation::{self, Operation, Tensors};
use crate::ops::rope::tokens;
use crate::ops::rope::{Positions, Rotation};
use crate::problem::qk_norm_rope::{Backward, Heads};
use crate::tensor::{InOut, TensorMut, TensorRef, Workspace};

const OP: &str = "qk_norm_rope_backward";

/// Arguments of [`backward`]. At least one of `q` and `k` is there, each with the gradient of its
/// output.
#[derive(Debug)]
pub struct Params<'a> {
    /// The forward's queries, before they were normalised: `[batch, seq, heads, head_dim]` or
    /// `[tokens, heads, head_dim]`, f32, f16 or bf16; strided, contiguous in the last dimension.
    pub q: Option<TensorRef<'a>>,
    /// The gradient of what the forward made of the queries, and that of the queries; both like `q`.
    pub dq_out: Option<InOut<'a>>,
    /// The forward's keys: like `q`, with any number of heads.
    pub k: Option<TensorRef<'a>>,
    /// The gradient of what the forward made of the keys, and that of the keys; both like `k`.
    pub dk_out: Option<InOut<'a>>,
    /// The forward's.
    pub q_weight: Option<TensorRef<'a>>,
    /// The forward's.
    pub k_weight: Option<TensorRef<'a>>,
    /// The forward's.
    pub weight_offset: f32,
    /// The forward's.
    pub epsilon: f32,
    /// The forward's.
    pub positions: Positions<'a>,
    /// The forward's.
    pub rotation: Rotation<'a>,
    /// The gradient of `q_weight`: `[head_dim]`, any float dtype. `None` where it is frozen.
    pub dq_weight: Option<TensorMut<'a>>,
    /// The gradient of `k_weight`; like `dq_weight`.
    pub dk_weight: Option<TensorMut<'a>>,
    /// Adds to what those hold, which must be f32 then.
    pub accumulate: bool,
    /// [`workspace_size`] bytes; nothing without `dq_weight` and `dk_weight`.
    pub workspace: Workspace<'a>,
}

const GRADIENTS: [tokens::Names; 2] = [("dq_out", "dq"), ("dk_out", "dk")];
const DWEIGHTS: [&str; 2] = ["dq_weight", "dk_weight"];

impl<'a> Params<'a> {
    fn gains(&self) -> Gains<'_, 'a> {
        Gains {
            op: OP,
            weights: [self.q_weight.as_ref(), self.k_weight.as_ref()],
            weight_offset: self.weight_offset,
            epsilon: self.epsilon,
        }
    }

    fn inputs(&self) -> [Option<&TensorRef<'a>>; 2] {
        [self.q.as_ref(), self.k.as_ref()]
    }

    fn gradients(&self) -> [Option<&InOut<'a>>; 2] {
        [self.dq_out.as_ref(), self.dk_out.as_ref()]
    }

    fn dweights(&self) -> [Option<&TensorMut<'a>>; 2] {
        [self.dq_weight.as_ref(), self.dk_weight.as_ref()]
    }
}

impl Operation for Params<'_> {
    const NAME: &'static str = OP;
    type Problem = Backward;

    fn problem(&self) -> Result<Backward> {
        let both = self.inputs().into_iter().zip(self.gradients());
        for (tensors, ((input, _), (gradient, _))) in both.zip(NAMES.into_iter().zip(GRADIENTS)) {
            match tensors {
                (Some(_), None) => {
                    let problem = text!("is absent, {input} is there");
                    return Err(Error::invalid(OP, gradient, problem));
                }
                (None, Some(_)) => {
                    let problem = text!("is there, without {input} it has no use");
                    return Err(Error::invalid(OP, gradient, problem));
                }
                _ => {}
            }
        }
        let (pairs, first) = tokens::pairs(OP, GRADIENTS, self.gradients())?;
        let mut heads = [None; 2];
        for (i, heads) in heads.iter_mut().enumerate() {
            let (Some(x), Some((dout, dx))) = (self.inputs()[i], pairs[i]) else {
                continue;
            };
            let x = x.raw();
            let dout_arg = Arg::new(OP, GRADIENTS[i].0, &dout);
            Arg::new(OP, NAMES[i].0, &x)
                .dtype_of(dout_arg)?
                .shape_of(dout_arg)?
                .last_contiguous()?;
            *heads = Some(Heads { x, dout, dx });
        }
        let there = heads.each_ref().map(Option::is_some);
        let norms = self.gains().problem(there, &first)?;
        let rotation = self.rotation.problem(OP, first.head_dim())?;
        let positions = self.positions.problem(OP, &first, &rotation)?;
        let mut dweights = [None; 2];
        for (i, dweight) in dweights.iter_mut().enumerate() {
            let gradient = (DWEIGHTS[i], self.dweights()[i]);
            let weight = norms.weights[i].as_ref();
            *dweight = check::gradient_like(OP, gradient, weight, self.accumulate)?;
        }
        Ok(Backward {
            heads,
            norms,
            positions,
            rotation,
            dweights,
            accumulate: self.accumulate,
        })
    }

    fn tensors(&self, tensors: &mut Tensors) {
        for ((name, _), input) in NAMES.into_iter().zip(self.inputs()) {
            tensors.read_optional(name, input);
        }
        self.gains().tensors(tensors);
        self.rotation.tensors(tensors);
        self.positions.tensors(tensors);
        for (names, pair) in GRADIENTS.into_iter().zip(self.gradients()) {
            if let Some(pair) = pair {
                tensors.in_out(names, pair);
            }
        }
        for (name, dweight) in DWEIGHTS.into_iter().zip(self.dweights()) {
            tensors.write_optional(name, dweight);
        }
    }

    fn workspace(&self) -> Option<&Workspace<'_>> {
        Some(&self.workspace)
    }
}

operation::functions!(backward);
