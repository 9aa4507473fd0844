//! Quantisation: floats to codes of 8 or 2 bits.

use std::ffi::c_void;

use crate::error::{Error, Result, text};
use crate::ffi::context::unsloth_context;
use crate::ffi::operation::{self, FromC};
use crate::ffi::params::params;
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::{unsloth_tensor, workspace_from};
use crate::ffi::{unsloth_implementation, unsloth_stream};
use crate::ops::quantize::{Params, Rule};

const OP: &str = "quantize";

/// How a scale follows from the elements that share it. What is divided by it is rounded to the
/// nearest integer, ties to even.
pub type unsloth_quantize_rule = u32;
/// The greatest magnitude, divided by 127 for 8 bits.
pub const UNSLOTH_QUANTIZE_ABSMAX: unsloth_quantize_rule = 0;
/// The mean magnitude, for ternary codes: BitNet b1.58's.
pub const UNSLOTH_QUANTIZE_ABSMEAN: unsloth_quantize_rule = 1;
/// For ternary codes: what is not above 0.7 of the mean magnitude is 0, the scale is the mean
/// magnitude of the rest (ternary weight networks).
pub const UNSLOTH_QUANTIZE_THRESHOLD: unsloth_quantize_rule = 2;

/// Arguments of `unsloth_quantize_forward`: `x = scale * out`, rounded.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_quantize_params {
    /// `sizeof(unsloth_quantize_params)`.
    pub struct_size: u32,
    /// `UNSLOTH_QUANTIZE_*`; for i8 and f8e4m3 0.
    pub rule: unsloth_quantize_rule,
    /// `[.., k]`, f32, f16 or bf16, `k` up to 16,909,320; any strides with a contiguous last dimension.
    pub x: unsloth_tensor,
    /// The shape of `x`: i8, f8e4m3, or ternary where `k` is a multiple of 128; any strides with a contiguous last dimension.
    pub out: unsloth_tensor,
    /// f32, contiguous, written; its shape says what shares a scale. `[1]`: everything. The leading dimensions of `x`, or `[1]` if it
    /// has none: each row. These and `k / g`: each `g` neighbours of a row, for ternary codes a multiple of 128. Zeros alone have the
    /// scale 0. Where an element is not finite, or magnitudes add up to more than f32 holds, the scale is not finite and codes are 0.
    pub scale: unsloth_tensor,
    /// Optional: i32, contiguous, the sums of the codes (of ternary ones, -1 to 1) of what shares a scale, or of each row where one
    /// scale is for all. Codes of f8e4m3 are no integers, and have none.
    pub sum: unsloth_tensor,
    /// Optional scratch memory, aligned to 256 bytes; see `unsloth_quantize_workspace_size`.
    pub workspace: *mut c_void,
    /// Size of `workspace` in bytes.
    pub workspace_size: usize,
}
params!(unsloth_quantize_params, [x, out, scale, sum]);

impl FromC for unsloth_quantize_params {
    type Operation<'a> = Params<'a>;

    unsafe fn convert<'a>(&self) -> Result<Params<'a>> {
        let rule = Rule::from_raw(self.rule).ok_or_else(|| {
            let problem = text!(
                "is {}, allowed: 0 (absmax), 1 (absmean), 2 (threshold)",
                self.rule
            );
            Error::invalid(OP, "rule", problem)
        })?;
        // SAFETY: the caller promises that the tensors are valid until the work has run.
        unsafe {
            Ok(Params {
                x: self.x.input(OP, "x")?,
                out: self.out.output(OP, "out")?,
                scale: self.scale.output(OP, "scale")?,
                sum: self.sum.optional_output(OP, "sum")?,
                rule,
                workspace: workspace_from(OP, self.workspace, self.workspace_size)?,
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
pub unsafe extern "C" fn unsloth_quantize_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_quantize_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// Writes to `workspace_size` the bytes of workspace that the call needs: on CUDA 8 for each row
/// and 8 more where one scale is for all, else 0. The CPU takes memory of its own. Data pointers and the workspace are not looked at.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `workspace_size` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_quantize_workspace_size(
    ctx: *mut unsloth_context,
    params: *const unsloth_quantize_params,
    workspace_size: *mut usize,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::workspace_size(ctx, params, workspace_size) }
}

/// Quantises on `stream`. The same inputs give the same bits, with any number of threads. A sum of
/// magnitudes is one of pieces of 4096 neighbours, each of 32 sums of every 32nd element; pieces are
/// added in f64.
///
/// Outputs may overlap neither `x` nor each other.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors are valid on the context's device until the work
/// has run; `stream` is NULL or a live stream of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_quantize_forward(
    ctx: *mut unsloth_context,
    params: *const unsloth_quantize_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
