//! Formats of 32 codes of 4 or 5 bits, which begin with their f16 scales.

use std::arch::x86_64::*;

use super::{Factors, Fused, FusedBytes, MOST, both, f16s, halves, sixteen_where, words};
use crate::cpu::blocks::{Q4_0, Q4_1, Q5_0, Q5_1};

/// Scales, and offsets that are as many times these as `zero` says.
///
/// # Safety
/// As [`Fused::factors`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn around<const BYTES: usize>(step: *const u8, blocks: usize, zero: f32) -> Factors {
    // SAFETY: the caller's promise.
    let scales = unsafe { f16s::<BYTES, 0>(step, blocks) };
    let offsets = _mm256_mul_ps(scales, _mm256_set1_ps(-zero));
    ([scales; MOST], [offsets; MOST])
}

/// Scales, and offsets that stand behind them.
///
/// # Safety
/// As [`Fused::factors`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn beside<const BYTES: usize>(step: *const u8, blocks: usize) -> Factors {
    // SAFETY: the caller's promise.
    let (scales, offsets) = unsafe {
        (
            f16s::<BYTES, 0>(step, blocks),
            f16s::<BYTES, 2>(step, blocks),
        )
    };
    ([scales; MOST], [offsets; MOST])
}

/// The last 16 bytes of two blocks: the low halves are codes 0 to 15, and the high ones 16 to 31.
///
/// # Safety
/// The blocks are there, and the processor has the instructions.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn last<const BYTES: usize>(step: *const u8, first: usize, second: usize) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        both(
            step.add((first + 1) * BYTES - 16),
            step.add((second + 1) * BYTES - 16),
        )
    }
}

/// Their codes.
///
/// # Safety
/// As [`last`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn nibbles<const BYTES: usize>(
    step: *const u8,
    first: usize,
    second: usize,
) -> [__m256i; 2] {
    // SAFETY: the caller's promise.
    let bytes = unsafe { last::<BYTES>(step, first, second) };
    [halves(bytes, false), halves(bytes, true)]
}

/// Their codes, in words.
///
/// # Safety
/// As [`last`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn nibbles_in_words<const BYTES: usize>(
    step: *const u8,
    first: usize,
    second: usize,
) -> [__m256i; 4] {
    // SAFETY: the caller's promise.
    let bytes = unsafe { last::<BYTES>(step, first, second) };
    let low = _mm256_set1_epi16(15);
    [
        _mm256_and_si256(bytes, low),
        _mm256_and_si256(_mm256_srli_epi16::<8>(bytes), low),
        _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), low),
        _mm256_srli_epi16::<12>(bytes),
    ]
}

/// Their codes, with fifth bits from the 32 that lie before them.
///
/// # Safety
/// As [`last`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn five_bits<const BYTES: usize>(
    step: *const u8,
    first: usize,
    second: usize,
) -> [__m256i; 2] {
    // SAFETY: the caller's promise.
    let (bytes, fifth) = unsafe {
        let fifth = |block| step.add((block + 1) * BYTES - 20).cast::<i32>();
        let one = _mm_set1_epi32(fifth(first).read_unaligned());
        let other = _mm_set1_epi32(fifth(second).read_unaligned());
        let fifth = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(one), other);
        (last::<BYTES>(step, first, second), fifth)
    };
    // A code's fifth bit lies in one of four bytes: these say in which.
    let of_low = _mm256_set_epi64x(0x0101_0101_0101_0101, 0, 0x0101_0101_0101_0101, 0);
    let of_high = _mm256_or_si256(of_low, _mm256_set1_epi8(2));
    let bits = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
    let of_low = sixteen_where(_mm256_shuffle_epi8(fifth, of_low), bits);
    let of_high = sixteen_where(_mm256_shuffle_epi8(fifth, of_high), bits);
    [
        _mm256_or_si256(halves(bytes, false), of_low),
        _mm256_or_si256(halves(bytes, true), of_high),
    ]
}

impl Fused for Q4_0 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn factors(step: *const u8, blocks: usize) -> Factors {
        // SAFETY: the caller's promise.
        unsafe { around::<18>(step, blocks, 8.0) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn words(step: *const u8, first: usize, second: usize) -> [__m256i; 4] {
        // SAFETY: the caller's promise.
        unsafe { nibbles_in_words::<18>(step, first, second) }
    }
}

impl FusedBytes for Q4_0 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn bytes(step: *const u8, first: usize, second: usize) -> [__m256i; 2] {
        // SAFETY: the caller's promise.
        unsafe { nibbles::<18>(step, first, second) }
    }
}

impl Fused for Q4_1 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn factors(step: *const u8, blocks: usize) -> Factors {
        // SAFETY: the caller's promise.
        unsafe { beside::<20>(step, blocks) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn words(step: *const u8, first: usize, second: usize) -> [__m256i; 4] {
        // SAFETY: the caller's promise.
        unsafe { nibbles_in_words::<20>(step, first, second) }
    }
}

impl FusedBytes for Q4_1 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn bytes(step: *const u8, first: usize, second: usize) -> [__m256i; 2] {
        // SAFETY: the caller's promise.
        unsafe { nibbles::<20>(step, first, second) }
    }
}

impl Fused for Q5_0 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn factors(step: *const u8, blocks: usize) -> Factors {
        // SAFETY: the caller's promise.
        unsafe { around::<22>(step, blocks, 16.0) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn words(step: *const u8, first: usize, second: usize) -> [__m256i; 4] {
        // SAFETY: the caller's promise.
        words(unsafe { Self::bytes(step, first, second) })
    }
}

impl FusedBytes for Q5_0 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn bytes(step: *const u8, first: usize, second: usize) -> [__m256i; 2] {
        // SAFETY: the caller's promise.
        unsafe { five_bits::<22>(step, first, second) }
    }
}

impl Fused for Q5_1 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn factors(step: *const u8, blocks: usize) -> Factors {
        // SAFETY: the caller's promise.
        unsafe { beside::<24>(step, blocks) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn words(step: *const u8, first: usize, second: usize) -> [__m256i; 4] {
        // SAFETY: the caller's promise.
        words(unsafe { Self::bytes(step, first, second) })
    }
}

impl FusedBytes for Q5_1 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn bytes(step: *const u8, first: usize, second: usize) -> [__m256i; 2] {
        // SAFETY: the caller's promise.
        unsafe { five_bits::<24>(step, first, second) }
    }
}
