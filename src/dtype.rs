//! Element types of tensors.

use half::{bf16, f16};

/// The element type of a tensor. The discriminants are those of the C ABI (`UNSLOTH_DTYPE_*`).
///
/// A *plain* dtype is one value per element. The others are formats of quantised weights, whose
/// elements come in blocks along the last dimension: GGUF's, with data as in the file and no
/// alignment asked for, are taken by what takes weights ([`DType::BLOCKS`]); codes whose scales lie
/// apart are written by [`ops::quantize`](crate::ops::quantize).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum DType {
    /// IEEE binary32.
    F32 = 1,
    /// IEEE binary16.
    F16 = 2,
    /// bfloat16: the upper half of binary32.
    Bf16 = 3,
    /// 32-bit signed integer.
    I32 = 4,
    /// 64-bit signed integer.
    I64 = 5,
    /// One byte; zero is false, anything else is true.
    Bool = 6,
    /// 8-bit float, 4 exponent bits and 3 of mantissa, without infinities ([`E4m3`]), whose scale lies
    /// apart.
    F8E4M3 = 7,
    /// Reserved: 8-bit float, 5 exponent bits and 2 of mantissa.
    F8E5M2 = 8,
    /// 8-bit signed integer, whose scale lies apart.
    I8 = 9,
    /// Packed ternary codes, 128 in 32 bytes, whose scales lie apart.
    Ternary = 10,
    /// GGUF's Q8_0: 32 signed bytes and their f16 scale.
    Q8_0 = 11,
    /// GGUF's Q4_0: 32 times 4 bits, less 8, and their f16 scale.
    Q4_0 = 12,
    /// GGUF's Q4_1: 32 times 4 bits, their f16 scale and what is added to all.
    Q4_1 = 13,
    /// GGUF's Q4_K: 8 times 32 of 4 bits, each with a scale and an offset of 6 bits.
    Q4K = 14,
    /// GGUF's Q6_K: 16 times 16 of 6 bits, less 32, each with a scale of 8 bits.
    Q6K = 15,
    /// GGUF's TQ1_0: 256 times -1, 0 or 1, five in a byte, and their f16 scale.
    Tq1_0 = 16,
    /// GGUF's TQ2_0: 256 times 2 bits, less 1, and their f16 scale.
    Tq2_0 = 17,
    /// GGUF's Q2_0: 64 times 2 bits, less 1, and their f16 scale.
    Q2_0 = 18,
    /// GGUF's Q5_0: as Q4_0 with a fifth bit, less 16.
    Q5_0 = 19,
    /// GGUF's Q5_1: as Q4_1 with a fifth bit.
    Q5_1 = 20,
    /// GGUF's Q5_K: as Q4_K with a fifth bit.
    Q5K = 21,
}

impl DType {
    /// The plain dtypes that operations take.
    pub const ALL: [DType; 6] = [
        DType::F32,
        DType::F16,
        DType::Bf16,
        DType::I32,
        DType::I64,
        DType::Bool,
    ];

    /// GGUF's formats in blocks, which operations take for weights.
    pub const BLOCKS: [DType; 11] = [
        DType::Q8_0,
        DType::Q4_0,
        DType::Q4_1,
        DType::Q5_0,
        DType::Q5_1,
        DType::Q4K,
        DType::Q5K,
        DType::Q6K,
        DType::Tq1_0,
        DType::Tq2_0,
        DType::Q2_0,
    ];

    /// The dtypes that have a name and a layout, and no operation yet.
    pub const RESERVED: [DType; 1] = [DType::F8E5M2];

    /// What a KV cache may store, and attention's keys and values may be: the floats, and codes of 8 bits
    /// whose scales lie apart.
    pub const CACHED: &'static [DType] = &[DType::F32, DType::F16, DType::Bf16, DType::F8E4M3];

    /// The dtypes of codes whose scales lie apart: what
    /// [`ops::quantize`](crate::ops::quantize) writes, and linear layers multiply.
    pub const QUANTIZED: [DType; 3] = [DType::I8, DType::Ternary, DType::F8E4M3];

    /// Of these, integers, by which `x` is rounded to integers too.
    pub const INTEGERS: [DType; 2] = [DType::I8, DType::Ternary];

    /// What a weight may be: the floats, and [`DType::BLOCKS`]. It is all of [`DType::MATRICES`] but what
    /// comes last there.
    pub const WEIGHTS: &'static [DType] = DType::MATRICES
        .split_at(DType::MATRICES.len() - DType::QUANTIZED.len())
        .0;

    /// What the weight of a linear layer may be: [`DType::WEIGHTS`] and [`DType::QUANTIZED`].
    pub const MATRICES: &'static [DType] = &[
        DType::F32,
        DType::F16,
        DType::Bf16,
        DType::Q8_0,
        DType::Q4_0,
        DType::Q4_1,
        DType::Q5_0,
        DType::Q5_1,
        DType::Q4K,
        DType::Q5K,
        DType::Q6K,
        DType::Tq1_0,
        DType::Tq2_0,
        DType::Q2_0,
        DType::I8,
        DType::Ternary,
        DType::F8E4M3,
    ];

    /// The floating-point dtypes that every operation computes in.
    pub const FLOATS: &'static [DType] = &[DType::F32, DType::F16, DType::Bf16];

    /// Elements and bytes of a block: what memory is made of. A block of a plain dtype is one
    /// element.
    pub const fn block(self) -> (usize, usize) {
        match self {
            DType::F32 | DType::I32 => (1, 4),
            DType::F16 | DType::Bf16 => (1, 2),
            DType::I64 => (1, 8),
            DType::Bool | DType::F8E4M3 | DType::F8E5M2 | DType::I8 => (1, 1),
            DType::Ternary => (128, 32),
            DType::Q8_0 => (32, 34),
            DType::Q4_0 => (32, 18),
            DType::Q4_1 => (32, 20),
            DType::Q5_0 => (32, 22),
            DType::Q5_1 => (32, 24),
            DType::Q4K => (256, 144),
            DType::Q5K => (256, 176),
            DType::Q6K => (256, 210),
            DType::Tq1_0 => (256, 54),
            DType::Tq2_0 => (256, 66),
            DType::Q2_0 => (64, 18),
        }
    }

    /// Bytes of `elements` neighbours from the start of a row on, whole blocks: as many as are
    /// begun. It does not overflow for what a [`Layout`](crate::Layout) spans.
    pub const fn row_bytes(self, elements: usize) -> usize {
        let (len, bytes) = self.block();
        elements.div_ceil(len) * bytes
    }

    /// Size of one element in bytes, of a plain dtype. Operations refuse formats in blocks before
    /// they ask; of these it is the size of a block.
    pub const fn size(self) -> usize {
        self.block().1
    }

    /// What addresses of data must be multiples of, in bytes: an element. Blocks may lie anywhere.
    pub const fn alignment(self) -> usize {
        match self.block() {
            (1, bytes) => bytes,
            _ => 1,
        }
    }

    /// Lower-case name, as in messages.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::Bool => "bool",
            DType::F8E4M3 => "f8e4m3",
            DType::F8E5M2 => "f8e5m2",
            DType::I8 => "i8",
            DType::Ternary => "ternary",
            DType::Q8_0 => "q8_0",
            DType::Q4_0 => "q4_0",
            DType::Q4_1 => "q4_1",
            DType::Q5_0 => "q5_0",
            DType::Q5_1 => "q5_1",
            DType::Q4K => "q4_k",
            DType::Q5K => "q5_k",
            DType::Q6K => "q6_k",
            DType::Tq1_0 => "tq1_0",
            DType::Tq2_0 => "tq2_0",
            DType::Q2_0 => "q2_0",
        }
    }

    /// Whether this is f32, f16 or bf16.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F16 | DType::Bf16)
    }

    /// Whether it is one of [`DType::BLOCKS`].
    pub fn is_in_blocks(self) -> bool {
        DType::BLOCKS.contains(&self)
    }

    /// Whether it is one of [`DType::QUANTIZED`].
    pub fn is_quantized(self) -> bool {
        DType::QUANTIZED.contains(&self)
    }

    /// Whether it is one of [`DType::INTEGERS`].
    pub fn is_of_integers(self) -> bool {
        DType::INTEGERS.contains(&self)
    }

    /// Whether no operation of this version takes it.
    pub fn is_reserved(self) -> bool {
        DType::RESERVED.contains(&self)
    }

    /// The dtype with this C ABI value, reserved ones included.
    pub fn from_raw(value: u32) -> Option<DType> {
        DType::ALL
            .into_iter()
            .chain(DType::BLOCKS)
            .chain(DType::QUANTIZED)
            .chain(DType::RESERVED)
            .find(|d| *d as u32 == value)
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that can be an element of a tensor.
pub trait Element: sealed::Sealed + Copy + Send + Sync + 'static {
    /// Its dtype.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($t:ty => $d:ident),* $(,)?) => {$(
        impl sealed::Sealed for $t {}
        impl Element for $t {
            const DTYPE: DType = DType::$d;
        }
    )*};
}

elements!(f32 => F32, f16 => F16, bf16 => Bf16, i32 => I32, i64 => I64, bool => Bool, E4m3 => F8E4M3);

/// An 8-bit float of 4 exponent bits with bias 7 and 3 of mantissa, by its bits: up to ±448, without
/// infinities; `S.1111.111` is NaN (Micikevicius et al. 2022, "FP8 formats for deep learning").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct E4m3(u8);

impl E4m3 {
    /// The greatest number.
    pub const MAX: f32 = 448.0;

    /// The number with these bits.
    pub const fn from_bits(bits: u8) -> E4m3 {
        E4m3(bits)
    }

    /// Its bits.
    pub const fn to_bits(self) -> u8 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_told_apart() {
        for value in 0..=64 {
            let found = DType::from_raw(value);
            assert_eq!(found.is_some(), (1..=21).contains(&value), "{value}");
            assert!(found.is_none_or(|d| d as u32 == value));
        }
        assert!(DType::ALL.iter().all(|d| !d.is_reserved()));
        let weights: Vec<DType> = [DType::FLOATS, &DType::BLOCKS].concat();
        assert_eq!(weights, DType::WEIGHTS);
        let matrices: Vec<DType> = [DType::WEIGHTS, &DType::QUANTIZED].concat();
        assert_eq!(matrices, DType::MATRICES);
        let cached: Vec<DType> = [DType::FLOATS, &[DType::F8E4M3]].concat();
        assert_eq!(cached, DType::CACHED);
    }

    #[test]
    fn rows_are_whole_blocks() {
        // Bytes of 256 elements in a GGUF file, by ggml's table of type sizes.
        for (dtype, bytes) in [
            (DType::Q8_0, 272),
            (DType::Q4_0, 144),
            (DType::Q4_1, 160),
            (DType::Q5_0, 176),
            (DType::Q5_1, 192),
            (DType::Q4K, 144),
            (DType::Q5K, 176),
            (DType::Q6K, 210),
            (DType::Tq1_0, 54),
            (DType::Tq2_0, 66),
            (DType::Q2_0, 72),
            (DType::Ternary, 64),
            (DType::F8E4M3, 256),
            (DType::F32, 1024),
        ] {
            assert_eq!(dtype.row_bytes(256), bytes, "{dtype}");
            assert_eq!(dtype.row_bytes(0), 0);
            let (len, block) = dtype.block();
            assert_eq!(dtype.row_bytes(1), block, "{dtype}");
            assert_eq!(dtype.row_bytes(len + 1), 2 * block, "{dtype}");
        }
        // The most that a layout spans.
        let most = isize::MAX as usize / 8;
        let all = DType::ALL.into_iter().chain(DType::BLOCKS);
        let others = DType::QUANTIZED.into_iter().chain(DType::RESERVED);
        for dtype in all.chain(others) {
            let (len, bytes) = dtype.block();
            assert!(bytes <= 8 * len, "{dtype}");
            assert!(dtype.row_bytes(most - 1) <= isize::MAX as usize, "{dtype}");
        }
    }
}
