//! The CUDA driver: libcuda, opened when first needed, and the functions of it that this backend calls.
//!
//! Every symbol is resolved once, by itself, so a driver that is missing or too old is an error here and nowhere else. Results are
//! plain integers: a newer driver may return codes that the bindings' enum does not have.

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_void};
use std::sync::OnceLock;

pub(crate) use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction,
    CUfunction_attribute, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue,
    CUlaunchAttributeValue_union__bindgen_ty_1, CUlaunchConfig, CUmemAccess_flags, CUmemAccessDesc,
    CUmemAllocationHandleType, CUmemAllocationType, CUmemLocation, CUmemLocationType,
    CUmemPool_attribute, CUmemPoolProps, CUmemoryPool, CUmodule, CUpointer_attribute, CUresult,
    CUstream, CUstreamCaptureStatus,
};

use crate::backend::Backend;
use crate::error::{Error, Result, text};

/// `cuLaunchKernelEx`.
type LaunchWith = unsafe extern "C" fn(
    *const CUlaunchConfig,
    CUfunction,
    *mut *mut c_void,
    *mut *mut c_void,
) -> c_int;

macro_rules! functions {
    ($($method:ident = $symbol:ident($($argument:ident: $type:ty),*);)*) => {
        /// The driver's functions. Each method calls one and turns its result into an error that names it.
        pub(crate) struct Driver {
            /// The CUDA version that the driver supports.
            pub version: (u32, u32),
            /// Absent before 12.4.
            load_function: Option<unsafe extern "C" fn(CUfunction) -> c_int>,
            /// Absent before 11.8.
            launch_with: Option<LaunchWith>,
            $($method: unsafe extern "C" fn($($type),*) -> c_int,)*
        }

        #[allow(clippy::too_many_arguments)] // as the driver's functions have them
        impl Driver {
            fn resolve(library: &Library) -> std::result::Result<Driver, String> {
                Ok(Driver {
                    version: (0, 0),
                    // SAFETY: the type is that of the function in CUDA's headers; so below.
                    load_function: unsafe { library.symbol("cuFuncLoad\0") },
                    // SAFETY: as above.
                    launch_with: unsafe { library.symbol("cuLaunchKernelEx\0") },
                    // SAFETY: as above.
                    $($method: unsafe { library.symbol(concat!(stringify!($symbol), "\0")) }
                        .ok_or(concat!("libcuda has no ", stringify!($symbol), ": the driver is too old"))?,)*
                })
            }

            $(
                #[doc = concat!("`", stringify!($symbol), "`.")]
                ///
                /// # Safety
                /// As the driver's documentation says.
                #[allow(dead_code)] // some are called only where their result needs more than a name
                pub unsafe fn $method(&self, op: &'static str, $($argument: $type),*) -> Result<()> {
                    // SAFETY: the caller's promise.
                    let code = unsafe { (self.$method)($($argument),*) };
                    if code == 0 {
                        return Ok(());
                    }
                    Err(self.error(op, stringify!($symbol), code))
                }
            )*
        }
    };
}

functions! {
    init = cuInit(flags: c_uint);
    driver_version = cuDriverGetVersion(version: *mut c_int);
    error_name = cuGetErrorName(error: c_int, name: *mut *const c_char);
    device_count = cuDeviceGetCount(count: *mut c_int);
    device_get = cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    device_name = cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice);
    device_attribute = cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice);
    primary_retain = cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    primary_release = cuDevicePrimaryCtxRelease_v2(device: CUdevice);
    current = cuCtxGetCurrent(context: *mut CUcontext);
    push = cuCtxPushCurrent_v2(context: CUcontext);
    pop = cuCtxPopCurrent_v2(context: *mut CUcontext);
    context_synchronize = cuCtxSynchronize();
    device_can_access_peer = cuDeviceCanAccessPeer(can: *mut c_int, device: CUdevice, peer: CUdevice);
    enable_peer_access = cuCtxEnablePeerAccess(peer: CUcontext, flags: c_uint);
    module_load = cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
    module_unload = cuModuleUnload(module: CUmodule);
    module_function = cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    function_attribute = cuFuncGetAttribute(value: *mut c_int, attribute: CUfunction_attribute, function: CUfunction);
    function_set_attribute = cuFuncSetAttribute(function: CUfunction, attribute: CUfunction_attribute, value: c_int);
    occupancy = cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks: *mut c_int, function: CUfunction, threads: c_int,
        shared_bytes: usize);
    launch = cuLaunchKernel(function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
        block_z: c_uint, shared_bytes: c_uint, stream: CUstream, params: *mut *mut c_void, extra: *mut *mut c_void);
    tensor_map = cuTensorMapEncodeTiled(map: *mut c_void, kind: c_int, rank: c_uint, ptr: *mut c_void, sizes: *const u64,
        strides: *const u64, counts: *const c_uint, steps: *const c_uint, interleave: c_int, swizzle: c_int, promotion: c_int,
        fill: c_int);
    mem_alloc = cuMemAlloc_v2(ptr: *mut CUdeviceptr, size: usize);
    mem_free = cuMemFree_v2(ptr: CUdeviceptr);
    pool_create = cuMemPoolCreate(pool: *mut CUmemoryPool, properties: *const CUmemPoolProps);
    pool_destroy = cuMemPoolDestroy(pool: CUmemoryPool);
    pool_trim = cuMemPoolTrimTo(pool: CUmemoryPool, keep: usize);
    pool_attribute = cuMemPoolGetAttribute(pool: CUmemoryPool, attribute: CUmemPool_attribute, value: *mut c_void);
    pool_set_attribute = cuMemPoolSetAttribute(pool: CUmemoryPool, attribute: CUmemPool_attribute, value: *mut c_void);
    pool_set_access = cuMemPoolSetAccess(pool: CUmemoryPool, accesses: *const CUmemAccessDesc, count: usize);
    pool_alloc = cuMemAllocFromPoolAsync(ptr: *mut CUdeviceptr, size: usize, pool: CUmemoryPool, stream: CUstream);
    pool_free = cuMemFreeAsync(ptr: CUdeviceptr, stream: CUstream);
    host_alloc = cuMemHostAlloc(ptr: *mut *mut c_void, size: usize, flags: c_uint);
    host_free = cuMemFreeHost(ptr: *mut c_void);
    mem_info = cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    host_to_device = cuMemcpyHtoDAsync_v2(dst: CUdeviceptr, src: *const c_void, size: usize, stream: CUstream);
    device_to_host = cuMemcpyDtoHAsync_v2(dst: *mut c_void, src: CUdeviceptr, size: usize, stream: CUstream);
    device_to_device = cuMemcpyDtoDAsync_v2(dst: CUdeviceptr, src: CUdeviceptr, size: usize, stream: CUstream);
    peer_to_peer = cuMemcpyPeerAsync(dst: CUdeviceptr, dst_context: CUcontext, src: CUdeviceptr, src_context: CUcontext,
        size: usize, stream: CUstream);
    memset = cuMemsetD8Async(dst: CUdeviceptr, value: c_uchar, size: usize, stream: CUstream);
    pointer_attributes = cuPointerGetAttributes(count: c_uint, attributes: *mut CUpointer_attribute, values: *mut *mut c_void,
        ptr: CUdeviceptr);
    exchange_capture_mode = cuThreadExchangeStreamCaptureMode(mode: *mut c_uint);
    stream_create = cuStreamCreate(stream: *mut CUstream, flags: c_uint);
    stream_create_with_priority = cuStreamCreateWithPriority(stream: *mut CUstream, flags: c_uint, priority: c_int);
    stream_destroy = cuStreamDestroy_v2(stream: CUstream);
    stream_synchronize = cuStreamSynchronize(stream: CUstream);
    stream_is_capturing = cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus);
    event_create = cuEventCreate(event: *mut CUevent, flags: c_uint);
    event_destroy = cuEventDestroy_v2(event: CUevent);
    event_record = cuEventRecord(event: CUevent, stream: CUstream);
    event_synchronize = cuEventSynchronize(event: CUevent);
    event_query = cuEventQuery(event: CUevent);
    event_elapsed = cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent);
    stream_wait_event = cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
}

/// libcuda, opened here and not by cudarc, which another crate of the program may have told to link it. It is never closed: its own
/// threads may outlive any owner.
struct Library(std::mem::ManuallyDrop<libloading::Library>);

impl Library {
    /// The name that drivers install, and that of development packages. With their NUL they are
    /// opened as they are, without a copy.
    const NAMES: [&str; 2] = ["libcuda.so.1\0", "libcuda.so\0"];

    fn open() -> std::result::Result<Library, String> {
        let opened = Library::NAMES.iter().find_map(|name| {
            // SAFETY: opening libcuda runs its initialisers, which may run at any time and on any thread.
            unsafe { libloading::Library::new(*name) }.ok()
        });
        let library = opened.ok_or(text!(
            "libcuda was not found: it comes with the NVIDIA driver"
        ))?;
        Ok(Library(std::mem::ManuallyDrop::new(library)))
    }

    /// # Safety
    /// `F` is the type of the function `name`, which ends in NUL.
    unsafe fn symbol<F: Copy>(&self, name: &str) -> Option<F> {
        // SAFETY: the type is the caller's promise; the library stays open.
        unsafe { self.0.get::<F>(name.as_bytes()) }
            .ok()
            .map(|symbol| *symbol)
    }
}

pub(super) const OUT_OF_MEMORY: c_int = CUresult::CUDA_ERROR_OUT_OF_MEMORY as c_int;
const CAPTURE_IMPLICIT: c_int = CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT as c_int;
const NO_DEVICE: c_int = CUresult::CUDA_ERROR_NO_DEVICE as c_int;

/// Errors after which the context takes no more work (CUDA's documentation: "the process must be terminated and relaunched").
const STICKY: [CUresult; 12] = [
    CUresult::CUDA_ERROR_ECC_UNCORRECTABLE,
    CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE,
    CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
    CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
    CUresult::CUDA_ERROR_LAUNCH_TIMEOUT,
    CUresult::CUDA_ERROR_ASSERT,
    CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR,
    CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION,
    CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
    CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE,
    CUresult::CUDA_ERROR_INVALID_PC,
    CUresult::CUDA_ERROR_LAUNCH_FAILED,
];

impl Driver {
    /// The driver, initialised.
    ///
    /// # Errors
    /// [`Error::BackendUnavailable`] if there is none or it does not start. The answer is kept for the life of the process.
    pub fn get(op: &'static str) -> Result<&'static Driver> {
        static DRIVER: OnceLock<std::result::Result<Driver, String>> = OnceLock::new();
        let unavailable = |reason: &String| Error::BackendUnavailable {
            op,
            backend: Backend::Cuda.name(),
            reason: text!("{reason}"),
        };
        DRIVER
            .get_or_init(Driver::start)
            .as_ref()
            .map_err(unavailable)
    }

    fn start() -> std::result::Result<Driver, String> {
        let mut driver = Driver::resolve(&Library::open()?)?;
        // SAFETY: callable at any time, with zero flags.
        let code = unsafe { (driver.init)(0) };
        if code != 0 && code != NO_DEVICE {
            let name = driver.name(code);
            return Err(text!("cuInit failed with {name} ({code})"));
        }
        let mut version = 0;
        // SAFETY: `version` is valid for a write.
        unsafe { driver.driver_version("driver", &mut version) }.map_err(|e| text!("{e}"))?;
        let version = version.unsigned_abs();
        driver.version = (version / 1000, version % 1000 / 10);
        Ok(driver)
    }

    /// Sets the calling thread's capture mode to relaxed until the guard is dropped: what a library does inside the call, such as
    /// loading its kernels, is then allowed while a stream is captured.
    pub fn relax_capture(&self, op: &'static str) -> Result<Relaxed<'_>> {
        /// `CU_STREAM_CAPTURE_MODE_RELAXED`.
        const RELAXED: c_uint = 2;
        let mut before = RELAXED;
        // SAFETY: the mode is valid for the exchange.
        unsafe { self.exchange_capture_mode(op, &mut before) }?;
        Ok(Relaxed {
            driver: self,
            before,
        })
    }

    /// Number of devices; 0 where the driver finds none.
    pub fn num_devices(&self, op: &'static str) -> Result<i32> {
        let mut count = 0;
        // SAFETY: `count` is valid for a write.
        let code = unsafe { (self.device_count)(&mut count) };
        const NOT_INITIALIZED: c_int = CUresult::CUDA_ERROR_NOT_INITIALIZED as c_int;
        match code {
            0 => Ok(count),
            // What the driver answers after `cuInit` found no device.
            NO_DEVICE | NOT_INITIALIZED => Ok(0),
            _ => Err(self.error(op, "cuDeviceGetCount", code)),
        }
    }

    /// Loads a function's code now rather than at its first launch, which may be inside a graph capture.
    ///
    /// # Safety
    /// `function` is a function of the current context.
    pub unsafe fn load(&self, op: &'static str, function: CUfunction) -> Result<()> {
        if let Some(load) = self.load_function {
            // SAFETY: the caller's promise.
            let code = unsafe { load(function) };
            if code != 0 {
                return Err(self.error(op, "cuFuncLoad", code));
            }
        }
        // Older drivers load a function when they are asked what it needs.
        let mut value = 0;
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS;
        // SAFETY: the caller's promise.
        unsafe { self.function_attribute(op, &mut value, attribute, function) }
    }

    /// Whether kernels can be started before the one before them has ended, in graphs too: since 12.3.
    pub fn launches_early(&self) -> bool {
        self.version >= (12, 3) && self.launch_with.is_some()
    }

    /// Launches a kernel that may be started before the one before it in the stream has ended, and
    /// waits for that by itself; of clusters of so many blocks along the grid's first dimension.
    ///
    /// # Safety
    /// As [`Driver::launch`]; the driver [launches early](Driver::launches_early), and before the kernel
    /// touches memory it executes `griddepcontrol.wait`.
    #[allow(non_snake_case, clippy::too_many_arguments)] // as the driver has them
    pub unsafe fn launch_early(
        &self,
        op: &'static str,
        function: CUfunction,
        [gridDimX, gridDimY, gridDimZ]: [c_uint; 3],
        [blockDimX, blockDimY, blockDimZ]: [c_uint; 3],
        shared_bytes: c_uint,
        cluster: c_uint,
        stream: CUstream,
        parameters: *mut *mut c_void,
    ) -> Result<()> {
        const CALL: &str = "cuLaunchKernelEx";
        let Some(launch) = self.launch_with else {
            let code = CUresult::CUDA_ERROR_NOT_SUPPORTED as c_int;
            return Err(self.error(op, CALL, code));
        };
        let early = CUlaunchAttribute {
            id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: CUlaunchAttributeValue {
                programmaticStreamSerializationAllowed: 1,
            },
        };
        let of_cluster = CUlaunchAttribute {
            id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
            pad: [0; 4],
            value: CUlaunchAttributeValue {
                clusterDim: CUlaunchAttributeValue_union__bindgen_ty_1 {
                    x: cluster,
                    y: 1,
                    z: 1,
                },
            },
        };
        let mut attributes = [early, of_cluster];
        let config = CUlaunchConfig {
            gridDimX,
            gridDimY,
            gridDimZ,
            blockDimX,
            blockDimY,
            blockDimZ,
            sharedMemBytes: shared_bytes,
            hStream: stream,
            attrs: attributes.as_mut_ptr(),
            // A kernel may have a cluster of its own, which none is said of then.
            numAttrs: if cluster > 1 { 2 } else { 1 },
        };
        // SAFETY: the configuration and its attributes live until the call returns; the rest is the
        // caller's promise.
        match unsafe { launch(&config, function, parameters, std::ptr::null_mut()) } {
            0 => Ok(()),
            code => Err(self.error(op, CALL, code)),
        }
    }

    /// Whether work queued on the stream becomes part of a graph instead of running.
    ///
    /// # Safety
    /// The stream is live, and its context current.
    pub unsafe fn is_capturing(&self, op: &'static str, stream: CUstream) -> Result<bool> {
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: `status` is valid for a write; the rest is the caller's promise.
        match unsafe { (self.stream_is_capturing)(stream, &mut status) } {
            0 => Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE),
            // The default stream, asked about while one that waits for it is captured.
            CAPTURE_IMPLICIT => Ok(true),
            code => Err(self.error(op, "cuStreamIsCapturing", code)),
        }
    }

    fn error(&self, op: &'static str, call: &'static str, code: c_int) -> Error {
        Error::Cuda {
            op,
            call,
            name: self.name(code),
            code,
            sticky: STICKY.iter().any(|sticky| *sticky as c_int == code),
        }
    }

    /// The driver's name of an error, such as `CUDA_ERROR_ILLEGAL_ADDRESS`.
    fn name(&self, code: c_int) -> String {
        let mut name = std::ptr::null();
        // SAFETY: `name` is valid for a write; what the driver writes is NULL or a static string.
        unsafe {
            if (self.error_name)(code, &mut name) == 0 && !name.is_null() {
                return text!("{}", CStr::from_ptr(name).to_string_lossy());
            }
        }
        text!("an error that the driver does not name")
    }
}

/// While it lives, the calling thread's capture mode is relaxed; then again what it was.
#[must_use]
pub(crate) struct Relaxed<'a> {
    driver: &'a Driver,
    before: c_uint,
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        // SAFETY: the mode is valid for the exchange, and was the thread's.
        let _ = unsafe {
            self.driver
                .exchange_capture_mode("capture", &mut self.before)
        };
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver")
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}
