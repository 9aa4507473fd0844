//! Q8_0: an f16 scale, then 32 codes that are bytes with a sign.

use std::arch::x86_64::*;

use super::{Factors, Fused, MOST, both, f16s};
use crate::cpu::blocks::Q8_0;

/// Of a block.
const BYTES: usize = 34;

impl Fused for Q8_0 {
    const SIGNED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn factors(step: *const u8, blocks: usize) -> Factors {
        // SAFETY: the caller's promise.
        let scales = unsafe { f16s::<BYTES, 0>(step, blocks) };
        ([scales; MOST], [_mm256_setzero_ps(); MOST])
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn words(step: *const u8, first: usize, second: usize) -> [__m256i; 4] {
        // SAFETY: the caller's promise.
        let [low, high] = unsafe {
            let (first, second) = (step.add(first * BYTES + 2), step.add(second * BYTES + 2));
            [both(first, second), both(first.add(16), second.add(16))]
        };
        [
            _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(low)),
            _mm256_srai_epi16::<8>(low),
            _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(high)),
            _mm256_srai_epi16::<8>(high),
        ]
    }
}
