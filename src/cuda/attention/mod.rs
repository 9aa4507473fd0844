//! Attention on the GPU: which kernels serve a problem.
//!
//! [`Plan::new`] chooses, from shapes, strides and dtypes; whether a problem is supported, what workspace it needs and what is launched
//! all follow from its answer.

mod arguments;
mod hopper;
mod portable;

use super::Cuda;
use super::device::Resources;
use crate::context::Stream;
use crate::error::Result;
use crate::ops::Implementation;
use crate::ops::attention::Problem;

const OP: &str = "attention";

/// The operation's kernels, loaded.
pub(super) struct Kernels {
    portable: portable::Kernels,
    /// Where the device has what they need.
    hopper: Option<hopper::Kernels>,
}

impl Kernels {
    pub fn new(resources: &Resources) -> Result<Kernels> {
        Ok(Kernels {
            portable: portable::Kernels::new(resources)?,
            hopper: hopper::Kernels::new(resources)?,
        })
    }
}

/// The kernels that a problem gets.
pub(crate) enum Plan<'a> {
    Portable(portable::Plan<'a>),
    /// And what serves at addresses that Hopper's copy engine does not take.
    Hopper(hopper::Plan<'a>, portable::Plan<'a>),
}

impl<'a> Plan<'a> {
    /// Chooses; data pointers are not looked at.
    ///
    /// # Errors
    /// No kernel serves the problem.
    pub fn new(cuda: &'a Cuda, problem: &Problem) -> Result<Plan<'a>> {
        let kernels = &cuda.attention;
        let portable = portable::Plan::new(&kernels.portable, problem)?;
        let hopper = kernels.hopper.as_ref();
        Ok(match hopper.and_then(|hopper| hopper.plan(problem)) {
            Some(plan) => Plan::Hopper(plan, portable.without_splits()),
            None => Plan::Portable(portable),
        })
    }

    pub fn implementation(&self) -> Implementation {
        match self {
            Plan::Portable(_) => Implementation::Cuda,
            Plan::Hopper(..) => Implementation::CudaHopper,
        }
    }

    /// In bytes.
    pub fn workspace_size(&self) -> usize {
        match self {
            Plan::Portable(plan) => plan.workspace_size(),
            Plan::Hopper(plan, _) => plan.workspace_size(),
        }
    }

    /// Launches what was chosen for this problem. `workspace` has the planned size.
    pub fn forward(
        &self,
        cuda: &Cuda,
        problem: &Problem,
        workspace: *mut u8,
        stream: Stream,
    ) -> Result<()> {
        if problem.batch == 0 || problem.max_seqlen_q == 0 {
            return Ok(());
        }
        match self {
            Plan::Hopper(plan, _) if plan.reaches(problem) => {
                hopper::forward(cuda, plan, problem, workspace, stream)
            }
            Plan::Portable(plan) | Plan::Hopper(_, plan) => {
                portable::forward(cuda, plan, problem, workspace, stream)
            }
        }
    }
}
