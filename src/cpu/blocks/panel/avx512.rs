//! Products by AVX-512 with VNNI, whose instruction multiplies bytes without a sign by bytes with one. Bytes of activations have
//! none: those with a sign are 128 more than they should be, for which dot products start with so much less. Codes have one: where
//! groups have no offsets of their own, the code of zero is taken away from them, and nothing is left to be added.

use std::arch::x86_64::*;

use super::pack::Words;
use super::{Bits, Group, ROWS, SHARED, Shape};

/// Adds the products of a group's codes and of one of its planes of bytes: of `WORDS` lines of both. They are
/// spelled out, since in a loop that is not unrolled dot products are kept in memory.
macro_rules! add_plane {
    ($codes:expr, $x:expr, $dots:ident, $($i:literal)*) => {$(
        if $i < WORDS {
            let mut codes = [_mm512_setzero_si512(); VECTORS];
            for (v, codes) in codes.iter_mut().enumerate() {
                *codes = _mm512_loadu_si512($codes.add($i * COLUMNS + v * LANES).cast());
            }
            for (r, dots) in $dots.iter_mut().enumerate() {
                let word = _mm512_set1_epi32($x.add($i * ROWS + r).cast::<i32>().read());
                for (dots, codes) in dots.iter_mut().zip(codes) {
                    *dots = _mm512_dpbusd_epi32(*dots, word, codes);
                }
            }
        }
    )*};
}

/// Rows of weights of a panel.
pub const COLUMNS: usize = 32;

/// Of a vector, and vectors of a line of a panel.
const LANES: usize = 16;
const VECTORS: usize = COLUMNS / LANES;

/// See [`Kernel::round`](super::Kernel::round).
///
/// # Safety
/// The processor has the instructions.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub unsafe fn round(values: &[f32; SHARED], group: usize, bits: Bits) -> Group {
    // SAFETY: two vectors of values, and 16 words.
    unsafe {
        let halves = [0, 16].map(|at| _mm512_loadu_ps(values.as_ptr().add(at)));
        // As integers, magnitudes are in the order of the numbers, and NaN is above them.
        let [a, b] = halves.map(|x| _mm512_castps_si512(_mm512_abs_ps(x)));
        let most = _mm512_reduce_max_epu32(_mm512_max_epu32(a, b));
        let limit = f32::from(bits.most());
        let scale = f32::from_bits(most) / limit;
        let codes = halves.map(|x| {
            // Without a scale that is a number there is no code, and any will do.
            let code = _mm512_div_ps(x, _mm512_set1_ps(scale));
            let code = _mm512_min_ps(code, _mm512_set1_ps(limit));
            _mm512_cvtps_epi32(_mm512_max_ps(code, _mm512_set1_ps(-limit)))
        });
        let sums = codes.map(|codes| _mm512_reduce_add_epi32(codes));
        // Bytes that have a sign are 128 more, so that they have none.
        let more = _mm_set1_epi8(i8::MIN);
        let low = codes.map(|codes| _mm512_cvtepi32_epi8(codes));
        let mut words = [0; 16];
        let order: &[__m128i] = match bits {
            Bits::Eight => &low.map(|low| _mm_xor_si128(low, more)),
            Bits::Sixteen => {
                let high = codes.map(|c| _mm512_cvtepi32_epi8(_mm512_srai_epi32::<8>(c)));
                let high = high.map(|high| _mm_xor_si128(high, more));
                match group {
                    16 => &[high[0], low[0], high[1], low[1]],
                    _ => &[high[0], high[1], low[0], low[1]],
                }
            }
        };
        for (bytes, words) in order.iter().zip(words.chunks_exact_mut(4)) {
            _mm_storeu_si128(words.as_mut_ptr().cast(), *bytes);
        }
        let sums = match group {
            16 => sums,
            _ => [sums[0] + sums[1], 0],
        };
        Group { scale, words, sums }
    }
}

/// For groups of `WORDS` times four weights, which have offsets unless they are `CENTERED`, by activations of
/// `PLANES` bytes.
///
/// # Safety
/// The processor has the instructions; `x` is a block, `panel` a panel of the shape, and there is
/// room for so many rows of sums.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub unsafe fn multiply<const WORDS: usize, const CENTERED: bool, const PLANES: usize>(
    shape: Shape,
    x: &[f32],
    panel: &[f32],
    rows: usize,
    sums: &mut [f32],
    stride: usize,
) {
    let groups = shape.groups();
    let (x, w) = (x.as_ptr(), panel.as_ptr());
    let mut totals = [[_mm512_setzero_ps(); VECTORS]; ROWS];
    // SAFETY: all lines are in the block and the panel, as their lengths say.
    unsafe {
        let x_scales = x.add(PLANES * groups * WORDS * ROWS);
        let x_sums = x_scales.add(groups * ROWS);
        let w_scales = w.add(groups * WORDS * COLUMNS);
        let w_offsets = w_scales.add(groups * COLUMNS);
        let w_starts = w_offsets.add(groups * COLUMNS);
        // Groups whose activations share a scale are scaled by it together.
        let shared = SHARED / 4 / WORDS;
        for first in (0..groups).step_by(shared) {
            let mut parts = [[_mm512_setzero_ps(); VECTORS]; ROWS];
            for g in first..first + shared {
                let mut dots = [[_mm512_setzero_si512(); VECTORS]; ROWS];
                for v in 0..VECTORS {
                    let start = w_starts.add(g * COLUMNS + v * LANES);
                    let start = _mm512_loadu_si512(start.cast());
                    dots.iter_mut().for_each(|dots| dots[v] = start);
                }
                let (codes, x) = (w.add(g * WORDS * COLUMNS), x.add(PLANES * g * WORDS * ROWS));
                add_plane!(codes, x, dots, 0 1 2 3 4 5 6 7);
                if PLANES > 1 {
                    for dots in &mut dots {
                        for dots in dots {
                            *dots = _mm512_slli_epi32::<8>(*dots);
                        }
                    }
                    let low = x.add(WORDS * ROWS);
                    add_plane!(codes, low, dots, 0 1 2 3 4 5 6 7);
                }
                for v in 0..VECTORS {
                    let at = g * COLUMNS + v * LANES;
                    let scales = _mm512_loadu_ps(w_scales.add(at));
                    let offsets = _mm512_loadu_ps(w_offsets.add(at));
                    for r in 0..ROWS {
                        let (dots, total) = (_mm512_cvtepi32_ps(dots[r][v]), &mut totals[r][v]);
                        if shared > 1 {
                            parts[r][v] = _mm512_fmadd_ps(dots, scales, parts[r][v]);
                        } else {
                            let scale = _mm512_set1_ps(*x_scales.add(g * ROWS + r));
                            *total = _mm512_fmadd_ps(dots, _mm512_mul_ps(scales, scale), *total);
                        }
                        if !CENTERED {
                            let sum = _mm512_set1_ps(*x_sums.add(g * ROWS + r));
                            *total = _mm512_fmadd_ps(offsets, sum, *total);
                        }
                    }
                }
            }
            if shared > 1 {
                for r in 0..ROWS {
                    let scale = _mm512_set1_ps(*x_scales.add(first * ROWS + r));
                    for v in 0..VECTORS {
                        totals[r][v] = _mm512_fmadd_ps(parts[r][v], scale, totals[r][v]);
                    }
                }
            }
        }
        for (r, totals) in totals.iter().enumerate().take(rows) {
            for (v, total) in totals.iter().enumerate() {
                _mm512_storeu_ps(sums.as_mut_ptr().add(r * stride + v * LANES), *total);
            }
        }
    }
}

/// Turns words of [`COLUMNS`] rows to lines, a square of 16 times 16 at a time, and has `store` write each
/// line's vectors, in order.
///
/// # Safety
/// The processor has the instructions. There are so many words, and as many as are missing to a multiple of
/// 16 may be read behind them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn place(words: Words, mut store: impl FnMut(usize, usize, __m512i)) {
    for v in 0..VECTORS {
        for first in (0..words.lines).step_by(LANES) {
            // SAFETY: the caller's promise.
            let lines = unsafe {
                let rows = words.from.add(v * LANES * words.apart + first);
                turned(std::array::from_fn(
                    #[inline(always)]
                    |i| _mm512_loadu_si512(rows.add(i * words.apart).cast()),
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

/// Words of codes, less `zero`, and the lines of what each group's dot products start with: bytes of
/// activations that have a sign are 128 more than they should be.
///
/// # Safety
/// As [`place`], and there is room for the lines.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub unsafe fn place_codes(words: Words, zero: u8, group: usize, starts: *mut f32) {
    let zero = _mm512_set1_epi8(zero.cast_signed());
    let mut sum = _mm512_setzero_si512();
    // SAFETY: the caller's promise.
    unsafe {
        place(
            words,
            #[inline(always)]
            |line, at, codes| {
                let codes = _mm512_sub_epi8(codes, zero);
                _mm512_storeu_si512(words.to.add(line * COLUMNS + at).cast(), codes);
                let (g, of_group) = (line / (group / 4), line % (group / 4));
                if of_group == 0 {
                    sum = _mm512_setzero_si512();
                }
                sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(i8::MIN), codes);
                if of_group == group / 4 - 1 {
                    let start = _mm512_sub_epi32(_mm512_setzero_si512(), sum);
                    _mm512_storeu_si512(starts.add(g * COLUMNS + at).cast(), start);
                }
            },
        );
    }
}

/// Words that lines have as they are.
///
/// # Safety
/// As [`place_codes`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub unsafe fn place_factors(words: Words) {
    // SAFETY: the caller's promise.
    unsafe {
        place(
            words,
            #[inline(always)]
            |line, at, factors| {
                _mm512_storeu_si512(words.to.add(line * COLUMNS + at).cast(), factors);
            },
        );
    }
}

/// The columns of a square of words.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn turned(rows: [__m512i; LANES]) -> [__m512i; LANES] {
    let (mut twos, mut fours, mut columns) = (rows, rows, rows);
    for i in (0..LANES).step_by(2) {
        twos[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        twos[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for i in (0..LANES).step_by(4) {
        fours[i] = _mm512_unpacklo_epi64(twos[i], twos[i + 2]);
        fours[i + 1] = _mm512_unpackhi_epi64(twos[i], twos[i + 2]);
        fours[i + 2] = _mm512_unpacklo_epi64(twos[i + 1], twos[i + 3]);
        fours[i + 3] = _mm512_unpackhi_epi64(twos[i + 1], twos[i + 3]);
    }
    // Quarter `q` of `fours[4 * i + j]` has four rows' words of column `4 * q + j`.
    for j in 0..4 {
        let even = |i: usize| _mm512_shuffle_i32x4::<0x88>(fours[i + j], fours[i + 4 + j]);
        let odd = |i: usize| _mm512_shuffle_i32x4::<0xdd>(fours[i + j], fours[i + 4 + j]);
        columns[j] = _mm512_shuffle_i32x4::<0x88>(even(0), even(8));
        columns[8 + j] = _mm512_shuffle_i32x4::<0xdd>(even(0), even(8));
        columns[4 + j] = _mm512_shuffle_i32x4::<0x88>(odd(0), odd(8));
        columns[12 + j] = _mm512_shuffle_i32x4::<0xdd>(odd(0), odd(8));
    }
    columns
}
