//! What the backward passes of RMSNorm and LayerNorm check alike.

use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::ops::check::{self, Arg};
use crate::ops::operation::Tensors;
use crate::problem::norm::{Backward, Parameters};
use crate::tensor::{InOut, TensorMut, TensorRef};

/// The arguments of both, borrowed from theirs.
pub(super) struct Arguments<'p, 'a> {
    pub op: &'static str,
    pub centered: bool,
    pub x: &'p TensorRef<'a>,
    pub dout: &'p InOut<'a>,
    pub dresidual: Option<&'p TensorRef<'a>>,
    pub weight: Option<&'p TensorRef<'a>>,
    pub weight_offset: f32,
    pub epsilon: f32,
    pub dweight: Option<&'p TensorMut<'a>>,
    pub dbias: Option<&'p TensorMut<'a>>,
    pub accumulate: bool,
}

impl Arguments<'_, '_> {
    pub fn problem(&self) -> Result<Backward> {
        let op = self.op;
        let x = self.x.raw();
        let arg = Arg::new(op, "x", &x)
            .min_rank(1)?
            .dtype(DType::FLOATS)?
            .last_contiguous()?;
        let dout = self.dout.input();
        Arg::new(op, "dout", &dout).dtype_of(arg)?.shape_of(arg)?;
        check::in_out(op, ("dout", "dx"), self.dout)?;
        let dresidual = self.dresidual.map(TensorRef::raw);
        if let Some(dresidual) = &dresidual {
            Arg::new(op, "dresidual", dresidual)
                .dtype_of(arg)?
                .shape_of(arg)?
                .last_contiguous()?;
        }
        let dim = x.layout.dim(x.layout.rank() - 1);
        let weight = self.weight.map(TensorRef::raw);
        if let Some(weight) = &weight {
            Arg::new(op, "weight", weight)
                .dtype(DType::FLOATS)?
                .shape(&[dim])?
                .last_contiguous()?;
        }
        check::finite(op, "weight_offset", self.weight_offset)?;
        if weight.is_none() && self.weight_offset != 0.0 {
            let problem = text!("is {}, without a weight it must be 0", self.weight_offset);
            return Err(Error::invalid(op, "weight_offset", problem));
        }
        if check::finite(op, "epsilon", self.epsilon)? <= 0.0 {
            let problem = text!("is {}, it must be above 0", self.epsilon);
            return Err(Error::invalid(op, "epsilon", problem));
        }
        if weight.is_none() && self.dweight.is_some() {
            let problem = "is there, without a weight it has no use";
            return Err(Error::invalid(op, "dweight", problem));
        }
        let gradient = |name, gradient: Option<&TensorMut<'_>>| match gradient {
            None => Ok(None),
            Some(gradient) => {
                let raw = gradient.raw();
                check::parameter_gradient(Arg::new(op, name, &raw), self.accumulate)?
                    .shape(&[dim])?
                    .last_contiguous()?
                    .writable()?;
                Ok(Some(raw))
            }
        };
        Ok(Backward {
            centered: self.centered,
            x,
            dout,
            dx: self.dout.output(),
            dresidual,
            weight,
            weight_offset: self.weight_offset,
            epsilon: self.epsilon,
            parameters: Parameters {
                dweight: gradient("dweight", self.dweight)?,
                dbias: gradient("dbias", self.dbias)?,
                accumulate: self.accumulate,
            },
        })
    }

    pub fn tensors(&self, tensors: &mut Tensors) {
        tensors.read("x", self.x);
        tensors.in_out(("dout", "dx"), self.dout);
        tensors.read_optional("dresidual", self.dresidual);
        tensors.read_optional("weight", self.weight);
        tensors.write_optional("dweight", self.dweight);
        tensors.write_optional("dbias", self.dbias);
    }
}
