//! Tensor and sequence parallel layers: what [`linear`](crate::ops::linear), [`mlp`](crate::ops::mlp),
//! [`attention_block`](crate::ops::attention_block), [`decoder_layer`](crate::ops::decoder_layer) and, of
//! a [`Vocabulary`], [`embedding`](crate::ops::embedding) do where a group of ranks divides their weights.
//!
//! A weight is divided by its rows (a column parallel layer, after the columns of its output) or by its
//! columns (a row parallel one). The products of the second are parts of sums, which the call adds up
//! over all ranks. So a block divides its first projections by rows and its last by columns, and its
//! input and output are whole on every rank, with the same bits; or, sequence parallel, divided by rows:
//! the call then gathers the input and scatters the sums, and what lies between blocks, norms and
//! residuals, is of a rank's rows alone.
//!
//! Partial sums are rounded to the dtype of the output, added in f32 by a local group and as NCCL does
//! by one of its, and rounded again. A bias or a residual is added once, to one rank's part.
//!
//! A sum takes time in which a device would have nothing to do. Where there are rows enough
//! ([`Parallel::chunk_rows`]) a product is made in chunks of them, each of which ranks add up beside the
//! next one's product; in a decoder layer also beside what is computed of the chunks that have been added
//! up. On CUDA that takes a stream of the group's own, which has run what it was given when the caller's
//! stream gets to the end of the call. Ranks have the same bits; those of a call without chunks they need not
//! be, as cuBLASLt may have another algorithm for fewer rows.
//!
//! All ranks make the same calls, with tensors of the same shapes but for what is divided, and all or
//! none of them with a gradient. What follows from shapes that ranks share is refused on every rank,
//! before any of them has sent anything. All the workspace that a call asks for is needed.

mod chunks;
mod product;
mod rows;
mod vocabulary;

use crate::comm::Comm;
use crate::context::{Collective, Join};
use crate::error::{Error, Result, text};
use crate::layout::{Layout, MAX_RANK};
use crate::ops::check::{Arg, with_last};
use crate::ops::collective::{part_of, parts, row};
use crate::ops::parts::{Names, Parts};
use crate::problem::collective::{self, Kind, ReduceOp};
use crate::tensor::RawTensor;
pub(crate) use chunks::{ByRows, Chunks, rows_of};
pub(crate) use rows::{Rows, push_summed, take};
pub use vocabulary::Vocabulary;

/// How a weight is divided among ranks. The discriminants are those of the C ABI
/// (`UNSLOTH_PARTITION_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Partition {
    /// By its rows: a rank has columns of the output.
    #[default]
    Column = 0,
    /// By its columns: a rank has columns of the input, and its product is a part of a sum.
    Row = 1,
}

impl Partition {
    /// The partition with this C ABI value.
    pub fn from_raw(value: u32) -> Option<Partition> {
        [Partition::Column, Partition::Row]
            .into_iter()
            .find(|p| *p as u32 == value)
    }
}

/// A group that a layer's weights are divided among, and how.
#[derive(Clone, Copy, Debug)]
pub struct Parallel<'a> {
    /// This rank's part in the group.
    pub comm: &'a Comm,
    /// How the weight of a linear layer is divided. Blocks have their own, and do not look at it.
    pub partition: Partition,
    /// Sequence parallel: the input of what is divided by rows and the output of what is divided by
    /// columns, and their gradients, are a rank's rows of these. They are contiguous, and rows are those
    /// of the first dimension.
    pub sequence: bool,
    /// With `sequence`: the rows of each rank, the same on all; `None` for as many of each.
    pub row_counts: Option<&'a [i64]>,
    /// Rows of a chunk, at least; the same on all ranks. What ranks add up is then made in chunks of so many
    /// rows of all ranks or more, eight at most, and one's sum runs beside the next one's product; gradients
    /// of the input are added up beside the products that do not need them. As many as there are rows, or more:
    /// everything is made and then added up. 0: what was found to be fast, which is one chunk on the CPU and in the
    /// forward pass of a decoder layer.
    pub chunk_rows: usize,
}

impl<'a> Parallel<'a> {
    /// Tensor parallel, the weight of a linear layer being divided by its rows.
    pub fn new(comm: &'a Comm) -> Parallel<'a> {
        Parallel {
            comm,
            partition: Partition::Column,
            sequence: false,
            row_counts: None,
            chunk_rows: 0,
        }
    }

    /// Whether it is the same group and the same division of rows, into chunks too.
    pub(crate) fn is(&self, other: &Parallel<'_>) -> bool {
        std::ptr::eq(self.comm, other.comm)
            && self.sequence == other.sequence
            && self.row_counts == other.row_counts
            && self.chunk_rows == other.chunk_rows
    }

    /// Refuses counts that nothing is divided by.
    pub(crate) fn check(&self, op: &'static str) -> Result<()> {
        if self.row_counts.is_some() && !self.sequence {
            let problem = "is there without sequence, which divides rows";
            return Err(Error::invalid(op, "row_counts", problem));
        }
        Ok(())
    }

    /// Refuses a norm over what is divided; `columns` of it are this rank's.
    pub(crate) fn check_norm(&self, op: &'static str, name: &'static str) -> Result<()> {
        let size = self.comm.size();
        if size == 1 {
            return Ok(());
        }
        let problem = text!("is of all columns together, which {size} ranks divide");
        Err(Error::unsupported(op, name, problem))
    }

    /// A rank's rows, checked; and the layout of the rows of all ranks.
    pub(crate) fn whole(
        &self,
        op: &'static str,
        name: &'static str,
        own: &RawTensor,
    ) -> Result<Layout> {
        Arg::new(op, name, own).min_rank(2)?.contiguous()?;
        let (rows, size) = (own.layout.dim(0), self.comm.size());
        let total = match self.row_counts {
            None => rows.checked_mul(size),
            Some(counts) => {
                if counts.len() != size {
                    let problem = text!("has {} entries, comm has {size} ranks", counts.len());
                    return Err(Error::invalid(op, "row_counts", problem));
                }
                let rank = self.comm.rank();
                if usize::try_from(counts[rank]) != Ok(rows) {
                    let problem = text!(
                        "has {} for rank {rank}, {name} has {rows} rows",
                        counts[rank]
                    );
                    return Err(Error::invalid(op, "row_counts", problem));
                }
                counts
                    .iter()
                    .enumerate()
                    .try_fold(0usize, |sum, (rank, count)| {
                        let count = usize::try_from(*count).map_err(|_| {
                            let problem = text!("has {count} for rank {rank}, allowed: 0 or more");
                            Error::invalid(op, "row_counts", problem)
                        })?;
                        Ok::<_, Error>(sum.saturating_add(count))
                    })
                    .map(Some)?
            }
        };
        let mut room = [0; MAX_RANK];
        let rank = own.layout.rank();
        room[..rank].copy_from_slice(own.layout.shape());
        room[0] = total.unwrap_or(usize::MAX);
        Layout::contiguous(&room[..rank]).map_err(|_| {
            let problem = text!("has {rows} rows: those of all ranks do not fit the address space");
            Error::invalid(op, name, problem)
        })
    }

    /// This rank's rows of a tensor that is divided, as its shape in the room given.
    pub(crate) fn own_shape<'r>(
        &self,
        op: &'static str,
        (name, whole): (&'static str, &RawTensor),
        columns: usize,
        room: &'r mut [usize; MAX_RANK],
    ) -> Result<&'r [usize]> {
        let divided = parts(
            op,
            self.comm,
            (name, whole),
            ("row_counts", self.row_counts),
        )?;
        let rank = with_last(whole, columns, room).len();
        room[0] = divided.of(self.comm.rank());
        Ok(&room[..rank])
    }

    /// Room for the rows of all ranks, and what gathers them.
    pub(crate) fn push_gather<const N: usize>(
        &self,
        op: &'static str,
        (name, names): (&'static str, Names),
        own: RawTensor,
        to: &mut Parts<'a, N>,
    ) -> Result<RawTensor> {
        let layout = self.whole(op, name, &own)?;
        let whole = take(&own, layout, to)?;
        to.push_collective(self.gather(op, name, [own, whole])?, names)?;
        Ok(whole)
    }

    /// What gathers the rows of all ranks, which were checked.
    pub(crate) fn gather(
        &self,
        op: &'static str,
        name: &'static str,
        [own, whole]: [RawTensor; 2],
    ) -> Result<Collective<'a>> {
        let divided = parts(
            op,
            self.comm,
            (name, &whole),
            ("row_counts", self.row_counts),
        )?;
        Ok(self.collective(collective::Problem {
            op,
            kind: Kind::AllGather,
            dtype: own.dtype,
            row: row(&whole),
            x: Some(own),
            out: Some(whole),
            sent: divided,
            received: divided,
        }))
    }

    /// Adds the sum of all ranks' tensors, in their place.
    pub(crate) fn push_sum<const N: usize>(
        &self,
        op: &'static str,
        names: Names,
        x: RawTensor,
        to: &mut Parts<'a, N>,
    ) -> Result<()> {
        to.push_collective(self.sum(op, x), names)
    }

    /// What adds up all ranks' tensors, in their place.
    pub(crate) fn sum(&self, op: &'static str, x: RawTensor) -> Collective<'a> {
        self.collective(collective::Problem {
            op,
            kind: Kind::AllReduce(ReduceOp::Sum),
            dtype: x.dtype,
            row: x.layout.num_elements(),
            x: Some(x),
            out: Some(x),
            sent: collective::Parts::Even(1),
            received: collective::Parts::Even(1),
        })
    }

    /// Adds the sum of all ranks' tensors, of which this rank gets its rows.
    pub(crate) fn push_scatter<const N: usize>(
        &self,
        op: &'static str,
        (name, names): (&'static str, Names),
        tensors: [RawTensor; 2],
        to: &mut Parts<'a, N>,
    ) -> Result<()> {
        to.push_collective(self.scatter(op, name, tensors)?, names)
    }

    /// What adds up all ranks' tensors, of which this rank gets its rows.
    pub(crate) fn scatter(
        &self,
        op: &'static str,
        name: &'static str,
        [whole, own]: [RawTensor; 2],
    ) -> Result<Collective<'a>> {
        let divided = parts(
            op,
            self.comm,
            (name, &whole),
            ("row_counts", self.row_counts),
        )?;
        Ok(self.collective(collective::Problem {
            op,
            kind: Kind::ReduceScatter(ReduceOp::Sum),
            dtype: whole.dtype,
            row: row(&whole),
            x: Some(whole),
            out: Some(own),
            sent: divided,
            received: divided,
        }))
    }

    /// What gives each rank all ranks' tensors of a shape, which lie behind each other in `all`; its own
    /// is in its place.
    pub(crate) fn gather_even(&self, op: &'static str, all: RawTensor) -> Result<Collective<'a>> {
        let size = self.comm.size();
        let each = collective::Parts::Even(all.layout.dim(0) / size);
        let own = part_of(&all, each, self.comm.rank())?;
        Ok(self.collective(collective::Problem {
            op,
            kind: Kind::AllGather,
            dtype: all.dtype,
            row: row(&all),
            x: Some(own),
            out: Some(all),
            sent: each,
            received: each,
        }))
    }

    /// Adds that what is behind it waits for the sums of these chunks.
    pub(crate) fn push_join<const N: usize>(
        &self,
        op: &'static str,
        chunks: Chunks,
        to: &mut Parts<'a, N>,
    ) -> Result<()> {
        match chunks.is_one() {
            true => Ok(()),
            false => self.push_join_of(op, chunks.last(), to),
        }
    }

    /// The same for the sum of this number and those before it.
    pub(crate) fn push_join_of<const N: usize>(
        &self,
        op: &'static str,
        number: usize,
        to: &mut Parts<'a, N>,
    ) -> Result<()> {
        to.push_join(Join {
            op,
            transport: self.comm.transport(),
            number,
        })
    }

    fn collective(&self, problem: collective::Problem<'a>) -> Collective<'a> {
        Collective {
            transport: self.comm.transport(),
            problem,
        }
    }
}

/// What a collective of a block's output calls its arguments, and what the block does.
pub(crate) const OF_OUT: Names = &[("x", "out")];
/// The same of its input, of its gradient, and of the gradient of its output.
pub(crate) const OF_X: Names = &[("out", "x")];
pub(crate) const OF_DX: Names = &[("x", "dx"), ("out", "dx")];
pub(crate) const OF_DOUT: Names = &[("x", "dout"), ("out", "dout")];
