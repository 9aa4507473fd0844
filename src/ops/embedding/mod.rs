//! Embedding: rows of a table, gathered by token id.
//!
//! Where ranks divide the table's rows ([`Params::vocabulary`]), one of them has a token's row and gives
//! it to all: the output has the bits of a table that is whole.

pub mod backward;

use crate::comm::Comm;
use crate::dtype::DType;
use crate::error::Result;
use crate::layout::{Layout, MAX_RANK};
use crate::ops::check::Arg;
use crate::ops::operation::{self, Operation, Tensors};
use crate::ops::parallel::{OF_OUT, Vocabulary, take};
use crate::ops::parts::{OneOr, Parts};
use crate::problem::embedding::{Problem, Slice};
use crate::tensor::{RawTensor, TensorMut, TensorRef, Workspace};

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
    /// The group that the table's rows are divided among, of which `table` has this rank's. Ids are those
    /// of the vocabulary, the same on all ranks, and `out`, contiguous, is whole on all; sequence parallel,
    /// its first dimension has this rank's rows.
    pub vocabulary: Option<Vocabulary<'a>>,
    /// Sequence parallel, [`workspace_size`] bytes; otherwise none is needed.
    pub workspace: Workspace<'a>,
}

/// The shape of `ids`, then `dim`.
fn of_ids(ids: &RawTensor, dim: usize) -> ([usize; MAX_RANK], usize) {
    let mut shape = [dim; MAX_RANK];
    let rank = ids.layout.rank();
    shape[..rank].copy_from_slice(ids.layout.shape());
    (shape, rank + 1)
}

impl<'a> Operation for Params<'a> {
    const NAME: &'static str = OP;
    /// Where ranks divide the table: the gathering of rows, before what adds them up.
    type Problem = OneOr<'a, Problem, 1>;

    fn problem(&self) -> Result<Self::Problem> {
        let (table, ids, out) = (self.table.raw(), self.ids.raw(), self.out.raw());
        Arg::new(OP, "table", &table)
            .rank(&[2])?
            .dtype(DType::WEIGHTS)?
            .rows_in_blocks()?;
        Arg::new(OP, "ids", &ids)
            .rank(&[1, 2, 3, 4, MAX_RANK - 1])?
            .dtype(&[DType::I32, DType::I64])?;
        let (shape, rank) = of_ids(&ids, table.layout.dim(1));
        let shape = &shape[..rank];
        let arg = Arg::new(OP, "out", &out).dtype(DType::FLOATS)?;
        let problem = |slice, out| Problem {
            table,
            slice,
            ids,
            out,
        };
        let Some(vocabulary) = &self.vocabulary else {
            arg.shape(shape)?.last_contiguous()?.writable()?;
            return Ok(OneOr::One(problem(Slice::whole(&table), out)));
        };
        vocabulary.check(OP, ("table", table.layout.dim(0)))?;
        let (parallel, slice) = (&vocabulary.parallel, vocabulary.slice());
        let mut parts = Parts::new(OP, &self.workspace).exactly();
        if !parallel.sequence {
            arg.shape(shape)?.contiguous()?;
            parts.push(Ok(problem(slice, out)), &[])?;
            parallel.push_sum(OP, OF_OUT, out, &mut parts)?;
            return Ok(OneOr::Parts(parts));
        }
        let layout = Layout::contiguous(shape)?;
        vocabulary.check_own(OP, ("out", &out), ("ids", &ids), &layout)?;
        let whole = take(&out, layout, &mut parts)?;
        parts.push(Ok(problem(slice, whole)), &[])?;
        parallel.push_scatter(OP, ("ids", OF_OUT), [whole, out], &mut parts)?;
        Ok(OneOr::Parts(parts))
    }

    fn tensors(&self, tensors: &mut Tensors) {
        tensors.read("table", &self.table);
        tensors.read("ids", &self.ids);
        tensors.write("out", &self.out);
    }

    fn workspace(&self) -> Option<&Workspace<'_>> {
        Some(&self.workspace)
    }

    fn comm(&self) -> Option<&Comm> {
        self.vocabulary.as_ref().map(|of| of.parallel.comm)
    }
}

operation::functions!();
