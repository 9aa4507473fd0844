//! Partial sums of all ranks become the residual stream and its RMSNorm, which all get: what ends a block whose last product is
//! divided by columns, and begins the next one.
//!
//! ```text
//! s = residual + x of rank 0 + x of rank 1 + ..        (s = the sum without a residual)
//! y = s / sqrt(mean(s²) + epsilon) * (weight + weight_offset)
//! ```
//!
//! It is [`all_reduce`](crate::ops::all_reduce) and [`rms_norm`](mod@crate::ops::rms_norm), and where ranks have slots at each other
//! ([`Comm::warm_up`]) one launch of up to eight rows, of up to 16 KiB each: ranks write them to each other, and each
//! adds them up in the order of ranks, in f32, without rounding what lies between. All ranks have the same bits.
//! The memory is NCCL's (its windows), the launch is not: it waits for the other ranks on the device, and returns from that only
//! when they have come or the group is aborted.
//!
//! With sequence parallelism (arXiv:2205.05198) the residual stream of many rows is divided among the ranks: each adds up and normalises
//! its own rows, and all get all normalised rows. It is a [`reduce_scatter`](crate::ops::reduce_scatter), a norm and an
//! [`all_gather`](crate::ops::all_gather). Where input and output lie in memory that the group gave ([`Comm::alloc`]), copy engines bring the
//! ranks' parts, one kernel adds and normalises them, and copy engines take the rows to all: no multiprocessor waits for
//! another GPU, so that products on another stream keep theirs.

use crate::comm::Comm;
use crate::context::{Collective, Context, Normalised};
use crate::dtype::DType;
use crate::error::Result;
use crate::ops::check::Arg;
use crate::ops::collective::{part_of, parts, row, rows_of};
use crate::ops::operation::{self, Operation, Tensors};
use crate::ops::rms_norm;
use crate::problem;
use crate::problem::collective::{Kind, Parts, Problem, ReduceOp};
use crate::tensor::{InOut, TensorRef};

const OP: &str = "all_reduce_rms_norm";

/// Arguments of [`forward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// This rank's part in the group.
    pub comm: &'a Comm,
    /// `x` `[.., dim]`, this rank's part of the sum, and the output of the same shape and dtype: f32, f16 or bf16; contiguous. All
    /// ranks have one shape and one dtype.
    pub x: InOut<'a>,
    /// The residual, the same on all ranks, and its sum with all `x`; both like `x`, or with `sequence` of this rank's rows alone;
    /// `None` for none.
    pub residual: Option<InOut<'a>>,
    /// Gains `[dim]`, any float dtype; `None` for all ones. The same on all ranks.
    pub weight: Option<TensorRef<'a>>,
    /// Added to every gain: 0 for Llama, 1 for Gemma. 0 without a weight.
    pub weight_offset: f32,
    /// Added to the mean square; above 0.
    pub epsilon: f32,
    /// Whether the first dimension of the residual stream is divided evenly among the ranks, in their order. `x` has two dimensions
    /// or more then.
    pub sequence: bool,
}

impl<'a> Operation for Params<'a> {
    const NAME: &'static str = OP;
    type Problem = Normalised<'a>;

    fn problem(&self) -> Result<Normalised<'a>> {
        let (x, out) = (self.x.input(), self.x.output());
        let arg = Arg::new(OP, "x", &x)
            .min_rank(if self.sequence { 2 } else { 1 })?
            .dtype(DType::FLOATS)?
            .contiguous()?;
        Arg::new(OP, "out", &out)
            .dtype_of(arg)?
            .shape_of(arg)?
            .contiguous()?;
        let parts = match self.sequence {
            true => Some(parts(OP, self.comm, ("x", &x), ("x", None))?),
            false => None,
        };
        let rank = self.comm.rank();
        // What this rank adds up and normalises.
        let own = match parts {
            Some(parts) => part_of(&out, parts, rank)?,
            None => out,
        };
        if let Some(pair) = &self.residual {
            for (name, tensor) in [("residual", pair.input()), ("residual_out", pair.output())] {
                let of = Arg::new(OP, name, &tensor).dtype_of(arg)?.contiguous()?;
                match parts {
                    Some(parts) => rows_of(of, &x, parts.of(rank))?,
                    None => of.shape_of(arg).map(drop)?,
                }
            }
        }
        let weight = self.weight.as_ref().map(TensorRef::raw);
        rms_norm::check_gains(OP, &x, weight.as_ref(), self.weight_offset, self.epsilon)?;
        // The sum is made where the output will be.
        let norm = problem::rms_norm::Problem {
            x: own,
            out: own,
            residual: self.residual.as_ref().map(|r| (r.input(), r.output())),
            weight,
            weight_offset: self.weight_offset,
            epsilon: self.epsilon,
        };
        let whole = Problem {
            op: OP,
            kind: Kind::AllReduce(ReduceOp::Sum),
            dtype: x.dtype,
            row: x.layout.num_elements(),
            x: Some(x),
            out: Some(out),
            sent: Parts::Even(1),
            received: Parts::Even(1),
        };
        let divided = |kind, parts, from, to| Problem {
            kind,
            row: row(&out),
            x: Some(from),
            out: Some(to),
            sent: parts,
            received: parts,
            ..whole
        };
        let scattered = |parts| divided(Kind::ReduceScatter(ReduceOp::Sum), parts, x, own);
        Ok(Normalised {
            sum: Collective {
                transport: self.comm.transport(),
                problem: parts.map_or(whole, scattered),
            },
            norm,
            gathered: parts.map(|parts| divided(Kind::AllGather, parts, own, out)),
        })
    }

    fn tensors(&self, tensors: &mut Tensors) {
        tensors.in_out(("x", "out"), &self.x);
        tensors.read_optional("weight", self.weight.as_ref());
        if let Some(pair) = &self.residual {
            tensors.in_out(("residual", "residual_out"), pair);
        }
    }

    fn context(&self) -> Option<(&'static str, &Context)> {
        Some(("comm", self.comm.context()))
    }
}

operation::functions!();
