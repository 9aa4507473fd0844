//! Estimates of a training step.

use super::{OP, answer, count, count_or, float, model_from, unsloth_model_params};
use crate::error::{Error, Result, text};
use crate::estimate::{self, Checkpointing, OptimizerKind, Training};
use crate::ffi::context::{context_from, unsloth_context};
use crate::ffi::optimizer::{master_from, unsloth_master, unsloth_optimizer_kind};
use crate::ffi::params::{self, params};
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::unsloth_dtype;
use crate::ffi::{flag, guard};

/// Which activations are kept for the backward pass and which computed again. Gradients have the
/// same bits whatever is kept (on a GPU if they are `deterministic`).
///
/// Bytes are those that `unsloth_decoder_layer_saved_size` answers for a layer of Llama 3 8B in 16
/// bits, per token. A layer's input, 8192 bytes, is always kept, by the caller.
pub type unsloth_checkpointing = u32;
/// All are kept: 102,528 bytes.
pub const UNSLOTH_CHECKPOINTING_NONE: unsloth_checkpointing = 0;
/// All but attention's scores are kept (arXiv:2205.05198, section 5). Flash attention never stores
/// scores, so with it this is the same as keeping all.
pub const UNSLOTH_CHECKPOINTING_SELECTIVE: unsloth_checkpointing = 1;
/// Only each layer's input is kept, and the layer computed again (arXiv:1604.06174), for a third
/// more arithmetic.
pub const UNSLOTH_CHECKPOINTING_FULL: unsloth_checkpointing = 2;
/// What is made element by element is computed again, for little time: 86,144 bytes.
pub const UNSLOTH_CHECKPOINTING_ELEMENTWISE: unsloth_checkpointing = 3;
/// And gate and up, by their product: 28,800 bytes.
pub const UNSLOTH_CHECKPOINTING_MLP: unsloth_checkpointing = 4;
/// And queries, keys and values: 16,512 bytes. Attention's output stays, which is the dearest to
/// compute.
pub const UNSLOTH_CHECKPOINTING_PROJECTIONS: unsloth_checkpointing = 5;

/// A training step.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_training_memory_params {
    /// `sizeof(unsloth_training_memory_params)`.
    pub struct_size: u32,
    /// Of activations.
    pub dtype: unsloth_dtype,
    /// Of gradients of parameters; 0 for `dtype`.
    pub gradient_dtype: unsloth_dtype,
    /// One of `UNSLOTH_MASTER_*`: where trained 16-bit weights are kept in f32 (mixed precision,
    /// arXiv:1710.03740). With f32 weights there is nothing beside them.
    pub master_weights: unsloth_master,
    /// One of `UNSLOTH_OPTIMIZER_*`.
    pub optimizer: unsloth_optimizer_kind,
    /// One of `UNSLOTH_CHECKPOINTING_*`.
    pub checkpointing: unsloth_checkpointing,
    /// 1 if attention stores its probabilities, as plain implementations do; 0 for a log-sum-exp
    /// per query.
    pub naive_attention: u32,
    /// Zero.
    pub reserved: u32,
    /// The model.
    pub model: *const unsloth_model_params,
    /// Sequences of a batch.
    pub batch_size: i64,
    /// Tokens per sequence.
    pub sequence_length: i64,
    /// Parameters of adapters beside the model's frozen weights (LoRA, arXiv:2106.09685), which
    /// alone are trained: of them alone there are gradients, masters and optimizer state. 0 trains
    /// the model itself.
    pub adapter_parameters: i64,
    /// Of matrices; 0 for `dtype`.
    pub weight_dtype: unsloth_dtype,
    /// Of gains and biases; 0 for `weight_dtype`.
    pub vector_dtype: unsloth_dtype,
    /// Of adapters; 0 for `dtype`.
    pub adapter_dtype: unsloth_dtype,
    /// Zero.
    pub reserved2: u32,
    /// The most tokens whose logits are there at a time. 0 for all; with `ctx` for as many as
    /// `unsloth_linear_cross_entropy_forward` takes.
    pub chunk_tokens: i64,
    /// For a step of this library's operations on the device of this context, which answers for
    /// them to the byte; live until the call ends. NULL for an engine of operations of any kind,
    /// which is counted from shapes.
    pub ctx: *mut unsloth_context,
    /// With `ctx` alone: elements of the matrices of one layer that adapters are added to, where
    /// their sum, in `dtype`, and its gradient, in `gradient_dtype`, are made for one layer at a
    /// time. 0 where they are not made.
    pub adapted_parameters: i64,
    /// With `ctx` alone: tokens are packed without a batch, and are those of so many sequences at
    /// the most (`cu_seqlens`). 0 for `batch_size` sequences side by side.
    pub packed_sequences: i64,
    /// With `ctx` alone: layers in a segment of a plan by which layers run twice
    /// (`unsloth_checkpoint_plan`). 0 if none does.
    pub segment_layers: i64,
    /// With `ctx` alone: batches whose gradients are added up and whose inputs are all there at
    /// once, as one captured step has them; 0 for 1.
    pub micro_batches: i64,
}
params!(unsloth_training_memory_params, [reserved, reserved2]);

/// Bytes of a training step at its peak, by use. Left out are what a driver, its libraries (cuBLAS)
/// and allocators keep for themselves; and without a `ctx` what the backward pass holds for one
/// operation at a time.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_training_memory {
    /// `sizeof(unsloth_training_memory)`, set by the caller.
    pub struct_size: u32,
    /// Zero.
    pub reserved: u32,
    /// Weights, adapters and what is made of both included.
    pub weights: u64,
    /// What is kept beside trained 16-bit weights to have them in f32.
    pub master_weights: u64,
    /// Gradients of the trained weights.
    pub gradients: u64,
    /// What else the optimizer keeps.
    pub optimizer_state: u64,
    /// Activations kept from the forward to the backward pass: without a `ctx` counted as in
    /// arXiv:2205.05198, with it hidden states, what `unsloth_decoder_layer_saved_size` answers,
    /// and the last norm's output.
    pub saved_activations: u64,
    /// Activations of one layer that the backward pass computes again. With a `ctx` they are in
    /// `workspace`.
    pub recomputed_activations: u64,
    /// Logits, f32: `batch_size * sequence_length * vocab_size`, or of `chunk_tokens`. With a `ctx`
    /// they are in `workspace`.
    pub logits: u64,
    /// The sum.
    pub total: u64,
    /// With a `ctx`: ids, targets, positions, and where packed sequences begin; the loss and its
    /// divisor.
    pub inputs: u64,
    /// With a `ctx`: the gradient of hidden states.
    pub activation_gradients: u64,
    /// With a `ctx`: the most that one of the step's calls asks for.
    pub workspace: u64,
}
params!(unsloth_training_memory, [reserved]);

/// A checkpointing policy.
pub(in crate::ffi) fn checkpointing_from(
    op: &'static str,
    value: unsloth_checkpointing,
) -> Result<Checkpointing> {
    Checkpointing::from_raw(value).ok_or_else(|| {
        let problem = text!(
            "is {value}, allowed: 0 (none), 1 (selective), 2 (full), 3 (elementwise), 4 (mlp), \
             5 (projections)"
        );
        Error::invalid(op, "checkpointing", problem)
    })
}

/// Estimates a training step, before it or a part of it is there: of this library's operations on
/// the device of `params->ctx`, or of any engine's where that is NULL. Nothing is allocated on a
/// device or queued. The caller has set the result's `struct_size`
/// (`UNSLOTH_TRAINING_MEMORY_INIT`).
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes, and so does its `model`; its
/// `ctx` is NULL or a context's handle; `memory` is NULL or points to `memory->struct_size` bytes
/// valid for reads and writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_training_memory_estimate(
    params: *const unsloth_training_memory_params,
    memory: *mut unsloth_training_memory,
) -> unsloth_status {
    // SAFETY: the caller's promises.
    guard(OP, || unsafe {
        answer(memory, |out| {
            let p = params::read(OP, params)?;
            let optimizer = OptimizerKind::from_raw(p.optimizer).ok_or_else(|| {
                let problem = text!(
                    "is {}, allowed: 0 (adam), 1 (adam 8-bit), 2 (sgd), 3 (sgd with momentum)",
                    p.optimizer
                );
                Error::invalid(OP, "optimizer", problem)
            })?;
            let checkpointing = checkpointing_from(OP, p.checkpointing)?;
            let dtype = float("dtype", p.dtype)?;
            let float_or = |name, value, default| match value {
                0 => Ok(default),
                other => float(name, other),
            };
            let optional =
                |name, value| Ok::<_, Error>(Some(count(name, value)?).filter(|n| *n > 0));
            let weight_dtype = float_or("weight_dtype", p.weight_dtype, dtype)?;
            let training = Training {
                weight_dtype,
                vector_dtype: float_or("vector_dtype", p.vector_dtype, weight_dtype)?,
                adapter_dtype: float_or("adapter_dtype", p.adapter_dtype, dtype)?,
                gradient_dtype: float_or("gradient_dtype", p.gradient_dtype, dtype)?,
                master: master_from(OP, "master_weights", p.master_weights)?,
                optimizer,
                checkpointing,
                flash_attention: !flag(OP, "naive_attention", p.naive_attention)?,
                chunk_tokens: count("chunk_tokens", p.chunk_tokens)?,
                adapter_parameters: optional("adapter_parameters", p.adapter_parameters)?,
                adapted_parameters: count("adapted_parameters", p.adapted_parameters)?,
                packed_sequences: optional("packed_sequences", p.packed_sequences)?,
                segment_layers: optional("segment_layers", p.segment_layers)?,
                micro_batches: count_or("micro_batches", p.micro_batches, 1)?,
                ..Training::new(
                    model_from(p.model)?,
                    count("batch_size", p.batch_size)?,
                    count("sequence_length", p.sequence_length)?,
                    dtype,
                )
            };
            let m = if p.ctx.is_null() {
                estimate::training_memory(&training)?
            } else {
                let context = &context_from(OP, p.ctx)?.context;
                estimate::training_step_memory(context, &training)?
            };
            out.weights = m.weights;
            out.master_weights = m.master_weights;
            out.gradients = m.gradients;
            out.optimizer_state = m.optimizer_state;
            out.saved_activations = m.saved_activations;
            out.recomputed_activations = m.recomputed_activations;
            out.logits = m.logits;
            out.total = m.total;
            out.inputs = m.inputs;
            out.activation_gradients = m.activation_gradients;
            out.workspace = m.workspace;
            Ok(())
        })
    })
}
