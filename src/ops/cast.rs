//! Conversion between float dtypes.
//!
//! A number is rounded once, to the nearest of the output's dtype, ties to even; what is too great becomes an infinity, and NaN stays
//! NaN. In the dtype of the input it is a copy, bit for bit.

use crate::context::{Context, Device, Stream};
use crate::dtype::DType;
use crate::error::Result;
use crate::ops::Implementation;
use crate::ops::check::Arg;
use crate::tensor::{RawTensor, TensorMut, TensorRef};

const OP: &str = "cast";

/// Arguments of [`forward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// `[.., dim]`, f32, f16 or bf16; rows strided, contiguous in the last dimension.
    pub x: TensorRef<'a>,
    /// The shape of `x`, f32, f16 or bf16; rows strided, contiguous in the last dimension.
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
        let arg = Arg::new(OP, "x", &x)
            .min_rank(1)?
            .dtype(DType::FLOATS)?
            .last_contiguous()?;
        Arg::new(OP, "out", &out)
            .dtype(DType::FLOATS)?
            .shape_of(arg)?
            .last_contiguous()?
            .writable()?;
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
            crate::cuda::cast::supported(problem)?;
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

/// Converts on `stream`. Needs no workspace; does not allocate or synchronise.
///
/// # Errors
/// An argument is wrong (nothing was written), or the launch failed.
#[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
pub fn forward(ctx: &Context, params: &Params<'_>, stream: Stream) -> Result<()> {
    let problem = params.problem()?;
    params.check_data(&problem)?;
    choose(ctx, &problem)?;
    match ctx.device() {
        Device::Cpu(cpu) => crate::cpu::cast::forward(cpu, &problem),
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => crate::cuda::cast::forward(cuda, &problem, stream)?,
    }
    Ok(())
}
