//! The attention block.

pub mod backward;

use std::ffi::c_void;

use crate::error::{Error, Result, text};
use crate::ffi::context::unsloth_context;
use crate::ffi::kv_cache::{cache_from, unsloth_kv_cache};
use crate::ffi::linear::{output_from, weights_from};
use crate::ffi::operation::{self, WithC};
use crate::ffi::parallel::{Group, unsloth_parallel};
use crate::ffi::params::params;
use crate::ffi::rope::unsloth_rotation;
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::{unsloth_tensor, workspace_from};
use crate::ffi::{count, flag, unsloth_implementation, unsloth_stream};
use crate::ops::attention_block::{Params, Projections};
use crate::ops::linear::Output;
use crate::ops::rope::Positions;
use crate::tensor::{TensorRef, Workspace};

const OP: &str = "attention_block";

/// Arguments of `unsloth_attention_block_forward`: projections to queries, keys and values,
/// optional norms of queries and keys, optional rotation, attention, output projection, optional
/// addition of a residual.
///
/// It gives the same bits as this library's operations called one by one on tensors of the dtype of
/// `x`, with two exceptions: with a cache, keys are rotated in f32 on their way to it; and on a GPU
/// the order of sums depends on how tensors lie.
///
/// Without `cache` tokens attend to those of the same call. With it, `x` holds the new tokens of
/// the cache's current batch, in its order: their keys and values are appended to `layer`, and they
/// attend to everything their sequences hold in it.
///
/// Either `q_weight`, `k_weight` and `v_weight` are there, or `qkv_weight`. Weights and biases are
/// of any float dtype whatever that of `x`; weights have any strides with a contiguous last
/// dimension, biases are contiguous and optional. Weights may also be in blocks or of codes, as
/// `unsloth_linear_params` says, in a forward pass.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_attention_block_params {
    /// `sizeof(unsloth_attention_block_params)`.
    pub struct_size: u32,
    /// 1 rotates queries and keys, after the norms, as `rotation` says; 0 leaves them.
    pub rotate: u32,
    /// 1 lets tokens see later ones too, only without a cache; 0 is causal.
    pub bidirectional: u32,
    /// Added to the mean squares of all norms.
    pub norm_epsilon: f32,
    /// Added to the gains of all norms: 1 for Gemma, else 0.
    pub norm_weight_offset: f32,
    /// Factor of the scores; 0 for `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Bound of the scores through tanh; 0 for none.
    pub softcap: f32,
    /// Zero.
    pub reserved: u32,
    /// Query heads.
    pub num_heads: i64,
    /// Key and value heads, a divisor of `num_heads`; 0 for `num_heads`.
    pub num_kv_heads: i64,
    /// Components of a query or key head.
    pub head_dim: i64,
    /// Components of a value head; 0 for `head_dim`.
    pub v_head_dim: i64,
    /// How many tokens one sees up to and with itself (and as many from itself on, if
    /// `bidirectional`); 0 for all.
    pub window: i64,
    /// With `cu_seqlens`: no sequence is longer; 0 for no better bound than all tokens.
    pub max_seqlen: i64,
    /// Without a cache and `positions`: position of the first token of every sequence.
    pub position_offset: i64,
    /// Optional: the cache to append to and attend over; of the same context.
    pub cache: *mut unsloth_kv_cache,
    /// With `cache`: the layer.
    pub layer: i64,
    /// Scratch memory, aligned to 256 bytes; see `unsloth_attention_block_workspace_size`.
    pub workspace: *mut c_void,
    /// Size of `workspace` in bytes.
    pub workspace_size: usize,
    /// `[batch, seq, hidden]` or `[tokens, hidden]`, f32, f16 or bf16, any strides with a
    /// contiguous last dimension. With `cu_seqlens` or `cache` it is `[tokens, hidden]`.
    pub x: unsloth_tensor,
    /// `[num_heads * head_dim, hidden]`.
    pub q_weight: unsloth_tensor,
    /// Optional: `[num_heads * head_dim]`.
    pub q_bias: unsloth_tensor,
    /// `[num_kv_heads * head_dim, hidden]`.
    pub k_weight: unsloth_tensor,
    /// Optional: `[num_kv_heads * head_dim]`.
    pub k_bias: unsloth_tensor,
    /// `[num_kv_heads * v_head_dim, hidden]`.
    pub v_weight: unsloth_tensor,
    /// Optional: `[num_kv_heads * v_head_dim]`.
    pub v_bias: unsloth_tensor,
    /// The rows of all query heads, then all key heads, then all value heads, in one matrix.
    pub qkv_weight: unsloth_tensor,
    /// Optional: the same for the biases.
    pub qkv_bias: unsloth_tensor,
    /// Optional: gains of an RMSNorm of the queries, any float dtype: `[head_dim]` normalises each
    /// head (Qwen 3), `[num_heads * head_dim]` all heads of a token together (OLMo 2).
    pub q_norm: unsloth_tensor,
    /// Optional: gains of an RMSNorm of the keys: `[head_dim]` or `[num_kv_heads * head_dim]`.
    pub k_norm: unsloth_tensor,
    /// With `rotate`: how queries and keys are rotated.
    pub rotation: unsloth_rotation,
    /// Optional, without a cache: positions for the rotation, i32 or i64, `[batch, seq]` or
    /// `[tokens]`. Needed with `rotate` and `cu_seqlens`.
    pub positions: unsloth_tensor,
    /// Optional, without a cache: i32 `[num_sequences + 1]`; sequence `b` is tokens `cu_seqlens[b]`
    /// to before `cu_seqlens[b + 1]`.
    pub cu_seqlens: unsloth_tensor,
    /// Optional: ALiBi slopes, f32 `[num_heads]`.
    pub alibi_slopes: unsloth_tensor,
    /// Optional: f32 `[num_heads]`, a logit that takes part in each softmax and has no value.
    pub sinks: unsloth_tensor,
    /// `[hidden_out, num_heads * v_head_dim]`.
    pub out_weight: unsloth_tensor,
    /// Optional: `[hidden_out]`.
    pub out_bias: unsloth_tensor,
    /// Optional: added to the product; like `out`, and may be the same tensor, which then
    /// accumulates.
    pub residual: unsloth_tensor,
    /// `[.., hidden_out]`: leading dimensions and dtype of `x`, any strides with a contiguous last
    /// dimension.
    pub out: unsloth_tensor,
    /// Optional, without a cache, for `unsloth_attention_block_backward`: receives queries, keys
    /// and values side by side, `[.., columns]`, contiguous, of the dtype of `x`. Rotated where the
    /// block has no norms; as the projections give them where it has. With any of the three that
    /// are kept, the call needs all the workspace that it asks for.
    pub qkv_out: unsloth_tensor,
    /// Optional, without a cache, together with `lse_out`: receives attention's output,
    /// `[.., num_heads * v_head_dim]`, contiguous, of the dtype of `x`.
    pub attended_out: unsloth_tensor,
    /// Optional: receives the log-sum-exp of attention's scores, f32, contiguous,
    /// `[batch, num_heads, seq]`, or `[num_heads, tokens]` where `x` has no batch.
    pub lse_out: unsloth_tensor,
    /// Optional, for a forward pass alone: gains of an RMSNorm of attention's output before `out_weight`,
    /// all heads of a token together (BitNet), any float dtype, `[num_heads * v_head_dim]`.
    pub attended_norm: unsloth_tensor,
    /// Optional: the group that heads are divided among. `num_heads`, `num_kv_heads`, the projections to queries, keys and values, the
    /// columns of `out_weight`, sinks, slopes, the cache and what is kept are of this rank's heads; sequence parallel, `x`, `residual`
    /// and `out` are its rows, and positions, `cu_seqlens`, the cache and what is kept are of all rows. Norms are of single heads.
    pub parallel: unsloth_parallel,
    /// Optional, for a forward pass without `parallel`: gains `[hidden]`, any float dtype, of an RMSNorm that `x` passes before it is
    /// projected, with the offset and the epsilon of the other norms. The same bits as `unsloth_rms_norm_forward` and then this block.
    /// `x` may then be `residual` and `out`.
    pub x_norm: unsloth_tensor,
}
params!(
    unsloth_attention_block_params,
    [
        reserved,
        x,
        q_weight,
        q_bias,
        k_weight,
        k_bias,
        v_weight,
        v_bias,
        qkv_weight,
        qkv_bias,
        q_norm,
        k_norm,
        rotation,
        positions,
        cu_seqlens,
        alibi_slopes,
        sinks,
        out_weight,
        out_bias,
        residual,
        out,
        qkv_out,
        attended_out,
        lse_out,
        attended_norm,
        parallel,
        x_norm,
    ]
);

impl WithC for unsloth_attention_block_params {
    type Operation<'a> = Params<'a>;

    unsafe fn with<R>(&self, run: impl FnOnce(&Params<'_>) -> Result<R>) -> Result<R> {
        // SAFETY: the caller promises an entry of the counts for each rank.
        let group = unsafe { self.parallel.of_block(OP) }?;
        // SAFETY: the caller promises that the tensors are valid until the work has run.
        let mut params = unsafe {
            Params {
                parallel: group.as_ref().map(Group::parallel),
                output: output_from(OP, &self.residual, &self.out)?,
                workspace: workspace_from(OP, self.workspace, self.workspace_size)?,
                qkv_out: self.qkv_out.optional_output(OP, "qkv_out")?,
                attended_out: self.attended_out.optional_output(OP, "attended_out")?,
                lse_out: self.lse_out.optional_output(OP, "lse_out")?,
                ..self.of_input(self.x.input(OP, "x")?)?
            }
        };
        if self.cache.is_null() {
            return run(&params);
        }
        let mut cache = cache_from(OP, self.cache)?;
        let layer = count(OP, "layer", self.layer)?;
        let layer = match cache.has_batch() {
            true => cache.lend(layer),
            // Queries are answered for every batch, and a launch is refused.
            false => cache.describe(layer, params.num_rows()?),
        };
        params.cache = Some(layer.map_err(|error| error.within(OP))?);
        run(&params)
    }
}

impl unsloth_attention_block_params {
    /// The block of an input `x`, without a cache and without what it writes.
    ///
    /// # Safety
    /// The tensors are valid on the context's device while the result is used.
    pub(crate) unsafe fn of_input<'a>(&self, x: TensorRef<'a>) -> Result<Params<'a>> {
        // SAFETY: the caller's promise.
        unsafe { convert(self, x) }
    }
}

/// # Safety
/// The tensors are valid on the context's device while the result is used.
unsafe fn convert<'a>(p: &unsloth_attention_block_params, x: TensorRef<'a>) -> Result<Params<'a>> {
    let num_heads = count(OP, "num_heads", p.num_heads)?;
    let head_dim = count(OP, "head_dim", p.head_dim)?;
    let or = |name, value, default| match count(OP, name, value)? {
        0 => Ok::<_, Error>(default),
        n => Ok(n),
    };
    // SAFETY: the caller's promise.
    unsafe {
        let positions = match p.positions.optional_input(OP, "positions")? {
            None => Positions::From(p.position_offset),
            Some(positions) if p.position_offset == 0 => Positions::PerToken(positions),
            Some(_) => {
                let problem = text!("is {} and positions are there: set one", p.position_offset);
                return Err(Error::invalid(OP, "position_offset", problem));
            }
        };
        Ok(Params {
            parallel: None,
            x,
            x_norm: p.x_norm.optional_input(OP, "x_norm")?,
            num_heads,
            num_kv_heads: or("num_kv_heads", p.num_kv_heads, num_heads)?,
            head_dim,
            v_head_dim: or("v_head_dim", p.v_head_dim, head_dim)?,
            projections: projections(p)?,
            q_norm: p.q_norm.optional_input(OP, "q_norm")?,
            k_norm: p.k_norm.optional_input(OP, "k_norm")?,
            attended_norm: p.attended_norm.optional_input(OP, "attended_norm")?,
            norm_weight_offset: p.norm_weight_offset,
            norm_epsilon: p.norm_epsilon,
            rotation: match flag(OP, "rotate", p.rotate)? {
                false => None,
                true => Some(p.rotation.read(OP)?),
            },
            positions,
            cache: None,
            cu_seqlens: p.cu_seqlens.optional_input(OP, "cu_seqlens")?,
            max_seqlen: count(OP, "max_seqlen", p.max_seqlen)?,
            scale: p.scale,
            softcap: p.softcap,
            bidirectional: flag(OP, "bidirectional", p.bidirectional)?,
            window: count(OP, "window", p.window)?,
            alibi_slopes: p.alibi_slopes.optional_input(OP, "alibi_slopes")?,
            sinks: p.sinks.optional_input(OP, "sinks")?,
            out_projection: weights_from(
                OP,
                ("out_weight", "out_bias"),
                &p.out_weight,
                &p.out_bias,
            )?,
            output: Output::none(),
            workspace: Workspace::none(),
            qkv_out: None,
            attended_out: None,
            lse_out: None,
        })
    }
}

/// # Safety
/// The tensors are valid on the context's device while the result is used.
unsafe fn projections<'a>(p: &unsloth_attention_block_params) -> Result<Projections<'a>> {
    let apart = [
        ("q_weight", &p.q_weight),
        ("q_bias", &p.q_bias),
        ("k_weight", &p.k_weight),
        ("k_bias", &p.k_bias),
        ("v_weight", &p.v_weight),
        ("v_bias", &p.v_bias),
    ];
    // SAFETY: the caller's promise.
    unsafe {
        if !p.qkv_weight.is_absent() {
            if let Some((name, _)) = apart.iter().find(|(_, t)| !t.is_absent()) {
                let problem = "and qkv_weight are both there: set one";
                return Err(Error::invalid(OP, *name, problem));
            }
            let names = ("qkv_weight", "qkv_bias");
            let packed = weights_from(OP, names, &p.qkv_weight, &p.qkv_bias)?;
            return Ok(Projections::Packed(packed));
        }
        if p.q_weight.is_absent() {
            let problem = "and qkv_weight are absent, one is required";
            return Err(Error::invalid(OP, "q_weight", problem));
        }
        if !p.qkv_bias.is_absent() {
            let problem = "is there without qkv_weight";
            return Err(Error::invalid(OP, "qkv_bias", problem));
        }
        let weights =
            |i: usize| weights_from(OP, (apart[i].0, apart[i + 1].0), apart[i].1, apart[i + 1].1);
        Ok(Projections::Apart {
            q: weights(0)?,
            k: weights(2)?,
            v: weights(4)?,
        })
    }
}

/// Whether this call would run, and by which implementation (written to `implementation` unless
/// NULL). Data pointers and the workspace are not looked at. The status and message are those the
/// call itself would give.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `implementation` is NULL or
/// valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_attention_block_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_attention_block_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::supported(ctx, params, implementation) }
}

/// Writes to `workspace_size` the bytes of workspace with which the call is fastest: queries, keys
/// and values of all tokens and attention's output, each rounded up to 256 bytes, then the greater
/// of the workspaces of attention and of the projections. What is kept (`qkv_out`, `attended_out`)
/// takes no room in it, and makes all of it needed; queries and keys that are normalised then lie
/// there. Otherwise what only the projections ask for is optional, as
/// `unsloth_linear_workspace_size` says. With a cache the answer is for its current batch. Where it
/// has none, as before the first `unsloth_kv_cache_extend`, the answer is enough for every batch of
/// as many tokens as `x` has, whatever its sequences are. Data pointers and the workspace are not
/// looked at.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `workspace_size` is NULL or
/// valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_attention_block_workspace_size(
    ctx: *mut unsloth_context,
    params: *const unsloth_attention_block_params,
    workspace_size: *mut usize,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::workspace_size(ctx, params, workspace_size) }
}

/// Computes the block on `stream`. Neither allocates device memory nor synchronises, and may be
/// captured into a CUDA graph.
///
/// `out` may be `residual`; other overlaps with it are errors. With a cache, calling it twice for
/// one layer and batch writes the same places again.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors and workspace
/// are valid on the context's device until the work has run; `stream` is NULL or a live stream of
/// that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_attention_block_forward(
    ctx: *mut unsloth_context,
    params: *const unsloth_attention_block_params,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: this function's contract is that of the generic one.
    unsafe { operation::launch(ctx, params, stream) }
}
