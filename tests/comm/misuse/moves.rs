//! Collectives that move numbers as they are.

use super::{INVALID, NEGATIVE, NONE, TWO};
use crate::common::abi::{Misuse, absent, shifted};
use unsloth::DType;
use unsloth::ffi::all_gather::*;
use unsloth::ffi::all_to_all::*;
use unsloth::ffi::broadcast::*;
use unsloth::ffi::send_receive::*;
use unsloth::ffi::status::*;

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
