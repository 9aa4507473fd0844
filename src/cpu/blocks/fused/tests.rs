//! Kernels against the chunks of any processor.

use half::f16;

use super::*;
use crate::cpu::blocks::{CHUNK, Chunk, Row, dot, group, with_format};

/// Numbers that only look random.
pub fn noise(seed: usize, i: usize) -> u32 {
    let x = (i as u32).wrapping_mul(0x9e37_79b9) ^ (seed as u32).wrapping_mul(0x85eb_ca6b);
    (x ^ x >> 15).wrapping_mul(0xc2b2_ae35) >> 8
}

/// Blocks of any codes, or of those with all bits set, with factors near one. There is nothing
/// behind them.
pub fn blocks(dtype: DType, weights: usize, seed: usize, all_bits: bool) -> Box<[u8]> {
    let (len, bytes) = dtype.block();
    let mut all: Vec<u8> = (0..weights / len * bytes)
        .map(|i| if all_bits { 255 } else { noise(seed, i) as u8 })
        .collect();
    let factors: &[usize] = match dtype {
        DType::Q4_1 | DType::Q5_1 | DType::Q4K | DType::Q5K => &[0, 2],
        DType::Q6K => &[208],
        DType::Tq1_0 => &[52],
        DType::Tq2_0 => &[64],
        _ => &[0],
    };
    for (i, block) in all.chunks_exact_mut(bytes).enumerate() {
        for at in factors {
            let factor = noise(seed + at, i) as f32 / (1 << 23) as f32 - 1.0;
            block[*at..at + 2].copy_from_slice(&f16::from_f32(factor).to_le_bytes());
        }
    }
    all.into()
}

/// All that this processor has.
fn every() -> impl Iterator<Item = Kernel> {
    let of = |dot| {
        let of_bits = move |bits| {
            let of_dtype = move |dtype| Kernel::new(dot, dtype, bits);
            DType::BLOCKS.into_iter().filter_map(of_dtype)
        };
        [Bits::Sixteen, Bits::Eight].into_iter().flat_map(of_bits)
    };
    dot::tests::every().into_iter().flat_map(of)
}

/// A row of activations, in words and in a kernel's form.
struct Rounded {
    words: Vec<i16>,
    scales: Vec<f32>,
    sums: Vec<f32>,
    /// Codes in that form.
    bytes: Vec<i8>,
    /// Scales and sums in that form.
    factors: [Vec<f32>; 2],
}

impl Rounded {
    fn new(form: Form, len: usize, group: usize, seed: usize, extreme: bool) -> Rounded {
        let most = form.bits().most();
        let code = |i| match (extreme, noise(seed, i) as i16) {
            (true, code) if code % 8 == 0 => most,
            (true, _) => -most,
            (false, code) if form == Form::Bytes => i16::from(code as i8).max(-most),
            (false, code) => code.clamp(-most, most),
        };
        let words: Vec<i16> = (0..len).map(code).collect();
        let scales: Vec<f32> = (0..len / group)
            .map(|i| noise(seed + 1, i) as f32 / 1e5 - 80.0)
            .collect();
        let sum = |(codes, scale): (&[i16], &f32)| {
            scale * codes.iter().map(|code| i32::from(*code)).sum::<i32>() as f32
        };
        let sums: Vec<f32> = words.chunks(group).zip(&scales).map(sum).collect();

        let (codes, of_each) = form.lengths(len, group);
        let mut bytes = vec![0; form.bytes(codes)];
        let mut in_form = [vec![0.0; of_each], vec![0.0; of_each]];
        for (i, word) in words.iter().enumerate() {
            let at = form.place(i);
            if matches!(form, Form::Words | Form::Pairs) {
                let word = word.to_ne_bytes().map(u8::cast_signed);
                bytes[2 * at..2 * at + 2].copy_from_slice(&word);
                continue;
            }
            let low = *word as i8;
            if form == Form::Bytes {
                bytes[at] = low;
                continue;
            }
            bytes[codes + at] = low;
            bytes[at] = ((i32::from(*word) - i32::from(low)) / 256) as i8;
        }
        for (i, (scale, sum)) in scales.iter().zip(&sums).enumerate() {
            let parts: &[f32] = match form {
                Form::Split => &[0.5, 0.0, 0.25, 0.25],
                Form::Eights | Form::Fourths => &[0.75, 0.25],
                _ => &[1.0],
            };
            let at = form.place_of_group(i, group) * parts.len();
            for (j, part) in parts.iter().enumerate() {
                in_form[0][at + j] = *scale;
                in_form[1][at + j] = part * sum;
            }
        }
        Rounded {
            words,
            scales,
            sums,
            bytes,
            factors: in_form,
        }
    }

    fn codes(&self) -> Codes<'_> {
        Codes {
            bytes: &self.bytes,
            scales: &self.factors[0],
            sums: &self.factors[1],
        }
    }

    /// The product with blocks, and the sum of the magnitudes of what is added.
    fn product(&self, dtype: DType, blocks: &[u8]) -> (f64, f64) {
        let group = group(dtype);
        let row = Row {
            codes: &self.words,
            scales: &self.scales,
            sums: &self.sums,
        };
        let (mut chunk, mut sum, mut most) = (Chunk::new(), 0.0, 0.0);
        let (len, bytes) = dtype.block();
        for (i, blocks) in blocks.chunks(dtype.row_bytes(CHUNK)).enumerate() {
            let here = i * CHUNK..i * CHUNK + blocks.len() / bytes * len;
            with_format!(dtype, F => chunk.unpack::<F>(blocks));
            let mut products = [0.0];
            let part = row.part(here.clone(), group);
            Dot::Portable.add(&chunk, (here.len(), group), [part], &mut products);
            sum += f64::from(products[0]);
            for (i, (code, x)) in chunk.codes[..here.len()].iter().zip(part.codes).enumerate() {
                let scale = chunk.scales[i / group] * part.scales[i / group];
                most += (f64::from(scale) * f64::from(*code) * f64::from(*x)).abs();
            }
            for (offset, sum) in chunk.offsets.iter().zip(part.sums).take(here.len() / group) {
                most += f64::from(offset * sum).abs();
            }
        }
        (sum, most)
    }
}

fn check<const R: usize>(kernel: Kernel, depth: usize, extreme: bool) {
    let dtype = kernel.dtype;
    let group = group(dtype);
    let x: [Rounded; R] =
        std::array::from_fn(|r| Rounded::new(kernel.form(), depth, group, 50 * r, extreme));
    let rows: [_; COLUMNS] = std::array::from_fn(|c| blocks(dtype, depth, 7 + c, extreme));
    let together = rows.concat();
    let expected = x
        .each_ref()
        .map(|x| rows.each_ref().map(|row| x.product(dtype, row)));
    for columns in [1, 2, 3, 4, 5, COLUMNS - 1, COLUMNS] {
        let products = kernel.products(
            some(&together, rows[0].len(), columns),
            x.each_ref().map(Rounded::codes),
        );
        for (products, expected) in products.iter().zip(&expected) {
            for (product, (expected, most)) in products.iter().zip(expected).take(columns) {
                let error = (f64::from(*product) - expected).abs();
                assert!(
                    error <= 2e-6 * most,
                    "{dtype} {depth}: {product}, not {expected}"
                );
            }
        }
    }
}

/// The first rows of some that lie one behind the other.
fn some(rows: &[u8], len: usize, count: usize) -> Rows<'_> {
    assert!(count * len <= rows.len());
    // SAFETY: they are there.
    unsafe { Rows::new(&rows[..len], len, count) }
}

#[test]
fn kernels_agree_with_chunks() {
    for kernel in every() {
        let dtype = kernel.dtype;
        // One block; on both sides of a vector, and of a step; more than a chunk, be it of short blocks or of long.
        let numbers = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 18, 31, 32, 33, 48, 65];
        let is_more = |blocks: usize| (blocks - 1) * dtype.block().0 > CHUNK;
        for blocks in numbers.into_iter().filter(|blocks| !is_more(*blocks)) {
            for extreme in [false, true] {
                let depth = blocks * dtype.block().0;
                check::<1>(kernel, depth, extreme);
                check::<4>(kernel, depth, extreme);
            }
        }
    }
}

/// A row's product has the same bits whatever stands beside it: rows of activations, rows of weights, or both.
#[test]
fn neighbours_change_nothing() {
    for kernel in every() {
        for number in [3, 4, 7, 18] {
            let dtype = kernel.dtype;
            let depth = number * dtype.block().0;
            let rounded =
                |r: usize| Rounded::new(kernel.form(), depth, group(dtype), 50 * r, false);
            let x = [0, 1, 2, 3].map(rounded);
            let rows = [0, 1, 2, 3].map(|c| blocks(dtype, depth, 7 + c, false));
            let together = rows.concat();
            let together = some(&together, rows[0].len(), rows.len());
            let all = kernel.products(together, x.each_ref().map(Rounded::codes));
            for (x, of_row) in x.iter().zip(all) {
                let [one] = kernel.products(together, [x.codes()]);
                for ((row, product), one) in rows.iter().zip(of_row).zip(one) {
                    let [alone] = kernel.products(some(row, row.len(), 1), [x.codes()]);
                    assert_eq!(alone[0].to_bits(), product.to_bits(), "{dtype} {number}");
                    assert_eq!(alone[0].to_bits(), one.to_bits(), "{dtype} {number}");
                }
            }
        }
    }
}
