//! The plan: what is counted in all targets, the chunks, the sum of the losses.

use super::OP;
use super::divided::Divided;
use crate::backend::{Implementation, Stream};
use crate::context::{Collective, Context, Planned};
use crate::dtype::DType;
use crate::error::Result;
use crate::ops::chunked::{Chunked, Memory, Rooms};
use crate::ops::parts::OneOr;
use crate::problem::Plan;
use crate::problem::cross_entropy::{self, Reduction, Targets, Total};
use crate::problem::linear_cross_entropy::Problem;
use crate::tensor::{RawTensor, Scratch};

/// A problem, and the group that divides its vocabulary.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call<'t> {
    pub problem: Problem,
    pub divided: Option<Divided<'t>>,
}

/// Chunks that wait to be run.
pub(crate) struct LossPlan<'t, 'a> {
    chunked: Chunked<'a>,
    divided: Option<Divided<'t>>,
    loss: cross_entropy::Problem,
    implementation: Implementation,
    needed: usize,
}

/// What is kept in the workspace, in this order.
struct Kept<'a> {
    /// With the rows of all ranks, sequence parallel.
    chunked: Chunked<'a>,
    /// Where ranks divide the vocabulary: what their logits come to.
    sums: Option<RawTensor>,
    /// The number of tokens that count.
    count: Option<RawTensor>,
    /// Losses that are added and that the caller does not want.
    losses: Option<RawTensor>,
    rooms: Rooms,
    memory: Memory,
}

impl<'t> Planned for Call<'t> {
    type Plan<'a> = LossPlan<'t, 'a>;

    fn plan(self, ctx: &Context) -> Result<LossPlan<'t, '_>> {
        let Problem { layer, loss } = self.problem;
        let columns = self.divided.map(|divided| divided.columns());
        let mut plan = LossPlan {
            chunked: Chunked::new(ctx, (OP, &[]), layer, columns),
            divided: self.divided,
            loss,
            implementation: Implementation::Cpu,
            needed: 0,
        };
        let kept = plan.kept(std::ptr::null_mut())?;
        plan.implementation = kept.chunked.implementation(&kept.rooms)?;
        plan.needed = plan.size(&kept, |plan| Ok(plan.without_allocating()))?;
        Ok(plan)
    }
}

impl Plan for LossPlan<'_, '_> {
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
        let chunked = &kept.chunked;
        chunked.visit_one(self.targets(&kept), &mut launch)?;
        if let Some(gather) = self.together(|divided| divided.gather(chunked))? {
            chunked.visit_one(gather, &mut launch)?;
        }
        let step = |chunk, logits| self.of_chunk(&kept, chunk, logits);
        chunked.launch(&kept.rooms, step, rest, stream)?;
        if let Some(sum) = self.together(|divided| divided.add(chunked))? {
            chunked.visit_one(sum, &mut launch)?;
        }
        match self.total(&kept) {
            Some(total) => chunked.visit_one(total, &mut launch),
            None => Ok(()),
        }
    }
}

impl<'t, 'a> LossPlan<'t, 'a> {
    /// What ranks do, if they divide the vocabulary.
    fn together(
        &self,
        what: impl Fn(&Divided<'t>) -> Result<Option<Collective<'t>>>,
    ) -> Result<Option<Collective<'t>>> {
        self.divided.as_ref().map_or(Ok(None), what)
    }

    /// In a workspace, which may be NULL where it is only measured.
    fn kept(&self, workspace: *mut u8) -> Result<Kept<'a>> {
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
        let (mut chunked, mut sums) = (self.chunked, None);
        if let Some(divided) = &self.divided {
            chunked = divided.take_rows(chunked, &mut memory)?;
            sums = Some(divided.take_sums(&chunked, &mut memory)?);
        }
        Ok(Kept {
            chunked,
            sums,
            count,
            losses,
            rooms: chunked.rooms(&mut memory)?,
            memory,
        })
    }

    /// Bytes of what is kept, and behind it of what plans ask for, who take turns.
    fn size(&self, kept: &Kept<'_>, size: impl Fn(&dyn Plan) -> Result<usize>) -> Result<usize> {
        let mut most = 0;
        let mut visit = |plan: &dyn Plan| {
            most = most.max(size(plan)?);
            Ok(())
        };
        let chunked = &kept.chunked;
        chunked.visit_one(self.targets(kept), &mut visit)?;
        for collective in [
            self.together(|divided| divided.gather(chunked))?,
            self.together(|divided| divided.add(chunked))?,
        ] {
            collective.map_or(Ok(()), |is| chunked.visit_one(is, &mut visit))?;
        }
        if let Some(total) = self.total(kept) {
            chunked.visit_one(total, &mut visit)?;
        }
        let step = |chunk, logits| self.of_chunk(kept, chunk, logits);
        let most = most.max(chunked.most(&kept.rooms, step, size)?);
        Ok(kept.memory.size().saturating_add(most))
    }

    fn denominator(&self, kept: &Kept<'_>) -> Option<RawTensor> {
        kept.count.or(self.loss.denominator)
    }

    fn targets(&self, kept: &Kept<'_>) -> Targets {
        Targets {
            targets: self.loss.targets,
            vocab: match &self.divided {
                None => self.chunked.layer().vocab(),
                Some(divided) => divided.vocabulary.size,
            },
            ignore_index: self.loss.ignore_index,
            count: kept.count,
        }
    }

    fn of_chunk(
        &self,
        kept: &Kept<'_>,
        chunk: usize,
        logits: RawTensor,
    ) -> Result<OneOr<'t, cross_entropy::Problem, 3>> {
        let of = cross_entropy::Problem {
            logits,
            targets: self.chunked.part(chunk, &self.loss.targets)?,
            loss: None,
            losses: self.chunked.part_of(chunk, &kept.losses)?,
            lse: self.chunked.part_of(chunk, &self.loss.lse)?,
            dlogits: self.loss.dlogits.map(|_| logits),
            denominator: self.denominator(kept),
            ..self.loss
        };
        match self.divided.zip(kept.sums) {
            None => Ok(OneOr::One(of)),
            Some((divided, sums)) => divided.step(of, sums).map(OneOr::Parts),
        }
    }

    fn total(&self, kept: &Kept<'_>) -> Option<Total> {
        Some(Total {
            losses: kept.losses?,
            denominator: self.denominator(kept),
            loss: self.loss.loss?,
        })
    }
}
