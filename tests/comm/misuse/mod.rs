//! Groups and collectives through the C ABI with arguments that must be refused.

use crate::common::abi::{self, Handle, last_message};
use unsloth::ffi::comm::*;
use unsloth::ffi::status::*;

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

/// Checks an operation's table on a group of one rank, with good arguments that have its `comm`, `x`
/// and `out`.
macro_rules! check {
    ($name:literal, $params:ty, $supported:ident, $forward:ident, $table:ident $(, $field:ident = $value:expr)*) => {{
        use super::{Group, INVALID};
        use crate::common::abi::{self, Handle, Operation, assert_fails, c_tensor};
        use crate::common::{TestTensor, contexts, rng};
        use unsloth::{DType, Layout};

        let memory = &contexts()[0];
        let layout = Layout::contiguous(&[2, 4]).unwrap();
        let x = crate::group::random(&mut rng(), DType::F32, &[2, 4]).upload(memory);
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

mod groups;
mod moves;
mod optimizer;
mod reductions;
