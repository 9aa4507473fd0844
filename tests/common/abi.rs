//! The C ABI as a caller sees it, for tests of misuse.

use unsloth::ffi::context::{unsloth_context, unsloth_context_create, unsloth_context_destroy};
use unsloth::ffi::status::{UNSLOTH_STATUS_SUCCESS, unsloth_last_error_message, unsloth_status};
use unsloth::ffi::tensor::{UNSLOTH_MAX_RANK, unsloth_tensor};
use unsloth::{DType, Layout};

use super::{DeviceTensor, TestTensor};

/// A CPU context handle that is destroyed with its owner.
pub struct Handle(pub *mut unsloth_context);

impl Handle {
    pub fn cpu() -> Handle {
        let mut ctx = std::ptr::null_mut();
        // SAFETY: NULL params mean the defaults; `ctx` is valid for a write.
        let status = unsafe { unsloth_context_create(std::ptr::null(), &mut ctx) };
        assert_eq!(status, UNSLOTH_STATUS_SUCCESS, "{}", last_message());
        Handle(ctx)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        unsloth_context_destroy(self.0);
    }
}

/// The calling thread's last message.
pub fn last_message() -> String {
    let mut buffer = [0u8; 1024];
    // SAFETY: the buffer has the capacity stated.
    let len = unsafe { unsloth_last_error_message(buffer.as_mut_ptr().cast(), buffer.len()) };
    String::from_utf8(buffer[..len.min(buffer.len() - 1)].to_vec()).unwrap()
}

/// Asserts that a call failed with this status and exactly this message.
#[track_caller]
pub fn assert_fails(status: unsloth_status, expected: unsloth_status, message: &str) {
    assert_eq!((status, last_message().as_str()), (expected, message));
}

/// An absent tensor.
pub fn absent() -> unsloth_tensor {
    unsloth_tensor {
        data: std::ptr::null_mut(),
        shape: [0; UNSLOTH_MAX_RANK],
        strides: [0; UNSLOTH_MAX_RANK],
        dtype: 0,
        rank: 0,
    }
}

/// The C view of a tensor in a context's memory.
pub fn c_tensor(tensor: &DeviceTensor) -> unsloth_tensor {
    described(tensor.data(), tensor.dtype, &tensor.layout)
}

/// A C tensor with explicit strides.
pub fn described(data: *mut std::ffi::c_void, dtype: DType, layout: &Layout) -> unsloth_tensor {
    let mut out = absent();
    out.data = data;
    out.dtype = dtype as u32;
    out.rank = layout.rank() as u32;
    for (to, &from) in out.shape.iter_mut().zip(layout.shape()) {
        *to = from as i64;
    }
    for (to, &from) in out.strides.iter_mut().zip(layout.strides()) {
        *to = from as i64;
    }
    out
}

/// Asserts that a failed call wrote nothing.
#[track_caller]
pub fn assert_untouched(output: &DeviceTensor) {
    let before = TestTensor::poisoned(output.dtype, output.layout);
    assert!(
        output.download().bits() == before.bits(),
        "a failed call wrote to its output"
    );
}
