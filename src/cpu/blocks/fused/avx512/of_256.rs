//! Formats of blocks of 256, whose scales have scales.

use std::arch::x86_64::*;

use super::Fused;
use crate::cpu::blocks::{Q4K, Q5K, Q6K};

/// Scales and offsets of one block or two: its f16 factors of both, then 12 bytes of 6 bits each,
/// as `scales_of_scales` of the formats has them.
///
/// # Safety
/// The blocks, of so many bytes, are there, and the processor has the instructions.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn of_six_bits<const BYTES: usize>(step: *const u8, blocks: usize) -> (__m512, __m512) {
    // SAFETY: the caller's promise.
    let heads = unsafe {
        let first = _mm256_zextsi128_si256(_mm_loadu_si128(step.cast()));
        match blocks {
            1 => first,
            _ => _mm256_inserti128_si256::<1>(first, _mm_loadu_si128(step.add(BYTES).cast())),
        }
    };
    // Words of four: scales 0 to 3 of each block, and 4 to 7; then offsets.
    let low = _mm256_permutevar8x32_epi32(heads, _mm256_setr_epi32(1, 3, 5, 7, 2, 3, 6, 7));
    let low = _mm256_srlv_epi32(low, _mm256_setr_epi32(0, 0, 0, 0, 0, 4, 0, 4));
    let low = _mm256_and_si256(low, _mm256_set1_epi64x(0x0f0f_0f0f_3f3f_3f3f));
    let high = _mm256_permutevar8x32_epi32(heads, _mm256_setr_epi32(1, 1, 5, 5, 2, 2, 6, 6));
    let high = _mm256_and_si256(
        _mm256_srli_epi32::<2>(high),
        _mm256_set1_epi64x(0x3030_3030_0000_0000),
    );
    let codes = _mm256_or_si256(low, high);
    // What is no f16 is left where it is.
    let factors = _mm512_cvtph_ps(heads);
    let of_scales = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 8, 8, 8, 8, 8, 8, 8, 8);
    let of_offsets = _mm512_setr_epi32(1, 1, 1, 1, 1, 1, 1, 1, 9, 9, 9, 9, 9, 9, 9, 9);
    let scales = wide(_mm256_castsi256_si128(codes));
    let offsets = wide(_mm256_extracti128_si256::<1>(codes));
    let negative = _mm512_sub_ps(_mm512_setzero_ps(), factors);
    (
        _mm512_mul_ps(scales, _mm512_permutexvar_ps(of_scales, factors)),
        _mm512_mul_ps(offsets, _mm512_permutexvar_ps(of_offsets, negative)),
    )
}

/// 16 codes as numbers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn wide(codes: __m128i) -> __m512 {
    _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes))
}

/// 32 bytes, twice.
///
/// # Safety
/// They are there, and the processor has the instructions.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn twice(bytes: *const u8) -> __m512i {
    // SAFETY: the caller's promise.
    _mm512_broadcast_i64x4(unsafe { _mm256_loadu_si256(bytes.cast()) })
}

/// The codes of two groups: low halves of 32 bytes, then high ones.
///
/// # Safety
/// As [`twice`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn halves(bytes: *const u8) -> __m512i {
    // SAFETY: the caller's promise.
    let twice = unsafe { twice(bytes) };
    let halves = _mm512_srlv_epi64(twice, _mm512_setr_epi64(0, 0, 0, 0, 4, 4, 4, 4));
    _mm512_and_si512(halves, _mm512_set1_epi8(15))
}

impl Fused for Q4K {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn factors(step: *const u8, blocks: usize) -> (__m512, __m512) {
        // SAFETY: the caller's promise.
        unsafe { of_six_bits::<144>(step, blocks) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn codes(step: *const u8, _: usize, z: usize) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { halves(step.add(z / 4 * 144 + 16 + z % 4 * 32)) }
    }
}

impl Fused for Q5K {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn factors(step: *const u8, blocks: usize) -> (__m512, __m512) {
        // SAFETY: the caller's promise.
        unsafe { of_six_bits::<176>(step, blocks) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn codes(step: *const u8, _: usize, z: usize) -> __m512i {
        // SAFETY: the caller's promise.
        let (codes, fifth) = unsafe {
            let block = step.add(z / 4 * 176);
            (halves(block.add(48 + z % 4 * 32)), twice(block.add(16)))
        };
        // Bit `g` is that of group `g`.
        let bit = 0x01 << (z % 4 * 2);
        let bits = _mm512_mask_blend_epi64(0xf0, _mm512_set1_epi8(bit), _mm512_set1_epi8(bit << 1));
        let fifth = _mm512_test_epi8_mask(fifth, bits);
        _mm512_mask_add_epi8(codes, fifth, codes, _mm512_set1_epi8(16))
    }
}

impl Fused for Q6K {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn factors(step: *const u8, _: usize) -> (__m512, __m512) {
        // SAFETY: the caller's promise.
        let (codes, factor) = unsafe {
            (
                _mm_loadu_si128(step.add(192).cast()),
                step.add(208).cast::<i16>().read_unaligned(),
            )
        };
        let factor = _mm512_cvtph_ps(_mm256_set1_epi16(factor));
        let scales = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)), factor);
        (scales, _mm512_mul_ps(scales, _mm512_set1_ps(-32.0)))
    }

    /// In each half of a block: low halves of 64 bytes, then high ones.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn codes(step: *const u8, _: usize, z: usize) -> __m512i {
        let half = z / 2;
        // SAFETY: the caller's promise.
        let (low, high) = unsafe {
            (
                _mm512_loadu_si512(step.add(half * 64).cast()),
                twice(step.add(128 + half * 32)),
            )
        };
        // Bits 0 and 1 are the fifth and sixth of codes 0 to 31, 2 and 3 of the next, and so on.
        let (low, high) = match z % 2 {
            0 => (
                low,
                _mm512_sllv_epi64(high, _mm512_setr_epi64(4, 4, 4, 4, 2, 2, 2, 2)),
            ),
            _ => (
                _mm512_srli_epi64::<4>(low),
                _mm512_srlv_epi64(high, _mm512_setr_epi64(0, 0, 0, 0, 2, 2, 2, 2)),
            ),
        };
        _mm512_or_si512(
            _mm512_and_si512(low, _mm512_set1_epi8(0x0f)),
            _mm512_and_si512(high, _mm512_set1_epi8(0x30)),
        )
    }
}
