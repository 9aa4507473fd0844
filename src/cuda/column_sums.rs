//! Sums of the shares that a kernel's blocks have stored.

use super::device::Resources;
use super::images::column_sums::Arguments;
use super::table::Table;
use super::{Cuda, check_blocks};
use crate::backend::Stream;
use crate::error::Result;
use crate::tensor::RawTensor;

/// By dtype of the sums.
pub(super) type Kernels = Table<Arguments, 1>;

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    Kernels::new("column_sums", resources, |c| [c.dtype])
}

/// f32 terms of sums: `[rows, columns]`, contiguous.
pub(super) struct Shares {
    /// On the device.
    pub address: u64,
    /// Below 2³¹; may be none.
    pub rows: usize,
    /// Below 2³¹.
    pub columns: usize,
}

impl Shares {
    /// Queues `out = sum over rows`, or `out += ..`, which takes f32.
    ///
    /// # Safety
    /// The shares are there when the stream comes to them; `out` has `columns` contiguous elements
    /// of a float dtype.
    pub unsafe fn add(
        &self,
        cuda: &Cuda,
        op: &'static str,
        out: &RawTensor,
        accumulate: bool,
        stream: Stream,
    ) -> Result<()> {
        if self.columns == 0 {
            return Ok(());
        }
        let kernel = cuda.column_sums.get([out.dtype as u32])?;
        let per_block = kernel.choices.columns as usize;
        let blocks = check_blocks(op, "x", self.columns.div_ceil(per_block))?;
        let arguments = Arguments {
            shares: self.address,
            out: out.ptr.addr() as u64,
            rows: self.rows as u32,
            columns: self.columns as u32,
            accumulate: u32::from(accumulate),
            ..Arguments::ZERO
        };
        // SAFETY: the caller's promise.
        unsafe { cuda.launch(op, kernel, blocks, &arguments, stream) }
    }
}
