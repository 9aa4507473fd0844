//! Operations that are one problem or several, as their parameters say.

use super::Parts;
use super::plan::PartsPlan;
use crate::backend::{Implementation, Stream};
use crate::context::{Context, Planned};
use crate::error::Result;
use crate::problem::Plan;
use crate::tensor::Scratch;

/// An operation of one problem where it is not made of parts.
#[allow(clippy::large_enum_variant)] // as of parts
pub(crate) enum OneOr<'t, P, const N: usize> {
    One(P),
    Parts(Parts<'t, N>),
}

/// The plan of either.
#[allow(clippy::large_enum_variant)] // as of parts
pub(crate) enum OneOrPlan<'t, 'a, P, const N: usize> {
    One(P),
    Parts(PartsPlan<'t, 'a, N>),
}

impl<'t, P: Planned, const N: usize> Planned for OneOr<'t, P, N>
where
    for<'a> P::Plan<'a>: 'a,
{
    type Plan<'a> = OneOrPlan<'t, 'a, P::Plan<'a>, N>;

    fn plan(self, ctx: &Context) -> Result<Self::Plan<'_>> {
        Ok(match self {
            OneOr::One(problem) => OneOrPlan::One(problem.plan(ctx)?),
            OneOr::Parts(parts) => OneOrPlan::Parts(parts.plan(ctx)?),
        })
    }
}

impl<P: Plan, const N: usize> OneOrPlan<'_, '_, P, N> {
    fn as_plan(&self) -> &dyn Plan {
        match self {
            OneOrPlan::One(plan) => plan,
            OneOrPlan::Parts(plan) => plan,
        }
    }
}

impl<P: Plan, const N: usize> Plan for OneOrPlan<'_, '_, P, N> {
    fn implementation(&self) -> Implementation {
        self.as_plan().implementation()
    }

    fn needed(&self) -> usize {
        self.as_plan().needed()
    }

    fn useful(&self) -> Result<usize> {
        self.as_plan().useful()
    }

    fn useful_for_any(&self) -> Result<usize> {
        self.as_plan().useful_for_any()
    }

    fn used(&self, given: usize) -> Result<usize> {
        self.as_plan().used(given)
    }

    fn without_allocating(&self) -> usize {
        self.as_plan().without_allocating()
    }

    fn probe(&self) -> Result<()> {
        self.as_plan().probe()
    }

    fn launch(&self, scratch: Scratch, stream: Stream) -> Result<()> {
        self.as_plan().launch(scratch, stream)
    }

    fn settle(&self, stream: Stream) {
        self.as_plan().settle(stream);
    }
}
