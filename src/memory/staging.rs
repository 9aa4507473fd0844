//! Tables that change on the host while the device still reads what they held before.

use super::Buffer;
use crate::backend::{Stream, Upload};
use crate::context::Context;
use crate::dtype::Element;
use crate::error::Result;

/// Takes small tables to a buffer: each copy is queued from memory of its own, so the caller may write
/// the next table at once.
#[derive(Debug)]
pub(crate) struct Staging {
    device: Box<dyn Upload>,
}

impl Staging {
    /// For copies of up to `size` bytes to buffers of `context`.
    pub fn new(op: &'static str, context: &Context, size: usize) -> Result<Staging> {
        Ok(Staging {
            device: context.device().staging(op, size)?,
        })
    }

    /// Queues a copy of `data` to `offset` bytes into `buffer`, on a stream that is not captured. Does
    /// not wait for it.
    pub fn upload<T: Element>(
        &mut self,
        op: &'static str,
        buffer: &mut Buffer,
        offset: usize,
        data: &[T],
        stream: Stream,
    ) -> Result<()> {
        let bytes = std::mem::size_of_val(data);
        buffer.check_range(offset, bytes)?;
        let to = buffer.as_ptr().wrapping_add(offset);
        // SAFETY: elements are plain numbers without padding, so their bytes are initialised. The range
        // was checked, and its buffer is freed only after queued work; the stream is live by the promise
        // of whoever made it, and the caller has seen that it is not captured.
        unsafe {
            let data = std::slice::from_raw_parts(data.as_ptr().cast::<u8>(), bytes);
            self.device.upload(op, to, data, stream)
        }
    }
}
