//! LayerNorm.

use crate::tensor::RawTensor;

/// Validated arguments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    /// `[.., dim]`.
    pub x: RawTensor,
    /// Like `x`, or `x`.
    pub out: RawTensor,
    /// `[dim]`.
    pub weight: Option<RawTensor>,
    /// `[dim]`.
    pub bias: Option<RawTensor>,
    pub epsilon: f32,
}
