//! What ranks that have parts of sequences give each other: parts for heads, where a rank gives every rank that
//! one's heads of its own tokens, and gets its own heads of all tokens, or the other way round; and keys and
//! values to all, whose gradients are added up.

use crate::comm::Comm;
use crate::comm::tokens::Order;
use crate::context::Collective;
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::layout::{Layout, MAX_RANK};
use crate::ops::check::Arg;
use crate::ops::parts::{Names, Parts};
use crate::problem::collective::{self, Kind, ReduceOp};
use crate::problem::{accumulate, cast};
use crate::tensor::{RawTensor, TensorMut, TensorRef};

/// What a tensor is of, which says where its tokens and its heads are.
#[derive(Clone, Copy, Debug)]
pub(super) enum Of {
    /// `[B, tokens, heads, D]`, or `[tokens, heads, D]`.
    Rows,
    /// `[B, heads, tokens]`, or `[heads, tokens]`.
    Lse,
}

impl Of {
    pub fn tokens(self, t: &RawTensor) -> usize {
        match self {
            Of::Rows => t.layout.rank() - 3,
            Of::Lse => t.layout.rank() - 1,
        }
    }

    pub fn heads(self, t: &RawTensor) -> usize {
        t.layout.rank() - 2
    }
}

/// A collective, and where what it gives is to be.
pub(super) struct Call {
    name: &'static str,
    pub problem: collective::Problem<'static>,
    received: RawTensor,
    to: RawTensor,
}

impl Call {
    pub fn unpack<const N: usize>(&self, parts: &mut Parts<'_, N>) -> Result<()> {
        if self.to.layout.is_contiguous() {
            return Ok(());
        }
        let unpack = cast::Problem {
            x: self.received,
            out: self.to,
        };
        parts.push(Ok(unpack), names_of(self.name))
    }
}

/// What a rank has of a chunk, and the room of all ranks' chunks.
pub(super) struct Chunk {
    pub own: RawTensor,
    pub all: RawTensor,
}

impl Chunk {
    /// The first chunks of all ranks, which are in their order, and the second ones, which are in the opposite one.
    pub fn of(order: Order, own: RawTensor, all: RawTensor) -> Result<(Chunk, Option<Chunk>)> {
        let half = |t: &RawTensor, second: bool| {
            let dim = Of::Rows.tokens(t);
            let tokens = t.layout.dim(dim) / 2;
            t.narrowed(dim, usize::from(second) * tokens, tokens)
        };
        let chunk = |second: bool| -> Result<Chunk> {
            Ok(Chunk {
                own: half(&own, second)?,
                all: half(&all, second)?,
            })
        };
        Ok(match order {
            Order::Contiguous => (Chunk { own, all }, None),
            Order::Zigzag => (chunk(false)?, Some(chunk(true)?)),
        })
    }
}

/// The ranks, for an operation.
pub(super) struct Group<'a> {
    pub op: &'static str,
    pub comm: &'a Comm,
}

impl<'a> Group<'a> {
    /// A rank's share of numbers of heads, in the last dimension.
    pub fn own_heads(&self, of_heads: RawTensor) -> Result<RawTensor> {
        let last = of_heads.layout.rank() - 1;
        let heads = of_heads.layout.dim(last) / self.comm.size();
        of_heads.narrowed(last, self.comm.rank() * heads, heads)
    }

    /// Gathers numbers of heads, of which each rank has written its own where they are to be.
    pub fn gather_heads<const N: usize>(
        &self,
        name: &'static str,
        [own, all]: [RawTensor; 2],
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        match self.comm.size() {
            1 => Ok(()),
            _ => self.push(name, Kind::AllGather, [own, all], parts),
        }
    }

    /// Adds up what ranks have of a tensor, which each then has.
    pub fn sum<const N: usize>(
        &self,
        name: &'static str,
        t: RawTensor,
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        match self.comm.size() {
            1 => Ok(()),
            _ => self.push(name, Kind::AllReduce(ReduceOp::Sum), [t, t], parts),
        }
    }

    /// Room for this rank's heads of all tokens, of whose own tokens `own` has all heads; `own` itself where
    /// there is one rank.
    pub fn take_heads<const N: usize>(
        &self,
        name: &'static str,
        own: RawTensor,
        of: Of,
        parts: &mut Parts<'a, N>,
    ) -> Result<RawTensor> {
        let heads = own.layout.dim(of.heads(&own)) / self.comm.size();
        self.take_all(name, own, (of, heads), parts)
    }

    /// Room for all heads of all tokens, likewise.
    pub fn take_tokens<const N: usize>(
        &self,
        name: &'static str,
        own: RawTensor,
        parts: &mut Parts<'a, N>,
    ) -> Result<RawTensor> {
        let heads = own.layout.dim(Of::Rows.heads(&own));
        self.take_all(name, own, (Of::Rows, heads), parts)
    }

    fn take_all<const N: usize>(
        &self,
        name: &'static str,
        own: RawTensor,
        (of, heads): (Of, usize),
        parts: &mut Parts<'a, N>,
    ) -> Result<RawTensor> {
        let size = self.comm.size();
        Arg::new(self.op, name, &own).last_contiguous()?;
        if size == 1 {
            return Ok(own);
        }
        let mut shape = [0; MAX_RANK];
        let rank = own.layout.rank();
        shape[..rank].copy_from_slice(own.layout.shape());
        shape[of.heads(&own)] = heads;
        let tokens = &mut shape[of.tokens(&own)];
        *tokens = tokens.checked_mul(size).ok_or_else(|| {
            let problem = text!("has too many tokens on {size} ranks");
            Error::invalid(self.op, name, problem)
        })?;
        self.take(&own, &shape[..rank], parts)
    }

    /// Adds up what ranks have of all tokens, each to have the sum of its own.
    pub fn scatter<const N: usize>(
        &self,
        name: &'static str,
        [all, own]: [RawTensor; 2],
        order: Order,
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        if self.comm.size() == 1 {
            return Ok(());
        }
        let sum = Kind::ReduceScatter(ReduceOp::Sum);
        let (first, second) = Chunk::of(order, own, all)?;
        let from = self.divided(&first.all, Of::Rows.tokens(&all))?;
        self.push(name, sum, [from, first.own], parts)?;
        if let Some(chunk) = second {
            let taken = parts.taken();
            let ranks = self.take_of_ranks(&chunk.own, parts)?;
            for rank in 0..self.comm.size() {
                let [out, x] = self.backwards(&ranks, &chunk.all, rank)?;
                self.copy(name, x, out, parts)?;
            }
            self.push(name, sum, [ranks, chunk.own], parts)?;
            parts.give_back(taken);
        }
        Ok(())
    }

    /// This rank's heads of all tokens: as [`Group::take_heads`], filled.
    pub fn heads_of<const N: usize>(
        &self,
        name: &'static str,
        own: RawTensor,
        of: Of,
        parts: &mut Parts<'a, N>,
    ) -> Result<RawTensor> {
        let heads = self.take_heads(name, own, of, parts)?;
        if self.comm.size() > 1 {
            let from = self.divided(&own, of.heads(&own))?;
            let to = self.divided(&heads, of.tokens(&heads))?;
            self.push(name, Kind::AllToAll, [from, to], parts)?;
        }
        Ok(heads)
    }

    /// Gives heads of all tokens back: `own` gets all heads of this rank's tokens.
    pub fn tokens_of<const N: usize>(
        &self,
        name: &'static str,
        heads: RawTensor,
        own: RawTensor,
        of: Of,
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        if self.comm.size() == 1 {
            return Ok(());
        }
        let from = self.divided(&heads, of.tokens(&heads))?;
        let to = self.divided(&own, of.heads(&own))?;
        self.push(name, Kind::AllToAll, [from, to], parts)
    }

    /// Room for what every rank has of a chunk, one rank behind the other.
    fn take_of_ranks<const N: usize>(
        &self,
        own: &RawTensor,
        parts: &mut Parts<'a, N>,
    ) -> Result<RawTensor> {
        let rank = own.layout.rank();
        let mut shape = [0; MAX_RANK];
        shape[0] = self.comm.size();
        shape[1..=rank].copy_from_slice(own.layout.shape());
        self.take(own, &shape[..=rank], parts)
    }

    /// Of the second chunks of all ranks, that of one: among them, and in their order in sequences, which is that
    /// of ranks from the last to the first.
    fn backwards(&self, ranks: &RawTensor, all: &RawTensor, rank: usize) -> Result<[RawTensor; 2]> {
        let dim = Of::Rows.tokens(all);
        let tokens = all.layout.dim(dim) / self.comm.size();
        let place = self.comm.size() - 1 - rank;
        let in_order = all.narrowed(dim, place * tokens, tokens)?;
        Ok([entry(ranks, rank)?, in_order])
    }

    /// A view whose first dimension is that of ranks, each of which has its part of dimension `dim`.
    pub fn divided(&self, t: &RawTensor, dim: usize) -> Result<RawTensor> {
        let (layout, size) = (&t.layout, self.comm.size());
        let rank = layout.rank();
        let (mut shape, mut strides) = ([0; MAX_RANK], [0; MAX_RANK]);
        shape[1..=rank].copy_from_slice(layout.shape());
        strides[1..=rank].copy_from_slice(layout.strides());
        shape[dim + 1] /= size;
        (shape[0], strides[0]) = (size, shape[dim + 1].saturating_mul(strides[dim + 1]));
        Ok(RawTensor {
            layout: Layout::strided(&shape[..=rank], &strides[..=rank])?,
            ..*t
        })
    }

    /// A collective, of `from` and `to`: what is divided among ranks has them as its first dimension. What has
    /// gaps is copied.
    fn push<const N: usize>(
        &self,
        name: &'static str,
        kind: Kind,
        tensors: [RawTensor; 2],
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        let taken = parts.taken();
        let call = self.call(name, kind, tensors, parts)?;
        let collective = Collective {
            transport: self.comm.transport(),
            problem: call.problem,
        };
        parts.push_collective(collective, names_of(name))?;
        call.unpack(parts)?;
        // What is sent and received is not read by later parts.
        parts.give_back(taken);
        Ok(())
    }

    /// A collective that is yet to be pushed, behind the copy that it sends.
    pub fn call<const N: usize>(
        &self,
        name: &'static str,
        kind: Kind,
        [from, to]: [RawTensor; 2],
        parts: &mut Parts<'a, N>,
    ) -> Result<Call> {
        let mut packed = |t: &RawTensor| match t.layout.is_contiguous() {
            true => Ok(*t),
            false => self.take(t, t.layout.shape(), parts),
        };
        let (sent, received) = (packed(&from)?, packed(&to)?);
        if !from.layout.is_contiguous() {
            parts.push(Ok(cast::Problem { x: from, out: sent }), names_of(name))?;
        }
        let entries = collective::Parts::Even(1);
        let elements = |t: &RawTensor| t.layout.num_elements();
        Ok(Call {
            name,
            to,
            received,
            problem: collective::Problem {
                op: self.op,
                kind,
                dtype: sent.dtype,
                row: match kind {
                    Kind::AllToAll => elements(&sent) / self.comm.size(),
                    _ => elements(&sent).min(elements(&received)),
                },
                x: Some(sent),
                out: Some(received),
                sent: entries,
                received: entries,
            },
        })
    }

    /// Sends a tensor without gaps to a rank, and receives one like it from a rank.
    pub fn pass<const N: usize>(
        &self,
        name: &'static str,
        [x, out]: [RawTensor; 2],
        (to, from): (usize, usize),
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        let call = Collective {
            transport: self.comm.transport(),
            problem: collective::Problem {
                op: self.op,
                kind: Kind::SendReceive { to, from },
                dtype: x.dtype,
                row: 0,
                x: Some(x),
                out: Some(out),
                sent: collective::Parts::Even(0),
                received: collective::Parts::Even(0),
            },
        };
        parts.push_collective(call, names_of(name))
    }

    /// Copies a tensor to another one of its shape, and rounds to its dtype.
    pub fn copy<const N: usize>(
        &self,
        name: &'static str,
        x: RawTensor,
        out: RawTensor,
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        parts.push(Ok(cast::Problem { x, out }), names_of(name))
    }

    /// Adds a tensor to another one of its shape.
    pub fn add<const N: usize>(
        &self,
        name: &'static str,
        x: RawTensor,
        out: RawTensor,
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        parts.push(Ok(accumulate::Problem { x, out }), names_of(name))
    }

    /// Room for a contiguous tensor.
    pub fn take_of<const N: usize>(
        &self,
        dtype: DType,
        shape: &[usize],
        parts: &mut Parts<'a, N>,
    ) -> Result<RawTensor> {
        let layout = Layout::contiguous(shape)?;
        let columns = shape.last().copied().unwrap_or(1);
        let taken = parts.take(dtype, [layout.num_rows(), columns])?;
        Ok(RawTensor { layout, ..taken })
    }

    /// Room for a contiguous tensor of another's dtype and shape.
    pub fn take_like<const N: usize>(
        &self,
        like: &RawTensor,
        parts: &mut Parts<'a, N>,
    ) -> Result<RawTensor> {
        self.take(like, like.layout.shape(), parts)
    }

    /// Room for a contiguous tensor of another's dtype.
    fn take<const N: usize>(
        &self,
        like: &RawTensor,
        shape: &[usize],
        parts: &mut Parts<'a, N>,
    ) -> Result<RawTensor> {
        self.take_of(like.dtype, shape, parts)
    }
}

/// Packed tokens as those of one sequence.
pub(super) fn as_batch(t: RawTensor) -> Result<RawTensor> {
    let rank = t.layout.rank();
    let (mut shape, mut strides) = ([1; MAX_RANK], [0; MAX_RANK]);
    shape[1..=rank].copy_from_slice(t.layout.shape());
    strides[1..=rank].copy_from_slice(t.layout.strides());
    let layout = Layout::strided(&shape[..=rank], &strides[..=rank])?;
    Ok(RawTensor { layout, ..t })
}

/// An entry of the first dimension.
pub(super) fn entry(t: &RawTensor, index: usize) -> Result<RawTensor> {
    let entry = t.narrowed(0, index, 1)?;
    let (shape, strides) = (entry.layout.shape(), entry.layout.strides());
    let layout = Layout::strided(&shape[1..], &strides[1..])?;
    Ok(RawTensor { layout, ..entry })
}

/// What copies and collectives of a tensor call it.
pub(super) fn names_of(name: &'static str) -> Names {
    macro_rules! names {
        ($($name:literal)*) => {
            match name {
                $($name => &[("x", $name), ("out", $name)],)*
                _ => &[],
            }
        };
    }
    names!("q" "k" "v" "out" "lse" "dout" "dq" "dk" "dv" "dsinks")
}

/// # Safety
/// It is the caller's tensor or lies in the workspace, and is read by parts of one call alone.
pub(super) unsafe fn read<'t>(t: &RawTensor) -> TensorRef<'t> {
    // SAFETY: the caller's promise.
    unsafe { TensorRef::from_raw(t.ptr, t.dtype, t.layout) }
}

/// # Safety
/// As [`read`].
pub(super) unsafe fn read_optional<'t>(t: Option<RawTensor>) -> Option<TensorRef<'t>> {
    // SAFETY: the caller's promise.
    t.map(|t| unsafe { read(&t) })
}

/// # Safety
/// As [`read`], and no part reads it before it is written.
pub(super) unsafe fn write<'t>(t: &RawTensor) -> TensorMut<'t> {
    // SAFETY: the caller's promise.
    unsafe { TensorMut::from_raw(t.ptr, t.dtype, t.layout) }
}
