//! A decoder layer against the operations that it is made of; its gradients under every policy of
//! checkpointing, and against differences of the forward's outputs.

use crate::common::contiguous;
use crate::common::tensor::strided_rows;
use crate::common::workspace::poisoned_workspace;
use crate::common::{DeviceTensor, FLOATS, TestTensor, contexts, rng};
use unsloth::ops::decoder_layer::{self, Checkpointing, backward};
use unsloth::ops::linear::{Output, Weights};
use unsloth::ops::mlp::{self, GateUp};
use unsloth::ops::rope::{Positions, Rotation};
use unsloth::ops::swiglu::{Activation, GateOrder};
use unsloth::ops::{attention_block, rms_norm};
use unsloth::{Buffer, Context, DType, InOut, Stream, TensorMut, TensorRef, Workspace};

const HIDDEN: usize = 24;
const INTERMEDIATE: usize = 40;
const HEADS: (usize, usize) = (4, 2);
const DIMS: (usize, usize) = (8, 16);
const EPSILON: f32 = 1e-5;

const POLICIES: [Checkpointing; 6] = [
    Checkpointing::None,
    Checkpointing::Selective,
    Checkpointing::Elementwise,
    Checkpointing::Mlp,
    Checkpointing::Projections,
    Checkpointing::Full,
];

#[derive(Clone, Copy, Debug)]
struct Case {
    leading: &'static [usize],
    /// Of packed sequences, where they end.
    cu_seqlens: Option<&'static [i32]>,
    packed: bool,
    biases: bool,
    qk_norm: bool,
    window: usize,
    /// Between the rows of the input.
    gap: usize,
    in_place: bool,
    accumulate: bool,
}

const BASE: Case = Case {
    leading: &[2, 7],
    cu_seqlens: None,
    packed: true,
    biases: false,
    qk_norm: false,
    window: 0,
    gap: 0,
    in_place: false,
    accumulate: false,
};

const CASES: [Case; 6] = [
    BASE,
    Case {
        packed: false,
        biases: true,
        in_place: true,
        accumulate: true,
        ..BASE
    },
    Case {
        qk_norm: true,
        gap: 8,
        ..BASE
    },
    Case {
        leading: &[13],
        cu_seqlens: Some(&[0, 5, 6, 13]),
        window: 4,
        accumulate: true,
        ..BASE
    },
    Case {
        leading: &[13],
        cu_seqlens: Some(&[0, 13]),
        packed: false,
        qk_norm: true,
        biases: true,
        in_place: true,
        ..BASE
    },
    Case {
        leading: &[0],
        ..BASE
    },
];

/// A layer's parameters, in this order, and what their gradients are called.
const PARAMETERS: [&str; 16] = [
    "attention_norm",
    "mlp_norm",
    "q",
    "q_bias",
    "k",
    "k_bias",
    "v",
    "v_bias",
    "qkv",
    "out",
    "gate",
    "up",
    "gate_up",
    "down",
    "q_norm",
    "k_norm",
];

fn shape_of(name: &str) -> Vec<usize> {
    let (q, k, v) = (HEADS.0 * DIMS.0, HEADS.1 * DIMS.0, HEADS.1 * DIMS.1);
    match name {
        "attention_norm" | "mlp_norm" => vec![HIDDEN],
        "q" => vec![q, HIDDEN],
        "q_bias" => vec![q],
        "k" => vec![k, HIDDEN],
        "k_bias" => vec![k],
        "v" => vec![v, HIDDEN],
        "v_bias" => vec![v],
        "qkv" => vec![q + k + v, HIDDEN],
        "out" => vec![HIDDEN, HEADS.0 * DIMS.1],
        "gate" | "up" => vec![INTERMEDIATE, HIDDEN],
        "gate_up" => vec![2 * INTERMEDIATE, HIDDEN],
        "down" => vec![HIDDEN, INTERMEDIATE],
        _ => vec![DIMS.0],
    }
}

impl Case {
    fn has(&self, name: &str) -> bool {
        match name {
            "q" | "k" | "v" | "gate" | "up" => !self.packed,
            "qkv" | "gate_up" => self.packed,
            "q_bias" | "k_bias" | "v_bias" => self.biases && !self.packed,
            "q_norm" | "k_norm" => self.qk_norm,
            _ => true,
        }
    }

    fn shape(&self) -> Vec<usize> {
        [self.leading, &[HIDDEN]].concat()
    }
}

/// The input and the parameters on a device.
struct Tensors {
    case: Case,
    x: DeviceTensor,
    dout: TestTensor,
    parameters: Vec<DeviceTensor>,
    cu_seqlens: Option<DeviceTensor>,
    positions: Option<DeviceTensor>,
}

impl Tensors {
    fn new(ctx: &Context, dtype: DType, case: Case) -> Tensors {
        let rng = &mut rng();
        let parameters = PARAMETERS.map(|name| {
            let shape = shape_of(name);
            let normal = TestTensor::normal(rng, DType::F32, contiguous(&shape));
            let values: Vec<f64> = normal.values().iter().map(|x| x * 0.3).collect();
            TestTensor::of(dtype, &shape, &values).upload(ctx)
        });
        let integers = |values: Vec<i32>| {
            let values: Vec<f64> = values.into_iter().map(f64::from).collect();
            TestTensor::of(DType::I32, &[values.len()], &values).upload(ctx)
        };
        let positions = case.cu_seqlens.map(|ends| {
            let each = ends.windows(2).flat_map(|pair| 0..pair[1] - pair[0]);
            integers(each.collect())
        });
        let x = strided_rows(&case.shape(), case.gap);
        Tensors {
            case,
            x: TestTensor::normal(rng, dtype, x).upload(ctx),
            dout: TestTensor::normal(rng, dtype, contiguous(&case.shape())),
            parameters: parameters.into(),
            cu_seqlens: case.cu_seqlens.map(|ends| integers(ends.to_vec())),
            positions,
        }
    }

    fn parameter(&self, name: &str) -> Option<TensorRef<'_>> {
        let at = PARAMETERS.iter().position(|n| *n == name).unwrap();
        self.case.has(name).then(|| self.parameters[at].view())
    }

    fn weights(&self, name: &str, bias: &str) -> Weights<'_> {
        Weights {
            weight: self.parameter(name).unwrap(),
            bias: (!bias.is_empty()).then(|| self.parameter(bias)).flatten(),
        }
    }

    fn attention(&self) -> attention_block::Params<'_> {
        attention_block::Params {
            x_norm: None,
            parallel: None,
            x: self.x.view(),
            num_heads: HEADS.0,
            num_kv_heads: HEADS.1,
            head_dim: DIMS.0,
            v_head_dim: DIMS.1,
            projections: match self.case.packed {
                true => attention_block::Projections::Packed(self.weights("qkv", "")),
                false => attention_block::Projections::Apart {
                    q: self.weights("q", "q_bias"),
                    k: self.weights("k", "k_bias"),
                    v: self.weights("v", "v_bias"),
                },
            },
            q_norm: self.parameter("q_norm"),
            k_norm: self.parameter("k_norm"),
            norm_weight_offset: 0.0,
            norm_epsilon: EPSILON,
            rotation: Some(Rotation::default()),
            positions: match &self.positions {
                None => Positions::From(3),
                Some(positions) => Positions::PerToken(positions.view()),
            },
            cache: None,
            cu_seqlens: self.cu_seqlens.as_ref().map(DeviceTensor::view),
            max_seqlen: 0,
            scale: 0.0,
            softcap: 0.0,
            bidirectional: false,
            window: self.case.window,
            alibi_slopes: None,
            sinks: None,
            attended_norm: None,
            out_projection: self.weights("out", ""),
            output: Output::none(),
            workspace: Workspace::none(),
            qkv_out: None,
            attended_out: None,
            lse_out: None,
        }
    }

    fn mlp(&self) -> mlp::Params<'_> {
        mlp::Params {
            x_norm: None,
            parallel: None,
            x: self.x.view(),
            gate_up: match self.case.packed {
                true => GateUp::Packed {
                    weights: self.weights("gate_up", ""),
                    order: GateOrder::GateFirst,
                },
                false => GateUp::Apart {
                    gate: self.weights("gate", ""),
                    up: self.weights("up", ""),
                },
            },
            activation: Activation::Silu,
            intermediate_norm: None,
            down: self.weights("down", ""),
            output: Output::none(),
            workspace: Workspace::none(),
            gate_up_out: None,
        }
    }

    fn layer<'a>(
        &'a self,
        checkpointing: Checkpointing,
        out: TensorMut<'a>,
        saved: Workspace<'a>,
        workspace: Workspace<'a>,
    ) -> decoder_layer::Params<'a> {
        decoder_layer::Params {
            x: self.x.view(),
            attention_norm: self.parameter("attention_norm").unwrap(),
            mlp_norm: self.parameter("mlp_norm").unwrap(),
            norm_weight_offset: 0.5,
            norm_epsilon: EPSILON,
            attention: self.attention(),
            mlp: self.mlp(),
            checkpointing,
            out,
            saved,
            workspace,
        }
    }
}

/// What a layer gives: its output, and its gradients in the order of [`PARAMETERS`] after `dx`.
struct Given {
    out: TestTensor,
    gradients: Vec<TestTensor>,
    saved: usize,
}

/// Forward and backward with exactly as much memory as is asked for, all of it NaN before.
fn run(ctx: &Context, t: &Tensors, checkpointing: Checkpointing) -> Given {
    let dtype = t.x.view().dtype();
    let mut out = TestTensor::poisoned(dtype, contiguous(&t.case.shape())).upload(ctx);
    let none = Workspace::none;
    let asked = t.layer(checkpointing, out.view_mut(), none(), none());
    let saved_size = decoder_layer::saved_size(ctx, &asked).unwrap();
    let size = decoder_layer::workspace_size(ctx, &asked).unwrap();
    let mut saved = poisoned_workspace(ctx, saved_size);
    let mut workspace = poisoned_workspace(ctx, size);
    let layer = t.layer(
        checkpointing,
        out.view_mut(),
        saved.workspace(),
        workspace.workspace(),
    );
    decoder_layer::forward(ctx, &layer, Stream::DEFAULT).unwrap();
    let out = out.download_output();

    let of_parameters = if t.case.accumulate { DType::F32 } else { dtype };
    let mut gradients: Vec<DeviceTensor> = PARAMETERS
        .iter()
        .map(|name| {
            let shape = shape_of(name);
            match t.case.accumulate {
                true => TestTensor::of(
                    DType::F32,
                    &shape,
                    &vec![0.25; shape.iter().product::<usize>()],
                ),
                false => TestTensor::poisoned(of_parameters, contiguous(&shape)),
            }
            .upload(ctx)
        })
        .collect();
    let mut dout = t.dout.upload(ctx);
    let mut dx = TestTensor::poisoned(dtype, contiguous(&t.case.shape())).upload(ctx);
    let mut nothing = TestTensor::poisoned(dtype, contiguous(&t.case.shape())).upload(ctx);
    let mut backward_with = |workspace: Workspace<'_>, saved: Workspace<'_>, launch: bool| {
        let mut views = gradients.iter_mut().map(DeviceTensor::view_mut);
        let mut next = PARAMETERS.iter().map(|name| {
            let view = views.next().unwrap();
            t.case.has(name).then_some(view)
        });
        let mut take = || next.next().unwrap();
        let (dattention_norm, dmlp_norm) = (take(), take());
        let attention = attention_block::backward::Gradients {
            dq_weight: take(),
            dq_bias: take(),
            dk_weight: take(),
            dk_bias: take(),
            dv_weight: take(),
            dv_bias: take(),
            dqkv_weight: take(),
            dout_weight: take(),
            ..Default::default()
        };
        let mlp = mlp::backward::Gradients {
            dgate_weight: take(),
            dup_weight: take(),
            dgate_up_weight: take(),
            ddown_weight: take(),
            ..Default::default()
        };
        let attention = attention_block::backward::Gradients {
            dq_norm: take(),
            dk_norm: take(),
            ..attention
        };
        let params = backward::Params {
            forward: t.layer(checkpointing, nothing.view_mut(), saved, Workspace::none()),
            dout: crate::common::in_out(t.case.in_place, &mut dout, &mut dx),
            dattention_norm,
            dmlp_norm,
            attention,
            mlp,
            accumulate: t.case.accumulate,
            deterministic: true,
            workspace,
        };
        match launch {
            false => backward::workspace_size(ctx, &params).unwrap(),
            true => {
                decoder_layer::backward(ctx, &params, Stream::DEFAULT).unwrap();
                0
            }
        }
    };
    let size = backward_with(none(), none(), false);
    let mut workspace = poisoned_workspace(ctx, size);
    backward_with(workspace.workspace(), saved.workspace(), true);
    let dx = if t.case.in_place { dout } else { dx };
    let mut given = vec![dx.download_output()];
    for (name, gradient) in PARAMETERS.iter().zip(&gradients) {
        if t.case.has(name) {
            given.push(gradient.download_output());
        }
    }
    Given {
        out,
        gradients: given,
        saved: saved_size,
    }
}

/// What is kept and what is computed again makes no difference of a bit.
#[test]
fn every_policy_gives_the_same_bits() {
    for ctx in contexts() {
        for dtype in FLOATS {
            for case in CASES {
                println!("{} {dtype} {case:?}", ctx.backend());
                let t = Tensors::new(&ctx, dtype, case);
                let all = run(&ctx, &t, Checkpointing::None);
                let mut saved = all.saved;
                for policy in POLICIES {
                    let less = run(&ctx, &t, policy);
                    assert!(less.saved <= saved, "{policy:?}");
                    saved = less.saved;
                    assert_eq!(less.out.bits(), all.out.bits(), "{policy:?}: out");
                    for (i, (a, b)) in less.gradients.iter().zip(&all.gradients).enumerate() {
                        assert_eq!(a.bits(), b.bits(), "{policy:?}: gradient {i}");
                    }
                }
                assert_eq!(saved, 0, "the input alone is kept");
            }
        }
    }
}

/// The layer's output by operations called one by one.
fn composed(ctx: &Context, t: &Tensors) -> TestTensor {
    let dtype = t.x.view().dtype();
    let poisoned = || TestTensor::poisoned(dtype, contiguous(&t.case.shape())).upload(ctx);
    let norm = |x: TensorRef<'_>, weight: &str, out: &mut DeviceTensor| {
        let params = rms_norm::Params {
            x: InOut::Apart {
                input: x,
                output: out.view_mut(),
            },
            residual: None,
            weight: t.parameter(weight),
            weight_offset: 0.5,
            epsilon: EPSILON,
        };
        rms_norm::forward(ctx, &params, Stream::DEFAULT).unwrap();
    };
    let (mut normed, mut hidden, mut out) = (poisoned(), poisoned(), poisoned());
    norm(t.x.view(), "attention_norm", &mut normed);
    let mut params = attention_block::Params {
        x: normed.view(),
        output: Output::Add(InOut::Apart {
            input: t.x.view(),
            output: hidden.view_mut(),
        }),
        ..t.attention()
    };
    let size = attention_block::workspace_size(ctx, &params).unwrap();
    let mut workspace = Buffer::new(ctx, size).unwrap();
    params.workspace = workspace.workspace();
    attention_block::forward(ctx, &params, Stream::DEFAULT).unwrap();
    norm(hidden.view(), "mlp_norm", &mut normed);
    let mut params = mlp::Params {
        x: normed.view(),
        output: Output::Add(InOut::Apart {
            input: hidden.view(),
            output: out.view_mut(),
        }),
        ..t.mlp()
    };
    let size = mlp::workspace_size(ctx, &params).unwrap();
    let mut workspace = Buffer::new(ctx, size).unwrap();
    params.workspace = workspace.workspace();
    mlp::forward(ctx, &params, Stream::DEFAULT).unwrap();
    out.download_output()
}

#[test]
fn it_is_its_operations() {
    for ctx in contexts() {
        for dtype in FLOATS {
            for case in CASES {
                let t = Tensors::new(&ctx, dtype, case);
                let (whole, parts) = (run(&ctx, &t, Checkpointing::Full).out, composed(&ctx, &t));
                // Gate and up are rounded on their way here, and not where the MLP is fused.
                let tolerance = match dtype {
                    DType::F32 => 2e-5,
                    DType::F16 => 1e-2,
                    _ => 6e-2,
                };
                for (a, b) in whole.values().iter().zip(parts.values()) {
                    assert!(
                        (a - b).abs() <= tolerance * (1.0 + b.abs()),
                        "{case:?} {dtype}: {a} {b}"
                    );
                }
            }
        }
    }
}

/// Along a direction of the input and of all parameters, the output changes as the gradients say.
#[test]
fn gradients_are_those_of_the_output() {
    let ctx = Context::cpu().unwrap();
    for case in CASES {
        let case = Case {
            accumulate: false,
            ..case
        };
        let t = Tensors::new(&ctx, DType::F32, case);
        let given = run(&ctx, &t, Checkpointing::Mlp);
        let rng = &mut rng();
        let names = PARAMETERS.iter().filter(|name| case.has(name));
        let mut directions =
            vec![TestTensor::normal(rng, DType::F32, *t.x.view().layout()).values()];
        directions.extend(
            names.map(|name| {
                TestTensor::normal(rng, DType::F32, contiguous(&shape_of(name))).values()
            }),
        );
        let predicted: f64 = given
            .gradients
            .iter()
            .zip(&directions)
            .flat_map(|(g, d)| g.values().into_iter().zip(d.clone()))
            .map(|(g, d)| g * d)
            .sum();
        let along = |step: f64| -> f64 {
            let moved = |tensor: &DeviceTensor, direction: &[f64]| {
                let mut host = tensor.download();
                let values = host.values();
                let at: Vec<f64> = values
                    .iter()
                    .zip(direction)
                    .map(|(v, d)| v + step * d)
                    .collect();
                host.set_values(&at);
                host.upload(&ctx)
            };
            let mut directions = directions.iter();
            let x = moved(&t.x, directions.next().unwrap());
            let parameters =
                PARAMETERS
                    .iter()
                    .zip(&t.parameters)
                    .map(|(name, p)| match case.has(name) {
                        true => moved(p, directions.next().unwrap()),
                        false => p.download().upload(&ctx),
                    });
            let t = Tensors {
                case,
                parameters: parameters.collect(),
                x,
                dout: t.dout.clone(),
                cu_seqlens: t.cu_seqlens.as_ref().map(|c| c.download().upload(&ctx)),
                positions: t.positions.as_ref().map(|c| c.download().upload(&ctx)),
            };
            let out = run(&ctx, &t, Checkpointing::None).out;
            out.values()
                .iter()
                .zip(t.dout.values())
                .map(|(o, d)| o * d)
                .sum()
        };
        let step = 1e-3;
        // Two orders of differences, so that what is left is rounding.
        let near = (along(step) - along(-step)) / (2.0 * step);
        let far = (along(2.0 * step) - along(-2.0 * step)) / (4.0 * step);
        let measured = (4.0 * near - far) / 3.0;
        let scale: f64 = given
            .gradients
            .iter()
            .flat_map(TestTensor::values)
            .map(|g| g * g)
            .sum();
        assert!(
            (measured - predicted).abs() <= 5e-3 * (1.0 + scale.sqrt()),
            "{case:?}: {measured} measured, {predicted} predicted"
        );
    }
}

/// What is wrong with a layer is said by the layer's own names.
#[test]
fn misuse_says_why() {
    let ctx = Context::cpu().unwrap();
    let t = Tensors::new(&ctx, DType::F32, BASE);
    let mut out = TestTensor::poisoned(DType::F32, contiguous(&BASE.shape())).upload(&ctx);
    let before = out.download();
    type Spoil = for<'a> fn(&mut decoder_layer::Params<'a>, &'a Tensors);
    let cases: [(Spoil, &str); 9] = [
        (
            |p, _| p.norm_epsilon = 0.0,
            "norm_epsilon is 0, it must be above 0",
        ),
        (
            |p, _| p.norm_weight_offset = f32::NAN,
            "norm_weight_offset is NaN, a finite number is needed",
        ),
        (
            |p, t| p.attention_norm = t.parameter("out").unwrap(),
            "attention_norm has shape [24, 64], expected [24]",
        ),
        (
            |p, t| p.mlp.down.weight = t.parameter("down").unwrap().narrowed(0, 0, 20).unwrap(),
            "down_weight has 20 rows, 24 are needed: x has as many columns",
        ),
        (
            |p, t| {
                let out = t.parameter("out").unwrap();
                p.attention.out_projection.weight = out.narrowed(0, 0, 20).unwrap();
            },
            "out_weight has 20 rows, 24 are needed: x has as many columns",
        ),
        (
            |p, _| p.attention.num_heads = 3,
            "num_heads is 3, a multiple of num_kv_heads 2 is needed",
        ),
        (
            |p, _| p.attention.num_heads = usize::MAX,
            "num_heads is 18446744073709551615, allowed: 1 to 1048576",
        ),
        (|p, _| p.saved = Workspace::none(), "saved has 0 bytes, "),
        (
            |p, _| p.workspace = Workspace::none(),
            "workspace_size is 0 bytes, ",
        ),
    ];
    let mut memory = [
        Buffer::new(&ctx, 1 << 20).unwrap(),
        Buffer::new(&ctx, 1 << 20).unwrap(),
    ];
    for (spoil, expected) in cases {
        let [saved, workspace] = &mut memory;
        let mut params = t.layer(
            Checkpointing::None,
            out.view_mut(),
            saved.workspace(),
            workspace.workspace(),
        );
        spoil(&mut params, &t);
        let error = decoder_layer::forward(&ctx, &params, Stream::DEFAULT).unwrap_err();
        let text = error.to_string();
        assert!(
            text.starts_with(&format!("decoder_layer: {expected}")),
            "{text}"
        );
    }
    // What queries refuse is refused for the same reason where memory lacks too.
    let mut narrow = TestTensor::poisoned(DType::F32, contiguous(&[3, 20])).upload(&ctx);
    let params = t.layer(
        Checkpointing::None,
        narrow.view_mut(),
        Workspace::none(),
        Workspace::none(),
    );
    let refused = decoder_layer::supported(&ctx, &params).unwrap_err();
    let error = decoder_layer::forward(&ctx, &params, Stream::DEFAULT).unwrap_err();
    assert_eq!(error.to_string(), refused.to_string());
    assert_eq!(out.download().bits(), before.bits(), "nothing was written");
}
