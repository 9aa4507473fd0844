//! Memory for what ranks add up.

use std::ptr::NonNull;
use std::sync::{MutexGuard, PoisonError};

use super::Comm;
use crate::backend::Stream;
use crate::error::{Error, Result, text};
use crate::memory::Buffer;

/// What a group has given out.
#[derive(Debug)]
pub(super) enum Memory {
    /// Like any other of the context's.
    Plain(Buffer),
    /// The transport's, at this address, of so many bytes.
    Reached(usize, u64),
    /// The transport's, for itself, of so many bytes.
    Slots(u64),
}

impl Memory {
    fn address(&self) -> usize {
        match self {
            Memory::Plain(buffer) => buffer.as_ptr().expose_provenance(),
            Memory::Reached(address, _) => *address,
            // Nobody was given it.
            Memory::Slots(_) => 0,
        }
    }
}

impl Comm {
    /// Allocates `size` zeroed bytes on the group's device, aligned to [`Workspace::ALIGNMENT`] bytes,
    /// for tensors of few bytes that ranks add up: NCCL of 2.27 and later reads them where they lie, and an
    /// [`all_reduce`](crate::ops::all_reduce) of up to 16 KiB takes a quarter to a third less time where input and output
    /// are there. 64 KiB and more take as long as elsewhere or longer.
    /// In local groups, and where NCCL is older, it is memory like any other.
    ///
    /// In a group that was made here, by NCCL of 2.28 or later, copy engines serve an [`all_gather`](crate::ops::all_gather) and an
    /// [`all_to_all`](crate::ops::all_to_all) of rows that are divided evenly, where both tensors are there: they take no multiprocessor
    /// from what runs beside them. Of few bytes it takes longer than elsewhere. All ranks have each tensor at the same place in such
    /// memory then, or none has.
    ///
    /// Every rank calls it, with one size, and it waits for all; not while a graph is captured. It counts as the context's.
    /// Freed by [`Comm::free`], or with the group.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the context's limit would be passed; too little memory; the group is broken.
    ///
    /// [`Workspace::ALIGNMENT`]: crate::Workspace::ALIGNMENT
    pub fn alloc(&self, size: usize) -> Result<NonNull<u8>> {
        const OP: &str = "comm_memory_alloc";
        let accountant = self.context.accountant();
        let bytes = size as u64;
        let mut all = self.memory();
        all.try_reserve(1)
            .map_err(|_| Error::out_of_host_memory(OP, size_of::<Memory>()))?;
        accountant.reserve(OP, bytes)?;
        let reached = self.transport.alloc(OP, &self.context, size);
        let memory = match reached {
            Ok(Some(memory)) => Memory::Reached(memory.expose_provenance(), bytes),
            other => {
                accountant.release(bytes);
                other?;
                let plain = Buffer::new(&self.context, size);
                Memory::Plain(plain.map_err(|error| error.within(OP))?)
            }
        };
        let address = std::ptr::with_exposed_provenance_mut(memory.address());
        all.push(memory);
        NonNull::new(address).ok_or_else(|| Error::Internal {
            op: OP,
            message: text!("was given no address"),
        })
    }

    /// Frees memory that [`Comm::alloc`] gave, after all work queued on the device. Every rank calls it.
    ///
    /// # Errors
    /// The group gave out no such memory; NCCL fails.
    ///
    /// # Safety
    /// Nothing uses the memory afterwards.
    pub unsafe fn free(&self, memory: NonNull<u8>) -> Result<()> {
        const OP: &str = "comm_memory_free";
        let found = {
            let mut all = self.memory();
            let at = all.iter().position(|m| m.address() == memory.addr().get());
            at.map(|at| all.swap_remove(at))
        };
        match found {
            None | Some(Memory::Slots(_)) => {
                let problem = text!("{memory:p} is no memory of this group");
                Err(Error::invalid(OP, "ptr", problem))
            }
            Some(Memory::Plain(buffer)) => {
                drop(buffer);
                Ok(())
            }
            Some(Memory::Reached(_, bytes)) => {
                self.context.accountant().release(bytes);
                self.transport.free(OP, memory.as_ptr()).map(|_| ())
            }
        }
    }

    /// Lets the transport make slots, where that can be, within the context's limit.
    pub(super) fn make_slots(&self, op: &'static str, stream: Stream) -> Result<()> {
        // One thread at a time: they are made once.
        let mut all = self.memory();
        let size = self.transport.slot_bytes();
        if size == 0 {
            return Ok(());
        }
        let bytes = size as u64;
        let accountant = self.context.accountant();
        // A rank without room takes part all the same: it tells the others, and then none has slots.
        let room = all.try_reserve(1).is_ok() && accountant.reserve(op, bytes).is_ok();
        let given = room.then_some(size);
        let made = self.transport.make_slots(op, &self.context, given, stream);
        if let Ok(true) = made {
            all.push(Memory::Slots(bytes));
        } else if room {
            accountant.release(bytes);
        }
        made.map(drop)
    }

    fn memory(&self) -> MutexGuard<'_, Vec<Memory>> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what is left out of the context's count: the transport frees it.
    pub(super) fn release(&mut self) {
        let left = self.memory.get_mut();
        for memory in left.unwrap_or_else(PoisonError::into_inner).drain(..) {
            if let Memory::Reached(_, bytes) | Memory::Slots(bytes) = memory {
                self.context.accountant().release(bytes);
            }
        }
    }
}
