//! Conversion between float dtypes.

use crate::tensor::RawTensor;

/// Validated arguments: two tensors of one shape.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    pub x: RawTensor,
    pub out: RawTensor,
}
