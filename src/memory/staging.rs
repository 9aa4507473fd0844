//! Host memory that changes while the device still reads what it held before.

use super::Buffer;
#[cfg(feature = "cuda")]
use crate::context::Device;
use crate::context::{Context, Stream};
use crate::dtype::Element;
use crate::error::Result;

/// Takes small tables to a buffer: each copy is queued from memory of its own, so the caller may write the next table at once.
#[derive(Debug)]
pub(crate) struct Staging {
    #[cfg(feature = "cuda")]
    ring: Option<crate::cuda::Ring>,
}

impl Staging {
    /// For copies of up to `size` bytes to buffers of `context`.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub fn new(op: &'static str, context: &Context, size: usize) -> Result<Staging> {
        Ok(Staging {
            #[cfg(feature = "cuda")]
            ring: match context.device() {
                Device::Cpu(_) => None,
                Device::Cuda(cuda) => Some(crate::cuda::Ring::new(op, cuda, size)?),
            },
        })
    }

    /// Queues a copy of `data` to `offset` bytes into `buffer`, on a stream that is not captured. Does not wait for it.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub fn upload<T: Element>(
        &mut self,
        op: &'static str,
        buffer: &mut Buffer,
        offset: usize,
        data: &[T],
        stream: Stream,
    ) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(ring) = &mut self.ring {
            let bytes = std::mem::size_of_val(data);
            buffer.check_range(offset, bytes)?;
            let to = buffer.as_ptr().wrapping_add(offset);
            // SAFETY: elements are plain numbers without padding; the range was checked, and its buffer frees after queued work; the
            // stream is live by the promise of whoever made it, and not captured by the caller's.
            return unsafe {
                let data = std::slice::from_raw_parts(data.as_ptr().cast::<u8>(), bytes);
                ring.upload(op, to, data, stream)
            };
        }
        buffer.copy_from_slice(offset, data, stream)
    }
}
