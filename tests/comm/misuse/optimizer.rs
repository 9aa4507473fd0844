//! Optimizers over a group.

use super::{Group, INVALID};
use crate::common::TestTensor;
use crate::common::abi::{Handle, assert_fails, c_tensor, last_message, zeroed_params};
use unsloth::ffi::optimizer::*;
use unsloth::ffi::optimizer_handle::*;
use unsloth::ffi::status::*;
use unsloth::{Context, DType, Layout};

/// Groups of another context and what is none are refused by queries as well; what is taken lives on with
/// the optimizer.
#[test]
fn groups_of_optimizers() {
    let memory = &Context::cpu().unwrap();
    let zeros = TestTensor::of(DType::F32, &[4], &[0.0; 4]);
    let (weight, gradient) = (zeros.upload(memory), zeros.upload(memory));
    let layout = Layout::contiguous(&[2048]).unwrap();
    let state = TestTensor::poisoned(DType::Bool, layout).upload(memory);
    let (ctx, other) = (Handle::cpu(), Handle::cpu());
    let (group, foreign) = (Group::new(&ctx), Group::new(&other));
    let parameter = unsloth_parameter {
        weight: c_tensor(&weight),
        gradient: c_tensor(&gradient),
        group: 0,
        reserved: 0,
    };
    let groups = unsloth_parameter_group {
        learning_rate: 1.0,
        weight_decay: 0.0,
    };
    // SAFETY: integers, floats and pointers.
    let mut params: unsloth_optimizer_params = unsafe { zeroed_params() };
    (params.parameters, params.num_parameters) = (&parameter, 1);
    (params.groups, params.num_groups) = (&groups, 1);
    (params.state, params.state_size) = (state.data(), 2048);
    let none = std::ptr::null_mut();
    let wrong = [
        (
            foreign.0,
            INVALID,
            "optimizer: comm belongs to another context",
        ),
        (
            std::ptr::without_provenance_mut(77),
            UNSLOTH_STATUS_INVALID_HANDLE,
            "optimizer: comm is not a live unsloth_comm handle (0x4d)",
        ),
    ];
    for (comm, status, message) in wrong {
        params.comm = comm;
        let (mut optimizer, mut size, mut implementation) = (std::ptr::null_mut(), 7, 7);
        // SAFETY: live locals; what is wrong is what is tested.
        unsafe {
            let got = unsloth_optimizer_supported(ctx.0, &params, &mut implementation);
            assert_fails(got, status, message);
            let got = unsloth_optimizer_state_size(ctx.0, &params, &mut size);
            assert_fails(got, status, message);
            let got = unsloth_optimizer_create(ctx.0, &params, none, &mut optimizer);
            assert_fails(got, status, message);
        }
        assert_eq!((optimizer.is_null(), size, implementation), (true, 7, 7));
    }
    params.comm = group.0;
    let mut optimizer = std::ptr::null_mut();
    // SAFETY: live locals, and memory of the context.
    unsafe {
        let got = unsloth_optimizer_create(ctx.0, &params, none, &mut optimizer);
        assert_eq!(got, UNSLOTH_STATUS_SUCCESS, "{}", last_message());
        drop(group);
        let got = unsloth_optimizer_step(optimizer, none);
        assert_eq!(got, UNSLOTH_STATUS_SUCCESS, "{}", last_message());
        assert_eq!(unsloth_optimizer_destroy(optimizer), UNSLOTH_STATUS_SUCCESS);
    }
    drop(foreign);
}
