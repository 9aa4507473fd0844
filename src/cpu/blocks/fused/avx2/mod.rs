//! Kernels of AVX2. Codes are widened to words, which multiply the words of activations, or multiply their bytes
//! as they are. Instructions that move bytes between the halves of a vector are slow; so each half has codes of
//! another piece.

mod nibbles;
mod of_256;
mod q8_0;
mod ternary;

use std::arch::x86_64::*;

use super::{COLUMNS, Rows, SUMMED, fetch};
use crate::cpu::blocks::{Bits, Codes, Format};
use crate::cpu::vector::of_256::sums_of_four;
use crate::dtype::DType;

/// Weights of a step, which is a block of 256, four of 64 or eight of 32.
const STEP: usize = 256;

/// Weights of a piece, which is a group, or two of 16.
const PIECE: usize = 32;

/// Pairs of pieces of a step.
const PAIRS: usize = STEP / PIECE / 2;

/// Factors of a vector.
const LANES: usize = 8;

/// Vectors of factors that a step may have: a factor for every 16 weights.
const MOST: usize = STEP / 16 / LANES;

/// Scales and offsets of a step's groups, in as many vectors as these fill. Each half of a vector has
/// those of one piece of each pair, as [`Form::Pairs`](crate::cpu::blocks::Form) and `Form::Bytes` say.
type Factors = ([__m256; MOST], [__m256; MOST]);

/// A format that can be decoded in registers.
trait Fused: Format {
    /// Weights of a block, and its bytes.
    const BLOCK: (usize, usize) = Self::DTYPE.block();

    /// Blocks of a step.
    const BLOCKS: usize = STEP / Self::BLOCK.0;

    /// Vectors of the factors of a step.
    const VECTORS: usize = STEP / Self::GROUP / LANES;

    /// Whether codes have a sign, and offsets are zero.
    const SIGNED: bool = false;

    /// Scales and offsets of the groups of a step, and zeros for blocks that it lacks.
    ///
    /// # Safety
    /// The processor has the instructions. There are so many blocks, from 1 to `BLOCKS`.
    unsafe fn factors(step: *const u8, blocks: usize) -> Factors;

    /// The codes of two pieces, in words, each in its half of four vectors: of codes 0 to 15 those of an
    /// even number and those of an odd one, then the same of codes 16 to 31.
    ///
    /// # Safety
    /// The processor has the instructions, and blocks that have the pieces are there. If these have more than one,
    /// the second piece is the one behind the first, whose number is even.
    unsafe fn words(step: *const u8, first: usize, second: usize) -> [__m256i; 4];
}

/// A format whose codes, which have no sign, are bytes on their way to be words.
trait FusedBytes: Fused {
    /// The codes of two pieces, each in its half of two vectors: codes 0 to 15, and 16 to 31.
    ///
    /// # Safety
    /// As [`Fused::words`].
    unsafe fn bytes(step: *const u8, first: usize, second: usize) -> [__m256i; 2];
}

/// Where a row of activations lies.
#[derive(Clone, Copy)]
struct Row {
    /// Of 8 bits or of 16.
    codes: *const i8,
    scales: *const f32,
    sums: *const f32,
}

/// See [`Kernel::products`](super::Kernel::products).
///
/// # Safety
/// The processor has the instructions. There are up to [`COLUMNS`] rows of so many blocks, and activations of so many
/// bits, in their form.
pub(super) unsafe fn products<const R: usize>(
    (dtype, bits): (DType, Bits),
    weights: Rows<'_>,
    blocks: usize,
    x: [Codes<'_>; R],
) -> [[f32; COLUMNS]; R] {
    use crate::cpu::blocks::{Q2_0, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, Tq1_0, Tq2_0};
    // SAFETY: the caller's promise.
    unsafe {
        match (dtype, bits) {
            (DType::Q8_0, Bits::Sixteen) => multiply::<Q8_0, Words, R>(weights, blocks, x),
            (DType::Tq1_0, Bits::Sixteen) => multiply::<Tq1_0, Words, R>(weights, blocks, x),
            (DType::Q2_0, Bits::Sixteen) => multiply::<Q2_0, Words, R>(weights, blocks, x),
            (DType::Q4_0, Bits::Sixteen) => multiply::<Q4_0, Words, R>(weights, blocks, x),
            (DType::Q4_0, Bits::Eight) => multiply::<Q4_0, Bytes, R>(weights, blocks, x),
            (DType::Q4_1, Bits::Sixteen) => multiply::<Q4_1, Words, R>(weights, blocks, x),
            (DType::Q4_1, Bits::Eight) => multiply::<Q4_1, Bytes, R>(weights, blocks, x),
            (DType::Q5_0, Bits::Sixteen) => multiply::<Q5_0, Words, R>(weights, blocks, x),
            (DType::Q5_0, Bits::Eight) => multiply::<Q5_0, Bytes, R>(weights, blocks, x),
            (DType::Q5_1, Bits::Sixteen) => multiply::<Q5_1, Words, R>(weights, blocks, x),
            (DType::Q5_1, Bits::Eight) => multiply::<Q5_1, Bytes, R>(weights, blocks, x),
            (DType::Q4K, Bits::Sixteen) => multiply::<Q4K, Words, R>(weights, blocks, x),
            (DType::Q4K, Bits::Eight) => multiply::<Q4K, Bytes, R>(weights, blocks, x),
            (DType::Q5K, Bits::Sixteen) => multiply::<Q5K, Words, R>(weights, blocks, x),
            (DType::Q5K, Bits::Eight) => multiply::<Q5K, Bytes, R>(weights, blocks, x),
            (DType::Q6K, Bits::Sixteen) => multiply::<Q6K, Words, R>(weights, blocks, x),
            (DType::Q6K, Bits::Eight) => multiply::<Q6K, Bytes, R>(weights, blocks, x),
            (DType::Tq2_0, Bits::Sixteen) => multiply::<Tq2_0, Words, R>(weights, blocks, x),
            (DType::Tq2_0, Bits::Eight) => multiply::<Tq2_0, Bytes, R>(weights, blocks, x),
            (other, bits) => unreachable!("there is no kernel for {other} by {bits:?} bits"),
        }
    }
}

/// # Safety
/// As [`products`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn multiply<F: Fused, A: Activations<F>, const R: usize>(
    weights: Rows<'_>,
    blocks: usize,
    x: [Codes<'_>; R],
) -> [[f32; COLUMNS]; R] {
    let x = x.map(|x| Row {
        codes: x.bytes.as_ptr(),
        scales: x.scales.as_ptr(),
        sums: x.sums.as_ptr(),
    });
    let mut sums = [[0.0; COLUMNS]; R];
    for at in (0..weights.count).step_by(SUMMED) {
        // By rows of x.
        let mut totals = [[_mm256_setzero_ps(); SUMMED]; R];
        for (c, row) in weights.starts(at).enumerate() {
            // SAFETY: the caller's promise.
            let of_column = unsafe { column::<F, A, R>(row, blocks, x) };
            for r in 0..R {
                totals[r][c] = of_column[r];
            }
        }
        for (totals, sums) in totals.iter().zip(&mut sums) {
            let sums = &mut sums[at..at + SUMMED];
            // SAFETY: as many floats.
            unsafe { _mm_storeu_ps(sums.as_mut_ptr(), sums_of_four(*totals)) };
        }
    }
    sums
}

/// The sums of products so far, by pairs of an even and of an odd number, so that an addition need
/// not wait for the one before it.
type Totals<const R: usize> = [[__m256; 2]; R];

/// Of the factors of a step and of rows of activations.
type Scales<const R: usize> = [[__m256; MOST]; R];

/// Adds the first pairs of a step. They are spelled out, so that shifts are by constants, and totals
/// stay in registers.
macro_rules! add_pairs {
    ($pieces:expr, $step:ident, $x:ident, $i:expr, $scales:ident, $totals:ident, $($pair:literal)*) => {$(
        if 2 * $pair < $pieces {
            // A piece that is not there has a scale of zero, whatever its codes.
            let second = (2 * $pair + 1).min($pieces - 1);
            A::add::<$pair, R>($step, second, $x, $i, &$scales, &mut $totals);
        }
    )*};
}

/// A row of so many blocks by rows of as many activations, with zeros behind them.
///
/// # Safety
/// These are there, and the processor has the instructions.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn column<F: Fused, A: Activations<F>, const R: usize>(
    row: *const u8,
    blocks: usize,
    x: [Row; R],
) -> [__m256; R] {
    let mut totals = [[_mm256_setzero_ps(); 2]; R];
    let mut scales = [[_mm256_setzero_ps(); MOST]; R];
    let (whole, rest) = (blocks / F::BLOCKS, blocks % F::BLOCKS);
    // SAFETY: steps and pieces end with the row and with activations.
    unsafe {
        for i in 0..whole {
            let step = row.add(i * F::BLOCKS * F::BLOCK.1);
            fetch(step, F::BLOCKS * F::BLOCK.1);
            begin::<F, R>(step, F::BLOCKS, x, i, &mut scales, &mut totals);
            add_pairs!(2 * PAIRS, step, x, i, scales, totals, 0 1 2 3);
        }
        if rest > 0 {
            let step = row.add(whole * F::BLOCKS * F::BLOCK.1);
            fetch(step, rest * F::BLOCK.1);
            begin::<F, R>(step, rest, x, whole, &mut scales, &mut totals);
            let pieces = rest * 2 * PAIRS / F::BLOCKS;
            add_pairs!(pieces, step, x, whole, scales, totals, 0 1 2 3);
        }
    }
    let mut sums = [_mm256_setzero_ps(); R];
    for (sum, [even, odd]) in sums.iter_mut().zip(totals) {
        *sum = _mm256_add_ps(even, odd);
    }
    sums
}

/// The scales of step `i` with each row, to whose totals what offsets give is added.
///
/// # Safety
/// As [`column`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn begin<F: Fused, const R: usize>(
    step: *const u8,
    blocks: usize,
    x: [Row; R],
    i: usize,
    scales: &mut Scales<R>,
    totals: &mut Totals<R>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let (of_weights, offsets) = F::factors(step, blocks);
        for r in 0..R {
            for v in 0..F::VECTORS {
                let at = (i * F::VECTORS + v) * LANES;
                let of_x = _mm256_loadu_ps(x[r].scales.add(at));
                scales[r][v] = _mm256_mul_ps(of_weights[v], of_x);
                if !F::SIGNED {
                    let sums = _mm256_loadu_ps(x[r].sums.add(at));
                    totals[r][0] = _mm256_fmadd_ps(offsets[v], sums, totals[r][0]);
                }
            }
        }
    }
}

/// What multiplies codes of a format.
trait Activations<F: Fused> {
    /// Adds the products of the codes of a pair, whose second piece is given, in step `i`.
    ///
    /// # Safety
    /// As [`column`].
    unsafe fn add<const PAIR: usize, const R: usize>(
        step: *const u8,
        second: usize,
        x: [Row; R],
        i: usize,
        scales: &Scales<R>,
        totals: &mut Totals<R>,
    );
}

/// Of 16 bits.
struct Words;

impl<F: Fused> Activations<F> for Words {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn add<const PAIR: usize, const R: usize>(
        step: *const u8,
        second: usize,
        x: [Row; R],
        i: usize,
        scales: &Scales<R>,
        totals: &mut Totals<R>,
    ) {
        // SAFETY: the caller's promise.
        let codes = unsafe { F::words(step, 2 * PAIR, second) };
        for r in 0..R {
            let mut dots = [_mm256_setzero_si256(); 4];
            for (v, dots) in dots.iter_mut().enumerate() {
                // SAFETY: the caller's promise: four vectors of words of each pair.
                *dots = unsafe {
                    let x = x[r].codes.cast::<i16>();
                    let x = x.add(i * STEP + PAIR * 2 * PIECE + v * 2 * LANES);
                    _mm256_madd_epi16(codes[v], _mm256_loadu_si256(x.cast()))
                };
            }
            let dots = [
                _mm256_add_epi32(dots[0], dots[1]),
                _mm256_add_epi32(dots[2], dots[3]),
            ];
            let total = &mut totals[r][PAIR % 2];
            if F::GROUP == 32 {
                let dots = _mm256_add_epi32(dots[0], dots[1]);
                scale_group::<PAIR>(dots, &scales[r], total);
            } else {
                scale_halves::<PAIR>(dots, &scales[r], total);
            }
        }
    }
}

/// Of 8 bits. An instruction multiplies bytes without a sign by bytes with one, and adds two products to a number of 16
/// bits.
struct Bytes;

impl<F: FusedBytes> Activations<F> for Bytes {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn add<const PAIR: usize, const R: usize>(
        step: *const u8,
        second: usize,
        x: [Row; R],
        i: usize,
        scales: &Scales<R>,
        totals: &mut Totals<R>,
    ) {
        // Two such numbers fit into 16 bits if codes have up to 5, and one if they have 6.
        const { assert!(F::BITS <= 5 || F::BITS == 6 && F::GROUP == 16) };
        // SAFETY: the caller's promise.
        let codes = unsafe { F::bytes(step, 2 * PAIR, second) };
        let one = _mm256_set1_epi16(1);
        for r in 0..R {
            let mut dots = [_mm256_setzero_si256(); 2];
            for (v, dots) in dots.iter_mut().enumerate() {
                // SAFETY: the caller's promise: two vectors of bytes of each pair.
                *dots = unsafe {
                    let x = x[r].codes.add(i * STEP + PAIR * 2 * PIECE + v * PIECE);
                    _mm256_maddubs_epi16(codes[v], _mm256_loadu_si256(x.cast()))
                };
            }
            let total = &mut totals[r][PAIR % 2];
            if F::GROUP == 32 {
                let dots = _mm256_madd_epi16(_mm256_add_epi16(dots[0], dots[1]), one);
                scale_group::<PAIR>(dots, &scales[r], total);
            } else {
                let dots = dots.map(|dots| _mm256_madd_epi16(dots, one));
                scale_halves::<PAIR>(dots, &scales[r], total);
            }
        }
    }
}

/// Adds the dot products of a pair of groups of 32, each of which has a half.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn scale_group<const PAIR: usize>(dots: __m256i, scales: &[__m256; MOST], total: &mut __m256) {
    let scale = of_each_half(scales[0], PAIR);
    *total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), scale, *total);
}

/// The same of four groups of 16: of a pair's first, then of its second.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn scale_halves<const PAIR: usize>(
    dots: [__m256i; 2],
    scales: &[__m256; MOST],
    total: &mut __m256,
) {
    for (half, dots) in dots.into_iter().enumerate() {
        let scale = of_each_half(scales[PAIR / 2], 2 * (PAIR % 2) + half);
        *total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), scale, *total);
    }
}

/// An element of each half of a vector, in all of that half.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn of_each_half(vector: __m256, element: usize) -> __m256 {
    match element {
        0 => _mm256_permute_ps::<0b00_00_00_00>(vector),
        1 => _mm256_permute_ps::<0b01_01_01_01>(vector),
        2 => _mm256_permute_ps::<0b10_10_10_10>(vector),
        _ => _mm256_permute_ps::<0b11_11_11_11>(vector),
    }
}

/// Sixteen bytes, and other sixteen.
///
/// # Safety
/// They are there, and the processor has the instructions.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn both(first: *const u8, second: *const u8) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let first = _mm256_castsi128_si256(_mm_loadu_si128(first.cast()));
        _mm256_inserti128_si256::<1>(first, _mm_loadu_si128(second.cast()))
    }
}

/// 16 bytes, twice, then those behind.
///
/// # Safety
/// They are there, and the processor has the instructions.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn twice(bytes: *const u8) -> [__m256i; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let bytes = bytes.cast::<__m128i>();
        [
            _mm256_broadcastsi128_si256(_mm_loadu_si128(bytes)),
            _mm256_broadcastsi128_si256(_mm_loadu_si128(bytes.add(1))),
        ]
    }
}

/// The low halves of bytes, or the high ones.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn halves(bytes: __m256i, high: bool) -> __m256i {
    let bytes = if high {
        _mm256_srli_epi16::<4>(bytes)
    } else {
        bytes
    };
    _mm256_and_si256(bytes, _mm256_set1_epi8(15))
}

/// 16 in each byte that has all bits of one of `bits`, and zero in others.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn sixteen_where(bytes: __m256i, bits: __m256i) -> __m256i {
    let is_set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bits), bits);
    _mm256_and_si256(is_set, _mm256_set1_epi8(16))
}

/// Words of the bytes of an even number, and of those of an odd number, of two vectors.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn words([low, high]: [__m256i; 2]) -> [__m256i; 4] {
    let even = _mm256_set1_epi16(0xff);
    [
        _mm256_and_si256(low, even),
        _mm256_srli_epi16::<8>(low),
        _mm256_and_si256(high, even),
        _mm256_srli_epi16::<8>(high),
    ]
}

/// An f16 in all lanes.
///
/// # Safety
/// It is there, and the processor has the instructions.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn f16_everywhere(at: *const u8) -> __m256 {
    // SAFETY: the caller's promise.
    _mm256_cvtph_ps(_mm_set1_epi16(unsafe { at.cast::<i16>().read_unaligned() }))
}

/// The f16 that lies at `AT` of each of up to eight blocks, in the order of factors; zeros for blocks
/// that there are not.
///
/// # Safety
/// The processor has the instructions, and so many blocks of so many bytes are there.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn f16s<const BYTES: usize, const AT: usize>(step: *const u8, blocks: usize) -> __m256 {
    let of = |block: usize| {
        if block >= blocks {
            return 0;
        }
        // SAFETY: the caller's promise.
        u64::from(unsafe { step.add(block * BYTES + AT).cast::<u16>().read_unaligned() })
    };
    // Instructions that put one at a time into a vector take longer.
    let even = of(0) | of(2) << 16 | of(4) << 32 | of(6) << 48;
    let odd = of(1) | of(3) << 16 | of(5) << 32 | of(7) << 48;
    _mm256_cvtph_ps(_mm_set_epi64x(odd.cast_signed(), even.cast_signed()))
}
