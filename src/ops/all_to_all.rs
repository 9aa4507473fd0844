//! Every rank sends rows to every rank: `out` is what rank 0 sends to this one, then what rank 1 does,
//! and so on.

use crate::comm::Comm;
use crate::context::{Collective, Context};
use crate::error::Result;
use crate::ops::check::Arg;
use crate::ops::collective::{moved, parts, row, rows_of};
use crate::ops::operation::{self, Operation, Tensors};
use crate::problem::collective::{Kind, Problem};
use crate::tensor::{TensorMut, TensorRef};

const OP: &str = "all_to_all";

/// Arguments of [`forward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// This rank's part in the group.
    pub comm: &'a Comm,
    /// `[rows, ..]`: the rows for rank 0, then those for rank 1, and so on. f32, f16, bf16, i32, i64,
    /// i8 or bool, of one dtype on all ranks; contiguous.
    pub x: TensorRef<'a>,
    /// Rows like those of `x`: what rank 0 sends, then what rank 1 does, and so on; contiguous.
    pub out: TensorMut<'a>,
    /// The rows of `x` for each rank; `None` for as many for each.
    pub send_counts: Option<&'a [i64]>,
    /// The rows of `out` of each rank, which are those that it sends; `None` for as many of each.
    pub receive_counts: Option<&'a [i64]>,
}

impl<'a> Operation for Params<'a> {
    const NAME: &'static str = OP;
    type Problem = Collective<'a>;

    fn problem(&self) -> Result<Collective<'a>> {
        let (x, out) = (self.x.raw(), self.out.raw());
        let arg = moved(OP, "x", &x)?;
        let of = Arg::new(OP, "out", &out).dtype_of(arg)?.contiguous()?;
        rows_of(of, &x, out.layout.dim(0))?;
        let send_counts = ("send_counts", self.send_counts);
        let receive_counts = ("receive_counts", self.receive_counts);
        Ok(Collective {
            transport: self.comm.transport(),
            problem: Problem {
                op: OP,
                kind: Kind::AllToAll,
                dtype: x.dtype,
                row: row(&x),
                x: Some(x),
                out: Some(out),
                sent: parts(OP, self.comm, ("x", &x), send_counts)?,
                received: parts(OP, self.comm, ("out", &out), receive_counts)?,
            },
        })
    }

    fn tensors(&self, tensors: &mut Tensors) {
        tensors.read("x", &self.x);
        tensors.write("out", &self.out);
    }

    fn context(&self) -> Option<(&'static str, &Context)> {
        Some(("comm", self.comm.context()))
    }
}

operation::functions!();
