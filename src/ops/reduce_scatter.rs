//! Numbers of all ranks become one, of which each rank gets its rows: those of
//! [`all_reduce`](crate::ops::all_reduce), bit for bit in a local group.

use crate::comm::Comm;
use crate::context::{Collective, Context};
use crate::error::Result;
use crate::ops::check::Arg;
use crate::ops::collective::{is_part, part_of, parts, reduced, row, rows_of};
use crate::ops::operation::{self, Operation, Tensors};
use crate::problem::collective::{Kind, Problem};
use crate::tensor::{InOut, TensorMut, TensorRef};

pub use crate::problem::collective::ReduceOp;

const OP: &str = "reduce_scatter";

/// Arguments of [`forward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// This rank's part in the group.
    pub comm: &'a Comm,
    /// Apart: `x` with the rows of all ranks, and `out` `[rows, ..]` for this rank's. In place: `x`
    /// alone, in which this rank's rows become the result, and the others stay as they are. f32, f16,
    /// bf16, i32, i64 or i8, of one dtype on all ranks; contiguous.
    pub x: InOut<'a>,
    /// The same on all ranks.
    pub op: ReduceOp,
    /// The rows of each rank, the same on all; `None` for as many of each.
    pub counts: Option<&'a [i64]>,
}

impl<'a> Params<'a> {
    /// In place if `out` is absent, or this rank's rows of `x` by its address.
    ///
    /// # Safety
    /// As [`TensorMut::from_raw`] of `x` where it is in place, else as [`TensorRef::from_raw`].
    pub(crate) unsafe fn new(
        comm: &'a Comm,
        x: TensorMut<'a>,
        out: Option<TensorMut<'a>>,
        op: ReduceOp,
        counts: Option<&'a [i64]>,
    ) -> Params<'a> {
        let whole = x.raw();
        let out = out.filter(|out| {
            // What is wrong with counts is told later.
            let parts = parts(OP, comm, ("x", &whole), ("counts", counts));
            !parts.is_ok_and(|parts| is_part(&out.raw(), &whole, parts, comm.rank()))
        });
        let x = match out {
            None => InOut::InPlace(x),
            Some(output) => InOut::Apart {
                // SAFETY: the caller's promise.
                input: unsafe { TensorRef::from_raw(whole.ptr, whole.dtype, whole.layout) },
                output,
            },
        };
        Params {
            comm,
            x,
            op,
            counts,
        }
    }
}

impl<'a> Operation for Params<'a> {
    const NAME: &'static str = OP;
    type Problem = Collective<'a>;

    fn problem(&self) -> Result<Collective<'a>> {
        let x = self.x.input();
        let arg = reduced(OP, "x", &x, self.op)?;
        let parts = parts(OP, self.comm, ("x", &x), ("counts", self.counts))?;
        let rank = self.comm.rank();
        let out = match &self.x {
            InOut::InPlace(_) => part_of(&x, parts, rank)?,
            InOut::Apart { output, .. } => {
                let out = output.raw();
                let of = Arg::new(OP, "out", &out).contiguous()?.dtype_of(arg)?;
                rows_of(of, &x, parts.of(rank))?;
                out
            }
        };
        Ok(Collective {
            transport: self.comm.transport(),
            problem: Problem {
                op: OP,
                kind: Kind::ReduceScatter(self.op),
                dtype: x.dtype,
                row: row(&x),
                x: Some(x),
                out: Some(out),
                sent: parts,
                received: parts,
            },
        })
    }

    fn tensors(&self, tensors: &mut Tensors) {
        match &self.x {
            InOut::InPlace(x) => tensors.write("x", x),
            InOut::Apart { .. } => tensors.in_out(("x", "out"), &self.x),
        }
    }

    fn context(&self) -> Option<(&'static str, &Context)> {
        Some(("comm", self.comm.context()))
    }
}

operation::functions!();
