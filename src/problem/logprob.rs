//! Log-probabilities of given ids under logits.

use crate::tensor::RawTensor;

/// Validated arguments, of a forward or of a backward pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    /// `[.., vocab]`, contiguous.
    pub logits: RawTensor,
    /// `[..]`, i32 or i64.
    pub ids: RawTensor,
    /// f32 `[..]`, contiguous.
    pub logprobs: Option<RawTensor>,
    /// As `logprobs`.
    pub entropy: Option<RawTensor>,
    /// As `logprobs`.
    pub lse: Option<RawTensor>,
    /// Whether the gradient of the logits takes their place.
    pub differentiate: bool,
    /// As `logprobs`, read.
    pub dlogprobs: Option<RawTensor>,
    /// As `logprobs`, read.
    pub dentropy: Option<RawTensor>,
    pub ignore_index: i64,
    /// Greater than 0.
    pub temperature: f32,
    /// 0 for none.
    pub softcap: f32,
}

impl Problem {
    pub fn vocab(&self) -> usize {
        let rank = self.logits.layout.rank();
        self.logits.layout.dim(rank.saturating_sub(1))
    }

    pub fn num_tokens(&self) -> usize {
        self.ids.layout.num_elements()
    }
}
