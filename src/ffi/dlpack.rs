//! Tensors of other libraries, by DLPack.

use std::ffi::c_void;

use crate::error::{Error, Result, text};
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::*;
use crate::ffi::{check_optional_out, check_out, check_pointer, guard};
use crate::layout::MAX_RANK;

/// `DLTensor` of DLPack (dlpack.h, ABI version 1).
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

/// `DLManagedTensorVersioned` of DLPack: what later major versions may change follows `flags`.
#[repr(C)]
struct DlManagedTensorVersioned {
    major: u32,
    minor: u32,
    manager_ctx: *mut c_void,
    deleter: *mut c_void,
    flags: u64,
    dl_tensor: DlTensor,
}
const _: () = assert!(std::mem::offset_of!(DlManagedTensorVersioned, dl_tensor) == 32);

/// The major version of DLPack that is read here.
const MAJOR: u32 = 1;

/// Makes a tensor from a DLPack `DLTensor`, or from a `DLManagedTensor`, which begins with one,
/// without copying. The memory stays the exporter's: keep it alive while the tensor is used. From a
/// Python object that exports DLPack, in C:
///
/// ```c
/// PyObject *capsule = PyObject_CallMethod(array, "__dlpack__", NULL);
/// void *managed = PyCapsule_GetPointer(capsule, "dltensor");
/// unsloth_tensor x;
/// unsloth_status status = unsloth_tensor_from_dlpack(managed, &x, NULL, NULL);
/// // ... and, once the work with `x` has run:  Py_DECREF(capsule);
/// ```
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
        let dl: *const DlTensor = dl_tensor.cast();
        check_pointer(OP, "dl_tensor", dl)?;
        check_out(OP, "tensor", tensor)?;
        check_optional_out(OP, "device_type", device_type)?;
        check_optional_out(OP, "device_id", device_id)?;
        // SAFETY: not NULL and aligned; the caller promises a valid DLTensor, which nothing changes
        // meanwhile.
        let dl = unsafe { &*dl };
        // SAFETY: as above.
        let converted = unsafe { from_dlpack(OP, dl) }?;
        // SAFETY: NULL or aligned, as was checked; the caller promises that they are then valid.
        unsafe { write(dl, converted, tensor, device_type, device_id) };
        Ok(())
    })
}

/// Makes a tensor from a DLPack `DLManagedTensorVersioned`, what capsules named
/// `"dltensor_versioned"` hold: exporters give these when they are asked for `max_version=(1, 0)`
/// or later, and some arrays only so (NumPy's that are read-only). Otherwise as
/// `unsloth_tensor_from_dlpack`.
///
/// `flags` receives DLPack's flags and may be NULL; bit 0 set says that the tensor may not be
/// written. `UNSLOTH_STATUS_UNSUPPORTED` for a major version other than 1.
///
/// # Safety
/// `managed` is NULL or points to a valid `DLManagedTensorVersioned`; the others are NULL or valid
/// for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_tensor_from_dlpack_versioned(
    managed: *const c_void,
    tensor: *mut unsloth_tensor,
    device_type: *mut i32,
    device_id: *mut i32,
    flags: *mut u64,
) -> unsloth_status {
    const OP: &str = "tensor_from_dlpack_versioned";
    guard(OP, || {
        let managed: *const DlManagedTensorVersioned = managed.cast();
        check_pointer(OP, "managed", managed)?;
        check_out(OP, "tensor", tensor)?;
        check_optional_out(OP, "device_type", device_type)?;
        check_optional_out(OP, "device_id", device_id)?;
        check_optional_out(OP, "flags", flags)?;
        // SAFETY: not NULL and aligned; every version begins with its number.
        let major = unsafe { (*managed).major };
        if major != MAJOR {
            let problem = text!("is of DLPack {major}, supported: {MAJOR}");
            return Err(Error::unsupported(OP, "managed", problem));
        }
        // SAFETY: the version says that the rest lies as declared here; the caller promises that it
        // is valid.
        let managed = unsafe { &*managed };
        // SAFETY: as above.
        let converted = unsafe { from_dlpack(OP, &managed.dl_tensor) }?;
        // SAFETY: NULL or aligned, as was checked; the caller promises that they are then valid.
        unsafe {
            write(
                &managed.dl_tensor,
                converted,
                tensor,
                device_type,
                device_id,
            );
            if !flags.is_null() {
                flags.write(managed.flags);
            }
        }
        Ok(())
    })
}

/// # Safety
/// `tensor` is valid for a write, the others are that or NULL.
unsafe fn write(
    dl: &DlTensor,
    converted: unsloth_tensor,
    tensor: *mut unsloth_tensor,
    device_type: *mut i32,
    device_id: *mut i32,
) {
    // SAFETY: the caller's promise, NULL excepted.
    unsafe {
        tensor.write(converted);
        if !device_type.is_null() {
            device_type.write(dl.device_type);
        }
        if !device_id.is_null() {
            device_id.write(dl.device_id);
        }
    }
}

/// # Safety
/// `dl` is a valid DLTensor: `shape` has `ndim` entries, and so has `strides` unless NULL.
unsafe fn from_dlpack(op: &'static str, dl: &DlTensor) -> Result<unsloth_tensor> {
    let rank = usize::try_from(dl.ndim)
        .ok()
        .filter(|r| (1..=MAX_RANK).contains(r));
    let rank = rank.ok_or_else(|| {
        let problem = text!("is {}, allowed: 1 to {MAX_RANK}", dl.ndim);
        Error::invalid(op, "ndim", problem)
    })?;
    // DLPack's codes: 0 int, 2 float, 4 bfloat, 6 bool, 10 float8_e4m3fn, 12 float8_e5m2.
    let dtype = match (dl.dtype_code, dl.dtype_bits, dl.dtype_lanes) {
        (2, 32, 1) => UNSLOTH_DTYPE_F32,
        (2, 16, 1) => UNSLOTH_DTYPE_F16,
        (4, 16, 1) => UNSLOTH_DTYPE_BF16,
        (0, 8, 1) => UNSLOTH_DTYPE_I8,
        (0, 32, 1) => UNSLOTH_DTYPE_I32,
        (0, 64, 1) => UNSLOTH_DTYPE_I64,
        (6, 8, 1) => UNSLOTH_DTYPE_BOOL,
        (10, 8, 1) => UNSLOTH_DTYPE_F8E4M3,
        (12, 8, 1) => UNSLOTH_DTYPE_F8E5M2,
        (code, bits, lanes) => {
            let problem = text!("has code {code}, {bits} bits and {lanes} lanes: no counterpart");
            return Err(Error::unsupported(op, "dtype", problem));
        }
    };
    let mut out = unsloth_tensor {
        dtype,
        rank: rank as u32,
        ..unsloth_tensor::ABSENT
    };
    check_pointer(op, "shape", dl.shape)?;
    // SAFETY: `ndim` entries, by the caller's promise.
    out.shape[..rank].copy_from_slice(unsafe { std::slice::from_raw_parts(dl.shape, rank) });
    if !dl.strides.is_null() {
        check_pointer(op, "strides", dl.strides)?;
        // SAFETY: `ndim` entries, by the caller's promise.
        let strides = unsafe { std::slice::from_raw_parts(dl.strides, rank) };
        out.strides[..rank].copy_from_slice(strides);
        // One element repeated, where zeros alone would say row-major.
        if strides.iter().all(|&s| s == 0) {
            out.flags = UNSLOTH_TENSOR_STRIDED;
        }
    }
    let address = usize::try_from(dl.byte_offset)
        .ok()
        .filter(|&offset| dl.data.addr().checked_add(offset).is_some());
    let offset = address.ok_or_else(|| {
        let problem = text!(
            "{} from data at {:p} overflows the address space",
            dl.byte_offset,
            dl.data
        );
        Error::invalid(op, "byte_offset", problem)
    })?;
    out.data = dl.data.wrapping_byte_add(offset);
    layout_of(op, "tensor", &out)?;
    Ok(out)
}
