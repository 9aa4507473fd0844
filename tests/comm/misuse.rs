//! Groups and collectives through the C ABI with arguments that must be refused.

use crate::common::abi::{
    self, Handle, Misuse, Operation, absent, assert_fails, c_tensor, last_message, shifted,
};
use crate::common::{TestTensor, contexts, rng};
use crate::group::random;
use unsloth::ffi::all_gather::*;
use unsloth::ffi::all_reduce::*;
use unsloth::ffi::all_reduce_rms_norm::*;
use unsloth::ffi::all_to_all::*;
use unsloth::ffi::broadcast::*;
use unsloth::ffi::comm::*;
use unsloth::ffi::reduce_scatter::*;
use unsloth::ffi::send_receive::*;
use unsloth::ffi::status::*;
use unsloth::{DType, Layout};

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;

/// A group of one rank.
struct Group(*mut unsloth_comm);

impl Group {
    fn new(ctx: &Handle) -> Group {
        // SAFETY: structs of integers, size first; pointers to live locals.
        unsafe {
            let mut id = unsloth_comm_id { bytes: [0; 128] };
            let status = unsloth_comm_id_create(&abi::zeroed_params(), &mut id);
            assert_eq!(status, UNSLOTH_STATUS_SUCCESS, "{}", last_message());
            let mut params: unsloth_comm_params = abi::zeroed_params();
            (params.size, params.id) = (1, id);
            let mut comm = std::ptr::null_mut();
            let status = unsloth_comm_create(ctx.0, &params, &mut comm);
            assert_eq!(status, UNSLOTH_STATUS_SUCCESS, "{}", last_message());
            Group(comm)
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // SAFETY: nothing uses what goes with it.
        unsafe { unsloth_comm_destroy(self.0) };
    }
}

/// Zeros: a count that is not even a row.
static NONE: [i64; 1] = [0];
static NEGATIVE: [i64; 1] = [-1];
static TWO: [i64; 1] = [2];

const ALL_REDUCE: &[Misuse<unsloth_all_reduce_params>] = &[
    (
        |p| p.struct_size = 100,
        INVALID,
        "all_reduce: struct_size is 100, at least 288 is needed",
    ),
    (
        |p| p.op = 5,
        INVALID,
        "all_reduce: op is 5, allowed: 0 (sum), 1 (avg), 2 (max), 3 (min), 4 (prod)",
    ),
    (
        |p| p.comm = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "all_reduce: comm is NULL",
    ),
    (
        |p| p.comm = std::ptr::without_provenance_mut(77),
        UNSLOTH_STATUS_INVALID_HANDLE,
        "all_reduce: comm is not a live unsloth_comm handle (0x4d)",
    ),
    (
        |p| p.x = absent(),
        INVALID,
        "all_reduce: x is absent (rank 0), it is required",
    ),
    (
        |p| p.x.dtype = DType::Bool as u32,
        INVALID,
        "all_reduce: x has dtype bool, allowed: f32, f16, bf16, i32, i64, i8",
    ),
    (
        |p| p.x.dtype = DType::Q4_0 as u32,
        INVALID,
        "all_reduce: x has dtype q4_0, allowed: f32, f16, bf16, i32, i64, i8",
    ),
    (
        |p| {
            p.op = UNSLOTH_REDUCE_OP_AVG;
            p.x.dtype = DType::I32 as u32;
            p.out.dtype = DType::I32 as u32;
        },
        INVALID,
        "all_reduce: x has dtype i32, allowed with avg: f32, f16, bf16",
    ),
    (
        |p| p.x.strides = [5, 1, 0, 0, 0, 0],
        INVALID,
        "all_reduce: x has shape [2, 4] with strides [5, 1], it must be contiguous",
    ),
    (
        |p| p.out.dtype = DType::F16 as u32,
        INVALID,
        "all_reduce: out has dtype f16, x has f32",
    ),
    (
        |p| p.out.shape[0] = 1,
        INVALID,
        "all_reduce: out has shape [1, 4], x has [2, 4]",
    ),
    (
        |p| p.out.strides = [1, 2, 0, 0, 0, 0],
        INVALID,
        "all_reduce: out has shape [2, 4] with strides [1, 2], it must be contiguous",
    ),
    (
        |p| p.out = shifted(&p.x),
        INVALID,
        "all_reduce: out overlaps x",
    ),
    (
        |p| p.x.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "all_reduce: data of x is NULL",
    ),
    (
        |p| p.out.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "all_reduce: data of out is NULL",
    ),
];

const ALL_GATHER: &[Misuse<unsloth_all_gather_params>] = &[
    (
        |p| p.comm = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "all_gather: comm is NULL",
    ),
    (
        |p| p.out = absent(),
        INVALID,
        "all_gather: out is absent (rank 0), it is required",
    ),
    (
        |p| p.out.dtype = DType::Q4_0 as u32,
        INVALID,
        "all_gather: out has dtype q4_0, allowed: f32, f16, bf16, i32, i64, i8, bool",
    ),
    (
        |p| p.out.strides = [5, 1, 0, 0, 0, 0],
        INVALID,
        "all_gather: out has shape [2, 4] with strides [5, 1], it must be contiguous",
    ),
    (
        |p| p.x.strides = [5, 1, 0, 0, 0, 0],
        INVALID,
        "all_gather: x has shape [2, 4] with strides [5, 1], it must be contiguous",
    ),
    (
        |p| p.x.dtype = DType::I32 as u32,
        INVALID,
        "all_gather: x has dtype i32, out has f32",
    ),
    (
        |p| p.x.shape[0] = 1,
        INVALID,
        "all_gather: x has shape [1, 4], expected [2, 4]",
    ),
    (
        |p| p.counts = std::ptr::without_provenance(0x1001),
        INVALID,
        "all_gather: counts 0x1001 is not aligned to 8 bytes",
    ),
    (
        |p| p.counts = NONE.as_ptr(),
        INVALID,
        "all_gather: counts add up to 0, out has 2 rows",
    ),
    (
        |p| p.counts = NEGATIVE.as_ptr(),
        INVALID,
        "all_gather: counts has -1 for rank 0, allowed: 0 to 2",
    ),
    (
        |p| p.out = shifted(&p.x),
        INVALID,
        "all_gather: out overlaps x",
    ),
    (
        |p| p.x.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "all_gather: data of x is NULL",
    ),
    (
        |p| p.out.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "all_gather: data of out is NULL",
    ),
];

const ALL_REDUCE_RMS_NORM: &[Misuse<unsloth_all_reduce_rms_norm_params>] = &[
    (
        |p| p.comm = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "all_reduce_rms_norm: comm is NULL",
    ),
    (
        |p| p.comm = std::ptr::without_provenance_mut(77),
        UNSLOTH_STATUS_INVALID_HANDLE,
        "all_reduce_rms_norm: comm is not a live unsloth_comm handle (0x4d)",
    ),
    (
        |p| p.x = absent(),
        INVALID,
        "all_reduce_rms_norm: x is absent (rank 0), it is required",
    ),
    (
        |p| p.x.dtype = DType::I32 as u32,
        INVALID,
        "all_reduce_rms_norm: x has dtype i32, allowed: f32, f16, bf16",
    ),
    (
        |p| p.x.strides = [5, 1, 0, 0, 0, 0],
        INVALID,
        "all_reduce_rms_norm: x has shape [2, 4] with strides [5, 1], it must be contiguous",
    ),
    (
        |p| p.out.dtype = DType::F16 as u32,
        INVALID,
        "all_reduce_rms_norm: out has dtype f16, x has f32",
    ),
    (
        |p| p.out.shape[0] = 1,
        INVALID,
        "all_reduce_rms_norm: out has shape [1, 4], x has [2, 4]",
    ),
    (
        |p| p.out.strides = [1, 2, 0, 0, 0, 0],
        INVALID,
        "all_reduce_rms_norm: out has shape [2, 4] with strides [1, 2], it must be contiguous",
    ),
    (
        |p| {
            p.residual = p.out;
            p.residual.shape[0] = 1;
        },
        INVALID,
        "all_reduce_rms_norm: residual has shape [1, 4], x has [2, 4]",
    ),
    (
        |p| p.residual_out = p.x,
        INVALID,
        "all_reduce_rms_norm: residual is absent (rank 0), it is required",
    ),
    (
        |p| p.residual = p.out,
        INVALID,
        "all_reduce_rms_norm: residual_out overlaps out",
    ),
    (
        |p| {
            p.weight = p.x;
            p.weight.rank = 1;
            p.weight.shape[0] = 2;
        },
        INVALID,
        "all_reduce_rms_norm: weight has shape [2], expected [4]",
    ),
    (
        |p| p.weight_offset = 1.0,
        INVALID,
        "all_reduce_rms_norm: weight_offset is 1, without a weight it must be 0",
    ),
    (
        |p| p.epsilon = 0.0,
        INVALID,
        "all_reduce_rms_norm: epsilon is 0, it must be above 0",
    ),
    (
        |p| p.reserved = 1,
        INVALID,
        "all_reduce_rms_norm: reserved is 1, allowed: 0",
    ),
    (
        |p| p.out = shifted(&p.x),
        INVALID,
        "all_reduce_rms_norm: out overlaps x",
    ),
    (
        |p| p.x.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "all_reduce_rms_norm: data of x is NULL",
    ),
];

const REDUCE_SCATTER: &[Misuse<unsloth_reduce_scatter_params>] = &[
    (
        |p| p.comm = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "reduce_scatter: comm is NULL",
    ),
    (
        |p| p.op = 9,
        INVALID,
        "reduce_scatter: op is 9, allowed: 0 (sum), 1 (avg), 2 (max), 3 (min), 4 (prod)",
    ),
    (
        |p| p.x = absent(),
        INVALID,
        "reduce_scatter: x is absent (rank 0), it is required",
    ),
    (
        |p| p.x.dtype = DType::Bool as u32,
        INVALID,
        "reduce_scatter: x has dtype bool, allowed: f32, f16, bf16, i32, i64, i8",
    ),
    (
        |p| p.out.dtype = DType::I32 as u32,
        INVALID,
        "reduce_scatter: out has dtype i32, x has f32",
    ),
    (
        |p| p.out.shape[0] = 1,
        INVALID,
        "reduce_scatter: out has shape [1, 4], expected [2, 4]",
    ),
    (
        |p| p.counts = NEGATIVE.as_ptr(),
        INVALID,
        "reduce_scatter: counts has -1 for rank 0, allowed: 0 to 2",
    ),
    (
        |p| p.counts = NONE.as_ptr(),
        INVALID,
        "reduce_scatter: counts add up to 0, x has 2 rows",
    ),
    (
        |p| p.out = shifted(&p.x),
        INVALID,
        "reduce_scatter: out overlaps x",
    ),
    (
        |p| p.out.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "reduce_scatter: data of out is NULL",
    ),
];

const BROADCAST: &[Misuse<unsloth_broadcast_params>] = &[
    (
        |p| p.comm = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "broadcast: comm is NULL",
    ),
    (
        |p| p.root = -1,
        INVALID,
        "broadcast: root is -1, at least 0 is needed",
    ),
    (
        |p| p.root = 1,
        INVALID,
        "broadcast: root is 1, allowed: 0 to 0",
    ),
    (
        |p| p.out = absent(),
        INVALID,
        "broadcast: out is absent (rank 0), it is required",
    ),
    (
        |p| p.x.dtype = DType::Bool as u32,
        INVALID,
        "broadcast: x has dtype bool, out has f32",
    ),
    (
        |p| (p.x.shape[1], p.x.strides[0]) = (3, 3),
        INVALID,
        "broadcast: x has shape [2, 3], out has [2, 4]",
    ),
    (
        |p| p.out.strides = [5, 1, 0, 0, 0, 0],
        INVALID,
        "broadcast: out has shape [2, 4] with strides [5, 1], it must be contiguous",
    ),
    (
        |p| p.out = shifted(&p.x),
        INVALID,
        "broadcast: out overlaps x",
    ),
];

const ALL_TO_ALL: &[Misuse<unsloth_all_to_all_params>] = &[
    (
        |p| p.comm = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "all_to_all: comm is NULL",
    ),
    (
        |p| p.x = absent(),
        INVALID,
        "all_to_all: x is absent (rank 0), it is required",
    ),
    (
        |p| p.out = absent(),
        INVALID,
        "all_to_all: out is absent (rank 0), it is required",
    ),
    (
        |p| (p.out.shape[1], p.out.strides[0]) = (3, 3),
        INVALID,
        "all_to_all: out has shape [2, 3], expected [2, 4]",
    ),
    (
        |p| p.send_counts = NEGATIVE.as_ptr(),
        INVALID,
        "all_to_all: send_counts has -1 for rank 0, allowed: 0 to 2",
    ),
    (
        |p| p.receive_counts = NONE.as_ptr(),
        INVALID,
        "all_to_all: receive_counts add up to 0, out has 2 rows",
    ),
    // Only the ranks together know.
    (
        |p| {
            p.send_counts = TWO.as_ptr();
            p.out.shape[0] = 1;
        },
        INVALID,
        "all_to_all: x has 8 elements for rank 0 on rank 0, out of rank 0 takes 4",
    ),
    (
        |p| p.out.data = p.x.data,
        INVALID,
        "all_to_all: out overlaps x",
    ),
];

const SEND_RECEIVE: &[Misuse<unsloth_send_receive_params>] = &[
    (
        |p| p.comm = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "send_receive: comm is NULL",
    ),
    (
        |p| (p.x, p.out) = (absent(), absent()),
        INVALID,
        "send_receive: x is absent, and out too: one is required",
    ),
    (
        |p| p.to = -1,
        INVALID,
        "send_receive: to is -1, at least 0 is needed",
    ),
    (
        |p| p.from = 1,
        INVALID,
        "send_receive: from is 1, allowed: 0 to 0",
    ),
    (
        |p| p.x = absent(),
        INVALID,
        "send_receive: from is 0, this rank, and nothing is sent to it",
    ),
    (
        |p| p.out = absent(),
        INVALID,
        "send_receive: to is 0, this rank, and nothing is received from it",
    ),
    (
        |p| p.x.strides = [5, 1, 0, 0, 0, 0],
        INVALID,
        "send_receive: x has shape [2, 4] with strides [5, 1], it must be contiguous",
    ),
    // Only the ranks together know.
    (
        |p| p.out.shape[0] = 1,
        INVALID,
        "send_receive: x has 8 elements on rank 0, out of rank 0 4",
    ),
    (
        |p| p.out = shifted(&p.x),
        INVALID,
        "send_receive: out overlaps x",
    ),
];

/// Checks an operation's table on a group of one rank, with good arguments that have its `comm`, `x`
/// and `out`.
macro_rules! check {
    ($name:literal, $params:ty, $supported:ident, $forward:ident, $table:ident $(, $field:ident = $value:expr)*) => {{
        let memory = &contexts()[0];
        let layout = Layout::contiguous(&[2, 4]).unwrap();
        let x = random(&mut rng(), DType::F32, &[2, 4]).upload(memory);
        let out = TestTensor::poisoned(DType::F32, layout).upload(memory);
        let ctx = Handle::cpu();
        let group = Group::new(&ctx);
        // SAFETY: integers and pointers, size first.
        let mut good: $params = unsafe { abi::zeroed_params() };
        $(good.$field = $value;)*
        good.comm = group.0;
        (good.x, good.out) = (c_tensor(&x), c_tensor(&out));
        let operation = Operation {
            name: $name,
            supported: $supported,
            forward: $forward,
        };
        operation.check_on(&ctx, good, $table, &[&out]);
        // The group is of its context alone.
        let other = Handle::cpu();
        // SAFETY: live arguments.
        let status = unsafe { $forward(other.0, &good, std::ptr::null_mut()) };
        let message = concat!($name, ": comm belongs to another context");
        assert_fails(status, INVALID, message);
    }};
}

#[test]
fn misuse_of_reductions_is_refused_and_writes_nothing() {
    check!(
        "all_reduce",
        unsloth_all_reduce_params,
        unsloth_all_reduce_supported,
        unsloth_all_reduce_forward,
        ALL_REDUCE
    );
    check!(
        "reduce_scatter",
        unsloth_reduce_scatter_params,
        unsloth_reduce_scatter_supported,
        unsloth_reduce_scatter_forward,
        REDUCE_SCATTER
    );
    check!(
        "all_reduce_rms_norm",
        unsloth_all_reduce_rms_norm_params,
        unsloth_all_reduce_rms_norm_supported,
        unsloth_all_reduce_rms_norm_forward,
        ALL_REDUCE_RMS_NORM,
        epsilon = 1e-5
    );
}

#[test]
fn misuse_of_moves_is_refused_and_writes_nothing() {
    check!(
        "all_gather",
        unsloth_all_gather_params,
        unsloth_all_gather_supported,
        unsloth_all_gather_forward,
        ALL_GATHER
    );
    check!(
        "broadcast",
        unsloth_broadcast_params,
        unsloth_broadcast_supported,
        unsloth_broadcast_forward,
        BROADCAST
    );
    check!(
        "all_to_all",
        unsloth_all_to_all_params,
        unsloth_all_to_all_supported,
        unsloth_all_to_all_forward,
        ALL_TO_ALL
    );
    check!(
        "send_receive",
        unsloth_send_receive_params,
        unsloth_send_receive_supported,
        unsloth_send_receive_forward,
        SEND_RECEIVE
    );
}

#[test]
fn misuse_of_groups_is_refused() {
    let ctx = Handle::cpu();
    type Spoil = fn(&mut unsloth_comm_params);
    let cases: [(Spoil, unsloth_status, &str); 11] = [
        (
            |p| p.struct_size = 8,
            INVALID,
            "struct_size is 8, at least 184 is needed",
        ),
        (
            |p| p.kind = 7,
            INVALID,
            "kind is 7, allowed: 0 (local), 1 (nccl)",
        ),
        (
            |p| p.kind = UNSLOTH_COMM_KIND_NCCL,
            UNSLOTH_STATUS_UNSUPPORTED,
            "kind is nccl, which ctx of the cpu backend is not",
        ),
        (
            |p| p.library = c"libnccl.so.2".as_ptr(),
            INVALID,
            "library is set, a local group has no library",
        ),
        (
            |p| p.nccl_comm = std::ptr::without_provenance_mut(64),
            INVALID,
            "nccl_comm is set, a local group has none",
        ),
        (|p| p.rank = -1, INVALID, "rank is -1, at least 0 is needed"),
        (|p| p.rank = 1, INVALID, "rank is 1, allowed: 0 to 0"),
        (|p| p.size = -2, INVALID, "size is -2, at least 0 is needed"),
        (|p| p.size = 0, INVALID, "size is 0, allowed: 1 to 1024"),
        (
            |p| p.id.bytes = [0; 128],
            INVALID,
            "id is none of a local group: unsloth_comm_id_create makes one",
        ),
        (
            |p| (p.size, p.timeout_ms) = (2, 20),
            UNSLOTH_STATUS_COMM_ERROR,
            "comm is broken: rank 0 waited 20ms in comm_create for rank 1",
        ),
    ];
    for (spoil, status, problem) in cases {
        // SAFETY: structs of integers, size first; pointers to live locals.
        unsafe {
            let mut params: unsloth_comm_params = abi::zeroed_params();
            params.size = 1;
            let made = unsloth_comm_id_create(&abi::zeroed_params(), &mut params.id);
            assert_eq!(made, UNSLOTH_STATUS_SUCCESS);
            spoil(&mut params);
            let mut comm = std::ptr::null_mut();
            let got = unsloth_comm_create(ctx.0, &params, &mut comm);
            assert_fails(got, status, &format!("comm_create: {problem}"));
            assert!(comm.is_null());
        }
    }
    // SAFETY: as above.
    unsafe {
        let mut params: unsloth_comm_id_params = abi::zeroed_params();
        params.kind = 3;
        let mut id = unsloth_comm_id { bytes: [7; 128] };
        let got = unsloth_comm_id_create(&params, &mut id);
        assert_fails(
            got,
            INVALID,
            "comm_id_create: kind is 3, allowed: 0 (local), 1 (nccl)",
        );
        assert!(id.bytes == [7; 128]);
    }
}

#[test]
fn a_group_tells_what_it_is() {
    let ctx = Handle::cpu();
    let group = Group::new(&ctx);
    drop(ctx);
    // SAFETY: structs of integers, size first; live handles, and then a dead one.
    unsafe {
        let mut info: unsloth_comm_info = abi::zeroed_params();
        let status = unsloth_comm_info_get(group.0, &mut info);
        assert_eq!(status, UNSLOTH_STATUS_SUCCESS);
        assert_eq!((info.kind, info.rank, info.size), (0, 0, 1));
        let stream = std::ptr::null_mut();
        assert_eq!(
            unsloth_comm_warm_up(group.0, stream),
            UNSLOTH_STATUS_SUCCESS
        );
        let status = unsloth_comm_warm_up(group.0, std::ptr::without_provenance_mut(16));
        let message = "comm_warm_up: stream is 0x10, the cpu backend has only NULL";
        assert_fails(status, INVALID, message);
        assert_eq!(unsloth_comm_error_get(group.0), UNSLOTH_STATUS_SUCCESS);
        assert_eq!(unsloth_comm_abort(group.0), UNSLOTH_STATUS_SUCCESS);
        let message = "comm_error_get: comm is broken: rank 0 aborted it";
        let status = unsloth_comm_error_get(group.0);
        assert_fails(status, UNSLOTH_STATUS_COMM_ERROR, message);
        assert_eq!(unsloth_comm_destroy(group.0), UNSLOTH_STATUS_SUCCESS);
        let status = unsloth_comm_error_get(group.0);
        assert_eq!(status, UNSLOTH_STATUS_INVALID_HANDLE);
        assert_eq!(
            unsloth_comm_destroy(std::ptr::null_mut()),
            UNSLOTH_STATUS_SUCCESS
        );
    }
}
