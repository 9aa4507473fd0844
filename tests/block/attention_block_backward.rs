//! Gradients of the attention block against their definition, which is proved by differences of the
//! forward's; what is kept against what is computed again; misuse.

use crate::common::abi::{self, Misuse, Operation, absent, c_tensor};
use crate::common::attention_block::*;
use crate::common::reference::attention::Options;
use crate::common::reference::attention_block::{Arithmetic, Block, Gradients as Expected};
use crate::common::reference::mlp::Layer;
use crate::common::{
    DeviceTensor, FLOATS, TestTensor, assert_gradient_rule, contexts, cut_off, rng, rounded,
};
use unsloth::ffi::attention_block::backward::*;
use unsloth::ffi::attention_block::*;
use unsloth::ffi::status::*;
use unsloth::ops::attention_block::backward::{Gradients, Params};
use unsloth::ops::attention_block::{self, Params as Forward};
use unsloth::ops::linear::Output;
use unsloth::ops::rope::Positions;
use unsloth::{Context, DType, Error, Layout, Stream, Workspace};

/// A case, and the lengths of its sequences where they are packed.
#[derive(Clone, Copy, Debug)]
struct Packed {
    case: Case,
    lens: &'static [usize],
    accumulate: bool,
}

const NOT_PACKED: Packed = Packed {
    case: PLAIN,
    lens: &[],
    accumulate: false,
};

fn cases() -> Vec<Packed> {
    let of = |case| Packed { case, ..NOT_PACKED };
    vec![
        of(PLAIN),
        Packed {
            accumulate: true,
            ..of(Case {
                packed: true,
                biases: true,
                tokens: &[9],
                ..PLAIN
            })
        },
        of(Case {
            biases: true,
            norm: Norm::Heads,
            weight_dtype: Some(DType::F32),
            ..PLAIN
        }),
        Packed {
            accumulate: true,
            ..of(Case {
                packed: true,
                biases: true,
                norm: Norm::All,
                heads: (3, 1),
                dims: (8, 5),
                ..PLAIN
            })
        },
        of(Case {
            rotate: false,
            bidirectional: true,
            window: 3,
            tokens: &[3, 11],
            ..PLAIN
        }),
        of(Case {
            rotate: false,
            norm: Norm::Heads,
            tokens: &[7],
            ..PLAIN
        }),
        of(Case {
            window: 4,
            softcap: 5.0,
            logits: true,
            tokens: &[1, 33],
            ..PLAIN
        }),
        Packed {
            lens: &[5, 0, 7],
            ..of(Case {
                tokens: &[12],
                packed: true,
                logits: true,
                ..PLAIN
            })
        },
        Packed {
            lens: &[3, 9],
            ..of(Case {
                tokens: &[12],
                norm: Norm::Heads,
                ..PLAIN
            })
        },
        of(Case {
            tokens: &[1],
            logits: true,
            ..PLAIN
        }),
        Packed {
            accumulate: true,
            ..of(Case {
                tokens: &[0],
                logits: true,
                ..PLAIN
            })
        },
        of(Case {
            tokens: &[2, 0],
            packed: true,
            biases: true,
            ..PLAIN
        }),
    ]
}

/// The gradients' names, in the order of the reference's.
const NAMES: [&str; 12] = [
    "dx",
    "q weight",
    "q bias",
    "k weight",
    "k bias",
    "v weight",
    "v bias",
    "q norm",
    "k norm",
    "sinks",
    "out weight",
    "out bias",
];

impl Packed {
    /// Lengths of the sequences, packed or not.
    fn sequences(&self) -> Vec<usize> {
        match (self.lens, self.case.tokens) {
            ([], [len]) => vec![*len],
            ([], [batch, len]) => vec![*len; *batch],
            (lens, _) => lens.to_vec(),
        }
    }

    fn num_tokens(&self) -> usize {
        self.case.tokens.iter().product()
    }

    /// The shape of a tensor of the tokens.
    fn shape(&self, columns: usize) -> Vec<usize> {
        [self.case.tokens, &[columns]].concat()
    }

    fn columns(&self) -> [usize; 3] {
        let ((nq, nk), (d, dv)) = (self.case.heads, self.case.dims);
        [nq * d, nk * d, nk * dv]
    }

    fn attended(&self) -> usize {
        self.case.heads.0 * self.case.dims.1
    }
}

/// A case on a device.
struct Call {
    packed: Packed,
    t: Tensors,
    dout: DeviceTensor,
    cu_seqlens: Option<DeviceTensor>,
    positions: Option<DeviceTensor>,
}

impl Call {
    fn new(ctx: &Context, dtype: DType, packed: &Packed) -> Call {
        let integers = |values: Vec<usize>| {
            let values: Vec<f64> = values.into_iter().map(|v| v as f64).collect();
            TestTensor::of(DType::I32, &[values.len()], &values).upload(ctx)
        };
        let starts = packed.lens.iter().scan(0, |sum, len| {
            *sum += len;
            Some(*sum)
        });
        let is_packed = !packed.lens.is_empty();
        let dout = crate::common::tensor::strided_rows(&packed.shape(HIDDEN_OUT), 5);
        Call {
            t: Tensors::new(ctx, dtype, &packed.case),
            dout: TestTensor::normal(&mut rng(), dtype, dout).upload(ctx),
            cu_seqlens: is_packed.then(|| integers([0].into_iter().chain(starts).collect())),
            positions: is_packed
                .then(|| integers(packed.lens.iter().flat_map(|len| 0..*len).collect())),
            packed: *packed,
        }
    }

    fn forward<'a>(&'a self, output: Output<'a>) -> Forward<'a> {
        let mut params = self.t.params(&self.packed.case, output);
        params.cu_seqlens = self.cu_seqlens.as_ref().map(DeviceTensor::view);
        if let Some(positions) = &self.positions {
            params.positions = Positions::PerToken(positions.view());
        }
        params
    }

    /// The block in f64.
    fn reference(&self) -> Block {
        let case = &self.packed.case;
        let values = |t: &DeviceTensor| t.download().values();
        let mut start = 0;
        let (weight, bias) = (values(&self.t.qkv), values(&self.t.qkv_bias));
        let projections = self.packed.columns().map(|rows| {
            let range = start..start + rows;
            start += rows;
            Layer {
                weight: weight[range.start * HIDDEN..range.end * HIDDEN].to_vec(),
                bias: case.biases.then(|| bias[range].to_vec()),
            }
        });
        let window = (case.window > 0).then_some(case.window);
        Block {
            heads: case.heads.0,
            kv_heads: case.heads.1,
            dim: case.dims.0,
            dim_v: case.dims.1,
            hidden: HIDDEN,
            hidden_out: HIDDEN_OUT,
            projections,
            out: Layer {
                weight: values(&self.t.out_weight),
                bias: case.biases.then(|| values(&self.t.out_bias)),
            },
            norms: [0, 1].map(|i| (case.norm != Norm::None).then(|| values(&self.t.norms[i]))),
            norm_weight_offset: 0.5,
            norm_epsilon: f64::from(EPSILON),
            rotation: case.rotate.then_some(case.packed),
            options: Options {
                softcap: (case.softcap > 0.0).then_some(f64::from(case.softcap)),
                causal: !case.bidirectional,
                window_left: window,
                window_right: window.filter(|_| case.bidirectional),
                alibi_slopes: case.logits.then(|| values(&self.t.slopes)),
                sinks: case.logits.then(|| values(&self.t.sinks)),
                ..Options::default()
            },
        }
    }
}

/// Runs with exactly the workspace that is asked for, poisoned, having seen that less is refused.
fn with_workspace<'a>(
    ctx: &Context,
    op: &'static str,
    size: usize,
    mut run: impl FnMut(Workspace<'a>) -> Result<(), Error>,
) {
    if size > 0 {
        let error = Error::WorkspaceTooSmall {
            op,
            required: size,
            provided: 0,
        };
        assert_eq!(run(Workspace::none()).unwrap_err(), error);
    }
    let layout = Layout::contiguous(&[size.div_ceil(4)]).unwrap();
    let memory = TestTensor::poisoned(DType::F32, layout).upload(ctx);
    // SAFETY: `size` bytes from the start of the tensor are its elements, which nothing else uses.
    run(unsafe { Workspace::from_raw(memory.data().cast(), size) }).unwrap();
    memory.download_output();
}

/// Queries, keys and values, attention's output and LSE, as the forward keeps them.
struct Kept([DeviceTensor; 3]);

/// The forward, which keeps what it can; gives its output too.
fn forward(ctx: &Context, call: &Call) -> (TestTensor, Kept) {
    let (packed, dtype) = (&call.packed, call.t.x.dtype);
    let poisoned = |dtype, shape: &[usize]| {
        TestTensor::poisoned(dtype, Layout::contiguous(shape).unwrap()).upload(ctx)
    };
    let heads = packed.case.heads.0;
    let lse = match packed.case.tokens {
        [batch, len] => vec![*batch, heads, *len],
        tokens => vec![heads, tokens[0]],
    };
    let mut kept = [
        poisoned(dtype, &packed.shape(packed.columns().iter().sum())),
        poisoned(dtype, &packed.shape(packed.attended())),
        poisoned(DType::F32, &lse),
    ];
    let mut out = poisoned(dtype, &packed.shape(HIDDEN_OUT));
    {
        let [qkv, attended, lse] = &mut kept;
        let mut params = call.forward(Output::Write(out.view_mut()));
        params.qkv_out = Some(qkv.view_mut());
        params.attended_out = Some(attended.view_mut());
        params.lse_out = Some(lse.view_mut());
        attention_block::supported(ctx, &params).unwrap();
        let size = attention_block::workspace_size(ctx, &params).unwrap();
        with_workspace(ctx, "attention_block", size, |workspace| {
            params.workspace = workspace;
            attention_block::forward(ctx, &params, Stream::DEFAULT)
        });
    }
    (out.download_output(), Kept(kept))
}

/// The gradients that are wanted, in the order of [`NAMES`]; of packed weights those of all under
/// the names of the queries'. `before` is what those of parameters hold.
fn backward(
    ctx: &Context,
    call: &Call,
    kept: [Option<&DeviceTensor>; 3],
    wanted: &dyn Fn(usize) -> bool,
    before: &dyn Fn(Layout) -> TestTensor,
) -> [Option<TestTensor>; 12] {
    let (case, t) = (&call.packed.case, &call.t);
    let vector = |n| Some(Layout::contiguous(&[n]).unwrap());
    let matrix = |n| Some(Layout::contiguous(&[n, HIDDEN]).unwrap());
    let [q, k, v] = call.packed.columns();
    let of_norm = |i: usize| (case.norm != Norm::None).then_some(t.norms[i].layout);
    let mut layouts = [
        Some(t.x.layout),
        matrix(q),
        vector(q).filter(|_| case.biases),
        matrix(k),
        vector(k).filter(|_| case.biases),
        matrix(v),
        vector(v).filter(|_| case.biases),
        of_norm(0),
        of_norm(1),
        case.logits.then_some(t.sinks.layout),
        Some(t.out_weight.layout),
        Some(t.out_bias.layout).filter(|_| case.biases),
    ];
    if case.packed {
        layouts[1] = matrix(q + k + v);
        layouts[2] = vector(q + k + v).filter(|_| case.biases);
        layouts[3..7].fill(None);
    }
    let mut tensors = [const { None }; 12];
    for (i, layout) in layouts.into_iter().enumerate() {
        tensors[i] = layout.filter(|_| wanted(i)).map(|layout| match i {
            0 => TestTensor::poisoned(t.x.dtype, layout).upload(ctx),
            9 if !call.packed.accumulate => TestTensor::poisoned(DType::F32, layout).upload(ctx),
            _ => before(layout).upload(ctx),
        });
    }
    {
        let mut views = tensors
            .each_mut()
            .map(|t| t.as_mut().map(DeviceTensor::view_mut));
        let mut view = |i: usize| views[i].take();
        let dx = view(0);
        let mut gradients = Gradients {
            dq_norm: view(7),
            dk_norm: view(8),
            dsinks: view(9),
            dout_weight: view(10),
            dout_bias: view(11),
            ..Gradients::default()
        };
        if case.packed {
            (gradients.dqkv_weight, gradients.dqkv_bias) = (view(1), view(2));
        } else {
            (gradients.dq_weight, gradients.dq_bias) = (view(1), view(2));
            (gradients.dk_weight, gradients.dk_bias) = (view(3), view(4));
            (gradients.dv_weight, gradients.dv_bias) = (view(5), view(6));
        }
        let mut params = Params {
            forward: call.forward(Output::none()),
            qkv: kept[0].map(DeviceTensor::view),
            attended: kept[1].map(DeviceTensor::view),
            lse: kept[2].map(DeviceTensor::view),
            dout: call.dout.view(),
            dx,
            gradients,
            accumulate: call.packed.accumulate,
            workspace: Workspace::none(),
        };
        attention_block::backward::supported(ctx, &params).unwrap();
        let size = attention_block::backward::workspace_size(ctx, &params).unwrap();
        with_workspace(ctx, "attention_block_backward", size, |workspace| {
            params.workspace = workspace;
            attention_block::backward(ctx, &params, Stream::DEFAULT)
        });
    }
    tensors.map(|t| t.map(|t| t.download_output()))
}

/// What of a packed gradient is of queries, of keys and of values.
fn unpacked(packed: &Packed, gradients: &[Option<TestTensor>; 12]) -> [Option<Vec<f64>>; 12] {
    let mut values = gradients
        .each_ref()
        .map(|t| t.as_ref().map(TestTensor::values));
    if packed.case.packed {
        for (first, width) in [(1, HIDDEN), (2, 1)] {
            let Some(all) = values[first].take() else {
                continue;
            };
            let mut start = 0;
            for (i, rows) in packed.columns().into_iter().enumerate() {
                let end = start + rows * width;
                values[first + 2 * i] = Some(all[start..end].to_vec());
                start = end;
            }
        }
    }
    values
}

fn listed(g: Expected, start: f64) -> [Vec<f64>; 12] {
    let add = |g: Vec<f64>| g.into_iter().map(|g| g + start).collect();
    let [(a, b), (c, d), (e, f)] = g.projections.map(|(w, b)| (add(w), add(b)));
    let [q_norm, k_norm] = g.norms.map(add);
    let (weight, bias) = g.out;
    [
        g.dx,
        a,
        b,
        c,
        d,
        e,
        f,
        q_norm,
        k_norm,
        add(g.sinks),
        add(weight),
        add(bias),
    ]
}

fn check(ctx: &Context, dtype: DType, packed: &Packed) {
    let call = Call::new(ctx, dtype, packed);
    let (out, kept) = forward(ctx, &call);
    // The output is that of a call that keeps nothing.
    let mut plain_out = TestTensor::poisoned(dtype, out.layout).upload(ctx);
    let mut params = call.forward(Output::Write(plain_out.view_mut()));
    let size = attention_block::workspace_size(ctx, &params).unwrap();
    let mut workspace = poisoned_workspace(ctx, size);
    params.workspace = workspace.workspace();
    attention_block::forward(ctx, &params, Stream::DEFAULT).unwrap();
    assert_same(ctx, &out, &plain_out.download_output());

    // Of parameters, gradients have their dtype or f32.
    let wide = packed.accumulate || dtype == DType::Bf16;
    let grad_dtype = if wide {
        DType::F32
    } else {
        packed.case.weight_dtype.unwrap_or(dtype)
    };
    let before = |layout: Layout| match packed.accumulate {
        true => TestTensor::from_values(grad_dtype, layout, &vec![0.25; layout.num_elements()]),
        false => TestTensor::poisoned(grad_dtype, layout),
    };
    let [qkv, attended, lse] = kept.0.each_ref().map(Some);
    let all = |kept| backward(ctx, &call, kept, &|_| true, &before);
    let got = all([qkv, attended, lse]);
    let bits = |t: &Option<TestTensor>| t.as_ref().map(TestTensor::bits);
    for kept in [[qkv, None, None], [None, attended, lse], [None; 3]] {
        let again = all(kept);
        for (i, (got, again)) in got.iter().zip(&again).enumerate() {
            let there = kept.map(|t| t.is_some());
            assert!(
                bits(got) == bits(again),
                "{}: other bits with {there:?}",
                NAMES[i]
            );
        }
    }

    let (x, dout) = (call.t.x.download().values(), call.dout.download().values());
    let (block, lens) = (call.reference(), packed.sequences());
    let start = if packed.accumulate { 0.25 } else { 0.0 };
    let apart = !packed.case.packed;
    let run = |arithmetic| block.backward((&x, &dout), &lens, arithmetic, apart);
    let exact = listed(run(Arithmetic::Exact), start);
    let terms = run(Arithmetic::Stored(dtype)).terms;
    // Roundings of few elements may cancel by chance: the worse of two ways to round counts.
    let others = [Arithmetic::Plain(dtype), Arithmetic::Stored(dtype)];
    let others = others.map(|arithmetic| listed(run(arithmetic), start));
    let plain = |i: usize, of: DType| -> Vec<f64> {
        let [a, b] = others.each_ref().map(|all| rounded(of, &all[i]));
        let worse = |((a, b), exact): ((f64, f64), &f64)| {
            if (a - exact).abs() < (b - exact).abs() {
                b
            } else {
                a
            }
        };
        a.into_iter().zip(b).zip(&exact[i]).map(worse).collect()
    };
    for (i, got) in unpacked(packed, &got).into_iter().enumerate() {
        let Some(got) = got else {
            let optional = match i {
                7 | 8 => packed.case.norm == Norm::None,
                9 => !packed.case.logits,
                _ => i > 0 && i % 2 == 0 && i < 7 || i == 11,
            };
            assert!(optional, "{} is missing", NAMES[i]);
            continue;
        };
        let of = match i {
            0 => dtype,
            9 => DType::F32,
            _ => grad_dtype,
        };
        let depth = if i == 0 {
            packed.columns().iter().sum()
        } else {
            packed.num_tokens()
        };
        let most = terms[i].max(cut_off(ctx, dtype, depth, &exact[i]));
        assert_gradient_rule(NAMES[i], of, &got, &exact[i], &plain(i, of), most);
    }
}

#[test]
fn agrees_with_its_definition() {
    for ctx in contexts() {
        for dtype in FLOATS {
            crate::common::for_each_case(&cases(), |case| check(&ctx, dtype, case));
        }
    }
}

/// Each gradient alone has the bits that it has among all.
#[test]
fn a_gradient_does_not_depend_on_what_else_is_asked_for() {
    for ctx in contexts() {
        for (packed, norm) in [(false, Norm::Heads), (true, Norm::None)] {
            let case = Case {
                packed,
                norm,
                biases: true,
                logits: true,
                ..PLAIN
            };
            let call = Call::new(&ctx, DType::F32, &Packed { case, ..NOT_PACKED });
            let (_, kept) = forward(&ctx, &call);
            let kept = kept.0.each_ref().map(Some);
            let poisoned = |layout| TestTensor::poisoned(DType::F32, layout);
            let run = |kept, wanted: &dyn Fn(usize) -> bool| {
                backward(&ctx, &call, kept, wanted, &poisoned).map(|t| t.map(|t| t.bits()))
            };
            let all = run(kept, &|_| true);
            for i in (0..12).filter(|i| all[*i].is_some()) {
                for kept in [kept, [None; 3]] {
                    assert!(run(kept, &|j| i == j)[i] == all[i], "{packed} {}", NAMES[i]);
                }
            }
        }
    }
}

/// The reference is the derivative of the forward's, along any direction, by differences.
#[test]
fn the_reference_is_the_derivative_of_the_forwards() {
    let ctx = &contexts()[0];
    for norm in [Norm::Heads, Norm::All, Norm::None] {
        let case = Case {
            norm,
            biases: true,
            logits: true,
            tokens: &[8],
            ..PLAIN
        };
        let packed = Packed {
            case,
            lens: &[3, 5],
            ..NOT_PACKED
        };
        let call = Call::new(ctx, DType::F32, &packed);
        let (x, dout) = (call.t.x.download().values(), call.dout.download().values());
        let (block, lens) = (call.reference(), packed.sequences());
        let g = block.backward((&x, &dout), &lens, Arithmetic::Exact, false);
        let along = Call::new(ctx, DType::F32, &packed);
        let (vx, v) = (along.t.x.download().values(), along.reference());
        let moved = |a: &[f64], v: &[f64], h: f64| -> Vec<f64> {
            a.iter().zip(v).map(|(a, v)| a + h * v).collect()
        };
        let optional = |a: &Option<Vec<f64>>, v: &Option<Vec<f64>>, h: f64| {
            a.as_ref().zip(v.as_ref()).map(|(a, v)| moved(a, v, h))
        };
        let layer = |a: &Layer, v: &Layer, h: f64| Layer {
            weight: moved(&a.weight, &v.weight, h),
            bias: optional(&a.bias, &v.bias, h),
        };
        let loss = |h: f64| {
            let mut at = block.clone();
            at.projections = [0, 1, 2].map(|i| layer(&block.projections[i], &v.projections[i], h));
            at.norms = [0, 1].map(|i| optional(&block.norms[i], &v.norms[i], h));
            at.options.sinks = optional(&block.options.sinks, &v.options.sinks, h);
            at.out = layer(&block.out, &v.out, h);
            let out = at.forward(&moved(&x, &vx, h), &lens, Arithmetic::Exact).out;
            out.iter().zip(&dout).map(|(a, b)| a * b).sum::<f64>()
        };
        let h = 1e-5;
        let difference = (loss(h) - loss(-h)) / (2.0 * h);
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let of_layer = |(weight, bias): &(Vec<f64>, Vec<f64>), v: &Layer| {
            dot(weight, &v.weight) + dot(bias, v.bias.as_ref().unwrap())
        };
        let mut derivative = dot(&g.dx, &vx) + of_layer(&g.out, &v.out);
        for i in 0..3 {
            derivative += of_layer(&g.projections[i], &v.projections[i]);
        }
        for (g, v) in g.norms.iter().zip(&v.norms) {
            derivative += v.as_ref().map_or(0.0, |v| dot(g, v));
        }
        derivative += dot(&g.sinks, v.options.sinks.as_ref().unwrap());
        let error = (difference - derivative).abs();
        assert!(
            error < 1e-6 * derivative.abs().max(100.0),
            "{difference} {derivative}"
        );
    }
}

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;

/// Spoils the forward's arguments.
fn spoil(
    p: &mut unsloth_attention_block_backward_params,
    change: fn(&mut unsloth_attention_block_params),
) {
    // SAFETY: those of the good arguments, which live as long as the test.
    let mut forward = unsafe { *p.forward };
    change(&mut forward);
    p.forward = Box::leak(Box::new(forward));
}

/// Three tokens of six components, two query heads and one key head of four, a norm of queries,
/// five components of the output.
const MISUSE: &[Misuse<unsloth_attention_block_backward_params>] = &[
    (
        |p| p.forward = std::ptr::null(),
        UNSLOTH_STATUS_NULL_POINTER,
        "attention_block_backward: forward is NULL",
    ),
    (
        |p| spoil(p, |f| f.struct_size = 8),
        INVALID,
        "attention_block_backward: forward.struct_size is 8, at least 3600 is needed",
    ),
    (
        |p| spoil(p, |f| f.cache = std::ptr::without_provenance_mut(0x7777)),
        INVALID,
        "attention_block_backward: forward.cache is there: the backward pass is of attention without a cache",
    ),
    (
        |p| spoil(p, |f| f.num_heads = 0),
        INVALID,
        "attention_block_backward: num_heads is 0 (not set), allowed: 1 to 1048576",
    ),
    (
        |p| spoil(p, |f| f.rotate = 2),
        INVALID,
        "attention_block_backward: rotate is 2, allowed: 0, 1",
    ),
    (
        |p| spoil(p, |f| f.softcap = -1.0),
        INVALID,
        "attention_block_backward: softcap is -1, at least 0 is needed",
    ),
    (
        |p| spoil(p, |f| f.norm_epsilon = 0.0),
        INVALID,
        "attention_block_backward: norm_epsilon is 0, it must be above 0",
    ),
    (
        |p| spoil(p, |f| f.q_norm.shape[0] = 3),
        INVALID,
        "attention_block_backward: q_norm has shape [3], allowed: [4] or [8]",
    ),
    (
        |p| spoil(p, |f| f.k_weight.shape[1] = 5),
        INVALID,
        "attention_block_backward: k_weight has shape [4, 5], expected [4, 6]",
    ),
    (
        |p| spoil(p, |f| f.x.rank = 1),
        INVALID,
        "attention_block_backward: x has rank 1, allowed: 2, 3",
    ),
    (
        |p| p.accumulate = 2,
        INVALID,
        "attention_block_backward: accumulate is 2, allowed: 0, 1",
    ),
    (
        |p| p.dout = absent(),
        INVALID,
        "attention_block_backward: dout is absent (rank 0), it is required",
    ),
    (
        |p| p.dout.shape[1] = 6,
        INVALID,
        "attention_block_backward: dout has shape [3, 6], expected [3, 5]",
    ),
    (
        |p| p.dout.dtype = DType::F16 as u32,
        INVALID,
        "attention_block_backward: dout has dtype f16, x has f32",
    ),
    (
        |p| p.qkv.shape[1] = 12,
        INVALID,
        "attention_block_backward: qkv has shape [3, 12], expected [3, 16]",
    ),
    (
        |p| p.qkv.strides[0] = 17,
        INVALID,
        "attention_block_backward: qkv has shape [3, 16] with strides [17, 1], it must be contiguous",
    ),
    (
        |p| p.attended = absent(),
        INVALID,
        "attention_block_backward: lse is there without attended",
    ),
    (
        |p| p.lse = absent(),
        INVALID,
        "attention_block_backward: attended is there without lse",
    ),
    (
        |p| p.lse.shape = [3, 2, 0, 0, 0, 0],
        INVALID,
        "attention_block_backward: lse has shape [3, 2], expected [2, 3]",
    ),
    (
        |p| p.lse.dtype = DType::Bf16 as u32,
        INVALID,
        "attention_block_backward: lse has dtype bf16, allowed: f32",
    ),
    (
        |p| p.dx.shape[1] = 5,
        INVALID,
        "attention_block_backward: dx has shape [3, 5], x has [3, 6]",
    ),
    (
        |p| p.dq_weight.shape[0] = 4,
        INVALID,
        "attention_block_backward: dq_weight has shape [4, 6], expected [8, 6]",
    ),
    (
        |p| p.dv_bias = p.dq_norm,
        INVALID,
        "attention_block_backward: dv_bias is there, without v_bias it has no use",
    ),
    (
        |p| p.dqkv_weight = p.dq_weight,
        INVALID,
        "attention_block_backward: dqkv_weight is there, without qkv_weight it has no use",
    ),
    (
        |p| p.dk_norm = p.dq_norm,
        INVALID,
        "attention_block_backward: dk_norm is there, without k_norm it has no use",
    ),
    (
        |p| p.dsinks = p.dq_norm,
        INVALID,
        "attention_block_backward: dsinks is there, without sinks it has no use",
    ),
    (
        |p| {
            spoil(p, |f| {
                f.sinks = f.out_bias;
                f.sinks.shape[0] = 2;
            });
            p.dsinks = p.dq_norm;
            p.dsinks.shape[0] = 2;
            p.dsinks.dtype = DType::F16 as u32;
        },
        INVALID,
        "attention_block_backward: dsinks has dtype f16, allowed: f32",
    ),
    (
        |p| {
            p.accumulate = 1;
            p.dq_norm.dtype = DType::Bf16 as u32;
        },
        INVALID,
        "attention_block_backward: dq_norm has dtype bf16, allowed with accumulate: f32",
    ),
    (
        |p| {
            (p.dx, p.dq_weight, p.dq_norm) = (absent(), absent(), absent());
            p.dout_weight = absent();
        },
        INVALID,
        "attention_block_backward: dx is absent, as are all other gradients: nothing is asked for",
    ),
    (
        |p| p.dx.data = p.dout.data,
        INVALID,
        "attention_block_backward: dx overlaps dout",
    ),
    (
        |p| p.dq_weight.data = p.qkv.data,
        INVALID,
        "attention_block_backward: dq_weight overlaps qkv",
    ),
    (
        |p| p.workspace_size = 255,
        UNSLOTH_STATUS_WORKSPACE_TOO_SMALL,
        "attention_block_backward: workspace_size is 255 bytes, 1152 are required",
    ),
    (
        |p| p.workspace = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "attention_block_backward: workspace is NULL",
    ),
    (
        |p| p.attended.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "attention_block_backward: data of attended is NULL",
    ),
    // What only the data tells is found before anything is written.
    (
        |p| {
            spoil(p, |f| {
                f.cu_seqlens = f.out_bias;
                f.cu_seqlens.dtype = DType::I32 as u32;
            });
        },
        INVALID,
        "attention_block_backward: cu_seqlens has 7 at index 1, allowed: 0 to the 3 tokens of q",
    ),
];

#[test]
fn misuse_is_refused_and_writes_nothing() {
    let memory = &contexts()[0];
    let contiguous = |shape: &[usize]| Layout::contiguous(shape).unwrap();
    let input = |shape: &[usize]| {
        TestTensor::normal(&mut rng(), DType::F32, contiguous(shape)).upload(memory)
    };
    let output =
        |shape: &[usize]| TestTensor::poisoned(DType::F32, contiguous(shape)).upload(memory);
    let (x, q, k, v) = (
        input(&[3, 6]),
        input(&[8, 6]),
        input(&[4, 6]),
        input(&[4, 6]),
    );
    let (out, norm, dout) = (input(&[5, 8]), input(&[4]), input(&[3, 5]));
    let starts = TestTensor::of(DType::I32, &[5], &[0.0, 7.0, 3.0, 3.0, 3.0]).upload(memory);
    let (qkv, attended, lse) = (input(&[3, 16]), input(&[3, 8]), input(&[2, 3]));
    let (dx, dq, dnorm, d_out) = (
        output(&[3, 6]),
        output(&[8, 6]),
        output(&[4]),
        output(&[5, 8]),
    );
    let workspace = output(&[1024]);
    // SAFETY: integers, floats and pointers, size first.
    let mut forward: unsloth_attention_block_params = unsafe { abi::zeroed_params() };
    (forward.num_heads, forward.num_kv_heads, forward.head_dim) = (2, 1, 4);
    (forward.x, forward.q_weight) = (c_tensor(&x), c_tensor(&q));
    (forward.k_weight, forward.v_weight) = (c_tensor(&k), c_tensor(&v));
    (forward.out_weight, forward.q_norm) = (c_tensor(&out), c_tensor(&norm));
    forward.norm_epsilon = 1e-5;
    // A bias that no gradient needs stands for starts of sequences.
    forward.out_bias = c_tensor(&starts);
    forward.out_bias.dtype = DType::F32 as u32;
    // SAFETY: as above.
    let mut good: unsloth_attention_block_backward_params = unsafe { abi::zeroed_params() };
    good.forward = &forward;
    (good.qkv, good.attended) = (c_tensor(&qkv), c_tensor(&attended));
    (good.lse, good.dout, good.dx) = (c_tensor(&lse), c_tensor(&dout), c_tensor(&dx));
    (good.dq_weight, good.dq_norm) = (c_tensor(&dq), c_tensor(&dnorm));
    good.dout_weight = c_tensor(&d_out);
    (good.workspace, good.workspace_size) = (workspace.data(), 4096);
    let operation = Operation {
        name: "attention_block_backward",
        supported: unsloth_attention_block_backward_supported,
        forward: unsloth_attention_block_backward,
    };
    operation.check(good, MISUSE, &[&dx, &dq, &dnorm, &d_out]);
}
