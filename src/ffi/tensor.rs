//! Tensors.

use std::ffi::c_void;

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::ffi::status::unsloth_status;
use crate::ffi::{check_out, check_pointer, guard, write_optional};
use crate::layout::{Layout, MAX_RANK};
use crate::tensor::{InOut, TensorMut, TensorRef, Workspace};

/// The greatest rank of a tensor.
pub const UNSLOTH_MAX_RANK: usize = 6;
const _: () = assert!(UNSLOTH_MAX_RANK == MAX_RANK);

/// The type of a tensor's elements. Zero is none, so that a zeroed tensor is recognised as absent.
pub type unsloth_dtype = u32;
/// IEEE binary32.
pub const UNSLOTH_DTYPE_F32: unsloth_dtype = 1;
/// IEEE binary16.
pub const UNSLOTH_DTYPE_F16: unsloth_dtype = 2;
/// bfloat16, the upper half of binary32.
pub const UNSLOTH_DTYPE_BF16: unsloth_dtype = 3;
/// 32-bit signed integer.
pub const UNSLOTH_DTYPE_I32: unsloth_dtype = 4;
/// 64-bit signed integer.
pub const UNSLOTH_DTYPE_I64: unsloth_dtype = 5;
/// One byte; zero is false, anything else is true.
pub const UNSLOTH_DTYPE_BOOL: unsloth_dtype = 6;
/// Reserved: 8-bit float with 4 exponent bits.
pub const UNSLOTH_DTYPE_F8E4M3: unsloth_dtype = 7;
/// Reserved: 8-bit float with 5 exponent bits.
pub const UNSLOTH_DTYPE_F8E5M2: unsloth_dtype = 8;
/// Reserved: 8-bit signed integer.
pub const UNSLOTH_DTYPE_I8: unsloth_dtype = 9;
/// Reserved: packed ternary.
pub const UNSLOTH_DTYPE_TERNARY: unsloth_dtype = 10;

/// A view of memory that the caller owns. A zeroed one is absent, where a parameter is optional.
///
/// A tensor may have no elements (a size of zero), and `data` is then not read. Queries (`unsloth_*_supported`,
/// `unsloth_*_workspace_size`) never look at `data`, so it may be NULL there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_tensor {
    /// Address of the first element, aligned to the dtype: host memory for the CPU backend, device memory for CUDA.
    pub data: *mut c_void,
    /// Sizes of the `rank` dimensions, outermost first.
    pub shape: [i64; UNSLOTH_MAX_RANK],
    /// Distances between neighbours along each dimension, in elements, not negative. All zero means row-major without gaps.
    pub strides: [i64; UNSLOTH_MAX_RANK],
    /// One of `UNSLOTH_DTYPE_*`.
    pub dtype: unsloth_dtype,
    /// Number of dimensions, 1 to `UNSLOTH_MAX_RANK`; 0 if the tensor is absent.
    pub rank: u32,
}

/// `DLTensor` of DLPack (dlpack.h, ABI version 1), which the caller passes by address.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    dtype_code: u8,
    dtype_bits: u8,
    dtype_lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}
const _: () = assert!(size_of::<DlTensor>() == 48);

/// Makes a tensor from a DLPack `DLTensor` without copying. The memory stays the exporter's: keep it alive while the tensor is
/// used.
///
/// `device_type` and `device_id` receive DLPack's device (1 is the CPU, 2 CUDA) and may be NULL.
/// `UNSLOTH_STATUS_UNSUPPORTED` for dtypes without a counterpart and for vector lanes.
///
/// # Safety
/// `dl_tensor` is NULL or points to a valid `DLTensor`; the others are NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_tensor_from_dlpack(
    dl_tensor: *const c_void,
    tensor: *mut unsloth_tensor,
    device_type: *mut i32,
    device_id: *mut i32,
) -> unsloth_status {
    const OP: &str = "tensor_from_dlpack";
    guard(OP, || {
        check_out(OP, "tensor", tensor)?;
        let dl: *const DlTensor = dl_tensor.cast();
        check_pointer(OP, "dl_tensor", dl)?;
        // SAFETY: checked; the caller promises a valid DLTensor.
        let dl = unsafe { &*dl };
        // SAFETY: as above.
        let converted = unsafe { from_dlpack(OP, dl) }?;
        // SAFETY: checked or NULL; the caller promises that they are valid.
        unsafe {
            write_optional(OP, "device_type", device_type, || dl.device_type)?;
            write_optional(OP, "device_id", device_id, || dl.device_id)?;
            tensor.write(converted);
        }
        Ok(())
    })
}

/// # Safety
/// `dl` is a valid DLTensor: `shape` has `ndim` entries, and so has `strides` unless NULL.
unsafe fn from_dlpack(op: &'static str, dl: &DlTensor) -> Result<unsloth_tensor> {
    let rank = usize::try_from(dl.ndim)
        .ok()
        .filter(|r| (1..=MAX_RANK).contains(r));
    let rank = rank.ok_or_else(|| {
        Error::invalid(
            op,
            "ndim",
            format!("is {}, allowed: 1 to {MAX_RANK}", dl.ndim),
        )
    })?;
    // DLPack's codes: 0 int, 2 float, 4 bfloat, 6 bool.
    let dtype = match (dl.dtype_code, dl.dtype_bits, dl.dtype_lanes) {
        (2, 32, 1) => UNSLOTH_DTYPE_F32,
        (2, 16, 1) => UNSLOTH_DTYPE_F16,
        (4, 16, 1) => UNSLOTH_DTYPE_BF16,
        (0, 32, 1) => UNSLOTH_DTYPE_I32,
        (0, 64, 1) => UNSLOTH_DTYPE_I64,
        (6, 8, 1) => UNSLOTH_DTYPE_BOOL,
        (code, bits, lanes) => {
            let problem = format!("has code {code}, {bits} bits and {lanes} lanes: no counterpart");
            return Err(Error::unsupported(op, "dtype", problem));
        }
    };
    let mut out = unsloth_tensor {
        data: std::ptr::null_mut(),
        shape: [0; UNSLOTH_MAX_RANK],
        strides: [0; UNSLOTH_MAX_RANK],
        dtype,
        rank: rank as u32,
    };
    check_pointer(op, "shape", dl.shape)?;
    // SAFETY: `ndim` entries, by the caller's promise.
    out.shape[..rank].copy_from_slice(unsafe { std::slice::from_raw_parts(dl.shape, rank) });
    if !dl.strides.is_null() {
        check_pointer(op, "strides", dl.strides)?;
        // SAFETY: `ndim` entries, by the caller's promise.
        let strides = unsafe { std::slice::from_raw_parts(dl.strides, rank) };
        out.strides[..rank].copy_from_slice(strides);
        // All zero would be read as contiguous here; DLPack means a fully broadcast tensor.
        if strides.iter().all(|&s| s == 0) && out.shape[..rank].iter().any(|&n| n > 1) {
            let problem = "are all zero: a fully broadcast tensor; give it dimensions of size 1";
            return Err(Error::unsupported(op, "strides", problem));
        }
    }
    let offset = usize::try_from(dl.byte_offset)
        .map_err(|_| Error::invalid(op, "byte_offset", format!("{} overflows", dl.byte_offset)))?;
    out.data = dl.data.cast::<u8>().wrapping_add(offset).cast();
    layout_of(op, "tensor", &out)?;
    Ok(out)
}

fn layout_of(op: &'static str, name: &'static str, t: &unsloth_tensor) -> Result<(DType, Layout)> {
    let rank = t.rank as usize;
    if rank > MAX_RANK {
        let problem = format!("has rank {rank}, above the maximum {MAX_RANK}");
        return Err(Error::invalid(op, name, problem));
    }
    let dtype = DType::from_raw(t.dtype).ok_or_else(|| match t.dtype {
        UNSLOTH_DTYPE_F8E4M3..=UNSLOTH_DTYPE_TERNARY => Error::unsupported(
            op,
            name,
            format!(
                "has dtype {}, which is reserved and not implemented",
                t.dtype
            ),
        ),
        other => Error::invalid(op, name, format!("has dtype {other}, which does not exist")),
    })?;
    let convert = |what: &str, values: &[i64]| -> Result<[usize; MAX_RANK]> {
        let mut out = [0; MAX_RANK];
        for (i, (to, &from)) in out.iter_mut().zip(values).enumerate() {
            *to = usize::try_from(from).map_err(|_| {
                Error::invalid(
                    op,
                    name,
                    format!("has {what} {from} in dimension {i}, negative"),
                )
            })?;
        }
        Ok(out)
    };
    let shape = convert("size", &t.shape[..rank])?;
    let strides = convert("stride", &t.strides[..rank])?;
    let layout = if strides[..rank].iter().all(|&s| s == 0) {
        Layout::contiguous(&shape[..rank])
    } else {
        Layout::strided(&shape[..rank], &strides[..rank])
    };
    let layout = layout.map_err(|_| {
        let problem = format!(
            "has shape {:?} with strides {:?}: it overflows the address space",
            &t.shape[..rank],
            &t.strides[..rank]
        );
        Error::invalid(op, name, problem)
    })?;
    // The last byte's address must exist too.
    if (t.data as usize)
        .checked_add(layout.span() * dtype.size())
        .is_none()
    {
        let problem = format!("at {:p} reaches past the end of the address space", t.data);
        return Err(Error::invalid(op, name, problem));
    }
    Ok((dtype, layout))
}

impl unsloth_tensor {
    /// The C view of a tensor.
    pub(crate) fn of(tensor: &TensorRef<'_>) -> unsloth_tensor {
        let raw = tensor.raw();
        let mut out = unsloth_tensor {
            data: raw.ptr.cast(),
            shape: [0; UNSLOTH_MAX_RANK],
            strides: [0; UNSLOTH_MAX_RANK],
            dtype: raw.dtype as u32,
            rank: raw.layout.rank() as u32,
        };
        // Sizes and strides fit (see Layout).
        for (to, &from) in out.shape.iter_mut().zip(raw.layout.shape()) {
            *to = from as i64;
        }
        for (to, &from) in out.strides.iter_mut().zip(raw.layout.strides()) {
            *to = from as i64;
        }
        out
    }

    /// Whether an optional tensor is left out.
    pub(crate) fn is_absent(&self) -> bool {
        self.rank == 0
    }

    /// An optional input.
    ///
    /// # Safety
    /// As [`TensorRef::from_raw`].
    pub(crate) unsafe fn optional_input<'a>(
        &self,
        op: &'static str,
        name: &'static str,
    ) -> Result<Option<TensorRef<'a>>> {
        if self.is_absent() {
            return self.check_absent(op, name).map(|()| None);
        }
        let (dtype, layout) = layout_of(op, name, self)?;
        // SAFETY: the caller's promise.
        Ok(Some(unsafe {
            TensorRef::from_raw(self.data.cast_const().cast(), dtype, layout)
        }))
    }

    /// A required input.
    ///
    /// # Safety
    /// As [`TensorRef::from_raw`].
    pub(crate) unsafe fn input<'a>(
        &self,
        op: &'static str,
        name: &'static str,
    ) -> Result<TensorRef<'a>> {
        // SAFETY: the caller's promise.
        unsafe { self.optional_input(op, name) }?.ok_or_else(|| absent(op, name))
    }

    /// An optional output.
    ///
    /// # Safety
    /// As [`TensorMut::from_raw`].
    pub(crate) unsafe fn optional_output<'a>(
        &self,
        op: &'static str,
        name: &'static str,
    ) -> Result<Option<TensorMut<'a>>> {
        if self.is_absent() {
            return self.check_absent(op, name).map(|()| None);
        }
        let (dtype, layout) = layout_of(op, name, self)?;
        // SAFETY: the caller's promise.
        Ok(Some(unsafe {
            TensorMut::from_raw(self.data.cast(), dtype, layout)
        }))
    }

    /// A required output.
    ///
    /// # Safety
    /// As [`TensorMut::from_raw`].
    pub(crate) unsafe fn output<'a>(
        &self,
        op: &'static str,
        name: &'static str,
    ) -> Result<TensorMut<'a>> {
        // SAFETY: the caller's promise.
        unsafe { self.optional_output(op, name) }?.ok_or_else(|| absent(op, name))
    }

    /// A rankless tensor with data is a mistake, not an absence.
    fn check_absent(&self, op: &'static str, name: &'static str) -> Result<()> {
        if self.data.is_null() {
            return Ok(());
        }
        Err(Error::invalid(
            op,
            name,
            format!("has data but rank 0, allowed: 1 to {MAX_RANK}"),
        ))
    }
}

fn absent(op: &'static str, name: &'static str) -> Error {
    Error::invalid(op, name, "is absent (rank 0), it is required")
}

/// An input and the output it becomes: in place if both are the same tensor or the output is absent.
///
/// # Safety
/// As [`TensorRef::from_raw`] and [`TensorMut::from_raw`].
pub(crate) unsafe fn in_out<'a>(
    op: &'static str,
    names: (&'static str, &'static str),
    input: &unsloth_tensor,
    output: &unsloth_tensor,
) -> Result<Option<InOut<'a>>> {
    // SAFETY: the caller's promise.
    let (i, o) = unsafe {
        (
            input.optional_input(op, names.0)?,
            output.optional_output(op, names.1)?,
        )
    };
    match (i, o) {
        (None, None) => Ok(None),
        (None, Some(_)) => Err(absent(op, names.0)),
        // SAFETY: the caller's promise: without an output the input is the one written.
        (Some(_), None) => Ok(Some(InOut::InPlace(unsafe { input.output(op, names.0) }?))),
        (Some(i), Some(o)) if i.raw().same_as(&o.raw()) && !i.raw().ptr.is_null() => {
            Ok(Some(InOut::InPlace(o)))
        }
        (Some(i), Some(o)) => Ok(Some(InOut::Apart {
            input: i,
            output: o,
        })),
    }
}

/// The caller's workspace.
///
/// # Safety
/// As [`Workspace::from_raw`].
pub(crate) unsafe fn workspace_from<'a>(
    op: &'static str,
    workspace: *mut c_void,
    size: usize,
) -> Result<Workspace<'a>> {
    if (workspace as usize).checked_add(size).is_none() {
        let problem = format!("{size} from {workspace:p} overflows the address space");
        return Err(Error::invalid(op, "workspace_size", problem));
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { Workspace::from_raw(workspace.cast(), size) })
}
