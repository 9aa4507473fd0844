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
