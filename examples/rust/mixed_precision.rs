//! Training in f16, with a loss scale and without: `cargo run --release --example mixed_precision`.
//!
//! A linear classifier learns to tell which of its inputs is the greatest. Its loss is a mean over the
//! tokens of a great many micro-batches, of which this program plays one, so gradients are below 6e-8,
//! the smallest number that f16 has: they vanish, and nothing is learned. The optimizer's loss scale,
//! which `dloss` reads from the device, lifts them into range; the update divides by it. It starts too
//! high here on purpose: gradients become infinite, their steps are skipped, and the scale is halved.

use rand::{Rng, SeedableRng, rngs::StdRng};
use unsloth::ops::linear::{self, Output, Weights};
use unsloth::ops::{cast, cross_entropy};
use unsloth::optimizer::{
    self, Group, LossScale, Master, MixedPrecision, Optimizer, Parameter, Params,
};
use unsloth::{Buffer, Context, DType, InOut, Layout, Result, Stream, Workspace};

const TOKENS: usize = 128;
const CLASSES: usize = 8;
/// Tokens of all micro-batches of a step.
const ALL_TOKENS: f32 = 1e8;
const STEPS: usize = 60;

/// A tensor of f16 with these values.
fn halves(ctx: &Context, values: &[f32], shape: &[usize]) -> Result<Buffer> {
    let layout = Layout::contiguous(shape)?;
    let wide = Buffer::from_slice(ctx, values)?;
    let mut narrow = Buffer::new(ctx, 2 * values.len())?;
    let params = cast::Params {
        x: wide.tensor(0, DType::F32, layout)?,
        out: narrow.tensor_mut(0, DType::F16, layout)?,
    };
    cast::forward(ctx, &params, Stream::DEFAULT)?;
    Ok(narrow)
}

/// Trains with a loss scale; gives the mean loss of the first step's tokens and the last's.
fn train(ctx: &Context, loss_scale: LossScale) -> Result<(f32, f32)> {
    let mut rng = StdRng::seed_from_u64(1);
    let x: Vec<f32> = (0..TOKENS * CLASSES)
        .map(|_| rng.random_range(-1.0..1.0))
        .collect();
    let greatest = |row: &[f32]| {
        let indexed = row.iter().enumerate();
        indexed.max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0 as i32
    };
    let targets: Vec<i32> = x.chunks(CLASSES).map(greatest).collect();

    let (tokens, square) = ([TOKENS, CLASSES], [CLASSES, CLASSES]);
    let of_tokens = Layout::contiguous(&tokens)?;
    let of_weight = Layout::contiguous(&square)?;
    let one = Layout::contiguous(&[1])?;
    let x = halves(ctx, &x, &tokens)?;
    let targets = Buffer::from_slice(ctx, &targets)?;
    let denominator = Buffer::from_slice(ctx, &[ALL_TOKENS])?;
    let mut weight = Buffer::new(ctx, 2 * CLASSES * CLASSES)?;
    let mut gradient = Buffer::new(ctx, 2 * CLASSES * CLASSES)?;
    let mut logits = Buffer::new(ctx, 2 * TOKENS * CLASSES)?;
    let mut loss = Buffer::new(ctx, 4)?;

    let parameters = [Parameter {
        weight: weight.tensor_mut(0, DType::F16, of_weight)?,
        gradient: gradient.tensor_mut(0, DType::F16, of_weight)?,
        group: 0,
    }];
    let groups = [Group {
        learning_rate: 0.1,
        weight_decay: 0.0,
    }];
    let params = Params {
        precision: MixedPrecision {
            compute: Some(DType::F16),
            master: Master::F32,
            loss_scale,
        },
        ..Params::adamw(&parameters, &groups, Workspace::none())
    };
    let mut state = Buffer::new(ctx, optimizer::state_size(ctx, &params)?)?;
    let params = Params {
        state: state.workspace(),
        ..params
    };
    // SAFETY: weight, gradient and state outlive the optimizer, and while it makes a step nothing
    // else uses them: all runs in the order of one stream.
    let mut optimizer = unsafe { Optimizer::new(ctx, &params, Stream::DEFAULT) }?;

    let mut losses = Vec::new();
    for _ in 0..STEPS {
        let params = linear::Params {
            x_norm: None,
            parallel: None,
            x: x.tensor(0, DType::F16, of_tokens)?,
            weights: Weights {
                weight: weight.tensor(0, DType::F16, of_weight)?,
                bias: None,
            },
            output: Output::Write(logits.tensor_mut(0, DType::F16, of_tokens)?),
            workspace: Workspace::none(),
        };
        linear::forward(ctx, &params, Stream::DEFAULT)?;

        // The loss, and in the logits' place their gradient times the scale.
        let mut params = cross_entropy::Params {
            logits: cross_entropy::Logits::Differentiate(InOut::InPlace(logits.tensor_mut(
                0,
                DType::F16,
                of_tokens,
            )?)),
            targets: targets.tensor(0, DType::I32, Layout::contiguous(&[TOKENS])?)?,
            loss: Some(loss.tensor_mut(0, DType::F32, one)?),
            losses: None,
            lse: None,
            dloss: Some(optimizer.loss_scale()?),
            denominator: Some(denominator.tensor(0, DType::F32, one)?),
            reduction: cross_entropy::Reduction::Mean,
            ignore_index: cross_entropy::IGNORE_INDEX,
            label_smoothing: 0.0,
            z_loss: 0.0,
            softcap: 0.0,
            workspace: Workspace::none(),
        };
        let mut workspace = Buffer::new(ctx, cross_entropy::workspace_size(ctx, &params)?)?;
        params.workspace = workspace.workspace();
        cross_entropy::forward(ctx, &params, Stream::DEFAULT)?;
        let sum = loss.to_vec::<f32>(0, 1, Stream::DEFAULT)?[0] * ALL_TOKENS;
        losses.push(sum / TOKENS as f32);

        let mut params = linear::backward::Params {
            parallel: None,
            dout: logits.tensor(0, DType::F16, of_tokens)?,
            x: Some(x.tensor(0, DType::F16, of_tokens)?),
            weight: None,
            dx: None,
            dweight: Some(gradient.tensor_mut(0, DType::F16, of_weight)?),
            dbias: None,
            accumulate: false,
            workspace: Workspace::none(),
        };
        let mut workspace = Buffer::new(ctx, linear::backward::workspace_size(ctx, &params)?)?;
        params.workspace = workspace.workspace();
        linear::backward(ctx, &params, Stream::DEFAULT)?;
        optimizer.step(Stream::DEFAULT)?;
    }
    let status = optimizer.status(Stream::DEFAULT)?;
    println!(
        "loss {:.3} to {:.3}; {} steps and {} skipped, scale {}",
        losses[0],
        losses[STEPS - 1],
        status.step,
        status.skipped,
        status.loss_scale
    );
    Ok((losses[0], losses[STEPS - 1]))
}

fn main() -> Result<()> {
    let ctx = Context::cpu()?;
    print!("without a scale: ");
    let (first, last) = train(&ctx, LossScale::NONE)?;
    assert_eq!(first, last, "gradients have vanished");

    print!("dynamic scale:   ");
    let dynamic = LossScale {
        init: 2f32.powi(44),
        ..LossScale::DYNAMIC
    };
    let (first, last) = train(&ctx, dynamic)?;
    assert!(last < first / 2.0);
    Ok(())
}
