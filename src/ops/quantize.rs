//! Quantisation: floats to 8-bit integers, 8-bit floats or ternary codes, with scales that lie apart.
//!
//! What shares a scale `s`, the whole tensor, a row or a group of a row as the shape of `scale`
//! says, becomes codes with `x ≈ s code`:
//!
//! - [`Rule::AbsMax`]: `s = max |x| / 127` for i8, as BitNet and LLM.int8 do with activations
//!   (Dettmers et al. 2022), and `s = max |x|` for ternary codes; `code = round(x / s)`. For f8e4m3
//!   `s = max |x| / 448`, and the code is the number of that format that is nearest to `x / s`
//!   (Micikevicius et al. 2022).
//! - [`Rule::AbsMean`]: `s = mean |x|`, `code = round(x / s)` cut off at ±1: BitNet b1.58's weights
//!   (Ma et al. 2024, equations 1 to 3, without their ε).
//! - [`Rule::Threshold`]: with `t = 0.7 mean |x|`, `code = sign(x)` where `|x| > t` and 0
//!   elsewhere, `s = mean |x|` of those that are not 0: ternary weight networks (Li, Zhang, Liu
//!   2016).
//!
//! All is f32: quotients are rounded once, then to the nearest code, ties to even. A sum of
//! magnitudes is one of pieces of 4096 neighbours; in a piece, elements at equal places modulo 32
//! are added in order, and these 32 sums by halves. Pieces are added in f64 in order, which is the
//! sum of a row; those of rows are rounded to f32 and added in f64 in order. So the same inputs
//! give the same bits, with any number of threads.
//!
//! Zeros alone have the scale 0 and codes 0. Where an element is infinite or NaN, or a sum of
//! magnitudes is beyond f32, the scale is not finite and codes are 0, so that products with it are
//! no numbers either.

use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::ops::check::Arg;
use crate::ops::operation::{self, Operation, Tensors};
pub use crate::problem::quantize::Rule;
use crate::problem::quantize::{Problem, Scope};
use crate::tensor::{RawTensor, TensorMut, TensorRef, Workspace};

const OP: &str = "quantize";

/// The longest row: sums of its codes fit an i32.
const MAX_ROW: usize = i32::MAX as usize / 127;

/// Arguments of [`forward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// `[.., k]`, f32, f16 or bf16, `k` up to 16,909,320; rows strided, contiguous in the last
    /// dimension.
    pub x: TensorRef<'a>,
    /// The shape of `x`: i8, f8e4m3, or ternary where `k` is a multiple of 128; rows strided, contiguous
    /// in the last dimension.
    pub out: TensorMut<'a>,
    /// f32, contiguous: `[1]`, one for all; the leading dimensions of `x` (`[1]` if it has none),
    /// one for each row; these and `k / g`, one for each group of `g` neighbours, which is a
    /// multiple of 128 for ternary codes.
    pub scale: TensorMut<'a>,
    /// i32, contiguous: the sums of the codes (of ternary ones, -1 to 1) of each row, or of each
    /// group where groups have scales. Codes of f8e4m3 have none.
    pub sum: Option<TensorMut<'a>>,
    /// What the scales are.
    pub rule: Rule,
    /// At least [`workspace_size`] bytes.
    pub workspace: Workspace<'a>,
}

impl Params<'_> {
    /// What shares a scale, going by the shapes.
    fn scope(&self, x: &RawTensor, leading: &[usize]) -> Result<Scope> {
        let scale = self.scale.raw();
        Arg::new(OP, "scale", &scale)
            .dtype(&[DType::F32])?
            .contiguous()?;
        let (shape, k) = (scale.layout.shape(), x.layout.dim(leading_rank(x)));
        if shape == leading {
            return Ok(Scope::Groups(1));
        }
        if shape == [1] && x.layout.rank() > 1 {
            return Ok(Scope::Tensor);
        }
        let groups = match shape.split_last() {
            Some((&groups, rows)) if rows == &x.layout.shape()[..leading_rank(x)] => groups,
            _ => 0,
        };
        if groups == 0 || !k.is_multiple_of(groups) {
            let problem = text!(
                "has shape {shape:?}, expected [1], {leading:?}, or {:?} and a divisor of {k}",
                &x.layout.shape()[..leading_rank(x)]
            );
            return Err(Error::invalid(OP, "scale", problem));
        }
        let (len, _) = self.out.raw().dtype.block();
        if !(k / groups).is_multiple_of(len) {
            let problem = text!(
                "is of groups of {}, allowed for {}: multiples of {len}",
                k / groups,
                self.out.raw().dtype
            );
            return Err(Error::invalid(OP, "scale", problem));
        }
        Ok(Scope::Groups(groups))
    }
}

fn leading_rank(x: &RawTensor) -> usize {
    x.layout.rank().saturating_sub(1)
}

impl Operation for Params<'_> {
    const NAME: &'static str = OP;
    type Problem = Problem;

    fn problem(&self) -> Result<Problem> {
        let (x, out) = (self.x.raw(), self.out.raw());
        let arg = Arg::new(OP, "x", &x)
            .min_rank(1)?
            .dtype(DType::FLOATS)?
            .last_contiguous()?;
        Arg::new(OP, "out", &out)
            .dtype(&DType::QUANTIZED)?
            .shape_of(arg)?
            .rows_in_blocks()?
            .writable()?;
        let k = x.layout.dim(leading_rank(&x));
        if k > MAX_ROW {
            let problem = text!("has rows of {k} elements, above the maximum {MAX_ROW}");
            return Err(Error::invalid(OP, "x", problem));
        }
        if self.rule != Rule::AbsMax && out.dtype != DType::Ternary {
            let problem = text!("is {}, allowed for {}: 0", self.rule as u32, out.dtype);
            return Err(Error::invalid(OP, "rule", problem));
        }
        let leading = match leading_rank(&x) {
            0 => &[1],
            rank => &x.layout.shape()[..rank],
        };
        let scope = self.scope(&x, leading)?;
        let sum = self.sum.as_ref().map(TensorMut::raw);
        if sum.is_some() && !out.dtype.is_of_integers() {
            let problem = text!(
                "is there, codes of {} are no integers to be summed",
                out.dtype
            );
            return Err(Error::unsupported(OP, "sum", problem));
        }
        if let Some(sum) = &sum {
            let scale = self.scale.raw();
            let expected = match scope {
                Scope::Tensor => leading,
                Scope::Groups(_) => scale.layout.shape(),
            };
            Arg::new(OP, "sum", sum)
                .dtype(&[DType::I32])?
                .shape(expected)?
                .contiguous()?;
        }
        Ok(Problem {
            x,
            out,
            scale: self.scale.raw(),
            sum,
            rule: self.rule,
            scope,
        })
    }

    fn tensors(&self, tensors: &mut Tensors) {
        tensors.read("x", &self.x);
        tensors.write("out", &self.out);
        tensors.write("scale", &self.scale);
        tensors.write_optional("sum", self.sum.as_ref());
    }

    fn workspace(&self) -> Option<&Workspace<'_>> {
        Some(&self.workspace)
    }
}

operation::functions!();
