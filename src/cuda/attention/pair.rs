//! Two chunks of queries: one launch where Hopper's kernels for many queries serve both, as no chunk's last tiles then leave
//! multiprocessors idle before the next one's begin; otherwise one launch behind the other.

use super::{Chosen, Cuda, Plan, hopper};
use crate::backend::{Implementation, Stream};
use crate::error::Result;
use crate::problem::attention::Pair;
use crate::problem::{self, Plans};
use crate::tensor::Scratch;

/// The kernels that both get.
pub(crate) struct PairPlan<'a> {
    later: Plan<'a>,
    earlier: Plan<'a>,
    /// What is launched for both.
    together: Option<hopper::Plan<'a>>,
}

impl Plans<Pair> for Cuda {
    type Plan<'a> = PairPlan<'a>;

    fn plan(&self, pair: Pair) -> Result<PairPlan<'_>> {
        let (later, earlier) = (self.plan(pair.later)?, self.plan(pair.earlier())?);
        let together = match (&later.kernels, &earlier.kernels) {
            (Chosen::Hopper(a, _), Chosen::Hopper(b, _)) => {
                a.with(b, &later.problem, &earlier.problem, pair.distance)
            }
            _ => None,
        };
        Ok(PairPlan {
            later,
            earlier,
            together,
        })
    }
}

impl problem::Plan for PairPlan<'_> {
    /// The more particular one.
    fn implementation(&self) -> Implementation {
        let both = [&self.later, &self.earlier].map(problem::Plan::implementation);
        let [later, earlier] = both;
        if later as u32 > earlier as u32 {
            later
        } else {
            earlier
        }
    }

    fn needed(&self) -> usize {
        let together = self
            .together
            .as_ref()
            .map_or(0, hopper::Plan::workspace_size);
        self.later.needed().max(self.earlier.needed()).max(together)
    }

    fn launch(&self, scratch: Scratch, stream: Stream) -> Result<()> {
        let (later, earlier) = (&self.later.problem, &self.earlier.problem);
        match &self.together {
            Some(plan) if plan.reaches(later) && plan.reaches(earlier) => {
                let cuda = self.later.cuda;
                hopper::forward(cuda, plan, (later, Some(earlier)), scratch.ptr, stream)
            }
            _ => {
                self.earlier.launch(scratch, stream)?;
                self.later.launch(scratch, stream)
            }
        }
    }
}
