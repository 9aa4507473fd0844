//! Losses of a head whose vocabulary ranks divide through the C ABI with arguments that must be refused,
//! on every rank and before it sends anything.

use super::misuse::{Memory, TOO_FEW, check, of_groups, on_two_ranks, poisoned, zeroed};
use super::vocabulary::of_vocabularies;
use crate::common::TestTensor;
use crate::common::abi::{Misuse, Operation, absent, c_tensor, last_message};
use unsloth::DType;
use unsloth::ffi::linear_cross_entropy::*;
use unsloth::ffi::status::*;

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;

const HEAD: Operation<unsloth_linear_cross_entropy_params> = Operation {
    name: "linear_cross_entropy",
    supported: unsloth_linear_cross_entropy_supported,
    forward: unsloth_linear_cross_entropy_forward,
};

const MISUSE: &[Misuse<unsloth_linear_cross_entropy_params>] = &[
    (
        |p| p.parallel.row_counts = TOO_FEW.as_ptr(),
        INVALID,
        "linear_cross_entropy: row_counts has 1 for rank ",
    ),
    (
        |p| p.x.shape[0] = 4,
        INVALID,
        "linear_cross_entropy: dx has shape [2, 3], x has [4, 3]",
    ),
    (
        |p| (p.x.shape[0], p.dx) = (4, absent()),
        INVALID,
        "linear_cross_entropy: targets has shape [4], expected [8]",
    ),
    (
        |p| (p.parallel.sequence, p.dx) = (0, absent()),
        INVALID,
        "linear_cross_entropy: targets has shape [4], expected [2]",
    ),
    (
        |p| p.x.strides = [4, 1, 0, 0, 0, 0],
        INVALID,
        "linear_cross_entropy: x has shape [2, 3] with strides [4, 1], it must be contiguous",
    ),
    (
        |p| p.dx.strides = [4, 1, 0, 0, 0, 0],
        INVALID,
        "linear_cross_entropy: dx has shape [2, 3] with strides [4, 1], it must be contiguous",
    ),
    (
        |p| p.targets.strides[0] = 2,
        INVALID,
        "linear_cross_entropy: targets has shape [4] with strides [2], it must be contiguous",
    ),
    (
        |p| p.losses.shape[0] = 2,
        INVALID,
        "linear_cross_entropy: losses has shape [2], expected [4]",
    ),
    (
        |p| p.workspace_size = 255,
        UNSLOTH_STATUS_WORKSPACE_TOO_SMALL,
        "linear_cross_entropy: workspace_size is 255 bytes, ",
    ),
    (
        |p| p.workspace = p.losses.data,
        INVALID,
        "linear_cross_entropy: workspace",
    ),
    (
        |p| p.dx.data = p.x.data,
        INVALID,
        "linear_cross_entropy: dx overlaps x",
    ),
];

#[test]
fn losses_are_refused_on_every_rank() {
    on_two_ranks(|handle, ctx, parallel, _| {
        let mut memory = Memory {
            ctx,
            all: Vec::new(),
        };
        let (losses, dx) = (poisoned(ctx, &[4]), poisoned(ctx, &[2, 3]));
        let targets = TestTensor::of(DType::I32, &[4], &[0.0, 7.0, -100.0, 1.0]).upload(ctx);
        let mut good: unsloth_linear_cross_entropy_params = zeroed();
        good.x = memory.normal(&[2, 3]);
        good.weight = memory.normal(&[4, 3]);
        good.targets = c_tensor(&targets);
        (good.losses, good.dx) = (c_tensor(&losses), c_tensor(&dx));
        good.parallel = parallel;
        (good.parallel.sequence, good.vocab_begin, good.vocab_size) = (1, 1, 8);
        let mut size = 0;
        // SAFETY: good arguments.
        let status =
            unsafe { unsloth_linear_cross_entropy_workspace_size(handle.0, &good, &mut size) };
        assert_eq!(status, UNSLOTH_STATUS_SUCCESS, "{}", last_message());
        (good.workspace, good.workspace_size) = (memory.workspace(size), size);
        let all: &[Misuse<_>] =
            of_groups!(unsloth_linear_cross_entropy_params, "linear_cross_entropy");
        check(&HEAD, handle, good, all, &losses);
        let all: &[Misuse<unsloth_linear_cross_entropy_params>] = of_vocabularies!(
            unsloth_linear_cross_entropy_params,
            "linear_cross_entropy",
            "weight"
        );
        check(&HEAD, handle, good, all, &losses);
        check(&HEAD, handle, good, MISUSE, &dx);
        HEAD.check_on(handle, good, &[], &[&losses, &dx]);
    });
}
