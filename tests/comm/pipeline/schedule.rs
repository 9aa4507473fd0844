//! What the ranks of a pipeline do fits together, for every kind and many sizes.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use unsloth::training::pipeline::{Action, Kind, Params, Schedule, Step};

use super::{actions, params};

/// What is known of each part of the model and each micro-batch.
type Set = BTreeSet<(usize, usize)>;

/// Follows all ranks, whose transfers are calls that wait for their other side; `joined` says whether two of
/// a rank may be one call. No rank may be left waiting, and every pass has to find what it needs.
fn follow(p: &Params, ranks: &[Vec<Action>], joined: bool) {
    let last = p.stages * p.chunks - 1;
    let part = |rank: usize, chunk: usize| chunk * p.stages + rank;
    let [mut forward, mut backward, mut weight] = [Set::new(), Set::new(), Set::new()];
    let [mut activation, mut gradient] = [Set::new(), Set::new()];
    let mut at = vec![0; p.stages];
    let mut over = vec![BTreeSet::new(); p.stages];
    let mut moved = true;
    while moved {
        moved = false;
        for rank in 0..p.stages {
            let calls = |rank: usize, at: &[usize]| {
                let rest = &ranks[rank][at[rank]..];
                let both = joined && rest.first().is_some_and(|a| a.joined);
                rest.len().min(1 + usize::from(both))
            };
            let number = calls(rank, &at);
            let Some(action) = ranks[rank].get(at[rank]).copied() else {
                continue;
            };
            let key = (part(rank, action.chunk), action.micro_batch);
            let (own, mb) = key;
            let remote = p.stages > 1;
            match action.step {
                Step::Forward => {
                    let from = if remote { &activation } else { &forward };
                    let before = if remote { own } else { own.wrapping_sub(1) };
                    assert!(own == 0 || from.contains(&(before, mb)), "{action:?}");
                    assert!(forward.insert(key), "{action:?} again");
                }
                Step::Backward | Step::BackwardInput => {
                    let from = if remote { &gradient } else { &backward };
                    let after = if remote { own } else { own + 1 };
                    assert!(own == last || from.contains(&(after, mb)), "{action:?}");
                    assert!(forward.contains(&key) && backward.insert(key), "{action:?}");
                    if action.step == Step::Backward {
                        assert!(weight.insert(key));
                    }
                }
                Step::BackwardWeight => assert!(backward.contains(&key) && weight.insert(key)),
                _ => {
                    for i in 0..number {
                        let index = at[rank] + i;
                        let own = ranks[rank][index];
                        let peer = own.peer.unwrap();
                        let others = at[peer]..at[peer] + calls(peer, &at);
                        let other = others.into_iter().find(|j| {
                            let a = &ranks[peer][*j];
                            a.peer == Some(rank)
                                && a.step.is_send() != own.step.is_send()
                                && !over[peer].contains(j)
                        });
                        let (Some(j), false) = (other, over[rank].contains(&index)) else {
                            continue;
                        };
                        let met = ranks[peer][j];
                        let (sent, sender, received, receiver) = match own.step.is_send() {
                            true => (own, rank, met, peer),
                            false => (met, peer, own, rank),
                        };
                        let to = part(receiver, received.chunk);
                        assert_eq!(sent.micro_batch, received.micro_batch);
                        if sent.step == Step::SendActivation {
                            assert_eq!(received.step, Step::ReceiveActivation);
                            assert_eq!(part(sender, sent.chunk) + 1, to);
                            assert!(forward.contains(&(to - 1, sent.micro_batch)));
                            assert!(activation.insert((to, sent.micro_batch)));
                        } else {
                            assert_eq!(received.step, Step::ReceiveGradient);
                            assert_eq!(part(sender, sent.chunk), to + 1);
                            assert!(backward.contains(&(to + 1, sent.micro_batch)));
                            assert!(gradient.insert((to, sent.micro_batch)));
                        }
                        over[rank].insert(index);
                        over[peer].insert(j);
                        moved = true;
                    }
                    if !(0..number).all(|i| over[rank].contains(&(at[rank] + i))) {
                        continue;
                    }
                }
            }
            at[rank] += if action.peer.is_some() { number } else { 1 };
            moved = true;
        }
    }
    let ends: Vec<_> = ranks.iter().map(Vec::len).collect();
    assert_eq!(at, ends, "ranks wait for each other");
    let all = p.stages * p.chunks * p.micro_batches;
    assert!([forward, backward, weight].iter().all(|of| of.len() == all));
}

/// Slots have one micro-batch at a time, and its gradient is gone before another one comes.
fn check_slots(schedule: &Schedule, rank: usize, actions: &[Action]) {
    let number = schedule.num_slots(rank).unwrap();
    let mut slots = vec![None; number];
    let mut gradients = vec![None; number];
    let mut slot_of = BTreeMap::new();
    for (i, action) in actions.iter().enumerate() {
        let key = (action.chunk, action.micro_batch);
        if action.step == Step::SendGradient {
            assert_eq!(action.slot, None);
            assert_eq!(gradients[slot_of[&key]], Some(key), "{action:?} is lost");
            gradients[slot_of[&key]] = None;
            continue;
        }
        let slot = action.slot.unwrap();
        match action.step {
            Step::ReceiveActivation => assert_eq!(slots[slot], None),
            Step::Forward => {
                assert_eq!(slots[slot].replace(key), None);
                slot_of.insert(key, slot);
            }
            _ => assert_eq!(slots[slot], Some(key), "{action:?}"),
        }
        match action.step {
            Step::ReceiveGradient => assert_eq!(gradients[slot], None, "{i} {action:?}"),
            Step::Backward | Step::BackwardInput => {
                // The gradient goes on, if there is a rank for it.
                let sent = |a: &Action| a.step == Step::SendGradient;
                let sent = |a: &Action| sent(a) && (a.chunk, a.micro_batch) == key;
                gradients[slot] = actions[i..].iter().any(sent).then_some(key);
            }
            _ => {}
        }
        if matches!(action.step, Step::Backward | Step::BackwardWeight) {
            slots[slot] = None;
        }
    }
    assert!(slots.iter().all(Option::is_none));
}

/// Transfers that are joined are two of one call; what is received is taken by the next pass.
fn check_neighbours(actions: &[Action]) {
    for (i, action) in actions.iter().enumerate() {
        if action.joined {
            let next = actions[i + 1];
            assert!(action.step.is_transfer() && next.step.is_transfer() && !next.joined);
            assert_ne!(action.step.is_send(), next.step.is_send());
        }
        if action.step.is_receive() {
            let pass = actions[i..].iter().find(|a| !a.step.is_transfer()).unwrap();
            assert_eq!(
                (pass.chunk, pass.micro_batch, pass.slot),
                (action.chunk, action.micro_batch, action.slot)
            );
            let forward = action.step == Step::ReceiveActivation;
            assert_eq!(pass.step == Step::Forward, forward);
        }
        assert_eq!(action.peer.is_some(), action.step.is_transfer());
    }
}

fn check(p: &Params) {
    let schedule = Schedule::new(p).unwrap();
    let ranks = actions(p);
    for (rank, actions) in ranks.iter().enumerate() {
        assert_eq!(schedule.num_actions(rank).unwrap(), actions.len());
        check_slots(&schedule, rank, actions);
        check_neighbours(actions);
    }
    follow(schedule.params(), &ranks, true);
    follow(schedule.params(), &ranks, false);
}

#[test]
fn small_pipelines_fit_together() {
    for kind in Kind::ALL {
        for stages in 1..=6 {
            for micro_batches in 1..=9 {
                for chunks in 2..=3 {
                    check(&params(kind, stages, micro_batches, chunks));
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Larger ones, with ranks that wait for transfers and without.
    #[test]
    fn pipelines_fit_together(
        kind in prop::sample::select(Kind::ALL.to_vec()),
        stages in 1usize..14,
        micro_batches in 1usize..24,
        chunks in 2usize..6,
    ) {
        let few = if kind == Kind::Interleaved { micro_batches % 5 + 1 } else { micro_batches };
        check(&params(kind, stages, few, chunks));
    }
}

/// Passes of a rank, as letters with micro-batches: forward, backward, of the input and of weights.
fn passes(p: &Params, rank: usize) -> String {
    let ranks = actions(p);
    let passes = ranks[rank].iter().filter_map(|a| {
        let letter = match a.step {
            Step::Forward => 'F',
            Step::Backward | Step::BackwardInput => 'B',
            Step::BackwardWeight => 'W',
            _ => return None,
        };
        let chunk = ["", "'", "''"][a.chunk];
        Some(format!("{letter}{}{chunk}", a.micro_batch))
    });
    passes.collect::<Vec<_>>().join(" ")
}

/// The orders of the papers' figures.
#[test]
fn orders_are_those_of_the_papers() {
    let of = |kind, stages, micro_batches, rank| {
        let chunks = if kind == Kind::Interleaved { 2 } else { 1 };
        let p = Params {
            kind,
            stages,
            micro_batches,
            chunks,
        };
        passes(&p, rank)
    };
    assert_eq!(of(Kind::GPipe, 2, 3, 1), "F0 F1 F2 B0 B1 B2");
    let first = "F0 F1 F2 B0 F3 B1 B2 B3";
    assert_eq!(of(Kind::OneFOneB, 3, 4, 0), first);
    assert_eq!(of(Kind::OneFOneB, 3, 4, 2), "F0 B0 F1 B1 F2 B2 F3 B3");
    assert_eq!(
        of(Kind::Interleaved, 2, 4, 0),
        "F0 F1 F0' F1' F2 B0' F3 B1' F2' B0 F3' B1 B2' B3' B2 B3"
    );
    assert_eq!(
        of(Kind::Interleaved, 2, 4, 1),
        "F0 F1 F0' B0' F1' B1' F2 B0 F3 B1 F2' B2' F3' B3' B2 B3"
    );
    assert_eq!(
        of(Kind::ZeroBubble, 3, 4, 0),
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3"
    );
    assert_eq!(
        of(Kind::ZeroBubble, 3, 4, 2),
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"
    );
}
