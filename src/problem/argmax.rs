//! The index of the greatest element of each row.

use crate::tensor::RawTensor;

/// Validated arguments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    /// `[.., n]`, `n` from 1 to `i32::MAX`.
    pub x: RawTensor,
    /// i32 or i64: the leading dimensions of `x`, or `[1]`.
    pub out: RawTensor,
}
