//! Every rank gets the rows of all: `out` is `x` of rank 0, then `x` of rank 1, and so on.

use crate::comm::Comm;
use crate::context::{Collective, Context};
use crate::error::Result;
use crate::ops::check::Arg;
use crate::ops::collective::{is_part, moved, part_of, parts, row, rows_of};
use crate::ops::operation::{self, Operation, Tensors};
use crate::problem::collective::{Kind, Problem};
use crate::tensor::{InOut, TensorMut, TensorRef};

const OP: &str = "all_gather";

/// Arguments of [`forward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// This rank's part in the group.
    pub comm: &'a Comm,
    /// Apart: `x` `[rows, ..]`, and `out` with the rows of all ranks. In place: `out` alone, in which
    /// this rank's rows are at their place. f32, f16, bf16, i32, i64, i8 or bool, of one dtype on all
    /// ranks; contiguous.
    pub x: InOut<'a>,
    /// The rows of each rank, the same on all; `None` for as many of each.
    pub counts: Option<&'a [i64]>,
}

impl<'a> Params<'a> {
    /// In place if `x` is absent, or this rank's rows of `out` by its address.
    pub(crate) fn new(
        comm: &'a Comm,
        x: Option<TensorRef<'a>>,
        out: TensorMut<'a>,
        counts: Option<&'a [i64]>,
    ) -> Params<'a> {
        let whole = out.raw();
        let x = x.filter(|x| {
            // What is wrong with counts is told later.
            let parts = parts(OP, comm, ("out", &whole), ("counts", counts));
            !parts.is_ok_and(|parts| is_part(&x.raw(), &whole, parts, comm.rank()))
        });
        let x = match x {
            Some(input) => InOut::Apart { input, output: out },
            None => InOut::InPlace(out),
        };
        Params { comm, x, counts }
    }
}

impl<'a> Operation for Params<'a> {
    const NAME: &'static str = OP;
    type Problem = Collective<'a>;

    fn problem(&self) -> Result<Collective<'a>> {
        let out = self.x.output();
        moved(OP, "out", &out)?;
        let parts = parts(OP, self.comm, ("out", &out), ("counts", self.counts))?;
        let rank = self.comm.rank();
        let x = match &self.x {
            InOut::InPlace(_) => part_of(&out, parts, rank)?,
            InOut::Apart { input, .. } => {
                let x = input.raw();
                let arg = Arg::new(OP, "x", &x).contiguous()?;
                arg.dtype_of(Arg::new(OP, "out", &out))?;
                rows_of(arg, &out, parts.of(rank))?;
                x
            }
        };
        Ok(Collective {
            transport: self.comm.transport(),
            problem: Problem {
                op: OP,
                kind: Kind::AllGather,
                dtype: out.dtype,
                row: row(&out),
                x: Some(x),
                out: Some(out),
                sent: parts,
                received: parts,
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
