//! What ranks do together where they divide the vocabulary: a token's sums over each rank's logits are
//! gathered, four numbers of each rank, of which every rank makes the losses and the gradient of its own
//! logits. The gradient of the input is added up at last.

use super::OP;
use crate::context::Collective;
use crate::dtype::DType;
use crate::error::Result;
use crate::layout::Layout;
use crate::ops::chunked::{Chunked, Memory};
use crate::ops::collective::part_of;
use crate::ops::parallel::Vocabulary;
use crate::ops::parts::Parts;
use crate::problem::chunked::Layer;
use crate::problem::collective;
use crate::problem::cross_entropy::{self, Columns, Part, SUMS, Whole};
use crate::tensor::{RawTensor, Workspace};

/// The group, and this rank's rows of what the layer has of all ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Divided<'t> {
    pub vocabulary: Vocabulary<'t>,
    /// Sequence parallel: the caller's input and its gradient.
    pub own: Option<(RawTensor, Option<RawTensor>)>,
}

impl<'t> Divided<'t> {
    /// As many columns as a rank has, the same on all.
    pub fn columns(&self) -> usize {
        let Vocabulary { parallel, size, .. } = self.vocabulary;
        size.div_ceil(parallel.comm.size())
    }

    /// Sequence parallel, takes memory for the rows of all ranks.
    pub fn take_rows<'a>(&self, chunked: Chunked<'a>, memory: &mut Memory) -> Result<Chunked<'a>> {
        if self.own.is_none() {
            return Ok(chunked);
        }
        let Layer { x, dx, .. } = *chunked.layer();
        let mut take = |t: RawTensor| memory.take(t.dtype, t.layout.shape());
        let (x, dx) = (take(x)?, dx.map(take).transpose()?);
        Ok(chunked.over(x, dx))
    }

    /// Takes memory for the sums of all ranks over a chunk's tokens.
    pub fn take_sums(&self, chunked: &Chunked<'_>, memory: &mut Memory) -> Result<RawTensor> {
        let ranks = self.vocabulary.parallel.comm.size();
        let rows = chunked.most_tokens().saturating_mul(ranks);
        memory.take(DType::F32, &[rows, SUMS])
    }

    /// What gathers the input.
    pub fn gather(&self, chunked: &Chunked<'_>) -> Result<Option<Collective<'t>>> {
        let Some((own, _)) = self.own else {
            return Ok(None);
        };
        let tensors = [own, chunked.layer().x];
        self.vocabulary.parallel.gather(OP, "x", tensors).map(Some)
    }

    /// What adds up the gradient of the input, if it is wanted.
    pub fn add(&self, chunked: &Chunked<'_>) -> Result<Option<Collective<'t>>> {
        let (Some(dx), parallel) = (chunked.layer().dx, &self.vocabulary.parallel) else {
            return Ok(None);
        };
        match self.own.and_then(|(_, dx)| dx) {
            None => Ok(Some(parallel.sum(OP, dx))),
            Some(own) => parallel.scatter(OP, "dx", [dx, own]).map(Some),
        }
    }

    /// Between a chunk's product and its gradients; `sums` has room for those of all ranks.
    pub fn step(&self, of: cross_entropy::Problem, sums: RawTensor) -> Result<Parts<'t, 3>> {
        let Vocabulary {
            parallel,
            begin,
            size,
        } = self.vocabulary;
        let (ranks, rank) = (parallel.comm.size(), parallel.comm.rank());
        let tokens = of.num_tokens();
        let all = RawTensor {
            layout: Layout::contiguous(&[ranks * tokens, SUMS])?,
            ..sums
        };
        let columns = Columns { begin, vocab: size };
        let mut parts = Parts::new(OP, &Workspace::none());
        let part = Part {
            of: cross_entropy::Problem {
                losses: None,
                lse: None,
                dlogits: None,
                ..of
            },
            columns,
            sums: part_of(&all, collective::Parts::Even(tokens), rank)?,
        };
        parts.push(Ok(part), &[])?;
        parts.push_collective(parallel.gather_even(OP, all)?, &[])?;
        let whole = Whole {
            of,
            columns,
            sums: all,
            ranks,
        };
        parts.push(Ok(whole), &[])?;
        Ok(parts)
    }
}
