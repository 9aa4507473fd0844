//! Ranks that gather the keys and values of all, and attend to them with their own queries.

use arrayvec::ArrayVec;

use super::backward::OfHeads;
use super::blocks::{Block, Division, Run, Sight};
use super::exchange::{Group, as_batch};
use super::{OP, Params, attention, backward};
use crate::error::Result;
use crate::ops::operation::Operation;
use crate::ops::parts::{Parts, named};
use crate::problem::attention::Pair;
use crate::tensor::RawTensor;

/// Where tokens are in queries, keys and values, and in `lse`.
pub(super) const TOKENS: usize = 1;
pub(super) const TOKENS_OF_LSE: usize = 2;

/// All keys of a sequence, in their order.
fn all_keys(division: Division) -> Run {
    Run {
        // Keys of all ranks were counted where room was made for them.
        at: 0..division.size * division.keys,
        position: 0,
    }
}

/// Of some queries, the block with all keys; one with none where they see nothing.
fn block(queries: &Run, keys: &Run, sight: Sight) -> Block {
    let nothing = Block::nothing(queries.at.len());
    Block::new(queries, keys, sight).unwrap_or(nothing)
}

impl<'a> Params<'a> {
    /// Gathers keys and values, and attends to what each of this rank's chunks sees of them.
    pub(super) fn push_gathered<const N: usize>(
        &self,
        group: &Group<'a>,
        [q, k, v, out]: [RawTensor; 4],
        lse: Option<RawTensor>,
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        let division = group.division([&q, &k], self.order)?;
        let sight = Sight::new(self.causal, self.window_left, self.window_right);
        let [k, v] = group.gathered([k, v], self.order, parts)?;
        let keys = all_keys(division);
        let mut calls = ArrayVec::<_, 2>::new();
        for queries in division.queries_of(self.comm.rank()) {
            let block = block(&queries, &keys, sight);
            let of_queries = |t: RawTensor| t.narrowed(TOKENS, queries.at.start, queries.at.len());
            let of_keys = |t: RawTensor| t.narrowed(TOKENS, 0, block.keys.len());
            let tensors = [of_queries(q)?, of_keys(k)?, of_keys(v)?, of_queries(out)?];
            let lse = lse.map(|t| t.narrowed(TOKENS_OF_LSE, queries.at.start, queries.at.len()));
            let call = attention::Params {
                window_left: block.window_left,
                window_right: block.window_right,
                ..self.unmasked(tensors, lse.transpose()?, self.of_heads())
            };
            calls.push((queries.at.start, named(OP, call.problem(), &[])?));
        }
        match calls[..] {
            [(start, earlier), (end, later)] => {
                let pair = Pair::new(&earlier, later, end - start);
                parts.push(Ok(pair), &[])
            }
            _ => calls
                .into_iter()
                .try_for_each(|(_, call)| parts.push(Ok(call), &[])),
        }
    }

    /// The same where a batch is one run of packed tokens.
    pub(super) fn push_packed<const N: usize>(
        &self,
        group: &Group<'a>,
        [q, k, v, out]: [RawTensor; 4],
        lse: Option<RawTensor>,
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        let [k, v] = group.gathered([k, v], self.order, parts)?;
        self.push_nothing([q, k, v, out], lse, parts)?;
        let call = self.attention([q, k, v, out], lse, self.of_heads());
        parts.push(call.problem(), &[])
    }

    /// Packed queries, as those of one sequence that see no keys, which give zeros: those of no sequence keep them.
    pub(super) fn push_nothing<const N: usize>(
        &self,
        tensors: [RawTensor; 4],
        lse: Option<RawTensor>,
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        let [q, k, v, out] = tensors;
        let none = |t: RawTensor| as_batch(t.narrowed(0, 0, 0)?);
        let tensors = [as_batch(q)?, none(k)?, none(v)?, as_batch(out)?];
        let lse = lse.map(as_batch).transpose()?;
        let call = self.unmasked(tensors, lse, [None; 2]);
        parts.push(call.problem(), &[])
    }
}

/// What the backward pass of a rank's queries reads: `q`, `out` and `dout`; `lse`; and all keys and values.
struct Inputs {
    queries: [RawTensor; 3],
    lse: RawTensor,
    keys: [RawTensor; 2],
}

impl<'a> backward::Params<'a> {
    /// Gathers keys and values, and adds up the gradients that all ranks' queries give them.
    pub(super) fn push_gathered<const N: usize>(
        &self,
        group: &Group<'a>,
        [q, k, v, out, dout]: [RawTensor; 5],
        lse: RawTensor,
        [dq, dk, dv]: [Option<RawTensor>; 3],
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        let division = group.division([&q, &k], self.order)?;
        let sight = Sight::new(self.causal, self.window_left, self.window_right);
        let inputs = Inputs {
            queries: [q, out, dout],
            lse,
            keys: group.gathered([k, v], self.order, parts)?,
        };
        let mut take = |name, own: Option<RawTensor>| {
            own.map(|own| group.take_tokens(name, own, parts))
                .transpose()
        };
        let all = [take("dk", dk)?, take("dv", dv)?];
        let keys = all_keys(division);
        // The last chunk first: its queries see the most keys.
        let own: [Option<Run>; 2] = {
            let mut own = division.queries_of(self.comm.rank());
            [own.next(), own.next()]
        };
        let mut first = true;
        for queries in own.iter().rev().flatten() {
            let block = block(queries, &keys, sight);
            let taken = parts.taken();
            match first {
                true => {
                    self.push_block(&inputs, queries, &block, (dq, all), false, parts)?;
                    self.push_unseen(&inputs, block.keys.len(), all, parts)?;
                }
                // What another chunk has given is added to.
                false => {
                    let mut more = [None; 2];
                    for (more, all) in more.iter_mut().zip(all) {
                        if let Some(all) = all {
                            let seen = all.narrowed(TOKENS, 0, block.keys.len())?;
                            *more = Some((group.take_like(&seen, parts)?, seen));
                        }
                    }
                    let given = more.map(|more| more.map(|(given, _)| given));
                    self.push_block(&inputs, queries, &block, (dq, given), true, parts)?;
                    for (name, more) in ["dk", "dv"].into_iter().zip(more) {
                        if let Some((x, out)) = more {
                            group.add(name, x, out, parts)?;
                        }
                    }
                }
            }
            parts.give_back(taken);
            first = false;
        }
        for (name, (all, own)) in [("dk", (all[0], dk)), ("dv", (all[1], dv))] {
            if let (Some(all), Some(own)) = (all, own) {
                group.scatter(name, [all, own], self.order, parts)?;
            }
        }
        self.push_sum_of_sinks(group, parts)
    }

    /// The same where a batch is one run of packed tokens.
    pub(super) fn push_packed<const N: usize>(
        &self,
        group: &Group<'a>,
        [q, k, v, out, dout]: [RawTensor; 5],
        lse: RawTensor,
        [dq, dk, dv]: [Option<RawTensor>; 3],
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        let [k, v] = group.gathered([k, v], self.order, parts)?;
        let mut take = |name, own: Option<RawTensor>| {
            own.map(|own| group.take_tokens(name, own, parts))
                .transpose()
        };
        let all = [dq, take("dk", dk)?, take("dv", dv)?];
        let tensors = [q, k, v, out, dout];
        self.push_nothing(tensors, lse, all, parts)?;
        let call = self.attention(tensors, lse, all, self.of_heads());
        parts.push(call.problem(), &[])?;
        for (name, all, own) in [("dk", all[1], dk), ("dv", all[2], dv)] {
            if let (Some(all), Some(own)) = (all, own) {
                group.scatter(name, [all, own], self.order, parts)?;
            }
        }
        self.push_sum_of_sinks(group, parts)
    }

    /// Gradients of packed tokens, as those of one sequence of queries without keys and one of keys without queries,
    /// which are zeros: those of no sequence keep them.
    pub(super) fn push_nothing<const N: usize>(
        &self,
        tensors: [RawTensor; 5],
        lse: RawTensor,
        [dq, dk, dv]: [Option<RawTensor>; 3],
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        let [q, k, v, out, dout] = tensors;
        let none = |t: RawTensor| as_batch(t.narrowed(0, 0, 0)?);
        let of_none = OfHeads::default();
        if let Some(dq) = dq {
            let tensors = [
                as_batch(q)?,
                none(k)?,
                none(v)?,
                as_batch(out)?,
                as_batch(dout)?,
            ];
            let gradients = [Some(as_batch(dq)?), None, None];
            let call = self.unmasked(tensors, as_batch(lse)?, gradients, of_none);
            parts.push(call.problem(), &[])?;
        }
        if dk.is_some() || dv.is_some() {
            let tensors = [
                none(q)?,
                as_batch(k)?,
                as_batch(v)?,
                none(out)?,
                none(dout)?,
            ];
            let gradients = [
                None,
                dk.map(as_batch).transpose()?,
                dv.map(as_batch).transpose()?,
            ];
            let lse = as_batch(lse.narrowed(1, 0, 0)?)?;
            let call = self.unmasked(tensors, lse, gradients, of_none);
            parts.push(call.problem(), &[])?;
        }
        Ok(())
    }

    /// Adds up the gradients that all ranks' queries give sinks.
    pub(super) fn push_sum_of_sinks<const N: usize>(
        &self,
        group: &Group<'a>,
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        match self.of_heads().dsinks {
            Some(dsinks) => group.sum("dsinks", dsinks, parts),
            None => Ok(()),
        }
    }

    /// The gradients of some queries, and of the keys that they see: the first ones of `dk` and `dv`; and of sinks, which
    /// may be added to.
    fn push_block<const N: usize>(
        &self,
        inputs: &Inputs,
        queries: &Run,
        block: &Block,
        (dq, [dk, dv]): (Option<RawTensor>, [Option<RawTensor>; 2]),
        accumulate: bool,
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        if dq.is_none() && dk.is_none() && dv.is_none() {
            return Ok(());
        }
        let of_queries = |t: RawTensor| t.narrowed(TOKENS, queries.at.start, queries.at.len());
        let of_keys = |t: RawTensor| t.narrowed(TOKENS, 0, block.keys.len());
        let ([q, out, dout], [k, v]) = (inputs.queries, inputs.keys);
        let tensors = [
            of_queries(q)?,
            of_keys(k)?,
            of_keys(v)?,
            of_queries(out)?,
            of_queries(dout)?,
        ];
        let lse = inputs.lse;
        let lse = lse.narrowed(TOKENS_OF_LSE, queries.at.start, queries.at.len())?;
        let gradients = [
            dq.map(of_queries).transpose()?,
            dk.map(of_keys).transpose()?,
            dv.map(of_keys).transpose()?,
        ];
        let call = attention::backward::Params {
            window_left: block.window_left,
            window_right: block.window_right,
            accumulate,
            ..self.unmasked(tensors, lse, gradients, self.of_heads())
        };
        parts.push(call.problem(), &[])
    }

    /// Keys behind the first `seen`, which no query of this rank sees: no queries give them gradients of zero.
    fn push_unseen<const N: usize>(
        &self,
        inputs: &Inputs,
        seen: usize,
        [dk, dv]: [Option<RawTensor>; 2],
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        let ([q, out, dout], [k, v]) = (inputs.queries, inputs.keys);
        let rest = k.layout.dim(TOKENS) - seen;
        if rest == 0 || (dk.is_none() && dv.is_none()) {
            return Ok(());
        }
        let none = |t: RawTensor| t.narrowed(TOKENS, 0, 0);
        let unseen = |t: RawTensor| t.narrowed(TOKENS, seen, rest);
        let tensors = [none(q)?, unseen(k)?, unseen(v)?, none(out)?, none(dout)?];
        let gradients = [
            None,
            dk.map(unseen).transpose()?,
            dv.map(unseen).transpose()?,
        ];
        let lse = inputs.lse.narrowed(TOKENS_OF_LSE, 0, 0)?;
        let call = self.unmasked(tensors, lse, gradients, OfHeads::default());
        parts.push(call.problem(), &[])
    }
}
