//! Log-probabilities of ids under a linear layer's output, their entropies and gradients, in chunks,
//! against the composition of their definitions, which is proved by differences; misuse.

mod common;
#[path = "linear_logprob/misuse.rs"]
mod misuse;

use common::reference::linear::{
    Gradients, linear, linear_backward, linear_backward_f32, linear_f32,
};
use common::reference::logprob::{Logprob, Tokens};
use common::rules::epsilon;
use common::tensor::{strided_rows, transposed};
use common::{
    DeviceTensor, FLOATS, TestTensor, assert_flash_rule_of_sums, assert_gradient_rule, contexts,
    cut_off, rng, rounded,
};
use rand::Rng;
use unsloth::ops::cross_entropy::IGNORE_INDEX;
use unsloth::ops::linear::Weights;
use unsloth::ops::linear_logprob::{self as head, Params, backward};
use unsloth::{Context, DType, Error, Layout, Result, Stream, Workspace};

#[derive(Clone, Debug)]
struct Case {
    x: Layout,
    dx: Layout,
    ids: Layout,
    weight: Layout,
    bias: bool,
    ids_dtype: DType,
    logprob: Logprob,
    /// Of log-probabilities, and of entropies.
    given: [bool; 2],
    /// Of `x`, of the weight, of the bias.
    gradients: [bool; 3],
    accumulate: bool,
    chunk_tokens: usize,
    skew: usize,
}

fn contiguous(shape: &[usize]) -> Layout {
    Layout::contiguous(shape).unwrap()
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let of = |leading: &[usize], hidden: usize| {
        let x = contiguous(&[leading, &[hidden]].concat());
        (x, x, contiguous(leading))
    };
    for (i, ((x, dx, ids), vocab, gap)) in [
        (of(&[1], 1), 1, 0),
        (of(&[7], 20), 33, 0),
        (of(&[0], 8), 16, 0),
        (of(&[2, 4, 5], 32), 96, 8),
        (of(&[3], 8), 600, 0),
        (
            (
                transposed(&[5, 4, 32], 0, 1),
                strided_rows(&[5, 4, 32], 3),
                transposed(&[5, 4], 0, 1),
            ),
            64,
            1,
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let hidden = x.dim(x.rank() - 1);
        for features in 0..8 {
            let bit = |n: usize| (features + i) >> n & 1 == 1;
            cases.push(Case {
                x,
                dx,
                ids,
                weight: strided_rows(&[vocab, hidden], gap),
                bias: bit(1),
                ids_dtype: if bit(1) { DType::I64 } else { DType::I32 },
                logprob: Logprob {
                    ignore_index: if bit(0) { 0 } else { IGNORE_INDEX },
                    temperature: if bit(2) { 0.75 } else { 1.0 },
                    softcap: if bit(0) { 2.5 } else { 0.0 },
                },
                given: [features % 3 != 0, features % 3 != 1],
                gradients: match features {
                    4 => [true, false, false],
                    5 => [false, true, false],
                    6 => [false, false, true],
                    _ => [true; 3],
                },
                accumulate: bit(0) && bit(1),
                chunk_tokens: [0, 1, 4, 1000][(features + i) % 4],
                skew: usize::from(features == 5),
            });
        }
    }
    cases
}

/// Inputs of both passes.
struct Inputs {
    x: TestTensor,
    weight: TestTensor,
    bias: Option<TestTensor>,
    ids: TestTensor,
    dlogprobs: TestTensor,
    dentropy: TestTensor,
}

/// Inputs on a device.
struct There {
    x: DeviceTensor,
    weight: DeviceTensor,
    bias: Option<DeviceTensor>,
    ids: DeviceTensor,
}

/// Runs a call with what is needed of a workspace, of which a byte less is refused, or with all that
/// is useful.
fn run_in_workspace(
    ctx: &Context,
    size: usize,
    useful: bool,
    mut call: impl FnMut(Workspace<'static>) -> Result<()>,
) {
    let mut size = size;
    if !useful {
        size = match call(Workspace::none()) {
            Err(Error::WorkspaceTooSmall { required, .. }) => required,
            done => return done.unwrap(),
        };
    }
    let memory = TestTensor::poisoned(DType::F32, contiguous(&[size.div_ceil(4)])).upload(ctx);
    // SAFETY: `size` bytes from the start of the tensor are its elements, which nothing else uses
    // while the call runs.
    let lent = |size| unsafe { Workspace::from_raw(memory.data().cast(), size) };
    if !useful {
        let refused = call(lent(size - 1)).unwrap_err();
        assert!(
            matches!(refused, Error::WorkspaceTooSmall { .. }),
            "{refused}"
        );
    }
    call(lent(size)).unwrap();
    memory.download_output();
}

impl Inputs {
    /// Random ones: a quarter of the tokens are ignored, logits are of about 2.
    fn random(rng: &mut impl Rng, case: &Case, (dtype, weight_dtype): (DType, DType)) -> Inputs {
        let vocab = case.weight.dim(0);
        let mut normal = |dtype, layout: Layout, scale: f64| {
            let mut tensor = TestTensor::poisoned_at(dtype, layout, case.skew);
            let values = TestTensor::normal(rng, dtype, layout).values();
            tensor.set_values(&values.iter().map(|x| x * scale).collect::<Vec<_>>());
            tensor
        };
        let x = normal(dtype, case.x, 1.0);
        let scale = 2.0 / (case.weight.dim(1) as f64).sqrt();
        let weight = normal(weight_dtype, case.weight, scale);
        let bias = case
            .bias
            .then(|| normal(weight_dtype, contiguous(&[vocab]), 0.5));
        let tokens = contiguous(case.ids.shape());
        let of_tokens = [0, 1].map(|i| match case.given[i] {
            true => normal(DType::F32, tokens, 1.0),
            false => TestTensor::from_values(DType::F32, tokens, &vec![0.0; tokens.num_elements()]),
        });
        let ids: Vec<f64> = (0..case.ids.num_elements())
            .map(|_| match rng.random_range(0..4) {
                0 => case.logprob.ignore_index as f64,
                _ => rng.random_range(0..vocab as i64) as f64,
            })
            .collect();
        let [dlogprobs, dentropy] = of_tokens;
        Inputs {
            x,
            weight,
            bias,
            ids: TestTensor::from_values(case.ids_dtype, case.ids, &ids),
            dlogprobs,
            dentropy,
        }
    }

    fn upload(&self, ctx: &Context) -> There {
        There {
            x: self.x.upload(ctx),
            weight: self.weight.upload(ctx),
            bias: self.bias.as_ref().map(|t| t.upload(ctx)),
            ids: self.ids.upload(ctx),
        }
    }

    fn sizes(&self) -> (usize, usize, usize) {
        let (n, k) = (self.weight.layout.dim(0), self.weight.layout.dim(1));
        (self.x.layout.num_rows(), k, n)
    }

    /// Log-probabilities, entropies and lse; the last two where the case's features say so.
    fn forward(&self, ctx: &Context, case: &Case, useful: bool) -> [Option<Vec<f64>>; 3] {
        let there = self.upload(ctx);
        let layout = contiguous(case.ids.shape());
        let wanted = [true, case.given[1], case.bias];
        let mut out =
            wanted.map(|w| w.then(|| TestTensor::poisoned(DType::F32, layout).upload(ctx)));
        let [logprobs, entropy, lse] = out.each_mut().map(|t| t.as_mut().map(|t| t.view_mut()));
        let mut params = Params {
            x: there.x.view(),
            weights: there.weights(),
            ids: there.ids.view(),
            logprobs,
            entropy,
            lse,
            ignore_index: case.logprob.ignore_index,
            temperature: case.temperature(),
            softcap: case.logprob.softcap as f32,
            chunk_tokens: case.chunk_tokens,
            workspace: Workspace::none(),
        };
        head::supported(ctx, &params).unwrap();
        let size = head::workspace_size(ctx, &params).unwrap();
        run_in_workspace(ctx, size, useful, |workspace| {
            params.workspace = workspace;
            head::forward(ctx, &params, Stream::DEFAULT)
        });
        out.map(|t| t.map(|t| t.download_output().values()))
    }

    /// The gradients that are wanted; `before` is what those of parameters hold.
    fn backward(
        &self,
        ctx: &Context,
        case: &Case,
        before: &[TestTensor; 2],
        useful: bool,
    ) -> [Option<Vec<f64>>; 3] {
        let there = self.upload(ctx);
        let given = [&self.dlogprobs, &self.dentropy].map(|t| t.upload(ctx));
        let mut out = [
            TestTensor::poisoned_at(self.x.dtype, case.dx, case.skew).upload(ctx),
            before[0].upload(ctx),
            before[1].upload(ctx),
        ];
        let [dx, dweight, dbias] = out.each_mut().map(|t| t.view_mut());
        let [a, b, c] = case.gradients;
        let mut params = backward::Params {
            x: there.x.view(),
            weights: there.weights(),
            ids: there.ids.view(),
            dlogprobs: case.given[0].then(|| given[0].view()),
            dentropy: case.given[1].then(|| given[1].view()),
            dx: a.then_some(dx),
            dweight: b.then_some(dweight),
            dbias: c.then_some(dbias),
            accumulate: case.accumulate,
            ignore_index: case.logprob.ignore_index,
            temperature: case.temperature(),
            softcap: case.logprob.softcap as f32,
            chunk_tokens: case.chunk_tokens,
            workspace: Workspace::none(),
        };
        backward::supported(ctx, &params).unwrap();
        let size = backward::workspace_size(ctx, &params).unwrap();
        run_in_workspace(ctx, size, useful, |workspace| {
            params.workspace = workspace;
            head::backward(ctx, &params, Stream::DEFAULT)
        });
        let mut wanted = case.gradients.iter();
        out.map(|t| wanted.next().unwrap().then(|| t.download_output().values()))
    }

    /// Both passes for these functions of a linear layer, and for storing logits and their gradients
    /// in a dtype; with the magnitudes of what adds up to the latter.
    fn computed(
        &self,
        case: &Case,
        (linear, backward): (LinearFn, BackwardFn),
        stored: Option<DType>,
    ) -> (Tokens, Gradients, Vec<f64>) {
        let (x, weight) = (self.x.values(), self.weight.values());
        let bias = self.bias.as_ref().map(TestTensor::values);
        let store = |values: Vec<f64>| match stored {
            Some(dtype) => rounded(dtype, &values),
            None => values,
        };
        let logits = store(linear(&x, &weight, self.sizes(), bias.as_deref(), None));
        let ids: Vec<i64> = self.ids.values().iter().map(|t| *t as i64).collect();
        let vocab = self.sizes().2;
        let given = [&self.dlogprobs, &self.dentropy].map(TestTensor::values);
        let tokens = case.logprob.tokens(&logits, &ids, vocab);
        let (dlogits, terms) = case
            .logprob
            .gradient(&logits, &ids, vocab, (&given[0], &given[1]));
        let gradients = backward(&store(dlogits), &x, &weight, self.sizes());
        (tokens, gradients, terms)
    }
}

impl There {
    fn weights(&self) -> Weights<'_> {
        Weights {
            weight: self.weight.view(),
            bias: self.bias.as_ref().map(|t| t.view()),
        }
    }
}

impl Case {
    /// As calls say it: 0 is 1.
    fn temperature(&self) -> f32 {
        match self.logprob.temperature == 1.0 && self.bias {
            true => 0.0,
            false => self.logprob.temperature as f32,
        }
    }
}

type LinearFn =
    fn(&[f64], &[f64], (usize, usize, usize), Option<&[f64]>, Option<&[f64]>) -> Vec<f64>;
type BackwardFn = fn(&[f64], &[f64], &[f64], (usize, usize, usize)) -> Gradients;
const EXACT: (LinearFn, BackwardFn) = (linear, linear_backward);
const PLAIN: (LinearFn, BackwardFn) = (linear_f32, linear_backward_f32);

fn magnitudes(values: &[f64]) -> Vec<f64> {
    values.iter().map(|v| v.abs()).collect()
}

fn greatest(values: &[f64]) -> f64 {
    values.iter().copied().fold(0.0, f64::max)
}

fn check(ctx: &Context, (dtype, weight_dtype): (DType, DType), case: &Case) {
    let rng = &mut rng();
    let inputs = Inputs::random(rng, case, (dtype, weight_dtype));
    let sizes = inputs.sizes();
    // Of parameters, gradients have their dtype or f32.
    let wide = case.accumulate || rng.random::<bool>();
    let grad_dtype = if wide { DType::F32 } else { weight_dtype };
    let before = [contiguous(&[sizes.2, sizes.1]), contiguous(&[sizes.2])].map(|layout| {
        let mut tensor = TestTensor::poisoned_at(grad_dtype, layout, case.skew);
        if case.accumulate {
            tensor.set_values(&TestTensor::normal(rng, grad_dtype, layout).values());
        }
        tensor
    });

    let (exact, gradients, of_dlogits) = inputs.computed(case, EXACT, None);
    let (plain, plain_gradients, _) = inputs.computed(case, PLAIN, Some(dtype));
    // What logits add up from, and what an error of theirs moves.
    let great = [&inputs.x, &inputs.weight].map(|t| magnitudes(&t.values()));
    let of_logits = greatest(&linear(&great[0], &great[1], sizes, None, None));
    let of_logits = 1.0 + 2.0 * of_logits / case.logprob.temperature;
    let dlogits: Vec<f64> = of_dlogits.iter().map(|t| t * of_logits).collect();
    let terms = linear_backward(&dlogits, &great[0], &great[1], sizes);
    let entropy = greatest(&exact.entropy);
    let of_tokens = greatest(&exact.terms) + of_logits;

    let compare_forward = |got: &[Option<Vec<f64>>; 3]| {
        for (name, got, exact, plain, terms) in [
            (
                "logprobs",
                &got[0],
                &exact.logprobs,
                &plain.logprobs,
                of_tokens,
            ),
            (
                "entropy",
                &got[1],
                &exact.entropy,
                &plain.entropy,
                of_tokens * (1.0 + entropy),
            ),
            ("lse", &got[2], &exact.lse, &plain.lse, of_tokens),
        ] {
            if let Some(got) = got {
                let plain = rounded(DType::F32, plain);
                assert_flash_rule_of_sums(name, DType::F32, got, exact, &plain, terms);
            }
        }
    };
    let compare_backward = |got: &[Option<Vec<f64>>; 3]| {
        for (i, (name, exact, plain, terms)) in [
            ("dx", &gradients.dx, &plain_gradients.dx, &terms.dx),
            (
                "dweight",
                &gradients.dweight,
                &plain_gradients.dweight,
                &terms.dweight,
            ),
            (
                "dbias",
                &gradients.dbias,
                &plain_gradients.dbias,
                &terms.dbias,
            ),
        ]
        .into_iter()
        .enumerate()
        {
            let Some(got) = &got[i] else { continue };
            let dtype_of = if i == 0 { dtype } else { grad_dtype };
            let held = match (case.accumulate, i) {
                (true, 1 | 2) => before[i - 1].values(),
                _ => vec![0.0; exact.len()],
            };
            let add = |g: &[f64]| g.iter().zip(&held).map(|(g, h)| g + h).collect::<Vec<_>>();
            let (exact, plain) = (add(exact), rounded(dtype_of, &add(plain)));
            let most = greatest(terms) + greatest(&magnitudes(&held));
            let most = most.max(cut_off(ctx, dtype, [sizes.2, sizes.0, 0][i], &exact));
            assert_gradient_rule(name, dtype_of, got, &exact, &plain, most);
        }
    };
    let got = inputs.forward(ctx, case, true);
    compare_forward(&got);
    assert!(
        got == inputs.forward(ctx, case, true),
        "other bits from the same inputs"
    );
    compare_forward(&inputs.forward(ctx, case, false));
    let got = inputs.backward(ctx, case, &before, true);
    compare_backward(&got);
    let again = inputs.backward(ctx, case, &before, true);
    assert!(got == again, "other bits from the same inputs");
    compare_backward(&inputs.backward(ctx, case, &before, false));
}

#[test]
fn agrees_with_its_definition() {
    for ctx in contexts() {
        for dtype in FLOATS {
            common::for_each_case(&cases(), |case| check(&ctx, (dtype, dtype), case));
        }
        let mixed = (DType::Bf16, DType::F32);
        common::for_each_case(&cases()[8..16], |case| check(&ctx, mixed, case));
    }
}

/// A case of contiguous tensors.
fn plain_case(tokens: usize, (vocab, hidden): (usize, usize)) -> Case {
    let x = contiguous(&[tokens, hidden]);
    Case {
        x,
        dx: x,
        ids: contiguous(&[tokens]),
        weight: contiguous(&[vocab, hidden]),
        bias: true,
        ids_dtype: DType::I32,
        logprob: Logprob {
            ignore_index: IGNORE_INDEX,
            temperature: 0.75,
            softcap: 3.0,
        },
        given: [true; 2],
        gradients: [true; 3],
        accumulate: false,
        chunk_tokens: 0,
        skew: 0,
    }
}

/// The reference's gradients are differences of the forward's along random directions.
#[test]
fn the_definition_is_its_own_derivative() {
    const STEP: f64 = 1e-5;
    let rng = &mut rng();
    let case = plain_case(5, (11, 7));
    let inputs = Inputs::random(rng, &case, (DType::F32, DType::F32));
    let sizes = inputs.sizes();
    let bias = inputs.bias.as_ref().unwrap();
    let tensors = [&inputs.x, &inputs.weight, bias].map(TestTensor::values);
    let ids: Vec<i64> = inputs.ids.values().iter().map(|t| *t as i64).collect();
    let along = tensors
        .each_ref()
        .map(|t| -> Vec<f64> { t.iter().map(|_| common::tensor::normal(rng)).collect() });
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let value = |step: f64| -> f64 {
        let [x, w, b] = [0, 1, 2].map(|i| -> Vec<f64> {
            tensors[i]
                .iter()
                .zip(&along[i])
                .map(|(t, v)| t + step * v)
                .collect()
        });
        let logits = linear(&x, &w, sizes, Some(&b), None);
        let tokens = case.logprob.tokens(&logits, &ids, sizes.2);
        dot(&tokens.logprobs, &inputs.dlogprobs.values())
            + dot(&tokens.entropy, &inputs.dentropy.values())
    };
    let difference = (value(STEP) - value(-STEP)) / (2.0 * STEP);
    let (_, g, _) = inputs.computed(&case, EXACT, None);
    let derivative = dot(&g.dx, &along[0]) + dot(&g.dweight, &along[1]) + dot(&g.dbias, &along[2]);
    assert!(
        (difference - derivative).abs() < 1e-7,
        "{difference} {derivative}"
    );
}

/// A vocabulary with entries that a bias of minus infinity rules out is as one without them.
#[test]
fn logits_may_be_minus_infinity() {
    for ctx in contexts() {
        for dtype in FLOATS {
            let case = Case {
                logprob: Logprob {
                    softcap: 0.0,
                    ..plain_case(1, (1, 1)).logprob
                },
                ..plain_case(6, (40, 16))
            };
            let inputs = Inputs::random(&mut rng(), &case, (dtype, dtype));
            let few = Case {
                weight: contiguous(&[24, 16]),
                ..case.clone()
            };
            let mut ids = inputs.ids.clone();
            let first = |id: f64| if id < 0.0 { id } else { id % 24.0 };
            ids.set_values(&ids.values().into_iter().map(first).collect::<Vec<_>>());
            let part = |t: &TestTensor, shape: &[usize]| {
                let len = shape.iter().product();
                TestTensor::of(t.dtype, shape, &t.values()[..len])
            };
            let mut all = Inputs { ids, ..inputs };
            let bias = all.bias.as_mut().unwrap();
            let mut values = bias.values();
            values[24..].fill(f64::NEG_INFINITY);
            bias.set_values(&values);
            let alone = Inputs {
                weight: part(&all.weight, &[24, 16]),
                bias: Some(part(all.bias.as_ref().unwrap(), &[24])),
                x: all.x.clone(),
                ids: all.ids.clone(),
                dlogprobs: all.dlogprobs.clone(),
                dentropy: all.dentropy.clone(),
            };
            let close = |a: &[Option<Vec<f64>>; 3], b: &[Option<Vec<f64>>; 3]| {
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
                &all.forward(&ctx, &case, true),
                &alone.forward(&ctx, &few, true),
            );
            let before = |vocab: usize| {
                [contiguous(&[vocab, 16]), contiguous(&[vocab])]
                    .map(|layout| TestTensor::poisoned(DType::F32, layout))
            };
            let backward = all.backward(&ctx, &case, &before(40), true);
            close(&backward, &alone.backward(&ctx, &few, &before(24), true));
        }
    }
}

/// Two halves of a batch, the second added to the first, are the whole in two chunks, to the bit.
#[test]
fn halves_add_up() {
    for ctx in contexts() {
        for dtype in FLOATS {
            let whole = Case {
                chunk_tokens: 20,
                ..plain_case(40, (300, 50))
            };
            let inputs = Inputs::random(&mut rng(), &whole, (dtype, dtype));
            let mut held = [contiguous(&[300, 50]), contiguous(&[300])]
                .map(|layout| TestTensor::poisoned(DType::F32, layout));
            let expected = inputs.backward(&ctx, &whole, &held, true);
            let logprobs = inputs.forward(&ctx, &whole, true);
            for half in 0..2 {
                let case = Case {
                    accumulate: half == 1,
                    ..plain_case(20, (300, 50))
                };
                let part = |t: &TestTensor| {
                    let layout = t.layout.narrowed(0, half * 20, 20).unwrap().0;
                    let (values, n) = (t.values(), layout.num_elements());
                    TestTensor::from_values(t.dtype, layout, &values[half * n..(half + 1) * n])
                };
                let of_half = Inputs {
                    x: part(&inputs.x),
                    weight: inputs.weight.clone(),
                    bias: inputs.bias.clone(),
                    ids: part(&inputs.ids),
                    dlogprobs: part(&inputs.dlogprobs),
                    dentropy: part(&inputs.dentropy),
                };
                for (all, got) in logprobs.iter().zip(of_half.forward(&ctx, &case, true)) {
                    let all = &all.as_ref().unwrap()[half * 20..(half + 1) * 20];
                    assert!(got.unwrap() == all, "{dtype}");
                }
                let [dx, dweight, dbias] = of_half.backward(&ctx, &case, &held, true);
                let all = &expected[0].as_ref().unwrap()[half * 1000..(half + 1) * 1000];
                assert!(dx.unwrap() == all, "{dtype}");
                held[0].set_values(&dweight.unwrap());
                held[1].set_values(&dbias.unwrap());
            }
            let [_, dweight, dbias] = expected.map(Option::unwrap);
            assert!(
                (held[0].values(), held[1].values()) == (dweight, dbias),
                "{dtype}"
            );
        }
    }
}
