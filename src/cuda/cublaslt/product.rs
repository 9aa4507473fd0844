//! A product as the library is told of it, and what the choice of its algorithm depends on.

use crate::dtype::DType;

/// `out = x Wᵀ + bias + residual`, all row-major, `x` and `W` of one dtype; strides between rows in
/// elements. For a gradient the columns of `W`, or of both, are multiplied, and their rows summed
/// over.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct Product {
    pub dtype: DType,
    /// Of bias, residual and output.
    pub out_dtype: DType,
    pub rows: usize,
    pub in_features: usize,
    pub out_features: usize,
    pub x: usize,
    pub x_stride: usize,
    /// Whether `x` is `[in_features, rows]`, and not `[rows, in_features]`.
    pub x_by_columns: bool,
    pub weight: usize,
    pub weight_stride: usize,
    /// Whether `W` is `[in_features, out_features]`, and not `[out_features, in_features]`: the
    /// product is a gradient's.
    pub weight_by_columns: bool,
    pub bias: Option<usize>,
    /// Address and stride.
    pub residual: Option<(usize, usize)>,
    pub out: usize,
    pub out_stride: usize,
}

/// What the choice of an algorithm depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    pub sizes: [usize; 3],
    pub strides: [usize; 4],
    /// Dtypes, whether there are bias and residual, what is multiplied of `x` and `W`, and the
    /// alignments of the pointers.
    pub traits: u32,
}

impl Key {
    /// Spreads keys over slots. Callers choose their shapes, and at worst choose for some of them at each call, so this need not
    /// withstand them.
    pub fn hash(&self) -> usize {
        let words = self.sizes.iter().chain(&self.strides).map(|w| *w as u64);
        let mixed = words.fold(u64::from(self.traits), |hash, word| {
            (hash.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        });
        (mixed >> 32) as usize
    }
}

/// Alignments of more bytes than this serve no algorithm better.
const WIDEST: u32 = 16;

impl Product {
    /// The same at aligned addresses where nothing lies.
    pub fn aligned(&self) -> Product {
        const NOWHERE: usize = 256;
        Product {
            x: NOWHERE,
            weight: NOWHERE,
            bias: self.bias.map(|_| NOWHERE),
            residual: self.residual.map(|(_, stride)| (NOWHERE, stride)),
            out: NOWHERE,
            ..*self
        }
    }

    pub(super) fn pointers(&self) -> [usize; 4] {
        let (residual, _) = self.residual.unwrap_or((self.out, 0));
        [self.weight, self.x, residual, self.out]
    }

    pub(super) fn alignments(&self) -> [u32; 4] {
        self.pointers()
            .map(|address| 1 << address.trailing_zeros().min(WIDEST.ilog2()))
    }

    /// The rows that the library is asked about. Along the columns of `x` they are as many as it
    /// has: more would not fit between two of them.
    fn asked_rows(&self) -> usize {
        match self.x_by_columns {
            true => self.rows,
            false => rounded_rows(self.rows),
        }
    }

    /// The key of this product and of those with nearly as many rows, which share an algorithm.
    pub(super) fn key(&self) -> Key {
        let alignments = self.alignments();
        let aligned = alignments.iter().fold(0, |bits, a| bits << 5 | a);
        let flags = [
            self.bias.is_some(),
            self.residual.is_some(),
            self.x_by_columns,
            self.weight_by_columns,
        ];
        let flags = (flags.iter().rev()).fold(0, |bits, flag| bits << 1 | u32::from(*flag));
        Key {
            sizes: [self.asked_rows(), self.in_features, self.out_features],
            strides: [
                self.weight_stride,
                self.x_stride,
                self.residual.map_or(0, |(_, stride)| stride),
                self.out_stride,
            ],
            traits: self.dtype as u32 | flags << 4 | aligned << 8 | (self.out_dtype as u32) << 28,
        }
    }
}

/// Rows up to the next eighth of their power of two.
pub(super) fn rounded_rows(rows: usize) -> usize {
    let step = 1 << rows.max(8).ilog2().saturating_sub(3);
    rows.next_multiple_of(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearly_equal_rows_share_an_algorithm() {
        let cases = [
            (1, 1),
            (16, 16),
            (17, 18),
            (31, 32),
            (33, 36),
            (512, 512),
            (513, 576),
            (8191, 8192),
        ];
        for (rows, rounded) in cases {
            assert_eq!(rounded_rows(rows), rounded, "{rows}");
        }
    }

    #[test]
    fn keys_tell_apart_what_algorithms_depend_on() {
        let product = Product {
            dtype: DType::Bf16,
            out_dtype: DType::Bf16,
            rows: 512,
            in_features: 64,
            out_features: 128,
            x: 256,
            x_stride: 64,
            x_by_columns: false,
            weight: 4096,
            weight_stride: 64,
            weight_by_columns: false,
            bias: None,
            residual: None,
            out: 8192,
            out_stride: 128,
        };
        let others = [
            Product {
                dtype: DType::F16,
                ..product
            },
            Product {
                out_dtype: DType::F32,
                ..product
            },
            Product {
                rows: 600,
                ..product
            },
            Product {
                x_by_columns: true,
                ..product
            },
            Product {
                weight_by_columns: true,
                ..product
            },
            Product {
                in_features: 56,
                ..product
            },
            Product { x: 258, ..product },
            Product {
                weight: 4104,
                ..product
            },
            Product {
                out_stride: 136,
                ..product
            },
            Product {
                bias: Some(512),
                ..product
            },
            Product {
                residual: Some((8192, 128)),
                ..product
            },
        ];
        for other in others {
            assert_ne!(other.key(), product.key(), "{other:?}");
        }
        // Rows lie in the columns of x, whose stride more of them would not fit.
        let along = Product {
            rows: 500,
            x_by_columns: true,
            ..product
        };
        assert_eq!(along.key().sizes[0], 500);
        let same = Product {
            rows: 500,
            x: 512,
            ..product
        };
        assert_eq!(same.key(), product.key());
    }
}
