//! The index of the greatest element of each row, such as a greedily sampled token.
//!
//! Of equal elements the first counts, and zeros are equal whatever their signs. NaN counts as greater than everything, so that a
//! row with NaN gives the index of the first, as in NumPy and PyTorch.

use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::ops::check::Arg;
use crate::ops::operation::{self, Operation, Tensors};
use crate::problem::argmax::Problem;
use crate::tensor::{TensorMut, TensorRef};

const OP: &str = "argmax";

/// Arguments of [`forward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// `[.., n]`, f32, f16 or bf16, with `n` at least 1; rows strided, contiguous in the last dimension.
    pub x: TensorRef<'a>,
    /// i32 or i64: the leading dimensions of `x`, or `[1]` if it has none; any strides.
    pub out: TensorMut<'a>,
}

impl Operation for Params<'_> {
    const NAME: &'static str = OP;
    type Problem = Problem;

    fn problem(&self) -> Result<Problem> {
        let (x, out) = (self.x.raw(), self.out.raw());
        Arg::new(OP, "x", &x)
            .min_rank(1)?
            .dtype(DType::FLOATS)?
            .last_contiguous()?;
        let (columns, leading) = match x.layout.shape() {
            [columns] => (*columns, &[1][..]),
            [leading @ .., columns] => (*columns, leading),
            [] => (0, &[][..]),
        };
        Arg::new(OP, "out", &out)
            .dtype(&[DType::I32, DType::I64])?
            .shape(leading)?
            .writable()?;
        // Indices fit the i32 that they may be written as.
        if columns == 0 || columns > i32::MAX as usize {
            let problem = text!("has {columns} columns, allowed: 1 to {}", i32::MAX);
            return Err(Error::invalid(OP, "x", problem));
        }
        Ok(Problem { x, out })
    }

    fn tensors(&self, tensors: &mut Tensors) {
        tensors.read("x", &self.x);
        tensors.write("out", &self.out);
    }
}

operation::functions!();
