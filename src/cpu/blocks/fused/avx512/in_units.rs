//! Formats of 32 codes of 4 or 5 bits, four blocks at a time: the low halves of their bytes are
//! half of the codes of each, the high ones the other, so that both add to the same sums.
//! Activations lie in that order, with factors for each of these 16 sums.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::{Product, Row, fetch};
use crate::cpu::blocks::{Format, Q4_0, Q4_1, Q5_0, Q5_1};

/// Blocks of a unit.
const BLOCKS: usize = 4;

/// Codes of a unit.
const CODES: usize = 128;

/// Sums of a unit, each of which has factors.
const SUMS: usize = 16;

/// Bytes of a vector.
const VECTOR: usize = 64;

/// Where things are in a block, which begins with its f16 scale.
pub(super) trait Nibbles: Format {
    const BYTES: usize = Self::DTYPE.block().1;

    /// The 16 bytes whose low halves are codes 0 to 15, and whose high halves are codes 16 to 31.
    const CODES: usize = Self::BYTES - 16;

    /// Four bytes of fifth bits.
    const FIFTH: Option<usize> = None;

    /// The code of zero; without one, an offset stands behind the scale.
    const ZERO: Option<f32> = None;
}

impl Nibbles for Q4_0 {
    const ZERO: Option<f32> = Some(8.0);
}

impl Nibbles for Q4_1 {}

impl Nibbles for Q5_0 {
    const FIFTH: Option<usize> = Some(2);
    const ZERO: Option<f32> = Some(16.0);
}

impl Nibbles for Q5_1 {
    const FIFTH: Option<usize> = Some(4);
}

/// Products by such a format.
pub(super) struct InUnits<F>(PhantomData<F>);

/// Which words to take of a unit's first 64 bytes and of its last, which together are all.
struct Words {
    codes: [u16; 32],
    /// A scale for each sum, and what is behind it.
    factors: [u16; 32],
}

impl<F: Nibbles> InUnits<F> {
    const WORDS: &'static Words = &{
        let mut all = Words {
            codes: [0; 32],
            factors: [0; 32],
        };
        let mut i = 0;
        while i < 32 {
            all.codes[i] = Self::index(i / 8 * F::BYTES / 2 + F::CODES / 2 + i % 8);
            all.factors[i] = Self::index(i % SUMS / (SUMS / BLOCKS) * F::BYTES / 2 + i / SUMS);
            i += 1;
        }
        all
    };

    const fn index(word: usize) -> u16 {
        match word {
            0..32 => word as u16,
            // Behind the 32 of the first.
            _ => (32 + word - (BLOCKS * F::BYTES - VECTOR) / 2) as u16,
        }
    }
}

/// What of a unit's first and last 64 bytes is there.
#[derive(Clone, Copy)]
struct Masks {
    first: u64,
    last: u64,
}

impl Masks {
    fn new<F: Nibbles>(blocks: usize) -> Masks {
        let bytes = blocks * F::BYTES;
        let of = |bytes: usize| match bytes {
            0 => 0,
            1..VECTOR => u64::MAX >> (VECTOR - bytes),
            _ => u64::MAX,
        };
        Masks {
            first: of(bytes),
            last: of(bytes.saturating_sub(BLOCKS * F::BYTES - VECTOR)),
        }
    }
}

/// Sums of a row, and what is to be subtracted from them for each zero.
struct Totals<const R: usize> {
    sums: [__m512; R],
    zeros: [__m512; R],
}

impl<F: Nibbles> Product for InUnits<F> {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn column<const R: usize>(row: *const u8, blocks: usize, x: [Row; R]) -> [__m512; R] {
        let mut totals = Totals {
            sums: [_mm512_setzero_ps(); R],
            zeros: [_mm512_setzero_ps(); R],
        };
        let (whole, rest) = (blocks / BLOCKS, blocks % BLOCKS);
        // SAFETY: units end with the row and with activations; the last has so many blocks, and
        // masked loads read no other bytes.
        unsafe {
            for i in 0..whole {
                let unit = row.add(i * BLOCKS * F::BYTES);
                fetch(unit, BLOCKS * F::BYTES);
                let first = _mm512_loadu_si512(unit.cast());
                let last = _mm512_loadu_si512(unit.add(BLOCKS * F::BYTES - VECTOR).cast());
                let fifth = fifth_bits::<F>(unit, BLOCKS);
                add::<F, R>(first, last, fifth, x, i, &mut totals);
            }
            if rest > 0 {
                let unit = row.add(whole * BLOCKS * F::BYTES);
                let masks = Masks::new::<F>(rest);
                let end = unit.wrapping_add(BLOCKS * F::BYTES - VECTOR);
                fetch(unit, rest * F::BYTES);
                let first = _mm512_maskz_loadu_epi8(masks.first, unit.cast());
                let last = _mm512_maskz_loadu_epi8(masks.last, end.cast());
                let fifth = fifth_bits::<F>(unit, rest);
                add::<F, R>(first, last, fifth, x, whole, &mut totals);
            }
        }
        if let Some(zero) = F::ZERO {
            for r in 0..R {
                totals.sums[r] =
                    _mm512_fnmadd_ps(_mm512_set1_ps(zero), totals.zeros[r], totals.sums[r]);
            }
        }
        totals.sums
    }
}

/// Those of the codes in low halves, and of those in high ones.
///
/// # Safety
/// So many blocks are there.
#[inline]
unsafe fn fifth_bits<F: Nibbles>(unit: *const u8, blocks: usize) -> [u64; 2] {
    let mut masks = [0; 2];
    if let Some(at) = F::FIFTH {
        for k in 0..blocks {
            // SAFETY: the caller's promise.
            let bits = unsafe { unit.add(k * F::BYTES + at).cast::<u32>().read_unaligned() };
            masks[0] |= u64::from(bits & 0xffff) << (16 * k);
            masks[1] |= u64::from(bits >> 16) << (16 * k);
        }
    }
    masks
}

/// Adds the products of unit `i`, given its bytes.
///
/// # Safety
/// Activations are there, and the processor has the instructions.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn add<F: Nibbles, const R: usize>(
    first: __m512i,
    last: __m512i,
    fifth: [u64; 2],
    x: [Row; R],
    i: usize,
    totals: &mut Totals<R>,
) {
    let words = InUnits::<F>::WORDS;
    // SAFETY: vectors of words; the caller's promise.
    unsafe {
        let codes = _mm512_loadu_si512(words.codes.as_ptr().cast());
        let codes = _mm512_permutex2var_epi16(first, codes, last);
        let factors = _mm512_loadu_si512(words.factors.as_ptr().cast());
        let factors = _mm512_permutex2var_epi16(first, factors, last);
        let scales = _mm512_cvtph_ps(_mm512_castsi512_si256(factors));
        let (nibble, sixteen) = (_mm512_set1_epi8(15), _mm512_set1_epi8(16));
        let mut low = _mm512_and_si512(codes, nibble);
        let mut high = _mm512_and_si512(_mm512_srli_epi16::<4>(codes), nibble);
        if F::FIFTH.is_some() {
            low = _mm512_mask_add_epi8(low, fifth[0], low, sixteen);
            high = _mm512_mask_add_epi8(high, fifth[1], high, sixteen);
        }
        for (r, x) in x.iter().enumerate() {
            let (x_high, x_low) = (x.high.add(i * CODES), x.low.add(i * CODES));
            let zero = _mm512_setzero_si512();
            let dots = _mm512_dpbusd_epi32(zero, low, _mm512_loadu_si512(x_high.cast()));
            let dots =
                _mm512_dpbusd_epi32(dots, high, _mm512_loadu_si512(x_high.add(VECTOR).cast()));
            let dots = _mm512_slli_epi32::<8>(dots);
            let dots = _mm512_dpbusd_epi32(dots, low, _mm512_loadu_si512(x_low.cast()));
            let dots =
                _mm512_dpbusd_epi32(dots, high, _mm512_loadu_si512(x_low.add(VECTOR).cast()));
            let scale = _mm512_mul_ps(scales, _mm512_loadu_ps(x.scales.add(i * SUMS)));
            totals.sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), scale, totals.sums[r]);
            let sums = _mm512_loadu_ps(x.sums.add(i * SUMS));
            match F::ZERO {
                Some(_) => totals.zeros[r] = _mm512_fmadd_ps(scales, sums, totals.zeros[r]),
                None => {
                    let offsets = _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(factors));
                    totals.sums[r] = _mm512_fmadd_ps(offsets, sums, totals.sums[r]);
                }
            }
        }
    }
}
