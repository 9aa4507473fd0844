//! The plan of either pass: a look at all ids where the host can look, then the chunks.

use super::{OP, backward};
use crate::backend::{Implementation, Stream};
use crate::context::{Context, Planned};
use crate::error::Result;
use crate::ops::chunked::{Chunked, Memory, Rooms};
use crate::problem::Plan;
use crate::problem::cross_entropy::Targets;
use crate::problem::linear_logprob::Problem;
use crate::problem::logprob;
use crate::tensor::{RawTensor, Scratch};

/// Chunks that wait to be run.
pub(crate) struct LogprobPlan<'a> {
    chunked: Chunked<'a>,
    logprob: logprob::Problem,
    implementation: Implementation,
    needed: usize,
}

impl Planned for Problem {
    type Plan<'a> = LogprobPlan<'a>;

    fn plan(self, ctx: &Context) -> Result<LogprobPlan<'_>> {
        let op = match self.logprob.differentiate {
            true => backward::OP,
            false => OP,
        };
        let mut plan = LogprobPlan {
            chunked: Chunked::new(ctx, (op, &[("targets", "ids")]), self.layer, None),
            logprob: self.logprob,
            implementation: Implementation::Cpu,
            needed: 0,
        };
        let (rooms, _) = plan.rooms(std::ptr::null_mut())?;
        plan.implementation = plan.chunked.implementation(&rooms)?;
        plan.needed = plan.size(|plan| Ok(plan.without_allocating()))?;
        Ok(plan)
    }
}

impl Plan for LogprobPlan<'_> {
    fn implementation(&self) -> Implementation {
        self.implementation
    }

    fn needed(&self) -> usize {
        self.needed
    }

    fn useful(&self) -> Result<usize> {
        let size = self.size(|plan| plan.useful())?;
        Ok(size.max(self.needed))
    }

    fn launch(&self, scratch: Scratch, stream: Stream) -> Result<()> {
        let (rooms, memory) = self.rooms(scratch.ptr)?;
        let rest = memory.rest(scratch.size);
        let mut launch = |plan: &dyn Plan| plan.launch(rest, stream);
        self.chunked.visit_one(self.ids(), &mut launch)?;
        let step = |chunk, logits| self.of_chunk(chunk, logits);
        self.chunked.launch(&rooms, step, rest, stream)
    }
}

impl LogprobPlan<'_> {
    /// In a workspace, which may be NULL where it is only measured.
    fn rooms(&self, workspace: *mut u8) -> Result<(Rooms, Memory)> {
        let mut memory = Memory::new(workspace);
        Ok((self.chunked.rooms(&mut memory)?, memory))
    }

    /// Bytes of chunks, and behind them of what plans ask for, who take turns.
    fn size(&self, size: impl Fn(&dyn Plan) -> Result<usize>) -> Result<usize> {
        let (rooms, memory) = self.rooms(std::ptr::null_mut())?;
        self.chunked.visit_one(self.ids(), &mut |_| Ok(()))?;
        let step = |chunk, logits| self.of_chunk(chunk, logits);
        let most = self.chunked.most(&rooms, step, size)?;
        Ok(memory.size().saturating_add(most))
    }

    fn ids(&self) -> Targets {
        Targets {
            targets: self.logprob.ids,
            vocab: self.chunked.layer().vocab(),
            ignore_index: self.logprob.ignore_index,
            count: None,
        }
    }

    fn of_chunk(&self, chunk: usize, logits: RawTensor) -> Result<logprob::Problem> {
        let p = &self.logprob;
        let part = |t: &Option<RawTensor>| self.chunked.part_of(chunk, t);
        Ok(logprob::Problem {
            logits,
            ids: self.chunked.part(chunk, &p.ids)?,
            logprobs: part(&p.logprobs)?,
            entropy: part(&p.entropy)?,
            lse: part(&p.lse)?,
            dlogprobs: part(&p.dlogprobs)?,
            dentropy: part(&p.dentropy)?,
            ..*p
        })
    }
}
