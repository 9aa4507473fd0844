//! QK-norm and RoPE in one pass, and their gradients, against their definition, which is proved by
//! differences of the forward: styles, layouts, dtypes, features.

use crate::common::reference::qk_norm_rope::QkNorm;
use crate::common::reference::rope::Shape;
use crate::common::tensor::{strided_rows, transposed};
use crate::common::{
    DeviceTensor, FLOATS, TestTensor, assert_flash_rule_of_sums, assert_gradient_rule, contexts,
    contiguous, for_each_case, in_out, rng, rounded,
};
use unsloth::ops::qk_norm_rope::{self, backward};
use unsloth::ops::rope::{Angles, Positions, Rotation, Scaling, Style, inverse_frequencies};
use unsloth::{Buffer, Context, ContextOptions, DType, InOut, Layout, Stream, Workspace};

#[derive(Clone, Copy, Debug)]
enum Where {
    From(i64),
    /// Given per token, in a tensor of this dtype and layout.
    Tensor(DType, Layout),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Source {
    Plain,
    Yarn,
    Factors,
    Table,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    /// Of q and of k.
    layouts: [Option<Layout>; 2],
    style: Style,
    rotary_dim: usize,
    positions: Where,
    source: Source,
    /// Dtypes of the gains of q and of k.
    weights: [Option<DType>; 2],
    weight_offset: f32,
    /// The gains' gradients: none, overwritten in a dtype, or accumulated.
    gradients: Option<(DType, bool)>,
    in_place: bool,
    skew: usize,
}

const EPSILON: f32 = 1e-5;
const YARN: Scaling = Scaling::Yarn {
    factor: 4.0,
    original_max_positions: 512,
    beta_fast: 0.0,
    beta_slow: 0.0,
    extrapolation_factor: 0.0,
    fractional_ramp: false,
};

fn cases(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    let mut push = |layouts: [Option<Layout>; 2], rotary_dim: usize| {
        for style in [Style::HalfSplit, Style::Interleaved] {
            // What does not depend on the shape takes turns.
            let turn = cases.len();
            let first = layouts[0].or(layouts[1]).unwrap();
            let tokens = contiguous(&first.shape()[..first.rank() - 2]);
            let of_half = if turn % 2 == 0 { DType::F32 } else { dtype };
            let weights = match turn / 2 % 4 {
                0 => [None, None],
                1 => [Some(of_half), Some(dtype)],
                2 => [Some(dtype), Some(DType::F32)],
                _ => [None, Some(of_half)],
            }
            .map(|weight| weight.filter(|_| turn % 11 > 0));
            let there = [0, 1].map(|i| layouts[i].is_some());
            let weights = [0, 1].map(|i| weights[i].filter(|_| there[i]));
            cases.push(Case {
                layouts,
                style,
                rotary_dim,
                positions: match turn % 5 {
                    0 => Where::From(0),
                    1 => Where::From(77),
                    2 => Where::Tensor(DType::I32, tokens),
                    3 => Where::Tensor(DType::I64, tokens),
                    _ => Where::From(900),
                },
                source: match turn % 7 {
                    0 => Source::Yarn,
                    2 => Source::Factors,
                    3 | 5 => Source::Table,
                    _ => Source::Plain,
                },
                weights,
                weight_offset: match weights {
                    [None, None] => 0.0,
                    _ => [0.0, 1.0][turn / 2 % 2],
                },
                gradients: match turn % 3 {
                    0 => Some((DType::F32, turn % 2 == 0)),
                    1 => Some((dtype, false)),
                    _ => None,
                },
                in_place: turn / 2 % 2 == 0,
                skew: usize::from(turn % 6 > 3),
            });
        }
    };
    let pair = |q: &[usize], k: &[usize]| [Some(contiguous(q)), Some(contiguous(k))];
    for rotary_dim in [0, 2, 6, 8, 14, 16] {
        push(pair(&[2, 3, 4, 16], &[2, 3, 2, 16]), rotary_dim);
    }
    // Heads that a GPU has one, two, and up to all threads of a warp for, and some between.
    for (head_dim, rotary_dim) in [
        (2, 0),
        (18, 0),
        (24, 0),
        (64, 0),
        (80, 64),
        (96, 32),
        (128, 0),
        (256, 64),
        (256, 0),
        (512, 0),
    ] {
        push(pair(&[3, 5, head_dim], &[3, 1, head_dim]), rotary_dim);
    }
    // More tokens than a part of the sums has, and more heads than a block.
    push(pair(&[2, 35, 9, 16], &[2, 35, 3, 16]), 0);
    push(pair(&[3, 40, 64], &[3, 8, 64]), 0);
    for q in [
        contiguous(&[1, 1, 2]),
        contiguous(&[0, 3, 8]),
        contiguous(&[7, 0, 8]),
        contiguous(&[2, 0, 1, 8]),
        strided_rows(&[3, 5, 18], 3),
        strided_rows(&[3, 5, 32], 8),
        transposed(&[2, 5, 3, 20], 1, 2),
        strided_rows(&[3, 5, 128], 8),
        strided_rows(&[3, 5, 128], 4),
        transposed(&[2, 5, 3, 64], 1, 2),
    ] {
        push([Some(q), None], 0);
        push([None, Some(q)], 0);
    }
    // More tokens than a GPU has warps for each of them, and more heads than a warp has at a time.
    push(pair(&[2, 1100, 1, 64], &[2, 1100, 1, 64]), 0);
    push(pair(&[2, 9, 21, 128], &[2, 9, 5, 128]), 0);
    cases
}

/// What is rotated by which angles, on the host and on a device.
struct Turns {
    /// `rotary_dim / 2` for each token.
    angles: Vec<f64>,
    scale: f64,
    positions: Option<DeviceTensor>,
    factors: Option<DeviceTensor>,
    tables: Option<[DeviceTensor; 2]>,
}

fn turns(ctx: &Context, case: &Case, tokens: &[usize], rotary_dim: usize) -> Turns {
    let rng = &mut rng();
    let half = rotary_dim / 2;
    let count: usize = tokens.iter().product();
    let (tensor, positions) = match case.positions {
        Where::From(offset) => {
            let seq = tokens[tokens.len() - 1];
            let position = |i: usize| offset + (i % seq) as i64;
            (None, (0..count).map(position).collect::<Vec<_>>())
        }
        Where::Tensor(dtype, layout) => {
            let tensor = TestTensor::integers(rng, dtype, layout, 500);
            let values = tensor.values().iter().map(|v| *v as i64).collect();
            (Some(tensor.upload(ctx)), values)
        }
    };
    let mut turns = Turns {
        angles: Vec::new(),
        scale: 1.0,
        positions: tensor,
        factors: None,
        tables: None,
    };
    // Angles as the operation defines them: f32 products of f32 frequencies, or the table's.
    let products = |frequencies: &[f32]| -> Vec<f64> {
        let of = |p: &i64| {
            let p = *p as f32;
            frequencies
                .iter()
                .map(move |f| f64::from(p * f))
                .collect::<Vec<_>>()
        };
        positions.iter().flat_map(of).collect()
    };
    let scaling = match case.source {
        Source::Yarn => YARN,
        _ => Scaling::None,
    };
    let (frequencies, own) = inverse_frequencies(0.0, scaling, rotary_dim).unwrap();
    match case.source {
        Source::Plain | Source::Yarn => {
            turns.scale = own.into();
            turns.angles = products(&frequencies);
        }
        Source::Factors => {
            let values: Vec<f64> = (0..half).map(|i| 1.0 + i as f64).collect();
            let divided = frequencies.iter().zip(&values).map(|(f, v)| f / *v as f32);
            turns.angles = products(&divided.collect::<Vec<_>>());
            turns.factors = Some(TestTensor::of(DType::F32, &[half], &values).upload(ctx));
        }
        Source::Table => {
            let rows = positions.iter().max().map_or(1, |p| p + 1) as usize;
            let layout = strided_rows(&[rows, half], 3);
            let angles = TestTensor::normal(rng, DType::F32, layout).values();
            turns.tables = Some([f64::cos, f64::sin].map(|f| {
                let values: Vec<f64> = angles.iter().map(|a| f(*a)).collect();
                TestTensor::from_values(DType::F32, layout, &values).upload(ctx)
            }));
            let row = |p: &i64| angles[*p as usize * half..][..half].to_vec();
            turns.angles = positions.iter().flat_map(row).collect();
        }
    }
    turns
}

impl Turns {
    fn positions(&self, case: &Case) -> Positions<'_> {
        match (case.positions, &self.positions) {
            (Where::From(offset), _) => Positions::From(offset),
            (_, Some(tensor)) => Positions::PerToken(tensor.view()),
            _ => unreachable!(),
        }
    }

    fn rotation(&self, case: &Case) -> Rotation<'_> {
        let angles = match &self.tables {
            Some([cos, sin]) => Angles::Table {
                cos: cos.view(),
                sin: sin.view(),
            },
            None => Angles::Computed {
                theta: 0.0,
                scaling: match case.source {
                    Source::Yarn => YARN,
                    _ => Scaling::None,
                },
                freq_factors: self.factors.as_ref().map(DeviceTensor::view),
                attention_factor: 0.0,
            },
        };
        Rotation {
            style: case.style,
            rotary_dim: case.rotary_dim,
            angles,
        }
    }
}

fn poisoned(ctx: &Context, size: usize) -> Buffer {
    let buffer = Buffer::from_slice(ctx, &vec![f32::NAN; size / 4]).unwrap();
    assert_eq!(buffer.size(), size);
    buffer
}

/// Both passes of a case, of random numbers: each result with what judges it.
fn check(ctx: &Context, dtype: DType, case: &Case) {
    let rng = &mut rng();
    let first = case.layouts[0].or(case.layouts[1]).unwrap();
    let (tokens, head_dim) = (
        &first.shape()[..first.rank() - 2],
        first.dim(first.rank() - 1),
    );
    let rotary_dim = match case.rotary_dim {
        0 => head_dim,
        n => n,
    };
    let turns = turns(ctx, case, tokens, rotary_dim);
    let row = contiguous(&[head_dim]);
    let mut random = || {
        case.layouts.map(|layout| {
            let layout = layout?;
            let mut t = TestTensor::poisoned_at(dtype, layout, case.skew);
            t.set_values(&TestTensor::normal(rng, dtype, layout).values());
            Some(t)
        })
    };
    let (x, dout) = (random(), random());
    let weights = case.weights.map(|d| Some(TestTensor::normal(rng, d?, row)));
    let held = case.weights.map(|weight| {
        let (d, accumulate) = case.gradients.filter(|_| weight.is_some())?;
        Some(match accumulate {
            true => TestTensor::normal(rng, d, row),
            false => TestTensor::poisoned(d, row),
        })
    });

    let upload = |all: &[Option<TestTensor>; 2]| -> [Option<DeviceTensor>; 2] {
        all.each_ref().map(|t| t.as_ref().map(|t| t.upload(ctx)))
    };
    let blank = || {
        case.layouts
            .map(|layout| Some(TestTensor::poisoned_at(dtype, layout?, case.skew).upload(ctx)))
    };
    let (there_x, there_weights) = (upload(&x), upload(&weights));
    let (mut from, mut to) = (upload(&x), blank());
    let [q, k] = in_outs(case.in_place, &mut from, &mut to);
    let params = qk_norm_rope::Params {
        q,
        k,
        q_weight: there_weights[0].as_ref().map(DeviceTensor::view),
        k_weight: there_weights[1].as_ref().map(DeviceTensor::view),
        weight_offset: case.weight_offset,
        epsilon: EPSILON,
        positions: turns.positions(case),
        rotation: turns.rotation(case),
    };
    qk_norm_rope::supported(ctx, &params).unwrap();
    qk_norm_rope::forward(ctx, &params, Stream::DEFAULT).unwrap();
    let outputs = if case.in_place { from } else { to };

    let (mut from, mut to, mut sums) = (upload(&dout), blank(), upload(&held));
    let [dq_out, dk_out] = in_outs(case.in_place, &mut from, &mut to);
    let [dq_weight, dk_weight] = sums
        .each_mut()
        .map(|t| t.as_mut().map(DeviceTensor::view_mut));
    let mut params = backward::Params {
        q: there_x[0].as_ref().map(DeviceTensor::view),
        dq_out,
        k: there_x[1].as_ref().map(DeviceTensor::view),
        dk_out,
        q_weight: there_weights[0].as_ref().map(DeviceTensor::view),
        k_weight: there_weights[1].as_ref().map(DeviceTensor::view),
        weight_offset: case.weight_offset,
        epsilon: EPSILON,
        positions: turns.positions(case),
        rotation: turns.rotation(case),
        dq_weight,
        dk_weight,
        accumulate: case.gradients.is_some_and(|(_, accumulate)| accumulate),
        workspace: Workspace::none(),
    };
    let mut memory = poisoned(ctx, backward::workspace_size(ctx, &params).unwrap());
    params.workspace = memory.workspace();
    backward::supported(ctx, &params).unwrap();
    qk_norm_rope::backward(ctx, &params, Stream::DEFAULT).unwrap();
    let gradients = if case.in_place { from } else { to };

    for i in 0..2 {
        let (Some(x), Some(dout)) = (&x[i], &dout[i]) else {
            continue;
        };
        let weight = weights[i].as_ref().map(TestTensor::values);
        let of = QkNorm {
            shape: Shape {
                heads: x.layout.dim(x.layout.rank() - 2),
                head_dim,
                rotary_dim,
                interleaved: case.style == Style::Interleaved,
            },
            angles: &turns.angles,
            scale: turns.scale,
            weight: weight.as_deref(),
            weight_offset: weight.as_ref().map_or(0.0, |_| case.weight_offset.into()),
            epsilon: EPSILON.into(),
        };
        let (x, dout) = (x.values(), dout.values());
        let out = outputs[i].as_ref().unwrap().download_output();
        let plain = of.plain_forward(dtype, &x);
        let expected = of.forward(&x);
        let most = |terms: &[f64]| terms.iter().fold(0.0, |most: f64, t| most.max(t.abs()));
        // Of a head of two components the plain result may happen to be exact.
        let terms = 2.0 * most(&expected);
        assert_flash_rule_of_sums("out", dtype, &out.values(), &expected, &plain, terms);

        let wanted = of.backward(&x, &dout);
        let (plain, plain_sums) = of.plain_backward(dtype, &x, &dout);
        let dx = gradients[i].as_ref().unwrap().download_output();
        let terms = most(&wanted.dx_terms);
        assert_gradient_rule("dx", dtype, &dx.values(), &wanted.dx, &plain, terms);
        let (Some(got), Some(held)) = (&sums[i], &held[i]) else {
            continue;
        };
        let (got, mut terms) = (got.download_output(), most(&wanted.dweight_terms));
        // What is added to is a term, too, and may cancel the others.
        let accumulate = case.gradients.is_some_and(|(_, accumulate)| accumulate);
        if accumulate {
            terms += most(&held.values());
        }
        let add = |sums: Vec<f64>| match accumulate {
            true => sums.iter().zip(held.values()).map(|(a, b)| a + b).collect(),
            false => sums,
        };
        let (wanted, plain) = (add(wanted.dweight), rounded(got.dtype, &add(plain_sums)));
        assert_gradient_rule("dweight", got.dtype, &got.values(), &wanted, &plain, terms);
    }
}

/// Queries and keys with their outputs.
fn in_outs<'a>(
    in_place: bool,
    [q, k]: &'a mut [Option<DeviceTensor>; 2],
    [q_out, k_out]: &'a mut [Option<DeviceTensor>; 2],
) -> [Option<InOut<'a>>; 2] {
    let pair = |from: &'a mut Option<DeviceTensor>, to: &'a mut Option<DeviceTensor>| {
        Some(in_out(in_place, from.as_mut()?, to.as_mut()?))
    };
    [pair(q, q_out), pair(k, k_out)]
}

#[test]
fn agrees_with_its_definition() {
    for ctx in contexts() {
        for dtype in FLOATS {
            for_each_case(&cases(dtype), |case| check(&ctx, dtype, case));
        }
    }
}

/// The reference's gradients are the forward's differences along random directions.
#[test]
fn the_definition_is_the_forwards_derivative() {
    const STEP: f64 = 1e-5;
    let rng = &mut rng();
    let (tokens, heads, head_dim, rotary_dim) = (3, 2, 10, 6);
    let count = tokens * heads * head_dim;
    for (interleaved, weight_offset, scale) in
        [(false, 0.0, 1.0), (true, 1.0, 1.0), (false, 1.0, 1.25)]
    {
        let mut random = |n| TestTensor::normal(rng, DType::F32, contiguous(&[n])).values();
        let (x, dout, weight) = (random(count), random(count), random(head_dim));
        let (along_x, along_weight) = (random(count), random(head_dim));
        let angles = random(tokens * rotary_dim / 2);
        let moved = |from: &[f64], along: &[f64], step: f64| -> Vec<f64> {
            from.iter().zip(along).map(|(a, b)| a + step * b).collect()
        };
        let of = |weight: &[f64], f: &mut dyn FnMut(&QkNorm)| {
            f(&QkNorm {
                shape: Shape {
                    heads,
                    head_dim,
                    rotary_dim,
                    interleaved,
                },
                angles: &angles,
                scale,
                weight: Some(weight),
                weight_offset,
                epsilon: 1e-5,
            });
        };
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let loss = |step: f64| {
            let mut loss = 0.0;
            of(&moved(&weight, &along_weight, step), &mut |of| {
                loss = dot(&of.forward(&moved(&x, &along_x, step)), &dout);
            });
            loss
        };
        let difference = (loss(STEP) - loss(-STEP)) / (2.0 * STEP);
        let mut derivative = 0.0;
        of(&weight, &mut |of| {
            let gradients = of.backward(&x, &dout);
            derivative = dot(&gradients.dx, &along_x) + dot(&gradients.dweight, &along_weight);
        });
        assert!(
            (difference - derivative).abs() < 1e-7 * (1.0 + derivative.abs()),
            "{difference} {derivative}"
        );
    }
}

/// Outputs and gradients of heads `[tokens, heads, head_dim]` that begin at an element of a tensor: in
/// vectors or, where that is none, element by element.
fn bits(ctx: &Context, x: &TestTensor, dout: &TestTensor, skew: usize) -> [Vec<u8>; 3] {
    let dim = x.layout.dim(2);
    let at = |t: &TestTensor| {
        let mut moved = TestTensor::poisoned_at(t.dtype, t.layout, skew);
        moved.set_values(&t.values());
        moved.upload(ctx)
    };
    let (mut q, mut dq_out) = (at(x), at(dout));
    let weight = TestTensor::of(DType::F32, &[dim], &vec![0.75; dim]).upload(ctx);
    let mut dweight = TestTensor::poisoned(DType::F32, contiguous(&[dim])).upload(ctx);
    let mut out = TestTensor::poisoned_at(x.dtype, x.layout, skew).upload(ctx);
    let params = qk_norm_rope::Params {
        q: Some(in_out(false, &mut q, &mut out)),
        q_weight: Some(weight.view()),
        epsilon: EPSILON,
        ..Default::default()
    };
    qk_norm_rope::forward(ctx, &params, Stream::DEFAULT).unwrap();
    let mut params = backward::Params {
        q: Some(q.view()),
        dq_out: Some(InOut::InPlace(dq_out.view_mut())),
        k: None,
        dk_out: None,
        q_weight: Some(weight.view()),
        k_weight: None,
        weight_offset: 0.0,
        epsilon: EPSILON,
        positions: Positions::default(),
        rotation: Rotation::default(),
        dq_weight: Some(dweight.view_mut()),
        dk_weight: None,
        accumulate: false,
        workspace: Workspace::none(),
    };
    let mut memory = poisoned(ctx, backward::workspace_size(ctx, &params).unwrap());
    params.workspace = memory.workspace();
    qk_norm_rope::backward(ctx, &params, Stream::DEFAULT).unwrap();
    [out, dq_out, dweight].map(|t| t.download_output().bits())
}

/// The same inputs give the same bits: again, with any number of threads, and of heads also however
/// they are moved.
#[test]
fn the_same_inputs_give_the_same_bits() {
    let rng = &mut rng();
    let mut random =
        |dtype, shape: &[usize]| [0; 2].map(|_| TestTensor::normal(rng, dtype, contiguous(shape)));
    let [x, dout] = random(DType::F32, &[37, 5, 64]);
    // Those of 16 bits have kernels of their own on a GPU.
    let all = [
        [x.clone(), dout.clone()],
        random(DType::Bf16, &[37, 5, 64]),
        random(DType::Bf16, &[37, 7, 128]),
        random(DType::F16, &[37, 3, 256]),
    ];
    for ctx in contexts() {
        for [x, dout] in &all {
            let once = bits(&ctx, x, dout, 0);
            assert!(once == bits(&ctx, x, dout, 0));
            let moved = bits(&ctx, x, dout, 1);
            assert!(once[..2] == moved[..2], "{:?}", x.layout);
        }
    }
    let of_threads = |num_threads| {
        let options = ContextOptions {
            num_threads,
            ..Default::default()
        };
        bits(&Context::new(&options).unwrap(), &x, &dout, 0)
    };
    assert!(of_threads(1) == of_threads(3));
}
