//! Log-probabilities of given ids under logits, the entropies of these, and their gradient, which
//! takes the logits' place. A block has one token, whose logits it reads once for the sums and once
//! more for the gradient.

// CubeCL has no such method.
#![allow(clippy::manual_is_multiple_of)]

use cubecl::prelude::*;

use crate::Error;
use crate::cross_entropy::{THREADS, UNROLL, WARPS, capped, clear};
use crate::emit::{Builder, Float as Dtype, Kernel, ScalarType, with_vector};
use crate::math;
use crate::rows::{self, Sizes, Strides, row_index, row_start};

/// What the kernel takes besides pointers.
#[derive(CubeType, Clone, Copy)]
struct Args {
    /// In vectors.
    length: u32,
    wide_ids: u32,
    ignore_index: i64,
    /// 1 over the temperature.
    inverse: f32,
    /// 0 for none.
    softcap: f32,
    /// What a logit is multiplied by to be a share of the softcap; 0 without one.
    bend: f32,
    has_logprobs: u32,
    has_entropy: u32,
    has_lse: u32,
    differentiate: u32,
    has_dlogprobs: u32,
    has_dentropy: u32,
    sizes: Sizes,
    ids: Strides,
}

/// What logits come to: the greatest, the sum of exponentials of the distances from it, which are
/// negative, and the sum of distances that have these weights.
#[derive(CubeType, Clone, Copy)]
struct Sums {
    peak: f32,
    exponentials: f32,
    weighted: f32,
}

/// A distance beyond which exponentials are zero: what is multiplied by them stays finite.
const FAR: f32 = -1e4;

/// The same as distances from a greater peak.
#[cube]
fn moved(sums: Sums, peak: f32) -> Sums {
    let shift = max(sums.peak - peak, f32::new(FAR));
    let factor = shift.exp();
    Sums {
        peak,
        exponentials: sums.exponentials * factor,
        weighted: (sums.weighted + shift * sums.exponentials) * factor,
    }
}

#[cube]
fn joined(a: Sums, b: Sums) -> Sums {
    let peak = max(a.peak, b.peak);
    let (a, b) = (moved(a, peak), moved(b, peak));
    Sums {
        peak,
        exponentials: a.exponentials + b.exponentials,
        weighted: a.weighted + b.weighted,
    }
}

/// The sums of the lanes of a warp, in all of them.
#[cube]
fn of_warp(mine: Sums) -> Sums {
    let mut peak = mine.peak;
    let mut exponentials = mine.exponentials;
    let mut weighted = mine.weighted;
    #[unroll]
    for step in 0..5u32 {
        let other = Sums {
            peak: plane_shuffle_xor(peak, comptime!(1u32 << step)),
            exponentials: plane_shuffle_xor(exponentials, comptime!(1u32 << step)),
            weighted: plane_shuffle_xor(weighted, comptime!(1u32 << step)),
        };
        let mine = Sums {
            peak,
            exponentials,
            weighted,
        };
        let all = joined(mine, other);
        peak = all.peak;
        exponentials = all.exponentials;
        weighted = all.weighted;
    }
    Sums {
        peak,
        exponentials,
        weighted,
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
        parts[at + comptime!(2 * WARPS as usize)] = of_warp_.weighted;
    }
    sync_cube();
    let at = (UNIT_POS_X % 32) as usize;
    of_warp(Sums {
        peak: parts[at],
        exponentials: parts[at + comptime!(WARPS as usize)],
        weighted: parts[at + comptime!(2 * WARPS as usize)],
    })
}

/// Logits after the softcap and over the temperature.
#[cube]
fn scaled<F: Float, N: Size>(z: Vector<F, N>, args: Args) -> Vector<f32, N> {
    let mut s = capped::<F, N>(z, args.softcap);
    #[unroll]
    for j in 0..N::value() {
        s[j] *= args.inverse;
    }
    s
}

/// The sums over a token's logits, in all threads.
#[cube]
fn sum_token<F: Float, N: Size>(logits: &Array<Vector<F, N>>, from: usize, args: Args) -> Sums {
    // Below every logit but minus infinity, from which it has a distance.
    let mut peak = f32::new(f32::MIN);
    let mut exponentials = 0.0f32;
    let mut weighted = 0.0f32;
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
                let s = scaled::<F, N>(*loaded.index(k as usize), args);
                let mut next = peak;
                #[unroll]
                for j in 0..N::value() {
                    next = max(next, s[j]);
                }
                let before = Sums {
                    peak,
                    exponentials,
                    weighted,
                };
                let here = moved(before, next);
                exponentials = here.exponentials;
                weighted = here.weighted;
                #[unroll]
                for j in 0..N::value() {
                    let distance = s[j] - next;
                    let e = distance.exp();
                    exponentials += e;
                    // A logit of minus infinity has no share.
                    if e > 0.0f32 {
                        weighted += e * distance;
                    }
                }
                peak = next;
            }
        }
        i += comptime!(THREADS * UNROLL);
    }
    of_block(Sums {
        peak,
        exponentials,
        weighted,
    })
}

/// A token whose distribution is known, and the gradients of what came of it.
#[derive(CubeType, Clone, Copy)]
struct Token {
    peak: f32,
    log_sum: f32,
    entropy: f32,
    id: u32,
    dlogprob: f32,
    dentropy: f32,
}

/// Overwrites a token's logits with their gradient: a thread reads what it writes.
#[cube]
fn differentiate<F: Float, N: Size>(
    logits: &mut Array<Vector<F, N>>,
    from: usize,
    token: Token,
    args: Args,
) {
    let width = comptime!(N::value() as u32);
    let mut i = UNIT_POS_X;
    while i < args.length {
        let s = scaled::<F, N>(logits[from + i as usize], args);
        let mut gradient = Vector::<f32, N>::zeroed();
        #[unroll]
        for j in 0..N::value() {
            let log_p = s[j] - token.peak - token.log_sum;
            let p = log_p.exp();
            let mut g = token.dlogprob;
            if p > 0.0f32 {
                g += token.dentropy * (log_p + token.entropy);
            }
            g = -(p * g);
            if i * width + comptime!(j as u32) == token.id {
                g += token.dlogprob;
            }
            // Without a softcap a logit may be minus infinity.
            if args.softcap > 0.0f32 {
                let share = s[j] * args.bend;
                g *= 1.0f32 - share * share;
            }
            gradient[j] = g * args.inverse;
        }
        logits[from + i as usize] = Vector::cast_from(gradient);
        i += THREADS;
    }
}

/// Grid: tokens. `plain` is the memory of `logits`, by elements.
#[cube]
fn logprob<F: Float, N: Size>(
    logits: &mut Array<Vector<F, N>>,
    plain: &Array<F>,
    ids: &Array<i32>,
    ids_i64: &Array<i64>,
    logprobs: &mut Array<f32>,
    entropies: &mut Array<f32>,
    lses: &mut Array<f32>,
    dlogprobs: &Array<f32>,
    dentropies: &Array<f32>,
    args: Args,
) {
    let width = comptime!(N::value() as u32);
    let at = row_start(row_index(CUBE_POS_X, args.sizes), args.ids);
    let id = if args.wide_ids == 1u32 {
        ids_i64[at]
    } else {
        i64::cast_from(ids[at])
    };
    let row = CUBE_POS_X as usize;
    let from = row * args.length as usize;
    let ignored = id == args.ignore_index;
    let mut of_id = 0.0f32;
    let mut lse = 0.0f32;
    let mut entropy = 0.0f32;
    if ignored {
        if args.differentiate != 0u32 {
            clear::<F, N>(logits, from, args.length);
        }
    } else {
        // A negative id is a great one without its sign.
        let column = usize::cast_from(id);
        let inside = column < args.length as usize * width as usize;
        let mut z = math::nan();
        if inside {
            z = f32::cast_from(plain[from * width as usize + column]);
            if args.softcap > 0.0f32 {
                z = args.softcap * (z / args.softcap).tanh();
            }
            z *= args.inverse;
        }
        let sums = sum_token::<F, N>(logits, from, args);
        let log_sum = sums.exponentials.ln();
        of_id = z - sums.peak - log_sum;
        lse = sums.peak + log_sum;
        entropy = log_sum - sums.weighted / sums.exponentials;
        if args.differentiate != 0u32 {
            let mut dlogprob = 0.0f32;
            let mut dentropy = 0.0f32;
            if args.has_dlogprobs != 0u32 {
                dlogprob = dlogprobs[row];
            }
            if args.has_dentropy != 0u32 {
                dentropy = dentropies[row];
            }
            if !inside {
                dlogprob = math::nan();
            }
            let token = Token {
                peak: sums.peak,
                log_sum,
                entropy,
                id: u32::cast_from(column),
                dlogprob,
                dentropy,
            };
            differentiate::<F, N>(logits, from, token, args);
        }
    }
    if UNIT_POS_X == 0u32 {
        if args.has_logprobs != 0u32 {
            logprobs[row] = of_id;
        }
        if args.has_entropy != 0u32 {
            entropies[row] = entropy;
        }
        if args.has_lse != 0u32 {
            lses[row] = lse;
        }
    }
}

fn args(b: &mut Builder) -> ArgsExpand {
    use ScalarType::{F32, I64, U32};
    ArgsExpand {
        length: b.scalar("length", U32).into(),
        wide_ids: b.scalar("wide_ids", U32).into(),
        ignore_index: b.scalar("ignore_index", I64).into(),
        inverse: b.scalar("inverse", F32).into(),
        softcap: b.scalar("softcap", F32).into(),
        bend: b.scalar("bend", F32).into(),
        has_logprobs: b.scalar("has_logprobs", U32).into(),
        has_entropy: b.scalar("has_entropy", U32).into(),
        has_lse: b.scalar("has_lse", U32).into(),
        differentiate: b.scalar("differentiate", U32).into(),
        has_dlogprobs: b.scalar("has_dlogprobs", U32).into(),
        has_dentropy: b.scalar("has_dentropy", U32).into(),
        sizes: rows::sizes(b),
        ids: rows::strides(b, ["ids_0", "ids_1", "ids_2"]),
    }
}

macro_rules! kernel {
    ($b:ident, $f:ty, $n:ty) => {{
        let (vector, element) = ($b.type_of::<Vector<$f, $n>>(), $b.type_of::<$f>());
        let (narrow, wide) = ($b.type_of::<i32>(), $b.type_of::<i64>());
        let float = $b.type_of::<f32>();
        let logits = $b.write("logits", vector);
        // May be overwritten, hence not `read`.
        let plain = $b.write("plain", element);
        let ids = $b.read("ids", narrow);
        let ids_i64 = $b.read("ids_i64", wide);
        let logprobs = $b.write("logprobs", float);
        let entropies = $b.write("entropies", float);
        let lses = $b.write("lses", float);
        let dlogprobs = $b.read("dlogprobs", float);
        let dentropies = $b.read("dentropies", float);
        let args = args(&mut $b);
        logprob::expand::<$f, $n>(
            $b.scope(),
            logits.into(),
            plain.into(),
            ids.into(),
            ids_i64.into(),
            logprobs.into(),
            entropies.into(),
            lses.into(),
            dlogprobs.into(),
            dentropies.into(),
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
    let name = format!("logprob_{}x{width}", dtype.name());
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
