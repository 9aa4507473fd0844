//! Memory estimation.

pub mod training;

pub(super) use training::checkpointing_from;
pub use training::*;

use std::ffi::c_char;

use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::estimate::{self, AttentionShape, Inference, Model};
use crate::ffi::context::{context_from, unsloth_context};
use crate::ffi::kv_cache::{config_from, unsloth_kv_cache_params};
use crate::ffi::parallel::unsloth_parallel;
use crate::ffi::params::{self, Params, params};
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::unsloth_dtype;
use crate::ffi::{check_out, flag, guard};

const OP: &str = "estimate";

/// A decoder-only transformer of the Llama family: RMSNorm before attention and before a gated MLP, rotary positions, grouped-query
/// attention.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_model_params {
    /// `sizeof(unsloth_model_params)`.
    pub struct_size: u32,
    /// 1 if the output projection is the embedding.
    pub tied_embeddings: u32,
    /// 1 if the query, key and value projections have biases (Qwen 2).
    pub qkv_bias: u32,
    /// 1 if attention's output projection has a bias.
    pub output_bias: u32,
    /// 1 if the MLP's three projections have biases.
    pub mlp_bias: u32,
    /// 1 if query and key heads are normalised, with one gain vector for queries and one for keys per layer (Qwen 3).
    pub qk_norm: u32,
    /// Entries of the vocabulary.
    pub vocab_size: i64,
    /// Components of the hidden state.
    pub hidden_size: i64,
    /// Components between the MLP's projections.
    pub intermediate_size: i64,
    /// Layers.
    pub num_layers: i64,
    /// Query heads per layer.
    pub num_heads: i64,
    /// Key and value heads per layer, a divisor of `num_heads`; 0 for `num_heads`.
    pub num_kv_heads: i64,
    /// Components of a query or key head; 0 for `hidden_size / num_heads`.
    pub head_dim: i64,
    /// Components of a value head; 0 for `head_dim`.
    pub v_head_dim: i64,
}
params!(unsloth_model_params, []);

/// Parameters of a model, by use.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_parameter_count {
    /// `sizeof(unsloth_parameter_count)`, set by the caller.
    pub struct_size: u32,
    /// Zero.
    pub reserved: u32,
    /// `vocab_size * hidden_size`.
    pub embedding: u64,
    /// Projections to queries, keys and values and of attention's output, with their biases, in all layers.
    pub attention: u64,
    /// Gate, up and down projections with their biases, in all layers.
    pub mlp: u64,
    /// Gains of all norms, the last one included.
    pub norms: u64,
    /// The output projection; 0 if it is the embedding.
    pub head: u64,
    /// The sum.
    pub total: u64,
}
params!(unsloth_parameter_count, [reserved]);

/// The shape of a batched attention.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_attention_memory_params {
    /// `sizeof(unsloth_attention_memory_params)`.
    pub struct_size: u32,
    /// Of queries, keys, values and output.
    pub dtype: unsloth_dtype,
    /// 1 if queries see keys up to their own position only.
    pub causal: u32,
    /// Zero.
    pub reserved: u32,
    /// Sequences.
    pub batch_size: i64,
    /// Queries per sequence.
    pub num_queries: i64,
    /// Keys per sequence; 0 for `num_queries`.
    pub num_keys: i64,
    /// Query heads.
    pub num_heads: i64,
    /// Key and value heads, a divisor of `num_heads`; 0 for `num_heads`.
    pub num_kv_heads: i64,
    /// Components of a query or key head.
    pub head_dim: i64,
    /// Components of a value head; 0 for `head_dim`.
    pub v_head_dim: i64,
}
params!(unsloth_attention_memory_params, [reserved]);

/// Bytes of attention, by use: of a plain implementation, which stores every score, and of this library's.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_attention_memory {
    /// `sizeof(unsloth_attention_memory)`, set by the caller.
    pub struct_size: u32,
    /// Zero.
    pub reserved: u32,
    /// Queries, keys and values.
    pub inputs: u64,
    /// The output.
    pub output: u64,
    /// Scores that a plain implementation stores: `batch_size * num_heads * num_queries * num_keys` elements.
    pub naive_scores: u64,
    /// Probabilities that it stores beside them: as many.
    pub naive_probabilities: u64,
    /// `inputs + output + naive_scores + naive_probabilities`.
    pub naive_total: u64,
    /// What `unsloth_attention_workspace_size` answers.
    pub flash_workspace: u64,
    /// The log-sum-exp kept for the backward pass, f32: `batch_size * num_heads * num_queries`.
    pub flash_lse: u64,
    /// `inputs + output + flash_workspace + flash_lse`.
    pub flash_total: u64,
}
params!(unsloth_attention_memory, [reserved]);

/// Bytes of a KV cache, by use.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_kv_cache_memory {
    /// `sizeof(unsloth_kv_cache_memory)`, set by the caller.
    pub struct_size: u32,
    /// Zero.
    pub reserved: u32,
    /// Key pages of all layers: `num_layers * num_pages * page_size * num_kv_heads * head_dim` elements.
    pub keys: u64,
    /// Value pages of all layers, with `v_head_dim`.
    pub values: u64,
    /// Block tables, lengths and positions: `max_batch_size * (ceil(max_sequence_length / page_size) + 2) + 1 + max_batch_tokens`
    /// integers of 32 bits.
    pub tables: u64,
    /// `keys + values + tables`: what `unsloth_kv_cache_create` allocates on the device.
    pub total: u64,
    /// On the host, beside `total`: what the cache knows of its pages, of its sequences and of a
    /// batch, whose tables it has here too. Counted for `max_batch_size` sequences that hold every
    /// page once; a further one takes 64 bytes or so, and 4 for each page that it shares.
    pub host: u64,
    /// On the host, for a cache on a GPU alone: page-locked memory, from which tables are copied.
    pub page_locked: u64,
}
params!(unsloth_kv_cache_memory, [reserved]);

/// An engine that runs a model by this library's blocks.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_inference_memory_params {
    /// `sizeof(unsloth_inference_memory_params)`.
    pub struct_size: u32,
    /// Of the weights: a float, or one in blocks, with gains and biases of f32.
    pub weight_dtype: unsloth_dtype,
    /// Of hidden states.
    pub dtype: unsloth_dtype,
    /// Zero.
    pub reserved: u32,
    /// The model.
    pub model: *const unsloth_model_params,
    /// The KV cache, whose layers and heads are the model's.
    pub kv_cache: *const unsloth_kv_cache_params,
    /// Sequences of the largest pass.
    pub batch_size: i64,
    /// Tokens of the largest pass: those of a prompt.
    pub num_tokens: i64,
    /// Tokens of one pass whose logits are computed: the last of each sequence to continue it, all to score a text.
    pub num_logits: i64,
    /// Ranks that divide the weights as `unsloth_shard_get` says, not sequence parallel. Figures are then this rank's: `model` is
    /// whole, `kv_cache` has the rank's key heads, logits are of its rows of the vocabulary, and `workspace` is what divided blocks
    /// ask for.
    pub parallel: unsloth_parallel,
}
params!(unsloth_inference_memory_params, [reserved, parallel]);

/// Bytes of an engine at its peak, by use.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_inference_memory {
    /// `sizeof(unsloth_inference_memory)`, set by the caller.
    pub struct_size: u32,
    /// Zero.
    pub reserved: u32,
    /// Weights.
    pub weights: u64,
    /// The cache: what `unsloth_kv_cache_create` allocates on the device.
    /// `unsloth_kv_cache_memory_estimate` has the rest, which is on the host.
    pub kv_cache: u64,
    /// Hidden states and their normalised copy: `2 * num_tokens * hidden_size` elements.
    pub activations: u64,
    /// The largest of what `unsloth_attention_block_workspace_size` with packed projections, `unsloth_mlp_workspace_size` and, for the
    /// logits, `unsloth_linear_workspace_size` answer.
    pub workspace: u64,
    /// Logits, f32: `num_logits * vocab_size`.
    pub logits: u64,
    /// The sum.
    pub total: u64,
}
params!(unsloth_inference_memory, [reserved]);

fn count(name: &'static str, value: i64) -> Result<u64> {
    u64::try_from(value)
        .map_err(|_| Error::invalid(OP, name, text!("is {value}, at least 0 is needed")))
}

/// A count whose zero stands for a default.
fn count_or(name: &'static str, value: i64, default: u64) -> Result<u64> {
    match count(name, value)? {
        0 => Ok(default),
        n => Ok(n),
    }
}

fn float(name: &'static str, dtype: unsloth_dtype) -> Result<DType> {
    DType::from_raw(dtype)
        .filter(|d| d.is_float())
        .ok_or_else(|| {
            let problem = text!("is {dtype}, allowed: 1 (f32), 2 (f16), 3 (bf16)");
            Error::invalid(OP, name, problem)
        })
}

fn weight(name: &'static str, dtype: unsloth_dtype) -> Result<DType> {
    let known = DType::from_raw(dtype).filter(|d| d.is_float() || d.is_in_blocks());
    known.ok_or_else(|| {
        let problem =
            text!("is {dtype}, allowed: 1 (f32), 2 (f16), 3 (bf16), and formats in blocks");
        Error::invalid(OP, name, problem)
    })
}

/// # Safety
/// `model` is NULL or points to `struct_size` readable bytes.
unsafe fn model_from(model: *const unsloth_model_params) -> Result<Model> {
    if model.is_null() {
        return Err(Error::NullPointer {
            op: OP,
            argument: "model".into(),
        });
    }
    // SAFETY: the caller's promise.
    let p = unsafe { params::read(OP, model) }?;
    let hidden_size = count("hidden_size", p.hidden_size)?;
    let num_heads = count("num_heads", p.num_heads)?;
    let head_dim = match (
        count("head_dim", p.head_dim)?,
        hidden_size.checked_rem(num_heads),
    ) {
        (0, Some(0)) => hidden_size / num_heads,
        (0, Some(_)) => {
            let problem = text!(
                "is 0, and hidden_size {hidden_size} does not divide by num_heads {num_heads}"
            );
            return Err(Error::invalid(OP, "head_dim", problem));
        }
        (n, _) => n,
    };
    Ok(Model {
        vocab_size: count("vocab_size", p.vocab_size)?,
        hidden_size,
        intermediate_size: count("intermediate_size", p.intermediate_size)?,
        num_layers: count("num_layers", p.num_layers)?,
        num_heads,
        num_kv_heads: count_or("num_kv_heads", p.num_kv_heads, num_heads)?,
        head_dim,
        v_head_dim: count_or("v_head_dim", p.v_head_dim, head_dim)?,
        tied_embeddings: flag(OP, "tied_embeddings", p.tied_embeddings)?,
        qkv_bias: flag(OP, "qkv_bias", p.qkv_bias)?,
        output_bias: flag(OP, "output_bias", p.output_bias)?,
        mlp_bias: flag(OP, "mlp_bias", p.mlp_bias)?,
        qk_norm: flag(OP, "qk_norm", p.qk_norm)?,
    })
}

/// Runs `fill` on a copy of the caller's result struct and writes it back.
///
/// # Safety
/// `out` is NULL or points to `struct_size` bytes valid for reads and writes.
unsafe fn answer<T: Params>(out: *mut T, fill: impl FnOnce(&mut T) -> Result<()>) -> Result<()> {
    check_out(OP, "memory", out)?;
    // SAFETY: the caller's promise.
    unsafe {
        let mut value = params::read(OP, out.cast_const())?;
        fill(&mut value)?;
        params::write(&value, out);
    }
    Ok(())
}

/// Counts a model's parameters; the caller has set the result's `struct_size` (`UNSLOTH_PARAMETER_COUNT_INIT`).
///
/// # Safety
/// `model` is NULL or points to `model->struct_size` readable bytes; `parameters` is NULL or points to `parameters->struct_size` bytes
/// valid for reads and writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_model_parameters_count(
    model: *const unsloth_model_params,
    parameters: *mut unsloth_parameter_count,
) -> unsloth_status {
    // SAFETY: the caller's promises.
    guard(OP, || unsafe {
        answer(parameters, |out| {
            let count = model_from(model)?.parameters()?;
            out.embedding = count.embedding;
            out.attention = count.attention;
            out.mlp = count.mlp;
            out.norms = count.norms;
            out.head = count.head;
            out.total = count.total;
            Ok(())
        })
    })
}

/// Estimates attention on the context's device, by a plain implementation and by this library; the caller has set the result's
/// `struct_size` (`UNSLOTH_ATTENTION_MEMORY_INIT`).
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `memory` is NULL or points to `memory->struct_size` bytes valid
/// for reads and writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_attention_memory_estimate(
    ctx: *mut unsloth_context,
    params: *const unsloth_attention_memory_params,
    memory: *mut unsloth_attention_memory,
) -> unsloth_status {
    // SAFETY: the caller's promises.
    guard(OP, || unsafe {
        answer(memory, |out| {
            let context = &context_from(OP, ctx)?.context;
            let p = params::read(OP, params)?;
            let num_queries = count("num_queries", p.num_queries)?;
            let num_heads = count("num_heads", p.num_heads)?;
            let head_dim = count("head_dim", p.head_dim)?;
            let shape = AttentionShape {
                batch_size: count("batch_size", p.batch_size)?,
                num_queries,
                num_keys: count_or("num_keys", p.num_keys, num_queries)?,
                num_heads,
                num_kv_heads: count_or("num_kv_heads", p.num_kv_heads, num_heads)?,
                head_dim,
                v_head_dim: count_or("v_head_dim", p.v_head_dim, head_dim)?,
                dtype: float("dtype", p.dtype)?,
                causal: flag(OP, "causal", p.causal)?,
            };
            let m = estimate::attention_memory(context, &shape)?;
            out.inputs = m.inputs;
            out.output = m.output;
            out.naive_scores = m.naive_scores;
            out.naive_probabilities = m.naive_probabilities;
            out.naive_total = m.naive_total;
            out.flash_workspace = m.flash_workspace;
            out.flash_lse = m.flash_lse;
            out.flash_total = m.flash_total;
            Ok(())
        })
    })
}

/// Estimates a KV cache, exactly; the caller has set the result's `struct_size` (`UNSLOTH_KV_CACHE_MEMORY_INIT`).
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `memory` is NULL or points to `memory->struct_size` bytes valid
/// for reads and writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_kv_cache_memory_estimate(
    params: *const unsloth_kv_cache_params,
    memory: *mut unsloth_kv_cache_memory,
) -> unsloth_status {
    // SAFETY: the caller's promises.
    guard(OP, || unsafe {
        answer(memory, |out| {
            let size = config_from(OP, &params::read(OP, params)?)?.size()?;
            out.keys = size.keys;
            out.values = size.values;
            out.tables = size.tables;
            out.host = size.host;
            out.page_locked = size.page_locked;
            out.total = size.total();
            Ok(())
        })
    })
}

/// Estimates inference on the context's device; the caller has set the result's `struct_size` (`UNSLOTH_INFERENCE_MEMORY_INIT`).
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes, and so do its pointers; `parallel.row_counts` is NULL or has an
/// entry for each rank; `memory` is NULL or points to `memory->struct_size` bytes valid for reads and writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_inference_memory_estimate(
    ctx: *mut unsloth_context,
    params: *const unsloth_inference_memory_params,
    memory: *mut unsloth_inference_memory,
) -> unsloth_status {
    // SAFETY: the caller's promises.
    guard(OP, || unsafe {
        answer(memory, |out| {
            let context = &context_from(OP, ctx)?.context;
            let p = params::read(OP, params)?;
            if p.kv_cache.is_null() {
                return Err(Error::NullPointer {
                    op: OP,
                    argument: "kv_cache".into(),
                });
            }
            let inference = Inference {
                model: model_from(p.model)?,
                weight_dtype: weight("weight_dtype", p.weight_dtype)?,
                dtype: float("dtype", p.dtype)?,
                cache: config_from(OP, &params::read(OP, p.kv_cache)?)?,
                batch_size: count("batch_size", p.batch_size)?,
                num_tokens: count("num_tokens", p.num_tokens)?,
                num_logits: count("num_logits", p.num_logits)?,
            };
            let m = match p.parallel.of_block(OP)? {
                Some(group) => {
                    estimate::inference_memory_of_rank(context, &inference, &group.parallel())?
                }
                None => estimate::inference_memory(context, &inference)?,
            };
            out.weights = m.weights;
            out.kv_cache = m.kv_cache;
            out.activations = m.activations;
            out.workspace = m.workspace;
            out.logits = m.logits;
            out.total = m.total;
            Ok(())
        })
    })
}

/// Writes a number of bytes for people, such as `1.50 GiB`, NUL-terminated and cut to `capacity` bytes: three significant digits and
/// a binary unit. Returns the length of the whole text without its NUL; 32 bytes are always enough.
///
/// # Safety
/// `buffer` is NULL or has room for `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_format_bytes(
    bytes: u64,
    buffer: *mut c_char,
    capacity: usize,
) -> usize {
    let text = estimate::in_words(bytes);
    if !buffer.is_null() && capacity > 0 {
        let len = text.len().min(capacity - 1);
        // SAFETY: `len + 1 <= capacity`, and the caller promises that much room.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr().cast(), buffer, len);
            *buffer.add(len) = 0;
        }
    }
    text.len()
}
