//! The way from a rank to the others of its group, which is the backend's.

use std::ffi::c_void;
use std::time::Duration;

use super::{Chosen, Context, Device, Planned};
use crate::alloc::boxed;
use crate::backend::{NcclLibrary, Stream};
use crate::cpu::Cpu;
use crate::cpu::collective::{self, Member};
pub(crate) use crate::cpu::collective::{ID_BYTES, MAX_RANKS};
use crate::cuda::Cuda;
use crate::cuda::collective::{self as nccl, Comm};
use crate::error::{Error, Result, text};
use crate::problem::Plans;
use crate::problem::collective::{self as problem, Call, Problem};
use crate::problem::rms_norm;

/// A rank's way to the others.
#[derive(Debug)]
pub(crate) enum Transport {
    /// To threads of this process.
    Local(Member),
    /// NCCL's.
    Nccl(Box<Comm>),
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

    /// The id of a group of NCCL's that is to meet.
    pub fn nccl_id(op: &'static str, library: &NcclLibrary<'_>) -> Result<[u8; ID_BYTES]> {
        nccl::new_id(op, library)
    }

    /// That of a rank of a group of NCCL's, when all have come.
    pub fn nccl(
        op: &'static str,
        ctx: &Context,
        library: &NcclLibrary<'_>,
        id: &[u8; ID_BYTES],
        ranks: (usize, usize),
    ) -> Result<Transport> {
        let comm = of_gpu(op, ctx)?.join(op, library, *id, ranks)?;
        Ok(Transport::Nccl(boxed(op, comm)?))
    }

    /// That of a communicator of the caller's.
    ///
    /// # Safety
    /// It is a live `ncclComm_t` of the library's, for as long as the result lives.
    pub unsafe fn lent(
        op: &'static str,
        ctx: &Context,
        library: &NcclLibrary<'_>,
        comm: *mut c_void,
    ) -> Result<Transport> {
        // SAFETY: the caller's promise.
        let comm = unsafe { of_gpu(op, ctx)?.borrow(op, library, comm) }?;
        Ok(Transport::Nccl(boxed(op, comm)?))
    }

    /// Which rank it is of, of how many, and the version of NCCL, 0 without it; `None` where the
    /// transport does not know the ranks.
    pub fn of_nccl(&self) -> Option<(usize, usize, i32)> {
        match self {
            Transport::Local(_) => None,
            Transport::Nccl(comm) => Some((comm.rank(), comm.size(), comm.version_code())),
        }
    }

    /// Meets the other ranks.
    pub fn warm_up(&self, op: &'static str, ctx: &Context, stream: Stream) -> Result<()> {
        match self {
            Transport::Local(member) => member.barrier(op),
            Transport::Nccl(comm) => comm.warm_up(op, of_gpu(op, ctx)?, stream),
        }
    }

    /// Bytes of this rank's slots, to which the other ranks write; 0 if the group has slots already, or cannot have any.
    pub fn slot_bytes(&self) -> usize {
        match self {
            Transport::Local(_) => 0,
            Transport::Nccl(comm) => comm.slot_bytes(),
        }
    }

    /// Makes slots together with the other ranks, and says whether the group has some then. `bytes` is what [`Transport::slot_bytes`]
    /// gave, or `None` if this rank has no room: then no rank makes any.
    pub fn make_slots(
        &self,
        op: &'static str,
        ctx: &Context,
        bytes: Option<usize>,
        stream: Stream,
    ) -> Result<bool> {
        match self {
            Transport::Local(_) => Ok(false),
            Transport::Nccl(comm) => comm.make_slots(op, of_gpu(op, ctx)?, bytes, stream),
        }
    }

    /// Memory that other ranks reach, zeroed; `None` where that is no more than other memory.
    pub fn alloc(&self, op: &'static str, ctx: &Context, size: usize) -> Result<Option<*mut u8>> {
        match self {
            Transport::Local(_) => Ok(None),
            Transport::Nccl(comm) => comm.alloc(op, of_gpu(op, ctx)?, size),
        }
    }

    /// Frees what [`Transport::alloc`] gave; whether it did give it.
    pub fn free(&self, op: &'static str, memory: *mut u8) -> Result<bool> {
        match self {
            Transport::Local(_) => Ok(false),
            Transport::Nccl(comm) => comm.free(op, memory),
        }
    }

    /// Breaks the group.
    pub fn abort(&self, op: &'static str) -> Result<()> {
        match self {
            Transport::Local(member) => {
                member.abort();
                Ok(())
            }
            Transport::Nccl(comm) => comm.abort(op),
        }
    }

    /// Rows of a chunk, at least, of so many with so many bytes each, where a chunk's sum is to run beside
    /// the next one's product: the same on all ranks, whatever devices they have.
    pub fn chunk_rows(&self, rows: usize, row_bytes: usize) -> usize {
        match self {
            // A rank's threads do one thing after the other.
            Transport::Local(_) => rows,
            Transport::Nccl(comm) => comm.chunk_rows(rows, row_bytes),
        }
    }

    /// Why the group does not work, if it does not.
    pub fn health(&self, op: &'static str) -> Result<()> {
        match self {
            Transport::Local(member) => member.health(op),
            Transport::Nccl(comm) => comm.health(op),
        }
    }
}

/// The GPU of a context, for a group of NCCL's.
fn of_gpu<'a>(op: &'static str, ctx: &'a Context) -> Result<&'a Cuda> {
    match &ctx.inner.device {
        Device::Cuda(cuda) => Ok(cuda),
        Device::Cpu(_) => {
            let problem = "is nccl, which ctx of the cpu backend is not";
            Err(Error::unsupported(op, "kind", problem))
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
    type Plan<'a> = Chosen<
        <Cpu as Plans<Call<'t, Member>>>::Plan<'a>,
        <Cuda as Plans<Call<'t, Comm>>>::Plan<'a>,
    >;

    fn plan(self, ctx: &Context) -> Result<Self::Plan<'_>> {
        let problem = self.problem;
        Ok(match (&ctx.inner.device, self.transport) {
            (Device::Cpu(cpu), Transport::Local(transport)) => {
                Chosen::Cpu(cpu.plan(Call { transport, problem })?)
            }
            (Device::Cuda(cuda), Transport::Nccl(comm)) => {
                let transport = &**comm;
                Chosen::Cuda((**cuda).plan(Call { transport, problem })?)
            }
            // A group is of its context's backend, which was compared.
            _ => return Err(of_another(problem.op)),
        })
    }
}

/// Two collectives of the same ranks that are one launch where that can be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Both<'t> {
    pub transport: &'t Transport,
    pub problems: [Problem<'t>; 2],
}

impl<'t> Planned for Both<'t> {
    type Plan<'a> = Chosen<
        <Cpu as Plans<problem::Both<'t, Member>>>::Plan<'a>,
        <Cuda as Plans<problem::Both<'t, Comm>>>::Plan<'a>,
    >;

    fn plan(self, ctx: &Context) -> Result<Self::Plan<'_>> {
        let problems = self.problems;
        Ok(match (&ctx.inner.device, self.transport) {
            (Device::Cpu(cpu), Transport::Local(transport)) => {
                let both = problem::Both {
                    transport,
                    problems,
                };
                Chosen::Cpu(cpu.plan(both)?)
            }
            (Device::Cuda(cuda), Transport::Nccl(comm)) => {
                let both = problem::Both {
                    transport: &**comm,
                    problems,
                };
                Chosen::Cuda((**cuda).plan(both)?)
            }
            _ => return Err(of_another(problems[0].op)),
        })
    }
}

/// A sum of all ranks, and what it becomes on each, or on one for all.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Normalised<'t> {
    pub sum: Collective<'t>,
    pub norm: rms_norm::Problem,
    pub gathered: Option<Problem<'t>>,
}

impl<'t> Planned for Normalised<'t> {
    type Plan<'a> = Chosen<
        <Cpu as Plans<problem::Normalised<'t, Member>>>::Plan<'a>,
        <Cuda as Plans<problem::Normalised<'t, Comm>>>::Plan<'a>,
    >;

    fn plan(self, ctx: &Context) -> Result<Self::Plan<'_>> {
        let Normalised {
            sum,
            norm,
            gathered,
        } = self;
        let problem = sum.problem;
        Ok(match (&ctx.inner.device, sum.transport) {
            (Device::Cpu(cpu), Transport::Local(transport)) => {
                let normalised = problem::Normalised {
                    sum: Call { transport, problem },
                    norm,
                    gathered,
                };
                Chosen::Cpu(cpu.plan(normalised)?)
            }
            (Device::Cuda(cuda), Transport::Nccl(comm)) => {
                let transport = &**comm;
                let normalised = problem::Normalised {
                    sum: Call { transport, problem },
                    norm,
                    gathered,
                };
                Chosen::Cuda((**cuda).plan(normalised)?)
            }
            _ => return Err(of_another(problem.op)),
        })
    }
}

fn of_another(op: &'static str) -> Error {
    Error::invalid(op, "comm", "belongs to another context")
}

/// A collective that runs beside what is queued behind it. On the CPU it has run when that begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Beside<'t> {
    pub is: Collective<'t>,
    /// What it is waited for by.
    pub number: usize,
}

impl<'t> Planned for Beside<'t> {
    type Plan<'a> = Chosen<
        <Cpu as Plans<Call<'t, Member>>>::Plan<'a>,
        <Cuda as Plans<problem::Beside<'t, Comm>>>::Plan<'a>,
    >;

    fn plan(self, ctx: &Context) -> Result<Self::Plan<'_>> {
        let Beside { is, number } = self;
        let problem = is.problem;
        Ok(match (&ctx.inner.device, is.transport) {
            (Device::Cpu(cpu), Transport::Local(transport)) => {
                Chosen::Cpu(cpu.plan(Call { transport, problem })?)
            }
            (Device::Cuda(cuda), Transport::Nccl(comm)) => {
                let transport = &**comm;
                let call = Call { transport, problem };
                Chosen::Cuda((**cuda).plan(problem::Beside { call, number })?)
            }
            _ => return Err(of_another(problem.op)),
        })
    }
}

/// What is queued behind it waits for a collective beside others, and for those before that.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Join<'t> {
    pub op: &'static str,
    pub transport: &'t Transport,
    pub number: usize,
}

impl<'t> Planned for Join<'t> {
    type Plan<'a> = Chosen<
        <Cpu as Plans<problem::Join<'t, Member>>>::Plan<'a>,
        <Cuda as Plans<problem::Join<'t, Comm>>>::Plan<'a>,
    >;

    fn plan(self, ctx: &Context) -> Result<Self::Plan<'_>> {
        let Join { op, number, .. } = self;
        Ok(match (&ctx.inner.device, self.transport) {
            (Device::Cpu(cpu), Transport::Local(transport)) => {
                let join = problem::Join {
                    op,
                    transport,
                    number,
                };
                Chosen::Cpu(cpu.plan(join)?)
            }
            (Device::Cuda(cuda), Transport::Nccl(comm)) => {
                let join = problem::Join {
                    op,
                    transport: &**comm,
                    number,
                };
                Chosen::Cuda((**cuda).plan(join)?)
            }
            _ => return Err(of_another(op)),
        })
    }
}
