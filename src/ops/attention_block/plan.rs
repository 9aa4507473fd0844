//! The plans of the block's operations, and their launch one after the other.

use arrayvec::ArrayVec;

use super::OP;
use crate::backend::{Implementation, Stream};
use crate::context::{Context, Planned};
use crate::error::{Error, Result};
use crate::problem::attention_block::Problem;
use crate::problem::{Plan, attention, kv_cache, linear, rms_norm, rope};
use crate::tensor::Scratch;

type PlanOf<'a, P> = <P as Planned>::Plan<'a>;

/// One plan for each operation; see [`Problem`].
pub(crate) struct BlockPlan<'a> {
    projections: ArrayVec<PlanOf<'a, linear::Problem>, 3>,
    norms: ArrayVec<PlanOf<'a, rms_norm::Problem>, 2>,
    rope: Option<PlanOf<'a, rope::Problem>>,
    append: Option<PlanOf<'a, kv_cache::Append>>,
    attention: PlanOf<'a, attention::Problem>,
    out_projection: PlanOf<'a, linear::Problem>,
    intermediates: usize,
}

impl Planned for Problem {
    type Plan<'a> = BlockPlan<'a>;

    fn plan(self, ctx: &Context) -> Result<BlockPlan<'_>> {
        fn each<P: Planned, const N: usize>(
            ctx: &Context,
            problems: ArrayVec<P, N>,
        ) -> Result<ArrayVec<PlanOf<'_, P>, N>> {
            problems.into_iter().map(|p| within(p.plan(ctx))).collect()
        }
        fn optional<P: Planned>(
            ctx: &Context,
            problem: Option<P>,
        ) -> Result<Option<PlanOf<'_, P>>> {
            problem.map(|p| within(p.plan(ctx))).transpose()
        }
        Ok(BlockPlan {
            projections: each(ctx, self.projections)?,
            norms: each(ctx, self.norms)?,
            rope: optional(ctx, self.rope)?,
            append: optional(ctx, self.append)?,
            attention: within(self.attention.plan(ctx))?,
            out_projection: within(self.out_projection.plan(ctx))?,
            intermediates: self.intermediates,
        })
    }
}

impl Plan for BlockPlan<'_> {
    /// That of attention, which alone has several.
    fn implementation(&self) -> Implementation {
        self.attention.implementation()
    }

    fn needed(&self) -> usize {
        match self.intermediates {
            0 => 0,
            bytes => bytes + self.attention.needed(),
        }
    }

    /// Behind what passes between operations, attention and the projections take turns.
    fn useful(&self) -> Result<usize> {
        if self.intermediates == 0 {
            return Ok(0);
        }
        let mut shared = self.attention.useful()?;
        for projection in self.projections.iter().chain([&self.out_projection]) {
            shared = shared.max(projection.useful()?);
        }
        Ok(self.intermediates + shared)
    }

    fn launch(&self, scratch: Scratch, stream: Stream) -> Result<()> {
        if self.intermediates == 0 {
            return Ok(());
        }
        let shared = Scratch {
            ptr: scratch.ptr.wrapping_add(self.intermediates),
            size: scratch.size.saturating_sub(self.intermediates),
        };
        let run = |plan: &dyn Plan, scratch| within(plan.launch(scratch, stream));
        for projection in &self.projections {
            run(projection, shared)?;
        }
        for norm in &self.norms {
            run(norm, Scratch::NONE)?;
        }
        if let Some(rope) = &self.rope {
            run(rope, Scratch::NONE)?;
        }
        if let Some(append) = &self.append {
            run(append, Scratch::NONE)?;
        }
        let attention = Scratch {
            size: self.attention.needed().min(shared.size),
            ..shared
        };
        run(&self.attention, attention)?;
        run(&self.out_projection, shared)
    }
}

/// An error of one of the block's operations, as the block's own.
pub(super) fn within<T>(result: Result<T>) -> Result<T> {
    result.map_err(|error: Error| error.within(OP))
}
