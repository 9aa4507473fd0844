//! Rows of a table, gathered by token id.

use crate::tensor::RawTensor;

/// Validated arguments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    /// `[vocab, dim]`.
    pub table: RawTensor,
    /// i32 or i64 `[..]`.
    pub ids: RawTensor,
    /// `[.., dim]`.
    pub out: RawTensor,
}

/// Validated arguments of the backward pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backward {
    /// `[.., dim]`.
    pub dout: RawTensor,
    /// i32 or i64 `[..]`.
    pub ids: RawTensor,
    /// `[vocab, dim]`.
    pub dweight: RawTensor,
    /// A row whose gradient is zero.
    pub padding_idx: Option<usize>,
    /// Whether `dweight`, which is f32 then, is added to.
    pub accumulate: bool,
}
