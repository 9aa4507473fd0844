//! Groups of ranks.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::NonNull;
use std::time::Duration;

use crate::alloc::Shared;
use crate::comm::{Comm, Id, Kind, NcclLibrary, Params, Symbols};
use crate::error::{Error, Result, text};
use crate::ffi::context::{context_from, unsloth_context};
use crate::ffi::handle::Table;
use crate::ffi::params::{self, params};
use crate::ffi::status::unsloth_status;
use crate::ffi::{check_out, check_pointer, count, guard, stream_from, unsloth_stream};
use crate::problem::collective::ReduceOp;

/// A rank's part in a group of ranks, over which collectives run. Opaque; made by
/// `unsloth_comm_create`, ended by `unsloth_comm_destroy`. Several threads may use one at a time; their
/// collectives take turns. It keeps what it needs of its context, and may be destroyed before or after
/// it.
///
/// All ranks of a group call the same collectives in the same order, with arguments that fit together.
/// Tensors of different ranks do not overlap.
/// A rank of a local group waits inside each for the others, and finds out where they do not fit: then
/// every rank gets the same error and nothing is written. On GPUs collectives are NCCL's, queued on the
/// caller's stream, and fit or not unseen; `unsloth_comm_error_get` tells what went wrong later. NCCL
/// sums f16 and bf16 in their dtype where its kernels are not symmetric ones: each of the ranks' numbers
/// but the first adds a rounding. A capture of a stream with a collective is one of every rank.
/// Layers of many rows add up chunks of them on one stream that the group has for that (`chunk_rows` of
/// `unsloth_parallel`), which the caller's waits for in the same call: while a call that does is captured,
/// no other thread makes one with the same group.
pub struct unsloth_comm {
    _opaque: [u8; 0],
}

/// How the ranks of a group reach each other.
pub type unsloth_comm_kind = u32;
/// They are threads of one process, each with a context of the CPU backend, of its own or a shared one.
pub const UNSLOTH_COMM_KIND_LOCAL: unsloth_comm_kind = 0;
/// They are GPUs, which NCCL connects, each with a context of the CUDA backend.
pub const UNSLOTH_COMM_KIND_NCCL: unsloth_comm_kind = 1;

/// Gives a function of NCCL's by its name, NULL where there is none such. `user` is what was given
/// beside it.
pub type unsloth_symbol_callback =
    Option<unsafe extern "C" fn(user: *mut c_void, name: *const c_char) -> *mut c_void>;

/// What numbers of all ranks become one by.
pub type unsloth_reduce_op = u32;
/// Their sum. Integers wrap around.
pub const UNSLOTH_REDUCE_OP_SUM: unsloth_reduce_op = 0;
/// Their sum over the number of ranks, of floats.
pub const UNSLOTH_REDUCE_OP_AVG: unsloth_reduce_op = 1;
/// The greatest. NaN counts only where all are.
pub const UNSLOTH_REDUCE_OP_MAX: unsloth_reduce_op = 2;
/// The least. NaN counts only where all are.
pub const UNSLOTH_REDUCE_OP_MIN: unsloth_reduce_op = 3;
/// Their product. Integers wrap around.
pub const UNSLOTH_REDUCE_OP_PROD: unsloth_reduce_op = 4;

/// What the ranks of a group find each other by. One rank makes it with `unsloth_comm_id_create` and
/// gives its bytes to the others. It serves one group.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_comm_id {
    /// Not for reading.
    pub bytes: [u8; 128],
}

/// Arguments of `unsloth_comm_id_create`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_comm_id_params {
    /// `sizeof(unsloth_comm_id_params)`.
    pub struct_size: u32,
    /// Of the group, `UNSLOTH_COMM_KIND_*`.
    pub kind: unsloth_comm_kind,
    /// As in `unsloth_comm_params`.
    pub library: *const c_char,
    /// As in `unsloth_comm_params`.
    pub get_symbol: unsloth_symbol_callback,
    /// As in `unsloth_comm_params`.
    pub user: *mut c_void,
}
params!(unsloth_comm_id_params, []);

/// Arguments of `unsloth_comm_create`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_comm_params {
    /// `sizeof(unsloth_comm_params)`.
    pub struct_size: u32,
    /// How ranks reach each other, `UNSLOTH_COMM_KIND_*`; the same on all.
    pub kind: unsloth_comm_kind,
    /// Which rank this is, from 0.
    pub rank: i32,
    /// Ranks of the group, the same on all: 1 to 1024 of a local one.
    pub size: i32,
    /// How long a rank of a local group waits for another, in milliseconds, when they meet and in each
    /// collective; 0 for 600,000, which is ten minutes. Who waited in vain breaks the group.
    pub timeout_ms: u64,
    /// The same on all ranks.
    pub id: unsloth_comm_id,
    /// Optional, of NCCL's kind: an `ncclComm_t` that the caller has, of the context's device. It is
    /// borrowed: the caller ends it, after this, and calls NCCL with it from one thread at a time together
    /// with this. `rank`, `size` and `id` are not looked at then.
    pub nccl_comm: *mut c_void,
    /// Optional, of NCCL's kind: the path of its library, UTF-8. A communicator works only with the library
    /// that made it. Without a path it is the one that the process has loaded, or else, where `nccl_comm`
    /// is NULL, the `libnccl.so.2` that is found.
    pub library: *const c_char,
    /// Optional, of NCCL's kind: gives its functions, for a program that has NCCL linked into it. It is
    /// called before this function returns, and not later; `library` is not looked at then.
    pub get_symbol: unsloth_symbol_callback,
    /// For `get_symbol`.
    pub user: *mut c_void,
}
params!(unsloth_comm_params, []);

/// What a group is.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_comm_info {
    /// `sizeof(unsloth_comm_info)`, set by the caller.
    pub struct_size: u32,
    /// `UNSLOTH_COMM_KIND_*`.
    pub kind: unsloth_comm_kind,
    /// Which rank this is.
    pub rank: i32,
    /// Ranks of the group.
    pub size: i32,
    /// NCCL's version as `ncclGetVersion` gives it, such as 22803 for 2.28.3; 0 of a local group.
    pub library_version: i32,
    /// Zero.
    pub reserved: u32,
}
params!(unsloth_comm_info, [reserved]);

static COMMS: Table<Comm> = Table::new("unsloth_comm", 5);

/// The group behind a handle, which stays alive with what is returned.
pub(crate) fn comm_from(op: &'static str, comm: *const unsloth_comm) -> Result<Shared<Comm>> {
    COMMS.get(op, "comm", comm)
}

/// The reduction of a parameter struct.
pub(crate) fn reduce_op_from(op: &'static str, value: unsloth_reduce_op) -> Result<ReduceOp> {
    ReduceOp::from_raw(value).ok_or_else(|| {
        let problem = text!("is {value}, allowed: 0 (sum), 1 (avg), 2 (max), 3 (min), 4 (prod)");
        Error::invalid(op, "op", problem)
    })
}

/// The counts of a parameter struct, one for each rank; `None` where there are none.
///
/// # Safety
/// `counts` is NULL or has `size` entries, which stay for `'a`.
pub(crate) unsafe fn counts_from<'a>(
    op: &'static str,
    name: &'static str,
    counts: *const i64,
    size: usize,
) -> Result<Option<&'a [i64]>> {
    if counts.is_null() {
        return Ok(None);
    }
    check_pointer(op, name, counts)?;
    // SAFETY: not NULL and aligned; the caller promises the entries.
    Ok(Some(unsafe { std::slice::from_raw_parts(counts, size) }))
}

/// Where a parameter struct says that NCCL is.
///
/// # Safety
/// `path` is NULL or NUL-terminated for `'a`; `get` gives NULL or NCCL's functions, which stay, while
/// `'a` lasts.
unsafe fn library_from<'a>(
    op: &'static str,
    kind: Kind,
    path: *const c_char,
    get: unsloth_symbol_callback,
    user: *mut c_void,
) -> Result<NcclLibrary<'a>> {
    if kind == Kind::Local && (!path.is_null() || get.is_some()) {
        let name = if path.is_null() {
            "get_symbol"
        } else {
            "library"
        };
        return Err(Error::invalid(
            op,
            name,
            "is set, a local group has no library",
        ));
    }
    // SAFETY: the caller's promise.
    Ok(unsafe {
        NcclLibrary {
            path: (!path.is_null()).then(|| CStr::from_ptr(path)),
            symbols: get.map(|get| Symbols::new(get, user)),
        }
    })
}

fn kind_from(op: &'static str, kind: unsloth_comm_kind) -> Result<Kind> {
    Kind::from_raw(kind)
        .ok_or_else(|| Error::invalid(op, "kind", text!("is {kind}, allowed: 0 (local), 1 (nccl)")))
}

/// Writes an id for a new group to `id`. One rank calls it, and gives the id to the others.
///
/// The id of a local group is a number of this process, and nothing is kept for it. That of NCCL's is its
/// own, which any process may be given; `UNSLOTH_STATUS_BACKEND_UNAVAILABLE` if there is no NCCL.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes, and its library is NCCL's; `id` is
/// NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_comm_id_create(
    params: *const unsloth_comm_id_params,
    id: *mut unsloth_comm_id,
) -> unsloth_status {
    const OP: &str = "comm_id_create";
    guard(OP, || {
        check_out(OP, "id", id)?;
        // SAFETY: the caller's promise.
        let p = unsafe { params::read(OP, params) }?;
        let kind = kind_from(OP, p.kind)?;
        // SAFETY: the caller's promise.
        let library = unsafe { library_from(OP, kind, p.library, p.get_symbol, p.user) }?;
        let made = Id::of(kind, &library)?;
        // SAFETY: checked; the caller promises that it is valid.
        unsafe {
            id.write(unsloth_comm_id {
                bytes: *made.as_bytes(),
            });
        }
        Ok(())
    })
}

/// Joins a group and writes the handle of this rank's part in it to `comm`; the caller ends it with
/// `unsloth_comm_destroy`. Every rank calls it with one id, and it waits for all.
///
/// NCCL waits without end; see its documentation for what it asks of processes. In a local group, a rank
/// that is taken, or another size than the first rank's, is `UNSLOTH_STATUS_INVALID_ARGUMENT`
/// for the rank that comes with it and `UNSLOTH_STATUS_COMM_ERROR` for those that are there, as is a
/// rank that does not come in time. The id has served then.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes, and its library is NCCL's; its
/// `nccl_comm` is NULL or lives until the handle is destroyed; `comm` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_comm_create(
    ctx: *mut unsloth_context,
    params: *const unsloth_comm_params,
    comm: *mut *mut unsloth_comm,
) -> unsloth_status {
    const OP: &str = "comm_create";
    guard(OP, || {
        check_out(OP, "comm", comm)?;
        let object = context_from(OP, ctx)?;
        // SAFETY: the caller's promise.
        let p = unsafe { params::read(OP, params) }?;
        let kind = kind_from(OP, p.kind)?;
        // SAFETY: the caller's promise.
        let library = unsafe { library_from(OP, kind, p.library, p.get_symbol, p.user) }?;
        let context = &object.context;
        let made = match NonNull::new(p.nccl_comm) {
            Some(_) if kind == Kind::Local => {
                let problem = "is set, a local group has none";
                return Err(Error::invalid(OP, "nccl_comm", problem));
            }
            // SAFETY: the caller's promise.
            Some(lent) => unsafe { Comm::from_nccl(context, lent, &library) }?,
            None => {
                let params = Params {
                    kind,
                    id: Id::from_bytes(p.id.bytes),
                    rank: count(OP, "rank", p.rank.into())?,
                    size: count(OP, "size", p.size.into())?,
                    timeout: match p.timeout_ms {
                        0 => None,
                        ms => Some(Duration::from_millis(ms)),
                    },
                    library,
                };
                Comm::new(context, &params)?
            }
        };
        let handle = COMMS.insert(OP, made)?;
        // SAFETY: checked; the caller promises that it is valid.
        unsafe { comm.write(handle) };
        Ok(())
    })
}

/// Ends a rank's part in a group; NULL is fine. Calls in other threads get to their end first. On a GPU
/// it waits for the device, and every rank calls it; a group whose ranks are not all there any more is
/// aborted before. A borrowed communicator stays as it is. The
/// other ranks of a local group come back from what they wait for it in with
/// `UNSLOTH_STATUS_COMM_ERROR`, and can only send to each other then.
///
/// # Safety
/// `comm` is NULL or was made by `unsloth_comm_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_comm_destroy(comm: *mut unsloth_comm) -> unsloth_status {
    const OP: &str = "comm_destroy";
    guard(OP, || {
        if !comm.is_null() {
            drop(COMMS.remove(OP, "comm", comm)?);
        }
        Ok(())
    })
}

/// Describes a group in `info`, whose `struct_size` the caller has set (`UNSLOTH_COMM_INFO_INIT`).
///
/// # Safety
/// `info` is NULL or points to `info->struct_size` bytes valid for reads and writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_comm_info_get(
    comm: *mut unsloth_comm,
    info: *mut unsloth_comm_info,
) -> unsloth_status {
    const OP: &str = "comm_info_get";
    guard(OP, || {
        check_out(OP, "info", info)?;
        let object = comm_from(OP, comm)?;
        // SAFETY: the caller's promise.
        let asked = unsafe { params::read(OP, info.cast_const()) }?;
        let told = unsloth_comm_info {
            struct_size: asked.struct_size,
            kind: object.kind() as u32,
            // At most as many as an i32 counts.
            rank: object.rank() as i32,
            size: object.size() as i32,
            library_version: object.library_version(),
            reserved: 0,
        };
        // SAFETY: `read` accepted it; the caller promises that it is writable.
        unsafe { params::write(&told, info) };
        Ok(())
    })
}

/// Meets the other ranks of a group once, so that what the first collective takes longer for is done:
/// NCCL connects ranks and allocates device memory then, which a launch is not to do. Every rank calls
/// it; waits for the stream, and is not for one that is being captured.
///
/// A group of up to eight ranks whose GPUs reach each other's memory gets slots here, if NCCL is 2.29 or later: each rank
/// allocates 512 KiB for every rank of the group, to which the others write. Where there are slots
/// `unsloth_all_reduce_rms_norm_forward` of few rows is one launch. They count as the context's memory and end with the group. If one
/// rank has no room for its slots, no rank has any.
///
/// # Safety
/// `stream` is NULL or a live stream of the group's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_comm_warm_up(
    comm: *mut unsloth_comm,
    stream: unsloth_stream,
) -> unsloth_status {
    const OP: &str = "comm_warm_up";
    guard(OP, || {
        // SAFETY: the caller's promise.
        let stream = unsafe { stream_from(stream) };
        comm_from(OP, comm)?.warm_up(stream)
    })
}

/// Allocates `size` bytes on the group's device, aligned to 256 bytes, and writes the address to `ptr`. The contents are zero.
/// For what ranks add up of few bytes, such as the hidden states of a step that makes a token: NCCL of 2.27 and later reads
/// them at the other ranks where they lie. A sum whose input and output are there takes a quarter to a third less
/// time up to 16 KiB; of 64 KiB and more as long as elsewhere, or longer. In a local group, and where NCCL is older, it is memory like
/// any other.
///
/// In a group that the library made, with NCCL 2.28 or later, copy engines serve `unsloth_all_gather_forward` and `unsloth_all_to_all_forward`
/// of rows that are divided evenly, where both tensors are there: for large ones beside other work, as they take no
/// multiprocessor. Of small ones it takes longer than elsewhere. Every rank has each tensor at the same place in such memory then, or none has.
///
/// Every rank calls it, with one size, and waits for all; not while a graph is captured. It counts as the context's. Freed with
/// `unsloth_comm_memory_free`, or with the group. A size of zero gives an address that may only be freed.
///
/// # Safety
/// `ptr` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_comm_memory_alloc(
    comm: *mut unsloth_comm,
    size: usize,
    ptr: *mut *mut c_void,
) -> unsloth_status {
    const OP: &str = "comm_memory_alloc";
    guard(OP, || {
        check_out(OP, "ptr", ptr)?;
        let memory = comm_from(OP, comm)?.alloc(size)?;
        // SAFETY: checked; the caller promises that it is valid.
        unsafe { ptr.write(memory.as_ptr().cast()) };
        Ok(())
    })
}

/// Frees memory of `unsloth_comm_memory_alloc` of the same group, after all work queued on the device. Every rank calls it. NULL is
/// fine; any other address is `UNSLOTH_STATUS_INVALID_ARGUMENT`. May not be called while a graph is captured.
///
/// # Safety
/// Nothing uses the memory afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_comm_memory_free(
    comm: *mut unsloth_comm,
    ptr: *mut c_void,
) -> unsloth_status {
    const OP: &str = "comm_memory_free";
    guard(OP, || {
        let object = comm_from(OP, comm)?;
        let Some(memory) = NonNull::new(ptr.cast()) else {
            return Ok(());
        };
        // SAFETY: the caller's promise.
        unsafe { object.free(memory) }
    })
}

/// Whether a group works, as far as this rank knows: `UNSLOTH_STATUS_SUCCESS`, or
/// `UNSLOTH_STATUS_COMM_ERROR` and the message says why not. Does not wait.
///
/// # Safety
/// `comm` was made by `unsloth_comm_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_comm_error_get(comm: *mut unsloth_comm) -> unsloth_status {
    const OP: &str = "comm_error_get";
    guard(OP, || comm_from(OP, comm)?.health())
}

/// Breaks a group: ranks that wait for others come back with `UNSLOTH_STATUS_COMM_ERROR`, and later
/// calls of any rank are refused so. Any thread may call it, while others are in collectives. Of GPUs
/// every rank calls it for itself, and NCCL ends what is running. The handle still has to be destroyed.
///
/// A borrowed communicator is not aborted by this, and its owner still has to: but kernels of this library no longer wait for its
/// other ranks, and later calls are refused. `UNSLOTH_STATUS_UNSUPPORTED` where NCCL is older than 2.4.
///
/// # Safety
/// `comm` was made by `unsloth_comm_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_comm_abort(comm: *mut unsloth_comm) -> unsloth_status {
    const OP: &str = "comm_abort";
    guard(OP, || comm_from(OP, comm)?.abort())
}
