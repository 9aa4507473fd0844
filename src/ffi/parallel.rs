//! Groups that layers are divided among.

use std::fmt;

use crate::alloc::Shared;
use crate::comm::Comm;
use crate::error::{Error, Result, text};
use crate::ffi::comm::{comm_from, counts_from, unsloth_comm};
use crate::ffi::params::Field;
use crate::ffi::{count, flag};
use crate::ops::parallel::{Parallel, Partition, Vocabulary};

/// How the weight of a linear layer is divided among ranks.
pub type unsloth_partition = u32;
/// By its rows (a column parallel layer): a rank has columns of the output.
pub const UNSLOTH_PARTITION_COLUMN: unsloth_partition = 0;
/// By its columns (a row parallel layer): a rank has columns of the input, and the products of all
/// ranks are added up.
pub const UNSLOTH_PARTITION_ROW: unsloth_partition = 1;

/// The group that a layer's weights are divided among. All zero: a rank has all of them.
///
/// A block (`unsloth_mlp_params`, `unsloth_attention_block_params`) has its first projections divided by
/// their rows, the last by its columns: each rank gives its part of the weights, and the call adds up the
/// output. Biases that all ranks have, and the residual, are the same on all and are added once.
/// `unsloth_shard_get` says what a rank's parts are. Partial sums are rounded to the dtype of the output,
/// added as `unsloth_all_reduce_forward` does, and rounded again.
///
/// All ranks make the same calls, with as many rows and with the same tensors absent. What is wrong with
/// shapes that ranks share is refused on every rank before any has sent anything. All the workspace that
/// a call asks for is needed. A call of a local group waits for the other ranks.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_parallel {
    /// This rank's part in the group, of the same context; NULL for no group.
    pub comm: *mut unsloth_comm,
    /// Optional, with `sequence`: the rows of each rank, one entry for each, on the host, the same on all
    /// ranks; NULL for as many of each.
    pub row_counts: *const i64,
    /// Of a linear layer, one of `UNSLOTH_PARTITION_*`; zero of a block.
    pub partition: unsloth_partition,
    /// 1, sequence parallel: what would be the same on all ranks, the input of a weight divided by rows
    /// and the output of one divided by columns, with its residual and their gradients, is this rank's
    /// rows, those of the first dimension; contiguous. The call gathers and scatters them. 0: it is whole
    /// on all ranks, and what is added up is contiguous.
    pub sequence: u32,
    /// Rows of a chunk, at least; the same on all ranks, and zero of a vocabulary. What ranks add up is then
    /// made in chunks of so many rows of all ranks or more, eight at most, and one's sum runs beside the next
    /// one's product, on a stream of the group's own; gradients of the input are added up beside the products
    /// that do not need them. As many as there are rows, or more: everything is made and then added up.
    /// 0: what was found to be fast, which is one chunk on the CPU and in the
    /// forward pass of a decoder layer.
    pub chunk_rows: i64,
    /// Zero.
    pub reserved: [u32; 2],
}

impl Field for unsloth_parallel {
    fn check(&self, op: &'static str, name: fmt::Arguments<'_>) -> Result<()> {
        self.reserved.check(op, format_args!("{name}.reserved"))
    }
}

/// A group that is held while parameters are used.
pub(crate) struct Group<'a> {
    comm: Shared<Comm>,
    partition: Partition,
    sequence: bool,
    row_counts: Option<&'a [i64]>,
    chunk_rows: usize,
}

impl Group<'_> {
    pub fn parallel(&self) -> Parallel<'_> {
        Parallel {
            comm: &self.comm,
            partition: self.partition,
            sequence: self.sequence,
            row_counts: self.row_counts,
            chunk_rows: self.chunk_rows,
        }
    }
}

/// The group that a vocabulary's rows are divided among, likewise.
pub(crate) struct OfVocabulary<'a> {
    group: Group<'a>,
    begin: usize,
    size: usize,
}

impl OfVocabulary<'_> {
    pub fn vocabulary(&self) -> Vocabulary<'_> {
        Vocabulary {
            parallel: self.group.parallel(),
            begin: self.begin,
            size: self.size,
        }
    }
}

impl unsloth_parallel {
    /// The group of a linear layer, if there is one.
    ///
    /// # Safety
    /// `row_counts` is NULL or has an entry for each rank, for `'a`.
    pub(crate) unsafe fn of_layer<'a>(&self, op: &'static str) -> Result<Option<Group<'a>>> {
        let partition = Partition::from_raw(self.partition).ok_or_else(|| {
            let problem = text!("is {}, allowed: 0 (column), 1 (row)", self.partition);
            Error::invalid(op, "partition", problem)
        })?;
        let sequence = flag(op, "sequence", self.sequence)?;
        let chunk_rows = count(op, "chunk_rows", self.chunk_rows)?;
        if self.comm.is_null() {
            for (name, is_set) in [
                ("partition", self.partition != 0),
                ("sequence", sequence),
                ("row_counts", !self.row_counts.is_null()),
                ("chunk_rows", chunk_rows != 0),
            ] {
                if is_set {
                    return Err(Error::invalid(op, name, "is set without comm"));
                }
            }
            return Ok(None);
        }
        let comm = comm_from(op, self.comm)?;
        // SAFETY: the caller promises the entries.
        let row_counts = unsafe { counts_from(op, "row_counts", self.row_counts, comm.size()) }?;
        Ok(Some(Group {
            comm,
            partition,
            sequence,
            row_counts,
            chunk_rows,
        }))
    }

    /// That of a vocabulary's rows.
    ///
    /// # Safety
    /// As [`Self::of_layer`].
    pub(crate) unsafe fn of_vocabulary<'a>(
        &self,
        op: &'static str,
        begin: i64,
        size: i64,
    ) -> Result<Option<OfVocabulary<'a>>> {
        if self.chunk_rows != 0 {
            let problem = text!("is {}, allowed of a vocabulary: 0", self.chunk_rows);
            return Err(Error::invalid(op, "chunk_rows", problem));
        }
        // SAFETY: the caller's promise.
        let Some(group) = (unsafe { self.of_block(op) })? else {
            for (name, value) in [("vocab_begin", begin), ("vocab_size", size)] {
                if value != 0 {
                    return Err(Error::invalid(op, name, "is set without comm"));
                }
            }
            return Ok(None);
        };
        Ok(Some(OfVocabulary {
            group,
            begin: count(op, "vocab_begin", begin)?,
            size: count(op, "vocab_size", size)?,
        }))
    }

    /// That of a block.
    ///
    /// # Safety
    /// As [`Self::of_layer`].
    pub(crate) unsafe fn of_block<'a>(&self, op: &'static str) -> Result<Option<Group<'a>>> {
        if self.partition != 0 {
            let problem = text!("is {}, allowed of a block: 0", self.partition);
            return Err(Error::invalid(op, "partition", problem));
        }
        // SAFETY: the caller's promise.
        unsafe { self.of_layer(op) }
    }
}
