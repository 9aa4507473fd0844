//! NCCL's functions and constants, as its header declares them, found at run time.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// `ncclResult_t`.
pub(crate) type Status = c_int;
pub(crate) const SUCCESS: Status = 0;
/// What a communicator that does not block gives, and no error.
pub(crate) const IN_PROGRESS: Status = 7;

/// `ncclUniqueId`, which is passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct UniqueId(pub [u8; 128]);

/// `ncclDataType_t`.
pub(crate) const INT8: c_int = 0;
pub(crate) const INT32: c_int = 2;
pub(crate) const INT64: c_int = 4;
pub(crate) const FLOAT16: c_int = 6;
pub(crate) const FLOAT32: c_int = 7;
/// Since 2.10.
pub(crate) const BFLOAT16: c_int = 9;

/// `ncclRedOp_t`.
pub(crate) const SUM: c_int = 0;
pub(crate) const PROD: c_int = 1;
pub(crate) const MAX: c_int = 2;
pub(crate) const MIN: c_int = 3;
/// Since 2.10.
pub(crate) const AVG: c_int = 4;

/// `ncclWindow_t`, which is NULL where ranks do not reach each other's memory.
pub(crate) type Window = *mut c_void;
/// `NCCL_WIN_COLL_SYMMETRIC`, since 2.27: what ranks have at one offset of a window they reduce with each other.
pub(crate) const SYMMETRIC: c_int = 1;

/// `NCCL_CTA_POLICY_ZERO`, since 2.28: gathers and exchanges between symmetric windows are left to copy engines.
pub(crate) const BY_COPY_ENGINES: c_int = 2;

/// `ncclConfig_t` of 2.28, which later versions take too.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
    comm_name: *const c_char,
    collnet_enable: c_int,
    cta_policy: c_int,
    shrink_share: c_int,
    nvls_ctas: c_int,
    channels_per_net_peer: c_int,
    nvlink_centric_sched: c_int,
}

impl Config {
    /// All that NCCL chooses by itself, but for the policy.
    pub fn of(cta_policy: c_int) -> Config {
        const UNSET: c_int = c_int::MIN;
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 2_28_00,
            blocking: UNSET,
            cga_cluster_size: UNSET,
            min_ctas: UNSET,
            max_ctas: UNSET,
            net_name: std::ptr::null(),
            split_share: UNSET,
            traffic_class: UNSET,
            comm_name: std::ptr::null(),
            collnet_enable: UNSET,
            cta_policy,
            shrink_share: UNSET,
            nvls_ctas: UNSET,
            channels_per_net_peer: UNSET,
            nvlink_centric_sched: UNSET,
        }
    }
}

macro_rules! functions {
    (
        always { $($method:ident = $symbol:ident($($argument:ident: $type:ty),* $(,)?) -> $result:ty;)* }
        later { $($newer:ident = $new_symbol:ident($($new_argument:ident: $new_type:ty),* $(,)?) -> $new_result:ty;)* }
    ) => {
        /// The functions of a library; of those that old versions lack, the ones that it has.
        #[derive(Clone, Copy)]
        pub(crate) struct Functions {
            $(pub $method: unsafe extern "C" fn($($type),*) -> $result,)*
            $(pub $newer: Option<unsafe extern "C" fn($($new_type),*) -> $new_result>,)*
        }

        impl Functions {
            /// Asks for each by its name, which ends in NUL.
            ///
            /// # Errors
            /// The name of one that is missing.
            ///
            /// # Safety
            /// What `find` gives is NULL or NCCL's function of the name, which stays.
            pub unsafe fn resolve(
                find: impl Fn(&'static str) -> *mut c_void,
            ) -> Result<Functions, &'static str> {
                Ok(Functions {
                    $($method: {
                        let found = find(concat!(stringify!($symbol), "\0"));
                        if found.is_null() {
                            return Err(stringify!($symbol));
                        }
                        // SAFETY: not NULL, and the function's type in NCCL's header.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($type),*) -> $result,
                            >(found)
                        }
                    },)*
                    $($newer: {
                        let found = find(concat!(stringify!($new_symbol), "\0"));
                        // SAFETY: NULL is no function, which `None` is; else as above.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                Option<unsafe extern "C" fn($($new_type),*) -> $new_result>,
                            >(found)
                        }
                    },)*
                })
            }
        }
    };
}

type Comm = *mut c_void;
type Stream = *mut c_void;

functions! {
    always {
    get_version = ncclGetVersion(version: *mut c_int) -> Status;
    error_string = ncclGetErrorString(status: Status) -> *const c_char;
    get_unique_id = ncclGetUniqueId(id: *mut UniqueId) -> Status;
    comm_init_rank = ncclCommInitRank(comm: *mut Comm, size: c_int, id: UniqueId, rank: c_int) -> Status;
    comm_destroy = ncclCommDestroy(comm: Comm) -> Status;
    comm_count = ncclCommCount(comm: Comm, count: *mut c_int) -> Status;
    comm_user_rank = ncclCommUserRank(comm: Comm, rank: *mut c_int) -> Status;
    comm_device = ncclCommCuDevice(comm: Comm, device: *mut c_int) -> Status;
    all_reduce = ncclAllReduce(x: *const c_void, out: *mut c_void, count: usize, dtype: c_int, op: c_int, comm: Comm,
        stream: Stream) -> Status;
    reduce = ncclReduce(x: *const c_void, out: *mut c_void, count: usize, dtype: c_int, op: c_int, root: c_int, comm: Comm,
        stream: Stream) -> Status;
    broadcast = ncclBroadcast(x: *const c_void, out: *mut c_void, count: usize, dtype: c_int, root: c_int, comm: Comm,
        stream: Stream) -> Status;
    all_gather = ncclAllGather(x: *const c_void, out: *mut c_void, count: usize, dtype: c_int, comm: Comm,
        stream: Stream) -> Status;
    reduce_scatter = ncclReduceScatter(x: *const c_void, out: *mut c_void, count: usize, dtype: c_int, op: c_int, comm: Comm,
        stream: Stream) -> Status;
    group_start = ncclGroupStart() -> Status;
    group_end = ncclGroupEnd() -> Status;
    }
    later {
    comm_abort = ncclCommAbort(comm: Comm) -> Status;
    async_error = ncclCommGetAsyncError(comm: Comm, status: *mut Status) -> Status;
    send = ncclSend(x: *const c_void, count: usize, dtype: c_int, to: c_int, comm: Comm, stream: Stream) -> Status;
    recv = ncclRecv(out: *mut c_void, count: usize, dtype: c_int, from: c_int, comm: Comm, stream: Stream) -> Status;
    last_error = ncclGetLastError(comm: Comm) -> *const c_char;
    mem_alloc = ncclMemAlloc(memory: *mut *mut c_void, size: usize) -> Status;
    mem_free = ncclMemFree(memory: *mut c_void) -> Status;
    window_register = ncclCommWindowRegister(comm: Comm, memory: *mut c_void, size: usize, window: *mut Window,
        flags: c_int) -> Status;
    window_deregister = ncclCommWindowDeregister(comm: Comm, window: Window) -> Status;
    comm_init_rank_config = ncclCommInitRankConfig(comm: *mut Comm, size: c_int, id: UniqueId, rank: c_int, config: *mut Config) -> Status;
    all_to_all = ncclAlltoAll(x: *const c_void, out: *mut c_void, count: usize, dtype: c_int, comm: Comm, stream: Stream) -> Status;
    peer_pointer = ncclGetPeerDevicePointer(window: Window, offset: usize, peer: c_int, pointer: *mut *mut c_void) -> Status;
    }
}
