//! GGUF's block formats in f64, element by element, and blocks of random content.

use half::f16;
use rand::Rng;
use unsloth::DType;

/// Blocks for so many elements: every code, factors of either sign.
pub fn random(rng: &mut impl Rng, dtype: DType, elements: usize) -> Vec<u8> {
    let (len, bytes) = dtype.block();
    assert!(elements.is_multiple_of(len));
    let mut out: Vec<u8> = (0..elements / len * bytes).map(|_| rng.random()).collect();
    for block in out.chunks_exact_mut(bytes) {
        // The greatest code times its scale is about 1.
        let (at, most): (&[usize], f64) = match dtype {
            DType::Q8_0 => (&[0], 128.0),
            DType::Q4_0 => (&[0], 8.0),
            DType::Q4_1 => (&[0, 2], 8.0),
            DType::Q5_0 => (&[0], 16.0),
            DType::Q5_1 => (&[0, 2], 16.0),
            DType::Q4K => (&[0, 2], 500.0),
            DType::Q5K => (&[0, 2], 1000.0),
            DType::Q6K => (&[208], 4000.0),
            DType::Tq1_0 => (&[52], 1.0),
            DType::Tq2_0 => (&[64], 1.0),
            DType::Q2_0 => (&[0], 2.0),
            other => unreachable!("{other} is not in blocks"),
        };
        for at in at {
            let factor = f16::from_f64(rng.random_range(-1.0..1.0) / most);
            block[*at..at + 2].copy_from_slice(&factor.to_le_bytes());
        }
    }
    out
}

/// The elements of blocks.
pub fn decode(dtype: DType, blocks: &[u8]) -> Vec<f64> {
    let (len, bytes) = dtype.block();
    let element = |block: &[u8], i: usize| element(dtype, block, i);
    (blocks.chunks_exact(bytes))
        .flat_map(|block| (0..len).map(move |i| element(block, i)))
        .collect()
}

fn element(dtype: DType, block: &[u8], i: usize) -> f64 {
    let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f64();
    // 16 bytes: elements 0 to 15 below, 16 to 31 above.
    let nibble = |at: usize| match i {
        0..16 => block[at + i] % 16,
        _ => block[at + i - 16] / 16,
    };
    let bit = |at: usize| block[at + i / 8] >> (i % 8) & 1;
    // 32 bytes for two groups of 32.
    let nibble_of_group = |at: usize| {
        let byte = block[at + i / 64 * 32 + i % 32];
        if (i / 32).is_multiple_of(2) {
            byte % 16
        } else {
            byte / 16
        }
    };
    let of_superblock = |code: u8| {
        let (group, packed) = (i / 32, &block[4..16]);
        let (scale, least) = match group {
            0..4 => (packed[group] % 64, packed[group + 4] % 64),
            _ => (
                packed[group + 4] % 16 + 16 * (packed[group - 4] / 64),
                packed[group + 4] / 16 + 16 * (packed[group] / 64),
            ),
        };
        half(0) * f64::from(scale) * f64::from(code) - half(2) * f64::from(least)
    };
    match dtype {
        DType::Q8_0 => half(0) * f64::from(block[2 + i] as i8),
        DType::Q4_0 => half(0) * (f64::from(nibble(2)) - 8.0),
        DType::Q4_1 => half(0) * f64::from(nibble(4)) + half(2),
        DType::Q5_0 => half(0) * (f64::from(nibble(6) + 16 * bit(2)) - 16.0),
        DType::Q5_1 => half(0) * f64::from(nibble(8) + 16 * bit(4)) + half(2),
        DType::Q4K => of_superblock(nibble_of_group(16)),
        DType::Q5K => {
            let fifth = block[16 + i % 32] >> (i / 32) & 1;
            of_superblock(nibble_of_group(48) + 16 * fifth)
        }
        DType::Q6K => {
            let (part, j) = (i / 128, i % 128);
            let low = block[64 * part + j % 64];
            let low = if j < 64 { low % 16 } else { low / 16 };
            let high = block[128 + 32 * part + j % 32] >> (2 * (j / 32)) & 3;
            let scale = f64::from(block[192 + i / 16] as i8);
            half(208) * scale * (f64::from(low + 16 * high) - 32.0)
        }
        DType::Tq1_0 => {
            let (byte, digit) = match i {
                0..160 => (i % 32, i / 32),
                160..240 => (32 + (i - 160) % 16, (i - 160) / 16),
                _ => (48 + (i - 240) % 4, (i - 240) / 4),
            };
            // A fraction of 256, whose digits of base 3 are the codes.
            let scaled = u32::from(block[byte]) * 3u32.pow(digit as u32) % 256 * 3;
            half(52) * (f64::from(scaled / 256) - 1.0)
        }
        DType::Tq2_0 => {
            let code = block[32 * (i / 128) + i % 32] >> (2 * (i % 128 / 32)) & 3;
            half(64) * (f64::from(code) - 1.0)
        }
        DType::Q2_0 => half(0) * (f64::from(block[2 + i / 4] >> (2 * (i % 4)) & 3) - 1.0),
        other => unreachable!("{other} is not in blocks"),
    }
}
