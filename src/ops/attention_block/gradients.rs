//! The gradients of a block's parameters: those that a caller wants, checked against the block.

use arrayvec::ArrayVec;

use super::check::Checked;
use super::{Params as Forward, Projections};
use crate::dtype::DType;
use crate::error::Result;
use crate::ops::check::{self, Arg, described};
use crate::problem::linear::Weights;
use crate::tensor::{RawTensor, TensorMut};

/// Gradients of parameters: shaped like them, of any float dtype (those of sinks f32); rows of
/// matrices strided, all others contiguous. Those of parameters that are not there have no use.
#[derive(Debug, Default)]
pub struct Gradients<'a> {
    /// `[num_heads * head_dim, hidden]`.
    pub dq_weight: Option<TensorMut<'a>>,
    /// `[num_heads * head_dim]`.
    pub dq_bias: Option<TensorMut<'a>>,
    /// `[num_kv_heads * head_dim, hidden]`.
    pub dk_weight: Option<TensorMut<'a>>,
    /// `[num_kv_heads * head_dim]`.
    pub dk_bias: Option<TensorMut<'a>>,
    /// `[num_kv_heads * v_head_dim, hidden]`.
    pub dv_weight: Option<TensorMut<'a>>,
    /// `[num_kv_heads * v_head_dim]`.
    pub dv_bias: Option<TensorMut<'a>>,
    /// Of the packed weight, like it.
    pub dqkv_weight: Option<TensorMut<'a>>,
    /// Of the packed bias, like it.
    pub dqkv_bias: Option<TensorMut<'a>>,
    /// Like `q_norm`.
    pub dq_norm: Option<TensorMut<'a>>,
    /// Like `k_norm`.
    pub dk_norm: Option<TensorMut<'a>>,
    /// f32 `[num_heads]`.
    pub dsinks: Option<TensorMut<'a>>,
    /// `[hidden_out, num_heads * v_head_dim]`.
    pub dout_weight: Option<TensorMut<'a>>,
    /// `[hidden_out]`.
    pub dout_bias: Option<TensorMut<'a>>,
}

/// The gradients of a matrix and its bias that are wanted.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pair {
    pub dweight: Option<RawTensor>,
    pub dbias: Option<RawTensor>,
}

impl Pair {
    pub fn is_some(&self) -> bool {
        self.dweight.is_some() || self.dbias.is_some()
    }
}

/// The gradients that are wanted.
pub(super) struct Wanted {
    pub dx: Option<RawTensor>,
    /// Of the packed weight, or of those of queries, keys and values.
    pub projections: ArrayVec<Pair, 3>,
    /// Of queries and keys.
    pub norms: [Option<RawTensor>; 2],
    pub sinks: Option<RawTensor>,
    pub out: Pair,
}

impl Wanted {
    /// Whether the gradients of queries (0), keys (1) or values (2) are needed.
    pub fn needs(&self, which: usize) -> bool {
        let packed = self.projections.len() == 1;
        let projection = &self.projections[if packed { 0 } else { which }];
        let of_norm = self.norms.get(which).is_some_and(Option::is_some);
        self.dx.is_some() || projection.is_some() || of_norm
    }

    /// Whether what lies behind attention is needed.
    pub fn inner(&self) -> bool {
        (0..3).any(|which| self.needs(which))
    }

    /// Whether attention's output is needed.
    pub fn attended(&self) -> bool {
        self.inner() || self.sinks.is_some() || self.out.dweight.is_some()
    }
}

/// Whether there is anything to compute.
fn has_elements(gradient: &RawTensor) -> bool {
    !gradient.layout.is_empty()
}

impl Gradients<'_> {
    /// The same once more, for the parameters of a part.
    pub(crate) fn again(&self) -> Gradients<'_> {
        Gradients {
            dq_weight: described(&self.dq_weight),
            dq_bias: described(&self.dq_bias),
            dk_weight: described(&self.dk_weight),
            dk_bias: described(&self.dk_bias),
            dv_weight: described(&self.dv_weight),
            dv_bias: described(&self.dv_bias),
            dqkv_weight: described(&self.dqkv_weight),
            dqkv_bias: described(&self.dqkv_bias),
            dq_norm: described(&self.dq_norm),
            dk_norm: described(&self.dk_norm),
            dsinks: described(&self.dsinks),
            dout_weight: described(&self.dout_weight),
            dout_bias: described(&self.dout_bias),
        }
    }

    /// All, by name.
    pub(crate) fn list(&self) -> [(&'static str, Option<&TensorMut<'_>>); 13] {
        [
            ("dq_weight", self.dq_weight.as_ref()),
            ("dq_bias", self.dq_bias.as_ref()),
            ("dk_weight", self.dk_weight.as_ref()),
            ("dk_bias", self.dk_bias.as_ref()),
            ("dv_weight", self.dv_weight.as_ref()),
            ("dv_bias", self.dv_bias.as_ref()),
            ("dqkv_weight", self.dqkv_weight.as_ref()),
            ("dqkv_bias", self.dqkv_bias.as_ref()),
            ("dout_weight", self.dout_weight.as_ref()),
            ("dout_bias", self.dout_bias.as_ref()),
            ("dq_norm", self.dq_norm.as_ref()),
            ("dk_norm", self.dk_norm.as_ref()),
            ("dsinks", self.dsinks.as_ref()),
        ]
    }

    /// Checks them against the block; `op` is the backward pass.
    pub(super) fn wanted(
        &self,
        op: &'static str,
        forward: &Forward<'_>,
        checked: &Checked,
        dx: Option<RawTensor>,
        accumulate: bool,
    ) -> Result<Wanted> {
        let all = self.list();
        let like = |i: usize, of: Option<&RawTensor>| -> Result<Option<RawTensor>> {
            Ok(check::gradient_like(op, all[i], of, accumulate)?.filter(has_elements))
        };
        let pair = |i: usize, of: Option<&Weights>| -> Result<Pair> {
            Ok(Pair {
                dweight: like(2 * i, of.map(|of| &of.weight))?,
                dbias: like(2 * i + 1, of.and_then(|of| of.bias.as_ref()))?,
            })
        };
        let packed = matches!(forward.projections, Projections::Packed(_));
        let mut projections = ArrayVec::new();
        for i in 0..3 {
            let of = checked.projections.get(i).filter(|_| !packed);
            projections.push(pair(i, of)?);
        }
        let of_packed = pair(3, checked.projections.first().filter(|_| packed))?;
        if packed {
            projections = ArrayVec::from_iter([of_packed]);
        }
        let [q_norm, k_norm] = [0, 1].map(|which| forward.norm(which).map(|norm| norm.raw()));
        let sinks = forward.sinks.map(|sinks| sinks.raw());
        let dsinks = like(12, sinks.as_ref())?;
        if let Some(dsinks) = &dsinks {
            Arg::new(op, "dsinks", dsinks).dtype(&[DType::F32])?;
        }
        Ok(Wanted {
            dx: dx.filter(has_elements),
            projections,
            norms: [like(10, q_norm.as_ref())?, like(11, k_norm.as_ref())?],
            sinks: dsinks,
            out: pair(4, Some(&checked.out_projection))?,
        })
    }
}
