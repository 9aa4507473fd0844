//! Whether what ranks call fits together. Every rank sees the same calls and finds the same fault.

use super::group::Calls;
use crate::error::{Error, Result, text};
use crate::problem::collective::{Kind, Problem};

/// Checks the calls of all ranks against that of rank 0.
///
/// # Errors
/// The first fault, the same on each rank.
pub(super) fn check(op: &'static str, calls: Calls<'_>) -> Result<()> {
    let Some(first) = calls.get(0) else {
        return all_wait(op, calls);
    };
    for rank in 1..calls.len() {
        let Some(call) = calls.get(rank) else {
            let problem = text!("has rank 0 in {}, rank {rank} in a barrier", first.op);
            return Err(Error::invalid(op, "comm", problem));
        };
        pair(op, first, call, rank, calls.len())?;
    }
    match first.kind {
        Kind::AllToAll => what_is_sent_is_received(op, calls),
        _ => Ok(()),
    }
}

fn all_wait(op: &'static str, calls: Calls<'_>) -> Result<()> {
    for rank in 1..calls.len() {
        if let Some(call) = calls.get(rank) {
            let problem = text!("has rank 0 in a barrier, rank {rank} in {}", call.op);
            return Err(Error::invalid(op, "comm", problem));
        }
    }
    Ok(())
}

/// Checks a rank's call against that of rank 0.
fn pair(
    op: &'static str,
    first: &Problem<'_>,
    call: &Problem<'_>,
    rank: usize,
    size: usize,
) -> Result<()> {
    let differ =
        |name: &'static str, what: &str, a: &dyn std::fmt::Display, b: &dyn std::fmt::Display| {
            let problem = text!("{what}{a} on rank 0, {b} on rank {rank}");
            Err(Error::invalid(op, name, problem))
        };
    if first.op != call.op {
        let problem = text!("has rank 0 in {}, rank {rank} in {}", first.op, call.op);
        return Err(Error::invalid(op, "comm", problem));
    }
    match (first.kind, call.kind) {
        (Kind::AllReduce(a), Kind::AllReduce(b))
        | (Kind::ReduceScatter(a), Kind::ReduceScatter(b))
            if a != b =>
        {
            return differ("op", "is ", &a, &b);
        }
        (Kind::Broadcast(a), Kind::Broadcast(b)) if a != b => {
            return differ("root", "is ", &a, &b);
        }
        _ => {}
    }
    let tensor = match first.kind {
        Kind::Broadcast(_) => "out",
        _ => "x",
    };
    if first.dtype != call.dtype {
        return differ(tensor, "has dtype ", &first.dtype, &call.dtype);
    }
    if first.kind == Kind::AllToAll {
        return Ok(());
    }
    for part in 0..size {
        let (a, b) = (
            first.sent.of(part) * first.row,
            call.sent.of(part) * call.row,
        );
        if a == b {
            continue;
        }
        let part = match first.kind {
            Kind::AllGather | Kind::GatherBackwards | Kind::ReduceScatter(_) => {
                text!(" in part {part}")
            }
            _ => String::new(),
        };
        let problem = text!("has {a} elements{part} on rank 0, {b} on rank {rank}");
        return Err(Error::invalid(op, tensor, problem));
    }
    Ok(())
}

fn what_is_sent_is_received(op: &'static str, calls: Calls<'_>) -> Result<()> {
    for from in 0..calls.len() {
        for to in 0..calls.len() {
            let (Some(sender), Some(receiver)) = (calls.get(from), calls.get(to)) else {
                continue;
            };
            let (sent, received) = (sender.sent_to(to).1, receiver.received_from(from).1);
            if sent != received {
                let problem = text!(
                    "has {sent} elements for rank {to} on rank {from}, out of rank {to} takes {received}"
                );
                return Err(Error::invalid(op, "x", problem));
            }
        }
    }
    Ok(())
}
