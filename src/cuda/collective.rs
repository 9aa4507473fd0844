//! Collectives of GPUs: NCCL's, on the caller's stream.
//!
//! What NCCL has no function for is a group of those that it has: rows by counts are gathered by
//! broadcasts and scattered by reductions to one rank, each of a part, and rows are exchanged by sends
//! and receipts. A group is one launch.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

use super::device::Primary;
use super::nccl::{self, Nccl, Version};
use super::warm_up::Taken;
use super::{Cuda, Run};
use crate::backend::{Device, NcclLibrary, Stream};
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::problem::collective::{Call, Kind, Parts, Problem, ReduceOp};
use crate::tensor::RawTensor;

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
        let mut comm = ptr::null_mut();
        let entered = primary.enter(op)?;
        // SAFETY: valid for a write; both fit an int, and NCCL looks at the id.
        let status = unsafe {
            let id = nccl::UniqueId(id);
            (nccl.functions.comm_init_rank)(&mut comm, size as c_int, id, rank as c_int)
        };
        drop(entered);
        nccl.check(op, "ncclCommInitRank", ptr::null_mut(), status)?;
        Ok(Comm {
            nccl,
            comm: AtomicPtr::new(comm),
            lent: false,
            rank,
            size,
            primary,
            turn: Mutex::new(()),
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
        })
    }

    fn retained(&self, op: &'static str) -> Result<Primary> {
        let driver = self.resources.primary.driver;
        Primary::retain(op, driver, self.resources.ordinal())
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
        let x = memory.tensor(DType::F32, 1)?;
        let problem = Problem {
            op,
            kind: Kind::AllReduce(ReduceOp::Sum),
            dtype: DType::F32,
            row: 1,
            x: Some(x),
            out: Some(x),
            sent: Parts::Even(1),
            received: Parts::Even(1),
        };
        self.launch(&problem, stream)?;
        cuda.synchronize(op, stream)
    }

    /// Ends what NCCL has running, and the communicator with it.
    pub fn abort(&self, op: &'static str) -> Result<()> {
        if self.lent {
            let problem = "was lent: who made it aborts it";
            return Err(Error::unsupported(op, "comm", problem));
        }
        let f = &self.nccl.functions;
        let abort = self.nccl.later(op, f.comm_abort, "ncclCommAbort", "2.4")?;
        // Not in turn: who has it may wait for a rank that does not come.
        let comm = self.comm.swap(ptr::null_mut(), Ordering::AcqRel);
        if comm.is_null() {
            return Ok(());
        }
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
    fn launch(&self, p: &Problem<'_>, stream: Stream) -> Result<()> {
        if p.is_empty() {
            return Ok(());
        }
        let _entered = self.primary.enter(p.op)?;
        // NCCL connects ranks when they first need it, which a capture elsewhere may be in the way of.
        let _relaxed = self.primary.driver.relax_capture(p.op)?;
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let queue = Queue {
            comm: self,
            handle: self.live(p.op)?,
            stream: stream.as_raw(),
            op: p.op,
            dtype: moved_as(p.dtype),
            size: p.dtype.size(),
        };
        queue.run(p)
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
            Kind::AllToAll | Kind::SendReceive { .. } => {
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
        if self.lent || comm.is_null() {
            return;
        }
        let Ok(_entered) = self.primary.enter(OP) else {
            return;
        };
        // SAFETY: made by `join`, and used by nobody else. Its work has run; at process exit the driver may
        // have gone, which is no error here.
        unsafe {
            let _ = self.primary.driver.context_synchronize(OP);
            (self.nccl.functions.comm_destroy)(comm);
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

/// NCCL's name of a dtype that numbers are reduced in.
fn reduced_as(op: &'static str, dtype: DType) -> Result<c_int> {
    Ok(match dtype {
        DType::F32 => nccl::FLOAT32,
        DType::F16 => nccl::FLOAT16,
        DType::Bf16 => nccl::BFLOAT16,
        DType::I32 => nccl::INT32,
        DType::I64 => nccl::INT64,
        DType::I8 => nccl::INT8,
        other => {
            let message = text!("NCCL was asked for a reduction of {other}");
            return Err(Error::Internal { op, message });
        }
    })
}

/// That of elements which are moved as they are: any of their size, which every version has.
fn moved_as(dtype: DType) -> c_int {
    match dtype.size() {
        1 => nccl::INT8,
        2 => nccl::FLOAT16,
        4 => nccl::INT32,
        _ => nccl::INT64,
    }
}

fn reduction(op: ReduceOp) -> c_int {
    match op {
        ReduceOp::Sum => nccl::SUM,
        ReduceOp::Avg => nccl::AVG,
        ReduceOp::Max => nccl::MAX,
        ReduceOp::Min => nccl::MIN,
        ReduceOp::Prod => nccl::PROD,
    }
}

/// What a problem's calls of NCCL have in common.
#[derive(Clone, Copy)]
struct Queue<'a> {
    comm: &'a Comm,
    handle: *mut c_void,
    stream: *mut c_void,
    op: &'static str,
    /// Of moves.
    dtype: c_int,
    /// Bytes of an element.
    size: usize,
}

impl Queue<'_> {
    fn check(&self, call: &'static str, status: nccl::Status) -> Result<()> {
        self.comm.nccl.check(self.op, call, self.handle, status)
    }

    /// The same, for moves of another dtype.
    fn of(&self, dtype: DType) -> Self {
        Queue {
            dtype: moved_as(dtype),
            size: dtype.size(),
            ..*self
        }
    }

    /// The address of an element; of a tensor that is not there, NULL.
    fn at(&self, tensor: Option<RawTensor>, element: usize) -> *mut c_void {
        tensor.map_or(ptr::null_mut(), |t| {
            t.ptr.wrapping_add(element * self.size).cast()
        })
    }

    /// Calls that are one launch. The group ends whatever comes of them.
    fn group(&self, calls: impl FnOnce() -> Result<()>) -> Result<()> {
        let f = &self.comm.nccl.functions;
        // SAFETY: a group of this thread's, which ends below.
        self.check("ncclGroupStart", unsafe { (f.group_start)() })?;
        let called = calls();
        // SAFETY: as above.
        let ended = self.check("ncclGroupEnd", unsafe { (f.group_end)() });
        called.and(ended)
    }

    fn run(&self, p: &Problem<'_>) -> Result<()> {
        let (x, out) = (self.at(p.x, 0), self.at(p.out, 0));
        let f = &self.comm.nccl.functions;
        let (comm, stream, dtype) = (self.handle, self.stream, self.dtype);
        // SAFETY: the tensors are valid on the communicator's device until the work has run, and have the
        // elements that counts say: the problem was checked. The stream is of that device.
        unsafe {
            match (p.kind, p.sent) {
                (Kind::AllReduce(op), _) => {
                    let dtype = reduced_as(p.op, p.dtype)?;
                    let status = (f.all_reduce)(x, out, p.row, dtype, reduction(op), comm, stream);
                    self.check("ncclAllReduce", status)
                }
                (Kind::AllGather, Parts::Even(rows)) => {
                    let status = (f.all_gather)(x, out, rows * p.row, dtype, comm, stream);
                    self.check("ncclAllGather", status)
                }
                (Kind::ReduceScatter(op), Parts::Even(rows)) => {
                    let (dtype, op) = (reduced_as(p.op, p.dtype)?, reduction(op));
                    let status = (f.reduce_scatter)(x, out, rows * p.row, dtype, op, comm, stream);
                    self.check("ncclReduceScatter", status)
                }
                (Kind::AllGather, Parts::Each(_)) => self.group(|| {
                    self.for_each_part(|root| {
                        let (start, len) = p.received_from(root);
                        let to = self.at(p.out, start);
                        let from = if root == self.comm.rank { x } else { to };
                        self.broadcast(from, to, len, root)
                    })
                }),
                (Kind::ReduceScatter(op), Parts::Each(_)) => {
                    let (dtype, op) = (reduced_as(p.op, p.dtype)?, reduction(op));
                    self.group(|| {
                        self.for_each_part(|root| {
                            let (start, len) = p.sent_to(root);
                            let from = self.at(p.x, start);
                            // Only the root's is written.
                            let to = if root == self.comm.rank { out } else { from };
                            if len == 0 {
                                return Ok(());
                            }
                            let root = root as c_int;
                            let status = (f.reduce)(from, to, len, dtype, op, root, comm, stream);
                            self.check("ncclReduce", status)
                        })
                    })
                }
                (Kind::Broadcast(root), _) => {
                    let from = if p.x.is_some() { x } else { out };
                    self.broadcast(from, out, p.row, root)
                }
                (Kind::AllToAll, _) => self.group(|| {
                    self.for_each_part(|peer| {
                        let (start, len) = p.sent_to(peer);
                        self.send(self.at(p.x, start), len, peer)?;
                        let (start, len) = p.received_from(peer);
                        self.receive(self.at(p.out, start), len, peer)
                    })
                }),
                // The two may differ in dtype: they are of two transfers.
                (Kind::SendReceive { to, from }, _) => self.group(|| {
                    if let Some(x) = p.x {
                        let len = x.layout.num_elements();
                        self.of(x.dtype).send(x.ptr.cast(), len, to)?;
                    }
                    if let Some(out) = p.out {
                        let len = out.layout.num_elements();
                        self.of(out.dtype).receive(out.ptr.cast(), len, from)?;
                    }
                    Ok(())
                }),
            }
        }
    }

    fn for_each_part(&self, call: impl Fn(usize) -> Result<()>) -> Result<()> {
        (0..self.comm.size).try_for_each(call)
    }

    /// # Safety
    /// The addresses have as many elements until the work has run.
    unsafe fn broadcast(
        &self,
        from: *const c_void,
        to: *mut c_void,
        len: usize,
        root: usize,
    ) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        let f = &self.comm.nccl.functions;
        let root = root as c_int;
        // SAFETY: the caller's promise.
        let status =
            unsafe { (f.broadcast)(from, to, len, self.dtype, root, self.handle, self.stream) };
        self.check("ncclBroadcast", status)
    }

    /// # Safety
    /// As [`Queue::broadcast`].
    unsafe fn send(&self, from: *const c_void, len: usize, to: usize) -> Result<()> {
        let f = &self.comm.nccl.functions;
        if let Some(send) = f.send
            && len > 0
        {
            // SAFETY: the caller's promise.
            let status =
                unsafe { send(from, len, self.dtype, to as c_int, self.handle, self.stream) };
            self.check("ncclSend", status)?;
        }
        Ok(())
    }

    /// # Safety
    /// As [`Queue::broadcast`].
    unsafe fn receive(&self, to: *mut c_void, len: usize, from: usize) -> Result<()> {
        let f = &self.comm.nccl.functions;
        if let Some(recv) = f.recv
            && len > 0
        {
            // SAFETY: the caller's promise.
            let status =
                unsafe { recv(to, len, self.dtype, from as c_int, self.handle, self.stream) };
            self.check("ncclRecv", status)?;
        }
        Ok(())
    }
}
