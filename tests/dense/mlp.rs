//! The gated feed-forward block against its definition, and against the single operations it is
//! made of.

use crate::common::head::magnitudes;
use crate::common::reference::mlp::{Layer, Layers, Plain, mlp as reference};
use crate::common::rules::epsilon;
use crate::common::tensor::strided_rows;
use crate::common::{
    DeviceTensor, FLOATS, TestTensor, assert_flash_rule_of_sums, contexts, in_out, rng, rounded,
};
use unsloth::ops::linear::{Output, Weights};
use unsloth::ops::mlp::{self, GateUp, Params};
use unsloth::ops::swiglu::{Activation, GateOrder};
use unsloth::{Backend, Buffer, Context, DType, Error, Layout, Stream, Workspace};

#[derive(Clone, Debug)]
struct Case {
    rows: usize,
    hidden: usize,
    intermediate: usize,
    packed: Option<GateOrder>,
    bias: bool,
    /// In place if true.
    residual: Option<bool>,
    activation: Activation,
    gap: usize,
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for rows in [0, 1, 3, 9, 40] {
        for (hidden, intermediate) in [(1, 1), (24, 40), (65, 131)] {
            for packed in [None, Some(GateOrder::GateFirst), Some(GateOrder::UpFirst)] {
                let odd = (rows + hidden) % 2 == 1;
                cases.push(Case {
                    rows,
                    hidden,
                    intermediate,
                    packed,
                    bias: odd,
                    residual: [None, Some(true), Some(false)][(rows + intermediate) % 3],
                    activation: [
                        Activation::Silu,
                        Activation::Gelu,
                        Activation::GeluTanh,
                        Activation::ReluSquared,
                    ][rows % 4],
                    gap: if odd { 3 } else { 0 },
                });
            }
        }
    }
    cases.push(Case {
        hidden: 16,
        intermediate: 0,
        bias: true,
        ..cases[10].clone()
    });
    cases.push(Case {
        hidden: 300,
        intermediate: 1200,
        ..cases[cases.len() - 2].clone()
    });
    cases
}

/// A layer with its weight rows `gap` elements apart.
fn layer(
    rng: &mut impl rand::Rng,
    dtype: DType,
    (n, k): (usize, usize),
    case: &Case,
) -> (TestTensor, Option<TestTensor>) {
    let scale = 1.0 / (k.max(1) as f64).sqrt();
    let layout = strided_rows(&[n, k], case.gap);
    let values = TestTensor::normal(rng, DType::F32, layout).values();
    let values: Vec<f64> = values.iter().map(|v| v * scale).collect();
    let weight = TestTensor::from_values(dtype, layout, &values);
    let bias = Layout::contiguous(&[n]).unwrap();
    (
        weight,
        case.bias.then(|| TestTensor::normal(rng, dtype, bias)),
    )
}

fn weights<'a>(layer: &'a (DeviceTensor, Option<DeviceTensor>)) -> Weights<'a> {
    Weights {
        weight: layer.0.view(),
        bias: layer.1.as_ref().map(|b| b.view()),
    }
}

fn check(ctx: &Context, dtype: DType, weight_dtype: DType, case: &Case) {
    let rng = &mut rng();
    let (rows, hidden, intermediate) = (case.rows, case.hidden, case.intermediate);
    let shape = |columns| strided_rows(&[rows, columns], case.gap);
    let x = TestTensor::normal(rng, dtype, shape(hidden));
    let residual = case
        .residual
        .map(|_| TestTensor::normal(rng, dtype, shape(hidden)));
    let mut layer = |n, k| layer(rng, weight_dtype, (n, k), case);
    let (gate, up) = (layer(intermediate, hidden), layer(intermediate, hidden));
    let down = layer(hidden, intermediate);
    let upload = |l: &(TestTensor, Option<TestTensor>)| {
        (l.0.upload(ctx), l.1.as_ref().map(|b| b.upload(ctx)))
    };

    let packed = |order: GateOrder| {
        let (first, second) = match order {
            GateOrder::UpFirst => (&up, &gate),
            _ => (&gate, &up),
        };
        let join = |a: &TestTensor, b: &TestTensor, layout| {
            TestTensor::from_values(weight_dtype, layout, &[a.values(), b.values()].concat())
        };
        let weight = join(
            &first.0,
            &second.0,
            strided_rows(&[2 * intermediate, hidden], case.gap),
        );
        let both = first.1.as_ref().zip(second.1.as_ref());
        let layout = Layout::contiguous(&[2 * intermediate]).unwrap();
        upload(&(weight, both.map(|(a, b)| join(a, b, layout))))
    };
    let apart = (upload(&gate), upload(&up));
    let joined = packed(case.packed.unwrap_or_default());
    let (dx, ddown) = (x.upload(ctx), upload(&down));
    let mut dresidual = residual.as_ref().map(|r| r.upload(ctx));
    let mut out = TestTensor::poisoned(dtype, shape(hidden)).upload(ctx);
    let in_place = case.residual == Some(true);

    let mut params = Params {
        x_norm: None,
        parallel: None,
        x: dx.view(),
        gate_up: match case.packed {
            None => GateUp::Apart {
                gate: weights(&apart.0),
                up: weights(&apart.1),
            },
            Some(order) => GateUp::Packed {
                weights: weights(&joined),
                order,
            },
        },
        activation: case.activation,
        intermediate_norm: None,
        down: weights(&ddown),
        output: match &mut dresidual {
            None => Output::Write(out.view_mut()),
            Some(r) => Output::Add(in_out(in_place, r, &mut out)),
        },
        workspace: Workspace::none(),
        gate_up_out: None,
    };
    mlp::supported(ctx, &params).unwrap();
    let size = mlp::workspace_size(ctx, &params).unwrap();
    // Behind what is needed there may be what products have use for.
    let needed = rows * intermediate * dtype.size();
    let products = size.saturating_sub(needed.next_multiple_of(Workspace::ALIGNMENT));
    assert!(size == needed || (ctx.backend() != Backend::Cpu && products > 0));
    // Up to three bytes too long, poisoned, to see that the call stays inside what it asked for.
    let guarded =
        TestTensor::poisoned(DType::F32, Layout::contiguous(&[size.div_ceil(4)]).unwrap());
    let workspace = guarded.upload(ctx);
    if needed > 0 {
        let error = mlp::forward(ctx, &params, Stream::DEFAULT).unwrap_err();
        assert_eq!(
            error,
            Error::WorkspaceTooSmall {
                op: "mlp",
                required: needed,
                provided: 0
            }
        );
    }
    // SAFETY: `size` bytes from the start of the tensor are its elements, which nothing else uses.
    params.workspace = unsafe { Workspace::from_raw(workspace.data().cast(), size) };
    mlp::forward(ctx, &params, Stream::DEFAULT).unwrap();
    workspace.download_output();

    let layers = {
        let values = |(w, b): &(TestTensor, Option<TestTensor>)| Layer {
            weight: w.values(),
            bias: b.as_ref().map(TestTensor::values),
        };
        Layers {
            gate: values(&gate),
            up: values(&up),
            down: values(&down),
        }
    };
    let residual = residual.map(|r| r.values());
    let run = |plain| {
        let sizes = (rows, hidden, intermediate);
        reference(
            &x.values(),
            &layers,
            sizes,
            case.activation,
            residual.as_deref(),
            plain,
        )
    };
    let out = match &dresidual {
        Some(r) if in_place => r,
        _ => &out,
    };
    // The CPU's gate and up stay in registers. A GPU stores both, or the gate alone: roundings of
    // few elements may cancel in one way and not in the other, so the worse of both counts.
    let plain = match ctx.backend() {
        Backend::Cpu => vec![Plain::Activated(dtype)],
        _ => vec![Plain::GateAndActivated(dtype), Plain::Everything(dtype)],
    };
    let exact = run(None);
    let plain = plain
        .into_iter()
        .map(|plain| rounded(dtype, &run(Some(plain))))
        .reduce(|a, b| {
            let worse = |((a, b), r): ((f64, f64), &f64)| {
                if (a - r).abs() < (b - r).abs() { b } else { a }
            };
            a.into_iter().zip(b).zip(&exact).map(worse).collect()
        })
        .unwrap_or_default();
    let terms = reference(
        &magnitudes(&x.values()),
        &layers.magnitudes(),
        (rows, hidden, intermediate),
        case.activation,
        residual.as_deref().map(magnitudes).as_deref(),
        None,
    );
    // Whether a single element between is rounded up or down may hang on the last bit of an
    // exponential, whichever way a plain one goes.
    let units = match intermediate {
        1 => 0.5 * epsilon(dtype).max(2.0 * epsilon(DType::F32)) / epsilon(DType::F32),
        _ => 1.0,
    };
    assert_flash_rule_of_sums(
        "out",
        dtype,
        &out.download_output().values(),
        &exact,
        &plain,
        terms.into_iter().fold(0.0, f64::max) * units,
    );
}

#[test]
fn agrees_with_its_definition() {
    for ctx in contexts() {
        for dtype in FLOATS {
            for weight_dtype in [dtype, DType::F32, DType::Bf16] {
                crate::common::for_each_case(&cases(), |case| {
                    check(&ctx, dtype, weight_dtype, case)
                });
            }
        }
    }
}

#[test]
fn misaligned_and_overlapping_workspaces_are_refused() {
    let ctx = Context::cpu().unwrap();
    let zeros = |shape: &[usize]| {
        let n: usize = shape.iter().product();
        TestTensor::of(DType::F32, shape, &vec![0.0; n]).upload(&ctx)
    };
    let (x, weight, down) = (zeros(&[2, 4]), zeros(&[64, 4]), zeros(&[4, 64]));
    let mut out = zeros(&[2, 4]);
    let scratch = Buffer::from_slice(&ctx, &[0f32; 256]).unwrap();
    let mut run = |start: *mut u8| {
        let layer = |t| Weights {
            weight: t,
            bias: None,
        };
        let params = Params {
            x_norm: None,
            parallel: None,
            x: x.view(),
            gate_up: GateUp::Apart {
                gate: layer(weight.view()),
                up: layer(weight.view()),
            },
            activation: Activation::Silu,
            intermediate_norm: None,
            down: layer(down.view()),
            output: Output::Write(out.view_mut()),
            // SAFETY: refused before it is touched, or inside `scratch`.
            workspace: unsafe { Workspace::from_raw(start, 512) },
            gate_up_out: None,
        };
        mlp::forward(&ctx, &params, Stream::DEFAULT).map_err(|e| e.to_string())
    };
    assert_eq!(run(scratch.as_ptr()), Ok(()));
    let odd = scratch.as_ptr().wrapping_add(4);
    assert_eq!(
        run(odd),
        Err(format!(
            "mlp: workspace {odd:p} is not aligned to 256 bytes"
        ))
    );
    assert_eq!(
        run(weight.data().cast()),
        Err("mlp: workspace overlaps gate_weight".into())
    );
    assert_eq!(
        run(std::ptr::null_mut()),
        Err("mlp: workspace is NULL".into())
    );
}
