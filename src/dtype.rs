//! Element types of tensors.

use half::{bf16, f16};

/// The element type of a tensor. The discriminants are those of the C ABI (`UNSLOTH_DTYPE_*`).
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
}

impl DType {
    /// Every dtype.
    pub const ALL: [DType; 6] = [
        DType::F32,
        DType::F16,
        DType::Bf16,
        DType::I32,
        DType::I64,
        DType::Bool,
    ];

    /// The floating-point dtypes that every operation computes in.
    pub const FLOATS: &'static [DType] = &[DType::F32, DType::F16, DType::Bf16];

    /// Size of one element in bytes.
    pub const fn size(self) -> usize {
        match self {
            DType::F32 | DType::I32 => 4,
            DType::F16 | DType::Bf16 => 2,
            DType::I64 => 8,
            DType::Bool => 1,
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
        }
    }

    /// Whether this is f32, f16 or bf16.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F16 | DType::Bf16)
    }

    /// The dtype with this C ABI value, if it is one that has an implementation.
    pub fn from_raw(value: u32) -> Option<DType> {
        DType::ALL.into_iter().find(|d| *d as u32 == value)
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

elements!(f32 => F32, f16 => F16, bf16 => Bf16, i32 => I32, i64 => I64, bool => Bool);
