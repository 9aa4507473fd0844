//! Adding one tensor to another: of gradients that are computed in pieces.

use crate::tensor::RawTensor;

/// Validated arguments: two tensors of one shape, f32, f16 or bf16, contiguous in the last dimension. `out` is f32
/// or of the dtype of `x`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    /// What is added.
    pub x: RawTensor,
    /// To what: each sum is rounded once.
    pub out: RawTensor,
}
