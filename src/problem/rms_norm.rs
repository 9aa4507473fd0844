//! RMSNorm.

use crate::tensor::RawTensor;

/// Validated arguments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    /// `[.., dim]`.
    pub x: RawTensor,
    /// Like `x`, or `x`.
    pub out: RawTensor,
    /// The residual and its updated sum, like `x`.
    pub residual: Option<(RawTensor, RawTensor)>,
    /// `[dim]`.
    pub weight: Option<RawTensor>,
    pub weight_offset: f32,
    pub epsilon: f32,
}
