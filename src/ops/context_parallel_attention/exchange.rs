//! What ranks that have parts of sequences give each other: parts for heads, where a rank gives every rank that
//! one's heads of its own tokens, and gets its own heads of all tokens, or the other way round; and keys and
//! values to all, whose gradients are added up.

use crate::comm::Comm;
use crate::context::Collective;
use crate::error::{Error, Result, text};
use crate::layout::{Layout, MAX_RANK};
use crate::ops::check::Arg;
use crate::ops::parts::{Names, Parts};
use crate::problem::cast;
use crate::problem::collective::{self, Kind, ReduceOp};
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

/// The ranks, for an operation.
pub(super) struct Group<'a> {
    pub op: &'static str,
    pub comm: &'a Comm,
}

impl<'a> Group<'a> {
    /// Heads of keys can be divided; then those of queries can be too.
    pub fn check_heads(&self, k: &RawTensor) -> Result<()> {
        let (heads, size) = (k.layout.dim(2), self.comm.size());
        if heads.is_multiple_of(size) {
            return Ok(());
        }
        let problem = text!("has {heads} heads, which {size} ranks do not share evenly");
        Err(Error::invalid(self.op, "k", problem))
    }

    /// How many keys of whole sequences this rank's queries may see, from the first: all, or up to their own.
    pub fn visible(
        &self,
        [q, k]: [&RawTensor; 2],
        causal: bool,
        windows: [(&'static str, usize); 2],
    ) -> Result<usize> {
        let [queries, keys] = [q, k].map(|t| t.layout.dim(1));
        let (size, rank) = (self.comm.size(), self.comm.rank());
        if !causal {
            if let Some((name, window)) = windows.into_iter().find(|(_, window)| *window > 0) {
                let problem = text!("is {window}, allowed with all_gather unless causal: 0");
                return Err(Error::unsupported(self.op, name, problem));
            }
            // What is too long is told where there is to be room for it.
            return Ok(keys.saturating_mul(size));
        }
        if queries != keys {
            let problem =
                text!("has {keys} tokens, q has {queries}: causal all_gather needs as many");
            return Err(Error::unsupported(self.op, "k", problem));
        }
        Ok(keys.saturating_mul(rank + 1))
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
        let heads = own.layout.dim(of.heads()) / self.comm.size();
        self.take_all(name, own, (of, heads), parts)
    }

    /// Room for all heads of all tokens, likewise.
    pub fn take_tokens<const N: usize>(
        &self,
        name: &'static str,
        own: RawTensor,
        parts: &mut Parts<'a, N>,
    ) -> Result<RawTensor> {
        let heads = own.layout.dim(Of::Rows.heads());
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
        shape[of.heads()] = heads;
        let tokens = shape[of.tokens()].checked_mul(size);
        shape[of.tokens()] = tokens.ok_or_else(|| {
            let problem = text!("has too many tokens on {size} ranks");
            Error::invalid(self.op, name, problem)
        })?;
        self.take(&own, &shape[..rank], parts)
    }

    /// All heads of all tokens, of which `own` are this rank's.
    pub fn gathered<const N: usize>(
        &self,
        name: &'static str,
        own: RawTensor,
        parts: &mut Parts<'a, N>,
    ) -> Result<RawTensor> {
        let all = self.take_tokens(name, own, parts)?;
        if self.comm.size() > 1 {
            let to = self.divided(&all, Of::Rows.tokens())?;
            self.push(name, Kind::AllGather, [own, to], parts)?;
        }
        Ok(all)
    }

    /// Adds up what ranks have of all tokens, each to have the sum of its own.
    pub fn scatter<const N: usize>(
        &self,
        name: &'static str,
        [all, own]: [RawTensor; 2],
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        if self.comm.size() == 1 {
            return Ok(());
        }
        let from = self.divided(&all, Of::Rows.tokens())?;
        self.push(name, Kind::ReduceScatter(ReduceOp::Sum), [from, own], parts)
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
        let from = self.divided(&heads, of.tokens())?;
        let to = self.divided(&own, of.heads())?;
        self.push(name, Kind::AllToAll, [from, to], parts)
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

    /// A collective, of `from` and `to`: what is divided among ranks has them as its first dimension. What has
    /// gaps is copied.
    fn push<const N: usize>(
        &self,
        name: &'static str,
        kind: Kind,
        [from, to]: [RawTensor; 2],
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
        let elements = |t: &RawTensor| t.layout.num_elements();
        let call = Collective {
            transport: self.comm.transport(),
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
        };
        parts.push_collective(call, names)?;
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
