//! This library's operations on candle's tensors (feature `candle`), without copies.
//!
//! Inputs are read where candle keeps them, with whatever strides and offsets their views have; the
//! output is a new tensor of candle's. On CUDA (feature `candle-cuda`) the work goes to the stream
//! of the tensors' device, in order with candle's own; nothing waits, and nothing passes through
//! the host. Contexts are made when a device is first used, and kept.
//!
//! These are forward passes: gradients do not flow through them. Errors are candle's, around this
//! crate's.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//!
//! let x = Tensor::new(&[[3f32, 4.0]], &Device::Cpu)?;
//! let y = unsloth::candle::rms_norm(&x, None, 1e-9)?;
//! let norm = y.sqr()?.mean_all()?.to_scalar::<f32>()?;
//! assert!((norm - 1.0).abs() < 1e-6);
//! # Ok::<(), candle_core::Error>(())
//! ```

#[cfg(feature = "candle-cuda")]
mod cuda;
mod storage;

use candle_core::{Error, Result, Tensor};

use crate::memory::Buffer;
use crate::ops;
use crate::ops::rope::{Angles, Positions, Rotation, Style};
use crate::tensor::{InOut, Workspace};
use storage::Call;

/// Root mean square normalisation over the last dimension: [`ops::rms_norm`].
///
/// `x` is `[.., dim]`, f32, f16 or bf16; `weight`, the gains, `[dim]` in any of these.
///
/// # Errors
/// A tensor has a shape, dtype, strides or device that the operation does not take, or the launch
/// failed.
pub fn rms_norm(x: &Tensor, weight: Option<&Tensor>, epsilon: f32) -> Result<Tensor> {
    let inputs: Vec<&Tensor> = [x].into_iter().chain(weight).collect();
    Call::new(&inputs, x.shape(), x.dtype())?.run(|context, inputs, out, stream| {
        let (x, weight) = split(inputs);
        let params = ops::rms_norm::Params {
            x: InOut::Apart {
                input: x,
                output: out,
            },
            residual: None,
            weight: weight.first().copied(),
            weight_offset: 0.0,
            epsilon,
        };
        ops::rms_norm::forward(context, &params, stream)
    })
}

/// Rotates vectors by the angles of a table: [`ops::rope`].
///
/// `x` is `[batch, seq, heads, head_dim]` (candle's own functions have heads before the sequence:
/// pass `x.transpose(1, 2)?`, which copies nothing), f32, f16 or bf16. `cos` and `sin` are f32
/// `[positions, rotary_dim / 2]`; components past `rotary_dim` pass through. Without `positions`,
/// i32 or i64 `[batch, seq]`, token `i` of a sequence stands at position `i`: narrow the tables to
/// begin elsewhere.
///
/// # Errors
/// As [`rms_norm`].
pub fn rope(
    x: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    positions: Option<&Tensor>,
    style: Style,
) -> Result<Tensor> {
    let rotary_dim = 2 * cos.dim(candle_core::D::Minus1)?;
    let inputs: Vec<&Tensor> = [x, cos, sin].into_iter().chain(positions).collect();
    Call::new(&inputs, x.shape(), x.dtype())?.run(|context, inputs, out, stream| {
        let (x, tables) = split(inputs);
        let (cos, rest) = split(tables);
        let (sin, positions) = split(rest);
        let params = ops::rope::Params {
            q: Some(InOut::Apart {
                input: x,
                output: out,
            }),
            k: None,
            positions: match positions.first() {
                Some(positions) => Positions::PerToken(*positions),
                None => Positions::default(),
            },
            rotation: Rotation {
                style,
                rotary_dim,
                angles: Angles::Table { cos, sin },
            },
            inverse: false,
        };
        ops::rope::forward(context, &params, stream)
    })
}

/// `silu(gate) * up`: [`ops::swiglu`].
///
/// `gate` and `up` have one shape `[.., dim]` and one dtype, f32, f16 or bf16. They may be halves
/// of one tensor (`narrow`).
///
/// # Errors
/// As [`rms_norm`].
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    Call::new(&[gate, up], gate.shape(), gate.dtype())?.run(|context, inputs, out, stream| {
        let (gate, rest) = split(inputs);
        let (up, _) = split(rest);
        let params = ops::swiglu::Params {
            tensors: ops::swiglu::Tensors::Apart {
                gate: InOut::Apart {
                    input: gate,
                    output: out,
                },
                up,
            },
            activation: ops::swiglu::Activation::Silu,
        };
        ops::swiglu::forward(context, &params, stream)
    })
}

/// `x Wᵀ + bias`: [`ops::linear`].
///
/// `x` is `[.., in_features]`, `weight` `[out_features, in_features]`, `bias` `[out_features]`;
/// f32, f16 or bf16. The result has the dtype of `x`.
///
/// # Errors
/// As [`rms_norm`].
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let mut shape = x.dims().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = weight.dim(0)?;
    }
    let inputs: Vec<&Tensor> = [x, weight].into_iter().chain(bias).collect();
    Call::new(&inputs, &shape.into(), x.dtype())?.run(|context, inputs, out, stream| {
        let (x, rest) = split(inputs);
        let (weight, bias) = split(rest);
        let mut params = ops::linear::Params {
            x_norm: None,
            parallel: None,
            x,
            weights: ops::linear::Weights {
                weight,
                bias: bias.first().copied(),
            },
            output: ops::linear::Output::Write(out),
            workspace: Workspace::none(),
        };
        let size = ops::linear::workspace_size(context, &params)?;
        if size == 0 {
            return ops::linear::forward(context, &params, stream);
        }
        // SAFETY: only the work queued below uses it, on this stream.
        let mut workspace = unsafe { Buffer::new_async(context, size, stream) }?;
        params.workspace = workspace.workspace();
        let queued = ops::linear::forward(context, &params, stream);
        // SAFETY: as above.
        queued.and(unsafe { workspace.free_async(stream) })
    })
}

/// How [`attention`] weighs keys; the default sees all of them, with scores scaled by `1 /
/// sqrt(head_dim)`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Attention {
    /// Queries see no later key; the last query sees the last key.
    pub causal: bool,
    /// Multiplies scores; 0 for `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Scores become `softcap * tanh(score / softcap)`; 0 for none.
    pub softcap: f32,
    /// Keys that a query sees at most, its own and those before; 0 for all.
    pub window: usize,
}

/// Attention: [`ops::attention`].
///
/// `q` is `[batch, seq_q, heads, head_dim]`, `k` and `v` are `[batch, seq_k, kv_heads, head_dim]`,
/// where `kv_heads` divides `heads`; f32, f16 or bf16. (Tensors with heads before the sequence:
/// pass `x.transpose(1, 2)?`, which copies nothing.) The result is `[batch, seq_q, heads,
/// head_dim]` in the dtype of `q`.
///
/// # Errors
/// As [`rms_norm`].
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, options: Attention) -> Result<Tensor> {
    let mut shape = q.dims().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = v.dim(candle_core::D::Minus1)?;
    }
    Call::new(&[q, k, v], &shape.into(), q.dtype())?.run(|context, inputs, out, stream| {
        let (q, rest) = split(inputs);
        let (k, rest) = split(rest);
        let (v, _) = split(rest);
        let mut params = ops::attention::Params::new(q, k, v, out);
        params.causal = options.causal;
        params.softcap = options.softcap;
        params.scale = options.scale;
        params.window_left = options.window;
        let size = ops::attention::workspace_size(context, &params)?;
        if size == 0 {
            return ops::attention::forward(context, &params, stream);
        }
        // SAFETY: only the work queued below uses it, on this stream.
        let mut workspace = unsafe { Buffer::new_async(context, size, stream) }?;
        params.workspace = workspace.workspace();
        let queued = ops::attention::forward(context, &params, stream);
        // SAFETY: as above.
        queued.and(unsafe { workspace.free_async(stream) })
    })
}

/// The first of a list that has it, and the rest.
fn split<T: Copy>(list: &[T]) -> (T, &[T]) {
    (list[0], &list[1..])
}

/// An error of this crate's as one of candle's.
fn wrapped(error: crate::Error) -> Error {
    Error::wrap(error)
}
