//! The way from a rank to the others of its group, which is the backend's.

use std::time::Duration;

use super::{Context, Device, Planned};
use crate::backend::Stream;
use crate::cpu::Cpu;
use crate::cpu::collective::{self, Member};
pub(crate) use crate::cpu::collective::{ID_BYTES, MAX_RANKS};
use crate::error::{Error, Result, text};
use crate::problem::Plans;
use crate::problem::collective::{Call, Problem};

/// A rank's way to the others.
#[derive(Debug)]
pub(crate) enum Transport {
    /// To threads of this process.
    Local(Member),
}

impl Transport {
    /// The id of a local group that is to meet.
    pub fn local_id(op: &'static str) -> Result<[u8; ID_BYTES]> {
        collective::new_id(op)
    }

    /// That of a rank of a local group, when all have come.
    pub fn local(
        op: &'static str,
        ctx: &Context,
        id: &[u8; ID_BYTES],
        (rank, size): (usize, usize),
        timeout: Duration,
    ) -> Result<Transport> {
        let Device::Cpu(_) = &ctx.inner.device else {
            let problem = text!(
                "is local, which ctx of the {} backend is not",
                ctx.backend()
            );
            return Err(Error::unsupported(op, "kind", problem));
        };
        let member = Member::meet(op, id, rank, size, timeout)?;
        Ok(Transport::Local(member))
    }

    /// Meets the other ranks.
    pub fn warm_up(&self, op: &'static str, _: Stream) -> Result<()> {
        match self {
            Transport::Local(member) => member.barrier(op),
        }
    }

    /// Breaks the group.
    pub fn abort(&self, _: &'static str) -> Result<()> {
        match self {
            Transport::Local(member) => {
                member.abort();
                Ok(())
            }
        }
    }

    /// Why the group does not work, if it does not.
    pub fn health(&self, op: &'static str) -> Result<()> {
        match self {
            Transport::Local(member) => member.health(op),
        }
    }
}

/// A collective of the ranks that a transport leads to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Collective<'t> {
    pub transport: &'t Transport,
    pub problem: Problem<'t>,
}

impl<'t> Planned for Collective<'t> {
    type Plan<'a> = <Cpu as Plans<Call<'t, Member>>>::Plan<'a>;

    fn plan(self, ctx: &Context) -> Result<Self::Plan<'_>> {
        let problem = self.problem;
        match (&ctx.inner.device, self.transport) {
            (Device::Cpu(cpu), Transport::Local(transport)) => {
                cpu.plan(Call { transport, problem })
            }
            // A group is of its context's backend, which was compared.
            (Device::Cuda(_), Transport::Local(_)) => {
                let what = "belongs to another context";
                Err(Error::invalid(problem.op, "comm", what))
            }
        }
    }
}
