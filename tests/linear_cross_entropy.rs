//! Cross-entropy of a linear layer's output and its gradients, in chunks, against the composition of
//! their definitions, which is proved by differences; against the operations one by one; misuse.

mod common;
#[path = "linear_cross_entropy/misuse.rs"]
mod misuse;

use common::reference::cross_entropy::{Loss, Tokens};
use common::reference::linear::{
    Gradients, linear, linear_backward, linear_backward_f32, linear_f32,
};
use common::tensor::{strided_rows, transposed};
use common::{
    DeviceTensor, FLOATS, TestTensor, assert_flash_rule_of_sums, assert_gradient_rule, contexts,
    cut_off, rng, rounded,
};
use rand::Rng;
use unsloth::ops::cross_entropy::{self, IGNORE_INDEX, Logits, Reduction};
use unsloth::ops::linear::{self, Output, Weights};
use unsloth::ops::linear_cross_entropy::{self as head, Params};
use unsloth::{Context, ContextOptions, DType, Error, InOut, Layout, Stream, Workspace};

#[derive(Clone, Debug)]
struct Case {
    x: Layout,
    dx: Layout,
    targets: Layout,
    weight: Layout,
    dweight: Layout,
    bias: bool,
    targets_dtype: DType,
    loss: Loss,
    reduction: Reduction,
    /// Given from outside.
    denominator: Option<f64>,
    dloss: Option<f64>,
    /// Of `x`, of the weight, of the bias.
    gradients: [bool; 3],
    accumulate: bool,
    /// Whether each token's loss is asked for.
    losses: bool,
    chunk_tokens: usize,
    skew: usize,
}

fn contiguous(shape: &[usize]) -> Layout {
    Layout::contiguous(shape).unwrap()
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let contiguous_case = |leading: &[usize], hidden: usize| {
        let x = contiguous(&[leading, &[hidden]].concat());
        (x, x, contiguous(leading))
    };
    let strided = |shape: &[usize], gap| strided_rows(shape, gap);
    for (i, ((x, dx, targets), vocab, gap)) in [
        (contiguous_case(&[1], 1), 1, 0),
        (contiguous_case(&[7], 20), 33, 0),
        (contiguous_case(&[0], 8), 16, 0),
        (contiguous_case(&[2, 3, 5], 32), 96, 0),
        (contiguous_case(&[40], 16), 120, 0),
        (contiguous_case(&[3], 8), 600, 8),
        (
            (
                strided(&[9, 20], 4),
                strided(&[9, 20], 1),
                Layout::strided(&[9], &[3]).unwrap(),
            ),
            50,
            3,
        ),
        (
            (
                transposed(&[5, 4, 32], 0, 1),
                contiguous(&[5, 4, 32]),
                transposed(&[5, 4], 0, 1),
            ),
            64,
            0,
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
                targets,
                weight: strided_rows(&[vocab, hidden], gap),
                dweight: strided_rows(&[vocab, hidden], gap / 2),
                bias: bit(1),
                targets_dtype: if bit(1) { DType::I64 } else { DType::I32 },
                loss: Loss {
                    ignore_index: if bit(0) { 0 } else { IGNORE_INDEX },
                    label_smoothing: if bit(1) { 0.125 } else { 0.0 },
                    z_loss: if bit(2) { 0.0625 } else { 0.0 },
                    softcap: if bit(0) { 2.5 } else { 0.0 },
                },
                reduction: if bit(2) {
                    Reduction::Sum
                } else {
                    Reduction::Mean
                },
                denominator: (!bit(2) && bit(1)).then_some(7.0),
                dloss: bit(0).then_some(-1.5),
                gradients: match features {
                    3 => [false; 3],
                    4 => [true, false, false],
                    5 => [false, true, false],
                    6 => [false, true, true],
                    _ => [true; 3],
                },
                accumulate: bit(0) && bit(1),
                losses: bit(2),
                // Several of a size, uneven ones, one of all tokens and more.
                chunk_tokens: [0, 1, 4, 1000][(features + i) % 4],
                skew: usize::from(features == 5),
            });
        }
    }
    cases
}

/// Inputs of a call.
struct Inputs {
    x: TestTensor,
    weight: TestTensor,
    bias: Option<TestTensor>,
    targets: TestTensor,
}

/// What a call has written.
#[derive(Debug, Default, PartialEq)]
struct Written {
    loss: Vec<f64>,
    losses: Vec<f64>,
    lse: Vec<f64>,
    dx: Vec<f64>,
    dweight: Vec<f64>,
    dbias: Vec<f64>,
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
        let targets: Vec<f64> = (0..case.targets.num_elements())
            .map(|_| match rng.random_range(0..4) {
                0 => case.loss.ignore_index as f64,
                _ => rng.random_range(0..vocab as i64) as f64,
            })
            .collect();
        Inputs {
            x,
            weight,
            bias,
            targets: TestTensor::from_values(case.targets_dtype, case.targets, &targets),
        }
    }

    fn sizes(&self) -> (usize, usize, usize) {
        let (n, k) = (self.weight.layout.dim(0), self.weight.layout.dim(1));
        (self.x.layout.num_rows(), k, n)
    }

    /// Runs the case with what is needed of a workspace, of which a byte less is refused, or with
    /// all that is useful. `before` is what the gradients of parameters hold.
    fn run(&self, ctx: &Context, case: &Case, before: &[TestTensor; 2], useful: bool) -> Written {
        let x = self.x.upload(ctx);
        let weight = self.weight.upload(ctx);
        let bias = self.bias.as_ref().map(|t| t.upload(ctx));
        let targets = self.targets.upload(ctx);
        let number =
            |value: Option<f64>| value.map(|v| TestTensor::of(DType::F32, &[1], &[v]).upload(ctx));
        let (dloss, denominator) = (number(case.dloss), number(case.denominator));
        let poisoned =
            |dtype, layout| TestTensor::poisoned_at(dtype, layout, case.skew).upload(ctx);
        let of_tokens = || {
            let layout = contiguous(case.targets.shape());
            case.losses.then(|| poisoned(DType::F32, layout))
        };
        let (mut losses, mut lse) = (of_tokens(), of_tokens());
        let mut loss = poisoned(DType::F32, contiguous(&[1]));
        let mut dx = case.gradients[0].then(|| poisoned(self.x.dtype, case.dx));
        let mut dweight = case.gradients[1].then(|| before[0].upload(ctx));
        let mut dbias = case.gradients[2].then(|| before[1].upload(ctx));
        let mut params = Params {
            x: x.view(),
            weights: Weights {
                weight: weight.view(),
                bias: bias.as_ref().map(|t| t.view()),
            },
            targets: targets.view(),
            loss: Some(loss.view_mut()),
            losses: losses.as_mut().map(DeviceTensor::view_mut),
            lse: lse.as_mut().map(DeviceTensor::view_mut),
            dx: dx.as_mut().map(DeviceTensor::view_mut),
            dweight: dweight.as_mut().map(DeviceTensor::view_mut),
            dbias: dbias.as_mut().map(DeviceTensor::view_mut),
            accumulate: case.accumulate,
            dloss: dloss.as_ref().map(|t| t.view()),
            denominator: denominator.as_ref().map(|t| t.view()),
            reduction: case.reduction,
            ignore_index: case.loss.ignore_index,
            label_smoothing: case.loss.label_smoothing as f32,
            z_loss: case.loss.z_loss as f32,
            softcap: case.loss.softcap as f32,
            chunk_tokens: case.chunk_tokens,
            workspace: Workspace::none(),
        };
        head::supported(ctx, &params).unwrap();
        let mut size = head::workspace_size(ctx, &params).unwrap();
        if !useful {
            size = match head::forward(ctx, &params, Stream::DEFAULT) {
                Err(Error::WorkspaceTooSmall { required, .. }) => required,
                Ok(()) => 0,
                Err(error) => panic!("{error}"),
            };
        }
        let memory = TestTensor::poisoned(DType::F32, contiguous(&[size.div_ceil(4)])).upload(ctx);
        let lent = |size| {
            // SAFETY: `size` bytes from the start of the tensor are its elements, which nothing
            // else uses.
            unsafe { Workspace::from_raw(memory.data().cast(), size) }
        };
        if !useful && size > 0 {
            params.workspace = lent(size - 1);
            let refused = head::forward(ctx, &params, Stream::DEFAULT).unwrap_err();
            assert!(
                matches!(refused, Error::WorkspaceTooSmall { .. }),
                "{refused}"
            );
        }
        params.workspace = lent(size);
        head::forward(ctx, &params, Stream::DEFAULT).unwrap();
        memory.download_output();
        let values = |t: &DeviceTensor| t.download_output().values();
        let optional = |t: &Option<DeviceTensor>| t.as_ref().map_or(Vec::new(), values);
        Written {
            loss: values(&loss),
            losses: optional(&losses),
            lse: optional(&lse),
            dx: optional(&dx),
            dweight: optional(&dweight),
            dbias: optional(&dbias),
        }
    }

    /// Losses and gradients of parameters and input for these functions of a linear layer, and for
    /// storing logits and their gradients in a dtype.
    fn computed(
        &self,
        case: &Case,
        (linear, backward): (LinearFn, BackwardFn),
        stored: Option<DType>,
    ) -> (Tokens, Gradients) {
        let (x, weight) = (self.x.values(), self.weight.values());
        let bias = self.bias.as_ref().map(TestTensor::values);
        let store = |values: Vec<f64>| match stored {
            Some(dtype) => rounded(dtype, &values),
            None => values,
        };
        let logits = store(linear(&x, &weight, self.sizes(), bias.as_deref(), None));
        let targets: Vec<i64> = self.targets.values().iter().map(|t| *t as i64).collect();
        let tokens = case.loss.tokens(&logits, &targets, self.sizes().2);
        let scale = case.dloss.unwrap_or(1.0) / divisor(case, &tokens);
        let dlogits = store(tokens.gradients.iter().map(|g| g * scale).collect());
        let gradients = backward(&dlogits, &x, &weight, self.sizes());
        (tokens, gradients)
    }
}

type LinearFn =
    fn(&[f64], &[f64], (usize, usize, usize), Option<&[f64]>, Option<&[f64]>) -> Vec<f64>;
type BackwardFn = fn(&[f64], &[f64], &[f64], (usize, usize, usize)) -> Gradients;
const EXACT: (LinearFn, BackwardFn) = (linear, linear_backward);
const PLAIN: (LinearFn, BackwardFn) = (linear_f32, linear_backward_f32);

fn divisor(case: &Case, tokens: &Tokens) -> f64 {
    match case.reduction {
        Reduction::Sum => 1.0,
        _ => case.denominator.unwrap_or(tokens.num_valid.max(1) as f64),
    }
}

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
    let before = [case.dweight, contiguous(&[sizes.2])].map(|layout| {
        let mut tensor = TestTensor::poisoned_at(grad_dtype, layout, case.skew);
        if case.accumulate {
            tensor.set_values(&TestTensor::normal(rng, grad_dtype, layout).values());
        }
        tensor
    });

    let (exact, gradients) = inputs.computed(case, EXACT, None);
    let (plain, plain_gradients) = inputs.computed(case, PLAIN, Some(dtype));
    // What logits add up from, and what an error of theirs moves.
    let great = [&inputs.x, &inputs.weight].map(|t| magnitudes(&t.values()));
    let of_logits = 1.0 + 2.0 * greatest(&linear(&great[0], &great[1], sizes, None, None));
    let scale = case.dloss.unwrap_or(1.0) / divisor(case, &exact);
    let of_dlogits = exact
        .gradient_terms
        .iter()
        .map(|t| t * of_logits * scale.abs());
    let dlogits: Vec<f64> = of_dlogits.collect();
    let terms = linear_backward(&dlogits, &great[0], &great[1], sizes);

    let sum = |tokens: &Tokens| -> f64 {
        let sum: f64 = rounded(DType::F32, &tokens.losses).iter().sum();
        sum / divisor(case, tokens)
    };
    let loss_terms: Vec<f64> = exact.loss_terms.iter().map(|t| t + of_logits).collect();
    let of_sum = loss_terms.iter().sum::<f64>() / divisor(case, &exact);
    let compare = |got: &Written| {
        let f32 = DType::F32;
        assert_flash_rule_of_sums(
            "loss",
            f32,
            &got.loss,
            &[sum(&exact)],
            &[sum(&plain)],
            of_sum,
        );
        if case.losses {
            let most = greatest(&loss_terms);
            let plain_losses = rounded(f32, &plain.losses);
            assert_flash_rule_of_sums(
                "losses",
                f32,
                &got.losses,
                &exact.losses,
                &plain_losses,
                most,
            );
            assert_flash_rule_of_sums("lse", f32, &got.lse, &exact.lse, &plain.lse, most);
        }
        for (i, (name, got, exact, plain, terms)) in [
            ("dx", &got.dx, &gradients.dx, &plain_gradients.dx, &terms.dx),
            (
                "dweight",
                &got.dweight,
                &gradients.dweight,
                &plain_gradients.dweight,
                &terms.dweight,
            ),
            (
                "dbias",
                &got.dbias,
                &gradients.dbias,
                &plain_gradients.dbias,
                &terms.dbias,
            ),
        ]
        .into_iter()
        .enumerate()
        {
            if !case.gradients[i] {
                assert!(got.is_empty());
                continue;
            }
            let dtype_of = if i == 0 { dtype } else { grad_dtype };
            let held = match (case.accumulate, i) {
                (true, 1 | 2) => before[i - 1].values(),
                _ => vec![0.0; exact.len()],
            };
            let add = |g: &[f64]| g.iter().zip(&held).map(|(g, h)| g + h).collect::<Vec<_>>();
            let (exact, plain) = (add(exact), rounded(dtype_of, &add(plain)));
            let depth = [sizes.2, sizes.0, 0][i];
            let most = greatest(terms) + greatest(&magnitudes(&held));
            let most = most.max(cut_off(ctx, dtype, depth, &exact));
            assert_gradient_rule(name, dtype_of, got, &exact, &plain, most);
        }
    };
    let got = inputs.run(ctx, case, &before, true);
    compare(&got);
    assert!(
        got == inputs.run(ctx, case, &before, true),
        "other bits from the same inputs"
    );
    compare(&inputs.run(ctx, case, &before, false));
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

/// A case of contiguous tensors without features.
fn plain_case(tokens: usize, (vocab, hidden): (usize, usize)) -> Case {
    let x = contiguous(&[tokens, hidden]);
    let weight = contiguous(&[vocab, hidden]);
    Case {
        x,
        dx: x,
        targets: contiguous(&[tokens]),
        weight,
        dweight: weight,
        bias: true,
        targets_dtype: DType::I32,
        loss: Loss {
            ignore_index: IGNORE_INDEX,
            label_smoothing: 0.1,
            z_loss: 0.01,
            softcap: 3.0,
        },
        reduction: Reduction::Mean,
        denominator: None,
        dloss: None,
        gradients: [true; 3],
        accumulate: false,
        losses: true,
        chunk_tokens: 0,
        skew: 0,
    }
}

/// The reference's gradients are the loss' difference along random directions.
#[test]
fn the_definition_is_its_own_derivative() {
    const STEP: f64 = 1e-5;
    let rng = &mut rng();
    let case = plain_case(5, (11, 7));
    let inputs = Inputs::random(rng, &case, (DType::F32, DType::F32));
    let sizes = inputs.sizes();
    let bias = inputs.bias.as_ref().unwrap();
    let tensors = [&inputs.x, &inputs.weight, bias].map(TestTensor::values);
    let targets: Vec<i64> = inputs.targets.values().iter().map(|t| *t as i64).collect();
    let along = tensors
        .each_ref()
        .map(|t| -> Vec<f64> { t.iter().map(|_| common::tensor::normal(rng)).collect() });
    let loss = |step: f64| -> f64 {
        let [x, w, b] = [0, 1, 2].map(|i| -> Vec<f64> {
            tensors[i]
                .iter()
                .zip(&along[i])
                .map(|(t, v)| t + step * v)
                .collect()
        });
        let logits = linear(&x, &w, sizes, Some(&b), None);
        let tokens = case.loss.tokens(&logits, &targets, sizes.2);
        tokens.losses.iter().sum::<f64>() / divisor(&case, &tokens)
    };
    let difference = (loss(STEP) - loss(-STEP)) / (2.0 * STEP);
    let (_, g) = inputs.computed(&case, EXACT, None);
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let derivative = dot(&g.dx, &along[0]) + dot(&g.dweight, &along[1]) + dot(&g.dbias, &along[2]);
    assert!(
        (difference - derivative).abs() < 1e-7,
        "{difference} {derivative}"
    );
}

fn poisoned_gradients(case: &Case, dtype: DType) -> [TestTensor; 2] {
    [case.dweight, contiguous(&[case.weight.dim(0)])].map(|t| TestTensor::poisoned(dtype, t))
}

/// In one chunk it is the three operations, to the bit.
#[test]
fn one_chunk_is_the_operations_one_by_one() {
    let ctx = Context::cpu().unwrap();
    for dtype in FLOATS {
        let case = plain_case(40, (300, 50));
        let inputs = Inputs::random(&mut rng(), &case, (dtype, dtype));
        let before = poisoned_gradients(&case, dtype);
        let got = inputs.run(&ctx, &case, &before, true);

        let (x, weight) = (inputs.x.upload(&ctx), inputs.weight.upload(&ctx));
        let bias = inputs.bias.as_ref().unwrap().upload(&ctx);
        let targets = inputs.targets.upload(&ctx);
        let poisoned = |dtype, layout| TestTensor::poisoned(dtype, layout).upload(&ctx);
        let mut logits = poisoned(dtype, contiguous(&[40, 300]));
        let weights = Weights {
            weight: weight.view(),
            bias: Some(bias.view()),
        };
        let product = linear::Params {
            x: x.view(),
            weights,
            output: Output::Write(logits.view_mut()),
            workspace: Workspace::none(),
        };
        linear::forward(&ctx, &product, Stream::DEFAULT).unwrap();
        let of_tokens = || poisoned(DType::F32, contiguous(&[40]));
        let (mut losses, mut lse) = (of_tokens(), of_tokens());
        let mut loss = poisoned(DType::F32, contiguous(&[1]));
        let params = cross_entropy::Params {
            logits: Logits::Differentiate(InOut::InPlace(logits.view_mut())),
            targets: targets.view(),
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
        let mut dx = poisoned(dtype, case.dx);
        let [mut dweight, mut dbias] = before.map(|t| t.upload(&ctx));
        let params = linear::backward::Params {
            dout: logits.view(),
            x: Some(x.view()),
            weight: Some(weight.view()),
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
            dx: values(&dx),
            dweight: values(&dweight),
            dbias: values(&dbias),
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
            let whole = Case {
                denominator: Some(23.0),
                chunk_tokens: 20,
                ..plain_case(40, (300, 50))
            };
            let inputs = Inputs::random(&mut rng(), &whole, (dtype, dtype));
            let before = poisoned_gradients(&whole, DType::F32);
            let expected = inputs.run(&ctx, &whole, &before, true);
            let mut got = Written::default();
            let mut held = before.clone();
            for half in 0..2 {
                let case = Case {
                    accumulate: half == 1,
                    denominator: whole.denominator,
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
                    targets: part(&inputs.targets),
                };
                let written = of_half.run(&ctx, &case, &held, true);
                got.losses.extend(&written.losses);
                got.lse.extend(&written.lse);
                got.dx.extend(&written.dx);
                held[0].set_values(&written.dweight);
                held[1].set_values(&written.dbias);
                (got.dweight, got.dbias) = (written.dweight, written.dbias);
            }
            got.loss = expected.loss.clone();
            assert!(got == expected, "{dtype}");
            if ctx.backend() == unsloth::Backend::Cpu {
                for num_threads in [1, 5] {
                    let options = ContextOptions {
                        num_threads,
                        ..ContextOptions::default()
                    };
                    let ctx = Context::new(&options).unwrap();
                    assert!(
                        inputs.run(&ctx, &whole, &before, true) == expected,
                        "{dtype}"
                    );
                }
            }
        }
    }
}

/// A batch of ignored tokens alone has no loss, and no gradient.
#[test]
fn ignored_tokens_count_for_nothing() {
    for ctx in contexts() {
        let case = Case {
            chunk_tokens: 3,
            ..plain_case(7, (33, 20))
        };
        let mut inputs = Inputs::random(&mut rng(), &case, (DType::Bf16, DType::Bf16));
        inputs.targets.set_values(&[IGNORE_INDEX as f64; 7]);
        let got = inputs.run(&ctx, &case, &poisoned_gradients(&case, DType::Bf16), true);
        let all = [
            got.loss,
            got.losses,
            got.lse,
            got.dx,
            got.dweight,
            got.dbias,
        ];
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
