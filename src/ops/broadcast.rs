//! Every rank gets what one of them has: `out = x of rank root`.

use crate::comm::Comm;
use crate::context::{Collective, Context};
use crate::error::{Error, Result, text};
use crate::ops::check::Arg;
use crate::ops::collective::moved;
use crate::ops::operation::{self, Operation, Tensors};
use crate::problem::collective::{Kind, Parts, Problem};
use crate::tensor::InOut;

const OP: &str = "broadcast";

/// Arguments of [`forward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// This rank's part in the group.
    pub comm: &'a Comm,
    /// `out` `[..]`, alone: the root's is what the others' become. Or apart from `x`, of the same shape
    /// and dtype, whose data only the root reads. f32, f16, bf16, i32, i64, i8 or bool; contiguous; all
    /// ranks have as many elements of one dtype.
    pub x: InOut<'a>,
    /// The rank that has it, the same on all ranks.
    pub root: usize,
}

impl Params<'_> {
    fn is_root(&self) -> bool {
        self.comm.rank() == self.root
    }
}

impl<'a> Operation for Params<'a> {
    const NAME: &'static str = OP;
    type Problem = Collective<'a>;

    fn problem(&self) -> Result<Collective<'a>> {
        let out = self.x.output();
        let arg = moved(OP, "out", &out)?;
        if let InOut::Apart { input, .. } = &self.x {
            let x = input.raw();
            Arg::new(OP, "x", &x)
                .dtype_of(arg)?
                .shape_of(arg)?
                .contiguous()?;
        }
        if self.root >= self.comm.size() {
            let last = self.comm.size() - 1;
            let problem = text!("is {}, allowed: 0 to {last}", self.root);
            return Err(Error::invalid(OP, "root", problem));
        }
        Ok(Collective {
            transport: self.comm.transport(),
            problem: Problem {
                op: OP,
                kind: Kind::Broadcast(self.root),
                dtype: out.dtype,
                row: out.layout.num_elements(),
                x: self.is_root().then(|| self.x.input()),
                out: Some(out),
                sent: Parts::Even(1),
                received: Parts::Even(1),
            },
        })
    }

    fn tensors(&self, tensors: &mut Tensors) {
        match self.is_root() {
            true => tensors.in_out(("x", "out"), &self.x),
            false => tensors.write("out", self.x.written()),
        }
    }

    fn context(&self) -> Option<(&'static str, &Context)> {
        Some(("comm", self.comm.context()))
    }
}

operation::functions!();
