//! Sends and receipts, which are of two ranks. The receiver copies; the sender stays until it has.

use super::group::{Broken, Deadline, Group};
use super::work;
use crate::cpu::Cpu;
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::problem::collective::Problem;

/// What a rank sends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Send {
    #[default]
    None,
    /// To a rank that has not come for it yet.
    Offered(usize),
    /// The receiver looks at it.
    Taken,
    /// And has done so.
    Done(Result<(), Differ>),
}

/// What two ranks do not agree on: that of the sender, that of the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Differ {
    DType(DType, DType),
    Elements(usize, usize),
}

impl Differ {
    fn error(self, op: &'static str, from: usize, to: usize) -> Error {
        let problem = match self {
            Differ::DType(a, b) => text!("has dtype {a} on rank {from}, out of rank {to} {b}"),
            Differ::Elements(a, b) => {
                text!("has {a} elements on rank {from}, out of rank {to} {b}")
            }
        };
        Error::invalid(op, "x", problem)
    }
}

/// Sends `x` to a rank and receives `out` from one, as far as they are there.
pub(super) fn run(
    cpu: &Cpu,
    group: &Group,
    rank: usize,
    problem: &Problem<'_>,
    (to, from): (usize, usize),
    deadline: Deadline,
) -> Result<()> {
    group.show(rank, Some(problem));
    if problem.x.is_some() {
        let mut state = group.lock();
        if let Some(why) = state.without(to) {
            return Err(why.error(problem.op));
        }
        state.sends[rank] = Send::Offered(to);
        group.changed();
    }
    let received = match problem.out {
        Some(_) => receive(cpu, group, rank, problem, from, deadline),
        None => Ok(()),
    };
    let sent = match problem.x {
        Some(_) => finish(group, rank, problem, to, deadline),
        None => Ok(()),
    };
    received.and(sent)
}

fn receive(
    cpu: &Cpu,
    group: &Group,
    rank: usize,
    problem: &Problem<'_>,
    from: usize,
    (deadline, after): Deadline,
) -> Result<()> {
    let wanted = Send::Offered(rank);
    let (mut state, in_time) = group.wait(group.lock(), deadline, |state| {
        state.sends[from] == wanted || state.without(from).is_some()
    });
    if let Some(why) = state.without(from)
        && state.sends[from] != wanted
    {
        return Err(why.error(problem.op));
    }
    if !in_time {
        let why = Broken::TimedOut {
            rank,
            op: problem.op,
            missing: from,
            after,
        };
        return Err(group.break_up(&mut state, why).error(problem.op));
    }
    state.sends[from] = Send::Taken;
    drop(state);
    // SAFETY: the sender does not return before it is told that this is done.
    let outcome = unsafe { take(cpu, group, problem, from) };
    group.lock().sends[from] = Send::Done(outcome);
    group.changed();
    outcome.map_err(|differ| differ.error(problem.op, from, rank))
}

/// Copies what a rank sends.
///
/// # Safety
/// The rank has shown its call, and stays in it.
unsafe fn take(cpu: &Cpu, group: &Group, problem: &Problem<'_>, from: usize) -> Result<(), Differ> {
    // SAFETY: the caller's promise.
    let sender = unsafe { group.call(from) };
    let (Some(x), Some(out)) = (sender.and_then(|call| call.x), problem.out) else {
        return Ok(());
    };
    if x.dtype != out.dtype {
        return Err(Differ::DType(x.dtype, out.dtype));
    }
    let (sent, room) = (x.layout.num_elements(), out.layout.num_elements());
    if sent != room {
        return Err(Differ::Elements(sent, room));
    }
    // SAFETY: both have these elements; the sender's are not written, and nobody else has the
    // receiver's.
    unsafe { work::copy(cpu, &out, 0, &x, 0, sent) };
    Ok(())
}

/// Waits until what a rank sends has been taken.
fn finish(
    group: &Group,
    rank: usize,
    problem: &Problem<'_>,
    to: usize,
    (deadline, after): Deadline,
) -> Result<()> {
    let (mut state, _) = group.wait(group.lock(), deadline, |state| {
        state.sends[rank] != Send::Offered(to) || state.without(to).is_some()
    });
    if state.sends[rank] == Send::Offered(to) {
        // Nobody looks at it, nor will.
        state.sends[rank] = Send::None;
        let why = state.without(to).unwrap_or_else(|| {
            let why = Broken::TimedOut {
                rank,
                op: problem.op,
                missing: to,
                after,
            };
            group.break_up(&mut state, why)
        });
        return Err(why.error(problem.op));
    }
    let (mut state, _) = group.wait(state, None, |state| {
        matches!(state.sends[rank], Send::Done(_))
    });
    match std::mem::take(&mut state.sends[rank]) {
        Send::Done(Err(differ)) => Err(differ.error(problem.op, rank, to)),
        _ => Ok(()),
    }
}
