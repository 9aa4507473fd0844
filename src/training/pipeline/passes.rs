//! In which order a rank runs its forward and backward passes, and what it holds meanwhile. All kinds are
//! one rule with other numbers.

use super::{Kind, Params, Step};

/// A pass through a chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pass {
    pub step: Step,
    pub micro_batch: usize,
    pub chunk: usize,
}

/// The passes of a rank, in order: some forward ones, then each backward pass in turn behind one more
/// forward pass, as long as there are any. Gradients of weights, where they are apart, are put off.
pub(super) fn passes(params: &Params, rank: usize) -> impl Iterator<Item = Pass> + use<> {
    let p = *params;
    let total = p.micro_batches * p.chunks;
    let behind = p.stages - 1 - rank;
    let ahead = match p.kind {
        Kind::GPipe => total,
        Kind::OneFOneB | Kind::ZeroBubble => behind.min(total),
        // A rank's first micro-batch returns to its last chunk's end when all chunks have had a group.
        Kind::Interleaved => (2 * behind + (p.chunks - 1) * p.stages).min(total),
    };
    let delay = rank.min(total);
    let split = p.kind.is_split();
    let forward = move |i| of(&p, Step::Forward, i);
    let backward = move |i| match split {
        false => of(&p, Step::Backward, i),
        true => of(&p, Step::BackwardInput, i),
    };
    let weight = move |i| of(&p, Step::BackwardWeight, i);
    let turns = (0..total).flat_map(move |i| {
        [
            (i < total - ahead).then(|| forward(ahead + i)),
            Some(backward(i)),
            (split && i >= delay).then(|| weight(i - delay)),
        ]
    });
    let rest = if split { total - delay } else { total };
    (0..ahead)
        .map(forward)
        .chain(turns.flatten())
        .chain((rest..total).map(weight))
}

/// The `i`th pass of its kind: as many micro-batches as there are ranks go through one chunk, then through
/// the next. With one chunk that is all of them in order.
fn of(p: &Params, step: Step, i: usize) -> Pass {
    let (group, i) = (i / p.num_parts(), i % p.num_parts());
    let chunk = i / p.stages;
    Pass {
        step,
        micro_batch: group * p.stages + i % p.stages,
        chunk: match step {
            Step::Forward => chunk,
            _ => p.chunks - 1 - chunk,
        },
    }
}

/// How many micro-batches of single chunks a rank holds at most, from their forward passes to their last
/// backward passes.
pub(super) fn num_slots(params: &Params, rank: usize) -> usize {
    let last = match params.kind.is_split() {
        false => Step::Backward,
        true => Step::BackwardWeight,
    };
    let (mut held, mut most) = (0usize, 0);
    for pass in passes(params, rank) {
        if pass.step == Step::Forward {
            held += 1;
            most = held.max(most);
        } else if pass.step == last {
            held -= 1;
        }
    }
    most
}
