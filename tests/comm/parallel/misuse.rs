//! Divided layers through the C ABI with arguments that must be refused, on every rank and before it sends
//! anything.

use std::ptr::null_mut;

use crate::common::abi::{self, Handle, Misuse, Operation, c_tensor, last_message};
use crate::common::{DeviceTensor, TestTensor, contiguous, rng};
use crate::group::context;
use unsloth::ffi::attention_block::backward::*;
use unsloth::ffi::attention_block::*;
use unsloth::ffi::comm::*;
use unsloth::ffi::decoder_layer::*;
use unsloth::ffi::linear::backward::*;
use unsloth::ffi::linear::*;
use unsloth::ffi::mlp::*;
use unsloth::ffi::parallel::*;
use unsloth::ffi::status::*;
use unsloth::{Context, DType};

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;
const UNSUPPORTED: unsloth_status = UNSLOTH_STATUS_UNSUPPORTED;

/// Of two ranks.
pub static EVEN: [i64; 2] = [2, 2];
pub static TOO_FEW: [i64; 2] = [1, 1];
static NEGATIVE: [i64; 2] = [2, -1];

/// Arguments of which only the size is set.
pub fn zeroed<P: Copy>() -> P {
    // SAFETY: every struct that this file names has its size first, and only integers, floats and pointers.
    unsafe { abi::zeroed_params() }
}

/// Calls `run` on each of two ranks.
pub fn on_two_ranks(run: impl Fn(&Handle, &Context, unsloth_parallel, usize) + Sync) {
    let mut id = unsloth_comm_id { bytes: [0; 128] };
    // SAFETY: structs of integers, size first; pointers to live locals.
    let status = unsafe { unsloth_comm_id_create(&abi::zeroed_params(), &mut id) };
    assert_eq!(status, UNSLOTH_STATUS_SUCCESS, "{}", last_message());
    std::thread::scope(|scope| {
        let run = &run;
        for rank in 0..2 {
            scope.spawn(move || {
                let ctx = Handle::cpu();
                let mut params: unsloth_comm_params = zeroed();
                (params.rank, params.size, params.id) = (rank, 2, id);
                let mut comm = null_mut();
                // SAFETY: as above.
                let status = unsafe { unsloth_comm_create(ctx.0, &params, &mut comm) };
                assert_eq!(status, UNSLOTH_STATUS_SUCCESS, "{}", last_message());
                let parallel = unsloth_parallel {
                    comm,
                    row_counts: std::ptr::null(),
                    partition: 0,
                    sequence: 0,
                    chunk_rows: 0,
                    reserved: [0; 2],
                };
                run(&ctx, &context(1), parallel, rank as usize);
                // SAFETY: nothing uses what goes with it.
                unsafe { unsloth_comm_destroy(comm) };
            });
        }
    });
}

/// Tensors of a call, which stay until it ends.
pub struct Memory<'a> {
    pub ctx: &'a Context,
    pub all: Vec<DeviceTensor>,
}

impl Memory<'_> {
    pub fn normal(&mut self, shape: &[usize]) -> unsloth::ffi::tensor::unsloth_tensor {
        let t = TestTensor::normal(&mut rng(), DType::F32, contiguous(shape));
        self.all.push(t.upload(self.ctx));
        c_tensor(self.all.last().unwrap())
    }

    /// Bytes aligned as a workspace is.
    pub fn workspace(&mut self, size: usize) -> *mut std::ffi::c_void {
        let t = TestTensor::poisoned(DType::F32, contiguous(&[size.div_ceil(4) + 64]));
        self.all.push(t.upload(self.ctx));
        let data = self.all.last().unwrap().data();
        data.wrapping_byte_add(data.align_offset(256))
    }
}

pub fn poisoned(ctx: &Context, shape: &[usize]) -> DeviceTensor {
    TestTensor::poisoned(DType::F32, contiguous(shape)).upload(ctx)
}

/// What is refused of any group.
macro_rules! of_groups {
    ($p:ty, $op:literal) => {
        &[
            (
                |p: &mut $p| p.parallel.comm = std::ptr::null_mut(),
                INVALID,
                concat!($op, ": sequence is set without comm"),
            ),
            (
                |p: &mut $p| p.parallel.comm = std::ptr::without_provenance_mut(77),
                UNSLOTH_STATUS_INVALID_HANDLE,
                concat!($op, ": comm is not a live unsloth_comm handle (0x4d)"),
            ),
            (
                |p: &mut $p| p.parallel.sequence = 2,
                INVALID,
                concat!($op, ": sequence is 2, allowed: 0, 1"),
            ),
            (
                |p: &mut $p| p.parallel.reserved[1] = 1,
                INVALID,
                concat!($op, ": parallel.reserved is 1, allowed: 0"),
            ),
            (
                |p: &mut $p| p.parallel.chunk_rows = -1,
                INVALID,
                concat!($op, ": chunk_rows is -1, "),
            ),
            (
                |p: &mut $p| {
                    p.parallel.row_counts = $crate::parallel::misuse::TOO_FEW
                        .as_ptr()
                        .wrapping_byte_add(1)
                },
                INVALID,
                concat!($op, ": row_counts"),
            ),
        ]
    };
}

pub(super) use of_groups;

/// As [`Operation::check_on`], of messages that begin like this.
pub fn check<P: Copy>(
    op: &Operation<P>,
    ctx: &Handle,
    good: P,
    table: &[Misuse<P>],
    out: &DeviceTensor,
) {
    for (spoil, status, message) in table {
        let mut params = good;
        spoil(&mut params);
        // SAFETY: what passes validation lies in live memory.
        let got = unsafe { (op.forward)(ctx.0, &params, null_mut()) };
        assert_eq!(got, *status, "{message}: {}", last_message());
        assert!(
            last_message().starts_with(message),
            "{message}: {}",
            last_message()
        );
        abi::assert_untouched(out);
    }
}

const LINEAR: Operation<unsloth_linear_params> = Operation {
    name: "linear",
    supported: unsloth_linear_supported,
    forward: unsloth_linear_forward,
};

const ROW: &[Misuse<unsloth_linear_params>] = &[
    (
        |p| p.parallel.partition = 2,
        INVALID,
        "linear: partition is 2, allowed: 0 (column), 1 (row)",
    ),
    (
        |p| {
            p.parallel.sequence = 0;
            p.parallel.row_counts = EVEN.as_ptr();
        },
        INVALID,
        "linear: row_counts is there without sequence, which divides rows",
    ),
    (
        |p| p.parallel.row_counts = TOO_FEW.as_ptr(),
        INVALID,
        "linear: row_counts add up to 2, x has 4 rows",
    ),
    (
        |p| p.parallel.row_counts = NEGATIVE.as_ptr(),
        INVALID,
        "linear: row_counts has -1 for rank 1, allowed: 0 to 4",
    ),
    (
        |p| {
            p.x.shape[0] = 3;
        },
        INVALID,
        "linear: x has 3 rows, which 2 ranks do not share evenly",
    ),
    (
        |p| p.parallel.sequence = 0,
        INVALID,
        "linear: out has shape [2, 3], expected [4, 3]",
    ),
    (
        |p| p.out.strides = [6, 2, 0, 0, 0, 0],
        INVALID,
        "linear: out has shape [2, 3] with strides [6, 2], it must be contiguous",
    ),
    (
        |p| {
            p.x.rank = 1;
            (p.x.shape[0], p.x.strides[0]) = (8, 1);
        },
        INVALID,
        "linear: x has rank 1, at least 2 is needed",
    ),
    (
        |p| p.workspace_size = 1,
        UNSLOTH_STATUS_WORKSPACE_TOO_SMALL,
        "linear: workspace_size is 1 bytes, ",
    ),
];

#[test]
fn linear_layers_refuse_on_every_rank() {
    on_two_ranks(|handle, ctx, parallel, _| {
        let mut memory = Memory {
            ctx,
            all: Vec::new(),
        };
        let out = poisoned(ctx, &[2, 3]);
        let mut good: unsloth_linear_params = zeroed();
        good.x = memory.normal(&[4, 8]);
        good.weight = memory.normal(&[3, 8]);
        good.residual = memory.normal(&[2, 3]);
        good.out = c_tensor(&out);
        good.parallel = parallel;
        (good.parallel.partition, good.parallel.sequence) = (UNSLOTH_PARTITION_ROW, 1);
        let mut size = 0;
        // SAFETY: good arguments.
        let status = unsafe { unsloth_linear_workspace_size(handle.0, &good, &mut size) };
        assert_eq!(status, UNSLOTH_STATUS_SUCCESS, "{}", last_message());
        (good.workspace, good.workspace_size) = (memory.workspace(size), size);
        check(&LINEAR, handle, good, ROW, &out);
        let all: &[Misuse<_>] = of_groups!(unsloth_linear_params, "linear");
        // Without a group its partition is told of first.
        check(&LINEAR, handle, good, &all[1..], &out);
        let column: &[Misuse<unsloth_linear_params>] = &[
            (
                |p| p.parallel.row_counts = TOO_FEW.as_ptr(),
                INVALID,
                "linear: row_counts has 1 for rank",
            ),
            (
                |p| p.parallel.comm = null_mut(),
                INVALID,
                "linear: sequence is set without comm",
            ),
            (
                |p| p.x.strides = [9, 1, 0, 0, 0, 0],
                INVALID,
                "linear: x has shape [4, 8] with strides [9, 1], it must be contiguous",
            ),
            (
                |_| (),
                INVALID,
                "linear: out has shape [2, 3], expected [8, 3]",
            ),
        ];
        let mut columns = good;
        columns.parallel.partition = UNSLOTH_PARTITION_COLUMN;
        check(&LINEAR, handle, columns, column, &out);
        LINEAR.check_on(handle, good, &[], &[&out]);
    });
}

const LINEAR_BACKWARD: Operation<unsloth_linear_backward_params> = Operation {
    name: "linear_backward",
    supported: unsloth_linear_backward_supported,
    forward: unsloth_linear_backward,
};

const COLUMN_BACKWARD: &[Misuse<unsloth_linear_backward_params>] = &[
    (
        |p| p.x.shape[0] = 3,
        INVALID,
        "linear_backward: x has shape [3, 8], expected [2, 8]",
    ),
    (
        |p| p.dx.shape[0] = 4,
        INVALID,
        "linear_backward: dx has shape [4, 8], expected [2, 8]",
    ),
    (
        |p| p.dout.shape[0] = 3,
        INVALID,
        "linear_backward: dout has 3 rows, which 2 ranks do not share evenly",
    ),
    (
        |p| p.dx.strides = [9, 1, 0, 0, 0, 0],
        INVALID,
        "linear_backward: dx has shape [2, 8] with strides [9, 1], it must be contiguous",
    ),
    (
        |p| p.parallel.row_counts = TOO_FEW.as_ptr(),
        INVALID,
        "linear_backward: row_counts add up to 2, dout has 4 rows",
    ),
    (
        |p| p.dweight.shape[1] = 7,
        INVALID,
        "linear_backward: dweight has shape [3, 7], expected [3, 8]",
    ),
    (
        |p| p.workspace_size = 1,
        UNSLOTH_STATUS_WORKSPACE_TOO_SMALL,
        "linear_backward: workspace_size is 1 bytes, ",
    ),
];

#[test]
fn gradients_of_linear_layers_are_refused_on_every_rank() {
    on_two_ranks(|handle, ctx, parallel, _| {
        let mut memory = Memory {
            ctx,
            all: Vec::new(),
        };
        let (dx, dweight) = (poisoned(ctx, &[2, 8]), poisoned(ctx, &[3, 8]));
        let mut good: unsloth_linear_backward_params = zeroed();
        good.dout = memory.normal(&[4, 3]);
        good.x = memory.normal(&[2, 8]);
        good.weight = memory.normal(&[3, 8]);
        (good.dx, good.dweight) = (c_tensor(&dx), c_tensor(&dweight));
        good.parallel = parallel;
        good.parallel.sequence = 1;
        let mut size = 0;
        // SAFETY: good arguments.
        let status = unsafe { unsloth_linear_backward_workspace_size(handle.0, &good, &mut size) };
        assert_eq!(status, UNSLOTH_STATUS_SUCCESS, "{}", last_message());
        (good.workspace, good.workspace_size) = (memory.workspace(size), size);
        check(&LINEAR_BACKWARD, handle, good, COLUMN_BACKWARD, &dx);
        let all: &[Misuse<_>] = of_groups!(unsloth_linear_backward_params, "linear_backward");
        check(&LINEAR_BACKWARD, handle, good, all, &dweight);
        LINEAR_BACKWARD.check_on(handle, good, &[], &[&dx, &dweight]);
    });
}

const MLP: Operation<unsloth_mlp_params> = Operation {
    name: "mlp",
    supported: unsloth_mlp_supported,
    forward: unsloth_mlp_forward,
};

const OF_MLP: &[Misuse<unsloth_mlp_params>] = &[
    (
        |p| p.parallel.partition = UNSLOTH_PARTITION_ROW,
        INVALID,
        "mlp: partition is 1, allowed of a block: 0",
    ),
    (
        |p| {
            p.intermediate_norm = p.gate_weight;
            (p.intermediate_norm.rank, p.intermediate_norm.shape[0]) = (1, 4);
            p.norm_epsilon = 1.0;
        },
        UNSUPPORTED,
        "mlp: intermediate_norm is of all columns together, which 2 ranks divide",
    ),
    (
        |p| p.out.strides = [9, 1, 0, 0, 0, 0],
        INVALID,
        "mlp: out has shape [2, 8] with strides [9, 1], it must be contiguous",
    ),
    (
        |p| p.x.strides = [9, 1, 0, 0, 0, 0],
        INVALID,
        "mlp: x has shape [2, 8] with strides [9, 1], it must be contiguous",
    ),
    (
        |p| p.parallel.row_counts = TOO_FEW.as_ptr(),
        INVALID,
        "mlp: row_counts has 1 for rank",
    ),
];

/// An MLP of this rank's part.
fn mlp(memory: &mut Memory<'_>, parallel: unsloth_parallel) -> unsloth_mlp_params {
    let mut good: unsloth_mlp_params = zeroed();
    good.x = memory.normal(&[2, 8]);
    good.gate_weight = memory.normal(&[4, 8]);
    good.up_weight = memory.normal(&[4, 8]);
    good.down_weight = memory.normal(&[8, 4]);
    good.parallel = parallel;
    good.parallel.sequence = 1;
    good
}

#[test]
fn feed_forward_blocks_are_refused_on_every_rank() {
    on_two_ranks(|handle, ctx, parallel, _| {
        let mut memory = Memory {
            ctx,
            all: Vec::new(),
        };
        let out = poisoned(ctx, &[2, 8]);
        let mut good = mlp(&mut memory, parallel);
        good.out = c_tensor(&out);
        let mut size = 0;
        // SAFETY: good arguments.
        let status = unsafe { unsloth_mlp_workspace_size(handle.0, &good, &mut size) };
        assert_eq!(status, UNSLOTH_STATUS_SUCCESS, "{}", last_message());
        (good.workspace, good.workspace_size) = (memory.workspace(size), size);
        check(&MLP, handle, good, OF_MLP, &out);
        let all: &[Misuse<_>] = of_groups!(unsloth_mlp_params, "mlp");
        check(&MLP, handle, good, all, &out);
        MLP.check_on(handle, good, &[], &[&out]);
    });
}

const ATTENTION: Operation<unsloth_attention_block_params> = Operation {
    name: "attention_block",
    supported: unsloth_attention_block_supported,
    forward: unsloth_attention_block_forward,
};

const OF_ATTENTION: &[Misuse<unsloth_attention_block_params>] = &[
    (
        |p| p.parallel.partition = UNSLOTH_PARTITION_ROW,
        INVALID,
        "attention_block: partition is 1, allowed of a block: 0",
    ),
    (
        |p| {
            p.q_norm = p.q_weight;
            (p.q_norm.rank, p.q_norm.shape[0]) = (1, 8);
            p.norm_epsilon = 1.0;
        },
        UNSUPPORTED,
        "attention_block: q_norm is of all columns together, which 2 ranks divide",
    ),
    (
        |p| {
            p.attended_norm = p.q_weight;
            (p.attended_norm.rank, p.attended_norm.shape[0]) = (1, 8);
            p.norm_epsilon = 1.0;
        },
        UNSUPPORTED,
        "attention_block: attended_norm is of all columns together, which 2 ranks divide",
    ),
    (
        |p| p.out.strides = [9, 1, 0, 0, 0, 0],
        INVALID,
        "attention_block: out has shape [2, 8] with strides [9, 1], it must be contiguous",
    ),
    (
        |p| {
            p.qkv_out = p.q_weight;
            (p.qkv_out.shape[0], p.qkv_out.shape[1]) = (2, 16);
        },
        INVALID,
        "attention_block: qkv_out has shape [2, 16], expected [4, 16]",
    ),
];

/// Attention of this rank's heads.
fn attention(
    memory: &mut Memory<'_>,
    parallel: unsloth_parallel,
) -> unsloth_attention_block_params {
    let mut good: unsloth_attention_block_params = zeroed();
    (good.num_heads, good.num_kv_heads, good.head_dim) = (2, 1, 4);
    good.x = memory.normal(&[2, 8]);
    good.q_weight = memory.normal(&[8, 8]);
    good.k_weight = memory.normal(&[4, 8]);
    good.v_weight = memory.normal(&[4, 8]);
    good.out_weight = memory.normal(&[8, 8]);
    good.parallel = parallel;
    good.parallel.sequence = 1;
    good
}

#[test]
fn attention_blocks_are_refused_on_every_rank() {
    on_two_ranks(|handle, ctx, parallel, _| {
        let mut memory = Memory {
            ctx,
            all: Vec::new(),
        };
        let out = poisoned(ctx, &[2, 8]);
        let mut good = attention(&mut memory, parallel);
        good.out = c_tensor(&out);
        let mut size = 0;
        // SAFETY: good arguments.
        let status = unsafe { unsloth_attention_block_workspace_size(handle.0, &good, &mut size) };
        assert_eq!(status, UNSLOTH_STATUS_SUCCESS, "{}", last_message());
        (good.workspace, good.workspace_size) = (memory.workspace(size), size);
        check(&ATTENTION, handle, good, OF_ATTENTION, &out);
        let all: &[Misuse<_>] = of_groups!(unsloth_attention_block_params, "attention_block");
        check(&ATTENTION, handle, good, all, &out);
        ATTENTION.check_on(handle, good, &[], &[&out]);

        // The backward pass has the forward's group.
        let dx = poisoned(ctx, &[2, 8]);
        let mut backward: unsloth_attention_block_backward_params = zeroed();
        backward.forward = &good;
        backward.dout = memory.normal(&[2, 8]);
        backward.dx = c_tensor(&dx);
        backward.dx.strides = [9, 1, 0, 0, 0, 0];
        // SAFETY: what passes validation lies in live memory.
        let status = unsafe { unsloth_attention_block_backward(handle.0, &backward, null_mut()) };
        let expected = "attention_block_backward: dx has shape [2, 8] with strides [9, 1], it must be contiguous";
        abi::assert_fails(status, INVALID, expected);
        abi::assert_untouched(&dx);
    });
}

/// Both parts of a decoder layer are divided among one group in the same way.
#[test]
fn a_decoder_layer_has_one_group() {
    on_two_ranks(|handle, ctx, parallel, _| {
        let mut memory = Memory {
            ctx,
            all: Vec::new(),
        };
        let out = poisoned(ctx, &[2, 8]);
        let of_attention = attention(&mut memory, parallel);
        let of_mlp = mlp(&mut memory, parallel);
        let mut good: unsloth_decoder_layer_params = zeroed();
        good.attention = &of_attention;
        good.norm_epsilon = 1.0;
        good.x = memory.normal(&[2, 8]);
        (good.attention_norm, good.mlp_norm) = (memory.normal(&[8]), memory.normal(&[8]));
        good.out = c_tensor(&out);
        for (sequence, chunk_rows) in [(0, 0), (1, 3)] {
            let mut other = of_mlp;
            (other.parallel.sequence, other.parallel.chunk_rows) = (sequence, chunk_rows);
            good.mlp = &other;
            // SAFETY: what passes validation lies in live memory.
            let status = unsafe { unsloth_decoder_layer_forward(handle.0, &good, null_mut()) };
            let expected = "decoder_layer: parallel of the attention block is not that of the mlp, with the same rows and chunks";
            abi::assert_fails(status, INVALID, expected);
            abi::assert_untouched(&out);
        }
    });
}

/// A group of another context is refused.
#[test]
fn a_group_is_of_the_calls_context() {
    on_two_ranks(|_, ctx, parallel, _| {
        let other = Handle::cpu();
        let mut memory = Memory {
            ctx,
            all: Vec::new(),
        };
        let out = poisoned(ctx, &[2, 8]);
        let mut params = mlp(&mut memory, parallel);
        params.out = c_tensor(&out);
        // SAFETY: what passes validation lies in live memory.
        let status = unsafe { unsloth_mlp_forward(other.0, &params, null_mut()) };
        abi::assert_fails(status, INVALID, "mlp: comm belongs to another context");
    });
}
