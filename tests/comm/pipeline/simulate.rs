//! How long pipelines take and what they hold, against the formulas of the papers.

use unsloth::training::pipeline::{Costs, Kind, Params, Schedule, Simulation};

use super::params;

/// Times of a micro-batch on a rank: forward, and back to its input and its weights.
const TIMES: [[f64; 3]; 5] = [
    [1.0, 1.0, 1.0],
    [2.0, 3.0, 1.0],
    [1.0, 1.0, 0.5],
    [5.0, 1.0, 1.0],
    [1.0, 5.0, 1.0],
];

fn costs([forward, backward_input, backward_weight]: [f64; 3], overlap: bool) -> Costs {
    Costs {
        forward,
        backward_input,
        backward_weight,
        overlap,
        ..Costs::default()
    }
}

fn simulate(p: &Params, costs: &Costs) -> Simulation {
    Schedule::new(p).unwrap().simulate(costs).unwrap()
}

#[track_caller]
fn assert_near(p: &Params, found: f64, expected: f64) {
    let most = 1e-9 * expected.max(1.0);
    assert!(
        (found - expected).abs() <= most,
        "{p:?}: {found}, expected {expected}"
    );
}

/// The time that ranks are idle in, of a step's passes and of its schedule.
#[test]
fn bubbles_are_those_of_the_papers() {
    for times in TIMES {
        let [f, b, w] = times;
        for overlap in [false, true] {
            for (stages, micro_batches) in [(1, 3), (2, 2), (2, 7), (3, 5), (4, 4), (4, 8), (8, 12)]
            {
                for kind in [Kind::OneFOneB, Kind::GPipe, Kind::ZeroBubble] {
                    let p = params(kind, stages, micro_batches, 1);
                    let found = simulate(&p, &costs(times, overlap));
                    let (p_1, m) = (stages as f64 - 1.0, micro_batches as f64);
                    let bubble = match kind {
                        Kind::ZeroBubble => p_1 * (f + b - w),
                        _ => p_1 * (f + b + w),
                    };
                    let work = m * (f + b + w);
                    assert_near(&p, found.time, work + bubble);
                    assert_near(&p, found.idle, bubble / (work + bubble));
                    if kind != Kind::ZeroBubble {
                        assert_near(&p, found.idle, p_1 / (m + p_1));
                    }
                    assert!(
                        found
                            .ranks
                            .iter()
                            .all(|rank| (rank.busy - work).abs() < 1e-9)
                    );
                }
            }
        }
    }
}

/// Chunks divide the idle time, where transfers are beside the passes. With many ranks one rank's first
/// transfers wait for others, which costs no more than two passes.
#[test]
fn chunks_divide_the_bubble() {
    for times in TIMES {
        let all: f64 = times.iter().sum();
        for (stages, groups, chunks) in [
            (1, 2, 2),
            (2, 1, 2),
            (2, 4, 2),
            (3, 3, 3),
            (4, 2, 4),
            (8, 4, 3),
            (8, 16, 2),
        ] {
            let p = params(Kind::Interleaved, stages, groups, chunks);
            let found = simulate(&p, &costs(times, true));
            let (p_1, m, v) = (stages as f64 - 1.0, p.micro_batches as f64, chunks as f64);
            let expected = all * (m + p_1 / v);
            if stages <= 4 {
                assert_near(&p, found.time, expected);
                assert_near(&p, found.idle, p_1 / (v * m + p_1));
            } else {
                let late = found.time - expected;
                assert!(
                    (-1e-9..=2.0 * all / v).contains(&late),
                    "{p:?}: {late} late"
                );
            }
        }
    }
}

/// Micro-batches that a rank holds: all, those that are under way behind it, those of all chunks, and as many
/// on each rank as on the first.
#[test]
fn memory_is_that_of_the_papers() {
    for stages in 1..=8 {
        for micro_batches in 1..=10 {
            for kind in Kind::ALL {
                let p = params(kind, stages, micro_batches, 3);
                let schedule = Schedule::new(&p).unwrap();
                let costs = Costs {
                    activation_bytes: 300,
                    split_bytes: 30,
                    ..costs(TIMES[0], false)
                };
                let found = simulate(&p, &costs);
                for (rank, of) in found.ranks.iter().enumerate() {
                    let behind = stages - 1 - rank;
                    let expected = match kind {
                        Kind::GPipe => micro_batches,
                        Kind::OneFOneB => micro_batches.min(stages - rank),
                        Kind::Interleaved => (2 * behind + 2 * stages + 1).min(3 * p.micro_batches),
                        _ => micro_batches.min(stages),
                    };
                    assert_eq!(of.peak_live, expected, "{p:?}, rank {rank}");
                    assert_eq!(schedule.num_slots(rank).unwrap(), expected);
                    let bytes = match kind {
                        Kind::Interleaved => 100 * expected,
                        // As under 1F1B whole, the others between the halves of their way back.
                        Kind::ZeroBubble => {
                            let whole = micro_batches.min(stages - rank);
                            300 * whole + 30 * (expected - whole)
                        }
                        _ => 300 * expected,
                    };
                    assert_eq!(of.peak_bytes, bytes as u64, "{p:?}, rank {rank}");
                }
            }
        }
    }
}

/// Of a chain without a bubble to fill it is known what transfers take.
#[test]
fn transfers_take_their_time() {
    for overlap in [false, true] {
        let p = params(Kind::GPipe, 4, 1, 1);
        let costs = Costs {
            transfer: 0.5,
            ..costs([1.0, 2.0, 1.0], overlap)
        };
        assert_eq!(simulate(&p, &costs).time, 4.0 * 4.0 + 6.0 * 0.5);
        // A rank receives and sends at once; each of 8 micro-batches takes a pass and a transfer.
        let p = params(Kind::GPipe, 2, 8, 1);
        let one = simulate(&p, &costs).time;
        let expected = match overlap {
            true => 9.0 * 4.0 + 2.0 * 0.5,
            false => 9.0 * 4.0 + 16.0 * 0.5,
        };
        assert_eq!(one, expected);
    }
}

/// The figures of the guide to collectives: 8 ranks, 32 micro-batches.
#[test]
fn the_guide_has_these_figures() {
    for (kind, time, held) in [
        (Kind::GPipe, 117.0, 32),
        (Kind::OneFOneB, 117.0, 8),
        (Kind::Interleaved, 107.0, 23),
        (Kind::ZeroBubble, 103.0, 8),
    ] {
        let groups = if kind == Kind::Interleaved { 4 } else { 32 };
        let p = params(kind, 8, groups, 2);
        let found = simulate(&p, &costs(TIMES[0], kind == Kind::Interleaved));
        assert_near(&p, found.time, time);
        assert_near(&p, found.idle, (time - 96.0) / time);
        assert_eq!(found.ranks[0].peak_live, held);
    }
}
