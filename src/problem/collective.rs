//! Collectives: what the ranks of a group do together. One problem for all of them.

use std::fmt;

use crate::dtype::DType;
use crate::problem::rms_norm;
use crate::tensor::RawTensor;

/// What numbers of all ranks become one by. The discriminants are those of the C ABI
/// (`UNSLOTH_REDUCE_OP_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum ReduceOp {
    /// Their sum. Integers wrap around.
    #[default]
    Sum = 0,
    /// Their sum over the number of ranks; of floats.
    Avg = 1,
    /// The greatest. NaN counts only where all are.
    Max = 2,
    /// The least. NaN counts only where all are.
    Min = 3,
    /// Their product. Integers wrap around.
    Prod = 4,
}

impl ReduceOp {
    /// All of them.
    pub const ALL: [ReduceOp; 5] = [
        ReduceOp::Sum,
        ReduceOp::Avg,
        ReduceOp::Max,
        ReduceOp::Min,
        ReduceOp::Prod,
    ];

    /// The operation with this C ABI value.
    pub fn from_raw(value: u32) -> Option<ReduceOp> {
        ReduceOp::ALL.into_iter().find(|op| *op as u32 == value)
    }

    /// Lower-case name, as in messages.
    pub const fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Avg => "avg",
            ReduceOp::Max => "max",
            ReduceOp::Min => "min",
            ReduceOp::Prod => "prod",
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Which collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    AllReduce(ReduceOp),
    AllGather,
    /// The same, the last rank's part first. Parts are as long.
    GatherBackwards,
    ReduceScatter(ReduceOp),
    /// Of this rank's tensor.
    Broadcast(usize),
    AllToAll,
    /// A send where there is `x`, a receipt where there is `out`.
    SendReceive {
        to: usize,
        from: usize,
    },
}

/// How the rows of a tensor are divided among ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Parts<'a> {
    /// As many for each.
    Even(usize),
    /// Not negative, and of an entry for each rank.
    Each(&'a [i64]),
}

impl Parts<'_> {
    /// Rows of a rank's part.
    pub fn of(self, rank: usize) -> usize {
        match self {
            Parts::Even(rows) => rows,
            Parts::Each(counts) => counts.get(rank).map_or(0, |n| *n as usize),
        }
    }

    /// Rows before a rank's part.
    pub fn before(self, rank: usize) -> usize {
        match self {
            Parts::Even(rows) => rows * rank,
            Parts::Each(counts) => counts.iter().take(rank).map(|n| *n as usize).sum(),
        }
    }
}

/// Validated arguments. Tensors are contiguous, and of one dtype but where one is sent and another
/// received.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem<'a> {
    /// The operation's name in errors.
    pub op: &'static str,
    pub kind: Kind,
    pub dtype: DType,
    /// Elements of a row; of the whole tensor where none is divided, which then is one row.
    pub row: usize,
    /// What this rank gives; absent on the receiving ranks of a broadcast. It may be the rank's part
    /// of `out` in an all-gather, and `out` its part of `x` in a reduce-scatter; in an all-reduce and
    /// a broadcast they may be the same.
    pub x: Option<RawTensor>,
    /// What it gets.
    pub out: Option<RawTensor>,
    /// The parts of `x`, where it is divided, or of all ranks' together.
    pub sent: Parts<'a>,
    /// The same of `out`.
    pub received: Parts<'a>,
}

impl Problem<'_> {
    /// Whether no rank gives any element, as far as one of them knows.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))] // the CPU's ranks meet all the same
    pub fn is_empty(&self) -> bool {
        let empty = |t: &Option<RawTensor>| t.is_none_or(|t| t.layout.is_empty());
        match self.kind {
            // The greater of the two has the parts of all ranks.
            Kind::AllGather | Kind::GatherBackwards => empty(&self.out),
            Kind::ReduceScatter(_) => empty(&self.x),
            _ => empty(&self.x) && empty(&self.out),
        }
    }

    /// Elements before a rank's part of `x`, and in it.
    pub fn sent_to(&self, rank: usize) -> (usize, usize) {
        (
            self.sent.before(rank) * self.row,
            self.sent.of(rank) * self.row,
        )
    }

    /// The same of `out`.
    pub fn received_from(&self, rank: usize) -> (usize, usize) {
        (
            self.received.before(rank) * self.row,
            self.received.of(rank) * self.row,
        )
    }
}

/// A problem with the way to the other ranks that a backend has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call<'a, T> {
    pub transport: &'a T,
    pub problem: Problem<'a>,
}

/// Two problems that are one launch where that can be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Both<'a, T> {
    pub transport: &'a T,
    pub problems: [Problem<'a>; 2],
}

/// A sum of all ranks that a norm reads, in fewer launches where that can be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Normalised<'a, T> {
    /// Of rows: all of them for every rank, or, where `gathered` is there, each rank's own.
    pub sum: Call<'a, T>,
    /// Its `x` and its `out` are what the sum gives this rank.
    pub norm: rms_norm::Problem,
    /// What all ranks then get of each other's.
    pub gathered: Option<Problem<'a>>,
}

/// The most calls that run beside others and are waited for one by one.
pub(crate) const MOST_BESIDE: usize = 8;

/// A call that runs behind what was queued before it and beside what is queued after it, until there is a
/// [`Join`] of its number. Such calls run in the order in which they are made.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))] // the CPU's calls run when they are made
pub(crate) struct Beside<'a, T> {
    pub call: Call<'a, T>,
    /// Below [`MOST_BESIDE`].
    pub number: usize,
}

/// What is queued behind it waits for the last call beside others that had this number, and for all such
/// calls before that one.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))] // as above
pub(crate) struct Join<'a, T> {
    pub op: &'static str,
    pub transport: &'a T,
    pub number: usize,
}
