//! How the ranks of a group find each other: by an id, which is a number of this process.

use std::collections::VecDeque;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::group::Group;
use crate::alloc::{Shared, boxed};
use crate::error::{Error, Result, text};

/// Bytes of an id: those of NCCL's.
pub(crate) const ID_BYTES: usize = 128;

/// What an id begins with.
const MAGIC: [u8; 8] = *b"unsloth\x01";

/// The groups of a process that have not met yet. A child of `fork` leaves its parent's as they are,
/// with whatever lock was held there.
struct Process {
    pid: u32,
    open: Mutex<Open>,
}

struct Open {
    ids: Ids,
    groups: Vec<(u64, Shared<Group>)>,
}

/// The numbers of a process's ids, counted from 1, and which of them have served. A rank that comes
/// with an id that has served gets an error at once, where it would else wait for ranks that have
/// long met. Memory is a byte for each id since the oldest that has not served.
#[derive(Default)]
struct Ids {
    made: u64,
    /// Ids 1 to `done` have all served.
    done: u64,
    /// Whether id `done + 1 + i` has served. Entry 0, if there is one, has not.
    served: VecDeque<bool>,
}

impl Ids {
    fn make(&mut self, op: &'static str) -> Result<u64> {
        self.served
            .try_reserve(1)
            .map_err(|_| Error::out_of_host_memory(op, self.served.len() + 1))?;
        self.served.push_back(false);
        self.made += 1;
        Ok(self.made)
    }

    fn has_served(&self, number: u64) -> bool {
        match number.checked_sub(self.done + 1) {
            None => true,
            Some(at) => self.served.get(at as usize).is_some_and(|served| *served),
        }
    }

    fn serve(&mut self, number: u64) {
        let at = number.checked_sub(self.done + 1);
        if let Some(served) = at.and_then(|at| self.served.get_mut(at as usize)) {
            *served = true;
        }
        while self.served.front() == Some(&true) {
            self.served.pop_front();
            self.done += 1;
        }
    }
}

impl Process {
    /// That of this process, made now if there is none.
    fn get(op: &'static str) -> Result<&'static Process> {
        /// Never freed.
        static PROCESS: AtomicPtr<Process> = AtomicPtr::new(ptr::null_mut());
        let pid = std::process::id();
        let mut current = PROCESS.load(Ordering::Acquire);
        loop {
            // SAFETY: NULL or from `Box::into_raw` below, published with Release, and never freed.
            if let Some(process) = unsafe { current.as_ref() }
                && process.pid == pid
            {
                return Ok(process);
            }
            let process = Process {
                pid,
                open: Mutex::new(Open {
                    ids: Ids::default(),
                    groups: Vec::new(),
                }),
            };
            let fresh = Box::into_raw(boxed(op, process)?);
            let exchanged =
                PROCESS.compare_exchange(current, fresh, Ordering::AcqRel, Ordering::Acquire);
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

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The group of an id, new if its first rank comes.
    fn group(&self, op: &'static str, number: u64, size: usize) -> Result<Shared<Group>> {
        let mut open = self.open();
        if open.ids.has_served(number) {
            let problem = "has served: a group takes a new one";
            return Err(Error::invalid(op, "id", problem));
        }
        if let Some((_, group)) = open.groups.iter().find(|(other, _)| *other == number) {
            return Ok(group.clone());
        }
        open.groups
            .try_reserve(1)
            .map_err(|_| Error::out_of_host_memory(op, size_of::<(u64, Shared<Group>)>()))?;
        let group = Shared::new(op, Group::new(op, size)?)?;
        open.groups.push((number, group.clone()));
        Ok(group)
    }

    /// Its ranks have met, or will not: nobody is to find it any more.
    fn close(&self, number: u64) {
        let mut open = self.open();
        let Some(at) = open.groups.iter().position(|(other, _)| *other == number) else {
            return;
        };
        open.groups.swap_remove(at);
        open.ids.serve(number);
    }
}

/// An id that no other group of this process has.
pub(crate) fn new_id(op: &'static str) -> Result<[u8; ID_BYTES]> {
    let process = Process::get(op)?;
    let number = process.open().ids.make(op)?;
    let mut id = [0; ID_BYTES];
    id[..8].copy_from_slice(&MAGIC);
    id[8..16].copy_from_slice(&u64::from(process.pid).to_ne_bytes());
    id[16..24].copy_from_slice(&number.to_ne_bytes());
    Ok(id)
}

/// The number of an id that this process made.
fn number_of(op: &'static str, process: &Process, id: &[u8; ID_BYTES]) -> Result<u64> {
    let word = |at: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&id[at..at + 8]);
        u64::from_ne_bytes(word)
    };
    let (pid, number) = (word(8), word(16));
    let known = 1..=process.open().ids.made;
    if id[..8] != MAGIC || id[24..].iter().any(|byte| *byte != 0) {
        let problem = "is none of a local group: unsloth_comm_id_create makes one";
        return Err(Error::invalid(op, "id", problem));
    }
    if pid != u64::from(process.pid) || !known.contains(&number) {
        let problem = text!("is of process {pid}, this is {}", process.pid);
        return Err(Error::invalid(op, "id", problem));
    }
    Ok(number)
}

/// Waits until all ranks of a group have come.
pub(super) fn meet(
    op: &'static str,
    id: &[u8; ID_BYTES],
    rank: usize,
    size: usize,
    timeout: Duration,
) -> Result<Shared<Group>> {
    let process = Process::get(op)?;
    let number = number_of(op, process, id)?;
    let group = process.group(op, number, size)?;
    let deadline = (Instant::now().checked_add(timeout), timeout);
    let joined = group.join(op, rank, size, deadline);
    process.close(number);
    joined.map(|()| group)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_stays_of_groups_that_met_or_did_not() {
        let process = Process::get("test").unwrap();
        let is_open = |number| {
            let open = process.open();
            open.groups.iter().any(|(other, _)| *other == number)
        };
        let ids = [0; 2].map(|_| new_id("test").unwrap());
        let numbers = ids.map(|id| number_of("test", process, &id).unwrap());
        assert_ne!(numbers[0], numbers[1]);
        meet("test", &ids[0], 0, 1, Duration::ZERO).unwrap();
        let late = meet("test", &ids[1], 1, 3, Duration::from_millis(1)).unwrap_err();
        assert_eq!(
            late.to_string(),
            "test: comm is broken: rank 1 waited 1ms in test for rank 0"
        );
        assert!(numbers.iter().all(|number| !is_open(*number)));
        // Also after many more.
        for _ in 0..1000 {
            let id = new_id("test").unwrap();
            meet("test", &id, 0, 1, Duration::ZERO).unwrap();
        }
        for id in ids {
            let again = meet("test", &id, 0, 1, Duration::ZERO).unwrap_err();
            assert_eq!(
                again.to_string(),
                "test: id has served: a group takes a new one"
            );
        }
    }

    #[test]
    fn ids_take_room_from_the_oldest_that_has_not_served() {
        let mut ids = Ids::default();
        let numbers: Vec<_> = (0..5).map(|_| ids.make("test").unwrap()).collect();
        assert_eq!(numbers, [1, 2, 3, 4, 5]);
        for (number, waiting) in [(4, 5), (2, 5), (1, 3), (3, 1), (3, 1), (5, 0)] {
            ids.serve(number);
            assert!(ids.has_served(number));
            assert_eq!(ids.served.len(), waiting, "after {number}");
        }
        assert_eq!(ids.make("test").unwrap(), 6);
        assert!(!ids.has_served(6));
    }
}
