//! Keys and values of all ranks, on each of them.

use super::exchange::{Chunk, Group, Of, names_of};
use crate::comm::tokens::Order;
use crate::context::Both;
use crate::error::Result;
use crate::ops::parts::Parts;
use crate::problem::collective::Kind;
use crate::tensor::RawTensor;

impl<'a> Group<'a> {
    /// All keys and values of all tokens, of which these are this rank's, in the order of sequences.
    pub fn gathered<const N: usize>(
        &self,
        [k, v]: [RawTensor; 2],
        order: Order,
        parts: &mut Parts<'a, N>,
    ) -> Result<[RawTensor; 2]> {
        let all = [
            self.take_tokens("k", k, parts)?,
            self.take_tokens("v", v, parts)?,
        ];
        if self.comm.size() == 1 {
            return Ok(all);
        }
        let (first_k, second_k) = Chunk::of(order, k, all[0])?;
        let (first_v, second_v) = Chunk::of(order, v, all[1])?;
        self.push_gather(Kind::AllGather, [first_k, first_v], parts)?;
        if let (Some(k), Some(v)) = (second_k, second_v) {
            self.push_gather(Kind::GatherBackwards, [k, v], parts)?;
        }
        Ok(all)
    }

    /// Gathers chunks of keys and of values, in one launch: each has few bytes for what a launch takes.
    fn push_gather<const N: usize>(
        &self,
        kind: Kind,
        [k, v]: [Chunk; 2],
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        let taken = parts.taken();
        let k = self.call(
            "k",
            kind,
            [k.own, self.divided(&k.all, Of::Rows.tokens(&k.all))?],
            parts,
        )?;
        let v = self.call(
            "v",
            kind,
            [v.own, self.divided(&v.all, Of::Rows.tokens(&v.all))?],
            parts,
        )?;
        let both = Both {
            transport: self.comm.transport(),
            problems: [k.problem, v.problem],
        };
        parts.push_both(both, names_of("k"))?;
        k.unpack(parts)?;
        v.unpack(parts)?;
        parts.give_back(taken);
        Ok(())
    }
}
