//! Cross-entropy of a linear layer's output and its gradients, in chunks, against the composition of
//! their definitions, which is proved by differences; against the operations one by one; misuse.

mod misuse;

use crate::common::head::{
    EXACT, Inputs, Layer, PLAIN, greatest, layers, magnitudes, run_in_workspace,
};
use crate::common::reference::cross_entropy::{Loss, Tokens};
use crate::common::reference::linear::linear;
use crate::common::rules::epsilon;
use crate::common::{
    DeviceTensor, FLOATS, TestTensor, assert_flash_rule_of_sums, contexts, contiguous, rng, rounded,
};
use crate::features::Features;
use half::bf16;
use rand::Rng;
use unsloth::ops::cross_entropy::{self, IGNORE_INDEX, Logits, Reduction};
use unsloth::ops::linear::{self, Output, Weights};
use unsloth::ops::linear_cross_entropy::{self as head, Params};
use unsloth::{Context, ContextOptions, DType, InOut, Stream, Workspace};

#[derive(Clone, Copy, Debug)]
struct Case {
    layer: Layer,
    loss: Loss,
    reduction: Reduction,
    /// Given from outside.
    denominator: Option<f64>,
    dloss: Option<f64>,
    /// Whether each token's loss is asked for.
    losses: bool,
}

fn cases() -> Vec<Case> {
    let case = |(i, (layer, features)): (usize, (Layer, usize))| {
        let of_loss = Features::new(features, layer.ignore_index);
        Case {
            layer: Layer {
                gradients: match i % 8 {
                    3 => [false; 3],
                    _ => layer.gradients,
                },
                ..layer
            },
            loss: of_loss.loss,
            reduction: of_loss.reduction,
            denominator: of_loss.denominator,
            dloss: of_loss.dloss,
            losses: of_loss.losses,
        }
    };
    layers().into_iter().enumerate().map(case).collect()
}

/// A case of contiguous tensors.
fn plain_case(tokens: usize, sizes: (usize, usize)) -> Case {
    Case {
        layer: Layer::plain(tokens, sizes),
        loss: Loss {
            ignore_index: IGNORE_INDEX,
            label_smoothing: 0.1,
            z_loss: 0.01,
            softcap: 3.0,
        },
        reduction: Reduction::Mean,
        denominator: None,
        dloss: None,
        losses: true,
    }
}

impl Case {
    fn divisor(&self, tokens: &Tokens) -> f64 {
        match self.reduction {
            Reduction::Sum => 1.0,
            _ => self.denominator.unwrap_or(tokens.num_valid.max(1) as f64),
        }
    }

    /// What the gradient of a token's loss is multiplied by.
    fn scale(&self, tokens: &Tokens) -> f64 {
        self.dloss.unwrap_or(1.0) / self.divisor(tokens)
    }

    fn loss(&self, tokens: &Tokens) -> f64 {
        let losses = rounded(DType::F32, &tokens.losses);
        losses.iter().sum::<f64>() / self.divisor(tokens)
    }
}

fn scaled(values: &[f64], by: f64) -> Vec<f64> {
    values.iter().map(|v| v * by).collect()
}

/// What a call has written.
#[derive(Debug, Default, PartialEq)]
struct Written {
    loss: Vec<f64>,
    losses: Vec<f64>,
    lse: Vec<f64>,
    gradients: [Option<Vec<f64>>; 3],
}

/// Runs a case with what is needed of a workspace, or with all that is useful. `before` is what the
/// gradients of parameters hold.
fn run(
    ctx: &Context,
    case: &Case,
    inputs: &Inputs,
    before: &[TestTensor; 2],
    useful: bool,
) -> Written {
    let (there, layer) = (inputs.upload(ctx), &case.layer);
    let number =
        |value: Option<f64>| value.map(|v| TestTensor::of(DType::F32, &[1], &[v]).upload(ctx));
    let (dloss, denominator) = (number(case.dloss), number(case.denominator));
    let poisoned = |dtype, layout| TestTensor::poisoned_at(dtype, layout, layer.skew).upload(ctx);
    let of_tokens = || {
        let layout = contiguous(layer.ids.shape());
        case.losses.then(|| poisoned(DType::F32, layout))
    };
    let (mut losses, mut lse) = (of_tokens(), of_tokens());
    let mut loss = poisoned(DType::F32, contiguous(&[1]));
    let mut gradients = [
        poisoned(inputs.x.dtype, layer.dx),
        before[0].upload(ctx),
        before[1].upload(ctx),
    ];
    let [dx, dweight, dbias] = gradients.each_mut().map(DeviceTensor::view_mut);
    let wanted = layer.gradients;
    let mut params = Params {
        vocabulary: None,
        x: there.x.view(),
        weights: there.weights(),
        targets: there.ids.view(),
        loss: Some(loss.view_mut()),
        losses: losses.as_mut().map(DeviceTensor::view_mut),
        lse: lse.as_mut().map(DeviceTensor::view_mut),
        dx: wanted[0].then_some(dx),
        dweight: wanted[1].then_some(dweight),
        dbias: wanted[2].then_some(dbias),
        accumulate: layer.accumulate,
        dloss: dloss.as_ref().map(|t| t.view()),
        denominator: denominator.as_ref().map(|t| t.view()),
        reduction: case.reduction,
        ignore_index: case.loss.ignore_index,
        label_smoothing: case.loss.label_smoothing as f32,
        z_loss: case.loss.z_loss as f32,
        softcap: case.loss.softcap as f32,
        chunk_tokens: layer.chunk_tokens,
        workspace: Workspace::none(),
    };
    head::supported(ctx, &params).unwrap();
    let size = head::workspace_size(ctx, &params).unwrap();
    run_in_workspace(ctx, size, useful, |workspace| {
        params.workspace = workspace;
        head::forward(ctx, &params, Stream::DEFAULT)
    });
    let values = |t: &DeviceTensor| t.download_output().values();
    let optional = |t: &Option<DeviceTensor>| t.as_ref().map_or(Vec::new(), values);
    Written {
        loss: values(&loss),
        losses: optional(&losses),
        lse: optional(&lse),
        gradients: [0, 1, 2].map(|i| wanted[i].then(|| values(&gradients[i]))),
    }
}

fn check(ctx: &Context, (dtype, weight_dtype): (DType, DType), case: &Case) {
    let (rng, layer) = (&mut rng(), &case.layer);
    let inputs = Inputs::random(rng, layer, (dtype, weight_dtype));
    // Of parameters, gradients have their dtype or f32.
    let wide = layer.accumulate || rng.random::<bool>();
    let grad_dtype = if wide { DType::F32 } else { weight_dtype };
    let before = layer.before(rng, grad_dtype);

    let [exact, plain] =
        [EXACT, PLAIN].map(|f| (case.loss).tokens(&inputs.logits(f), &inputs.ids(), layer.vocab()));
    let [of_exact, of_plain] = [(EXACT, &exact), (PLAIN, &plain)].map(|(functions, tokens)| {
        inputs.gradients(functions, scaled(&tokens.gradients, case.scale(tokens)))
    });
    // What an error of logits moves.
    let of_logits = 1.0 + 2.0 * inputs.terms_of_logits();
    let by = of_logits * case.scale(&exact).abs();
    let terms = inputs.terms_of_gradients(&scaled(&exact.gradient_terms, by));
    let loss_terms: Vec<f64> = exact.loss_terms.iter().map(|t| t + of_logits).collect();
    let compare = |got: &Written| {
        let compare = |name, got: &[f64], exact: &[f64], plain: &[f64], terms| {
            let plain = rounded(DType::F32, plain);
            assert_flash_rule_of_sums(name, DType::F32, got, exact, &plain, terms);
        };
        let of_sum = loss_terms.iter().sum::<f64>() / case.divisor(&exact);
        // In a plain sum the tokens' errors may cancel, and in another not.
        let errors = plain.losses.iter().zip(&exact.losses);
        let error = errors.map(|(p, e)| (p - e).abs()).sum::<f64>() / case.divisor(&exact);
        let loss = case.loss(&exact);
        compare("loss", &got.loss, &[loss], &[loss + error], of_sum);
        if case.losses {
            // Logits are rounded to the dtype, which moves the sum of their exponentials by up to half a unit
            // in the last place, and losses by their terms'. With few tokens the plain result may happen to
            // lose much less, and is no measure then.
            let moved = |by: &[f64]| 0.25 * greatest(by) * epsilon(dtype) / epsilon(DType::F32);
            let most = greatest(&loss_terms);
            let of_losses = most.max(moved(&exact.loss_terms));
            compare(
                "losses",
                &got.losses,
                &exact.losses,
                &plain.losses,
                of_losses,
            );
            let of_lse = most.max(moved(&magnitudes(&exact.lse)));
            compare("lse", &got.lse, &exact.lse, &plain.lse, of_lse);
        }
        let (dtypes, all) = ((dtype, grad_dtype), [&of_exact, &of_plain, &terms]);
        layer.assert_gradients(ctx, dtypes, &before, &got.gradients, all);
    };
    let got = run(ctx, case, &inputs, &before, true);
    compare(&got);
    let again = run(ctx, case, &inputs, &before, true);
    assert!(got == again, "other bits from the same inputs");
    compare(&run(ctx, case, &inputs, &before, false));
}

#[test]
fn agrees_with_its_definition() {
    for ctx in contexts() {
        for dtype in FLOATS {
            crate::common::for_each_case(&cases(), |case| check(&ctx, (dtype, dtype), case));
        }
        let mixed = (DType::Bf16, DType::F32);
        crate::common::for_each_case(&cases()[8..16], |case| check(&ctx, mixed, case));
    }
}

/// The reference's gradients are the loss' difference along random directions.
#[test]
fn the_definition_is_its_own_derivative() {
    const STEP: f64 = 1e-5;
    let rng = &mut rng();
    let case = plain_case(5, (11, 7));
    let inputs = Inputs::random(rng, &case.layer, (DType::F32, DType::F32));
    let (sizes, ids) = (inputs.sizes(), inputs.ids());
    let bias = inputs.bias.as_ref().unwrap();
    let tensors = [&inputs.x, &inputs.weight, bias].map(TestTensor::values);
    let along = tensors.each_ref().map(|t| -> Vec<f64> {
        t.iter()
            .map(|_| crate::common::tensor::normal(rng))
            .collect()
    });
    let tokens = |step: f64| {
        let moved = |i: usize| -> Vec<f64> {
            let pairs = tensors[i].iter().zip(&along[i]);
            pairs.map(|(t, v)| t + step * v).collect()
        };
        let logits = linear(&moved(0), &moved(1), sizes, Some(&moved(2)), None);
        case.loss.tokens(&logits, &ids, sizes.2)
    };
    let loss = |step: f64| {
        let tokens = tokens(step);
        tokens.losses.iter().sum::<f64>() / case.divisor(&tokens)
    };
    let difference = (loss(STEP) - loss(-STEP)) / (2.0 * STEP);
    let here = tokens(0.0);
    let g = inputs.gradients(EXACT, scaled(&here.gradients, case.scale(&here)));
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let derivative = dot(&g.dx, &along[0]) + dot(&g.dweight, &along[1]) + dot(&g.dbias, &along[2]);
    let error = (difference - derivative).abs();
    assert!(error < 1e-7, "{difference} {derivative}");
}

/// In one chunk it is the three operations, to the bit.
#[test]
fn one_chunk_is_the_operations_one_by_one() {
    let ctx = Context::cpu().unwrap();
    for dtype in FLOATS {
        let case = plain_case(40, (300, 64));
        let inputs = Inputs::random(&mut rng(), &case.layer, (dtype, dtype));
        let before = case.layer.before(&mut rng(), dtype);
        let got = run(&ctx, &case, &inputs, &before, true);

        let there = inputs.upload(&ctx);
        let poisoned = |dtype, layout| TestTensor::poisoned(dtype, layout).upload(&ctx);
        let mut logits = poisoned(dtype, contiguous(&[40, 300]));
        let product = linear::Params {
            x_norm: None,
            parallel: None,
            x: there.x.view(),
            weights: there.weights(),
            output: Output::Write(logits.view_mut()),
            workspace: Workspace::none(),
        };
        linear::forward(&ctx, &product, Stream::DEFAULT).unwrap();
        let of_tokens = || poisoned(DType::F32, contiguous(&[40]));
        let (mut losses, mut lse) = (of_tokens(), of_tokens());
        let mut loss = poisoned(DType::F32, contiguous(&[1]));
        let params = cross_entropy::Params {
            logits: Logits::Differentiate(InOut::InPlace(logits.view_mut())),
            targets: there.ids.view(),
            loss: Some(loss.view_mut()),
            losses: Some(losses.view_mut()),
            lse: Some(lse.view_mut()),
            dloss: None,
            denominator: None,
            reduction: Reduction::Mean,
            ignore_index: IGNORE_INDEX,
            label_smoothing: case.loss.label_smoothing as f32,
            z_loss: case.loss.z_loss as f32,
            softcap: case.loss.softcap as f32,
            workspace: Workspace::none(),
        };
        cross_entropy::forward(&ctx, &params, Stream::DEFAULT).unwrap();
        let mut dx = poisoned(dtype, case.layer.dx);
        let [mut dweight, mut dbias] = before.map(|t| t.upload(&ctx));
        let params = linear::backward::Params {
            parallel: None,
            dout: logits.view(),
            x: Some(there.x.view()),
            weight: Some(there.weight.view()),
            dx: Some(dx.view_mut()),
            dweight: Some(dweight.view_mut()),
            dbias: Some(dbias.view_mut()),
            accumulate: false,
            workspace: Workspace::none(),
        };
        linear::backward(&ctx, &params, Stream::DEFAULT).unwrap();
        let values = |t: &DeviceTensor| t.download_output().values();
        let expected = Written {
            loss: values(&loss),
            losses: values(&losses),
            lse: values(&lse),
            gradients: [&dx, &dweight, &dbias].map(|t| Some(values(t))),
        };
        assert!(got == expected, "{dtype}");
    }
}

/// Two halves of a batch over the whole's number of tokens, the second added to the first, are the
/// whole in two chunks, to the bit; with any number of threads.
#[test]
fn halves_add_up() {
    for ctx in contexts() {
        for dtype in FLOATS {
            let mut whole = plain_case(40, (300, 64));
            whole.denominator = Some(23.0);
            whole.layer.chunk_tokens = 20;
            let inputs = Inputs::random(&mut rng(), &whole.layer, (dtype, dtype));
            let before = whole.layer.before(&mut rng(), DType::F32);
            let expected = run(&ctx, &whole, &inputs, &before, true);
            let (mut got, mut held) = (Written::default(), before.clone());
            let mut dx = Vec::new();
            for half in 0..2 {
                let mut case = plain_case(20, (300, 64));
                case.denominator = whole.denominator;
                case.layer.accumulate = half == 1;
                let written = run(&ctx, &case, &inputs.half(half), &held, true);
                got.losses.extend(&written.losses);
                got.lse.extend(&written.lse);
                let [of_x, of_weight, of_bias] = written.gradients.map(Option::unwrap);
                dx.extend(of_x);
                held[0].set_values(&of_weight);
                held[1].set_values(&of_bias);
            }
            let [dweight, dbias] = held.map(|t| t.values());
            got.gradients = [dx, dweight, dbias].map(Some);
            got.loss = expected.loss.clone();
            assert!(got == expected, "{dtype}");
            if ctx.backend() == unsloth::Backend::Cpu {
                for num_threads in [1, 5] {
                    let options = ContextOptions {
                        num_threads,
                        ..ContextOptions::default()
                    };
                    let ctx = Context::new(&options).unwrap();
                    let other = run(&ctx, &whole, &inputs, &before, true);
                    assert!(other == expected, "{dtype} {num_threads}");
                }
            }
        }
    }
}

/// A batch of ignored tokens alone has no loss, and no gradient.
#[test]
fn ignored_tokens_count_for_nothing() {
    for ctx in contexts() {
        let mut case = plain_case(7, (33, 20));
        case.layer.chunk_tokens = 3;
        let mut inputs = Inputs::random(&mut rng(), &case.layer, (DType::Bf16, DType::Bf16));
        inputs.ids.set_values(&[IGNORE_INDEX as f64; 7]);
        let before = case.layer.before(&mut rng(), DType::Bf16);
        let got = run(&ctx, &case, &inputs, &before, true);
        let [dx, dweight, dbias] = got.gradients.map(Option::unwrap);
        let all = [got.loss, got.losses, got.lse, dx, dweight, dbias];
        assert!(all.iter().all(|t| !t.is_empty()));
        assert!(all.iter().flatten().all(|v| *v == 0.0), "{all:?}");
    }
}

/// A workspace has the logits of a chunk, not of all tokens.
#[test]
fn workspaces_are_of_a_chunk() {
    let ctx = Context::new(&ContextOptions {
        num_threads: 1,
        ..ContextOptions::default()
    })
    .unwrap();
    let (vocab, hidden) = (50_000, 4);
    let weight = vec![0.0f32; vocab * hidden];
    for (tokens, chunk_tokens, chunk) in [
        // 128 MiB are 671 tokens; of 640 each there would be two, which are made even.
        (1000, 0, 512),
        (500, 0, 500),
        (1000, 64, 64),
        (1000, 5000, 1000),
    ] {
        let x = vec![0.0f32; tokens * hidden];
        let targets = vec![0i32; tokens];
        let mut losses = vec![0.0f32; tokens];
        let params = Params {
            vocabulary: None,
            x: unsloth::TensorRef::from_slice(&x, &[tokens, hidden]).unwrap(),
            weights: Weights {
                weight: unsloth::TensorRef::from_slice(&weight, &[vocab, hidden]).unwrap(),
                bias: None,
            },
            targets: unsloth::TensorRef::from_slice(&targets, &[tokens]).unwrap(),
            loss: None,
            losses: Some(unsloth::TensorMut::from_slice(&mut losses, &[tokens]).unwrap()),
            lse: None,
            dx: None,
            dweight: None,
            dbias: None,
            accumulate: false,
            dloss: None,
            denominator: None,
            reduction: Reduction::Mean,
            ignore_index: IGNORE_INDEX,
            label_smoothing: 0.0,
            z_loss: 0.0,
            softcap: 0.0,
            chunk_tokens,
            workspace: Workspace::none(),
        };
        let size = head::workspace_size(&ctx, &params).unwrap();
        // Behind it is what a thread multiplies in.
        let logits = chunk * vocab * 4;
        assert!(
            (logits..logits + (1 << 20)).contains(&size),
            "{tokens} {chunk_tokens}: {size}"
        );
    }
}

/// All tokens are taken at once where the sum in f32 of `dweight`, which chunks need, is larger than
/// what they save.
#[test]
fn chunks_are_not_where_they_take_more() {
    let ctx = Context::new(&ContextOptions {
        num_threads: 1,
        ..ContextOptions::default()
    })
    .unwrap();
    let (vocab, hidden) = (50_000, 1000);
    let weight = vec![bf16::ZERO; vocab * hidden];
    let mut dweight = weight.clone();
    // 128 MiB are 1280 tokens and some; 4000 in four chunks, which are made even.
    for (tokens, chunk_tokens, chunk) in [(3000, 0, 3000), (4000, 0, 1024), (3000, 512, 512)] {
        let x = vec![bf16::ZERO; tokens * hidden];
        let targets = vec![0i32; tokens];
        let mut loss = [0.0f32];
        let params = Params {
            vocabulary: None,
            x: unsloth::TensorRef::from_slice(&x, &[tokens, hidden]).unwrap(),
            weights: Weights {
                weight: unsloth::TensorRef::from_slice(&weight, &[vocab, hidden]).unwrap(),
                bias: None,
            },
            targets: unsloth::TensorRef::from_slice(&targets, &[tokens]).unwrap(),
            loss: Some(unsloth::TensorMut::from_slice(&mut loss, &[1]).unwrap()),
            losses: None,
            lse: None,
            dx: None,
            dweight: Some(unsloth::TensorMut::from_slice(&mut dweight, &[vocab, hidden]).unwrap()),
            dbias: None,
            accumulate: false,
            dloss: None,
            denominator: None,
            reduction: Reduction::Mean,
            ignore_index: IGNORE_INDEX,
            label_smoothing: 0.0,
            z_loss: 0.0,
            softcap: 0.0,
            chunk_tokens,
            workspace: Workspace::none(),
        };
        let size = head::workspace_size(&ctx, &params).unwrap();
        let sum = if chunk < tokens {
            vocab * hidden * 4
        } else {
            0
        };
        let least = chunk * vocab * 2 + sum;
        // Behind it is what a thread multiplies in.
        assert!(
            (least..least + (48 << 20)).contains(&size),
            "{tokens} {chunk_tokens}: {size}, {least} at least"
        );
    }
}
