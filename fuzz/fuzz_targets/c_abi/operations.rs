//! The calls that there are.

use unsloth::ffi::all_gather::*;
use unsloth::ffi::all_reduce::*;
use unsloth::ffi::all_reduce_rms_norm::*;
use unsloth::ffi::all_to_all::*;
use unsloth::ffi::argmax::*;
use unsloth::ffi::attention::backward::*;
use unsloth::ffi::attention::*;
use unsloth::ffi::attention_block::backward::*;
use unsloth::ffi::attention_block::*;
use unsloth::ffi::attention_merge::*;
use unsloth::ffi::broadcast::*;
use unsloth::ffi::cast::*;
use unsloth::ffi::context_parallel_attention::backward::*;
use unsloth::ffi::context_parallel_attention::*;
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
use unsloth::ffi::qk_norm_rope::backward::*;
use unsloth::ffi::qk_norm_rope::*;
use unsloth::ffi::quantize::*;
use unsloth::ffi::reduce_scatter::*;
use unsloth::ffi::rms_norm::backward::*;
use unsloth::ffi::rms_norm::*;
use unsloth::ffi::rope::*;
use unsloth::ffi::send_receive::*;
use unsloth::ffi::swiglu::backward::*;
use unsloth::ffi::swiglu::*;
use unsloth::ffi::weight_repack::*;

use crate::attention::Batch;
use crate::call::{Call, Scratch};
use crate::input::Input;

/// A call: the method that makes its parameters, the functions, and the one that says how much
/// scratch memory it takes if it takes any.
macro_rules! of {
    ($make:ident, $supported:ident, $launch:ident) => {
        |call| {
            let params = call.$make();
            call.finish(params, $supported, None, $launch);
        }
    };
    ($make:ident, $supported:ident, $launch:ident, $size:ident) => {
        |call| {
            let params = call.$make();
            finish!(call, params, $supported, $launch, $size);
        }
    };
}

macro_rules! finish {
    ($call:ident, $params:ident, $supported:ident, $launch:ident, $size:ident) => {
        let scratch = Scratch::of(&$params, $size, |p, at, size| {
            (p.workspace, p.workspace_size) = (at.cast(), size);
        });
        $call.finish($params, $supported, Some(scratch), $launch);
    };
}

/// One call of each operation; those that decide more come more often.
pub const ALL: [fn(&mut Call<'_, '_>); 44] = [
    of!(
        attention,
        unsloth_attention_supported,
        unsloth_attention_forward,
        unsloth_attention_workspace_size
    ),
    of!(
        attention,
        unsloth_attention_supported,
        unsloth_attention_forward,
        unsloth_attention_workspace_size
    ),
    of!(
        attention,
        unsloth_attention_supported,
        unsloth_attention_forward,
        unsloth_attention_workspace_size
    ),
    of!(
        attention,
        unsloth_attention_supported,
        unsloth_attention_forward,
        unsloth_attention_workspace_size
    ),
    of!(
        attention_backward,
        unsloth_attention_backward_supported,
        unsloth_attention_backward,
        unsloth_attention_backward_workspace_size
    ),
    of!(
        attention_backward,
        unsloth_attention_backward_supported,
        unsloth_attention_backward,
        unsloth_attention_backward_workspace_size
    ),
    |call| attention_block(call, None),
    of!(
        attention_block_backward,
        unsloth_attention_block_backward_supported,
        unsloth_attention_block_backward,
        unsloth_attention_block_backward_workspace_size
    ),
    of!(
        decoder_layer,
        unsloth_decoder_layer_supported,
        unsloth_decoder_layer_forward,
        unsloth_decoder_layer_workspace_size
    ),
    of!(
        decoder_layer_backward,
        unsloth_decoder_layer_backward_supported,
        unsloth_decoder_layer_backward,
        unsloth_decoder_layer_backward_workspace_size
    ),
    of!(rope, unsloth_rope_supported, unsloth_rope_forward),
    of!(
        qk_norm_rope,
        unsloth_qk_norm_rope_supported,
        unsloth_qk_norm_rope_forward
    ),
    of!(
        qk_norm_rope_backward,
        unsloth_qk_norm_rope_backward_supported,
        unsloth_qk_norm_rope_backward,
        unsloth_qk_norm_rope_backward_workspace_size
    ),
    of!(
        rms_norm,
        unsloth_rms_norm_supported,
        unsloth_rms_norm_forward
    ),
    of!(
        layer_norm,
        unsloth_layer_norm_supported,
        unsloth_layer_norm_forward
    ),
    of!(swiglu, unsloth_swiglu_supported, unsloth_swiglu_forward),
    of!(linear, unsloth_linear_supported, unsloth_linear_forward),
    of!(
        linear_backward,
        unsloth_linear_backward_supported,
        unsloth_linear_backward,
        unsloth_linear_backward_workspace_size
    ),
    of!(
        rms_norm_backward,
        unsloth_rms_norm_backward_supported,
        unsloth_rms_norm_backward,
        unsloth_rms_norm_backward_workspace_size
    ),
    of!(
        cross_entropy,
        unsloth_cross_entropy_supported,
        unsloth_cross_entropy_forward,
        unsloth_cross_entropy_workspace_size
    ),
    of!(
        linear_cross_entropy,
        unsloth_linear_cross_entropy_supported,
        unsloth_linear_cross_entropy_forward,
        unsloth_linear_cross_entropy_workspace_size
    ),
    of!(
        linear_logprob,
        unsloth_linear_logprob_supported,
        unsloth_linear_logprob_forward,
        unsloth_linear_logprob_workspace_size
    ),
    of!(
        linear_logprob_backward,
        unsloth_linear_logprob_backward_supported,
        unsloth_linear_logprob_backward,
        unsloth_linear_logprob_backward_workspace_size
    ),
    of!(
        layer_norm_backward,
        unsloth_layer_norm_backward_supported,
        unsloth_layer_norm_backward,
        unsloth_layer_norm_backward_workspace_size
    ),
    of!(
        swiglu_backward,
        unsloth_swiglu_backward_supported,
        unsloth_swiglu_backward
    ),
    of!(
        mlp,
        unsloth_mlp_supported,
        unsloth_mlp_forward,
        unsloth_mlp_workspace_size
    ),
    of!(
        mlp,
        unsloth_mlp_supported,
        unsloth_mlp_forward,
        unsloth_mlp_workspace_size
    ),
    of!(
        mlp_backward,
        unsloth_mlp_backward_supported,
        unsloth_mlp_backward,
        unsloth_mlp_backward_workspace_size
    ),
    of!(cast, unsloth_cast_supported, unsloth_cast_forward),
    of!(argmax, unsloth_argmax_supported, unsloth_argmax_forward),
    of!(
        attention_merge,
        unsloth_attention_merge_supported,
        unsloth_attention_merge_forward
    ),
    of!(
        quantize,
        unsloth_quantize_supported,
        unsloth_quantize_forward,
        unsloth_quantize_workspace_size
    ),
    of!(
        weight_repack,
        unsloth_weight_repack_supported,
        unsloth_weight_repack_forward
    ),
    of!(
        embedding_backward,
        unsloth_embedding_backward_supported,
        unsloth_embedding_backward,
        unsloth_embedding_backward_workspace_size
    ),
    of!(
        embedding,
        unsloth_embedding_supported,
        unsloth_embedding_forward,
        unsloth_embedding_workspace_size
    ),
    of!(
        all_reduce,
        unsloth_all_reduce_supported,
        unsloth_all_reduce_forward
    ),
    of!(
        all_reduce_rms_norm,
        unsloth_all_reduce_rms_norm_supported,
        unsloth_all_reduce_rms_norm_forward
    ),
    of!(
        all_gather,
        unsloth_all_gather_supported,
        unsloth_all_gather_forward
    ),
    of!(
        reduce_scatter,
        unsloth_reduce_scatter_supported,
        unsloth_reduce_scatter_forward
    ),
    of!(
        broadcast,
        unsloth_broadcast_supported,
        unsloth_broadcast_forward
    ),
    of!(
        all_to_all,
        unsloth_all_to_all_supported,
        unsloth_all_to_all_forward
    ),
    of!(
        send_receive,
        unsloth_send_receive_supported,
        unsloth_send_receive_forward
    ),
    of!(
        context_parallel_attention,
        unsloth_context_parallel_attention_supported,
        unsloth_context_parallel_attention_forward,
        unsloth_context_parallel_attention_workspace_size
    ),
    of!(
        context_parallel_attention_backward,
        unsloth_context_parallel_attention_backward_supported,
        unsloth_context_parallel_attention_backward,
        unsloth_context_parallel_attention_backward_workspace_size
    ),
];

pub fn run(operation: fn(&mut Call<'_, '_>), input: &mut Input) {
    operation(&mut Call::new(input));
}

/// The attention block, on the current batch of a cache if one is given.
pub fn attention_block(call: &mut Call<'_, '_>, batch: Option<&Batch>) {
    let params = call.attention_block(batch);
    finish!(
        call,
        params,
        unsloth_attention_block_supported,
        unsloth_attention_block_forward,
        unsloth_attention_block_workspace_size
    );
}
