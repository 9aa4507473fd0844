//! A training step that is made of this library's operations, as they answer for it.

use crate::context::Context;
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::layout::Layout;
use crate::ops::attention_block::{self, Projections};
use crate::ops::cross_entropy::{IGNORE_INDEX, Reduction};
use crate::ops::decoder_layer::{self, Checkpointing};
use crate::ops::linear::{Output, Weights};
use crate::ops::mlp::{self, GateUp};
use crate::ops::rope::{Positions, Rotation};
use crate::ops::swiglu::{Activation, GateOrder};
use crate::ops::{embedding, linear_cross_entropy, rms_norm};
use crate::optimizer::estimated_state_size;
use crate::tensor::{InOut, TensorMut, TensorRef, Workspace};
use crate::training::checkpoint;

use super::training::{OptimizerKind, Training, TrainingMemory};
use super::{OP, index, positive, product, sum};

/// What a training step of this library's operations takes on the device of `context`, to the byte:
///
/// ```text
/// weights, gradients, the optimizer's state
/// num_layers + 1 hidden states, and what each layer saves; or as a checkpoint plan has them
/// the last norm's output, the gradient of hidden states, a batch's ids, targets and positions
/// the largest workspace of embedding, decoder_layer, rms_norm and linear_cross_entropy
/// ```
///
/// with all of them allocated at once, as an engine does that captures a step into a graph. The
/// gradient of hidden states has one place, which layers take in turn. Hidden states begin at
/// multiples of 256 bytes. Gradients that are f32 are added to.
///
/// # Errors
/// As [`training_memory`](super::training_memory); the backend has no implementation of a layer, or
/// this library does not make such a step.
pub fn training_step_memory(context: &Context, t: &Training) -> Result<TrainingMemory> {
    let step = Step::new(context, t)?;
    let states = step.states()?;
    let saved =
        decoder_layer::saved_size(context, &step.layer(t.checkpointing)?).map_err(within)?;
    let (hidden_slots, saved_slots, segmented) = step.slots(states, saved as u64)?;
    let workspace = step.workspace_size(segmented).map_err(within)?;
    let (optimizer_state, master_weights) = step.optimizer()?;
    let (weights, gradients) = t.states()?;
    // What layers are adapted with lies in memory of one layer.
    let adapted = |dtype: DType| product("weights", &[t.adapted_parameters, dtype.size() as u64]);
    let one = step.bytes(t.dtype, &step.shape)?;
    let tokens = step.bytes(DType::I32, step.leading())?;
    let inputs = match t.packed_sequences {
        None => sum("inputs", &[tokens, tokens, 4])?,
        Some(most) => {
            let ends = product("inputs", &[sum("inputs", &[most, 1])?, 4])?;
            sum("inputs", &[tokens, tokens, tokens, ends, 4])?
        }
    };
    TrainingMemory {
        weights: sum("weights", &[weights, adapted(t.dtype)?])?,
        master_weights,
        gradients: sum("gradients", &[gradients, adapted(t.gradient_dtype)?])?,
        optimizer_state,
        saved_activations: sum(
            "activations",
            &[
                product("activations", &[hidden_slots, states])?,
                product("activations", &[saved_slots, saved as u64])?,
                one,
            ],
        )?,
        inputs: sum(
            "inputs",
            &[product("inputs", &[t.micro_batches, inputs])?, 4],
        )?,
        activation_gradients: one,
        workspace: workspace as u64,
        ..TrainingMemory::default()
    }
    .summed()
}

fn within(error: Error) -> Error {
    error.within(OP)
}

/// A tensor of which only shape and dtype are looked at.
fn described(dtype: DType, shape: &[usize]) -> Result<TensorRef<'static>> {
    // SAFETY: queries do not look at data, so NULL may stand for it.
    Ok(unsafe { TensorRef::from_raw(std::ptr::null(), dtype, Layout::contiguous(shape)?) })
}

fn written(dtype: DType, shape: &[usize]) -> Result<TensorMut<'static>> {
    // SAFETY: as in `described`.
    Ok(unsafe { TensorMut::from_raw(std::ptr::null_mut(), dtype, Layout::contiguous(shape)?) })
}

/// A step, with its sizes as operations take them.
struct Step<'a> {
    context: &'a Context,
    t: &'a Training,
    /// Of hidden states.
    shape: Vec3,
    /// Of matrices as layers read them.
    layer_dtype: DType,
    hidden: usize,
    vocab: usize,
    heads: [usize; 2],
    dims: [usize; 2],
    intermediate: usize,
}

/// Up to three dimensions.
type Vec3 = arrayvec::ArrayVec<usize, 3>;

impl<'a> Step<'a> {
    fn new(context: &'a Context, t: &'a Training) -> Result<Step<'a>> {
        t.model.parameters()?;
        let tokens = t.check()?;
        let refused = |name, problem: &'static str| Err(Error::invalid(OP, name, problem));
        if !t.flash_attention {
            return refused(
                "naive_attention",
                "is 1: this library's attention stores no probabilities",
            );
        }
        if t.optimizer == OptimizerKind::Adam8bit {
            return refused(
                "optimizer",
                "is 1 (adam 8-bit), which this library's steps do not have",
            );
        }
        let full = t.adapter_parameters.is_none();
        if full && t.model.tied_embeddings && t.gradient_dtype != DType::F32 {
            let problem = text!(
                "is {}: both gradients of a tied embedding are added up in f32",
                t.gradient_dtype
            );
            return Err(Error::invalid(OP, "gradient_dtype", problem));
        }
        let hidden = index("hidden_size", t.model.hidden_size)?;
        let shape: &[usize] = match t.packed_sequences {
            Some(most) => {
                positive("packed_sequences", most)?;
                &[index("tokens", tokens)?, hidden]
            }
            None => &[
                index("batch_size", t.batch_size)?,
                index("sequence_length", t.sequence_length)?,
                hidden,
            ],
        };
        Ok(Step {
            context,
            t,
            shape: shape.iter().copied().collect(),
            layer_dtype: match t.adapted_parameters {
                0 => t.weight_dtype,
                _ => t.dtype,
            },
            hidden,
            vocab: index("vocab_size", t.model.vocab_size)?,
            heads: [
                index("num_heads", t.model.num_heads)?,
                index("num_kv_heads", t.model.num_kv_heads)?,
            ],
            dims: [
                index("head_dim", t.model.head_dim)?,
                index("v_head_dim", t.model.v_head_dim)?,
            ],
            intermediate: index("intermediate_size", t.model.intermediate_size)?,
        })
    }

    /// Whether the model's own weights are trained.
    fn is_full(&self) -> bool {
        self.t.adapter_parameters.is_none()
    }

    fn accumulates(&self) -> bool {
        self.is_full() && self.t.gradient_dtype == DType::F32
    }

    /// Dimensions of tokens.
    fn leading(&self) -> &[usize] {
        &self.shape[..self.shape.len() - 1]
    }

    fn bytes(&self, dtype: DType, shape: &[usize]) -> Result<u64> {
        let mut sizes = shape.iter().map(|size| *size as u64);
        sizes.try_fold(dtype.size() as u64, |bytes, size| {
            product("activations", &[bytes, size])
        })
    }

    /// Bytes from one hidden state to the next.
    fn states(&self) -> Result<u64> {
        let bytes = self.bytes(self.t.dtype, &self.shape)?;
        bytes
            .checked_next_multiple_of(Workspace::ALIGNMENT as u64)
            .ok_or_else(|| super::overflow("activations"))
    }

    /// How many hidden states and layers' saved tensors are held, and whether layers run without
    /// saving.
    fn slots(&self, hidden_bytes: u64, saved_bytes: u64) -> Result<(u64, u64, bool)> {
        let layers = self.t.model.num_layers;
        let Some(every) = self.t.segment_layers else {
            return Ok((sum("num_layers", &[layers, 1])?, layers, false));
        };
        let plan = checkpoint::Plan::new(&checkpoint::Params {
            num_layers: index("num_layers", layers)?,
            every: index("segment_layers", positive("segment_layers", every)?)?,
            hidden_bytes,
            saved_bytes,
        })
        .map_err(within)?;
        let hidden = plan.num_hidden_slots() as u64;
        let saved = plan.num_saved_slots() as u64;
        Ok((hidden, saved, plan.num_recomputed() > 0))
    }

    /// Bytes of the optimizer's state without its masters, and those of masters.
    fn optimizer(&self) -> Result<(u64, u64)> {
        let moments = match self.t.optimizer {
            OptimizerKind::Sgd => 0,
            OptimizerKind::SgdMomentum => 1,
            _ => 2,
        };
        let mut parameters = arrayvec::ArrayVec::<_, 14>::new();
        for (dtype, elements, count) in self.t.trained()? {
            let what = "parameters";
            parameters.push((dtype, index(what, elements)?, index(what, count)?));
        }
        let (all, masters) =
            estimated_state_size(moments, self.t.master, &parameters).map_err(within)?;
        Ok(((all - masters) as u64, masters as u64))
    }

    fn weight(&self, shape: &[usize], has_bias: bool) -> Result<Weights<'static>> {
        Ok(Weights {
            weight: described(self.layer_dtype, shape)?,
            bias: self.vector(has_bias, shape[0])?,
        })
    }

    fn vector(&self, is_there: bool, size: usize) -> Result<Option<TensorRef<'static>>> {
        let vector = || described(self.t.vector_dtype, &[size]);
        is_there.then(vector).transpose()
    }

    /// The gradient of a parameter that is trained.
    fn gradient(&self, is_trained: bool, shape: &[usize]) -> Result<Option<TensorMut<'static>>> {
        let gradient = || written(self.t.gradient_dtype, shape);
        is_trained.then(gradient).transpose()
    }

    /// Rows of queries, keys and values.
    fn qkv(&self) -> usize {
        let ([heads, kv_heads], [dim, v_dim]) = (self.heads, self.dims);
        heads * dim + kv_heads * (dim + v_dim)
    }

    fn layer(&self, checkpointing: Checkpointing) -> Result<decoder_layer::Params<'static>> {
        let (model, hidden) = (&self.t.model, self.hidden);
        let ([num_heads, num_kv_heads], [head_dim, v_head_dim]) = (self.heads, self.dims);
        let x = described(self.t.dtype, &self.shape)?;
        let (positions, cu_seqlens) = match self.t.packed_sequences {
            None => (Positions::From(0), None),
            Some(most) => {
                let ends = index("packed_sequences", sum("packed_sequences", &[most, 1])?)?;
                let ends = described(DType::I32, &[ends])?;
                let positions = described(DType::I32, self.leading())?;
                (Positions::PerToken(positions), Some(ends))
            }
        };
        let attention = attention_block::Params {
            x_norm: None,
            parallel: None,
            x,
            num_heads,
            num_kv_heads,
            head_dim,
            v_head_dim,
            projections: Projections::Packed(self.weight(&[self.qkv(), hidden], model.qkv_bias)?),
            q_norm: self.vector(model.qk_norm, head_dim)?,
            k_norm: self.vector(model.qk_norm, head_dim)?,
            norm_weight_offset: 0.0,
            norm_epsilon: 1e-5,
            rotation: Some(Rotation::default()),
            positions,
            cache: None,
            cu_seqlens,
            max_seqlen: 0,
            scale: 0.0,
            softcap: 0.0,
            bidirectional: false,
            window: 0,
            alibi_slopes: None,
            sinks: None,
            attended_norm: None,
            out_projection: self.weight(&[hidden, num_heads * v_head_dim], model.output_bias)?,
            output: Output::none(),
            workspace: Workspace::none(),
            qkv_out: None,
            attended_out: None,
            lse_out: None,
        };
        let mlp = mlp::Params {
            x_norm: None,
            parallel: None,
            x,
            gate_up: GateUp::Packed {
                weights: self.weight(&[2 * self.intermediate, hidden], model.mlp_bias)?,
                order: GateOrder::GateFirst,
            },
            activation: Activation::default(),
            intermediate_norm: None,
            down: self.weight(&[hidden, self.intermediate], model.mlp_bias)?,
            output: Output::none(),
            workspace: Workspace::none(),
            gate_up_out: None,
        };
        let gains = described(self.t.vector_dtype, &[hidden])?;
        Ok(decoder_layer::Params {
            x,
            attention_norm: gains,
            mlp_norm: gains,
            norm_weight_offset: 0.0,
            norm_epsilon: 1e-5,
            attention,
            mlp,
            checkpointing,
            out: written(self.t.dtype, &self.shape)?,
            saved: Workspace::none(),
            workspace: Workspace::none(),
        })
    }

    fn layer_backward(&self) -> Result<decoder_layer::backward::Params<'static>> {
        let (model, hidden, full) = (&self.t.model, self.hidden, self.is_full());
        let matrices = full || self.t.adapted_parameters > 0;
        let attended = self.heads[0] * self.dims[1];
        let vector = |is_there, size| self.gradient(full && is_there, &[size]);
        let matrix = |shape| self.gradient(matrices, shape);
        Ok(decoder_layer::backward::Params {
            forward: self.layer(self.t.checkpointing)?,
            dout: InOut::InPlace(written(self.t.dtype, &self.shape)?),
            dattention_norm: vector(true, hidden)?,
            dmlp_norm: vector(true, hidden)?,
            attention: attention_block::backward::Gradients {
                dqkv_weight: matrix(&[self.qkv(), hidden])?,
                dqkv_bias: vector(model.qkv_bias, self.qkv())?,
                dq_norm: vector(model.qk_norm, self.dims[0])?,
                dk_norm: vector(model.qk_norm, self.dims[0])?,
                dout_weight: matrix(&[hidden, attended])?,
                dout_bias: vector(model.output_bias, hidden)?,
                ..Default::default()
            },
            mlp: mlp::backward::Gradients {
                dgate_up_weight: matrix(&[2 * self.intermediate, hidden])?,
                dgate_up_bias: vector(model.mlp_bias, 2 * self.intermediate)?,
                ddown_weight: matrix(&[hidden, self.intermediate])?,
                ddown_bias: vector(model.mlp_bias, hidden)?,
                ..Default::default()
            },
            accumulate: self.accumulates(),
            // Which takes no more.
            deterministic: false,
            workspace: Workspace::none(),
        })
    }

    fn loss(&self) -> Result<linear_cross_entropy::Params<'static>> {
        let table = [self.vocab, self.hidden];
        Ok(linear_cross_entropy::Params {
            vocabulary: None,
            x: described(self.t.dtype, &self.shape)?,
            weights: Weights {
                weight: described(self.t.weight_dtype, &table)?,
                bias: None,
            },
            targets: described(DType::I32, self.leading())?,
            loss: Some(written(DType::F32, &[1])?),
            losses: None,
            lse: None,
            dx: Some(written(self.t.dtype, &self.shape)?),
            dweight: self.gradient(self.is_full(), &table)?,
            dbias: None,
            accumulate: self.accumulates(),
            dloss: Some(described(DType::F32, &[1])?),
            denominator: Some(described(DType::F32, &[1])?),
            reduction: Reduction::Mean,
            ignore_index: IGNORE_INDEX,
            label_smoothing: 0.0,
            z_loss: 0.0,
            softcap: 0.0,
            chunk_tokens: index("chunk_tokens", self.t.chunk_tokens)?,
            workspace: Workspace::none(),
        })
    }

    /// The most that one call of the step asks for.
    fn workspace_size(&self, segmented: bool) -> Result<usize> {
        let (ctx, gains) = (self.context, [self.hidden]);
        let mut most = decoder_layer::workspace_size(ctx, &self.layer(self.t.checkpointing)?)?;
        let mut need = |size: usize| most = most.max(size);
        if segmented {
            // A layer that will run again saves nothing the first time.
            let layer = self.layer(Checkpointing::Full)?;
            need(decoder_layer::workspace_size(ctx, &layer)?);
        }
        let layer = self.layer_backward()?;
        need(decoder_layer::backward::workspace_size(ctx, &layer)?);
        need(linear_cross_entropy::workspace_size(ctx, &self.loss()?)?);
        let norm = rms_norm::backward::Params {
            x: described(self.t.dtype, &self.shape)?,
            dout: InOut::InPlace(written(self.t.dtype, &self.shape)?),
            dresidual: None,
            weight: self.vector(true, self.hidden)?,
            weight_offset: 0.0,
            epsilon: 1e-5,
            dweight: self.gradient(self.is_full(), &gains)?,
            accumulate: self.accumulates(),
            workspace: Workspace::none(),
        };
        need(rms_norm::backward::workspace_size(ctx, &norm)?);
        let table = self.gradient(self.is_full(), &[self.vocab, self.hidden])?;
        if let Some(dweight) = table {
            let embedding = embedding::backward::Params {
                vocabulary: None,
                dout: described(self.t.dtype, &self.shape)?,
                ids: described(DType::I32, self.leading())?,
                dweight,
                padding_idx: None,
                accumulate: self.accumulates(),
                workspace: Workspace::none(),
            };
            need(embedding::backward::workspace_size(ctx, &embedding)?);
        }
        Ok(most)
    }
}
