//! How rows of rounded activations lie: as the kernels that multiply them read them.

/// Of a code of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bits {
    Sixteen,
    /// Half of the bytes, and by AVX-512 half of the products of bytes.
    Eight,
}

impl Bits {
    /// Codes in a word of 32 bits.
    pub(super) fn together(self) -> usize {
        match self {
            Bits::Sixteen => 2,
            Bits::Eight => 4,
        }
    }

    /// The greatest code. With that of 16 bits both bytes of every code have a sign and are in range.
    pub(super) fn most(self) -> i16 {
        match self {
            Bits::Sixteen => 127 * 256 + 127,
            Bits::Eight => 127,
        }
    }
}

/// Codes in a unit of [`Form::Split`], with whose factors there are as many of each.
const UNIT: usize = 128;
const FACTORS: usize = 16;

/// Codes that lie together of [`Form::Pairs`] and [`Form::Bytes`], and of [`Form::Eights`] and [`Form::Fourths`].
pub(super) const TOGETHER: usize = 256;

/// How a row lies. Behind its codes and factors there are zeros, so that kernels that read whole
/// vectors need not look where it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Codes as they are, for [`Row`](super::Row).
    Words,
    /// Of codes of `256 * high + low` the high bytes, then the low.
    Planes,
    /// As planes, for groups of 32. Of each four groups there are first the 16 codes that each
    /// begins with, then the others. Of each group there are four scales, all the same, and four
    /// sums: of codes 0 to 3 and 16 to 19, and so on.
    Split,
    /// As planes, by eight groups of 32: of each its codes 0 to 7, then of each its codes 8 to 15, and so on. Of
    /// each group there are two scales, both the same, and behind its sum there is a zero.
    Eights,
    /// As [`Form::Eights`], but of each group first its codes 0, 4, 8 and so on, then 1, 5, 9 and so on.
    Fourths,
    /// Codes as they are, by pieces of 32, of which two lie in each other: of both the codes 0 to 15 of an
    /// even number, of both those of an odd one, then codes 16 to 31 likewise. Of eight factors there are
    /// first those of the first pieces of pairs.
    Pairs,
    /// Codes of 8 bits, by pairs of pieces likewise: of both the codes 0 to 15, then codes 16 to 31. Factors as
    /// [`Form::Pairs`] has them.
    Bytes,
}

impl Form {
    /// Of a code.
    pub fn bits(self) -> Bits {
        match self {
            Form::Bytes => Bits::Eight,
            _ => Bits::Sixteen,
        }
    }

    /// Bytes of so many codes.
    pub fn bytes(self, codes: usize) -> usize {
        codes / self.bits().together() * size_of::<u32>()
    }

    /// Where a code lies.
    #[inline(always)]
    pub fn place(self, code: usize) -> usize {
        let of = |size: usize| code % size;
        match self {
            Form::Words | Form::Planes => code,
            Form::Split => code - of(UNIT) + of(32) / 16 * 64 + of(UNIT) / 32 * 16 + of(16),
            Form::Eights => code - of(TOGETHER) + of(32) / 8 * 64 + of(TOGETHER) / 32 * 8 + of(8),
            Form::Fourths => code - of(TOGETHER) + of(4) * 64 + of(TOGETHER) / 32 * 8 + of(32) / 4,
            Form::Pairs => {
                let vector = of(32) / 16 * 2 + of(2);
                code - of(64) + vector * 16 + of(64) / 32 * 8 + of(16) / 2
            }
            Form::Bytes => code - of(64) + of(32) / 16 * 32 + of(64) / 32 * 16 + of(16),
        }
    }

    /// Where the factors of a group lie that is one of so many codes, if there is one of each.
    #[inline(always)]
    pub fn place_of_group(self, group: usize, size: usize) -> usize {
        match (self, size) {
            (Form::Pairs | Form::Bytes, 16) => group & !6 | group << 1 & 4 | group >> 1 & 2,
            (Form::Pairs | Form::Bytes, _) => group & !7 | group << 2 & 4 | group >> 1 & 3,
            _ => group,
        }
    }

    /// Codes of a row, and scales, of which there are as many as sums.
    pub fn lengths(self, depth: usize, group: usize) -> (usize, usize) {
        let codes = depth.next_multiple_of(match self {
            Form::Pairs | Form::Bytes | Form::Eights | Form::Fourths => TOGETHER,
            _ => UNIT,
        });
        match self {
            Form::Split => (codes, codes / UNIT * FACTORS),
            Form::Eights | Form::Fourths => (codes, codes / TOGETHER * FACTORS),
            _ => (codes, (depth / group).next_multiple_of(FACTORS)),
        }
    }
}
