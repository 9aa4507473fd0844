//! The attention block whose heads ranks divide, with and without a cache, and its gradients.

use std::collections::BTreeMap;
use std::ops::Range;

use unsloth::kv_cache::{Config, KvCache};
use unsloth::ops::attention_block::backward::{Gradients, Params as Backward};
use unsloth::ops::attention_block::{self, Params, Projections};
use unsloth::ops::linear::{Output, Weights};
use unsloth::ops::rope::{Positions, Rotation};
use unsloth::{Context, DType, InOut, Stream, Workspace};

use super::{
    Gradient, Rows, assert_same, columns, columns_of, divided, greatest, groups, of_parts,
    poisoned, rows, run, unbound, unbound_ref,
};
use crate::common::reference::attention::Options;
use crate::common::reference::attention_block::{Arithmetic, Block, Gradients as Exact};
use crate::common::reference::mlp::Layer;
use crate::common::{
    DeviceTensor, TestTensor, assert_flash_rule_of_sums, contiguous, rng, rounded,
};
use crate::group::ranks;

/// Key and value heads, which are divided with two query heads each.
const KV_HEADS: usize = 8;
const HEADS: usize = 16;
const DIM: usize = 4;
const DIM_V: usize = 3;
const HIDDEN: usize = 20;
const EPSILON: f32 = 1e-5;

/// What rows are.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Tokens of one sequence.
    Tokens,
    /// Sequences of two tokens.
    Batch,
    /// New tokens of one sequence, which a cache takes.
    Cached,
}

#[derive(Clone, Debug)]
struct Case {
    size: usize,
    rows: Rows,
    kind: Kind,
    dtype: DType,
    packed: bool,
    bias: bool,
    residual: bool,
    norms: bool,
}

/// A matrix and its bias.
type Pair = (TestTensor, Option<TestTensor>);

struct Tensors {
    x: TestTensor,
    residual: TestTensor,
    dout: TestTensor,
    /// To queries, keys and values.
    projections: [Pair; 3],
    out: Pair,
    norms: [TestTensor; 2],
    sinks: TestTensor,
}

/// A rank's columns of queries, keys, values and attention's output.
fn parts(size: usize, rank: usize) -> [Range<usize>; 4] {
    let kv = divided(KV_HEADS, size, rank);
    let times = |n: usize| kv.start * n..kv.end * n;
    let group = HEADS / KV_HEADS;
    [
        times(group * DIM),
        times(DIM),
        times(DIM_V),
        times(group * DIM_V),
    ]
}

impl Case {
    fn shape(&self, rows: usize, columns: usize) -> Vec<usize> {
        match self.kind {
            Kind::Batch => vec![rows, 2, columns],
            _ => vec![rows, columns],
        }
    }

    fn lens(&self) -> Vec<usize> {
        match self.kind {
            Kind::Batch => vec![2; self.rows.total()],
            _ => vec![self.rows.total()],
        }
    }
}

impl Tensors {
    fn new(case: &Case) -> Tensors {
        let rng = &mut rng();
        let mut layer = |n: usize, k: usize| {
            let normal = TestTensor::normal(rng, DType::F32, contiguous(&[n, k])).values();
            let scaled: Vec<f64> = normal.iter().map(|v| v / (k as f64).sqrt()).collect();
            let bias = TestTensor::normal(rng, case.dtype, contiguous(&[n]));
            let weight = TestTensor::of(case.dtype, &[n, k], &scaled);
            (weight, case.bias.then_some(bias))
        };
        let projections = [
            layer(HEADS * DIM, HIDDEN),
            layer(KV_HEADS * DIM, HIDDEN),
            layer(KV_HEADS * DIM_V, HIDDEN),
        ];
        let out = layer(HIDDEN, HEADS * DIM_V);
        let shape = contiguous(&case.shape(case.rows.total(), HIDDEN));
        let [x, residual, dout] = [0; 3].map(|_| TestTensor::normal(rng, case.dtype, shape));
        let norms = [0; 2].map(|_| TestTensor::normal(rng, DType::F32, contiguous(&[DIM])));
        Tensors {
            x,
            residual,
            dout,
            projections,
            out,
            norms,
            sinks: TestTensor::normal(rng, DType::F32, contiguous(&[HEADS])),
        }
    }

    fn block(&self, case: &Case) -> Block {
        let layer = |(weight, bias): &Pair| Layer {
            weight: weight.values(),
            bias: bias.as_ref().map(TestTensor::values),
        };
        Block {
            heads: HEADS,
            kv_heads: KV_HEADS,
            dim: DIM,
            dim_v: DIM_V,
            hidden: HIDDEN,
            hidden_out: HIDDEN,
            projections: self.projections.each_ref().map(layer),
            out: layer(&self.out),
            norms: self
                .norms
                .each_ref()
                .map(|norm| case.norms.then(|| norm.values())),
            norm_weight_offset: 0.0,
            norm_epsilon: f64::from(EPSILON),
            rotation: Some(false),
            options: Options {
                causal: true,
                sinks: Some(self.sinks.values()),
                ..Options::default()
            },
        }
    }
}

/// A rank's part of a block.
struct Part {
    /// To queries, keys and values, or all in one.
    projections: Vec<(DeviceTensor, Option<DeviceTensor>)>,
    out: (DeviceTensor, Option<DeviceTensor>),
    norms: [DeviceTensor; 2],
    sinks: DeviceTensor,
    kv_heads: usize,
    norms_heads: bool,
}

impl Part {
    fn new(ctx: &Context, case: &Case, tensors: &Tensors, rank: usize) -> Part {
        let ranges = parts(case.size, rank);
        let mut all: Vec<Pair> = Vec::new();
        for ((weight, bias), range) in tensors.projections.iter().zip(&ranges) {
            let bias = bias.as_ref().map(|bias| rows(bias, range.clone()));
            all.push((rows(weight, range.clone()), bias));
        }
        if case.packed {
            let joined = |of: &dyn Fn(&Pair) -> Option<TestTensor>| {
                let of: Option<Vec<_>> = all.iter().map(of).collect();
                of.map(|of| {
                    let mut shape = of[0].layout.shape().to_vec();
                    shape[0] = of.iter().map(|t| t.layout.dim(0)).sum();
                    let values: Vec<f64> = of.iter().flat_map(TestTensor::values).collect();
                    TestTensor::of(case.dtype, &shape, &values)
                })
            };
            let weight = joined(&|(weight, _)| Some(weight.clone())).unwrap();
            let bias = joined(&|(_, bias)| bias.clone());
            all = vec![(weight, bias)];
        }
        let kv = divided(KV_HEADS, case.size, rank);
        let upload = |(w, b): Pair| (w.upload(ctx), b.map(|b| b.upload(ctx)));
        let out = (
            columns(&tensors.out.0, ranges[3].clone()),
            tensors.out.1.clone(),
        );
        let group = HEADS / KV_HEADS;
        Part {
            projections: all.into_iter().map(upload).collect(),
            out: upload(out),
            norms: tensors.norms.each_ref().map(|norm| norm.upload(ctx)),
            sinks: rows(&tensors.sinks, kv.start * group..kv.end * group).upload(ctx),
            kv_heads: kv.len(),
            norms_heads: case.norms,
        }
    }

    fn params<'a>(
        &'a self,
        x: &'a DeviceTensor,
        parallel: unsloth::ops::parallel::Parallel<'a>,
    ) -> Params<'a> {
        let weights = |(weight, bias): &'a (DeviceTensor, Option<DeviceTensor>)| Weights {
            weight: weight.view(),
            bias: bias.as_ref().map(|bias| bias.view()),
        };
        Params {
            x_norm: None,
            x: x.view(),
            num_heads: self.kv_heads * (HEADS / KV_HEADS),
            num_kv_heads: self.kv_heads,
            head_dim: DIM,
            v_head_dim: DIM_V,
            projections: match &self.projections[..] {
                [q, k, v] => Projections::Apart {
                    q: weights(q),
                    k: weights(k),
                    v: weights(v),
                },
                all => Projections::Packed(weights(&all[0])),
            },
            q_norm: self.norms_heads.then(|| self.norms[0].view()),
            k_norm: self.norms_heads.then(|| self.norms[1].view()),
            norm_weight_offset: 0.0,
            norm_epsilon: EPSILON,
            rotation: Some(Rotation::default()),
            positions: Positions::From(0),
            cache: None,
            cu_seqlens: None,
            max_seqlen: 0,
            scale: 0.0,
            softcap: 0.0,
            bidirectional: false,
            window: 0,
            alibi_slopes: None,
            sinks: Some(self.sinks.view()),
            attended_norm: None,
            out_projection: weights(&self.out),
            output: Output::none(),
            workspace: Workspace::none(),
            qkv_out: None,
            attended_out: None,
            lse_out: None,
            parallel: Some(parallel),
        }
    }
}

/// Every rank's output, and what it keeps for the backward pass, if it does.
fn forward(case: &Case, tensors: &Tensors, keeps: bool) -> Vec<[TestTensor; 4]> {
    ranks(case.size, |ctx, comm| {
        let rank = comm.rank();
        let part = Part::new(ctx, case, tensors, rank);
        let own = case.rows.of(rank);
        let x = rows(&tensors.x, own.clone()).upload(ctx);
        let residual = rows(&tensors.residual, own.clone()).upload(ctx);
        let mut out = poisoned(case.dtype, &case.shape(own.len(), HIDDEN)).upload(ctx);
        let [q, k, v, attended] = parts(case.size, rank).map(|range| range.len());
        let total = case.rows.total();
        let mut qkv = poisoned(case.dtype, &case.shape(total, q + k + v)).upload(ctx);
        let mut attended = poisoned(case.dtype, &case.shape(total, attended)).upload(ctx);
        let heads = part.kv_heads * (HEADS / KV_HEADS);
        let mut lse = match case.kind {
            Kind::Batch => poisoned(DType::F32, &[total, heads, 2]),
            _ => poisoned(DType::F32, &[heads, total]),
        }
        .upload(ctx);
        let config = Config {
            v_head_dim: DIM_V,
            page_size: 4,
            ..Config::new(1, part.kv_heads, DIM, 40, case.dtype)
        };
        let mut cache = KvCache::new(ctx, &config).unwrap();
        let cached = case.kind == Kind::Cached;
        if cached {
            let sequence = cache.create_sequence().unwrap();
            cache.extend(&[(sequence, total)], Stream::DEFAULT).unwrap();
        }
        let mut call = |workspace: Option<Workspace<'_>>| {
            let asks = workspace.is_none();
            // SAFETY: described once for each call, and alive while it runs.
            let params = unsafe {
                Params {
                    cache: cached.then(|| cache.lend(0).unwrap()),
                    output: match case.residual {
                        false => Output::Write(unbound(&mut out)),
                        true => Output::Add(InOut::Apart {
                            input: unbound_ref(&residual),
                            output: unbound(&mut out),
                        }),
                    },
                    qkv_out: keeps.then(|| unbound(&mut qkv)),
                    attended_out: keeps.then(|| unbound(&mut attended)),
                    lse_out: keeps.then(|| unbound(&mut lse)),
                    workspace: workspace.unwrap_or(Workspace::none()),
                    ..part.params(&x, case.rows.parallel(comm))
                }
            };
            if asks {
                attention_block::supported(ctx, &params).unwrap();
                return attention_block::workspace_size(ctx, &params);
            }
            attention_block::forward(ctx, &params, Stream::DEFAULT).map(|()| 0)
        };
        let size = call(None);
        run(ctx, "attention_block", size, |workspace| {
            call(Some(workspace)).map(drop)
        });
        [out, qkv, attended, lse].map(|t| t.download_output())
    })
}

fn cases(kinds: &[Kind]) -> Vec<Case> {
    let mut cases = Vec::new();
    for (size, rows, dtype) in groups() {
        for kind in kinds {
            for all in [false, true] {
                cases.push(Case {
                    size,
                    rows: rows.clone(),
                    kind: *kind,
                    dtype,
                    packed: all,
                    bias: all,
                    residual: all,
                    norms: !all,
                });
            }
        }
    }
    cases
}

#[test]
fn forward_is_that_of_one_rank() {
    for case in cases(&[Kind::Tokens, Kind::Batch, Kind::Cached]) {
        println!("case {case:?}");
        let tensors = Tensors::new(&case);
        let outs = forward(&case, &tensors, false);
        let outs: Vec<_> = outs.into_iter().map(|[out, ..]| out).collect();
        let got = case.rows.joined(&outs);
        let (block, x) = (tensors.block(&case), tensors.x.values());
        let residual = tensors.residual.values();
        let of = |arithmetic| -> Vec<f64> {
            let out = block.forward(&x, &case.lens(), arithmetic).out;
            match case.residual {
                false => out,
                true => out.iter().zip(&residual).map(|(a, b)| a + b).collect(),
            }
        };
        let exact = of(Arithmetic::Exact);
        let plain = rounded(case.dtype, &of(Arithmetic::Plain(case.dtype)));
        let terms = greatest(&exact) + (HEADS * DIM_V) as f64;
        let terms = of_parts(terms, case.dtype, case.size, &exact);
        assert_flash_rule_of_sums("out", case.dtype, &got, &exact, &plain, terms);
    }
}

/// Kept tensors but those of rows that are no tokens have the same bits whoever asks.
fn backward(
    case: &Case,
    tensors: &Tensors,
    kept: Option<&[[TestTensor; 4]]>,
    wants_dx: bool,
) -> Vec<Vec<TestTensor>> {
    ranks(case.size, |ctx, comm| {
        let rank = comm.rank();
        let part = Part::new(ctx, case, tensors, rank);
        let own = case.rows.of(rank);
        let x = rows(&tensors.x, own.clone()).upload(ctx);
        let dout = rows(&tensors.dout, own.clone()).upload(ctx);
        let kept = kept.map(|kept| kept[rank].each_ref().map(|t| t.upload(ctx)));
        let like = |t: &DeviceTensor| poisoned(DType::F32, t.view().shape()).upload(ctx);
        let mut dx = poisoned(case.dtype, x.view().shape()).upload(ctx);
        let mut matrices: Vec<_> = part
            .projections
            .iter()
            .chain([&part.out])
            .map(|(weight, bias)| (like(weight), bias.as_ref().map(like)))
            .collect();
        let mut norms = part.norms.each_ref().map(like);
        let mut sinks = like(&part.sinks);
        let mut params = |workspace| {
            // SAFETY: described once for each call, and alive while it runs.
            unsafe {
                let mut all = matrices.iter_mut().map(|(weight, bias)| {
                    (
                        Some(unbound(weight)),
                        bias.as_mut().map(|bias| unbound(bias)),
                    )
                });
                let mut of = Gradients::default();
                if case.packed {
                    (of.dqkv_weight, of.dqkv_bias) = all.next().unwrap();
                } else {
                    (of.dq_weight, of.dq_bias) = all.next().unwrap();
                    (of.dk_weight, of.dk_bias) = all.next().unwrap();
                    (of.dv_weight, of.dv_bias) = all.next().unwrap();
                }
                (of.dout_weight, of.dout_bias) = all.next().unwrap();
                if case.norms {
                    let [q, k] = &mut norms;
                    (of.dq_norm, of.dk_norm) = (Some(unbound(q)), Some(unbound(k)));
                }
                of.dsinks = Some(unbound(&mut sinks));
                let [qkv, attended, lse] = [1, 2, 3].map(|i| kept.as_ref().map(|t| t[i].view()));
                Backward {
                    forward: part.params(&x, case.rows.parallel(comm)),
                    qkv,
                    attended,
                    lse,
                    dout: dout.view(),
                    dx: wants_dx.then(|| unbound(&mut dx)),
                    gradients: of,
                    accumulate: false,
                    deterministic: true,
                    workspace,
                }
            }
        };
        let asked = params(Workspace::none());
        attention_block::backward::supported(ctx, &asked).unwrap();
        let size = attention_block::backward::workspace_size(ctx, &asked);
        run(ctx, "attention_block_backward", size, |workspace| {
            attention_block::backward(ctx, &params(workspace), Stream::DEFAULT)
        });
        let mut all = vec![dx.download_output(), sinks.download_output()];
        all.extend(norms.map(|norm| norm.download_output()));
        for (weight, bias) in matrices {
            all.push(weight.download_output());
            all.extend(bias.map(|bias| bias.download_output()));
        }
        all
    })
}

#[test]
fn backward_is_that_of_one_rank() {
    let all = cases(&[Kind::Tokens, Kind::Batch]).into_iter();
    for case in all.filter(|case| case.packed == (case.kind == Kind::Batch)) {
        println!("case {case:?}");
        let case = Case {
            residual: false,
            ..case
        };
        let tensors = Tensors::new(&case);
        let kept = forward(&case, &tensors, true);
        let all = backward(&case, &tensors, Some(&kept), true);
        // What was kept, and what is not asked for, changes no bits.
        let again = backward(&case, &tensors, None, false);
        for (all, again) in all.iter().zip(&again) {
            let pairs = all.iter().zip(again).skip(1);
            pairs.for_each(|(a, b)| assert!(a.bits() == b.bits()));
        }
        check_gradients(&case, &tensors, &all);
    }
}

fn check_gradients(case: &Case, tensors: &Tensors, all: &[Vec<TestTensor>]) {
    let (block, x, dout) = (
        tensors.block(case),
        tensors.x.values(),
        tensors.dout.values(),
    );
    let of = |arithmetic| block.backward((&x, &dout), &case.lens(), arithmetic, !case.packed);
    let exact = of(Arithmetic::Exact);
    let stored = of(Arithmetic::Stored(case.dtype));
    let plain = of(Arithmetic::Plain(case.dtype));
    let terms = stored.terms;
    let dx: Vec<_> = all.iter().map(|all| all[0].clone()).collect();
    let mut gradients: BTreeMap<usize, Gradient> = BTreeMap::new();
    // Numbered as `terms` are.
    let mut push = |i: usize, got: &[f64], of: &dyn Fn(&Exact) -> Vec<f64>| {
        let gradient = gradients.entry(i).or_default();
        gradient.push(got, of(&exact), [of(&plain), of(&stored)]);
    };
    push(0, &case.rows.joined(&dx), &|g| g.dx.clone());
    // Of norms, each rank has the part of its heads: their sum is the gradient.
    for which in 0..2 {
        let mut sum = vec![0.0; DIM];
        for all in all.iter().filter(|_| case.norms) {
            let values = all[2 + which].values();
            sum.iter_mut().zip(values).for_each(|(sum, v)| *sum += v);
        }
        if case.norms {
            push(7 + which, &sum, &|g| g.norms[which].clone());
        }
    }
    for (rank, all) in all.iter().enumerate() {
        let ranges = parts(case.size, rank);
        let group = HEADS / KV_HEADS;
        let kv = divided(KV_HEADS, case.size, rank);
        let heads = kv.start * group..kv.end * group;
        push(9, &all[1].values(), &|g| g.sinks[heads.clone()].to_vec());
        let per = if case.bias { 2 } else { 1 };
        let matrices: Vec<_> = all[4..].iter().map(TestTensor::values).collect();
        let mut start = [0, 0];
        for (i, range) in ranges[..3].iter().enumerate() {
            let own = |t: &[f64], row: usize| t[range.start * row..range.end * row].to_vec();
            // Of a packed matrix, some of its rows.
            let found = |which: usize, row: usize, start: &mut [usize; 2]| match case.packed {
                false => matrices[per * i + which].clone(),
                true => {
                    let from = start[which];
                    start[which] += range.len() * row;
                    matrices[which][from..start[which]].to_vec()
                }
            };
            let weight = found(0, HIDDEN, &mut start);
            push(1 + 2 * i, &weight, &|g| own(&g.projections[i].0, HIDDEN));
            if case.bias {
                let bias = found(1, 1, &mut start);
                push(2 + 2 * i, &bias, &|g| own(&g.projections[i].1, 1));
            }
        }
        let out = &matrices[matrices.len() - per];
        push(10, out, &|g| {
            columns_of(&g.out.0, HEADS * DIM_V, ranges[3].clone())
        });
        if case.bias && rank == 0 {
            push(11, matrices.last().unwrap(), &|g| g.out.1.clone());
        }
    }
    for (i, gradient) in gradients {
        let (dtype, terms) = match i {
            0 => (
                case.dtype,
                of_parts(terms[0], case.dtype, case.size, &exact.dx),
            ),
            _ => (DType::F32, terms[i]),
        };
        gradient.check(&format!("gradient {i}"), dtype, terms);
    }
    if case.bias {
        let last: Vec<_> = all.iter().map(|all| all.last().unwrap().clone()).collect();
        assert_same(&last);
    }
}
