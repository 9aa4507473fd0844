//! Formats of blocks of 256, whose scales have scales.

use std::arch::x86_64::*;

use super::{
    Factors, Fused, FusedBytes, MOST, both, f16_everywhere, halves, sixteen_where, twice, words,
};
use crate::cpu::blocks::{Q4K, Q5K, Q6K};

/// Scales and offsets of a block: its f16 factors of both, then 12 bytes of 6 bits each, as
/// `scales_of_scales` of the formats has them.
///
/// # Safety
/// The block is there, and the processor has the instructions.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn of_six_bits(block: *const u8) -> Factors {
    // SAFETY: the caller's promise.
    let (head, scale, offset) = unsafe {
        let head = _mm_loadu_si128(block.cast());
        (head, f16_everywhere(block), f16_everywhere(block.add(2)))
    };
    // Words of four: scales 0 to 3, scales 4 to 7, offsets 0 to 3, offsets 4 to 7.
    let low = _mm_shuffle_epi32::<0b11_10_11_01>(head);
    let low = _mm_srlv_epi32(low, _mm_setr_epi32(0, 0, 0, 4));
    let low = _mm_and_si128(
        low,
        _mm_setr_epi32(0x3f3f_3f3f, 0x0f0f_0f0f, 0x3f3f_3f3f, 0x0f0f_0f0f),
    );
    let high = _mm_srli_epi32::<2>(_mm_shuffle_epi32::<0b10_10_01_01>(head));
    let high = _mm_and_si128(high, _mm_setr_epi32(0, 0x3030_3030, 0, 0x3030_3030));
    let codes = _mm_or_si128(low, high);
    // Of pieces of an even number, and of an odd one.
    let order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    let codes = _mm_shuffle_epi8(codes, order);
    let scales = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(codes));
    let offsets = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128::<8>(codes)));
    let negative = _mm256_sub_ps(_mm256_setzero_ps(), offset);
    (
        [_mm256_mul_ps(scales, scale); MOST],
        [_mm256_mul_ps(offsets, negative); MOST],
    )
}

/// Four bits of each code of a pair, which has 32 bytes: the low halves are those of its first piece.
///
/// # Safety
/// They are there, and the processor has the instructions.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn four_bits(bytes: *const u8, pair: usize) -> [__m256i; 2] {
    // SAFETY: the caller's promise.
    let mut codes = unsafe { twice(bytes.add(pair * 32)) };
    for codes in &mut codes {
        let halves = _mm256_srlv_epi32(*codes, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
        *codes = _mm256_and_si256(halves, _mm256_set1_epi8(15));
    }
    codes
}

impl Fused for Q4K {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn factors(step: *const u8, _: usize) -> Factors {
        // SAFETY: the caller's promise.
        unsafe { of_six_bits(step) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn words(step: *const u8, first: usize, second: usize) -> [__m256i; 4] {
        // SAFETY: the caller's promise.
        words(unsafe { Self::bytes(step, first, second) })
    }
}

impl FusedBytes for Q4K {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn bytes(step: *const u8, first: usize, _: usize) -> [__m256i; 2] {
        // SAFETY: the caller's promise.
        unsafe { four_bits(step.add(16), first / 2) }
    }
}

impl Fused for Q5K {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn factors(step: *const u8, _: usize) -> Factors {
        // SAFETY: the caller's promise.
        unsafe { of_six_bits(step) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn words(step: *const u8, first: usize, second: usize) -> [__m256i; 4] {
        // SAFETY: the caller's promise.
        words(unsafe { Self::bytes(step, first, second) })
    }
}

impl FusedBytes for Q5K {
    /// Bit `g` of the bytes behind the scales is that of group `g`.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn bytes(step: *const u8, first: usize, _: usize) -> [__m256i; 2] {
        // SAFETY: the caller's promise.
        let ([low, high], fifth) =
            unsafe { (four_bits(step.add(48), first / 2), twice(step.add(16))) };
        let bit = 1_u8 << first;
        let bits = _mm256_setr_m128i(
            _mm_set1_epi8(bit.cast_signed()),
            _mm_set1_epi8((bit << 1).cast_signed()),
        );
        [
            _mm256_or_si256(low, sixteen_where(fifth[0], bits)),
            _mm256_or_si256(high, sixteen_where(fifth[1], bits)),
        ]
    }
}

impl Fused for Q6K {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn factors(step: *const u8, _: usize) -> Factors {
        // SAFETY: the caller's promise.
        let (codes, factor) = unsafe {
            (
                _mm_loadu_si128(step.add(192).cast()),
                f16_everywhere(step.add(208)),
            )
        };
        let (mut scales, mut offsets) = ([factor; MOST], [factor; MOST]);
        // Of pieces of an even number, and of an odd one.
        let order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
        let codes = _mm_shuffle_epi8(codes, order);
        let codes = [codes, _mm_srli_si128::<8>(codes)];
        for (v, codes) in codes.into_iter().enumerate() {
            let codes = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
            scales[v] = _mm256_mul_ps(codes, factor);
            offsets[v] = _mm256_mul_ps(scales[v], _mm256_set1_ps(-32.0));
        }
        (scales, offsets)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn words(step: *const u8, first: usize, second: usize) -> [__m256i; 4] {
        // SAFETY: the caller's promise.
        words(unsafe { Self::bytes(step, first, second) })
    }
}

impl FusedBytes for Q6K {
    /// In each half of a block: pieces 0 and 1 are the low halves of 64 bytes, 2 and 3 the high ones;
    /// bits 0 and 1 of 32 bytes are the fifth and sixth of piece 0, 2 and 3 those of piece 1, and so on.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn bytes(step: *const u8, first: usize, _: usize) -> [__m256i; 2] {
        let (half, is_high) = (first / 4, first % 4 == 2);
        // SAFETY: the caller's promise.
        let (mut codes, above) = unsafe {
            let low = step.add(half * 64);
            let codes = [both(low, low.add(32)), both(low.add(16), low.add(48))];
            (codes, twice(step.add(128 + half * 32)))
        };
        for (codes, above) in codes.iter_mut().zip(above) {
            let above = match is_high {
                false => _mm256_sllv_epi32(above, _mm256_setr_epi32(4, 4, 4, 4, 2, 2, 2, 2)),
                true => _mm256_srlv_epi32(above, _mm256_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2)),
            };
            let above = _mm256_and_si256(above, _mm256_set1_epi8(0x30));
            *codes = _mm256_or_si256(halves(*codes, is_high), above);
        }
        codes
    }
}
