//! Tensors from DLPack.

use std::ffi::c_void;
use std::ptr;

use crate::common::abi::{absent, assert_fails, last_message};
use unsloth::ffi::dlpack::*;
use unsloth::ffi::status::*;
use unsloth::ffi::tensor::*;

/// `DLTensor` as dlpack.h lays it out.
#[repr(C)]
#[derive(Clone, Copy)]
struct DlTensor {
    data: *mut c_void,
    device: (i32, i32),
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

const SHAPE: [i64; 3] = [2, 3, 4];
const STRIDES: [i64; 3] = [24, 4, 1];
const ZEROS: [i64; 3] = [0; 3];

fn good() -> DlTensor {
    DlTensor {
        data: ptr::without_provenance_mut(0x1000),
        device: (2, 5),
        ndim: 3,
        code: 2,
        bits: 32,
        lanes: 1,
        shape: SHAPE.as_ptr(),
        strides: STRIDES.as_ptr(),
        byte_offset: 64,
    }
}

fn convert(dl: &DlTensor, tensor: &mut unsloth_tensor) -> unsloth_status {
    // SAFETY: `dl` is valid; the others are live or NULL.
    unsafe {
        unsloth_tensor_from_dlpack(
            ptr::from_ref(dl).cast(),
            tensor,
            ptr::null_mut(),
            ptr::null_mut(),
        )
    }
}

#[test]
fn every_field_arrives() {
    let (mut tensor, mut device_type, mut device_id) = (absent(), 0, 0);
    // SAFETY: pointers to live locals.
    let status = unsafe {
        unsloth_tensor_from_dlpack(
            ptr::from_ref(&good()).cast(),
            &mut tensor,
            &mut device_type,
            &mut device_id,
        )
    };
    assert_eq!(status, UNSLOTH_STATUS_SUCCESS, "{}", last_message());
    assert_eq!((device_type, device_id), (2, 5));
    assert_eq!(tensor.data.addr(), 0x1040);
    assert_eq!((tensor.dtype, tensor.rank), (UNSLOTH_DTYPE_F32, 3));
    assert_eq!(tensor.shape, [2, 3, 4, 0, 0, 0]);
    assert_eq!(tensor.strides, [24, 4, 1, 0, 0, 0]);
    let contiguous = DlTensor {
        strides: ptr::null(),
        ..good()
    };
    assert_eq!(convert(&contiguous, &mut tensor), UNSLOTH_STATUS_SUCCESS);
    assert_eq!(tensor.strides, [0; UNSLOTH_MAX_RANK]);
}

#[test]
fn one_element_repeated_is_not_row_major() {
    let mut tensor = absent();
    let broadcast = DlTensor {
        strides: ZEROS.as_ptr(),
        ..good()
    };
    assert_eq!(convert(&broadcast, &mut tensor), UNSLOTH_STATUS_SUCCESS);
    assert_eq!(tensor.flags, UNSLOTH_TENSOR_STRIDED);
    assert_eq!(tensor.strides, [0; UNSLOTH_MAX_RANK]);
}

#[test]
fn dtypes() {
    let table: [(u8, u8, u32); 8] = [
        (2, 32, UNSLOTH_DTYPE_F32),
        (2, 16, UNSLOTH_DTYPE_F16),
        (4, 16, UNSLOTH_DTYPE_BF16),
        (0, 8, UNSLOTH_DTYPE_I8),
        (0, 32, UNSLOTH_DTYPE_I32),
        (0, 64, UNSLOTH_DTYPE_I64),
        (6, 8, UNSLOTH_DTYPE_BOOL),
        (10, 8, UNSLOTH_DTYPE_F8E4M3),
    ];
    for (code, bits, dtype) in table {
        let mut tensor = absent();
        let dl = DlTensor {
            code,
            bits,
            ..good()
        };
        assert_eq!(convert(&dl, &mut tensor), UNSLOTH_STATUS_SUCCESS);
        assert_eq!(tensor.dtype, dtype);
    }
}

#[test]
fn misuse() {
    let table: [(DlTensor, unsloth_status, &str); 8] = [
        (
            DlTensor { ndim: 0, ..good() },
            UNSLOTH_STATUS_INVALID_ARGUMENT,
            "tensor_from_dlpack: ndim is 0, allowed: 1 to 6",
        ),
        (
            DlTensor { ndim: -3, ..good() },
            UNSLOTH_STATUS_INVALID_ARGUMENT,
            "tensor_from_dlpack: ndim is -3, allowed: 1 to 6",
        ),
        (
            DlTensor { bits: 64, ..good() },
            UNSLOTH_STATUS_UNSUPPORTED,
            "tensor_from_dlpack: dtype has code 2, 64 bits and 1 lanes: no counterpart",
        ),
        (
            DlTensor { lanes: 4, ..good() },
            UNSLOTH_STATUS_UNSUPPORTED,
            "tensor_from_dlpack: dtype has code 2, 32 bits and 4 lanes: no counterpart",
        ),
        (
            DlTensor {
                shape: ptr::null(),
                ..good()
            },
            UNSLOTH_STATUS_NULL_POINTER,
            "tensor_from_dlpack: shape is NULL",
        ),
        (
            DlTensor {
                byte_offset: u64::MAX,
                ..good()
            },
            UNSLOTH_STATUS_INVALID_ARGUMENT,
            "tensor_from_dlpack: byte_offset 18446744073709551615 from data at 0x1000 overflows the address space",
        ),
        (
            DlTensor {
                shape: [i64::MAX, 3, 4].as_ptr(),
                ..good()
            },
            UNSLOTH_STATUS_INVALID_ARGUMENT,
            "tensor_from_dlpack: tensor has shape [9223372036854775807, 3, 4] with strides [24, 4, 1]: it overflows the address space",
        ),
        (
            DlTensor {
                strides: [-24, 4, 1].as_ptr(),
                ..good()
            },
            UNSLOTH_STATUS_INVALID_ARGUMENT,
            "tensor_from_dlpack: tensor has stride -24 in dimension 0, negative",
        ),
    ];
    for (dl, status, message) in table {
        let mut tensor = absent();
        assert_fails(convert(&dl, &mut tensor), status, message);
        assert_eq!(tensor.rank, 0, "a failed call writes nothing");
    }
    // SAFETY: NULL is refused.
    unsafe {
        let none = ptr::null_mut();
        assert_fails(
            unsloth_tensor_from_dlpack(ptr::null(), &mut absent(), none, none),
            UNSLOTH_STATUS_NULL_POINTER,
            "tensor_from_dlpack: dl_tensor is NULL",
        );
        assert_fails(
            unsloth_tensor_from_dlpack(ptr::from_ref(&good()).cast(), ptr::null_mut(), none, none),
            UNSLOTH_STATUS_NULL_POINTER,
            "tensor_from_dlpack: tensor is NULL",
        );
    }
}
