//! Sixteen bytes in a register. Every x86-64 has these vectors, so that nothing is left to whether
//! the compiler sees them.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// How many.
pub(super) const BYTES: usize = 16;

/// Bytes that are shifted together; whoever shifts masks what crosses from one to the next.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Bytes(__m128i);

#[cfg(target_arch = "x86_64")]
impl Bytes {
    #[inline(always)]
    pub fn of(bytes: &[u8; BYTES]) -> Bytes {
        // SAFETY: sixteen bytes, which need no alignment.
        Bytes(unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) })
    }

    #[inline(always)]
    pub fn store(self, to: &mut [u8; BYTES]) {
        // SAFETY: as above.
        unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), self.0) };
    }

    #[inline(always)]
    pub fn and(self, mask: u8) -> Bytes {
        // SAFETY: every x86-64 has SSE2.
        Bytes(unsafe { _mm_and_si128(self.0, _mm_set1_epi8(mask.cast_signed())) })
    }

    #[inline(always)]
    pub fn xor(self, mask: u8) -> Bytes {
        // SAFETY: every x86-64 has SSE2.
        Bytes(unsafe { _mm_xor_si128(self.0, _mm_set1_epi8(mask.cast_signed())) })
    }

    #[inline(always)]
    pub fn or(self, other: Bytes) -> Bytes {
        // SAFETY: every x86-64 has SSE2.
        Bytes(unsafe { _mm_or_si128(self.0, other.0) })
    }

    /// To the left by `bits`, or by as many less than none to the right.
    #[inline(always)]
    pub fn shift(self, bits: i32) -> Bytes {
        // SAFETY: every x86-64 has SSE2.
        Bytes(unsafe {
            let by = _mm_cvtsi32_si128(bits.abs());
            match bits < 0 {
                true => _mm_srl_epi16(self.0, by),
                false => _mm_sll_epi16(self.0, by),
            }
        })
    }

    /// Digit `n` of base 3 of each byte `b`, which stands for the fraction `b / 256`: `3 (3^n b mod 256) / 256`, rounded
    /// down. `powers` has `3^n` for each pair of bytes.
    #[inline(always)]
    pub fn digits(self, powers: [u16; BYTES / 2]) -> Bytes {
        // SAFETY: every x86-64 has SSE2, and there are eight words.
        Bytes(unsafe {
            let high = _mm_set1_epi16(0xff00_u16.cast_signed());
            let powers = _mm_loadu_si128(powers.as_ptr().cast());
            // `3^n b mod 256` of low bytes, and of high ones, in the high bytes of words.
            let even = _mm_mullo_epi16(self.0, _mm_slli_epi16::<8>(powers));
            let odd = _mm_mullo_epi16(_mm_and_si128(self.0, high), powers);
            let even = _mm_mulhi_epu16(even, _mm_set1_epi16(3));
            let odd = _mm_mulhi_epu16(odd, _mm_set1_epi16(3 << 8));
            _mm_or_si128(even, _mm_and_si128(odd, high))
        })
    }
}

#[cfg(not(target_arch = "x86_64"))]
#[derive(Clone, Copy)]
pub(super) struct Bytes(u128);

#[cfg(not(target_arch = "x86_64"))]
impl Bytes {
    const EACH: u128 = u128::MAX / 255;

    pub fn of(bytes: &[u8; BYTES]) -> Bytes {
        Bytes(u128::from_le_bytes(*bytes))
    }

    pub fn store(self, to: &mut [u8; BYTES]) {
        *to = self.0.to_le_bytes();
    }

    pub fn and(self, mask: u8) -> Bytes {
        Bytes(self.0 & Self::EACH * u128::from(mask))
    }

    pub fn xor(self, mask: u8) -> Bytes {
        Bytes(self.0 ^ Self::EACH * u128::from(mask))
    }

    pub fn or(self, other: Bytes) -> Bytes {
        Bytes(self.0 | other.0)
    }

    /// To the left by `bits`, or by as many less than none to the right.
    pub fn shift(self, bits: i32) -> Bytes {
        Bytes(match bits < 0 {
            true => self.0 >> -bits,
            false => self.0 << bits,
        })
    }

    /// Digit `n` of base 3 of each byte `b`, which stands for the fraction `b / 256`: `3 (3^n b mod 256) / 256`, rounded
    /// down. `powers` has `3^n` for each pair of bytes.
    pub fn digits(self, powers: [u16; BYTES / 2]) -> Bytes {
        let mut bytes = self.0.to_le_bytes();
        for (pair, power) in bytes.as_chunks_mut::<2>().0.iter_mut().zip(powers) {
            *pair = pair.map(|byte| ((u16::from(byte) * power & 0xff) * 3 >> 8) as u8);
        }
        Bytes::of(&bytes)
    }
}

/// The sixteen bytes from `at`.
#[inline(always)]
pub(super) fn sixteen<const N: usize>(block: &[u8; N], at: usize) -> Bytes {
    let mut bytes = [0; BYTES];
    bytes.copy_from_slice(&block[at..at + BYTES]);
    Bytes::of(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of any byte, also of one that no five digits give.
    #[test]
    fn digits_are_those_of_fractions() {
        for (n, power) in [1_u32, 3, 9, 27, 81].into_iter().enumerate() {
            for first in (0..=255).step_by(BYTES) {
                let bytes: [u8; BYTES] = std::array::from_fn(|i| first + i as u8);
                let mut digits = [0; BYTES];
                Bytes::of(&bytes)
                    .digits([power as u16; BYTES / 2])
                    .store(&mut digits);
                for (byte, digit) in bytes.into_iter().zip(digits) {
                    let expected = u32::from(byte) * power % 256 * 3 / 256;
                    assert_eq!(u32::from(digit), expected, "digit {n} of {byte}");
                }
            }
        }
    }
}
