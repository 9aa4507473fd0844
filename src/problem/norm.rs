//! The backward pass of RMSNorm and LayerNorm, which are one problem with a mean or without.

use crate::tensor::RawTensor;

/// Validated arguments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backward {
    /// Whether rows lost their mean: LayerNorm.
    pub centered: bool,
    /// What was normalised: `[.., dim]`.
    pub x: RawTensor,
    /// Like `x`.
    pub dout: RawTensor,
    /// Like `x`; may be `dout`.
    pub dx: RawTensor,
    /// Added to `dx`; like `x`.
    pub dresidual: Option<RawTensor>,
    /// `[dim]`.
    pub weight: Option<RawTensor>,
    pub weight_offset: f32,
    pub epsilon: f32,
    pub parameters: Parameters,
}

/// Gradients of gains and biases.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parameters {
    /// `[dim]`, any float dtype.
    pub dweight: Option<RawTensor>,
    /// As `dweight`.
    pub dbias: Option<RawTensor>,
    /// Whether they are added to what is there, which is f32.
    pub accumulate: bool,
}

impl Backward {
    /// Elements of a row.
    pub fn dim(&self) -> usize {
        self.x.layout.dim(self.x.layout.rank().saturating_sub(1))
    }
}

impl Parameters {
    /// Those that are asked for.
    pub fn iter(&self) -> impl Iterator<Item = &RawTensor> {
        self.dweight.iter().chain(&self.dbias)
    }
}
