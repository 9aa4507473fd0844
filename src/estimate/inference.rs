//! Inference.

use crate::comm::shard::{Kind, Params as Part, Shard, shard};
use crate::context::Context;
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::kv_cache::Config;
use crate::layout::Layout;
use crate::ops::linear;
use crate::ops::linear::{Output, Weights};
use crate::ops::mlp::{self, GateUp};
use crate::ops::parallel::{Parallel, Partition};
use crate::ops::swiglu::Activation;
use crate::tensor::{TensorMut, TensorRef, Workspace};

use super::block;
use super::model::Model;
use super::{OP, float_size, index, positive, product, sum};

/// An engine that runs a model by this library's blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inference {
    /// The model.
    pub model: Model,
    /// Of the weights: a float, or one in blocks, with gains and biases of f32.
    pub weight_dtype: DType,
    /// Of hidden states.
    pub dtype: DType,
    /// The KV cache, whose layers and heads are the model's.
    pub cache: Config,
    /// Sequences of the largest pass.
    pub batch_size: u64,
    /// Tokens of the largest pass: those of a prompt.
    pub num_tokens: u64,
    /// Tokens of one pass whose logits are computed: the last of each sequence to continue it, all
    /// to score a text.
    pub num_logits: u64,
}

/// Bytes of an engine at its peak, by use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InferenceMemory {
    /// Weights.
    pub weights: u64,
    /// The cache: what [`KvCache::new`](crate::kv_cache::KvCache::new) allocates on the device.
    /// [`Config::size`] has the rest, which is on the host.
    pub kv_cache: u64,
    /// Hidden states and their normalised copy: `2 · num_tokens · hidden_size` elements.
    pub activations: u64,
    /// The largest of the workspaces that [`ops::attention_block`](crate::ops::attention_block)
    /// with packed projections, [`ops::mlp`](crate::ops::mlp) and, for the logits,
    /// [`ops::linear`](crate::ops::linear) ask for: what their queries answer.
    pub workspace: u64,
    /// Logits, f32: `num_logits · vocab_size`.
    pub logits: u64,
    /// The sum.
    pub total: u64,
}

/// What inference takes on the device of `context`.
///
/// # Errors
/// A size is zero; `dtype` is no float, `weight_dtype` neither a float nor in blocks; rows of weights are
/// not whole blocks; the cache does not suit the model, or the sum overflows.
pub fn inference_memory(context: &Context, i: &Inference) -> Result<InferenceMemory> {
    memory(context, i, None)
}

/// The same on this rank of a group that divides the weights, as [`shard`] says: `i` has the whole model, and a
/// cache of the rank's key heads. Weights are the rank's parts, `workspace` is what the divided blocks ask
/// for, and logits are of the rank's rows of the vocabulary. What a group has for itself is not counted.
///
/// # Errors
/// As [`inference_memory`]; the group is of another context or sequence parallel, or cannot divide the model.
pub fn inference_memory_of_rank(
    context: &Context,
    i: &Inference,
    parallel: &Parallel<'_>,
) -> Result<InferenceMemory> {
    if parallel.sequence {
        let problem = "divides rows, which inference is not asked about";
        return Err(Error::unsupported(OP, "sequence", problem));
    }
    let part = Inference {
        model: part_of(i, parallel)?,
        ..i.clone()
    };
    memory(context, &part, Some(parallel))
}

/// A rank's part of the model.
fn part_of(i: &Inference, parallel: &Parallel<'_>) -> Result<Model> {
    let m = &i.model;
    let (hidden, intermediate) = (
        index("hidden_size", m.hidden_size)?,
        index("intermediate_size", m.intermediate_size)?,
    );
    let (heads, kv_heads) = (
        index("num_heads", m.num_heads)?,
        index("num_kv_heads", m.num_kv_heads)?,
    );
    let (head_dim, v_head_dim) = (
        index("head_dim", m.head_dim)?,
        index("v_head_dim", m.v_head_dim)?,
    );
    let q_size = index("num_heads", m.q_size()?)?;
    let divided = |kind, shape| -> Result<Shard> {
        let part = Part {
            dtype: i.weight_dtype,
            heads: (heads, kv_heads),
            dims: (head_dim, v_head_dim),
            ..Part::new(kind, shape, parallel.comm.rank(), parallel.comm.size())
        };
        shard(&part).map_err(|error| error.within(OP))
    };
    let vocabulary = [index("vocab_size", m.vocab_size)?, hidden];
    let attention = divided(Kind::Query, [q_size, hidden])?;
    Ok(Model {
        vocab_size: divided(Kind::Vocabulary, vocabulary)?.rows as u64,
        intermediate_size: divided(Kind::Row, [hidden, intermediate])?.columns as u64,
        num_heads: attention.heads.0 as u64,
        num_kv_heads: attention.heads.1 as u64,
        ..*m
    })
}

/// What a whole model takes, or a rank's part of it.
fn memory(
    context: &Context,
    i: &Inference,
    parallel: Option<&Parallel<'_>>,
) -> Result<InferenceMemory> {
    let weights = weight_bytes(i)?;
    let size = float_size("dtype", i.dtype)?;
    for (name, value, of_model) in [
        ("num_layers", i.cache.num_layers, i.model.num_layers),
        ("num_kv_heads", i.cache.num_kv_heads, i.model.num_kv_heads),
        ("head_dim", i.cache.head_dim, i.model.head_dim),
        ("v_head_dim", i.cache.v_head_dim, i.model.v_head_dim),
    ] {
        if value as u64 != of_model {
            let problem = text!("of the cache is {value}, the model has {of_model}");
            return Err(Error::invalid(OP, name, problem));
        }
    }
    positive("batch_size", i.batch_size)?;
    positive("num_tokens", i.num_tokens)?;
    let attention = block::workspace_size(
        context,
        &i.cache,
        block::Sizes {
            hidden: index("hidden_size", i.model.hidden_size)?,
            num_heads: index("num_heads", i.model.num_heads)?,
            dtype: i.dtype,
            weight_dtype: i.weight_dtype,
            num_sequences: index("batch_size", i.batch_size)?,
            num_tokens: index("num_tokens", i.num_tokens)?,
        },
        parallel,
    )
    .map_err(|error| error.within(OP))?;
    let mlp = mlp_workspace_size(context, i, parallel).map_err(|error| error.within(OP))?;
    let head = linear::estimated_workspace_size(
        context,
        index("num_logits", i.num_logits)?,
        (
            index("vocab_size", i.model.vocab_size)?,
            index("hidden_size", i.model.hidden_size)?,
        ),
        (i.dtype, i.weight_dtype, DType::F32),
        parallel.map(|group| Parallel {
            partition: Partition::Column,
            ..*group
        }),
    )
    .map_err(|error| error.within(OP))?;
    let mut memory = InferenceMemory {
        weights,
        kv_cache: i.cache.size()?.total(),
        activations: product("activations", &[2, i.num_tokens, i.model.hidden_size, size])?,
        workspace: attention.max(mlp).max(head) as u64,
        logits: product("logits", &[i.num_logits, i.model.vocab_size, 4])?,
        total: 0,
    };
    memory.total = sum(
        "total",
        &[
            memory.weights,
            memory.kv_cache,
            memory.activations,
            memory.workspace,
            memory.logits,
        ],
    )?;
    Ok(memory)
}

/// Bytes of the weights.
fn weight_bytes(i: &Inference) -> Result<u64> {
    let parameters = i.model.parameters()?.total;
    if !i.weight_dtype.is_in_blocks() {
        let size = float_size("weight_dtype", i.weight_dtype)?;
        return product("weights", &[parameters, size]);
    }
    let (len, bytes) = i.weight_dtype.block();
    let mut total = 0;
    for tensor in i.model.tensors()? {
        // Rows that are not whole blocks are refused where a workspace is asked for.
        let size = match tensor.is_vector {
            true => product("weights", &[tensor.elements, size_of::<f32>() as u64])?,
            false => product(
                "weights",
                &[tensor.elements.div_ceil(len as u64), bytes as u64],
            )?,
        };
        total = sum(
            "weights",
            &[total, product("weights", &[size, tensor.count])?],
        )?;
    }
    Ok(total)
}

/// What the MLP's query answers for the largest pass.
fn mlp_workspace_size(
    context: &Context,
    i: &Inference,
    parallel: Option<&Parallel<'_>>,
) -> Result<usize> {
    let (tokens, hidden, intermediate) = (
        index("num_tokens", i.num_tokens)?,
        index("hidden_size", i.model.hidden_size)?,
        index("intermediate_size", i.model.intermediate_size)?,
    );
    let described = |dtype, shape: [usize; 2]| -> Result<TensorRef<'static>> {
        // SAFETY: queries do not look at data.
        Ok(unsafe { TensorRef::from_raw(std::ptr::null(), dtype, Layout::contiguous(&shape)?) })
    };
    let weights = |rows, columns| -> Result<Weights<'static>> {
        Ok(linear::Weights {
            weight: described(i.weight_dtype, [rows, columns])?,
            bias: None,
        })
    };
    let layout = Layout::contiguous(&[tokens, hidden])?;
    // SAFETY: as above.
    let out = unsafe { TensorMut::from_raw(std::ptr::null_mut(), i.dtype, layout) };
    let params = mlp::Params {
        x_norm: None,
        parallel: parallel.copied(),
        x: described(i.dtype, [tokens, hidden])?,
        gate_up: GateUp::Apart {
            gate: weights(intermediate, hidden)?,
            up: weights(intermediate, hidden)?,
        },
        activation: Activation::default(),
        intermediate_norm: None,
        down: weights(hidden, intermediate)?,
        output: Output::Write(out),
        workspace: Workspace::none(),
        gate_up_out: None,
    };
    mlp::workspace_size(context, &params)
}
