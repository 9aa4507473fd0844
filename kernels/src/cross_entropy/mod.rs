//! Cross-entropy of logits: the loss of each token and its gradient. A block has one token, whose
//! logits it reads once for the loss and once more for the gradient.

// CubeCL has no such method.
#![allow(clippy::manual_is_multiple_of)]

mod parts;
mod sums;

use cubecl::prelude::*;

use crate::Error;
use crate::emit::{Builder, Float as Dtype, Kernel, ScalarType, with_vector};
use crate::math;
use crate::rows::{self, Sizes, Strides, row_index, row_start};
pub use parts::{part_kernels, whole_kernels};
pub use sums::kernels as sum_kernels;

/// Threads of a block.
pub(crate) const THREADS: u32 = 1024;
pub(crate) const WARPS: u32 = THREADS / 32;
/// Vectors that a thread loads before it looks at them.
pub(crate) const UNROLL: u32 = 2;

/// What the kernel takes besides pointers.
#[derive(CubeType, Clone, Copy)]
struct Args {
    /// In vectors.
    length: u32,
    wide_targets: u32,
    ignore_index: i64,
    label_smoothing: f32,
    /// `label_smoothing / vocab`.
    spread: f32,
    z_loss: f32,
    /// 0 for none.
    softcap: f32,
    has_dlogits: u32,
    has_losses: u32,
    has_lse: u32,
    has_dloss: u32,
    has_denominator: u32,
    sizes: Sizes,
    logits: Strides,
    dlogits: Strides,
    targets: Strides,
}

/// What logits come to: the greatest, the sum of exponentials of the distances from it, and their
/// sum.
#[derive(CubeType, Clone, Copy)]
struct Sums {
    peak: f32,
    exponentials: f32,
    total: f32,
}

#[cube]
fn joined(a: Sums, b: Sums) -> Sums {
    let peak = max(a.peak, b.peak);
    Sums {
        peak,
        exponentials: a.exponentials * (a.peak - peak).exp()
            + b.exponentials * (b.peak - peak).exp(),
        total: a.total + b.total,
    }
}

/// The sums of the lanes of a warp, in all of them.
#[cube]
fn of_warp(mine: Sums) -> Sums {
    let mut peak = mine.peak;
    let mut exponentials = mine.exponentials;
    let mut total = mine.total;
    #[unroll]
    for step in 0..5u32 {
        let other = Sums {
            peak: plane_shuffle_xor(peak, comptime!(1u32 << step)),
            exponentials: plane_shuffle_xor(exponentials, comptime!(1u32 << step)),
            total: plane_shuffle_xor(total, comptime!(1u32 << step)),
        };
        let all = joined(
            Sums {
                peak,
                exponentials,
                total,
            },
            other,
        );
        peak = all.peak;
        exponentials = all.exponentials;
        total = all.total;
    }
    Sums {
        peak,
        exponentials,
        total,
    }
}

/// The sums of all threads, in all of them.
#[cube]
fn of_block(mine: Sums) -> Sums {
    let of_warp_ = of_warp(mine);
    let mut parts = SharedMemory::<f32>::new(comptime!(3 * WARPS as usize));
    if UNIT_POS_X % 32 == 0u32 {
        let at = (UNIT_POS_X / 32) as usize;
        parts[at] = of_warp_.peak;
        parts[at + comptime!(WARPS as usize)] = of_warp_.exponentials;
        parts[at + comptime!(2 * WARPS as usize)] = of_warp_.total;
    }
    sync_cube();
    let at = (UNIT_POS_X % 32) as usize;
    of_warp(Sums {
        peak: parts[at],
        exponentials: parts[at + comptime!(WARPS as usize)],
        total: parts[at + comptime!(2 * WARPS as usize)],
    })
}

/// Logits after the softcap.
#[cube]
pub(crate) fn capped<F: Float, N: Size>(z: Vector<F, N>, softcap: f32) -> Vector<f32, N> {
    let mut s = Vector::<f32, N>::cast_from(z);
    if softcap > 0.0f32 {
        #[unroll]
        for j in 0..N::value() {
            s[j] = softcap * (s[j] / softcap).tanh();
        }
    }
    s
}

/// The sums over a token's logits, in all threads.
#[cube]
fn sum_token<F: Float, N: Size>(logits: &Array<Vector<F, N>>, from: usize, args: Args) -> Sums {
    // Below every logit but minus infinity, from which it has a distance.
    let mut peak = f32::new(f32::MIN);
    let mut exponentials = 0.0f32;
    let mut total = 0.0f32;
    let mut i = UNIT_POS_X;
    while i < args.length {
        let mut loaded = Sequence::<Vector<F, N>>::new();
        #[unroll]
        for k in 0..UNROLL {
            // Past the end the last one is read again.
            let at = min(i + k * THREADS, args.length - 1u32);
            loaded.push(logits[from + at as usize]);
        }
        #[unroll]
        for k in 0..UNROLL {
            if i + k * THREADS < args.length {
                let s = capped::<F, N>(*loaded.index(k as usize), args.softcap);
                let mut next = peak;
                #[unroll]
                for j in 0..N::value() {
                    next = max(next, s[j]);
                    total += s[j];
                }
                exponentials *= (peak - next).exp();
                #[unroll]
                for j in 0..N::value() {
                    exponentials += (s[j] - next).exp();
                }
                peak = next;
            }
        }
        i += comptime!(THREADS * UNROLL);
    }
    of_block(Sums {
        peak,
        exponentials,
        total,
    })
}

/// Stores a token's gradient. `from` and `to` may be the same memory: a thread reads what it writes.
#[cube]
fn differentiate<F: Float, N: Size>(
    logits: &Array<Vector<F, N>>,
    from: usize,
    dlogits: &mut Array<Vector<F, N>>,
    to: usize,
    target: u32,
    lse: f32,
    scale: f32,
    args: Args,
) {
    let width = comptime!(N::value() as u32);
    let factor = 1.0f32 + 2.0f32 * args.z_loss * lse;
    let mut i = UNIT_POS_X;
    while i < args.length {
        let s = capped::<F, N>(logits[from + i as usize], args.softcap);
        let mut gradient = Vector::<f32, N>::zeroed();
        #[unroll]
        for j in 0..N::value() {
            let mut g = (s[j] - lse).exp() * factor - args.spread;
            if i * width + comptime!(j as u32) == target {
                g -= 1.0f32 - args.label_smoothing;
            }
            if args.softcap > 0.0f32 {
                let share = s[j] / args.softcap;
                g *= 1.0f32 - share * share;
            }
            gradient[j] = g * scale;
        }
        dlogits[to + i as usize] = Vector::cast_from(gradient);
        i += THREADS;
    }
}

/// Zeros, for a token that is ignored.
#[cube]
pub(crate) fn clear<F: Float, N: Size>(dlogits: &mut Array<Vector<F, N>>, to: usize, length: u32) {
    let mut i = UNIT_POS_X;
    while i < length {
        dlogits[to + i as usize] = Vector::zeroed();
        i += THREADS;
    }
}

/// Grid: tokens. `plain` is the memory of `logits`, by elements.
#[cube]
fn cross_entropy<F: Float, N: Size>(
    logits: &Array<Vector<F, N>>,
    plain: &Array<F>,
    targets: &Array<i32>,
    targets_i64: &Array<i64>,
    dlogits: &mut Array<Vector<F, N>>,
    losses: &mut Array<f32>,
    lses: &mut Array<f32>,
    dloss: &Array<f32>,
    denominator: &Array<f32>,
    args: Args,
) {
    let width = comptime!(N::value() as u32);
    let index = row_index(CUBE_POS_X, args.sizes);
    let at = row_start(index, args.targets);
    let target = if args.wide_targets == 1u32 {
        targets_i64[at]
    } else {
        i64::cast_from(targets[at])
    };
    let from = row_start(index, args.logits);
    let to = row_start(index, args.dlogits);
    let token = CUBE_POS_X as usize;
    if target == args.ignore_index {
        if args.has_dlogits != 0u32 {
            clear::<F, N>(dlogits, to, args.length);
        }
        if UNIT_POS_X == 0u32 {
            if args.has_losses != 0u32 {
                losses[token] = 0.0f32;
            }
            if args.has_lse != 0u32 {
                lses[token] = 0.0f32;
            }
        }
    } else {
        // A negative target is a great one without its sign.
        let column = usize::cast_from(target);
        let inside = column < args.length as usize * width as usize;
        let mut of_target = math::nan();
        let mut scale = math::nan();
        if inside {
            let z = f32::cast_from(plain[from * width as usize + column]);
            of_target = z;
            if args.softcap > 0.0f32 {
                of_target = args.softcap * (z / args.softcap).tanh();
            }
            scale = 1.0f32;
        }
        let sums = sum_token::<F, N>(logits, from, args);
        let lse = sums.peak + sums.exponentials.ln();
        if UNIT_POS_X == 0u32 {
            if args.has_losses != 0u32 {
                let share = 1.0f32 - args.label_smoothing;
                // Logits may be minus infinity where no probability is spread over them.
                let mut smooth = 0.0f32;
                if args.spread > 0.0f32 {
                    smooth = args.spread * sums.total;
                }
                losses[token] = lse - share * of_target - smooth + args.z_loss * lse * lse;
            }
            if args.has_lse != 0u32 {
                lses[token] = lse;
            }
        }
        if args.has_dlogits != 0u32 {
            if args.has_dloss != 0u32 {
                scale *= dloss[0];
            }
            if args.has_denominator != 0u32 {
                scale /= denominator[0];
            }
            let column = u32::cast_from(column);
            differentiate::<F, N>(logits, from, dlogits, to, column, lse, scale, args);
        }
    }
}

fn args(b: &mut Builder) -> ArgsExpand {
    use ScalarType::{F32, I64, U32};
    ArgsExpand {
        length: b.scalar("length", U32).into(),
        wide_targets: b.scalar("wide_targets", U32).into(),
        ignore_index: b.scalar("ignore_index", I64).into(),
        label_smoothing: b.scalar("label_smoothing", F32).into(),
        spread: b.scalar("spread", F32).into(),
        z_loss: b.scalar("z_loss", F32).into(),
        softcap: b.scalar("softcap", F32).into(),
        has_dlogits: b.scalar("has_dlogits", U32).into(),
        has_losses: b.scalar("has_losses", U32).into(),
        has_lse: b.scalar("has_lse", U32).into(),
        has_dloss: b.scalar("has_dloss", U32).into(),
        has_denominator: b.scalar("has_denominator", U32).into(),
        sizes: rows::sizes(b),
        logits: rows::strides(b, ["logits_0", "logits_1", "logits_2"]),
        dlogits: rows::strides(b, ["dlogits_0", "dlogits_1", "dlogits_2"]),
        targets: rows::strides(b, ["targets_0", "targets_1", "targets_2"]),
    }
}

macro_rules! kernel {
    ($b:ident, $f:ty, $n:ty) => {{
        let (vector, element) = ($b.type_of::<Vector<$f, $n>>(), $b.type_of::<$f>());
        let (narrow, wide) = ($b.type_of::<i32>(), $b.type_of::<i64>());
        let float = $b.type_of::<f32>();
        // May be overwritten in place, hence not `read`.
        let logits = $b.write("logits", vector);
        let plain = $b.write("plain", element);
        let targets = $b.read("targets", narrow);
        let targets_i64 = $b.read("targets_i64", wide);
        let dlogits = $b.write("dlogits", vector);
        let losses = $b.write("losses", float);
        let lses = $b.write("lses", float);
        let dloss = $b.read("dloss", float);
        let denominator = $b.read("denominator", float);
        let args = args(&mut $b);
        cross_entropy::expand::<$f, $n>(
            $b.scope(),
            logits.into(),
            plain.into(),
            targets.into(),
            targets_i64.into(),
            dlogits.into(),
            losses.into(),
            lses.into(),
            dloss.into(),
            denominator.into(),
            args,
        );
    }};
}

fn kernel(dtype: Dtype, vectors: bool) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    with_vector!(dtype, F, N => match vectors {
        true => kernel!(b, F, N),
        false => kernel!(b, F, Const<1>),
    });
    let width = if vectors { dtype.per_vector() } else { 1 };
    let name = format!("cross_entropy_{}x{width}", dtype.name());
    let choices = vec![("dtype", dtype.code()), ("width", width)];
    b.finish(name, choices, THREADS)
}

/// By dtype, in vectors and by element.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    let mut kernels = Vec::new();
    for dtype in Dtype::ALL.iter().copied() {
        for vectors in [true, false] {
            kernels.push(kernel(dtype, vectors)?);
        }
    }
    Ok(kernels)
}
