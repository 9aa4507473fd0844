//! The backward pass of attention over sequences that ranks divide: each gets its tokens' part of the gradients
//! of `q`, `k` and `v`.

use super::exchange::{self, Group, Of};
use super::{Method, Order, attention};
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::ops::operation::{self, Operation, Tensors};
use crate::ops::parts::{Parts, named};
use crate::tensor::{RawTensor, TensorMut, TensorRef, Workspace};

const OP: &str = "context_parallel_attention_backward";

/// Arguments of [`backward`]. Make them with [`Params::new`], then set what the forward pass was given,
/// and the gradients that are wanted. All ranks want the same ones.
#[derive(Debug)]
pub struct Params<'a> {
    /// This rank's part in the group.
    pub comm: &'a Comm,
    /// As [`super::Params::method`].
    pub method: Method,
    /// As [`super::Params::order`].
    pub order: Order,
    /// This rank's queries, as the forward pass had them.
    pub q: TensorRef<'a>,
    /// Its keys.
    pub k: TensorRef<'a>,
    /// Its values.
    pub v: TensorRef<'a>,
    /// What the forward pass gave: the dtype of `q`, or f32.
    pub out: TensorRef<'a>,
    /// What it gave too: f32 `[B, Hq, Sq]`, contiguous in the last dimension.
    pub lse: TensorRef<'a>,
    /// Gradient of `out`: its shape; the dtype of `q`, or f32.
    pub dout: TensorRef<'a>,
    /// Receives the gradient of `q`: like it.
    pub dq: Option<TensorMut<'a>>,
    /// Receives the gradient of `k`: like it.
    pub dk: Option<TensorMut<'a>>,
    /// Receives the gradient of `v`: like it. One of the three at least is there.
    pub dv: Option<TensorMut<'a>>,
    /// As [`attention::backward::Params::deterministic`](crate::ops::attention::backward::Params::deterministic).
    pub deterministic: bool,
    /// As [`super::Params::scale`].
    pub scale: f32,
    /// As [`super::Params::softcap`].
    pub softcap: f32,
    /// As [`super::Params::causal`].
    pub causal: bool,
    /// As [`super::Params::window_left`].
    pub window_left: usize,
    /// As [`super::Params::window_right`].
    pub window_right: usize,
    /// Scratch of [`workspace_size`] bytes, all of which are needed.
    pub workspace: Workspace<'a>,
}

impl<'a> Params<'a> {
    /// Of plain attention; no gradient is asked for yet.
    pub fn new(
        comm: &'a Comm,
        [q, k, v]: [TensorRef<'a>; 3],
        out: TensorRef<'a>,
        lse: TensorRef<'a>,
        dout: TensorRef<'a>,
    ) -> Self {
        Params {
            comm,
            method: Method::default(),
            order: Order::default(),
            q,
            k,
            v,
            out,
            lse,
            dout,
            dq: None,
            dk: None,
            dv: None,
            deterministic: false,
            scale: 0.0,
            softcap: 0.0,
            causal: false,
            window_left: 0,
            window_right: 0,
            workspace: Workspace::none(),
        }
    }

    fn gradients(&self) -> [(&'static str, Option<&TensorMut<'a>>); 3] {
        [
            ("dq", self.dq.as_ref()),
            ("dk", self.dk.as_ref()),
            ("dv", self.dv.as_ref()),
        ]
    }

    /// The backward pass of one rank alone with the windows of the whole, over these tensors: `q`, `k`, `v`, `out`,
    /// `dout`; `lse`; and the gradients.
    fn attention<'t>(
        &self,
        tensors: [RawTensor; 5],
        lse: RawTensor,
        gradients: [Option<RawTensor>; 3],
    ) -> attention::backward::Params<'t> {
        attention::backward::Params {
            causal: self.causal,
            window_left: self.window_left,
            window_right: self.window_right,
            ..self.unmasked(tensors, lse, gradients)
        }
    }

    /// The same where every query sees every key.
    pub(super) fn unmasked<'t>(
        &self,
        [q, k, v, out, dout]: [RawTensor; 5],
        lse: RawTensor,
        [dq, dk, dv]: [Option<RawTensor>; 3],
    ) -> attention::backward::Params<'t> {
        // SAFETY: they are the caller's tensors, which a call with these parameters has lent, or lie in
        // its workspace; only parts of that call use them, one after the other.
        unsafe {
            let [q, k, v, out, lse, dout] = [q, k, v, out, lse, dout].map(|t| exchange::read(&t));
            let [dq, dk, dv] = [dq, dk, dv].map(|t| t.map(|t| exchange::write(&t)));
            attention::backward::Params {
                dq,
                dk,
                dv,
                deterministic: self.deterministic,
                scale: self.scale,
                softcap: self.softcap,
                ..attention::backward::Params::new(q, k, v, out, lse, dout)
            }
        }
    }
}

/// Parts that take no memory of the host's: six exchanges with copies before and behind, attention, and three back.
pub(super) const PARTS: usize = 29;

impl<'a> Operation for Params<'a> {
    const NAME: &'static str = OP;
    type Problem = Parts<'a, PARTS>;

    fn problem(&self) -> Result<Self::Problem> {
        let [q, k, v, out, dout] =
            [&self.q, &self.k, &self.v, &self.out, &self.dout].map(TensorRef::raw);
        let lse = self.lse.raw();
        let own = self.gradients().map(|(_, t)| t.map(TensorMut::raw));
        exchange::check_batched(OP, [&q, &k, &v])?;
        if own.iter().all(Option::is_none) {
            let problem = "is absent, as are dk and dv: nothing is asked for";
            return Err(Error::invalid(OP, "dq", problem));
        }
        // What one rank's call would refuse is refused here.
        let alone = self.attention([q, k, v, out, dout], lse, own);
        named(OP, alone.problem(), &[])?;
        let group = Group {
            op: OP,
            comm: self.comm,
        };
        let mut parts = Parts::new(OP, &self.workspace).exactly().of_any_number();
        match self.method {
            Method::Ulysses => {}
            Method::Ring if self.comm.size() > 1 => {
                self.push_ring(&group, [q, k, v, out, dout], lse, own, &mut parts)?;
                return Ok(parts);
            }
            Method::AllGather | Method::Ring => {
                self.push_gathered(&group, [q, k, v, out, dout], lse, own, &mut parts)?;
                return Ok(parts);
            }
        }
        group.check_order(self.order)?;
        group.check_heads(&k)?;
        let tensors = [
            group.heads_of("q", q, Of::Rows, &mut parts)?,
            group.heads_of("k", k, Of::Rows, &mut parts)?,
            group.heads_of("v", v, Of::Rows, &mut parts)?,
            group.heads_of("out", out, Of::Rows, &mut parts)?,
            group.heads_of("dout", dout, Of::Rows, &mut parts)?,
        ];
        let lse = group.heads_of("lse", lse, Of::Lse, &mut parts)?;
        let names = self.gradients().map(|(name, _)| name);
        let mut of_heads = [None; 3];
        for (i, own) in own.iter().enumerate() {
            if let Some(own) = own {
                of_heads[i] = Some(group.take_heads(names[i], *own, Of::Rows, &mut parts)?);
            }
        }
        let alone = self.attention(tensors, lse, of_heads);
        parts.push(alone.problem(), &[])?;
        for (i, name) in names.into_iter().enumerate() {
            if let (Some(heads), Some(own)) = (of_heads[i], own[i]) {
                group.tokens_of(name, heads, own, Of::Rows, &mut parts)?;
            }
        }
        Ok(parts)
    }

    fn tensors(&self, tensors: &mut Tensors) {
        for (name, tensor) in [
            ("q", &self.q),
            ("k", &self.k),
            ("v", &self.v),
            ("out", &self.out),
            ("lse", &self.lse),
            ("dout", &self.dout),
        ] {
            tensors.read(name, tensor);
        }
        for (name, tensor) in self.gradients() {
            tensors.write_optional(name, tensor);
        }
    }

    fn workspace(&self) -> Option<&Workspace<'_>> {
        Some(&self.workspace)
    }

    fn comm(&self) -> Option<&Comm> {
        Some(self.comm)
    }
}

operation::functions!(backward);
