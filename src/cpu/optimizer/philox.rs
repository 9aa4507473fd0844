//! Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): random
//! numbers that are a function of where they are used, so that no order of the work changes them.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// Counters that are worked on side by side, so that loops vectorise.
pub const LANES: usize = 16;

/// Four words for each of [`LANES`] counters, which are given word by word, and a key.
#[inline(always)]
pub fn philox(mut counter: [[u32; LANES]; 4], mut key: [u32; 2]) -> [[u32; LANES]; 4] {
    for _ in 0..ROUNDS {
        let [c0, c1, c2, c3] = &mut counter;
        for i in 0..LANES {
            let a = u64::from(MULTIPLIERS[0]) * u64::from(c0[i]);
            let b = u64::from(MULTIPLIERS[1]) * u64::from(c2[i]);
            c0[i] = (b >> 32) as u32 ^ c1[i] ^ key[0];
            c1[i] = b as u32;
            c2[i] = (a >> 32) as u32 ^ c3[i] ^ key[1];
            c3[i] = a as u32;
        }
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of Random123's `kat_vectors`.
    #[test]
    fn known_answers() {
        let all = u32::MAX;
        let cases = [
            (
                [0; 4],
                [0; 2],
                [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8],
            ),
            (
                [all; 4],
                [all; 2],
                [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd],
            ),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, expected) in cases {
            let words = philox(counter.map(|word: u32| [word; LANES]), key);
            assert_eq!(words, expected.map(|word: u32| [word; LANES]));
        }
    }
}
