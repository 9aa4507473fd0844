//! GGUF's formats: what lies where in a block.

use half::f16;

use super::CHUNK;
use super::bytes::{BYTES, Bytes, sixteen};
use crate::cpu::float::widen;
use crate::dtype::DType;

/// A format of blocks.
pub(crate) trait Format {
    const DTYPE: DType;

    /// Neighbours that share a scale.
    const GROUP: usize = 32;

    /// Of a code.
    const BITS: u32;

    /// The code that stands for zero in all groups; each offset is then minus so many times its group's scale.
    const ZERO: Option<u8> = None;

    /// Unpacks whole blocks, no more than [`CHUNK`] weights: a code for each, a scale and an offset
    /// for each group of them.
    fn unpack(blocks: &[u8], codes: &mut [u8], scales: &mut [f32], offsets: &mut [f32]);
}

/// The f16 that lie at `AT` of blocks, widened one by one: an instruction that widens eight would first need them side
/// by side in memory, and panels ask for one to eight at a time.
#[inline(always)]
pub(super) fn halves<const BYTES: usize, const AT: usize>(blocks: &[[u8; BYTES]], out: &mut [f32]) {
    for (out, block) in out.iter_mut().zip(blocks) {
        *out = widen(f16::from_le_bytes([block[AT], block[AT + 1]]));
    }
}

/// Offsets that are the same multiple of each scale: exact, as is what they are added to.
#[inline(always)]
pub(super) fn centered(scales: &[f32], offsets: &mut [f32], zero: f32) {
    for (offset, scale) in offsets.iter_mut().zip(scales) {
        *offset = -zero * scale;
    }
}

/// The 16 bytes from `AT` have the low halves of codes 0 to 15, and the high ones of 16 to 31.
#[inline(always)]
fn nibbles<const N: usize, const AT: usize>(blocks: &[[u8; N]], codes: &mut [u8]) {
    let (codes, _) = codes.as_chunks_mut::<BYTES>();
    let (codes, _) = codes.as_chunks_mut::<2>();
    for (block, [low, high]) in blocks.iter().zip(codes) {
        let pairs = sixteen(block, AT);
        pairs.and(15).store(low);
        pairs.shift(-4).and(15).store(high);
    }
}

/// Bit `i` of the four bytes from `AT` is the fifth of code `i`.
#[inline(always)]
fn fifth_bits<const N: usize, const AT: usize>(blocks: &[[u8; N]], codes: &mut [u8]) {
    const EACH: u64 = u64::MAX / 255;
    let (codes, _) = codes.as_chunks_mut::<8>();
    let (codes, _) = codes.as_chunks_mut::<4>();
    for (block, codes) in blocks.iter().zip(codes) {
        for (i, codes) in codes.iter_mut().enumerate() {
            // Bit `j` alone in byte `j`; then the highest bit where there was one.
            let alone = (EACH * u64::from(block[AT + i])) & 0x8040_2010_0804_0201;
            let bits = ((alone + EACH * 0x7f) >> 3) & (EACH * 16);
            *codes = (u64::from_le_bytes(*codes) | bits).to_le_bytes();
        }
    }
}

/// f16 scale, 32 signed bytes.
pub(crate) struct Q8_0;

impl Format for Q8_0 {
    const DTYPE: DType = DType::Q8_0;
    const BITS: u32 = 8;
    const ZERO: Option<u8> = Some(128);

    #[inline(always)]
    fn unpack(blocks: &[u8], codes: &mut [u8], scales: &mut [f32], offsets: &mut [f32]) {
        let (blocks, _) = blocks.as_chunks::<34>();
        halves::<34, 0>(blocks, scales);
        centered(scales, offsets, 128.0);
        let (codes, _) = codes.as_chunks_mut::<BYTES>();
        let (codes, _) = codes.as_chunks_mut::<2>();
        for (block, [first, second]) in blocks.iter().zip(codes) {
            // 128 more.
            sixteen(block, 2).xor(0x80).store(first);
            sixteen(block, 18).xor(0x80).store(second);
        }
    }
}

/// f16 scale, 32 codes of 4 bits.
pub(crate) struct Q4_0;

impl Format for Q4_0 {
    const DTYPE: DType = DType::Q4_0;
    const BITS: u32 = 4;
    const ZERO: Option<u8> = Some(8);

    #[inline(always)]
    fn unpack(blocks: &[u8], codes: &mut [u8], scales: &mut [f32], offsets: &mut [f32]) {
        let (blocks, _) = blocks.as_chunks::<18>();
        halves::<18, 0>(blocks, scales);
        centered(scales, offsets, 8.0);
        nibbles::<18, 2>(blocks, codes);
    }
}

/// f16 scale, f16 offset, 32 codes of 4 bits.
pub(crate) struct Q4_1;

impl Format for Q4_1 {
    const DTYPE: DType = DType::Q4_1;
    const BITS: u32 = 4;

    #[inline(always)]
    fn unpack(blocks: &[u8], codes: &mut [u8], scales: &mut [f32], offsets: &mut [f32]) {
        let (blocks, _) = blocks.as_chunks::<20>();
        halves::<20, 0>(blocks, scales);
        halves::<20, 2>(blocks, offsets);
        nibbles::<20, 4>(blocks, codes);
    }
}

/// f16 scale, 32 fifth bits, 32 codes of 4 bits.
pub(crate) struct Q5_0;

impl Format for Q5_0 {
    const DTYPE: DType = DType::Q5_0;
    const BITS: u32 = 5;
    const ZERO: Option<u8> = Some(16);

    #[inline(always)]
    fn unpack(blocks: &[u8], codes: &mut [u8], scales: &mut [f32], offsets: &mut [f32]) {
        let (blocks, _) = blocks.as_chunks::<22>();
        halves::<22, 0>(blocks, scales);
        centered(scales, offsets, 16.0);
        nibbles::<22, 6>(blocks, codes);
        fifth_bits::<22, 2>(blocks, codes);
    }
}

/// f16 scale, f16 offset, 32 fifth bits, 32 codes of 4 bits.
pub(crate) struct Q5_1;

impl Format for Q5_1 {
    const DTYPE: DType = DType::Q5_1;
    const BITS: u32 = 5;

    #[inline(always)]
    fn unpack(blocks: &[u8], codes: &mut [u8], scales: &mut [f32], offsets: &mut [f32]) {
        let (blocks, _) = blocks.as_chunks::<24>();
        halves::<24, 0>(blocks, scales);
        halves::<24, 2>(blocks, offsets);
        nibbles::<24, 8>(blocks, codes);
        fifth_bits::<24, 4>(blocks, codes);
    }
}

/// Eight scales and eight offsets of 6 bits in 12 bytes, times the block's two f16. The first four of
/// each are the low six bits of bytes 0 to 3 and 4 to 7; the last four have their low halves in
/// bytes 8 to 11, and what is left above the first.
#[inline(always)]
fn scales_of_scales<const BYTES: usize>(
    blocks: &[[u8; BYTES]],
    scales: &mut [f32],
    offsets: &mut [f32],
) {
    const MOST: usize = CHUNK / 256;
    let (mut scale, mut offset) = ([0.0; MOST], [0.0; MOST]);
    halves::<BYTES, 0>(blocks, &mut scale);
    halves::<BYTES, 2>(blocks, &mut offset);
    let (scales, _) = scales.as_chunks_mut::<8>();
    let (offsets, _) = offsets.as_chunks_mut::<8>();
    let factors = scale.into_iter().zip(offset);
    for (((block, scales), offsets), (scale, offset)) in
        blocks.iter().zip(scales).zip(offsets).zip(factors)
    {
        let packed = |i: usize| block[4 + i];
        for i in 0..4 {
            scales[i] = scale * f32::from(packed(i) & 63);
            offsets[i] = -offset * f32::from(packed(4 + i) & 63);
            let (low, high) = (packed(8 + i) & 15, packed(8 + i) >> 4);
            scales[4 + i] = scale * f32::from(low | (packed(i) >> 6) << 4);
            offsets[4 + i] = -offset * f32::from(high | (packed(4 + i) >> 6) << 4);
        }
    }
}

/// Four times 32 bytes from `AT`, whose low halves are the codes of a group and whose high halves are
/// those of the next.
#[inline(always)]
fn halves_of_groups<const N: usize, const AT: usize>(blocks: &[[u8; N]], codes: &mut [u8]) {
    let (codes, _) = codes.as_chunks_mut::<BYTES>();
    let (codes, _) = codes.as_chunks_mut::<16>();
    for (block, codes) in blocks.iter().zip(codes) {
        for (pair, codes) in codes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            for part in 0..2 {
                let pairs = sixteen(block, AT + 32 * pair + BYTES * part);
                pairs.and(15).store(&mut codes[part]);
                pairs.shift(-4).and(15).store(&mut codes[2 + part]);
            }
        }
    }
}

/// f16 factors of scales and of offsets, 12 bytes of these, 256 codes of 4 bits.
pub(crate) struct Q4K;

impl Format for Q4K {
    const DTYPE: DType = DType::Q4K;
    const BITS: u32 = 4;

    #[inline(always)]
    fn unpack(blocks: &[u8], codes: &mut [u8], scales: &mut [f32], offsets: &mut [f32]) {
        let (blocks, _) = blocks.as_chunks::<144>();
        scales_of_scales(blocks, scales, offsets);
        halves_of_groups::<144, 16>(blocks, codes);
    }
}

/// As Q4_K; bit `g` of the 32 bytes behind the scales is the fifth of the codes of group `g`.
pub(crate) struct Q5K;

impl Format for Q5K {
    const DTYPE: DType = DType::Q5K;
    const BITS: u32 = 5;

    #[inline(always)]
    fn unpack(blocks: &[u8], codes: &mut [u8], scales: &mut [f32], offsets: &mut [f32]) {
        let (blocks, _) = blocks.as_chunks::<176>();
        scales_of_scales(blocks, scales, offsets);
        halves_of_groups::<176, 48>(blocks, codes);
        let (codes, _) = codes.as_chunks_mut::<BYTES>();
        let (codes, _) = codes.as_chunks_mut::<16>();
        for (block, codes) in blocks.iter().zip(codes) {
            for (i, codes) in codes.iter_mut().enumerate() {
                let fifth = sixteen(block, 16 + i % 2 * BYTES).shift(4 - i as i32 / 2);
                Bytes::of(codes).or(fifth.and(16)).store(codes);
            }
        }
    }
}

/// 256 times 4 low and 2 high bits of codes, 16 signed scales of 8 bits, their f16 factor. In each
/// half of 128, the low bits of code `i` are in byte `i % 64`, above those of 64 less from 64 on; the
/// high ones are in byte `i % 32`, at bit `2 (i / 32)`.
pub(crate) struct Q6K;

impl Format for Q6K {
    const DTYPE: DType = DType::Q6K;
    const BITS: u32 = 6;
    const GROUP: usize = 16;
    const ZERO: Option<u8> = Some(32);

    #[inline(always)]
    fn unpack(blocks: &[u8], codes: &mut [u8], scales: &mut [f32], offsets: &mut [f32]) {
        const MOST: usize = CHUNK / 256;
        let (blocks, _) = blocks.as_chunks::<210>();
        let mut factors = [0.0; MOST];
        halves::<210, 208>(blocks, &mut factors);
        let (groups, _) = scales.as_chunks_mut::<16>();
        for ((block, scales), factor) in blocks.iter().zip(groups).zip(factors) {
            for (i, scale) in scales.iter_mut().enumerate() {
                *scale = factor * f32::from(block[192 + i].cast_signed());
            }
        }
        centered(scales, offsets, 32.0);
        let (codes, _) = codes.as_chunks_mut::<BYTES>();
        let (codes, _) = codes.as_chunks_mut::<16>();
        for (block, codes) in blocks.iter().zip(codes) {
            for (half, codes) in codes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                for part in 0..2 {
                    let top = sixteen(block, 128 + 32 * half + BYTES * part);
                    let low = |i: usize| sixteen(block, 64 * half + 32 * i + BYTES * part);
                    let (first, second) = (low(0), low(1));
                    let code = |low: Bytes, shift| low.and(15).or(top.shift(shift).and(0x30));
                    code(first, 4).store(&mut codes[part]);
                    code(second, 2).store(&mut codes[2 + part]);
                    code(first.shift(-4), 0).store(&mut codes[4 + part]);
                    code(second.shift(-4), -2).store(&mut codes[6 + part]);
                }
            }
        }
    }
}
