//! Linear layers whose output is never stored whole.

use super::linear::Weights;
use crate::tensor::RawTensor;

/// A layer from `hidden` to `vocab`, and what is wanted of its gradients.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layer {
    /// `[tokens.., hidden]`, where leading dimensions are merged as far as strides allow.
    pub x: RawTensor,
    /// `[vocab, hidden]`, and a bias.
    pub weights: Weights,
    /// Like `x`.
    pub dx: Option<RawTensor>,
    /// `[vocab, hidden]`.
    pub dweight: Option<RawTensor>,
    /// `[vocab]`.
    pub dbias: Option<RawTensor>,
    /// Whether `dweight` and `dbias`, which are f32 then, are added to.
    pub accumulate: bool,
    /// The most tokens whose outputs are stored at a time; 0 for what is usual.
    pub chunk_tokens: usize,
}

impl Layer {
    /// Whether any gradient is wanted.
    pub fn is_differentiated(&self) -> bool {
        self.dx.is_some() || self.dweight.is_some() || self.dbias.is_some()
    }

    /// Columns of the output.
    pub fn vocab(&self) -> usize {
        self.weights.out_features()
    }

    /// The sizes of the dimensions of tokens.
    pub fn tokens(&self) -> &[usize] {
        let shape = self.x.layout.shape();
        &shape[..shape.len().saturating_sub(1)]
    }
}
