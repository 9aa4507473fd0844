//! Conversion of [`E4m3`].

use super::float::Float;
use crate::dtype::E4m3;

/// Of f32's exponent less that of a normal code, in place.
const BIAS: u32 = (127 - 7) << 23;
/// The least normal number, 2^-6.
const LEAST: u32 = (127 - 6) << 23;
/// Bits of f32's significand that a code lacks.
const DROPPED: u32 = 23 - 3;
/// NaN, whatever the sign; the code below it is the greatest number, 448.
const NAN: u32 = 0x7f;

// Plain integer arithmetic, as for f16 and bf16, so that the loops vectorise.
impl Float for E4m3 {
    #[inline(always)]
    fn load(src: &[E4m3], dst: &mut [f32]) {
        for (d, s) in dst.iter_mut().zip(src) {
            *d = s.widen();
        }
    }

    #[inline(always)]
    fn store(src: &[f32], dst: &mut [E4m3]) {
        // A number whose unit in the last place is that of subnormal codes, 2^-9.
        const SUBNORMAL: u32 = (127 + 14) << 23;
        for (d, s) in dst.iter_mut().zip(src) {
            let bits = s.to_bits();
            let magnitude = bits & 0x7fff_ffff;
            let sum = f32::from_bits(magnitude) + f32::from_bits(SUBNORMAL);
            let subnormal = sum.to_bits().wrapping_sub(SUBNORMAL);
            let odd = (magnitude >> DROPPED) & 1;
            let half = (1 << (DROPPED - 1)) - 1;
            let normal = magnitude.wrapping_sub(BIAS).wrapping_add(half + odd) >> DROPPED;
            let rounded = if magnitude < LEAST { subnormal } else { normal };
            let finite = rounded.min(NAN - 1);
            let code = if magnitude > 0x7f80_0000 { NAN } else { finite };
            *d = E4m3::from_bits((code | (bits >> 24) & 0x80) as u8);
        }
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        let bits = u32::from(self.to_bits());
        let code = bits & NAN;
        let magnitude = code << DROPPED;
        // A subnormal is the excess over the least normal number, which takes it in exactly.
        let subnormal = f32::from_bits(magnitude + LEAST) - f32::from_bits(LEAST);
        let special = if code == NAN {
            0x7fc0_0000
        } else {
            magnitude + BIAS
        };
        let widened = if code < 8 {
            subnormal.to_bits()
        } else {
            special
        };
        f32::from_bits(widened | (bits & 0x80) << 24)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of a code by the format's definition (Micikevicius et al. 2022, table 1).
    fn value(code: u8) -> f32 {
        let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
        let (exponent, fraction) = (i32::from(code >> 3 & 15), f32::from(code & 7));
        match (exponent, code & 7) {
            (15, 7) => f32::NAN,
            (0, _) => sign * fraction * 2f32.powi(-9),
            _ => sign * (1.0 + fraction / 8.0) * 2f32.powi(exponent - 7),
        }
    }

    #[test]
    fn codes_have_the_values_of_their_definition() {
        for code in 0..=u8::MAX {
            let (wide, expected) = (E4m3::from_bits(code).widen(), value(code));
            assert!(
                wide.to_bits() == expected.to_bits() || (wide.is_nan() && expected.is_nan()),
                "{code:#x}: {wide}, not {expected}"
            );
        }
    }

    #[test]
    fn numbers_become_the_nearest_code() {
        // Each code, what lies halfway to the next, and the neighbours of both.
        let around = (0..=0x7eu8).flat_map(|code| {
            let (here, next) = (
                value(code),
                if code < 0x7e { value(code + 1) } else { 480.0 },
            );
            [here, (here + next) / 2.0].map(f32::to_bits)
        });
        let around = around.flat_map(|bits| [bits.wrapping_sub(1), bits, bits + 1]);
        let patterns = (0..1u32 << 16).map(|i| i.wrapping_mul(65_537 * 17));
        for x in around.chain(patterns).map(f32::from_bits) {
            let mut code = [E4m3::from_bits(0)];
            E4m3::store(&[x], &mut code);
            let code = code[0].to_bits();
            if x.is_nan() {
                assert_eq!(code & 0x7f, 0x7f, "{x}");
                continue;
            }
            // Beyond the greatest code all saturates.
            let x_abs = f64::from(x.abs()).min(448.0);
            let distance = |c: u8| (f64::from(value(c)) - x_abs).abs();
            let nearest = (0..=0x7eu8)
                .min_by(|&a, &b| {
                    let even = (a & 1).cmp(&(b & 1));
                    distance(a).total_cmp(&distance(b)).then(even)
                })
                .expect("there are codes");
            let sign = if x.is_sign_negative() { 0x80 } else { 0 };
            assert_eq!(code, nearest | sign, "{x:e}");
        }
    }
}
