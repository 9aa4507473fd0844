//! Elementary functions where CUDA's own lose accuracy or need local memory. Coefficients are minimax fits (Remez,
//! `kernels/dev/minimax.py`), those of the CPU backend.

use std::f64::consts::{FRAC_2_PI, FRAC_PI_2};

use cubecl::prelude::*;

/// -π/2 in two parts.
const MINUS_PI_HALF_HIGH: f64 = -FRAC_PI_2;
const MINUS_PI_HALF_LOW: f64 = -6.123_233_995_736_766e-17;

/// A quiet NaN, which CubeCL has no constant for.
#[cube]
pub(crate) fn nan() -> f32 {
    let bits = RuntimeCell::<u32>::new(0x7fc0_0000u32);
    f32::reinterpret(bits.read())
}

/// A zero that changes nothing that it is added to, not even its sign; CubeCL would drop its own.
#[cube]
pub(crate) fn negative_zero() -> f32 {
    let bits = RuntimeCell::<u32>::new(0x8000_0000u32);
    f32::reinterpret(bits.read())
}

/// `1 / (1 + exp(-x))`, with small relative error in the left tail too.
#[cube]
pub(crate) fn logistic(x: f32) -> f32 {
    let e = (-x.abs()).exp();
    let mut numerator = 1.0f32;
    if x < 0.0 {
        numerator = e;
    }
    numerator / (1.0f32 + e)
}

/// [`logistic`] by the hardware's exponential and reciprocal: a dozen units in the last place of f32, more in the far tails, all of it far
/// below the rounding to 16 bits.
#[cube(fast_math = FastMath::all())]
pub(crate) fn logistic_for_16_bits(x: f32) -> f32 {
    let e = (-x.abs()).exp();
    let mut numerator = 1.0f32;
    if x < 0.0 {
        numerator = e;
    }
    numerator / (1.0f32 + e)
}

/// `max(x, 0)`; of NaN it is NaN.
#[cube]
pub(crate) fn relu(x: f32) -> f32 {
    select(x < 0.0f32, 0.0f32, x)
}

/// The standard normal density `exp(-x²/2) / √(2π)`, with small relative error in the tails too.
#[cube]
pub(crate) fn normal_density(x: f32) -> f32 {
    // x²/2 is rounded; its error, exact by FMA, is put back. Past the bound the density is zero.
    let square = (0.5f32 * x * x).min(104.04f32);
    let error = fma(0.5f32 * x, x, -square).min(1e-4f32);
    let e = (-square).exp();
    0.398_942_3f32 * fma(e, -error, e)
}

/// The standard normal distribution function `(1 + erf(x / √2)) / 2`, with small relative error in the left tail too.
#[cube]
pub(crate) fn normal_cdf(x: f32) -> f32 {
    // erfc(z) = exp(-z²) t P(t) with t = 1 / (1 + 0.35 z), z = |x| / √2, until erfc underflows.
    let z = (x.abs() * 0.707_106_77f32).min(10.2f32);
    let t = 1.0f32 / fma(0.35f32, z, 1.0f32);
    let mut p = fma(0.038_685_87f32, t, -0.160_521_98f32);
    p = fma(p, t, 0.185_333_9f32);
    p = fma(p, t, -0.033_060_35f32);
    p = fma(p, t, 0.091_653_25f32);
    p = fma(p, t, 0.143_443_07f32);
    p = fma(p, t, 0.152_129_04f32);
    p = fma(p, t, 0.187_689_42f32);
    p = fma(p, t, 0.197_165_5f32);
    p = fma(p, t, 0.197_482_29f32);
    // x²/2 is rounded; its error, exact by FMA, is put back, or the tail would lose digits.
    let square = (0.5f32 * x * x).min(104.04f32);
    let mut error = fma(0.5f32 * x, x, -square);
    if error >= 1e-4f32 {
        error = 0.0f32;
    }
    let e = (-square).exp();
    let tail = 0.5f32 * (t * p) * fma(e, -error, e);
    let mut y = tail;
    if x > 0.0 {
        y = 1.0f32 - tail;
    }
    // Around zero an odd polynomial loses nothing.
    let s = x * x;
    if s < 1.0 {
        let mut q = fma(-7.664_679e-6f32, s, 1.135_126_6e-4f32);
        q = fma(q, s, -1.186_353_1e-3f32);
        q = fma(q, s, 9.973_332e-3f32);
        q = fma(q, s, -6.649_036e-2f32);
        q = fma(q, s, 0.398_942_3f32);
        y = fma(x, q, 0.5f32);
    }
    y
}

/// Sine and cosine of an angle.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct SinCos {
    pub sin: f32,
    pub cos: f32,
}

/// Sine and cosine to 1.6 ulp of the larger of the two, for angles up to 2⁴⁵. CUDA's own keep a stack frame for great angles.
#[cube]
pub(crate) fn sin_cos(angle: f32) -> SinCos {
    // The reduction is in f64, where an f32 angle and the multiples of π/2 near it leave bits to spare.
    let wide = f64::cast_from(angle);
    let n = (wide * FRAC_2_PI).round();
    let high = fma(n, MINUS_PI_HALF_HIGH, wide);
    let r = f32::cast_from(fma(n, MINUS_PI_HALF_LOW, high));
    let s = r * r;
    let mut sine = fma(2.718_237_3e-6f32, s, -1.983_932_7e-4f32);
    sine = fma(sine, s, 8.333_329e-3f32);
    sine = fma(sine, s, -0.166_666_67f32);
    sine = fma(r * s, sine, r);
    let mut cosine = fma(2.443_773e-5f32, s, -1.388_736_1e-3f32);
    cosine = fma(cosine, s, 4.166_664_7e-2f32);
    cosine = fma(s * s, cosine, fma(-0.5f32, s, 1.0f32));
    // Quadrant: odd ones exchange the two, and the signs follow.
    let quadrant = i64::cast_from(n);
    let mut sin = sine;
    let mut cos = cosine;
    if quadrant & 1 != 0 {
        sin = cosine;
        cos = sine;
    }
    if quadrant & 2 != 0 {
        sin = -sin;
    }
    if (quadrant + 1) & 2 != 0 {
        cos = -cos;
    }
    SinCos { sin, cos }
}
