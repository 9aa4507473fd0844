//! What goes wrong between ranks: every one of them gets an error, and nothing is written.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use unsloth::comm::{Comm, Id, Kind, Params};
use unsloth::ops::all_reduce::{self, ReduceOp};
use unsloth::ops::{all_gather, all_to_all, broadcast, reduce_scatter, send_receive};
use unsloth::{Context, DType, Error, InOut, Layout, Result, Stream};

use crate::common::TestTensor;
use crate::group::{LONG, context, inputs, pair, params, ranks};

const SHORT: Duration = Duration::from_millis(50);

/// Each thread's error, or nothing where it had none.
fn messages(results: Vec<Result<Comm>>) -> Vec<String> {
    let told = |result: Result<Comm>| result.map_or_else(|e| e.to_string(), |_| String::new());
    results.into_iter().map(told).collect()
}

/// Ranks come to a meeting one after the other, so that messages are always the same.
fn meet(coming: &[(usize, usize)], timeout: Duration) -> Vec<String> {
    let id = Id::new(Kind::Local).unwrap();
    let ctx = &context(1);
    std::thread::scope(|scope| {
        let threads: Vec<_> = coming
            .iter()
            .map(|(rank, size)| {
                let thread =
                    scope.spawn(move || Comm::new(ctx, &params(id, *rank, *size, timeout)));
                std::thread::sleep(Duration::from_millis(100));
                thread
            })
            .collect();
        messages(threads.into_iter().map(|t| t.join().unwrap()).collect())
    })
}

#[test]
fn ranks_that_do_not_fit_do_not_meet() {
    let expected = [
        "comm_create: comm is broken: rank 1 came twice",
        "comm_create: rank is 1, which is taken",
        "comm_create: id has served: a group takes a new one",
    ];
    assert_eq!(meet(&[(1, 3), (1, 3), (0, 3)], LONG), expected);
    let expected = [
        "comm_create: comm is broken: rank 1 came with size 2",
        "comm_create: size is 2, another rank came with 3",
    ];
    assert_eq!(meet(&[(0, 3), (1, 2)], LONG), expected);
    let expected = [
        "comm_create: comm is broken: rank 2 waited 50ms in comm_create for rank 0",
        "comm_create: id has served: a group takes a new one",
    ];
    assert_eq!(meet(&[(2, 3), (0, 3)], SHORT), expected);
    // A group that met goes on without who comes too late.
    let expected = ["", "comm_create: id has served: a group takes a new one"];
    assert_eq!(meet(&[(0, 1), (0, 1)], LONG), expected);
}

#[test]
fn what_a_group_cannot_be_made_of_is_refused() {
    let ctx = context(1);
    let id = Id::new(Kind::Local).unwrap();
    let mut bytes = *id.as_bytes();
    bytes[30] = 1;
    let mut foreign = *id.as_bytes();
    foreign[8..16].copy_from_slice(&1u64.to_ne_bytes());
    let mut future = *id.as_bytes();
    future[16..24].copy_from_slice(&u64::MAX.to_ne_bytes());
    let own = std::process::id();
    let cases = [
        (id, 0, 0, "size is 0, allowed: 1 to 1024".to_string()),
        (id, 0, 1025, "size is 1025, allowed: 1 to 1024".to_string()),
        (id, 2, 2, "rank is 2, allowed: 0 to 1".to_string()),
        (
            Id::from_bytes(bytes),
            0,
            1,
            "id is none of a local group: unsloth_comm_id_create makes one".to_string(),
        ),
        (
            Id::from_bytes([0; 128]),
            0,
            1,
            "id is none of a local group: unsloth_comm_id_create makes one".to_string(),
        ),
        (
            Id::from_bytes(foreign),
            0,
            1,
            format!("id is of process 1, this is {own}"),
        ),
        (
            Id::from_bytes(future),
            0,
            1,
            format!("id is of process {own}, this is {own}"),
        ),
    ];
    for (id, rank, size, problem) in cases {
        let error = Comm::new(&ctx, &Params::local(id, rank, size)).unwrap_err();
        assert_eq!(error.to_string(), format!("comm_create: {problem}"));
        assert!(matches!(error, Error::InvalidArgument { .. }));
    }
    // None of these used the id up.
    let comm = Comm::new(&ctx, &Params::local(id, 0, 1)).unwrap();
    assert_eq!(comm.health(), Ok(()));
}

/// Runs `call` with tensors of these shapes, and sees that it wrote to none.
fn run(
    ctx: &Context,
    (dtype, x, out): (DType, &[usize], &[usize]),
    call: impl FnOnce(InOut<'_>) -> Result<()>,
) -> Result<()> {
    let x = inputs(dtype, &[x.to_vec()]).remove(0);
    let out = TestTensor::poisoned(dtype, Layout::contiguous(out).unwrap());
    let (given, mut taken) = (x.upload(ctx), out.upload(ctx));
    let result = call(pair(&given, &mut taken));
    assert!(given.download().bits() == x.bits());
    assert!(
        taken.download().bits() == out.bits(),
        "a refused call wrote"
    );
    result
}

fn reduce(ctx: &Context, comm: &Comm, dtype: DType, n: usize, op: ReduceOp) -> Result<()> {
    run(ctx, (dtype, &[n], &[n]), |x| {
        all_reduce::forward(ctx, &all_reduce::Params { comm, x, op }, Stream::DEFAULT)
    })
}

fn gather(ctx: &Context, comm: &Comm, rows: usize, counts: Option<&[i64]>) -> Result<()> {
    let all = counts.map_or(rows * comm.size(), |counts| {
        counts.iter().sum::<i64>() as usize
    });
    run(ctx, (DType::F32, &[rows, 2], &[all, 2]), |x| {
        let params = all_gather::Params { comm, x, counts };
        all_gather::forward(ctx, &params, Stream::DEFAULT)
    })
}

fn cast(ctx: &Context, comm: &Comm, dtype: DType, n: usize, root: usize) -> Result<()> {
    run(ctx, (dtype, &[n], &[n]), |x| {
        broadcast::forward(ctx, &broadcast::Params { comm, x, root }, Stream::DEFAULT)
    })
}

fn scatter(ctx: &Context, comm: &Comm, op: ReduceOp, counts: [i64; 3]) -> Result<()> {
    let own = counts[comm.rank()] as usize;
    run(ctx, (DType::F32, &[6], &[own]), |x| {
        let counts = Some(&counts[..]);
        let params = reduce_scatter::Params {
            comm,
            x,
            op,
            counts,
        };
        reduce_scatter::forward(ctx, &params, Stream::DEFAULT)
    })
}

fn exchange(ctx: &Context, comm: &Comm, receive: [i64; 3]) -> Result<()> {
    let all = receive.iter().sum::<i64>() as usize;
    run(ctx, (DType::F32, &[6], &[all]), |x| {
        let InOut::Apart { input, output } = x else {
            unreachable!()
        };
        let params = all_to_all::Params {
            comm,
            x: input,
            out: output,
            send_counts: None,
            receive_counts: Some(&receive),
        };
        all_to_all::forward(ctx, &params, Stream::DEFAULT)
    })
}

/// What three ranks call that does not fit together, and what each is told. The group works on.
#[test]
fn calls_that_do_not_fit_are_refused_on_every_rank() {
    use ReduceOp::{Max, Sum};
    type Case = (fn(&Context, &Comm) -> Result<()>, &'static str);
    let cases: &[Case] = &[
        (
            |ctx, comm| match comm.rank() {
                2 => reduce(ctx, comm, DType::F16, 5, Sum),
                _ => reduce(ctx, comm, DType::F32, 5, Sum),
            },
            "x has dtype f32 on rank 0, f16 on rank 2",
        ),
        (
            |ctx, comm| reduce(ctx, comm, DType::F32, 5 + comm.rank() / 2, Sum),
            "x has 5 elements on rank 0, 6 on rank 2",
        ),
        (
            |ctx, comm| match comm.rank() {
                1 => reduce(ctx, comm, DType::F32, 5, Max),
                _ => reduce(ctx, comm, DType::F32, 5, Sum),
            },
            "op is sum on rank 0, max on rank 1",
        ),
        (
            |ctx, comm| match comm.rank() {
                1 => cast(ctx, comm, DType::F32, 5, 0),
                _ => reduce(ctx, comm, DType::F32, 5, Sum),
            },
            "comm has rank 0 in all_reduce, rank 1 in broadcast",
        ),
        (
            |ctx, comm| cast(ctx, comm, DType::F32, 5, comm.rank()),
            "root is 0 on rank 0, 1 on rank 1",
        ),
        (
            |ctx, comm| match comm.rank() {
                0 => cast(ctx, comm, DType::I8, 5, 1),
                _ => cast(ctx, comm, DType::Bool, 5, 1),
            },
            "out has dtype i8 on rank 0, bool on rank 1",
        ),
        (
            |ctx, comm| gather(ctx, comm, 4 - comm.rank() / 2, None),
            "x has 8 elements in part 0 on rank 0, 6 on rank 2",
        ),
        (
            |ctx, comm| match comm.rank() {
                0 => gather(ctx, comm, 1, Some(&[1, 2, 3])),
                1 => gather(ctx, comm, 2, Some(&[1, 2, 3])),
                _ => gather(ctx, comm, 2, Some(&[1, 3, 2])),
            },
            "x has 4 elements in part 1 on rank 0, 6 on rank 2",
        ),
        (
            |ctx, comm| match comm.rank() {
                2 => scatter(ctx, comm, Sum, [2, 2, 2]),
                _ => scatter(ctx, comm, Sum, [2, 1, 3]),
            },
            "x has 1 elements in part 1 on rank 0, 2 on rank 2",
        ),
        (
            |ctx, comm| match comm.rank() {
                1 => exchange(ctx, comm, [2, 2, 1]),
                _ => exchange(ctx, comm, [2, 2, 2]),
            },
            "x has 2 elements for rank 1 on rank 2, out of rank 1 takes 1",
        ),
        (
            |ctx, comm| match comm.rank() {
                1 => comm.warm_up(Stream::DEFAULT),
                _ => reduce(ctx, comm, DType::F32, 5, Sum),
            },
            "comm has rank 0 in all_reduce, rank 1 in a barrier",
        ),
        (
            |ctx, comm| match comm.rank() {
                2 => reduce(ctx, comm, DType::F32, 5, Sum),
                _ => comm.warm_up(Stream::DEFAULT),
            },
            "comm has rank 0 in a barrier, rank 2 in all_reduce",
        ),
    ];
    ranks(3, |ctx, comm| {
        for (call, problem) in cases {
            let error = call(ctx, comm).unwrap_err().to_string();
            let told = error.split_once(": ").unwrap().1;
            assert_eq!(told, *problem, "rank {}", comm.rank());
            assert_eq!(comm.health(), Ok(()));
            comm.warm_up(Stream::DEFAULT).unwrap();
        }
    });
}

fn transfer(
    ctx: &Context,
    comm: &Comm,
    (dtype, n): (DType, usize),
    to: Option<usize>,
    from: Option<usize>,
) -> Result<()> {
    run(ctx, (dtype, &[n], &[n]), |x| {
        let InOut::Apart { input, output } = x else {
            unreachable!()
        };
        let params = send_receive::Params {
            comm,
            x: to.map(|to| (input, to)),
            out: from.map(|from| (output, from)),
        };
        send_receive::forward(ctx, &params, Stream::DEFAULT)
    })
}

#[test]
fn transfers_that_do_not_fit_are_refused_on_both_ranks() {
    let told = ranks(2, |ctx, comm| {
        let of = |given: (DType, usize), taken: (DType, usize)| {
            let result = match comm.rank() {
                0 => transfer(ctx, comm, given, Some(1), None),
                _ => transfer(ctx, comm, taken, None, Some(0)),
            };
            result.unwrap_err().to_string()
        };
        [
            of((DType::F32, 3), (DType::I32, 3)),
            of((DType::F32, 3), (DType::F32, 4)),
        ]
    });
    let expected = [
        "send_receive: x has dtype f32 on rank 0, out of rank 1 i32",
        "send_receive: x has 3 elements on rank 0, out of rank 1 4",
    ];
    assert_eq!(told, [expected, expected]);
}

/// The first rank of three waits in vain.
#[test]
fn who_does_not_come_is_waited_for_in_vain() {
    type Call = fn(&Context, &Comm) -> Result<()>;
    let cases: [(Call, &str); 5] = [
        (
            |ctx, comm| reduce(ctx, comm, DType::F32, 5, ReduceOp::Sum),
            "all_reduce",
        ),
        (|ctx, comm| gather(ctx, comm, 2, None), "all_gather"),
        (|_, comm| comm.warm_up(Stream::DEFAULT), "comm_warm_up"),
        (
            |ctx, comm| transfer(ctx, comm, (DType::F32, 5), None, Some(1 - comm.rank())),
            "send_receive",
        ),
        (
            |ctx, comm| transfer(ctx, comm, (DType::F32, 5), Some(1 - comm.rank()), None),
            "send_receive",
        ),
    ];
    for (call, name) in cases {
        let id = Id::new(Kind::Local).unwrap();
        let (waited, late) = (Barrier::new(2), Barrier::new(2));
        std::thread::scope(|scope| {
            let absent = scope.spawn(|| {
                let ctx = context(1);
                let comm = Comm::new(&ctx, &params(id, 1, 2, LONG)).unwrap();
                waited.wait();
                let told = call(&ctx, &comm).unwrap_err().to_string();
                late.wait();
                (told, comm.health().unwrap_err().to_string())
            });
            let ctx = context(1);
            let comm = Comm::new(&ctx, &params(id, 0, 2, SHORT)).unwrap();
            let start = Instant::now();
            let error = call(&ctx, &comm).unwrap_err();
            assert!(start.elapsed() >= SHORT && matches!(error, Error::Comm { .. }));
            waited.wait();
            late.wait();
            let (told, health) = absent.join().unwrap();
            let problem = format!("comm is broken: rank 0 waited 50ms in {name} for rank 1");
            assert_eq!(error.to_string(), format!("{name}: {problem}"));
            assert_eq!(told, error.to_string());
            assert_eq!(health, format!("comm_error_get: {problem}"));
            // And so it stays.
            let again = call(&ctx, &comm).unwrap_err();
            assert_eq!(again.to_string(), error.to_string());
        });
    }
}

/// Ranks that wait come back when another aborts or goes, long before they would give up.
#[test]
fn who_waits_is_told_that_it_is_in_vain() {
    for (aborts, problem) in [
        (true, "is broken: rank 3 aborted it"),
        (false, "is incomplete: rank 3 has ended"),
    ] {
        let start = Instant::now();
        let id = Id::new(Kind::Local).unwrap();
        std::thread::scope(|scope| {
            let wait = |rank: usize| {
                let ctx = context(1);
                let comm = Comm::new(&ctx, &params(id, rank, 4, LONG)).unwrap();
                let told = match rank {
                    0 => reduce(&ctx, &comm, DType::F32, 5, ReduceOp::Sum),
                    1 => transfer(&ctx, &comm, (DType::F32, 5), None, Some(3)),
                    _ => transfer(&ctx, &comm, (DType::F32, 5), Some(3), None),
                };
                let health = comm.health().unwrap_err().to_string();
                let later = comm.warm_up(Stream::DEFAULT).unwrap_err().to_string();
                [told.unwrap_err().to_string(), health, later]
            };
            let waiting: Vec<_> = (0..3).map(|rank| scope.spawn(move || wait(rank))).collect();
            let ctx = context(1);
            let comm = Comm::new(&ctx, &params(id, 3, 4, LONG)).unwrap();
            std::thread::sleep(SHORT);
            if aborts {
                // From another thread than the rank's.
                let aborted = &comm;
                std::thread::scope(|scope| scope.spawn(move || aborted.abort().unwrap()).join())
                    .unwrap();
                let told = reduce(&ctx, &comm, DType::F32, 5, ReduceOp::Sum).unwrap_err();
                let expected = "all_reduce: comm is broken: rank 3 aborted it";
                assert_eq!(told.to_string(), expected);
            }
            drop(comm);
            for (thread, name) in
                waiting
                    .into_iter()
                    .zip(["all_reduce", "send_receive", "send_receive"])
            {
                let problem = format!("comm {problem}");
                let expected = [name, "comm_error_get", "comm_warm_up"]
                    .map(|name| format!("{name}: {problem}"));
                assert_eq!(thread.join().unwrap(), expected);
            }
        });
        assert!(start.elapsed() < LONG / 2);
    }
}

/// A rank may end and leave its context, which the others have the same of, before or after.
#[test]
fn a_group_keeps_its_context() {
    let id = Id::new(Kind::Local).unwrap();
    let ctx = context(1);
    let comm = Comm::new(&ctx, &Params::local(id, 0, 1)).unwrap();
    drop(ctx);
    comm.warm_up(Stream::DEFAULT).unwrap();
    assert_eq!(comm.health(), Ok(()));
    let other = context(1);
    let error = reduce(&other, &comm, DType::F32, 5, ReduceOp::Sum).unwrap_err();
    let expected = "all_reduce: comm belongs to another context";
    assert_eq!(error.to_string(), expected);
    let ctx = comm.context().clone();
    drop(comm);
    ctx.synchronize_device().unwrap();
}
