//! RMSNorm.

use crate::error::Result;
use crate::layout::Layout;
use crate::tensor::{RawTensor, Workspace};

/// Validated arguments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    /// `[.., dim]`.
    pub x: RawTensor,
    /// Like `x`, or `x`.
    pub out: RawTensor,
    /// The residual and its updated sum, like `x`.
    pub residual: Option<(RawTensor, RawTensor)>,
    /// `[dim]`.
    pub weight: Option<RawTensor>,
    pub weight_offset: f32,
    pub epsilon: f32,
}

/// The norm of a product's input on its way there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OfInput {
    /// `[dim]`.
    pub weight: RawTensor,
    /// Whether nothing in flight writes it, so that it may be read ahead.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "a GPU reads ahead"))]
    pub constant: bool,
    pub weight_offset: f32,
    pub epsilon: f32,
}

impl OfInput {
    /// Bytes of workspace that an input takes once it is normalised.
    pub fn bytes(x: &RawTensor) -> usize {
        (x.layout.num_elements() * x.dtype.size()).next_multiple_of(Workspace::ALIGNMENT)
    }

    /// The norm by itself, to the memory at `to`.
    pub fn alone(&self, x: RawTensor, to: *mut u8) -> Result<Problem> {
        let out = RawTensor {
            ptr: to,
            layout: Layout::contiguous(x.layout.shape())?,
            ..x
        };
        Ok(Problem {
            x,
            out,
            residual: None,
            weight: Some(self.weight),
            weight_offset: self.weight_offset,
            epsilon: self.epsilon,
        })
    }
}
