//! Contexts: a backend on one device, with its threads and its memory accounting.
//!
//! This is the only file that knows both backends: what is above asks a context for a plan, or for
//! what every device has.

mod accountant;
mod event;
mod transport;

use crate::alloc::{Shared, boxed};
use crate::backend::{self, check_ordinal};
use crate::cpu::{self, Cpu};
use crate::cuda::{self, Cuda};
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::problem::{Plan, Plans};
use crate::tensor::{Place, Scratch};
pub(crate) use accountant::Accountant;
pub use accountant::MemoryStats;
pub use event::Event;
pub(crate) use transport::{
    Beside, Both, Collective, ID_BYTES, Join, MAX_RANKS, Normalised, Transport,
};

pub use crate::backend::{Backend, DeviceInfo, Implementation, ProductShape, Stream};

impl Backend {
    /// Number of devices: 1 for the CPU.
    ///
    /// # Errors
    /// [`Error::BackendUnavailable`] if the backend is not compiled in or has no driver.
    pub fn device_count(self) -> Result<i32> {
        match self {
            Backend::Cpu => Ok(1),
            Backend::Cuda => cuda::device_count("device_count"),
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
                check_ordinal(OP, device, 1)?;
                cpu::device_info(OP)
            }
            Backend::Cuda => cuda::device_info(OP, device),
        }
    }
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

/// A backend on one device. Cheap to clone; clones share threads and accounting. May be used by
/// several threads at a time.
#[derive(Clone, Debug)]
pub struct Context {
    inner: Shared<Inner>,
}

#[derive(Debug)]
struct Inner {
    device: Device,
    accountant: Accountant,
}

/// The backends' state.
#[derive(Debug)]
enum Device {
    Cpu(Cpu),
    Cuda(Box<Cuda>),
}

/// The plan of the backend that a context has.
pub(crate) enum Chosen<C, G> {
    Cpu(C),
    Cuda(G),
}

impl<C: Plan, G: Plan> Plan for Chosen<C, G> {
    fn implementation(&self) -> Implementation {
        match self {
            Chosen::Cpu(plan) => plan.implementation(),
            Chosen::Cuda(plan) => plan.implementation(),
        }
    }

    fn needed(&self) -> usize {
        match self {
            Chosen::Cpu(plan) => plan.needed(),
            Chosen::Cuda(plan) => plan.needed(),
        }
    }

    fn useful(&self) -> Result<usize> {
        match self {
            Chosen::Cpu(plan) => plan.useful(),
            Chosen::Cuda(plan) => plan.useful(),
        }
    }

    fn useful_for_any(&self) -> Result<usize> {
        match self {
            Chosen::Cpu(plan) => plan.useful_for_any(),
            Chosen::Cuda(plan) => plan.useful_for_any(),
        }
    }

    fn used(&self, given: usize) -> Result<usize> {
        match self {
            Chosen::Cpu(plan) => plan.used(given),
            Chosen::Cuda(plan) => plan.used(given),
        }
    }

    fn without_allocating(&self) -> usize {
        match self {
            Chosen::Cpu(plan) => plan.without_allocating(),
            Chosen::Cuda(plan) => plan.without_allocating(),
        }
    }

    fn probe(&self) -> Result<()> {
        match self {
            Chosen::Cpu(plan) => plan.probe(),
            Chosen::Cuda(plan) => plan.probe(),
        }
    }

    fn launch(&self, scratch: Scratch, stream: Stream) -> Result<()> {
        match self {
            Chosen::Cpu(plan) => plan.launch(scratch, stream),
            Chosen::Cuda(plan) => plan.launch(scratch, stream),
        }
    }

    fn settle(&self, stream: Stream) {
        match self {
            Chosen::Cpu(plan) => plan.settle(stream),
            Chosen::Cuda(plan) => plan.settle(stream),
        }
    }
}

/// A problem that a context's backend has a plan for.
pub(crate) trait Planned: Sized {
    type Plan<'a>: Plan;

    /// Asks the context's backend.
    ///
    /// # Errors
    /// No implementation of it serves this problem.
    fn plan(self, ctx: &Context) -> Result<Self::Plan<'_>>;
}

impl<P> Planned for P
where
    Cpu: Plans<P>,
    Cuda: Plans<P>,
{
    type Plan<'a> = Chosen<<Cpu as Plans<P>>::Plan<'a>, <Cuda as Plans<P>>::Plan<'a>>;

    fn plan(self, ctx: &Context) -> Result<Self::Plan<'_>> {
        Ok(match &ctx.inner.device {
            Device::Cpu(cpu) => Chosen::Cpu(cpu.plan(self)?),
            Device::Cuda(cuda) => Chosen::Cuda((**cuda).plan(self)?),
        })
    }
}

impl Context {
    /// Makes a context.
    ///
    /// # Errors
    /// [`Error::BackendUnavailable`] if the backend is not compiled in or has no driver,
    /// [`Error::InvalidArgument`] if there is no such device, [`Error::UnsupportedDevice`] if no
    /// compiled kernel fits it.
    pub fn new(options: &ContextOptions) -> Result<Context> {
        const OP: &str = "context";
        let device = match options.backend {
            Backend::Cpu => {
                check_ordinal(OP, options.device, 1)?;
                Device::Cpu(Cpu::new(options.num_threads)?)
            }
            Backend::Cuda => Device::Cuda(boxed(OP, Cuda::new(OP, options.device)?)?),
        };
        let accountant = Accountant::new(options.memory_limit);
        let context = Context {
            inner: Shared::new(OP, Inner { device, accountant })?,
        };
        context.tell();
        Ok(context)
    }

    /// Tells what was made, to who listens.
    fn tell(&self) {
        if !tracing::event_enabled!(tracing::Level::INFO) {
            return;
        }
        let (backend, device) = (self.backend(), self.device_ordinal());
        if let Ok(info) = backend.device_info(device) {
            tracing::info!("context: {backend} {device} ({})", info.name);
        }
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
        self.device().backend()
    }

    /// Device ordinal.
    pub fn device_ordinal(&self) -> i32 {
        self.device().ordinal()
    }

    /// Whose memory its operations use.
    pub(crate) fn place(&self) -> Place {
        Place {
            backend: self.backend(),
            ordinal: self.device_ordinal(),
        }
    }

    /// Waits until everything queued on `stream` has finished. The CPU backend runs each call to its
    /// end, so it returns at once.
    ///
    /// # Errors
    /// An error of an earlier asynchronous operation of the stream.
    pub fn synchronize(&self, stream: Stream) -> Result<()> {
        self.device().synchronize("stream", stream)
    }

    /// Waits until everything queued on the device has finished, on every stream of this process.
    ///
    /// # Errors
    /// An error of an earlier asynchronous operation.
    pub fn synchronize_device(&self) -> Result<()> {
        self.device().synchronize_device("context")
    }

    /// Makes a stream on the device. The CPU backend has only the default stream and gives that.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn create_stream(&self) -> Result<Stream> {
        self.device().create_stream("stream")
    }

    /// Ends a stream after the work queued on it.
    ///
    /// # Safety
    /// `stream` is the default stream (nothing happens) or came from [`Context::create_stream`] and is
    /// not used again.
    ///
    /// # Errors
    /// The driver refuses.
    pub unsafe fn destroy_stream(&self, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise is this function's: the stream is the default one or this
        // device's, and ends here.
        unsafe { self.device().destroy_stream("stream", stream) }
    }

    /// Loads what linear layers of these shapes, or of usual ones if there are none, would otherwise
    /// load when they are first called: cuBLASLt, its choices of algorithms, and their kernels. Runs
    /// the products in device memory that is taken for the moment (the greatest tensor of one, and
    /// its workspace of at most 32 MiB; not counted by the context) and waits for them.
    ///
    /// Not during a capture. Nothing happens on the CPU, and where there is no cuBLASLt.
    ///
    /// # Errors
    /// A shape is refused as by a linear layer, there is too little memory, or the driver refuses.
    pub fn warm_up(&self, products: &[ProductShape]) -> Result<()> {
        const OP: &str = "context_warm_up";
        for product in products {
            if !DType::FLOATS.contains(&product.dtype) {
                let problem = text!("has {}, allowed: f32, f16, bf16", product.dtype);
                return Err(Error::invalid(OP, "products", problem));
            }
        }
        self.device().warm_up(OP, products)
    }

    /// What has been allocated through the context.
    pub fn memory_stats(&self) -> MemoryStats {
        MemoryStats {
            // Only a lost context does not know.
            pool_size: self.device().pool_size("memory_stats").unwrap_or(0),
            ..self.accountant().stats()
        }
    }

    /// Returns what the pool of [`Buffer::new_async`] holds and nothing uses to the device, until it
    /// holds `keep` bytes. The CPU backend has no pool.
    ///
    /// [`Buffer::new_async`]: crate::Buffer::new_async
    ///
    /// # Errors
    /// The driver refuses.
    pub fn trim_memory_pool(&self, keep: usize) -> Result<()> {
        self.device().trim_pool("memory_pool_trim", keep)
    }

    /// Refuses a stream that is being captured into a graph, for a call whose work must run now;
    /// `advice` says what to do instead.
    pub(crate) fn check_not_capturing(
        &self,
        op: &'static str,
        stream: Stream,
        advice: &str,
    ) -> Result<()> {
        if !self.device().is_capturing(op, stream)? {
            return Ok(());
        }
        let problem = text!("is being captured into a graph: {advice}");
        Err(Error::invalid(op, "stream", problem))
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
        self.inner.is(&other.inner)
    }

    /// The device, as every backend has one.
    pub(crate) fn device(&self) -> &dyn backend::Device {
        match &self.inner.device {
            Device::Cpu(cpu) => cpu,
            Device::Cuda(cuda) => &**cuda,
        }
    }

    pub(crate) fn accountant(&self) -> &Accountant {
        &self.inner.accountant
    }

    /// Queues a copy of `size` bytes from another context's memory, on a stream of this one.
    ///
    /// # Safety
    /// Both ranges are valid on their contexts' devices until the copy has run, and do not overlap.
    pub(crate) unsafe fn copy_peer(
        &self,
        op: &'static str,
        dst: *mut u8,
        from: &Context,
        src: *const u8,
        size: usize,
        stream: Stream,
    ) -> Result<()> {
        match (&self.inner.device, &from.inner.device) {
            (Device::Cpu(cpu), Device::Cpu(_)) => {
                let kind = backend::CopyKind::DeviceToDevice;
                // SAFETY: the caller's promise; the two contexts share the host's memory.
                unsafe { backend::Device::copy(cpu, op, dst, src, size, kind, stream) }
            }
            (Device::Cuda(to), Device::Cuda(from)) => {
                // SAFETY: the caller's promise: both ranges are valid until the copy has run.
                unsafe { to.copy_peer(op, dst, from, src, size, stream) }
            }
            _ => {
                let problem = text!(
                    "is on the {} backend, ctx on the {} backend: \
                     copies between host and device have a kind",
                    from.backend(),
                    self.backend()
                );
                Err(Error::invalid(op, "src_ctx", problem))
            }
        }
    }
}
