//! Training.

use arrayvec::ArrayVec;

use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::optimizer::Master;

use super::model::{Model, Tensor};
use super::{OP, float_size, positive, product, sum};
pub use crate::problem::decoder_layer::Checkpointing;

/// What an optimizer keeps for each trained parameter. The discriminants are those of the C ABI
/// (`UNSLOTH_OPTIMIZER_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum OptimizerKind {
    /// Adam or AdamW (arXiv:1412.6980, arXiv:1711.05101): two f32 moments, 8 bytes.
    #[default]
    Adam = 0,
    /// AdamW with 8-bit moments in blocks of 256 with an f32 scale each (Dettmers et al. 2022,
    /// arXiv:2110.02861; the block size is that of bitsandbytes): 2 bytes and 1/32. Small tensors,
    /// which bitsandbytes keeps in f32, are counted alike.
    Adam8bit = 1,
    /// Stochastic gradient descent: nothing.
    Sgd = 2,
    /// Stochastic gradient descent with momentum: one f32, 4 bytes.
    SgdMomentum = 3,
}

impl OptimizerKind {
    /// The optimizer with this C ABI value.
    pub fn from_raw(value: u32) -> Option<OptimizerKind> {
        use OptimizerKind::{Adam, Adam8bit, Sgd, SgdMomentum};
        [Adam, Adam8bit, Sgd, SgdMomentum]
            .into_iter()
            .find(|o| *o as u32 == value)
    }

    fn state_bytes(self, parameters: u64) -> Result<u64> {
        let what = "optimizer state";
        match self {
            OptimizerKind::Adam => product(what, &[8, parameters]),
            OptimizerKind::Adam8bit => {
                let scales = product(what, &[2 * 4, parameters.div_ceil(256)])?;
                sum(what, &[product(what, &[2, parameters])?, scales])
            }
            OptimizerKind::Sgd => Ok(0),
            OptimizerKind::SgdMomentum => product(what, &[4, parameters]),
        }
    }
}

/// A training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Training {
    /// The model.
    pub model: Model,
    /// Sequences of a batch.
    pub batch_size: u64,
    /// Tokens per sequence.
    pub sequence_length: u64,
    /// Of activations.
    pub dtype: DType,
    /// Of matrices.
    pub weight_dtype: DType,
    /// Of gains and biases.
    pub vector_dtype: DType,
    /// Of gradients of parameters.
    pub gradient_dtype: DType,
    /// Where trained 16-bit weights are kept in f32 (mixed precision, arXiv:1710.03740). With f32
    /// weights there is nothing beside them.
    pub master: Master,
    /// The optimizer.
    pub optimizer: OptimizerKind,
    /// Which activations are kept.
    pub checkpointing: Checkpointing,
    /// Attention stores a log-sum-exp per query in place of its probabilities.
    pub flash_attention: bool,
    /// The most tokens whose logits are there at a time. 0 for all of them; in a step of this
    /// library's for as many as [`linear_cross_entropy`](crate::ops::linear_cross_entropy) takes.
    pub chunk_tokens: u64,
    /// Parameters of adapters beside the model's frozen weights (LoRA, arXiv:2106.09685), which
    /// alone are trained: of them alone there are gradients, masters and optimizer state. `None`
    /// trains the model itself.
    pub adapter_parameters: Option<u64>,
    /// Of adapters.
    pub adapter_dtype: DType,
    /// In a step of this library's alone: elements of the matrices of one layer that adapters are
    /// added to, where their sum, in `dtype`, and its gradient, in `gradient_dtype`, are made for one
    /// layer at a time. 0 where they are not made.
    pub adapted_parameters: u64,
    /// In a step of this library's alone: tokens are packed without a batch, and are those of so
    /// many sequences at the most (`cu_seqlens`).
    pub packed_sequences: Option<u64>,
    /// In a step of this library's alone: layers in a segment of a
    /// [plan](crate::training::checkpoint) by which layers run twice. `None` if none does.
    pub segment_layers: Option<u64>,
    /// In a step of this library's alone: batches whose gradients are added up and whose inputs are
    /// all there at once, as one captured step has them.
    pub micro_batches: u64,
}

impl Training {
    /// A step with AdamW, f32 gradients and f32 masters of weights of this dtype, that keeps all
    /// activations and stores no probabilities.
    pub fn new(model: Model, batch_size: u64, sequence_length: u64, dtype: DType) -> Training {
        Training {
            model,
            batch_size,
            sequence_length,
            dtype,
            weight_dtype: dtype,
            vector_dtype: dtype,
            gradient_dtype: DType::F32,
            master: Master::F32,
            optimizer: OptimizerKind::Adam,
            checkpointing: Checkpointing::None,
            flash_attention: true,
            chunk_tokens: 0,
            adapter_parameters: None,
            adapter_dtype: dtype,
            adapted_parameters: 0,
            packed_sequences: None,
            segment_layers: None,
            micro_batches: 1,
        }
    }

    /// Checks what both counts look at; gives the number of tokens.
    pub(super) fn check(&self) -> Result<u64> {
        for (name, dtype) in [
            ("dtype", self.dtype),
            ("weight_dtype", self.weight_dtype),
            ("vector_dtype", self.vector_dtype),
            ("gradient_dtype", self.gradient_dtype),
            ("adapter_dtype", self.adapter_dtype),
        ] {
            float_size(name, dtype)?;
        }
        product(
            "tokens",
            &[
                positive("batch_size", self.batch_size)?,
                positive("sequence_length", self.sequence_length)?,
            ],
        )
    }

    /// Dtype, elements and count of the model's tensors.
    fn of_model(&self) -> Result<Shapes> {
        let tensors = self.model.tensors()?.into_iter();
        let of = |t: Tensor| match t.is_vector {
            true => (self.vector_dtype, t.elements, t.count),
            false => (self.weight_dtype, t.elements, t.count),
        };
        Ok(tensors.map(of).collect())
    }

    /// Those of what is trained; of adapters as of one tensor.
    pub(super) fn trained(&self) -> Result<Shapes> {
        match self.adapter_parameters {
            Some(parameters) => Ok([(self.adapter_dtype, parameters, 1)].into_iter().collect()),
            None => self.of_model(),
        }
    }

    /// Bytes of weights and of gradients.
    pub(super) fn states(&self) -> Result<(u64, u64)> {
        let bytes = |shapes: &Shapes, dtype: Option<DType>| {
            shapes.iter().try_fold(0, |total, (own, elements, count)| {
                let size = dtype.unwrap_or(*own).size() as u64;
                let bytes = product("weights", &[*elements, *count, size])?;
                sum("weights", &[total, bytes])
            })
        };
        let mut weights = bytes(&self.of_model()?, None)?;
        let trained = self.trained()?;
        if self.adapter_parameters.is_some() {
            weights = sum("weights", &[weights, bytes(&trained, None)?])?;
        }
        Ok((weights, bytes(&trained, Some(self.gradient_dtype))?))
    }
}

/// Dtype, elements and count of tensors.
pub(super) type Shapes = ArrayVec<(DType, u64, u64), 14>;

/// Bytes of a training step at its peak, by use.
///
/// Left out are what a driver, its libraries and allocators keep for themselves; and by
/// [`training_memory`] what the backward pass holds for one operation at a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrainingMemory {
    /// Weights, adapters and what is made of both included.
    pub weights: u64,
    /// What is kept beside trained 16-bit weights to have them in f32.
    pub master_weights: u64,
    /// Gradients of the trained weights.
    pub gradients: u64,
    /// What else the optimizer keeps.
    pub optimizer_state: u64,
    /// Activations kept from the forward to the backward pass.
    pub saved_activations: u64,
    /// Activations of one layer that the backward pass computes again. In a step of this library's
    /// they are in its workspace.
    pub recomputed_activations: u64,
    /// Logits, f32: `batch_size · sequence_length · vocab_size`, or of `chunk_tokens`. In a step of
    /// this library's they are in its workspace.
    pub logits: u64,
    /// Of a step of this library's: ids, targets, positions, and where packed sequences begin; the
    /// loss and its divisor.
    pub inputs: u64,
    /// Of a step of this library's: the gradient of hidden states.
    pub activation_gradients: u64,
    /// Of a step of this library's: the most that one of its calls asks for.
    pub workspace: u64,
    /// The sum.
    pub total: u64,
}

impl TrainingMemory {
    /// With the sum of the rest as `total`.
    pub(super) fn summed(self) -> Result<TrainingMemory> {
        let total = sum(
            "total",
            &[
                self.weights,
                self.master_weights,
                self.gradients,
                self.optimizer_state,
                self.saved_activations,
                self.recomputed_activations,
                self.logits,
                self.inputs,
                self.activation_gradients,
                self.workspace,
            ],
        )?;
        Ok(TrainingMemory { total, ..self })
    }
}

/// Activations of one layer for the backward pass, in bytes.
struct LayerActivations {
    /// The layer's input.
    input: u64,
    /// Everything, without attention's probabilities.
    linear: u64,
    /// Attention's probabilities.
    quadratic: u64,
    /// Of `linear` what the policy does not keep.
    dropped: u64,
}

/// What one layer stores, counted as in Korthikanti et al. 2022 (arXiv:2205.05198, section 4) for
/// the layer that [`Model`] describes, without dropout. Per token, in elements of the dtype:
///
/// | kept | for | elements |
/// |-|-|-|
/// | input of each norm | the norm | 2 h |
/// | output of each norm | the projections that read it | 2 h |
/// | rotated queries and keys, values | attention | Hq D + Hkv (D + Dv) |
/// | attention's output | the output projection (and flash attention) | Hq Dv |
/// | gate and up | the activation and the product | 2 i |
/// | their product | the down projection | i |
/// | with QK-norm: queries and keys before it | the norms | (Hq + Hkv) D |
///
/// and in f32 one scale per norm and token. Plain attention adds the softmax's output, `Hq · S`
/// elements per token (of a causal one half are zeros, and stored); flash attention its
/// log-sum-exp, `Hq` f32 per token.
fn layer(t: &Training, tokens: u64, size: u64) -> Result<LayerActivations> {
    let what = "activations";
    let m = &t.model;
    let (h, i) = (m.hidden_size, m.intermediate_size);
    let mut elements = [
        product(what, &[4, h])?,
        m.q_size()?,
        m.kv_size()?,
        m.attended_size()?,
        product(what, &[3, i])?,
        0,
    ];
    let kept = t.checkpointing.kept();
    let mut words = 2;
    if m.qk_norm {
        let heads = sum(what, &[m.num_heads, m.num_kv_heads])?;
        elements[5] = product(what, &[heads, m.head_dim])?;
        words = sum(what, &[words, heads])?;
    }
    let mut quadratic = 0;
    if t.flash_attention {
        words = sum(what, &[words, m.num_heads])?;
    } else {
        quadratic = product(what, &[tokens, m.num_heads, t.sequence_length, size])?;
    }
    let per_token = sum(
        what,
        &[
            product(what, &[sum(what, &elements)?, size])?,
            product(what, &[4, words])?,
        ],
    )?;
    // The norms' outputs and the product of gate and up are made element by element.
    let mut dropped = 0;
    for (is_kept, of) in [
        (kept.norms, [product(what, &[2, h])?, i, 0]),
        (kept.gate_up, [i, i, 0]),
        (kept.qkv, [elements[1], elements[2], elements[5]]),
    ] {
        if !is_kept {
            dropped = sum(what, &[dropped, sum(what, &of)?])?;
        }
    }
    Ok(LayerActivations {
        input: product(what, &[tokens, h, size])?,
        linear: product(what, &[tokens, per_token])?,
        quadratic,
        dropped: product(what, &[tokens, dropped, size])?,
    })
}

/// What a training step takes in an engine of operations of any kind, with logits whole:
/// [`training_step_memory`](super::training_step_memory) knows what one of this library's takes.
///
/// Model states are those of mixed-precision training as in ZeRO (Rajbhandari et al. 2020,
/// arXiv:1910.02054, section 3.1): with 16-bit weights and gradients, master copies and Adam, 16
/// bytes per trained parameter.
///
/// # Errors
/// A size is zero, a dtype is no float, something is set that only a step of this library's has, or
/// the sum overflows.
pub fn training_memory(t: &Training) -> Result<TrainingMemory> {
    t.model.parameters()?;
    let tokens = t.check()?;
    for (name, value) in [
        ("adapted_parameters", t.adapted_parameters),
        ("packed_sequences", t.packed_sequences.unwrap_or(0)),
        ("segment_layers", t.segment_layers.unwrap_or(0)),
        (
            "micro_batches",
            Some(t.micro_batches).filter(|n| *n > 1).unwrap_or(0),
        ),
    ] {
        if value > 0 {
            let problem = text!("is {value}, which asks for the estimate of a context's own step");
            return Err(Error::invalid(OP, name, problem));
        }
    }
    let size = float_size("dtype", t.dtype)?;
    let (weights, gradients) = t.states()?;
    let (mut trained, mut master_weights) = (0, 0);
    for (dtype, elements, count) in t.trained()? {
        let elements = product("parameters", &[elements, count])?;
        trained = sum("parameters", &[trained, elements])?;
        let bytes = match t.master {
            _ if dtype == DType::F32 => 0,
            Master::None | Master::Stochastic => 0,
            Master::F32 => 4,
            Master::Remainder => 2,
        };
        let bytes = product("master weights", &[elements, bytes])?;
        master_weights = sum("master weights", &[master_weights, bytes])?;
    }

    let layer = layer(t, tokens, size)?;
    let whole = sum("activations", &[layer.linear, layer.quadratic])?;
    let (kept, recomputed) = match t.checkpointing {
        Checkpointing::None => (whole, 0),
        Checkpointing::Selective => (layer.linear, layer.quadratic),
        Checkpointing::Full => (layer.input, whole),
        _ => (
            layer.linear - layer.dropped,
            sum("activations", &[layer.dropped, layer.quadratic])?,
        ),
    };
    // After the layers: the last norm's input, and its output, which the output projection reads;
    // one scale per token.
    let per_token = product("activations", &[2, t.model.hidden_size, size])?;
    let last = product(
        "activations",
        &[tokens, sum("activations", &[per_token, 4])?],
    )?;
    let layers = product("activations", &[t.model.num_layers, kept])?;
    let of_logits = match t.chunk_tokens {
        0 => tokens,
        most => tokens.min(most),
    };
    TrainingMemory {
        weights,
        master_weights,
        gradients,
        optimizer_state: t.optimizer.state_bytes(trained)?,
        saved_activations: sum("activations", &[layers, last])?,
        recomputed_activations: recomputed,
        logits: product("logits", &[of_logits, t.model.vocab_size, 4])?,
        ..TrainingMemory::default()
    }
    .summed()
}
