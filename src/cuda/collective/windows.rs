//! Memory that ranks reach at each other: NCCL's symmetric windows. Its kernels for few bytes read there what the others have,
//! where they else send it by buffers of NCCL's own.

use std::ffi::c_void;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Comm;
use crate::alloc::push;
use crate::cuda::{Cuda, nccl};
use crate::error::{Error, Result, text};
use crate::tensor::RawTensor;

/// Windows begin and end where pages do.
pub(super) const PAGE: usize = 4096;

/// What a rank has allocated and registered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    pub memory: *mut c_void,
    pub bytes: usize,
    pub window: nccl::Window,
}

// SAFETY: addresses on a device and handles of NCCL's, which any thread may use, in turn.
unsafe impl Send for Window {}

/// Those of a communicator.
#[derive(Debug, Default)]
pub(super) struct Windows(Mutex<Vec<Window>>);

impl Windows {
    pub fn is_empty(&self) -> bool {
        self.all().is_empty()
    }

    /// Whether a tensor lies in one of them.
    pub fn hold(&self, tensor: &RawTensor) -> bool {
        let range = tensor.byte_range();
        let starts = |w: &Window| w.memory.addr();
        self.all()
            .iter()
            .any(|w| starts(w) <= range.start && range.end - starts(w) <= w.bytes)
    }

    /// Keeps one until all are freed.
    pub fn keep(&self, op: &'static str, window: Window) -> Result<()> {
        push(op, &mut self.all(), window)
    }

    fn all(&self) -> MutexGuard<'_, Vec<Window>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Comm {
    /// Allocates zeroed memory and registers it, waiting for the other ranks; `None` where NCCL is older than 2.27, which
    /// has no windows.
    pub fn alloc(&self, op: &'static str, cuda: &Cuda, size: usize) -> Result<Option<*mut u8>> {
        let f = &self.nccl.functions;
        if f.mem_alloc.is_none() || f.window_register.is_none() {
            return Ok(None);
        }
        let bytes = size.max(1).checked_next_multiple_of(PAGE).ok_or_else(|| {
            Error::invalid(op, "size", text!("is {size}, more than any device has"))
        })?;
        let mut made = self.allocate(op, cuda, bytes)?;
        let registered = self.register(op, &mut made, bytes);
        let kept = registered.and_then(|()| self.windows.keep(op, made));
        match kept {
            Ok(()) => Ok(Some(made.memory.cast())),
            Err(error) => {
                // The call fails with what went wrong first.
                let _ = self.end(op, made);
                Err(error)
            }
        }
    }

    /// Allocates zeroed memory that is in no window yet. By a NCCL that has windows.
    pub(super) fn allocate(&self, op: &'static str, cuda: &Cuda, bytes: usize) -> Result<Window> {
        let f = &self.nccl.functions;
        let alloc = self.nccl.later(op, f.mem_alloc, "ncclMemAlloc", "2.27")?;
        let handle = self.live(op)?;
        let _turn = self.turn();
        let _entered = self.primary.enter(op)?;
        let _relaxed = self.primary.driver.relax_capture(op)?;
        let mut made = Window {
            memory: ptr::null_mut(),
            bytes,
            window: ptr::null_mut(),
        };
        // SAFETY: valid for a write; a context of the communicator's device is current.
        let status = unsafe { alloc(&mut made.memory, bytes) };
        self.nccl.check(op, "ncclMemAlloc", handle, status)?;
        // SAFETY: just allocated, and nobody has it yet.
        match unsafe { cuda.zero(op, made.memory.addr() as u64, bytes) } {
            Ok(()) => Ok(made),
            Err(error) => {
                let _ = self.end(op, made);
                Err(error)
            }
        }
    }

    /// Registers what [`Comm::allocate`] gave, waiting for the other ranks. By a NCCL that has windows.
    pub(super) fn register(&self, op: &'static str, made: &mut Window, bytes: usize) -> Result<()> {
        const CALL: &str = "ncclCommWindowRegister";
        let f = &self.nccl.functions;
        let register = self.nccl.later(op, f.window_register, CALL, "2.27")?;
        let handle = self.live(op)?;
        let _turn = self.turn();
        let _entered = self.primary.enter(op)?;
        let _relaxed = self.primary.driver.relax_capture(op)?;
        // SAFETY: allocated memory of so many bytes; valid for a write; the communicator is live.
        let status = unsafe {
            register(
                handle,
                made.memory,
                bytes,
                &mut made.window,
                nccl::SYMMETRIC,
            )
        };
        self.nccl.check(op, CALL, handle, status)
    }

    /// Frees what [`Comm::alloc`] gave, after everything queued on the device. Whether there was such memory.
    pub fn free(&self, op: &'static str, memory: *mut u8) -> Result<bool> {
        let found = {
            let mut all = self.windows.all();
            let at = all.iter().position(|w| w.memory == memory.cast());
            at.map(|at| all.swap_remove(at))
        };
        let Some(found) = found else {
            return Ok(false);
        };
        let _turn = self.turn();
        let _entered = self.primary.enter(op)?;
        // SAFETY: a context is current.
        unsafe { self.primary.driver.context_synchronize(op) }?;
        self.end(op, found).map(|()| true)
    }

    /// Frees all that is left. The device has run what used it, and a context of its is current.
    pub(super) fn end_windows(&self, op: &'static str) {
        for window in self.windows.all().drain(..) {
            // There is nobody to tell.
            let _ = self.end(op, window);
        }
    }

    /// Takes memory out of its window, if it is in one, and frees it. A context of the device is current.
    pub(super) fn end(&self, op: &'static str, window: Window) -> Result<()> {
        let f = &self.nccl.functions;
        let mut left = Ok(());
        // An aborted communicator has taken its windows along.
        if let (Ok(handle), Some(deregister)) = (self.live(op), f.window_deregister)
            && !window.window.is_null()
        {
            // SAFETY: a window of this live communicator, which nothing uses any more.
            let status = unsafe { deregister(handle, window.window) };
            left = self
                .nccl
                .check(op, "ncclCommWindowDeregister", handle, status);
        }
        if let Some(free) = f.mem_free {
            // SAFETY: NCCL allocated it, and it is in no window any more.
            let status = unsafe { free(window.memory) };
            let freed = self.nccl.check(op, "ncclMemFree", ptr::null_mut(), status);
            left = left.and(freed);
        }
        left
    }
}
