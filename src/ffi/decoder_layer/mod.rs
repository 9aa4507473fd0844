//! A decoder layer, for training.

pub mod backward;

use std::ffi::c_void;

use crate::error::{Error, Result};
use crate::ffi::attention_block::unsloth_attention_block_params;
use crate::ffi::context::{context_from, unsloth_context};
use crate::ffi::estimate::{checkpointing_from, unsloth_checkpointing};
use crate::ffi::mlp::unsloth_mlp_params;
use crate::ffi::operation::{self, WithC};
use crate::ffi::parallel::Group;
use crate::ffi::params::{self, params, read_field};
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::{unsloth_tensor, workspace_from};
use crate::ffi::{check_out, guard, unsloth_implementation, unsloth_stream};
use crate::ops::decoder_layer::{self, Params};
use crate::ops::{attention_block, mlp};

const OP: &str = "decoder_layer";

/// Arguments of `unsloth_decoder_layer_forward`: `h = x + attention_block(rms_norm(x))`, then
/// `out = h + mlp(rms_norm(h))`.
///
/// What the backward pass needs is left in `saved`, as much of it as `checkpointing` says; the rest
/// it computes again, by the same kernels, so that gradients have the same bits in every case
/// (on a GPU if they are `deterministic`).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_decoder_layer_params {
    /// `sizeof(unsloth_decoder_layer_params)`.
    pub struct_size: u32,
    /// One of `UNSLOTH_CHECKPOINTING_*`.
    pub checkpointing: unsloth_checkpointing,
    /// Added to the mean squares of both norms; above 0.
    pub norm_epsilon: f32,
    /// Added to the gains of both norms: 1 for Gemma, else 0.
    pub norm_weight_offset: f32,
    /// The attention block, without a cache. Its `x`, `residual`, `out`, workspace and what it keeps
    /// are not looked at. With `parallel`, which the MLP then has too, ranks divide the layer: sequence
    /// parallel, `x` and `out` are this rank's rows.
    pub attention: *const unsloth_attention_block_params,
    /// The MLP, of which likewise.
    pub mlp: *const unsloth_mlp_params,
    /// Memory from forward to backward, aligned to 256 bytes; see `unsloth_decoder_layer_saved_size`.
    pub saved: *mut c_void,
    /// Size of `saved` in bytes.
    pub saved_size: usize,
    /// Scratch memory, aligned to 256 bytes; see `unsloth_decoder_layer_workspace_size`.
    pub workspace: *mut c_void,
    /// Size of `workspace` in bytes.
    pub workspace_size: usize,
    /// `[batch, seq, hidden]` or `[tokens, hidden]`, f32, f16 or bf16, any strides with a contiguous
    /// last dimension. With `cu_seqlens` of the attention it is `[tokens, hidden]`. The backward pass
    /// reads it again.
    pub x: unsloth_tensor,
    /// `[hidden]`, any float dtype: gains of the norm before the attention block.
    pub attention_norm: unsloth_tensor,
    /// `[hidden]`, any float dtype: gains of the norm before the MLP.
    pub mlp_norm: unsloth_tensor,
    /// Like `x`, and not the same tensor.
    pub out: unsloth_tensor,
}
params!(
    unsloth_decoder_layer_params,
    [x, attention_norm, mlp_norm, out]
);

impl unsloth_decoder_layer_params {
    /// Calls `run` with the layer, whose groups are held meanwhile; `out` is the tensor of that field, or
    /// for the backward pass, which has none, `x`.
    ///
    /// # Safety
    /// The structs that are pointed to are readable, and all tensors are valid until the work has
    /// run.
    pub(super) unsafe fn with_layer<R>(
        &self,
        op: &'static str,
        out: &unsloth_tensor,
        run: impl FnOnce(Params<'_>) -> Result<R>,
    ) -> Result<R> {
        let checkpointing = checkpointing_from(op, self.checkpointing)?;
        // SAFETY: the caller's promises.
        unsafe {
            let x = self.x.input(op, "x")?;
            let within = |error: Error| error.within(op);
            let attention_norm = self.attention_norm.input(op, "attention_norm")?;
            let mlp_norm = self.mlp_norm.input(op, "mlp_norm")?;
            let attention = read_field(op, "attention", self.attention)?;
            let of_attention = attention.parallel.of_block(op)?;
            let mlp = read_field(op, "mlp", self.mlp)?;
            let of_mlp = mlp.parallel.of_block(op)?;
            run(Params {
                x,
                attention_norm,
                mlp_norm,
                norm_weight_offset: self.norm_weight_offset,
                norm_epsilon: self.norm_epsilon,
                attention: attention_block::Params {
                    parallel: of_attention.as_ref().map(Group::parallel),
                    ..attention.of_input(x).map_err(within)?
                },
                mlp: mlp::Params {
                    parallel: of_mlp.as_ref().map(Group::parallel),
                    ..mlp.of_input(x).map_err(within)?
                },
                checkpointing,
                out: out.output(op, "out")?,
                saved: workspace_from(op, self.saved, self.saved_size)?,
                workspace: workspace_from(op, self.workspace, self.workspace_size)?,
            })
        }
    }
}

impl WithC for unsloth_decoder_layer_params {
    type Operation<'a> = Params<'a>;

    unsafe fn with<R>(&self, run: impl FnOnce(&Params<'_>) -> Result<R>) -> Result<R> {
        // SAFETY: the caller's promises.
        unsafe { self.with_layer(OP, &self.out, |params| run(&params)) }
    }
}

/// Whether this call would run, and by which implementation (written to `implementation` unless
/// NULL). Data pointers, `saved` and the workspace are not looked at. The status and message are
/// those the call itself would give.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes, as `params->attention` and
/// `params->mlp` are or do; `implementation` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_decoder_layer_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_decoder_layer_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// Writes the bytes that the layer keeps from forward to backward to `saved_size`: per token and in
/// elements of the dtype of `x`, with `checkpointing`
///
/// | kept | none | elementwise | mlp | projections | full |
/// |-|-|-|-|-|-|
/// | outputs of both norms, `2 * hidden` | x | | | | |
/// | gate and up, `2 * intermediate` | x | x | | | |
/// | queries, keys and values | x | x | x | | |
/// | attention's output, its `lse` (f32) and the MLP's residual, `hidden` | x | x | x | x | |
///
/// each rounded up to 256 bytes. The layer's input, which the caller keeps, is not among them. Data
/// pointers, `saved` and the workspace are not looked at.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes, as `params->attention` and
/// `params->mlp` are or do; `saved_size` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_decoder_layer_saved_size(
    ctx: *mut unsloth_context,
    params: *const unsloth_decoder_layer_params,
    saved_size: *mut usize,
) -> unsloth_status {
    // SAFETY: the caller's promises.
    guard(OP, || unsafe {
        check_out(OP, "saved_size", saved_size)?;
        let context = &context_from(OP, ctx)?.context;
        let params = params::read(OP, params)?;
        let size = params.with(|params| decoder_layer::saved_size(context, params))?;
        saved_size.write(size);
        Ok(())
    })
}

/// Writes the workspace that the call needs to `workspace_size`, in bytes: what is not kept, each
/// tensor rounded up to 256 bytes, an activated intermediate, and what the operations have use for.
/// Data pointers, `saved` and the workspace are not looked at.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes, as `params->attention` and
/// `params->mlp` are or do; `workspace_size` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_decoder_layer_workspace_size(
    ctx: *mut unsloth_context,
    params: *const unsloth_decoder_layer_params,
    workspace_size: *mut usize,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::workspace_size(ctx, params, workspace_size) }
}

/// Computes the layer on `stream`. Neither allocates device memory nor synchronises, and may be
/// captured into a CUDA graph.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes, as `params->attention` and
/// `params->mlp` are or do; tensors, `saved` and workspace are valid on the context's device until
/// the work has run; `stream` is NULL or a live stream of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_decoder_layer_forward(
    ctx: *mut unsloth_context,
    params: *const unsloth_decoder_layer_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
