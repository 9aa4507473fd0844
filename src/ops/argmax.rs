//! The index of the greatest element of each row, such as a greedily sampled token.
//!
//! Of equal elements the first counts, and zeros are equal whatever their signs. NaN counts as greater than everything, so that a
//! row with NaN gives the index of the first, as in NumPy and PyTorch.

use crate::context::{Context, Device, Stream};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::ops::Implementation;
use crate::ops::check::Arg;
use crate::tensor::{RawTensor, TensorMut, TensorRef};

const OP: &str = "argmax";

/// Arguments of [`forward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// `[.., n]`, f32, f16 or bf16, with `n` at least 1; rows strided, contiguous in the last dimension.
    pub x: TensorRef<'a>,
    /// i32 or i64: the leading dimensions of `x`, or `[1]` if it has none; any strides.
    pub out: TensorMut<'a>,
}

/// Validated arguments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    pub x: RawTensor,
    pub out: RawTensor,
}

impl Params<'_> {
    fn problem(&self) -> Result<Problem> {
        let (x, out) = (self.x.raw(), self.out.raw());
        Arg::new(OP, "x", &x)
            .min_rank(1)?
            .dtype(DType::FLOATS)?
            .last_contiguous()?;
        let (columns, leading) = match x.layout.shape() {
            [columns] => (*columns, &[1][..]),
            [leading @ .., columns] => (*columns, leading),
            [] => (0, &[][..]),
        };
        Arg::new(OP, "out", &out)
            .dtype(&[DType::I32, DType::I64])?
            .shape(leading)?
            .writable()?;
        // Indices fit the i32 that they may be written as.
        if columns == 0 || columns > i32::MAX as usize {
            let problem = format!("has {columns} columns, allowed: 1 to {}", i32::MAX);
            return Err(Error::invalid(OP, "x", problem));
        }
        Ok(Problem { x, out })
    }

    fn check_data(&self, p: &Problem) -> Result<()> {
        let x = Arg::new(OP, "x", &p.x).data()?;
        Arg::new(OP, "out", &p.out).data()?.disjoint(x)?;
        Ok(())
    }
}

#[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
fn choose(ctx: &Context, problem: &Problem) -> Result<Implementation> {
    match ctx.device() {
        Device::Cpu(_) => Ok(Implementation::Cpu),
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => {
            crate::cuda::argmax::supported(problem)?;
            Ok(Implementation::Cuda)
        }
    }
}

/// Which implementation [`forward`] would run with these arguments. Data pointers are not looked at.
///
/// # Errors
/// Why there is none.
pub fn supported(ctx: &Context, params: &Params<'_>) -> Result<Implementation> {
    choose(ctx, &params.problem()?)
}

/// Finds the indices on `stream`. Needs no workspace; does not allocate or synchronise.
///
/// # Errors
/// An argument is wrong (nothing was written), or the launch failed.
#[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
pub fn forward(ctx: &Context, params: &Params<'_>, stream: Stream) -> Result<()> {
    let problem = params.problem()?;
    params.check_data(&problem)?;
    choose(ctx, &problem)?;
    match ctx.device() {
        Device::Cpu(cpu) => crate::cpu::argmax::forward(cpu, &problem),
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => crate::cuda::argmax::forward(cuda, &problem, stream)?,
    }
    Ok(())
}
