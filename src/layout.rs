//! Shapes and strides.

use crate::error::{Error, Result, text};

/// The greatest rank of a tensor.
pub const MAX_RANK: usize = 6;

/// Shape and strides of a tensor, both in elements, of up to [`MAX_RANK`] dimensions.
///
/// Strides are never negative; a stride of zero repeats a dimension (inputs only). The element count and the span are known
/// to fit: `span() * 8` does not overflow `isize`, so byte offsets of any dtype can be computed without checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    rank: usize,
    shape: [usize; MAX_RANK],
    strides: [usize; MAX_RANK],
}

/// The widest element, in bytes; spans are limited so that `span * MAX_ELEMENT_SIZE` fits an `isize`.
const MAX_ELEMENT_SIZE: usize = 8;

impl Layout {
    /// Of one dimension without elements.
    pub(crate) const NONE: Layout = Layout {
        rank: 1,
        shape: [0; MAX_RANK],
        strides: [1; MAX_RANK],
    };

    /// Row-major layout of `shape`.
    ///
    /// # Errors
    /// The rank is above [`MAX_RANK`] or the size overflows.
    pub fn contiguous(shape: &[usize]) -> Result<Layout> {
        let mut strides = [0; MAX_RANK];
        let rank = checked_rank(shape.len())?;
        let mut stride = 1usize;
        for i in (0..rank).rev() {
            strides[i] = stride;
            // Dimensions of size zero count as one, so that the strides of an empty tensor are still distinct.
            stride = stride
                .checked_mul(shape[i].max(1))
                .ok_or_else(|| overflow(shape))?;
        }
        Layout::strided(shape, &strides[..rank])
    }

    /// Layout of `shape` with explicit `strides`, in elements.
    ///
    /// # Errors
    /// The ranks differ or are above [`MAX_RANK`], or the span overflows.
    pub fn strided(shape: &[usize], strides: &[usize]) -> Result<Layout> {
        let rank = checked_rank(shape.len())?;
        if strides.len() != rank {
            return Err(Error::invalid(
                "tensor",
                "strides",
                text!("have {} entries, the shape has {rank}", strides.len()),
            ));
        }
        let mut layout = Layout {
            rank,
            shape: [0; MAX_RANK],
            strides: [0; MAX_RANK],
        };
        layout.shape[..rank].copy_from_slice(shape);
        layout.strides[..rank].copy_from_slice(strides);
        let limit = isize::MAX as usize / MAX_ELEMENT_SIZE;
        let mut count = 1usize;
        let mut last = 0usize;
        for (&n, &s) in shape.iter().zip(strides) {
            // Sizes are multiplied with zeros left out: an empty tensor of absurd shape is refused too.
            count = count.checked_mul(n.max(1)).ok_or_else(|| overflow(shape))?;
            let reach = n
                .saturating_sub(1)
                .checked_mul(s)
                .ok_or_else(|| overflow(shape))?;
            last = last.checked_add(reach).ok_or_else(|| overflow(shape))?;
        }
        if count > limit || last >= limit {
            return Err(overflow(shape));
        }
        Ok(layout)
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Sizes of the dimensions.
    pub fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    /// Distances between neighbours along each dimension, in elements.
    pub fn strides(&self) -> &[usize] {
        &self.strides[..self.rank]
    }

    /// Size of dimension `dim`; 1 past the rank.
    pub fn dim(&self, dim: usize) -> usize {
        if dim < self.rank { self.shape[dim] } else { 1 }
    }

    /// Stride of dimension `dim`; 0 past the rank.
    pub fn stride(&self, dim: usize) -> usize {
        if dim < self.rank {
            self.strides[dim]
        } else {
            0
        }
    }

    /// Number of elements.
    pub fn num_elements(&self) -> usize {
        self.shape().iter().product()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.shape().contains(&0)
    }

    /// Elements from the first to the last one, both included; 0 if empty.
    pub fn span(&self) -> usize {
        if self.is_empty() {
            return 0;
        }
        let last: usize = self
            .shape()
            .iter()
            .zip(self.strides())
            .map(|(&n, &s)| (n - 1) * s)
            .sum();
        last + 1
    }

    /// Whether the elements lie in row-major order without gaps.
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        for i in (0..self.rank).rev() {
            if self.shape[i] != 1 && self.strides[i] != expected {
                return self.is_empty();
            }
            expected *= self.shape[i];
        }
        true
    }

    /// Whether neighbours along the last dimension are neighbours in memory.
    pub fn is_last_contiguous(&self) -> bool {
        self.rank > 0 && (self.strides[self.rank - 1] == 1 || self.shape[self.rank - 1] <= 1)
    }

    /// Whether every row is of whole blocks of `len` elements, and begins where one does. A block
    /// lies along the last dimension, which is contiguous unless `len` is 1.
    pub fn is_in_blocks(&self, len: usize) -> bool {
        let Some((row, outer)) = self.shape().split_last() else {
            return true;
        };
        len == 1
            || self.is_last_contiguous()
                && row.is_multiple_of(len)
                && self
                    .strides()
                    .iter()
                    .zip(outer)
                    .all(|(s, &n)| n <= 1 || s.is_multiple_of(len))
    }

    /// Whether two index tuples may reach the same element (sufficient test: strides sorted by size must each clear the span of
    /// the smaller ones). Outputs must not overlap themselves.
    pub fn may_self_overlap(&self) -> bool {
        if self.is_empty() {
            return false;
        }
        if self.is_contiguous() {
            return false;
        }
        let mut dims = [(0, 1); MAX_RANK];
        for (dim, (&stride, &n)) in dims.iter_mut().zip(self.strides().iter().zip(self.shape())) {
            *dim = (stride, n);
        }
        dims.sort_unstable();
        let mut reach = 0;
        for (stride, n) in dims.into_iter().filter(|(_, n)| *n > 1) {
            if stride <= reach {
                return true;
            }
            reach += (n - 1) * stride;
        }
        false
    }

    /// Number of rows: the product of every dimension but the last.
    pub fn num_rows(&self) -> usize {
        self.shape()[..self.rank.saturating_sub(1)].iter().product()
    }

    /// Offset in elements of row `row`, counted in row-major order over every dimension but the last.
    pub fn row_offset(&self, mut row: usize) -> usize {
        let mut offset = 0;
        for i in (0..self.rank.saturating_sub(1)).rev() {
            let n = self.shape[i].max(1);
            offset += (row % n) * self.strides[i];
            row /= n;
        }
        offset
    }

    /// The same elements as `[rows, columns]`, if rows are equally spaced.
    pub(crate) fn as_rows(&self) -> Option<Layout> {
        let last = self.rank.checked_sub(1)?;
        // Outer dimensions step over whole inner ones; those of one entry have no step.
        let mut outer = (0..last).rev().filter(|i| self.shape[*i] > 1);
        let mut stride = self.shape[last].max(1);
        if let Some(inner) = outer.next() {
            stride = self.strides[inner];
            let mut span = stride.checked_mul(self.shape[inner])?;
            for i in outer {
                if self.strides[i] != span {
                    return None;
                }
                span = span.checked_mul(self.shape[i])?;
            }
        }
        let shape = [self.num_rows(), self.shape[last]];
        Layout::strided(&shape, &[stride, self.strides[last]]).ok()
    }

    /// The layout with dimensions `a` and `b` exchanged.
    ///
    /// # Errors
    /// A dimension is not below the rank.
    pub fn transposed(&self, a: usize, b: usize) -> Result<Layout> {
        self.check_dim(a)?;
        self.check_dim(b)?;
        let mut out = *self;
        out.shape.swap(a, b);
        out.strides.swap(a, b);
        Ok(out)
    }

    /// The layout and the offset (in elements) of `len` entries from `start` along dimension `dim`.
    ///
    /// # Errors
    /// The range does not lie inside the dimension.
    pub fn narrowed(&self, dim: usize, start: usize, len: usize) -> Result<(Layout, usize)> {
        self.check_dim(dim)?;
        if start
            .checked_add(len)
            .is_none_or(|end| end > self.shape[dim])
        {
            return Err(Error::invalid(
                "tensor",
                "range",
                text!(
                    "of {len} from {start} is outside dimension {dim} of size {}",
                    self.shape[dim]
                ),
            ));
        }
        let mut out = *self;
        out.shape[dim] = len;
        // An empty view points at the start, so that no view begins past the end of its allocation.
        Ok((
            out,
            if out.is_empty() {
                0
            } else {
                start * self.strides[dim]
            },
        ))
    }

    /// The layout with dimension `dim` split into `sizes`, whose product must be its size.
    ///
    /// # Errors
    /// The product differs or the rank would pass [`MAX_RANK`].
    pub fn unflattened(&self, dim: usize, sizes: &[usize]) -> Result<Layout> {
        self.check_dim(dim)?;
        let product = sizes.iter().try_fold(1usize, |p, &n| p.checked_mul(n));
        if product != Some(self.shape[dim]) {
            return Err(Error::invalid(
                "tensor",
                "sizes",
                text!(
                    "{sizes:?} do not multiply to {} of dimension {dim}",
                    self.shape[dim]
                ),
            ));
        }
        let rank = checked_rank(self.rank - 1 + sizes.len())?;
        let after = dim + sizes.len();
        let (mut shape, mut strides) = (self.shape, self.strides);
        shape[after..rank].copy_from_slice(&self.shape()[dim + 1..]);
        strides[after..rank].copy_from_slice(&self.strides()[dim + 1..]);
        let mut inner = product.unwrap_or(0);
        for (i, &n) in (dim..after).zip(sizes) {
            inner = inner.checked_div(n).unwrap_or(0);
            shape[i] = n;
            strides[i] = self.strides[dim] * inner;
        }
        Layout::strided(&shape[..rank], &strides[..rank])
    }

    fn check_dim(&self, dim: usize) -> Result<()> {
        if dim < self.rank {
            return Ok(());
        }
        Err(Error::invalid(
            "tensor",
            "dimension",
            text!("{dim} is not below rank {}", self.rank),
        ))
    }
}

fn checked_rank(rank: usize) -> Result<usize> {
    if rank <= MAX_RANK {
        return Ok(rank);
    }
    Err(Error::invalid(
        "tensor",
        "rank",
        text!("{rank} is above the maximum {MAX_RANK}"),
    ))
}

fn overflow(shape: &[usize]) -> Error {
    Error::invalid(
        "tensor",
        "shape",
        text!("{shape:?} overflows the address space"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contiguous_strides() {
        let l = Layout::contiguous(&[2, 3, 4]).unwrap();
        assert_eq!(l.strides(), [12, 4, 1]);
        assert_eq!((l.num_elements(), l.span(), l.num_rows()), (24, 24, 6));
        assert!(l.is_contiguous() && !l.may_self_overlap());
        assert_eq!(l.row_offset(4), 16);
    }

    #[test]
    fn empty_and_unit_dimensions() {
        let l = Layout::contiguous(&[2, 0, 4]).unwrap();
        assert_eq!((l.num_elements(), l.span(), l.num_rows()), (0, 0, 0));
        assert!(l.is_contiguous() && !l.may_self_overlap());
        let l = Layout::strided(&[1, 5], &[999, 1]).unwrap();
        assert!(l.is_contiguous());
    }

    #[test]
    fn rows_are_equally_spaced_or_not() {
        for (shape, strides, rows) in [
            (&[5][..], &[1][..], Some([1, 5, 5, 1])),
            (&[3, 5], &[8, 1], Some([3, 5, 8, 1])),
            (&[2, 3, 5], &[24, 8, 1], Some([6, 5, 8, 1])),
            (&[2, 3, 5], &[25, 8, 1], None),
            (&[2, 1, 3, 5], &[24, 7, 8, 1], Some([6, 5, 8, 1])),
            (&[1, 1, 5], &[9, 9, 1], Some([1, 5, 5, 1])),
            (&[2, 1, 5], &[9, 1, 1], Some([2, 5, 9, 1])),
            (&[2, 0, 5], &[0, 8, 1], Some([0, 5, 0, 1])),
            (&[], &[], None),
        ] {
            let found = Layout::strided(shape, strides).unwrap().as_rows();
            let found = found.map(|l| [l.dim(0), l.dim(1), l.stride(0), l.stride(1)]);
            assert_eq!(found, rows, "{shape:?} {strides:?}");
        }
    }

    #[test]
    fn overflow_is_refused() {
        for shape in [
            &[usize::MAX, 2][..],
            &[1 << 40, 1 << 40],
            &[0, usize::MAX, usize::MAX],
        ] {
            assert!(Layout::contiguous(shape).is_err(), "{shape:?}");
        }
        assert!(Layout::strided(&[2], &[usize::MAX]).is_err());
        assert!(Layout::contiguous(&[1; MAX_RANK + 1]).is_err());
        assert!(Layout::strided(&[2, 2], &[2]).is_err());
    }

    #[test]
    fn self_overlap() {
        let overlap = |shape: &[usize], strides: &[usize]| {
            Layout::strided(shape, strides).unwrap().may_self_overlap()
        };
        assert!(overlap(&[2, 3], &[0, 1]));
        assert!(overlap(&[2, 3], &[2, 1]));
        assert!(!overlap(&[2, 3], &[3, 1]));
        assert!(!overlap(&[3, 2], &[1, 3]));
        assert!(!overlap(&[1, 3], &[0, 1]));
    }

    #[test]
    fn views() {
        let l = Layout::contiguous(&[2, 12]).unwrap();
        let (n, offset) = l.narrowed(1, 4, 8).unwrap();
        assert_eq!(
            (n.shape(), n.strides(), offset),
            (&[2, 8][..], &[12, 1][..], 4)
        );
        let u = n.unflattened(1, &[2, 4]).unwrap();
        assert_eq!((u.shape(), u.strides()), (&[2, 2, 4][..], &[12, 4, 1][..]));
        assert_eq!(u.transposed(0, 1).unwrap().strides(), [4, 12, 1]);
        assert!(l.narrowed(1, 8, 5).is_err() && l.narrowed(1, usize::MAX, 2).is_err());
        assert!(l.unflattened(1, &[5, 2]).is_err() && l.transposed(0, 2).is_err());
    }
}
