//! Attention over sequences that ranks divide: on every rank the bits that one rank alone gives its tokens.

mod definition;
mod misuse;
mod packed;

use unsloth::ops::attention;
use unsloth::ops::context_parallel_attention::{self as divided, Method, Order, backward};
use unsloth::{Comm, Context, DType, Layout, Stream, Workspace};

use crate::common::tensor::transposed;
use crate::common::{DeviceTensor, FLOATS, TestTensor, contiguous, rng};
use crate::group::{context, ranks, sizes};
use crate::parallel::{poisoned, run, unbound};

/// Sizes of a rank's part, and what is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    method: Method,
    order: Order,
    batch: usize,
    queries: usize,
    keys: usize,
    /// Key heads of each rank, or of all where these gather keys, and query heads of each key head.
    kv_heads: usize,
    group: usize,
    dims: (usize, usize),
    causal: bool,
    windows: (usize, usize),
    softcap: f32,
    sinks: bool,
    slopes: bool,
    /// Whether tensors have heads before tokens, or gaps.
    gaps: bool,
    gradients: [bool; 3],
}

const CASE: Case = Case {
    method: Method::Ulysses,
    order: Order::Contiguous,
    batch: 1,
    queries: 5,
    keys: 5,
    kv_heads: 1,
    group: 1,
    dims: (8, 8),
    causal: true,
    windows: (0, 0),
    softcap: 0.0,
    sinks: false,
    slopes: false,
    gaps: false,
    gradients: [true; 3],
};

#[rustfmt::skip]
const CASES: [Case; 11] = [
    CASE,
    Case {
        causal: false,
        batch: 2,
        ..CASE
    },
    Case {
        kv_heads: 2,
        group: 3,
        batch: 3,
        dims: (16, 4),
        ..CASE
    },
    Case {
        queries: 1,
        keys: 1,
        group: 2,
        ..CASE
    },
    Case {
        queries: 2,
        keys: 7,
        softcap: 3.0,
        ..CASE
    },
    Case {
        gaps: true,
        kv_heads: 2,
        batch: 2,
        windows: (6, 0),
        ..CASE
    },
    Case {
        causal: false,
        windows: (4, 3),
        gradients: [true, false, false],
        ..CASE
    },
    Case {
        gaps: true,
        group: 2,
        gradients: [false, true, true],
        ..CASE
    },
    Case {
        queries: 0,
        keys: 0,
        ..CASE
    },
    Case {
        group: 2,
        sinks: true,
        ..CASE
    },
    Case {
        causal: false,
        batch: 2,
        queries: 3,
        sinks: true,
        slopes: true,
        gradients: [true, false, false],
        ..CASE
    },
];

/// `q`, `k`, `v` and `dout` of all ranks, and the same of one rank that has all tokens.
struct Whole {
    tensors: [TestTensor; 4],
}

impl Case {
    fn kv_heads(&self, size: usize) -> usize {
        match self.method {
            Method::Ulysses => self.kv_heads * size,
            _ => self.kv_heads,
        }
    }

    /// Shapes of `q`, `k`, `v` and `out` with as many tokens as a number of ranks have.
    fn shapes(&self, size: usize, ranks: usize) -> [[usize; 4]; 4] {
        let (kv, (d, dv)) = (self.kv_heads(size), self.dims);
        let (queries, keys) = (self.queries * ranks, self.keys * ranks);
        [
            [self.batch, queries, kv * self.group, d],
            [self.batch, keys, kv, d],
            [self.batch, keys, kv, dv],
            [self.batch, queries, kv * self.group, dv],
        ]
    }

    fn whole(&self, dtype: DType, size: usize) -> Whole {
        let rng = &mut rng();
        let tensors = self.shapes(size, size);
        Whole {
            tensors: tensors.map(|shape| TestTensor::normal(rng, dtype, contiguous(&shape))),
        }
    }

    /// Sinks and slopes, the same on all ranks.
    fn of_heads(&self, heads: usize) -> [TestTensor; 2] {
        [(1.0, 0.9), (0.3, 0.4)].map(|(scale, step): (f64, f64)| {
            let values: Vec<_> = (0..heads)
                .map(|h| scale * (step * h as f64).cos())
                .collect();
            TestTensor::of(DType::F32, &[heads], &values)
        })
    }

    /// A tensor of a rank, with the layout of the case.
    fn layout(&self, shape: &[usize]) -> Layout {
        match self.gaps {
            true => transposed(shape, 1, 2),
            false => contiguous(shape),
        }
    }

    fn uploaded(&self, ctx: &Context, t: &TestTensor) -> DeviceTensor {
        let layout = self.layout(t.layout.shape());
        TestTensor::from_values(t.dtype, layout, &t.values()).upload(ctx)
    }

    fn output(&self, ctx: &Context, dtype: DType, shape: &[usize]) -> DeviceTensor {
        TestTensor::poisoned(dtype, self.layout(shape)).upload(ctx)
    }

    /// What a rank needs for its tokens, forward and back.
    fn workspace_sizes(
        &self,
        ctx: &Context,
        comm: &Comm,
        [q, k, v, dout]: &[TestTensor; 4],
    ) -> [usize; 2] {
        let [q, k, v, dout] = [q, k, v, dout].map(|t| self.uploaded(ctx, t));
        let mut outputs = [&dout, &q, &k, &v].map(|t| self.output(ctx, q.dtype, t.layout.shape()));
        let heads: Vec<usize> = [0, 2, 1].map(|dim| q.layout.dim(dim)).into();
        let lse = poisoned(DType::F32, &heads).upload(ctx);
        let [out, dq, dk, dv] = &mut outputs;
        let back = backward::Params {
            method: self.method,
            order: self.order,
            dq: Some(dq.view_mut()),
            dk: Some(dk.view_mut()),
            dv: Some(dv.view_mut()),
            causal: self.causal,
            ..backward::Params::new(
                comm,
                [q.view(), k.view(), v.view()],
                dout.view(),
                lse.view(),
                dout.view(),
            )
        };
        let back = backward::workspace_size(ctx, &back).unwrap();
        let params = divided::Params {
            method: self.method,
            order: self.order,
            causal: self.causal,
            ..divided::Params::new(comm, q.view(), k.view(), v.view(), out.view_mut())
        };
        [divided::workspace_size(ctx, &params).unwrap(), back]
    }

    /// Output, `lse` and the gradients that are asked for, of a rank's tokens or of all; and that of sinks.
    fn run(
        &self,
        ctx: &Context,
        comm: Option<&Comm>,
        [q, k, v, dout]: &[TestTensor; 4],
    ) -> Vec<TestTensor> {
        let dtype = q.dtype;
        let [q, k, v, dout] = [q, k, v, dout].map(|t| self.uploaded(ctx, t));
        let mut out = self.output(ctx, dtype, dout.view().shape());
        let heads: Vec<usize> = [0, 2, 1].map(|dim| q.view().shape()[dim]).into();
        let mut lse = poisoned(DType::F32, &heads).upload(ctx);
        let numbers = self.of_heads(heads[1]).map(|t| t.upload(ctx));
        let sinks = self.sinks.then(|| numbers[0].view());
        let alibi_slopes = self.slopes.then(|| numbers[1].view());
        let mut dsinks = poisoned(DType::F32, &[heads[1]]).upload(ctx);
        let mut gradients = [&q, &k, &v].map(|t| self.output(ctx, dtype, t.view().shape()));
        let (window_left, window_right) = self.windows;
        // SAFETY: described for one call at a time, and alive while it runs.
        let output = |t: &mut DeviceTensor| unsafe { unbound(t) };
        if let Some(comm) = comm {
            let mut params = |workspace| divided::Params {
                method: self.method,
                order: self.order,
                lse: Some(output(&mut lse)),
                sinks,
                alibi_slopes,
                causal: self.causal,
                window_left,
                window_right,
                softcap: self.softcap,
                workspace,
                ..divided::Params::new(comm, q.view(), k.view(), v.view(), output(&mut out))
            };
            let size = divided::workspace_size(ctx, &params(Workspace::none()));
            run(ctx, "context_parallel_attention", size, |workspace| {
                divided::forward(ctx, &params(workspace), Stream::DEFAULT)
            });
            let [dq, dk, dv] = &mut gradients;
            let mut params = |workspace| backward::Params {
                method: self.method,
                order: self.order,
                dq: self.gradients[0].then(|| output(dq)),
                dk: self.gradients[1].then(|| output(dk)),
                dv: self.gradients[2].then(|| output(dv)),
                sinks,
                alibi_slopes,
                dsinks: self.sinks.then(|| output(&mut dsinks)),
                causal: self.causal,
                window_left,
                window_right,
                softcap: self.softcap,
                workspace,
                ..backward::Params::new(
                    comm,
                    [q.view(), k.view(), v.view()],
                    out.view(),
                    lse.view(),
                    dout.view(),
                )
            };
            let size = backward::workspace_size(ctx, &params(Workspace::none()));
            run(
                ctx,
                "context_parallel_attention_backward",
                size,
                |workspace| backward(ctx, &params(workspace), Stream::DEFAULT),
            );
        } else {
            let mut params = |workspace| attention::Params {
                lse: Some(output(&mut lse)),
                sinks,
                alibi_slopes,
                causal: self.causal,
                window_left,
                window_right,
                softcap: self.softcap,
                workspace,
                ..attention::Params::new(q.view(), k.view(), v.view(), output(&mut out))
            };
            let size = attention::workspace_size(ctx, &params(Workspace::none()));
            run(ctx, "attention", size, |workspace| {
                attention::forward(ctx, &params(workspace), Stream::DEFAULT)
            });
            let [dq, dk, dv] = &mut gradients;
            let mut params = |workspace| attention::backward::Params {
                dq: self.gradients[0].then(|| output(dq)),
                dk: self.gradients[1].then(|| output(dk)),
                dv: self.gradients[2].then(|| output(dv)),
                sinks,
                alibi_slopes,
                dsinks: self.sinks.then(|| output(&mut dsinks)),
                causal: self.causal,
                window_left,
                window_right,
                softcap: self.softcap,
                workspace,
                ..attention::backward::Params::new(
                    q.view(),
                    k.view(),
                    v.view(),
                    out.view(),
                    lse.view(),
                    dout.view(),
                )
            };
            let size = attention::backward::workspace_size(ctx, &params(Workspace::none()));
            run(ctx, "attention_backward", size, |workspace| {
                attention::backward(ctx, &params(workspace), Stream::DEFAULT)
            });
        }
        let asked = gradients.into_iter().zip(self.gradients);
        let asked = asked.filter_map(|(t, asked)| asked.then_some(t));
        let dsinks = self.sinks.then_some(dsinks);
        let all = [out, lse].into_iter().chain(asked).chain(dsinks);
        all.map(|t| t.download_output()).collect()
    }
}

/// Which of the tokens of all ranks one has.
fn held(order: Order, tokens: usize, (size, rank): (usize, usize)) -> Vec<usize> {
    match order {
        Order::Zigzag => {
            let chunk = tokens / (2 * size);
            let of = |i: usize| i * chunk..(i + 1) * chunk;
            of(rank).chain(of(2 * size - 1 - rank)).collect()
        }
        _ => (rank * tokens / size..(rank + 1) * tokens / size).collect(),
    }
}

/// Some entries of dimension `dim`.
fn taken(t: &TestTensor, dim: usize, indices: &[usize]) -> TestTensor {
    let shape = t.layout.shape();
    let (before, all) = (shape[..dim].iter().product::<usize>(), shape[dim]);
    let after: usize = shape[dim + 1..].iter().product();
    let values = t.values();
    let of = |outer: usize| {
        let values = &values;
        let row = move |i: &usize| values[(outer * all + i) * after..][..after].to_vec();
        indices.iter().flat_map(row)
    };
    let values: Vec<f64> = (0..before).flat_map(of).collect();
    let mut shape = shape.to_vec();
    shape[dim] = indices.len();
    TestTensor::of(t.dtype, &shape, &values)
}

impl Case {
    /// What a rank has of a tensor with the tokens of all as dimension `dim`.
    fn part(&self, t: &TestTensor, dim: usize, at: (usize, usize)) -> TestTensor {
        taken(t, dim, &held(self.order, t.layout.dim(dim), at))
    }
}

#[test]
fn it_is_that_of_one_rank() {
    for size in sizes() {
        for (i, case) in CASES.iter().enumerate() {
            let dtypes = match i {
                0 => &FLOATS[..],
                _ => &FLOATS[(size + i) % FLOATS.len()..][..1],
            };
            for dtype in dtypes {
                let whole = case.whole(*dtype, size);
                let expected = case.run(&context(2), None, &whole.tensors);
                let found = ranks(size, |ctx, comm| {
                    let at = (size, comm.rank());
                    let own = whole.tensors.each_ref().map(|t| case.part(t, 1, at));
                    case.run(ctx, Some(comm), &own)
                });
                for (rank, found) in found.iter().enumerate() {
                    assert_eq!(found.len(), expected.len());
                    for (j, (found, expected)) in found.iter().zip(&expected).enumerate() {
                        let expected = match j {
                            1 => case.part(expected, 2, (size, rank)),
                            _ if expected.layout.rank() == 1 => expected.clone(),
                            _ => case.part(expected, 1, (size, rank)),
                        };
                        assert!(
                            found.values() == expected.values(),
                            "{size} ranks, {dtype}, {case:?}: {j} of rank {rank}"
                        );
                    }
                }
            }
        }
    }
}
