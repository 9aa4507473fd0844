//! Embedding: rows of a table, gathered by token id.

pub mod backward;

use crate::dtype::DType;
use crate::error::Result;
use crate::layout::MAX_RANK;
use crate::ops::check::Arg;
use crate::ops::operation::{self, Operation, Tensors};
use crate::problem::embedding::Problem;
use crate::tensor::{TensorMut, TensorRef};

pub use backward::backward;

const OP: &str = "embedding";

/// Arguments of [`forward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// `[vocab, dim]`, f32, f16 or bf16, or one of [`DType::BLOCKS`], which are decoded to f32; rows strided, contiguous in the last dimension. Rows of blocks are whole blocks and
    /// begin at multiples of them, at any address.
    pub table: TensorRef<'a>,
    /// i32 or i64 of any shape `[..]`, any strides. Each must be a row of the table; on a device, where the host cannot look, the
    /// output of an id outside becomes a row of NaN.
    pub ids: TensorRef<'a>,
    /// `[.., dim]`: the shape of `ids`, then the table's rows; f32, f16 or bf16, rows strided. In another dtype than the table
    /// each element is converted, rounding to nearest even.
    pub out: TensorMut<'a>,
}

impl Operation for Params<'_> {
    const NAME: &'static str = OP;
    type Problem = Problem;

    fn problem(&self) -> Result<Problem> {
        let (table, ids, out) = (self.table.raw(), self.ids.raw(), self.out.raw());
        Arg::new(OP, "table", &table)
            .rank(&[2])?
            .dtype(DType::WEIGHTS)?
            .rows_in_blocks()?;
        Arg::new(OP, "ids", &ids)
            .rank(&[1, 2, 3, 4, MAX_RANK - 1])?
            .dtype(&[DType::I32, DType::I64])?;
        let rank = ids.layout.rank();
        let mut shape = [table.layout.dim(1); MAX_RANK];
        shape[..rank].copy_from_slice(ids.layout.shape());
        Arg::new(OP, "out", &out)
            .dtype(DType::FLOATS)?
            .shape(&shape[..=rank])?
            .last_contiguous()?
            .writable()?;
        Ok(Problem { table, ids, out })
    }

    fn tensors(&self, tensors: &mut Tensors) {
        tensors.read("table", &self.table);
        tensors.read("ids", &self.ids);
        tensors.write("out", &self.out);
    }
}

operation::functions!();
