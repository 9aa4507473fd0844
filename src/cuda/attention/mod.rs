//! Attention on the GPU: which kernels serve a problem.
//!
//! A [`Plan`] is chosen from shapes, strides and dtypes; whether a problem is supported, what workspace it needs and what is launched
//! all follow from its answer.

mod arguments;
mod backward;
mod hopper;
mod pair;
mod portable;
mod step;

use super::device::Resources;
use super::{Cuda, claims};
use crate::backend::{Implementation, Stream};
use crate::error::Result;
use crate::problem::attention::Problem;
use crate::problem::{self, Plans};
use crate::tensor::Scratch;

const OP: &str = "attention";

/// The operation's kernels, loaded.
pub(super) struct Kernels {
    portable: portable::Kernels,
    backward: backward::Kernels,
    /// Where the device has what they need.
    hopper: Option<hopper::Kernels>,
    step: step::Kernels,
}

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    Kernels::new(resources)
}

impl Kernels {
    fn new(resources: &Resources) -> Result<Kernels> {
        Ok(Kernels {
            portable: portable::Kernels::new(resources)?,
            backward: backward::Kernels::new(resources)?,
            hopper: hopper::Kernels::new(resources)?,
            step: step::kernels(resources)?,
        })
    }
}

/// The kernels that a problem gets.
pub(crate) struct Plan<'a> {
    cuda: &'a Cuda,
    problem: Problem,
    kernels: Chosen<'a>,
}

enum Chosen<'a> {
    /// And why not Hopper's.
    Portable(portable::Plan<'a>, &'static str),
    /// And what serves at addresses that Hopper's copy engine does not take.
    Hopper(hopper::Plan<'a>, portable::Plan<'a>),
    /// The same of few queries.
    Decode(hopper::decode::Plan<'a>, portable::Plan<'a>),
    /// The same of one query to few keys.
    Step(step::Chosen<'a>, portable::Plan<'a>),
}

impl Plans<Problem> for Cuda {
    type Plan<'a> = Plan<'a>;

    fn plan(&self, problem: Problem) -> Result<Plan<'_>> {
        let kernels = &self.attention;
        let portable = portable::Plan::new(&kernels.portable, &problem)?;
        let hopper = kernels.hopper.as_ref();
        let decode = || hopper.and_then(|hopper| hopper.decode(&problem));
        let kernels = if let Some(chosen) = step::alone(&kernels.step, &problem) {
            Chosen::Step(chosen, portable.without_splits())
        } else if let Some(plan) = decode() {
            Chosen::Decode(plan, portable.without_splits())
        } else {
            let hopper = hopper.ok_or("the device has no others");
            match hopper.and_then(|hopper| hopper.plan(&problem)) {
                Ok(plan) => Chosen::Hopper(plan, portable.without_splits()),
                Err(why) => Chosen::Portable(portable, why),
            }
        };
        Ok(Plan {
            cuda: self,
            problem,
            kernels,
        })
    }
}

impl problem::Plan for Plan<'_> {
    fn implementation(&self) -> Implementation {
        match self.kernels {
            Chosen::Portable(..) => Implementation::Cuda,
            Chosen::Hopper(..) | Chosen::Decode(..) | Chosen::Step(..) => {
                Implementation::CudaHopper
            }
        }
    }

    fn needed(&self) -> usize {
        match &self.kernels {
            Chosen::Portable(plan, _) => plan.workspace_size(),
            Chosen::Hopper(plan, _) => plan.workspace_size(),
            Chosen::Decode(plan, _) => plan.workspace_size(),
            Chosen::Step(_, plan) => plan.workspace_size(),
        }
    }

    fn useful_for_any(&self) -> Result<usize> {
        let kernels = &self.cuda.attention;
        let portable = kernels.portable.most_workspace(&self.problem);
        let hopper = kernels.hopper.as_ref().map_or(0, |hopper| {
            hopper.most_of_decoding(&self.problem).max(claims::COUNTER)
        });
        Ok(portable.max(hopper))
    }

    fn launch(&self, scratch: Scratch, stream: Stream) -> Result<()> {
        let (cuda, p) = (self.cuda, &self.problem);
        if p.batch == 0 || p.max_seqlen_q == 0 {
            return Ok(());
        }
        match &self.kernels {
            Chosen::Hopper(plan, _) if plan.reaches(p) => {
                hopper::forward(cuda, plan, (p, None), scratch.ptr, stream)
            }
            Chosen::Decode(plan, _) if plan.reaches(p) => {
                hopper::decode::forward(cuda, plan, p, scratch.ptr, stream)
            }
            Chosen::Step(chosen, _) if step::reaches(p) => {
                step::launch(cuda, (p, None), *chosen, stream)
            }
            Chosen::Portable(plan, why) => {
                portable::forward(cuda, plan, p, why, scratch.ptr, stream)
            }
            Chosen::Hopper(_, plan) | Chosen::Decode(_, plan) | Chosen::Step(_, plan) => {
                let why = "the copy engine takes no such addresses";
                portable::forward(cuda, plan, p, why, scratch.ptr, stream)
            }
        }
    }
}
