//! The backward pass of attention over sequences that ranks divide: each gets its tokens' part of the gradients
//! of `q`, `k` and `v`.

use super::exchange::{self, Group, Of};
use super::{Method, attention};
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

    /// The backward pass of one rank alone, over these tensors: `q`, `k`, `v`, `out`, `dout`; `lse`; and the
    /// gradients.
    fn attention<'t>(
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
                causal: self.causal,
                window_left: self.window_left,
                window_right: self.window_right,
                ..attention::backward::Params::new(q, k, v, out, lse, dout)
            }
        }
    }
}

/// The most parts: six exchanges with copies before and behind, attention, and three back.
const PARTS: usize = 29;

impl<'a> Params<'a> {
    /// Attends to the keys and values of all ranks, and adds up their gradients.
    fn push_gathered(
        &self,
        group: &Group<'a>,
        [q, k, v, out, dout]: [RawTensor; 5],
        lse: RawTensor,
        [dq, dk, dv]: [Option<RawTensor>; 3],
        parts: &mut Parts<'a, PARTS>,
    ) -> Result<()> {
        let windows = [
            ("window_left", self.window_left),
            ("window_right", self.window_right),
        ];
        let visible = group.visible([&q, &k], self.causal, windows)?;
        let k = group.gathered("k", k, parts)?;
        let v = group.gathered("v", v, parts)?;
        let mut take = |name, own: Option<RawTensor>| {
            own.map(|own| group.take_tokens(name, own, parts))
                .transpose()
        };
        let (all_dk, all_dv) = (take("dk", dk)?, take("dv", dv)?);
        let keys = |t: RawTensor, start, len| t.narrowed(1, start, len);
        let gradients = |start, len| -> Result<_> {
            let part = |t: Option<RawTensor>| t.map(|t| keys(t, start, len)).transpose();
            Ok((part(all_dk)?, part(all_dv)?))
        };
        let (of_k, of_v) = gradients(0, visible)?;
        let (seen_k, seen_v) = (keys(k, 0, visible)?, keys(v, 0, visible)?);
        let seen = self.attention([q, seen_k, seen_v, out, dout], lse, [dq, of_k, of_v]);
        parts.push(seen.problem(), &[])?;
        let rest = k.layout.dim(1) - visible;
        if rest > 0 && (dk.is_some() || dv.is_some()) {
            // Keys that no query of this rank sees: no queries give them gradients of zero.
            let none = |t: RawTensor| t.narrowed(1, 0, 0);
            let (rest_k, rest_v) = (keys(k, visible, rest)?, keys(v, visible, rest)?);
            let tensors = [none(q)?, rest_k, rest_v, none(out)?, none(dout)?];
            let (of_k, of_v) = gradients(visible, rest)?;
            let unseen = self.attention(tensors, lse.narrowed(2, 0, 0)?, [None, of_k, of_v]);
            parts.push(unseen.problem(), &[])?;
        }
        for (name, all, own) in [("dk", all_dk, dk), ("dv", all_dv, dv)] {
            if let (Some(all), Some(own)) = (all, own) {
                group.scatter(name, [all, own], parts)?;
            }
        }
        Ok(())
    }
}

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
        let mut parts = Parts::new(OP, &self.workspace).exactly();
        if self.method == Method::AllGather {
            self.push_gathered(&group, [q, k, v, out, dout], lse, own, &mut parts)?;
            return Ok(parts);
        }
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
