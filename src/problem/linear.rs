//! Linear layers.

use super::rms_norm::OfInput;
use crate::tensor::{Activations, RawTensor, Scales};

/// Validated arguments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    /// `[.., in_features]`.
    pub x: RawTensor,
    /// Of `x` before it is multiplied.
    pub norm: Option<OfInput>,
    pub weights: Weights,
    /// Like `out`.
    pub residual: Option<RawTensor>,
    /// `[.., out_features]`.
    pub out: RawTensor,
}

/// A layer's matrix and bias.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weights {
    /// `[out_features, in_features]`; floats, in blocks, or codes.
    pub weight: RawTensor,
    /// Of codes; none are ones. Their number divides that of the rows.
    pub scales: Option<Scales>,
    /// To how few bits what blocks are multiplied by may be rounded.
    pub activations: Activations,
    /// Whether nothing in flight writes the matrix or its scales, so that they may be read ahead.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "a GPU reads ahead"))]
    pub constant: bool,
    /// `[out_features]`.
    pub bias: Option<RawTensor>,
}

impl Weights {
    /// Whether blocks are multiplied by activations as they are.
    pub fn float_activations(&self) -> bool {
        self.activations == Activations::Float
    }

    /// Rows of the matrix.
    pub fn out_features(&self) -> usize {
        self.weight.layout.dim(0)
    }
}

/// Validated arguments of the backward pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backward {
    /// `[.., out_features]`.
    pub dout: RawTensor,
    /// By the weight `[out_features, in_features]`: `[.., in_features]`.
    pub dx: Option<Gradient>,
    /// Whether `dx` is added to what is there, as where several layers share their input.
    pub add_dx: bool,
    /// By the input `[.., in_features]`: `[out_features, in_features]`.
    pub dweight: Option<Gradient>,
    /// `[out_features]`.
    pub dbias: Option<RawTensor>,
    /// Whether `dweight` and `dbias`, which are f32 then, are added to.
    pub accumulate: bool,
}

/// A gradient, and what multiplies that of the output for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gradient {
    pub by: RawTensor,
    pub out: RawTensor,
}
