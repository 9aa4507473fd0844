//! Gradients of gated activations against their definition, which is proved by differences of the
//! forward: layouts, dtypes, packed and apart, in place; misuse.

use crate::common::abi::{self, Misuse, absent, assert_fails, c_tensor};
use crate::common::contiguous;
use crate::common::reference::swiglu::{activate, derivative};
use crate::common::tensor::{strided_rows, transposed};
use crate::common::{FLOATS, TestTensor, assert_close_of_sums, contexts, in_out, rng};
use unsloth::ffi::status::*;
use unsloth::ffi::swiglu::backward::*;
use unsloth::ops::swiglu::backward::{Dout, Params, Tensors};
use unsloth::ops::swiglu::{self, Activation, GateOrder};
use unsloth::{Context, DType, Layout, Stream};

const ACTIVATIONS: [Activation; 4] = [
    Activation::Silu,
    Activation::Gelu,
    Activation::GeluTanh,
    Activation::ReluSquared,
];

#[derive(Clone, Debug)]
struct Case {
    layout: Layout,
    packed: Option<GateOrder>,
    in_place: bool,
    /// Whether the output is computed again; in place as the rest is.
    with_out: bool,
    activation: Activation,
    skew: usize,
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for layout in [
        contiguous(&[1]),
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
            for packed in [None, Some(GateOrder::GateFirst), Some(GateOrder::UpFirst)] {
                for in_place in [false, true] {
                    cases.push(Case {
                        layout,
                        packed,
                        in_place,
                        with_out: cases.len() % 3 > 0,
                        activation,
                        skew: usize::from(activation == Activation::Gelu),
                    });
                }
            }
        }
    }
    cases
}

/// The halves of rows of twice `dim`.
fn halves(values: &[f64], dim: usize) -> [Vec<f64>; 2] {
    [0, 1].map(|n| {
        let rows = values.chunks((2 * dim).max(1));
        rows.flat_map(|row| row[n * dim..(n + 1) * dim].to_vec())
            .collect()
    })
}

fn check(ctx: &Context, dtype: DType, case: &Case) {
    let rng = &mut rng();
    let dim = *case.layout.shape().last().unwrap();
    // Wide enough for the tails of every activation.
    let mut spread = |layout: Layout| {
        let values = TestTensor::normal(rng, DType::F32, layout).values();
        let mut t = TestTensor::poisoned_at(dtype, layout, case.skew);
        t.set_values(&values.iter().map(|x| 3.0 * x).collect::<Vec<_>>());
        t
    };
    let poisoned = |layout| TestTensor::poisoned_at(dtype, layout, case.skew).upload(ctx);
    let mut both = case.layout.shape().to_vec();
    *both.last_mut().unwrap() *= 2;
    let both = strided_rows(&both, 5 * usize::from(case.in_place));

    let dout = spread(case.layout);
    let (mut there, mut out) = (dout.upload(ctx), poisoned(case.layout));
    let run = |tensors, dout| {
        let params = Params {
            tensors,
            dout,
            activation: case.activation,
        };
        swiglu::backward::supported(ctx, &params).unwrap();
        assert_eq!(swiglu::backward::workspace_size(ctx, &params).unwrap(), 0);
        swiglu::backward(ctx, &params, Stream::DEFAULT).unwrap();
    };
    let of_dout = match case.with_out {
        true => Dout::WithOut(in_out(case.in_place, &mut there, &mut out)),
        false => Dout::Only(there.view()),
    };
    let (inputs, outputs) = match case.packed {
        None => {
            let (gate, up) = (spread(case.layout), spread(case.layout));
            let (mut a, mut b) = (gate.upload(ctx), up.upload(ctx));
            let (mut dgate, mut dup) = (poisoned(case.layout), poisoned(case.layout));
            let tensors = Tensors::Apart {
                gate: in_out(case.in_place, &mut a, &mut dgate),
                up: in_out(case.in_place, &mut b, &mut dup),
            };
            run(tensors, of_dout);
            let written = if case.in_place { [a, b] } else { [dgate, dup] };
            let written = written.map(|t| t.download_output().values());
            ([gate.values(), up.values()], written)
        }
        Some(order) => {
            let packed = spread(both);
            let (mut a, mut gradients) = (packed.upload(ctx), poisoned(both));
            let gate_up = in_out(case.in_place, &mut a, &mut gradients);
            run(Tensors::Packed { gate_up, order }, of_dout);
            let written = if case.in_place { a } else { gradients };
            let mut inputs = halves(&packed.values(), dim);
            let mut outputs = halves(&written.download_output().values(), dim);
            if order == GateOrder::UpFirst {
                inputs.reverse();
                outputs.reverse();
            }
            (inputs, outputs)
        }
    };
    let [gate, up] = inputs;
    let dout = dout.values();
    let each = |f: &dyn Fn(f64, f64, f64) -> f64| -> Vec<f64> {
        let gated = gate.iter().zip(&up).zip(&dout);
        gated.map(|((g, u), d)| f(*g, *u, *d)).collect()
    };
    let act = case.activation;
    // An exponential, a division and products; the argument of tanh reaches 100 in the tail, and its
    // rounding goes through the exponential. The derivative is a sum of two terms.
    let ulps = match act {
        Activation::GeluTanh => 512.0,
        _ => 24.0,
    };
    let judge = |name, got: &[f64], wanted: Vec<f64>, terms: Vec<f64>| {
        let terms: Vec<f64> = terms.iter().map(|t| t.abs()).collect();
        assert_close_of_sums(name, dtype, got, &wanted, &terms, ulps);
    };
    let [dgate, dup] = outputs;
    judge(
        "dgate",
        &dgate,
        each(&|g, u, d| d * u * derivative(g, act)),
        each(&|g, u, d| d * u * (derivative(g, act).abs() + 2.0 * (activate(g, act) / g).abs())),
    );
    let wanted = each(&|g, _, d| d * activate(g, act));
    judge("dup", &dup, wanted.clone(), wanted);
    if case.with_out {
        let written = if case.in_place { there } else { out };
        let wanted = each(&|g, u, _| u * activate(g, act));
        let got = written.download_output().values();
        judge("out", &got, wanted.clone(), wanted);
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

/// The reference's derivative is the activation's difference.
#[test]
fn the_definition_is_the_forwards_derivative() {
    const STEP: f64 = 1e-5;
    for activation in ACTIVATIONS {
        for x in [-9.0, -3.1, -1.2785, -0.7, 0.0, 0.3, 1.7, 6.0] {
            let difference =
                (activate(x + STEP, activation) - activate(x - STEP, activation)) / (2.0 * STEP);
            let exact = derivative(x, activation);
            // A square that begins at zero has half a step's slope there.
            let most = match activation {
                Activation::ReluSquared => STEP,
                _ => 1e-8,
            };
            assert!(
                (difference - exact).abs() < most,
                "{x}: {difference} {exact}"
            );
        }
    }
}

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;

const MISUSE: &[Misuse<unsloth_swiglu_backward_params>] = &[
    (
        |p| p.gate = absent(),
        INVALID,
        "swiglu_backward: gate is absent (rank 0), it is required",
    ),
    (
        |p| p.up.shape[0] = 3,
        INVALID,
        "swiglu_backward: up has shape [3, 8], gate has [2, 8]",
    ),
    (
        |p| p.dout.shape[1] = 7,
        INVALID,
        "swiglu_backward: dout has shape [2, 7], expected [2, 8]",
    ),
    (
        |p| p.dout = absent(),
        INVALID,
        "swiglu_backward: dout is absent (rank 0), it is required",
    ),
    (
        |p| p.dgate_up = p.dgate,
        INVALID,
        "swiglu_backward: dgate_up is there beside gate: set one pair",
    ),
    (
        |p| p.gate_up = p.gate,
        INVALID,
        "swiglu_backward: gate is there beside gate_up: set one pair",
    ),
    (
        |p| p.dup.data = p.gate.data,
        INVALID,
        "swiglu_backward: dup overlaps gate",
    ),
    (
        |p| p.out.data = p.dgate.data,
        INVALID,
        "swiglu_backward: out overlaps dgate",
    ),
    (
        |p| p.activation = 4,
        INVALID,
        "swiglu_backward: activation is 4, allowed: 0 (silu), 1 (gelu), 2 (gelu tanh), 3 (squared relu)",
    ),
    (
        |p| p.gate_order = 2,
        INVALID,
        "swiglu_backward: gate_order is 2, allowed: 0 (gate first), 1 (up first)",
    ),
    (
        |p| p.up.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "swiglu_backward: data of up is NULL",
    ),
];

#[test]
fn misuse_is_refused_and_writes_nothing() {
    for (memory, ctx) in abi::backends() {
        let layout = contiguous(&[2, 8]);
        let normal = || TestTensor::normal(&mut rng(), DType::F32, layout).upload(&memory);
        let (gate, up, dout) = (normal(), normal(), normal());
        let poisoned = || TestTensor::poisoned(DType::F32, layout).upload(&memory);
        let (dgate, dup, out) = (poisoned(), poisoned(), poisoned());
        // SAFETY: a struct of integers, floats and pointers, size first.
        let mut good: unsloth_swiglu_backward_params = unsafe { abi::zeroed_params() };
        (good.gate, good.up, good.dout) = (c_tensor(&gate), c_tensor(&up), c_tensor(&dout));
        (good.dgate, good.dup, good.out) = (c_tensor(&dgate), c_tensor(&dup), c_tensor(&out));
        for (spoil, status, message) in MISUSE {
            let mut bad = good;
            spoil(&mut bad);
            // SAFETY: every tensor that passes validation lies in memory made above.
            let got = unsafe { unsloth_swiglu_backward(ctx.0, &bad, std::ptr::null_mut()) };
            assert_fails(got, *status, message);
        }
        for untouched in [&dgate, &dup, &out] {
            abi::assert_untouched(untouched);
        }
    }
}
