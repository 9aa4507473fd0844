//! Storage types and their f32 arithmetic.
//!
//! Every operation loads a block of elements into f32, computes, and stores a block; blocks stay in the L1 cache, so memory is
//! passed over once whatever the storage type.

use std::ops::Range;

use half::{bf16, f16};

use crate::dtype::Element;

/// Elements per block: long enough to amortise a call, short enough for a few f32 blocks in L1.
pub(crate) const BLOCK: usize = 512;

/// The blocks of a row of `len` elements, in order.
pub(crate) fn blocks(len: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len)
        .step_by(BLOCK)
        .map(move |start| start..len.min(start + BLOCK))
}

/// A storage type with conversions of whole slices. Rounding is to nearest even; NaN stays NaN.
pub(crate) trait Float: Element {
    /// Widens `src` into `dst`; both have the same length.
    fn load(src: &[Self], dst: &mut [f32]);

    /// Rounds `src` into `dst`; both have the same length.
    fn store(src: &[f32], dst: &mut [Self]);

    /// Widens one element.
    fn widen(self) -> f32;

    /// The elements as they are, if they are f32.
    #[inline(always)]
    fn as_f32(_: &[Self]) -> Option<&[f32]> {
        None
    }
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
    fn as_f32(src: &[f32]) -> Option<&[f32]> {
        Some(src)
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

/// As an f32, without the instructions that not all processors have.
#[inline(always)]
pub(crate) fn widen(half: f16) -> f32 {
    const BIAS: u32 = (127 - 15) << 23;
    const LEAST: u32 = (127 - 14) << 23;
    let bits = u32::from(half.to_bits());
    let magnitude = (bits & 0x7fff) << 13;
    // A subnormal is the excess over the least normal number, which takes it in exactly.
    let subnormal = f32::from_bits(magnitude + LEAST) - f32::from_bits(LEAST);
    // Infinity and NaN keep the greatest exponent.
    let special = if magnitude >= 0x1f << 23 { BIAS } else { 0 };
    let normal = magnitude + BIAS + special;
    let widened = if magnitude < 1 << 23 {
        subnormal.to_bits()
    } else {
        normal
    };
    f32::from_bits(widened | (bits & 0x8000) << 16)
}

impl Float for f16 {
    // What the processor does not convert is done as for bf16 below; f16 has 5 bits of exponent and 10 of significand.
    #[inline(always)]
    fn load(src: &[f16], dst: &mut [f32]) {
        let done = f16c::load(src, dst);
        for (d, s) in dst[done..].iter_mut().zip(&src[done..]) {
            *d = widen(*s);
        }
    }

    #[inline(always)]
    fn store(src: &[f32], dst: &mut [f16]) {
        const BIAS: u32 = (127 - 15) << 23;
        // The least normal f16, the least number that rounds to infinity's exponent, and a number whose unit in the last place is
        // that of subnormal f16.
        const LEAST: u32 = (127 - 14) << 23;
        const OVERFLOW: u32 = (127 + 16) << 23;
        const SUBNORMAL: u32 = (127 - 1) << 23;
        let done = f16c::store(src, dst);
        let (src, dst) = (&src[done..], &mut dst[done..]);
        for (d, s) in dst.iter_mut().zip(src) {
            let bits = s.to_bits();
            let magnitude = bits & 0x7fff_ffff;
            let sum = f32::from_bits(magnitude) + f32::from_bits(SUBNORMAL);
            let subnormal = sum.to_bits().wrapping_sub(SUBNORMAL);
            let odd = (magnitude >> 13) & 1;
            let normal = magnitude.wrapping_sub(BIAS).wrapping_add(0xfff + odd) >> 13;
            let special = if magnitude > 0x7f80_0000 {
                0x7e00
            } else {
                0x7c00
            };
            let rounded = if magnitude < LEAST { subnormal } else { normal };
            let rounded = if magnitude >= OVERFLOW {
                special
            } else {
                rounded
            };
            *d = f16::from_bits((rounded | (bits >> 16) & 0x8000) as u16);
        }
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

/// Conversion of f16 by instructions where there are some: eight elements at a time, from the start of the slices; gives how many were
/// converted.
mod f16c {
    use half::f16;

    const LANES: usize = 8;

    #[inline(always)]
    pub fn load(src: &[f16], dst: &mut [f32]) -> usize {
        let len = src.len().min(dst.len()) / LANES * LANES;
        #[cfg(target_arch = "x86_64")]
        if len > 0 && is_x86_feature_detected!("avx") && is_x86_feature_detected!("f16c") {
            // SAFETY: the features are there; `len` is a multiple of LANES within both slices.
            unsafe { x86::load(src.as_ptr(), dst.as_mut_ptr(), len) };
            return len;
        }
        0
    }

    #[inline(always)]
    pub fn store(src: &[f32], dst: &mut [f16]) -> usize {
        let len = src.len().min(dst.len()) / LANES * LANES;
        #[cfg(target_arch = "x86_64")]
        if len > 0 && is_x86_feature_detected!("avx") && is_x86_feature_detected!("f16c") {
            // SAFETY: the features are there; `len` is a multiple of LANES within both slices.
            unsafe { x86::store(src.as_ptr(), dst.as_mut_ptr(), len) };
            return len;
        }
        0
    }

    #[cfg(target_arch = "x86_64")]
    mod x86 {
        use std::arch::x86_64::*;

        use half::f16;

        use super::LANES;

        /// # Safety
        /// `len` elements are readable and writable; it is a multiple of LANES.
        #[target_feature(enable = "avx,f16c")]
        pub unsafe fn load(src: *const f16, dst: *mut f32, len: usize) {
            for i in (0..len).step_by(LANES) {
                // SAFETY: LANES elements from `i` lie below `len`; no alignment is asked for.
                unsafe {
                    let halves = _mm_loadu_si128(src.add(i).cast());
                    _mm256_storeu_ps(dst.add(i), _mm256_cvtph_ps(halves));
                }
            }
        }

        /// # Safety
        /// `len` elements are readable and writable; it is a multiple of LANES.
        #[target_feature(enable = "avx,f16c")]
        pub unsafe fn store(src: *const f32, dst: *mut f16, len: usize) {
            for i in (0..len).step_by(LANES) {
                // SAFETY: LANES elements from `i` lie below `len`; no alignment is asked for.
                unsafe {
                    let wide = _mm256_loadu_ps(src.add(i));
                    let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(wide);
                    _mm_storeu_si128(dst.add(i).cast(), halves);
                }
            }
        }
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

/// Copies elements of one dtype to another; both slices have the same length.
#[inline(always)]
pub(crate) fn convert<T: Float, U: Float>(from: &[T], to: &mut [U]) {
    if T::DTYPE == U::DTYPE {
        // SAFETY: the same dtype is the same type, and the lengths are equal.
        unsafe {
            std::ptr::copy_nonoverlapping(from.as_ptr().cast::<U>(), to.as_mut_ptr(), to.len());
        }
        return;
    }
    let mut block = [0.0f32; BLOCK];
    for (from, to) in from.chunks(BLOCK).zip(to.chunks_mut(BLOCK)) {
        let block = &mut block[..from.len()];
        T::load(from, block);
        U::store(block, to);
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
            $crate::dtype::DType::F32 => {
                type $t = f32;
                $body
            }
            // Never another's bits as f32: the panic becomes a status.
            other => unreachable!("the problem was checked to be of floats, not {other}"),
        }
    };
}
pub(crate) use with_float;

/// [`with_float`], of what weights and caches may be, too: a dtype that has been checked to be a float or
/// [`F8E4M3`](crate::dtype::DType::F8E4M3).
macro_rules! with_float_or_e4m3 {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            $crate::dtype::DType::F8E4M3 => {
                type $t = $crate::dtype::E4m3;
                $body
            }
            other => $crate::cpu::float::with_float!(other, $t => $body),
        }
    };
}
pub(crate) use with_float_or_e4m3;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stores_agree_with_half() {
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
        // The neighbourhood of every f16 and of the ties between them.
        let around = (0..=u16::MAX).flat_map(|h| {
            let bits = f16::from_bits(h).to_f32().to_bits();
            [0, 1, u32::MAX, 1 << 12, (1 << 12) + 1, (1 << 12) - 1]
                .map(|step| f32::from_bits(bits.wrapping_add(step)))
        });
        for x in specials.into_iter().chain(patterns).chain(around) {
            let mut out = [bf16::ZERO];
            bf16::store(&[x], &mut out);
            let expected = bf16::from_f32(x);
            assert!(
                out[0].to_bits() == expected.to_bits() || (x.is_nan() && out[0].is_nan()),
                "{x}"
            );
            // Eight by instruction where there is one, the last by arithmetic.
            let mut out = [f16::ZERO; 9];
            f16::store(&[x; 9], &mut out);
            let expected = f16::from_f32(x);
            for y in out {
                assert!(
                    y.to_bits() == expected.to_bits() || (x.is_nan() && y.is_nan()),
                    "{x:e}: {:x}, not {:x}",
                    y.to_bits(),
                    expected.to_bits()
                );
            }
        }
    }

    #[test]
    fn loads_are_exact() {
        let halves: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        let mut wide = vec![0.0; halves.len()];
        f16::load(&halves, &mut wide);
        let mut one_by_one = wide.clone();
        for (h, w) in halves.iter().zip(&mut one_by_one) {
            f16::load(&[*h], std::slice::from_mut(w));
        }
        for wide in [&wide, &one_by_one] {
            for (h, w) in halves.iter().zip(wide) {
                assert!(h.to_f32().to_bits() == w.to_bits() || (h.is_nan() && w.is_nan()));
            }
        }
        let brains: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
        bf16::load(&brains, &mut wide);
        for (b, w) in brains.iter().zip(&wide) {
            assert!(b.to_f32().to_bits() == w.to_bits() || (b.is_nan() && w.is_nan()));
        }
    }
}
