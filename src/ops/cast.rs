//! Conversion between float dtypes.
//!
//! A number is rounded once, to the nearest of the output's dtype, ties to even; what is too great becomes an infinity, and NaN stays
//! NaN. In the dtype of the input it is a copy, bit for bit.
//!
//! It has no backward pass of its own: the gradient of the input is the gradient of the output, cast to the input's dtype, where
//! rounding counts as no change (the straight-through estimator).

use crate::dtype::DType;
use crate::error::Result;
use crate::ops::check::Arg;
use crate::ops::operation::{self, Operation, Tensors};
use crate::problem::cast::Problem;
use crate::tensor::{TensorMut, TensorRef};

const OP: &str = "cast";

/// Arguments of [`forward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// `[.., dim]`, f32, f16 or bf16; rows strided, contiguous in the last dimension.
    pub x: TensorRef<'a>,
    /// The shape of `x`, f32, f16 or bf16; rows strided, contiguous in the last dimension.
    pub out: TensorMut<'a>,
}

impl Operation for Params<'_> {
    const NAME: &'static str = OP;
    type Problem = Problem;

    fn problem(&self) -> Result<Problem> {
        let (x, out) = (self.x.raw(), self.out.raw());
        let arg = Arg::new(OP, "x", &x)
            .min_rank(1)?
            .dtype(DType::FLOATS)?
            .last_contiguous()?;
        Arg::new(OP, "out", &out)
            .dtype(DType::FLOATS)?
            .shape_of(arg)?
            .last_contiguous()?
            .writable()?;
        Ok(Problem { x, out })
    }

    fn tensors(&self, tensors: &mut Tensors) {
        tensors.read("x", &self.x);
        tensors.write("out", &self.out);
    }
}

operation::functions!();
