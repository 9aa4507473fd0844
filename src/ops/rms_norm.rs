//! RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), with an optional fused residual addition.
//!
//! For every row `s` of length `dim` (the last dimension):
//!
//! ```text
//! s = x + residual                                     (s = x without a residual)
//! y = s / sqrt(mean(s²) + epsilon) * (weight + weight_offset)
//! ```
//!
//! Rows are independent, so the same call normalises hidden states `[tokens, hidden]` and, for QK-norm, heads
//! `[batch, seq, heads, head_dim]`. All arithmetic is f32; the normalisation uses the f32 sum, not its rounded copy.

use crate::context::{Context, Device, Stream};
use crate::dtype::DType;
use crate::error::Result;
use crate::ops::Implementation;
use crate::ops::check::{self, Arg};
use crate::tensor::{InOut, RawTensor, TensorRef};

const OP: &str = "rms_norm";

/// Arguments of [`forward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// `x` `[.., dim]` and the output of the same shape and dtype (f32, f16 or bf16); strided, contiguous in the last dimension.
    pub x: InOut<'a>,
    /// The residual and its updated sum `x + residual`, both like `x`; `None` for plain normalisation.
    pub residual: Option<InOut<'a>>,
    /// Gains `[dim]`, any float dtype; `None` for all ones.
    pub weight: Option<TensorRef<'a>>,
    /// Added to every gain: 0 for Llama, 1 for Gemma, whose stored gains are centred on zero.
    pub weight_offset: f32,
    /// Added to the mean square; not negative.
    pub epsilon: f32,
}

/// Validated arguments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    pub x: RawTensor,
    pub out: RawTensor,
    pub residual: Option<(RawTensor, RawTensor)>,
    pub weight: Option<RawTensor>,
    pub weight_offset: f32,
    pub epsilon: f32,
}

impl Params<'_> {
    fn problem(&self) -> Result<Problem> {
        let x = self.x.input();
        let arg = Arg::new(OP, "x", &x).min_rank(1)?.dtype(DType::FLOATS)?;
        check::in_out(OP, ("x", "out"), &self.x)?;
        let residual = match &self.residual {
            None => None,
            Some(pair) => {
                let (input, output) = (pair.input(), pair.output());
                Arg::new(OP, "residual", &input)
                    .dtype_of(arg)?
                    .shape_of(arg)?;
                check::in_out(OP, ("residual", "residual_out"), pair)?;
                Some((input, output))
            }
        };
        let weight = self.weight.as_ref().map(TensorRef::raw);
        if let Some(w) = &weight {
            let dim = x.layout.dim(x.layout.rank() - 1);
            Arg::new(OP, "weight", w)
                .dtype(DType::FLOATS)?
                .shape(&[dim])?
                .last_contiguous()?;
        }
        check::finite(OP, "weight_offset", self.weight_offset)?;
        if check::finite(OP, "epsilon", self.epsilon)? < 0.0 {
            let problem = format!("is {}, at least 0 is needed", self.epsilon);
            return Err(crate::Error::invalid(OP, "epsilon", problem));
        }
        Ok(Problem {
            x,
            out: self.x.output(),
            residual,
            weight,
            weight_offset: self.weight_offset,
            epsilon: self.epsilon,
        })
    }

    fn check_data(&self, p: &Problem) -> Result<()> {
        check::in_out_data(OP, ("x", "out"), &self.x)?;
        let (x, out) = (Arg::new(OP, "x", &p.x), Arg::new(OP, "out", &p.out));
        if let Some(w) = &p.weight {
            let w = Arg::new(OP, "weight", w).data()?;
            out.disjoint(w)?;
        }
        if let (Some(pair), Some((input, output))) = (&self.residual, &p.residual) {
            check::in_out_data(OP, ("residual", "residual_out"), pair)?;
            out.disjoint(Arg::new(OP, "residual", input))?;
            let sum = Arg::new(OP, "residual_out", output)
                .disjoint(x)?
                .disjoint(out)?;
            if let Some(w) = &p.weight {
                sum.disjoint(Arg::new(OP, "weight", w))?;
            }
        }
        Ok(())
    }
}

#[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
fn choose(ctx: &Context, problem: &Problem) -> Result<Implementation> {
    match ctx.device() {
        Device::Cpu(_) => Ok(Implementation::Cpu),
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => {
            crate::cuda::rms_norm::supported(problem)?;
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

/// Computes RMSNorm on `stream`. Needs no workspace; does not allocate or synchronise.
///
/// # Errors
/// An argument is wrong (nothing was written), or the launch failed.
#[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
pub fn forward(ctx: &Context, params: &Params<'_>, stream: Stream) -> Result<()> {
    let problem = params.problem()?;
    params.check_data(&problem)?;
    choose(ctx, &problem)?;
    match ctx.device() {
        Device::Cpu(cpu) => crate::cpu::rms_norm::forward(cpu, &problem),
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => crate::cuda::rms_norm::forward(cuda, &problem, stream)?,
    }
    Ok(())
}
