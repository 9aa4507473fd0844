//! Q8_0: an f16 scale, then 32 codes that are bytes.

use std::arch::x86_64::*;

use super::Fused;
use crate::cpu::blocks::Q8_0;

/// Of a block.
const BYTES: usize = 34;

/// Blocks of a step.
const BLOCKS: usize = 16;

/// Vectors that a step may lie in, in twos.
const PAIRS: usize = 5;

/// Where the scale of each of 16 blocks lies: in the vectors of pair `p`, if bit `i` of its mask
/// says so, as word `words[p][i]`.
struct Table {
    words: [[u16; 32]; PAIRS],
    masks: [u32; PAIRS],
}

static TABLE: Table = {
    let mut table = Table {
        words: [[0; 32]; PAIRS],
        masks: [0; PAIRS],
    };
    let mut i = 0;
    while i < BLOCKS {
        let word = i * BYTES / 2;
        table.words[word / 64][i] = (word % 64) as u16;
        table.masks[word / 64] |= 1 << i;
        i += 1;
    }
    table
};

/// The 64 bytes from the `at`th of `len`, and zeros behind these.
///
/// # Safety
/// These are there, and the processor has the instructions.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn sixty_four(bytes: *const u8, len: usize, at: usize) -> __m512i {
    // SAFETY: the caller's promise; a masked load reads no other bytes.
    unsafe {
        match len.saturating_sub(at) {
            0 => _mm512_setzero_si512(),
            rest @ 1..64 => _mm512_maskz_loadu_epi8(u64::MAX >> (64 - rest), bytes.add(at).cast()),
            _ => _mm512_loadu_si512(bytes.add(at).cast()),
        }
    }
}

/// The scales of up to 16 blocks.
///
/// # Safety
/// These are there, and the processor has the instructions.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn scales(step: *const u8, blocks: usize) -> __m512 {
    let len = blocks * BYTES;
    let mut words = _mm512_setzero_si512();
    for (pair, (at, mask)) in TABLE.words.iter().zip(TABLE.masks).enumerate() {
        if pair * 128 >= len {
            break;
        }
        // SAFETY: the caller's promise, and a vector of words.
        unsafe {
            let first = sixty_four(step, len, pair * 128);
            let second = sixty_four(step, len, pair * 128 + 64);
            let at = _mm512_loadu_si512(at.as_ptr().cast());
            let here = _mm512_maskz_permutex2var_epi16(mask, first, at, second);
            words = _mm512_or_si512(words, here);
        }
    }
    _mm512_cvtph_ps(_mm512_castsi512_si256(words))
}

impl Fused for Q8_0 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn factors(step: *const u8, blocks: usize) -> (__m512, __m512) {
        // SAFETY: the caller's promise.
        let scales = unsafe { scales(step, blocks) };
        (scales, _mm512_mul_ps(scales, _mm512_set1_ps(-128.0)))
    }

    /// Of two blocks; the last is taken twice where there is none behind it.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn codes(step: *const u8, blocks: usize, z: usize) -> __m512i {
        let second = (2 * z + 1).min(blocks - 1);
        // SAFETY: the caller's promise.
        let codes = unsafe {
            let first = _mm256_loadu_si256(step.add(2 * z * BYTES + 2).cast());
            let second = _mm256_loadu_si256(step.add(second * BYTES + 2).cast());
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(first), second)
        };
        // 128 more.
        _mm512_xor_si512(codes, _mm512_set1_epi8(i8::MIN))
    }
}
