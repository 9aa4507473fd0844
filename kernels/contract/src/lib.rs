//! The numbers that the host and the kernels share: what a kernel is told in an argument, and what a choice between kernels means.
//!
//! Each is defined here and nowhere else. The library uses this crate at run time, the kernels' crate at build time; kernels in
//! CUDA C++ include it as [`cpp::header`].

/// An enum whose values cross to kernels as numbers.
macro_rules! codes {
    ($(#[$of_enum:meta])* pub enum $name:ident { $($(#[$of_code:meta])* $code:ident = $value:literal,)* }) => {
        $(#[$of_enum])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name { $($(#[$of_code])* $code = $value,)* }

        impl $name {
            /// All of them.
            pub const ALL: &'static [$name] = &[$($name::$code,)*];

            /// What kernels know it by.
            pub const fn code(self) -> u32 {
                self as u32
            }

            /// The one with this code.
            pub const fn from_code(code: u32) -> Option<$name> {
                match code {
                    $($value => Some($name::$code),)*
                    _ => None,
                }
            }

            /// Its name here.
            pub const fn identifier(self) -> &'static str {
                match self {
                    $($name::$code => stringify!($code),)*
                }
            }
        }
    };
}

pub mod attention;
pub mod cpp;

codes! {
    /// A dtype that kernels compute with, by its value in the C ABI. As an argument, 0 says that there is no such tensor.
    pub enum Float {
        /// IEEE binary32.
        F32 = 1,
        /// IEEE binary16.
        F16 = 2,
        /// bfloat16.
        Bf16 = 3,
    }
}

impl Float {
    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Float::F32 => "f32",
            Float::F16 => "f16",
            Float::Bf16 => "bf16",
        }
    }

    /// Bytes of an element.
    pub const fn size(self) -> u32 {
        match self {
            Float::F32 => 4,
            Float::F16 | Float::Bf16 => 2,
        }
    }

    /// Elements of a [`VECTOR`].
    pub const fn per_vector(self) -> u32 {
        VECTOR / self.size()
    }
}

/// The C ABI's value of 8-bit floats (e4m3): codes, which kernels hold as bytes.
pub const E4M3: u32 = 7;
/// That of codes of 8 bits.
pub const I8: u32 = 9;
/// That of ternary codes, of 2 bits.
pub const TERNARY: u32 = 10;

codes! {
    /// A format of weights in blocks, by its value in the C ABI.
    pub enum Blocks {
        /// 32 signed bytes and their f16 scale.
        Q8_0 = 11,
        /// 32 times 4 bits, less 8, and their f16 scale.
        Q4_0 = 12,
        /// 32 times 4 bits, their f16 scale and what is added to all.
        Q4_1 = 13,
        /// 8 times 32 of 4 bits, each with a scale and an offset of 6 bits.
        Q4K = 14,
        /// 16 times 16 of 6 bits, less 32, each with a scale of 8 bits.
        Q6K = 15,
        /// 256 digits of base 3, less 1, and their f16 scale.
        Tq1_0 = 16,
        /// 256 times 2 bits, less 1, and their f16 scale.
        Tq2_0 = 17,
        /// 64 times 2 bits, less 1, and their f16 scale.
        Q2_0 = 18,
        /// As Q4_0 with a fifth bit, less 16.
        Q5_0 = 19,
        /// As Q4_1 with a fifth bit.
        Q5_1 = 20,
        /// As Q4_K with a fifth bit.
        Q5K = 21,
    }
}

/// Bytes of a kernel's widest access.
pub const VECTOR: u32 = 16;

codes! {
    /// The function of a gate.
    pub enum Activation {
        /// `x / (1 + exp(-x))`.
        Silu = 0,
        /// `x Φ(x)`.
        Gelu = 1,
        /// [`Gelu`](Activation::Gelu), with a hyperbolic tangent in place of `Φ`.
        GeluTanh = 2,
        /// `max(x, 0)²`.
        ReluSquared = 3,
    }
}

/// Linear layers.
pub mod linear {
    /// Rows and columns of a tile of the kernels for many rows.
    pub const TILE: u32 = 64;

    codes! {
        /// What a kernel is made for.
        pub enum Kind {
            /// Few rows of 16-bit x, on tensor cores.
            Rows = 0,
            /// Few rows of any dtypes.
            RowsSimt = 1,
            /// Many rows of 16-bit x.
            Tiles = 2,
            /// Many rows of any dtypes.
            TilesSimt = 3,
            /// Few long rows of f32.
            RowsDeep = 4,
        }
    }

    codes! {
        /// What becomes of a product and its bias.
        pub enum Epilogue {
            /// It is the output.
            Store = 0,
            /// A residual is added.
            Add = 1,
            /// A gate activated by [`Silu`](crate::Activation::Silu) multiplies it.
            GateSilu = 2,
            /// A gate activated by [`Gelu`](crate::Activation::Gelu) multiplies it.
            GateGelu = 3,
            /// A gate activated by [`GeluTanh`](crate::Activation::GeluTanh) multiplies it.
            GateGeluTanh = 4,
            /// A gate activated by [`ReluSquared`](crate::Activation::ReluSquared) multiplies it.
            GateReluSquared = 5,
        }
    }
}

/// Gradients of linear layers.
pub mod linear_backward {
    /// Rows and columns of a tile of a product.
    pub const TILE: u32 = 64;
    /// Vectors of a row that a block sums for the bias.
    pub const LANES: u32 = 32;

    codes! {
        /// What a kernel is made for.
        pub enum Kind {
            /// The gradient of the input.
            Input = 0,
            /// The gradient of the weight.
            Weight = 1,
            /// The gradient of the bias, or of a part of the rows.
            Bias = 2,
        }
    }
}

/// Cross-entropy of logits whose columns ranks divide.
pub mod cross_entropy {
    /// Numbers of a token that a rank gives to the others: the greatest logit, after the softcap, the sum of
    /// exponentials of the distances from it, the sum of logits, and the target's logit or zero.
    pub const SUMS: u32 = 4;
}

/// The gradient of an embedding's table.
pub mod embedding_backward {
    /// Bits of a digit of the sort: two digits are enough for 262,143 rows.
    pub const DIGIT: u32 = 9;
    /// Values of a digit, and threads of a block that sorts.
    pub const BINS: u32 = 1 << DIGIT;
    /// Positions that a block sorts.
    pub const TILE: u32 = 2048;
    /// Threads of all other blocks.
    pub const THREADS: u32 = 256;
    /// Positions of a row beyond which they are summed in pieces, and positions of a piece. A thread
    /// reads them a few at a time, and waits for each of these times.
    pub const LONG: u32 = 32;
    /// Vectors of a row whose pieces a block adds.
    pub const COLUMNS: u32 = 64;
    /// Sorted positions of a thread that sums the rows that begin there; their first vectors are loaded at once.
    pub const ROUNDS: u32 = 4;
    /// Rows of which a block zeroes those without positions.
    pub const ROWS: u32 = 32;

    codes! {
        /// What a kernel is made for.
        pub enum Kind {
            /// The first digits of a tile.
            Count = 0,
            /// A pass of the sort.
            Scatter = 1,
            /// Rows of few positions and of none, and pieces of rows of many.
            Rows = 2,
            /// The sums of pieces.
            Joins = 3,
        }
    }
}

/// Optimizers.
pub mod optimizer {
    /// Elements of a parameter that a block has.
    pub const CHUNK: u32 = 16 << 10;
    /// Words of a parameter in the table.
    pub const ENTRY: u32 = 8;

    codes! {
        /// What a kernel is made for.
        pub enum Kind {
            /// The sums of squares of chunks.
            Norm = 0,
            /// What follows from them.
            Decide = 1,
            /// The update by Adam.
            Adam = 2,
            /// The update by gradients with momentum.
            Momentum = 3,
            /// The update by gradients alone.
            Plain = 4,
            /// Gradients multiplied by a factor.
            Scale = 5,
            /// The sum of a rank's sums of squares, for the others.
            Sum = 6,
            /// What follows from the sums of all ranks.
            Agree = 7,
        }
    }

    codes! {
        /// Where a weight's f32 value is between steps.
        pub enum Storage {
            /// In the weight.
            Weight = 0,
            /// In an f32 of its own.
            F32 = 1,
            /// In the bf16 weight and a remainder.
            Remainder = 2,
            /// In the bf16 weight, which is rounded at random.
            Stochastic = 3,
        }
    }

    /// Where a parameter's traits begin in 32 bits; first is the weight's dtype.
    pub mod shift {
        /// The gradient's dtype.
        pub const GRADIENT: u32 = 4;
        /// The storage.
        pub const STORAGE: u32 = 8;
        /// Whether weight and gradient begin at whole vectors.
        pub const VECTORS: u32 = 12;
        /// The group.
        pub const GROUP: u32 = 16;
    }
}

/// Few rows that ranks add up in each other's memory.
pub mod rank_sums {
    /// The most ranks.
    pub const RANKS: u32 = 8;
    /// The most rows of a launch.
    pub const ROWS: u32 = 8;
    /// Bytes of a row that a line of the slots has.
    pub const LINE: u32 = 8;
    /// Bytes that a line takes: those of a row, and the number of the call beside each four.
    pub const LINE_BYTES: u32 = 2 * LINE;
    /// Lines of the longest row.
    pub const LINES: u32 = 2048;
}

/// Rounding to codes.
pub mod quantize {
    /// Vectors of groups that a thread can hold, or have on their way.
    pub const HELD: u32 = 8;

    codes! {
        /// What a kernel is made for.
        pub enum Kind {
            /// Codes, and the scales of groups.
            Codes = 0,
            /// What a row adds to the scale of all.
            Rows = 1,
            /// The scale of all.
            Scale = 2,
            /// Codes of 8 bits, and the scales of groups, which threads hold one after another.
            InTurn = 3,
        }
    }

    codes! {
        /// What `x` is rounded to.
        pub enum Codes {
            /// Integers of 8 bits.
            I8 = 0,
            /// -1, 0 and 1.
            Ternary = 1,
            /// Floats of 8 bits.
            E4m3 = 2,
        }
    }

    codes! {
        /// What a scale is, by its value in the C ABI.
        pub enum Rule {
            /// The greatest magnitude by the greatest code.
            AbsMax = 0,
            /// The mean magnitude.
            AbsMean = 1,
            /// The mean of the magnitudes above a threshold.
            Threshold = 2,
        }
    }
}

/// RoPE, and a KV cache that rotates keys.
pub mod rotation {
    /// Pairs of components that a launch has frequencies for.
    pub const MAX_PAIRS: u32 = 256;
    /// Threads of a block of RoPE.
    pub const THREADS: u32 = 128;

    codes! {
        /// Which components make a pair.
        pub enum Style {
            /// `i` and `i + rotary_dim / 2`.
            HalfSplit = 0,
            /// `2 i` and `2 i + 1`.
            Interleaved = 1,
            /// None: nothing is rotated.
            Plain = 2,
        }
    }

    codes! {
        /// Where positions come from.
        pub enum Positions {
            /// The first is given, others count up from it.
            From = 0,
            /// Each is given as i32.
            I32 = 1,
            /// Each is given as i64.
            I64 = 2,
        }
    }

    codes! {
        /// Where angles come from.
        pub enum Angles {
            /// Position times frequency.
            Frequencies = 0,
            /// The same, frequencies divided by factors.
            Factors = 1,
            /// A table.
            Table = 2,
        }
    }
}

/// QK-norm and RoPE in one pass.
pub mod qk_norm_rope {
    /// Threads of a block.
    pub const THREADS: u32 = 128;
    /// Components of a head that a thread has: two times as many pairs as it turns.
    pub const SHARE: u32 = 16;
    /// Threads that share a head at the most.
    pub const MAX_LANES: u32 = 32;
    /// Quads of pairs whose cosines and sines a block has room for.
    pub const TURN_QUADS: u32 = 256;
    /// Tokens whose angles a block has at a time, at the most.
    pub const MAX_TOKENS: u32 = 16;
}

/// Argmax.
pub mod argmax {
    /// Vectors of a thread in flight: where a row is spread as thin as it goes, and where there are many.
    pub const UNROLLS: [u32; 2] = [1, 4];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_lead_back() {
        for mask in attention::Mask::ALL {
            assert_eq!(attention::Mask::from_code(mask.code()), Some(*mask));
        }
        assert_eq!(Float::from_code(0), None);
        assert_eq!(Float::Bf16.identifier(), "Bf16");
        assert_eq!(Float::ALL.iter().map(|f| f.per_vector()).sum::<u32>(), 20);
    }

    #[test]
    fn flags_are_bits_of_their_own() {
        use attention::flag::*;
        let all = [
            CU_SEQLENS_Q,
            CU_SEQLENS_K,
            SEQ_LENS_K,
            PAGED,
            LSE,
            SINKS,
            MASK,
            ALIBI,
            OUT_F32,
        ];
        assert!(all.iter().all(|flag| flag.is_power_of_two()));
        assert_eq!(all.iter().fold(0, |a, b| a | b), all.iter().sum());
    }
}
