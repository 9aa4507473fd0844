//! A tensor goes to another rank, and one comes from another: `out = x of rank from`.
//!
//! Only the two ranks of a transfer call it, each with its side of it; a rank that sends and receives,
//! as in a ring, does both in one call. A sender's call is not over before the receiver's.

use crate::comm::Comm;
use crate::context::{Collective, Context};
use crate::error::{Error, Result, text};
use crate::ops::collective::moved;
use crate::ops::operation::{self, Operation, Tensors};
use crate::problem::collective::{Kind, Parts, Problem};
use crate::tensor::{TensorMut, TensorRef};

const OP: &str = "send_receive";

/// Arguments of [`forward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// This rank's part in the group.
    pub comm: &'a Comm,
    /// What is sent, `[..]`, and to which rank. f32, f16, bf16, i32, i64, i8 or bool; contiguous.
    pub x: Option<(TensorRef<'a>, usize)>,
    /// What is received, of as many elements as are sent and of their dtype, and from which rank;
    /// contiguous. One of the two at least is there. A rank that sends to itself also receives from
    /// itself.
    pub out: Option<(TensorMut<'a>, usize)>,
}

impl Params<'_> {
    fn check_peer(&self, name: &'static str, peer: usize) -> Result<()> {
        if peer < self.comm.size() {
            return Ok(());
        }
        let problem = text!("is {peer}, allowed: 0 to {}", self.comm.size() - 1);
        Err(Error::invalid(OP, name, problem))
    }
}

impl<'a> Operation for Params<'a> {
    const NAME: &'static str = OP;
    type Problem = Collective<'a>;

    fn problem(&self) -> Result<Collective<'a>> {
        let x = self.x.as_ref().map(|(x, to)| (x.raw(), *to));
        let out = self.out.as_ref().map(|(out, from)| (out.raw(), *from));
        let own = self.comm.rank();
        if let Some((x, to)) = &x {
            moved(OP, "x", x)?;
            self.check_peer("to", *to)?;
        }
        if let Some((out, from)) = &out {
            moved(OP, "out", out)?;
            self.check_peer("from", *from)?;
        }
        let Some(dtype) = x.or(out).map(|(tensor, _)| tensor.dtype) else {
            let problem = "is absent, and out too: one is required";
            return Err(Error::invalid(OP, "x", problem));
        };
        let (to, from) = (x.map(|(_, to)| to), out.map(|(_, from)| from));
        if (to == Some(own)) != (from == Some(own)) {
            let (name, other) = match to == Some(own) {
                true => ("to", "received from"),
                false => ("from", "sent to"),
            };
            let problem = text!("is {own}, this rank, and nothing is {other} it");
            return Err(Error::invalid(OP, name, problem));
        }
        Ok(Collective {
            transport: self.comm.transport(),
            problem: Problem {
                op: OP,
                kind: Kind::SendReceive {
                    to: to.unwrap_or(own),
                    from: from.unwrap_or(own),
                },
                dtype,
                row: 0,
                x: x.map(|(x, _)| x),
                out: out.map(|(out, _)| out),
                sent: Parts::Even(0),
                received: Parts::Even(0),
            },
        })
    }

    fn tensors(&self, tensors: &mut Tensors) {
        tensors.read_optional("x", self.x.as_ref().map(|(x, _)| x));
        tensors.write_optional("out", self.out.as_ref().map(|(out, _)| out));
    }

    fn context(&self) -> Option<(&'static str, &Context)> {
        Some(("comm", self.comm.context()))
    }
}

operation::functions!();
