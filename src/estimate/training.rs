//! Training.

use crate::dtype::DType;
use crate::error::Result;

use super::model::Model;
use super::{float_size, positive, product, sum};
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
    /// Sequences per step.
    pub batch_size: u64,
    /// Tokens per sequence.
    pub sequence_length: u64,
    /// Of weights and activations.
    pub dtype: DType,
    /// Of gradients.
    pub gradient_dtype: DType,
    /// The optimizer updates an f32 copy of the trained weights (mixed precision,
    /// arXiv:1710.03740). With f32 weights there is none.
    pub master_weights: bool,
    /// The optimizer.
    pub optimizer: OptimizerKind,
    /// Which activations are kept.
    pub checkpointing: Checkpointing,
    /// Attention stores a log-sum-exp per query in place of its probabilities.
    pub flash_attention: bool,
    /// Parameters of adapters beside the model's frozen weights (LoRA, arXiv:2106.09685), which
    /// alone are trained: of them alone there are gradients, master copies and optimizer state.
    /// `None` trains the model itself.
    pub adapter_parameters: Option<u64>,
}

/// Bytes of a training step at its peak, by use.
///
/// Left out are what the backward pass holds for one operation at a time, and what allocators and
/// libraries keep for themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrainingMemory {
    /// Weights in the dtype of the model, adapters included.
    pub weights: u64,
    /// f32 copies of the trained weights.
    pub master_weights: u64,
    /// Gradients of the trained weights.
    pub gradients: u64,
    /// What the optimizer keeps.
    pub optimizer_state: u64,
    /// Activations kept from the forward to the backward pass.
    pub saved_activations: u64,
    /// Activations of one layer that the backward pass computes again.
    pub recomputed_activations: u64,
    /// Logits, f32: `batch_size · sequence_length · vocab_size`.
    pub logits: u64,
    /// The sum.
    pub total: u64,
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

/// What a training step takes.
///
/// Model states are those of mixed-precision training as in ZeRO (Rajbhandari et al. 2020,
/// arXiv:1910.02054, section 3.1): with 16-bit weights and gradients, master copies and Adam, 16
/// bytes per trained parameter.
///
/// # Errors
/// A size is zero, a dtype is no float, or the sum overflows.
pub fn training_memory(t: &Training) -> Result<TrainingMemory> {
    let model = t.model.parameters()?.total;
    let size = float_size("dtype", t.dtype)?;
    let gradient_size = float_size("gradient_dtype", t.gradient_dtype)?;
    let tokens = product(
        "tokens",
        &[
            positive("batch_size", t.batch_size)?,
            positive("sequence_length", t.sequence_length)?,
        ],
    )?;
    let trained = t.adapter_parameters.unwrap_or(model);
    let parameters = sum("parameters", &[model, t.adapter_parameters.unwrap_or(0)])?;

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

    let mut memory = TrainingMemory {
        weights: product("weights", &[parameters, size])?,
        master_weights: if t.master_weights && t.dtype != DType::F32 {
            product("master weights", &[trained, 4])?
        } else {
            0
        },
        gradients: product("gradients", &[trained, gradient_size])?,
        optimizer_state: t.optimizer.state_bytes(trained)?,
        saved_activations: sum("activations", &[layers, last])?,
        recomputed_activations: recomputed,
        logits: product("logits", &[tokens, t.model.vocab_size, 4])?,
        total: 0,
    };
    memory.total = sum(
        "total",
        &[
            memory.weights,
            memory.master_weights,
            memory.gradients,
            memory.optimizer_state,
            memory.saved_activations,
            memory.recomputed_activations,
            memory.logits,
        ],
    )?;
    Ok(memory)
}
