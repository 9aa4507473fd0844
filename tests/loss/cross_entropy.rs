//! Cross-entropy and its gradient against the definition, which is proved by differences: dtypes,
//! layouts, ignored tokens, smoothing, z-loss, softcap, reductions; misuse.

use crate::common::abi::{self, Misuse, absent, assert_fails, c_tensor};
use crate::common::contiguous;
use crate::common::reference::cross_entropy::Loss;
use crate::common::tensor::{strided_rows, transposed};
use crate::common::{FLOATS, TestTensor, assert_close_of_sums, contexts, in_out, rng};
use crate::features::Features;
use rand::Rng;
use unsloth::ffi::cross_entropy::*;
use unsloth::ffi::status::*;
use unsloth::ops::cross_entropy::{self, IGNORE_INDEX, Logits, Params, Reduction};
use unsloth::{Buffer, Context, DType, Layout, Stream, Workspace};

#[derive(Clone, Debug)]
struct Case {
    logits: Layout,
    targets: DType,
    loss: Loss,
    reduction: Reduction,
    /// Given from outside.
    denominator: Option<f64>,
    dloss: Option<f64>,
    gradient: bool,
    in_place: bool,
    /// Whether each token's loss is asked for.
    losses: bool,
    skew: usize,
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, logits) in [
        contiguous(&[1, 1]),
        contiguous(&[3, 7]),
        contiguous(&[5, 512]),
        contiguous(&[2, 3, 1000]),
        contiguous(&[9, 20_000]),
        contiguous(&[0, 16]),
        strided_rows(&[4, 257], 7),
        strided_rows(&[4, 256], 8),
        transposed(&[3, 4, 33], 0, 1),
        // More than a block of a GPU keeps.
        contiguous(&[3, 130_008]),
        strided_rows(&[2, 4, 9000], 8),
    ]
    .into_iter()
    .enumerate()
    {
        for features in 0..8 {
            let mut case = case_of(logits, features + i);
            case.gradient = features != 3;
            case.skew = usize::from(features == 5);
            cases.push(case);
        }
    }
    cases
}

fn case_of(logits: Layout, features: usize) -> Case {
    let bit = |n: usize| features >> n & 1 == 1;
    let of_loss = Features::new(features, if bit(0) { 0 } else { IGNORE_INDEX });
    Case {
        logits,
        targets: if bit(1) { DType::I64 } else { DType::I32 },
        loss: of_loss.loss,
        reduction: of_loss.reduction,
        denominator: of_loss.denominator,
        dloss: of_loss.dloss,
        gradient: true,
        in_place: bit(1),
        losses: of_loss.losses,
        skew: 0,
    }
}

fn check(ctx: &Context, dtype: DType, case: &Case) {
    let rng = &mut rng();
    let vocab = *case.logits.shape().last().unwrap();
    let leading = contiguous(&case.logits.shape()[..case.logits.rank() - 1]);
    let tokens = leading.num_elements();
    let mut logits = TestTensor::poisoned_at(dtype, case.logits, case.skew);
    let normal = TestTensor::normal(rng, dtype, case.logits).values();
    logits.set_values(&normal.iter().map(|x| 3.0 * x).collect::<Vec<_>>());
    let targets: Vec<i64> = (0..tokens)
        .map(|_| match rng.random_range(0..4) {
            0 => case.loss.ignore_index,
            _ => rng.random_range(0..vocab as i64),
        })
        .collect();
    let expected = case.loss.tokens(&logits.values(), &targets, vocab);
    let as_floats: Vec<f64> = targets.iter().map(|t| *t as f64).collect();
    let targets = TestTensor::from_values(case.targets, leading, &as_floats).upload(ctx);

    let number =
        |value: Option<f64>| value.map(|v| TestTensor::of(DType::F32, &[1], &[v]).upload(ctx));
    let (dloss, denominator) = (number(case.dloss), number(case.denominator));
    let of_tokens = || TestTensor::poisoned(DType::F32, leading).upload(ctx);
    let (mut losses, mut lse) = (of_tokens(), of_tokens());
    let mut loss = TestTensor::poisoned(DType::F32, contiguous(&[1])).upload(ctx);
    let mut there = logits.upload(ctx);
    let mut dlogits = TestTensor::poisoned_at(dtype, case.logits, case.skew).upload(ctx);
    let mut params = Params {
        logits: match case.gradient {
            true => Logits::Differentiate(in_out(case.in_place, &mut there, &mut dlogits)),
            false => Logits::Read(there.view()),
        },
        targets: targets.view(),
        loss: Some(loss.view_mut()),
        losses: case.losses.then(|| losses.view_mut()),
        lse: case.losses.then(|| lse.view_mut()),
        dloss: dloss.as_ref().map(|t| t.view()),
        denominator: denominator.as_ref().map(|t| t.view()),
        reduction: case.reduction,
        ignore_index: case.loss.ignore_index,
        label_smoothing: case.loss.label_smoothing as f32,
        z_loss: case.loss.z_loss as f32,
        softcap: case.loss.softcap as f32,
        workspace: Workspace::none(),
    };
    let size = cross_entropy::workspace_size(ctx, &params).unwrap();
    let mut memory = Buffer::from_slice(ctx, &vec![f32::NAN; size / 4]).unwrap();
    params.workspace = memory.workspace();
    cross_entropy::supported(ctx, &params).unwrap();
    cross_entropy::forward(ctx, &params, Stream::DEFAULT).unwrap();

    let divisor = match case.reduction {
        Reduction::Sum => 1.0,
        _ => case.denominator.unwrap_or(expected.num_valid.max(1) as f64),
    };
    // The exponentials and the logarithm, and partial sums over the vocabulary.
    let ulps = 24.0 + (vocab as f64).sqrt() / 4.0;
    let sum: f64 = expected.losses.iter().sum();
    let terms: f64 = expected.loss_terms.iter().sum();
    assert_close_of_sums(
        "loss",
        DType::F32,
        &loss.download_output().values(),
        &[sum / divisor],
        &[terms / divisor],
        ulps,
    );
    if case.losses {
        let (losses, lse) = (losses.download_output(), lse.download_output());
        let terms = &expected.loss_terms;
        assert_close_of_sums(
            "losses",
            DType::F32,
            &losses.values(),
            &expected.losses,
            terms,
            ulps,
        );
        assert_close_of_sums("lse", DType::F32, &lse.values(), &expected.lse, terms, ulps);
    }
    if case.gradient {
        let scale = case.dloss.unwrap_or(1.0) / divisor;
        let scaled = |values: &[f64], by: f64| values.iter().map(|v| v * by).collect::<Vec<_>>();
        let written = if case.in_place { there } else { dlogits }.download_output();
        assert_close_of_sums(
            "dlogits",
            dtype,
            &written.values(),
            &scaled(&expected.gradients, scale),
            &scaled(&expected.gradient_terms, scale.abs()),
            ulps,
        );
    }
}

#[test]
fn agrees_with_its_definition() {
    for ctx in contexts() {
        for dtype in FLOATS {
            crate::common::for_each_case(&cases(), |case| check(&ctx, dtype, case));
        }
    }
}

/// More tokens than a GPU has multiprocessors: blocks take several, a part of which is ignored.
#[test]
fn many_tokens() {
    let cases = [
        case_of(contiguous(&[300, 8192]), 2),
        case_of(contiguous(&[300, 8192]), 4),
        case_of(contiguous(&[75, 60_000]), 6),
        case_of(contiguous(&[150, 58_000]), 0),
    ];
    for ctx in contexts() {
        for dtype in [DType::F16, DType::Bf16] {
            crate::common::for_each_case(&cases, |case| check(&ctx, dtype, case));
        }
    }
}

/// The reference's gradient is the loss' difference along random directions.
#[test]
fn the_definition_is_its_own_derivative() {
    const STEP: f64 = 1e-5;
    let rng = &mut rng();
    let (vocab, targets) = (11, [3, 0, IGNORE_INDEX, 10]);
    for (label_smoothing, z_loss, softcap) in [(0.0, 0.0, 0.0), (0.1, 0.01, 0.0), (0.2, 0.5, 3.0)] {
        let loss = Loss {
            ignore_index: IGNORE_INDEX,
            label_smoothing,
            z_loss,
            softcap,
        };
        let mut random = || TestTensor::normal(rng, DType::F32, contiguous(&[4, vocab])).values();
        let (logits, along) = (random(), random());
        let moved = |step: f64| -> f64 {
            let moved: Vec<f64> = logits
                .iter()
                .zip(&along)
                .map(|(a, b)| a + step * b)
                .collect();
            loss.tokens(&moved, &targets, vocab).losses.iter().sum()
        };
        let difference = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
        let gradients = loss.tokens(&logits, &targets, vocab).gradients;
        let derivative: f64 = gradients.iter().zip(&along).map(|(g, a)| g * a).sum();
        assert!(
            (difference - derivative).abs() < 1e-8,
            "{difference} {derivative}"
        );
    }
}

/// Logits of minus infinity, as a mask of the vocabulary leaves them, are as none.
#[test]
fn logits_may_be_minus_infinity() {
    for ctx in contexts() {
        for dtype in FLOATS {
            let rng = &mut rng();
            let (tokens, vocab, masked) = (3, 600, 24);
            let few = TestTensor::normal(rng, dtype, contiguous(&[tokens, masked])).values();
            let all: Vec<f64> = few
                .chunks(masked)
                .flat_map(|row| [row, &vec![f64::NEG_INFINITY; vocab - masked]].concat())
                .collect();
            let targets = [3, IGNORE_INDEX, 0];
            let loss = Loss {
                ignore_index: IGNORE_INDEX,
                label_smoothing: 0.0,
                z_loss: 0.0,
                softcap: 0.0,
            };
            let expected = loss.tokens(&few, &targets, masked);
            let mut logits = TestTensor::of(dtype, &[tokens, vocab], &all).upload(&ctx);
            let as_floats = targets.map(|t| t as f64);
            let targets = TestTensor::of(DType::I64, &[tokens], &as_floats).upload(&ctx);
            let of_tokens = TestTensor::poisoned(DType::F32, contiguous(&[tokens]));
            let mut losses = of_tokens.upload(&ctx);
            let params = Params {
                logits: Logits::Differentiate(unsloth::InOut::InPlace(logits.view_mut())),
                targets: targets.view(),
                loss: None,
                losses: Some(losses.view_mut()),
                lse: None,
                dloss: None,
                denominator: None,
                reduction: Reduction::Sum,
                ignore_index: IGNORE_INDEX,
                label_smoothing: 0.0,
                z_loss: 0.0,
                softcap: 0.0,
                workspace: Workspace::none(),
            };
            cross_entropy::forward(&ctx, &params, Stream::DEFAULT).unwrap();
            let (losses, dlogits) = (losses.download_output(), logits.download_output());
            let terms = &expected.loss_terms;
            let (of, f32) = (&expected.losses, DType::F32);
            assert_close_of_sums("losses", f32, &losses.values(), of, terms, 32.0);
            for (i, row) in dlogits.values().chunks(vocab).enumerate() {
                let of_row = i * masked..(i + 1) * masked;
                let gradients = &expected.gradients[of_row.clone()];
                let terms = &expected.gradient_terms[of_row];
                assert_close_of_sums("dlogits", dtype, &row[..masked], gradients, terms, 32.0);
                assert!(row[masked..].iter().all(|g| *g == 0.0));
            }
        }
    }
}

/// Greater than the vocabulary and less than zero: refused where the host can look, NaN elsewhere.
#[test]
fn targets_outside_are_seen() {
    for ctx in contexts() {
        for target in [4.0, -1.0] {
            let mut logits = TestTensor::of(DType::F32, &[1, 4], &[0.0; 4]).upload(&ctx);
            let targets = TestTensor::of(DType::I32, &[1], &[target]).upload(&ctx);
            let mut loss = TestTensor::of(DType::F32, &[1], &[5.0]).upload(&ctx);
            let params = Params {
                logits: Logits::Differentiate(unsloth::InOut::InPlace(logits.view_mut())),
                targets: targets.view(),
                loss: Some(loss.view_mut()),
                losses: None,
                lse: None,
                dloss: None,
                denominator: None,
                reduction: Reduction::Sum,
                ignore_index: IGNORE_INDEX,
                label_smoothing: 0.0,
                z_loss: 0.0,
                softcap: 0.0,
                workspace: Workspace::none(),
            };
            let size = cross_entropy::workspace_size(&ctx, &params).unwrap();
            let mut memory = Buffer::new(&ctx, size).unwrap();
            let params = Params {
                workspace: memory.workspace(),
                ..params
            };
            let done = cross_entropy::forward(&ctx, &params, Stream::DEFAULT);
            if ctx.backend() == unsloth::Backend::Cpu {
                let message = format!(
                    "cross_entropy: targets has {target} at index 0, allowed: 0 to 3, and -100 to ignore the token"
                );
                assert_eq!(done.unwrap_err().to_string(), message);
                assert_eq!(loss.download_output().values(), [5.0]);
                assert_eq!(logits.download_output().values(), [0.0; 4]);
            } else {
                done.unwrap();
                assert!(loss.download_output().values()[0].is_nan());
                assert!(logits.download_output().values().iter().all(|g| g.is_nan()));
            }
        }
    }
}

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;

const MISUSE: &[Misuse<unsloth_cross_entropy_params>] = &[
    (
        |p| p.logits = absent(),
        INVALID,
        "cross_entropy: logits is absent (rank 0), it is required",
    ),
    (
        |p| p.targets.dtype = DType::F32 as u32,
        INVALID,
        "cross_entropy: targets has dtype f32, allowed: i32, i64",
    ),
    (
        |p| p.targets.shape[0] = 3,
        INVALID,
        "cross_entropy: targets has shape [3], expected [2]",
    ),
    (
        |p| p.loss.shape[0] = 2,
        INVALID,
        "cross_entropy: loss has shape [2], expected [1]",
    ),
    (
        |p| p.losses.dtype = DType::Bf16 as u32,
        INVALID,
        "cross_entropy: losses has dtype bf16, allowed: f32",
    ),
    (
        |p| p.dlogits.dtype = DType::F16 as u32,
        INVALID,
        "cross_entropy: dlogits has dtype f16, logits has f32",
    ),
    (
        |p| p.reduction = 2,
        INVALID,
        "cross_entropy: reduction is 2, allowed: 0 (mean), 1 (sum)",
    ),
    (
        |p| (p.reduction, p.denominator) = (1, p.dloss),
        INVALID,
        "cross_entropy: denominator is there, without a mean it has no use",
    ),
    (
        |p| p.has_ignore_index = 2,
        INVALID,
        "cross_entropy: has_ignore_index is 2, allowed: 0, 1",
    ),
    (
        |p| p.ignore_index = 5,
        INVALID,
        "cross_entropy: ignore_index is 5, without has_ignore_index",
    ),
    (
        |p| p.label_smoothing = 1.5,
        INVALID,
        "cross_entropy: label_smoothing is 1.5, allowed: 0 to 1",
    ),
    (
        |p| p.z_loss = -1.0,
        INVALID,
        "cross_entropy: z_loss is -1, it must not be negative",
    ),
    (
        |p| p.softcap = f32::INFINITY,
        INVALID,
        "cross_entropy: softcap is inf, a finite number is needed",
    ),
    (
        |p| p.dloss.data = p.loss.data,
        INVALID,
        "cross_entropy: loss overlaps dloss",
    ),
    (
        |p| p.lse.data = p.losses.data,
        INVALID,
        "cross_entropy: lse overlaps losses",
    ),
    (
        |p| p.targets.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "cross_entropy: data of targets is NULL",
    ),
];

#[test]
fn misuse_is_refused_and_writes_nothing() {
    for (memory, ctx) in abi::backends() {
        let layout = contiguous(&[2, 8]);
        let logits = TestTensor::normal(&mut rng(), DType::F32, layout).upload(&memory);
        let targets = TestTensor::of(DType::I32, &[2], &[1.0, 7.0]).upload(&memory);
        let poisoned =
            |shape: &[usize]| TestTensor::poisoned(DType::F32, contiguous(shape)).upload(&memory);
        let (loss, losses, lse) = (poisoned(&[1]), poisoned(&[2]), poisoned(&[2]));
        let dlogits = poisoned(&[2, 8]);
        let dloss = TestTensor::of(DType::F32, &[1], &[1.0]).upload(&memory);
        // SAFETY: a struct of integers, floats and pointers, size first.
        let mut good: unsloth_cross_entropy_params = unsafe { abi::zeroed_params() };
        (good.logits, good.targets) = (c_tensor(&logits), c_tensor(&targets));
        (good.loss, good.losses) = (c_tensor(&loss), c_tensor(&losses));
        (good.lse, good.dlogits) = (c_tensor(&lse), c_tensor(&dlogits));
        good.dloss = c_tensor(&dloss);
        let mut size = 0;
        // SAFETY: the struct is there, and the size can be written.
        let asked = unsafe { unsloth_cross_entropy_workspace_size(ctx.0, &good, &mut size) };
        assert_eq!(asked, UNSLOTH_STATUS_SUCCESS);
        let workspace = Buffer::new(&memory, size).unwrap();
        (good.workspace, good.workspace_size) = (workspace.as_ptr().cast(), size);
        for (spoil, status, message) in MISUSE {
            let mut bad = good;
            spoil(&mut bad);
            // SAFETY: every tensor that passes validation lies in memory made above.
            let got = unsafe { unsloth_cross_entropy_forward(ctx.0, &bad, std::ptr::null_mut()) };
            assert_fails(got, *status, message);
        }
        for untouched in [&loss, &losses, &lse, &dlogits] {
            abi::assert_untouched(untouched);
        }
    }
}
