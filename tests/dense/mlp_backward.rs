//! Gradients of the gated feed-forward block against their definition, which is proved by
//! differences of the forward's; what is kept against what is computed again; misuse.

mod misuse;

use crate::common::head::{greatest, magnitudes};
use crate::common::reference::mlp::{Arithmetic, Layer, Layers, mlp as reference, mlp_backward};
use crate::common::tensor::{strided_rows, transposed};
use crate::common::workspace::with_workspace;
use crate::common::{
    DeviceTensor, FLOATS, TestTensor, assert_flash_rule_of_sums, assert_gradient_rule, contexts,
    cut_off, rng, rounded,
};
use unsloth::ops::linear::{Output, Weights};
use unsloth::ops::mlp::backward::{Gradients, Params};
use unsloth::ops::mlp::{self, GateUp};
use unsloth::ops::swiglu::{Activation, GateOrder};
use unsloth::{Context, DType, Layout, Stream, Workspace};

#[derive(Clone, Copy, Debug)]
struct Case {
    leading: &'static [usize],
    hidden: usize,
    intermediate: usize,
    hidden_out: usize,
    packed: Option<GateOrder>,
    bias: bool,
    activation: Activation,
    /// Between rows, if there is any.
    gap: usize,
    /// Leading dimensions do not merge.
    transposed: bool,
    accumulate: bool,
}

const BASE: Case = Case {
    leading: &[9],
    hidden: 24,
    intermediate: 40,
    hidden_out: 24,
    packed: None,
    bias: false,
    activation: Activation::Silu,
    gap: 0,
    transposed: false,
    accumulate: false,
};

fn cases() -> Vec<Case> {
    let up_first = Some(GateOrder::UpFirst);
    let gate_first = Some(GateOrder::GateFirst);
    vec![
        BASE,
        Case {
            packed: gate_first,
            bias: true,
            accumulate: true,
            ..BASE
        },
        Case {
            packed: up_first,
            leading: &[2, 20],
            activation: Activation::Gelu,
            ..BASE
        },
        Case {
            bias: true,
            gap: 3,
            accumulate: true,
            activation: Activation::GeluTanh,
            ..BASE
        },
        Case {
            hidden: 65,
            intermediate: 131,
            hidden_out: 33,
            packed: up_first,
            bias: true,
            ..BASE
        },
        Case {
            leading: &[3, 5],
            transposed: true,
            bias: true,
            hidden_out: 17,
            ..BASE
        },
        Case {
            leading: &[],
            hidden: 16,
            bias: true,
            ..BASE
        },
        Case {
            leading: &[0],
            bias: true,
            ..BASE
        },
        Case {
            leading: &[0],
            bias: true,
            accumulate: true,
            packed: gate_first,
            ..BASE
        },
        Case {
            leading: &[40],
            intermediate: 96,
            packed: gate_first,
            gap: 8,
            ..BASE
        },
    ]
}

/// The gradients in the order of [`Gradients`], after that of the input.
const NAMES: [&str; 7] = [
    "dx",
    "gate weight",
    "gate bias",
    "up weight",
    "up bias",
    "down weight",
    "down bias",
];

/// A case's tensors, of values that its dtypes have.
struct Tensors {
    case: Case,
    x: TestTensor,
    dout: TestTensor,
    /// Gate, up and down.
    layers: [(TestTensor, Option<TestTensor>); 3],
}

impl Tensors {
    fn new(dtype: DType, weights: DType, case: Case) -> Tensors {
        let rng = &mut rng();
        let mut layer = |n: usize, k: usize| {
            let scale = 1.0 / (k as f64).sqrt();
            let layout = strided_rows(&[n, k], case.gap);
            let normal = TestTensor::normal(rng, DType::F32, layout).values();
            let values: Vec<f64> = normal.iter().map(|v| v * scale).collect();
            let bias = Layout::contiguous(&[n]).unwrap();
            let bias = case.bias.then(|| TestTensor::normal(rng, weights, bias));
            (TestTensor::from_values(weights, layout, &values), bias)
        };
        let layers = [
            layer(case.intermediate, case.hidden),
            layer(case.intermediate, case.hidden),
            layer(case.hidden_out, case.intermediate),
        ];
        Tensors {
            x: TestTensor::normal(rng, dtype, layout(&case, case.hidden)),
            dout: TestTensor::normal(rng, dtype, layout(&case, case.hidden_out)),
            layers,
            case,
        }
    }

    fn values(&self) -> Layers {
        let [gate, up, down] = self.layers.each_ref().map(|(weight, bias)| Layer {
            weight: weight.values(),
            bias: bias.as_ref().map(TestTensor::values),
        });
        Layers { gate, up, down }
    }

    fn sizes(&self) -> (usize, usize, usize, usize) {
        let c = &self.case;
        (
            self.x.layout.num_rows(),
            c.hidden,
            c.intermediate,
            c.hidden_out,
        )
    }

    /// The layers as a context has them: gate and up, or both packed, and down.
    fn upload(&self, ctx: &Context) -> Uploaded {
        let one = |(w, b): &(TestTensor, Option<TestTensor>)| {
            (w.upload(ctx), b.as_ref().map(|b| b.upload(ctx)))
        };
        let [gate, up, down] = &self.layers;
        let first = match self.case.packed {
            None => vec![one(gate), one(up)],
            Some(order) => {
                let [a, b] = ordered(order, [gate, up]);
                let bias = a.1.as_ref().zip(b.1.as_ref()).map(|(a, b)| joined(a, b, 0));
                vec![one(&(joined(&a.0, &b.0, self.case.gap), bias))]
            }
        };
        Uploaded {
            x: self.x.upload(ctx),
            dout: self.dout.upload(ctx),
            first,
            down: one(down),
        }
    }
}

fn ordered<T>(order: GateOrder, [gate, up]: [T; 2]) -> [T; 2] {
    match order {
        GateOrder::UpFirst => [up, gate],
        _ => [gate, up],
    }
}

/// The rows of two, one below the other.
fn joined(a: &TestTensor, b: &TestTensor, gap: usize) -> TestTensor {
    let mut shape = a.layout.shape().to_vec();
    shape[0] *= 2;
    let layout = match shape.len() {
        1 => Layout::contiguous(&shape).unwrap(),
        _ => strided_rows(&shape, gap),
    };
    TestTensor::from_values(a.dtype, layout, &[a.values(), b.values()].concat())
}

fn layout(case: &Case, columns: usize) -> Layout {
    let shape = [case.leading, &[columns]].concat();
    match case.transposed {
        true => transposed(&shape, 0, 1),
        false => strided_rows(&shape, case.gap),
    }
}

struct Uploaded {
    x: DeviceTensor,
    dout: DeviceTensor,
    first: Vec<(DeviceTensor, Option<DeviceTensor>)>,
    down: (DeviceTensor, Option<DeviceTensor>),
}

fn weights(layer: &(DeviceTensor, Option<DeviceTensor>)) -> Weights<'_> {
    Weights {
        weight: layer.0.view(),
        bias: layer.1.as_ref().map(|b| b.view()),
    }
}

impl Uploaded {
    fn forward<'a>(&'a self, case: &Case, output: Output<'a>) -> mlp::Params<'a> {
        mlp::Params {
            x_norm: None,
            parallel: None,
            x: self.x.view(),
            gate_up: match case.packed {
                None => GateUp::Apart {
                    gate: weights(&self.first[0]),
                    up: weights(&self.first[1]),
                },
                Some(order) => GateUp::Packed {
                    weights: weights(&self.first[0]),
                    order,
                },
            },
            activation: case.activation,
            intermediate_norm: None,
            down: weights(&self.down),
            output,
            workspace: Workspace::none(),
            gate_up_out: None,
        }
    }
}

/// The forward, which keeps gate and up; gives its output and them.
fn forward(ctx: &Context, case: &Case, on: &Uploaded) -> (TestTensor, DeviceTensor) {
    let dtype = on.x.dtype;
    let mut out = TestTensor::poisoned(dtype, layout(case, case.hidden_out)).upload(ctx);
    let shape = [case.leading, &[2 * case.intermediate]].concat();
    let kept = Layout::contiguous(&shape).unwrap();
    let mut kept = TestTensor::poisoned(dtype, kept).upload(ctx);
    let mut params = on.forward(case, Output::Write(out.view_mut()));
    params.gate_up_out = Some(kept.view_mut());
    mlp::supported(ctx, &params).unwrap();
    let size = mlp::workspace_size(ctx, &params).unwrap();
    with_workspace(ctx, "mlp", size, |workspace| {
        params.workspace = workspace;
        mlp::forward(ctx, &params, Stream::DEFAULT)
    });
    (out.download_output(), kept)
}

/// The gradients that are wanted, in the order of [`NAMES`]; of packed weights those of both under
/// the names of the gate's. `before` is what those of parameters hold.
fn backward(
    ctx: &Context,
    case: &Case,
    on: &Uploaded,
    kept: Option<&DeviceTensor>,
    wanted: &dyn Fn(usize) -> bool,
    before: &dyn Fn(Layout) -> TestTensor,
) -> [Option<TestTensor>; 7] {
    let dx = TestTensor::poisoned(on.x.dtype, layout(case, case.hidden));
    let up = on.first.get(1);
    let of = [Some(&on.first[0]), up, Some(&on.down)];
    let mut tensors = [const { None }; 7];
    tensors[0] = wanted(0).then(|| dx.upload(ctx));
    for (i, layer) in of.into_iter().enumerate() {
        let Some((weight, bias)) = layer else {
            continue;
        };
        let (w, b) = (2 * i + 1, 2 * i + 2);
        tensors[w] = wanted(w).then(|| before(weight.layout).upload(ctx));
        let bias = bias.as_ref().filter(|_| wanted(b));
        tensors[b] = bias.map(|bias| before(bias.layout).upload(ctx));
    }
    {
        let [dx, a, ab, up, up_bias, down, down_bias] = &mut tensors;
        let mut gradients = Gradients {
            ddown_weight: down.as_mut().map(DeviceTensor::view_mut),
            ddown_bias: down_bias.as_mut().map(DeviceTensor::view_mut),
            dup_weight: up.as_mut().map(DeviceTensor::view_mut),
            dup_bias: up_bias.as_mut().map(DeviceTensor::view_mut),
            ..Gradients::default()
        };
        let first = [a, ab].map(|t| t.as_mut().map(DeviceTensor::view_mut));
        match case.packed {
            None => [gradients.dgate_weight, gradients.dgate_bias] = first,
            Some(_) => [gradients.dgate_up_weight, gradients.dgate_up_bias] = first,
        }
        let mut params = Params {
            forward: on.forward(case, Output::none()),
            gate_up: kept.map(DeviceTensor::view),
            dout: on.dout.view(),
            dx: dx.as_mut().map(DeviceTensor::view_mut),
            gradients,
            accumulate: case.accumulate,
            workspace: Workspace::none(),
        };
        mlp::backward::supported(ctx, &params).unwrap();
        let size = mlp::backward::workspace_size(ctx, &params).unwrap();
        with_workspace(ctx, "mlp_backward", size, |workspace| {
            params.workspace = workspace;
            mlp::backward(ctx, &params, Stream::DEFAULT)
        });
    }
    tensors.map(|t| t.map(|t| t.download_output()))
}

/// Halves of packed gradients have their own names.
fn unpacked(case: &Case, gradients: &[Option<TestTensor>; 7]) -> [Option<Vec<f64>>; 7] {
    let mut values = gradients
        .each_ref()
        .map(|t| t.as_ref().map(TestTensor::values));
    let Some(order) = case.packed else {
        return values;
    };
    for i in [1, 2] {
        let Some(both) = values[i].take() else {
            continue;
        };
        let (a, b) = both.split_at(both.len() / 2);
        let [gate, up] = ordered(order, [a.to_vec(), b.to_vec()]);
        (values[i], values[i + 2]) = (Some(gate), Some(up));
    }
    values
}

fn check(ctx: &Context, dtype: DType, weight_dtype: DType, case: &Case) {
    let t = Tensors::new(dtype, weight_dtype, *case);
    let on = t.upload(ctx);
    let (x, dout, layers, sizes) = (t.x.values(), t.dout.values(), t.values(), t.sizes());
    let (rows, hidden, intermediate, _) = sizes;
    let (out, kept) = forward(ctx, case, &on);
    if case.hidden_out == hidden {
        use crate::common::reference::mlp::Plain;
        let run = |plain| {
            let sizes = (rows, hidden, intermediate);
            reference(&x, &layers, sizes, case.activation, None, plain)
        };
        let exact = run(None);
        let plain = rounded(dtype, &run(Some(Plain::Everything(dtype))));
        let of_magnitudes = layers.magnitudes();
        let sizes = (rows, hidden, intermediate);
        let terms = reference(
            &magnitudes(&x),
            &of_magnitudes,
            sizes,
            case.activation,
            None,
            None,
        );
        let most = greatest(&terms);
        assert_flash_rule_of_sums("out", dtype, &out.values(), &exact, &plain, most);
    }

    // Of parameters, gradients have their dtype or f32.
    let wide = case.accumulate || weight_dtype == DType::Bf16;
    let grad_dtype = if wide { DType::F32 } else { weight_dtype };
    let before = |layout: Layout| match case.accumulate {
        true => TestTensor::from_values(grad_dtype, layout, &vec![0.25; layout.num_elements()]),
        false => TestTensor::poisoned(grad_dtype, layout),
    };
    let all = |kept| backward(ctx, case, &on, kept, &|_| true, &before);
    let from_kept = all(Some(&kept));
    let again = all(None);
    let bits = |t: &Option<TestTensor>| t.as_ref().map(TestTensor::bits);
    for (i, (kept, again)) in from_kept.iter().zip(&again).enumerate() {
        assert!(bits(kept) == bits(again), "{}: other bits", NAMES[i]);
    }

    let gradients = |arithmetic| {
        let g = mlp_backward(&dout, &x, &layers, sizes, case.activation, arithmetic);
        let start = if case.accumulate { 0.25 } else { 0.0 };
        let add = |g: Vec<f64>| g.into_iter().map(|g| g + start).collect();
        let of_layers = [g.gate, g.up, g.down].map(|l| [add(l.dweight), add(l.dbias)]);
        let [[a, b], [c, d], [e, f]] = of_layers;
        [g.dx, a, b, c, d, e, f]
    };
    let exact = gradients(Arithmetic::Exact);
    let plain = gradients(Arithmetic::Plain {
        dtype,
        apart: case.packed.is_none(),
    });
    let terms = gradients(Arithmetic::Magnitudes);
    let got = unpacked(case, &from_kept);
    for (i, got) in got.iter().enumerate() {
        let Some(got) = got else {
            assert!(!case.bias && i > 0 && i % 2 == 0, "{} is missing", NAMES[i]);
            continue;
        };
        let of = if i == 0 { dtype } else { grad_dtype };
        let most = terms[i].iter().copied().fold(0.0, f64::max);
        let depth = if i == 0 { 2 * intermediate } else { rows };
        let most = most.max(cut_off(ctx, dtype, depth, &exact[i]));
        assert_gradient_rule(NAMES[i], of, got, &exact[i], &rounded(of, &plain[i]), most);
    }
}

#[test]
fn agrees_with_its_definition() {
    for ctx in contexts() {
        for dtype in FLOATS {
            let other = if dtype == DType::F32 {
                DType::Bf16
            } else {
                DType::F32
            };
            for weight_dtype in [dtype, other] {
                crate::common::for_each_case(&cases(), |case| {
                    check(&ctx, dtype, weight_dtype, case)
                });
            }
        }
    }
}

/// Each gradient alone has the bits that it has among all.
#[test]
fn a_gradient_does_not_depend_on_what_else_is_asked_for() {
    for ctx in contexts() {
        for dtype in FLOATS {
            for packed in [None, Some(GateOrder::UpFirst)] {
                let case = Case {
                    packed,
                    bias: true,
                    ..BASE
                };
                let on = Tensors::new(dtype, dtype, case).upload(&ctx);
                let (_, kept) = forward(&ctx, &case, &on);
                let poisoned = |layout| TestTensor::poisoned(dtype, layout);
                let run = |kept, wanted: &dyn Fn(usize) -> bool| {
                    let all = backward(&ctx, &case, &on, kept, wanted, &poisoned);
                    all.map(|t| t.map(|t| t.bits()))
                };
                let all = run(Some(&kept), &|_| true);
                for i in (0..7).filter(|i| all[*i].is_some()) {
                    for kept in [None, Some(&kept)] {
                        let alone = run(kept, &|j| i == j);
                        assert!(alone[i] == all[i], "{dtype} {packed:?} {}", NAMES[i]);
                    }
                }
            }
        }
    }
}

/// The reference is the derivative of the forward's, along any direction, by differences.
#[test]
fn the_reference_is_the_derivative_of_the_forwards() {
    let rng = &mut rng();
    let (rows, hidden, intermediate) = (4, 5, 6);
    let mut random = |len: usize| -> Vec<f64> {
        (0..len)
            .map(|_| crate::common::tensor::normal(rng))
            .collect()
    };
    let mut layer = |n: usize, k: usize| Layer {
        weight: random(n * k),
        bias: Some(random(n)),
    };
    let mut layers = || Layers {
        gate: layer(intermediate, hidden),
        up: layer(intermediate, hidden),
        down: layer(hidden, intermediate),
    };
    let (at, along) = (layers(), layers());
    let [x, vx, dout] = [(); 3].map(|()| random(rows * hidden));
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let moved = |a: &[f64], v: &[f64], h: f64| -> Vec<f64> {
        a.iter().zip(v).map(|(a, v)| a + h * v).collect()
    };
    let moved_layer = |a: &Layer, v: &Layer, h: f64| Layer {
        weight: moved(&a.weight, &v.weight, h),
        bias: a
            .bias
            .as_ref()
            .zip(v.bias.as_ref())
            .map(|(a, v)| moved(a, v, h)),
    };
    for activation in [
        Activation::Silu,
        Activation::Gelu,
        Activation::GeluTanh,
        Activation::ReluSquared,
    ] {
        let loss = |h: f64| {
            let layers = Layers {
                gate: moved_layer(&at.gate, &along.gate, h),
                up: moved_layer(&at.up, &along.up, h),
                down: moved_layer(&at.down, &along.down, h),
            };
            let sizes = (rows, hidden, intermediate);
            dot(
                &reference(&moved(&x, &vx, h), &layers, sizes, activation, None, None),
                &dout,
            )
        };
        let h = 1e-4;
        let difference = (loss(h) - loss(-h)) / (2.0 * h);
        let sizes = (rows, hidden, intermediate, hidden);
        let g = mlp_backward(&dout, &x, &at, sizes, activation, Arithmetic::Exact);
        let of_layer = |g: &crate::common::reference::linear::Gradients, v: &Layer| {
            dot(&g.dweight, &v.weight) + dot(&g.dbias, v.bias.as_ref().unwrap())
        };
        let derivative = dot(&g.dx, &vx)
            + of_layer(&g.gate, &along.gate)
            + of_layer(&g.up, &along.up)
            + of_layer(&g.down, &along.down);
        let error = (difference - derivative).abs();
        assert!(
            error < 1e-6 * derivative.abs().max(100.0),
            "{difference} {derivative}"
        );
    }
}
