//! Cross-entropy, of logits and of a linear layer's output, and log-probabilities with entropies.

use candle_core::{D, Result, Tensor};
use unsloth::ops::cross_entropy::{self, IGNORE_INDEX, Logits, Reduction};
use unsloth::ops::linear::Weights;
use unsloth::ops::{linear_cross_entropy, linear_logprob};
use unsloth::{Context, DType, InOut, Stream, Workspace};

use super::{Leaf, assert_gradients, gradients};
use crate::common::workspace::poisoned_workspace;
use crate::common::{DeviceTensor, TestTensor, contexts, for_each_case};
use crate::{assert_agrees, normal, output};

const TOKENS: usize = 30;
const HIDDEN: usize = 48;
const VOCAB: usize = 130;
const UNITS: f64 = 32.0;

#[derive(Clone, Copy, Debug)]
struct Case {
    reduction: Reduction,
    label_smoothing: f32,
    z_loss: f32,
    softcap: f32,
}

const BASE: Case = Case {
    reduction: Reduction::Mean,
    label_smoothing: 0.0,
    z_loss: 0.0,
    softcap: 0.0,
};

const CASES: [Case; 5] = [
    BASE,
    Case {
        reduction: Reduction::Sum,
        ..BASE
    },
    Case {
        label_smoothing: 0.1,
        ..BASE
    },
    Case {
        z_loss: 0.01,
        ..BASE
    },
    Case {
        label_smoothing: 0.2,
        z_loss: 0.05,
        softcap: 2.0,
        ..BASE
    },
];

/// Targets, of which every fifth is to be ignored.
fn targets() -> Vec<Option<usize>> {
    (0..TOKENS)
        .map(|i| (i % 5 != 3).then_some(i * 37 % VOCAB))
        .collect()
}

/// For ours.
fn ids(ctx: &Context) -> DeviceTensor {
    let id = |target: &Option<usize>| target.map_or(IGNORE_INDEX as f64, |t| t as f64);
    let ids: Vec<f64> = targets().iter().map(id).collect();
    TestTensor::of(DType::I32, &[TOKENS], &ids).upload(ctx)
}

/// For candle's: 1 at the target of each token, `[TOKENS, VOCAB]`, and 1 of each token that counts.
fn chosen() -> (Tensor, Tensor) {
    let (mut chosen, mut counts) = (vec![0f32; TOKENS * VOCAB], vec![0f32; TOKENS]);
    for (i, target) in targets().into_iter().enumerate() {
        if let Some(target) = target {
            chosen[i * VOCAB + target] = 1.0;
            counts[i] = 1.0;
        }
    }
    let device = &candle_core::Device::Cpu;
    (
        Tensor::from_vec(chosen, (TOKENS, VOCAB), device).unwrap(),
        Tensor::from_vec(counts, TOKENS, device).unwrap(),
    )
}

fn capped(logits: &Tensor, softcap: f32) -> Result<Tensor> {
    match f64::from(softcap) {
        0.0 => Ok(logits.clone()),
        cap => (logits / cap)?.tanh()? * cap,
    }
}

/// The loss by its formula.
fn loss(logits: &Tensor, case: &Case) -> Result<Tensor> {
    let (chosen, counts) = chosen();
    let smoothing = f64::from(case.label_smoothing);
    let s = capped(logits, case.softcap)?;
    let lse = s.log_sum_exp(1)?;
    let of_target = ((&s * chosen)?.sum(1)? * (1.0 - smoothing))?;
    let of_all = (s.mean(1)? * smoothing)?;
    let z_loss = (lse.sqr()? * f64::from(case.z_loss))?;
    let losses = (((lse - of_target)? - of_all)? + z_loss)?;
    let sum = (losses * &counts)?.sum_all()?;
    match case.reduction {
        Reduction::Sum => Ok(sum),
        _ => sum / counts.sum_all()?,
    }
}

fn product(x: &Leaf, weight: &Leaf, bias: &Leaf) -> Result<Tensor> {
    let product = x.theirs.matmul(&weight.theirs.t()?)?;
    product.broadcast_add(&bias.theirs)
}

/// The gradient of the loss, on the device and for candle.
fn dloss(ctx: &Context) -> (TestTensor, DeviceTensor) {
    let dloss = TestTensor::of(DType::F32, &[1], &[3.0]);
    let ours = dloss.upload(ctx);
    (dloss, ours)
}

#[test]
fn cross_entropy() {
    for ctx in contexts() {
        for_each_case(&CASES, |case| {
            let logits = Leaf::normal(&ctx, &[TOKENS, VOCAB]);
            let (ids, (dloss, ours)) = (ids(&ctx), dloss(&ctx));
            let mut result = output(&ctx, DType::F32, &[1]);
            let mut dlogits = logits.gradient(&ctx);
            let mut params = cross_entropy::Params {
                logits: Logits::Differentiate(InOut::Apart {
                    input: logits.ours.view(),
                    output: dlogits.view_mut(),
                }),
                targets: ids.view(),
                loss: Some(result.view_mut()),
                losses: None,
                lse: None,
                dloss: Some(ours.view()),
                denominator: None,
                reduction: case.reduction,
                ignore_index: IGNORE_INDEX,
                label_smoothing: case.label_smoothing,
                z_loss: case.z_loss,
                softcap: case.softcap,
                workspace: Workspace::none(),
            };
            let size = cross_entropy::workspace_size(&ctx, &params).unwrap();
            let mut workspace = poisoned_workspace(&ctx, size);
            params.workspace = workspace.workspace();
            cross_entropy::forward(&ctx, &params, Stream::DEFAULT).unwrap();

            let y = loss(&logits.theirs, case).unwrap();
            assert_agrees("cross_entropy", &result.download_output(), &y, UNITS);
            let theirs = gradients(&[(Ok(y), &dloss)]);
            assert_gradients(
                "cross_entropy",
                &[("logits", &logits, &dlogits)],
                &theirs,
                UNITS,
            );
        });
    }
}

#[test]
fn linear_cross_entropy() {
    for ctx in contexts() {
        // In one chunk, and in chunks of which the last is shorter.
        let cases = CASES.map(|case| [(case, 0), (case, 16)]);
        for_each_case(cases.as_flattened(), |&(case, chunk_tokens)| {
            let x = Leaf::normal(&ctx, &[TOKENS, HIDDEN]);
            let weight = Leaf::matrix(&ctx, [VOCAB, HIDDEN]);
            let bias = Leaf::normal(&ctx, &[VOCAB]);
            let (ids, (dloss, ours)) = (ids(&ctx), dloss(&ctx));
            let mut result = output(&ctx, DType::F32, &[1]);
            let mut dx = x.gradient(&ctx);
            let mut dweight = weight.gradient(&ctx);
            let mut dbias = bias.gradient(&ctx);
            let mut params = linear_cross_entropy::Params {
                vocabulary: None,
                x: x.ours.view(),
                weights: Weights {
                    weight: weight.ours.view(),
                    bias: Some(bias.ours.view()),
                },
                targets: ids.view(),
                loss: Some(result.view_mut()),
                losses: None,
                lse: None,
                dx: Some(dx.view_mut()),
                dweight: Some(dweight.view_mut()),
                dbias: Some(dbias.view_mut()),
                accumulate: false,
                dloss: Some(ours.view()),
                denominator: None,
                reduction: case.reduction,
                ignore_index: IGNORE_INDEX,
                label_smoothing: case.label_smoothing,
                z_loss: case.z_loss,
                softcap: case.softcap,
                chunk_tokens,
                workspace: Workspace::none(),
            };
            let size = linear_cross_entropy::workspace_size(&ctx, &params).unwrap();
            let mut workspace = poisoned_workspace(&ctx, size);
            params.workspace = workspace.workspace();
            linear_cross_entropy::forward(&ctx, &params, Stream::DEFAULT).unwrap();

            let logits = product(&x, &weight, &bias).unwrap();
            let y = loss(&logits, &case).unwrap();
            assert_agrees("linear_cross_entropy", &result.download_output(), &y, UNITS);
            let theirs = gradients(&[(Ok(y), &dloss)]);
            let leaves = [
                ("x", &x, &dx),
                ("weight", &weight, &dweight),
                ("bias", &bias, &dbias),
            ];
            assert_gradients("linear_cross_entropy", &leaves, &theirs, UNITS);
        });
    }
}

#[test]
fn linear_logprob() {
    for ctx in contexts() {
        // Temperature, softcap and tokens of a chunk.
        for_each_case(
            &[(0.0, 0.0, 0), (0.7, 2.0, 16)],
            |&(temperature, softcap, chunk_tokens)| {
                let x = Leaf::normal(&ctx, &[TOKENS, HIDDEN]);
                let weight = Leaf::matrix(&ctx, [VOCAB, HIDDEN]);
                let bias = Leaf::normal(&ctx, &[VOCAB]);
                let ids = ids(&ctx);
                let [dlogprobs, dentropy] = [0, 1].map(|_| normal(DType::F32, &[TOKENS]));
                let (of_logprobs, of_entropy) = (dlogprobs.upload(&ctx), dentropy.upload(&ctx));
                let mut dx = x.gradient(&ctx);
                let mut dweight = weight.gradient(&ctx);
                let mut dbias = bias.gradient(&ctx);
                let mut params = linear_logprob::backward::Params {
                    x: x.ours.view(),
                    weights: Weights {
                        weight: weight.ours.view(),
                        bias: Some(bias.ours.view()),
                    },
                    ids: ids.view(),
                    dlogprobs: Some(of_logprobs.view()),
                    dentropy: Some(of_entropy.view()),
                    dx: Some(dx.view_mut()),
                    dweight: Some(dweight.view_mut()),
                    dbias: Some(dbias.view_mut()),
                    accumulate: false,
                    ignore_index: IGNORE_INDEX,
                    temperature,
                    softcap,
                    chunk_tokens,
                    workspace: Workspace::none(),
                };
                let size = linear_logprob::backward::workspace_size(&ctx, &params).unwrap();
                let mut workspace = poisoned_workspace(&ctx, size);
                params.workspace = workspace.workspace();
                linear_logprob::backward(&ctx, &params, Stream::DEFAULT).unwrap();

                let (chosen, counts) = chosen();
                let theirs = || {
                    let s = capped(&product(&x, &weight, &bias)?, softcap)?;
                    let s = match f64::from(temperature) {
                        0.0 => s,
                        temperature => (s / temperature)?,
                    };
                    let lse = s.log_sum_exp(1)?;
                    let logits = s.broadcast_sub(&lse.unsqueeze(1)?)?;
                    let logprobs = (&logits * chosen)?.sum(1)?;
                    let entropy = (logits.exp()? * logits)?.sum(D::Minus1)?.neg()? * counts;
                    Ok::<_, candle_core::Error>((logprobs, entropy))
                };
                let (logprobs, entropy) = theirs().unwrap();
                let theirs = gradients(&[(Ok(logprobs), &dlogprobs), (entropy, &dentropy)]);
                let leaves = [
                    ("x", &x, &dx),
                    ("weight", &weight, &dweight),
                    ("bias", &bias, &dbias),
                ];
                assert_gradients("linear_logprob", &leaves, &theirs, UNITS);
            },
        );
    }
}
