//! Cross-entropy of logits.

use crate::tensor::RawTensor;

/// How the losses of tokens become one. The discriminants are those of the C ABI
/// (`UNSLOTH_REDUCTION_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Reduction {
    /// Their sum over the number of tokens that are not ignored, or over a denominator of the
    /// caller's.
    #[default]
    Mean = 0,
    /// Their sum.
    Sum = 1,
}

impl Reduction {
    /// The reduction with this C ABI value.
    pub fn from_raw(value: u32) -> Option<Reduction> {
        [Reduction::Mean, Reduction::Sum]
            .into_iter()
            .find(|r| *r as u32 == value)
    }
}

/// Validated arguments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    /// `[.., vocab]`.
    pub logits: RawTensor,
    /// `[..]`, i32 or i64.
    pub targets: RawTensor,
    /// f32 `[1]`.
    pub loss: Option<RawTensor>,
    /// f32 `[..]`, contiguous.
    pub losses: Option<RawTensor>,
    /// As `losses`.
    pub lse: Option<RawTensor>,
    /// Like `logits`; may be `logits`.
    pub dlogits: Option<RawTensor>,
    /// f32 `[1]`.
    pub dloss: Option<RawTensor>,
    /// f32 `[1]`; only with a mean.
    pub denominator: Option<RawTensor>,
    pub reduction: Reduction,
    pub ignore_index: i64,
    pub label_smoothing: f32,
    pub z_loss: f32,
    /// 0 for none.
    pub softcap: f32,
}

impl Problem {
    pub fn vocab(&self) -> usize {
        self.logits
            .layout
            .dim(self.logits.layout.rank().saturating_sub(1))
    }

    pub fn num_tokens(&self) -> usize {
        self.targets.layout.num_elements()
    }
}

/// The columns of logits that a rank has, where ranks divide the vocabulary.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Columns {
    /// The first of them.
    pub begin: usize,
    /// Those of all ranks.
    pub vocab: usize,
}

/// Numbers of a token that a rank gives to the others: the greatest logit, after the softcap, the sum of
/// exponentials of the distances from it, the sum of logits, and the target's logit or zero.
pub(crate) const SUMS: usize = 4;

/// What a rank's columns come to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    /// Its logits are contiguous, and nothing is written but `sums`.
    pub of: Problem,
    pub columns: Columns,
    /// f32 `[tokens, SUMS]`.
    pub sums: RawTensor,
}

/// What the columns of all ranks come to: losses, and the gradient of this rank's columns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Whole {
    /// Its logits are contiguous; `loss` and a mean's count are not its.
    pub of: Problem,
    pub columns: Columns,
    /// f32 `[ranks * tokens, SUMS]`.
    pub sums: RawTensor,
    pub ranks: usize,
}

/// What is looked for in the targets of a batch before its tokens are taken in parts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Targets {
    /// As a [`Problem`]'s.
    pub targets: RawTensor,
    pub vocab: usize,
    pub ignore_index: i64,
    /// f32 `[1]`: the number of those that are not ignored, or 1 if all are.
    pub count: Option<RawTensor>,
}

/// The losses of a batch as one number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Total {
    /// f32, contiguous.
    pub losses: RawTensor,
    /// f32 `[1]`: what their sum is divided by.
    pub denominator: Option<RawTensor>,
    /// f32 `[1]`.
    pub loss: RawTensor,
}
