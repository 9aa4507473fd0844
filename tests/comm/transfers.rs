//! Collectives that only move: broadcasts, rows from all to all, sends and receipts.

use unsloth::ops::{all_to_all, broadcast, send_receive};
use unsloth::{DType, InOut, Layout, Stream};

use crate::common::TestTensor;
use crate::group::{MOVED, inputs, pair, random, ranks, rows, sizes};

#[test]
fn broadcast_gives_what_the_root_has() {
    for size in sizes() {
        for dtype in MOVED {
            for shape in [&[1][..], &[0], &[3, 77], &[2, 5, 2000]] {
                for in_place in [false, true] {
                    let root = size / 2;
                    let x = inputs(dtype, &vec![shape.to_vec(); size]);
                    let outs = ranks(size, |ctx, comm| {
                        let given = x[comm.rank()].upload(ctx);
                        let mut out = match in_place && comm.rank() == root {
                            true => x[root].clone(),
                            false => TestTensor::poisoned_like(&x[root]),
                        }
                        .upload(ctx);
                        let params = broadcast::Params {
                            comm,
                            x: match in_place {
                                true => InOut::InPlace(out.view_mut()),
                                false => pair(&given, &mut out),
                            },
                            root,
                        };
                        broadcast::supported(ctx, &params).unwrap();
                        broadcast::forward(ctx, &params, Stream::DEFAULT).unwrap();
                        assert!(given.download().bits() == x[comm.rank()].bits());
                        out.download_output().bits()
                    });
                    let what = format!("{size} ranks, {dtype}, {shape:?}, {in_place}");
                    assert!(outs.iter().all(|out| *out == x[root].bits()), "{what}");
                }
            }
        }
    }
}

/// Rows that a rank sends to another.
fn sent(from: usize, to: usize) -> i64 {
    [0, 2, 1, 5, 0, 3, 1][(3 * from + to) % 7]
}

#[test]
fn all_to_all_exchanges_rows() {
    for size in sizes() {
        for dtype in MOVED {
            for even in [false, true] {
                let of = |from, to| if even { 4 } else { sent(from, to) };
                let send = |rank| (0..size).map(|to| of(rank, to)).collect::<Vec<i64>>();
                let receive = |rank| (0..size).map(|from| of(from, rank)).collect::<Vec<i64>>();
                let row = [3, 41];
                let shape = |rank| rows(send(rank).iter().sum(), &row);
                let x = inputs(dtype, &(0..size).map(shape).collect::<Vec<_>>());
                let outs = ranks(size, |ctx, comm| {
                    let rank = comm.rank();
                    let (send, receive) = (send(rank), receive(rank));
                    let given = x[rank].upload(ctx);
                    let layout = Layout::contiguous(&rows(receive.iter().sum(), &row)).unwrap();
                    let mut out = TestTensor::poisoned_at(dtype, layout, 1).upload(ctx);
                    let params = all_to_all::Params {
                        comm,
                        x: given.view(),
                        out: out.view_mut(),
                        send_counts: (!even).then_some(&send[..]),
                        receive_counts: (!even).then_some(&receive[..]),
                    };
                    all_to_all::supported(ctx, &params).unwrap();
                    all_to_all::forward(ctx, &params, Stream::DEFAULT).unwrap();
                    out.download_output().bits()
                });
                let bytes = row.iter().product::<usize>() * dtype.size();
                for (rank, out) in outs.iter().enumerate() {
                    let part = |from: usize| {
                        let before = send(from)[..rank].iter().sum::<i64>() as usize * bytes;
                        let len = of(from, rank) as usize * bytes;
                        x[from].bits()[before..before + len].to_vec()
                    };
                    let expected: Vec<u8> = (0..size).flat_map(part).collect();
                    assert!(
                        *out == expected,
                        "{size} ranks, {dtype}, {even}, rank {rank}"
                    );
                }
            }
        }
    }
}

/// Each rank sends to the next, and receives from the one before; a rank alone from itself.
#[test]
fn a_ring_moves_on() {
    for size in sizes() {
        for dtype in MOVED {
            for shape in [&[1][..], &[0], &[2, 3001]] {
                let x = inputs(dtype, &vec![shape.to_vec(); size]);
                let outs = ranks(size, |ctx, comm| {
                    let rank = comm.rank();
                    let given = x[rank].upload(ctx);
                    let mut out = TestTensor::poisoned_like(&x[rank]).upload(ctx);
                    let params = send_receive::Params {
                        comm,
                        x: Some((given.view(), (rank + 1) % size)),
                        out: Some((out.view_mut(), (rank + size - 1) % size)),
                    };
                    send_receive::supported(ctx, &params).unwrap();
                    send_receive::forward(ctx, &params, Stream::DEFAULT).unwrap();
                    out.download_output().bits()
                });
                for (rank, out) in outs.iter().enumerate() {
                    let before = (rank + size - 1) % size;
                    assert!(*out == x[before].bits(), "{size} ranks, {dtype}, {shape:?}");
                }
            }
        }
    }
}

/// A pipeline: only the two ranks of a transfer call it, while others are further on or behind.
#[test]
fn a_chain_needs_no_others() {
    let rng = &mut crate::common::rng();
    let x: Vec<_> = (0..20).map(|_| random(rng, DType::F32, &[50])).collect();
    let outs = ranks(4, |ctx, comm| {
        let rank = comm.rank();
        let mut last = Vec::new();
        for given in &x {
            let mut held = match rank {
                0 => given.clone(),
                _ => TestTensor::poisoned_like(given),
            }
            .upload(ctx);
            if rank > 0 {
                let params = send_receive::Params {
                    comm,
                    x: None,
                    out: Some((held.view_mut(), rank - 1)),
                };
                send_receive::forward(ctx, &params, Stream::DEFAULT).unwrap();
            }
            if rank < 3 {
                let params = send_receive::Params {
                    comm,
                    x: Some((held.view(), rank + 1)),
                    out: None,
                };
                send_receive::forward(ctx, &params, Stream::DEFAULT).unwrap();
            }
            last.push(held.download_output().bits());
        }
        last
    });
    let expected: Vec<_> = x.iter().map(TestTensor::bits).collect();
    assert!(outs.iter().all(|out| *out == expected));
}
