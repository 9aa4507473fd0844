//! The C ABI as a caller sees it, for tests of misuse.

use unsloth::ffi::context::*;
use unsloth::ffi::status::*;
use unsloth::ffi::tensor::{UNSLOTH_TENSOR_STRIDED, unsloth_tensor};
use unsloth::{Backend, Context, DType, Layout};

use super::{DeviceTensor, TestTensor};

/// A context handle that is destroyed with its owner.
pub struct Handle(pub *mut unsloth_context);

impl Handle {
    pub fn cpu() -> Handle {
        Handle::on(Backend::Cpu)
    }

    pub fn on(backend: Backend) -> Handle {
        // SAFETY: a struct of integers, size first.
        let mut params: unsloth_context_params = unsafe { zeroed_params() };
        params.backend = if backend == Backend::Cuda {
            UNSLOTH_BACKEND_CUDA
        } else {
            UNSLOTH_BACKEND_CPU
        };
        let mut ctx = std::ptr::null_mut();
        // SAFETY: `params` is live and `ctx` valid for a write.
        let status = unsafe { unsloth_context_create(&params, &mut ctx) };
        assert_eq!(status, UNSLOTH_STATUS_SUCCESS, "{}", last_message());
        Handle(ctx)
    }
}

/// A context of every backend that is compiled in and has a device, for memory, and one of C's.
pub fn backends() -> Vec<(Context, Handle)> {
    let both = |ctx: Context| {
        let handle = Handle::on(ctx.backend());
        (ctx, handle)
    };
    super::contexts().into_iter().map(both).collect()
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: nothing uses what goes with it.
        unsafe { unsloth_context_destroy(self.0) };
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
    unsloth_tensor::default()
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
    if layout.strides().iter().all(|&s| s == 0) {
        out.flags = UNSLOTH_TENSOR_STRIDED;
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

/// What is done to good arguments, the status and the message that must follow.
pub type Misuse<P> = (fn(&mut P), unsloth_status, &'static str);

/// The functions of one operation.
pub struct Operation<P> {
    pub name: &'static str,
    pub supported: unsafe extern "C" fn(
        *mut unsloth_context,
        *const P,
        *mut unsloth::ffi::unsloth_implementation,
    ) -> unsloth_status,
    pub forward: unsafe extern "C" fn(
        *mut unsloth_context,
        *const P,
        unsloth::ffi::unsloth_stream,
    ) -> unsloth_status,
}

impl<P: Copy> Operation<P> {
    /// Every misuse is refused with its message and leaves the outputs poisoned; then the good
    /// arguments, whose tensors lie in live memory, succeed. Handles and pointers are spoilt as
    /// well.
    pub fn check(&self, good: P, table: &[Misuse<P>], outputs: &[&DeviceTensor]) {
        self.check_on(&Handle::cpu(), good, table, outputs);
    }

    /// The same on a context of the backend whose memory the tensors are in. What only values in
    /// memory would tell is not asked of a GPU, where the host does not read them; nor is success,
    /// of an operation that the backend does not have.
    pub fn check_on(&self, ctx: &Handle, good: P, table: &[Misuse<P>], outputs: &[&DeviceTensor]) {
        let stream = std::ptr::null_mut();
        let of_cpu = outputs.iter().all(|t| t.backend() == Backend::Cpu);
        for (spoil, status, message) in table {
            if !of_cpu && message.contains(" at index ") {
                continue;
            }
            let mut params = good;
            spoil(&mut params);
            // SAFETY: every tensor that passes validation lies in live memory, by this function's
            // contract.
            let got = unsafe { (self.forward)(ctx.0, &params, stream) };
            assert_fails(got, *status, message);
            outputs.iter().for_each(|output| assert_untouched(output));
        }
        let fails = |got, status, problem: &str| {
            assert_fails(got, status, &format!("{}: {problem}", self.name));
        };
        let dead = Handle::cpu().0;
        // SAFETY: NULL, destroyed handles and misaligned pointers are what is tested; the good
        // arguments are good.
        unsafe {
            let params = std::ptr::from_ref(&good);
            let got = (self.forward)(std::ptr::null_mut(), params, stream);
            fails(got, UNSLOTH_STATUS_NULL_POINTER, "ctx is NULL");
            let got = (self.forward)(ctx.0, std::ptr::null(), stream);
            fails(got, UNSLOTH_STATUS_NULL_POINTER, "params is NULL");
            let got = (self.forward)(ctx.0, std::ptr::without_provenance(0x1001), stream);
            let problem = "params 0x1001 is not aligned to 8 bytes";
            fails(got, UNSLOTH_STATUS_INVALID_ARGUMENT, problem);
            let got = (self.forward)(dead, params, stream);
            assert_eq!(got, UNSLOTH_STATUS_INVALID_HANDLE, "{}", last_message());
            outputs.iter().for_each(|output| assert_untouched(output));

            let mut implementation = 77;
            let got = (self.supported)(ctx.0, std::ptr::null(), &mut implementation);
            assert_eq!((got, implementation), (UNSLOTH_STATUS_NULL_POINTER, 77));
            let got = (self.supported)(ctx.0, params, &mut implementation);
            if !of_cpu && got == UNSLOTH_STATUS_UNSUPPORTED {
                let problem = "ctx is on the cuda backend, which has no kernel for this operation";
                fails(got, got, problem);
                fails((self.forward)(ctx.0, params, stream), got, problem);
                outputs.iter().for_each(|output| assert_untouched(output));
                return;
            }
            assert_eq!(got, UNSLOTH_STATUS_SUCCESS, "{}", last_message());
            assert_eq!(implementation == 1, of_cpu, "{implementation}");
            let got = (self.supported)(ctx.0, params, std::ptr::null_mut());
            assert_eq!(got, UNSLOTH_STATUS_SUCCESS);
            outputs.iter().for_each(|output| assert_untouched(output));

            let got = (self.forward)(ctx.0, params, stream);
            assert_eq!(got, UNSLOTH_STATUS_SUCCESS, "{}", last_message());
        }
        for output in outputs {
            assert!(
                output
                    .download_output()
                    .values()
                    .iter()
                    .all(|y| y.is_finite())
            );
        }
    }
}

/// The tensor four bytes further on.
pub fn shifted(tensor: &unsloth_tensor) -> unsloth_tensor {
    unsloth_tensor {
        data: tensor.data.wrapping_byte_add(4),
        ..*tensor
    }
}

/// A parameter struct with nothing but its size set.
///
/// # Safety
/// All zero is a value of `P`, whose first field is the `u32` size.
pub unsafe fn zeroed_params<P: Copy>() -> P {
    let mut params = std::mem::MaybeUninit::<P>::zeroed();
    // SAFETY: the caller's promise.
    unsafe {
        params
            .as_mut_ptr()
            .cast::<u32>()
            .write(size_of::<P>() as u32);
        params.assume_init()
    }
}
