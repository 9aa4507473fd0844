//! The attention block against the operations that it is made of, and its errors.

mod common;

use common::{DeviceTensor, FLOATS, TestTensor, contexts, rng};
use rand::Rng;
use unsloth::kv_cache::{Append, Config, KvCache, PageLayout};
use unsloth::ops::attention_block::{self, Params, Projections};
use unsloth::ops::linear::{self, Output, Weights};
use unsloth::ops::rope::{self, Positions, Rotation, Style};
use unsloth::ops::{attention, rms_norm};
use unsloth::{Backend, Buffer, Context, DType, InOut, Layout, Stream, TensorRef};

/// What a case varies.
#[derive(Clone, Copy, Debug)]
struct Case {
    /// Leading dimensions of `x`.
    tokens: &'static [usize],
    heads: (usize, usize),
    dims: (usize, usize),
    packed: bool,
    biases: bool,
    /// Gains per head, for all heads together, or none.
    norm: Norm,
    rotate: bool,
    residual: Residual,
    bidirectional: bool,
    window: usize,
    softcap: f32,
    /// Sinks and ALiBi slopes.
    logits: bool,
    weight_dtype: Option<DType>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Norm {
    None,
    Heads,
    All,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Residual {
    None,
    Apart,
    InPlace,
}

const PLAIN: Case = Case {
    tokens: &[2, 7],
    heads: (4, 2),
    dims: (16, 16),
    packed: false,
    biases: false,
    norm: Norm::None,
    rotate: true,
    residual: Residual::None,
    bidirectional: false,
    window: 0,
    softcap: 0.0,
    logits: false,
    weight_dtype: None,
};

fn cases() -> Vec<Case> {
    vec![
        PLAIN,
        Case {
            packed: true,
            tokens: &[9],
            residual: Residual::InPlace,
            ..PLAIN
        },
        Case {
            biases: true,
            norm: Norm::Heads,
            residual: Residual::Apart,
            ..PLAIN
        },
        Case {
            packed: true,
            biases: true,
            norm: Norm::All,
            heads: (3, 1),
            dims: (8, 5),
            weight_dtype: Some(DType::F32),
            ..PLAIN
        },
        Case {
            rotate: false,
            bidirectional: true,
            window: 3,
            tokens: &[3, 11],
            ..PLAIN
        },
        Case {
            window: 4,
            softcap: 5.0,
            logits: true,
            tokens: &[1, 33],
            heads: (6, 6),
            ..PLAIN
        },
        Case {
            tokens: &[1],
            ..PLAIN
        },
        Case {
            tokens: &[0],
            ..PLAIN
        },
        Case {
            tokens: &[2, 0],
            packed: true,
            ..PLAIN
        },
    ]
}

const HIDDEN: usize = 24;
const HIDDEN_OUT: usize = 20;
const EPSILON: f32 = 1e-5;

/// The tensors of a case.
struct Tensors {
    x: DeviceTensor,
    /// Query, key, value and output weights; views of one matrix where packed.
    qkv: DeviceTensor,
    qkv_bias: DeviceTensor,
    out_weight: DeviceTensor,
    out_bias: DeviceTensor,
    norms: [DeviceTensor; 2],
    sinks: DeviceTensor,
    slopes: DeviceTensor,
    residual: TestTensor,
}

impl Tensors {
    fn new(ctx: &Context, dtype: DType, case: &Case) -> Tensors {
        let rng = &mut rng();
        let contiguous = |shape: &[usize]| Layout::contiguous(shape).unwrap();
        let weights = case.weight_dtype.unwrap_or(dtype);
        let mut normal = |dtype, layout: Layout, scale: f64| {
            let values: Vec<f64> = TestTensor::normal(rng, DType::F32, layout)
                .values()
                .iter()
                .map(|x| x * scale)
                .collect();
            TestTensor::from_values(dtype, layout, &values)
        };
        let leading = |last: usize| [case.tokens, &[last]].concat();
        let (nq, nk) = case.heads;
        let (d, dv) = case.dims;
        let rows = nq * d + nk * (d + dv);
        let gains = |n: usize, per_head: usize| match case.norm {
            Norm::All => n * per_head,
            _ => per_head,
        };
        let x = common::tensor::strided_rows(&leading(HIDDEN), 3);
        Tensors {
            x: normal(dtype, x, 1.0).upload(ctx),
            qkv: normal(weights, contiguous(&[rows, HIDDEN]), 0.3).upload(ctx),
            qkv_bias: normal(weights, contiguous(&[rows]), 0.3).upload(ctx),
            out_weight: normal(weights, contiguous(&[HIDDEN_OUT, nq * dv]), 0.3).upload(ctx),
            out_bias: normal(weights, contiguous(&[HIDDEN_OUT]), 0.3).upload(ctx),
            norms: [
                normal(weights, contiguous(&[gains(nq, d)]), 1.0).upload(ctx),
                normal(weights, contiguous(&[gains(nk, d)]), 1.0).upload(ctx),
            ],
            sinks: normal(DType::F32, contiguous(&[nq]), 1.0).upload(ctx),
            slopes: normal(DType::F32, contiguous(&[nq]), 0.1).upload(ctx),
            residual: normal(dtype, contiguous(&leading(HIDDEN_OUT)), 1.0),
        }
    }

    fn rotation(case: &Case) -> Option<Rotation<'static>> {
        case.rotate.then(|| Rotation {
            style: if case.packed {
                Style::Interleaved
            } else {
                Style::HalfSplit
            },
            ..Rotation::default()
        })
    }

    /// Rows `start..start + len` of the matrix of queries, keys and values.
    fn projection(&self, case: &Case, start: usize, len: usize) -> Weights<'_> {
        Weights {
            weight: self.qkv.view().narrowed(0, start, len).unwrap(),
            bias: case
                .biases
                .then(|| self.qkv_bias.view().narrowed(0, start, len).unwrap()),
        }
    }

    fn apart(&self, case: &Case) -> [Weights<'_>; 3] {
        let ((nq, nk), (d, dv)) = (case.heads, case.dims);
        [
            self.projection(case, 0, nq * d),
            self.projection(case, nq * d, nk * d),
            self.projection(case, (nq + nk) * d, nk * dv),
        ]
    }

    fn params<'a>(&'a self, case: &Case, output: Output<'a>) -> Params<'a> {
        let [q, k, v] = self.apart(case);
        Params {
            x: self.x.view(),
            num_heads: case.heads.0,
            num_kv_heads: case.heads.1,
            head_dim: case.dims.0,
            v_head_dim: case.dims.1,
            projections: match case.packed {
                false => Projections::Apart { q, k, v },
                true => Projections::Packed(self.projection(case, 0, self.qkv.layout.dim(0))),
            },
            q_norm: (case.norm != Norm::None).then(|| self.norms[0].view()),
            k_norm: (case.norm != Norm::None).then(|| self.norms[1].view()),
            norm_weight_offset: 0.5,
            norm_epsilon: EPSILON,
            rotation: Self::rotation(case),
            positions: Positions::From(0),
            cu_seqlens: None,
            max_seqlen: 0,
            scale: 0.0,
            softcap: case.softcap,
            bidirectional: case.bidirectional,
            window: case.window,
            alibi_slopes: case.logits.then(|| self.slopes.view()),
            sinks: case.logits.then(|| self.sinks.view()),
            out_projection: Weights {
                weight: self.out_weight.view(),
                bias: case.biases.then(|| self.out_bias.view()),
            },
            output,
            workspace: unsloth::Workspace::none(),
        }
    }

    /// Output and residual, as the case has them.
    fn outputs(&self, ctx: &Context, case: &Case) -> (DeviceTensor, DeviceTensor) {
        let out = match case.residual {
            Residual::InPlace => self.residual.clone(),
            _ => TestTensor::poisoned(self.residual.dtype, self.residual.layout),
        };
        (out.upload(ctx), self.residual.upload(ctx))
    }
}

fn output<'a>(case: &Case, out: &'a mut DeviceTensor, residual: &'a DeviceTensor) -> Output<'a> {
    match case.residual {
        Residual::None => Output::Write(out.view_mut()),
        Residual::InPlace => Output::Add(InOut::InPlace(out.view_mut())),
        Residual::Apart => Output::Add(InOut::Apart {
            input: residual.view(),
            output: out.view_mut(),
        }),
    }
}

/// Queries, keys and values with heads, projected and normalised by single operations.
fn heads(ctx: &Context, t: &Tensors, case: &Case) -> [DeviceTensor; 3] {
    let ((nq, nk), (d, dv)) = (case.heads, case.dims);
    let project = |weights: Weights<'_>| {
        let columns = weights.weight.shape()[0];
        let shape = [case.tokens, &[columns]].concat();
        let layout = Layout::contiguous(&shape).unwrap();
        let mut out = TestTensor::poisoned(t.x.dtype, layout).upload(ctx);
        let params = linear::Params {
            x: t.x.view(),
            weights,
            output: Output::Write(out.view_mut()),
        };
        linear::forward(ctx, &params, Stream::DEFAULT).unwrap();
        out
    };
    let sizes = [(nq, d), (nk, d), (nk, dv)];
    let mut out = match case.packed {
        false => t.apart(case).map(project),
        true => {
            // One product, since the order of its sums may depend on the number of columns; then its slices.
            let columns = t.qkv.layout.dim(0);
            let values = project(t.projection(case, 0, columns)).download().values();
            let mut start = 0;
            sizes.map(|(num, dim)| {
                let slice: Vec<f64> = values
                    .chunks(columns)
                    .flat_map(|row| row[start..start + num * dim].iter().copied())
                    .collect();
                start += num * dim;
                let shape = [case.tokens, &[num * dim]].concat();
                TestTensor::of(t.x.dtype, &shape, &slice).upload(ctx)
            })
        }
    };
    for (i, (num, weight)) in [nq, nk].into_iter().zip(&t.norms).enumerate() {
        if case.norm == Norm::None {
            continue;
        }
        let mut x = out[i].view_mut();
        if case.norm == Norm::Heads {
            x = x.unflattened(case.tokens.len(), &[num, d]).unwrap();
        }
        let params = rms_norm::Params {
            x: InOut::InPlace(x),
            residual: None,
            weight: Some(weight.view()),
            weight_offset: 0.5,
            epsilon: EPSILON,
        };
        rms_norm::forward(ctx, &params, Stream::DEFAULT).unwrap();
    }
    for (t, (num, dim)) in out.iter_mut().zip(sizes) {
        t.layout = t
            .layout
            .unflattened(case.tokens.len(), &[num, dim])
            .unwrap();
    }
    out
}

fn project_out(ctx: &Context, t: &Tensors, case: &Case, attended: &DeviceTensor) -> TestTensor {
    let (mut out, residual) = t.outputs(ctx, case);
    let shape = [case.tokens, &[case.heads.0 * case.dims.1]].concat();
    let flat = Layout::contiguous(&shape).unwrap();
    // The heads lie one after the other, so the same memory is a row per token.
    let data = TestTensor::of(attended.dtype, &shape, &attended.download_output().values());
    assert_eq!(data.layout, flat);
    let data = data.upload(ctx);
    let params = linear::Params {
        x: data.view(),
        weights: Weights {
            weight: t.out_weight.view(),
            bias: case.biases.then(|| t.out_bias.view()),
        },
        output: output(case, &mut out, &residual),
    };
    linear::forward(ctx, &params, Stream::DEFAULT).unwrap();
    out.download_output()
}

fn check(ctx: &Context, dtype: DType, case: &Case) {
    let t = Tensors::new(ctx, dtype, case);
    let [mut q, mut k, v] = heads(ctx, &t, case);
    if let Some(rotation) = Tensors::rotation(case) {
        let params = rope::Params {
            q: Some(InOut::InPlace(q.view_mut())),
            k: Some(InOut::InPlace(k.view_mut())),
            rotation,
            ..rope::Params::default()
        };
        rope::forward(ctx, &params, Stream::DEFAULT).unwrap();
    }
    let shape = [case.tokens, &[case.heads.0, case.dims.1]].concat();
    let mut attended = TestTensor::poisoned(dtype, Layout::contiguous(&shape).unwrap()).upload(ctx);
    {
        let batched = |t: TensorRef<'static>| match case.tokens {
            [n] => t.unflattened(0, &[1, *n]).unwrap(),
            _ => t,
        };
        let detach = |t: &DeviceTensor| {
            // SAFETY: the tensors outlive the call.
            let view = unsafe { TensorRef::from_raw(t.data().cast(), t.dtype, t.layout) };
            batched(view)
        };
        let mut out = attended.view_mut();
        if let [n] = case.tokens {
            out = out.unflattened(0, &[1, *n]).unwrap();
        }
        let params = attention::Params {
            causal: !case.bidirectional,
            window_left: case.window,
            window_right: if case.bidirectional { case.window } else { 0 },
            softcap: case.softcap,
            alibi_slopes: case.logits.then(|| t.slopes.view()),
            sinks: case.logits.then(|| t.sinks.view()),
            ..attention::Params::new(detach(&q), detach(&k), detach(&v), out)
        };
        let mut workspace =
            Buffer::new(ctx, attention::workspace_size(ctx, &params).unwrap()).unwrap();
        let params = attention::Params {
            workspace: workspace.workspace(),
            ..params
        };
        attention::forward(ctx, &params, Stream::DEFAULT).unwrap();
    }
    let expected = project_out(ctx, &t, case, &attended);

    let (mut out, residual) = t.outputs(ctx, case);
    let mut params = t.params(case, output(case, &mut out, &residual));
    attention_block::supported(ctx, &params).unwrap();
    let size = attention_block::workspace_size(ctx, &params).unwrap();
    let mut workspace = poisoned_workspace(ctx, size);
    params.workspace = workspace.workspace();
    attention_block::forward(ctx, &params, Stream::DEFAULT).unwrap();
    let out = out.download_output();
    assert!(out.values().iter().all(|x| x.is_finite()));
    assert_same(ctx, &out, &expected);
}

/// The same bits; up to rounding on a GPU, where the order of a product's sums depends on how tensors lie, and on what else is computed
/// with it.
fn assert_same(ctx: &Context, a: &TestTensor, b: &TestTensor) {
    if ctx.backend() == Backend::Cpu {
        assert!(a.bits() == b.bits(), "not the same bits");
        return;
    }
    let expected = b.values();
    let greatest = expected.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
    let bound = greatest * (4.0 * common::rules::epsilon(b.dtype)).max(2e-5);
    for (a, b) in a.values().iter().zip(&expected) {
        assert!((a - b).abs() <= bound, "{a} and {b}, {bound} apart at most");
    }
}

/// A workspace of exactly this size, all NaN.
fn poisoned_workspace(ctx: &Context, size: usize) -> Buffer {
    let mut workspace = Buffer::new(ctx, size).unwrap();
    let nan = vec![f32::from_bits(0x7fc0_7fc0); size / 4];
    workspace.copy_from_slice(0, &nan, Stream::DEFAULT).unwrap();
    workspace
}

#[test]
fn it_is_its_operations() {
    for ctx in contexts() {
        for dtype in FLOATS {
            common::for_each_case(&cases(), |case| check(&ctx, dtype, case));
        }
    }
}

/// Equal but for the order of f32 sums, which may depend on how many rows a product has.
fn assert_near(a: &[f64], b: &[f64]) {
    assert_eq!(a.len(), b.len());
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert!((a - b).abs() <= 1e-5 * a.abs().max(1.0), "{i}: {a} {b}");
    }
}

/// Packed sequences are those sequences one by one.
#[test]
fn packed_sequences_do_not_see_each_other() {
    for ctx in contexts() {
        let case = Case {
            tokens: &[12],
            ..PLAIN
        };
        let t = Tensors::new(&ctx, DType::F32, &case);
        let starts = [0, 5, 5, 12];
        let positions: Vec<i32> = (0..5).chain(0..7).collect();
        let cu = Buffer::from_slice(&ctx, &starts).unwrap();
        let at = Buffer::from_slice(&ctx, &positions).unwrap();
        let i32s = |n: usize| Layout::contiguous(&[n]).unwrap();
        let run = |x: TensorRef<'_>, packed: bool, rows: usize| {
            let layout = Layout::contiguous(&[rows, HIDDEN_OUT]).unwrap();
            let mut out = TestTensor::poisoned(DType::F32, layout).upload(&ctx);
            let mut params = Params {
                x,
                ..t.params(&case, Output::Write(out.view_mut()))
            };
            if packed {
                params.cu_seqlens = Some(cu.tensor(0, DType::I32, i32s(4)).unwrap());
                params.max_seqlen = 7;
                let at = at.tensor(0, DType::I32, i32s(12)).unwrap();
                params.positions = Positions::PerToken(at);
            }
            let size = attention_block::workspace_size(&ctx, &params).unwrap();
            let mut workspace = poisoned_workspace(&ctx, size);
            params.workspace = workspace.workspace();
            attention_block::forward(&ctx, &params, Stream::DEFAULT).unwrap();
            out.download_output().values()
        };
        let together = run(t.x.view(), true, 12);
        let one = run(t.x.view().narrowed(0, 0, 5).unwrap(), false, 5);
        let two = run(t.x.view().narrowed(0, 5, 7).unwrap(), false, 7);
        assert_near(&together, &[one, two].concat());
    }
}

/// With a cache: the same bits as projecting, rotating, appending and attending by single operations, over several steps of
/// several sequences.
#[test]
fn with_a_cache_it_is_its_operations() {
    for ctx in contexts() {
        for (dtype, cached) in [
            (DType::F32, DType::F32),
            (DType::F32, DType::F16),
            (DType::Bf16, DType::Bf16),
        ] {
            let config = Config {
                v_head_dim: 5,
                page_size: 4,
                page_layout: PageLayout::HeadMajor,
                ..Config::new(2, 2, 16, 20, cached)
            };
            let mut caches = [0, 1].map(|_| KvCache::new(&ctx, &config).unwrap());
            for cache in &mut caches {
                for _ in 0..3 {
                    cache.create_sequence().unwrap();
                }
            }
            let steps: [(&'static [usize], [usize; 3]); 4] = [
                (&[9], [6, 3, 0]),
                (&[3], [1, 1, 1]),
                (&[5], [0, 4, 1]),
                (&[0], [0, 0, 0]),
            ];
            for (tokens, counts) in steps {
                let case = Case {
                    tokens,
                    dims: (16, 5),
                    norm: Norm::Heads,
                    packed: tokens[0] % 2 == 0,
                    ..PLAIN
                };
                // Identifiers are the same in both, which had the same history.
                let batch: Vec<_> = (0..3usize)
                    .map(|i| unsloth::kv_cache::SequenceId::from_raw((1 << 32) | i as i64))
                    .zip(counts)
                    .collect();
                for cache in &mut caches {
                    cache.extend(&batch, Stream::DEFAULT).unwrap();
                }
                for layer in 0..2 {
                    let t = Tensors::new(&ctx, dtype, &case);
                    let expected = cached_by_hand(&ctx, &t, &case, &mut caches[0], layer);
                    let (mut out, residual) = t.outputs(&ctx, &case);
                    let mut params = t.params(&case, output(&case, &mut out, &residual));
                    let cache = &mut caches[1];
                    attention_block::supported_cached(cache, layer, &params).unwrap();
                    let size =
                        attention_block::workspace_size_cached(cache, layer, &params).unwrap();
                    let mut workspace = poisoned_workspace(&ctx, size);
                    params.workspace = workspace.workspace();
                    attention_block::forward_cached(cache, layer, &params, Stream::DEFAULT)
                        .unwrap();
                    assert_same(&ctx, &out.download_output(), &expected);
                }
            }
        }
    }
}

fn cached_by_hand(
    ctx: &Context,
    t: &Tensors,
    case: &Case,
    cache: &mut KvCache,
    layer: usize,
) -> TestTensor {
    let [mut q, k, v] = heads(ctx, t, case);
    let rotation = Tensors::rotation(case).unwrap();
    let params = rope::Params {
        q: Some(InOut::InPlace(q.view_mut())),
        positions: Positions::PerToken(cache.batch().unwrap().positions),
        rotation,
        ..rope::Params::default()
    };
    rope::forward(ctx, &params, Stream::DEFAULT).unwrap();
    let append = Append {
        layer,
        k: k.view(),
        v: v.view(),
        rotation: Some(rotation),
    };
    cache.append(&append, Stream::DEFAULT).unwrap();
    let shape = [case.tokens[0], case.heads.0, case.dims.1];
    let layout = Layout::contiguous(&shape).unwrap();
    let mut attended = TestTensor::poisoned(t.x.dtype, layout).upload(ctx);
    let params = cache
        .attention(layer, q.view(), attended.view_mut())
        .unwrap();
    let mut workspace = Buffer::new(ctx, attention::workspace_size(ctx, &params).unwrap()).unwrap();
    let params = attention::Params {
        workspace: workspace.workspace(),
        ..params
    };
    attention::forward(ctx, &params, Stream::DEFAULT).unwrap();
    project_out(ctx, t, case, &attended)
}

/// Feeding a text through the cache in pieces gives what the whole gives at once without one.
#[test]
fn append_then_attend_is_attention() {
    for ctx in contexts() {
        for page_layout in [PageLayout::TokenMajor, PageLayout::HeadMajor] {
            let case = Case {
                tokens: &[29],
                ..PLAIN
            };
            let t = Tensors::new(&ctx, DType::F32, &case);
            let layout = Layout::contiguous(&[29, HIDDEN_OUT]).unwrap();
            let run = |ctx: &Context, cache: Option<&mut KvCache>, x: TensorRef<'_>| {
                let rows = x.shape()[0];
                let layout = Layout::contiguous(&[rows, HIDDEN_OUT]).unwrap();
                let mut out = TestTensor::poisoned(DType::F32, layout).upload(ctx);
                let mut params = Params {
                    x,
                    ..t.params(&case, Output::Write(out.view_mut()))
                };
                let size = match &cache {
                    None => attention_block::workspace_size(ctx, &params),
                    Some(cache) => attention_block::workspace_size_cached(cache, 0, &params),
                };
                let mut workspace = poisoned_workspace(ctx, size.unwrap());
                params.workspace = workspace.workspace();
                match cache {
                    None => attention_block::forward(ctx, &params, Stream::DEFAULT),
                    Some(cache) => {
                        attention_block::forward_cached(cache, 0, &params, Stream::DEFAULT)
                    }
                }
                .unwrap();
                out.download_output().values()
            };
            let whole = run(&ctx, None, t.x.view());
            assert_eq!(whole.len(), layout.num_elements());
            let config = Config {
                page_size: 8,
                page_layout,
                ..Config::new(1, 2, 16, 8, DType::F32)
            };
            let mut cache = KvCache::new(&ctx, &config).unwrap();
            let id = cache.create_sequence().unwrap();
            let mut pieces = Vec::new();
            let mut start = 0;
            while start < 29 {
                let len = rng().random_range(1..=8usize).min(29 - start);
                cache.extend(&[(id, len)], Stream::DEFAULT).unwrap();
                let x = t.x.view().narrowed(0, start, len).unwrap();
                pieces.extend(run(&ctx, Some(&mut cache), x));
                start += len;
            }
            assert_near(&whole, &pieces);
        }
    }
}

#[test]
fn bad_calls_say_why() {
    for ctx in contexts() {
        let case = Case {
            tokens: &[4],
            ..PLAIN
        };
        let t = Tensors::new(&ctx, DType::F32, &case);
        type Change = for<'p> fn(&'p Tensors, &mut Params<'p>);
        let cases: [(Change, &str); 12] = [
            (
                |_, p| p.num_heads = 0,
                "attention_block: num_heads is 0, allowed: 1 to 1048576",
            ),
            (
                |_, p| p.num_kv_heads = 3,
                "attention_block: num_heads is 4, a multiple of num_kv_heads 3 is needed",
            ),
            (
                |_, p| p.head_dim = 513,
                "attention_block: head_dim is 513, allowed: 1 to 512",
            ),
            (
                |_, p| p.num_heads = 8,
                "attention_block: q_weight has 64 rows, 128 are needed",
            ),
            (
                |_, p| p.projections = Projections::Packed(p.out_projection),
                "attention_block: qkv_weight has shape [20, 64], expected [20, 24]",
            ),
            (
                |t, p| p.out_projection.weight = t.qkv.view(),
                "attention_block: out_weight has shape [128, 24], expected [128, 64]",
            ),
            (
                |t, p| p.q_norm = Some(t.sinks.view()),
                "attention_block: q_norm has shape [4], allowed: [16] or [64]",
            ),
            (
                |t, p| p.sinks = Some(t.qkv_bias.view()),
                "attention_block: sinks has shape [128], expected [4]",
            ),
            (
                |t, p| {
                    p.k_norm = Some(t.norms[1].view());
                    p.norm_epsilon = -1.0;
                },
                "attention_block: epsilon is -1, at least 0 is needed",
            ),
            (
                |_, p| p.softcap = -1.0,
                "attention_block: softcap is -1, at least 0 is needed",
            ),
            (
                |_, p| p.cu_seqlens = Some(TensorRef::from_slice(&[0i32; 4], &[4]).unwrap()),
                "attention_block: positions are absent: packed sequences need them for the rotation",
            ),
            (
                |t, p| p.x = t.residual_view(),
                "attention_block: q_weight has shape [64, 24], expected [64, 20]",
            ),
        ];
        for (change, message) in &cases {
            let layout = Layout::contiguous(&[4, HIDDEN_OUT]).unwrap();
            let mut out = TestTensor::poisoned(DType::F32, layout).upload(&ctx);
            let mut params = t.params(&case, Output::Write(out.view_mut()));
            change(&t, &mut params);
            let result = attention_block::forward(&ctx, &params, Stream::DEFAULT);
            let query = attention_block::workspace_size(&ctx, &params);
            assert_eq!(result.unwrap_err().to_string(), *message);
            assert_eq!(query.unwrap_err().to_string(), *message);
            common::abi::assert_untouched(&out);
        }
    }
}

#[test]
fn bad_caches_say_why() {
    for ctx in contexts() {
        let case = Case {
            tokens: &[4],
            ..PLAIN
        };
        let t = Tensors::new(&ctx, DType::F32, &case);
        let fails = |cache: &mut KvCache, layer, change: fn(&mut Params<'_>), message: &str| {
            let layout = Layout::contiguous(&[4, HIDDEN_OUT]).unwrap();
            let mut out = TestTensor::poisoned(DType::F32, layout).upload(&ctx);
            let mut params = t.params(&case, Output::Write(out.view_mut()));
            change(&mut params);
            let error = attention_block::forward_cached(cache, layer, &params, Stream::DEFAULT)
                .unwrap_err();
            assert_eq!(error.to_string(), message);
            common::abi::assert_untouched(&out);
        };
        let keep: fn(&mut Params<'_>) = |_| {};
        let config = Config::new(2, 2, 16, 4, DType::F32);
        let mut cache = KvCache::new(&ctx, &config).unwrap();
        fails(
            &mut cache,
            0,
            keep,
            "attention_block: cache has no current batch: it must be extended first, and again after its sequences changed",
        );
        let id = cache.create_sequence().unwrap();
        cache.extend(&[(id, 3)], Stream::DEFAULT).unwrap();
        fails(
            &mut cache,
            0,
            keep,
            "attention_block: x has 4 tokens, the cache's batch has 3",
        );
        cache.extend(&[(id, 4)], Stream::DEFAULT).unwrap();
        fails(
            &mut cache,
            2,
            keep,
            "attention_block: layer is 2, the cache has 2 layers",
        );
        fails(
            &mut cache,
            0,
            |p| p.bidirectional = true,
            "attention_block: bidirectional is set: with a cache attention is causal",
        );
        fails(
            &mut cache,
            1,
            keep,
            "attention_block: workspace_size is 0 bytes, 3072 are required",
        );
        let other = Config::new(1, 4, 16, 4, DType::F32);
        let mut cache = KvCache::new(&ctx, &other).unwrap();
        let id = cache.create_sequence().unwrap();
        cache.extend(&[(id, 4)], Stream::DEFAULT).unwrap();
        fails(
            &mut cache,
            0,
            keep,
            "attention_block: num_kv_heads is 2, the cache has 4",
        );
    }
}

impl Tensors {
    /// A tensor with rows of another length than the hidden state.
    fn residual_view(&self) -> TensorRef<'_> {
        self.out_bias
            .view()
            .unflattened(0, &[1, HIDDEN_OUT])
            .unwrap()
    }
}
