//! Losses of a head whose vocabulary ranks divide, and their gradients.

use std::ops::Range;

use unsloth::comm::Comm;
use unsloth::ops::cross_entropy::{IGNORE_INDEX, Reduction};
use unsloth::ops::linear::Weights;
use unsloth::ops::linear_cross_entropy::{self as head, Params};
use unsloth::{Context, DType, Stream, TensorMut, TensorRef, Workspace};

use super::vocabulary::{range, tables, vocabulary};
use super::{Rows, assert_same, groups, of_parts, poisoned, rows, unbound};
use crate::common::head::{EXACT, Inputs, Layer, PLAIN, greatest, run_in_workspace};
use crate::common::reference::cross_entropy::{Loss, Tokens};
use crate::common::{
    TestTensor, assert_flash_rule_of_sums, contiguous, rng, rounded, tensor::DeviceTensor,
};
use crate::group::{context, is_cuda, ranks};

#[derive(Clone, Debug)]
struct Case {
    size: usize,
    rows: Rows,
    table: Vec<usize>,
    layer: Layer,
    loss: Loss,
    reduction: Reduction,
    denominator: Option<f64>,
    dloss: Option<f64>,
    /// Whether tokens' losses are asked for.
    losses: bool,
}

const HIDDEN: usize = 24;

/// Cases with all features, each of them in half of them.
fn cases() -> Vec<(Case, DType)> {
    let mut cases = Vec::new();
    for (i, (size, rows, dtype)) in groups().into_iter().enumerate() {
        for (j, table) in tables(size).into_iter().enumerate() {
            let features = 5 * i + 3 * j;
            let bit = |n: usize| features >> n & 1 == 1;
            let ignore_index = if bit(0) { 0 } else { IGNORE_INDEX };
            let layer = Layer::plain(rows.total(), (table.iter().sum(), HIDDEN));
            let layer = Layer {
                bias: bit(1),
                ids_dtype: if bit(2) { DType::I64 } else { DType::I32 },
                ignore_index,
                gradients: match features % 7 {
                    4 => [true, false, false],
                    5 => [false, true, true],
                    6 => [false; 3],
                    _ => [true; 3],
                },
                accumulate: bit(0) && bit(1),
                chunk_tokens: [0, 1, 2, 1000][features % 4],
                ..layer
            };
            let loss = Loss {
                ignore_index,
                label_smoothing: if bit(1) { 0.125 } else { 0.0 },
                z_loss: if bit(2) { 0.0625 } else { 0.0 },
                softcap: if bit(0) { 2.5 } else { 0.0 },
            };
            cases.push((
                Case {
                    size,
                    rows: rows.clone(),
                    table,
                    layer,
                    loss,
                    reduction: match bit(2) {
                        true => Reduction::Sum,
                        false => Reduction::Mean,
                    },
                    denominator: (!bit(2) && bit(1)).then_some(7.0),
                    dloss: bit(0).then_some(-1.5),
                    losses: !bit(3),
                },
                dtype,
            ));
        }
    }
    cases
}

impl Case {
    fn divisor(&self, tokens: &Tokens) -> f64 {
        match self.reduction {
            Reduction::Sum => 1.0,
            _ => self.denominator.unwrap_or(tokens.num_valid.max(1) as f64),
        }
    }

    fn scale(&self, tokens: &Tokens) -> f64 {
        self.dloss.unwrap_or(1.0) / self.divisor(tokens)
    }
}

/// What a rank has written: loss, losses and lse; and gradients.
type Written = ([TestTensor; 3], [TestTensor; 3]);

/// A rank's rows of a parameter.
fn own(t: &TestTensor, range: &Range<usize>) -> TestTensor {
    rows(t, range.clone())
}

fn run(
    (ctx, comm): (&Context, Option<&Comm>),
    case: &Case,
    inputs: &Inputs,
    before: &[TestTensor; 2],
    useful: bool,
) -> Written {
    let rank = comm.map_or(0, Comm::rank);
    let (tokens, part) = match comm {
        None => (0..case.rows.total(), 0..case.layer.vocab()),
        Some(_) => (case.rows.of(rank), range(&case.table, rank)),
    };
    let x = rows(&inputs.x, tokens.clone()).upload(ctx);
    let weight = own(&inputs.weight, &part).upload(ctx);
    let bias = inputs.bias.as_ref().map(|t| own(t, &part).upload(ctx));
    let ids = inputs.ids.upload(ctx);
    let number =
        |value: Option<f64>| value.map(|v| TestTensor::of(DType::F32, &[1], &[v]).upload(ctx));
    let (dloss, denominator) = (number(case.dloss), number(case.denominator));
    let of_tokens = || poisoned(DType::F32, &[case.rows.total()]).upload(ctx);
    let (mut losses, mut lse) = (of_tokens(), of_tokens());
    let mut loss = poisoned(DType::F32, &[1]).upload(ctx);
    let mut gradients = [
        poisoned(inputs.x.dtype, &[tokens.len(), HIDDEN]).upload(ctx),
        own(&before[0], &part).upload(ctx),
        own(&before[1], &part).upload(ctx),
    ];
    let wanted = case.layer.gradients;
    let mut params = |workspace| {
        let [dx, dweight, dbias] = &mut gradients;
        // SAFETY: described once for each call, and alive while it runs.
        let described = |is: bool, t: &mut DeviceTensor| is.then(|| unsafe { unbound(t) });
        Params {
            x: x.view(),
            weights: Weights {
                weight: weight.view(),
                bias: bias.as_ref().map(|t| t.view()),
            },
            targets: ids.view(),
            loss: described(true, &mut loss),
            losses: described(case.losses, &mut losses),
            lse: described(case.losses, &mut lse),
            dx: described(wanted[0], dx),
            dweight: described(wanted[1], dweight),
            dbias: described(wanted[2], dbias),
            accumulate: case.layer.accumulate,
            dloss: dloss.as_ref().map(|t| t.view()),
            denominator: denominator.as_ref().map(|t| t.view()),
            reduction: case.reduction,
            ignore_index: case.loss.ignore_index,
            label_smoothing: case.loss.label_smoothing as f32,
            z_loss: case.loss.z_loss as f32,
            softcap: case.loss.softcap as f32,
            chunk_tokens: case.layer.chunk_tokens,
            workspace,
            vocabulary: comm.map(|comm| vocabulary(&case.rows, comm, &case.table)),
        }
    };
    let asked = params(Workspace::none());
    head::supported(ctx, &asked).unwrap();
    let size = head::workspace_size(ctx, &asked).unwrap();
    run_in_workspace(ctx, size, useful, |workspace| {
        head::forward(ctx, &params(workspace), Stream::DEFAULT)
    });
    (
        [loss, losses, lse].map(|t| t.download_output()),
        gradients.map(|t| t.download_output()),
    )
}

fn check(case: &Case, dtype: DType) {
    println!("case {case:?} {dtype}");
    let (rng, layer) = (&mut rng(), &case.layer);
    let inputs = Inputs::random(rng, layer, (dtype, dtype));
    let grad_dtype = if layer.accumulate { DType::F32 } else { dtype };
    let before = layer.before(rng, grad_dtype);
    let outs = ranks(case.size, |ctx, comm| {
        let useful = run((ctx, Some(comm)), case, &inputs, &before, true);
        let needed = run((ctx, Some(comm)), case, &inputs, &before, false);
        let bits = |of: &Written| [&of.0, &of.1].map(|all| all.each_ref().map(TestTensor::bits));
        assert!(
            bits(&useful) == bits(&needed),
            "other bits with less memory"
        );
        useful
    });

    let [exact, plain] =
        [EXACT, PLAIN].map(|f| (case.loss).tokens(&inputs.logits(f), &inputs.ids(), layer.vocab()));
    let [of_exact, of_plain] = [(EXACT, &exact), (PLAIN, &plain)].map(|(functions, tokens)| {
        let scale = case.scale(tokens);
        inputs.gradients(
            functions,
            tokens.gradients.iter().map(|g| g * scale).collect(),
        )
    });
    let of_logits = 1.0 + 2.0 * inputs.terms_of_logits();
    let by = of_logits * case.scale(&exact).abs();
    let terms: Vec<f64> = exact.gradient_terms.iter().map(|t| t * by).collect();
    let mut terms = inputs.terms_of_gradients(&terms);
    let of_dx = of_parts(0.0, dtype, case.size, &of_exact.dx);
    terms.dx.iter_mut().for_each(|t| *t = t.max(of_dx));
    let loss_terms: Vec<f64> = exact.loss_terms.iter().map(|t| t + of_logits).collect();
    let judge = |name, got: &TestTensor, exact: &[f64], plain: &[f64], terms| {
        let plain = rounded(DType::F32, plain);
        assert_flash_rule_of_sums(name, DType::F32, &got.values(), exact, &plain, terms);
    };
    // Losses are whole, with the same bits on all ranks.
    let of_ranks = |i: usize| outs.iter().map(|out| out.0[i].clone()).collect::<Vec<_>>();
    let (sum, divisor) = (exact.losses.iter().sum::<f64>(), case.divisor(&exact));
    let errors = plain.losses.iter().zip(&exact.losses);
    let error = errors.map(|(p, e)| (p - e).abs()).sum::<f64>() / divisor;
    let loss = of_ranks(0);
    assert_same(&loss);
    let of_sum = loss_terms.iter().sum::<f64>() / divisor;
    let mean = sum / divisor;
    judge("loss", &loss[0], &[mean], &[mean + error], of_sum);
    if case.losses {
        let most = greatest(&loss_terms);
        let (losses, lse) = (of_ranks(1), of_ranks(2));
        assert_same(&losses);
        assert_same(&lse);
        judge("losses", &losses[0], &exact.losses, &plain.losses, most);
        judge("lse", &lse[0], &exact.lse, &plain.lse, most);
    }
    // Gradients of parameters are of a rank's rows, that of the input is whole or a rank's rows too.
    let of_ranks = |i: usize| outs.iter().map(|out| out.1[i].clone()).collect::<Vec<_>>();
    let behind = |i: usize| of_ranks(i).iter().flat_map(TestTensor::values).collect();
    let wanted = layer.gradients;
    let got = [
        wanted[0].then(|| case.rows.joined(&of_ranks(0))),
        wanted[1].then(|| behind(1)),
        wanted[2].then(|| behind(2)),
    ];
    let all = [&of_exact, &of_plain, &terms];
    layer.assert_gradients(&context(1), (dtype, grad_dtype), &before, &got, all);

    // A group of one has the bits of none, where both are by the same code.
    if case.size == 1 && !is_cuda() {
        let alone = run((&context(1), None), case, &inputs, &before, true);
        let bits = |of: &Written| [&of.0, &of.1].map(|all| all.each_ref().map(TestTensor::bits));
        assert!(
            bits(&alone) == bits(&outs[0]),
            "other bits than without a group"
        );
    }
}

#[test]
fn losses_and_gradients_are_those_of_one_rank() {
    for (case, dtype) in cases() {
        check(&case, dtype);
    }
}

/// Logits of minus infinity on all of a rank's columns are a share of zero.
#[test]
fn a_rank_may_have_no_probability() {
    let case = Case {
        size: 2,
        rows: Rows::Whole(3),
        table: vec![4, 4],
        layer: Layer {
            gradients: [false, false, true],
            ..Layer::plain(3, (8, HIDDEN))
        },
        loss: Loss {
            ignore_index: IGNORE_INDEX,
            label_smoothing: 0.0,
            z_loss: 0.0,
            softcap: 0.0,
        },
        reduction: Reduction::Sum,
        denominator: None,
        dloss: None,
        losses: true,
    };
    let mut inputs = Inputs::random(&mut rng(), &case.layer, (DType::F32, DType::F32));
    let mut bias = [0.0; 8];
    bias[4..].fill(f64::NEG_INFINITY);
    inputs.bias = Some(TestTensor::of(DType::F32, &[8], &bias));
    inputs.ids = TestTensor::of(DType::I32, &[3], &[0.0, 3.0, 1.0]);
    let before = case.layer.before(&mut rng(), DType::F32);
    let outs = ranks(2, |ctx, comm| {
        run((ctx, Some(comm)), &case, &inputs, &before, true)
    });
    assert_eq!(outs[1].1[2].values(), [0.0; 4]);
    let [loss, losses, lse] = &outs[0].0;
    let positive = |t: &TestTensor| t.values().iter().all(|v| v.is_finite() && *v > 0.0);
    assert!(positive(loss) && positive(losses));
    assert!(lse.values().iter().all(|v| v.is_finite()));
    let sum: f64 = outs[0].1[2].values().iter().sum();
    assert!(sum.abs() < 1e-5, "{sum}");
    assert_same(&[outs[0].0[1].clone(), outs[1].0[1].clone()]);
}

/// A target that the vocabulary does not have is refused by all ranks, before anything is sent.
#[test]
fn targets_are_of_the_vocabulary() {
    for size in [1, 2, 4] {
        for bad in [-1.0, (3 * size) as f64] {
            let layout = contiguous(&[2]);
            let ids = TestTensor::from_values(DType::I64, layout, &[0.0, bad]);
            let rows = Rows::Whole(2);
            let table = vec![3; size];
            ranks(size, |ctx, comm| {
                let x = TestTensor::normal(&mut rng(), DType::F32, contiguous(&[2, 5])).upload(ctx);
                let weight = poisoned(DType::F32, &[3, 5]).upload(ctx);
                let ids = ids.upload(ctx);
                let mut losses = poisoned(DType::F32, &[2]).upload(ctx);
                let mut params = |workspace| Params {
                    x: x.view(),
                    weights: Weights {
                        weight: weight.view(),
                        bias: None,
                    },
                    targets: ids.view(),
                    loss: None,
                    // SAFETY: described once for each call, and alive while it runs.
                    losses: Some(unsafe { unbound(&mut losses) }),
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
                    chunk_tokens: 0,
                    workspace,
                    vocabulary: Some(vocabulary(&rows, comm, &table)),
                };
                let asked = params(Workspace::none());
                let size_of = head::workspace_size(ctx, &asked).unwrap();
                let memory = poisoned(DType::F32, &[size_of / 4 + 64]).upload(ctx);
                let at = memory.data().cast::<u8>();
                let at = at.wrapping_add(at.align_offset(256));
                // SAFETY: as many bytes are the tensor's, which nothing else uses.
                let workspace = unsafe { Workspace::from_raw(at, size_of) };
                let called = params(workspace);
                let error = head::forward(ctx, &called, Stream::DEFAULT).unwrap_err();
                let expected = format!(
                    "linear_cross_entropy: targets has {bad} at index 1, allowed: 0 to {}, and -100 \
                     to ignore the token",
                    3 * size - 1
                );
                assert_eq!(error.to_string(), expected);
                crate::common::abi::assert_untouched(&losses);
            });
        }
    }
}

/// Chunks have as many tokens on all ranks, whatever rows these have: what a workspace grows by with a
/// rank's rows is the logits of a chunk.
#[test]
fn chunks_are_the_same_on_all_ranks() {
    const TOKENS: usize = 1 << 20;
    let rows = Rows::Whole(TOKENS);
    let sizes = ranks(3, |ctx, comm| {
        let table = [1 << 16, 2 << 16, 3 << 16];
        let own = range(&table, comm.rank());
        // SAFETY: queries do not look at data.
        let tensor = |dtype, shape: &[usize]| unsafe {
            TensorRef::from_raw(std::ptr::null(), dtype, contiguous(shape))
        };
        // SAFETY: as above.
        let lse =
            unsafe { TensorMut::from_raw(std::ptr::null_mut(), DType::F32, contiguous(&[TOKENS])) };
        let params = Params {
            x: tensor(DType::F32, &[TOKENS, 8]),
            weights: Weights {
                weight: tensor(DType::F32, &[own.len(), 8]),
                bias: None,
            },
            targets: tensor(DType::I32, &[TOKENS]),
            loss: None,
            losses: None,
            lse: Some(lse),
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
            chunk_tokens: 0,
            workspace: Workspace::none(),
            vocabulary: Some(vocabulary(&rows, comm, &table)),
        };
        head::workspace_size(ctx, &params).unwrap()
    });
    // 256 tokens of a third of the columns are 128 MiB. Products take a little besides.
    let logits = 256.0 * f64::from(1 << 16) * 4.0;
    for pair in sizes.windows(2) {
        let grown = pair[1] as f64 - pair[0] as f64;
        assert!((grown / logits - 1.0).abs() < 0.01, "{sizes:?}");
    }
}
