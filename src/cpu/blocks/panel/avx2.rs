//! Products by AVX2: words are two codes of 16 bits, whose products an instruction adds; or four of 8 bits, of which an
//! instruction multiplies those without a sign by those with one, and adds two products to a number of 16 bits.

use std::arch::x86_64::*;

use super::pack::Words;
use super::{Bits, Group, ROWS, SHARED, Shape};
use crate::cpu::blocks::activations::round_together;

/// Rows of weights of a panel.
pub const COLUMNS: usize = 16;

/// Of a vector, and vectors of a line of a panel.
const LANES: usize = 8;
const VECTORS: usize = COLUMNS / LANES;

/// See [`Kernel::round`](super::Kernel::round).
#[inline(always)]
pub fn round(values: &[f32; SHARED], group: usize, bits: Bits) -> Group {
    let mut codes = [0; SHARED];
    let scale = round_together(values, bits, &mut codes);
    let (mut words, mut sums) = ([0; SHARED / 2], [0; 2]);
    match bits {
        Bits::Sixteen => {
            for (word, [low, high]) in words.iter_mut().zip(codes.as_chunks().0) {
                *word = u32::from(low.cast_unsigned()) | u32::from(high.cast_unsigned()) << 16;
            }
        }
        Bits::Eight => {
            for (word, codes) in words.iter_mut().zip(codes.as_chunks::<4>().0) {
                *word = u32::from_le_bytes(codes.map(|code| code as u8));
            }
        }
    }
    for (sum, codes) in sums.iter_mut().zip(codes.chunks_exact(group)) {
        *sum = codes.iter().map(|code| i32::from(*code)).sum();
    }
    Group { scale, words, sums }
}

/// How many lines a group has is no constant: the compiler would unroll the loop over them and add
/// in another order, for which it has too few registers.
///
/// # Safety
/// The processor has the instructions; `x` is a block, `panel` a panel of the shape, and there is
/// room for so many rows of sums.
#[target_feature(enable = "avx2,fma")]
pub unsafe fn multiply(
    shape: Shape,
    x: &[f32],
    panel: &[f32],
    rows: usize,
    sums: &mut [f32],
    stride: usize,
) {
    let (groups, words) = (shape.groups(), shape.group / 2);
    let (x, w) = (x.as_ptr(), panel.as_ptr());
    let mut totals = [[_mm256_setzero_ps(); VECTORS]; ROWS];
    // SAFETY: all lines are in the block and the panel, as their lengths say.
    unsafe {
        let (x_scales, w_scales) = (
            x.add(groups * words * ROWS),
            w.add(groups * words * COLUMNS),
        );
        let (x_sums, w_offsets) = (x_scales.add(groups * ROWS), w_scales.add(groups * COLUMNS));
        for g in 0..groups {
            let mut dots = [[_mm256_setzero_si256(); VECTORS]; ROWS];
            let (codes, x) = (w.add(g * words * COLUMNS), x.add(g * words * ROWS));
            for i in 0..words {
                let codes = codes.add(i * COLUMNS).cast();
                let codes = [_mm256_loadu_si256(codes), _mm256_loadu_si256(codes.add(1))];
                for (r, dots) in dots.iter_mut().enumerate() {
                    let word = _mm256_set1_epi32(x.add(i * ROWS + r).cast::<i32>().read());
                    for (dots, codes) in dots.iter_mut().zip(codes) {
                        *dots = _mm256_add_epi32(*dots, _mm256_madd_epi16(codes, word));
                    }
                }
            }
            let factors = [w_scales, w_offsets].map(|at| at.add(g * COLUMNS));
            let of_x = [x_scales, x_sums].map(|at| at.add(g * ROWS));
            add_group(&dots, factors, of_x, &mut totals);
        }
        store(&totals, rows, sums, stride);
    }
}

/// Sums of products, of rows by vectors of columns.
type Sums<T> = [[T; VECTORS]; ROWS];

/// Adds a group's dot products times scales, and its offsets times sums of codes.
///
/// # Safety
/// The processor has the instructions; there are the lines of scales and offsets, and of `x`'s scales and sums.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn add_group(
    dots: &Sums<__m256i>,
    [scales, offsets]: [*const f32; 2],
    [x_scales, x_sums]: [*const f32; 2],
    totals: &mut Sums<__m256>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        for v in 0..VECTORS {
            let scales = _mm256_loadu_ps(scales.add(v * LANES));
            let offsets = _mm256_loadu_ps(offsets.add(v * LANES));
            for r in 0..ROWS {
                let scale = _mm256_mul_ps(scales, _mm256_set1_ps(*x_scales.add(r)));
                let sum = _mm256_set1_ps(*x_sums.add(r));
                let dots = _mm256_cvtepi32_ps(dots[r][v]);
                let total = _mm256_fmadd_ps(dots, scale, totals[r][v]);
                totals[r][v] = _mm256_fmadd_ps(offsets, sum, total);
            }
        }
    }
}

/// Stores the sums of so many rows.
///
/// # Safety
/// The processor has the instructions, and there is room.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn store(totals: &Sums<__m256>, rows: usize, sums: &mut [f32], stride: usize) {
    for (r, totals) in totals.iter().enumerate().take(rows) {
        for (v, total) in totals.iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { _mm256_storeu_ps(sums.as_mut_ptr().add(r * stride + v * LANES), *total) };
        }
    }
}

/// As [`multiply`], for activations of 8 bits. Products are summed in numbers of 16 bits first, of as much of a group as
/// these have room for: it has so many parts.
///
/// # Safety
/// As [`multiply`], and no sum is more than 32767.
#[target_feature(enable = "avx2,fma")]
pub unsafe fn multiply_bytes<const PARTS: usize>(
    shape: Shape,
    x: &[f32],
    panel: &[f32],
    rows: usize,
    sums: &mut [f32],
    stride: usize,
) {
    let (groups, words) = (shape.groups(), shape.group / 4);
    // No constant, see above.
    let lines = words / PARTS;
    let (x, w) = (x.as_ptr(), panel.as_ptr());
    let mut totals = [[_mm256_setzero_ps(); VECTORS]; ROWS];
    // SAFETY: all lines are in the block and the panel, as their lengths say.
    unsafe {
        let (x_scales, w_scales) = (
            x.add(groups * words * ROWS),
            w.add(groups * words * COLUMNS),
        );
        let (x_sums, w_offsets) = (x_scales.add(groups * ROWS), w_scales.add(groups * COLUMNS));
        for g in 0..groups {
            let mut dots = [[_mm256_setzero_si256(); VECTORS]; ROWS];
            for part in 0..PARTS {
                let mut pairs = [[_mm256_setzero_si256(); VECTORS]; ROWS];
                let first = g * words + part * lines;
                let (codes, x) = (w.add(first * COLUMNS), x.add(first * ROWS));
                for i in 0..lines {
                    let codes = codes.add(i * COLUMNS).cast();
                    let codes = [_mm256_loadu_si256(codes), _mm256_loadu_si256(codes.add(1))];
                    for (r, pairs) in pairs.iter_mut().enumerate() {
                        let word = _mm256_set1_epi32(x.add(i * ROWS + r).cast::<i32>().read());
                        for (pairs, codes) in pairs.iter_mut().zip(codes) {
                            *pairs = _mm256_add_epi16(*pairs, _mm256_maddubs_epi16(codes, word));
                        }
                    }
                }
                for (dots, pairs) in dots.iter_mut().zip(pairs) {
                    for (dots, pairs) in dots.iter_mut().zip(pairs) {
                        let fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
                        *dots = _mm256_add_epi32(*dots, fours);
                    }
                }
            }
            let factors = [w_scales, w_offsets].map(|at| at.add(g * COLUMNS));
            let of_x = [x_scales, x_sums].map(|at| at.add(g * ROWS));
            add_group(&dots, factors, of_x, &mut totals);
        }
        store(&totals, rows, sums, stride);
    }
}

/// Turns words of [`COLUMNS`] rows to lines, a square of 8 times 8 at a time, and has `store` write each, which is
/// told where its vector would be if it were a line of a panel.
///
/// # Safety
/// The processor has the instructions. There are so many words, which are a multiple of 8 or as many as are
/// missing to one may be read behind them.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn place(words: Words, store: impl Fn(usize, usize, __m256i)) {
    for first in (0..words.lines).step_by(LANES) {
        for v in 0..VECTORS {
            // SAFETY: the caller's promise.
            let lines = unsafe {
                let rows = words.from.add(v * LANES * words.apart + first);
                turned(std::array::from_fn(
                    #[inline(always)]
                    |i| _mm256_loadu_si256(rows.add(i * words.apart).cast()),
                ))
            };
            for (i, line) in lines.into_iter().enumerate() {
                if first + i < words.lines {
                    store(first + i, v * LANES, line);
                }
            }
        }
    }
}

/// Words of four codes, which become two lines of words of two.
///
/// # Safety
/// As [`place`], and there is room for the lines.
#[target_feature(enable = "avx2,fma")]
pub unsafe fn place_codes(words: Words) {
    // SAFETY: the caller's promise.
    unsafe {
        place(
            words,
            #[inline(always)]
            |line, at, four| {
                let first = _mm256_set1_epi64x(0x8005_8004_8001_8000_u64.cast_signed());
                let high = _mm256_set_epi64x(0x0808_0808_0808_0808, 0, 0x0808_0808_0808_0808, 0);
                let first = _mm256_add_epi8(first, high);
                let second = _mm256_add_epi8(first, _mm256_set1_epi8(2));
                let to = words.to.add(2 * line * COLUMNS + at);
                _mm256_storeu_si256(to.cast(), _mm256_shuffle_epi8(four, first));
                let to = to.add(COLUMNS);
                _mm256_storeu_si256(to.cast(), _mm256_shuffle_epi8(four, second));
            },
        );
    }
}

/// Words that lines have as they are.
///
/// # Safety
/// As [`place_codes`].
#[target_feature(enable = "avx2,fma")]
pub unsafe fn place_factors(words: Words) {
    // SAFETY: the caller's promise.
    unsafe {
        place(
            words,
            #[inline(always)]
            |line, at, factors| {
                _mm256_storeu_si256(words.to.add(line * COLUMNS + at).cast(), factors);
            },
        );
    }
}

/// The columns of a square of words.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn turned(rows: [__m256i; LANES]) -> [__m256i; LANES] {
    let (mut twos, mut fours, mut columns) = (rows, rows, rows);
    for i in (0..LANES).step_by(2) {
        twos[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
        twos[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for i in (0..LANES).step_by(4) {
        fours[i] = _mm256_unpacklo_epi64(twos[i], twos[i + 2]);
        fours[i + 1] = _mm256_unpackhi_epi64(twos[i], twos[i + 2]);
        fours[i + 2] = _mm256_unpacklo_epi64(twos[i + 1], twos[i + 3]);
        fours[i + 3] = _mm256_unpackhi_epi64(twos[i + 1], twos[i + 3]);
    }
    // Half `h` of `fours[4 * i + j]` has four rows' words of column `4 * h + j`.
    for j in 0..4 {
        columns[j] = _mm256_permute2x128_si256::<0x20>(fours[j], fours[4 + j]);
        columns[4 + j] = _mm256_permute2x128_si256::<0x31>(fours[j], fours[4 + j]);
    }
    columns
}
