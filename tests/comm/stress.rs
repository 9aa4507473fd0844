//! Groups under load: ranks that are late at random, groups side by side, handles that end while others
//! use them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use unsloth::comm::{Comm, Id, Kind};
use unsloth::ops::all_reduce::{self, ReduceOp};
use unsloth::ops::{all_gather, all_to_all, send_receive};
use unsloth::{Context, InOut, Stream, TensorMut, TensorRef};

use crate::group::{LONG, context, params, ranks};

/// Sums what each rank has, and what it has to be.
fn sum(ctx: &Context, comm: &Comm, round: usize) {
    let len = 1 + 97 * (round % 40);
    let mut x = vec![(comm.rank() + round) as f32; len];
    let params = all_reduce::Params {
        comm,
        x: InOut::InPlace(TensorMut::from_slice(&mut x, &[len]).unwrap()),
        op: ReduceOp::Sum,
    };
    all_reduce::forward(ctx, &params, Stream::DEFAULT).unwrap();
    let size = comm.size();
    let expected = (size * (size - 1) / 2 + size * round) as f32;
    assert!(x.iter().all(|x| *x == expected));
}

fn gather(ctx: &Context, comm: &Comm, round: usize) {
    let (size, len) = (comm.size(), 1 + round % 7);
    let x = vec![(10 * comm.rank() + round) as i32; len];
    let mut out = vec![-1; size * len];
    let params = all_gather::Params {
        comm,
        x: InOut::Apart {
            input: TensorRef::from_slice(&x, &[len]).unwrap(),
            output: TensorMut::from_slice(&mut out, &[size * len]).unwrap(),
        },
        counts: None,
    };
    all_gather::forward(ctx, &params, Stream::DEFAULT).unwrap();
    let expected = |i: usize| (10 * (i / len) + round) as i32;
    assert!(out.iter().enumerate().all(|(i, x)| *x == expected(i)));
}

fn exchange(ctx: &Context, comm: &Comm, round: usize) {
    let (rank, size) = (comm.rank(), comm.size());
    let x: Vec<i64> = (0..size)
        .map(|to| (100 * rank + to + round) as i64)
        .collect();
    let mut out = vec![-1i64; size];
    let params = all_to_all::Params {
        comm,
        x: TensorRef::from_slice(&x, &[size]).unwrap(),
        out: TensorMut::from_slice(&mut out, &[size]).unwrap(),
        send_counts: None,
        receive_counts: None,
    };
    all_to_all::forward(ctx, &params, Stream::DEFAULT).unwrap();
    let expected = |from: usize| (100 * from + rank + round) as i64;
    assert!(out.iter().enumerate().all(|(from, x)| *x == expected(from)));
}

fn ring(ctx: &Context, comm: &Comm, round: usize) {
    let (rank, size) = (comm.rank(), comm.size());
    let x = [(rank + round) as f32];
    let mut out = [f32::NAN];
    let params = send_receive::Params {
        comm,
        x: Some((TensorRef::from_slice(&x, &[1]).unwrap(), (rank + 1) % size)),
        out: Some((
            TensorMut::from_slice(&mut out, &[1]).unwrap(),
            (rank + size - 1) % size,
        )),
    };
    send_receive::forward(ctx, &params, Stream::DEFAULT).unwrap();
    assert_eq!(out, [((rank + size - 1) % size + round) as f32]);
}

#[test]
fn ranks_that_come_late_are_waited_for() {
    for size in [2, 3, 8] {
        ranks(size, |ctx, comm| {
            let rng = &mut StdRng::seed_from_u64(comm.rank() as u64);
            for round in 0..100 {
                for call in [sum, gather, exchange, ring] {
                    match rng.random_range(0..8) {
                        0 => std::thread::sleep(Duration::from_micros(rng.random_range(0..300))),
                        1 => std::thread::yield_now(),
                        _ => {}
                    }
                    call(ctx, comm, round);
                }
            }
        });
    }
}

/// Every thread is a rank of two groups, in another order in each.
#[test]
fn groups_do_not_disturb_each_other() {
    let id = Id::new(Kind::Local).unwrap();
    ranks(4, |ctx, comm| {
        let rank = 3 - comm.rank();
        let other = Comm::new(ctx, &params(id, rank, 4, LONG)).unwrap();
        for round in 0..100 {
            sum(ctx, comm, round);
            exchange(ctx, &other, round);
            ring(ctx, comm, round + 1);
            gather(ctx, &other, round);
        }
    });
}

/// Ranks of one context share its threads.
#[test]
fn ranks_may_share_a_context() {
    let ctx = &context(3);
    let id = Id::new(Kind::Local).unwrap();
    std::thread::scope(|scope| {
        for rank in 0..4 {
            scope.spawn(move || {
                let comm = Comm::new(ctx, &params(id, rank, 4, LONG)).unwrap();
                for round in 0..100 {
                    sum(ctx, &comm, 39 + 40 * round);
                }
            });
        }
    });
}

/// Eight threads use a group for sums, while others are made and end.
#[test]
fn groups_come_and_go() {
    let rounds = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            ranks(8, |ctx, comm| {
                for round in 0..100 {
                    sum(ctx, comm, round);
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
            })
        });
        scope.spawn(|| {
            for round in 0..20 {
                ranks(3, |ctx, comm| {
                    sum(ctx, comm, round);
                    // Some go while others are still in their call.
                    if comm.rank() == round % 3 {
                        comm.abort().unwrap();
                    }
                });
            }
        });
    });
    assert_eq!(rounds.into_inner(), 800);
}

/// Threads that share a rank take turns.
#[test]
fn threads_of_a_rank_take_turns() {
    ranks(2, |ctx, comm| {
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| (0..50).for_each(|_| sum(ctx, comm, 11)));
            }
        });
    });
}
