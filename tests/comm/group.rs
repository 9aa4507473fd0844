//! A group of ranks, each a thread with a context of its own.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use unsloth::comm::{Comm, Id, Kind, Params};
use unsloth::{Backend, Context, ContextOptions};

use crate::common::tensor::DeviceTensor;
use crate::common::{TestTensor, rng};
use rand::Rng;
use unsloth::{DType, InOut, Layout};

/// What groups have in tables, as far as there are devices for them.
pub fn sizes() -> impl Iterator<Item = usize> {
    let most = devices().unwrap_or(usize::MAX);
    [1, 2, 3, 4, 8]
        .into_iter()
        .filter(move |size| *size <= most)
}

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

/// Whether a GPU is emulated, which takes seconds for a case.
pub fn is_emulated() -> bool {
    is_cuda() && devices().is_none()
}

/// How many devices ranks have, one each, which the test of a group waits for. `UNSLOTH_TEST_DEVICES` says so on a
/// machine with several GPUs; there groups are kept for later tests, since NCCL takes a second to make one. Without it ranks
/// are threads of the CPU or of one emulated GPU, as many as a test asks for.
pub fn devices() -> Option<usize> {
    let count = std::env::var("UNSLOTH_TEST_DEVICES").ok()?;
    Some(count.parse().expect("UNSLOTH_TEST_DEVICES is a number"))
}

/// A context of few threads: groups have one for each rank.
pub fn context(num_threads: usize) -> Context {
    context_on(0, num_threads)
}

/// That of a rank.
fn context_on(rank: usize, num_threads: usize) -> Context {
    let device = if is_cuda() && devices().is_some() {
        rank
    } else {
        0
    };
    Context::new(&ContextOptions {
        device: device as i32,
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

/// Runs every rank of a new group, and gives what they give in their order. On devices the group may be one of
/// before.
pub fn ranks<R: Send>(size: usize, run: impl Fn(&Context, &Comm) -> R + Sync) -> Vec<R> {
    if devices().is_some() {
        let group = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        let group = take_of(size, group).unwrap_or_else(|| joined(size));
        let results = each(&group, |(ctx, comm)| run(ctx, comm));
        // One in which a rank has failed is used no more.
        KEPT.lock().unwrap().push(group);
        return results;
    }
    let id = new_id();
    let numbers: Vec<usize> = (0..size).collect();
    each(&numbers, |rank| {
        let (ctx, comm) = join(id, *rank, size);
        run(&ctx, &comm)
    })
}

/// Groups that nothing uses.
static KEPT: Mutex<Vec<Group>> = Mutex::new(Vec::new());

type Group = Vec<(Context, Comm)>;

fn take_of(size: usize, mut kept: std::sync::MutexGuard<'_, Vec<Group>>) -> Option<Group> {
    let at = kept.iter().position(|group| group.len() == size)?;
    Some(kept.swap_remove(at))
}

fn joined(size: usize) -> Group {
    let id = new_id();
    let numbers: Vec<usize> = (0..size).collect();
    each(&numbers, |rank| join(id, *rank, size))
}

fn join(id: Id, rank: usize, size: usize) -> (Context, Comm) {
    // One thread or two: the bits do not depend on it.
    let ctx = context_on(rank, 1 + rank % 2);
    let comm = Comm::new(&ctx, &params(id, rank, size, LONG)).unwrap();
    assert_eq!((comm.rank(), comm.size()), (rank, size));
    (ctx, comm)
}

/// A thread for each rank.
fn each<T: Sync, R: Send>(of_ranks: &[T], run: impl Fn(&T) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = of_ranks
            .iter()
            .map(|of_rank| scope.spawn(move || run(of_rank)))
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
