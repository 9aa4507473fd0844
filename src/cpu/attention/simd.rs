//! Vector helpers over pulp's instruction sets.

use pulp::Simd;

/// # Safety
/// A vector's worth of floats is readable at `ptr`.
#[inline(always)]
pub(super) unsafe fn load<S: Simd>(ptr: *const f32) -> S::f32s {
    // SAFETY: the caller's promise; no alignment is asked for.
    unsafe { ptr.cast::<S::f32s>().read_unaligned() }
}

/// # Safety
/// A vector's worth of floats is writable at `ptr`.
#[inline(always)]
pub(super) unsafe fn store<S: Simd>(ptr: *mut f32, value: S::f32s) {
    // SAFETY: the caller's promise; no alignment is asked for.
    unsafe { ptr.cast::<S::f32s>().write_unaligned(value) };
}

/// `exp(x)` for `x <= 0` to 1.1 ulp, zero below -87.3 (where results are subnormal), NaN for NaN: what a softmax needs, in fewer
/// instructions than [`math::exp`](crate::cpu::math::exp).
#[inline(always)]
pub(super) fn exp_nonpositive<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    // Adding 1.5·2²³ leaves the nearest integer in the low bits of the significand; 127 more, the exponent's bias.
    const ROUND: f32 = 12_582_912.0 + 127.0;
    const LN2_HIGH: f32 = 0.693_145_75;
    const LN2_LOW: f32 = 1.428_606_8e-6;
    const LEAST: f32 = -87.3;
    // Below that, −∞ of a hidden score included, what follows would be −∞ less −∞.
    let too_small = simd.less_than_f32s(x, simd.splat_f32s(LEAST));
    let x = simd.select_f32s(too_small, simd.splat_f32s(LEAST), x);
    let shifted = simd.mul_add_f32s(
        x,
        simd.splat_f32s(std::f32::consts::LOG2_E),
        simd.splat_f32s(ROUND),
    );
    let n = simd.sub_f32s(shifted, simd.splat_f32s(ROUND));
    let r = simd.mul_add_f32s(n, simd.splat_f32s(-LN2_HIGH), x);
    let r = simd.mul_add_f32s(n, simd.splat_f32s(-LN2_LOW), r);
    let p = simd.mul_add_f32s(
        simd.splat_f32s(0.001_381_314_5),
        r,
        simd.splat_f32s(0.008_369_419),
    );
    let p = simd.mul_add_f32s(p, r, simd.splat_f32s(0.041_668_456));
    let p = simd.mul_add_f32s(p, r, simd.splat_f32s(0.166_665_15));
    let p = simd.mul_add_f32s(p, r, simd.splat_f32s(0.499_999_93));
    let p = simd.mul_add_f32s(simd.mul_f32s(p, r), r, r);
    let p = simd.add_f32s(p, simd.splat_f32s(1.0));
    let exponent =
        simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(shifted), simd.splat_u32s(23));
    let y = simd.mul_f32s(p, simd.transmute_f32s_u32s(exponent));
    simd.select_f32s(too_small, simd.splat_f32s(0.0), y)
}

/// The maximum, or zero in place of −∞, so that `score - max` of a row that has seen no key is −∞ and not NaN.
#[inline(always)]
pub(super) fn finite_max<S: Simd>(simd: S, max: S::f32s) -> S::f32s {
    let none = simd.equal_f32s(max, simd.splat_f32s(f32::NEG_INFINITY));
    simd.select_f32s(none, simd.splat_f32s(0.0), max)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Exp<'a>(&'a [f32], &'a mut [f32]);

    impl pulp::WithSimd for Exp<'_> {
        type Output = ();

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) {
            for (x, y) in self.0.iter().zip(self.1) {
                let mut lanes = [0.0f32; 64];
                // SAFETY: no vector is longer than 64 floats.
                unsafe {
                    store::<S>(
                        lanes.as_mut_ptr(),
                        exp_nonpositive(simd, simd.splat_f32s(*x)),
                    )
                };
                *y = lanes[S::F32_LANES - 1];
            }
        }
    }

    #[test]
    fn exp_is_accurate() {
        let n = 200_000;
        let x: Vec<f32> = (0..=n).map(|i| -87.3 * i as f32 / n as f32).collect();
        let mut y = vec![0.0; x.len()];
        pulp::Arch::new().dispatch(Exp(&x, &mut y));
        for (x, y) in x.iter().zip(y) {
            let truth = f64::from(*x).exp();
            assert!((f64::from(y) - truth).abs() <= 1.4e-7 * truth, "{x}: {y}");
        }
        let x = [
            0.0,
            f32::NEG_INFINITY,
            -1e30,
            f32::NAN,
            f32::from_bits(0x7fc0_dead),
        ];
        let mut y = [7.0; 5];
        pulp::Arch::new().dispatch(Exp(&x, &mut y));
        assert_eq!(y[..3], [1.0, 0.0, 0.0]);
        assert!(y[3].is_nan() && y[4].is_nan());
    }
}
