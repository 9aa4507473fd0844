//! The gradients of LayerNorm.
//!
//! With the mean `m` of a row of length `dim`, `r = 1 / sqrt(mean((x - m)²) + epsilon)`,
//! `n = (x - m) r` and `g = dout * weight`:
//!
//! ```text
//! dx      = r (g - mean(g) - n mean(g n)) + dresidual
//! dweight = sum over rows of dout * n
//! dbias   = sum over rows of dout
//! ```
//!
//! Mean and `r` are computed again from `x`. For the rest see [`rms_norm`](mod@crate::ops::rms_norm::backward).

use crate::error::Result;
use crate::ops::norm::Arguments;
use crate::ops::operation::{self, Operation, Tensors};
use crate::problem::norm::Backward;
use crate::tensor::{InOut, TensorMut, TensorRef, Workspace};

/// Arguments of [`backward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// The forward's `x`: `[.., dim]` (f32, f16 or bf16), strided, contiguous in the last dimension.
    pub x: TensorRef<'a>,
    /// The gradient of the output, and that of `x`; both like `x`.
    pub dout: InOut<'a>,
    /// Added to `dx`: the gradient that reaches `x` by another way; like `x`.
    pub dresidual: Option<TensorRef<'a>>,
    /// The forward's gains.
    pub weight: Option<TensorRef<'a>>,
    /// The forward's.
    pub epsilon: f32,
    /// The gradient of the weight: `[dim]`, any float dtype. `None` where the weight is frozen.
    pub dweight: Option<TensorMut<'a>>,
    /// The gradient of the bias, as `dweight`.
    pub dbias: Option<TensorMut<'a>>,
    /// Adds to what `dweight` and `dbias` hold, which must be f32 then.
    pub accumulate: bool,
    /// [`workspace_size`] bytes; nothing without `dweight` and `dbias`.
    pub workspace: Workspace<'a>,
}

impl Params<'_> {
    fn arguments(&self) -> Arguments<'_, '_> {
        Arguments {
            op: Self::NAME,
            centered: true,
            x: &self.x,
            dout: &self.dout,
            dresidual: self.dresidual.as_ref(),
            weight: self.weight.as_ref(),
            weight_offset: 0.0,
            epsilon: self.epsilon,
            dweight: self.dweight.as_ref(),
            dbias: self.dbias.as_ref(),
            accumulate: self.accumulate,
        }
    }
}

impl Operation for Params<'_> {
    const NAME: &'static str = "layer_norm_backward";
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
