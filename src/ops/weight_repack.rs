//! Ternary weights of files, brought to the order of [`DType::Ternary`].
//!
//! A file's format has the codes of a matrix in an order of its own, and its scale behind them. What
//! is written is what linear layers multiply
//! ([`TensorRef::with_scales`](crate::TensorRef::with_scales)): the same codes, bit for bit, and the
//! scale.
//!
//! [`Format::I2S`] differs by the order of the codes in a byte alone, so codes may take their own
//! place. It is BitNet's format as its builds for x86 write it; others write other orders under the
//! same name, which nothing in a file tells apart. A code of 3, which the format does not have,
//! stays one, and is a weight of 2.
//!
//! GGUF's TQ1_0, TQ2_0 and Q2_0 are no formats here: they have a scale for each block, which scales
//! of rows do not say, and linear layers take them as they are ([`DType::BLOCKS`]).

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::ops::check::Arg;
use crate::ops::operation::{self, Operation, Tensors};
pub use crate::problem::weight_repack::Format;
use crate::problem::weight_repack::Problem;
use crate::tensor::{RawTensor, TensorMut, TensorRef};

const OP: &str = "weight_repack";

/// Arguments of [`forward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// What the bytes are.
    pub format: Format,
    /// What is read, and where codes go.
    pub codes: Codes<'a>,
    /// f32, `[1]`: the matrix' scale, optional. Without it the scale stays where it is, an f32 at byte
    /// `n k / 4`.
    pub scale: Option<TensorMut<'a>>,
}

/// The bytes of a matrix `[n, k]`, and its codes.
#[derive(Debug)]
pub enum Codes<'a> {
    /// Read from one, written to the other; they do not overlap.
    Apart {
        /// `[n k / 4 + 32]`, i8, contiguous, at any address: the file's bytes.
        packed: TensorRef<'a>,
        /// `[n, k]`, ternary, contiguous; `k` a multiple of 128.
        out: TensorMut<'a>,
    },
    /// The codes become what `out` would be; the bytes behind them stay.
    InPlace {
        /// `[n k / 4 + 32]`, i8, contiguous, at any address: the file's bytes.
        packed: TensorMut<'a>,
        /// That of the codes, `[n, k]` without gaps; `k` a multiple of 128.
        layout: Layout,
    },
}

impl Codes<'_> {
    fn raw(&self) -> (RawTensor, RawTensor) {
        match self {
            Codes::Apart { packed, out } => (packed.raw(), out.raw()),
            Codes::InPlace { packed, layout } => {
                let packed = packed.raw();
                let out = RawTensor {
                    ptr: packed.ptr,
                    dtype: DType::Ternary,
                    layout: *layout,
                };
                (packed, out)
            }
        }
    }
}

impl Operation for Params<'_> {
    const NAME: &'static str = OP;
    type Problem = Problem;

    fn problem(&self) -> Result<Problem> {
        let (packed, out) = self.codes.raw();
        if let Codes::Apart { packed, .. } = &self.codes
            && packed.scales().is_some()
        {
            let problem = "has scales: a file's are in its bytes";
            return Err(Error::invalid(OP, "packed", problem));
        }
        Arg::new(OP, "out", &out)
            .rank(&[2])?
            .dtype(&[DType::Ternary])?
            .rows_in_blocks()?
            .contiguous()?;
        let scale = self.scale.as_ref().map(TensorMut::raw);
        if let Some(scale) = &scale {
            Arg::new(OP, "scale", scale)
                .dtype(&[DType::F32])?
                .shape(&[1])?;
        }
        let problem = Problem {
            packed,
            out,
            scale,
            format: self.format,
        };
        Arg::new(OP, "packed", &packed)
            .dtype(&[DType::I8])?
            .shape(&[problem.bytes() + self.format.tail_bytes()])?
            .contiguous()?;
        Ok(problem)
    }

    fn tensors(&self, tensors: &mut Tensors) {
        match &self.codes {
            Codes::Apart { packed, out } => {
                tensors.read("packed", packed);
                tensors.write("out", out);
            }
            Codes::InPlace { packed, .. } => tensors.write("packed", packed),
        }
        tensors.write_optional("scale", self.scale.as_ref());
    }
}

operation::functions!();
