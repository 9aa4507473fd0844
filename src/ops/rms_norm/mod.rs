//! RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), with an optional fused residual addition.
//!
//! For every row `s` of length `dim` (the last dimension):
//!
//! ```text
//! s = x + residual                                     (s = x without a residual)
//! y = s / sqrt(mean(s²) + epsilon) * (weight + weight_offset)
//! ```
//!
//! Rows are independent, so the same call normalises hidden states `[tokens, hidden]` and, for QK-norm, heads
//! `[batch, seq, heads, head_dim]`. All arithmetic is f32; the normalisation uses the f32 sum, not its rounded copy.

pub mod backward;

pub use backward::backward;

use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::ops::check::{self, Arg};
use crate::ops::operation::{self, Operation, Tensors};
use crate::problem::rms_norm::{OfInput, Problem};
use crate::tensor::{InOut, RawTensor, TensorRef};

const OP: &str = "rms_norm";

/// Arguments of [`forward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// `x` `[.., dim]` and the output of the same shape and dtype (f32, f16 or bf16); strided, contiguous in the last dimension.
    pub x: InOut<'a>,
    /// The residual and its updated sum `x + residual`, both like `x`; `None` for plain normalisation.
    pub residual: Option<InOut<'a>>,
    /// Gains `[dim]`, any float dtype; `None` for all ones.
    pub weight: Option<TensorRef<'a>>,
    /// Added to every gain: 0 for Llama, 1 for Gemma, whose stored gains are centred on zero. 0
    /// without a weight.
    pub weight_offset: f32,
    /// Added to the mean square; above 0.
    pub epsilon: f32,
}

impl Operation for Params<'_> {
    const NAME: &'static str = OP;
    type Problem = Problem;

    fn problem(&self) -> Result<Problem> {
        let x = self.x.input();
        let arg = Arg::new(OP, "x", &x).min_rank(1)?.dtype(DType::FLOATS)?;
        check::in_out(OP, ("x", "out"), &self.x)?;
        let residual = match &self.residual {
            None => None,
            Some(pair) => {
                let (input, output) = (pair.input(), pair.output());
                Arg::new(OP, "residual", &input)
                    .dtype_of(arg)?
                    .shape_of(arg)?;
                check::in_out(OP, ("residual", "residual_out"), pair)?;
                Some((input, output))
            }
        };
        let weight = self.weight.as_ref().map(TensorRef::raw);
        check_gains(OP, &x, weight.as_ref(), self.weight_offset, self.epsilon)?;
        Ok(Problem {
            x,
            out: self.x.output(),
            residual,
            weight,
            weight_offset: self.weight_offset,
            epsilon: self.epsilon,
        })
    }

    fn tensors(&self, tensors: &mut Tensors) {
        tensors.in_out(("x", "out"), &self.x);
        tensors.read_optional("weight", self.weight.as_ref());
        if let Some(pair) = &self.residual {
            tensors.in_out(("residual", "residual_out"), pair);
        }
    }
}

/// An RMSNorm of the input of another operation, which passes it on its way there: rounded to the input's dtype, as this operation would
/// store it.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// Gains `[dim]`, any float dtype.
    pub weight: TensorRef<'a>,
    /// Added to every gain.
    pub weight_offset: f32,
    /// Added to the mean square; above 0.
    pub epsilon: f32,
}

impl Norm<'_> {
    /// Validates for an input of an operation that calls gains, offset and epsilon so.
    pub(crate) fn problem(
        &self,
        op: &'static str,
        names: [&'static str; 3],
        x: &RawTensor,
    ) -> Result<OfInput> {
        let weight = self.weight.raw();
        Arg::new(op, names[0], &weight)
            .dtype(DType::FLOATS)?
            .shape(&[x.layout.dim(x.layout.rank() - 1)])?
            .last_contiguous()?;
        check::finite(op, names[1], self.weight_offset)?;
        check_epsilon(op, names[2], self.epsilon)?;
        Ok(OfInput {
            weight,
            constant: self.weight.is_constant(),
            weight_offset: self.weight_offset,
            epsilon: self.epsilon,
        })
    }
}

/// Checks what rows like those of `x` are normalised with.
pub(crate) fn check_gains(
    op: &'static str,
    x: &RawTensor,
    weight: Option<&RawTensor>,
    weight_offset: f32,
    epsilon: f32,
) -> Result<()> {
    if let Some(weight) = weight {
        Arg::new(op, "weight", weight)
            .dtype(DType::FLOATS)?
            .shape(&[x.layout.dim(x.layout.rank() - 1)])?
            .last_contiguous()?;
    }
    check::finite(op, "weight_offset", weight_offset)?;
    if weight.is_none() && weight_offset != 0.0 {
        let problem = text!("is {weight_offset}, without a weight it must be 0");
        return Err(Error::invalid(op, "weight_offset", problem));
    }
    check_epsilon(op, "epsilon", epsilon)
}

/// Zero is what a caller has who forgot it, and makes NaN of a row of zeros.
fn check_epsilon(op: &'static str, name: &'static str, epsilon: f32) -> Result<()> {
    if check::finite(op, name, epsilon)? <= 0.0 {
        let problem = text!("is {epsilon}, it must be above 0");
        return Err(Error::invalid(op, name, problem));
    }
    Ok(())
}

operation::functions!();
