//! Embeddings whose table ranks divide: the bits of one rank's.

use std::ops::Range;

use rand::Rng;
use unsloth::ops::embedding::{self, Params, backward};
use unsloth::ops::parallel::Vocabulary;
use unsloth::{Context, DType, Layout, Stream, Workspace};

use super::vocabulary::{range, tables, vocabulary};
use super::{Rows, assert_same, groups, poisoned, rows, run, unbound};
use crate::common::guarded::AtEnd;
use crate::common::reference::blocks;
use crate::common::{TestTensor, contiguous, rng};
use crate::group::{context, ranks, sizes};

/// Ids of a shape whose first dimension are the rows of all ranks.
fn ids(rng: &mut impl Rng, dtype: DType, total: usize, vocab: usize) -> TestTensor {
    TestTensor::integers(rng, dtype, contiguous(&[total, 3]), vocab as i64)
}

const DIM: usize = 32;

/// A table, or a rank's rows of it.
struct Table {
    dtype: DType,
    rows: usize,
    bytes: Vec<u8>,
}

impl Table {
    /// With zeros of both signs, which sums of ranks are to keep.
    fn random(rng: &mut impl Rng, dtype: DType, rows: usize) -> Table {
        if dtype.is_in_blocks() {
            return Table {
                dtype,
                rows,
                bytes: blocks::random(rng, dtype, rows * DIM),
            };
        }
        let mut table = TestTensor::normal(rng, dtype, contiguous(&[rows, DIM]));
        let mut values = table.values();
        for pair in values.chunks_exact_mut(5) {
            (pair[0], pair[1]) = (-0.0, 0.0);
        }
        table.set_values(&values);
        Table {
            dtype,
            rows,
            bytes: table.bits(),
        }
    }

    fn part(&self, range: Range<usize>) -> Table {
        let row = self.bytes.len() / self.rows;
        Table {
            rows: range.len(),
            bytes: self.bytes[range.start * row..range.end * row].to_vec(),
            ..*self
        }
    }

    /// Ends where memory does.
    fn upload(&self, ctx: &Context) -> AtEnd {
        AtEnd::new(ctx, &self.bytes)
    }

    fn layout(&self) -> Layout {
        contiguous(&[self.rows, DIM])
    }
}

fn forward(
    ctx: &Context,
    (table, ids): (&Table, &TestTensor),
    (out_dtype, out): (DType, &[usize]),
    vocabulary: Option<Vocabulary<'_>>,
) -> TestTensor {
    let (memory, ids) = (table.upload(ctx), ids.upload(ctx));
    let mut out = poisoned(out_dtype, out).upload(ctx);
    let mut params = |workspace| Params {
        table: memory.view(table.dtype, table.layout()),
        ids: ids.view(),
        // SAFETY: described once for each call, and alive while it runs.
        out: unsafe { unbound(&mut out) },
        vocabulary,
        workspace,
    };
    let asked = params(Workspace::none());
    embedding::supported(ctx, &asked).unwrap();
    let size = embedding::workspace_size(ctx, &asked);
    let sequence = vocabulary.is_some_and(|of| of.parallel.sequence);
    let whole = ids.view().layout().num_elements() * DIM * out_dtype.size();
    let expected = if sequence {
        whole.next_multiple_of(256)
    } else {
        0
    };
    assert_eq!(size, Ok(expected));
    run(ctx, "embedding", size, |workspace| {
        embedding::forward(ctx, &params(workspace), Stream::DEFAULT)
    });
    out.download_output()
}

#[test]
fn forward_is_that_of_one_rank() {
    let rng = &mut rng();
    for (size, of_rows, dtype) in groups() {
        for table in tables(size) {
            for (from, id) in [(dtype, DType::I64), (DType::Q8_0, DType::I32)] {
                println!("case {size} {of_rows:?} {from} {dtype} {table:?}");
                let vocab = table.iter().sum();
                let whole = Table::random(rng, from, vocab);
                let total = of_rows.total();
                let ids = ids(rng, id, total, vocab);
                let expected =
                    forward(&context(1), (&whole, &ids), (dtype, &[total, 3, DIM]), None);
                let outs = ranks(size, |ctx, comm| {
                    let own = whole.part(range(&table, comm.rank()));
                    let shape = [of_rows.of(comm.rank()).len(), 3, DIM];
                    let vocabulary = vocabulary(&of_rows, comm, &table);
                    forward(ctx, (&own, &ids), (dtype, &shape), Some(vocabulary))
                });
                if !of_rows.is_divided() {
                    assert_same(&outs);
                }
                for (rank, out) in outs.iter().enumerate() {
                    let expected = bits_of_rows(&expected, of_rows.of(rank));
                    assert!(out.bits() == expected, "rank {rank} has other bits");
                }
            }
        }
    }
}

/// The bits of some rows of a contiguous tensor.
fn bits_of_rows(t: &TestTensor, range: Range<usize>) -> Vec<u8> {
    let bits = t.bits();
    let row = bits.len() / t.layout.dim(0).max(1);
    bits[range.start * row..range.end * row].to_vec()
}

struct Case {
    dout: TestTensor,
    ids: TestTensor,
    before: TestTensor,
    padding_idx: Option<usize>,
    accumulate: bool,
}

fn gradient(
    ctx: &Context,
    case: &Case,
    (dout, before): (&TestTensor, &TestTensor),
    vocabulary: Option<Vocabulary<'_>>,
) -> TestTensor {
    let (dout, ids) = (dout.upload(ctx), case.ids.upload(ctx));
    let mut dweight = before.upload(ctx);
    let mut params = |workspace| backward::Params {
        dout: dout.view(),
        ids: ids.view(),
        // SAFETY: described once for each call, and alive while it runs.
        dweight: unsafe { unbound(&mut dweight) },
        padding_idx: case.padding_idx,
        accumulate: case.accumulate,
        workspace,
        vocabulary,
    };
    let asked = params(Workspace::none());
    backward::supported(ctx, &asked).unwrap();
    let size = backward::workspace_size(ctx, &asked);
    run(ctx, "embedding_backward", size, |workspace| {
        embedding::backward(ctx, &params(workspace), Stream::DEFAULT)
    });
    dweight.download_output()
}

#[test]
fn gradients_are_those_of_one_rank() {
    let rng = &mut rng();
    for (size, of_rows, dtype) in groups() {
        for (i, table) in tables(size).into_iter().enumerate() {
            for accumulate in [false, true] {
                println!("case {size} {of_rows:?} {dtype} {table:?} {accumulate}");
                let (vocab, total) = (table.iter().sum::<usize>(), of_rows.total());
                let to = if accumulate { DType::F32 } else { dtype };
                let layout = contiguous(&[vocab, DIM]);
                let case = Case {
                    dout: TestTensor::normal(rng, dtype, contiguous(&[total, 3, DIM])),
                    ids: ids(rng, DType::I32, total, vocab),
                    before: match accumulate {
                        true => TestTensor::normal(rng, to, layout),
                        false => TestTensor::poisoned(to, layout),
                    },
                    // None, the first row of all, one of the middle.
                    padding_idx: [None, Some(0), Some(vocab / 2)][i],
                    accumulate,
                };
                let expected = gradient(&context(1), &case, (&case.dout, &case.before), None);
                let outs = ranks(size, |ctx, comm| {
                    let own = range(&table, comm.rank());
                    let dout = rows(&case.dout, of_rows.of(comm.rank()));
                    let before = rows(&case.before, own);
                    let vocabulary = vocabulary(&of_rows, comm, &table);
                    gradient(ctx, &case, (&dout, &before), Some(vocabulary))
                });
                for (rank, out) in outs.iter().enumerate() {
                    let expected = bits_of_rows(&expected, range(&table, rank));
                    assert!(out.bits() == expected, "rank {rank} has other bits");
                }
            }
        }
    }
}

/// An id that the vocabulary does not have is refused by all ranks, and none has written anything.
#[test]
fn ids_are_of_the_vocabulary() {
    for size in sizes() {
        for bad in [-1.0, (4 * size) as f64] {
            ranks(size, |ctx, comm| {
                let table = vec![4; size];
                let rows = Rows::Whole(2);
                let own = poisoned(DType::F32, &[4, DIM]).upload(ctx);
                let ids = TestTensor::of(DType::I64, &[2], &[0.0, bad]).upload(ctx);
                let layout = Layout::contiguous(&[2, DIM]).unwrap();
                let mut out = TestTensor::poisoned(DType::F32, layout).upload(ctx);
                let params = Params {
                    table: own.view(),
                    ids: ids.view(),
                    out: out.view_mut(),
                    vocabulary: Some(vocabulary(&rows, comm, &table)),
                    workspace: Workspace::none(),
                };
                let error = embedding::forward(ctx, &params, Stream::DEFAULT).unwrap_err();
                let of = match size {
                    1 => "the table",
                    _ => "the vocabulary",
                };
                let expected = format!(
                    "embedding: ids has {bad} at index 1, {of} has {} rows",
                    4 * size
                );
                assert_eq!(error.to_string(), expected);
                crate::common::abi::assert_untouched(&out);
            });
        }
    }
}
