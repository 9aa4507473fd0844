//! Rounding to codes of 8 or 2 bits.

use crate::tensor::RawTensor;

/// How a scale follows from what shares it. The discriminants are those of the C ABI
/// (`UNSLOTH_QUANTIZE_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Rule {
    /// The greatest magnitude becomes the greatest code.
    #[default]
    AbsMax = 0,
    /// The mean magnitude becomes 1: ternary codes only.
    AbsMean = 1,
    /// What is above 0.7 of the mean magnitude becomes 1, the scale is its mean: ternary codes
    /// only.
    Threshold = 2,
}

impl Rule {
    /// The rule with this C ABI value.
    pub fn from_raw(value: u32) -> Option<Rule> {
        [Rule::AbsMax, Rule::AbsMean, Rule::Threshold]
            .into_iter()
            .find(|rule| *rule as u32 == value)
    }
}

/// What shares a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Everything.
    Tensor,
    /// A row; the number of equal groups that it is cut into, which have one each.
    Groups(usize),
}

/// Validated arguments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    /// `[.., k]`, floats.
    pub x: RawTensor,
    /// Its shape; i8, ternary or f8e4m3.
    pub out: RawTensor,
    /// f32, contiguous: one, or one for each group of each row.
    pub scale: RawTensor,
    /// i32, contiguous: one for each group of each row; one for each row where one scale is for
    /// all.
    pub sum: Option<RawTensor>,
    pub rule: Rule,
    pub scope: Scope,
}
