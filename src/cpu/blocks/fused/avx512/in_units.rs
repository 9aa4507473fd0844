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

/// Where things are in a block, which begins with its f16 scale; without a code of zero, an offset stands behind that.
pub(super) trait Nibbles: Format {
    const BYTES: usize = Self::DTYPE.block().1;

    /// The 16 bytes whose low halves are codes 0 to 15, and whose high halves are codes 16 to 31.
    const CODES: usize = Self::BYTES - 16;

    /// Four bytes of fifth bits.
    const FIFTH: Option<usize> = None;
}

impl Nibbles for Q4_0 {}

impl Nibbles for Q4_1 {}

impl Nibbles for Q5_0 {
    const FIFTH: Option<usize> = Some(2);
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

    /// Whether a unit's first 64 bytes have all its scales, and what is behind them.
    const FACTORS_ARE_FIRST: bool = (BLOCKS - 1) * F::BYTES + 4 <= VECTOR;

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

/// The sums of a product, and what is to be subtracted from them for each zero.
#[derive(Clone, Copy)]
struct Totals {
    sums: __m512,
    zeros: __m512,
}

impl<F: Nibbles> Product for InUnits<F> {
    /// Not with fifth bits: they are put together in integer registers, which do not suffice for four rows.
    const HAS_FOUR: bool = F::FIFTH.is_none();

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn column<const R: usize>(row: *const u8, blocks: usize, x: [Row; R]) -> [__m512; R] {
        let mut totals = [Totals::zero(); R];
        let (whole, rest) = (blocks / BLOCKS, blocks % BLOCKS);
        // SAFETY: units end with the row and with activations; the last has so many blocks.
        unsafe {
            for i in 0..whole {
                let unit = Unit::whole::<F>(row.add(i * BLOCKS * F::BYTES));
                for r in 0..R {
                    totals[r].add::<F>(&unit, &OfUnit::new(x[r], i));
                }
            }
            if rest > 0 {
                let masks = Masks::new::<F>(rest);
                let unit = Unit::part::<F>(row.add(whole * BLOCKS * F::BYTES), rest, masks);
                for r in 0..R {
                    totals[r].add::<F>(&unit, &OfUnit::new(x[r], whole));
                }
            }
        }
        ends::<F, R>(totals)
    }

    /// A unit of activations is loaded once for all of them.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn four(rows: [*const u8; 4], blocks: usize, x: Row) -> [__m512; 4] {
        let mut totals = [Totals::zero(); 4];
        let (whole, rest) = (blocks / BLOCKS, blocks % BLOCKS);
        // SAFETY: as above.
        unsafe {
            for i in 0..whole {
                let x = OfUnit::new(x, i);
                for c in 0..4 {
                    let unit = Unit::whole::<F>(rows[c].add(i * BLOCKS * F::BYTES));
                    totals[c].add::<F>(&unit, &x);
                }
            }
            if rest > 0 {
                let (x, masks) = (OfUnit::new(x, whole), Masks::new::<F>(rest));
                for c in 0..4 {
                    let unit = rows[c].add(whole * BLOCKS * F::BYTES);
                    totals[c].add::<F>(&Unit::part::<F>(unit, rest, masks), &x);
                }
            }
        }
        ends::<F, 4>(totals)
    }
}

/// The activations that a unit multiplies.
struct OfUnit {
    /// The high bytes of activations: those that codes in low halves of bytes multiply, and those for codes in high halves.
    high: [__m512i; 2],
    /// Their low bytes, likewise.
    low: [__m512i; 2],
    scales: __m512,
    sums: __m512,
}

impl OfUnit {
    /// # Safety
    /// There are so many units, and the processor has the instructions.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn new(x: Row, i: usize) -> OfUnit {
        // SAFETY: the caller's promise.
        unsafe {
            let (high, low) = (x.high.add(i * CODES), x.low.add(i * CODES));
            OfUnit {
                high: [
                    _mm512_loadu_si512(high.cast()),
                    _mm512_loadu_si512(high.add(VECTOR).cast()),
                ],
                low: [
                    _mm512_loadu_si512(low.cast()),
                    _mm512_loadu_si512(low.add(VECTOR).cast()),
                ],
                scales: _mm512_loadu_ps(x.scales.add(i * SUMS)),
                sums: _mm512_loadu_ps(x.sums.add(i * SUMS)),
            }
        }
    }
}

/// A decoded unit.
struct Unit {
    /// The codes in low halves of bytes, and those in high ones.
    low: __m512i,
    high: __m512i,
    /// The scales in f16, and what is behind each.
    factors: __m512i,
}

impl Unit {
    /// # Safety
    /// All blocks are there, and the processor has the instructions.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn whole<F: Nibbles>(unit: *const u8) -> Unit {
        // SAFETY: the caller's promise; what is loaded at once lies in the unit.
        unsafe {
            fetch(unit, BLOCKS * F::BYTES);
            let words = InUnits::<F>::WORDS;
            let of_factors = _mm512_loadu_si512(words.factors.as_ptr().cast());
            let first = _mm512_loadu_si512(unit.cast());
            let (codes, factors);
            if InUnits::<F>::FACTORS_ARE_FIRST {
                // Short loads seldom lie in two cache lines, and need no instruction that moves words.
                let of =
                    |block: usize| _mm_loadu_si128(unit.add(block * F::BYTES + F::CODES).cast());
                let one = _mm512_castsi128_si512(of(0));
                let two = _mm512_inserti32x4::<1>(one, of(1));
                let three = _mm512_inserti32x4::<2>(two, of(2));
                codes = _mm512_inserti32x4::<3>(three, of(3));
                factors = _mm512_permutexvar_epi16(of_factors, first);
            } else {
                let of_codes = _mm512_loadu_si512(words.codes.as_ptr().cast());
                let last = _mm512_loadu_si512(unit.add(BLOCKS * F::BYTES - VECTOR).cast());
                codes = _mm512_permutex2var_epi16(first, of_codes, last);
                factors = _mm512_permutex2var_epi16(first, of_factors, last);
            }
            Unit::new::<F>(codes, factors, fifth_bits::<F>(unit, BLOCKS))
        }
    }

    /// Of fewer blocks; masked loads read no others.
    ///
    /// # Safety
    /// So many are there, and the processor has the instructions.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn part<F: Nibbles>(unit: *const u8, blocks: usize, masks: Masks) -> Unit {
        let words = InUnits::<F>::WORDS;
        // SAFETY: vectors of words; the caller's promise.
        unsafe {
            fetch(unit, blocks * F::BYTES);
            let end = unit.wrapping_add(BLOCKS * F::BYTES - VECTOR);
            let first = _mm512_maskz_loadu_epi8(masks.first, unit.cast());
            let last = _mm512_maskz_loadu_epi8(masks.last, end.cast());
            let of = |words: &[u16; 32]| {
                let words = _mm512_loadu_si512(words.as_ptr().cast());
                _mm512_permutex2var_epi16(first, words, last)
            };
            let (codes, factors) = (of(&words.codes), of(&words.factors));
            Unit::new::<F>(codes, factors, fifth_bits::<F>(unit, blocks))
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    fn new<F: Nibbles>(codes: __m512i, factors: __m512i, fifth: [u64; 2]) -> Unit {
        let (nibble, sixteen) = (_mm512_set1_epi8(15), _mm512_set1_epi8(16));
        let mut low = _mm512_and_si512(codes, nibble);
        let mut high = _mm512_and_si512(_mm512_srli_epi16::<4>(codes), nibble);
        if F::FIFTH.is_some() {
            low = _mm512_mask_add_epi8(low, fifth[0], low, sixteen);
            high = _mm512_mask_add_epi8(high, fifth[1], high, sixteen);
        }
        Unit { low, high, factors }
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

impl Totals {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    fn zero() -> Totals {
        Totals {
            sums: _mm512_setzero_ps(),
            zeros: _mm512_setzero_ps(),
        }
    }

    /// Adds the products of a unit.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    fn add<F: Nibbles>(&mut self, unit: &Unit, x: &OfUnit) {
        let dots = _mm512_dpbusd_epi32(_mm512_setzero_si512(), unit.low, x.high[0]);
        let dots = _mm512_dpbusd_epi32(dots, unit.high, x.high[1]);
        let dots = _mm512_slli_epi32::<8>(dots);
        let dots = _mm512_dpbusd_epi32(dots, unit.low, x.low[0]);
        let dots = _mm512_dpbusd_epi32(dots, unit.high, x.low[1]);
        let scales = _mm512_cvtph_ps(_mm512_castsi512_si256(unit.factors));
        let scale = _mm512_mul_ps(scales, x.scales);
        self.sums = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), scale, self.sums);
        match F::ZERO {
            Some(_) => self.zeros = _mm512_fmadd_ps(scales, x.sums, self.zeros),
            None => {
                let offsets = _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(unit.factors));
                self.sums = _mm512_fmadd_ps(offsets, x.sums, self.sums);
            }
        }
    }
}

/// The sums without what zeros add to them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn ends<F: Nibbles, const N: usize>(totals: [Totals; N]) -> [__m512; N] {
    let mut ends = [_mm512_setzero_ps(); N];
    for (end, Totals { sums, zeros }) in ends.iter_mut().zip(totals) {
        *end = match F::ZERO {
            Some(zero) => _mm512_fnmadd_ps(_mm512_set1_ps(f32::from(zero)), zeros, sums),
            None => sums,
        };
    }
    ends
}
