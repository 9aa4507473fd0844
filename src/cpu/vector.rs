//! Vectors of f32 from elements of any type: what [`pulp::Simd`] has no function for, by the
//! instructions behind it.

use std::any::TypeId;

use pulp::Simd;

use crate::cpu::float::Float;
use crate::dtype::DType;

/// Whether [`load`] takes no more than instructions on registers. Where it takes more, widening a
/// block into scratch is faster.
#[inline(always)]
pub(crate) fn in_registers<S: Simd, T: Float>() -> bool {
    #[cfg(target_arch = "x86_64")]
    if is::<S, pulp::x86::V4>() || (is::<S, pulp::x86::V3>() && T::DTYPE == DType::Bf16) {
        return true;
    }
    T::DTYPE == DType::F32
}

/// A vector's worth of elements, widened.
///
/// # Safety
/// That many elements are readable at `from`; no alignment is asked for.
#[inline(always)]
pub(crate) unsafe fn load<S: Simd, T: Float>(simd: S, from: *const T) -> S::f32s {
    #[cfg(target_arch = "x86_64")]
    if T::DTYPE == DType::F8E4M3 && is::<S, pulp::x86::V4>() {
        // SAFETY: as many bytes as the set's vectors have elements; the caller's promise.
        unsafe {
            let codes = from.cast::<std::arch::x86_64::__m128i>().read_unaligned();
            return std::mem::transmute_copy(&e4m3::widen(codes));
        }
    }
    if T::DTYPE == DType::F32 {
        // SAFETY: f32 is what is there, and the caller's promise.
        return unsafe { from.cast::<S::f32s>().read_unaligned() };
    }
    // SAFETY: the elements, of two bytes each, are as many as the vectors have; the sets are told
    // apart by their types, whose vectors these are.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        use std::mem::transmute_copy;

        use pulp::x86::{V3, V4};
        if is::<S, V4>() {
            let avx512 = transmute_copy::<S, V4>(&simd).avx512f;
            let bits = from.cast::<std::arch::x86_64::__m256i>().read_unaligned();
            return match T::DTYPE {
                DType::F16 => transmute_copy(&avx512._mm512_cvtph_ps(bits)),
                _ => {
                    let bits = avx512._mm512_cvtepu16_epi32(bits);
                    transmute_copy(&avx512._mm512_slli_epi32::<16>(bits))
                }
            };
        }
        if is::<S, V3>() && T::DTYPE == DType::Bf16 {
            let avx2 = transmute_copy::<S, V3>(&simd).avx2;
            let bits = from.cast::<std::arch::x86_64::__m128i>().read_unaligned();
            let bits = avx2._mm256_cvtepu16_epi32(bits);
            return transmute_copy(&avx2._mm256_slli_epi32::<16>(bits));
        }
    }
    let mut wide = simd.splat_f32s(0.0);
    // SAFETY: the caller's promise, and a vector is as many f32.
    unsafe {
        T::load(
            std::slice::from_raw_parts(from, S::F32_LANES),
            std::slice::from_raw_parts_mut((&raw mut wide).cast(), S::F32_LANES),
        );
    }
    wide
}

/// The sum of each of four vectors.
#[inline(always)]
pub(crate) fn sums_of_four<S: Simd>(simd: S, vectors: [S::f32s; 4]) -> [f32; 4] {
    // SAFETY: the sets are told apart by their types, whose vectors these are, and their instructions are there.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        use std::mem::transmute_copy;

        if is::<S, pulp::x86::V4>() {
            return transmute_copy(&of_512::sums_of_four(transmute_copy(&vectors)));
        }
        if is::<S, pulp::x86::V3>() {
            return transmute_copy(&of_256::sums_of_four(transmute_copy(&vectors)));
        }
    }
    vectors.map(
        #[inline(always)]
        |vector| simd.reduce_sum_f32s(vector),
    )
}

/// Vectors of AVX-512.
#[cfg(target_arch = "x86_64")]
pub(crate) mod of_512 {
    use std::arch::x86_64::*;

    /// The sums of two vectors' halves of each 128 bits, side by side.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn halved(a: __m512, b: __m512) -> __m512d {
        let halves = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        _mm512_castps_pd(halves)
    }

    /// The sum of each vector, all in the same order.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub fn sums_of_four([a, b, c, d]: [__m512; 4]) -> __m128 {
        let (ab, cd) = (halved(a, b), halved(c, d));
        let four = _mm512_add_ps(
            _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)),
            _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)),
        );
        let two = _mm512_add_ps(four, _mm512_shuffle_f32x4::<0b01_00_11_10>(four, four));
        let one = _mm512_add_ps(two, _mm512_shuffle_f32x4::<0b10_11_00_01>(two, two));
        _mm512_castps512_ps128(one)
    }
}

/// Vectors of AVX2.
#[cfg(target_arch = "x86_64")]
pub(crate) mod of_256 {
    use std::arch::x86_64::*;

    /// The sum of each vector, all in the same order.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub fn sums_of_four([a, b, c, d]: [__m256; 4]) -> __m128 {
        let four = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
        _mm_add_ps(
            _mm256_castps256_ps128(four),
            _mm256_extractf128_ps::<1>(four),
        )
    }
}

/// 8-bit floats by instructions.
#[cfg(target_arch = "x86_64")]
mod e4m3 {
    use std::arch::x86_64::*;

    /// 16 codes, by way of f16: its instruction takes subnormal numbers in without a delay.
    ///
    /// # Safety
    /// The processor has the instructions.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,f16c")]
    pub unsafe fn widen(codes: __m128i) -> __m512 {
        let codes = _mm256_cvtepu8_epi16(codes);
        // f16 has one bit of exponent more, which an arithmetic shift fills with the sign and the mask
        // clears, and a bias that is 8 greater.
        let halves = _mm256_srai_epi16::<1>(_mm256_slli_epi16::<8>(codes));
        let halves = _mm256_and_si256(halves, _mm256_set1_epi16(0xbfff_u16.cast_signed()));
        let magnitudes = _mm256_and_si256(codes, _mm256_set1_epi16(0x7f));
        let nan = _mm256_cmpeq_epi16_mask(magnitudes, _mm256_set1_epi16(0x7f));
        let halves = _mm256_mask_blend_epi16(nan, halves, _mm256_set1_epi16(0x7e00));
        _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(256.0))
    }
}

/// Whether two instruction sets are the same one.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn is<S: Simd, T: Simd>() -> bool {
    TypeId::of::<S>() == TypeId::of::<T>()
}

/// How far ahead of their use weights are asked for, in bytes.
const AHEAD: usize = 4096;

/// Asks for what lies [`AHEAD`] of something, which may be behind all that there is. Reading is what products
/// of few rows wait for, and the processor by itself does not look far enough.
#[inline(always)]
pub(crate) fn fetch<T>(from: *const T) {
    prefetch(from.cast::<u8>().wrapping_add(AHEAD));
}

/// Asks for what lies there, if there is anything.
#[inline(always)]
pub(crate) fn prefetch(from: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch reads nothing, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast::<i8>()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = from;
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use pulp::{Arch, WithSimd};

    use super::*;
    use crate::dtype::E4m3;

    /// Every element of `bits`, a vector at a time.
    struct All<'a, T>(&'a [T]);

    impl<T: Float> WithSimd for All<'_, T> {
        type Output = Vec<f32>;

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> Vec<f32> {
            let mut wide = vec![0.0f32; self.0.len()];
            for i in (0..wide.len()).step_by(S::F32_LANES) {
                // SAFETY: lengths are multiples of every vector's.
                unsafe {
                    let vector = load(simd, self.0.as_ptr().add(i));
                    wide.as_mut_ptr()
                        .add(i)
                        .cast::<S::f32s>()
                        .write_unaligned(vector);
                }
            }
            wide
        }
    }

    fn check<T: Float>(from_bits: impl Fn(u16) -> T) {
        let elements: Vec<T> = (0..=u16::MAX).map(from_bits).collect();
        let mut expected = vec![0.0; elements.len()];
        T::load(&elements, &mut expected);
        let mut results = vec![Arch::new().dispatch(All(&elements))];
        results.push(All(&elements).with_simd(pulp::Scalar));
        #[cfg(target_arch = "x86_64")]
        if let Some(v3) = pulp::x86::V3::try_new() {
            results.push(Simd::vectorize(v3, All(&elements)));
        }
        for result in results {
            for (x, y) in result.iter().zip(&expected) {
                assert!(x.to_bits() == y.to_bits() || (x.is_nan() && y.is_nan()));
            }
        }
    }

    #[test]
    fn vectors_hold_what_slices_give() {
        check(f16::from_bits);
        check(bf16::from_bits);
        check(|bits| f32::from(bits) / 3.0);
        check(|bits| E4m3::from_bits(bits as u8));
    }
}
