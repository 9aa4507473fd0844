//! Vocabularies whose rows ranks divide.

use super::Parallel;
use crate::error::{Error, Result, text};
use crate::layout::{Layout, MAX_RANK};
use crate::ops::check::Arg;
use crate::ops::collective::parts;
use crate::problem::embedding::Slice;
use crate::tensor::RawTensor;

/// A group that the rows of a vocabulary are divided among, those of an embedding's table or of the
/// projection to logits, and which of them this rank has: as many as its table has, from `begin` on.
/// Every row is of one rank; a rank may have none.
///
/// [`shard`](mod@crate::comm::shard) with its kind `Vocabulary` says which; rows past the vocabulary's
/// end are not given.
#[derive(Clone, Copy, Debug)]
pub struct Vocabulary<'a> {
    /// The group. Sequence parallel, what is whole on all ranks otherwise is a rank's rows of it, but ids
    /// and targets are those of all rows. Nothing is in chunks of rows, whatever `chunk_rows` is.
    pub parallel: Parallel<'a>,
    /// The row of the vocabulary that is this rank's first.
    pub begin: usize,
    /// Rows of the vocabulary, those of all ranks; the same on all.
    pub size: usize,
}

impl Vocabulary<'_> {
    /// Refuses rows that the vocabulary does not have; `name` is the tensor that has them.
    pub(crate) fn check(
        &self,
        op: &'static str,
        (name, rows): (&'static str, usize),
    ) -> Result<()> {
        self.parallel.check(op)?;
        let (begin, size) = (self.begin, self.size);
        if begin.checked_add(rows).is_none_or(|end| end > size) {
            let problem =
                text!("is {begin}, and {name} has {rows} rows: vocab_size {size} has fewer");
            return Err(Error::invalid(op, "vocab_begin", problem));
        }
        Ok(())
    }

    /// The same for a table.
    pub(crate) fn slice(&self) -> Slice {
        Slice {
            begin: self.begin,
            vocab: self.size,
        }
    }

    /// Checks a tensor of rows of this rank that all ranks have together as `whole` says; `ids` has an id
    /// for each of them.
    pub(crate) fn check_own(
        &self,
        op: &'static str,
        (name, own): (&'static str, &RawTensor),
        (ids_name, ids): (&'static str, &RawTensor),
        whole: &Layout,
    ) -> Result<()> {
        let Parallel {
            comm, row_counts, ..
        } = self.parallel;
        let divided = parts(op, comm, (ids_name, ids), ("row_counts", row_counts))?;
        let mut shape = [0; MAX_RANK];
        let rank = whole.rank();
        shape[..rank].copy_from_slice(whole.shape());
        shape[0] = divided.of(comm.rank());
        Arg::new(op, name, own)
            .shape(&shape[..rank])?
            .contiguous()?;
        Ok(())
    }
}
