//! Collectives of a group of threads of one process, each of which is a rank.
//!
//! A collective has three steps. Every rank shows its call and waits for the others; all see the same
//! calls, so all find the same fault in them if there is one. Then each does its share: it gathers
//! what comes to itself, or reduces its part of the elements for everyone. Then each waits for the
//! others' shares, which read and write its tensors. Only the first wait can time out or be broken
//! off, and does so for all ranks or for none: who has begun gets to the end, which is near.
//!
//! A send and a receipt are of two ranks, and are in `exchange`.

mod agree;
mod exchange;
mod group;
mod meeting;
mod work;

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::alloc::Shared;
use crate::cpu::{Cpu, Run};
use crate::error::Result;
use crate::problem::collective::{Both, Call, Join, Kind, Normalised, Problem};
use crate::tensor::Scratch;
use group::Group;
pub(crate) use meeting::{ID_BYTES, new_id};

/// The most ranks of a group.
pub(crate) const MAX_RANKS: usize = 1024;

/// A rank of a group. When it goes, the others can do nothing together any more.
#[derive(Debug)]
pub(crate) struct Member {
    group: Shared<Group>,
    rank: usize,
    timeout: Duration,
    /// A rank does one thing at a time.
    turn: Mutex<()>,
}

impl Member {
    /// Waits until all ranks of the group with this id have come.
    ///
    /// # Errors
    /// The id is not of this process or has served; the rank is taken; sizes differ; not all came in
    /// time. The others get an error then too.
    pub fn meet(
        op: &'static str,
        id: &[u8; ID_BYTES],
        rank: usize,
        size: usize,
        timeout: Duration,
    ) -> Result<Member> {
        Ok(Member {
            group: meeting::meet(op, id, rank, size, timeout)?,
            rank,
            timeout,
            turn: Mutex::new(()),
        })
    }

    /// Breaks the group: ranks that wait for others come back, and later calls are refused.
    pub fn abort(&self) {
        self.group.abort(self.rank);
    }

    /// Why the group is broken, if it is.
    pub fn health(&self, op: &'static str) -> Result<()> {
        self.group.health(op)
    }

    /// Waits for all ranks.
    pub fn barrier(&self, op: &'static str) -> Result<()> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.group.begin(op, self.rank, self.deadline(), None)?;
        let _end = group::End(&self.group);
        // SAFETY: all ranks have begun, and none has ended.
        agree::check(op, unsafe { self.group.calls() })
    }

    /// When a wait that begins now is given up; `None` where that is too far to tell.
    fn deadline(&self) -> (Option<Instant>, Duration) {
        (Instant::now().checked_add(self.timeout), self.timeout)
    }

    fn run(&self, cpu: &Cpu, problem: &Problem<'_>) -> Result<()> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let deadline = self.deadline();
        if let Kind::SendReceive { to, from } = problem.kind {
            return exchange::run(cpu, &self.group, self.rank, problem, (to, from), deadline);
        }
        self.group
            .begin(problem.op, self.rank, deadline, Some(problem))?;
        // The others look at this rank's call until the end, which they wait for: also where a
        // panic comes first.
        let _end = group::End(&self.group);
        // SAFETY: all ranks have begun, and none has ended.
        let calls = unsafe { self.group.calls() };
        agree::check(problem.op, calls)?;
        // SAFETY: as above, and all ranks call it: they found the same calls to agree.
        unsafe { work::run(cpu, self.rank, problem, calls) };
        Ok(())
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.group.leave(self.rank);
    }
}

impl Run for Call<'_, Member> {
    fn run(&self, cpu: &Cpu, _: Scratch) -> Result<()> {
        self.transport.run(cpu, &self.problem)
    }
}

/// One after the other.
impl Run for Both<'_, Member> {
    fn run(&self, cpu: &Cpu, _: Scratch) -> Result<()> {
        let mut problems = self.problems.iter();
        problems.try_for_each(|problem| self.transport.run(cpu, problem))
    }
}

impl Run for Normalised<'_, Member> {
    fn run(&self, cpu: &Cpu, scratch: Scratch) -> Result<()> {
        self.sum.run(cpu, scratch)?;
        self.norm.run(cpu, scratch)?;
        match &self.gathered {
            Some(gathered) => self.sum.transport.run(cpu, gathered),
            None => Ok(()),
        }
    }
}

/// Nothing runs beside other work here.
impl Run for Join<'_, Member> {
    fn run(&self, _: &Cpu, _: Scratch) -> Result<()> {
        Ok(())
    }
}
