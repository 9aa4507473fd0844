//! Groups themselves.

use super::{Group, INVALID};
use crate::common::abi::{self, Handle, assert_fails};
use unsloth::ffi::comm::*;
use unsloth::ffi::status::*;

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
