//! A pipeline's step on the host, without its work: whether ranks' actions fit each other, how long they
//! take and what is held meanwhile.

use super::schedule::reserved;
use super::{Action, Params, Step};
use crate::error::{Error, Result, text};

const OP: &str = "pipeline_simulate";

/// What passes and transfers take. Times are in any unit, 0 to 1e18.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Costs {
    /// Of a micro-batch forward through all chunks of a rank; a chunk takes an equal part of it.
    pub forward: f64,
    /// Of the gradient of the input, likewise.
    pub backward_input: f64,
    /// Of the gradients of weights, likewise. [`Step::Backward`] takes both.
    pub backward_weight: f64,
    /// Of an activation or a gradient from one rank to another.
    pub transfer: f64,
    /// Whether a rank's transfers run on a stream of their own, beside its passes and in their order.
    /// Otherwise all that a rank does is on one stream.
    pub overlap: bool,
    /// Bytes that all chunks of a rank hold of a micro-batch from the forward pass to [`Step::Backward`] or
    /// [`Step::BackwardInput`].
    pub activation_bytes: u64,
    /// Bytes that they hold from [`Step::BackwardInput`] to [`Step::BackwardWeight`].
    pub split_bytes: u64,
}

/// What a step takes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Simulation {
    /// From the first pass's begin to the end of the last one, or of the last transfer.
    pub time: f64,
    /// The share of it in which ranks run no pass, in the mean: the bubble, and what they wait for
    /// transfers.
    pub idle: f64,
    /// What each rank takes.
    pub ranks: Vec<RankUse>,
}

/// What a rank takes in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankUse {
    /// The time in its passes.
    pub busy: f64,
    /// The most micro-batches of single chunks that it holds, each from its forward pass to its last
    /// backward pass.
    pub peak_live: usize,
    /// The most bytes of these.
    pub peak_bytes: u64,
}

impl Costs {
    /// The greatest time, of which a step's sum is finite.
    const MOST: f64 = 1e18;

    fn check(&self) -> Result<()> {
        for (name, value) in [
            ("forward", self.forward),
            ("backward_input", self.backward_input),
            ("backward_weight", self.backward_weight),
            ("transfer", self.transfer),
        ] {
            if !(0.0..=Costs::MOST).contains(&value) {
                let problem = text!("is {value}, allowed: 0 to 1e18");
                return Err(Error::invalid(OP, name, problem));
            }
        }
        Ok(())
    }

    fn of(&self, step: Step) -> f64 {
        match step {
            Step::Forward => self.forward,
            Step::Backward => self.backward_input + self.backward_weight,
            Step::BackwardInput => self.backward_input,
            Step::BackwardWeight => self.backward_weight,
            _ => self.transfer,
        }
    }
}

/// Follows the actions of each rank, which are a [`Schedule`](super::Schedule)'s or the caller's own, and
/// sees that every pass finds what it needs, that transfers meet, that all passes of all micro-batches run
/// once. A transfer takes both ranks from when the later one comes to it; [`Action::joined`] ones of a rank
/// run at the same time. Slots are not looked at.
///
/// # Errors
/// `params` has no pipeline, a cost is out of range; an action does not fit, or ranks wait for each other
/// for ever; the host has too little memory.
pub fn simulate(
    params: &Params,
    ranks: &[impl AsRef<[Action]>],
    costs: &Costs,
) -> Result<Simulation> {
    let params = params.checked(OP)?;
    costs.check()?;
    if ranks.len() != params.stages {
        let problem = text!("has {} lists, stages is {}", ranks.len(), params.stages);
        return Err(Error::invalid(OP, "ranks", problem));
    }
    let mut run = Run::new(&params, costs)?;
    for (rank, actions) in ranks.iter().enumerate() {
        run.ranks[rank].actions = actions.as_ref();
        for (i, action) in actions.as_ref().iter().enumerate() {
            run.check(rank, i, action)?;
        }
    }
    let mut moved = true;
    while moved {
        moved = false;
        for rank in 0..params.stages {
            while run.pass(rank)? || run.transfer(rank)? {
                moved = true;
            }
        }
    }
    run.end()
}

/// When something was done, of each part of the model and each micro-batch; infinite where it was not.
type Times = Vec<f64>;

const NEVER: f64 = f64::INFINITY;

struct Run<'a> {
    p: &'a Params,
    costs: &'a Costs,
    /// When a part had done its passes, and when it had received what they need of other ranks.
    forward: Times,
    backward: Times,
    weight: Times,
    activation: Times,
    gradient: Times,
    ranks: Vec<State<'a>>,
}

/// Where a rank is.
#[derive(Clone, Default)]
struct State<'a> {
    actions: &'a [Action],
    /// The first pass and the first transfer that are left, and when those before were done.
    pass: usize,
    transfer: usize,
    passed: f64,
    transferred: f64,
    /// Since when it is at its transfers, one or two joined, which of them are over, and when these were.
    since: Option<f64>,
    over: [bool; 2],
    until: f64,
    /// Micro-batches of chunks that are held whole, and between the halves of their backward passes.
    whole: usize,
    halves: usize,
    most_bytes: u128,
    found: RankUse,
}

impl State<'_> {
    /// Moves on to the next pass and the next transfer.
    fn find(&mut self) {
        let next = |from: usize, transfer: bool| {
            let mut rest = self.actions[from..].iter();
            let found = rest.position(|action| action.step.is_transfer() == transfer);
            found.map_or(self.actions.len(), |at| from + at)
        };
        (self.pass, self.transfer) = (next(self.pass, false), next(self.transfer, true));
    }

    /// The transfers that it is at.
    fn calls(&self) -> &[Action] {
        let rest = self.actions.get(self.transfer..).unwrap_or_default();
        let joined = rest.first().is_some_and(|action| action.joined);
        &rest[..rest.len().min(1 + usize::from(joined))]
    }
}

impl<'a> Run<'a> {
    fn new(p: &'a Params, costs: &'a Costs) -> Result<Run<'a>> {
        let times = || -> Result<Times> {
            let len = p.num_parts() * p.micro_batches;
            let mut list = reserved(OP, len)?;
            list.resize(len, NEVER);
            Ok(list)
        };
        let mut ranks = reserved(OP, p.stages)?;
        ranks.resize(p.stages, State::default());
        Ok(Run {
            p,
            costs,
            forward: times()?,
            backward: times()?,
            weight: times()?,
            activation: times()?,
            gradient: times()?,
            ranks,
        })
    }

    fn index(&self, rank: usize, action: &Action) -> usize {
        let part = self.p.part(rank, action.chunk);
        self.p.index(part, action.micro_batch)
    }

    /// Refuses what no rank can do.
    fn check(&self, rank: usize, i: usize, action: &Action) -> Result<()> {
        let p = self.p;
        let is_there = action.micro_batch < p.micro_batches && action.chunk < p.chunks;
        let last = p.num_parts() - 1;
        let peer = |to_next: bool| match (p.stages, p.part(rank, action.chunk)) {
            (1, _) => None,
            (stages, part) if to_next => (part < last).then(|| (rank + 1) % stages),
            (stages, part) => (part > 0).then(|| (rank + stages - 1) % stages),
        };
        let expected = match action.step {
            _ if !is_there => return Err(unfit(rank, i, action, "is of none that there is")),
            Step::SendActivation | Step::ReceiveGradient => peer(true),
            Step::ReceiveActivation | Step::SendGradient => peer(false),
            _ => None,
        };
        if action.peer != expected || action.step.is_transfer() && expected.is_none() {
            return Err(unfit(rank, i, action, "has another peer than there is"));
        }
        let next = self.ranks[rank].actions.get(i + 1);
        let other = next.is_some_and(|next| {
            next.step.is_send() && action.step.is_receive()
                || next.step.is_receive() && action.step.is_send()
        });
        let alone = i == 0 || !self.ranks[rank].actions[i - 1].joined;
        if action.joined && !(other && alone) {
            let problem = "is joined with what is not one transfer in the other direction";
            return Err(unfit(rank, i, action, problem));
        }
        Ok(())
    }

    /// Runs a rank's next pass, if what it needs is there.
    fn pass(&mut self, rank: usize) -> Result<bool> {
        let p = self.p;
        self.ranks[rank].find();
        let State { pass, transfer, .. } = self.ranks[rank];
        let Some(action) = self.ranks[rank].actions.get(pass) else {
            return Ok(false);
        };
        if transfer < pass && !self.costs.overlap {
            return Ok(false);
        }
        let (at, part) = (self.index(rank, action), p.part(rank, action.chunk));
        let (done, needs) = match action.step {
            Step::Forward => (
                self.forward[at],
                match p.stages {
                    _ if part == 0 => 0.0,
                    1 => self.forward[at - p.micro_batches],
                    _ => self.activation[at],
                },
            ),
            Step::BackwardWeight => (self.weight[at], self.backward[at]),
            _ => (
                self.backward[at],
                match p.stages {
                    _ if part + 1 == p.num_parts() => self.forward[at],
                    1 => self.backward[at + p.micro_batches],
                    _ => self.gradient[at].max(self.forward[at]),
                },
            ),
        };
        if done != NEVER {
            return Err(unfit(rank, pass, action, "is there for the second time"));
        }
        if needs == NEVER {
            return Ok(false);
        }
        let state = &mut self.ranks[rank];
        let time = self.costs.of(action.step) / p.chunks as f64;
        let others = if self.costs.overlap {
            0.0
        } else {
            state.transferred
        };
        let end = state.passed.max(others).max(needs) + time;
        (state.passed, state.pass) = (end, pass + 1);
        state.found.busy += time;
        match action.step {
            Step::Forward => {
                state.whole += 1;
                self.forward[at] = end;
            }
            Step::Backward => (self.backward[at], self.weight[at]) = (end, end),
            Step::BackwardInput => self.backward[at] = end,
            _ => self.weight[at] = end,
        }
        let live = state.whole + state.halves;
        state.found.peak_live = live.max(state.found.peak_live);
        let bytes = state.whole as u128 * u128::from(self.costs.activation_bytes)
            + state.halves as u128 * u128::from(self.costs.split_bytes);
        state.most_bytes = bytes.max(state.most_bytes);
        match action.step {
            Step::Forward => {}
            Step::Backward => state.whole -= 1,
            Step::BackwardInput => {
                (state.whole, state.halves) = (state.whole - 1, state.halves + 1)
            }
            _ => state.halves -= 1,
        }
        Ok(true)
    }

    /// Moves what a rank is at transferring, as far as the other ranks are there too.
    fn transfer(&mut self, rank: usize) -> Result<bool> {
        self.ranks[rank].find();
        let State { pass, transfer, .. } = self.ranks[rank];
        let calls = self.ranks[rank].calls();
        if calls.is_empty() || pass < transfer && !self.costs.overlap {
            return Ok(false);
        }
        let mut moved = false;
        if self.ranks[rank].since.is_none() {
            let made = calls.iter().map(|call| match call.step {
                Step::SendActivation => self.forward[self.index(rank, call)],
                Step::SendGradient => self.backward[self.index(rank, call)],
                _ => 0.0,
            });
            let made = made.fold(0.0, f64::max);
            if made == NEVER {
                return Ok(false);
            }
            let state = &mut self.ranks[rank];
            let others = if self.costs.overlap {
                0.0
            } else {
                state.passed
            };
            state.since = Some(state.transferred.max(others).max(made));
            moved = true;
        }
        for i in 0..self.ranks[rank].calls().len() {
            moved |= !self.ranks[rank].over[i] && self.meet(rank, i)?;
        }
        let state = &mut self.ranks[rank];
        let number = state.calls().len();
        if state.over[..number].iter().all(|over| *over) {
            state.transfer += number;
            state.transferred = state.until;
            (state.since, state.over) = (None, [false; 2]);
            moved = true;
        }
        Ok(moved)
    }

    /// Moves a rank's `i`th call, if its peer is at the other side of it.
    fn meet(&mut self, rank: usize, i: usize) -> Result<bool> {
        let own = self.ranks[rank].calls()[i];
        let peer = own.peer.unwrap_or(rank);
        let there = &self.ranks[peer];
        let faces = |(j, call): (usize, &Action)| {
            let faces = call.peer == Some(rank) && call.step.is_send() != own.step.is_send();
            (faces && !there.over[j]).then_some((j, *call))
        };
        let found = there.calls().iter().enumerate().find_map(faces);
        let (Some(own_since), Some(since), Some((j, other))) =
            (self.ranks[rank].since, there.since, found)
        else {
            return Ok(false);
        };
        let (to, sent, from, received) = match own.step.is_send() {
            true => (peer, own, rank, other),
            false => (rank, other, peer, own),
        };
        let (taken, step) = match sent.step {
            Step::SendActivation => (&mut self.activation, Step::ReceiveActivation),
            _ => (&mut self.gradient, Step::ReceiveGradient),
        };
        let (given, wanted) = (
            self.p.part(from, sent.chunk),
            self.p.part(to, received.chunk),
        );
        let neighbours = match sent.step {
            Step::SendActivation => wanted == given + 1,
            _ => wanted + 1 == given,
        };
        let at = self.p.index(wanted, received.micro_batch);
        let first = taken[at] == NEVER;
        if received.step != step
            || !neighbours
            || sent.micro_batch != received.micro_batch
            || !first
        {
            let transfer = self.ranks[rank].transfer + i;
            let problem = text!(
                "meets {:?} of micro_batch {} of rank {peer}",
                other.step,
                other.micro_batch
            );
            return Err(unfit(rank, transfer, &own, &problem));
        }
        let end = own_since.max(since) + self.costs.transfer;
        taken[at] = end;
        for (rank, call) in [(rank, i), (peer, j)] {
            let state = &mut self.ranks[rank];
            state.over[call] = true;
            state.until = state.until.max(end);
        }
        Ok(true)
    }

    /// What was found, if all has been done.
    fn end(mut self) -> Result<Simulation> {
        for (rank, state) in self.ranks.iter_mut().enumerate() {
            state.find();
            let at = state.pass.min(state.transfer);
            if let Some(action) = state.actions.get(at) {
                return Err(unfit(rank, at, action, "waits for ever"));
            }
        }
        let done = [&self.forward, &self.backward, &self.weight];
        if let Some(at) = done
            .iter()
            .find_map(|of| of.iter().position(|t| *t == NEVER))
        {
            let (part, micro_batch) = (at / self.p.micro_batches, at % self.p.micro_batches);
            let (rank, chunk) = (part % self.p.stages, part / self.p.stages);
            let problem = text!(
                "have not all passes of micro_batch {micro_batch} in chunk {chunk} of rank {rank}"
            );
            return Err(Error::invalid(OP, "ranks", problem));
        }
        let mut found = Simulation {
            ranks: reserved(OP, self.p.stages)?,
            ..Simulation::default()
        };
        let mut busy = 0.0;
        for state in &self.ranks {
            let bytes = state.most_bytes.div_ceil(self.p.chunks as u128);
            let peak_bytes = u64::try_from(bytes).map_err(|_| {
                let bytes = self.costs.activation_bytes;
                let problem = text!("is {bytes}: what a rank holds passes 64 bits");
                Error::invalid(OP, "activation_bytes", problem)
            })?;
            busy += state.found.busy;
            found.time = found.time.max(state.passed).max(state.transferred);
            found.ranks.push(RankUse {
                peak_bytes,
                ..state.found
            });
        }
        if found.time > 0.0 {
            let all = found.time * self.p.stages as f64;
            found.idle = ((all - busy) / all).max(0.0);
        }
        Ok(found)
    }
}

fn unfit(rank: usize, i: usize, action: &Action, problem: &str) -> Error {
    let Action {
        step,
        micro_batch,
        chunk,
        ..
    } = action;
    let problem = text!(
        "have {step:?} of micro_batch {micro_batch} in chunk {chunk} as action {i} of rank {rank}, which \
         {problem}"
    );
    Error::invalid(OP, "ranks", problem)
}
