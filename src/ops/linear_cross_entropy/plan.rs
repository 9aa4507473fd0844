//! The plan: what is counted in all targets, the chunks, the sum of the losses.

use super::OP;
use crate::backend::{Implementation, Stream};
use crate::context::{Context, Planned};
use crate::dtype::DType;
use crate::error::Result;
use crate::ops::chunked::{Chunked, Memory, Rooms};
use crate::problem::Plan;
use crate::problem::cross_entropy::{self, Reduction, Targets, Total};
use crate::problem::linear_cross_entropy::Problem;
use crate::tensor::{RawTensor, Scratch};

/// Chunks that wait to be run.
pub(crate) struct LossPlan<'a> {
    chunked: Chunked<'a>,
    loss: cross_entropy::Problem,
    implementation: Implementation,
    needed: usize,
}

/// What is kept in the workspace, in this order.
struct Kept {
    /// The number of tokens that count.
    count: Option<RawTensor>,
    /// Losses that are added and that the caller does not want.
    losses: Option<RawTensor>,
    rooms: Rooms,
    memory: Memory,
}

impl Planned for Problem {
    type Plan<'a> = LossPlan<'a>;

    fn plan(self, ctx: &Context) -> Result<LossPlan<'_>> {
        let mut plan = LossPlan {
            chunked: Chunked::new(ctx, (OP, &[]), self.layer),
            loss: self.loss,
            implementation: Implementation::Cpu,
            needed: 0,
        };
        let kept = plan.kept(std::ptr::null_mut())?;
        plan.implementation = plan.chunked.implementation(&kept.rooms)?;
        plan.needed = plan.size(&kept, |plan| Ok(plan.without_allocating()))?;
        Ok(plan)
    }
}

impl Plan for LossPlan<'_> {
    fn implementation(&self) -> Implementation {
        self.implementation
    }

    fn needed(&self) -> usize {
        self.needed
    }

    fn useful(&self) -> Result<usize> {
        let kept = self.kept(std::ptr::null_mut())?;
        let size = self.size(&kept, |plan| plan.useful())?;
        Ok(size.max(self.needed))
    }

    fn launch(&self, scratch: Scratch, stream: Stream) -> Result<()> {
        let kept = self.kept(scratch.ptr)?;
        let rest = kept.memory.rest(scratch.size);
        let mut launch = |plan: &dyn Plan| plan.launch(rest, stream);
        self.chunked.visit_one(self.targets(&kept), &mut launch)?;
        let step = |chunk, logits| self.of_chunk(&kept, chunk, logits);
        self.chunked.launch(&kept.rooms, step, rest, stream)?;
        match self.total(&kept) {
            Some(total) => self.chunked.visit_one(total, &mut launch),
            None => Ok(()),
        }
    }
}

impl LossPlan<'_> {
    /// In a workspace, which may be NULL where it is only measured.
    fn kept(&self, workspace: *mut u8) -> Result<Kept> {
        let (loss, layer) = (&self.loss, self.chunked.layer());
        let mut memory = Memory::new(workspace);
        let counts = loss.reduction == Reduction::Mean
            && loss.denominator.is_none()
            && (loss.loss.is_some() || layer.is_differentiated());
        let count = match counts {
            true => Some(memory.take(DType::F32, &[1])?),
            false => None,
        };
        let losses = match loss.losses {
            None if loss.loss.is_some() => Some(memory.take(DType::F32, layer.tokens())?),
            given => given,
        };
        Ok(Kept {
            count,
            losses,
            rooms: self.chunked.rooms(&mut memory)?,
            memory,
        })
    }

    /// Bytes of what is kept, and behind it of what plans ask for, who take turns.
    fn size(&self, kept: &Kept, size: impl Fn(&dyn Plan) -> Result<usize>) -> Result<usize> {
        let mut most = 0;
        let mut visit = |plan: &dyn Plan| {
            most = most.max(size(plan)?);
            Ok(())
        };
        self.chunked.visit_one(self.targets(kept), &mut visit)?;
        if let Some(total) = self.total(kept) {
            self.chunked.visit_one(total, &mut visit)?;
        }
        let step = |chunk, logits| self.of_chunk(kept, chunk, logits);
        let most = most.max(self.chunked.most(&kept.rooms, step, size)?);
        Ok(kept.memory.size().saturating_add(most))
    }

    fn denominator(&self, kept: &Kept) -> Option<RawTensor> {
        kept.count.or(self.loss.denominator)
    }

    fn targets(&self, kept: &Kept) -> Targets {
        Targets {
            targets: self.loss.targets,
            vocab: self.chunked.layer().vocab(),
            ignore_index: self.loss.ignore_index,
            count: kept.count,
        }
    }

    fn of_chunk(
        &self,
        kept: &Kept,
        chunk: usize,
        logits: RawTensor,
    ) -> Result<cross_entropy::Problem> {
        Ok(cross_entropy::Problem {
            logits,
            targets: self.chunked.part(chunk, &self.loss.targets)?,
            loss: None,
            losses: self.chunked.part_of(chunk, &kept.losses)?,
            lse: self.chunked.part_of(chunk, &self.loss.lse)?,
            dlogits: self.loss.dlogits.map(|_| logits),
            denominator: self.denominator(kept),
            ..self.loss
        })
    }

    fn total(&self, kept: &Kept) -> Option<Total> {
        Some(Total {
            losses: kept.losses?,
            denominator: self.denominator(kept),
            loss: self.loss.loss?,
        })
    }
}
