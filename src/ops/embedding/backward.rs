//! The backward pass of an embedding: each row of the table gets the sum of the output's gradients
//! where its id stands.
//!
//! Sums are f32, in the order of the ids, and rounded once; with [`Params::accumulate`] they are
//! added to what is there. The same inputs give the same bits with any number of threads, and where
//! ranks divide the table's rows the bits of a gradient that is whole.

use super::of_ids;
use crate::comm::Comm;
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::layout::{Layout, MAX_RANK};
use crate::ops::check::Arg;
use crate::ops::operation::{self, Operation, Tensors};
use crate::ops::parallel::{OF_DOUT, Vocabulary};
use crate::ops::parts::{OneOr, Parts};
use crate::problem::embedding::{Backward, Slice};
use crate::tensor::{TensorMut, TensorRef, Workspace};

const OP: &str = "embedding_backward";

/// Arguments of [`backward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// `[.., dim]`: the gradient of the output, the shape of `ids`, then the table's rows; f32, f16
    /// or bf16, rows strided, contiguous in the last dimension.
    pub dout: TensorRef<'a>,
    /// i32 or i64 of any shape `[..]`, any strides. Each must be a row of the table; on a device,
    /// where the host cannot look, an id outside adds to no row.
    pub ids: TensorRef<'a>,
    /// `[vocab, dim]`, the gradient of the table: its dtype or f32 (any float dtype is taken); rows
    /// strided. All of it is written unless it is added to.
    pub dweight: TensorMut<'a>,
    /// A row whose gradient is zero, whatever was looked up there.
    pub padding_idx: Option<usize>,
    /// Adds to what `dweight` holds, which must be f32 then. Rows that no id names stay as they
    /// are.
    pub accumulate: bool,
    /// What a call needs is refused below [`workspace_size`].
    pub workspace: Workspace<'a>,
    /// The group that the table's rows are divided among, of which `dweight` has this rank's.
    /// `padding_idx` and `ids`, the same on all ranks, are those of the vocabulary, and `dout` is whole on
    /// all, which then exchange nothing; sequence parallel, its first dimension has this rank's rows.
    pub vocabulary: Option<Vocabulary<'a>>,
}

impl<'a> Operation for Params<'a> {
    const NAME: &'static str = OP;
    /// Sequence parallel: the sums, behind what gathers.
    type Problem = OneOr<'a, Backward, 1>;

    fn problem(&self) -> Result<Self::Problem> {
        let (dout, ids, dweight) = (self.dout.raw(), self.ids.raw(), self.dweight.raw());
        let allowed = match self.accumulate {
            true => &[DType::F32],
            false => DType::FLOATS,
        };
        Arg::new(OP, "dweight", &dweight)
            .rank(&[2])?
            .dtype(allowed)?
            .last_contiguous()?
            .writable()?;
        Arg::new(OP, "ids", &ids)
            .rank(&[1, 2, 3, 4, MAX_RANK - 1])?
            .dtype(&[DType::I32, DType::I64])?;
        let (shape, rank) = of_ids(&ids, dweight.layout.dim(1));
        let shape = &shape[..rank];
        let arg = Arg::new(OP, "dout", &dout).dtype(DType::FLOATS)?;
        let rows = dweight.layout.dim(0);
        let mut slice = Slice::whole(&dweight);
        if let Some(vocabulary) = &self.vocabulary {
            vocabulary.check(OP, ("dweight", rows))?;
            slice = vocabulary.slice();
        }
        if let Some(row) = self.padding_idx.filter(|row| *row >= slice.vocab) {
            let problem = match &self.vocabulary {
                None => text!("is {row}, dweight has {rows} rows"),
                Some(_) => text!("is {row}, the vocabulary has {} rows", slice.vocab),
            };
            return Err(Error::invalid(OP, "padding_idx", problem));
        }
        let of_table = |row: usize| row.checked_sub(slice.begin).filter(|row| *row < rows);
        let problem = |dout| Backward {
            dout,
            ids,
            dweight,
            slice,
            padding_idx: self.padding_idx.and_then(of_table),
            accumulate: self.accumulate,
        };
        match &self.vocabulary {
            Some(vocabulary) if vocabulary.parallel.sequence => {
                let layout = Layout::contiguous(shape)?;
                vocabulary.check_own(OP, ("dout", &dout), ("ids", &ids), &layout)?;
                let mut parts = Parts::new(OP, &self.workspace).exactly();
                let parallel = &vocabulary.parallel;
                let whole = parallel.push_gather(OP, ("dout", OF_DOUT), dout, &mut parts)?;
                parts.push(Ok(problem(whole)), &[])?;
                Ok(OneOr::Parts(parts))
            }
            _ => {
                arg.shape(shape)?.last_contiguous()?;
                Ok(OneOr::One(problem(dout)))
            }
        }
    }

    fn tensors(&self, tensors: &mut Tensors) {
        tensors.read("dout", &self.dout);
        tensors.read("ids", &self.ids);
        tensors.write("dweight", &self.dweight);
    }

    fn workspace(&self) -> Option<&Workspace<'_>> {
        Some(&self.workspace)
    }

    fn comm(&self) -> Option<&Comm> {
        self.vocabulary.as_ref().map(|of| of.parallel.comm)
    }
}

operation::functions!(backward);
