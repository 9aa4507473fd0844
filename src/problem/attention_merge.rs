//! Parts of attention over disjoint sets of keys, as one.

use crate::tensor::RawTensor;

/// Validated arguments. Packed tokens are those of one sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    /// `[parts, B, S, H, D]`, f32, f16 or bf16; contiguous in the last dimension.
    pub outs: RawTensor,
    /// f32 `[parts, B, H, S]`.
    pub lses: RawTensor,
    /// `[B, S, H, D]`, f32, f16 or bf16; contiguous in the last dimension. It may be one of the parts.
    pub out: RawTensor,
    /// f32 `[B, H, S]`. It may be that of the same part.
    pub lse: Option<RawTensor>,
}

impl Problem {
    /// Rows of the output.
    pub fn rows(&self) -> usize {
        self.out.layout.num_rows()
    }
}
