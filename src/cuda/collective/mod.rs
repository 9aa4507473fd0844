//! Collectives of GPUs: NCCL's, on the caller's stream or beside it.
//!
//! What NCCL has no function for is a group of those that it has: rows by counts are gathered by
//! broadcasts and scattered by reductions to one rank, each of a part, and rows are exchanged, and gathered in another
//! order, by sends and receipts. A group is one launch.

mod queue;
mod side;
mod slots;
mod windows;

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::device::Primary;
use super::nccl::{self, Nccl, Version};
use super::tuning::rules::sums;
use super::warm_up::Taken;
use super::{Cuda, Run};
use crate::backend::{Device, NcclLibrary, Stream};
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::problem::collective::{Beside, Both, Call, Join, Kind, Parts, Problem, ReduceOp};
use crate::tensor::RawTensor;
use queue::{Queue, moved_as};
use side::Side;
pub(super) use slots::Slots;
use windows::Windows;

/// Since then copy engines serve what ranks send each other as it is, from and to windows.
const WITH_COPY_ENGINES: Version = Version(2, 28, 0);

/// A rank of a group of NCCL's.
#[derive(Debug)]
pub(crate) struct Comm {
    nccl: Nccl,
    /// NULL once it was aborted.
    comm: AtomicPtr<c_void>,
    /// Whether it is the caller's, who ends it.
    lent: bool,
    rank: usize,
    size: usize,
    primary: Primary,
    /// NCCL takes the calls on a communicator from one thread at a time.
    turn: Mutex<()>,
    /// Used in turn, too.
    side: Side,
    windows: Windows,
    slots: slots::Made,
}

// SAFETY: handles of NCCL's and of the driver's, which any thread may use, in turn where it matters.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

/// An id of a group that is to meet.
pub(crate) fn new_id(op: &'static str, library: &NcclLibrary<'_>) -> Result<[u8; 128]> {
    Nccl::find(op, library, true)?.new_id(op)
}

impl Cuda {
    /// Joins a group, waiting for its other ranks.
    pub fn join(
        &self,
        op: &'static str,
        library: &NcclLibrary<'_>,
        id: [u8; 128],
        (rank, size): (usize, usize),
    ) -> Result<Comm> {
        let nccl = Nccl::find(op, library, true)?;
        let primary = self.retained(op)?;
        let side = Side::new(op, self)?;
        let mut comm = ptr::null_mut();
        let entered = primary.enter(op)?;
        let (id, size_of_group, own) = (nccl::UniqueId(id), size as c_int, rank as c_int);
        let (call, status) = match nccl.functions.comm_init_rank_config {
            Some(init) if nccl.version >= WITH_COPY_ENGINES => {
                let mut config = nccl::Config::of(nccl::BY_COPY_ENGINES);
                // SAFETY: valid for a write; both fit an int, and NCCL looks at the id; the configuration is one of its own.
                let status = unsafe { init(&mut comm, size_of_group, id, own, &mut config) };
                ("ncclCommInitRankConfig", status)
            }
            _ => {
                let init = nccl.functions.comm_init_rank;
                // SAFETY: as above.
                let status = unsafe { init(&mut comm, size_of_group, id, own) };
                ("ncclCommInitRank", status)
            }
        };
        drop(entered);
        nccl.check(op, call, ptr::null_mut(), status)?;
        Ok(Comm {
            nccl,
            comm: AtomicPtr::new(comm),
            lent: false,
            rank,
            size,
            primary,
            turn: Mutex::new(()),
            side,
            windows: Windows::default(),
            slots: slots::Made::new(),
        })
    }

    /// Takes a communicator of the caller's.
    ///
    /// # Safety
    /// It is a live one of the library's, for as long as the result lives.
    pub unsafe fn borrow(
        &self,
        op: &'static str,
        library: &NcclLibrary<'_>,
        comm: *mut c_void,
    ) -> Result<Comm> {
        let nccl = Nccl::find(op, library, false)?;
        let primary = self.retained(op)?;
        let ask = |call, function: unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int| {
            let mut value = 0;
            // SAFETY: a live communicator, by the caller's promise; valid for a write.
            let status = unsafe { function(comm, &mut value) };
            nccl.check(op, call, comm, status)?;
            Ok::<c_int, Error>(value)
        };
        let f = &nccl.functions;
        let size = ask("ncclCommCount", f.comm_count)?;
        let rank = ask("ncclCommUserRank", f.comm_user_rank)?;
        let device = ask("ncclCommCuDevice", f.comm_device)?;
        if device != self.resources.ordinal() {
            let ours = self.resources.ordinal();
            let problem = text!("is of device {device}, ctx is of device {ours}");
            return Err(Error::invalid(op, "nccl_comm", problem));
        }
        Ok(Comm {
            nccl,
            comm: AtomicPtr::new(comm),
            lent: true,
            rank: rank.unsigned_abs() as usize,
            size: size.unsigned_abs() as usize,
            primary,
            turn: Mutex::new(()),
            side: Side::new(op, self)?,
            windows: Windows::default(),
            slots: slots::Made::new(),
        })
    }

    fn retained(&self, op: &'static str) -> Result<Primary> {
        let driver = self.resources.primary.driver;
        Primary::retain(op, driver, self.resources.ordinal())
    }
}

/// A reduction of one number, in place.
fn of_one(op: &'static str, x: RawTensor, by: ReduceOp) -> Problem<'static> {
    Problem {
        op,
        kind: Kind::AllReduce(by),
        dtype: x.dtype,
        row: 1,
        x: Some(x),
        out: Some(x),
        sent: Parts::Even(1),
        received: Parts::Even(1),
    }
}

impl Comm {
    pub fn rank(&self) -> usize {
        self.rank
    }

    pub fn size(&self) -> usize {
        self.size
    }

    /// As `ncclGetVersion` gives it.
    pub fn version_code(&self) -> i32 {
        self.nccl.version_code
    }

    /// Rows of a chunk of so many with so many bytes each, at least.
    pub fn chunk_rows(&self, rows: usize, row_bytes: usize) -> usize {
        match self.size {
            1 => rows,
            _ => sums::chunk_rows(rows, row_bytes),
        }
    }

    /// The communicator, unless it was aborted.
    fn live(&self, op: &'static str) -> Result<*mut c_void> {
        let comm = self.comm.load(Ordering::Acquire);
        if comm.is_null() {
            return Err(Error::comm(
                op,
                text!("is broken: rank {} aborted it", self.rank),
            ));
        }
        Ok(comm)
    }

    /// Connects the ranks, by a reduction of one number, and waits for it.
    pub fn warm_up(&self, op: &'static str, cuda: &Cuda, stream: Stream) -> Result<()> {
        let memory = Taken::new(cuda, op, size_of::<f32>())?;
        let problem = of_one(op, memory.tensor(DType::F32, 1)?, ReduceOp::Sum);
        self.launch(&problem, stream)?;
        cuda.synchronize(op, stream)
    }

    /// Ends what NCCL has running, and the communicator with it. Of one that was lent, ends what this library has running:
    /// who made it aborts it.
    pub fn abort(&self, op: &'static str) -> Result<()> {
        let f = &self.nccl.functions;
        let abort = match self.lent {
            true => None,
            false => Some(self.nccl.later(op, f.comm_abort, "ncclCommAbort", "2.4")?),
        };
        self.abort_slots();
        // Not in turn: who has it may wait for a rank that does not come.
        let comm = self.comm.swap(ptr::null_mut(), Ordering::AcqRel);
        let (Some(abort), false) = (abort, comm.is_null()) else {
            return Ok(());
        };
        let _entered = self.primary.enter(op)?;
        // SAFETY: made by `join`, and found by nobody from here on.
        let status = unsafe { abort(comm) };
        self.nccl
            .check(op, "ncclCommAbort", ptr::null_mut(), status)
    }

    /// Asks for an asynchronous error.
    pub fn health(&self, op: &'static str) -> Result<()> {
        let comm = self.live(op)?;
        let Some(ask) = self.nccl.functions.async_error else {
            return Ok(());
        };
        let mut found = nccl::SUCCESS;
        // SAFETY: the communicator is live; valid for a write.
        let status = unsafe { ask(comm, &mut found) };
        self.nccl.check(op, "ncclCommGetAsyncError", comm, status)?;
        match found {
            nccl::IN_PROGRESS => Ok(()),
            found => self.nccl.check(op, "an earlier collective", comm, found),
        }
    }

    /// Queues a problem, which has been checked.
    pub(super) fn launch(&self, p: &Problem<'_>, stream: Stream) -> Result<()> {
        if p.is_empty() {
            return Ok(());
        }
        let _turn = self.turn();
        self.queue_or_fork(std::slice::from_ref(p), stream)
    }

    /// Queues two problems as one launch.
    fn launch_both(&self, both: &[Problem<'_>; 2], stream: Stream) -> Result<()> {
        let _turn = self.turn();
        self.queue_or_fork(both, stream)
    }

    /// Queues problems of one operation, in turn. NCCL's copies refuse the default stream of old, which so waits for the group's own.
    fn queue_or_fork(&self, problems: &[Problem<'_>], stream: Stream) -> Result<()> {
        const NUMBER: usize = 0;
        match problems.iter().find(|p| self.by_copies(p)) {
            Some(p) if stream.is_legacy() => {
                let queue = |side| self.queue_all(problems, side);
                self.side.beside(p.op, NUMBER, stream, queue)?;
                self.side.join(p.op, NUMBER, stream)
            }
            _ => self.queue_all(problems, stream),
        }
    }

    /// Whether copy engines may serve a problem: what ranks send each other as it is, between windows. The same on all ranks, if each
    /// has its tensors at the same place in the group's memory.
    pub(super) fn by_copies(&self, p: &Problem<'_>) -> bool {
        let even = |parts| matches!(parts, Parts::Even(_));
        let in_window = |t: &Option<RawTensor>| t.is_some_and(|t| self.windows.hold(&t));
        matches!(p.kind, Kind::AllGather | Kind::AllToAll)
            && self.nccl.version >= WITH_COPY_ENGINES
            && (even(p.sent) && even(p.received))
            && (in_window(&p.x) && in_window(&p.out))
    }

    /// Queues a problem that has elements on a stream of the communicator's own, behind what the caller's has.
    fn launch_beside(&self, p: &Problem<'_>, number: usize, stream: Stream) -> Result<()> {
        let _turn = self.turn();
        self.side
            .beside(p.op, number, stream, |side| self.queue(p, side))
    }

    /// Queues work of this library's own between those of NCCL's, unless the group is broken.
    pub(super) fn in_turn(
        &self,
        op: &'static str,
        queue: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let _turn = self.turn();
        self.live(op)?;
        queue()
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a problem, in turn.
    fn queue(&self, p: &Problem<'_>, stream: Stream) -> Result<()> {
        self.queue_all(std::slice::from_ref(p), stream)
    }

    /// Queues problems of one operation that have elements, in turn.
    fn queue_all(&self, problems: &[Problem<'_>], stream: Stream) -> Result<()> {
        let Some(first) = problems.first() else {
            return Ok(());
        };
        let _entered = self.primary.enter(first.op)?;
        // NCCL connects ranks when they first need it, which a capture elsewhere may be in the way of.
        let _relaxed = self.primary.driver.relax_capture(first.op)?;
        let handle = self.live(first.op)?;
        let queue = |p: &Problem<'_>| Queue {
            comm: self,
            handle,
            stream: stream.as_raw(),
            op: p.op,
            dtype: moved_as(p.dtype),
            size: p.dtype.size(),
        };
        match problems {
            [p] => queue(p).run(p),
            _ => queue(first).group(|| problems.iter().try_for_each(|p| queue(p).run(p))),
        }
    }

    /// Whether the library has what a problem needs.
    fn check(&self, p: &Problem<'_>) -> Result<()> {
        let needs = |argument: &'static str, what: &str, least: Version| {
            if self.nccl.version >= least {
                return Ok(());
            }
            let Version(major, minor, _) = least;
            let of = self.nccl.version;
            let problem = text!("is {what}, comm is of NCCL {of}: {major}.{minor} is needed");
            Err(Error::unsupported(p.op, argument, problem))
        };
        const WITH_BF16_AND_AVG: Version = Version(2, 10, 0);
        match p.kind {
            Kind::AllReduce(op) | Kind::ReduceScatter(op) => {
                if p.dtype == DType::Bf16 {
                    needs("x", "bf16", WITH_BF16_AND_AVG)?;
                }
                if op == ReduceOp::Avg {
                    needs("op", "avg", WITH_BF16_AND_AVG)?;
                }
            }
            Kind::GatherBackwards | Kind::AllToAll | Kind::SendReceive { .. } => {
                let f = &self.nccl.functions;
                self.nccl.later(p.op, f.send, "ncclSend", "2.7")?;
                self.nccl.later(p.op, f.recv, "ncclRecv", "2.7")?;
            }
            Kind::AllGather | Kind::Broadcast(_) => {}
        }
        // Ranks and counts that NCCL has as ints are below the group's size.
        Ok(())
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        const OP: &str = "comm_destroy";
        let comm = *self.comm.get_mut();
        let ends = !self.lent && !comm.is_null();
        if !ends && self.windows.is_empty() {
            return;
        }
        let Ok(_entered) = self.primary.enter(OP) else {
            return;
        };
        // SAFETY: a context is current. At process exit the driver may have gone, which is no error here.
        let _ = unsafe { self.primary.driver.context_synchronize(OP) };
        self.end_slots(OP);
        self.end_windows(OP);
        if ends {
            // SAFETY: made by `join`, and used by nobody else; its work has run.
            unsafe { (self.nccl.functions.comm_destroy)(comm) };
        }
    }
}

impl Run for Call<'_, Comm> {
    fn check(&self) -> Result<()> {
        self.transport.check(&self.problem)
    }

    fn run(&self, _: &Cuda, stream: Stream) -> Result<()> {
        self.transport.launch(&self.problem, stream)
    }
}

impl Run for Both<'_, Comm> {
    fn check(&self) -> Result<()> {
        let mut problems = self.problems.iter();
        problems.try_for_each(|problem| self.transport.check(problem))
    }

    fn run(&self, _: &Cuda, stream: Stream) -> Result<()> {
        match self.problems.iter().any(Problem::is_empty) {
            // The other one may have elements.
            true => {
                let mut problems = self.problems.iter();
                problems.try_for_each(|problem| self.transport.launch(problem, stream))
            }
            false => self.transport.launch_both(&self.problems, stream),
        }
    }
}

impl Run for Beside<'_, Comm> {
    fn check(&self) -> Result<()> {
        self.call.check()
    }

    fn run(&self, _: &Cuda, stream: Stream) -> Result<()> {
        let Call { transport, problem } = &self.call;
        transport.launch_beside(problem, self.number, stream)
    }

    fn settle(&self, stream: Stream) {
        let Call { transport, problem } = &self.call;
        // The call fails with what went wrong first.
        let _ = transport.side.join(problem.op, self.number, stream);
    }
}

impl Run for Join<'_, Comm> {
    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn run(&self, _: &Cuda, stream: Stream) -> Result<()> {
        self.transport.side.join(self.op, self.number, stream)
    }
}
