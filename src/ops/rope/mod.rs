//! Rotary position embedding (Su et al. 2021, arXiv:2104.09864).
//!
//! Every pair `(a, b)` of components of a head turns by an angle that grows with the token's position:
//!
//! ```text
//! a' = a cos(φ) - b sin(φ)
//! b' = b cos(φ) + a sin(φ)        φ = position * inv_freq[pair]
//! ```
//!
//! so that the dot product of a rotated query and key depends on the difference of their positions alone. The inverse rotation
//! (`φ` negated) is also the gradient. Arithmetic is f32; the only rounding to the tensors' dtype is that of the result.

mod rotation;
pub(crate) mod tokens;

pub use crate::problem::rope::{Scaling, Style};
pub use rotation::{Angles, Rotation, inverse_frequencies};
pub use tokens::Positions;

use crate::error::Result;
use crate::ops::operation::{self, Operation, Tensors};
use crate::problem::rope::Problem;
use crate::tensor::InOut;

const OP: &str = "rope";

/// Arguments of [`forward`]. At least one of `q` and `k` is there.
#[derive(Debug, Default)]
pub struct Params<'a> {
    /// Queries and their output: `[batch, seq, heads, head_dim]` or `[tokens, heads, head_dim]`, f32, f16 or bf16; strided,
    /// contiguous in the last dimension.
    pub q: Option<InOut<'a>>,
    /// Keys and their output: like `q`, with any number of heads.
    pub k: Option<InOut<'a>>,
    /// Where tokens stand.
    pub positions: Positions<'a>,
    /// How they are rotated.
    pub rotation: Rotation<'a>,
    /// Rotates backwards: undoes the rotation, and maps gradients of the rotated to gradients of the original.
    pub inverse: bool,
}

const NAMES: [tokens::Names; 2] = [("q", "q_out"), ("k", "k_out")];

impl Params<'_> {
    fn pairs(&self) -> [Option<&InOut<'_>>; 2] {
        [self.q.as_ref(), self.k.as_ref()]
    }
}

impl Operation for Params<'_> {
    const NAME: &'static str = OP;
    type Problem = Problem;

    fn problem(&self) -> Result<Problem> {
        let (tensors, first) = tokens::pairs(OP, NAMES, self.pairs())?;
        let rotation = self.rotation.problem(OP, first.head_dim())?;
        let positions = self.positions.problem(OP, &first, &rotation)?;
        Ok(Problem {
            tensors,
            positions,
            rotation,
            inverse: self.inverse,
        })
    }

    fn tensors(&self, tensors: &mut Tensors) {
        self.rotation.tensors(tensors);
        self.positions.tensors(tensors);
        for (pair, names) in self.pairs().into_iter().zip(NAMES) {
            if let Some(pair) = pair {
                tensors.in_out(names, pair);
            }
        }
    }
}

operation::functions!();
