//! Dot products of codes of 8 bits and of weights of 8 or 2, exactly.
//!
//! Instructions multiply bytes without a sign by bytes with one, so weights are taken with what
//! makes them positive, and the sum of the other codes is subtracted so many times. Sums are of 32
//! bits and may wrap on the way: the result does not, as rows are no longer than allows.

use crate::cpu::blocks::Dot;
use crate::dtype::DType;

/// Ternary codes of a block, and its bytes.
const CODES: usize = 128;
const BYTES: usize = CODES / 4;

/// What weights lie in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// Bytes with a sign.
    I8,
    /// One more than the weight, in 2 bits: [`DType::Ternary`].
    Ternary,
}

impl Format {
    pub fn of(dtype: DType) -> Format {
        match dtype {
            DType::Ternary => Format::Ternary,
            _ => Format::I8,
        }
    }
}

/// A row of `x`.
#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    pub codes: &'a [i8],
    pub scale: f32,
    /// Of the codes.
    pub sum: i32,
}

impl Row<'_> {
    pub const EMPTY: Row<'static> = Row {
        codes: &[],
        scale: 0.0,
        sum: 0,
    };
}

/// The products of a row of weights and of some rows of codes, which are given with their sums.
pub(super) fn dots<const R: usize>(
    dot: Dot,
    format: Format,
    weights: &[u8],
    x: [(&[i8], i32); R],
) -> [i32; R] {
    let codes = match format {
        Format::I8 => weights.len(),
        Format::Ternary => weights.len() / BYTES * CODES,
    };
    assert!(x.iter().all(|(x, _)| x.len() >= codes));
    let sums = x.map(|(_, sum)| sum);
    let x = x.map(|(x, _)| &x[..codes]);
    match (dot, format) {
        (Dot::Portable, _) => portable(format, weights, x),
        // SAFETY: such a value is made where the processor has the instructions; the lengths have
        // been checked.
        #[cfg(target_arch = "x86_64")]
        (Dot::Avx2, Format::I8) => unsafe { x86::avx2_i8(weights, x) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        (Dot::Avx2, Format::Ternary) => less(unsafe { x86::avx2_ternary(weights, x) }, sums, 1),
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        (Dot::Avx512, Format::I8) => less(unsafe { x86::avx512_i8(weights, x) }, sums, 128),
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        (Dot::Avx512, Format::Ternary) => less(unsafe { x86::avx512_ternary(weights, x) }, sums, 1),
    }
}

/// Products of weights that were `more` than they are.
fn less<const R: usize>(mut dots: [i32; R], sums: [i32; R], more: i32) -> [i32; R] {
    for (dot, sum) in dots.iter_mut().zip(sums) {
        *dot = dot.wrapping_sub(sum.wrapping_mul(more));
    }
    dots
}

fn portable<const R: usize>(format: Format, weights: &[u8], x: [&[i8]; R]) -> [i32; R] {
    x.map(|x| match format {
        Format::I8 => {
            let products = weights.iter().zip(x);
            products
                .map(|(w, x)| i32::from(w.cast_signed()) * i32::from(*x))
                .sum()
        }
        Format::Ternary => {
            let blocks = weights.as_chunks::<BYTES>().0.iter();
            let blocks = blocks.zip(x.as_chunks::<CODES>().0);
            blocks
                .map(|(bytes, x)| {
                    let product = |i: usize| {
                        let code = bytes[i % BYTES] >> (2 * (i / BYTES)) & 3;
                        (i32::from(code) - 1) * i32::from(x[i])
                    };
                    (0..CODES).map(product).sum::<i32>()
                })
                .sum()
        }
    })
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{BYTES, CODES};

    /// The four codes of each byte of a block: every 32 neighbours.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn unpack(packed: __m256i) -> [__m256i; 4] {
        let three = _mm256_set1_epi8(3);
        [
            _mm256_and_si256(packed, three),
            _mm256_and_si256(_mm256_srli_epi16::<2>(packed), three),
            _mm256_and_si256(_mm256_srli_epi16::<4>(packed), three),
            _mm256_and_si256(_mm256_srli_epi16::<6>(packed), three),
        ]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn reduce(sums: __m256i) -> i32 {
        let four = _mm_add_epi32(
            _mm256_castsi256_si128(sums),
            _mm256_extracti128_si256::<1>(sums),
        );
        let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b1110>(four));
        let one = _mm_add_epi32(two, _mm_shuffle_epi32::<0b01>(two));
        _mm_cvtsi128_si32(one)
    }

    /// Of weights that are one more.
    ///
    /// # Safety
    /// The processor has the instructions. Every row has 128 codes for each 32 bytes of weights.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    pub unsafe fn avx512_ternary<const R: usize>(weights: &[u8], x: [&[i8]; R]) -> [i32; R] {
        // A sum for each of the four, so that none waits for the last.
        let mut total = [[_mm256_setzero_si256(); 4]; R];
        for block in 0..weights.len() / BYTES {
            // SAFETY: the block's bytes, and 128 codes of every row.
            unsafe {
                let packed = _mm256_loadu_si256(weights.as_ptr().add(BYTES * block).cast());
                let codes = unpack(packed);
                for (total, x) in total.iter_mut().zip(x) {
                    let x = x.as_ptr().add(CODES * block);
                    for i in 0..4 {
                        let x = _mm256_loadu_si256(x.add(BYTES * i).cast());
                        total[i] = _mm256_dpbusd_epi32(total[i], codes[i], x);
                    }
                }
            }
        }
        let mut out = [0; R];
        for (out, [a, b, c, d]) in out.iter_mut().zip(total) {
            let pairs = _mm256_add_epi32(_mm256_add_epi32(a, b), _mm256_add_epi32(c, d));
            *out = reduce(pairs);
        }
        out
    }

    /// Of weights that are 128 more.
    ///
    /// # Safety
    /// The processor has the instructions. Every row has a code for each weight.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    pub unsafe fn avx512_i8<const R: usize>(weights: &[u8], x: [&[i8]; R]) -> [i32; R] {
        let more = _mm512_set1_epi8(-128);
        let mut total = [_mm512_setzero_si512(); R];
        for start in (0..weights.len()).step_by(64) {
            let mask = u64::MAX >> (64 - (weights.len() - start).min(64));
            // SAFETY: masked loads read no byte past the weights, and none past as many codes. What
            // is past them is multiplied by zeros.
            unsafe {
                let codes = _mm512_maskz_loadu_epi8(mask, weights.as_ptr().add(start).cast());
                let codes = _mm512_xor_si512(codes, more);
                for (total, x) in total.iter_mut().zip(x) {
                    let x = _mm512_maskz_loadu_epi8(mask, x.as_ptr().add(start));
                    *total = _mm512_dpbusd_epi32(*total, codes, x);
                }
            }
        }
        total.map(
            #[inline(always)]
            |total| _mm512_reduce_add_epi32(total),
        )
    }

    /// As [`avx512_ternary`].
    ///
    /// # Safety
    /// As there.
    #[target_feature(enable = "avx2")]
    pub unsafe fn avx2_ternary<const R: usize>(weights: &[u8], x: [&[i8]; R]) -> [i32; R] {
        let ones = _mm256_set1_epi16(1);
        let mut total = [_mm256_setzero_si256(); R];
        for block in 0..weights.len() / BYTES {
            // SAFETY: the block's bytes, and 128 codes of every row. A sum of 16 bits is one of
            // eight products of up to 3 times 128, and cannot overflow.
            unsafe {
                let packed = _mm256_loadu_si256(weights.as_ptr().add(BYTES * block).cast());
                let codes = unpack(packed);
                for (total, x) in total.iter_mut().zip(x) {
                    let x = x.as_ptr().add(CODES * block);
                    let mut pairs = _mm256_setzero_si256();
                    for (i, codes) in codes.into_iter().enumerate() {
                        let x = _mm256_loadu_si256(x.add(BYTES * i).cast());
                        pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(codes, x));
                    }
                    *total = _mm256_add_epi32(*total, _mm256_madd_epi16(pairs, ones));
                }
            }
        }
        let mut out = [0; R];
        for (out, total) in out.iter_mut().zip(total) {
            *out = reduce(total);
        }
        out
    }

    /// Of the weights as they are: sums of two products of 8 bits without a sign would not fit 16.
    ///
    /// # Safety
    /// As [`avx512_i8`].
    #[target_feature(enable = "avx2")]
    pub unsafe fn avx2_i8<const R: usize>(weights: &[u8], x: [&[i8]; R]) -> [i32; R] {
        let mut total = [_mm256_setzero_si256(); R];
        let whole = weights.len() / 16 * 16;
        for start in (0..whole).step_by(16) {
            // SAFETY: 16 weights and as many codes of every row from `start` on.
            unsafe {
                let codes = _mm_loadu_si128(weights.as_ptr().add(start).cast());
                let codes = _mm256_cvtepi8_epi16(codes);
                for (total, x) in total.iter_mut().zip(x) {
                    let x = _mm_loadu_si128(x.as_ptr().add(start).cast());
                    let products = _mm256_madd_epi16(codes, _mm256_cvtepi8_epi16(x));
                    *total = _mm256_add_epi32(*total, products);
                }
            }
        }
        let mut out = [0; R];
        for ((out, total), x) in out.iter_mut().zip(total).zip(x) {
            let rest = weights[whole..].iter().zip(&x[whole..]);
            let rest = rest.map(|(w, x)| i32::from(w.cast_signed()) * i32::from(*x));
            *out = reduce(total) + rest.sum::<i32>();
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All that this processor has.
    fn every() -> Vec<Dot> {
        let mut all = vec![Dot::Portable];
        #[cfg(target_arch = "x86_64")]
        if Dot::new() != Dot::Portable {
            all.push(Dot::Avx2);
        }
        if Dot::new() != *all.last().unwrap_or(&Dot::Portable) {
            all.push(Dot::new());
        }
        all
    }

    fn weight(format: Format, weights: &[u8], i: usize) -> i64 {
        match format {
            Format::I8 => i64::from(weights[i].cast_signed()),
            Format::Ternary => {
                let byte = weights[i / CODES * BYTES + i % BYTES];
                i64::from(byte >> (2 * (i % CODES / BYTES)) & 3) - 1
            }
        }
    }

    fn check<const R: usize>(
        format: Format,
        codes: usize,
        weights: &[u8],
        x: &dyn Fn(usize) -> i8,
    ) {
        let rows: [Vec<i8>; R] =
            std::array::from_fn(|r| (0..codes).map(|i| x(i + 7 * r)).collect());
        let expected = rows.each_ref().map(|row| {
            let products = row.iter().enumerate();
            let products = products.map(|(i, x)| weight(format, weights, i) * i64::from(*x));
            products.sum::<i64>()
        });
        for dot in every() {
            let rows = rows.each_ref().map(|row| {
                let sum = row.iter().map(|x| i32::from(*x)).sum();
                (&row[..], sum)
            });
            let got = dots(dot, format, weights, rows).map(i64::from);
            assert_eq!(got, expected, "{dot:?} {format:?} {codes}");
        }
    }

    /// Every code in every place, and the greatest in all, whose sums are the greatest.
    /// Every code in every place, and the greatest in all, whose sums are the greatest.
    #[test]
    fn all_instructions_are_exact() {
        let noise = |i: usize| (i * 89 % 255) as u8 as i8;
        for format in [Format::I8, Format::Ternary] {
            for codes in [128, 256, 2560] {
                let bytes = match format {
                    Format::I8 => codes,
                    Format::Ternary => codes / 4,
                };
                for fill in [0x00, 0xff, 0x80, 0x7f] {
                    check::<1>(format, codes, &vec![fill; bytes], &|_| -127);
                    check::<1>(format, codes, &vec![fill; bytes], &|_| 127);
                }
                let mixed: Vec<u8> = (0..bytes).map(|i| ((i * 151) >> 2) as u8).collect();
                check::<3>(format, codes, &mixed, &noise);
                check::<4>(format, codes, &mixed, &noise);
            }
        }
        // The longest rows.
        check::<1>(Format::I8, 132_104, &[0x80; 132_104], &|_| -127);
        let most = vec![0xff; 8_454_656 / 4];
        check::<1>(Format::Ternary, 8_454_656, &most, &|_| 127);
        for codes in [1, 15, 17, 63, 65, 200] {
            let weights: Vec<u8> = (0..codes).map(|i| (i * 151) as u8).collect();
            check::<2>(Format::I8, codes, &weights, &noise);
        }
        for dot in every() {
            assert_eq!(dots(dot, Format::I8, &[], [(&[][..], 0)]), [0]);
        }
    }
}
