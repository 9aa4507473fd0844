//! Elementary functions on f32 as straight-line code: loops over them vectorise inside
//! [`Cpu::vectorize`](crate::cpu::Cpu::vectorize).
//!
//! Coefficients are minimax fits (Remez) made for these forms. `mul_add` is one instruction where
//! dispatch finds FMA.

/// `exp(x)` to 1.1 ulp; gradual underflow, +∞ above 88.73, NaN for NaN.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Adding 1.5·2²³ leaves the nearest integer in the low bits of the significand.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_145_75; // 17 bits, so that its product with any exponent is exact
    const LN2_LOW: f32 = 1.428_606_8e-6;
    // Comparisons rather than `clamp`, which LLVM vectorises less well; both are false for NaN,
    // which passes through.
    let x = if x < -105.0 { -105.0 } else { x };
    let x = if x > 90.0 { 90.0 } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_HIGH, x);
    let r = n.mul_add(-LN2_LOW, r);
    let p = 0.001_381_314_5_f32
        .mul_add(r, 0.008_369_419)
        .mul_add(r, 0.041_668_456)
        .mul_add(r, 0.166_665_15)
        .mul_add(r, 0.499_999_93);
    let p = (p * r).mul_add(r, r) + 1.0;
    // In two factors, neither of which leaves the range of normal numbers.
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) << 23) as u32);
    p * power(half) * power(n.wrapping_sub(half))
}

/// `1 / (1 + exp(-x))`, with small relative error in the left tail too.
#[inline(always)]
pub(crate) fn logistic(x: f32) -> f32 {
    let e = exp(-x.abs());
    let numerator = if x < 0.0 { e } else { 1.0 };
    numerator / (1.0 + e)
}

/// `max(x, 0)`; of NaN it is NaN.
#[inline(always)]
pub(crate) fn relu(x: f32) -> f32 {
    if x < 0.0 { 0.0 } else { x }
}

/// `tanh(x)` to 3 ulp.
#[inline(always)]
#[allow(dead_code)] // attention's softcap
pub(crate) fn tanh(x: f32) -> f32 {
    let magnitude = x.abs();
    let s = x * x;
    let p = (-0.005_704_986_f32)
        .mul_add(s, 0.020_639_086)
        .mul_add(s, -0.053_739_715)
        .mul_add(s, 0.133_314_42)
        .mul_add(s, -0.333_332_8);
    let small = (x * s).mul_add(p, x);
    let large = 1.0 - 2.0 / (1.0 + exp(2.0 * magnitude));
    let y = if magnitude < 0.625 { small } else { large };
    y.copysign(x)
}

/// Angles up to which [`sin_cos`] is accurate.
pub(crate) const MAX_ANGLE: f32 = 1_073_741_824.0;

/// `(sin(x), cos(x))` to 1.6 ulp of the larger of the two, for `|x|` up to [`MAX_ANGLE`].
#[inline(always)]
pub(crate) fn sin_cos(x: f32) -> (f32, f32) {
    // The reduction is in f64, where an f32 angle and the multiples of π/2 near it leave bits to
    // spare.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    const PI_HALF_HIGH: f64 = std::f64::consts::FRAC_PI_2;
    const PI_HALF_LOW: f64 = 6.123_233_995_736_766e-17;
    let wide = f64::from(x);
    let shifted = wide.mul_add(std::f64::consts::FRAC_2_PI, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-PI_HALF_LOW, n.mul_add(-PI_HALF_HIGH, wide)) as f32;
    let s = r * r;
    let sine = 2.718_237_3e-6_f32
        .mul_add(s, -1.983_932_7e-4)
        .mul_add(s, 8.333_329e-3)
        .mul_add(s, -0.166_666_67);
    let sine = (r * s).mul_add(sine, r);
    let cosine = 2.443_773e-5_f32
        .mul_add(s, -1.388_736_1e-3)
        .mul_add(s, 4.166_664_7e-2);
    let cosine = (s * s).mul_add(cosine, (-0.5_f32).mul_add(s, 1.0));
    // Quadrant: odd ones exchange the two, and the signs follow.
    let quadrant = shifted.to_bits() as u32;
    let odd = quadrant & 1 != 0;
    let (a, b) = if odd { (cosine, sine) } else { (sine, cosine) };
    let sign_a = (quadrant & 2) << 30;
    let sign_b = (quadrant.wrapping_add(1) & 2) << 30;
    (
        f32::from_bits(a.to_bits() ^ sign_a),
        f32::from_bits(b.to_bits() ^ sign_b),
    )
}

/// The standard normal density `exp(-x²/2) / √(2π)`, with small relative error in the tails too.
#[inline(always)]
pub(crate) fn normal_density(x: f32) -> f32 {
    const FRAC_1_SQRT_TAU: f32 = 0.398_942_3;
    // x²/2 is rounded; its error, exact by FMA, is put back. Past the bound the density is zero.
    let square = (0.5 * x * x).min(104.04);
    let error = (0.5 * x).mul_add(x, -square);
    let e = exp(-square);
    FRAC_1_SQRT_TAU * e.mul_add(-error.min(1e-4), e)
}

/// The standard normal distribution function `(1 + erf(x / √2)) / 2`, with small relative error in
/// the left tail too.
#[inline(always)]
pub(crate) fn normal_cdf(x: f32) -> f32 {
    // erfc(z) = exp(-z²) t P(t) with t = 1 / (1 + 0.35 z), z = |x| / √2; P fits exp(z²) erfc(z) / t
    // up to z = 10.2, where erfc underflows.
    let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let z = if z > 10.2 { 10.2 } else { z };
    let t = 1.0 / 0.35_f32.mul_add(z, 1.0);
    let p = 0.038_685_87_f32
        .mul_add(t, -0.160_521_98)
        .mul_add(t, 0.185_333_9)
        .mul_add(t, -0.033_060_35)
        .mul_add(t, 0.091_653_25)
        .mul_add(t, 0.143_443_07)
        .mul_add(t, 0.152_129_04)
        .mul_add(t, 0.187_689_42)
        .mul_add(t, 0.197_165_5)
        .mul_add(t, 0.197_482_29);
    // x²/2 is rounded; its error, exact by FMA, is put back, or the tail would lose digits.
    let square = 0.5 * x * x;
    let square = if square > 104.04 { 104.04 } else { square };
    let error = (0.5 * x).mul_add(x, -square);
    let error = if error < 1e-4 { error } else { 0.0 };
    let e = exp(-square);
    let tail = 0.5 * (t * p) * e.mul_add(-error, e);
    let outer = if x > 0.0 { 1.0 - tail } else { tail };
    // Around zero an odd polynomial is as cheap and loses nothing.
    let s = x * x;
    let q = (-7.664_679e-6_f32)
        .mul_add(s, 1.135_126_6e-4)
        .mul_add(s, -1.186_353_1e-3)
        .mul_add(s, 9.973_332e-3)
        .mul_add(s, -6.649_036e-2)
        .mul_add(s, 0.398_942_3);
    if s < 1.0 { x.mul_add(q, 0.5) } else { outer }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Inputs spread over `[-limit, limit]`, with their neighbourhood of zero.
    fn inputs(limit: f32) -> impl Iterator<Item = f32> {
        let n = 400_003;
        (0..n)
            .map(move |i| (i as f32 / (n - 1) as f32 * 2.0 - 1.0) * limit)
            .flat_map(|x| [x, x * 1e-3, x * 1e-7])
    }

    /// The largest error in units in the last place of the true value.
    fn max_ulp(limit: f32, f: impl Fn(f32) -> f32, truth: impl Fn(f64) -> f64) -> (f64, f32) {
        let mut worst = (0.0, 0.0);
        for x in inputs(limit) {
            let t = truth(f64::from(x));
            let ulp = f64::from(f32::from_bits((t as f32).abs().to_bits() + 1))
                - f64::from((t as f32).abs());
            let error = (f64::from(f(x)) - t).abs() / ulp;
            assert!(!error.is_nan(), "{x}");
            if error > worst.0 {
                worst = (error, x);
            }
        }
        worst
    }

    #[test]
    fn exp_is_accurate() {
        let (worst, at) = max_ulp(88.0, exp, f64::exp);
        assert!(worst < 1.1, "{worst} at {at}");
        // Subnormal results: absolute error within one step.
        for i in 0..2000 {
            let x = -87.0 - i as f32 * 0.01;
            let error = (f64::from(exp(x)) - f64::from(x).exp()).abs();
            assert!(error < 1.5e-45 + 1e-7 * f64::from(x).exp(), "{x}");
        }
    }

    #[test]
    fn exp_of_specials() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e30), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(89.0), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(88.7).is_finite());
    }

    #[test]
    fn sin_cos_is_accurate() {
        let mut worst = 0.0f64;
        for limit in [1.0, 100.0, 1e4, 1e6, MAX_ANGLE] {
            for x in inputs(limit) {
                let (sin, cos) = sin_cos(x);
                let (true_sin, true_cos) = f64::from(x).sin_cos();
                let error = (f64::from(sin) - true_sin)
                    .abs()
                    .max((f64::from(cos) - true_cos).abs());
                worst = worst.max(error / f64::from(f32::EPSILON));
                // Small values keep their relative accuracy as well.
                let relative = (f64::from(sin) - true_sin).abs() / true_sin.abs().max(1e-30);
                assert!(
                    relative < 2.5e-7 || x == 0.0,
                    "sin({x}) = {sin}, not {true_sin}"
                );
                assert!(!error.is_nan(), "{x}");
            }
        }
        assert!(worst < 0.8, "{worst}");
        assert!(sin_cos(f32::NAN).0.is_nan() && sin_cos(f32::INFINITY).1.is_nan());
        assert_eq!(sin_cos(0.0), (0.0, 1.0));
    }

    #[test]
    fn tanh_is_accurate() {
        let (worst, at) = max_ulp(12.0, tanh, f64::tanh);
        assert!(worst < 3.0, "{worst} at {at}");
        assert_eq!(tanh(f32::INFINITY), 1.0);
        assert_eq!(tanh(f32::NEG_INFINITY), -1.0);
        assert_eq!(tanh(-0.0).to_bits(), (-0.0f32).to_bits());
        assert!(tanh(f32::NAN).is_nan());
    }

    /// Φ(x) by its series around zero (Abramowitz and Stegun 26.2.10) and, in the tail, its
    /// continued fraction (26.2.14).
    fn normal_cdf_f64(x: f64) -> f64 {
        let density = (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
        if x.abs() < 3.0 {
            let (mut term, mut sum) = (x, x);
            for n in 1..200 {
                term *= x * x / f64::from(2 * n + 1);
                sum += term;
            }
            return 0.5 + density * sum;
        }
        let fraction = (1..200)
            .rev()
            .fold(x.abs(), |f, n| x.abs() + f64::from(n) / f);
        let tail = density / fraction;
        if x > 0.0 { 1.0 - tail } else { tail }
    }

    #[test]
    fn normal_cdf_is_accurate() {
        let (worst, at) = max_ulp(12.0, normal_cdf, normal_cdf_f64);
        assert!(worst < 6.0, "{worst} at {at}");
        assert_eq!(normal_cdf(f32::INFINITY), 1.0);
        assert_eq!(normal_cdf(f32::NEG_INFINITY), 0.0);
        assert_eq!(normal_cdf(-40.0), 0.0);
        assert!(normal_cdf(f32::NAN).is_nan());
    }
}
