//! Slots: memory of a rank to which the other ranks write. A kernel of this library that adds up few rows writes its own to the
//! others' slots, reads theirs from its own, and goes on with the sum in the same launch. NCCL allocates the memory and, since 2.29,
//! says at which address another rank reaches it.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use contract::rank_sums::{LINE, LINE_BYTES, LINES, RANKS, ROWS};

use super::windows::{PAGE, Window};
use super::{Comm, of_one};
use crate::backend::{CopyKind, Device, Stream};
use crate::cuda::Cuda;
use crate::cuda::nccl;
use crate::cuda::warm_up::Taken;
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::collective::ReduceOp;

/// The most ranks that have slots.
pub(in crate::cuda) const MOST_RANKS: usize = RANKS as usize;

/// The page-locked memory that holds the flag: a page.
const FLAG_BYTES: usize = 4096;

/// The slots of a rank, and the way to those of the others.
#[derive(Debug)]
pub(in crate::cuda) struct Slots {
    /// At which address this device reaches each rank's slots; 0 behind the last rank.
    pub ranks: [u64; MOST_RANKS],
    /// This rank's, where it reads them.
    pub own: u64,
    /// Behind this rank's slots: for each row of a launch, how many launches there were.
    pub calls: u64,
    aborted: Flag,
}

impl Slots {
    /// The address of the flag by which kernels are told to wait no longer.
    pub fn aborted(&self) -> u64 {
        self.aborted.0.addr() as u64
    }

    /// Whether rows of so many bytes of elements fit. The same on all ranks, as their shapes are.
    pub fn fit(rows: usize, row_bytes: usize) -> bool {
        rows <= ROWS as usize
            && row_bytes.is_multiple_of(LINE as usize)
            && row_bytes <= (LINES * LINE) as usize
    }
}

/// A word of the host's that kernels read.
#[derive(Debug)]
struct Flag(*mut AtomicU32);

// SAFETY: an atomic number, which stays until its owner frees it.
unsafe impl Send for Flag {}
// SAFETY: as above.
unsafe impl Sync for Flag {}

/// Made once at most.
pub(super) type Made = OnceLock<Slots>;

/// Bytes of a rank's slots: two halves, which calls take by turns, each with rows of every rank.
fn bytes(ranks: usize) -> usize {
    2 * ranks * (ROWS * LINES * LINE_BYTES) as usize
}

fn pages(bytes: usize) -> usize {
    bytes.next_multiple_of(PAGE)
}

impl Comm {
    /// Bytes of this rank's slots; 0 if there are some already, or cannot be any.
    pub fn slot_bytes(&self) -> usize {
        let f = &self.nccl.functions;
        let possible = f.mem_alloc.is_some()
            && f.window_register.is_some()
            && f.peer_pointer.is_some()
            && self.size <= MOST_RANKS
            && self.slots.get().is_none();
        match possible {
            true => bytes(self.size) + ROWS as usize * size_of::<u32>(),
            false => 0,
        }
    }

    pub(in crate::cuda) fn slots(&self) -> Option<&Slots> {
        self.slots.get()
    }

    /// Makes slots of so many bytes together with the other ranks, and says whether there are some then: none has any unless all can.
    /// `bytes` is `None` if this rank has no room. Waits for the stream.
    pub fn make_slots(
        &self,
        op: &'static str,
        cuda: &Cuda,
        bytes: Option<usize>,
        stream: Stream,
    ) -> Result<bool> {
        let memory = bytes.and_then(|bytes| self.allocate(op, cuda, pages(bytes)).ok());
        let Some(mut made) = memory else {
            return self.all(op, cuda, false, stream).map(|_| false);
        };
        let none = match self.registered(op, cuda, (&mut made, bytes), stream) {
            Ok(Some(slots)) => match self.windows.keep(op, made) {
                Ok(()) => return Ok(self.slots.set(slots).is_ok()),
                Err(error) => {
                    self.free_flag(op, &slots.aborted);
                    Err(error)
                }
            },
            none => none.map(|_| ()),
        };
        let freed = self.without(op, made);
        none.and(freed)
    }

    /// Registers the memory as a window of all ranks. Gives the slots in it; `None` if some rank does not reach all others.
    fn registered(
        &self,
        op: &'static str,
        cuda: &Cuda,
        (made, bytes): (&mut Window, Option<usize>),
        stream: Stream,
    ) -> Result<Option<Slots>> {
        // All of them register, or none: it waits for the others.
        if !self.all(op, cuda, true, stream)? {
            return Ok(None);
        }
        let registered = self.register(op, made, pages(bytes.unwrap_or(0)));
        let slots = registered.ok().and_then(|()| self.reached(op, made));
        match (self.all(op, cuda, slots.is_some(), stream), slots) {
            (Ok(true), slots) => Ok(slots),
            (all, slots) => {
                if let Some(slots) = slots {
                    self.free_flag(op, &slots.aborted);
                }
                all.map(|_| None)
            }
        }
    }

    /// Frees what was to be slots.
    fn without(&self, op: &'static str, made: Window) -> Result<bool> {
        tracing::debug!("{op}: ranks do not reach each other's memory");
        let _entered = self.primary.enter(op)?;
        self.end(op, made).map(|()| false)
    }

    /// The slots in a window, if this device reaches those of all ranks.
    fn reached(&self, op: &'static str, made: &Window) -> Option<Slots> {
        let pointer_of = self.nccl.functions.peer_pointer?;
        if made.window.is_null() {
            return None;
        }
        let _entered = self.primary.enter(op).ok()?;
        let mut ranks = [0; MOST_RANKS];
        for (rank, address) in ranks.iter_mut().enumerate().take(self.size) {
            let mut found: *mut c_void = ptr::null_mut();
            // SAFETY: a window of the live communicator; valid for a write.
            let status = unsafe { pointer_of(made.window, 0, rank as c_int, &mut found) };
            if status != nccl::SUCCESS || found.is_null() {
                return None;
            }
            *address = found.addr() as u64;
        }
        let own = made.memory.addr() as u64;
        let mut flag = ptr::null_mut();
        // SAFETY: valid for a write; a context is current. Every device may read it by its address.
        unsafe {
            self.primary
                .driver
                .host_alloc(op, &mut flag, FLAG_BYTES, MAPPED)
        }
        .ok()?;
        let flag: *mut AtomicU32 = flag.cast();
        // SAFETY: page-locked memory, which is this function's alone.
        unsafe { flag.write(AtomicU32::new(0)) };
        Some(Slots {
            ranks,
            own,
            calls: own + bytes(self.size) as u64,
            aborted: Flag(flag),
        })
    }

    /// Tells kernels that wait for other ranks to end.
    pub(super) fn abort_slots(&self) {
        if let Some(slots) = self.slots.get() {
            // SAFETY: the flag stays until the communicator goes.
            unsafe { (*slots.aborted.0).store(1, Ordering::Release) };
        }
    }

    /// Frees the flag; the memory goes with its window. No kernel reads it any more.
    pub(super) fn end_slots(&mut self, op: &'static str) {
        if let Some(slots) = self.slots.take() {
            self.free_flag(op, &slots.aborted);
        }
    }

    fn free_flag(&self, op: &'static str, flag: &Flag) {
        let Ok(_entered) = self.primary.enter(op) else {
            return;
        };
        // SAFETY: allocated by `reached`, and read by nobody any more. There is nobody to tell.
        let _ = unsafe { self.primary.driver.host_free(op, flag.0.cast()) };
    }

    /// Whether all ranks say yes. Waits for them.
    fn all(&self, op: &'static str, cuda: &Cuda, ours: bool, stream: Stream) -> Result<bool> {
        const BYTES: usize = size_of::<f32>();
        let memory = Taken::new(cuda, op, BYTES)?;
        let x = memory.tensor(DType::F32, 1)?;
        let (said, mut heard) = ([f32::from(u8::from(ours))], [0.0f32]);
        let from = said.as_ptr().cast();
        // SAFETY: a number on either side, which stays until the stream has run.
        unsafe { cuda.copy(op, x.ptr, from, BYTES, CopyKind::HostToDevice, stream) }?;
        let problem = of_one(op, x, ReduceOp::Min);
        self.launch(&problem, stream)?;
        // SAFETY: as above.
        unsafe {
            cuda.copy(
                op,
                heard.as_mut_ptr().cast(),
                x.ptr,
                BYTES,
                CopyKind::DeviceToHost,
                stream,
            )
        }?;
        cuda.synchronize(op, stream)?;
        Ok(heard == [1.0])
    }
}

/// `CU_MEMHOSTALLOC_DEVICEMAP`.
const MAPPED: u32 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows, bytes of each, and whether slots take them.
    #[test]
    fn rows_fit_or_do_not() {
        let most = (LINES * LINE) as usize;
        for (rows, row_bytes, fits) in [
            (1, 8192, true),
            (8, most, true),
            (9, 8, false),
            (1, most + 8, false),
            (1, 12, false),
            (0, 0, true),
        ] {
            assert_eq!(Slots::fit(rows, row_bytes), fits, "{rows} of {row_bytes}");
        }
    }

    /// Half of the slots holds each rank's rows apart.
    #[test]
    fn slots_of_two_ranks_take_a_mebibyte() {
        assert_eq!(bytes(2), 1 << 20);
    }
}
