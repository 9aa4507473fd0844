//! Linear layers.

pub mod backward;

use std::ffi::c_void;

use crate::error::{Error, Result};
use crate::ffi::context::unsloth_context;
use crate::ffi::operation::{self, WithC};
use crate::ffi::parallel::{Group, unsloth_parallel};
use crate::ffi::params::params;
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::{in_out, unsloth_tensor, workspace_from};
use crate::ffi::{unsloth_implementation, unsloth_stream};
use crate::ops::linear::{Output, Params, Weights};
use crate::ops::rms_norm::Norm;

const OP: &str = "linear";

/// Arguments of `unsloth_linear_forward`: `out = x weight^T + bias + residual`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_linear_params {
    /// `sizeof(unsloth_linear_params)`.
    pub struct_size: u32,
    /// Zero.
    pub reserved: u32,
    /// `[.., in_features]`, f32, f16 or bf16, any strides with a contiguous last dimension.
    pub x: unsloth_tensor,
    /// `[out_features, in_features]`, any float dtype whatever that of `x`; any strides with a contiguous last dimension. Also
    /// in blocks (`UNSLOTH_DTYPE_Q8_0`, `Q4_0`, `Q4_1`, `Q5_0`, `Q5_1`, `Q4_K`, `Q5_K`, `Q6_K`, `TQ1_0`, `TQ2_0`, `Q2_0`): rows of
    /// whole blocks, which begin at multiples of a block. Products may then be of `x` rounded to 16 bits, unless the weight has
    /// `UNSLOTH_TENSOR_FLOAT_ACTIVATIONS`, or to 8 bits if it has `UNSLOTH_TENSOR_INT8_ACTIVATIONS`; on CUDA those of more rows
    /// are of weights rounded to the dtype of `x`.
    /// Also i8, or ternary with rows of a multiple of 128, with its scales in `quantization`: `x` is rounded to 8 bits by the
    /// greatest magnitude of each row, as `unsloth_quantize_forward` does, and integers are summed exactly.
    /// Also f8e4m3, with its scales in `quantization`: `x` is not rounded, and sums are scaled at their end. On CUDA that is so for
    /// up to 64 rows, on Hopper with an `x` of 16 bits for up to 3,072; of more, weights are scaled and then rounded to the dtype of
    /// `x`, as blocks are.
    pub weight: unsloth_tensor,
    /// Optional: `[out_features]`, any float dtype, contiguous.
    pub bias: unsloth_tensor,
    /// Optional: added to the product; like `out`, and may be the same tensor, which then accumulates.
    pub residual: unsloth_tensor,
    /// `[.., out_features]`: leading dimensions of `x`; its dtype or f32, to which the sums are not rounded then; any strides with a
    /// contiguous last dimension.
    pub out: unsloth_tensor,
    /// Optional scratch memory that makes the product faster, aligned to 256 bytes; see `unsloth_linear_workspace_size`.
    pub workspace: *mut c_void,
    /// Size of `workspace` in bytes. If less than `unsloth_linear_workspace_size` answers, the workspace is not looked at.
    pub workspace_size: usize,
    /// Optional: the group that `weight` is divided among, of which this is the rank's part. Divided by rows, `bias` and `out` are its
    /// columns too. Divided by columns, `x` is, and `out` is the sum of all ranks' products, `bias` and `residual` added once.
    pub parallel: unsloth_parallel,
    /// Optional, for a forward pass without `parallel`: gains `[in_features]`, any float dtype, of an RMSNorm that `x` passes before it is
    /// multiplied. The same bits as `unsloth_rms_norm_forward` and then this product; one kernel for up to eight short rows on Hopper, else
    /// both, and a workspace for what is normalised is needed.
    pub x_norm: unsloth_tensor,
    /// With `x_norm`: added to its gains.
    pub norm_weight_offset: f32,
    /// With `x_norm`: added to mean squares; above 0.
    pub norm_epsilon: f32,
}
params!(
    unsloth_linear_params,
    [reserved, x, weight, bias, residual, out, parallel, x_norm]
);

/// The output of a product, and its residual if there is one.
///
/// # Safety
/// The tensors are valid on the context's device while it is used.
pub(crate) unsafe fn output_from<'a>(
    op: &'static str,
    residual: &unsloth_tensor,
    out: &unsloth_tensor,
) -> Result<Output<'a>> {
    // SAFETY: the caller's promise.
    unsafe {
        if residual.optional_input(op, "residual")?.is_none() {
            return Ok(Output::Write(out.output(op, "out")?));
        }
        // Without this the residual would silently become the output.
        out.output(op, "out")?;
        let pair = in_out(op, ("residual", "out"), residual, out)?;
        pair.map(Output::Add)
            .ok_or_else(|| Error::invalid(op, "residual", "is absent (rank 0)"))
    }
}

/// A norm of an input, if its gains are there.
///
/// # Safety
/// The tensor is valid on the context's device while it is used.
pub(crate) unsafe fn norm_from<'a>(
    op: &'static str,
    name: &'static str,
    gains: &unsloth_tensor,
    (weight_offset, epsilon): (f32, f32),
) -> Result<Option<Norm<'a>>> {
    // SAFETY: the caller's promise.
    let gains = unsafe { gains.optional_input(op, name)? };
    Ok(gains.map(|weight| Norm {
        weight,
        weight_offset,
        epsilon,
    }))
}

/// A layer's matrix and bias.
///
/// # Safety
/// The tensors are valid on the context's device while it is used.
pub(crate) unsafe fn weights_from<'a>(
    op: &'static str,
    names: (&'static str, &'static str),
    weight: &unsloth_tensor,
    bias: &unsloth_tensor,
) -> Result<Weights<'a>> {
    // SAFETY: the caller's promise.
    unsafe {
        Ok(Weights {
            weight: weight.input(op, names.0)?,
            bias: bias.optional_input(op, names.1)?,
        })
    }
}

impl WithC for unsloth_linear_params {
    type Operation<'a> = Params<'a>;

    unsafe fn with<R>(&self, run: impl FnOnce(&Params<'_>) -> Result<R>) -> Result<R> {
        // SAFETY: the caller promises that the tensors are valid until the work has run, and an entry of
        // the counts for each rank.
        unsafe {
            let group = self.parallel.of_layer(OP)?;
            run(&Params {
                x: self.x.input(OP, "x")?,
                x_norm: norm_from(
                    OP,
                    "x_norm",
                    &self.x_norm,
                    (self.norm_weight_offset, self.norm_epsilon),
                )?,
                weights: weights_from(OP, ("weight", "bias"), &self.weight, &self.bias)?,
                output: output_from(OP, &self.residual, &self.out)?,
                workspace: workspace_from(OP, self.workspace, self.workspace_size)?,
                parallel: group.as_ref().map(Group::parallel),
            })
        }
    }
}

/// Whether this call would run, and by which implementation (written to `implementation` unless NULL). Data pointers and the
/// workspace are not looked at. The status and message are those the call itself would give.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `implementation` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_linear_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_linear_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// Writes to `workspace_size` the bytes of workspace with which the call is fastest: at most 32 MiB,
/// and 0 on the CPU. The workspace is optional. With less, or with NULL, another algorithm computes
/// the same product, whose sums may round differently. On CUDA a weight in blocks is decoded there if
/// `x` has more than 32 rows, and if it is f32 and has more than 24, or rows of more than 28672 elements,
/// or the weight has `UNSLOTH_TENSOR_FLOAT_ACTIVATIONS`: such a call needs room for it, or for 128 MiB of
/// it (256 of its rows, if these are more); one that is f8e4m3, if `x` has more than 64 rows. A weight that is i8 or ternary needs
/// room for `x`, rounded to 8 bits.
/// More rows may ask for less, so a caller with several sizes asks for each. The answer is for data
/// aligned to 16 bytes. Data pointers and the workspace are not looked at.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `workspace_size` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_linear_workspace_size(
    ctx: *mut unsloth_context,
    params: *const unsloth_linear_params,
    workspace_size: *mut usize,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::workspace_size(ctx, params, workspace_size) }
}

/// Computes the layer on `stream`, accumulating in f32. Neither allocates device memory nor synchronises, and may be captured into a CUDA
/// graph. Calls that may run at the same time must not share a workspace.
///
/// `out` may be `residual`; other overlaps with it, and with a workspace that is used, are errors.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors are valid on the context's device until the work
/// has run; `stream` is NULL or a live stream of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_linear_forward(
    ctx: *mut unsloth_context,
    params: *const unsloth_linear_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
