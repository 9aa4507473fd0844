//! Cross-entropy of a linear layer's output.

use super::{chunked, cross_entropy};

/// Validated arguments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    pub layer: chunked::Layer,
    /// That of the whole output, which is nowhere: of `logits` and `dlogits` only the shape counts.
    /// Dimensions of tokens are those of the layer.
    pub loss: cross_entropy::Problem,
}
