//! Linear layers.

use crate::tensor::RawTensor;

/// Validated arguments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    /// `[.., in_features]`.
    pub x: RawTensor,
    pub weights: Weights,
    /// Like `out`.
    pub residual: Option<RawTensor>,
    /// `[.., out_features]`.
    pub out: RawTensor,
}

/// A layer's matrix and bias.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weights {
    /// `[out_features, in_features]`.
    pub weight: RawTensor,
    /// `[out_features]`.
    pub bias: Option<RawTensor>,
}

impl Weights {
    /// Rows of the matrix.
    pub fn out_features(&self) -> usize {
        self.weight.layout.dim(0)
    }
}
