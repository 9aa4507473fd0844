//! Page-locked host memory through which small tables go to the device without anybody waiting.

use std::collections::VecDeque;

use super::Cuda;
use super::device::{Entered, Primary};
use super::driver::{CUevent, CUstream, OUT_OF_MEMORY};
use super::event::NO_TIMING;
use crate::backend::{Stream, Upload, page_locked};
use crate::error::{Error, Result, text};

/// Copies that may be under way at a time; the next one waits for the oldest.
const MAX_FLIGHTS: usize = 64;

/// A ring of page-locked memory. Every copy gets a piece of its own, which is used again when an event behind the copy has passed.
pub(crate) struct Ring {
    memory: *mut u8,
    size: usize,
    /// Bytes given out since the beginning, skipped ones at the ring's end included.
    written: usize,
    /// Bytes of these that are free again.
    retired: usize,
    flights: VecDeque<Flight>,
    spare: Vec<CUevent>,
    primary: Primary,
}

// SAFETY: the ring owns its memory and events, which the driver lets any thread use.
unsafe impl Send for Ring {}
// SAFETY: nothing can be done with a shared reference.
unsafe impl Sync for Ring {}

/// A copy under way.
struct Flight {
    event: CUevent,
    /// `written` behind it.
    end: usize,
}

impl Ring {
    /// A ring through which up to `size` bytes can go at a time.
    pub fn new(op: &'static str, cuda: &Cuda, size: usize) -> Result<Ring> {
        let size = page_locked(size);
        let primary = &cuda.resources.primary;
        let mut ring = Ring {
            memory: std::ptr::null_mut(),
            size,
            written: 0,
            retired: 0,
            flights: VecDeque::new(),
            spare: Vec::new(),
            primary: Primary::retain(op, primary.driver, cuda.resources.ordinal())?,
        };
        let reserved = (ring.flights.try_reserve_exact(MAX_FLIGHTS))
            .and_then(|()| ring.spare.try_reserve_exact(MAX_FLIGHTS));
        reserved.map_err(|_| Error::out_of_host_memory(op, MAX_FLIGHTS * size_of::<Flight>()))?;
        let _entered = ring.enter(op)?;
        let mut memory = std::ptr::null_mut();
        // SAFETY: `memory` is valid for a write; a context is current.
        match unsafe { primary.driver.host_alloc(op, &mut memory, size, 0) } {
            Ok(()) => ring.memory = memory.cast(),
            Err(Error::Cuda {
                code: OUT_OF_MEMORY,
                ..
            }) => {
                return Err(Error::OutOfMemory {
                    op,
                    requested: size as u64,
                    reason: text!("the host has too little memory that can be page-locked"),
                });
            }
            Err(error) => return Err(error),
        }
        Ok(ring)
    }

    /// Where `len` bytes that nothing reads begin, in bytes since the beginning. Waits for the device only if it is a whole ring behind.
    fn make_room(&mut self, op: &'static str, len: usize) -> Result<usize> {
        let offset = self.written % self.size;
        let start = match offset + len <= self.size {
            true => self.written,
            false => self.written + (self.size - offset),
        };
        while self.flights.len() >= MAX_FLIGHTS || start + len - self.retired > self.size {
            let Some(flight) = self.flights.front() else {
                self.retired = start;
                break;
            };
            // SAFETY: the event is live.
            unsafe { self.primary.driver.event_synchronize(op, flight.event) }?;
            self.retired = flight.end;
            let passed = self.flights.pop_front();
            self.spare.extend(passed.map(|flight| flight.event));
        }
        Ok(start)
    }

    fn take_event(&mut self, op: &'static str) -> Result<CUevent> {
        if let Some(event) = self.spare.pop() {
            return Ok(event);
        }
        let mut event = std::ptr::null_mut();
        // SAFETY: valid for a write; a context is current.
        unsafe { self.primary.driver.event_create(op, &mut event, NO_TIMING) }?;
        Ok(event)
    }

    fn enter(&self, op: &'static str) -> Result<Entered> {
        self.primary.enter(op)
    }
}

impl Upload for Ring {
    unsafe fn upload(
        &mut self,
        op: &'static str,
        dst: *mut u8,
        data: &[u8],
        stream: Stream,
    ) -> Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        if data.len() > self.size / 2 {
            return Err(Error::Internal {
                op,
                message: text!("{} bytes through a ring of {}", data.len(), self.size),
            });
        }
        let stream: CUstream = stream.as_raw().cast();
        let driver = self.primary.driver;
        let _entered = self.enter(op)?;
        let start = self.make_room(op, data.len())?;
        let event = self.take_event(op)?;
        let piece = self.memory.wrapping_add(start % self.size);
        // SAFETY: the piece lies in the ring and no copy reads it; events and stream are live; the rest is the caller's promise.
        let queued = unsafe {
            std::ptr::copy_nonoverlapping(data.as_ptr(), piece, data.len());
            driver
                .host_to_device(op, dst.addr() as u64, piece.cast(), data.len(), stream)
                .and_then(|()| {
                    driver
                        .event_record(op, event, stream)
                        // The copy is under way, and nothing else will tell when it is done.
                        .inspect_err(|_| drop(driver.stream_synchronize(op, stream)))
                })
        };
        if let Err(error) = queued {
            self.spare.push(event);
            return Err(error);
        }
        self.written = start + data.len();
        let end = self.written;
        self.flights.push_back(Flight { event, end });
        Ok(())
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        const OP: &str = "staging";
        let Ok(_entered) = self.enter(OP) else {
            return;
        };
        let driver = self.primary.driver;
        // SAFETY: made by this ring, and unused from here on. A lost context has freed them already.
        unsafe {
            for flight in self.flights.drain(..) {
                let _ = driver.event_synchronize(OP, flight.event);
                let _ = driver.event_destroy(OP, flight.event);
            }
            for event in self.spare.drain(..) {
                let _ = driver.event_destroy(OP, event);
            }
            if !self.memory.is_null() {
                let _ = driver.host_free(OP, self.memory.cast());
            }
        }
    }
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring")
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}
