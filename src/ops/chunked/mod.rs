//! Linear layers whose output is never stored whole, as a language model's logits: tokens are taken
//! in chunks, each of which is multiplied, used and differentiated in the same memory.

mod chunks;
mod plan;

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::ops::check::{Arg, parameter_gradient};
use crate::ops::linear::Weights;
use crate::ops::operation::Tensors;
use crate::problem::chunked::Layer;
use crate::tensor::{RawTensor, TensorMut, TensorRef};
pub(crate) use chunks::merged;
pub(crate) use plan::{Chunked, Memory, Rooms};

/// What the parameters of an operation have of such a layer.
pub(crate) struct Fields<'p, 'a> {
    pub x: &'p TensorRef<'a>,
    pub weights: &'p Weights<'a>,
    pub dx: &'p Option<TensorMut<'a>>,
    pub dweight: &'p Option<TensorMut<'a>>,
    pub dbias: &'p Option<TensorMut<'a>>,
    pub accumulate: bool,
    pub chunk_tokens: usize,
}

impl Fields<'_, '_> {
    /// Checks them. Leading dimensions are as they were given. A rank may have no rows of a weight that
    /// is `divided`.
    pub fn layer(&self, op: &'static str, divided: bool) -> Result<Layer> {
        let x = self.x.raw();
        let arg = Arg::new(op, "x", &x)
            .min_rank(2)?
            .dtype(DType::FLOATS)?
            .last_contiguous()?;
        let hidden = x.layout.dim(x.layout.rank() - 1);
        self.weights.check_floats(op, "weight")?;
        let weights = self.weights.problem(op, ("weight", "bias"), hidden)?;
        let vocab = weights.out_features();
        if vocab == 0 && !divided {
            let problem = "has no rows, there is no target among them";
            return Err(Error::invalid(op, "weight", problem));
        }
        let [dx, dweight, dbias] =
            [self.dx, self.dweight, self.dbias].map(|t| t.as_ref().map(TensorMut::raw));
        if let Some(dx) = &dx {
            Arg::new(op, "dx", dx)
                .dtype_of(arg)?
                .shape_of(arg)?
                .last_contiguous()?
                .writable()?;
        }
        let of_parameter = |name, gradient: &Option<RawTensor>, shape: &[usize]| {
            gradient.as_ref().map_or(Ok(()), |gradient| {
                parameter_gradient(Arg::new(op, name, gradient), self.accumulate)?
                    .shape(shape)?
                    .last_contiguous()?
                    .writable()
                    .map(drop)
            })
        };
        of_parameter("dweight", &dweight, &[vocab, hidden])?;
        of_parameter("dbias", &dbias, &[vocab])?;
        Ok(Layer {
            x,
            weights,
            dx,
            dweight,
            dbias,
            accumulate: self.accumulate,
            chunk_tokens: self.chunk_tokens,
        })
    }

    /// What it reads and writes.
    pub fn tensors(&self, tensors: &mut Tensors) {
        tensors.read("x", self.x);
        self.weights.tensors(("weight", "bias"), tensors);
        tensors.write_optional("dx", self.dx.as_ref());
        tensors.write_optional("dweight", self.dweight.as_ref());
        tensors.write_optional("dbias", self.dbias.as_ref());
    }
}
