//! Schedules of a pipeline: what each of the ranks that divide a model's layers does in a training step, in
//! order, on the host alone.
//!
//! The model is cut into `stages * chunks` parts of layers. Part `chunk * stages + rank` is the rank's chunk
//! `chunk`: with one chunk a rank has neighbouring layers, with more it has several groups of them
//! ("virtual stages"). A step's batch is cut into micro-batches, which go forward through all parts, and
//! whose gradients come back. A rank waits while nothing has reached it: the bubble. With `p` ranks, `m`
//! micro-batches, `v` chunks, and passes through all of a rank's chunks that take `F` forward, `B` for the
//! gradient of the input and `W` for those of the weights, it is
//!
//! | | idle time of a rank | micro-batches held by a rank at most |
//! |-|-|-|
//! | [`Kind::GPipe`] (arXiv:1811.06965) | `(p-1)(F+B+W)` | `m` |
//! | [`Kind::OneFOneB`] (arXiv:1806.03377, 2104.04473) | `(p-1)(F+B+W)` | `min(m, p-rank)` |
//! | [`Kind::Interleaved`] (arXiv:2104.04473) | `(p-1)(F+B+W)/v` | `p + (p-1)/v`, by rank less |
//! | [`Kind::ZeroBubble`] (ZB-H1 of arXiv:2401.10241) | `(p-1)(F+B-W)` | `min(m, p)` |
//!
//! (for at least `p` micro-batches; interleaved with transfers beside the passes, [`Costs::overlap`]; of the
//! last with `W` no greater than `F` and `B`). The last splits the backward pass: the gradient of the input is
//! what the rank before waits for, those of the weights fill what would be idle time.
//!
//! # Transfers
//!
//! [`Schedule::actions`] names every transfer at its sender and at its receiver. All ranks' actions are
//! drawn from one order of them all, so that blocking calls, of which neither side's is over before the
//! other's has begun, never wait for each other in a circle. An action that is [`joined`](Action::joined)
//! with the next one, of the other direction, may be one call with it
//! ([`send_receive`](crate::ops::send_receive) takes both; over NCCL a group), so that both move at once; it
//! need not. What a rank receives is taken by the pass behind: one buffer for each direction is enough, and
//! more of them let transfers run ahead on a stream of their own.
//!
//! # Memory
//!
//! A pass has a slot for what is held of a micro-batch in a chunk from the forward pass to the last backward
//! pass: input, what the layers saved, the output while it is not sent. A slot is taken again at once, by
//! the next forward pass. The gradient that goes on to the rank before may lie in it too, in room of its own
//! beside the input, which may be received before it is sent: it is sent before another one is received for the
//! slot.
//!
//! ```
//! use unsloth::training::pipeline::{Costs, Kind, Params, Schedule, Step};
//!
//! let schedule = Schedule::new(&Params {
//!     kind: Kind::OneFOneB,
//!     stages: 4,
//!     micro_batches: 8,
//!     chunks: 1,
//! })?;
//! // The last rank goes back as soon as it has gone forward.
//! let steps: Vec<_> = schedule.actions(3)?.iter().map(|a| a.step).collect();
//! assert_eq!(steps[..3], [Step::ReceiveActivation, Step::Forward, Step::Backward]);
//! let found = schedule.simulate(&Costs {
//!     forward: 1.0,
//!     backward_input: 1.0,
//!     backward_weight: 1.0,
//!     activation_bytes: 1 << 20,
//!     ..Costs::default()
//! })?;
//! assert_eq!((found.time, found.idle), (33.0, 3.0 / 11.0));
//! assert_eq!((found.ranks[0].peak_bytes, found.ranks[3].peak_bytes), (4 << 20, 1 << 20));
//! # Ok::<(), unsloth::Error>(())
//! ```

mod passes;
mod schedule;
mod simulate;

use crate::error::{Error, Result, text};
pub use schedule::Schedule;
pub use simulate::{Costs, RankUse, Simulation, simulate};

const OP: &str = "pipeline_schedule";

/// The most ranks of a pipeline, and the most chunks of a rank.
pub const MAX_STAGES: usize = 1024;

/// The most forward passes of all ranks: `stages * chunks * micro_batches`.
pub const MAX_PASSES: usize = 1 << 20;

/// In which order ranks go forward and back. The discriminants are those of the C ABI
/// (`UNSLOTH_PIPELINE_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Kind {
    /// A rank goes forward until the first gradient can be there, then in turns back and forward.
    #[default]
    OneFOneB = 0,
    /// All micro-batches go forward, then all go back.
    GPipe = 1,
    /// As [`Kind::OneFOneB`], with two or more chunks on a rank; the ranks divide the micro-batches evenly.
    Interleaved = 2,
    /// As [`Kind::OneFOneB`], with backward passes in two, of which the second, of weights, is put off by as
    /// many micro-batches as the rank's number: ZB-H1.
    ZeroBubble = 3,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 4] = [
        Kind::OneFOneB,
        Kind::GPipe,
        Kind::Interleaved,
        Kind::ZeroBubble,
    ];

    /// The kind with this C ABI value.
    pub fn from_raw(value: u32) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| *kind as u32 == value)
    }

    fn is_split(self) -> bool {
        self == Kind::ZeroBubble
    }
}

/// A pipeline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Params {
    /// In which order ranks go forward and back.
    pub kind: Kind,
    /// Ranks, 1 to [`MAX_STAGES`].
    pub stages: usize,
    /// Micro-batches of a step, at least 1; interleaved, a multiple of `stages`.
    pub micro_batches: usize,
    /// Groups of layers of each rank: 2 to [`MAX_STAGES`] interleaved, else 1. 0 is 1.
    pub chunks: usize,
}

impl Params {
    /// The same with a number of chunks, having seen that there can be such a pipeline.
    fn checked(&self, op: &'static str) -> Result<Params> {
        let Params {
            stages,
            micro_batches,
            ..
        } = *self;
        let invalid = |name, problem| Err(Error::invalid(op, name, problem));
        if !(1..=MAX_STAGES).contains(&stages) {
            let problem = text!("is {stages}, allowed: 1 to {MAX_STAGES}");
            return invalid("stages", problem);
        }
        let chunks = self.chunks.max(1);
        match self.kind {
            Kind::Interleaved if !(2..=MAX_STAGES).contains(&chunks) => {
                let problem = text!("is {chunks}, allowed interleaved: 2 to {MAX_STAGES}");
                return invalid("chunks", problem);
            }
            Kind::Interleaved => {}
            _ if chunks > 1 => {
                let problem = text!("is {chunks}, allowed unless interleaved: 1");
                return invalid("chunks", problem);
            }
            _ => {}
        }
        let most = MAX_PASSES / (stages * chunks);
        if !(1..=most).contains(&micro_batches) {
            let problem = text!(
                "is {micro_batches}, allowed with stages {stages} and chunks {chunks}: 1 to {most}"
            );
            return invalid("micro_batches", problem);
        }
        if self.kind == Kind::Interleaved && !micro_batches.is_multiple_of(stages) {
            let problem =
                text!("is {micro_batches}, a multiple of stages {stages} is needed interleaved");
            return invalid("micro_batches", problem);
        }
        Ok(Params { chunks, ..*self })
    }

    /// Parts of the model.
    fn num_parts(&self) -> usize {
        self.stages * self.chunks
    }

    /// The part of the model that is a rank's chunk.
    fn part(&self, rank: usize, chunk: usize) -> usize {
        chunk * self.stages + rank
    }

    /// Where what is known of a part's micro-batch lies in a list of all.
    fn index(&self, part: usize, micro_batch: usize) -> usize {
        part * self.micro_batches + micro_batch
    }
}

/// What a rank does. The discriminants are those of the C ABI (`UNSLOTH_PIPELINE_STEP_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Step {
    /// The chunk's layers take the micro-batch's activation.
    Forward = 1,
    /// The chunk's layers take its gradient: gradients of the input and of weights.
    Backward = 2,
    /// Only the gradient of the input.
    BackwardInput = 3,
    /// Those of weights, of a micro-batch whose [`Step::BackwardInput`] was before.
    BackwardWeight = 4,
    /// The chunk's output goes to `peer`, which has the next part of the model.
    SendActivation = 5,
    /// The chunk's input comes from `peer`, which has the part before.
    ReceiveActivation = 6,
    /// The gradient of the chunk's input goes to `peer`, which has the part before.
    SendGradient = 7,
    /// The gradient of the chunk's output comes from `peer`, which has the next part.
    ReceiveGradient = 8,
}

impl Step {
    /// Whether something goes to another rank.
    pub fn is_send(self) -> bool {
        matches!(self, Step::SendActivation | Step::SendGradient)
    }

    /// Whether something comes from another rank.
    pub fn is_receive(self) -> bool {
        matches!(self, Step::ReceiveActivation | Step::ReceiveGradient)
    }

    /// Whether it is either.
    pub fn is_transfer(self) -> bool {
        self.is_send() || self.is_receive()
    }
}

/// One line of a rank's schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Action {
    /// What to do.
    pub step: Step,
    /// With which micro-batch.
    pub micro_batch: usize,
    /// In which of this rank's chunks.
    pub chunk: usize,
    /// The other rank, of a transfer.
    pub peer: Option<usize>,
    /// Where what is held of the micro-batch in this chunk lies; `None` of [`Step::SendGradient`], before
    /// which the slot may have been taken again.
    pub slot: Option<usize>,
    /// Whether this transfer and the next action, a transfer in the other direction, may be one call.
    pub joined: bool,
}
