//! A group of ranks, each a thread with a context of its own.

use std::time::Duration;

use unsloth::comm::{Comm, Id, Kind, Params};
use unsloth::{Backend, Context, ContextOptions};

use crate::common::tensor::DeviceTensor;
use crate::common::{TestTensor, rng};
use rand::Rng;
use unsloth::{DType, InOut, Layout};

/// What groups have in tables.
pub const SIZES: [usize; 5] = [1, 2, 3, 4, 8];

/// What is moved.
pub const MOVED: [DType; 7] = [
    DType::F32,
    DType::F16,
    DType::Bf16,
    DType::I32,
    DType::I64,
    DType::I8,
    DType::Bool,
];

/// Longer than any test waits that is right.
pub const LONG: Duration = Duration::from_secs(60);

/// Whether groups are of NCCL's, as an emulated GPU has one of many ranks: where `UNSLOTH_TEST_BACKEND`
/// is cuda.
pub fn is_cuda() -> bool {
    std::env::var("UNSLOTH_TEST_BACKEND").is_ok_and(|backend| backend == "cuda")
}

/// A context of few threads: groups have one for each rank.
pub fn context(num_threads: usize) -> Context {
    Context::new(&ContextOptions {
        backend: match is_cuda() {
            true => Backend::Cuda,
            false => Backend::Cpu,
        },
        num_threads,
        ..ContextOptions::default()
    })
    .unwrap()
}

pub fn params(id: Id, rank: usize, size: usize, timeout: Duration) -> Params<'static> {
    let params = match is_cuda() {
        true => Params::nccl(id, rank, size),
        false => Params::local(id, rank, size),
    };
    Params {
        timeout: Some(timeout),
        ..params
    }
}

/// An id of a new group.
pub fn new_id() -> Id {
    Id::new(match is_cuda() {
        true => Kind::Nccl,
        false => Kind::Local,
    })
    .unwrap()
}

/// Runs every rank of a new group, and gives what they give in their order.
pub fn ranks<R: Send>(size: usize, run: impl Fn(&Context, &Comm) -> R + Sync) -> Vec<R> {
    let id = new_id();
    std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = (0..size)
            .map(|rank| {
                scope.spawn(move || {
                    // One thread or two: the bits do not depend on it.
                    let ctx = context(1 + rank % 2);
                    let comm = Comm::new(&ctx, &params(id, rank, size, LONG)).unwrap();
                    assert_eq!((comm.rank(), comm.size()), (rank, size));
                    run(&ctx, &comm)
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// What each rank gives: its tensor of that shape.
pub fn inputs(dtype: DType, shapes: &[Vec<usize>]) -> Vec<TestTensor> {
    let rng = &mut rng();
    shapes
        .iter()
        .map(|shape| random(rng, dtype, shape))
        .collect()
}

/// Normal floats, small integers and both booleans, at an address that is aligned to the dtype alone.
pub fn random(rng: &mut impl Rng, dtype: DType, shape: &[usize]) -> TestTensor {
    let layout = Layout::contiguous(shape).unwrap();
    let mut tensor = TestTensor::poisoned_at(dtype, layout, 1);
    let values: Vec<f64> = (0..layout.num_elements())
        .map(|_| match dtype {
            DType::Bool => f64::from(rng.random_range(0..2)),
            DType::I32 | DType::I64 | DType::I8 => f64::from(rng.random_range(-9..10)),
            _ => crate::common::tensor::normal(rng),
        })
        .collect();
    tensor.set_values(&values);
    tensor
}

/// Rows of each rank: as many of all, different numbers with zero among them, and all of one rank.
pub fn divisions(size: usize) -> Vec<(Vec<i64>, bool)> {
    const UNEVEN: [i64; 8] = [3, 0, 5, 1, 0, 2, 7, 4];
    let mut of_last = vec![0; size];
    of_last[size - 1] = 6;
    vec![
        (vec![3; size], true),
        (vec![0; size], true),
        (vec![2; size], false),
        (UNEVEN[..size].to_vec(), false),
        (of_last, false),
    ]
}

/// As a shape with these rows.
pub fn rows(count: i64, row: &[usize]) -> Vec<usize> {
    [&[count as usize], row].concat()
}

/// Apart, or in place.
pub fn pair<'a>(x: &'a DeviceTensor, out: &'a mut DeviceTensor) -> InOut<'a> {
    InOut::Apart {
        input: x.view(),
        output: out.view_mut(),
    }
}
