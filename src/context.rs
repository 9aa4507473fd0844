//! Contexts: a backend on one device, with its threads and its memory accounting.

use std::sync::Arc;

use crate::cpu::Cpu;
#[cfg(feature = "cuda")]
use crate::cuda::{self, Cuda};
use crate::error::{Error, Result};
use crate::memory::Accountant;

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

    /// Number of devices: 1 for the CPU.
    ///
    /// # Errors
    /// [`Error::BackendUnavailable`] if the backend is not compiled in or has no driver.
    pub fn device_count(self) -> Result<i32> {
        const OP: &str = "device_count";
        match self {
            Backend::Cpu => Ok(1),
            #[cfg(feature = "cuda")]
            Backend::Cuda => cuda::device_count(OP),
            #[cfg(not(feature = "cuda"))]
            Backend::Cuda => Err(not_compiled(OP, self)),
        }
    }

    /// What a device is.
    ///
    /// # Errors
    /// As [`Backend::device_count`]; [`Error::InvalidArgument`] if there is no such device.
    pub fn device_info(self, device: i32) -> Result<DeviceInfo> {
        const OP: &str = "device_info";
        match self {
            Backend::Cpu => {
                check_device(OP, device, 1)?;
                Ok(crate::cpu::device_info())
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda => cuda::device_info(OP, device),
            #[cfg(not(feature = "cuda"))]
            Backend::Cuda => Err(not_compiled(OP, self)),
        }
    }
}

impl std::fmt::Display for Backend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
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

/// How to make a [`Context`]; the default is the CPU with every hardware thread and no memory limit.
#[derive(Clone, Debug, Default)]
pub struct ContextOptions {
    /// Where operations run.
    pub backend: Backend,
    /// Device ordinal; 0 for the CPU.
    pub device: i32,
    /// Threads of the CPU backend; 0 means all that the process may use. Ignored by others.
    pub num_threads: usize,
    /// Most bytes that may be allocated through the context at a time; `None` for no limit.
    pub memory_limit: Option<u64>,
}

/// A backend on one device. Cheap to clone; clones share threads and accounting. May be used by several threads at a time.
#[derive(Clone, Debug)]
pub struct Context {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    device: Device,
    accountant: Accountant,
}

/// The backends' state, for operations to dispatch on.
#[derive(Debug)]
pub(crate) enum Device {
    Cpu(Cpu),
    #[cfg(feature = "cuda")]
    Cuda(Box<Cuda>),
}

impl Context {
    /// Makes a context.
    ///
    /// # Errors
    /// [`Error::BackendUnavailable`] if the backend is not compiled in or has no driver, [`Error::InvalidArgument`] if there is no
    /// such device, [`Error::UnsupportedDevice`] if no compiled kernel fits it.
    pub fn new(options: &ContextOptions) -> Result<Context> {
        const OP: &str = "context";
        let device = match options.backend {
            Backend::Cpu => {
                check_device(OP, options.device, 1)?;
                Device::Cpu(Cpu::new(options.num_threads)?)
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda => Device::Cuda(Box::new(Cuda::new(OP, options.device)?)),
            #[cfg(not(feature = "cuda"))]
            Backend::Cuda => return Err(not_compiled(OP, options.backend)),
        };
        let accountant = Accountant::new(options.memory_limit);
        Ok(Context {
            inner: Arc::new(Inner { device, accountant }),
        })
    }

    /// A CPU context with default options.
    ///
    /// # Errors
    /// The threads could not be started.
    pub fn cpu() -> Result<Context> {
        Context::new(&ContextOptions::default())
    }

    /// Where its operations run.
    pub fn backend(&self) -> Backend {
        match &self.inner.device {
            Device::Cpu(_) => Backend::Cpu,
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => Backend::Cuda,
        }
    }

    /// Device ordinal.
    pub fn device_ordinal(&self) -> i32 {
        match &self.inner.device {
            Device::Cpu(_) => 0,
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => cuda.ordinal(),
        }
    }

    /// Waits until everything queued on `stream` has finished. The CPU backend runs each call to its end, so it returns at once.
    ///
    /// # Errors
    /// An error of an earlier asynchronous operation of the stream.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub fn synchronize(&self, stream: Stream) -> Result<()> {
        match &self.inner.device {
            Device::Cpu(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => cuda.synchronize("stream", stream),
        }
    }

    /// Makes a stream on the device. The CPU backend has only the default stream and gives that.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn create_stream(&self) -> Result<Stream> {
        match &self.inner.device {
            Device::Cpu(_) => Ok(Stream::DEFAULT),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => cuda.create_stream("stream"),
        }
    }

    /// Ends a stream after the work queued on it.
    ///
    /// # Safety
    /// `stream` is the default stream (nothing happens) or came from [`Context::create_stream`] and is not used again.
    ///
    /// # Errors
    /// The driver refuses.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub unsafe fn destroy_stream(&self, stream: Stream) -> Result<()> {
        match &self.inner.device {
            Device::Cpu(_) => Ok(()),
            #[cfg(feature = "cuda")]
            // SAFETY: the caller's promise.
            Device::Cuda(cuda) => unsafe { cuda.destroy_stream("stream", stream) },
        }
    }

    /// What has been allocated through the context.
    pub fn memory_stats(&self) -> crate::memory::MemoryStats {
        crate::memory::MemoryStats {
            pool_size: match &self.inner.device {
                Device::Cpu(_) => 0,
                #[cfg(feature = "cuda")]
                // Only a lost context does not know.
                Device::Cuda(cuda) => cuda.pool_size("memory_stats").unwrap_or(0),
            },
            ..self.accountant().stats()
        }
    }

    /// Returns what the pool of [`Buffer::new_async`](crate::Buffer::new_async) holds and nothing uses to the device, until it holds
    /// `keep` bytes. The CPU backend has no pool.
    ///
    /// # Errors
    /// The driver refuses.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub fn trim_memory_pool(&self, keep: usize) -> Result<()> {
        match &self.inner.device {
            Device::Cpu(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => cuda.trim_pool("memory_pool_trim", keep),
        }
    }

    /// Refuses a stream that is being captured into a graph, for a call whose work must run now; `advice` says what to do instead.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub(crate) fn check_not_capturing(
        &self,
        op: &'static str,
        stream: Stream,
        advice: &str,
    ) -> Result<()> {
        match &self.inner.device {
            Device::Cpu(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) if cuda.is_capturing(op, stream)? => {
                let problem = format!("is being captured into a graph: {advice}");
                Err(Error::invalid(op, "stream", problem))
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => Ok(()),
        }
    }

    /// Changes the limit on allocations; what is allocated already stays.
    pub fn set_memory_limit(&self, limit: Option<u64>) {
        self.accountant().set_limit(limit);
    }

    /// Makes the peak equal to what is in use.
    pub fn reset_memory_peak(&self) {
        self.accountant().reset_peak();
    }

    /// Whether both are clones of one context.
    pub(crate) fn is(&self, other: &Context) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    pub(crate) fn device(&self) -> &Device {
        &self.inner.device
    }

    pub(crate) fn accountant(&self) -> &Accountant {
        &self.inner.accountant
    }
}

/// A queue of work on a device: a `CUstream` for CUDA (NULL is the default stream); the CPU backend has only the default one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(*mut std::ffi::c_void);

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
    pub unsafe fn from_raw(handle: *mut std::ffi::c_void) -> Stream {
        Stream(handle)
    }

    /// The handle.
    pub fn as_raw(self) -> *mut std::ffi::c_void {
        self.0
    }
}

impl Default for Stream {
    fn default() -> Self {
        Stream::DEFAULT
    }
}

#[cfg(not(feature = "cuda"))]
fn not_compiled(op: &'static str, backend: Backend) -> Error {
    Error::BackendUnavailable {
        op,
        backend,
        reason: "this build does not contain it".into(),
    }
}

pub(crate) fn check_device(op: &'static str, device: i32, count: i32) -> Result<()> {
    if (0..count).contains(&device) {
        return Ok(());
    }
    Err(Error::invalid(
        op,
        "device",
        format!("{device} is outside 0 to {}", count - 1),
    ))
}
