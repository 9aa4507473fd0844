//! Log-probabilities of given ids under a linear layer's output.

use super::{chunked, logprob};

/// Validated arguments, of a forward pass, or of a backward pass where the layer has gradients.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    pub layer: chunked::Layer,
    /// That of the whole output, which is nowhere: of `logits` only the last dimension counts.
    /// Dimensions of tokens are those of the layer.
    pub logprob: logprob::Problem,
}
