//! QK-norm and RoPE in one pass, and their gradients.

use crate::problem::rope::{PositionSource, Rotation};
use crate::tensor::RawTensor;

/// Validated arguments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    /// Input and output of q, then of k, where present.
    pub tensors: [Option<(RawTensor, RawTensor)>; 2],
    pub norms: Norms,
    pub positions: PositionSource,
    pub rotation: Rotation,
}

/// How heads are normalised.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Norms {
    /// Gains of q and of k: `[head_dim]`, any float dtype.
    pub weights: [Option<RawTensor>; 2],
    pub weight_offset: f32,
    pub epsilon: f32,
}

/// The heads of q or of k, whose gradients are computed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heads {
    /// Before they were normalised.
    pub x: RawTensor,
    /// Like `x`.
    pub dout: RawTensor,
    /// Like `x`; may be `dout`.
    pub dx: RawTensor,
}

/// Validated arguments of the backward pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backward {
    /// Of q and of k.
    pub heads: [Option<Heads>; 2],
    pub norms: Norms,
    pub positions: PositionSource,
    pub rotation: Rotation,
    /// The gradients of the weights of q and of k.
    pub dweights: [Option<RawTensor>; 2],
    /// Whether they are added to what is there, which is f32.
    pub accumulate: bool,
}

impl Backward {
    /// Components of a head.
    pub fn head_dim(&self) -> usize {
        let mut heads = self.heads.iter().flatten();
        let layout = heads.next().map(|heads| &heads.x.layout);
        layout.map_or(0, |layout| layout.dim(layout.rank().saturating_sub(1)))
    }

    /// Whether there is no component.
    pub fn is_empty(&self) -> bool {
        let mut heads = self.heads.iter().flatten();
        heads.all(|heads| heads.x.layout.is_empty())
    }
}
