//! Outputs, in every dtype that candle has too.

use candle_core::{D, Device, Tensor};
use unsloth::ops::attention::{self, Params};
use unsloth::ops::linear::{self, Output, Weights};
use unsloth::ops::rms_norm;
use unsloth::ops::rope::{self, Angles, Rotation, Style};
use unsloth::ops::swiglu::{self, Activation, GateOrder, Tensors};
use unsloth::{DType, InOut, Stream, Workspace};

use crate::common::{FLOATS, TestTensor, contexts};
use crate::{assert_agrees, candle, normal, output};

#[test]
fn rms_norm() {
    for ctx in contexts() {
        for dtype in FLOATS {
            let (x, weight) = (normal(dtype, &[7, 192]), normal(dtype, &[192]));
            let (dx, dw) = (x.upload(&ctx), weight.upload(&ctx));
            let mut out = output(&ctx, dtype, &[7, 192]);
            let params = rms_norm::Params {
                x: InOut::Apart {
                    input: dx.view(),
                    output: out.view_mut(),
                },
                residual: None,
                weight: Some(dw.view()),
                weight_offset: 0.0,
                epsilon: 1e-5,
            };
            rms_norm::forward(&ctx, &params, Stream::DEFAULT).unwrap();
            let theirs = candle_nn::ops::rms_norm(&candle(&x), &candle(&weight), 1e-5).unwrap();
            assert_agrees("rms_norm", &out.download_output(), &theirs, 4.0);
        }
    }
}

#[test]
fn rope() {
    let (batch, seq, heads, dim) = (2, 9, 3, 64);
    for ctx in contexts() {
        for dtype in FLOATS {
            let x = normal(dtype, &[batch, seq, heads, dim]);
            let angles = normal(DType::F32, &[seq, dim / 2]);
            let table = |f: fn(f64) -> f64| {
                let values: Vec<f64> = angles.values().iter().map(|a| f(*a)).collect();
                TestTensor::of(DType::F32, &[seq, dim / 2], &values)
            };
            let (cos, sin) = (table(f64::cos), table(f64::sin));
            let (dx, dcos, dsin) = (x.upload(&ctx), cos.upload(&ctx), sin.upload(&ctx));
            for style in [Style::HalfSplit, Style::Interleaved] {
                let mut out = output(&ctx, dtype, &[batch, seq, heads, dim]);
                let params = rope::Params {
                    q: Some(InOut::Apart {
                        input: dx.view(),
                        output: out.view_mut(),
                    }),
                    rotation: Rotation {
                        style,
                        rotary_dim: 0,
                        angles: Angles::Table {
                            cos: dcos.view(),
                            sin: dsin.view(),
                        },
                    },
                    ..rope::Params::default()
                };
                rope::forward(&ctx, &params, Stream::DEFAULT).unwrap();
                let (cos, sin) = (candle(&cos), candle(&sin));
                let x = candle(&x);
                let (cos, sin) = (
                    cos.to_dtype(x.dtype()).unwrap(),
                    sin.to_dtype(x.dtype()).unwrap(),
                );
                let theirs = match style {
                    Style::Interleaved => {
                        let heads_first = x.transpose(1, 2).unwrap().contiguous().unwrap();
                        let y = candle_nn::rotary_emb::rope_i(&heads_first, &cos, &sin).unwrap();
                        y.transpose(1, 2).unwrap().contiguous().unwrap()
                    }
                    _ => candle_nn::rotary_emb::rope_thd(&x, &cos, &sin).unwrap(),
                };
                assert_agrees("rope", &out.download_output(), &theirs, 4.0);
            }
        }
    }
}

#[test]
fn swiglu() {
    for ctx in contexts() {
        for dtype in FLOATS {
            let packed = normal(dtype, &[5, 2 * 130]);
            let device = packed.upload(&ctx);
            for activation in [
                Activation::Silu,
                Activation::Gelu,
                Activation::GeluTanh,
                Activation::ReluSquared,
            ] {
                let mut out = output(&ctx, dtype, &[5, 130]);
                let params = swiglu::Params {
                    tensors: Tensors::Packed {
                        gate_up: device.view(),
                        order: GateOrder::GateFirst,
                        out: out.view_mut(),
                    },
                    activation,
                };
                swiglu::forward(&ctx, &params, Stream::DEFAULT).unwrap();
                let halves = candle(&packed).chunk(2, D::Minus1).unwrap();
                let gate = match activation {
                    Activation::Gelu => halves[0].gelu_erf(),
                    Activation::GeluTanh => halves[0].gelu(),
                    Activation::ReluSquared => halves[0].relu().and_then(|x| x.sqr()),
                    _ => halves[0].silu(),
                };
                let theirs = (gate.unwrap() * &halves[1]).unwrap();
                assert_agrees("swiglu", &out.download_output(), &theirs, 4.0);
            }
        }
    }
}

#[test]
fn linear() {
    const TERMS: usize = 96;
    for ctx in contexts() {
        // candle multiplies matrices of f32 and f16 on the CPU.
        for dtype in [DType::F32, DType::F16] {
            // Each of both sums rounds once a term, to either side.
            let units = 2.0 * (TERMS as f64).sqrt();
            for rows in [1, 5, 70] {
                let (x, weight) = (normal(dtype, &[rows, TERMS]), normal(dtype, &[130, TERMS]));
                let bias = normal(dtype, &[130]);
                let (dx, dw, db) = (x.upload(&ctx), weight.upload(&ctx), bias.upload(&ctx));
                let mut out = output(&ctx, dtype, &[rows, 130]);
                let params = linear::Params {
                    x_norm: None,
                    parallel: None,
                    x: dx.view(),
                    weights: Weights {
                        weight: dw.view(),
                        bias: Some(db.view()),
                    },
                    output: Output::Write(out.view_mut()),
                    workspace: Workspace::none(),
                };
                linear::forward(&ctx, &params, Stream::DEFAULT).unwrap();
                let product = candle(&x).matmul(&candle(&weight).t().unwrap()).unwrap();
                let theirs = product.broadcast_add(&candle(&bias)).unwrap();
                assert_agrees("linear", &out.download_output(), &theirs, units);
            }
        }
    }
}

#[test]
fn attention() {
    for ctx in contexts() {
        for (queries, causal) in [(1, false), (33, false), (33, true)] {
            let (keys, heads, dim) = (33, 4, 48);
            let q = normal(DType::F32, &[2, queries, heads, dim]);
            let k = normal(DType::F32, &[2, keys, heads, dim]);
            let v = normal(DType::F32, &[2, keys, heads, dim]);
            let (dq, dk, dv) = (q.upload(&ctx), k.upload(&ctx), v.upload(&ctx));
            let mut out = output(&ctx, DType::F32, &[2, queries, heads, dim]);
            let mut params = Params::new(dq.view(), dk.view(), dv.view(), out.view_mut());
            params.causal = causal;
            attention::forward(&ctx, &params, Stream::DEFAULT).unwrap();

            let heads_first = |t: &TestTensor| {
                let t = candle(t).transpose(1, 2).unwrap();
                t.contiguous().unwrap()
            };
            let (q, k, v) = (heads_first(&q), heads_first(&k), heads_first(&v));
            let scores = (q.matmul(&k.t().unwrap()).unwrap() / (dim as f64).sqrt()).unwrap();
            let hidden = |i: usize| causal && i % keys > i / keys;
            let mask: Vec<f32> = (0..queries * keys)
                .map(|i| if hidden(i) { f32::NEG_INFINITY } else { 0.0 })
                .collect();
            let mask = Tensor::from_vec(mask, (queries, keys), &Device::Cpu).unwrap();
            let scores = scores.broadcast_add(&mask).unwrap();
            let weights = candle_nn::ops::softmax_last_dim(&scores).unwrap();
            let theirs = weights.matmul(&v).unwrap().transpose(1, 2).unwrap();
            // Scores reach 5; exp makes an error of theirs as much larger relative to the weights.
            assert_agrees("attention", &out.download_output(), &theirs, 24.0);
        }
    }
}
