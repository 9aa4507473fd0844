//! Ternary weights of files, brought to the order of the ternary dtype.

use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::ffi::context::unsloth_context;
use crate::ffi::operation::{self, FromC};
use crate::ffi::params::params;
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::unsloth_tensor;
use crate::ffi::{unsloth_implementation, unsloth_stream};
use crate::ops::weight_repack::{Codes, Format, Params};

const OP: &str = "weight_repack";

/// How a file has ternary weights. GGUF's TQ1_0, TQ2_0 and Q2_0 are none of these: they have a scale
/// for each block, and are dtypes that linear layers take as they are.
pub type unsloth_weight_repack_format = u32;
/// BitNet's I2_S, GGUF's type 36 in its files, as its builds for x86 write it: 128 codes in 32 bytes,
/// weight + 1, byte `p` holding those of `p`, `p + 32`, `p + 64` and `p + 96` from its high bits down;
/// behind all codes 32 bytes, of which the first four are the scale, an f32. Other builds write other
/// orders under this name.
pub const UNSLOTH_WEIGHT_REPACK_I2_S: unsloth_weight_repack_format = 0;

/// Arguments of `unsloth_weight_repack_forward`: the codes of a matrix `[n, k]` from a file's order to
/// that of `UNSLOTH_DTYPE_TERNARY`, bit for bit. A code of 3, which I2_S does not have, stays one: a
/// weight of 2.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_weight_repack_params {
    /// `sizeof(unsloth_weight_repack_params)`.
    pub struct_size: u32,
    /// `UNSLOTH_WEIGHT_REPACK_*`.
    pub format: unsloth_weight_repack_format,
    /// `[n k / 4 + 32]`, i8, contiguous, at any address: the file's bytes.
    pub packed: unsloth_tensor,
    /// `[n, k]`, ternary, contiguous, at any address; `k` a multiple of 128. It may begin where `packed`
    /// does: then codes change in place, and the bytes behind them stay.
    pub out: unsloth_tensor,
    /// Optional: `[1]`, f32, written: what all codes are multiplied by, for the `quantization` of
    /// `out`. Absent, it stays where it is in `packed`, at byte `n k / 4`.
    pub scale: unsloth_tensor,
}
params!(unsloth_weight_repack_params, [packed, out, scale]);

impl FromC for unsloth_weight_repack_params {
    type Operation<'a> = Params<'a>;

    unsafe fn convert<'a>(&self) -> Result<Params<'a>> {
        let format = Format::from_raw(self.format).ok_or_else(|| {
            let problem = text!("is {}, allowed: 0 (i2_s)", self.format);
            Error::invalid(OP, "format", problem)
        })?;
        // SAFETY: the caller promises that the tensors are valid until the work has run.
        unsafe {
            let packed = self.packed.input(OP, "packed")?;
            let out = self.out.output(OP, "out")?;
            let (from, to) = (packed.raw(), out.raw());
            let in_place = from.ptr == to.ptr && !to.ptr.is_null() && to.dtype == DType::Ternary;
            let codes = match in_place {
                true => Codes::InPlace {
                    packed: self.packed.output(OP, "packed")?,
                    layout: to.layout,
                },
                false => Codes::Apart { packed, out },
            };
            Ok(Params {
                format,
                codes,
                scale: self.scale.optional_output(OP, "scale")?,
            })
        }
    }
}

/// Whether this call would run, and by which implementation (written to `implementation` unless NULL). Data pointers are not looked
/// at. The status and message are those the call itself would give.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `implementation` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_weight_repack_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_weight_repack_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// Brings codes to their order on `stream`. Needs no workspace; neither allocates nor synchronises, and may be captured into a CUDA
/// graph.
///
/// `out` may not overlap `packed` but where both begin at the same address; `scale` may overlap neither.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors are valid on the context's device until the work
/// has run; `stream` is NULL or a live stream of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_weight_repack_forward(
    ctx: *mut unsloth_context,
    params: *const unsloth_weight_repack_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
