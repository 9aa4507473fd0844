//! Tensor maps: how the copy engine (TMA) finds a box of a tensor.

use std::ffi::{c_int, c_void};

use crate::cuda::driver::Driver;
pub(super) use crate::cuda::images::TensorMap;
use crate::dtype::DType;
use crate::error::{Error, Result, text};

/// Bytes that addresses and strides must be multiples of.
pub(super) const ALIGNMENT: usize = 16;
/// Strides in bytes are below this.
pub(super) const MAX_STRIDE: usize = 1 << 40;
/// Columns of a box: 128 bytes of 16-bit elements, the span of the swizzle.
pub(super) const COLUMNS: u32 = 64;

const SWIZZLE_NONE: c_int = 0;
const SWIZZLE_64_BYTES: c_int = 2;
const SWIZZLE_128_BYTES: c_int = 3;

/// What the cache (L2) reads from memory where a box has any of it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Fetch {
    Bytes128 = 2,
    Bytes256 = 3,
}

impl TensorMap {
    /// Describes a tensor of `N` dimensions, the contiguous one first, from which boxes are copied; outside it reads as zeros. A
    /// swizzle spans a box's columns, of 64 bytes or 128; others are copied as they lie, and are whole lines of [`ALIGNMENT`].
    /// `strides` in elements are of the dimensions after the first; that of a dimension with one entry may be zero.
    pub(super) fn new<const N: usize>(
        driver: &Driver,
        op: &'static str,
        ptr: *mut u8,
        dtype: DType,
        sizes: [usize; N],
        strides: &[usize],
        counts: [u32; N],
    ) -> Result<TensorMap> {
        let elements = (dtype, Fetch::Bytes256);
        TensorMap::fetching(driver, op, ptr, elements, sizes, strides, counts)
    }

    /// The same, with a choice of what the cache reads.
    pub(super) fn fetching<const N: usize>(
        driver: &Driver,
        op: &'static str,
        ptr: *mut u8,
        (dtype, fetch): (DType, Fetch),
        sizes: [usize; N],
        strides: &[usize],
        counts: [u32; N],
    ) -> Result<TensorMap> {
        let kind = match dtype {
            DType::F16 => 6,
            DType::Bf16 => 9,
            DType::F8E4M3 => 0,
            other => {
                let message = text!("a tensor map was asked for {other}");
                return Err(Error::Internal { op, message });
            }
        };
        let swizzle = match counts[0] as usize * dtype.size() {
            64 => SWIZZLE_64_BYTES,
            128 => SWIZZLE_128_BYTES,
            _ => SWIZZLE_NONE,
        };
        let sizes = sizes.map(|size| size as u64);
        let mut bytes = [ALIGNMENT as u64; N];
        for (to, stride) in bytes.iter_mut().zip(strides) {
            *to = (stride * dtype.size()).max(ALIGNMENT) as u64;
        }
        let steps = [1u32; N];
        let mut map = TensorMap::ZERO;
        // SAFETY: the arrays have `N` entries, which is the rank; the map is aligned and valid for a write. The tensor is not touched.
        unsafe {
            driver.tensor_map(
                op,
                (&raw mut map).cast::<c_void>(),
                kind,
                N as u32,
                ptr.cast(),
                sizes.as_ptr(),
                bytes.as_ptr(),
                counts.as_ptr(),
                steps.as_ptr(),
                0,
                swizzle,
                fetch as c_int,
                0,
            )
        }?;
        Ok(map)
    }
}
