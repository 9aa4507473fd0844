//! Rotary position embedding.

use std::fmt;

use crate::error::{Error, Result, text};
use crate::ffi::context::unsloth_context;
use crate::ffi::operation::{self, FromC};
use crate::ffi::params::{Field, params};
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::{in_out, unsloth_tensor};
use crate::ffi::{flag, unsloth_implementation, unsloth_stream};
use crate::ops::rope::{Angles, Params, Positions, Rotation, Scaling, Style};

const OP: &str = "rope";

/// Which components form the pairs that are rotated.
pub type unsloth_rope_style = u32;
/// Components `i` and `i + rotary_dim / 2` (GPT-NeoX, and Llama in Hugging Face's layout).
pub const UNSLOTH_ROPE_STYLE_HALF_SPLIT: unsloth_rope_style = 0;
/// Components `2i` and `2i + 1` (GPT-J, and Llama in Meta's layout, which GGUF keeps).
pub const UNSLOTH_ROPE_STYLE_INTERLEAVED: unsloth_rope_style = 1;

/// How frequencies are stretched for contexts longer than the model was trained with.
pub type unsloth_rope_scaling = u32;
/// Not at all.
pub const UNSLOTH_ROPE_SCALING_NONE: unsloth_rope_scaling = 0;
/// Position interpolation (arXiv:2306.15595): every frequency is divided by `factor`.
pub const UNSLOTH_ROPE_SCALING_LINEAR: unsloth_rope_scaling = 1;
/// NTK-aware, static: theta becomes `theta * factor^(d / (d - 2))`, d being the rotary dimension.
pub const UNSLOTH_ROPE_SCALING_NTK: unsloth_rope_scaling = 2;
/// YaRN (arXiv:2309.00071), as in its authors' code and Hugging Face's; uses `factor`, `original_max_positions`, `beta_fast`,
/// `beta_slow`, `extrapolation_factor` and `fractional_ramp`.
pub const UNSLOTH_ROPE_SCALING_YARN: unsloth_rope_scaling = 3;
/// Llama 3.1's; uses `factor`, `original_max_positions`, `low_freq_factor` and `high_freq_factor`.
pub const UNSLOTH_ROPE_SCALING_LLAMA3: unsloth_rope_scaling = 4;

/// How heads are rotated. All zero is plain RoPE: half-split, the whole head, theta 10000.
///
/// Pair `i` of `rotary_dim / 2` turns by `position * inv_freq[i]`, `inv_freq[i] = theta^(-2i / rotary_dim)` before scaling.
/// Frequencies and angles are f32, as in the models' own code.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_rotation {
    /// One of `UNSLOTH_ROPE_STYLE_*`.
    pub style: unsloth_rope_style,
    /// One of `UNSLOTH_ROPE_SCALING_*`, which says what fields it uses; the others are ignored.
    pub scaling: unsloth_rope_scaling,
    /// Leading components of each head that are rotated, even; the rest pass through. 0 for the whole head.
    pub rotary_dim: u32,
    /// Base of the frequencies; 0 for 10000.
    pub theta: f32,
    /// Context extension of every scaling, positive.
    pub factor: f32,
    /// YaRN, Llama 3: positions the model was trained with before extension.
    pub original_max_positions: u32,
    /// Llama 3: wavelengths above `original_max_positions / low_freq_factor` are multiplied by `factor`; positive.
    pub low_freq_factor: f32,
    /// Llama 3: wavelengths below `original_max_positions / high_freq_factor` are kept; above `low_freq_factor`.
    pub high_freq_factor: f32,
    /// YaRN: turns over the original context above which a pair is kept; 0 for 32.
    pub beta_fast: f32,
    /// YaRN: turns below which a pair is interpolated; 0 for 1.
    pub beta_slow: f32,
    /// Multiplies cosines and sines; 0 for the scaling's own: `0.1 ln(factor) + 1` for YaRN with a `factor` above 1, else 1.
    pub attention_factor: f32,
    /// YaRN: share of the ramp that is applied; 0 for 1.
    pub extrapolation_factor: f32,
    /// YaRN: 1 keeps the ramp's ends fractional (`truncate: false`), 0 rounds them outwards.
    pub fractional_ramp: u32,
    /// Zero.
    pub reserved: [u32; 7],
    /// Optional: divides every scaled frequency; f32 `[rotary_dim / 2]` (GGUF's `rope_freqs`, LongRoPE's factors).
    pub freq_factors: unsloth_tensor,
    /// Optional, with `sin`: the caller's cosines, f32 `[max_positions, rotary_dim / 2]`, contiguous in the last dimension, used
    /// instead of theta, scaling, `freq_factors` and `attention_factor`.
    pub cos: unsloth_tensor,
    /// The caller's sines; like `cos`.
    pub sin: unsloth_tensor,
}

impl Field for unsloth_rotation {
    fn check(&self, op: &'static str, name: fmt::Arguments<'_>) -> Result<()> {
        self.reserved.check(op, format_args!("{name}.reserved"))?;
        self.freq_factors
            .check(op, format_args!("{name}.freq_factors"))?;
        self.cos.check(op, format_args!("{name}.cos"))?;
        self.sin.check(op, format_args!("{name}.sin"))
    }
}

impl unsloth_rotation {
    /// The rotation, for any operation that takes one.
    ///
    /// # Safety
    /// The tensors are valid on the context's device while it is used.
    pub(crate) unsafe fn read<'a>(&self, op: &'static str) -> Result<Rotation<'a>> {
        let style = Style::from_raw(self.style).ok_or_else(|| {
            let problem = text!(
                "is {}, allowed: 0 (half split), 1 (interleaved)",
                self.style
            );
            Error::invalid(op, "style", problem)
        })?;
        // SAFETY: the caller's promise.
        let (cos, sin, freq_factors) = unsafe {
            (
                self.cos.optional_input(op, "cos")?,
                self.sin.optional_input(op, "sin")?,
                self.freq_factors.optional_input(op, "freq_factors")?,
            )
        };
        let angles = match (cos, sin) {
            (Some(cos), Some(sin)) => Angles::Table { cos, sin },
            (None, None) => Angles::Computed {
                theta: self.theta,
                scaling: self.scaling(op)?,
                freq_factors,
                attention_factor: self.attention_factor,
            },
            (cos, _) => {
                let absent = if cos.is_some() { "sin" } else { "cos" };
                let problem = "is absent (rank 0): a table has cosines and sines";
                return Err(Error::invalid(op, absent, problem));
            }
        };
        Ok(Rotation {
            style,
            rotary_dim: self.rotary_dim as usize,
            angles,
        })
    }

    fn scaling(&self, op: &'static str) -> Result<Scaling> {
        let factor = self.factor;
        let original_max_positions = self.original_max_positions;
        Ok(match self.scaling {
            UNSLOTH_ROPE_SCALING_NONE => Scaling::None,
            UNSLOTH_ROPE_SCALING_LINEAR => Scaling::Linear { factor },
            UNSLOTH_ROPE_SCALING_NTK => Scaling::Ntk { factor },
            UNSLOTH_ROPE_SCALING_YARN => Scaling::Yarn {
                factor,
                original_max_positions,
                beta_fast: self.beta_fast,
                beta_slow: self.beta_slow,
                extrapolation_factor: self.extrapolation_factor,
                fractional_ramp: flag(op, "fractional_ramp", self.fractional_ramp)?,
            },
            UNSLOTH_ROPE_SCALING_LLAMA3 => Scaling::Llama3 {
                factor,
                low_freq_factor: self.low_freq_factor,
                high_freq_factor: self.high_freq_factor,
                original_max_positions,
            },
            other => {
                let problem = text!(
                    "is {other}, allowed: 0 (none), 1 (linear), 2 (ntk), 3 (yarn), 4 (llama 3)"
                );
                return Err(Error::invalid(op, "scaling", problem));
            }
        })
    }
}

/// Where tokens stand: as listed or, without a list, counted from an offset.
///
/// # Safety
/// The tensor is valid on the context's device while the result is used.
pub(crate) unsafe fn positions<'a>(
    op: &'static str,
    list: &unsloth_tensor,
    offset: i64,
) -> Result<Positions<'a>> {
    // SAFETY: the caller's promise.
    match unsafe { list.optional_input(op, "positions")? } {
        None => Ok(Positions::From(offset)),
        Some(positions) if offset == 0 => Ok(Positions::PerToken(positions)),
        Some(_) => {
            let problem = text!("is {offset} and positions are there: set one");
            Err(Error::invalid(op, "position_offset", problem))
        }
    }
}

/// Arguments of `unsloth_rope_forward`. At least one of `q` and `k` is there.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_rope_params {
    /// `sizeof(unsloth_rope_params)`.
    pub struct_size: u32,
    /// 1 rotates backwards: undoes the rotation, and maps gradients of the rotated to gradients of the original.
    pub inverse: u32,
    /// Position of the first token of every sequence, where `positions` is absent.
    pub position_offset: i64,
    /// How heads are rotated.
    pub rotation: unsloth_rotation,
    /// Optional: `[batch, seq, heads, head_dim]` or `[tokens, heads, head_dim]`, f32, f16 or bf16, any strides with a contiguous
    /// last dimension.
    pub q: unsloth_tensor,
    /// Like `q`. Absent, or the same tensor as `q`: `q` is overwritten.
    pub q_out: unsloth_tensor,
    /// Optional: like `q`, with any number of heads.
    pub k: unsloth_tensor,
    /// Like `k`. Absent, or the same tensor as `k`: `k` is overwritten.
    pub k_out: unsloth_tensor,
    /// Optional: i32 or i64 `[batch, seq]` or `[tokens]`, any strides (a batch stride of zero shares positions). With a table
    /// every position must lie inside; with CUDA, where the host cannot look, the rotated components of a token outside become
    /// NaN.
    pub positions: unsloth_tensor,
}
params!(
    unsloth_rope_params,
    [rotation, q, q_out, k, k_out, positions]
);

impl FromC for unsloth_rope_params {
    type Operation<'a> = Params<'a>;

    unsafe fn convert<'a>(&self) -> Result<Params<'a>> {
        // SAFETY: the caller promises that the tensors are valid until the work has run.
        unsafe {
            let positions = positions(OP, &self.positions, self.position_offset)?;
            Ok(Params {
                q: in_out(OP, ("q", "q_out"), &self.q, &self.q_out)?,
                k: in_out(OP, ("k", "k_out"), &self.k, &self.k_out)?,
                positions,
                rotation: self.rotation.read(OP)?,
                inverse: flag(OP, "inverse", self.inverse)?,
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
pub unsafe extern "C" fn unsloth_rope_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_rope_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// Rotates on `stream`. Needs no workspace; neither allocates device memory nor synchronises, and may be captured into a CUDA graph.
///
/// `q_out` may be `q` and `k_out` may be `k`; other overlaps with an output are errors. Heads of q and k may lie in one packed
/// tensor.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors are valid on the context's device until the work
/// has run; `stream` is NULL or a live stream of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_rope_forward(
    ctx: *mut unsloth_context,
    params: *const unsloth_rope_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
