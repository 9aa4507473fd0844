//! The gated feed-forward block.

use super::linear::Weights;
use super::rms_norm::OfInput;
use super::swiglu::Activation;
use crate::tensor::RawTensor;

/// Validated arguments; packed weights have become their two halves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    /// `[.., hidden]`.
    pub x: RawTensor,
    /// Of `x` before it is multiplied.
    pub norm: Option<OfInput>,
    pub gate: Weights,
    pub up: Weights,
    pub activation: Activation,
    pub down: Weights,
    /// Like `out`.
    pub residual: Option<RawTensor>,
    /// `[.., hidden_out]`.
    pub out: RawTensor,
    /// Rows of `gate` and of `up`. Two intermediates of all tokens fit an address space.
    pub intermediate: usize,
}
