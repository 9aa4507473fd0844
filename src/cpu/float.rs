//! Storage types and their f32 arithmetic.
//!
//! Every operation loads a block of elements into f32, computes, and stores a block; blocks stay in the L1 cache, so memory is
//! passed over once whatever the storage type.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::dtype::Element;

/// Elements per block: long enough to amortise a call, short enough for a few f32 blocks in L1.
pub(crate) const BLOCK: usize = 512;

/// A storage type with conversions of whole slices. Rounding is to nearest even; NaN stays NaN.
pub(crate) trait Float: Element {
    /// Widens `src` into `dst`; both have the same length.
    fn load(src: &[Self], dst: &mut [f32]);

    /// Rounds `src` into `dst`; both have the same length.
    fn store(src: &[f32], dst: &mut [Self]);

    /// Widens one element.
    fn widen(self) -> f32;
}

impl Float for f32 {
    #[inline(always)]
    fn load(src: &[f32], dst: &mut [f32]) {
        dst.copy_from_slice(src);
    }

    #[inline(always)]
    fn store(src: &[f32], dst: &mut [f32]) {
        dst.copy_from_slice(src);
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

impl Float for f16 {
    #[inline(always)]
    fn load(src: &[f16], dst: &mut [f32]) {
        src.convert_to_f32_slice(dst);
    }

    #[inline(always)]
    fn store(src: &[f32], dst: &mut [f16]) {
        dst.convert_from_f32_slice(src);
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

impl Float for bf16 {
    // Written as plain integer arithmetic so that the loops vectorise under whatever instruction set the caller dispatched to.
    #[inline(always)]
    fn load(src: &[bf16], dst: &mut [f32]) {
        for (d, s) in dst.iter_mut().zip(src) {
            *d = f32::from_bits(u32::from(s.to_bits()) << 16);
        }
    }

    #[inline(always)]
    fn store(src: &[f32], dst: &mut [bf16]) {
        for (d, s) in dst.iter_mut().zip(src) {
            let bits = s.to_bits();
            let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1))) >> 16;
            let quiet = (bits >> 16) | 0x40;
            let nan = bits & 0x7fff_ffff > 0x7f80_0000;
            *d = bf16::from_bits(if nan { quiet } else { rounded } as u16);
        }
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

/// Runs `$body` with `$t` bound to the Rust type of a float [`DType`](crate::dtype::DType) that has been checked to be one.
macro_rules! with_float {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            $crate::dtype::DType::F16 => {
                type $t = half::f16;
                $body
            }
            $crate::dtype::DType::Bf16 => {
                type $t = half::bf16;
                $body
            }
            _ => {
                debug_assert_eq!($dtype, $crate::dtype::DType::F32);
                type $t = f32;
                $body
            }
        }
    };
}
pub(crate) use with_float;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_store_agrees_with_half() {
        let specials = [
            0.0,
            -0.0,
            1.0,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::MAX,
            1e-40,
            f32::NAN,
        ];
        let patterns = (0..1u32 << 16).map(|i| f32::from_bits(i.wrapping_mul(65_537 * 17)));
        for x in specials.into_iter().chain(patterns) {
            let mut out = [bf16::ZERO];
            bf16::store(&[x], &mut out);
            let expected = bf16::from_f32(x);
            assert!(
                out[0].to_bits() == expected.to_bits() || (x.is_nan() && out[0].is_nan()),
                "{x}"
            );
        }
    }

    #[test]
    fn loads_are_exact() {
        let halves: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        let mut wide = vec![0.0; halves.len()];
        f16::load(&halves, &mut wide);
        for (h, w) in halves.iter().zip(&wide) {
            assert!(h.to_f32().to_bits() == w.to_bits() || (h.is_nan() && w.is_nan()));
        }
        let brains: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
        bf16::load(&brains, &mut wide);
        for (b, w) in brains.iter().zip(&wide) {
            assert!(b.to_f32().to_bits() == w.to_bits() || (b.is_nan() && w.is_nan()));
        }
    }
}
