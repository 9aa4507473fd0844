//! What operations and backends work with: tensors without lifetimes.

use arrayvec::ArrayVec;

use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::layout::{Layout, MAX_RANK};

/// Pointer, dtype and layout: what backends work with once arguments have been checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawTensor {
    pub ptr: *mut u8,
    pub dtype: DType,
    pub layout: Layout,
}

// SAFETY: a RawTensor is an address and a description; the operations that dereference it carry the obligations.
unsafe impl Send for RawTensor {}
// SAFETY: as above.
unsafe impl Sync for RawTensor {}

impl RawTensor {
    /// The half-open range of byte addresses from the first element to the last.
    pub fn byte_range(&self) -> std::ops::Range<usize> {
        let start = self.ptr as usize;
        start..start.saturating_add(self.dtype.row_bytes(self.layout.span()))
    }

    /// Whether the two may share an address: their byte ranges do, and they are not seen to interleave.
    pub fn overlaps(&self, other: &RawTensor) -> bool {
        let (a, b) = (self.byte_range(), other.byte_range());
        a.start < b.end && b.start < a.end && !self.interleaves(other)
    }

    /// Whether some pitch cuts memory into rows of which the two occupy different columns, as the parts of a packed projection
    /// do.
    fn interleaves(&self, other: &RawTensor) -> bool {
        let strides = |t: &RawTensor| {
            let (len, size) = t.dtype.block();
            let (shape, strides) = (t.layout.shape(), t.layout.strides());
            let repeated = (0..shape.len()).filter(|&i| shape[i] > 1);
            let pairs: ArrayVec<(usize, usize), MAX_RANK> = repeated
                .map(|i| match strides[i].is_multiple_of(len) {
                    true => (strides[i] / len * size, shape[i]),
                    // Within blocks: these are neighbours.
                    false => (size, shape[i].div_ceil(len)),
                })
                .collect();
            (size, pairs)
        };
        let ((size_a, a), (size_b, b)) = (strides(self), strides(other));
        // Columns that a tensor occupies from its first element on, if its larger strides keep to whole rows.
        let columns = |size: usize, dims: &[(usize, usize)], pitch: usize| {
            let mut reach = size;
            for &(stride, n) in dims {
                if stride < pitch {
                    reach += (n - 1) * stride;
                } else if stride % pitch != 0 {
                    return None;
                }
            }
            (reach <= pitch).then_some(reach)
        };
        let distance = (other.ptr as usize).wrapping_sub(self.ptr as usize) as isize;
        let pitches = a.iter().chain(&b).map(|&(stride, _)| stride);
        pitches.filter(|&pitch| pitch > 0).any(|pitch| {
            let (Some(a), Some(b)) = (columns(size_a, &a, pitch), columns(size_b, &b, pitch))
            else {
                return false;
            };
            let column = distance.rem_euclid(pitch as isize) as usize;
            column >= a && column + b <= pitch
        })
    }

    /// Whether both describe the same elements in the same order.
    pub fn same_as(&self, other: &RawTensor) -> bool {
        self.ptr == other.ptr && self.dtype == other.dtype && self.layout == other.layout
    }

    /// `len` rows from `start` as `[len, columns]`, rows being counted over every dimension but the last; `None`
    /// where rows are not equally spaced.
    pub fn rows(&self, start: usize, len: usize) -> Result<Option<RawTensor>> {
        let all = self.layout.as_rows();
        let all = all.map(|layout| RawTensor { layout, ..*self });
        all.map(|all| all.narrowed(0, start, len)).transpose()
    }

    /// `len` entries from `start` along dimension `dim`.
    pub fn narrowed(&self, dim: usize, start: usize, len: usize) -> Result<RawTensor> {
        let (layout, offset) = self.layout.narrowed(dim, start, len)?;
        if !layout.is_in_blocks(self.dtype.block().0)
            || !offset.is_multiple_of(self.dtype.block().0)
        {
            let problem = text!(
                "of {len} from {start} cuts blocks of {} elements of {}",
                self.dtype.block().0,
                self.dtype
            );
            return Err(Error::invalid("tensor", "range", problem));
        }
        Ok(self.offset(layout, offset))
    }

    /// `elements` is a multiple of the dtype's block.
    pub(super) fn offset(&self, layout: Layout, elements: usize) -> RawTensor {
        // wrapping: the pointer may be NULL in a query, and is then never dereferenced.
        let ptr = self.ptr.wrapping_add(self.dtype.row_bytes(elements));
        RawTensor {
            ptr,
            dtype: self.dtype,
            layout,
        }
    }
}
