//! Opaque handles.
//!
//! What C holds is not an address but a ticket: kind, generation and slot of a table of live objects, cast to a pointer and
//! never dereferenced. A NULL, foreign, mistyped or destroyed handle is therefore told apart from a live one with certainty,
//! by one atomic load. Destroying an object while another thread is inside a call with it is the caller's error, as for any
//! C library.

use std::cell::UnsafeCell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::{Error, Result};

/// Live objects of one type that a process may hold.
const CAPACITY: usize = 1 << 14;

struct Slot<T> {
    /// Odd while the slot holds a live object. It is never the same again before 2³¹ objects have passed through the slot.
    generation: AtomicU32,
    value: UnsafeCell<Option<Box<T>>>,
}

// SAFETY: `value` is written only by `insert` (slot off the free list, generation even) and `remove` (which won the exchange of
// the generation from odd to even); it is read by `get` only while the generation is odd.
unsafe impl<T: Send + Sync> Sync for Slot<T> {}

/// The live objects of one handle type.
pub(crate) struct Table<T: 'static> {
    kind_name: &'static str,
    kind: u8,
    slots: [Slot<T>; CAPACITY],
    free: Mutex<FreeList>,
}

struct FreeList {
    recycled: Vec<u32>,
    untouched: u32,
}

const INDEX_BITS: u32 = 16;
const GENERATION_BITS: u32 = 32;

// Tickets need 64 bits.
const _: () = assert!(usize::BITS == 64);

impl<T: Send + Sync> Table<T> {
    /// A table for handles of type `kind_name`; `kind` is unique among tables and not zero.
    pub const fn new(kind_name: &'static str, kind: u8) -> Self {
        Table {
            kind_name,
            kind,
            slots: [const {
                Slot {
                    generation: AtomicU32::new(0),
                    value: UnsafeCell::new(None),
                }
            }; CAPACITY],
            free: Mutex::new(FreeList {
                recycled: Vec::new(),
                untouched: 0,
            }),
        }
    }

    /// Takes in an object and gives its handle.
    pub fn insert<H>(&self, op: &'static str, value: T) -> Result<*mut H> {
        let index = {
            let mut free = self.free.lock().unwrap_or_else(|p| p.into_inner());
            match free.recycled.pop() {
                Some(index) => index,
                None if (free.untouched as usize) < CAPACITY => {
                    free.untouched += 1;
                    free.untouched - 1
                }
                None => {
                    return Err(Error::OutOfMemory {
                        op,
                        requested: size_of::<T>() as u64,
                        reason: format!("{CAPACITY} {} handles are live", self.kind_name),
                    });
                }
            }
        };
        let slot = &self.slots[index as usize];
        // SAFETY: the slot came off the free list, so its generation is even and this thread alone touches it.
        unsafe { *slot.value.get() = Some(Box::new(value)) };
        let generation = slot
            .generation
            .fetch_add(1, Ordering::Release)
            .wrapping_add(1);
        let ticket = (u64::from(self.kind) << (INDEX_BITS + GENERATION_BITS))
            | (u64::from(generation) << INDEX_BITS)
            | u64::from(index);
        Ok(std::ptr::without_provenance_mut(ticket as usize))
    }

    /// The live object behind a handle. It must not be destroyed while the reference lives.
    pub fn get<H>(&self, op: &'static str, argument: &'static str, handle: *const H) -> Result<&T> {
        let (slot, generation) = self.locate(op, argument, handle)?;
        if slot.generation.load(Ordering::Acquire) == generation {
            // SAFETY: the generation is odd and current, so `insert` has finished and `remove` has not begun; that it does not
            // begin while the reference lives is the caller's obligation.
            if let Some(value) = unsafe { (*slot.value.get()).as_deref() } {
                return Ok(value);
            }
        }
        Err(self.invalid(op, argument, handle))
    }

    /// Ends a handle and gives back its object.
    pub fn remove<H>(
        &self,
        op: &'static str,
        argument: &'static str,
        handle: *const H,
    ) -> Result<Box<T>> {
        let (slot, generation) = self.locate(op, argument, handle)?;
        let dead = generation.wrapping_add(1);
        let won = slot
            .generation
            .compare_exchange(generation, dead, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok();
        if !won {
            return Err(self.invalid(op, argument, handle));
        }
        // SAFETY: this thread won the exchange, so it alone touches the slot until it is on the free list.
        let value = unsafe { (*slot.value.get()).take() };
        let index = handle.addr() as u32 & ((1 << INDEX_BITS) - 1);
        self.free
            .lock()
            .unwrap_or_else(|p| p.into_inner())
            .recycled
            .push(index);
        value.ok_or_else(|| self.invalid(op, argument, handle))
    }

    fn locate<H>(
        &self,
        op: &'static str,
        argument: &'static str,
        handle: *const H,
    ) -> Result<(&Slot<T>, u32)> {
        if handle.is_null() {
            return Err(Error::NullPointer {
                op,
                argument: argument.into(),
            });
        }
        let ticket = handle.addr() as u64;
        let kind = ticket >> (INDEX_BITS + GENERATION_BITS);
        let generation = (ticket >> INDEX_BITS) as u32;
        let index = (ticket & ((1 << INDEX_BITS) - 1)) as usize;
        match self.slots.get(index) {
            Some(slot) if kind == u64::from(self.kind) && generation % 2 == 1 => {
                Ok((slot, generation))
            }
            _ => Err(self.invalid(op, argument, handle)),
        }
    }

    fn invalid<H>(&self, op: &'static str, argument: &'static str, handle: *const H) -> Error {
        Error::InvalidHandle {
            op,
            argument,
            kind: self.kind_name,
            handle: handle.addr(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Opaque;
    static NUMBERS: Table<u32> = Table::new("number", 201);
    static OTHERS: Table<u32> = Table::new("other", 202);

    #[test]
    fn life_of_a_handle() {
        let a: *mut Opaque = NUMBERS.insert("t", 7).unwrap();
        let b: *mut Opaque = NUMBERS.insert("t", 8).unwrap();
        assert_eq!(
            (
                NUMBERS.get("t", "a", a).unwrap(),
                NUMBERS.get("t", "b", b).unwrap()
            ),
            (&7, &8)
        );
        assert_eq!(*NUMBERS.remove("t", "a", a).unwrap(), 7);
        assert!(matches!(
            NUMBERS.get("t", "a", a),
            Err(Error::InvalidHandle { .. })
        ));
        assert!(matches!(
            NUMBERS.remove("t", "a", a),
            Err(Error::InvalidHandle { .. })
        ));
        let c: *mut Opaque = NUMBERS.insert("t", 9).unwrap();
        assert_ne!(a, c, "a recycled slot gives a new handle");
        assert!(NUMBERS.get("t", "a", a).is_err());
        assert_eq!(NUMBERS.get("t", "c", c).unwrap(), &9);
    }

    #[test]
    fn wild_handles() {
        let live: *mut Opaque = NUMBERS.insert("t", 1).unwrap();
        assert!(matches!(
            OTHERS.get("t", "h", live),
            Err(Error::InvalidHandle { .. })
        ));
        let local = Opaque;
        assert!(NUMBERS.get("t", "h", &raw const local).is_err());
        let null: *const Opaque = std::ptr::null();
        assert!(matches!(
            NUMBERS.get("t", "h", null),
            Err(Error::NullPointer { .. })
        ));
        for bits in [
            1usize,
            usize::MAX,
            0xffff,
            201 << 48,
            (201 << 48) | (1 << 16) | 0xffff,
        ] {
            let wild: *const Opaque = std::ptr::without_provenance(bits);
            assert!(NUMBERS.get("t", "h", wild).is_err(), "{bits:#x}");
        }
    }
}
