//! The backward pass of attention over sequences that ranks divide: each gets its tokens' part of the gradients
//! of `q`, `k` and `v`.

use super::check;
use super::exchange::{self, Group, Of};
use super::{Method, Order, attention, raw};
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
    /// As [`super::Params::sinks`].
    pub sinks: Option<TensorRef<'a>>,
    /// Receives the gradient of `sinks`, the same on all ranks: f32 `[Hq]`. There is another gradient besides.
    pub dsinks: Option<TensorMut<'a>>,
    /// As [`super::Params::alibi_slopes`].
    pub alibi_slopes: Option<TensorRef<'a>>,
    /// As [`super::Params::cu_seqlens_q`].
    pub cu_seqlens_q: Option<TensorRef<'a>>,
    /// As [`super::Params::cu_seqlens_k`].
    pub cu_seqlens_k: Option<TensorRef<'a>>,
    /// As [`super::Params::max_seqlen_q`].
    pub max_seqlen_q: usize,
    /// As [`super::Params::max_seqlen_k`].
    pub max_seqlen_k: usize,
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
            sinks: None,
            dsinks: None,
            alibi_slopes: None,
            cu_seqlens_q: None,
            cu_seqlens_k: None,
            max_seqlen_q: 0,
            max_seqlen_k: 0,
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
    pub(super) fn attention<'t>(
        &self,
        tensors: [RawTensor; 5],
        lse: RawTensor,
        gradients: [Option<RawTensor>; 3],
        of_heads: OfHeads,
    ) -> attention::backward::Params<'t> {
        // SAFETY: the caller's tensors, which a call with these parameters has lent.
        let read = |t: &Option<TensorRef<'_>>| unsafe { exchange::read_optional(raw(t)) };
        attention::backward::Params {
            causal: self.causal,
            window_left: self.window_left,
            window_right: self.window_right,
            cu_seqlens_q: read(&self.cu_seqlens_q),
            cu_seqlens_k: read(&self.cu_seqlens_k),
            max_seqlen_q: self.max_seqlen_q,
            max_seqlen_k: self.max_seqlen_k,
            ..self.unmasked(tensors, lse, gradients, of_heads)
        }
    }

    /// Those of all heads.
    pub(super) fn of_heads(&self) -> OfHeads {
        OfHeads {
            sinks: raw(&self.sinks),
            alibi_slopes: raw(&self.alibi_slopes),
            dsinks: self.dsinks.as_ref().map(TensorMut::raw),
        }
    }

    /// The same where every query sees every key.
    pub(super) fn unmasked<'t>(
        &self,
        [q, k, v, out, dout]: [RawTensor; 5],
        lse: RawTensor,
        [dq, dk, dv]: [Option<RawTensor>; 3],
        of_heads: OfHeads,
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
                sinks: exchange::read_optional(of_heads.sinks),
                alibi_slopes: exchange::read_optional(of_heads.alibi_slopes),
                dsinks: of_heads.dsinks.map(|t| exchange::write(&t)),
                deterministic: self.deterministic,
                scale: self.scale,
                softcap: self.softcap,
                ..attention::backward::Params::new(q, k, v, out, lse, dout)
            }
        }
    }
}

/// What there is a number of for each head: sinks, slopes, and the gradient of sinks.
#[derive(Clone, Copy, Default)]
pub(super) struct OfHeads {
    pub sinks: Option<RawTensor>,
    pub alibi_slopes: Option<RawTensor>,
    pub dsinks: Option<RawTensor>,
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
        let cu_seqlens = [&self.cu_seqlens_q, &self.cu_seqlens_k].map(Option::is_some);
        let packed = check::check_forms(OP, [&q, &k, &v], cu_seqlens)?;
        if own.iter().all(Option::is_none) {
            let problem = "is absent, as are dk and dv: nothing is asked for";
            return Err(Error::invalid(OP, "dq", problem));
        }
        // What one rank's call would refuse is refused here.
        let of_heads = self.of_heads();
        let alone = self.attention([q, k, v, out, dout], lse, own, of_heads);
        named(OP, alone.problem(), &[])?;
        let group = Group {
            op: OP,
            comm: self.comm,
        };
        if packed {
            let windows = [self.window_left, self.window_right];
            group.check_packed(self.method, self.order, (self.causal, windows))?;
        }
        if self.alibi_slopes.is_some() {
            group.check_slopes(self.method, self.causal)?;
        }
        let mut parts = Parts::new(OP, &self.workspace).exactly().of_any_number();
        match self.method {
            Method::Ulysses => {}
            Method::AllGather if packed => {
                self.push_packed(&group, [q, k, v, out, dout], lse, own, &mut parts)?;
                return Ok(parts);
            }
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
        let mut numbers = self.of_heads();
        let OfHeads {
            sinks,
            alibi_slopes,
            dsinks,
        } = &mut numbers;
        for number in [sinks, alibi_slopes, dsinks].into_iter().flatten() {
            *number = group.own_heads(*number)?;
        }
        if packed {
            self.push_nothing(tensors, lse, of_heads, &mut parts)?;
        }
        let alone = self.attention(tensors, lse, of_heads, numbers);
        parts.push(alone.problem(), &[])?;
        if let (Some(own), Some(all)) = (numbers.dsinks, &self.dsinks) {
            group.gather_heads("dsinks", [own, all.raw()], &mut parts)?;
        }
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
        for (name, tensor) in [
            ("sinks", &self.sinks),
            ("alibi_slopes", &self.alibi_slopes),
            ("cu_seqlens_q", &self.cu_seqlens_q),
            ("cu_seqlens_k", &self.cu_seqlens_k),
        ] {
            tensors.read_optional(name, tensor.as_ref());
        }
        tensors.write_optional("dsinks", self.dsinks.as_ref());
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
