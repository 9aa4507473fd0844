//! Parts of sequences for heads: a rank gives every rank that one's heads of its own tokens, and gets its own
//! heads of all tokens, or the other way round.

use crate::comm::Comm;
use crate::context::Collective;
use crate::error::{Error, Result, text};
use crate::layout::{Layout, MAX_RANK};
use crate::ops::check::Arg;
use crate::ops::parts::{Names, Parts};
use crate::problem::cast;
use crate::problem::collective::{self, Kind};
use crate::tensor::{RawTensor, TensorMut, TensorRef};

/// What a tensor is of, which says where its tokens and its heads are.
#[derive(Clone, Copy, Debug)]
pub(super) enum Of {
    /// `[B, tokens, heads, D]`.
    Rows,
    /// `[B, heads, tokens]`.
    Lse,
}

impl Of {
    fn tokens(self) -> usize {
        match self {
            Of::Rows => 1,
            Of::Lse => 2,
        }
    }

    fn heads(self) -> usize {
        match self {
            Of::Rows => 2,
            Of::Lse => 1,
        }
    }
}

/// Refuses what is not a batch: packed sequences cannot be divided.
pub(super) fn check_batched(op: &'static str, [q, k, v]: [&RawTensor; 3]) -> Result<()> {
    for (name, tensor) in [("q", q), ("k", k), ("v", v)] {
        Arg::new(op, name, tensor).rank(&[4])?;
    }
    Ok(())
}

/// The ranks, which divide heads evenly.
pub(super) struct Group<'a> {
    op: &'static str,
    comm: &'a Comm,
}

impl<'a> Group<'a> {
    /// Of keys whose heads can be divided; then those of queries can be too.
    pub fn new(op: &'static str, comm: &'a Comm, k: &RawTensor) -> Result<Group<'a>> {
        let (heads, size) = (k.layout.dim(2), comm.size());
        if !heads.is_multiple_of(size) {
            let problem = text!("has {heads} heads, which {size} ranks do not share evenly");
            return Err(Error::invalid(op, "k", problem));
        }
        Ok(Group { op, comm })
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
        let size = self.comm.size();
        Arg::new(self.op, name, &own).last_contiguous()?;
        if size == 1 {
            return Ok(own);
        }
        let mut shape = [0; MAX_RANK];
        let rank = own.layout.rank();
        shape[..rank].copy_from_slice(own.layout.shape());
        shape[of.heads()] /= size;
        let tokens = shape[of.tokens()].checked_mul(size);
        shape[of.tokens()] = tokens.ok_or_else(|| {
            let problem = text!("has too many tokens on {size} ranks");
            Error::invalid(self.op, name, problem)
        })?;
        self.take(&own, &shape[..rank], parts)
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
            let from = self.divided(&own, of.heads())?;
            let to = self.divided(&heads, of.tokens())?;
            self.push(name, from, to, parts)?;
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
        let from = self.divided(&heads, of.tokens())?;
        let to = self.divided(&own, of.heads())?;
        self.push(name, from, to, parts)
    }

    /// A view whose first dimension is that of ranks, each of which has its part of dimension `dim`.
    fn divided(&self, t: &RawTensor, dim: usize) -> Result<RawTensor> {
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

    /// Sends entry `i` of `from` to rank `i`, and puts what comes from rank `i` into entry `i` of `to`.
    /// What has gaps is copied.
    fn push<const N: usize>(
        &self,
        name: &'static str,
        from: RawTensor,
        to: RawTensor,
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        let names = names_of(name);
        let taken = parts.taken();
        let mut packed = |t: &RawTensor| match t.layout.is_contiguous() {
            true => Ok(*t),
            false => self.take(t, t.layout.shape(), parts),
        };
        let (sent, received) = (packed(&from)?, packed(&to)?);
        if !from.layout.is_contiguous() {
            parts.push(Ok(cast::Problem { x: from, out: sent }), names)?;
        }
        let entries = collective::Parts::Even(1);
        let all_to_all = Collective {
            transport: self.comm.transport(),
            problem: collective::Problem {
                op: self.op,
                kind: Kind::AllToAll,
                dtype: sent.dtype,
                row: sent.layout.num_elements() / self.comm.size(),
                x: Some(sent),
                out: Some(received),
                sent: entries,
                received: entries,
            },
        };
        parts.push_collective(all_to_all, names)?;
        if !to.layout.is_contiguous() {
            let unpack = cast::Problem {
                x: received,
                out: to,
            };
            parts.push(Ok(unpack), names)?;
        }
        // What is sent and received is not read by later parts.
        parts.give_back(taken);
        Ok(())
    }

    /// Room for a contiguous tensor of another's dtype.
    fn take<const N: usize>(
        &self,
        like: &RawTensor,
        shape: &[usize],
        parts: &mut Parts<'a, N>,
    ) -> Result<RawTensor> {
        let layout = Layout::contiguous(shape)?;
        let columns = shape.last().copied().unwrap_or(1);
        let taken = parts.take(like.dtype, [layout.num_rows(), columns])?;
        Ok(RawTensor { layout, ..taken })
    }
}

/// What copies and collectives of a tensor call it.
fn names_of(name: &'static str) -> Names {
    macro_rules! names {
        ($($name:literal)*) => {
            match name {
                $($name => &[("x", $name), ("out", $name)],)*
                _ => &[],
            }
        };
    }
    names!("q" "k" "v" "out" "lse" "dout" "dq" "dk" "dv")
}

/// # Safety
/// It is the caller's tensor or lies in the workspace, and is read by parts of one call alone.
pub(super) unsafe fn read<'t>(t: &RawTensor) -> TensorRef<'t> {
    // SAFETY: the caller's promise.
    unsafe { TensorRef::from_raw(t.ptr, t.dtype, t.layout) }
}

/// # Safety
/// As [`read`], and no part reads it before it is written.
pub(super) unsafe fn write<'t>(t: &RawTensor) -> TensorMut<'t> {
    // SAFETY: the caller's promise.
    unsafe { TensorMut::from_raw(t.ptr, t.dtype, t.layout) }
}
