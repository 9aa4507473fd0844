//! Gated activations against their definitions: layouts, dtypes, packed and apart; their
//! properties.

use crate::common::reference::swiglu::swiglu as exact;
use crate::common::tensor::{strided_rows, transposed};
use crate::common::{FLOATS, TestTensor, assert_close, contexts, in_out, rng};
use proptest::prelude::*;
use unsloth::ops::swiglu::{self, Activation, GateOrder, Params, Tensors};
use unsloth::{Context, DType, Layout, Stream};

const ACTIVATIONS: [Activation; 4] = [
    Activation::Silu,
    Activation::Gelu,
    Activation::GeluTanh,
    Activation::ReluSquared,
];

#[derive(Clone, Debug)]
enum Form {
    Apart { in_place: bool },
    Packed { order: GateOrder, gap: usize },
}

#[derive(Clone, Debug)]
struct Case {
    layout: Layout,
    form: Form,
    activation: Activation,
    skew: usize,
}

fn cases() -> Vec<Case> {
    let contiguous = |shape: &[usize]| Layout::contiguous(shape).unwrap();
    let mut cases = Vec::new();
    for layout in [
        contiguous(&[1]),
        contiguous(&[17]),
        contiguous(&[3, 7]),
        contiguous(&[2, 1536]),
        contiguous(&[2, 3, 2, 2, 2, 5]),
        contiguous(&[0, 8]),
        contiguous(&[4, 0]),
        contiguous(&[40, 1030]),
        strided_rows(&[5, 600], 3),
        transposed(&[3, 4, 33], 0, 1),
    ] {
        for activation in ACTIVATIONS {
            for form in [
                Form::Apart { in_place: false },
                Form::Apart { in_place: true },
                Form::Packed {
                    order: GateOrder::GateFirst,
                    gap: 0,
                },
                Form::Packed {
                    order: GateOrder::UpFirst,
                    gap: 5,
                },
            ] {
                let skew = usize::from(activation == Activation::Gelu);
                cases.push(Case {
                    layout,
                    form,
                    activation,
                    skew,
                });
            }
        }
    }
    cases
}

fn check(ctx: &Context, dtype: DType, case: &Case) {
    let rng = &mut rng();
    // Wide enough for the tails of every activation.
    let spread = |rng: &mut _, layout: Layout| {
        let values = TestTensor::normal(rng, DType::F32, layout).values();
        let values: Vec<f64> = values.iter().map(|x| 3.0 * x).collect();
        let mut t = TestTensor::poisoned_at(dtype, layout, case.skew);
        t.set_values(&values);
        t
    };
    let mut out = TestTensor::poisoned_at(dtype, case.layout, case.skew).upload(ctx);
    let run = |tensors| {
        let params = Params {
            tensors,
            activation: case.activation,
        };
        swiglu::supported(ctx, &params).unwrap();
        swiglu::forward(ctx, &params, Stream::DEFAULT).unwrap();
    };
    let (gate, up, out) = match case.form {
        Form::Apart { in_place } => {
            let (gate, up) = (spread(rng, case.layout), spread(rng, case.layout));
            let (mut device, up_device) = (gate.upload(ctx), up.upload(ctx));
            run(Tensors::Apart {
                gate: in_out(in_place, &mut device, &mut out),
                up: up_device.view(),
            });
            let out = if in_place { device } else { out };
            (gate.values(), up.values(), out)
        }
        Form::Packed { order, gap } => {
            let mut shape = case.layout.shape().to_vec();
            let dim = *shape.last().unwrap();
            *shape.last_mut().unwrap() *= 2;
            let packed = spread(rng, strided_rows(&shape, gap));
            let device = packed.upload(ctx);
            run(Tensors::Packed {
                gate_up: device.view(),
                order,
                out: out.view_mut(),
            });
            let values = packed.values();
            let half = |n: usize| -> Vec<f64> {
                let rows = values.chunks((2 * dim).max(1));
                rows.flat_map(|row| row[n * dim..(n + 1) * dim].to_vec())
                    .collect()
            };
            match order {
                GateOrder::UpFirst => (half(1), half(0), out),
                _ => (half(0), half(1), out),
            }
        }
    };
    let expected = exact(&gate, &up, case.activation);
    // An exponential, a division and two products; the argument of tanh reaches 100 in the tail,
    // and its rounding goes through the exponential.
    let ulps = match case.activation {
        Activation::GeluTanh => 256.0,
        _ => 12.0,
    };
    assert_close(
        "out",
        dtype,
        &out.download_output().values(),
        &expected,
        ulps,
    );
}

#[test]
fn agrees_with_its_definition() {
    for ctx in contexts() {
        for dtype in FLOATS {
            crate::common::for_each_case(&cases(), |case| check(&ctx, dtype, case));
        }
    }
}

/// One element through the operation.
fn activated(ctx: &Context, gate: f64, activation: Activation) -> f64 {
    let gate = TestTensor::of(DType::F32, &[1], &[gate]).upload(ctx);
    let up = TestTensor::of(DType::F32, &[1], &[1.0]).upload(ctx);
    let mut out = TestTensor::poisoned(DType::F32, up.layout).upload(ctx);
    let tensors = Tensors::Apart {
        gate: unsloth::InOut::Apart {
            input: gate.view(),
            output: out.view_mut(),
        },
        up: up.view(),
    };
    swiglu::forward(
        ctx,
        &Params {
            tensors,
            activation,
        },
        Stream::DEFAULT,
    )
    .unwrap();
    out.download_output().values()[0]
}

#[test]
fn extremes() {
    for ctx in contexts() {
        for activation in ACTIVATIONS {
            for (gate, expected) in [
                (0.0, 0.0),
                (200.0, 200.0),
                (3e38, f64::from(3e38f32)),
                (-200.0, 0.0),
                (f64::INFINITY, f64::INFINITY),
            ] {
                let y = activated(&ctx, gate, activation);
                let expected = match activation {
                    Activation::ReluSquared => f64::from((expected * expected) as f32),
                    _ => expected,
                };
                assert!(
                    y == expected,
                    "{activation:?}({gate}) is {y}, not {expected}"
                );
            }
            assert!(activated(&ctx, f64::NAN, activation).is_nan());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    /// A packed tensor gives the bits that its halves give apart.
    #[test]
    fn packed_equals_apart(
        (rows, dim) in (1usize..6, 1usize..700),
        activation in prop_oneof![Just(ACTIVATIONS[0]), Just(ACTIVATIONS[1]), Just(ACTIVATIONS[2]), Just(ACTIVATIONS[3])],
        up_first in any::<bool>(),
        dtype in prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::Bf16)],
    ) {
        for ctx in contexts() {
            let layout = Layout::contiguous(&[rows, 2 * dim]).unwrap();
            let packed = TestTensor::normal(&mut rng(), dtype, layout).upload(&ctx);
            let (gate, up) = if up_first { (dim, 0) } else { (0, dim) };
            let half = |start| packed.view().narrowed(1, start, dim).unwrap();
            let out_layout = Layout::contiguous(&[rows, dim]).unwrap();
            let mut outs = [(); 2].map(|()| TestTensor::poisoned(dtype, out_layout).upload(&ctx));
            let [apart, together] = &mut outs;
            let order = if up_first { GateOrder::UpFirst } else { GateOrder::GateFirst };
            for tensors in [
                Tensors::Apart {
                    gate: unsloth::InOut::Apart { input: half(gate), output: apart.view_mut() },
                    up: half(up),
                },
                Tensors::Packed { gate_up: packed.view(), order, out: together.view_mut() },
            ] {
                swiglu::forward(&ctx, &Params { tensors, activation }, Stream::DEFAULT).unwrap();
            }
            prop_assert_eq!(outs[0].download_output().bits(), outs[1].download_output().bits());
        }
    }

    /// Every activation is the identity minus its mirror image, `act(x) - act(-x) = x`; the squared one
    /// that of `x |x|`.
    #[test]
    fn activations_are_gates(x in -20.0f32..20.0) {
        for ctx in contexts() {
            for activation in ACTIVATIONS {
                let x = f64::from(x);
                let difference = activated(&ctx, x, activation) - activated(&ctx, -x, activation);
                let expected = match activation {
                    Activation::ReluSquared => x * x.abs(),
                    _ => x,
                };
                prop_assert!((difference - expected).abs() <= 1e-6 * expected.abs().max(1e-3));
            }
        }
    }
}
