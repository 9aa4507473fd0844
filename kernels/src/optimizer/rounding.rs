//! bf16 weights that are not rounded to nearest even: those with a remainder, and those rounded at
//! random.

use contract::optimizer::Storage;
use cubecl::prelude::*;

use super::{Args, Control};

const AT_RANDOM: u32 = Storage::Stochastic.code();

type Four = Vector<f32, Const<4>>;

#[cube]
fn is_nan(bits: u32) -> bool {
    bits & 0x7fff_ffffu32 > 0x7f80_0000u32
}

/// The lower 16 bits of each; none of a NaN, whose upper half must not be taken for rounded.
#[cube]
pub fn lower_halves(x: Four) -> Vector<u32, Const<2>> {
    let mut halves = Vector::<u32, Const<2>>::zeroed();
    #[unroll]
    for j in 0..4usize {
        let bits = u32::reinterpret(x[j]);
        let mut lower = bits & 0xffffu32;
        if is_nan(bits) {
            lower = 0u32;
        }
        halves[j / 2] |= lower << comptime!(16 * (j as u32 % 2));
    }
    halves
}

/// The f32 values of which these are the rounded upper halves and the lower ones.
#[cube]
pub fn joined(weight: Four, remainder: Vector<u32, Const<2>>) -> Four {
    let mut p = weight;
    #[unroll]
    for j in 0..4usize {
        let lower = (remainder[j / 2] >> comptime!(16 * (j as u32 % 2))) & 0xffffu32;
        // A lower half from a half on has rounded the upper half up.
        let upper = u32::reinterpret(weight[j]) - ((lower >> 15u32) << 16u32);
        p[j] = f32::reinterpret(upper | lower);
    }
    p
}

/// Four random words for a place among all elements, the seed and the step (Philox4x32-10, Salmon
/// et al. 2011).
#[cube]
fn philox(draw: u64, step: u64, args: &Args) -> Vector<u32, Const<4>> {
    let mut c0 = u32::cast_from(draw & 0xffff_ffffu64);
    let mut c1 = u32::cast_from(draw >> 32u64);
    let mut c2 = u32::cast_from(step & 0xffff_ffffu64);
    let mut c3 = u32::cast_from(step >> 32u64);
    let mut k0 = args.seed_low;
    let mut k1 = args.seed_high;
    #[unroll]
    for _ in 0..10u32 {
        let a_low = c0 * 0xD251_1F53u32;
        let a_high = u32::mul_hi(c0, 0xD251_1F53u32);
        let b_low = c2 * 0xCD9E_8D57u32;
        let b_high = u32::mul_hi(c2, 0xCD9E_8D57u32);
        c0 = b_high ^ c1 ^ k0;
        c1 = b_low;
        c2 = a_high ^ c3 ^ k1;
        c3 = a_low;
        k0 += 0x9E37_79B9u32;
        k1 += 0xBB67_AE85u32;
    }
    let mut words = Vector::<u32, Const<4>>::zeroed();
    words[0] = c0;
    words[1] = c1;
    words[2] = c2;
    words[3] = c3;
    words
}

/// What becomes of f32 values in bf16 weights that are not rounded to nearest even: numbers that
/// bf16 holds.
#[cube]
pub fn cut(p: Four, storage: u32, draw: u64, control: &Control, args: &Args) -> Four {
    let mut add = Vector::<u32, Const<4>>::new(0x8000u32);
    if storage == AT_RANDOM {
        add = philox(draw, control.u64s[4], args);
        #[unroll]
        for j in 0..4usize {
            add[j] = add[j] >> 16u32;
        }
    }
    let mut rounded = p;
    #[unroll]
    for j in 0..4usize {
        let bits = u32::reinterpret(p[j]);
        // NaN, which adding could turn into a zero, stays one.
        if !is_nan(bits) {
            rounded[j] = f32::reinterpret((bits + add[j]) & 0xffff_0000u32);
        }
    }
    rounded
}
