//! The plans of the block's operations, and their launch one after the other.

use arrayvec::ArrayVec;

use super::OP;
use crate::backend::{Implementation, Stream};
use crate::context::{Context, Planned};
use crate::error::Result;
use crate::problem::attention_block::{Names, Part, Problem};
use crate::problem::{Plan, attention, kv_cache, linear, rms_norm, rope};
use crate::tensor::Scratch;

type PartOf<'a, P> = Part<<P as Planned>::Plan<'a>>;

/// One plan for each operation; see [`Problem`].
pub(crate) struct BlockPlan<'a> {
    projections: ArrayVec<PartOf<'a, linear::Problem>, 3>,
    norms: ArrayVec<PartOf<'a, rms_norm::Problem>, 2>,
    rope: Option<PartOf<'a, rope::Problem>>,
    append: Option<PartOf<'a, kv_cache::Append>>,
    attention: PartOf<'a, attention::Problem>,
    out_projection: PartOf<'a, linear::Problem>,
    intermediates: usize,
    any_batch: bool,
}

impl Planned for Problem {
    type Plan<'a> = BlockPlan<'a>;

    fn plan(self, ctx: &Context) -> Result<BlockPlan<'_>> {
        fn one<P: Planned>(ctx: &Context, part: Part<P>) -> Result<PartOf<'_, P>> {
            self::part(part.is.plan(ctx), part.names)
        }
        fn each<P: Planned, const N: usize>(
            ctx: &Context,
            parts: ArrayVec<Part<P>, N>,
        ) -> Result<ArrayVec<PartOf<'_, P>, N>> {
            parts.into_iter().map(|part| one(ctx, part)).collect()
        }
        fn optional<P: Planned>(
            ctx: &Context,
            part: Option<Part<P>>,
        ) -> Result<Option<PartOf<'_, P>>> {
            part.map(|part| one(ctx, part)).transpose()
        }
        Ok(BlockPlan {
            projections: each(ctx, self.projections)?,
            norms: each(ctx, self.norms)?,
            rope: optional(ctx, self.rope)?,
            append: optional(ctx, self.append)?,
            attention: one(ctx, self.attention)?,
            out_projection: one(ctx, self.out_projection)?,
            intermediates: self.intermediates,
            any_batch: self.any_batch,
        })
    }
}

impl Plan for BlockPlan<'_> {
    /// That of attention, which alone has several.
    fn implementation(&self) -> Implementation {
        self.attention.is.implementation()
    }

    fn needed(&self) -> usize {
        match self.intermediates {
            0 => 0,
            bytes => bytes + self.attention.is.needed(),
        }
    }

    /// Behind what passes between operations, attention and the projections take turns.
    fn useful(&self) -> Result<usize> {
        if self.intermediates == 0 {
            return Ok(0);
        }
        let mut shared = match self.any_batch {
            true => self.attention.is.useful_for_any()?,
            false => self.attention.is.useful()?,
        };
        for projection in self.projections.iter().chain([&self.out_projection]) {
            shared = shared.max(projection.is.useful()?);
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
        let run = |part: Part<&dyn Plan>, scratch| {
            self::part(part.is.launch(scratch, stream), part.names).map(drop)
        };
        for projection in &self.projections {
            run(of(projection), shared)?;
        }
        for norm in &self.norms {
            run(of(norm), Scratch::NONE)?;
        }
        if let Some(rope) = &self.rope {
            run(of(rope), Scratch::NONE)?;
        }
        if let Some(append) = &self.append {
            run(of(append), Scratch::NONE)?;
        }
        let attention = Scratch {
            size: self.attention.is.needed().min(shared.size),
            ..shared
        };
        run(of(&self.attention), attention)?;
        run(of(&self.out_projection), shared)
    }
}

fn of<P: Plan>(part: &Part<P>) -> Part<&dyn Plan> {
    Part {
        is: &part.is,
        names: part.names,
    }
}

/// A part, or its error as the block's own: the argument is called what the block calls it.
pub(super) fn part<P>(result: Result<P>, names: Names) -> Result<Part<P>> {
    match result {
        Ok(is) => Ok(Part { is, names }),
        Err(error) => Err(error.within(OP).renamed(names)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    /// What a backend refuses when it chooses, or when it launches, is named as the block names it.
    #[test]
    fn errors_of_parts_name_the_blocks_arguments() {
        let names: Names = &[("weight", "q_norm"), ("epsilon", "norm_epsilon")];
        for (argument, expected) in [
            ("weight", "attention_block: q_norm is odd"),
            ("epsilon", "attention_block: norm_epsilon is odd"),
            ("x", "attention_block: x is odd"),
        ] {
            let refused: Result<()> = Err(Error::unsupported("rms_norm", argument, "is odd"));
            assert_eq!(part(refused, names).unwrap_err().to_string(), expected);
        }
    }
}
