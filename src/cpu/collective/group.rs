//! What the ranks of a group share, and how they wait for each other.

use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::exchange::Send;
use crate::error::{Error, Result, text};
use crate::problem::collective::Problem;

/// When a wait is given up, and how long it was then.
pub(super) type Deadline = (Option<Instant>, Duration);

#[derive(Debug)]
pub(super) struct Group {
    pub size: usize,
    state: Mutex<State>,
    changed: Condvar,
    /// Each rank's call, while it is in one.
    calls: Vec<AtomicPtr<Problem<'static>>>,
}

#[derive(Debug)]
pub(super) struct State {
    broken: Option<Broken>,
    /// Ranks that have ended: nothing of all ranks goes on without them, but what others send each
    /// other does.
    gone: Vec<bool>,
    first_gone: Option<usize>,
    /// Whether every rank has come once.
    met: bool,
    /// The ranks that wait for the others; before they met, those that have come.
    here: Vec<bool>,
    num_here: usize,
    /// Collectives that have begun, the meeting among them.
    begun: u64,
    /// Ranks that have not ended the last of them.
    working: usize,
    ended: u64,
    pub sends: Vec<Send>,
}

/// Why no rank of a group can go on.
#[derive(Clone, Copy, Debug)]
pub(super) enum Broken {
    /// A rank waited in an operation for another one.
    TimedOut {
        rank: usize,
        op: &'static str,
        missing: usize,
        after: Duration,
    },
    Aborted(usize),
    Left(usize),
    /// A rank that is there came again.
    Twice(usize),
    /// A rank came to a group of another size.
    Size(usize, usize),
}

impl State {
    /// Why not all ranks come any more.
    fn incomplete(&self) -> Option<Broken> {
        self.broken.or(self.first_gone.map(Broken::Left))
    }

    /// Why a rank does not come any more.
    pub fn without(&self, rank: usize) -> Option<Broken> {
        let gone = self.gone[rank].then_some(Broken::Left(rank));
        self.broken.or(gone)
    }
}

impl Broken {
    pub fn error(self, op: &'static str) -> Error {
        let problem = match self {
            Broken::TimedOut {
                rank,
                op: during,
                missing,
                after,
            } => text!("is broken: rank {rank} waited {after:?} in {during} for rank {missing}"),
            Broken::Aborted(rank) => text!("is broken: rank {rank} aborted it"),
            Broken::Left(rank) => text!("is incomplete: rank {rank} has ended"),
            Broken::Twice(rank) => text!("is broken: rank {rank} came twice"),
            Broken::Size(rank, size) => text!("is broken: rank {rank} came with size {size}"),
        };
        Error::comm(op, problem)
    }
}

/// Ends a rank's part in a collective when dropped.
pub(super) struct End<'a>(pub &'a Group);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// As many of them.
fn list<T>(op: &'static str, len: usize, make: impl Fn() -> T) -> Result<Vec<T>> {
    let mut list = Vec::new();
    list.try_reserve_exact(len)
        .map_err(|_| Error::out_of_host_memory(op, len * size_of::<T>()))?;
    list.extend((0..len).map(|_| make()));
    Ok(list)
}

impl Group {
    pub fn new(op: &'static str, size: usize) -> Result<Group> {
        Ok(Group {
            size,
            state: Mutex::new(State {
                broken: None,
                gone: list(op, size, || false)?,
                first_gone: None,
                met: false,
                here: list(op, size, || false)?,
                num_here: 0,
                begun: 0,
                working: 0,
                ended: 0,
                sends: list(op, size, || Send::None)?,
            }),
            changed: Condvar::new(),
            calls: list(op, size, || AtomicPtr::new(std::ptr::null_mut()))?,
        })
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells those who wait that the state has changed.
    pub fn changed(&self) {
        self.changed.notify_all();
    }

    /// Waits until `done`, and whether that came before the deadline.
    pub fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        deadline: Option<Instant>,
        mut done: impl FnMut(&State) -> bool,
    ) -> (MutexGuard<'a, State>, bool) {
        loop {
            if done(&state) {
                return (state, true);
            }
            state = match deadline {
                None => self
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return (state, false);
                    }
                    let waited = self.changed.wait_timeout(state, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Breaks the group unless it is broken already, and wakes those who wait.
    pub fn break_up(&self, state: &mut State, why: Broken) -> Broken {
        let why = *state.broken.get_or_insert(why);
        self.changed();
        why
    }

    pub fn abort(&self, rank: usize) {
        self.break_up(&mut self.lock(), Broken::Aborted(rank));
    }

    pub fn leave(&self, rank: usize) {
        let mut state = self.lock();
        state.gone[rank] = true;
        state.first_gone.get_or_insert(rank);
        drop(state);
        self.changed();
    }

    pub fn health(&self, op: &'static str) -> Result<()> {
        match self.lock().incomplete() {
            Some(why) => Err(why.error(op)),
            None => Ok(()),
        }
    }

    /// Comes to the meeting of the group.
    ///
    /// # Errors
    /// The rank is there already or the size is another: the group is broken for all. It is broken,
    /// or not all ranks come in time.
    pub fn join(
        &self,
        op: &'static str,
        rank: usize,
        size: usize,
        deadline: Deadline,
    ) -> Result<()> {
        let mut state = self.lock();
        if let Some(why) = state.incomplete() {
            return Err(why.error(op));
        }
        if size != self.size {
            self.break_up(&mut state, Broken::Size(rank, size));
            let problem = text!("is {size}, another rank came with {}", self.size);
            return Err(Error::invalid(op, "size", problem));
        }
        if state.met || state.here[rank] {
            if !state.met {
                self.break_up(&mut state, Broken::Twice(rank));
            }
            let problem = text!("is {rank}, which is taken");
            return Err(Error::invalid(op, "rank", problem));
        }
        self.gather(op, rank, deadline, state)?;
        // Nobody's tensors are touched, so nobody waits for the end.
        self.finish();
        Ok(())
    }

    /// Waits until every rank has shown its call.
    ///
    /// # Errors
    /// The group is broken, or not all ranks come in time.
    pub fn begin(
        &self,
        op: &'static str,
        rank: usize,
        deadline: Deadline,
        call: Option<&Problem<'_>>,
    ) -> Result<()> {
        self.show(rank, call);
        let state = self.lock();
        if let Some(why) = state.incomplete() {
            return Err(why.error(op));
        }
        self.gather(op, rank, deadline, state)
    }

    /// Lets others see a rank's call, which must stay until none looks any more.
    pub fn show(&self, rank: usize, call: Option<&Problem<'_>>) {
        let call = call.map_or(std::ptr::null_mut(), |call| {
            std::ptr::from_ref(call).cast_mut().cast()
        });
        // The lock orders it before what others read.
        self.calls[rank].store(call, Ordering::Relaxed);
    }

    fn gather(
        &self,
        op: &'static str,
        rank: usize,
        (deadline, after): Deadline,
        mut state: MutexGuard<'_, State>,
    ) -> Result<()> {
        state.here[rank] = true;
        state.num_here += 1;
        if state.num_here == self.size {
            state.met = true;
            state.here.fill(false);
            state.num_here = 0;
            state.working = self.size;
            state.begun += 1;
            self.changed();
            return Ok(());
        }
        let number = state.begun;
        let (mut state, in_time) = self.wait(state, deadline, |state| {
            state.begun != number || state.incomplete().is_some()
        });
        if state.begun != number {
            return Ok(());
        }
        state.here[rank] = false;
        state.num_here -= 1;
        let why = match state.incomplete() {
            Some(why) if in_time => why,
            _ => {
                let others = (0..self.size).filter(|other| *other != rank);
                let missing = others.clone().find(|other| !state.here[*other]);
                let why = Broken::TimedOut {
                    rank,
                    op,
                    missing: missing.unwrap_or(rank),
                    after,
                };
                self.break_up(&mut state, why)
            }
        };
        Err(why.error(op))
    }

    /// A rank's share is done.
    fn finish(&self) -> u64 {
        let mut state = self.lock();
        let number = state.ended;
        state.working -= 1;
        if state.working == 0 {
            state.ended += 1;
            self.changed();
        }
        number
    }

    /// Waits until every rank's share is done.
    pub fn end(&self) {
        let number = self.finish();
        drop(self.wait(self.lock(), None, |state| state.ended != number));
    }

    /// The calls of all ranks.
    ///
    /// # Safety
    /// A collective has begun, and the caller's rank has not ended it.
    pub unsafe fn calls(&self) -> Calls<'_> {
        Calls(self)
    }

    /// A rank's call; `None` where it waits without one.
    ///
    /// # Safety
    /// The rank cannot return from it while the result lives.
    pub unsafe fn call(&self, rank: usize) -> Option<&Problem<'_>> {
        // SAFETY: the pointer is NULL or of a call that its rank is in: the caller's promise.
        unsafe { self.calls[rank].load(Ordering::Relaxed).as_ref() }
    }
}

/// What all ranks call.
#[derive(Clone, Copy)]
pub(super) struct Calls<'a>(&'a Group);

impl<'a> Calls<'a> {
    pub fn len(self) -> usize {
        self.0.size
    }

    pub fn get(self, rank: usize) -> Option<&'a Problem<'a>> {
        // SAFETY: `Group::calls` was promised that no rank has ended.
        unsafe { self.0.call(rank) }
    }
}
