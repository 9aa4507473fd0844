//! Statuses, messages and versions.

use std::cell::RefCell;
use std::ffi::{CStr, c_char};
use std::fmt::{self, Write};

use crate::error::Error;

/// The result of a call. Zero is success, and outputs are written only then. Values are never
/// reused.
pub type unsloth_status = i32;
/// The call did what it was asked.
pub const UNSLOTH_STATUS_SUCCESS: unsloth_status = 0;
/// An argument has a value that is never allowed; the message names it.
pub const UNSLOTH_STATUS_INVALID_ARGUMENT: unsloth_status = 1;
/// A pointer that must not be NULL is.
pub const UNSLOTH_STATUS_NULL_POINTER: unsloth_status = 2;
/// A handle was never created, is of another type, or has been destroyed.
pub const UNSLOTH_STATUS_INVALID_HANDLE: unsloth_status = 3;
/// The arguments make sense but this backend or build has no implementation for them.
pub const UNSLOTH_STATUS_UNSUPPORTED: unsloth_status = 4;
/// The workspace is smaller than the call needs; see its `unsloth_*_workspace_size`.
pub const UNSLOTH_STATUS_WORKSPACE_TOO_SMALL: unsloth_status = 5;
/// Memory could not be allocated, or the context's limit would be passed.
pub const UNSLOTH_STATUS_OUT_OF_MEMORY: unsloth_status = 6;
/// A KV cache has too few free pages; every sequence is as it was.
pub const UNSLOTH_STATUS_OUT_OF_PAGES: unsloth_status = 7;
/// The backend is not in this build, or its driver is missing.
pub const UNSLOTH_STATUS_BACKEND_UNAVAILABLE: unsloth_status = 8;
/// No compiled kernel fits the device.
pub const UNSLOTH_STATUS_UNSUPPORTED_DEVICE: unsloth_status = 9;
/// The CUDA driver reported an error; the message has its name.
pub const UNSLOTH_STATUS_CUDA_ERROR: unsloth_status = 10;
/// A bug in this library.
pub const UNSLOTH_STATUS_INTERNAL_ERROR: unsloth_status = 11;
/// The ranks of a group did not come together, one aborted, or NCCL reported an error; the message
/// says which.
pub const UNSLOTH_STATUS_COMM_ERROR: unsloth_status = 12;

impl Error {
    /// The C ABI's status of this error.
    pub fn status(&self) -> unsloth_status {
        match self {
            Error::InvalidArgument { .. } => UNSLOTH_STATUS_INVALID_ARGUMENT,
            Error::NullPointer { .. } => UNSLOTH_STATUS_NULL_POINTER,
            Error::InvalidHandle { .. } => UNSLOTH_STATUS_INVALID_HANDLE,
            Error::Unsupported { .. } => UNSLOTH_STATUS_UNSUPPORTED,
            Error::WorkspaceTooSmall { .. } => UNSLOTH_STATUS_WORKSPACE_TOO_SMALL,
            Error::OutOfMemory { .. } => UNSLOTH_STATUS_OUT_OF_MEMORY,
            Error::OutOfPages { .. } => UNSLOTH_STATUS_OUT_OF_PAGES,
            Error::BackendUnavailable { .. } => UNSLOTH_STATUS_BACKEND_UNAVAILABLE,
            Error::UnsupportedDevice { .. } => UNSLOTH_STATUS_UNSUPPORTED_DEVICE,
            Error::Cuda { .. } => UNSLOTH_STATUS_CUDA_ERROR,
            Error::Comm { .. } => UNSLOTH_STATUS_COMM_ERROR,
            Error::Internal { .. } => UNSLOTH_STATUS_INTERNAL_ERROR,
        }
    }
}

/// The longest message that is kept, in bytes.
const MESSAGE_CAPACITY: usize = 1024;

/// A message in place: it is kept even where there is no memory for it. What does not fit is cut.
struct Message {
    len: usize,
    bytes: [u8; MESSAGE_CAPACITY],
}

impl Message {
    const EMPTY: Message = Message {
        len: 0,
        bytes: [0; MESSAGE_CAPACITY],
    };
}

impl Write for Message {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = &mut self.bytes[self.len..];
        let fits = floor_char_boundary(text.as_bytes(), room.len());
        room[..fits].copy_from_slice(&text.as_bytes()[..fits]);
        self.len += fits;
        // Whole, or no more is written.
        if fits == text.len() {
            Ok(())
        } else {
            Err(fmt::Error)
        }
    }
}

/// The most bytes of UTF-8 text, at most `len`, that end with a character.
fn floor_char_boundary(text: &[u8], len: usize) -> usize {
    let mut len = len.min(text.len());
    // Bytes inside a character begin with the bits 10.
    while text.get(len).is_some_and(|byte| byte >> 6 == 0b10) {
        len -= 1;
    }
    len
}

thread_local! {
    static LAST_ERROR: RefCell<Message> = const { RefCell::new(Message::EMPTY) };
}

/// Keeps the error's message for the calling thread and gives its status.
pub(crate) fn set_last_error(error: &Error) -> unsloth_status {
    // A thread that is being torn down has no storage left; its status still tells.
    let _ = LAST_ERROR.try_with(|last| {
        let mut last = last.borrow_mut();
        last.len = 0;
        let _ = write!(last, "{error}");
    });
    error.status()
}

/// Copies out the message of the calling thread's last failed call, NUL-terminated and cut to `capacity` bytes.
///
/// Returns the length of the whole message without its NUL, so that a call with `capacity` 0
/// (`buffer` may then be NULL) tells how much room is needed: never more than 1024 bytes. A longer
/// message was cut when it was kept. Empty if no call of this thread has failed. Successful calls
/// leave the message as it is.
///
/// # Safety
/// `buffer` is NULL or has room for `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_last_error_message(buffer: *mut c_char, capacity: usize) -> usize {
    LAST_ERROR
        .try_with(|last| {
            let last = last.borrow();
            let text = &last.bytes[..last.len];
            if !buffer.is_null() && capacity > 0 {
                let len = floor_char_boundary(text, capacity - 1);
                // SAFETY: `len + 1 <= capacity`, and the caller promises that much room.
                unsafe {
                    std::ptr::copy_nonoverlapping(text.as_ptr().cast(), buffer, len);
                    *buffer.add(len) = 0;
                }
            }
            text.len()
        })
        .unwrap_or(0)
}

/// The name of a status, such as `"UNSLOTH_STATUS_OUT_OF_MEMORY"`; `"UNSLOTH_STATUS_UNKNOWN"` for any other value. The string is
/// static.
#[unsafe(no_mangle)]
pub extern "C" fn unsloth_status_name(status: unsloth_status) -> *const c_char {
    let name: &'static CStr = match status {
        UNSLOTH_STATUS_SUCCESS => c"UNSLOTH_STATUS_SUCCESS",
        UNSLOTH_STATUS_INVALID_ARGUMENT => c"UNSLOTH_STATUS_INVALID_ARGUMENT",
        UNSLOTH_STATUS_NULL_POINTER => c"UNSLOTH_STATUS_NULL_POINTER",
        UNSLOTH_STATUS_INVALID_HANDLE => c"UNSLOTH_STATUS_INVALID_HANDLE",
        UNSLOTH_STATUS_UNSUPPORTED => c"UNSLOTH_STATUS_UNSUPPORTED",
        UNSLOTH_STATUS_WORKSPACE_TOO_SMALL => c"UNSLOTH_STATUS_WORKSPACE_TOO_SMALL",
        UNSLOTH_STATUS_OUT_OF_MEMORY => c"UNSLOTH_STATUS_OUT_OF_MEMORY",
        UNSLOTH_STATUS_OUT_OF_PAGES => c"UNSLOTH_STATUS_OUT_OF_PAGES",
        UNSLOTH_STATUS_BACKEND_UNAVAILABLE => c"UNSLOTH_STATUS_BACKEND_UNAVAILABLE",
        UNSLOTH_STATUS_UNSUPPORTED_DEVICE => c"UNSLOTH_STATUS_UNSUPPORTED_DEVICE",
        UNSLOTH_STATUS_CUDA_ERROR => c"UNSLOTH_STATUS_CUDA_ERROR",
        UNSLOTH_STATUS_INTERNAL_ERROR => c"UNSLOTH_STATUS_INTERNAL_ERROR",
        UNSLOTH_STATUS_COMM_ERROR => c"UNSLOTH_STATUS_COMM_ERROR",
        _ => c"UNSLOTH_STATUS_UNKNOWN",
    };
    name.as_ptr()
}

/// The version of the library that runs, as `"major.minor.patch"`. Compare with `UNSLOTH_VERSION_MAJOR` and its siblings, which
/// are the header's. The string is static.
#[unsafe(no_mangle)]
pub extern "C" fn unsloth_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// What the library was built with, as one line: version, backends, CUDA architectures, features. The string is static.
#[unsafe(no_mangle)]
pub extern "C" fn unsloth_build_info() -> *const c_char {
    const INFO: &str = concat!(
        "libunsloth ",
        env!("CARGO_PKG_VERSION"),
        "; backends: ",
        env!("UNSLOTH_BACKENDS"),
        "; cuda architectures: ",
        env!("UNSLOTH_CUDA_ARCHITECTURES"),
        "; target: ",
        env!("UNSLOTH_TARGET"),
        "\0"
    );
    INFO.as_ptr().cast()
}
