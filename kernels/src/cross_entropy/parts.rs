//! Cross-entropy of logits whose columns ranks divide: what a rank's columns come to, and, of what those
//! of all ranks come to, the loss and the gradient of a rank's columns. A block has one token.

use cubecl::prelude::*;

use super::{Args, Sums, THREADS, args, clear, differentiate, joined, sum_token};
use crate::Error;
use crate::emit::{Builder, Float as Dtype, Kernel, ScalarType, with_vector};
use crate::math;
use crate::rows::{row_index, row_start};
use contract::cross_entropy::SUMS;

/// A token's target.
#[cube]
fn target_of(targets: &Array<i32>, targets_i64: &Array<i64>, args: Args) -> i64 {
    let at = row_start(row_index(CUBE_POS_X, args.sizes), args.targets);
    if args.wide_targets == 1u32 {
        targets_i64[at]
    } else {
        i64::cast_from(targets[at])
    }
}

/// Stores the numbers of a token: the greatest logit, the sum of exponentials of distances from it, the
/// sum of logits, the target's logit. Zeros of one that is ignored. Grid: tokens. `plain` is the memory of
/// `logits`, by elements; the first column is `begin`.
#[cube]
fn part<F: Float, N: Size>(
    logits: &Array<Vector<F, N>>,
    plain: &Array<F>,
    targets: &Array<i32>,
    targets_i64: &Array<i64>,
    sums: &mut Array<f32>,
    args: Args,
    begin: usize,
) {
    let width = comptime!(N::value() as u32);
    let target = target_of(targets, targets_i64, args);
    let from = row_start(row_index(CUBE_POS_X, args.sizes), args.logits);
    let mut peak = 0.0f32;
    let mut exponentials = 0.0f32;
    let mut total = 0.0f32;
    let mut of_target = 0.0f32;
    if target != args.ignore_index {
        // A target before the first column is a great one.
        let column = usize::cast_from(target) - begin;
        if column < args.length as usize * width as usize {
            let z = f32::cast_from(plain[from * width as usize + column]);
            of_target = z;
            if args.softcap > 0.0f32 {
                of_target = args.softcap * (z / args.softcap).tanh();
            }
        }
        let all = sum_token::<F, N>(logits, from, args);
        peak = all.peak;
        exponentials = all.exponentials;
        total = all.total;
    }
    if UNIT_POS_X == 0u32 {
        let at = CUBE_POS_X as usize * comptime!(SUMS as usize);
        sums[at] = peak;
        sums[at + 1] = exponentials;
        sums[at + 2] = total;
        sums[at + 3] = of_target;
    }
}

/// Stores the loss and lse of a token, and overwrites its logits by their gradient. Grid: tokens, of which
/// `sums` has as many of each rank, one behind the other.
#[cube]
fn whole<F: Float, N: Size>(
    logits: &mut Array<Vector<F, N>>,
    read: &Array<Vector<F, N>>,
    targets: &Array<i32>,
    targets_i64: &Array<i64>,
    sums: &Array<f32>,
    losses: &mut Array<f32>,
    lses: &mut Array<f32>,
    dloss: &Array<f32>,
    denominator: &Array<f32>,
    args: Args,
    begin: usize,
    vocab: usize,
    ranks: u32,
    tokens: u32,
) {
    let width = comptime!(N::value() as u32);
    let target = target_of(targets, targets_i64, args);
    let from = row_start(row_index(CUBE_POS_X, args.sizes), args.logits);
    let token = CUBE_POS_X as usize;
    let mut loss = 0.0f32;
    let mut lse = 0.0f32;
    if target == args.ignore_index {
        if args.has_dlogits != 0u32 {
            clear::<F, N>(logits, from, args.length);
        }
    } else {
        let mut peak = f32::new(f32::MIN);
        let mut exponentials = 0.0f32;
        let mut total = 0.0f32;
        let mut of_target = 0.0f32;
        let mut rank = 0u32;
        while rank < ranks {
            let at = (rank as usize * tokens as usize + token) * comptime!(SUMS as usize);
            let before = Sums {
                peak,
                exponentials,
                total,
            };
            let of_rank = Sums {
                peak: sums[at],
                exponentials: sums[at + 1],
                total: sums[at + 2],
            };
            let both = joined(before, of_rank);
            peak = both.peak;
            exponentials = both.exponentials;
            total = both.total;
            of_target += sums[at + 3];
            rank += 1u32;
        }
        lse = peak + exponentials.ln();
        // A negative target is a great one without its sign.
        let column = usize::cast_from(target);
        let mut scale = 1.0f32;
        if column >= vocab {
            of_target = math::nan();
            scale = math::nan();
        }
        let share = 1.0f32 - args.label_smoothing;
        // Logits may be minus infinity where no probability is spread over them.
        let mut smooth = 0.0f32;
        if args.spread > 0.0f32 {
            smooth = args.spread * total;
        }
        loss = lse - share * of_target - smooth + args.z_loss * lse * lse;
        if args.has_dlogits != 0u32 {
            if args.has_dloss != 0u32 {
                scale *= dloss[0];
            }
            if args.has_denominator != 0u32 {
                scale /= denominator[0];
            }
            // One of another rank is none of these columns.
            let mut place = u32::MAX.runtime();
            if column - begin < args.length as usize * width as usize {
                place = u32::cast_from(column - begin);
            }
            differentiate::<F, N>(read, from, logits, from, place, lse, scale, args);
        }
    }
    if UNIT_POS_X == 0u32 {
        if args.has_losses != 0u32 {
            losses[token] = loss;
        }
        if args.has_lse != 0u32 {
            lses[token] = lse;
        }
    }
}

macro_rules! part {
    ($b:ident, $f:ty, $n:ty) => {{
        let (vector, element) = ($b.type_of::<Vector<$f, $n>>(), $b.type_of::<$f>());
        let (narrow, wide) = ($b.type_of::<i32>(), $b.type_of::<i64>());
        let float = $b.type_of::<f32>();
        let logits = $b.read("logits", vector);
        let plain = $b.read("plain", element);
        let targets = $b.read("targets", narrow);
        let targets_i64 = $b.read("targets_i64", wide);
        let sums = $b.write("sums", float);
        let args = args(&mut $b);
        let begin = $b.scalar("begin", ScalarType::U64);
        part::expand::<$f, $n>(
            $b.scope(),
            logits.into(),
            plain.into(),
            targets.into(),
            targets_i64.into(),
            sums.into(),
            args,
            begin.into(),
        );
    }};
}

macro_rules! whole {
    ($b:ident, $f:ty, $n:ty) => {{
        let vector = $b.type_of::<Vector<$f, $n>>();
        let (narrow, wide) = ($b.type_of::<i32>(), $b.type_of::<i64>());
        let float = $b.type_of::<f32>();
        let logits = $b.write("logits", vector);
        // The same memory, hence not `read`.
        let read = $b.write("read", vector);
        let targets = $b.read("targets", narrow);
        let targets_i64 = $b.read("targets_i64", wide);
        let sums = $b.read("sums", float);
        let losses = $b.write("losses", float);
        let lses = $b.write("lses", float);
        let dloss = $b.read("dloss", float);
        let denominator = $b.read("denominator", float);
        let args = args(&mut $b);
        let begin = $b.scalar("begin", ScalarType::U64);
        let vocab = $b.scalar("vocab", ScalarType::U64);
        let ranks = $b.scalar("ranks", ScalarType::U32);
        let tokens = $b.scalar("tokens", ScalarType::U32);
        whole::expand::<$f, $n>(
            $b.scope(),
            logits.into(),
            read.into(),
            targets.into(),
            targets_i64.into(),
            sums.into(),
            losses.into(),
            lses.into(),
            dloss.into(),
            denominator.into(),
            args,
            begin.into(),
            vocab.into(),
            ranks.into(),
            tokens.into(),
        );
    }};
}

macro_rules! kernels {
    ($name:ident, $kernel:ident) => {
        /// By dtype, in vectors and by element.
        pub fn $name() -> Result<Vec<Kernel>, Error> {
            let mut kernels = Vec::new();
            for dtype in Dtype::ALL.iter().copied() {
                for vectors in [true, false] {
                    let mut b = Builder::default();
                    with_vector!(dtype, F, N => match vectors {
                        true => $kernel!(b, F, N),
                        false => $kernel!(b, F, Const<1>),
                    });
                    let width = if vectors { dtype.per_vector() } else { 1 };
                    let of = stringify!($kernel);
                    let name = format!("cross_entropy_{of}_{}x{width}", dtype.name());
                    let choices = vec![("dtype", dtype.code()), ("width", width)];
                    kernels.push(b.finish(name, choices, THREADS)?);
                }
            }
            Ok(kernels)
        }
    };
}

kernels!(part_kernels, part);
kernels!(whole_kernels, whole);
