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

pub use crate::problem::rope::{Scaling, Style};
pub use rotation::{Angles, Rotation, inverse_frequencies};

use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::ops::check::{self, Arg};
use crate::ops::operation::{self, Operation, Tensors};
use crate::problem::rope::{PositionSource, Problem};
use crate::tensor::{InOut, RawTensor, TensorRef};

const OP: &str = "rope";

/// Where tokens stand.
#[derive(Clone, Copy, Debug)]
pub enum Positions<'a> {
    /// Token `i` of a sequence (of the batch entry, or of the tokens without a batch) stands at the offset plus `i`.
    From(i64),
    /// i32 or i64, `[batch, seq]` or `[tokens]`, any strides (a batch stride of zero shares positions). With a table every
    /// position must lie inside; on a device, where the host cannot look, the rotated components of a token outside become NaN.
    PerToken(TensorRef<'a>),
}

impl Default for Positions<'_> {
    fn default() -> Self {
        Positions::From(0)
    }
}

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

const NAMES: [(&str, &str); 2] = [("q", "q_out"), ("k", "k_out")];

impl Params<'_> {
    fn pairs(&self) -> [Option<&InOut<'_>>; 2] {
        [self.q.as_ref(), self.k.as_ref()]
    }
}

impl Operation for Params<'_> {
    const NAME: &'static str = OP;
    type Problem = Problem;

    fn problem(&self) -> Result<Problem> {
        let mut tensors = [None; 2];
        let mut first: Option<(&str, RawTensor)> = None;
        for ((slot, pair), names) in tensors.iter_mut().zip(self.pairs()).zip(NAMES) {
            let Some(pair) = pair else { continue };
            let (input, output) = (pair.input(), pair.output());
            let arg = Arg::new(OP, names.0, &input)
                .rank(&[3, 4])?
                .dtype(DType::FLOATS)?;
            check::in_out(OP, names, pair)?;
            match &first {
                None => first = Some((names.0, input)),
                Some((name, q)) => {
                    arg.dtype_of(Arg::new(OP, name, q))?;
                    same_tokens(names.0, &input, name, q)?;
                }
            }
            *slot = Some((input, output));
        }
        let Some((name, reference)) = first else {
            return Err(Error::invalid(OP, "q", "and k are absent, one is required"));
        };
        let rank = reference.layout.rank();
        let tokens = &reference.layout.shape()[..rank - 2];
        let rotation = self.rotation.problem(OP, reference.layout.dim(rank - 1))?;
        let positions = match &self.positions {
            Positions::PerToken(t) => {
                let raw = t.raw();
                Arg::new(OP, "positions", &raw)
                    .dtype(&[DType::I32, DType::I64])?
                    .shape(tokens)?;
                PositionSource::PerToken(raw)
            }
            Positions::From(offset) => {
                let len = tokens.last().copied().unwrap_or(0);
                // Lengths of tensors fit an i64 (see Layout).
                let end = offset.checked_add(len as i64);
                let fits = match (end, rotation.max_positions()) {
                    (None, _) => false,
                    (Some(_), None) => true,
                    (Some(end), Some(max)) => *offset >= 0 && end <= max as i64,
                };
                if !fits {
                    let allowed = match rotation.max_positions() {
                        Some(max) => text!("the table has {max} positions"),
                        None => text!("the sum overflows"),
                    };
                    let problem = text!("is {offset} and {name} has {len} tokens: {allowed}");
                    return Err(Error::invalid(OP, "position_offset", problem));
                }
                PositionSource::From(*offset)
            }
        };
        Ok(Problem {
            tensors,
            positions,
            rotation,
            inverse: self.inverse,
        })
    }

    fn tensors(&self, tensors: &mut Tensors) {
        self.rotation.tensors(tensors);
        if let Positions::PerToken(positions) = &self.positions {
            tensors.read("positions", positions);
        }
        for (pair, names) in self.pairs().into_iter().zip(NAMES) {
            if let Some(pair) = pair {
                tensors.in_out(names, pair);
            }
        }
    }
}

/// Both have the same tokens and head dimension.
fn same_tokens(
    name: &'static str,
    t: &RawTensor,
    other: &str,
    reference: &RawTensor,
) -> Result<()> {
    let (a, b) = (t.layout.shape(), reference.layout.shape());
    let heads = a.len() - 2;
    let alike = a.len() == b.len() && a[..heads] == b[..heads] && a[heads + 1] == b[heads + 1];
    if alike {
        return Ok(());
    }
    let problem = text!("has shape {a:?}, {other} has {b:?}: only the heads may differ");
    Err(Error::invalid(OP, name, problem))
}

operation::functions!();
