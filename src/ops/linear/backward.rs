//! The backward pass of a linear layer `y = x Wᵀ + bias`:
//!
//! ```text
//! dx      = dout W
//! dweight = doutᵀ x          summed over all rows
//! dbias   = sum of dout      over all rows
//! ```
//!
//! Each is optional, and what is absent costs nothing. (A residual's gradient is `dout` itself.)
//! Sums are f32 and rounded once; with [`Params::accumulate`] they are added to what `dweight` and
//! `dbias` hold, as several micro-batches ask for. No matrix is transposed in memory. The same
//! inputs give the same bits with any number of threads.

use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::layout::MAX_RANK;
use crate::ops::check::{Arg, with_last};
use crate::ops::operation::{self, Operation, Tensors};
use crate::problem::linear::{Backward, Gradient};
use crate::tensor::{RawTensor, TensorMut, TensorRef, Workspace};

const OP: &str = "linear_backward";

/// Arguments of [`backward`]. At least one of `dx`, `dweight` and `dbias` is there.
#[derive(Debug)]
pub struct Params<'a> {
    /// `[.., out_features]`, f32, f16 or bf16: the gradient of the output; rows strided, contiguous
    /// in the last dimension.
    pub dout: TensorRef<'a>,
    /// `[.., in_features]`, leading dimensions and dtype of `dout`: the layer's input; rows
    /// strided. `dweight` needs it; without `dweight` its data is not looked at.
    pub x: Option<TensorRef<'a>>,
    /// `[out_features, in_features]`, any float dtype whatever that of `dout`; rows strided. `dx`
    /// needs it; without `dx` its data is not looked at.
    pub weight: Option<TensorRef<'a>>,
    /// `[.., in_features]`, leading dimensions and dtype of `dout`: overwritten; rows strided.
    pub dx: Option<TensorMut<'a>>,
    /// `[out_features, in_features]`, the weight's dtype or f32 (any float dtype is taken); rows
    /// strided.
    pub dweight: Option<TensorMut<'a>>,
    /// `[out_features]`, the bias's dtype or f32 (any float dtype is taken), contiguous.
    pub dbias: Option<TensorMut<'a>>,
    /// Adds to what `dweight` and `dbias` hold, which must be f32 then. `dx` is overwritten always.
    pub accumulate: bool,
    /// What a call needs is refused below [`workspace_size`].
    pub workspace: Workspace<'a>,
}

impl Params<'_> {
    /// Checks input and weight, whether needed or not, and gives `in_features` if one is there.
    fn in_features(&self, dout: &RawTensor) -> Result<Option<usize>> {
        let arg = Arg::new(OP, "dout", dout);
        let x = self.x.as_ref().map(TensorRef::raw);
        let weight = self.weight.as_ref().map(TensorRef::raw);
        let mut size = None;
        if let Some(x) = &x {
            let in_features = x.layout.dim(x.layout.rank().saturating_sub(1));
            let mut room = [0; MAX_RANK];
            Arg::new(OP, "x", x)
                .dtype_of(arg)?
                .shape(with_last(dout, in_features, &mut room))?
                .last_contiguous()?;
            size = Some(in_features);
        }
        if let Some(weight) = &weight {
            let out_features = dout.layout.dim(dout.layout.rank() - 1);
            let in_features = size.unwrap_or(weight.layout.dim(1));
            Arg::new(OP, "weight", weight)
                .rank(&[2])?
                .dtype(DType::FLOATS)?
                .shape(&[out_features, in_features])?
                .last_contiguous()?;
            size = Some(in_features);
        }
        Ok(size)
    }

    /// Checks the gradient of a parameter.
    fn of_parameter(
        &self,
        name: &'static str,
        gradient: &RawTensor,
        shape: &[usize],
    ) -> Result<()> {
        let allowed = match self.accumulate {
            true => &[DType::F32],
            false => DType::FLOATS,
        };
        Arg::new(OP, name, gradient)
            .dtype(allowed)?
            .shape(shape)?
            .last_contiguous()?
            .writable()?;
        Ok(())
    }
}

/// A gradient that is wanted, and the tensor by which `dout` is multiplied for it; `names` are
/// theirs, that tensor's first.
fn gradient(
    out: Option<RawTensor>,
    by: Option<&TensorRef<'_>>,
    names: (&'static str, &'static str),
) -> Result<Option<Gradient>> {
    match (out, by) {
        (None, _) => Ok(None),
        (Some(out), Some(by)) => Ok(Some(Gradient { by: by.raw(), out })),
        (Some(_), None) => {
            let problem = text!("is absent (rank 0), {} needs it", names.1);
            Err(Error::invalid(OP, names.0, problem))
        }
    }
}

impl Operation for Params<'_> {
    const NAME: &'static str = OP;
    type Problem = Backward;

    fn problem(&self) -> Result<Backward> {
        let dout = self.dout.raw();
        let arg = Arg::new(OP, "dout", &dout)
            .min_rank(1)?
            .dtype(DType::FLOATS)?
            .last_contiguous()?;
        let out_features = dout.layout.dim(dout.layout.rank() - 1);
        let in_features = self.in_features(&dout)?;
        let [dx, dweight, dbias] =
            [&self.dx, &self.dweight, &self.dbias].map(|t| t.as_ref().map(TensorMut::raw));
        if dx.is_none() && dweight.is_none() && dbias.is_none() {
            let problem = "is absent (rank 0), and so are dweight and dbias: one is needed";
            return Err(Error::invalid(OP, "dx", problem));
        }
        let dx = gradient(dx, self.weight.as_ref(), ("weight", "dx"))?;
        let dweight = gradient(dweight, self.x.as_ref(), ("x", "dweight"))?;
        let in_features = in_features.unwrap_or(0);
        if let Some(Gradient { out, .. }) = &dx {
            let mut room = [0; MAX_RANK];
            Arg::new(OP, "dx", out)
                .dtype_of(arg)?
                .shape(with_last(&dout, in_features, &mut room))?
                .last_contiguous()?
                .writable()?;
        }
        if let Some(Gradient { out, .. }) = &dweight {
            self.of_parameter("dweight", out, &[out_features, in_features])?;
        }
        if let Some(dbias) = &dbias {
            self.of_parameter("dbias", dbias, &[out_features])?;
        }
        Ok(Backward {
            dout,
            dx,
            add_dx: false,
            dweight,
            dbias,
            accumulate: self.accumulate,
        })
    }

    fn tensors(&self, tensors: &mut Tensors) {
        tensors.read("dout", &self.dout);
        if self.dweight.is_some() {
            tensors.read_optional("x", self.x.as_ref());
        }
        if self.dx.is_some() {
            tensors.read_optional("weight", self.weight.as_ref());
        }
        tensors.write_optional("dx", self.dx.as_ref());
        tensors.write_optional("dweight", self.dweight.as_ref());
        tensors.write_optional("dbias", self.dbias.as_ref());
    }

    fn workspace(&self) -> Option<&Workspace<'_>> {
        Some(&self.workspace)
    }
}

operation::functions!(backward);
