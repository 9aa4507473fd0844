//! The gradients of RMSNorm.
//!
//! With `r = 1 / sqrt(mean(x²) + epsilon)`, `n = x r` and `g = dout * (weight + weight_offset)`, for
//! every row of length `dim`:
//!
//! ```text
//! dx      = r (g - n mean(g n)) + dresidual
//! dweight = sum over rows of dout * n
//! ```
//!
//! `r` is computed again from `x`, which costs no memory traffic: rows are read anyway. All
//! arithmetic is f32. Sums over rows are cut by the shape and the device alone and added in one
//! order, so the same inputs give the same bits.

use crate::error::Result;
use crate::ops::norm::Arguments;
use crate::ops::operation::{self, Operation, Tensors};
use crate::problem::norm::Backward;
use crate::tensor::{InOut, TensorMut, TensorRef, Workspace};

/// Arguments of [`backward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// What was normalised, `[.., dim]` (f32, f16 or bf16): the forward's `x`, or its sum with the
    /// residual where there was one. Strided, contiguous in the last dimension.
    pub x: TensorRef<'a>,
    /// The gradient of the output, and that of `x`; both like `x`.
    pub dout: InOut<'a>,
    /// The gradient that reaches the sum of `x` and the residual by another way; added to `dx`, and
    /// like `x`.
    pub dresidual: Option<TensorRef<'a>>,
    /// The forward's gains.
    pub weight: Option<TensorRef<'a>>,
    /// The forward's.
    pub weight_offset: f32,
    /// The forward's.
    pub epsilon: f32,
    /// The gradient of the weight: `[dim]`, any float dtype. `None` where the weight is frozen.
    pub dweight: Option<TensorMut<'a>>,
    /// Adds to what `dweight` holds, which must be f32 then.
    pub accumulate: bool,
    /// [`workspace_size`] bytes; nothing without `dweight`.
    pub workspace: Workspace<'a>,
}

impl Params<'_> {
    fn arguments(&self) -> Arguments<'_, '_> {
        Arguments {
            op: Self::NAME,
            centered: false,
            x: &self.x,
            dout: &self.dout,
            dresidual: self.dresidual.as_ref(),
            weight: self.weight.as_ref(),
            weight_offset: self.weight_offset,
            epsilon: self.epsilon,
            dweight: self.dweight.as_ref(),
            dbias: None,
            accumulate: self.accumulate,
        }
    }
}

impl Operation for Params<'_> {
    const NAME: &'static str = "rms_norm_backward";
    type Problem = Backward;

    fn problem(&self) -> Result<Backward> {
        self.arguments().problem()
    }

    fn tensors(&self, tensors: &mut Tensors) {
        self.arguments().tensors(tensors);
    }

    fn workspace(&self) -> Option<&Workspace<'_>> {
        Some(&self.workspace)
    }
}

operation::functions!(backward);
