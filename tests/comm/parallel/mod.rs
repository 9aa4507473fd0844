//! Layers and blocks that ranks divide, against one rank's from their definitions.

mod attention_block;
mod chunks;
mod decoder_layer;
mod embedding;
mod embedding_misuse;
mod estimate;
mod linear;
mod linear_backward;
mod linear_cross_entropy;
mod linear_cross_entropy_misuse;
mod misuse;
mod mlp;
mod vocabulary;

use std::ops::Range;

use unsloth::comm::Comm;
use unsloth::ops::parallel::Parallel;
use unsloth::{Context, DType, Error, Layout, TensorMut, TensorRef, Workspace};

use crate::common::rules::epsilon;
use crate::common::workspace::with_workspace;
use crate::common::{DeviceTensor, FLOATS, TestTensor, assert_gradient_rule, rounded};
use crate::group::{divisions, is_emulated, sizes};

/// How the rows of what is whole on all ranks otherwise are divided: not at all, evenly, by counts.
#[derive(Clone, Debug, PartialEq)]
pub enum Rows {
    Whole(usize),
    Even(usize, usize),
    Counts(Vec<i64>),
    /// As these, in chunks of so many rows of all ranks, at least.
    InChunks(Box<Rows>, usize),
}

impl Rows {
    /// Of groups of a size.
    pub fn all(size: usize) -> Vec<Rows> {
        let [.., (uneven, _), (of_last, _)] = &divisions(size)[..] else {
            panic!("there are no uneven divisions");
        };
        vec![
            Rows::Whole(5),
            Rows::Even(2, size),
            Rows::Even(0, size),
            Rows::Counts(uneven.clone()),
            Rows::Counts(of_last.clone()),
            Rows::InChunks(Box::new(Rows::Whole(7)), 3),
            Rows::InChunks(Box::new(Rows::Even(5, size)), 2 * size),
            // By counts there is one chunk.
            Rows::InChunks(Box::new(Rows::Counts(uneven.clone())), 1),
        ]
    }

    /// Rows of all ranks.
    pub fn total(&self) -> usize {
        match self {
            Rows::Whole(rows) => *rows,
            Rows::Even(rows, size) => rows * size,
            Rows::Counts(counts) => counts.iter().sum::<i64>() as usize,
            Rows::InChunks(rows, _) => rows.total(),
        }
    }

    /// Those of a rank.
    pub fn of(&self, rank: usize) -> Range<usize> {
        match self {
            Rows::Whole(rows) => 0..*rows,
            Rows::Even(rows, _) => rows * rank..rows * (rank + 1),
            Rows::Counts(counts) => {
                let start = counts[..rank].iter().sum::<i64>() as usize;
                start..start + counts[rank] as usize
            }
            Rows::InChunks(rows, _) => rows.of(rank),
        }
    }

    pub fn is_divided(&self) -> bool {
        match self {
            Rows::Whole(_) => false,
            Rows::InChunks(rows, _) => rows.is_divided(),
            _ => true,
        }
    }

    pub fn parallel<'a>(&'a self, comm: &'a Comm) -> Parallel<'a> {
        if let Rows::InChunks(rows, chunk_rows) = self {
            return Parallel {
                chunk_rows: *chunk_rows,
                ..rows.parallel(comm)
            };
        }
        Parallel {
            sequence: self.is_divided(),
            row_counts: match self {
                Rows::Counts(counts) => Some(counts),
                _ => None,
            },
            ..Parallel::new(comm)
        }
    }

    /// A rank's outputs joined: those of whole rows, which have the same bits, or rows behind each other.
    #[track_caller]
    pub fn joined(&self, outs: &[TestTensor]) -> Vec<f64> {
        if self.is_divided() {
            return outs.iter().flat_map(TestTensor::values).collect();
        }
        assert_same(outs);
        outs[0].values()
    }
}

/// All ranks have the same bits.
#[track_caller]
pub fn assert_same(outs: &[TestTensor]) {
    assert!(outs.iter().all(|out| out.bits() == outs[0].bits()));
}

/// Numbers divided among ranks as evenly as they go, the first having more.
pub fn divided(n: usize, size: usize, rank: usize) -> Range<usize> {
    let before = |rank: usize| rank * (n / size) + rank.min(n % size);
    before(rank)..before(rank + 1)
}

/// Some rows of a contiguous tensor, and some columns.
pub fn rows(t: &TestTensor, range: Range<usize>) -> TestTensor {
    let mut shape = t.layout.shape().to_vec();
    let row: usize = shape[1..].iter().product();
    shape[0] = range.len();
    TestTensor::of(
        t.dtype,
        &shape,
        &t.values()[range.start * row..range.end * row],
    )
}

pub fn columns(t: &TestTensor, range: Range<usize>) -> TestTensor {
    let mut shape = t.layout.shape().to_vec();
    let row = shape.pop().unwrap();
    let values = columns_of(&t.values(), row, range.clone());
    shape.push(range.len());
    TestTensor::of(t.dtype, &shape, &values)
}

/// Columns of rows of values.
pub fn columns_of(values: &[f64], row: usize, range: Range<usize>) -> Vec<f64> {
    let rows = values.chunks(row.max(1));
    rows.flat_map(|row| row[range.clone()].to_vec()).collect()
}

pub fn poisoned(dtype: DType, shape: &[usize]) -> TestTensor {
    TestTensor::poisoned(dtype, Layout::contiguous(shape).unwrap())
}

/// Runs with the workspace that is asked for; less is refused before any rank has sent anything.
pub fn run<'a>(
    ctx: &Context,
    op: &'static str,
    size: Result<usize, Error>,
    launch: impl FnMut(Workspace<'a>) -> Result<(), Error>,
) {
    with_workspace(ctx, op, size.unwrap(), launch);
}

/// Groups, divisions of rows and dtypes that tables are of: every dtype where rows are whole, and one of
/// them in turn where they are divided. On an emulated GPU, which takes seconds for a case, some of them.
pub fn groups() -> Vec<(usize, Rows, DType)> {
    let mut all = Vec::new();
    for size in sizes() {
        for (i, rows) in Rows::all(size).into_iter().enumerate() {
            let dtypes = match rows {
                Rows::Whole(_) => &FLOATS[..],
                _ => &FLOATS[(size + i) % FLOATS.len()..][..1],
            };
            all.extend(dtypes.iter().map(|dtype| (size, rows.clone(), *dtype)));
        }
    }
    let step = if is_emulated() { 3 } else { 1 };
    all.into_iter().step_by(step).collect()
}

/// A gradient that ranks have parts of, and what it is to be: exactly, and as plain code has it in one or
/// two ways. It is right as a whole, as the errors of few elements may happen to be small.
#[derive(Default)]
pub struct Gradient {
    got: Vec<f64>,
    exact: Vec<f64>,
    plain: [Vec<f64>; 2],
}

impl Gradient {
    pub fn push(&mut self, got: &[f64], exact: Vec<f64>, plain: [Vec<f64>; 2]) {
        assert_eq!(got.len(), exact.len());
        self.got.extend(got);
        self.exact.extend(exact);
        for (all, part) in self.plain.iter_mut().zip(plain) {
            all.extend(part);
        }
    }

    pub fn check(&self, name: &str, dtype: DType, terms: f64) {
        let plain = self.plain.each_ref().map(|plain| rounded(dtype, plain));
        let error = |of: &[f64]| {
            let errors = of.iter().zip(&self.exact).map(|(a, e)| (a - e).abs());
            errors.fold(0.0, f64::max)
        };
        let [a, b] = &plain;
        let worse = if error(a) < error(b) { b } else { a };
        assert_gradient_rule(name, dtype, &self.got, &self.exact, worse, terms);
    }
}

pub fn magnitudes(values: &[f64]) -> Vec<f64> {
    values.iter().map(|v| v.abs()).collect()
}

/// `terms` of a rule for sums over ranks, or what rounding every rank's part of them costs if that is
/// more: as much as so many errors of half a unit in the last place, of either sign.
pub fn of_parts(terms: f64, dtype: DType, size: usize, sums: &[f64]) -> f64 {
    let rounded = 0.5 * epsilon(dtype) * greatest(sums) * (size as f64).sqrt();
    terms.max(rounded / epsilon(DType::F32))
}

pub fn greatest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |most: f64, v| most.max(v.abs()))
}

/// An output described for a call, whatever lends it.
///
/// # Safety
/// It lives, and nothing else uses it, while the call runs.
pub unsafe fn unbound(t: &mut DeviceTensor) -> TensorMut<'static> {
    let (dtype, layout) = (t.view().dtype(), *t.view().layout());
    // SAFETY: the caller's promise.
    unsafe { TensorMut::from_raw(t.data().cast(), dtype, layout) }
}

/// An input, likewise.
///
/// # Safety
/// It lives while the call runs.
pub unsafe fn unbound_ref(t: &DeviceTensor) -> TensorRef<'static> {
    let (dtype, layout) = (t.view().dtype(), *t.view().layout());
    // SAFETY: the caller's promise.
    unsafe { TensorRef::from_raw(t.data().cast::<u8>().cast_const(), dtype, layout) }
}
