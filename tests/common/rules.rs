//! By which rules a result is right.

use unsloth::{Backend, Context, DType};

use super::tensor::round_to;

/// Half a unit in the last place relative to the value, times two: the spacing of the dtype.
pub fn epsilon(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => f64::powi(2.0, -10),
        DType::Bf16 => f64::powi(2.0, -7),
        _ => f64::powi(2.0, -23),
    }
}

/// The smallest normal number of the dtype: below it, rounding is absolute.
fn tiny(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => f64::powi(2.0, -14),
        _ => f64::powi(2.0, -126),
    }
}

/// Each element is the reference rounded to `dtype`, give or take `f32_ulps` units of f32
/// arithmetic before the rounding. For operations whose every output is a short chain of f32
/// operations.
pub fn assert_close(what: &str, dtype: DType, actual: &[f64], reference: &[f64], f32_ulps: f64) {
    let terms: Vec<f64> = reference.iter().map(|r| r.abs()).collect();
    assert_close_of_sums(what, dtype, actual, reference, &terms, f32_ulps);
}

/// [`assert_close`] for sums, whose terms' magnitudes add up to `terms`: where they cancel, the
/// units of f32 are those of the terms.
pub fn assert_close_of_sums(
    what: &str,
    dtype: DType,
    actual: &[f64],
    reference: &[f64],
    terms: &[f64],
    f32_ulps: f64,
) {
    assert_eq!(actual.len(), reference.len(), "{what}: length");
    for (i, ((&a, &r), terms)) in actual.iter().zip(reference).zip(terms).enumerate() {
        let rounding = match dtype {
            DType::F32 => 0.0,
            _ => 0.5 * epsilon(dtype) * r.abs().max(tiny(dtype)),
        };
        // A value that f32 arithmetic moves across a rounding boundary lands one step away, hence
        // the second term.
        let arithmetic = f32_ulps * epsilon(DType::F32) * terms;
        let bound = rounding + arithmetic + tiny(DType::F32);
        let same = a == r || (a - r).abs() <= bound * (1.0 + 1e-9);
        let rounds_alike = a == round_to(dtype, r);
        assert!(
            same || rounds_alike,
            "{what}: element {i} is {a}, the reference {r} ± {bound:e}"
        );
    }
}

/// The rule that FlashAttention is tested by: the greatest error is at most twice that of a plain
/// implementation in the same dtype, plus what rounding the result costs. NaN never passes;
/// infinities must agree.
pub fn assert_flash_rule(
    what: &str,
    dtype: DType,
    actual: &[f64],
    reference: &[f64],
    plain: &[f64],
) {
    assert_flash_rule_of_sums(what, dtype, actual, reference, plain, 0.0);
}

/// [`assert_flash_rule`] for sums whose terms have magnitudes that add up to `terms` at the most. A
/// plain result of few elements may happen to be exact; still no f32 sum is asked for more than two
/// units in the last place of `terms`.
pub fn assert_flash_rule_of_sums(
    what: &str,
    dtype: DType,
    actual: &[f64],
    reference: &[f64],
    plain: &[f64],
    terms: f64,
) {
    assert_rule(what, dtype, 2.0, [actual, reference, plain], terms);
}

/// [`assert_flash_rule_of_sums`] for gradients, whose error may be three times that of a plain
/// implementation.
pub fn assert_gradient_rule(
    what: &str,
    dtype: DType,
    actual: &[f64],
    reference: &[f64],
    plain: &[f64],
    terms: f64,
) {
    assert_rule(what, dtype, 3.0, [actual, reference, plain], terms);
}

/// What tensor cores may lose of sums of `depth` products of 16 bits, as `terms` of
/// [`assert_gradient_rule`]. They cut partial sums off where f32 arithmetic rounds (Fasi et al. 2021,
/// "Numerical behavior of NVIDIA tensor cores"), and so lose in the mean a quarter of a unit in the
/// last place of the result for each 16 products. None of it shows in results of 16 bits.
pub fn cut_off(ctx: &Context, dtype: DType, depth: usize, reference: &[f64]) -> f64 {
    if ctx.backend() == Backend::Cpu || dtype == DType::F32 {
        return 0.0;
    }
    let magnitude = reference.iter().fold(0.0, |m: f64, r| m.max(r.abs()));
    depth.div_ceil(16) as f64 * magnitude / 4.0
}

fn assert_rule(
    what: &str,
    dtype: DType,
    times: f64,
    [actual, reference, plain]: [&[f64]; 3],
    terms: f64,
) {
    assert_eq!(actual.len(), reference.len(), "{what}: length");
    assert_eq!(
        plain.len(),
        reference.len(),
        "{what}: length of the plain result"
    );
    let worst = |values: &[f64]| {
        values
            .iter()
            .zip(reference)
            .map(|(&v, &r)| if v == r { 0.0 } else { (v - r).abs() })
            .fold(0.0, f64::max)
    };
    let magnitude = reference
        .iter()
        .filter(|r| r.is_finite())
        .fold(0.0, |m: f64, r| m.max(r.abs()));
    let error = worst(plain).max(terms * epsilon(DType::F32));
    let bound = times * error + 0.5 * epsilon(dtype) * magnitude + tiny(DType::F32);
    for (i, (&a, &r)) in actual.iter().zip(reference).enumerate() {
        let right = a == r || (a - r).abs() <= bound;
        assert!(
            right,
            "{what}: element {i} is {a}, the reference {r} ± {bound:e}"
        );
    }
}
