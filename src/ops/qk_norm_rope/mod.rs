//! QK-norm (Henry et al. 2020, arXiv:2010.04245; as an RMSNorm with gains in Qwen 3 and Gemma 3) and
//! RoPE in one pass.
//!
//! Every head `x` of queries and keys, of `head_dim` components, is normalised and then rotated as
//! [`rope`](super::rope) does by its token's angles:
//!
//! ```text
//! y = R (x / sqrt(mean(x²) + epsilon) * (weight + weight_offset))
//! ```
//!
//! It is [`rms_norm`](super::rms_norm) followed by [`rope`](super::rope) with half the memory
//! traffic and a rounding less: all arithmetic is f32, and the result alone is rounded.

pub mod backward;

pub use backward::backward;

use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::ops::check::{self, Arg};
use crate::ops::operation::{self, Operation, Tensors};
use crate::ops::rope::tokens::{self, First};
use crate::ops::rope::{Positions, Rotation};
use crate::problem::qk_norm_rope::{Norms, Problem};
use crate::tensor::{InOut, RawTensor, TensorRef};

const OP: &str = "qk_norm_rope";

/// Arguments of [`forward`]. At least one of `q` and `k` is there.
#[derive(Debug, Default)]
pub struct Params<'a> {
    /// Queries and their output: `[batch, seq, heads, head_dim]` or `[tokens, heads, head_dim]`, f32,
    /// f16 or bf16; strided, contiguous in the last dimension.
    pub q: Option<InOut<'a>>,
    /// Keys and their output: like `q`, with any number of heads.
    pub k: Option<InOut<'a>>,
    /// Gains of the queries, `[head_dim]`, any float dtype, contiguous; `None` for all ones.
    pub q_weight: Option<TensorRef<'a>>,
    /// Gains of the keys; like `q_weight`.
    pub k_weight: Option<TensorRef<'a>>,
    /// Added to every gain: 1 for Gemma, else 0. 0 where there are no weights.
    pub weight_offset: f32,
    /// Added to the mean squares; above 0.
    pub epsilon: f32,
    /// Where tokens stand.
    pub positions: Positions<'a>,
    /// How they are rotated.
    pub rotation: Rotation<'a>,
}

const NAMES: [tokens::Names; 2] = [("q", "q_out"), ("k", "k_out")];

impl Params<'_> {
    fn pairs(&self) -> [Option<&InOut<'_>>; 2] {
        [self.q.as_ref(), self.k.as_ref()]
    }
}

/// The gains and numbers of both passes.
struct Gains<'p, 'a> {
    op: &'static str,
    weights: [Option<&'p TensorRef<'a>>; 2],
    weight_offset: f32,
    epsilon: f32,
}

const WEIGHTS: [&str; 2] = ["q_weight", "k_weight"];

impl Gains<'_, '_> {
    /// Checks them for queries and keys, of which those are there.
    fn problem(&self, there: [bool; 2], first: &First) -> Result<Norms> {
        let op = self.op;
        let mut weights: [Option<RawTensor>; 2] = [None; 2];
        for (i, name) in WEIGHTS.into_iter().enumerate() {
            let Some(weight) = self.weights[i].map(TensorRef::raw) else {
                continue;
            };
            if !there[i] {
                let problem = text!("is there, without {} it has no use", ["q", "k"][i]);
                return Err(Error::invalid(op, name, problem));
            }
            Arg::new(op, name, &weight)
                .dtype(DType::FLOATS)?
                .shape(&[first.head_dim()])?
                .last_contiguous()?;
            weights[i] = Some(weight);
        }
        check::finite(op, "weight_offset", self.weight_offset)?;
        if self.weight_offset != 0.0 && weights.iter().all(Option::is_none) {
            let offset = self.weight_offset;
            let problem = text!("is {offset}, without a weight it must be 0");
            return Err(Error::invalid(op, "weight_offset", problem));
        }
        // Zero is what a caller has who forgot it, and makes NaN of a head of zeros.
        if check::finite(op, "epsilon", self.epsilon)? <= 0.0 {
            let problem = text!("is {}, it must be above 0", self.epsilon);
            return Err(Error::invalid(op, "epsilon", problem));
        }
        Ok(Norms {
            weights,
            weight_offset: self.weight_offset,
            epsilon: self.epsilon,
        })
    }

    fn tensors(&self, tensors: &mut Tensors) {
        for (name, weight) in WEIGHTS.into_iter().zip(self.weights) {
            tensors.read_optional(name, weight);
        }
    }
}

impl<'a> Params<'a> {
    fn gains(&self) -> Gains<'_, 'a> {
        Gains {
            op: OP,
            weights: [self.q_weight.as_ref(), self.k_weight.as_ref()],
            weight_offset: self.weight_offset,
            epsilon: self.epsilon,
        }
    }
}

impl Operation for Params<'_> {
    const NAME: &'static str = OP;
    type Problem = Problem;

    fn problem(&self) -> Result<Problem> {
        let (tensors, first) = tokens::pairs(OP, NAMES, self.pairs())?;
        let there = tensors.each_ref().map(Option::is_some);
        let norms = self.gains().problem(there, &first)?;
        let rotation = self.rotation.problem(OP, first.head_dim())?;
        let positions = self.positions.problem(OP, &first, &rotation)?;
        Ok(Problem {
            tensors,
            norms,
            positions,
            rotation,
        })
    }

    fn tensors(&self, tensors: &mut Tensors) {
        self.gains().tensors(tensors);
        self.rotation.tensors(tensors);
        self.positions.tensors(tensors);
        for (pair, names) in self.pairs().into_iter().zip(NAMES) {
            if let Some(pair) = pair {
                tensors.in_out(names, pair);
            }
        }
    }
}

operation::functions!();
