//! Embeddings whose table ranks divide through the C ABI with arguments that must be refused, on every
//! rank and before it sends anything.

use super::misuse::{Memory, TOO_FEW, check, of_groups, on_two_ranks, poisoned, zeroed};
use super::vocabulary::of_vocabularies;
use crate::common::TestTensor;
use crate::common::abi::{Misuse, Operation, c_tensor, last_message};
use unsloth::DType;
use unsloth::ffi::embedding::backward::*;
use unsloth::ffi::embedding::*;
use unsloth::ffi::status::*;

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;

const EMBEDDING: Operation<unsloth_embedding_params> = Operation {
    name: "embedding",
    supported: unsloth_embedding_supported,
    forward: unsloth_embedding_forward,
};

#[test]
fn embeddings_are_refused_on_every_rank() {
    on_two_ranks(|handle, ctx, parallel, _| {
        let mut memory = Memory {
            ctx,
            all: Vec::new(),
        };
        let out = poisoned(ctx, &[2, 3]);
        let ids = TestTensor::of(DType::I32, &[4], &[0.0, 7.0, 5.0, 1.0]).upload(ctx);
        let mut good: unsloth_embedding_params = zeroed();
        good.table = memory.normal(&[4, 3]);
        good.ids = c_tensor(&ids);
        good.out = c_tensor(&out);
        good.parallel = parallel;
        (good.parallel.sequence, good.vocab_begin, good.vocab_size) = (1, 1, 8);
        let mut size = 0;
        // SAFETY: good arguments.
        let status = unsafe { unsloth_embedding_workspace_size(handle.0, &good, &mut size) };
        assert_eq!(
            (status, size),
            (UNSLOTH_STATUS_SUCCESS, 256),
            "{}",
            last_message()
        );
        (good.workspace, good.workspace_size) = (memory.workspace(size), size);
        let all: &[Misuse<_>] = of_groups!(unsloth_embedding_params, "embedding");
        check(&EMBEDDING, handle, good, all, &out);
        let all: &[Misuse<_>] = of_vocabularies!(unsloth_embedding_params, "embedding", "table");
        check(&EMBEDDING, handle, good, all, &out);
        let table: &[Misuse<unsloth_embedding_params>] = &[
            (
                |p| p.parallel.row_counts = TOO_FEW.as_ptr(),
                INVALID,
                "embedding: row_counts add up to 2, ids has 4 rows",
            ),
            (
                |p| p.ids.shape[0] = 5,
                INVALID,
                "embedding: ids has 5 rows, which 2 ranks do not share evenly",
            ),
            (
                |p| p.out.shape[0] = 4,
                INVALID,
                "embedding: out has shape [4, 3], expected [2, 3]",
            ),
            (
                |p| p.parallel.sequence = 0,
                INVALID,
                "embedding: out has shape [2, 3], expected [4, 3]",
            ),
            (
                |p| p.out.strides = [4, 1, 0, 0, 0, 0],
                INVALID,
                "embedding: out has shape [2, 3] with strides [4, 1], it must be contiguous",
            ),
            (
                |p| {
                    p.parallel.sequence = 0;
                    p.ids.shape[0] = 2;
                    p.out.strides = [4, 1, 0, 0, 0, 0];
                },
                INVALID,
                "embedding: out has shape [2, 3] with strides [4, 1], it must be contiguous",
            ),
            (
                |p| p.workspace_size = 255,
                UNSLOTH_STATUS_WORKSPACE_TOO_SMALL,
                "embedding: workspace_size is 255 bytes, ",
            ),
            (
                |p| p.workspace = p.workspace.wrapping_byte_add(4),
                INVALID,
                "embedding: workspace",
            ),
            (
                |p| p.workspace = p.out.data,
                INVALID,
                "embedding: workspace",
            ),
        ];
        check(&EMBEDDING, handle, good, table, &out);
        EMBEDDING.check_on(handle, good, &[], &[&out]);
    });
}

const BACKWARD: Operation<unsloth_embedding_backward_params> = Operation {
    name: "embedding_backward",
    supported: unsloth_embedding_backward_supported,
    forward: unsloth_embedding_backward,
};

#[test]
fn gradients_are_refused_on_every_rank() {
    on_two_ranks(|handle, ctx, parallel, _| {
        let mut memory = Memory {
            ctx,
            all: Vec::new(),
        };
        let dweight = poisoned(ctx, &[4, 3]);
        let ids = TestTensor::of(DType::I32, &[4], &[0.0, 7.0, 5.0, 1.0]).upload(ctx);
        let mut good: unsloth_embedding_backward_params = zeroed();
        good.dout = memory.normal(&[2, 3]);
        good.ids = c_tensor(&ids);
        good.dweight = c_tensor(&dweight);
        good.parallel = parallel;
        (good.parallel.sequence, good.vocab_begin, good.vocab_size) = (1, 1, 8);
        let mut size = 0;
        // SAFETY: good arguments.
        let status =
            unsafe { unsloth_embedding_backward_workspace_size(handle.0, &good, &mut size) };
        assert_eq!(
            (status, size),
            (UNSLOTH_STATUS_SUCCESS, 256),
            "{}",
            last_message()
        );
        (good.workspace, good.workspace_size) = (memory.workspace(size), size);
        let all: &[Misuse<_>] = of_groups!(unsloth_embedding_backward_params, "embedding_backward");
        check(&BACKWARD, handle, good, all, &dweight);
        let all: &[Misuse<_>] = of_vocabularies!(
            unsloth_embedding_backward_params,
            "embedding_backward",
            "dweight"
        );
        check(&BACKWARD, handle, good, all, &dweight);
        let table: &[Misuse<unsloth_embedding_backward_params>] = &[
            (
                |p| p.parallel.row_counts = TOO_FEW.as_ptr(),
                INVALID,
                "embedding_backward: row_counts add up to 2, ids has 4 rows",
            ),
            (
                |p| p.ids.shape[0] = 5,
                INVALID,
                "embedding_backward: ids has 5 rows, which 2 ranks do not share evenly",
            ),
            (
                |p| p.dout.shape[0] = 4,
                INVALID,
                "embedding_backward: dout has shape [4, 3], expected [2, 3]",
            ),
            (
                |p| p.parallel.sequence = 0,
                INVALID,
                "embedding_backward: dout has shape [2, 3], expected [4, 3]",
            ),
            (
                |p| p.dout.strides = [4, 1, 0, 0, 0, 0],
                INVALID,
                "embedding_backward: dout has shape [2, 3] with strides [4, 1], it must be contiguous",
            ),
            (
                |p| (p.has_padding_idx, p.padding_idx) = (1, 8),
                INVALID,
                "embedding_backward: padding_idx is 8, the vocabulary has 8 rows",
            ),
            (
                |p| p.workspace_size = 255,
                UNSLOTH_STATUS_WORKSPACE_TOO_SMALL,
                "embedding_backward: workspace_size is 255 bytes, ",
            ),
        ];
        check(&BACKWARD, handle, good, table, &dweight);
        BACKWARD.check_on(handle, good, &[], &[&dweight]);
    });
}
