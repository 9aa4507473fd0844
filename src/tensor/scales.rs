//! The scales of a tensor whose elements are codes.

use super::{Place, RawTensor};
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::layout::Layout;

/// The scales of a tensor whose elements are codes: f32, each for as many rows of a weight, or for a head
/// of keys or values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scales {
    pub ptr: *mut f32,
    pub len: usize,
    pub place: Option<Place>,
}

// SAFETY: as a RawTensor's.
unsafe impl Send for Scales {}
// SAFETY: as above.
unsafe impl Sync for Scales {}

impl Scales {
    /// As a tensor.
    pub fn raw(&self) -> RawTensor {
        RawTensor {
            ptr: self.ptr.cast(),
            dtype: DType::F32,
            layout: Layout::contiguous(&[self.len]).unwrap_or(Layout::NONE),
        }
    }

    /// Those of `len` rows from `start` on.
    ///
    /// # Errors
    /// The rows have no scales of their own.
    pub fn of_rows(self, rows: usize, start: usize, len: usize) -> Result<Scales> {
        let each = rows.checked_div(self.len).unwrap_or(0);
        if self.len == 1 || each == 0 {
            return Ok(self);
        }
        if !start.is_multiple_of(each) || !len.is_multiple_of(each) {
            let problem = text!(
                "has {} scales, rows {start} to {} have none of their own",
                self.len,
                start + len
            );
            return Err(Error::invalid("tensor", "quantization", problem));
        }
        Ok(Scales {
            ptr: self.ptr.wrapping_add(start / each),
            len: len / each,
            ..self
        })
    }
}
