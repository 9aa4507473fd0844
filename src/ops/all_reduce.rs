//! Numbers of all ranks become one, which all get: `out = op(x of rank 0, x of rank 1, ..)`.
//!
//! In a local group numbers are reduced in the order of ranks, in f32 (integers in 64 bits), and
//! rounded once: all ranks have the same bits, and have them again.

use crate::comm::Comm;
use crate::context::{Collective, Context};
use crate::error::Result;
use crate::ops::check::Arg;
use crate::ops::collective::reduced;
use crate::ops::operation::{self, Operation, Tensors};
use crate::problem::collective::{Kind, Parts, Problem};
use crate::tensor::InOut;

pub use crate::problem::collective::ReduceOp;

const OP: &str = "all_reduce";

/// Arguments of [`forward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// This rank's part in the group.
    pub comm: &'a Comm,
    /// `x` `[..]` and what it becomes, of the same shape and dtype: f32, f16, bf16, i32, i64 or i8;
    /// contiguous. All ranks have as many elements of one dtype.
    pub x: InOut<'a>,
    /// The same on all ranks.
    pub op: ReduceOp,
}

impl<'a> Operation for Params<'a> {
    const NAME: &'static str = OP;
    type Problem = Collective<'a>;

    fn problem(&self) -> Result<Collective<'a>> {
        let (x, out) = (self.x.input(), self.x.output());
        let arg = reduced(OP, "x", &x, self.op)?;
        Arg::new(OP, "out", &out)
            .dtype_of(arg)?
            .shape_of(arg)?
            .contiguous()?;
        Ok(Collective {
            transport: self.comm.transport(),
            problem: Problem {
                op: OP,
                kind: Kind::AllReduce(self.op),
                dtype: x.dtype,
                row: x.layout.num_elements(),
                x: Some(x),
                out: Some(out),
                sent: Parts::Even(1),
                received: Parts::Even(1),
            },
        })
    }

    fn tensors(&self, tensors: &mut Tensors) {
        tensors.in_out(("x", "out"), &self.x);
    }

    fn context(&self) -> Option<(&'static str, &Context)> {
        Some(("comm", self.comm.context()))
    }
}

operation::functions!();
