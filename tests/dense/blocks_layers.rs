//! Weights in blocks in the operations that are made of products.

use super::blocks::{Matrix, nmse};
use crate::common::{TestTensor, contexts, contiguous, rng};
use unsloth::ops::attention_block::{self, Projections};
use unsloth::ops::linear::{Output, Weights};
use unsloth::ops::mlp::{self, GateUp};
use unsloth::ops::rope::Positions;
use unsloth::ops::swiglu::{Activation, GateOrder};
use unsloth::{Context, DType, InOut, Stream, Workspace};

/// A block added to a constant; weights are gate's, up's and down's.
fn mlp_of(ctx: &Context, x: &TestTensor, [gate, up, down]: [Weights<'_>; 3]) -> Vec<f64> {
    mlp_by(ctx, x, GateUp::Apart { gate, up }, down)
}

fn mlp_by(ctx: &Context, x: &TestTensor, gate_up: GateUp<'_>, down: Weights<'_>) -> Vec<f64> {
    let dtype = x.dtype;
    let x = x.upload(ctx);
    let constant = vec![0.5; x.layout.num_elements()];
    let mut out = TestTensor::of(dtype, x.layout.shape(), &constant).upload(ctx);
    let mut params = mlp::Params {
        x_norm: None,
        parallel: None,
        x: x.view(),
        gate_up,
        activation: Activation::Silu,
        intermediate_norm: None,
        down,
        output: Output::Add(InOut::InPlace(out.view_mut())),
        workspace: Workspace::none(),
        gate_up_out: None,
    };
    let size = mlp::workspace_size(ctx, &params).unwrap();
    let memory = TestTensor::poisoned(DType::F32, contiguous(&[size.div_ceil(4)])).upload(ctx);
    // SAFETY: the tensor's elements, which nothing else uses.
    params.workspace = unsafe { Workspace::from_raw(memory.data().cast(), size) };
    mlp::forward(ctx, &params, Stream::DEFAULT).unwrap();
    out.download_output().values()
}

/// Residual and activation are those of float weights, whose formats may differ.
#[test]
fn mlps_are_those_of_the_decoded_weights() {
    let formats = [
        [DType::Q4_0, DType::Q4_0, DType::Q8_0],
        [DType::Q4K, DType::Q6K, DType::Q5_1],
    ];
    for ctx in contexts() {
        for [gate, up, down] in formats {
            let [gate, up] = [gate, up].map(|format| Matrix::random(&ctx, format, [512, 256], 0));
            let down = Matrix::random(&ctx, down, [256, 512], 0);
            // Some steps of rounding to 16 bits; what products are off by is told elsewhere.
            for (dtype, rows) in [
                (DType::F32, 1),
                (DType::F32, 40),
                (DType::F16, 3),
                (DType::F16, 70),
            ] {
                let x = TestTensor::normal(&mut rng(), dtype, contiguous(&[rows, 256]));
                let wide = TestTensor::of(DType::F32, x.layout.shape(), &x.values());
                let decoded = [&gate, &up, &down].map(|matrix| matrix.decoded(&ctx));
                let plain = decoded.each_ref().map(|weight| Weights {
                    weight: weight.view(),
                    bias: None,
                });
                let expected = mlp_of(&ctx, &wide, plain);
                for (float, most) in [(true, 1e-10), (false, 1e-8)] {
                    let most = if dtype == DType::F32 { most } else { 1e-6 };
                    let weights = [&gate, &up, &down].map(|matrix| matrix.weights(float));
                    let y = mlp_of(&ctx, &x, weights);
                    let error = nmse(&y, &expected);
                    assert!(error < most, "{float} {rows} {dtype}: {error}");
                }
            }
        }
    }
}

/// Gate and up of one matrix, which are one product of many rows on a GPU.
#[test]
fn gate_and_up_may_be_one_matrix() {
    let [hidden, intermediate] = [512, 1024];
    for ctx in contexts() {
        for format in [DType::Q4_0, DType::Q6K] {
            let both = Matrix::random(&ctx, format, [2 * intermediate, hidden], 0);
            let down = Matrix::random(&ctx, DType::Q8_0, [hidden, intermediate], 0);
            let plain = |values: &[f64], shape: &[usize]| {
                TestTensor::of(DType::F32, shape, values).upload(&ctx)
            };
            let halves = both.values.chunks(intermediate * hidden);
            let halves: Vec<_> = halves
                .map(|half| plain(half, &[intermediate, hidden]))
                .collect();
            let plain_down = plain(&down.values, &[hidden, intermediate]);
            for rows in [3, 70, 300] {
                let x = TestTensor::normal(&mut rng(), DType::F16, contiguous(&[rows, hidden]));
                let wide = TestTensor::of(DType::F32, x.layout.shape(), &x.values());
                for (order, [gate, up]) in
                    [(GateOrder::GateFirst, [0, 1]), (GateOrder::UpFirst, [1, 0])]
                {
                    let [gate, up] = [gate, up].map(|i| &halves[i]);
                    let plain = [gate, up, &plain_down].map(|weight| Weights {
                        weight: weight.view(),
                        bias: None,
                    });
                    let packed = GateUp::Packed {
                        weights: both.weights(false),
                        order,
                    };
                    let y = mlp_by(&ctx, &x, packed, down.weights(false));
                    let error = nmse(&y, &mlp_of(&ctx, &wide, plain));
                    assert!(error < 1e-6, "{format} {rows} {order:?}: {error}");
                }
            }
        }
    }
}

/// A gate whose weights do not agree is rounded as the more exact of them asks.
#[test]
fn several_weights_are_rounded_alike() {
    let ctx = Context::cpu().unwrap();
    let [gate, up] = [(); 2].map(|()| Matrix::random(&ctx, DType::Q4_1, [96, 64], 0));
    let down = Matrix::random(&ctx, DType::Q4_1, [64, 96], 0);
    let x = TestTensor::normal(&mut rng(), DType::F32, contiguous(&[33, 64]));
    let run = |gate, up| mlp_of(&ctx, &x, [gate, up, down.weights(false)]);
    let words = run(gate.weights(false), up.weights(false));
    assert_eq!(run(gate.int8_weights(), up.weights(false)), words);
    assert_eq!(run(gate.weights(false), up.int8_weights()), words);
    let error = nmse(&run(gate.int8_weights(), up.int8_weights()), &words);
    assert!(error < 1e-4, "{error}");
}

/// Four heads of 64 on two, 256 columns.
fn attention_of(ctx: &Context, x: &TestTensor, [qkv, out_weight]: [Weights<'_>; 2]) -> Vec<f64> {
    let x = x.upload(ctx);
    let mut out = TestTensor::poisoned(x.dtype, x.layout).upload(ctx);
    let mut params = attention_block::Params {
        x_norm: None,
        parallel: None,
        x: x.view(),
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 64,
        v_head_dim: 64,
        projections: Projections::Packed(qkv),
        q_norm: None,
        k_norm: None,
        norm_weight_offset: 0.0,
        norm_epsilon: 0.0,
        rotation: None,
        positions: Positions::From(0),
        cache: None,
        cu_seqlens: None,
        max_seqlen: 0,
        scale: 0.0,
        softcap: 0.0,
        bidirectional: false,
        window: 0,
        alibi_slopes: None,
        sinks: None,
        attended_norm: None,
        out_projection: out_weight,
        output: Output::Write(out.view_mut()),
        workspace: Workspace::none(),
        qkv_out: None,
        attended_out: None,
        lse_out: None,
    };
    let size = attention_block::workspace_size(ctx, &params).unwrap();
    let memory = TestTensor::poisoned(DType::F32, contiguous(&[size.div_ceil(4)])).upload(ctx);
    // SAFETY: the tensor's elements, which nothing else uses.
    params.workspace = unsafe { Workspace::from_raw(memory.data().cast(), size) };
    attention_block::forward(ctx, &params, Stream::DEFAULT).unwrap();
    out.download_output().values()
}

#[test]
fn attention_blocks_are_those_of_the_decoded_weights() {
    for ctx in contexts() {
        let qkv = Matrix::random(&ctx, DType::Q4K, [512, 256], 0);
        let out = Matrix::random(&ctx, DType::Q6K, [256, 256], 0);
        for (dtype, rows, most) in [
            (DType::F32, 3, 1e-8),
            (DType::F16, 3, 1e-5),
            (DType::F16, 70, 1e-5),
        ] {
            let scaled = TestTensor::normal(&mut rng(), dtype, contiguous(&[rows, 256]));
            let scaled: Vec<f64> = scaled.values().iter().map(|x| x / 32.0).collect();
            let x = TestTensor::of(dtype, &[rows, 256], &scaled);
            let wide = TestTensor::of(DType::F32, x.layout.shape(), &x.values());
            let decoded = [&qkv, &out].map(|matrix| matrix.decoded(&ctx));
            let plain = decoded.each_ref().map(|weight| Weights {
                weight: weight.view(),
                bias: None,
            });
            let expected = attention_of(&ctx, &wide, plain);
            let y = attention_of(&ctx, &x, [&qkv, &out].map(|matrix| matrix.weights(false)));
            let error = nmse(&y, &expected);
            assert!(error < most, "{rows} {dtype}: {error}");
        }
    }
}
