//! The CUDA backend: the driver, the compiled kernels, launching; then one file per operation.
//!
//! A context belongs to one device and uses its primary context. What costs time is done when the
//! first one on a device is made: images are loaded and functions given their attributes, for all
//! contexts of the process. A launch then only checks, fills a struct and calls the driver.

mod accumulate;
mod all_reduce_rms_norm;
pub(crate) mod argmax;
pub(crate) mod attention;
mod attention_merge;
mod blocks;
pub(crate) mod cast;
mod claims;
mod codes;
pub(crate) mod collective;
mod column_sums;
mod cross_entropy;
mod cublaslt;
mod device;
mod driver;
pub(crate) mod embedding;
mod event;
mod images;
pub(crate) mod kv_cache;
pub(crate) mod linear;
mod loaded;
mod logprob;
mod memory;
pub(crate) mod mlp;
mod nccl;
mod norm;
mod optimizer;
mod peer;
mod pool;
mod qk_norm_rope;
mod quantize;
mod remembered;
pub(crate) mod rope;
mod rotation;
mod rows;
mod staging;
pub(crate) mod swiglu;
mod table;
mod tensor_map;
mod tuning;
mod warm_up;
mod weight_repack;

use std::ffi::c_void;
use std::sync::atomic::AtomicU64;

use crate::backend::{Backend, DeviceInfo, Implementation, Stream};
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::problem::{Plan, Plans};
use crate::tensor::{RawTensor, Scratch};
use device::{Kernel, NON_BLOCKING, Primary};
use driver::{CUdevice_attribute, CUstream, Driver};
pub(crate) use event::Event;
use images::Arguments;
use loaded::Held;
use norm::backward as norm_backward;
use pool::Pool;
use qk_norm_rope::backward as qk_norm_rope_backward;
use swiglu::backward as swiglu_backward;

// Those that have kernels of their own.
loaded::operations!(
    accumulate,
    all_reduce_rms_norm,
    argmax,
    attention,
    attention_merge,
    blocks,
    cast,
    column_sums,
    cross_entropy,
    embedding,
    kv_cache,
    linear,
    logprob,
    norm,
    norm_backward,
    optimizer,
    qk_norm_rope,
    qk_norm_rope_backward,
    quantize,
    rope,
    swiglu,
    swiglu_backward,
    weight_repack,
);

/// The CUDA backend's state of one context.
pub(crate) struct Cuda {
    loaded: Held,
    /// For work of the library's own, which waits for nobody's stream.
    internal: CUstream,
    /// `None` where the device has no pools.
    pool: Option<Pool>,
    /// The devices that this one and its peers were given access to, a bit each.
    connected: AtomicU64,
}

// SAFETY: the fields are handles of the driver, which any thread may use.
unsafe impl Send for Cuda {}
// SAFETY: as above.
unsafe impl Sync for Cuda {}

/// Operations find their kernels as if they were the context's own.
impl std::ops::Deref for Cuda {
    type Target = Loaded;

    fn deref(&self) -> &Loaded {
        &self.loaded
    }
}

impl std::fmt::Debug for Cuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cuda")
            .field("ordinal", &self.resources.ordinal())
            .finish_non_exhaustive()
    }
}

/// Number of devices.
pub(crate) fn device_count(op: &'static str) -> Result<i32> {
    Driver::get(op)?.num_devices(op)
}

/// What a device is. Asking for its free memory takes its primary context, which is made for the moment if nothing holds it.
pub(crate) fn device_info(op: &'static str, ordinal: i32) -> Result<DeviceInfo> {
    let driver = Driver::get(op)?;
    check_ordinal(op, driver, ordinal)?;
    let primary = Primary::retain(op, driver, ordinal)?;
    let mut name = [0; 256];
    let (mut free, mut total) = (0, 0);
    let _entered = primary.enter(op)?;
    // SAFETY: one byte less than the name has, so that it ends in NUL; the results are valid for writes; a context is current.
    unsafe {
        driver.device_name(op, name.as_mut_ptr(), name.len() as i32 - 1, primary.device)?;
        driver.mem_info(op, &mut free, &mut total)?;
    }
    let name = name.map(|c| c as u8);
    let name = name.split(|c| *c == 0).next().unwrap_or_default();
    let multiprocessors = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    Ok(DeviceInfo {
        name: text!("{}", String::from_utf8_lossy(name)),
        total_memory: total as u64,
        free_memory: free as u64,
        compute_capability: primary.capability(op)?,
        num_units: primary.attribute(op, multiprocessors)?,
    })
}

fn check_ordinal(op: &'static str, driver: &Driver, ordinal: i32) -> Result<()> {
    let count = driver.num_devices(op)?;
    if count == 0 {
        return Err(unavailable(op, text!("the driver finds no device")));
    }
    crate::backend::check_ordinal(op, ordinal, count)
}

fn unavailable(op: &'static str, reason: String) -> Error {
    Error::BackendUnavailable {
        op,
        backend: Backend::Cuda.name(),
        reason,
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        const OP: &str = "context";
        let primary = &self.loaded.resources.primary;
        let Ok(_entered) = primary.enter(OP) else {
            return;
        };
        // SAFETY: a context is current; the stream was made by `new`, and is not used again. At process exit
        // the driver may have gone, which is no error here.
        unsafe {
            let _ = primary.driver.context_synchronize(OP);
            let _ = primary.driver.stream_destroy(OP, self.internal);
        }
    }
}

impl Cuda {
    /// Takes the device's primary context and what is loaded on it, loading it if this is its first
    /// context.
    ///
    /// # Errors
    /// No driver, no such device, no image that fits it, or the driver refuses.
    pub fn new(op: &'static str, ordinal: i32) -> Result<Cuda> {
        Cuda::with(op, Held::on_device(op, ordinal)?)
    }

    /// One to which cuBLASLt seems to be missing.
    #[cfg(test)]
    pub fn without_library(op: &'static str, ordinal: i32) -> Result<Cuda> {
        let mut loaded = Loaded::load(op, ordinal)?;
        loaded.linear.close();
        Cuda::with(op, Held::alone(op, loaded)?)
    }

    fn with(op: &'static str, loaded: Held) -> Result<Cuda> {
        let primary = &loaded.resources.primary;
        let entered = primary.enter(op)?;
        let pool = Pool::new(op, primary)?;
        let mut internal = std::ptr::null_mut();
        // SAFETY: valid for a write, and a context is current.
        unsafe {
            primary
                .driver
                .stream_create(op, &mut internal, NON_BLOCKING)
        }?;
        drop(entered);
        Ok(Cuda {
            loaded,
            internal,
            pool,
            connected: AtomicU64::new(0),
        })
    }

    /// Queues a kernel on a stream.
    ///
    /// # Safety
    /// The arguments are what the kernel expects, and the stream is live and of this device.
    unsafe fn launch<A: Arguments>(
        &self,
        op: &'static str,
        kernel: &Kernel<A>,
        blocks: u32,
        arguments: &A,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_grid(op, kernel, [blocks, 1, 1], arguments, stream) }
    }

    /// [`Cuda::launch`] with a grid of up to three dimensions.
    ///
    /// # Safety
    /// As [`Cuda::launch`].
    unsafe fn launch_grid<A: Arguments>(
        &self,
        op: &'static str,
        kernel: &Kernel<A>,
        grid: [u32; 3],
        arguments: &A,
        stream: Stream,
    ) -> Result<()> {
        let shape = Shape {
            grid,
            block: kernel.info.block,
            shared_bytes: kernel.info.shared_bytes,
            cluster: 1,
        };
        // SAFETY: the caller's promise.
        unsafe { self.launch_shape(op, kernel, shape, arguments, stream) }
    }

    /// [`Cuda::launch`] of blocks that are not as the kernel's image says.
    ///
    /// # Safety
    /// As [`Cuda::launch`]; and the kernel takes such blocks.
    unsafe fn launch_shape<A: Arguments>(
        &self,
        op: &'static str,
        kernel: &Kernel<A>,
        shape: Shape,
        arguments: &A,
        stream: Stream,
    ) -> Result<()> {
        const {
            assert!(A::PARAMETERS.len() <= MAX_PARAMETERS);
        }
        let base = (&raw const *arguments).cast_mut().cast::<c_void>();
        let mut parameters = [std::ptr::null_mut(); MAX_PARAMETERS];
        for (parameter, offset) in parameters.iter_mut().zip(A::PARAMETERS) {
            *parameter = base.wrapping_byte_add(*offset);
        }
        let Shape {
            grid,
            block,
            shared_bytes,
            cluster,
        } = shape;
        let [x, y, z] = block;
        tracing::trace!(
            "{op}: launches {} on {grid:?} blocks of {block:?} threads, {shared_bytes} bytes of shared memory",
            kernel.info.name.to_string_lossy(),
        );
        let primary = &self.resources.primary;
        let _entered = primary.enter(op)?;
        if self.resources.launches_early {
            // SAFETY: as below; every kernel begins by waiting for the one before it, or by reading what none that still runs writes. The
            // second launch of a product ends by waiting: none that still runs then writes what it reads, or reads or writes what it writes.
            return unsafe {
                primary.driver.launch_early(
                    op,
                    kernel.function,
                    grid,
                    block,
                    shared_bytes,
                    cluster,
                    stream.as_raw().cast(),
                    parameters.as_mut_ptr(),
                )
            };
        }
        // Such drivers are not asked for clusters: without one blocks would wait for what nobody sends, or add it up.
        if cluster > 1 {
            let message = text!("clusters of {cluster} blocks, which this driver does not give");
            return Err(Error::Internal { op, message });
        }
        // SAFETY: the function is of the current context, the parameters are as its layout says; the rest is the caller's promise.
        unsafe {
            primary.driver.launch(
                op,
                kernel.function,
                grid[0],
                grid[1],
                grid[2],
                x,
                y,
                z,
                shared_bytes,
                stream.as_raw().cast(),
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
    }
}

/// Blocks of a launch, threads of a block and bytes of its dynamic shared memory.
#[derive(Clone, Copy)]
struct Shape {
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    /// Blocks of a cluster: 1, unless the kernel waits for the one before it itself.
    cluster: u32,
}

/// A problem that kernels of this library run, without a workspace.
pub(crate) trait Run {
    /// Whether there are kernels for it, going by shapes and dtypes.
    fn check(&self) -> Result<()>;

    /// Queues them. Data has been checked.
    fn run(&self, cuda: &Cuda, stream: Stream) -> Result<()>;

    /// See [`Plan::settle`].
    fn settle(&self, _: Stream) {}
}

/// A problem that waits to be queued.
pub(crate) struct Ready<'a, P> {
    cuda: &'a Cuda,
    problem: P,
}

impl<P: Run> Plan for Ready<'_, P> {
    fn implementation(&self) -> Implementation {
        Implementation::Cuda
    }

    fn launch(&self, _: Scratch, stream: Stream) -> Result<()> {
        self.problem.run(self.cuda, stream)
    }

    fn settle(&self, stream: Stream) {
        self.problem.settle(stream);
    }
}

impl<P: Run> Plans<P> for Cuda {
    type Plan<'a> = Ready<'a, P>;

    fn plan(&self, problem: P) -> Result<Ready<'_, P>> {
        problem.check()?;
        Ok(Ready {
            cuda: self,
            problem,
        })
    }
}

/// Most parameters of a kernel.
const MAX_PARAMETERS: usize = 32;

/// Bytes of a vector access.
const VECTOR: usize = 16;

/// Whether a tensor can be accessed in vectors of `width` elements, as far as its address goes.
fn is_aligned(tensor: &RawTensor, width: usize) -> bool {
    tensor
        .ptr
        .addr()
        .is_multiple_of(width * tensor.dtype.size())
}

/// The blocks of a launch, or why there are too many.
fn check_blocks(op: &'static str, tensor: &'static str, blocks: usize) -> Result<u32> {
    if blocks <= i32::MAX as usize {
        return Ok(blocks as u32);
    }
    let problem = text!(
        "needs {blocks} thread blocks, the CUDA backend launches {}",
        i32::MAX
    );
    Err(Error::unsupported(op, tensor, problem))
}

/// The position of a float dtype in tables of kernels.
fn float_index(dtype: DType) -> Option<usize> {
    DType::FLOATS.iter().position(|d| *d == dtype)
}

/// A context of the first GPU, for tests; none without one. `UNSLOTH_REQUIRE_GPU=1`, which is for
/// machines that have one, makes that a failure.
#[cfg(test)]
pub(crate) fn test_context() -> Option<crate::Context> {
    let problem = match Backend::Cuda.device_count() {
        Ok(count) if count > 0 => {
            let options = crate::ContextOptions {
                backend: Backend::Cuda,
                ..Default::default()
            };
            return Some(crate::Context::new(&options).unwrap());
        }
        Ok(_) => "the driver knows no device".to_string(),
        Err(error) => error.to_string(),
    };
    let required = std::env::var_os("UNSLOTH_REQUIRE_GPU").is_some_and(|value| value == "1");
    assert!(!required, "UNSLOTH_REQUIRE_GPU is set: {problem}");
    None
}
