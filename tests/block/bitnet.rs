//! A layer of BitNet b1.58 2B-4T (arXiv 2504.12285), small, from its definition in f64: ternary matrices,
//! activations of 8 bits, a norm before each of the two matrices that lead back, a gate of squared ReLU.

use crate::common::workspace::poisoned_workspace;
use crate::common::{DeviceTensor, TestTensor, contiguous, rng};
use unsloth::ops::attention_block::{self, Projections};
use unsloth::ops::linear::{Output, Weights};
use unsloth::ops::mlp::{self, GateUp, Norm};
use unsloth::ops::quantize::{self, Rule};
use unsloth::ops::rms_norm;
use unsloth::ops::rope::{Angles, Positions, Rotation, Scaling};
use unsloth::ops::swiglu::Activation;
use unsloth::{Context, DType, InOut, Stream, TensorRef, Workspace};

const TOKENS: usize = 9;
const HIDDEN: usize = 256;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 64;
const INTERMEDIATE: usize = 384;
const EPSILON: f64 = 1e-5;
const THETA: f64 = 500_000.0;

/// A ternary matrix with one scale.
struct Matrix {
    codes: Vec<u8>,
    scale: Vec<f32>,
    shape: [usize; 2],
    /// In f64.
    values: Vec<f64>,
}

impl Matrix {
    /// `round(w / mean|w|)` of random floats, cut to -1, 0 and 1.
    fn random(ctx: &Context, shape: [usize; 2]) -> Matrix {
        let floats = TestTensor::normal(&mut rng(), DType::F32, contiguous(&shape)).upload(ctx);
        let mut matrix = Matrix {
            codes: vec![0; DType::Ternary.row_bytes(shape[0] * shape[1])],
            scale: vec![0.0],
            shape,
            values: Vec::new(),
        };
        // SAFETY: the vectors outlive the call, and nothing else uses them.
        let (out, scale) = unsafe {
            let codes = matrix.codes.as_mut_ptr().cast();
            let scale = matrix.scale.as_mut_ptr().cast();
            (
                unsloth::TensorMut::from_raw(codes, DType::Ternary, contiguous(&shape)),
                unsloth::TensorMut::from_raw(scale, DType::F32, contiguous(&[1])),
            )
        };
        let params = quantize::Params {
            x: floats.view(),
            out,
            scale,
            sum: None,
            rule: Rule::AbsMean,
            workspace: Workspace::none(),
        };
        quantize::forward(ctx, &params, Stream::DEFAULT).unwrap();
        // The mean of normal numbers is 0.8, with which scores would be far apart.
        matrix.scale[0] *= 0.06;
        let value = |i: usize| {
            let byte = matrix.codes[i / 128 * 32 + i % 32];
            let code = f64::from(byte >> (2 * (i % 128 / 32)) & 3) - 1.0;
            code * f64::from(matrix.scale[0])
        };
        matrix.values = (0..shape[0] * shape[1]).map(value).collect();
        matrix
    }

    fn weights(&self) -> Weights<'_> {
        // SAFETY: the codes are those of so many elements, and are borrowed.
        let weight = unsafe {
            let codes = self.codes.as_ptr().cast();
            TensorRef::from_raw(codes, DType::Ternary, contiguous(&self.shape))
        };
        let scale = TensorRef::from_slice(&self.scale, &[1]).unwrap();
        Weights {
            weight: weight.with_scales(scale).unwrap(),
            bias: None,
        }
    }

    /// Rows of activations, rounded to 8 bits each, by the matrix.
    fn product(&self, x: &[f64]) -> Vec<f64> {
        let depth = self.shape[1];
        let mut out = Vec::new();
        for row in x.chunks(depth) {
            let most = row.iter().fold(0.0f64, |most, x| most.max(x.abs()));
            let scale = most / 127.0;
            let codes: Vec<f64> = row
                .iter()
                .map(|x| (x / scale).round_ties_even() * scale)
                .collect();
            let dot = |w: &[f64]| w.iter().zip(&codes).map(|(w, x)| w * x).sum::<f64>();
            out.extend(self.values.chunks(depth).map(dot));
        }
        out
    }
}

fn norm(x: &[f64], gains: &[f64]) -> Vec<f64> {
    let of_row = |row: &[f64]| {
        let square = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
        let scale = 1.0 / (square + EPSILON).sqrt();
        let pairs = row.iter().zip(gains);
        pairs.map(|(x, g)| x * scale * g).collect::<Vec<_>>()
    };
    x.chunks(gains.len()).flat_map(of_row).collect()
}

/// Turns the halves of each head by their token's angles.
fn turn(x: &mut [f64], heads: usize) {
    for (token, row) in x.chunks_mut(heads * HEAD_DIM).enumerate() {
        for head in row.chunks_mut(HEAD_DIM) {
            for i in 0..HEAD_DIM / 2 {
                let angle = token as f64 * THETA.powf(-2.0 * i as f64 / HEAD_DIM as f64);
                let (sin, cos) = angle.sin_cos();
                let (a, b) = (head[i], head[i + HEAD_DIM / 2]);
                head[i] = a * cos - b * sin;
                head[i + HEAD_DIM / 2] = b * cos + a * sin;
            }
        }
    }
}

/// Causal attention of `[tokens, heads, dim]`.
fn attention(q: &[f64], k: &[f64], v: &[f64]) -> Vec<f64> {
    let at = |x: &[f64], heads, token, head| -> Vec<f64> {
        let start = (token * heads + head) * HEAD_DIM;
        x[start..start + HEAD_DIM].to_vec()
    };
    let mut out = Vec::new();
    for token in 0..TOKENS {
        for head in 0..HEADS {
            let of = head / (HEADS / KV_HEADS);
            let query = at(q, HEADS, token, head);
            let weight = |key: usize| {
                let key = at(k, KV_HEADS, key, of);
                let dot: f64 = query.iter().zip(&key).map(|(q, k)| q * k).sum();
                (dot / (HEAD_DIM as f64).sqrt()).exp()
            };
            let weights: Vec<f64> = (0..=token).map(weight).collect();
            let sum: f64 = weights.iter().sum();
            let mut mixed = vec![0.0; HEAD_DIM];
            for (key, weight) in weights.iter().enumerate() {
                for (m, v) in mixed.iter_mut().zip(at(v, KV_HEADS, key, of)) {
                    *m += weight / sum * v;
                }
            }
            out.extend(mixed);
        }
    }
    out
}

fn add(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

#[test]
fn a_layer_agrees_with_its_definition() {
    let ctx = Context::cpu().unwrap();
    let matrix = |rows, columns| Matrix::random(&ctx, [rows, columns]);
    let (of_q, of_kv) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
    let [q, k, v] = [of_q, of_kv, of_kv].map(|rows| matrix(rows, HIDDEN));
    let out_matrix = matrix(HIDDEN, of_q);
    let [gate, up] = [INTERMEDIATE; 2].map(|rows| matrix(rows, HIDDEN));
    let down = matrix(HIDDEN, INTERMEDIATE);
    let gains = |n| TestTensor::normal(&mut rng(), DType::F32, contiguous(&[n]));
    let [attention_norm, mlp_norm] = [HIDDEN; 2].map(gains);
    let (attended_norm, intermediate_norm) = (gains(of_q), gains(INTERMEDIATE));
    let x = TestTensor::normal(&mut rng(), DType::F32, contiguous(&[TOKENS, HIDDEN]));

    // The definition.
    let hidden = x.values();
    let normed = norm(&hidden, &attention_norm.values());
    let [mut queries, mut keys, values] = [&q, &k, &v].map(|m| m.product(&normed));
    turn(&mut queries, HEADS);
    turn(&mut keys, KV_HEADS);
    let attended = attention(&queries, &keys, &values);
    let attended = norm(&attended, &attended_norm.values());
    let middle = add(&hidden, &out_matrix.product(&attended));
    let normed = norm(&middle, &mlp_norm.values());
    let gated = gate.product(&normed).into_iter().zip(up.product(&normed));
    let activated: Vec<f64> = gated.map(|(g, u)| g.max(0.0).powi(2) * u).collect();
    let activated = norm(&activated, &intermediate_norm.values());
    let expected = add(&middle, &down.product(&activated));

    // The operations.
    let device = |t: &TestTensor| t.upload(&ctx);
    let mut hidden = device(&x);
    let mut normed = TestTensor::poisoned(DType::F32, x.layout).upload(&ctx);
    let normalise = |x: &DeviceTensor, out: &mut DeviceTensor, gains: &TestTensor| {
        let gains = gains.upload(&ctx);
        let params = rms_norm::Params {
            x: InOut::Apart {
                input: x.view(),
                output: out.view_mut(),
            },
            residual: None,
            weight: Some(gains.view()),
            weight_offset: 0.0,
            epsilon: EPSILON as f32,
        };
        rms_norm::forward(&ctx, &params, Stream::DEFAULT).unwrap();
    };
    let (attended_gains, intermediate_gains) = (device(&attended_norm), device(&intermediate_norm));
    normalise(&hidden, &mut normed, &attention_norm);
    let mut block = attention_block::Params {
        x_norm: None,
        parallel: None,
        x: normed.view(),
        num_heads: HEADS,
        num_kv_heads: KV_HEADS,
        head_dim: HEAD_DIM,
        v_head_dim: HEAD_DIM,
        projections: Projections::Apart {
            q: q.weights(),
            k: k.weights(),
            v: v.weights(),
        },
        q_norm: None,
        k_norm: None,
        attended_norm: Some(attended_gains.view()),
        norm_weight_offset: 0.0,
        norm_epsilon: EPSILON as f32,
        rotation: Some(Rotation {
            angles: Angles::Computed {
                theta: THETA as f32,
                scaling: Scaling::None,
                freq_factors: None,
                attention_factor: 0.0,
            },
            ..Rotation::default()
        }),
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
        out_projection: out_matrix.weights(),
        output: Output::Add(InOut::InPlace(hidden.view_mut())),
        workspace: Workspace::none(),
        qkv_out: None,
        attended_out: None,
        lse_out: None,
    };
    let size = attention_block::workspace_size(&ctx, &block).unwrap();
    let mut workspace = poisoned_workspace(&ctx, size);
    block.workspace = workspace.workspace();
    attention_block::forward(&ctx, &block, Stream::DEFAULT).unwrap();

    normalise(&hidden, &mut normed, &mlp_norm);
    let mut feed_forward = mlp::Params {
        x_norm: None,
        parallel: None,
        x: normed.view(),
        gate_up: GateUp::Apart {
            gate: gate.weights(),
            up: up.weights(),
        },
        activation: Activation::ReluSquared,
        intermediate_norm: Some(Norm {
            weight: intermediate_gains.view(),
            epsilon: EPSILON as f32,
        }),
        down: down.weights(),
        output: Output::Add(InOut::InPlace(hidden.view_mut())),
        workspace: Workspace::none(),
        gate_up_out: None,
    };
    let size = mlp::workspace_size(&ctx, &feed_forward).unwrap();
    let mut workspace = poisoned_workspace(&ctx, size);
    feed_forward.workspace = workspace.workspace();
    mlp::forward(&ctx, &feed_forward, Stream::DEFAULT).unwrap();

    // Of a sum in f32 beside one in f64 a code may be the next one: a 127th of the greatest activation.
    let got = hidden.download_output().values();
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>();
    let error = square(&mut got.iter().zip(&expected).map(|(a, b)| a - b));
    let added = square(&mut expected.iter().zip(x.values()).map(|(a, b)| a - b));
    assert!(error <= 1e-5 * added, "{error} {added}");
}
