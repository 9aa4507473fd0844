//! Embedding: rows of a table, gathered by token id.

use crate::context::{Context, Device, Stream};
use crate::dtype::DType;
use crate::error::Result;
use crate::layout::MAX_RANK;
use crate::ops::Implementation;
use crate::ops::check::Arg;
use crate::tensor::{RawTensor, TensorMut, TensorRef};

const OP: &str = "embedding";

/// Arguments of [`forward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// `[vocab, dim]`, f32, f16 or bf16; rows strided, contiguous in the last dimension.
    pub table: TensorRef<'a>,
    /// i32 or i64 of any shape `[..]`, any strides. Each must be a row of the table; on a device, where the host cannot look, the
    /// output of an id outside becomes a row of NaN.
    pub ids: TensorRef<'a>,
    /// `[.., dim]`: the shape of `ids`, then the table's rows; f32, f16 or bf16, rows strided. In another dtype than the table
    /// each element is converted, rounding to nearest even.
    pub out: TensorMut<'a>,
}

/// Validated arguments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    pub table: RawTensor,
    pub ids: RawTensor,
    pub out: RawTensor,
}

impl Params<'_> {
    fn problem(&self) -> Result<Problem> {
        let (table, ids, out) = (self.table.raw(), self.ids.raw(), self.out.raw());
        Arg::new(OP, "table", &table)
            .rank(&[2])?
            .dtype(DType::FLOATS)?
            .last_contiguous()?;
        Arg::new(OP, "ids", &ids)
            .rank(&[1, 2, 3, 4, MAX_RANK - 1])?
            .dtype(&[DType::I32, DType::I64])?;
        let rank = ids.layout.rank();
        let mut shape = [table.layout.dim(1); MAX_RANK];
        shape[..rank].copy_from_slice(ids.layout.shape());
        Arg::new(OP, "out", &out)
            .dtype(DType::FLOATS)?
            .shape(&shape[..=rank])?
            .last_contiguous()?
            .writable()?;
        Ok(Problem { table, ids, out })
    }

    fn check_data(&self, p: &Problem) -> Result<()> {
        let table = Arg::new(OP, "table", &p.table).data()?;
        let ids = Arg::new(OP, "ids", &p.ids).data()?;
        Arg::new(OP, "out", &p.out)
            .data()?
            .disjoint(table)?
            .disjoint(ids)?;
        Ok(())
    }
}

#[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
fn choose(ctx: &Context, problem: &Problem) -> Result<Implementation> {
    match ctx.device() {
        Device::Cpu(_) => Ok(Implementation::Cpu),
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => {
            crate::cuda::embedding::supported(problem)?;
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

/// Gathers rows on `stream`. Needs no workspace; does not allocate or synchronise.
///
/// # Errors
/// An argument is wrong (nothing was written), or the launch failed. On the CPU an id outside the table is such an argument.
#[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
pub fn forward(ctx: &Context, params: &Params<'_>, stream: Stream) -> Result<()> {
    let problem = params.problem()?;
    params.check_data(&problem)?;
    choose(ctx, &problem)?;
    match ctx.device() {
        Device::Cpu(cpu) => crate::cpu::embedding::forward(cpu, &problem),
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => crate::cuda::embedding::forward(cuda, &problem, stream),
    }
}
