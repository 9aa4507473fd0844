//! From a `#[cube]` function to CUDA C++ text and the layout that its launch needs, without a GPU.
//!
//! The layout is read off the compiled kernel, so the text and the host's argument struct cannot disagree.
//!
//! | file | what it is for |
//! |-|-|
//! | `mod.rs` | a kernel: its text, its arguments, how it is launched |
//! | `builder` | declares arguments and compiles what a `#[cube]` function expands to |
//! | `text` | what is made of CubeCL's text |

mod builder;
mod text;

use cubecl::ir::{ElemType, FloatKind, IntKind, StorageType, UIntKind};

pub use builder::{Builder, definitions};
pub use contract::Float;
pub use text::{start_none_early, translation_unit};

/// A compile-time choice that tells a kernel from its siblings, by name; what the host picks by.
pub type Choice = (&'static str, u32);

/// The type of a scalar argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScalarType {
    /// 32-bit float.
    F32,
    /// 32-bit unsigned integer.
    U32,
    /// 64-bit signed integer.
    I64,
    /// 64-bit unsigned integer; `usize` in kernels, whose addresses have 64 bits.
    U64,
}

impl ScalarType {
    fn storage(self) -> StorageType {
        StorageType::Scalar(match self {
            ScalarType::F32 => ElemType::Float(FloatKind::F32),
            ScalarType::U32 => ElemType::UInt(UIntKind::U32),
            ScalarType::I64 => ElemType::Int(IntKind::I64),
            ScalarType::U64 => ElemType::UInt(UIntKind::U64),
        })
    }

    /// Size in bytes.
    pub fn size(self) -> usize {
        self.storage().size()
    }

    /// Zero as a Rust literal.
    pub fn zero(self) -> &'static str {
        match self {
            ScalarType::F32 => "0.0",
            ScalarType::U32 | ScalarType::I64 | ScalarType::U64 => "0",
        }
    }

    /// The Rust type.
    pub fn rust(self) -> &'static str {
        match self {
            ScalarType::F32 => "f32",
            ScalarType::U32 => "u32",
            ScalarType::I64 => "i64",
            ScalarType::U64 => "u64",
        }
    }
}

/// A scalar argument and where it lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scalar {
    /// The argument's name.
    pub name: &'static str,
    /// Its type.
    pub ty: ScalarType,
    /// Bytes from the beginning of the struct of scalars.
    pub offset: usize,
}

/// The arguments of a kernel: pointers, each a parameter, then one struct with all scalars, then at most one array of f32 by value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arguments {
    /// The pointers' names.
    pub buffers: Vec<&'static str>,
    /// The scalars, by offset.
    pub scalars: Vec<Scalar>,
    /// Bytes of the scalars' struct that the kernel reads.
    pub scalars_size: usize,
    /// Name and length of the array.
    pub by_value: Option<(&'static str, usize)>,
}

/// A kernel as CUDA C++.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Its symbol.
    pub name: String,
    /// What tells it from its siblings.
    pub choices: Vec<Choice>,
    /// How it is called.
    pub arguments: Arguments,
    /// Threads of a block.
    pub block: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub shared_bytes: usize,
    /// `#include` lines.
    pub includes: Vec<String>,
    /// Everything else.
    pub text: String,
}

impl Kernel {
    /// Lets a thread have this many registers. Where it needs nearly all that there are, the compiler spills one or another in vain.
    pub fn with_registers(mut self, registers: u32) -> Kernel {
        let bound = format!("__launch_bounds__({})", self.block[0]);
        let most = format!("__maxnreg__({registers})");
        self.text = self.text.replace(&bound, &most);
        self
    }

    /// Lets a thread have the registers that `blocks` blocks at a time on a multiprocessor leave it. The compiler aims at more by itself,
    /// and spills for it on some architectures.
    pub fn for_blocks(mut self, blocks: u32) -> Kernel {
        let bound = format!("__launch_bounds__({}", self.block[0]);
        let bounds = format!("{bound}, {blocks})");
        self.text = self.text.replace(&format!("{bound})"), &bounds);
        self
    }
}

/// Declares a struct of scalar arguments, and how they are listed for the host.
macro_rules! scalars {
    ($name:ident, $expand:ident { $($(#[doc = $doc:literal])* $field:ident: $ty:ident,)* }) => {
        #[derive(CubeType, Clone)]
        pub struct $name { $($(#[doc = $doc])* pub $field: $ty,)* }

        impl $name {
            pub fn declare(b: &mut $crate::emit::Builder) -> $expand {
                $expand { $($field: b.scalar(stringify!($field), $crate::emit::scalars!(@ $ty)).into(),)* }
            }
        }
    };
    (@ f32) => { $crate::emit::ScalarType::F32 };
    (@ u32) => { $crate::emit::ScalarType::U32 };
    (@ u64) => { $crate::emit::ScalarType::U64 };
}
pub(crate) use scalars;

/// Runs `$body` with `$t` as the Rust type and `$n` as the number of elements in 16 bytes.
macro_rules! with_vector {
    ($float:expr, $t:ident, $n:ident => $body:expr) => {
        match $float {
            $crate::emit::Float::F32 => {
                type $t = f32;
                type $n = cubecl::prelude::Const<4>;
                $body
            }
            $crate::emit::Float::F16 => {
                type $t = half::f16;
                type $n = cubecl::prelude::Const<8>;
                $body
            }
            $crate::emit::Float::Bf16 => {
                type $t = half::bf16;
                type $n = cubecl::prelude::Const<8>;
                $body
            }
        }
    };
}
pub(crate) use with_vector;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::{self, Image};

    #[test]
    fn the_same_kernels_give_the_same_text() {
        let texts = |images: &[Image]| -> Vec<String> {
            let text = |image: &Image| translation_unit(&image.kernels);
            images.iter().map(text).collect()
        };
        let again = catalog::images().unwrap();
        assert!(texts(catalog::tests::expanded()) == texts(&again));
    }

    #[test]
    fn symbols_are_distinct_and_arguments_alike() {
        for image in catalog::tests::expanded() {
            let mut names: Vec<_> = image.kernels.iter().map(|k| &k.name).collect();
            names.sort();
            names.dedup();
            assert_eq!(names.len(), image.kernels.len(), "{}", image.name);
            let first = &image.kernels[0].arguments;
            for kernel in &image.kernels {
                assert_eq!(&kernel.arguments, first, "{}", kernel.name);
            }
        }
    }

    #[test]
    fn scalars_lie_behind_each_other() {
        for image in catalog::tests::expanded() {
            let arguments = &image.kernels[0].arguments;
            let mut end = 0;
            for scalar in &arguments.scalars {
                // Groups of one type are padded to 8 bytes.
                assert!(
                    (end..end + 8).contains(&scalar.offset),
                    "{scalar:?} of {}",
                    image.name
                );
                assert_eq!(scalar.offset % scalar.ty.size(), 0);
                end = scalar.offset + scalar.ty.size();
            }
            assert_eq!(end.next_multiple_of(8), arguments.scalars_size);
        }
    }

    #[test]
    fn vectors_move_16_bytes() {
        // These read elements one by one: an f32 of a row or a column, or a row of a head.
        const SCALAR: [&str; 4] = [
            "attention_backward_any",
            "attention_backward_rows",
            "column_sums",
            "cross_entropy_sums",
        ];
        let images = catalog::tests::expanded();
        for image in images.iter().filter(|image| !SCALAR.contains(&image.name)) {
            let unit = translation_unit(&image.kernels);
            // Of bf16; where partial results are f32, of these; of words that hold codes.
            let vectors = ["__nv_bfloat16_8", "float_4", "uint32_4"]
                .map(|ty| format!("struct __align__(16) {ty}"));
            assert!(vectors.iter().any(|v| unit.contains(v)), "{}", image.name);
        }
    }
}
