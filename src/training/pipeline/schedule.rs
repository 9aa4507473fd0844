//! When each pass runs, were all equally long, and the transfers between them.

use super::passes::{Pass, num_slots, passes};
use super::simulate::{Costs, Simulation, simulate};
use super::{Action, MAX_STAGES, OP, Params, Step};
use crate::error::{Error, Result, text};

/// What all ranks of a pipeline do in a step.
#[derive(Debug)]
pub struct Schedule {
    params: Params,
    turns: Turns,
}

/// The turn in which each part of the model takes each micro-batch, forward and back.
#[derive(Debug)]
struct Turns {
    forward: Vec<u32>,
    backward: Vec<u32>,
}

/// That of a pass which has not had one.
const NOT_YET: u32 = u32::MAX;

impl Schedule {
    /// Makes a schedule.
    ///
    /// # Errors
    /// There is no such pipeline, or the host has too little memory.
    pub fn new(params: &Params) -> Result<Schedule> {
        Schedule::of(OP, params)
    }

    /// [`Schedule::new`] for a call of another name.
    pub(crate) fn of(op: &'static str, params: &Params) -> Result<Schedule> {
        let params = params.checked(op)?;
        let turns = Turns::new(&params)?;
        Ok(Schedule { params, turns })
    }

    /// What it was made of.
    pub fn params(&self) -> &Params {
        &self.params
    }

    /// How many actions a rank has.
    ///
    /// # Errors
    /// There is no such rank.
    pub fn num_actions(&self, rank: usize) -> Result<usize> {
        let p = self.with_rank(rank)?;
        let passes = p.chunks * if p.kind.is_split() { 3 } else { 2 };
        // A chunk has two ends, of which the first and the last of the model meet no other rank.
        let ends = match p.stages {
            1 => 0,
            _ => 2 * p.chunks - usize::from(rank == 0) - usize::from(rank == p.stages - 1),
        };
        Ok(p.micro_batches * (passes + 2 * ends))
    }

    /// How many micro-batches of single chunks a rank holds at most: the slots that its actions name.
    ///
    /// # Errors
    /// There is no such rank.
    pub fn num_slots(&self, rank: usize) -> Result<usize> {
        Ok(num_slots(self.with_rank(rank)?, rank))
    }

    /// What a rank does, from the first to the last.
    ///
    /// # Errors
    /// There is no such rank, or the host has too little memory.
    pub fn actions(&self, rank: usize) -> Result<Vec<Action>> {
        let p = self.with_rank(rank)?;
        let mut placed: Vec<Placed> = reserved(OP, self.num_actions(rank)?)?;
        let mut slots = Slots::new(p, rank)?;
        let mut next = 0;
        for pass in passes(p, rank) {
            let turn = self.turns.of(p, rank, &pass).unwrap_or(next);
            next = turn + 1;
            let own = Action {
                step: pass.step,
                micro_batch: pass.micro_batch,
                chunk: pass.chunk,
                peer: None,
                slot: Some(slots.of(p, &pass)),
                joined: false,
            };
            let order = Placed::PASS;
            let action = own;
            placed.push(Placed {
                turn,
                order,
                action,
            });
            // What a pass takes comes right before it, and what it gives goes right before it is taken.
            let (taken, given) = self.transfers(rank, own, turn);
            placed.extend(taken.into_iter().chain(given));
        }
        placed.sort_unstable_by_key(|at| (at.turn, at.order));
        let mut actions = reserved(OP, placed.len())?;
        actions.extend(placed.iter().map(|at| at.action));
        for i in 1..actions.len() {
            // A call takes one transfer of each direction.
            let free = i < 2 || !actions[i - 2].joined;
            let (before, this) = (actions[i - 1].step, actions[i].step);
            let both = before.is_send() && this.is_receive();
            let both = both || before.is_receive() && this.is_send();
            actions[i - 1].joined = free && both && placed[i - 1].turn == placed[i].turn;
        }
        Ok(actions)
    }

    /// How long a step takes with these costs, and what ranks hold.
    ///
    /// # Errors
    /// A cost is out of range, or the host has too little memory.
    pub fn simulate(&self, costs: &Costs) -> Result<Simulation> {
        let mut ranks = reserved(OP, self.params.stages)?;
        for rank in 0..self.params.stages {
            ranks.push(self.actions(rank)?);
        }
        simulate(&self.params, &ranks, costs)
    }

    /// What a pass takes from another rank and gives to another.
    fn transfers(&self, rank: usize, own: Action, turn: u32) -> (Option<Placed>, Option<Placed>) {
        let p = &self.params;
        let (part, last) = (p.part(rank, own.chunk), p.num_parts() - 1);
        let before = (part > 0).then(|| (part - 1, (rank + p.stages - 1) % p.stages));
        let after = (part < last).then(|| (part + 1, (rank + 1) % p.stages));
        let Turns { forward, backward } = &self.turns;
        let (takes, from, gives, to, turns) = match own.step {
            _ if p.stages == 1 => return (None, None),
            Step::Forward => (
                Step::ReceiveActivation,
                before,
                Step::SendActivation,
                after,
                forward,
            ),
            Step::Backward | Step::BackwardInput => (
                Step::ReceiveGradient,
                after,
                Step::SendGradient,
                before,
                backward,
            ),
            _ => return (None, None),
        };
        let placed = |turn, step, sender: usize, peer| Placed {
            turn,
            order: Placed::order(step, sender),
            action: Action {
                step,
                peer: Some(peer),
                // The slot of a gradient that is sent may have been taken again.
                slot: own.slot.filter(|_| step != Step::SendGradient),
                ..own
            },
        };
        (
            from.map(|(_, peer)| placed(turn, takes, peer, peer)),
            to.map(|(part, peer)| {
                let turn = turns[p.index(part, own.micro_batch)];
                placed(turn, gives, rank, peer)
            }),
        )
    }

    fn with_rank(&self, rank: usize) -> Result<&Params> {
        let stages = self.params.stages;
        if rank >= stages {
            let problem = text!("is {rank}, allowed: 0 to {}", stages - 1);
            return Err(Error::invalid(OP, "rank", problem));
        }
        Ok(&self.params)
    }
}

impl Turns {
    /// Gives every pass the first turn in which what it needs is there, and its rank's pass before is over.
    fn new(p: &Params) -> Result<Turns> {
        let mut turns = Turns {
            forward: list(p.num_parts() * p.micro_batches)?,
            backward: list(p.num_parts() * p.micro_batches)?,
        };
        let mut ranks = reserved(OP, p.stages)?;
        ranks.extend((0..p.stages).map(|rank| (passes(p, rank).peekable(), 0)));
        loop {
            let (mut ended, mut moved) = (true, false);
            for (rank, (passes, clock)) in ranks.iter_mut().enumerate() {
                while let Some(pass) = passes.peek() {
                    let Some(turn) = turns.first(p, rank, pass) else {
                        break;
                    };
                    let turn = turn.max(*clock);
                    if let Some(at) = turns.slot_of(p, rank, pass) {
                        *at = turn;
                    }
                    *clock = turn + 1;
                    passes.next();
                    moved = true;
                }
                ended &= passes.peek().is_none();
            }
            if ended {
                return Ok(turns);
            }
            if !moved {
                let message = text!("the passes of {p:?} wait for each other");
                return Err(Error::Internal { op: OP, message });
            }
        }
    }

    /// The first turn in which what a pass needs is there; `None` where that has had no turn yet.
    fn first(&self, p: &Params, rank: usize, pass: &Pass) -> Option<u32> {
        let part = p.part(rank, pass.chunk);
        let behind = |of: &[u32], part: usize| match of[p.index(part, pass.micro_batch)] {
            NOT_YET => None,
            turn => Some(turn + 1),
        };
        match pass.step {
            Step::Forward if part == 0 => Some(0),
            Step::Forward => behind(&self.forward, part - 1),
            Step::BackwardWeight => behind(&self.backward, part),
            _ if part + 1 == p.num_parts() => behind(&self.forward, part),
            _ => behind(&self.backward, part + 1),
        }
    }

    fn slot_of(&mut self, p: &Params, rank: usize, pass: &Pass) -> Option<&mut u32> {
        let index = p.index(p.part(rank, pass.chunk), pass.micro_batch);
        match pass.step {
            Step::Forward => self.forward.get_mut(index),
            Step::BackwardWeight => None,
            _ => self.backward.get_mut(index),
        }
    }

    /// The turn of a pass; of gradients of weights, which nobody waits for, the one behind the pass before.
    fn of(&self, p: &Params, rank: usize, pass: &Pass) -> Option<u32> {
        let index = p.index(p.part(rank, pass.chunk), pass.micro_batch);
        match pass.step {
            Step::Forward => self.forward.get(index).copied(),
            Step::BackwardWeight => None,
            _ => self.backward.get(index).copied(),
        }
    }
}

/// An action, and where it lies in the order of all ranks' actions. That order is one of turns, and within
/// a turn of transfers before passes: whoever follows it finds the other side of the first transfer that is
/// left at it too.
#[derive(Debug)]
struct Placed {
    turn: u32,
    order: u32,
    action: Action,
}

impl Placed {
    const PASS: u32 = u32::MAX;

    /// Of a transfer among those of its turn: in a turn a rank sends one of each kind at most.
    fn order(step: Step, sender: usize) -> u32 {
        let gradient = matches!(step, Step::SendGradient | Step::ReceiveGradient);
        (sender + if gradient { MAX_STAGES } else { 0 }) as u32
    }
}

/// Which slot has what of a rank's.
struct Slots {
    taken: Vec<u32>,
    free: Vec<u32>,
}

impl Slots {
    fn new(p: &Params, rank: usize) -> Result<Slots> {
        let number = num_slots(p, rank);
        let mut free = reserved(OP, number)?;
        free.extend((0..number as u32).rev());
        let taken = list(p.chunks * p.micro_batches)?;
        Ok(Slots { taken, free })
    }

    /// The slot of a pass: the forward one takes one, which the last backward one gives back.
    fn of(&mut self, p: &Params, pass: &Pass) -> usize {
        let at = &mut self.taken[p.index(pass.chunk, pass.micro_batch)];
        if pass.step == Step::Forward {
            // As many as are ever held at once were free at first.
            *at = self.free.pop().unwrap_or_default();
        } else if pass.step != Step::BackwardInput {
            self.free.push(*at);
        }
        *at as usize
    }
}

/// An empty list with room.
pub(super) fn reserved<T>(op: &'static str, capacity: usize) -> Result<Vec<T>> {
    let mut list = Vec::new();
    list.try_reserve_exact(capacity)
        .map_err(|_| Error::out_of_host_memory(op, capacity * size_of::<T>()))?;
    Ok(list)
}

/// A list of passes that have had no turn.
fn list(len: usize) -> Result<Vec<u32>> {
    let mut list = reserved(OP, len)?;
    list.resize(len, NOT_YET);
    Ok(list)
}
