//! The gated feed-forward block.

pub mod backward;

use std::ffi::c_void;

use crate::error::{Error, Result};
use crate::ffi::context::unsloth_context;
use crate::ffi::linear::{norm_from, output_from, weights_from};
use crate::ffi::operation::{self, WithC};
use crate::ffi::parallel::{Group, unsloth_parallel};
use crate::ffi::params::params;
use crate::ffi::status::unsloth_status;
use crate::ffi::swiglu::{
    activation_from, gate_order_from, unsloth_activation, unsloth_gate_order,
};
use crate::ffi::tensor::{unsloth_tensor, workspace_from};
use crate::ffi::{unsloth_implementation, unsloth_stream};
use crate::ops::linear::Output;
use crate::ops::mlp::{GateUp, Norm, Params};
use crate::tensor::{TensorRef, Workspace};

const OP: &str = "mlp";

/// Arguments of `unsloth_mlp_forward`:
/// `out = (activation(x gate_weight^T + gate_bias) * (x up_weight^T + up_bias)) down_weight^T + down_bias + residual`.
///
/// Either `gate_weight` and `up_weight` are there, or `gate_up_weight`. Weights and biases are of any float dtype whatever that of
/// `x`; weights have any strides with a contiguous last dimension, biases are contiguous and optional. Weights may also be in blocks or
/// of codes, as `unsloth_linear_params` says, in a forward pass: of codes both of gate and up, or none.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_mlp_params {
    /// `sizeof(unsloth_mlp_params)`.
    pub struct_size: u32,
    /// One of `UNSLOTH_ACTIVATION_*`.
    pub activation: unsloth_activation,
    /// The order of the halves of `gate_up_weight` and `gate_up_bias`; one of `UNSLOTH_GATE_ORDER_*`.
    pub gate_order: unsloth_gate_order,
    /// With `intermediate_norm`: added to its mean squares; above 0.
    pub norm_epsilon: f32,
    /// `[.., hidden]`, f32, f16 or bf16, any strides with a contiguous last dimension.
    pub x: unsloth_tensor,
    /// `[intermediate, hidden]`.
    pub gate_weight: unsloth_tensor,
    /// Optional: `[intermediate]`.
    pub gate_bias: unsloth_tensor,
    /// `[intermediate, hidden]`.
    pub up_weight: unsloth_tensor,
    /// Optional: `[intermediate]`.
    pub up_bias: unsloth_tensor,
    /// `[2 * intermediate, hidden]`: the rows of gate and up in one matrix.
    pub gate_up_weight: unsloth_tensor,
    /// Optional: `[2 * intermediate]`.
    pub gate_up_bias: unsloth_tensor,
    /// `[hidden_out, intermediate]`.
    pub down_weight: unsloth_tensor,
    /// Optional: `[hidden_out]`.
    pub down_bias: unsloth_tensor,
    /// Optional: added to the product; like `out`, and may be the same tensor, which then accumulates.
    pub residual: unsloth_tensor,
    /// `[.., hidden_out]`: leading dimensions and dtype of `x`, any strides with a contiguous last dimension.
    pub out: unsloth_tensor,
    /// Scratch memory, aligned to 256 bytes; see `unsloth_mlp_workspace_size`.
    pub workspace: *mut c_void,
    /// Size of `workspace` in bytes.
    pub workspace_size: usize,
    /// Optional, for `unsloth_mlp_backward`: receives gate and up, biases included, `[.., 2 * intermediate]`, contiguous, of the
    /// dtype of `x`. They lie as in `gate_up_weight`; from two weights, gate is first. The call then needs all the workspace that
    /// it asks for.
    pub gate_up_out: unsloth_tensor,
    /// Optional, for a forward pass alone: gains `[intermediate]` of an RMSNorm of the activated product before `down_weight`
    /// (BitNet), any float dtype. It is computed in the workspace, which then holds gate and up.
    pub intermediate_norm: unsloth_tensor,
    /// Optional: the group that the intermediate dimension is divided among. Gate and up with their biases, the columns of
    /// `down_weight` and `gate_up_out` are this rank's part; sequence parallel, `x`, `residual` and `out` are its rows, and
    /// `gate_up_out` is of all rows. Not with `intermediate_norm`.
    pub parallel: unsloth_parallel,
    /// Optional, for a forward pass without `parallel` and `gate_up_out`: gains `[hidden]`, any float dtype, of an RMSNorm that `x` passes
    /// before it is multiplied, as in `unsloth_linear_params`. `x` may then be `residual` and `out`.
    pub x_norm: unsloth_tensor,
    /// With `x_norm`: added to its gains.
    pub x_norm_weight_offset: f32,
    /// With `x_norm`: added to mean squares; above 0.
    pub x_norm_epsilon: f32,
}
params!(
    unsloth_mlp_params,
    [
        x,
        gate_weight,
        gate_bias,
        up_weight,
        up_bias,
        gate_up_weight,
        gate_up_bias,
        down_weight,
        down_bias,
        residual,
        out,
        gate_up_out,
        intermediate_norm,
        parallel,
        x_norm,
    ]
);

impl WithC for unsloth_mlp_params {
    type Operation<'a> = Params<'a>;

    unsafe fn with<R>(&self, run: impl FnOnce(&Params<'_>) -> Result<R>) -> Result<R> {
        // SAFETY: the caller promises that the tensors are valid until the work has run, and an entry of
        // the counts for each rank.
        unsafe {
            let group = self.parallel.of_block(OP)?;
            run(&Params {
                output: output_from(OP, &self.residual, &self.out)?,
                workspace: workspace_from(OP, self.workspace, self.workspace_size)?,
                gate_up_out: self.gate_up_out.optional_output(OP, "gate_up_out")?,
                parallel: group.as_ref().map(Group::parallel),
                ..self.of_input(self.x.input(OP, "x")?)?
            })
        }
    }
}

impl unsloth_mlp_params {
    /// The block of an input `x`, without what it writes and without a group.
    ///
    /// # Safety
    /// The weights and biases are valid on the context's device while it is used.
    pub(crate) unsafe fn of_input<'a>(&self, x: TensorRef<'a>) -> Result<Params<'a>> {
        // SAFETY: the caller's promise.
        unsafe {
            Ok(Params {
                parallel: None,
                x,
                x_norm: norm_from(
                    OP,
                    "x_norm",
                    &self.x_norm,
                    (self.x_norm_weight_offset, self.x_norm_epsilon),
                )?,
                gate_up: gate_up(self)?,
                activation: activation_from(OP, self.activation)?,
                intermediate_norm: self.norm()?,
                down: weights_from(
                    OP,
                    ("down_weight", "down_bias"),
                    &self.down_weight,
                    &self.down_bias,
                )?,
                output: Output::none(),
                workspace: Workspace::none(),
                gate_up_out: None,
            })
        }
    }
}

impl unsloth_mlp_params {
    /// # Safety
    /// As [`Self::of_input`].
    unsafe fn norm<'a>(&self) -> Result<Option<Norm<'a>>> {
        // SAFETY: the caller's promise.
        let weight = unsafe {
            self.intermediate_norm
                .optional_input(OP, "intermediate_norm")?
        };
        Ok(weight.map(|weight| Norm {
            weight,
            epsilon: self.norm_epsilon,
        }))
    }
}

/// # Safety
/// The tensors are valid on the context's device while it is used.
unsafe fn gate_up<'a>(p: &unsloth_mlp_params) -> Result<GateUp<'a>> {
    let order = gate_order_from(OP, p.gate_order)?;
    let apart = [
        ("gate_weight", &p.gate_weight),
        ("gate_bias", &p.gate_bias),
        ("up_weight", &p.up_weight),
        ("up_bias", &p.up_bias),
    ];
    // SAFETY: the caller's promise.
    unsafe {
        if p.gate_up_weight.is_absent() {
            if p.gate_weight.is_absent() {
                let problem = "and gate_up_weight are absent, one is required";
                return Err(Error::invalid(OP, "gate_weight", problem));
            }
            if !p.gate_up_bias.is_absent() {
                let problem = "is there without gate_up_weight";
                return Err(Error::invalid(OP, "gate_up_bias", problem));
            }
            return Ok(GateUp::Apart {
                gate: weights_from(OP, (apart[0].0, apart[1].0), apart[0].1, apart[1].1)?,
                up: weights_from(OP, (apart[2].0, apart[3].0), apart[2].1, apart[3].1)?,
            });
        }
        if let Some((name, _)) = apart.iter().find(|(_, t)| !t.is_absent()) {
            let problem = "and gate_up_weight are both there: set one";
            return Err(Error::invalid(OP, *name, problem));
        }
        let names = ("gate_up_weight", "gate_up_bias");
        Ok(GateUp::Packed {
            weights: weights_from(OP, names, &p.gate_up_weight, &p.gate_up_bias)?,
            order,
        })
    }
}

/// Whether this call would run, and by which implementation (written to `implementation` unless NULL). Data pointers and the
/// workspace are not looked at. The status and message are those the call itself would give.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `implementation` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_mlp_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_mlp_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// Writes the workspace with which the call is fastest to `workspace_size`, in bytes. With
/// `gate_up_out` all of it is needed. With `intermediate_norm` two intermediates are. Otherwise one
/// intermediate, `tokens * intermediate` elements of the dtype of `x`, is needed and refused below;
/// the rest is an offer. On CUDA it is a second intermediate, of up to 2048 tokens, and what
/// products have use for, as `unsloth_linear_workspace_size` says, behind them. With less, each part
/// of the tokens reads the weights once more, and the call may take twice the time.
/// Results may differ in their rounding between workspaces. More tokens may ask for less. Data
/// pointers and the workspace are not looked at.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `workspace_size` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_mlp_workspace_size(
    ctx: *mut unsloth_context,
    params: *const unsloth_mlp_params,
    workspace_size: *mut usize,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::workspace_size(ctx, params, workspace_size) }
}

/// Computes the block on `stream`, accumulating in f32; the activated intermediate is rounded to the dtype of `x`. Neither allocates
/// device memory nor synchronises, and may be captured into a CUDA graph.
///
/// `out` may be `residual`; other overlaps with it or with the workspace are errors.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors and workspace are valid on the context's device
/// until the work has run; `stream` is NULL or a live stream of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_mlp_forward(
    ctx: *mut unsloth_context,
    params: *const unsloth_mlp_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
