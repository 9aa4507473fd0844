//! What of the arguments ranks' forms of attention do not take.

use super::Method;
use super::blocks::Division;
use super::exchange::{Group, Of};
use crate::comm::tokens::Order;
use crate::error::{Error, Result, text};
use crate::ops::check::Arg;
use crate::tensor::RawTensor;

/// Queries and keys are both batched, or both packed; which of them.
pub(super) fn check_forms(
    op: &'static str,
    [q, k, v]: [&RawTensor; 3],
    [cu_seqlens_q, cu_seqlens_k]: [bool; 2],
) -> Result<bool> {
    if cu_seqlens_q != cu_seqlens_k {
        let (absent, given) = match cu_seqlens_q {
            true => ("cu_seqlens_k", "cu_seqlens_q"),
            false => ("cu_seqlens_q", "cu_seqlens_k"),
        };
        let problem = text!("is absent, {given} needs it");
        return Err(Error::invalid(op, absent, problem));
    }
    let rank = if cu_seqlens_q { 3 } else { 4 };
    for (name, tensor) in [("q", q), ("k", k), ("v", v)] {
        Arg::new(op, name, tensor).rank(&[rank])?;
    }
    Ok(cu_seqlens_q)
}

impl Group<'_> {
    /// Heads of keys can be divided; then those of queries can be too.
    pub fn check_heads(&self, k: &RawTensor) -> Result<()> {
        let (heads, size) = (k.layout.dim(Of::Rows.heads(k)), self.comm.size());
        if heads.is_multiple_of(size) {
            return Ok(());
        }
        let problem = text!("has {heads} heads, which {size} ranks do not share evenly");
        Err(Error::invalid(self.op, "k", problem))
    }

    /// Packed sequences, which ranks divide as one, lie in one order, and keys do not travel.
    pub fn check_packed(
        &self,
        method: Method,
        order: Order,
        (causal, windows): (bool, [usize; 2]),
    ) -> Result<()> {
        if order != Order::Contiguous {
            let problem = "is zigzag, allowed with cu_seqlens_q: contiguous";
            return Err(Error::unsupported(self.op, "order", problem));
        }
        if method == Method::Ring {
            let problem = "is ring, allowed with cu_seqlens_q: ulysses, all_gather";
            return Err(Error::unsupported(self.op, "method", problem));
        }
        if method == Method::AllGather && !causal {
            let names = ["window_left", "window_right"].into_iter();
            if let Some((name, window)) = names.zip(windows).find(|(_, window)| *window > 0) {
                let problem =
                    text!("is {window}, allowed with cu_seqlens_q and all_gather unless causal: 0");
                return Err(Error::unsupported(self.op, name, problem));
            }
        }
        Ok(())
    }

    /// Positions of queries among keys are not known where keys travel, or may lie behind a chunk's queries.
    pub fn check_slopes(&self, method: Method, causal: bool) -> Result<()> {
        let problem = match method {
            Method::Ring => "is given, allowed with ring: absent",
            Method::AllGather if !causal => {
                "is given, allowed with all_gather unless causal: absent"
            }
            _ => return Ok(()),
        };
        Err(Error::unsupported(self.op, "alibi_slopes", problem))
    }

    /// Whole sequences of some heads have no order but their own.
    pub fn check_order(&self, order: Order) -> Result<()> {
        match order {
            Order::Contiguous => Ok(()),
            Order::Zigzag => {
                let problem = "is zigzag, allowed with ulysses: contiguous";
                Err(Error::unsupported(self.op, "order", problem))
            }
        }
    }

    /// How whole sequences are made of this rank's part: tokens divide into its chunks.
    pub fn division(&self, [q, k]: [&RawTensor; 2], order: Order) -> Result<Division> {
        let chunks = order.chunks();
        for (name, tensor) in [("q", q), ("k", k)] {
            let tokens = tensor.layout.dim(1);
            if !tokens.is_multiple_of(chunks) {
                let problem = text!("has {tokens} tokens, zigzag needs a multiple of {chunks}");
                return Err(Error::invalid(self.op, name, problem));
            }
        }
        Ok(Division {
            order,
            size: self.comm.size(),
            queries: q.layout.dim(1),
            keys: k.layout.dim(1),
        })
    }
}
