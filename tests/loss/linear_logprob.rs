//! Log-probabilities of ids under a linear layer's output, their entropies and gradients, in chunks,
//! against the composition of their definitions, which is proved by differences; misuse.

mod misuse;

use crate::common::head::{EXACT, Functions, Inputs, Layer, PLAIN, greatest, half_of, layers};
use crate::common::head::{magnitudes, run_in_workspace};
use crate::common::reference::linear::{Gradients, linear};
use crate::common::reference::logprob::Logprob;
use crate::common::rules::epsilon;
use crate::common::{
    DeviceTensor, FLOATS, TestTensor, assert_flash_rule_of_sums, contexts, contiguous, rng, rounded,
};
use rand::Rng;
use unsloth::ops::cross_entropy::IGNORE_INDEX;
use unsloth::ops::linear_logprob::{self as head, Params};
use unsloth::{Context, DType, Stream, Workspace};

#[derive(Clone, Copy, Debug)]
struct Case {
    layer: Layer,
    logprob: Logprob,
    /// Of log-probabilities, and of entropies.
    given: [bool; 2],
}

fn cases() -> Vec<Case> {
    let case = |(i, (layer, features)): (usize, (Layer, usize))| {
        let bit = |n: usize| features >> n & 1 == 1;
        Case {
            layer,
            logprob: Logprob {
                ignore_index: layer.ignore_index,
                temperature: if bit(2) { 0.75 } else { 1.0 },
                softcap: if bit(0) { 2.5 } else { 0.0 },
            },
            given: [i % 3 != 0, i % 3 != 1],
        }
    };
    layers().into_iter().enumerate().map(case).collect()
}

/// A case of contiguous tensors.
fn plain_case(tokens: usize, sizes: (usize, usize)) -> Case {
    Case {
        layer: Layer::plain(tokens, sizes),
        logprob: Logprob {
            ignore_index: IGNORE_INDEX,
            temperature: 0.75,
            softcap: 3.0,
        },
        given: [true; 2],
    }
}

impl Case {
    /// As calls say it: 0 is 1.
    fn temperature(&self) -> f32 {
        match self.logprob.temperature == 1.0 && self.layer.bias {
            true => 0.0,
            false => self.logprob.temperature as f32,
        }
    }

    /// Gradients of log-probabilities and entropies; zeros are not given to calls.
    fn given(&self, rng: &mut impl Rng) -> [TestTensor; 2] {
        let layout = contiguous(self.layer.ids.shape());
        let zeros = vec![0.0; layout.num_elements()];
        self.given.map(|given| match given {
            true => TestTensor::normal(rng, DType::F32, layout),
            false => TestTensor::from_values(DType::F32, layout, &zeros),
        })
    }
}

/// Log-probabilities, entropies and lse; the last two where the case's features say so.
fn forward(ctx: &Context, case: &Case, inputs: &Inputs, useful: bool) -> [Option<Vec<f64>>; 3] {
    let (there, layer) = (inputs.upload(ctx), &case.layer);
    let layout = contiguous(layer.ids.shape());
    let wanted = [true, case.given[1], layer.bias];
    let mut out = [(); 3].map(|()| TestTensor::poisoned(DType::F32, layout).upload(ctx));
    let [logprobs, entropy, lse] = out.each_mut().map(DeviceTensor::view_mut);
    let mut params = Params {
        x: there.x.view(),
        weights: there.weights(),
        ids: there.ids.view(),
        logprobs: Some(logprobs),
        entropy: wanted[1].then_some(entropy),
        lse: wanted[2].then_some(lse),
        ignore_index: case.logprob.ignore_index,
        temperature: case.temperature(),
        softcap: case.logprob.softcap as f32,
        chunk_tokens: layer.chunk_tokens,
        workspace: Workspace::none(),
    };
    head::supported(ctx, &params).unwrap();
    let size = head::workspace_size(ctx, &params).unwrap();
    run_in_workspace(ctx, size, useful, |workspace| {
        params.workspace = workspace;
        head::forward(ctx, &params, Stream::DEFAULT)
    });
    [0, 1, 2].map(|i| wanted[i].then(|| out[i].download_output().values()))
}

/// The gradients that are wanted; `before` is what those of parameters hold.
fn backward(
    ctx: &Context,
    case: &Case,
    (inputs, given): (&Inputs, &[TestTensor; 2]),
    before: &[TestTensor; 2],
    useful: bool,
) -> [Option<Vec<f64>>; 3] {
    let (there, layer) = (inputs.upload(ctx), &case.layer);
    let given = given.each_ref().map(|t| t.upload(ctx));
    let mut out = [
        TestTensor::poisoned_at(inputs.x.dtype, layer.dx, layer.skew).upload(ctx),
        before[0].upload(ctx),
        before[1].upload(ctx),
    ];
    let [dx, dweight, dbias] = out.each_mut().map(DeviceTensor::view_mut);
    let wanted = layer.gradients;
    let mut params = head::backward::Params {
        x: there.x.view(),
        weights: there.weights(),
        ids: there.ids.view(),
        dlogprobs: case.given[0].then(|| given[0].view()),
        dentropy: case.given[1].then(|| given[1].view()),
        dx: wanted[0].then_some(dx),
        dweight: wanted[1].then_some(dweight),
        dbias: wanted[2].then_some(dbias),
        accumulate: layer.accumulate,
        ignore_index: case.logprob.ignore_index,
        temperature: case.temperature(),
        softcap: case.logprob.softcap as f32,
        chunk_tokens: layer.chunk_tokens,
        workspace: Workspace::none(),
    };
    head::backward::supported(ctx, &params).unwrap();
    let size = head::backward::workspace_size(ctx, &params).unwrap();
    run_in_workspace(ctx, size, useful, |workspace| {
        params.workspace = workspace;
        head::backward(ctx, &params, Stream::DEFAULT)
    });
    [0, 1, 2].map(|i| wanted[i].then(|| out[i].download_output().values()))
}

/// The gradients by these functions, and the magnitudes of what adds up to that of the logits.
fn gradients(
    case: &Case,
    inputs: &Inputs,
    given: &[TestTensor; 2],
    functions: Functions,
) -> (Gradients, Vec<f64>) {
    let [dlogprobs, dentropy] = given.each_ref().map(TestTensor::values);
    let (logits, ids, of) = (inputs.logits(functions), inputs.ids(), &case.logprob);
    let (dlogits, terms) = of.gradient(&logits, &ids, inputs.sizes().2, (&dlogprobs, &dentropy));
    (inputs.gradients(functions, dlogits), terms)
}

fn check(ctx: &Context, (dtype, weight_dtype): (DType, DType), case: &Case) {
    let (rng, layer) = (&mut rng(), &case.layer);
    let inputs = Inputs::random(rng, layer, (dtype, weight_dtype));
    let given = case.given(rng);
    // Of parameters, gradients have their dtype or f32.
    let wide = layer.accumulate || rng.random::<bool>();
    let grad_dtype = if wide { DType::F32 } else { weight_dtype };
    let before = layer.before(rng, grad_dtype);

    let [exact, plain] = [EXACT, PLAIN]
        .map(|f| (case.logprob).tokens(&inputs.logits(f), &inputs.ids(), layer.vocab()));
    let (of_exact, of_dlogits) = gradients(case, &inputs, &given, EXACT);
    let (of_plain, _) = gradients(case, &inputs, &given, PLAIN);
    // What an error of logits moves.
    let of_logits = 1.0 + 2.0 * inputs.terms_of_logits() / case.logprob.temperature;
    let of_dlogits: Vec<f64> = of_dlogits.iter().map(|t| t * of_logits).collect();
    let terms = inputs.terms_of_gradients(&of_dlogits);
    let of_tokens = greatest(&exact.terms) + of_logits;
    // Scores are rounded to the dtype, which moves the sum of their exponentials, and that of a token's id its
    // log-probability, by up to half a unit in the last place. With few tokens the plain result may happen to
    // lose much less, and is no measure then.
    let scores: Vec<f64> = exact
        .logprobs
        .iter()
        .zip(&exact.lse)
        .map(|(p, lse)| p + lse)
        .collect();
    let score = greatest(&magnitudes(&scores)).max(greatest(&magnitudes(&exact.lse)));
    let of_rounding = 0.25 * score * epsilon(dtype) / epsilon(DType::F32);
    let of_entropy = of_tokens * (1.0 + greatest(&exact.entropy));

    let compare_forward = |got: &[Option<Vec<f64>>; 3]| {
        for (name, got, exact, plain, terms) in [
            (
                "logprobs",
                &got[0],
                &exact.logprobs,
                &plain.logprobs,
                of_tokens.max(of_rounding),
            ),
            (
                "entropy",
                &got[1],
                &exact.entropy,
                &plain.entropy,
                of_entropy,
            ),
            (
                "lse",
                &got[2],
                &exact.lse,
                &plain.lse,
                of_tokens.max(of_rounding),
            ),
        ] {
            if let Some(got) = got {
                let plain = rounded(DType::F32, plain);
                assert_flash_rule_of_sums(name, DType::F32, got, exact, &plain, terms);
            }
        }
    };
    let compare_backward = |got: &[Option<Vec<f64>>; 3]| {
        let (dtypes, all) = ((dtype, grad_dtype), [&of_exact, &of_plain, &terms]);
        layer.assert_gradients(ctx, dtypes, &before, got, all);
    };
    let got = forward(ctx, case, &inputs, true);
    compare_forward(&got);
    let again = forward(ctx, case, &inputs, true);
    assert!(got == again, "other bits from the same inputs");
    compare_forward(&forward(ctx, case, &inputs, false));
    let run = |useful| backward(ctx, case, (&inputs, &given), &before, useful);
    let got = run(true);
    compare_backward(&got);
    assert!(got == run(true), "other bits from the same inputs");
    compare_backward(&run(false));
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

/// The reference's gradients are differences of the forward's along random directions.
#[test]
fn the_definition_is_its_own_derivative() {
    const STEP: f64 = 1e-5;
    let rng = &mut rng();
    let case = plain_case(5, (11, 7));
    let inputs = Inputs::random(rng, &case.layer, (DType::F32, DType::F32));
    let given = case.given(rng);
    let (sizes, ids) = (inputs.sizes(), inputs.ids());
    let bias = inputs.bias.as_ref().unwrap();
    let tensors = [&inputs.x, &inputs.weight, bias].map(TestTensor::values);
    let along = tensors.each_ref().map(|t| -> Vec<f64> {
        t.iter()
            .map(|_| crate::common::tensor::normal(rng))
            .collect()
    });
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let value = |step: f64| {
        let moved = |i: usize| -> Vec<f64> {
            let pairs = tensors[i].iter().zip(&along[i]);
            pairs.map(|(t, v)| t + step * v).collect()
        };
        let logits = linear(&moved(0), &moved(1), sizes, Some(&moved(2)), None);
        let tokens = case.logprob.tokens(&logits, &ids, sizes.2);
        dot(&tokens.logprobs, &given[0].values()) + dot(&tokens.entropy, &given[1].values())
    };
    let difference = (value(STEP) - value(-STEP)) / (2.0 * STEP);
    let (g, _) = gradients(&case, &inputs, &given, EXACT);
    let derivative = dot(&g.dx, &along[0]) + dot(&g.dweight, &along[1]) + dot(&g.dbias, &along[2]);
    let error = (difference - derivative).abs();
    assert!(error < 1e-7, "{difference} {derivative}");
}

/// A vocabulary with entries that a bias of minus infinity rules out is as one without them.
#[test]
fn logits_may_be_minus_infinity() {
    const FEW: usize = 24;
    for ctx in contexts() {
        for dtype in FLOATS {
            let of = |vocab| {
                let mut case = plain_case(6, (vocab, 16));
                case.logprob.softcap = 0.0;
                case
            };
            let (many, few) = (of(40), of(FEW));
            let part = |t: &TestTensor, shape: &[usize]| {
                TestTensor::of(t.dtype, shape, &t.values()[..shape.iter().product()])
            };
            let mut all = Inputs::random(&mut rng(), &many.layer, (dtype, dtype));
            let first = |id: f64| if id < 0.0 { id } else { id % FEW as f64 };
            let ids: Vec<f64> = all.ids.values().into_iter().map(first).collect();
            all.ids.set_values(&ids);
            let bias = all.bias.as_mut().unwrap();
            let mut values = bias.values();
            values[FEW..].fill(f64::NEG_INFINITY);
            bias.set_values(&values);
            let alone = Inputs {
                weight: part(&all.weight, &[FEW, 16]),
                bias: all.bias.as_ref().map(|t| part(t, &[FEW])),
                ..all.clone()
            };
            let close = |a: [Option<Vec<f64>>; 3], b: [Option<Vec<f64>>; 3]| {
                for (a, b) in a.iter().flatten().zip(b.iter().flatten()) {
                    // Of parameters the entries that are ruled out have none.
                    let (a, beyond) = a.split_at(b.len());
                    assert!(beyond.iter().all(|g| *g == 0.0), "{dtype}: {beyond:?}");
                    // Other sums round to another gradient of a logit now and then.
                    let most = 30.0 * epsilon(dtype) * greatest(&magnitudes(b)).max(1.0);
                    let near = a.iter().zip(b).all(|(a, b)| (a - b).abs() <= most);
                    assert!(near, "{dtype}: {a:?} {b:?}");
                }
            };
            close(
                forward(&ctx, &many, &all, true),
                forward(&ctx, &few, &alone, true),
            );
            let given = many.given(&mut rng());
            let run = |case: &Case, inputs| {
                let before = case.layer.before(&mut rng(), DType::F32);
                backward(&ctx, case, (inputs, &given), &before, true)
            };
            close(run(&many, &all), run(&few, &alone));
        }
    }
}

/// Two halves of a batch, the second added to the first, are the whole in two chunks, to the bit.
#[test]
fn halves_add_up() {
    for ctx in contexts() {
        for dtype in FLOATS {
            let mut whole = plain_case(40, (300, 64));
            whole.layer.chunk_tokens = 20;
            let inputs = Inputs::random(&mut rng(), &whole.layer, (dtype, dtype));
            let given = whole.given(&mut rng());
            let mut held = whole.layer.before(&mut rng(), DType::F32);
            let of_tokens = forward(&ctx, &whole, &inputs, true);
            let expected = backward(&ctx, &whole, (&inputs, &given), &held, true);
            let (mut got, mut dx) = ([(); 3].map(|()| Vec::new()), Vec::new());
            for half in 0..2 {
                let mut case = plain_case(20, (300, 64));
                case.layer.accumulate = half == 1;
                let inputs = inputs.half(half);
                for (all, part) in got.iter_mut().zip(forward(&ctx, &case, &inputs, true)) {
                    all.extend(part.unwrap());
                }
                let given = given.each_ref().map(|t| half_of(t, half));
                let gradients = backward(&ctx, &case, (&inputs, &given), &held, true);
                let [of_x, dweight, dbias] = gradients.map(Option::unwrap);
                dx.extend(of_x);
                held[0].set_values(&dweight);
                held[1].set_values(&dbias);
            }
            assert!(got.map(Some) == of_tokens, "{dtype}");
            let [dweight, dbias] = held.map(|t| t.values());
            assert!([dx, dweight, dbias].map(Some) == expected, "{dtype}");
        }
    }
}
