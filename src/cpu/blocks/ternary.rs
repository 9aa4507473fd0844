//! GGUF's ternary formats and its format of two bits: codes of -1 to 1, or 2, times a block's
//! scale.

use super::CHUNK;
use super::bytes::{BYTES, Bytes, sixteen};
use super::formats::{Format, centered, halves};
use crate::dtype::DType;

/// The f16 at `AT` of each block for all of its `PER_BLOCK` groups, and -1 times it for their
/// offsets.
#[inline(always)]
fn one_scale<const N: usize, const AT: usize, const PER_BLOCK: usize>(
    blocks: &[[u8; N]],
    scales: &mut [f32],
    offsets: &mut [f32],
) {
    const MOST: usize = CHUNK / 64;
    let mut of_blocks = [0.0; MOST];
    halves::<N, AT>(blocks, &mut of_blocks);
    let (groups, _) = scales.as_chunks_mut::<PER_BLOCK>();
    for (groups, scale) in groups.iter_mut().zip(of_blocks) {
        groups.fill(scale);
    }
    centered(scales, offsets, 1.0);
}

/// 256 codes of 2 bits, f16 scale. In each half of 128, code `i` is in byte `i % 32`, at bit
/// `2 (i / 32)`.
pub(crate) struct Tq2_0;

impl Format for Tq2_0 {
    const DTYPE: DType = DType::Tq2_0;
    const BITS: u32 = 2;
    const ZERO: Option<u8> = Some(1);

    #[inline(always)]
    fn unpack(blocks: &[u8], codes: &mut [u8], scales: &mut [f32], offsets: &mut [f32]) {
        let (blocks, _) = blocks.as_chunks::<66>();
        one_scale::<66, 64, 8>(blocks, scales, offsets);
        let (codes, _) = codes.as_chunks_mut::<BYTES>();
        let (codes, _) = codes.as_chunks_mut::<16>();
        for (block, codes) in blocks.iter().zip(codes) {
            for (half, codes) in codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                for part in 0..2 {
                    let packed = sixteen(block, 32 * half + BYTES * part);
                    for quarter in 0..4 {
                        let shifted = packed.shift(-2 * quarter as i32);
                        shifted.and(3).store(&mut codes[2 * quarter + part]);
                    }
                }
            }
        }
    }
}

/// 240 codes, five in a byte, 16 codes, four in a byte, f16 scale. Neighbouring bytes have
/// neighbouring codes: 32 bytes the first 160, 16 bytes the next 80, 4 bytes what is left.
pub(crate) struct Tq1_0;

impl Format for Tq1_0 {
    const DTYPE: DType = DType::Tq1_0;
    const BITS: u32 = 2;
    const ZERO: Option<u8> = Some(1);

    #[inline(always)]
    fn unpack(blocks: &[u8], codes: &mut [u8], scales: &mut [f32], offsets: &mut [f32]) {
        let (blocks, _) = blocks.as_chunks::<54>();
        one_scale::<54, 52, 8>(blocks, scales, offsets);
        const POWERS: [u16; 5] = [1, 3, 9, 27, 81];
        let (codes, _) = codes.as_chunks_mut::<BYTES>();
        let (codes, _) = codes.as_chunks_mut::<16>();
        for (block, codes) in blocks.iter().zip(codes) {
            let bytes = [0, 16, 32].map(|at| sixteen(block, at));
            for (n, power) in POWERS.into_iter().enumerate() {
                let digits = bytes.map(|bytes| bytes.digits([power; BYTES / 2]));
                digits[0].store(&mut codes[2 * n]);
                digits[1].store(&mut codes[2 * n + 1]);
                digits[2].store(&mut codes[10 + n]);
            }
            // The last four bytes have four digits each, which are neighbours.
            let last = [block[48], block[49], block[50], block[51]];
            let mut four = [0; BYTES];
            four.as_chunks_mut::<4>().0.fill(last);
            let digits = Bytes::of(&four).digits([1, 1, 3, 3, 9, 9, 27, 27]);
            digits.store(&mut codes[15]);
        }
    }
}

/// f16 scale, 64 codes of 2 bits, neighbours in a byte.
pub(crate) struct Q2_0;

impl Format for Q2_0 {
    const DTYPE: DType = DType::Q2_0;
    const BITS: u32 = 2;
    const ZERO: Option<u8> = Some(1);

    #[inline(always)]
    fn unpack(blocks: &[u8], codes: &mut [u8], scales: &mut [f32], offsets: &mut [f32]) {
        let (blocks, _) = blocks.as_chunks::<18>();
        one_scale::<18, 0, 2>(blocks, scales, offsets);
        let (codes, _) = codes.as_chunks_mut::<4>();
        let (codes, _) = codes.as_chunks_mut::<16>();
        for (block, codes) in blocks.iter().zip(codes) {
            for (packed, codes) in block[2..].iter().zip(codes) {
                let packed = u32::from(*packed);
                let nibbles = (packed | packed << 12) & 0x000f_000f;
                *codes = ((nibbles | nibbles << 6) & 0x0303_0303).to_le_bytes();
            }
        }
    }
}
