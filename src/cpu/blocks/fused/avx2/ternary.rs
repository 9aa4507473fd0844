//! Ternary formats and that of two bits: codes stand for numbers that are one less.

use std::arch::x86_64::*;

use super::{Factors, Fused, FusedBytes, MOST, both, f16_everywhere, twice, words};
use crate::cpu::blocks::{Q2_0, Tq1_0, Tq2_0};

/// These scales, and what a code of zero stands for.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn around_one(scales: __m256) -> Factors {
    let offsets = _mm256_sub_ps(_mm256_setzero_ps(), scales);
    ([scales; MOST], [offsets; MOST])
}

impl Fused for Tq2_0 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn factors(step: *const u8, _: usize) -> Factors {
        // SAFETY: the caller's promise.
        around_one(unsafe { f16_everywhere(step.add(64)) })
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn words(step: *const u8, first: usize, second: usize) -> [__m256i; 4] {
        // SAFETY: the caller's promise.
        words(unsafe { Self::bytes(step, first, second) })
    }
}

impl FusedBytes for Tq2_0 {
    /// The 32 bytes of each half of a block have four pieces, two bits of each.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn bytes(step: *const u8, first: usize, _: usize) -> [__m256i; 2] {
        // SAFETY: the caller's promise.
        let packed = unsafe { twice(step.add(first / 4 * 32)) };
        packed.map(|packed| {
            let places = match first % 4 {
                0 => _mm256_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2),
                _ => _mm256_setr_epi32(4, 4, 4, 4, 6, 6, 6, 6),
            };
            _mm256_and_si256(_mm256_srlv_epi32(packed, places), _mm256_set1_epi8(3))
        })
    }
}

/// Words that are all the same.
const EACH: i64 = 0x0001_0001_0001_0001;

/// `3^n` for the bytes of each half of a vector, whose digits `n` are taken.
const fn powers(first: i64, second: i64) -> [i64; 4] {
    let [first, second] = [first * EACH, second * EACH];
    [first, first, second, second]
}

/// Digit `n` of base 3 of each byte `b`, `3 (3^n b mod 256) / 256` rounded down: of the bytes of an even number, and
/// of those of an odd one, in words.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn digits(bytes: __m256i, powers: [i64; 4]) -> [__m256i; 2] {
    let [a, b, c, d] = powers.map(|power| power << 8);
    [bytes, _mm256_srli_epi16::<8>(bytes)].map(|bytes| {
        // `3^n b mod 256`, in the high byte.
        let fraction = _mm256_mullo_epi16(bytes, _mm256_setr_epi64x(a, b, c, d));
        _mm256_mulhi_epu16(fraction, _mm256_set1_epi16(3))
    })
}

impl Fused for Tq1_0 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn factors(step: *const u8, _: usize) -> Factors {
        // SAFETY: the caller's promise.
        around_one(unsafe { f16_everywhere(step.add(52)) })
    }

    /// 32 bytes have five digits for as many pieces; 16 bytes have those of two and a half pieces, and 4 bytes
    /// four for the other half.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn words(step: *const u8, first: usize, _: usize) -> [__m256i; 4] {
        // The last 16 codes are digits of the same four bytes.
        const LAST: [i64; 2] = [0x0003_0003_0001_0001, 0x001b_001b_0009_0009];
        // SAFETY: the caller's promise.
        let (bytes, of_bytes) = unsafe {
            let second = step.add(32);
            match first {
                0 => (twice(step), [powers(1, 3); 2]),
                2 => (twice(step), [powers(9, 27); 2]),
                4 => (
                    [both(step, second), both(step.add(16), second)],
                    [powers(81, 1), powers(81, 3)],
                ),
                _ => {
                    let third = _mm_set1_epi32(step.add(48).cast::<i32>().read_unaligned());
                    let low = both(second, second);
                    (
                        [low, _mm256_inserti128_si256::<1>(low, third)],
                        [powers(9, 81), [27 * EACH, 27 * EACH, LAST[0], LAST[1]]],
                    )
                }
            }
        };
        let ([a, b], [c, d]) = (digits(bytes[0], of_bytes[0]), digits(bytes[1], of_bytes[1]));
        [a, b, c, d]
    }
}

impl Fused for Q2_0 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn factors(step: *const u8, blocks: usize) -> Factors {
        let of = |block: usize| {
            if block >= blocks {
                return 0;
            }
            // SAFETY: the caller's promise.
            u64::from(unsafe { step.add(block * 18).cast::<u16>().read_unaligned() })
        };
        // Both pieces of a pair are of one block.
        let four = of(0) | of(1) << 16 | of(2) << 32 | of(3) << 48;
        around_one(_mm256_cvtph_ps(_mm_set1_epi64x(four.cast_signed())))
    }

    /// A byte has four neighbours, and eight bytes have a piece.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn words(step: *const u8, first: usize, _: usize) -> [__m256i; 4] {
        // SAFETY: the caller's promise.
        let packed = unsafe { _mm_loadu_si128(step.add(first / 2 * 18 + 2).cast()) };
        let packed = _mm256_broadcastsi128_si256(packed);
        // Each byte in two words, in which two of its codes are then moved to the same places.
        let twice = _mm256_setr_epi64x(
            0x8001_8001_8000_8000_u64.cast_signed(),
            0x8003_8003_8002_8002_u64.cast_signed(),
            0x8009_8009_8008_8008_u64.cast_signed(),
            0x800b_800b_800a_800a_u64.cast_signed(),
        );
        let four = _mm256_set1_epi8(4);
        let (sixteen, three) = (_mm256_set1_epi32(0x0001_0010), _mm256_set1_epi16(3));
        let [a, b] = [twice, _mm256_add_epi8(twice, four)].map(|order| {
            let bytes = _mm256_shuffle_epi8(packed, order);
            let moved = _mm256_mullo_epi16(bytes, sixteen);
            [
                _mm256_and_si256(_mm256_srli_epi16::<4>(moved), three),
                _mm256_and_si256(_mm256_srli_epi16::<6>(moved), three),
            ]
        });
        [a[0], a[1], b[0], b[1]]
    }
}
