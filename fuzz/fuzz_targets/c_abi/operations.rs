//! One call of one operation.

use unsloth::ffi::argmax::*;
use unsloth::ffi::attention::backward::*;
use unsloth::ffi::attention::*;
use unsloth::ffi::attention_block::backward::*;
use unsloth::ffi::attention_block::*;
use unsloth::ffi::cast::*;
use unsloth::ffi::context::unsloth_context;
use unsloth::ffi::cross_entropy::*;
use unsloth::ffi::decoder_layer::backward::*;
use unsloth::ffi::decoder_layer::*;
use unsloth::ffi::embedding::backward::*;
use unsloth::ffi::embedding::*;
use unsloth::ffi::layer_norm::backward::*;
use unsloth::ffi::layer_norm::*;
use unsloth::ffi::linear::backward::*;
use unsloth::ffi::linear::*;
use unsloth::ffi::linear_cross_entropy::*;
use unsloth::ffi::linear_logprob::backward::*;
use unsloth::ffi::linear_logprob::*;
use unsloth::ffi::mlp::backward::*;
use unsloth::ffi::mlp::*;
use unsloth::ffi::rms_norm::backward::*;
use unsloth::ffi::rms_norm::*;
use unsloth::ffi::qk_norm_rope::backward::*;
use unsloth::ffi::qk_norm_rope::*;
use unsloth::ffi::rope::*;
use unsloth::ffi::status::*;
use unsloth::ffi::swiglu::backward::*;
use unsloth::ffi::swiglu::*;
use unsloth::ffi::tensor::*;
use unsloth::ffi::{unsloth_implementation, unsloth_stream};

use crate::arena::{Arena, absent};
use crate::attention::Batch;
use crate::input::Input;
use crate::{context, last_message};

type Supported<P> = unsafe extern "C" fn(
    *mut unsloth_context,
    *const P,
    *mut unsloth_implementation,
) -> unsloth_status;
type WorkspaceSize<P> =
    unsafe extern "C" fn(*mut unsloth_context, *const P, *mut usize) -> unsloth_status;
type Forward<P> =
    unsafe extern "C" fn(*mut unsloth_context, *const P, unsloth_stream) -> unsloth_status;

/// A params struct with room behind it, for sizes that are too large.
#[repr(C)]
pub struct Stated<P> {
    pub params: P,
    beyond: [u8; 32],
}

/// Where an operation takes scratch memory.
struct Scratch<P> {
    size: WorkspaceSize<P>,
    set: fn(&mut P, *mut u8, usize),
}

/// A layer over a vocabulary, and the tokens that it is for.
struct Head {
    x: unsloth_tensor,
    dx: unsloth_tensor,
    weight: unsloth_tensor,
    bias: unsloth_tensor,
    ids: unsloth_tensor,
    /// The shape of `ids`.
    tokens: Vec<i64>,
    ignore_index: i64,
    chunk_tokens: i64,
}

pub struct Call<'i, 'b> {
    pub input: &'i mut Input<'b>,
    arena: Arena,
    /// Structs that the call's own points to.
    pub kept: Vec<Box<dyn std::any::Any>>,
}

/// One call of each operation; those that decide more come more often.
pub const ALL: [fn(&mut Call<'_, '_>); 32] = [
    |call| call.run_attention(),
    |call| call.run_attention(),
    |call| call.run_attention(),
    |call| call.run_attention(),
    |call| call.run_attention_backward(),
    |call| call.run_attention_backward(),
    |call| call.run_attention_block(None),
    |call| call.run_attention_block_backward(),
    |call| call.run_decoder_layer(),
    |call| call.run_decoder_layer_backward(),
    |call| {
        let params = call.rope();
        call.finish(params, unsloth_rope_supported, None, unsloth_rope_forward);
    },
    |call| {
        let params = call.qk_norm_rope();
        call.finish(
            params,
            unsloth_qk_norm_rope_supported,
            None,
            unsloth_qk_norm_rope_forward,
        );
    },
    |call| {
        let params = call.qk_norm_rope_backward();
        call.finish(
            params,
            unsloth_qk_norm_rope_backward_supported,
            Some(unsloth_qk_norm_rope_backward_workspace_size),
            unsloth_qk_norm_rope_backward,
        );
    },
    |call| {
        let params = call.rms_norm();
        call.finish(
            params,
            unsloth_rms_norm_supported,
            None,
            unsloth_rms_norm_forward,
        );
    },
    |call| {
        let params = call.layer_norm();
        call.finish(
            params,
            unsloth_layer_norm_supported,
            None,
            unsloth_layer_norm_forward,
        );
    },
    |call| {
        let params = call.swiglu();
        call.finish(
            params,
            unsloth_swiglu_supported,
            None,
            unsloth_swiglu_forward,
        );
    },
    |call| {
        let params = call.linear();
        call.finish(
            params,
            unsloth_linear_supported,
            None,
            unsloth_linear_forward,
        );
    },
    |call| call.run_linear_backward(),
    |call| call.run_rms_norm_backward(),
    |call| call.run_cross_entropy(),
    |call| call.run_linear_cross_entropy(),
    |call| call.run_linear_logprob(),
    |call| call.run_linear_logprob_backward(),
    |call| call.run_layer_norm_backward(),
    |call| {
        let params = call.swiglu_backward();
        call.finish(
            params,
            unsloth_swiglu_backward_supported,
            None,
            unsloth_swiglu_backward,
        );
    },
    |call| call.run_mlp(),
    |call| call.run_mlp(),
    |call| call.run_mlp_backward(),
    |call| {
        let params = call.cast();
        call.finish(params, unsloth_cast_supported, None, unsloth_cast_forward);
    },
    |call| {
        let params = call.argmax();
        call.finish(
            params,
            unsloth_argmax_supported,
            None,
            unsloth_argmax_forward,
        );
    },
    |call| call.run_embedding_backward(),
    |call| {
        let params = call.embedding();
        call.finish(
            params,
            unsloth_embedding_supported,
            None,
            unsloth_embedding_forward,
        );
    },
];

pub fn run(operation: fn(&mut Call<'_, '_>), input: &mut Input) {
    let mut call = Call {
        input,
        arena: Arena::default(),
        kept: Vec::new(),
    };
    operation(&mut call);
}

/// A struct whose every field is zero.
///
/// # Safety
/// `P` is a params struct of the C ABI, for which all zero is a value.
pub unsafe fn zeroed<P>() -> Box<Stated<P>> {
    // SAFETY: the caller's promise; bytes have no other values.
    unsafe { Box::new(std::mem::zeroed()) }
}

/// A tensor's shape.
pub fn like(t: &unsloth_tensor) -> Vec<i64> {
    t.shape[..(t.rank as usize).min(t.shape.len())].to_vec()
}

/// The attention block, on the current batch of a cache if one is given.
pub fn attention_block(input: &mut Input, batch: &Batch) {
    let mut call = Call {
        input,
        arena: Arena::default(),
        kept: Vec::new(),
    };
    call.run_attention_block(Some(batch));
}

/// Calls of an operation with scratch memory: the method, the one that makes its parameters, their
/// struct, and the functions.
macro_rules! with_workspace {
    ($run:ident, $make:ident, $params:ty, [$size:ident, $supported:ident, $launch:ident]) => {
        fn $run(&mut self) {
            let params = self.$make();
            let scratch = Scratch {
                size: $size,
                set: |p: &mut $params, at, size| {
                    (p.workspace, p.workspace_size) = (at.cast(), size);
                },
            };
            self.finish(params, $supported, Some(scratch), $launch);
        }
    };
}

impl Call<'_, '_> {
    with_workspace!(
        run_attention,
        attention,
        unsloth_attention_params,
        [
            unsloth_attention_workspace_size,
            unsloth_attention_supported,
            unsloth_attention_forward
        ]
    );
    with_workspace!(
        run_attention_backward,
        attention_backward,
        unsloth_attention_backward_params,
        [
            unsloth_attention_backward_workspace_size,
            unsloth_attention_backward_supported,
            unsloth_attention_backward
        ]
    );
    with_workspace!(
        run_attention_block_backward,
        attention_block_backward,
        unsloth_attention_block_backward_params,
        [
            unsloth_attention_block_backward_workspace_size,
            unsloth_attention_block_backward_supported,
            unsloth_attention_block_backward
        ]
    );
    with_workspace!(
        run_decoder_layer,
        decoder_layer,
        unsloth_decoder_layer_params,
        [
            unsloth_decoder_layer_workspace_size,
            unsloth_decoder_layer_supported,
            unsloth_decoder_layer_forward
        ]
    );
    with_workspace!(
        run_decoder_layer_backward,
        decoder_layer_backward,
        unsloth_decoder_layer_backward_params,
        [
            unsloth_decoder_layer_backward_workspace_size,
            unsloth_decoder_layer_backward_supported,
            unsloth_decoder_layer_backward
        ]
    );
    with_workspace!(
        run_linear_backward,
        linear_backward,
        unsloth_linear_backward_params,
        [
            unsloth_linear_backward_workspace_size,
            unsloth_linear_backward_supported,
            unsloth_linear_backward
        ]
    );
    with_workspace!(
        run_embedding_backward,
        embedding_backward,
        unsloth_embedding_backward_params,
        [
            unsloth_embedding_backward_workspace_size,
            unsloth_embedding_backward_supported,
            unsloth_embedding_backward
        ]
    );
    with_workspace!(
        run_rms_norm_backward,
        rms_norm_backward,
        unsloth_rms_norm_backward_params,
        [
            unsloth_rms_norm_backward_workspace_size,
            unsloth_rms_norm_backward_supported,
            unsloth_rms_norm_backward
        ]
    );
    with_workspace!(
        run_layer_norm_backward,
        layer_norm_backward,
        unsloth_layer_norm_backward_params,
        [
            unsloth_layer_norm_backward_workspace_size,
            unsloth_layer_norm_backward_supported,
            unsloth_layer_norm_backward
        ]
    );
    with_workspace!(
        run_cross_entropy,
        cross_entropy,
        unsloth_cross_entropy_params,
        [
            unsloth_cross_entropy_workspace_size,
            unsloth_cross_entropy_supported,
            unsloth_cross_entropy_forward
        ]
    );
    with_workspace!(
        run_linear_cross_entropy,
        linear_cross_entropy,
        unsloth_linear_cross_entropy_params,
        [
            unsloth_linear_cross_entropy_workspace_size,
            unsloth_linear_cross_entropy_supported,
            unsloth_linear_cross_entropy_forward
        ]
    );
    with_workspace!(
        run_linear_logprob,
        linear_logprob,
        unsloth_linear_logprob_params,
        [
            unsloth_linear_logprob_workspace_size,
            unsloth_linear_logprob_supported,
            unsloth_linear_logprob_forward
        ]
    );
    with_workspace!(
        run_linear_logprob_backward,
        linear_logprob_backward,
        unsloth_linear_logprob_backward_params,
        [
            unsloth_linear_logprob_backward_workspace_size,
            unsloth_linear_logprob_backward_supported,
            unsloth_linear_logprob_backward
        ]
    );
    with_workspace!(
        run_mlp,
        mlp,
        unsloth_mlp_params,
        [
            unsloth_mlp_workspace_size,
            unsloth_mlp_supported,
            unsloth_mlp_forward
        ]
    );
    with_workspace!(
        run_mlp_backward,
        mlp_backward,
        unsloth_mlp_backward_params,
        [
            unsloth_mlp_backward_workspace_size,
            unsloth_mlp_backward_supported,
            unsloth_mlp_backward
        ]
    );
    fn run_attention_block(&mut self, batch: Option<&Batch>) {
        let params = self.attention_block(batch);
        let scratch = Scratch {
            size: unsloth_attention_block_workspace_size,
            set: |p: &mut unsloth_attention_block_params, at, size| {
                (p.workspace, p.workspace_size) = (at.cast(), size);
            },
        };
        self.finish(
            params,
            unsloth_attention_block_supported,
            Some(scratch),
            unsloth_attention_block_forward,
        );
    }

    /// Makes the call and what may be asked about it before.
    fn finish<P>(
        &mut self,
        mut stated: Box<Stated<P>>,
        supported: Supported<P>,
        scratch: Option<Scratch<P>>,
        forward: Forward<P>,
    ) {
        let ctx = context();
        let size = size_of::<P>();
        let mut struct_size = size;
        if self.input.one_in(32) {
            struct_size = self.input.up_to(255) as usize * (size + 32) / 255;
            stated.beyond[usize::from(self.input.byte()) % 32] = self.input.byte();
        }
        // SAFETY: every params struct begins with its size.
        unsafe {
            (&raw mut stated.params)
                .cast::<u32>()
                .write(struct_size as u32)
        };

        let mut expected = 0;
        // SAFETY: the struct has the size stated, and its tensors describe live memory or none.
        unsafe {
            let params = &raw const stated.params;
            let foretold = supported(ctx, params, std::ptr::null_mut());
            let mut short = false;
            if let Some(scratch) = &scratch {
                let status = (scratch.size)(ctx, params, &mut expected);
                assert_eq!(status, foretold, "workspace_size says {}", last_message());
                if status == UNSLOTH_STATUS_SUCCESS {
                    let is_small = expected < 1 << 24;
                    assert!(
                        is_small || !self.arena.is_small(),
                        "{expected} bytes of workspace for a small problem"
                    );
                    // Of sizes that nothing has memory for there are only queries: without a
                    // workspace the call must fail.
                    short = !is_small || (expected > 0 && self.input.one_in(16));
                    if is_small {
                        let given = expected - usize::from(short);
                        let at = self.arena.scratch(given);
                        (scratch.set)(&mut stated.params, at, given);
                    }
                }
            }
            let status = forward(ctx, &raw const stated.params, std::ptr::null_mut());
            if foretold != UNSLOTH_STATUS_SUCCESS {
                assert_eq!(status, foretold, "{}", last_message());
            }
            assert!(
                !short || status != UNSLOTH_STATUS_SUCCESS,
                "too little workspace was taken"
            );
            if status != UNSLOTH_STATUS_SUCCESS {
                assert_ne!(status, UNSLOTH_STATUS_INTERNAL_ERROR, "{}", last_message());
                assert!(!last_message().is_empty());
                assert!(
                    self.arena.is_untouched(),
                    "a failed call wrote: {}",
                    last_message()
                );
            }
        }
    }

    pub fn float_dtype(&mut self) -> unsloth_dtype {
        self.input
            .pick(&[UNSLOTH_DTYPE_F32, UNSLOTH_DTYPE_F16, UNSLOTH_DTYPE_BF16])
    }

    /// A size, seldom none at all.
    pub fn dim(&mut self, most: i64) -> i64 {
        if self.input.one_in(64) {
            return 0;
        }
        1 + self.input.up_to(most - 1)
    }

    /// A size of which nothing is multiplied that may be as large: seldom so large that only an empty tensor can have it.
    pub fn extent(&mut self, most: i64) -> i64 {
        if self.input.one_in(32) {
            return self.input.pick(&[1 << 40, 1 << 50, 0]);
        }
        self.input.up_to(most)
    }

    pub fn tensor(&mut self, dtype: unsloth_dtype, shape: &[i64]) -> unsloth_tensor {
        self.arena.tensor(self.input, dtype, shape)
    }

    /// Absent one time in two.
    pub fn optional(&mut self, dtype: unsloth_dtype, shape: &[i64]) -> unsloth_tensor {
        if self.input.byte() % 2 == 0 {
            return absent();
        }
        self.tensor(dtype, shape)
    }

    /// Zero mostly.
    pub fn flag(&mut self, most: u32) -> u32 {
        if self.input.one_in(64) {
            return self.input.word() as u32;
        }
        u32::from(self.input.byte()) % (most + 1)
    }

    pub fn limit(&mut self) -> i64 {
        match self.input.byte() % 8 {
            0..5 => 0,
            5..7 => self.input.up_to(20),
            _ => self.input.number(),
        }
    }

    pub fn factor(&mut self) -> f32 {
        match self.input.byte() % 4 {
            0 | 1 => 0.0,
            _ => self.input.float(),
        }
    }

    /// Leading dimensions and a last one.
    fn rows(&mut self) -> (Vec<i64>, i64) {
        let leading = (0..self.input.up_to(3)).map(|_| self.extent(5)).collect();
        let last = match self.input.one_in(32) {
            true => self.extent(0),
            false => self.dim(40),
        };
        (leading, last)
    }

    fn cast(&mut self) -> Box<Stated<unsloth_cast_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_cast_params>> = unsafe { zeroed() };
        let (from, to) = (self.float_dtype(), self.float_dtype());
        let (mut shape, dim) = self.rows();
        shape.push(dim);
        let p = &mut stated.params;
        p.x = self.tensor(from, &shape);
        p.out = self.tensor(to, &shape);
        p.reserved = self.flag(0);
        stated
    }

    fn argmax(&mut self) -> Box<Stated<unsloth_argmax_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_argmax_params>> = unsafe { zeroed() };
        let dtype = self.float_dtype();
        let to = self.input.pick(&[UNSLOTH_DTYPE_I32, UNSLOTH_DTYPE_I64]);
        let (leading, n) = self.rows();
        let p = &mut stated.params;
        p.x = self.tensor(dtype, &[&leading[..], &[n]].concat());
        p.out = match leading.is_empty() {
            true => self.tensor(to, &[1]),
            false => self.tensor(to, &leading),
        };
        p.reserved = self.flag(0);
        stated
    }

    fn rms_norm(&mut self) -> Box<Stated<unsloth_rms_norm_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_rms_norm_params>> = unsafe { zeroed() };
        let dtype = self.float_dtype();
        let (mut shape, dim) = self.rows();
        shape.push(dim);
        let p = &mut stated.params;
        p.x = self.tensor(dtype, &shape);
        p.out = self.optional(dtype, &shape);
        p.residual = self.optional(dtype, &shape);
        p.residual_out = self.optional(dtype, &shape);
        let weight_dtype = self.float_dtype();
        p.weight = self.optional(weight_dtype, &[dim]);
        p.epsilon = self.factor().max(1e-5);
        p.weight_offset = self.factor();
        p.reserved = self.flag(0);
        stated
    }

    fn layer_norm(&mut self) -> Box<Stated<unsloth_layer_norm_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_layer_norm_params>> = unsafe { zeroed() };
        let dtype = self.float_dtype();
        let (mut shape, dim) = self.rows();
        shape.push(dim);
        let p = &mut stated.params;
        p.x = self.tensor(dtype, &shape);
        p.out = self.optional(dtype, &shape);
        for vector in [&mut p.weight, &mut p.bias] {
            let dtype = self.float_dtype();
            *vector = self.optional(dtype, &[dim]);
        }
        p.epsilon = self.factor().max(1e-5);
        stated
    }

    fn rms_norm_backward(&mut self) -> Box<Stated<unsloth_rms_norm_backward_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_rms_norm_backward_params>> = unsafe { zeroed() };
        let dtype = self.float_dtype();
        let (mut shape, dim) = self.rows();
        shape.push(dim);
        let p = &mut stated.params;
        p.x = self.tensor(dtype, &shape);
        p.dout = self.tensor(dtype, &shape);
        p.dx = self.optional(dtype, &shape);
        p.dresidual = self.optional(dtype, &shape);
        let of_weight = self.float_dtype();
        p.weight = self.optional(of_weight, &[dim]);
        if p.weight.rank > 0 {
            p.weight_offset = self.factor();
            let of_gradient = self.float_dtype();
            p.dweight = self.optional(of_gradient, &[dim]);
        }
        p.accumulate = self.flag(1);
        p.epsilon = self.factor().max(1e-5);
        stated
    }

    fn layer_norm_backward(&mut self) -> Box<Stated<unsloth_layer_norm_backward_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_layer_norm_backward_params>> = unsafe { zeroed() };
        let dtype = self.float_dtype();
        let (mut shape, dim) = self.rows();
        shape.push(dim);
        let p = &mut stated.params;
        p.x = self.tensor(dtype, &shape);
        p.dout = self.tensor(dtype, &shape);
        p.dx = self.optional(dtype, &shape);
        p.dresidual = self.optional(dtype, &shape);
        for vector in [&mut p.weight, &mut p.dbias] {
            let dtype = self.float_dtype();
            *vector = self.optional(dtype, &[dim]);
        }
        if p.weight.rank > 0 {
            let of_gradient = self.float_dtype();
            p.dweight = self.optional(of_gradient, &[dim]);
        }
        p.accumulate = self.flag(1);
        p.epsilon = self.factor().max(1e-5);
        stated
    }

    fn swiglu_backward(&mut self) -> Box<Stated<unsloth_swiglu_backward_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_swiglu_backward_params>> = unsafe { zeroed() };
        let dtype = self.float_dtype();
        let (leading, dim) = self.rows();
        let shape = |last: i64| [&leading[..], &[last]].concat();
        let p = &mut stated.params;
        if self.input.one_in(2) {
            p.gate_up = self.tensor(dtype, &shape(2 * dim));
            p.dgate_up = self.optional(dtype, &shape(2 * dim));
        } else {
            p.gate = self.tensor(dtype, &shape(dim));
            p.up = self.tensor(dtype, &shape(dim));
            p.dgate = self.optional(dtype, &shape(dim));
            p.dup = self.optional(dtype, &shape(dim));
        }
        p.dout = self.tensor(dtype, &shape(dim));
        p.out = self.optional(dtype, &shape(dim));
        p.activation = self.flag(2);
        p.gate_order = self.flag(1);
        stated
    }

    fn linear_cross_entropy(&mut self) -> Box<Stated<unsloth_linear_cross_entropy_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_linear_cross_entropy_params>> = unsafe { zeroed() };
        let head = self.head();
        let p = &mut stated.params;
        (p.x, p.weight, p.bias) = (head.x, head.weight, head.bias);
        (p.targets, p.dx) = (head.ids, head.dx);
        for of_tokens in [&mut p.losses, &mut p.lse] {
            *of_tokens = self.optional(UNSLOTH_DTYPE_F32, &head.tokens);
        }
        p.accumulate = self.flag(1);
        let gradient = match p.accumulate {
            1 => UNSLOTH_DTYPE_F32,
            _ => p.weight.dtype,
        };
        let [vocab, hidden, ..] = p.weight.shape;
        p.dweight = self.optional(gradient, &[vocab, hidden]);
        p.dbias = self.optional(gradient, &[vocab]);
        for number in [&mut p.loss, &mut p.dloss] {
            *number = self.optional(UNSLOTH_DTYPE_F32, &[1]);
        }
        p.reduction = self.flag(1);
        (p.has_ignore_index, p.ignore_index) = (1, head.ignore_index);
        p.chunk_tokens = head.chunk_tokens;
        p.label_smoothing = self.factor();
        p.z_loss = self.factor();
        p.softcap = self.factor();
        stated
    }

    /// Tokens that have ids, and a weight for them.
    fn head(&mut self) -> Head {
        let (dtype, of_weight) = (self.float_dtype(), self.float_dtype());
        let (mut tokens, hidden) = self.rows();
        if tokens.is_empty() {
            tokens.push(1);
        }
        let vocab = self.dim(40);
        let integer = self.input.pick(&[UNSLOTH_DTYPE_I32, UNSLOTH_DTYPE_I64]);
        let ids = self.tensor(integer, &tokens);
        let of_x = [&tokens[..], &[hidden]].concat();
        Head {
            x: self.tensor(dtype, &of_x),
            dx: self.optional(dtype, &of_x),
            weight: self.tensor(of_weight, &[vocab, hidden]),
            bias: self.optional(of_weight, &[vocab]),
            ids,
            tokens,
            // Some ids are ignored.
            ignore_index: i64::from(self.flag(3)),
            chunk_tokens: i64::from(self.flag(7)),
        }
    }

    fn linear_logprob(&mut self) -> Box<Stated<unsloth_linear_logprob_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_linear_logprob_params>> = unsafe { zeroed() };
        let head = self.head();
        let p = &mut stated.params;
        (p.x, p.weight, p.bias, p.ids) = (head.x, head.weight, head.bias, head.ids);
        for of_tokens in [&mut p.logprobs, &mut p.entropy, &mut p.lse] {
            *of_tokens = self.optional(UNSLOTH_DTYPE_F32, &head.tokens);
        }
        (p.has_ignore_index, p.ignore_index) = (1, head.ignore_index);
        p.chunk_tokens = head.chunk_tokens;
        p.temperature = self.factor();
        p.softcap = self.factor();
        stated
    }

    fn linear_logprob_backward(&mut self) -> Box<Stated<unsloth_linear_logprob_backward_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_linear_logprob_backward_params>> = unsafe { zeroed() };
        let head = self.head();
        let p = &mut stated.params;
        (p.x, p.weight, p.bias, p.ids) = (head.x, head.weight, head.bias, head.ids);
        for of_tokens in [&mut p.dlogprobs, &mut p.dentropy] {
            *of_tokens = self.optional(UNSLOTH_DTYPE_F32, &head.tokens);
        }
        p.dx = head.dx;
        p.accumulate = self.flag(1);
        let gradient = match p.accumulate {
            1 => UNSLOTH_DTYPE_F32,
            _ => p.weight.dtype,
        };
        let [vocab, hidden, ..] = p.weight.shape;
        p.dweight = self.optional(gradient, &[vocab, hidden]);
        p.dbias = self.optional(gradient, &[vocab]);
        (p.has_ignore_index, p.ignore_index) = (1, head.ignore_index);
        p.chunk_tokens = head.chunk_tokens;
        p.temperature = self.factor();
        p.softcap = self.factor();
        stated
    }

    fn cross_entropy(&mut self) -> Box<Stated<unsloth_cross_entropy_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_cross_entropy_params>> = unsafe { zeroed() };
        let dtype = self.float_dtype();
        let (mut shape, vocab) = self.rows();
        if shape.is_empty() {
            shape.push(1);
        }
        let integer = self.input.pick(&[UNSLOTH_DTYPE_I32, UNSLOTH_DTYPE_I64]);
        let p = &mut stated.params;
        p.targets = self.tensor(integer, &shape);
        for of_tokens in [&mut p.losses, &mut p.lse] {
            *of_tokens = self.optional(UNSLOTH_DTYPE_F32, &shape);
        }
        shape.push(vocab);
        p.logits = self.tensor(dtype, &shape);
        p.dlogits = self.optional(dtype, &shape);
        p.loss = self.optional(UNSLOTH_DTYPE_F32, &[1]);
        p.dloss = self.optional(UNSLOTH_DTYPE_F32, &[1]);
        p.reduction = self.flag(1);
        if p.reduction == UNSLOTH_REDUCTION_MEAN {
            p.denominator = self.optional(UNSLOTH_DTYPE_F32, &[1]);
        }
        p.has_ignore_index = self.flag(1);
        if p.has_ignore_index == 1 {
            p.ignore_index = i64::from(self.flag(3));
        }
        p.label_smoothing = self.factor();
        p.z_loss = self.factor();
        p.softcap = self.factor();
        stated
    }

    fn swiglu(&mut self) -> Box<Stated<unsloth_swiglu_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_swiglu_params>> = unsafe { zeroed() };
        let dtype = self.float_dtype();
        let (leading, dim) = self.rows();
        let shape = [&leading[..], &[dim]].concat();
        let p = &mut stated.params;
        if self.input.one_in(2) {
            p.gate_up = self.tensor(dtype, &[&leading[..], &[2 * dim]].concat());
            p.out = self.tensor(dtype, &shape);
        } else {
            p.gate = self.tensor(dtype, &shape);
            p.up = self.tensor(dtype, &shape);
            p.out = self.optional(dtype, &shape);
        }
        p.activation = self.flag(2);
        p.gate_order = self.flag(1);
        stated
    }

    fn linear(&mut self) -> Box<Stated<unsloth_linear_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_linear_params>> = unsafe { zeroed() };
        let dtype = self.float_dtype();
        let weight_dtype = if self.input.one_in(4) {
            self.float_dtype()
        } else {
            dtype
        };
        let (leading, inner) = self.rows();
        let outer = self.extent(40);
        let shape = [&leading[..], &[outer]].concat();
        let p = &mut stated.params;
        p.x = self.tensor(dtype, &[&leading[..], &[inner]].concat());
        p.weight = self.tensor(weight_dtype, &[outer, inner]);
        p.bias = self.optional(weight_dtype, &[outer]);
        p.residual = self.optional(dtype, &shape);
        p.out = self.tensor(dtype, &shape);
        stated
    }

    fn linear_backward(&mut self) -> Box<Stated<unsloth_linear_backward_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_linear_backward_params>> = unsafe { zeroed() };
        let (dtype, weight_dtype) = (self.float_dtype(), self.float_dtype());
        let (leading, inner) = self.rows();
        let outer = self.extent(40);
        let rows = |last| [&leading[..], &[last]].concat();
        let p = &mut stated.params;
        p.accumulate = self.flag(1);
        let grad_dtype = match p.accumulate {
            1 => UNSLOTH_DTYPE_F32,
            _ => weight_dtype,
        };
        p.dout = self.tensor(dtype, &rows(outer));
        p.x = self.optional(dtype, &rows(inner));
        p.weight = self.optional(weight_dtype, &[outer, inner]);
        if p.weight.rank > 0 {
            p.dx = self.optional(dtype, &rows(inner));
        }
        if p.x.rank > 0 {
            p.dweight = self.optional(grad_dtype, &[outer, inner]);
        }
        p.dbias = self.optional(grad_dtype, &[outer]);
        stated
    }

    fn mlp(&mut self) -> Box<Stated<unsloth_mlp_params>> {
        let dtype = self.float_dtype();
        self.mlp_of(dtype)
    }

    fn mlp_of(&mut self, dtype: unsloth_dtype) -> Box<Stated<unsloth_mlp_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_mlp_params>> = unsafe { zeroed() };
        let (leading, hidden) = self.rows();
        let (inner, outer) = (self.extent(20), self.extent(20));
        let shape = [&leading[..], &[outer]].concat();
        let p = &mut stated.params;
        p.x = self.tensor(dtype, &[&leading[..], &[hidden]].concat());
        if self.input.one_in(2) {
            p.gate_up_weight = self.tensor(dtype, &[2 * inner, hidden]);
            p.gate_up_bias = self.optional(dtype, &[2 * inner]);
        } else {
            p.gate_weight = self.tensor(dtype, &[inner, hidden]);
            p.gate_bias = self.optional(dtype, &[inner]);
            p.up_weight = self.tensor(dtype, &[inner, hidden]);
            p.up_bias = self.optional(dtype, &[inner]);
        }
        p.down_weight = self.tensor(dtype, &[outer, inner]);
        p.down_bias = self.optional(dtype, &[outer]);
        p.residual = self.optional(dtype, &shape);
        p.out = self.tensor(dtype, &shape);
        p.gate_up_out = self.optional(dtype, &[&leading[..], &[2 * inner]].concat());
        p.activation = self.flag(2);
        p.gate_order = self.flag(1);
        stated
    }

    fn mlp_backward(&mut self) -> Box<Stated<unsloth_mlp_backward_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_mlp_backward_params>> = unsafe { zeroed() };
        let dtype = self.float_dtype();
        let mut forward = self.mlp_of(dtype);
        forward.params.struct_size = size_of::<unsloth_mlp_params>() as u32;
        let f = forward.params;
        let p = &mut stated.params;
        p.forward = &raw const forward.params;
        self.kept.push(forward);
        p.accumulate = self.flag(1);
        let grad_dtype = match p.accumulate {
            1 => UNSLOTH_DTYPE_F32,
            _ => dtype,
        };
        // A bias has elements where the large tensors of a call may have none.
        let of_nothing = like(&f.x).last() == Some(&0) || f.down_weight.shape[0] == 0;
        let bias = |t: &unsloth_tensor| if of_nothing { absent() } else { *t };
        for (to, of) in [
            (&mut p.dgate_weight, f.gate_weight),
            (&mut p.dgate_bias, bias(&f.gate_bias)),
            (&mut p.dup_weight, f.up_weight),
            (&mut p.dup_bias, bias(&f.up_bias)),
            (&mut p.dgate_up_weight, f.gate_up_weight),
            (&mut p.dgate_up_bias, bias(&f.gate_up_bias)),
            (&mut p.ddown_weight, f.down_weight),
            (&mut p.ddown_bias, bias(&f.down_bias)),
        ] {
            if of.rank > 0 {
                *to = self.optional(grad_dtype, &like(&of));
            }
        }
        p.dx = self.optional(dtype, &like(&f.x));
        p.dout = self.tensor(dtype, &like(&f.out));
        if f.gate_up_out.rank > 0 {
            p.gate_up = self.tensor(dtype, &like(&f.gate_up_out));
        }
        stated
    }

    fn embedding(&mut self) -> Box<Stated<unsloth_embedding_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_embedding_params>> = unsafe { zeroed() };
        let (leading, dim) = self.rows();
        let (dtype, out_dtype) = (self.float_dtype(), self.float_dtype());
        let integer = self.input.pick(&[UNSLOTH_DTYPE_I32, UNSLOTH_DTYPE_I64]);
        let p = &mut stated.params;
        let vocabulary = self.extent(40);
        p.table = self.tensor(dtype, &[vocabulary, dim]);
        p.ids = self.tensor(integer, &leading);
        p.out = self.tensor(out_dtype, &[&leading[..], &[dim]].concat());
        stated
    }

    fn embedding_backward(&mut self) -> Box<Stated<unsloth_embedding_backward_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_embedding_backward_params>> = unsafe { zeroed() };
        let (leading, dim) = self.rows();
        let (dtype, table_dtype) = (self.float_dtype(), self.float_dtype());
        let integer = self.input.pick(&[UNSLOTH_DTYPE_I32, UNSLOTH_DTYPE_I64]);
        let p = &mut stated.params;
        let vocabulary = self.extent(40);
        p.accumulate = self.flag(1);
        p.has_padding_idx = self.flag(1);
        p.padding_idx = self.input.up_to(40);
        let grad_dtype = match p.accumulate {
            1 => UNSLOTH_DTYPE_F32,
            _ => table_dtype,
        };
        p.dout = self.tensor(dtype, &[&leading[..], &[dim]].concat());
        p.ids = self.tensor(integer, &leading);
        p.dweight = self.tensor(grad_dtype, &[vocabulary, dim]);
        stated
    }
}
