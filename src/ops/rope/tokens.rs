//! Queries and keys of the same tokens, and where these stand: what RoPE and QK-norm check alike.

use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::ops::check::{self, Arg};
use crate::ops::operation::Tensors;
use crate::problem::rope::{PositionSource, Rotation};
use crate::tensor::{InOut, RawTensor, TensorRef};

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

/// What a tensor and its output are called.
pub(crate) type Names = (&'static str, &'static str);

/// The first tensor of heads that is there, which says what the other has to be like.
#[derive(Clone, Copy)]
pub(crate) struct First {
    name: &'static str,
    tensor: RawTensor,
}

impl First {
    /// Components of a head.
    pub fn head_dim(&self) -> usize {
        let layout = &self.tensor.layout;
        layout.dim(layout.rank() - 1)
    }

    /// The dimensions of the tokens.
    fn tokens(&self) -> &[usize] {
        let layout = &self.tensor.layout;
        &layout.shape()[..layout.rank() - 2]
    }
}

/// Inputs and outputs of queries and of keys, of which one is there.
type Pairs = [Option<(RawTensor, RawTensor)>; 2];

/// Checks queries and keys with their outputs, at least one of which is there.
pub(crate) fn pairs(
    op: &'static str,
    names: [Names; 2],
    pairs: [Option<&InOut<'_>>; 2],
) -> Result<(Pairs, First)> {
    let mut tensors = [None; 2];
    let mut first: Option<First> = None;
    for ((slot, pair), names) in tensors.iter_mut().zip(pairs).zip(names) {
        let Some(pair) = pair else { continue };
        let (input, output) = (pair.input(), pair.output());
        let arg = Arg::new(op, names.0, &input)
            .rank(&[3, 4])?
            .dtype(DType::FLOATS)?;
        check::in_out(op, names, pair)?;
        match &first {
            None => {
                first = Some(First {
                    name: names.0,
                    tensor: input,
                });
            }
            Some(First { name, tensor }) => {
                arg.dtype_of(Arg::new(op, name, tensor))?;
                same_tokens(op, names.0, &input, name, tensor)?;
            }
        }
        *slot = Some((input, output));
    }
    match first {
        Some(first) => Ok((tensors, first)),
        None => {
            let problem = text!("and {} are absent, one is required", names[1].0);
            Err(Error::invalid(op, names[0].0, problem))
        }
    }
}

impl Positions<'_> {
    /// The tensor that it reads.
    pub(crate) fn tensors(&self, tensors: &mut Tensors) {
        if let Positions::PerToken(positions) = self {
            tensors.read("positions", positions);
        }
    }

    /// Validates for the tokens of what is rotated.
    pub(crate) fn problem(
        &self,
        op: &'static str,
        first: &First,
        rotation: &Rotation,
    ) -> Result<PositionSource> {
        match self {
            Positions::PerToken(t) => {
                let raw = t.raw();
                Arg::new(op, "positions", &raw)
                    .dtype(&[DType::I32, DType::I64])?
                    .shape(first.tokens())?;
                Ok(PositionSource::PerToken(raw))
            }
            Positions::From(offset) => {
                let len = first.tokens().last().copied().unwrap_or(0);
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
                    let name = first.name;
                    let problem = text!("is {offset} and {name} has {len} tokens: {allowed}");
                    return Err(Error::invalid(op, "position_offset", problem));
                }
                Ok(PositionSource::From(*offset))
            }
        }
    }
}

/// Both have the same tokens and head dimension.
fn same_tokens(
    op: &'static str,
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
    Err(Error::invalid(op, name, problem))
}
