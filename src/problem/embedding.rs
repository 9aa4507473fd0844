//! Rows of a table, gathered by token id.

use crate::tensor::RawTensor;

/// Which rows of a vocabulary a table has: those from `begin` on. Ids are rows of the vocabulary.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slice {
    pub begin: usize,
    /// Rows of the whole.
    pub vocab: usize,
}

impl Slice {
    /// Of a table that has them all.
    pub fn whole(table: &RawTensor) -> Slice {
        Slice {
            begin: 0,
            vocab: table.layout.dim(0),
        }
    }
}

/// Validated arguments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    /// `[rows, dim]`, of which `slice` says what rows they are.
    pub table: RawTensor,
    pub slice: Slice,
    /// i32 or i64 `[..]`.
    pub ids: RawTensor,
    /// `[.., dim]`. An id of the vocabulary that is no row of the table gives negative zeros, which
    /// change nothing that they are added to.
    pub out: RawTensor,
}

/// Validated arguments of the backward pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backward {
    /// `[.., dim]`.
    pub dout: RawTensor,
    /// i32 or i64 `[..]`.
    pub ids: RawTensor,
    /// `[rows, dim]`, of which `slice` says what rows they are. Ids of other rows add to none.
    pub dweight: RawTensor,
    pub slice: Slice,
    /// A row of `dweight` whose gradient is zero.
    pub padding_idx: Option<usize>,
    /// Whether `dweight`, which is f32 then, is added to.
    pub accumulate: bool,
}
