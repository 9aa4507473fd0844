//! What a problem asks of NCCL.

use std::ffi::{c_int, c_void};
use std::ptr;

use super::Comm;
use crate::cuda::nccl;
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::problem::collective::{Kind, Parts, Problem, ReduceOp};
use crate::tensor::RawTensor;

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
pub(super) fn moved_as(dtype: DType) -> c_int {
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
pub(super) struct Queue<'a> {
    pub comm: &'a Comm,
    pub handle: *mut c_void,
    pub stream: *mut c_void,
    pub op: &'static str,
    /// Of moves.
    pub dtype: c_int,
    /// Bytes of an element.
    pub size: usize,
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
    pub fn group(&self, calls: impl FnOnce() -> Result<()>) -> Result<()> {
        let f = &self.comm.nccl.functions;
        // SAFETY: a group of this thread's, which ends below.
        self.check("ncclGroupStart", unsafe { (f.group_start)() })?;
        let called = calls();
        // SAFETY: as above.
        let ended = self.check("ncclGroupEnd", unsafe { (f.group_end)() });
        called.and(ended)
    }

    pub fn run(&self, p: &Problem<'_>) -> Result<()> {
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
                // NCCL has it in the order of ranks alone.
                (Kind::GatherBackwards, _) => self.group(|| {
                    self.for_each_part(|peer| {
                        let (start, len) = p.received_from(self.comm.size - 1 - peer);
                        self.send(x, len, peer)?;
                        self.receive(self.at(p.out, start), len, peer)
                    })
                }),
                (Kind::Broadcast(root), _) => {
                    let from = if p.x.is_some() { x } else { out };
                    self.broadcast(from, out, p.row, root)
                }
                (Kind::AllToAll, Parts::Even(rows)) if self.comm.by_copies(p) => {
                    const CALL: &str = "ncclAlltoAll";
                    let exchange = self.comm.nccl.later(p.op, f.all_to_all, CALL, "2.28")?;
                    let status = exchange(x, out, rows * p.row, dtype, comm, stream);
                    self.check(CALL, status)
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
