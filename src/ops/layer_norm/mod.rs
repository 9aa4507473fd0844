//! LayerNorm (Ba, Kiros and Hinton 2016, arXiv:1607.06450).
//!
//! For every row `x` of length `dim` (the last dimension), with its mean `m`:
//!
//! ```text
//! y = (x - m) / sqrt(mean((x - m)²) + epsilon) * weight + bias
//! ```
//!
//! Arithmetic is f32; the mean is subtracted before the square is taken, so rows far from zero keep
//! their digits.

pub mod backward;

pub use backward::backward;

use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::ops::check::{self, Arg};
use crate::ops::operation::{self, Operation, Tensors};
use crate::problem::layer_norm::Problem;
use crate::tensor::{InOut, TensorRef};

const OP: &str = "layer_norm";

/// Arguments of [`forward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// `x` `[.., dim]` and the output of the same shape and dtype (f32, f16 or bf16); strided,
    /// contiguous in the last dimension.
    pub x: InOut<'a>,
    /// Gains `[dim]`, any float dtype; `None` for all ones.
    pub weight: Option<TensorRef<'a>>,
    /// Added to the result: `[dim]`, any float dtype; `None` for zeros.
    pub bias: Option<TensorRef<'a>>,
    /// Added to the variance; above zero.
    pub epsilon: f32,
}

impl Operation for Params<'_> {
    const NAME: &'static str = OP;
    type Problem = Problem;

    fn problem(&self) -> Result<Problem> {
        let x = self.x.input();
        Arg::new(OP, "x", &x).min_rank(1)?.dtype(DType::FLOATS)?;
        check::in_out(OP, ("x", "out"), &self.x)?;
        let dim = x.layout.dim(x.layout.rank() - 1);
        let vector = |name, tensor: &Option<TensorRef<'_>>| match tensor {
            None => Ok(None),
            Some(tensor) => {
                let raw = tensor.raw();
                Arg::new(OP, name, &raw)
                    .dtype(DType::FLOATS)?
                    .shape(&[dim])?
                    .last_contiguous()?;
                Ok(Some(raw))
            }
        };
        if check::finite(OP, "epsilon", self.epsilon)? <= 0.0 {
            let problem = text!("is {}, a number above 0 is needed", self.epsilon);
            return Err(Error::invalid(OP, "epsilon", problem));
        }
        Ok(Problem {
            x,
            out: self.x.output(),
            weight: vector("weight", &self.weight)?,
            bias: vector("bias", &self.bias)?,
            epsilon: self.epsilon,
        })
    }

    fn tensors(&self, tensors: &mut Tensors) {
        tensors.in_out(("x", "out"), &self.x);
        tensors.read_optional("weight", self.weight.as_ref());
        tensors.read_optional("bias", self.bias.as_ref());
    }
}

operation::functions!();
