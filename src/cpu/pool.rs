//! The threads of a context: fork and join in about a microsecond, without an allocation.
//!
//! A caller publishes its work, a number of pieces, in a slot, and works on it too. Threads that have
//! nothing to do look through the slots for a moment, then sleep until something is published. Each
//! piece is taken by whoever comes first, so a thread that the system does not run holds up no more
//! than the piece it has. The pieces themselves depend on neither, and so do results.
//!
//! Threads are made with pthreads' own functions: those of `std` end the process where memory fails.

use std::cell::UnsafeCell;
use std::ffi::{CStr, c_void};
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// For how long a thread looks for work, or a caller for the end of it, before it sleeps. Calls of a
/// model that is being decoded follow one another faster than this.
const SPIN: Duration = Duration::from_micros(40);

/// Calls that are helped at a time. Further ones work alone.
const SLOTS: usize = 8;

/// Bytes of a thread's stack.
const STACK: usize = 2 << 20;

/// What a participant does: its number, and that of the piece.
type Work<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// Threads that help callers.
pub(super) struct Pool {
    /// One element, which the threads share; they end before it does.
    shared: Vec<Shared>,
    threads: Vec<libc::pthread_t>,
    /// Which process they are threads of, by the number of forks behind it.
    forks: u32,
}

/// Forks that this process descends from, as far as it has had pools.
static FORKS: AtomicU32 = AtomicU32::new(0);

struct Shared {
    slots: [Slot; SLOTS],
    /// Grows with every call that is published.
    published: AtomicUsize,
    /// Threads that look for work.
    looking: AtomicUsize,
    /// Threads that sleep, or are about to and will look at `published` once more.
    sleeping: AtomicUsize,
    stop: AtomicBool,
    lock: Mutex<()>,
    wake: Condvar,
}

/// One call's work. Slots lie in cache lines of their own.
#[repr(align(128))]
struct Slot {
    /// [`TAKEN`], [`OPEN`], [`WAITING`]; how many threads may still join, times [`ROOM`]; how many
    /// have joined and not left.
    state: AtomicU32,
    /// The next piece to be taken.
    next: Counter,
    /// Written by who has taken the slot before it opens it, read by who has joined.
    call: UnsafeCell<Call>,
    /// What a helper's piece panicked with.
    panic: Mutex<Option<Box<dyn std::any::Any + Send>>>,
    /// Wakes the caller when the last helper leaves.
    left: Condvar,
    lock: Mutex<()>,
}

#[repr(align(128))]
struct Counter(AtomicUsize);

/// A caller has the slot.
const TAKEN: u32 = 1 << 31;
/// Threads may join.
const OPEN: u32 = 1 << 30;
/// The caller sleeps until the last helper leaves.
const WAITING: u32 = 1 << 29;
/// One thread that may join. Below are those that have, of which there are fewer than this.
const ROOM: u32 = 1 << 14;
const JOINED: u32 = ROOM - 1;

/// The most threads of a pool, so that counts fit their bits.
pub(super) const MAX_THREADS: usize = 4096;

#[derive(Clone, Copy)]
struct Call {
    work: *const Work<'static>,
    pieces: usize,
    helpers: u32,
}

// SAFETY: `call` is written by the one caller that has taken the slot, while nobody has joined, and
// read by those who have; both see to it through `state`. The work it points to is `Sync`.
unsafe impl Sync for Slot {}
// SAFETY: as above; a slot is moved only before there are threads.
unsafe impl Send for Slot {}

impl Slot {
    fn new() -> Slot {
        fn nothing(_: usize, _: usize) {}
        const NOTHING: *const Work<'static> = &(nothing as fn(usize, usize));
        Slot {
            state: AtomicU32::new(0),
            next: Counter(AtomicUsize::new(0)),
            call: UnsafeCell::new(Call {
                work: NOTHING,
                pieces: 0,
                helpers: 0,
            }),
            panic: Mutex::new(None),
            left: Condvar::new(),
            lock: Mutex::new(()),
        }
    }

    /// Joins the work, if it is open to one more; gives the number of the participant.
    fn join(&self) -> Option<usize> {
        let mut state = self.state.load(Ordering::Relaxed);
        loop {
            let room = (state & !(TAKEN | OPEN | WAITING)) / ROOM;
            if state & OPEN == 0 || room == 0 {
                return None;
            }
            // What was written before the slot was opened is seen from here on.
            match self.state.compare_exchange_weak(
                state,
                state - ROOM + 1,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                // SAFETY: joined, so nobody writes.
                Ok(_) => return Some((unsafe { *self.call.get() }.helpers - room + 1) as usize),
                Err(now) => state = now,
            }
        }
    }

    /// Takes pieces until there are none left.
    ///
    /// # Safety
    /// The caller has joined, or has taken the slot, so that the work lives.
    unsafe fn work(&self, participant: usize) {
        // SAFETY: nobody writes while someone has joined, and the work is borrowed for that long.
        let call = unsafe { *self.call.get() };
        // SAFETY: as above.
        let work = unsafe { &*call.work };
        loop {
            let piece = self.next.0.fetch_add(1, Ordering::Relaxed);
            if piece >= call.pieces {
                return;
            }
            work(participant, piece);
        }
    }

    /// Ends a helper's part.
    fn leave(&self) {
        // The caller that sees the count fall sees what was done.
        let before = self.state.fetch_sub(1, Ordering::AcqRel);
        if before & WAITING != 0 && before & JOINED == 1 {
            drop(lock(&self.lock));
            self.left.notify_one();
        }
    }

    /// Waits until every helper has left. The slot has been closed.
    fn wait(&self) {
        let gone = || self.state.load(Ordering::Acquire) & JOINED == 0;
        if gone() || spin(gone) {
            return;
        }
        let mut guard = lock(&self.lock);
        let mut state = self.state.fetch_or(WAITING, Ordering::AcqRel);
        while state & JOINED != 0 {
            guard = self
                .left
                .wait(guard)
                .unwrap_or_else(PoisonError::into_inner);
            state = self.state.load(Ordering::Acquire);
        }
    }
}

/// A slot that is open. It is closed, and its helpers have left, when this is dropped.
struct Opened<'a>(&'a Slot);

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        self.0.state.fetch_and(!OPEN, Ordering::AcqRel);
        // Even if this one panics: what helpers work on is borrowed from it.
        self.0.wait();
    }
}

/// Guards nothing that a panic could leave half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Looks until it is done, or for as long as is worth it; whether it is done.
fn spin(mut done: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while start.elapsed() < SPIN {
        for _ in 0..32 {
            if done() {
                return true;
            }
            std::hint::spin_loop();
        }
    }
    false
}

impl Shared {
    /// Helps a caller; whether there was one.
    fn help(&self) -> bool {
        let mut helped = false;
        for slot in &self.slots {
            let Some(participant) = slot.join() else {
                continue;
            };
            helped = true;
            // SAFETY: joined.
            let end = catch_unwind(AssertUnwindSafe(|| unsafe { slot.work(participant) }));
            if let Err(panic) = end {
                // Nothing further is worth computing.
                slot.next.0.store(usize::MAX / 2, Ordering::Relaxed);
                *lock(&slot.panic) = Some(panic);
            }
            slot.leave();
        }
        helped
    }

    /// What a thread does until the pool ends.
    fn run(&self) {
        while !self.stop.load(Ordering::Relaxed) {
            let published = self.published.load(Ordering::SeqCst);
            if self.help() {
                continue;
            }
            let news = || {
                self.published.load(Ordering::SeqCst) != published
                    || self.stop.load(Ordering::SeqCst)
            };
            self.looking.fetch_add(1, Ordering::SeqCst);
            let found = spin(news);
            self.looking.fetch_sub(1, Ordering::SeqCst);
            if found {
                continue;
            }
            let mut guard = lock(&self.lock);
            // Counted first, then looked once more; callers publish first, then count. One of the
            // two sees the other.
            self.sleeping.fetch_add(1, Ordering::SeqCst);
            while !news() {
                guard = self
                    .wake
                    .wait(guard)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            self.sleeping.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Tells the threads of an open slot.
    fn publish(&self, helpers: usize) {
        self.published.fetch_add(1, Ordering::SeqCst);
        let missing = helpers.saturating_sub(self.looking.load(Ordering::SeqCst));
        let sleeping = self.sleeping.load(Ordering::SeqCst);
        if missing == 0 || sleeping == 0 {
            return;
        }
        drop(lock(&self.lock));
        if missing >= sleeping {
            self.wake.notify_all();
        } else {
            (0..missing).for_each(|_| self.wake.notify_one());
        }
    }
}

impl Pool {
    /// Threads for callers that work as well: `num_threads` with the caller, at least one and at most
    /// [`MAX_THREADS`].
    pub fn new(op: &'static str, num_threads: usize) -> Result<Pool> {
        static WATCH_FORKS: Once = Once::new();
        WATCH_FORKS.call_once(|| {
            extern "C" fn forked() {
                FORKS.fetch_add(1, Ordering::Relaxed);
            }
            // SAFETY: the handler only counts. Where it cannot be set, forks are not noticed.
            unsafe { libc::pthread_atfork(None, None, Some(forked)) };
        });
        let helpers = num_threads.clamp(1, MAX_THREADS) - 1;
        let failed = || {
            const REASON: &str = "the system starts no more threads";
            let mut reason = String::new();
            if reason.try_reserve(REASON.len()).is_ok() {
                reason.push_str(REASON);
            }
            Error::OutOfMemory {
                op,
                requested: (helpers as u64).saturating_mul(STACK as u64),
                reason,
            }
        };
        let no_memory = || Error::out_of_host_memory(op, size_of::<Shared>());
        let mut pool = Pool {
            shared: Vec::new(),
            threads: Vec::new(),
            forks: FORKS.load(Ordering::Relaxed),
        };
        if helpers == 0 {
            return Ok(pool);
        }
        (pool.shared.try_reserve_exact(1)).map_err(|_| no_memory())?;
        (pool.threads.try_reserve_exact(helpers)).map_err(|_| no_memory())?;
        pool.shared.push(Shared {
            slots: std::array::from_fn(|_| Slot::new()),
            published: AtomicUsize::new(0),
            looking: AtomicUsize::new(0),
            sleeping: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            lock: Mutex::new(()),
            wake: Condvar::new(),
        });
        for _ in 0..helpers {
            // Those that have been started end with `pool`.
            let thread = start(&pool.shared[0]).map_err(|_| failed())?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// Threads that work on a call, the caller's among them.
    pub fn num_threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// Calls `work(participant, piece)` for every piece below `pieces`, on up to `participants`
    /// threads, the caller's being participant 0; a participant does one piece after another.
    ///
    /// In a child of the process that made the pool the caller does all of them, for a fork leaves
    /// the threads behind.
    pub fn run(&self, participants: usize, pieces: usize, work: &Work<'_>) {
        let helpers = participants.min(pieces).saturating_sub(1);
        let helpers = helpers.min(self.threads.len());
        let alone = helpers == 0 || self.forks != FORKS.load(Ordering::Relaxed);
        let slot = match (alone, self.shared.first()) {
            (false, Some(shared)) => self.take().map(|slot| (shared, slot)),
            _ => None,
        };
        let Some((shared, slot)) = slot else {
            (0..pieces).for_each(|piece| work(0, piece));
            return;
        };
        // SAFETY: the slot is taken and not open, so nobody else looks at its call. The lifetime is
        // that of the borrow, for `Opened` waits until those have left who use it.
        unsafe {
            *slot.call.get() = Call {
                work: std::mem::transmute::<*const Work<'_>, *const Work<'static>>(work),
                pieces,
                helpers: helpers as u32,
            };
        }
        slot.next.0.store(0, Ordering::Relaxed);
        let open = TAKEN | OPEN | (helpers as u32 * ROOM);
        slot.state.store(open, Ordering::Release);
        let opened = Opened(slot);
        shared.publish(helpers);
        // SAFETY: taken.
        let end = catch_unwind(AssertUnwindSafe(|| unsafe { slot.work(0) }));
        drop(opened);
        let panic = end.err().or_else(|| lock(&slot.panic).take());
        slot.state.store(0, Ordering::Release);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// A slot that no other caller has.
    fn take(&self) -> Option<&Slot> {
        let taken = |slot: &&Slot| {
            let (acquire, relaxed) = (Ordering::Acquire, Ordering::Relaxed);
            (slot.state.compare_exchange(0, TAKEN, acquire, relaxed)).is_ok()
        };
        self.shared.first()?.slots.iter().find(taken)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let Some(shared) = self.shared.first() else {
            return;
        };
        if self.forks != FORKS.load(Ordering::Relaxed) {
            // The threads are another process's, whose locks may be held here for ever.
            std::mem::forget(std::mem::take(&mut self.shared));
            return;
        }
        shared.stop.store(true, Ordering::SeqCst);
        drop(lock(&shared.lock));
        shared.wake.notify_all();
        for thread in &self.threads {
            // SAFETY: a thread of ours that has not been joined.
            unsafe { libc::pthread_join(*thread, std::ptr::null_mut()) };
        }
    }
}

/// Starts a thread, which uses `shared` until it is told to stop.
fn start(shared: &Shared) -> std::io::Result<libc::pthread_t> {
    extern "C" fn main(shared: *mut c_void) -> *mut c_void {
        let name: &CStr = c"unsloth";
        // SAFETY: the name ends with a zero and has fewer than 16 bytes.
        #[cfg(target_os = "linux")]
        unsafe {
            libc::pthread_setname_np(libc::pthread_self(), name.as_ptr())
        };
        // SAFETY: the pool joins its threads before it frees what they share.
        unsafe { &*shared.cast::<Shared>() }.run();
        std::ptr::null_mut()
    }
    let check = |code: i32| match code {
        0 => Ok(()),
        code => Err(std::io::Error::from_raw_os_error(code)),
    };
    let mut attributes = MaybeUninit::uninit();
    let mut thread = MaybeUninit::uninit();
    let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: attributes and masks are made before they are used; `main` matches its declaration.
    // Signals stay with the application's threads: a thread inherits the mask of who makes it.
    unsafe {
        check(libc::pthread_attr_init(attributes.as_mut_ptr()))?;
        libc::pthread_attr_setstacksize(attributes.as_mut_ptr(), STACK);
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        let argument = std::ptr::from_ref(shared).cast_mut().cast();
        let (to, how) = (thread.as_mut_ptr(), attributes.as_ptr());
        let started = check(libc::pthread_create(to, how, main, argument));
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut());
        libc::pthread_attr_destroy(attributes.as_mut_ptr());
        started?;
        Ok(thread.assume_init())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every piece once, from many callers at a time, more than there are slots.
    #[test]
    fn callers_share_the_threads() {
        let pool = Pool::new("test", 4).unwrap();
        std::thread::scope(|scope| {
            for caller in 0..2 * SLOTS {
                let pool = &pool;
                scope.spawn(move || {
                    for round in 0..200 {
                        let pieces = 1 + (caller * 31 + round * 7) % 50;
                        let done: Vec<AtomicUsize> =
                            (0..pieces).map(|_| AtomicUsize::new(0)).collect();
                        let busy: Vec<AtomicBool> =
                            (0..4).map(|_| AtomicBool::new(false)).collect();
                        pool.run(3, pieces, &|participant, piece| {
                            assert!(participant < 3);
                            assert!(!busy[participant].swap(true, Ordering::Acquire));
                            done[piece].fetch_add(1, Ordering::Relaxed);
                            busy[participant].store(false, Ordering::Release);
                        });
                        assert!(done.iter().all(|n| n.load(Ordering::Relaxed) == 1));
                        if round % 64 == 0 {
                            // Long enough for threads to fall asleep.
                            std::thread::sleep(4 * SPIN);
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn panics_reach_the_caller() {
        let pool = Pool::new("test", 3).unwrap();
        for bad in 0..20 {
            let run = || pool.run(3, 20, &|_, piece| assert!(piece != bad, "piece {bad}"));
            assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
        }
        let sum = AtomicUsize::new(0);
        pool.run(3, 10, &|_, piece| {
            sum.fetch_add(piece, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 45);
    }

    /// A child has the pool's memory and none of its threads.
    #[test]
    fn a_child_works_alone() {
        let pool = Pool::new("test", 3).unwrap();
        pool.run(3, 100, &|_, _| {});
        // SAFETY: the child only computes, and ends without running anything of the parent's.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let sum = AtomicUsize::new(0);
            pool.run(3, 10, &|participant, piece| {
                sum.fetch_add(piece + 100 * participant, Ordering::Relaxed);
            });
            drop(pool);
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(sum.into_inner() != 45)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
    }

    #[test]
    fn idle_threads_sleep() {
        let pool = Pool::new("test", 3).unwrap();
        pool.run(3, 100, &|_, _| {});
        let deadline = Instant::now() + Duration::from_secs(30);
        while pool.shared[0].sleeping.load(Ordering::SeqCst) < 2 {
            assert!(Instant::now() < deadline, "threads are awake without work");
            std::thread::yield_now();
        }
    }
}
