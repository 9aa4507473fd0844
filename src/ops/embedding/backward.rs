//! The backward pass of an embedding: each row of the table gets the sum of the output's gradients
//! where its id stands.
//!
//! Sums are f32, in the order of the ids, and rounded once; with [`Params::accumulate`] they are
//! added to what is there. The same inputs give the same bits with any number of threads.

use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::layout::MAX_RANK;
use crate::ops::check::Arg;
use crate::ops::operation::{self, Operation, Tensors};
use crate::problem::embedding::Backward;
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
}

impl Operation for Params<'_> {
    const NAME: &'static str = OP;
    type Problem = Backward;

    fn problem(&self) -> Result<Backward> {
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
        let rank = ids.layout.rank();
        let mut shape = [dweight.layout.dim(1); MAX_RANK];
        shape[..rank].copy_from_slice(ids.layout.shape());
        Arg::new(OP, "dout", &dout)
            .dtype(DType::FLOATS)?
            .shape(&shape[..=rank])?
            .last_contiguous()?;
        let vocab = dweight.layout.dim(0);
        if let Some(row) = self.padding_idx.filter(|row| *row >= vocab) {
            let problem = text!("is {row}, dweight has {vocab} rows");
            return Err(Error::invalid(OP, "padding_idx", problem));
        }
        Ok(Backward {
            dout,
            ids,
            dweight,
            padding_idx: self.padding_idx,
            accumulate: self.accumulate,
        })
    }

    fn tensors(&self, tensors: &mut Tensors) {
        tensors.read("dout", &self.dout);
        tensors.read("ids", &self.ids);
        tensors.write("dweight", &self.dweight);
    }

    fn workspace(&self) -> Option<&Workspace<'_>> {
        Some(&self.workspace)
    }
}

operation::functions!(backward);
