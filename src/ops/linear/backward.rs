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

use crate::comm::Comm;
use crate::context::Collective;
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::layout::{Layout, MAX_RANK};
use crate::ops::check::{Arg, described, with_last};
use crate::ops::operation::{self, Operation, Tensors};
use crate::ops::parallel::{OF_DOUT, OF_DX, OF_X, Parallel, Partition, take};
use crate::ops::parts::{OneOr, Parts};
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
    /// The group that the weight is divided among, as in the forward pass; all tensors are this rank's
    /// parts. Of a weight divided by rows, `dx` is contiguous and gets the sum over ranks, sequence parallel
    /// its rows of it. Of one divided by columns nothing is added up; sequence parallel, `dout` is gathered,
    /// so `dbias` is of all rows on every rank.
    pub parallel: Option<Parallel<'a>>,
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

impl<'a> Params<'a> {
    /// The problem of a layer that is not divided.
    fn alone(&self) -> Result<Backward> {
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

    /// The same of this rank's part, with other rows and without what adds them up.
    fn of_rank<'t>(
        &'t self,
        dout: TensorRef<'t>,
        x: Option<TensorRef<'t>>,
        dx: Option<TensorMut<'t>>,
    ) -> Params<'t> {
        Params {
            dout,
            x,
            weight: self.weight,
            dx,
            dweight: described(&self.dweight),
            dbias: described(&self.dbias),
            accumulate: self.accumulate,
            workspace: Workspace::none(),
            parallel: None,
        }
    }

    /// Adds the gradients of a weight that is divided by columns.
    fn push_row(&self, parallel: &Parallel<'a>, parts: &mut Parts<'a, 1>) -> Result<()> {
        let mut dout = self.dout.raw();
        if parallel.sequence {
            Arg::new(OP, "dout", &dout)
                .min_rank(2)?
                .dtype(DType::FLOATS)?;
            dout = parallel.push_gather(OP, ("dout", OF_DOUT), dout, parts)?;
        }
        // SAFETY: the caller's tensors and the workspace, for one part.
        let of_rank = unsafe { self.of_rank(view(dout), self.x, described(&self.dx)) };
        parts.push(of_rank.alone(), &[])
    }

    /// Adds those of a weight that is divided by rows.
    fn push_column(&self, parallel: &Parallel<'a>, parts: &mut Parts<'a, 1>) -> Result<()> {
        let dout = self.dout.raw();
        let own_dx = self.dx.as_ref().map(TensorMut::raw);
        if let Some(dx) = &own_dx {
            Arg::new(OP, "dx", dx).contiguous()?;
        }
        if !parallel.sequence {
            let of_rank = self.of_rank(self.dout, self.x, described(&self.dx));
            let sum = own_dx.map(|dx| (dx, parallel.sum(OP, dx)));
            return push_summed(of_rank.alone()?, sum, parallel, parts);
        }
        let arg = Arg::new(OP, "dout", &dout)
            .min_rank(2)?
            .dtype(DType::FLOATS)?;
        let own = self.x.as_ref().map(TensorRef::raw);
        // This rank's rows of the input and of its gradient.
        for (name, own) in [("x", &own), ("dx", &own_dx)] {
            let Some(own) = own else { continue };
            let mut room = [0; MAX_RANK];
            let columns = own.layout.dim(own.layout.rank().saturating_sub(1));
            let shape = parallel.own_shape(OP, ("dout", &dout), columns, &mut room)?;
            Arg::new(OP, name, own).dtype_of(arg)?.shape(shape)?;
        }
        let all = |own: &RawTensor| -> Result<Layout> {
            let mut room = [0; MAX_RANK];
            let columns = own.layout.dim(own.layout.rank() - 1);
            Layout::contiguous(with_last(&dout, columns, &mut room))
        };
        let x = match (own, &self.dweight) {
            (Some(x), Some(_)) => Some(parallel.push_gather(OP, ("x", OF_X), x, parts)?),
            (Some(x), None) => Some(RawTensor {
                layout: all(&x)?,
                ..x
            }),
            (None, _) => None,
        };
        let dx = match &own_dx {
            Some(dx) => Some(take(dx, all(dx)?, parts)?),
            None => None,
        };
        // SAFETY: the caller's tensors and the workspace, for one part.
        let of_rank =
            unsafe { self.of_rank(self.dout, x.map(|x| view(x)), dx.map(|dx| view_mut(dx))) };
        let sum = dx.zip(own_dx).map(|(whole, own)| {
            let sum = parallel.scatter(OP, "dx", [whole, own])?;
            Ok::<_, Error>((own, sum))
        });
        push_summed(of_rank.alone()?, sum.transpose()?, parallel, parts)
    }
}

/// Adds gradients and the sum of that of the input, which is this one on this rank: beside the others' products
/// where there are rows enough.
fn push_summed<'a>(
    gradients: Backward,
    sum: Option<(RawTensor, Collective<'a>)>,
    parallel: &Parallel<'a>,
    parts: &mut Parts<'a, 1>,
) -> Result<()> {
    let Some((dx, sum)) = sum else {
        return parts.push(Ok(gradients), &[]);
    };
    let others = Backward {
        dx: None,
        ..gradients
    };
    if (others.dweight.is_none() && others.dbias.is_none()) || !parallel.sums_beside(&dx) {
        parts.push(Ok(gradients), &[])?;
        return parts.push_collective(sum, OF_DX);
    }
    let of_input = Backward {
        dweight: None,
        dbias: None,
        ..gradients
    };
    parts.push(Ok(of_input), &[])?;
    parts.push_beside(0, sum, OF_DX)?;
    parts.push(Ok(others), &[])?;
    parallel.push_join_of(OP, 0, parts)
}

/// A view of memory that the whole call lends, for the parameters of a part.
///
/// # Safety
/// The memory is the caller's or the workspace's, and is accessed only by the parts of one call.
unsafe fn view<'t>(t: RawTensor) -> TensorRef<'t> {
    // SAFETY: the caller's promise.
    unsafe { TensorRef::from_raw(t.ptr, t.dtype, t.layout) }
}

/// # Safety
/// As [`view`].
unsafe fn view_mut<'t>(t: RawTensor) -> TensorMut<'t> {
    // SAFETY: the caller's promise.
    unsafe { TensorMut::from_raw(t.ptr, t.dtype, t.layout) }
}

impl<'a> Operation for Params<'a> {
    const NAME: &'static str = OP;
    /// Where ranks divide the layer: the products, between what gathers and what adds up.
    type Problem = OneOr<'a, Backward, 1>;

    fn problem(&self) -> Result<Self::Problem> {
        let Some(parallel) = &self.parallel else {
            return Ok(OneOr::One(self.alone()?));
        };
        parallel.check(OP)?;
        let mut parts = Parts::new(OP, &self.workspace).exactly();
        match parallel.partition {
            Partition::Column => self.push_column(parallel, &mut parts)?,
            Partition::Row => self.push_row(parallel, &mut parts)?,
        }
        Ok(OneOr::Parts(parts))
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

    fn comm(&self) -> Option<&Comm> {
        self.parallel.as_ref().map(|parallel| parallel.comm)
    }
}

operation::functions!(backward);
