//! A step of an optimizer over a table of parameters: their gradients' norm, what follows from it
//! for all of them, the update. Each is a launch; where ranks share the parameters, a sum and a
//! collective over what they have found are between the first two.

use crate::dtype::DType;

/// Elements of a chunk of a parameter: a sum of squares each, and a thread's share of the work.
pub(crate) const CHUNK: usize = 16 << 10;

/// Elements to which parameters are padded in the state, so that each begins at whole vectors.
pub(crate) const PACK: usize = 8;

/// Where a weight's f32 value is between steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Storage {
    /// In the weight, rounded to nearest.
    Weight = 0,
    /// In an f32 of its own; the weight is it, rounded to nearest even.
    F32 = 1,
    /// Its upper 16 bits in the weight, rounded to nearest, ties upwards; the lower in a remainder.
    Remainder = 2,
    /// In the weight, rounded up or down at random.
    Stochastic = 3,
}

/// A parameter as kernels find it, in words of 64 bits: addresses of weight, gradient, moments and
/// master, its elements, [`PACK`]s before it, and in the last word chunks before it and, as the upper
/// half, traits: the weight's dtype in the lowest bits, the others from the bits that are named here.
pub(crate) mod traits {
    /// Words.
    pub const WORDS: usize = 8;
    /// The gradient's dtype.
    pub const GRADIENT: u32 = 4;
    /// A [`Storage`](super::Storage).
    pub const STORAGE: u32 = 8;
    /// Whether weight and gradient begin at whole vectors.
    pub const VECTORS: u32 = 12;
    /// The group.
    pub const GROUP: u32 = 16;
}

/// A parameter that has elements. Pointers are the device's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tensor {
    pub weight: *mut u8,
    pub gradient: *mut u8,
    /// f32: Adam's two moments; the momentum; or NULL.
    pub moments: [*mut u8; 2],
    /// f32, or 16-bit remainders, or NULL, as `storage` says.
    pub master: *mut u8,
    pub elements: usize,
    /// Chunks of the parameters before it.
    pub first_chunk: usize,
    /// [`PACK`]s of the parameters before it.
    pub first_pack: usize,
    pub weight_dtype: DType,
    pub gradient_dtype: DType,
    pub storage: Storage,
    /// Index of its learning rate and weight decay.
    pub group: usize,
}

/// The parameters, and what belongs to all of them. The optimizer owns the state's memory, and
/// whoever made it promised that weights and gradients are there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Table<'a> {
    pub tensors: &'a [Tensor],
    /// The same for kernels, where there are any.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub entries: *mut u8,
    pub num_chunks: usize,
    /// A [`Control`].
    pub control: *mut u8,
    /// A [`Group`] each.
    pub groups: *mut u8,
    /// An f32 for each chunk: the sum of squares, NaN where one was not finite.
    pub partials: *mut u8,
    /// An f64 for each rank that shares the parameters: the sum of its partials.
    pub sums: *mut u8,
}

// SAFETY: addresses; the backends, which dereference them, carry the obligations.
unsafe impl Sync for Table<'_> {}

/// What the steps of an optimizer leave behind, on the device.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub(crate) struct Control {
    /// What the loss is multiplied by.
    pub scale: f32,
    /// What gradients are multiplied by in this step's update.
    pub coefficient: f32,
    /// Of the last gradients, unscaled.
    pub norm: f32,
    /// 1 if the last gradients were not all finite.
    pub found_inf: u32,
    /// Steps since the scale changed.
    pub tracker: u32,
    /// Overflows in a row after which the scale shrinks.
    pub hysteresis: u32,
    /// `1 / (1 - beta1^step)`.
    pub bias1: f32,
    /// `1 / sqrt(1 - beta2^step)`.
    pub bias2: f32,
    /// Updates so far.
    pub step: u64,
    /// Steps without an update.
    pub skipped: u64,
    /// `beta1^step`.
    pub power1: f64,
    /// `beta2^step`.
    pub power2: f64,
}

/// What may differ between parameters, and change between steps.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Group {
    /// η, at least 0.
    pub learning_rate: f32,
    /// λ, at least 0; 0 for none.
    pub weight_decay: f32,
}

/// The update rule: what a parameter θ becomes, given its gradient g (unscaled and clipped), the
/// learning rate η and the weight decay λ of its group, at step t.
///
/// Decay that is not decoupled is part of the gradient: `g += λ θ`. Decoupled it shrinks the
/// parameter apart from that: `θ *= 1 - η λ` (Loshchilov and Hutter 2017, arXiv:1711.05101).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// Adam (Kingma and Ba 2014, arXiv:1412.6980, algorithm 1); decoupled it is AdamW:
    /// `m = β₁ m + (1 - β₁) g`, `v = β₂ v + (1 - β₂) g²`,
    /// `θ -= η / (1 - β₁ᵗ) m / (√(v / (1 - β₂ᵗ)) + ε)`.
    Adam {
        /// β₁, from 0 to below 1.
        beta1: f32,
        /// β₂, from 0 to below 1.
        beta2: f32,
        /// ε, above 0.
        epsilon: f32,
        /// Whether weight decay is decoupled.
        decoupled: bool,
    },
    /// Stochastic gradient descent: `b = μ b + g`, `θ -= η b`.
    Sgd {
        /// μ, from 0 to below 1; 0 keeps no b.
        momentum: f32,
        /// Nesterov's momentum, as Sutskever et al. (2013) have it: `θ -= η (g + μ b)`.
        nesterov: bool,
        /// Whether weight decay is decoupled.
        decoupled: bool,
    },
}

impl Rule {
    /// Moments of a parameter.
    pub(crate) fn num_moments(&self) -> usize {
        match self {
            Rule::Adam { .. } => 2,
            Rule::Sgd { momentum, .. } => usize::from(*momentum != 0.0),
        }
    }

    /// What a gradient adds to both moments: `1 - beta`, of which f32 would lose too much.
    pub(crate) fn new_shares(&self) -> [f32; 2] {
        self.betas().map(|beta| (1.0 - f64::from(beta)) as f32)
    }

    /// The decay of both moments, for the correction of their bias; zeros where there is none.
    pub(crate) fn betas(&self) -> [f32; 2] {
        match *self {
            Rule::Adam { beta1, beta2, .. } => [beta1, beta2],
            Rule::Sgd { .. } => [0.0; 2],
        }
    }
}

/// How the loss scale changes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Scaling {
    pub dynamic: bool,
    pub growth: f32,
    pub backoff: f32,
    pub interval: u32,
    pub hysteresis: u32,
}

/// First launch: the sum of squares of each chunk of the gradients, unscaled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Norm<'a> {
    pub table: Table<'a>,
}

/// Where ranks share the parameters, the sum of what the first launch found here, at this rank's
/// place among the sums; NaN where a gradient was not finite.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sum<'a> {
    pub table: Table<'a>,
    pub rank: usize,
}

/// Second launch: the norm, and all that follows for the update.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decide<'a> {
    pub table: Table<'a>,
    /// Ranks whose sums are added up, in their order; `None` where the partials are all there is.
    pub ranks: Option<usize>,
    pub scaling: Scaling,
    pub betas: [f32; 2],
    /// Greatest norm of the gradients; 0 for any.
    pub max_norm: f32,
}

/// Third launch: weights and moments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Update<'a> {
    pub table: Table<'a>,
    pub rule: Rule,
    pub zero_gradients: bool,
    /// Of stochastic rounding.
    pub seed: u64,
}

/// Multiplies the gradients.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScaleGradients<'a> {
    pub table: Table<'a>,
    pub factor: f32,
}
