//! Opaque handles.
//!
//! What C holds is not an address but a ticket: the key of a slot beside the kind of object and the
//! fork that made it, cast to a pointer and never dereferenced. A NULL, foreign, mistyped or
//! destroyed handle is told apart from a live one with certainty (a slot serves 2³¹ objects before
//! it repeats a key).
//!
//! A lookup gives a [`Shared`]: a call in flight keeps its object alive, and destroying the handle
//! from another thread takes effect when the last such call returns. It costs an uncontended read
//! lock and two counts, about 30 ns together; `cargo test --release -- --ignored lookup` measures
//! it.
//!
//! A child of `fork` has its parent's memory but not its threads, so it may not use its parent's
//! objects: their handles are refused there by the fork in the ticket, before any lock (which a
//! thread of the parent may have held) is touched. The child makes its own.

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use std::sync::{PoisonError, RwLock};

use crate::alloc::{Shared, boxed};
use crate::error::{Error, Result, text};
use crate::ffi::slots::{Key, Slots};

// A ticket: version of the key (32 bits), kind (4), fork (8), index of the key (20).
const INDEX_BITS: u32 = 20;
const FORK_BITS: u32 = 8;
const KIND_BITS: u32 = 4;
const _: () = assert!(INDEX_BITS + FORK_BITS + KIND_BITS == 32 && usize::BITS == 64);

/// Live objects of one type that a process may hold.
const CAPACITY: usize = 1 << INDEX_BITS;

/// Forks between the first process that made a handle and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn after_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Has forks counted from here on; whether that was possible. The first object waits for it, so a
/// child that has any handle of its parent's is counted.
fn watch_forks() -> bool {
    static WATCHED: AtomicBool = AtomicBool::new(false);
    if WATCHED.load(Ordering::Acquire) {
        return true;
    }
    // SAFETY: the handler lives as long as this library, and does nothing that is not allowed in
    // the child of a process with threads.
    let watched = unsafe { libc::pthread_atfork(None, None, Some(after_fork)) } == 0;
    if watched {
        // Threads that come here at once register it more than once, which counts a fork twice.
        WATCHED.store(true, Ordering::Release);
    }
    watched
}

fn out_of_memory<T>(op: &'static str, reason: &str) -> Error {
    Error::OutOfMemory {
        op,
        requested: size_of::<T>() as u64,
        reason: text!("{reason}"),
    }
}

fn forks() -> u32 {
    FORKS.load(Ordering::Relaxed) & ((1 << FORK_BITS) - 1)
}

type Objects<T> = RwLock<Slots<Shared<T>>>;

/// The objects that one process made.
struct Process<T> {
    fork: u32,
    objects: Objects<T>,
}

/// The live objects of one handle type.
pub(crate) struct Table<T: 'static> {
    kind_name: &'static str,
    kind: u32,
    /// NULL before the first object; never freed.
    process: AtomicPtr<Process<T>>,
}

impl<T: Send + Sync> Table<T> {
    /// A table for handles of type `kind_name`; `kind` is unique among tables, not zero, and fits
    /// its bits of a ticket.
    pub const fn new(kind_name: &'static str, kind: u32) -> Self {
        assert!(kind > 0 && kind < 1 << KIND_BITS);
        Table {
            kind_name,
            kind,
            process: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Takes in an object and gives its handle.
    pub fn insert<H>(&self, op: &'static str, value: T) -> Result<*mut H> {
        if !watch_forks() {
            return Err(out_of_memory::<T>(
                op,
                "the C library has none to watch forks",
            ));
        }
        let process = self.process(op)?;
        let object = Shared::new(op, value)?;
        let mut objects = process
            .objects
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        let Some(key) = objects.insert(op, CAPACITY, object)? else {
            return Err(out_of_memory::<T>(op, "too many handles are live"));
        };
        let low = self.kind << (FORK_BITS + INDEX_BITS) | process.fork << INDEX_BITS | key.index;
        Ok(ptr::without_provenance_mut(
            (u64::from(key.version) << 32 | u64::from(low)) as usize,
        ))
    }

    /// The live object behind a handle, for as long as the caller keeps it.
    pub fn get<H>(
        &self,
        op: &'static str,
        argument: &'static str,
        handle: *const H,
    ) -> Result<Shared<T>> {
        let (objects, key) = self.locate(op, argument, handle)?;
        let found = objects
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(key)
            .cloned();
        found.ok_or_else(|| self.invalid(op, argument, handle, false))
    }

    /// Ends a handle and gives back its object, which calls in flight may still share.
    pub fn remove<H>(
        &self,
        op: &'static str,
        argument: &'static str,
        handle: *const H,
    ) -> Result<Shared<T>> {
        let (objects, key) = self.locate(op, argument, handle)?;
        let found = objects
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(key);
        found.ok_or_else(|| self.invalid(op, argument, handle, false))
    }

    /// Where the object is if it lives: a handle of this kind and process.
    fn locate<H>(
        &self,
        op: &'static str,
        argument: &'static str,
        handle: *const H,
    ) -> Result<(&'static Objects<T>, Key)> {
        if handle.is_null() {
            return Err(Error::NullPointer {
                op,
                argument: argument.into(),
            });
        }
        let ticket = handle.addr() as u64;
        let low = ticket as u32;
        let version = (ticket >> 32) as u32;
        let index = low & ((1 << INDEX_BITS) - 1);
        let fork = low >> INDEX_BITS & ((1 << FORK_BITS) - 1);
        // Versions of objects are odd.
        if low >> (FORK_BITS + INDEX_BITS) != self.kind || version & 1 == 0 {
            return Err(self.invalid(op, argument, handle, false));
        }
        if fork != forks() {
            return Err(self.invalid(op, argument, handle, true));
        }
        Ok((&self.process(op)?.objects, Key { index, version }))
    }

    /// What this process made. That of a parent is left as it is, with whatever lock was held
    /// there.
    fn process(&self, op: &'static str) -> Result<&'static Process<T>> {
        let mut current = self.process.load(Ordering::Acquire);
        loop {
            // SAFETY: NULL or from `Box::into_raw` below, published with Release, and never freed.
            if let Some(process) = unsafe { current.as_ref() }
                && process.fork == forks()
            {
                return Ok(process);
            }
            let process = Process {
                fork: forks(),
                objects: RwLock::new(Slots::new()),
            };
            let fresh = Box::into_raw(boxed(op, process)?);
            let exchanged =
                self.process
                    .compare_exchange(current, fresh, Ordering::AcqRel, Ordering::Acquire);
            current = match exchanged {
                Ok(_) => fresh,
                Err(theirs) => {
                    // SAFETY: from `Box::into_raw` just now, and published nowhere.
                    drop(unsafe { Box::from_raw(fresh) });
                    theirs
                }
            };
        }
    }

    fn invalid<H>(
        &self,
        op: &'static str,
        argument: &'static str,
        handle: *const H,
        forked: bool,
    ) -> Error {
        Error::InvalidHandle {
            op,
            argument,
            kind: self.kind_name,
            handle: handle.addr(),
            forked,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    struct Opaque;
    static NUMBERS: Table<u32> = Table::new("number", 14);
    static OTHERS: Table<u32> = Table::new("other", 15);

    fn is_invalid<T>(result: Result<T>) -> bool {
        matches!(result, Err(Error::InvalidHandle { forked: false, .. }))
    }

    #[test]
    fn life_of_a_handle() {
        let a: *mut Opaque = NUMBERS.insert("t", 7).unwrap();
        let b: *mut Opaque = NUMBERS.insert("t", 8).unwrap();
        let get = |handle: *mut Opaque| NUMBERS.get("t", "h", handle).map(|found| *found);
        assert_eq!((get(a), get(b)), (Ok(7), Ok(8)));
        let kept = NUMBERS.get("t", "a", a).unwrap();
        assert_eq!(*NUMBERS.remove("t", "a", a).unwrap(), 7);
        assert!(is_invalid(get(a)) && is_invalid(NUMBERS.remove("t", "a", a)));
        assert_eq!(*kept, 7, "who uses it keeps it");
        let c: *mut Opaque = NUMBERS.insert("t", 9).unwrap();
        assert_ne!(a, c, "a recycled slot gives a new handle");
        assert!(is_invalid(get(a)));
        assert_eq!(get(c), Ok(9));
    }

    #[test]
    fn wild_handles() {
        let live: *mut Opaque = NUMBERS.insert("t", 1).unwrap();
        assert!(is_invalid(OTHERS.get("t", "h", live)));
        let local = Opaque;
        assert!(NUMBERS.get("t", "h", &raw const local).is_err());
        let null: *const Opaque = ptr::null();
        let found = NUMBERS.get("t", "h", null);
        assert!(matches!(found, Err(Error::NullPointer { .. })));
        let kind = 14 << 28;
        let wild = [1, usize::MAX, 0xffff, kind, kind | 1 << 32, kind | 1];
        let near = (0..64).map(|bit| live.addr() ^ (1 << bit));
        for bits in wild.into_iter().chain(near) {
            let wild: *const Opaque = ptr::without_provenance(bits);
            // Other tests hold numbers too, so a neighbour may be live; it is never this one.
            let found = NUMBERS.get("t", "h", wild);
            assert!(found.is_err() || wild.addr() as u32 != live.addr() as u32);
        }
    }

    /// Counts how many of it live.
    struct Counted(&'static AtomicUsize, [usize; 4]);

    impl Drop for Counted {
        fn drop(&mut self) {
            self.1 = [0; 4];
            self.0.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Threads create, use and destroy through the same places, so that most destroy what others
    /// use.
    #[test]
    fn threads_destroy_what_others_use() {
        static OBJECTS: Table<Counted> = Table::new("counted", 13);
        static LIVE: AtomicUsize = AtomicUsize::new(0);
        static PLACES: [AtomicPtr<Opaque>; 4] = [const { AtomicPtr::new(ptr::null_mut()) }; 4];
        static DONE: AtomicBool = AtomicBool::new(false);
        let rounds = if cfg!(miri) { 50 } else { 20_000 };
        let (mut used, mut dead) = (0, 0);
        std::thread::scope(|scope| {
            let users: Vec<_> = (0..4)
                .map(|user| {
                    scope.spawn(move || {
                        let (mut used, mut dead) = (0usize, 0usize);
                        while !DONE.load(Ordering::Relaxed) {
                            for at in 0..4 {
                                let handle = PLACES[(at + user) % 4].load(Ordering::Relaxed);
                                match OBJECTS.get("t", "h", handle) {
                                    Ok(found) => {
                                        let [first, rest @ ..] = found.1;
                                        assert!(first != 0 && rest.iter().all(|n| *n == first));
                                        used += 1;
                                    }
                                    Err(_) => dead += 1,
                                }
                            }
                        }
                        (used, dead)
                    })
                })
                .collect();
            let makers: Vec<_> = (0..2)
                .map(|maker| {
                    scope.spawn(move || {
                        for round in 0..rounds {
                            let number = 1 + maker + 2 * round;
                            LIVE.fetch_add(1, Ordering::Relaxed);
                            let object = Counted(&LIVE, [number; 4]);
                            let made = OBJECTS.insert("t", object).unwrap();
                            let old = PLACES[number % 4].swap(made, Ordering::Relaxed);
                            if !old.is_null() {
                                OBJECTS.remove("t", "h", old).unwrap();
                                assert!(OBJECTS.remove("t", "h", old).is_err());
                            }
                        }
                    })
                })
                .collect();
            for maker in makers {
                maker.join().unwrap();
            }
            DONE.store(true, Ordering::Relaxed);
            for user in users {
                let (u, d) = user.join().unwrap();
                (used, dead) = (used + u, dead + d);
            }
        });
        for place in &PLACES {
            OBJECTS
                .remove("t", "h", place.load(Ordering::Relaxed))
                .unwrap();
        }
        assert_eq!(LIVE.load(Ordering::Relaxed), 0, "every object was dropped");
        assert!(used > 0, "{used} uses, {dead} of them too late");
    }

    /// What a lookup costs, alone and among threads.
    #[test]
    #[ignore = "a measurement: cargo test --release --lib -- --ignored --nocapture lookup"]
    fn lookup_costs() {
        let handle: *mut Opaque = NUMBERS.insert("t", 1).unwrap();
        let ticket = handle.addr();
        let rounds = 5_000_000u32;
        for threads in [1, 2] {
            let start = std::time::Instant::now();
            std::thread::scope(|scope| {
                for _ in 0..threads {
                    scope.spawn(move || {
                        let handle: *const Opaque = ptr::without_provenance(ticket);
                        for _ in 0..rounds {
                            std::hint::black_box(NUMBERS.get("t", "h", handle).unwrap());
                        }
                    });
                }
            });
            let each = start.elapsed() / rounds;
            println!("{threads} threads: {each:?} a lookup");
        }
    }
}
