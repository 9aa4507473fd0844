//! Backends, as everything above the ground speaks of them: where operations run, on which device,
//! in the order of which stream.

use std::ffi::{CStr, c_char, c_void};

use crate::dtype::DType;
use crate::error::{Error, Result, text};

/// Where operations run. The discriminants are those of the C ABI (`UNSLOTH_BACKEND_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Backend {
    /// The host processor; tensors are host memory. Always there.
    #[default]
    Cpu = 0,
    /// An NVIDIA GPU; tensors are device memory. Needs a build with CUDA kernels, and a driver.
    Cuda = 1,
}

impl Backend {
    /// Every backend, compiled in or not.
    pub const ALL: [Backend; 2] = [Backend::Cpu, Backend::Cuda];

    /// Lower-case name, as in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Backend::Cpu => "cpu",
            Backend::Cuda => "cuda",
        }
    }

    /// Whether this build contains the backend.
    pub const fn is_compiled(self) -> bool {
        match self {
            Backend::Cpu => true,
            Backend::Cuda => cfg!(feature = "cuda"),
        }
    }

    /// The backend with this C ABI value.
    pub fn from_raw(value: u32) -> Option<Backend> {
        Backend::ALL.into_iter().find(|b| *b as u32 == value)
    }
}

impl std::fmt::Display for Backend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Which implementation a call runs. The discriminants are those of the C ABI
/// (`UNSLOTH_IMPLEMENTATION_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Implementation {
    /// The CPU backend.
    Cpu = 1,
    /// The CUDA backend's portable kernels.
    Cuda = 2,
    /// The CUDA backend's kernels for Hopper's matrix and copy instructions.
    CudaHopper = 3,
}

/// A device as its driver or operating system describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The vendor's name.
    pub name: String,
    /// Memory in bytes; 0 if unknown.
    pub total_memory: u64,
    /// Memory free at the time of the call, in bytes; 0 if unknown.
    pub free_memory: u64,
    /// CUDA compute capability, (0, 0) for the CPU.
    pub compute_capability: (u32, u32),
    /// Multiprocessors of a GPU, hardware threads of a CPU.
    pub num_units: u32,
}

/// A queue of work on a device: a `CUstream` for CUDA (NULL is the default stream); the CPU backend
/// has only the default one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(*mut c_void);

// SAFETY: a stream handle is an address that this crate passes to the driver, which is thread-safe.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// The default stream.
    pub const DEFAULT: Stream = Stream(std::ptr::null_mut());

    /// A stream that the caller owns.
    ///
    /// # Safety
    /// `handle` is NULL or a live stream of the device of the context it is used with.
    pub unsafe fn from_raw(handle: *mut c_void) -> Stream {
        Stream(handle)
    }

    /// The handle.
    pub fn as_raw(self) -> *mut c_void {
        self.0
    }

    /// Whether it is CUDA's default stream that other streams wait for: NULL, or `CU_STREAM_LEGACY`.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_legacy(self) -> bool {
        self.0.addr() <= 1
    }
}

impl Default for Stream {
    fn default() -> Self {
        Stream::DEFAULT
    }
}

/// Refuses a stream that is not the default one, for the CPU backend.
pub(crate) fn check_host_stream(op: &'static str, stream: Stream) -> Result<()> {
    if stream == Stream::DEFAULT {
        return Ok(());
    }
    let problem = text!("is {:p}, the cpu backend has only NULL", stream.as_raw());
    Err(Error::invalid(op, "stream", problem))
}

/// Sizes of a product `[num_rows, in_features] × [in_features, out_features]`, as a linear layer
/// computes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductShape {
    /// Of input, weight and output: a float.
    pub dtype: DType,
    /// Rows (tokens) of input and output.
    pub num_rows: usize,
    /// Columns of the input.
    pub in_features: usize,
    /// Columns of the output.
    pub out_features: usize,
}

/// Where NCCL's functions are. By default they are those of the library that the process has loaded, or
/// else, for a group that is made here, of the `libnccl.so.2` that it finds.
#[derive(Clone, Copy, Debug, Default)]
pub struct NcclLibrary<'a> {
    /// The library's file, to be loaded.
    pub path: Option<&'a CStr>,
    /// A function that gives them, for a program that has NCCL linked into it; the path is not looked
    /// at then.
    pub symbols: Option<Symbols>,
}

/// A function that gives other functions by their names.
#[derive(Clone, Copy, Debug)]
pub struct Symbols {
    get: SymbolCallback,
    user: *mut c_void,
}

/// Gives a function by its name, NULL where there is none such.
pub type SymbolCallback =
    unsafe extern "C" fn(user: *mut c_void, name: *const c_char) -> *mut c_void;

impl Symbols {
    /// # Safety
    /// `get` may be called with `user` while a group is made, and gives NULL or the functions of one
    /// NCCL, which stay.
    pub unsafe fn new(get: SymbolCallback, user: *mut c_void) -> Symbols {
        Symbols { get, user }
    }

    /// The function of a name that ends in NUL.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))] // NCCL is of GPUs
    pub(crate) fn find(&self, name: &'static str) -> *mut c_void {
        debug_assert!(name.ends_with('\0'));
        // SAFETY: `new` was promised that it may be called; the name ends in NUL.
        unsafe { (self.get)(self.user, name.as_ptr().cast()) }
    }
}

/// Between which memories a copy goes. The discriminants are those of the C ABI
/// (`UNSLOTH_COPY_KIND_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum CopyKind {
    /// From the host to the context's device.
    HostToDevice = 1,
    /// From the context's device to the host.
    DeviceToHost = 2,
    /// Within the context's device.
    DeviceToDevice = 3,
}

impl CopyKind {
    /// The kind with this C ABI value.
    pub fn from_raw(value: u32) -> Option<CopyKind> {
        use CopyKind::{DeviceToDevice, DeviceToHost, HostToDevice};
        [HostToDevice, DeviceToHost, DeviceToDevice]
            .into_iter()
            .find(|k| *k as u32 == value)
    }
}

/// Memory that a [`Device`] gave out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allocation {
    /// Never NULL, aligned to [`Workspace::ALIGNMENT`](crate::tensor::Workspace::ALIGNMENT).
    pub ptr: *mut u8,
    /// In bytes.
    pub size: usize,
    /// Whether it is the stream-ordered pool's. The CPU has none.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub pooled: bool,
}

/// What every backend does on its device besides operations: memory and streams.
///
/// Pointers are the device's. `op` is the name that errors are told under.
pub(crate) trait Device: Send + Sync + std::fmt::Debug {
    fn backend(&self) -> Backend;

    fn ordinal(&self) -> i32;

    /// Allocates zeroed memory, which every stream may use at once.
    fn alloc(&self, op: &'static str, size: usize) -> Result<Allocation>;

    /// Allocates memory in the order of a stream, with unspecified contents.
    ///
    /// # Safety
    /// The stream is live, of this device, and not captured.
    unsafe fn alloc_async(
        &self,
        op: &'static str,
        size: usize,
        stream: Stream,
    ) -> Result<Allocation>;

    /// Frees memory, after everything queued on the device.
    ///
    /// # Safety
    /// This device gave it out, and it is not used again.
    unsafe fn free(&self, op: &'static str, memory: Allocation) -> Result<()>;

    /// Frees memory after everything queued on a stream.
    ///
    /// # Safety
    /// As [`Device::free`], but work on `stream` may use the memory; the stream is live, of this
    /// device, and not captured.
    unsafe fn free_async(&self, op: &'static str, memory: Allocation, stream: Stream)
    -> Result<()>;

    /// Bytes that the stream-ordered pool holds of the device's memory; 0 without a pool.
    fn pool_size(&self, op: &'static str) -> Result<u64>;

    /// Returns what the pool holds and nobody uses to the device, until it holds `keep` bytes.
    fn trim_pool(&self, op: &'static str, keep: usize) -> Result<()>;

    /// Queues a copy.
    ///
    /// # Safety
    /// Both ranges are valid on the sides that `kind` names until the copy has run, and do not
    /// overlap; the stream is live and of this device.
    unsafe fn copy(
        &self,
        op: &'static str,
        dst: *mut u8,
        src: *const u8,
        size: usize,
        kind: CopyKind,
        stream: Stream,
    ) -> Result<()>;

    /// Queues a copy to the device that has read `src` when it returns.
    ///
    /// # Safety
    /// As [`Device::copy`].
    unsafe fn upload(
        &self,
        op: &'static str,
        dst: *mut u8,
        src: *const u8,
        size: usize,
        stream: Stream,
    ) -> Result<()>;

    /// Memory from which tables of up to `size` bytes are uploaded without waiting for the device.
    fn staging(&self, op: &'static str, size: usize) -> Result<Box<dyn Upload>>;

    /// Queues setting bytes.
    ///
    /// # Safety
    /// The range is valid until the work has run; the stream is live and of this device.
    unsafe fn set(
        &self,
        op: &'static str,
        dst: *mut u8,
        value: u8,
        size: usize,
        stream: Stream,
    ) -> Result<()>;

    /// Refuses a stream that cannot be one of the device's.
    fn check_stream(&self, op: &'static str, stream: Stream) -> Result<()>;

    /// Loads what is otherwise loaded at the first product of such a shape, or of usual ones where
    /// none is given.
    fn warm_up(&self, op: &'static str, products: &[ProductShape]) -> Result<()>;

    /// Waits until everything queued on a stream has finished.
    fn synchronize(&self, op: &'static str, stream: Stream) -> Result<()>;

    /// Waits until everything queued on the device has finished, whoever queued it.
    fn synchronize_device(&self, op: &'static str) -> Result<()>;

    fn create_stream(&self, op: &'static str) -> Result<Stream>;

    /// Ends a stream after the work queued on it.
    ///
    /// # Safety
    /// The stream is the default one or came from [`Device::create_stream`], and is not used again.
    unsafe fn destroy_stream(&self, op: &'static str, stream: Stream) -> Result<()>;

    /// Whether work queued on a stream becomes part of a graph instead of running.
    fn is_capturing(&self, op: &'static str, stream: Stream) -> Result<bool>;
}

/// Bytes of page-locked memory of a GPU's [`Device::staging`] for tables of up to `size` bytes.
pub(crate) fn page_locked(size: usize) -> usize {
    // Even where the last copy left the worst offset, all of the next fits behind or before it.
    size.max(32 << 10).saturating_mul(2)
}

/// Takes small tables to a device: a table may change as soon as [`Upload::upload`] returns.
pub(crate) trait Upload: Send + Sync + std::fmt::Debug {
    /// Queues a copy of `data`, without waiting for it.
    ///
    /// # Safety
    /// The destination is valid on the device until the copy has run; the stream is live, of the
    /// device, and not captured.
    unsafe fn upload(
        &mut self,
        op: &'static str,
        to: *mut u8,
        data: &[u8],
        stream: Stream,
    ) -> Result<()>;
}

/// Refuses an ordinal that is not below the number of devices.
pub(crate) fn check_ordinal(op: &'static str, device: i32, count: i32) -> Result<()> {
    if (0..count).contains(&device) {
        return Ok(());
    }
    let problem = text!("{device} is outside 0 to {}", count - 1);
    Err(Error::invalid(op, "device", problem))
}
