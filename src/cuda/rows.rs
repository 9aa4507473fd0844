//! Rows of several tensors of one shape, as kernels walk them.

use std::ops::Range;

use crate::layout::{Layout, MAX_RANK};

/// Row dimensions that a kernel takes.
pub(super) const DIMS: usize = 3;

/// The dimensions of `N` tensors of one shape, all but the last, with neighbours merged where every tensor allows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rows<const N: usize> {
    rank: usize,
    sizes: [usize; MAX_RANK],
    /// Per dimension, the stride of each tensor.
    strides: [[usize; N]; MAX_RANK],
}

/// A divisor as kernels take it, who divide numbers below 2³¹ by multiplying (Granlund and Montgomery, "Division by invariant integers
/// using multiplication", 1994).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Divisor {
    pub size: u32,
    pub multiplier: u32,
    pub shift: u32,
}

impl Divisor {
    /// Of a size from 1 to 2³¹.
    pub fn new(size: usize) -> Divisor {
        debug_assert!((1..=1 << 31).contains(&size));
        let size = size.max(1) as u64;
        // The least with 2^shift >= size, so that 2^32 (2^shift - size) / size is below 2^32.
        let shift = size.next_power_of_two().trailing_zeros();
        let multiplier = match size.is_power_of_two() {
            true => 1,
            false => (((1 << shift) - size) << 32) / size + 1,
        };
        Divisor {
            size: size as u32,
            multiplier: multiplier as u32,
            shift,
        }
    }
}

/// What one launch covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Launch<const N: usize> {
    /// Elements from the beginning of each tensor to its first row.
    pub offsets: [usize; N],
    /// Sizes of the row dimensions, outermost first, then ones: equally spaced rows have one dimension, the first.
    pub sizes: [usize; DIMS],
    /// Per row dimension, the stride of each tensor.
    pub strides: [[usize; N]; DIMS],
}

impl<const N: usize> Launch<N> {
    pub fn num_rows(&self) -> usize {
        self.sizes.iter().product()
    }

    /// The sizes that kernels divide by.
    pub fn divisors(&self) -> [Divisor; 2] {
        [self.sizes[1], self.sizes[2]].map(Divisor::new)
    }
}

/// Equally spaced rows of each tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Matrix<const N: usize> {
    /// Elements from the beginning of each tensor to its first row.
    pub offsets: [usize; N],
    /// Number of rows.
    pub rows: usize,
    /// From row to row, of each tensor.
    pub strides: [usize; N],
}

impl<const N: usize> Matrix<N> {
    /// Some of the rows.
    pub fn part(&self, rows: Range<usize>) -> Self {
        let mut part = *self;
        for (offset, stride) in part.offsets.iter_mut().zip(self.strides) {
            *offset += rows.start * stride;
        }
        part.rows = rows.len();
        part
    }
}

impl<const N: usize> Rows<N> {
    /// Every dimension but the last of layouts that have one shape.
    pub fn new(layouts: [&Layout; N]) -> Self {
        let rank = layouts.first().map_or(0, |l| l.rank()).saturating_sub(1);
        Self::of_dims(rank, layouts)
    }

    /// The first `rank` dimensions, in which the layouts agree.
    pub fn of_dims(rank: usize, layouts: [&Layout; N]) -> Self {
        let mut rows = Rows {
            rank: 0,
            sizes: [1; MAX_RANK],
            strides: [[0; N]; MAX_RANK],
        };
        for dim in 0..rank {
            let size = layouts.first().map_or(1, |l| l.dim(dim));
            if size == 1 {
                continue;
            }
            let strides = layouts.map(|l| l.stride(dim));
            let merges = rows.rank > 0
                && (0..N).all(|t| rows.strides[rows.rank - 1][t] == size * strides[t]);
            if merges {
                rows.sizes[rows.rank - 1] *= size;
                rows.strides[rows.rank - 1] = strides;
            } else {
                rows.sizes[rows.rank] = size;
                rows.strides[rows.rank] = strides;
                rows.rank += 1;
            }
        }
        rows
    }

    /// The greatest number of rows in a launch.
    pub fn rows_per_launch(&self) -> usize {
        self.sizes[self.outer()..self.rank].iter().product()
    }

    /// Rows of `length` elements made as long as they can be: of what follows each other without gaps in every tensor.
    pub fn lengthened(mut self, mut length: usize) -> (Self, usize) {
        while let Some(inner) = self.rank.checked_sub(1)
            && self.strides[inner].iter().all(|stride| *stride == length)
        {
            length *= self.sizes[inner];
            self.sizes[inner] = 1;
            self.strides[inner] = [0; N];
            self.rank = inner;
        }
        (self, length)
    }

    /// Whether every row of every tensor begins a multiple of `elements` after the tensor.
    pub fn aligned_to(&self, elements: usize) -> bool {
        self.strides[..self.rank]
            .iter()
            .flatten()
            .all(|stride| stride.is_multiple_of(elements))
    }

    /// [`Rows::aligned_to`] of one tensor.
    pub fn aligned_to_of(&self, tensor: usize, elements: usize) -> bool {
        let mut strides = self.strides[..self.rank].iter();
        strides.all(|s| s.get(tensor).is_none_or(|s| s.is_multiple_of(elements)))
    }

    /// The launches that cover all rows: one, unless more dimensions are left than a kernel takes.
    pub fn launches(&self) -> impl Iterator<Item = Launch<N>> + '_ {
        let outer = self.outer();
        let mut sizes = [1; DIMS];
        let mut strides = [[0; N]; DIMS];
        let inner = self.rank - outer;
        sizes[..inner].copy_from_slice(&self.sizes[outer..self.rank]);
        strides[..inner].copy_from_slice(&self.strides[outer..self.rank]);
        let count: usize = self.sizes[..outer].iter().product();
        (0..count).map(move |mut index| {
            let mut offsets = [0; N];
            for dim in (0..outer).rev() {
                let i = index % self.sizes[dim];
                index /= self.sizes[dim];
                for (offset, stride) in offsets.iter_mut().zip(&self.strides[dim]) {
                    *offset += i * stride;
                }
            }
            Launch {
                offsets,
                sizes,
                strides,
            }
        })
    }

    /// The matrices that cover all rows: one, unless the dimensions do not merge, in which case the longest gives the rows.
    pub fn matrices(&self) -> impl Iterator<Item = Matrix<N>> + '_ {
        let longest = (0..self.rank).max_by_key(|dim| self.sizes[*dim]);
        let (rows, strides) =
            longest.map_or((1, [0; N]), |dim| (self.sizes[dim], self.strides[dim]));
        let others = move || {
            (0..self.rank)
                .rev()
                .filter(move |dim| Some(*dim) != longest)
        };
        let count: usize = others().map(|dim| self.sizes[dim]).product();
        (0..count).map(move |mut index| {
            let mut offsets = [0; N];
            for dim in others() {
                let i = index % self.sizes[dim];
                index /= self.sizes[dim];
                for (offset, stride) in offsets.iter_mut().zip(&self.strides[dim]) {
                    *offset += i * stride;
                }
            }
            Matrix {
                offsets,
                rows,
                strides,
            }
        })
    }

    /// Sizes and strides of all dimensions, the outermost first, then ones: for kernels that take
    /// as many as there are.
    pub fn dims(&self) -> ([usize; MAX_RANK - 1], [[usize; N]; MAX_RANK - 1]) {
        let mut sizes = [1; MAX_RANK - 1];
        let mut strides = [[0; N]; MAX_RANK - 1];
        // Rows have a dimension less than their tensor.
        let rank = self.rank.min(MAX_RANK - 1);
        sizes[..rank].copy_from_slice(&self.sizes[..rank]);
        strides[..rank].copy_from_slice(&self.strides[..rank]);
        (sizes, strides)
    }

    /// Dimensions that a launch does not cover.
    fn outer(&self) -> usize {
        self.rank.saturating_sub(DIMS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offsets<const N: usize>(rows: &Rows<N>) -> Vec<[usize; N]> {
        let mut all = Vec::new();
        for launch in rows.launches() {
            let [a, b, c] = launch.sizes;
            for row in 0..a * b * c {
                let index = [row / (b * c), row / c % b, row % c];
                let mut at = launch.offsets;
                for (i, strides) in index.iter().zip(&launch.strides) {
                    for (offset, stride) in at.iter_mut().zip(strides) {
                        *offset += i * stride;
                    }
                }
                all.push(at);
            }
        }
        all
    }

    #[test]
    fn rows_are_where_the_layouts_say() {
        let contiguous = |shape: &[usize]| Layout::contiguous(shape).unwrap();
        let cases = [
            (contiguous(&[7]), contiguous(&[7]), 0, 1),
            (contiguous(&[5, 7]), contiguous(&[5, 7]), 1, 1),
            (contiguous(&[2, 3, 4, 8]), contiguous(&[2, 3, 4, 8]), 1, 1),
            (
                contiguous(&[2, 4, 3, 8]).transposed(1, 2).unwrap(),
                contiguous(&[2, 3, 4, 8]),
                3,
                1,
            ),
            (
                contiguous(&[1, 4, 3, 8]).transposed(1, 2).unwrap(),
                contiguous(&[1, 3, 4, 8]),
                2,
                1,
            ),
            (
                Layout::strided(&[2, 3, 2, 3, 2, 4], &[500, 150, 70, 20, 9, 1]).unwrap(),
                contiguous(&[2, 3, 2, 3, 2, 4]),
                5,
                6,
            ),
        ];
        for (a, b, rank, launches) in cases {
            let rows = Rows::new([&a, &b]);
            assert_eq!((rows.rank, rows.launches().count()), (rank, launches));
            assert_eq!(rows.rows_per_launch() * launches, a.num_rows());
            let expected: Vec<_> = (0..a.num_rows())
                .map(|row| [a.row_offset(row), b.row_offset(row)])
                .collect();
            assert_eq!(offsets(&rows), expected);
            let mut of_matrices: Vec<_> = rows
                .matrices()
                .flat_map(|m| {
                    (0..m.rows).map(move |row| {
                        [0, 1].map(|tensor| m.offsets[tensor] + row * m.strides[tensor])
                    })
                })
                .collect();
            of_matrices.sort_unstable();
            let mut expected = expected;
            expected.sort_unstable();
            assert_eq!(of_matrices, expected);
        }
    }

    #[test]
    fn divisors_divide() {
        const LAST: u32 = (1 << 31) - 1;
        let divide = |n: u32, by: Divisor| {
            let high = (u64::from(n) * u64::from(by.multiplier)) >> 32;
            (high as u32 + n) >> by.shift
        };
        let sizes = (1..300).chain((0..=31).flat_map(|bit| {
            let power = 1usize << bit;
            [
                power.saturating_sub(1).max(1),
                power,
                (power + 1).min(1 << 31),
            ]
        }));
        for size in sizes {
            let by = Divisor::new(size);
            let multiples = [1, 2, 3, 1000, LAST / size as u32];
            let near = multiples.map(|m| m.saturating_mul(size as u32).min(LAST));
            for n in near.into_iter().chain([0, 1, 12_345_678, LAST]) {
                for n in [n.saturating_sub(1), n, (n + 1).min(LAST)] {
                    assert_eq!(divide(n, by), n / size as u32, "{n} / {size}");
                }
            }
        }
    }

    #[test]
    fn rows_without_gaps_are_longer_ones() {
        let a = Layout::contiguous(&[2, 3, 16]).unwrap();
        let b = Layout::strided(&[2, 3, 16], &[60, 20, 1]).unwrap();
        let c = Layout::strided(&[2, 3, 16], &[60, 16, 1]).unwrap();
        let lengthened = |layouts| {
            let (rows, length) = Rows::new(layouts).lengthened(16);
            (rows.rank, rows.rows_per_launch(), length)
        };
        assert_eq!(lengthened([&a, &a]), (0, 1, 96));
        assert_eq!(lengthened([&a, &b]), (1, 6, 16));
        assert_eq!(lengthened([&a, &c]), (1, 2, 48));
        let single = Layout::strided(&[1, 16], &[99, 1]).unwrap();
        assert_eq!(lengthened([&single, &single]), (0, 1, 16));
    }

    #[test]
    fn alignment_is_that_of_every_stride() {
        let a = Layout::contiguous(&[4, 16]).unwrap();
        let b = Layout::strided(&[4, 16], &[20, 1]).unwrap();
        assert!(Rows::new([&a]).aligned_to(8) && !Rows::new([&a, &b]).aligned_to(8));
        let one = Layout::strided(&[1, 16], &[3, 1]).unwrap();
        assert!(Rows::new([&one]).aligned_to(8));
    }
}
