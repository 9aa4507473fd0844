//! Ternary formats and that of two bits, 256 codes at a time, which are eight groups in four vectors. Two of a
//! vector's 16 sums of four products belong to each group, the same two in all vectors: products of a unit are added up
//! as integers, and scaled once. Activations lie in that order, with factors for each of the 16 sums.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::{Product, Row, fetch};
use crate::cpu::blocks::{Format, Q2_0, Tq1_0, Tq2_0};

/// Codes of a unit.
const CODES: usize = 256;

/// Bytes of a vector, and vectors of the codes of a unit.
const VECTOR: usize = 64;
const VECTORS: usize = CODES / VECTOR;

/// Sums of a unit, each of which has factors.
const SUMS: usize = 16;

/// A format that can be decoded in registers, whose codes stand for numbers that are one less.
pub(super) trait Grouped: Format {
    /// Weights of a block, and its bytes.
    const BLOCK: (usize, usize) = Self::DTYPE.block();

    /// Blocks of a unit.
    const BLOCKS: usize = CODES / Self::BLOCK.0;

    /// The scale of each sum, and zeros for blocks that the unit lacks.
    ///
    /// # Safety
    /// The processor has the instructions. There are so many blocks, from 1 to `BLOCKS`.
    unsafe fn scales(unit: *const u8, blocks: usize) -> __m512;

    /// The codes, with any for blocks that the unit lacks.
    ///
    /// # Safety
    /// As above.
    unsafe fn codes(unit: *const u8, blocks: usize) -> [__m512i; VECTORS];
}

/// Products by such a format.
pub(super) struct ByGroups<F>(PhantomData<F>);

impl<F: Grouped> ByGroups<F> {
    /// Adds the products of unit `i` to a total.
    ///
    /// # Safety
    /// The activations are there, and the processor has the instructions.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn add(unit: &Unit, x: Row, i: usize, total: __m512) -> __m512 {
        // Two chains of sums, since one takes longer than all else.
        let (mut of_high, mut of_low) = (_mm512_setzero_si512(), _mm512_setzero_si512());
        // SAFETY: the caller's promise.
        unsafe {
            let (high, low) = (x.high.add(i * CODES), x.low.add(i * CODES));
            for (z, codes) in unit.codes.into_iter().enumerate() {
                let high = _mm512_loadu_si512(high.add(z * VECTOR).cast());
                of_high = _mm512_dpbusd_epi32(of_high, codes, high);
                let low = _mm512_loadu_si512(low.add(z * VECTOR).cast());
                of_low = _mm512_dpbusd_epi32(of_low, codes, low);
            }
            let dots = _mm512_add_epi32(_mm512_slli_epi32::<8>(of_high), of_low);
            let scales = _mm512_loadu_ps(x.scales.add(i * SUMS));
            let sums = _mm512_loadu_ps(x.sums.add(i * SUMS));
            let sums = _mm512_fmsub_ps(_mm512_cvtepi32_ps(dots), scales, sums);
            _mm512_fmadd_ps(sums, unit.scales, total)
        }
    }
}

/// A decoded unit.
struct Unit {
    codes: [__m512i; VECTORS],
    scales: __m512,
}

impl Unit {
    /// Unit `i` of a row, which has so many blocks.
    ///
    /// # Safety
    /// These are there, and the processor has the instructions.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn new<F: Grouped>(row: *const u8, i: usize, blocks: usize) -> Unit {
        // SAFETY: the caller's promise.
        unsafe {
            let unit = row.add(i * F::BLOCKS * F::BLOCK.1);
            fetch(unit, blocks * F::BLOCK.1);
            Unit {
                codes: F::codes(unit, blocks),
                scales: F::scales(unit, blocks),
            }
        }
    }
}

impl<F: Grouped> Product for ByGroups<F> {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn column<const R: usize>(row: *const u8, blocks: usize, x: [Row; R]) -> [__m512; R] {
        let mut totals = [_mm512_setzero_ps(); R];
        let (whole, rest) = (blocks / F::BLOCKS, blocks % F::BLOCKS);
        // SAFETY: units end with the row and with activations; the last has so many blocks.
        unsafe {
            for i in 0..whole {
                let unit = Unit::new::<F>(row, i, F::BLOCKS);
                for r in 0..R {
                    totals[r] = Self::add(&unit, x[r], i, totals[r]);
                }
            }
            if rest > 0 {
                let unit = Unit::new::<F>(row, whole, rest);
                for r in 0..R {
                    totals[r] = Self::add(&unit, x[r], whole, totals[r]);
                }
            }
        }
        totals
    }
}

impl Grouped for Tq2_0 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn scales(unit: *const u8, _: usize) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { everywhere(unit.add(64)) }
    }

    /// Each half of a block has four groups, two bits of its bytes each: a vector takes eight bytes for all four.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn codes(unit: *const u8, _: usize) -> [__m512i; VECTORS] {
        // SAFETY: the caller's promise.
        let packed = unsafe { _mm512_loadu_si512(unit.cast()) };
        let eight = [
            _mm512_permutex_epi64::<0b00_00_00_00>(packed),
            _mm512_permutex_epi64::<0b01_01_01_01>(packed),
            _mm512_permutex_epi64::<0b10_10_10_10>(packed),
            _mm512_permutex_epi64::<0b11_11_11_11>(packed),
        ];
        eight.map(|packed| {
            let codes = _mm512_srlv_epi64(packed, _mm512_setr_epi64(0, 2, 4, 6, 0, 2, 4, 6));
            _mm512_and_si512(codes, _mm512_set1_epi8(3))
        })
    }
}

/// An f16 in all lanes.
///
/// # Safety
/// It is there, and the processor has the instructions.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn everywhere(at: *const u8) -> __m512 {
    // SAFETY: the caller's promise.
    _mm512_cvtph_ps(_mm256_set1_epi16(unsafe {
        at.cast::<i16>().read_unaligned()
    }))
}

/// For each vector of TQ1_0's codes, which words of four bytes it takes of a block, and `3^n` for the digits `n`
/// of theirs that it takes.
struct Places {
    bytes: [[i32; SUMS]; VECTORS],
    powers: [[i32; SUMS]; VECTORS],
}

/// 32 bytes have five digits for as many groups; 16 bytes have those of two and a half groups, and 4 bytes
/// four for the other half.
static PLACES: Places = {
    const POWERS: [i32; 5] = [1, 3, 9, 27, 81];
    let mut places = Places {
        bytes: [[0; SUMS]; VECTORS],
        powers: [[0; SUMS]; VECTORS],
    };
    let mut z = 0;
    while z < VECTORS {
        let mut sum = 0;
        while sum < SUMS {
            // Of the words of codes that the block has, four codes each.
            let word = sum / 2 * 8 + z * 2 + sum % 2;
            let (bytes, digit) = match word {
                0..40 => (word % 8, word / 8),
                40..60 => (8 + (word - 40) % 4, (word - 40) / 4),
                _ => (12, word - 60),
            };
            places.bytes[z][sum] = bytes as i32;
            places.powers[z][sum] = POWERS[digit] * 0x0001_0001;
            sum += 1;
        }
        z += 1;
    }
    places
};

/// 16 words, which are known when this is compiled.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn constant(words: &'static [i32; SUMS]) -> __m512i {
    // SAFETY: a vector of words.
    unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
}

impl Grouped for Tq1_0 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn scales(unit: *const u8, _: usize) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { everywhere(unit.add(52)) }
    }

    /// Code `n` of a byte `b` is `3 (3^n b mod 256) / 256`, rounded down.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn codes(unit: *const u8, _: usize) -> [__m512i; VECTORS] {
        // SAFETY: the caller's promise: a block has 13 words before its scale.
        let packed = unsafe { _mm512_maskz_loadu_epi32(0x1fff, unit.cast()) };
        let high = _mm512_set1_epi16(0xff00_u16.cast_signed());
        let mut codes = [_mm512_setzero_si512(); VECTORS];
        for (z, codes) in codes.iter_mut().enumerate() {
            let bytes = _mm512_permutexvar_epi32(constant(&PLACES.bytes[z]), packed);
            // `3^n b mod 256` of low bytes, and of high ones, in the high bytes of words.
            let powers = constant(&PLACES.powers[z]);
            let even = _mm512_mullo_epi16(bytes, _mm512_slli_epi16::<8>(powers));
            let odd = _mm512_mullo_epi16(_mm512_and_si512(bytes, high), powers);
            // Three times that, over 256: of low bytes as it is, of high ones in the high byte, with a rest below it.
            let even = _mm512_mulhi_epu16(even, _mm512_set1_epi16(3));
            let odd = _mm512_mulhi_epu16(odd, _mm512_set1_epi16(3 << 8));
            // `even | odd & high`.
            *codes = _mm512_ternarylogic_epi64::<0b1111_1000>(even, odd, high);
        }
        codes
    }
}

impl Grouped for Q2_0 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn scales(unit: *const u8, blocks: usize) -> __m512 {
        let of = |block: usize| {
            if block >= blocks {
                return 0;
            }
            // SAFETY: the caller's promise.
            u64::from(unsafe { unit.add(block * 18).cast::<u16>().read_unaligned() })
        };
        let four = of(0) | of(1) << 16 | of(2) << 32 | of(3) << 48;
        let four = _mm_cvtph_ps(_mm_cvtsi64_si128(four.cast_signed()));
        let of_sums = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
        _mm512_permutexvar_ps(of_sums, _mm512_castps128_ps512(four))
    }

    /// A byte has four neighbours, one for each vector. The last block is taken for those that there are not.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn codes(unit: *const u8, blocks: usize) -> [__m512i; VECTORS] {
        // SAFETY: the caller's promise.
        let of = |block: usize| unsafe {
            _mm_loadu_si128(unit.add(block.min(blocks - 1) * 18 + 2).cast())
        };
        let one = _mm512_castsi128_si512(of(0));
        let two = _mm512_inserti32x4::<1>(one, of(1));
        let three = _mm512_inserti32x4::<2>(two, of(2));
        let packed = _mm512_inserti32x4::<3>(three, of(3));
        let places = [
            packed,
            _mm512_srli_epi16::<2>(packed),
            _mm512_srli_epi16::<4>(packed),
            _mm512_srli_epi16::<6>(packed),
        ];
        places.map(|codes| _mm512_and_si512(codes, _mm512_set1_epi8(3)))
    }
}
