//! Sums of the shares that a kernel's blocks have stored.

use super::device::Resources;
use super::images::column_sums::Arguments;
use super::table::Table;
use super::{Cuda, check_blocks};
use crate::backend::Stream;
use crate::error::Result;
use crate::tensor::RawTensor;

/// By dtype of the sums, and whether columns are read in vectors.
pub(super) type Kernels = Table<Arguments, 2>;

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    Kernels::new("column_sums", resources, |c| {
        [c.dtype, u32::from(c.width > 1)]
    })
}

/// Columns from which on they are read in vectors. Measured on an H200.
const MANY: usize = 8192;

/// f32 terms of up to two rows of sums: `[rows, columns]` of each, contiguous.
pub(super) struct Shares {
    /// On the device.
    pub addresses: [u64; 2],
    /// Of each below 2³¹; may be none.
    pub rows: [usize; 2],
    /// Below 2³¹.
    pub columns: usize,
}

impl Shares {
    /// Queues `out = sum over rows`, or `out += ..`, which takes f32, for the outputs that are
    /// there: one launch, where they have one dtype.
    ///
    /// # Safety
    /// The shares are there when the stream comes to them; outputs have `columns` contiguous
    /// elements of a float dtype.
    pub unsafe fn add(
        &self,
        cuda: &Cuda,
        op: &'static str,
        outs: [Option<RawTensor>; 2],
        accumulate: bool,
        stream: Stream,
    ) -> Result<()> {
        let add = |which, out: &RawTensor, more: Option<&RawTensor>| {
            // SAFETY: the caller's promise.
            unsafe { self.launch(cuda, op, (which, out), more, accumulate, stream) }
        };
        match &outs {
            [Some(a), Some(b)] if a.dtype == b.dtype => add(0, a, Some(b)),
            [a, b] => {
                a.as_ref().map_or(Ok(()), |a| add(0, a, None))?;
                b.as_ref().map_or(Ok(()), |b| add(1, b, None))
            }
        }
    }

    /// Queues the sums of the shares `which`, and with `more` those of the second.
    ///
    /// # Safety
    /// As [`Shares::add`]; the outputs have one dtype.
    unsafe fn launch(
        &self,
        cuda: &Cuda,
        op: &'static str,
        (which, out): (usize, &RawTensor),
        more: Option<&RawTensor>,
        accumulate: bool,
        stream: Stream,
    ) -> Result<()> {
        if self.columns == 0 {
            return Ok(());
        }
        let width = match self.columns >= MANY && self.columns.is_multiple_of(4) {
            true => 4,
            false => 1,
        };
        let kernel = cuda
            .column_sums
            .get([out.dtype as u32, u32::from(width > 1)])?;
        let groups = self.columns.div_ceil(kernel.choices.columns as usize);
        let blocks = check_blocks(op, "x", groups << u32::from(more.is_some()))?;
        let arguments = Arguments {
            shares: self.addresses[which],
            more_shares: self.addresses[1],
            out: out.ptr.addr() as u64,
            more_out: more.map_or(0, |more| more.ptr.addr() as u64),
            rows: self.rows[which] as u32,
            more_rows: self.rows[1] as u32,
            columns: (self.columns / width) as u32,
            accumulate: u32::from(accumulate),
        };
        // SAFETY: the caller's promise.
        unsafe { cuda.launch(op, kernel, blocks, &arguments, stream) }
    }
}
