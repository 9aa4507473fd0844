//! Ranks that pass keys and values on to each other, and attend to those that are there with their own queries.

use std::ops::Range;

use super::backward::OfHeads;
use super::blocks::{Block, Division, Sight};
use super::exchange::{Group, entry};
use super::gathered::{TOKENS, TOKENS_OF_LSE};
use super::{Params, attention, backward};
use crate::dtype::DType;
use crate::error::Result;
use crate::ops::operation::Operation;
use crate::ops::parts::Parts;
use crate::problem::attention_merge;
use crate::tensor::RawTensor;

/// Two tensors of a rank, keys and values or their gradients, which are somewhere on their way.
type Pair = [RawTensor; 2];

/// What travels from rank to rank: what one has while it sends, and where it receives, in turn.
struct Travelling {
    names: [&'static str; 2],
    here: [Option<RawTensor>; 2],
    rooms: [[Option<RawTensor>; 2]; 2],
    hops: usize,
}

impl Travelling {
    /// Both that are here; `own` of which there is none.
    fn pair(&self, own: Pair) -> Pair {
        [0, 1].map(|i| self.here[i].unwrap_or(own[i]))
    }

    /// Sends what is here to a rank, and receives from another what is here from then on.
    fn hop<'a, const N: usize>(
        &mut self,
        group: &Group<'a>,
        (to, from): (usize, usize),
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        let rooms = self.rooms[self.hops % 2];
        for (i, name) in self.names.into_iter().enumerate() {
            if let (Some(x), Some(out)) = (self.here[i], rooms[i]) {
                group.pass(name, [x, out], (to, from), parts)?;
                self.here[i] = Some(out);
            }
        }
        self.hops += 1;
        Ok(())
    }
}

/// Whose keys a rank has at a step, and the ranks that it sends to and receives from behind it.
struct Ring {
    rank: usize,
    size: usize,
    steps: usize,
}

impl Ring {
    fn new(rank: usize, division: Division, sight: Sight) -> Ring {
        Ring {
            rank,
            size: division.size,
            steps: division.steps(sight),
        }
    }

    fn owner(&self, step: usize) -> usize {
        (self.rank + self.size - step) % self.size
    }

    fn next(&self) -> (usize, usize) {
        ((self.rank + 1) % self.size, self.owner(1))
    }

    /// From where they are after the last step, to whom they are of.
    fn home(&self) -> (usize, usize) {
        let last = self.steps - 1;
        (self.owner(last), (self.rank + last) % self.size)
    }
}

fn narrowed(t: RawTensor, dim: usize, range: &Range<usize>) -> Result<RawTensor> {
    t.narrowed(dim, range.start, range.len())
}

impl<'a> Params<'a> {
    /// Attends to the keys of one rank after the other. What they give is merged in f32.
    pub(super) fn push_ring<const N: usize>(
        &self,
        group: &Group<'a>,
        [q, k, v, out]: [RawTensor; 4],
        lse: Option<RawTensor>,
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        let division = group.division([&q, &k], self.order)?;
        let sight = Sight::new(self.causal, self.window_left, self.window_right);
        let rank = self.comm.rank();
        let ring = Ring::new(rank, division, sight);
        let mut keys = group.travelling_keys([k, v], ring.steps, parts)?;
        let sums = Sums::take(group, &out, parts)?;
        let mut begun = false;
        if let [Some(sinks), _] = self.of_heads() {
            // Sinks count once, and for every query.
            let nothing = Block::nothing(division.queries);
            self.push_block(q, [k, v], &nothing, sums.part(0)?, Some(sinks), parts)?;
            begun = true;
        }
        for step in 0..ring.steps {
            let here = keys.pair([k, v]);
            for block in division.blocks(rank, ring.owner(step), sight) {
                if !begun && block.queries.len() == division.queries {
                    self.push_block(q, here, &block, sums.part(0)?, None, parts)?;
                    begun = true;
                    continue;
                }
                if !begun {
                    self.push_block(
                        q,
                        here,
                        &Block::nothing(division.queries),
                        sums.part(0)?,
                        None,
                        parts,
                    )?;
                    begun = true;
                }
                self.push_block(q, here, &block, sums.part(1)?, None, parts)?;
                parts.push(Ok(sums.merge(&block)?), &[("outs", "out")])?;
            }
            if step + 1 < ring.steps {
                keys.hop(group, ring.next(), parts)?;
            }
        }
        let [sum_out, sum_lse] = sums.part(0)?;
        if !begun {
            let nothing = Block::nothing(division.queries);
            self.push_block(q, [k, v], &nothing, [sum_out, sum_lse], None, parts)?;
        }
        group.copy("out", sum_out, out, parts)?;
        match lse {
            Some(lse) => group.copy("lse", sum_lse, lse, parts),
            None => Ok(()),
        }
    }

    /// What the queries of a block see of some keys, and of sinks.
    fn push_block<const N: usize>(
        &self,
        q: RawTensor,
        [k, v]: Pair,
        block: &Block,
        [out, lse]: [RawTensor; 2],
        sinks: Option<RawTensor>,
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        let tensors = [
            narrowed(q, TOKENS, &block.queries)?,
            narrowed(k, TOKENS, &block.keys)?,
            narrowed(v, TOKENS, &block.keys)?,
            narrowed(out, TOKENS, &block.queries)?,
        ];
        let lse = narrowed(lse, TOKENS_OF_LSE, &block.queries)?;
        let call = attention::Params {
            window_left: block.window_left,
            window_right: block.window_right,
            ..self.unmasked(tensors, Some(lse), [sinks, None])
        };
        parts.push(call.problem(), &[])
    }
}

/// The output so far, and that of the keys that are there: f32, one behind the other.
struct Sums {
    outs: RawTensor,
    lses: RawTensor,
}

impl Sums {
    fn take<'a, const N: usize>(
        group: &Group<'a>,
        out: &RawTensor,
        parts: &mut Parts<'a, N>,
    ) -> Result<Sums> {
        let [batch, tokens, heads, dim] = [0, 1, 2, 3].map(|i| out.layout.dim(i));
        Ok(Sums {
            outs: group.take_of(DType::F32, &[2, batch, tokens, heads, dim], parts)?,
            lses: group.take_of(DType::F32, &[2, batch, heads, tokens], parts)?,
        })
    }

    fn part(&self, which: usize) -> Result<[RawTensor; 2]> {
        Ok([entry(&self.outs, which)?, entry(&self.lses, which)?])
    }

    /// The queries of a block of both, as the output so far.
    fn merge(&self, block: &Block) -> Result<attention_merge::Problem> {
        let [out, lse] = self.part(0)?;
        Ok(attention_merge::Problem {
            outs: narrowed(self.outs, TOKENS + 1, &block.queries)?,
            lses: narrowed(self.lses, TOKENS_OF_LSE + 1, &block.queries)?,
            out: narrowed(out, TOKENS, &block.queries)?,
            lse: Some(narrowed(lse, TOKENS_OF_LSE, &block.queries)?),
        })
    }
}

/// A gradient that is added up in f32, and what a call gives of it.
#[derive(Clone, Copy)]
struct Gradient {
    name: &'static str,
    sum: RawTensor,
    part: RawTensor,
}

impl Gradient {
    /// Takes what a call gave of the tokens of a range: added, or in place of what is there.
    fn push<'a, const N: usize>(
        &self,
        group: &Group<'a>,
        tokens: &Range<usize>,
        add: bool,
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        let x = narrowed(self.part, TOKENS, tokens)?;
        let out = narrowed(self.sum, TOKENS, tokens)?;
        match add {
            true => group.add(self.name, x, out, parts),
            false => group.copy(self.name, x, out, parts),
        }
    }
}

/// What stays on a rank in the backward pass: its queries, `out` and `dout`; and `lse`.
struct Queries {
    tensors: [RawTensor; 3],
    lse: RawTensor,
}

impl<'a> backward::Params<'a> {
    /// Sends gradients of keys and values along with these, each rank adding what its queries give them, and then to
    /// whom they are of.
    pub(super) fn push_ring<const N: usize>(
        &self,
        group: &Group<'a>,
        [q, k, v, out, dout]: [RawTensor; 5],
        lse: RawTensor,
        [dq, dk, dv]: [Option<RawTensor>; 3],
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        let division = group.division([&q, &k], self.order)?;
        let sight = Sight::new(self.causal, self.window_left, self.window_right);
        let rank = self.comm.rank();
        let ring = Ring::new(rank, division, sight);
        let queries = Queries {
            tensors: [q, out, dout],
            lse,
        };
        let mut keys = group.travelling_keys([k, v], ring.steps, parts)?;
        let mut sums = group.travelling_gradients([dk, dv], ring.steps, parts)?;
        let mut given = [None; 2];
        for (given, own) in given.iter_mut().zip([&dk, &dv]) {
            if let Some(own) = own {
                *given = Some(group.take_like(own, parts)?);
            }
        }
        let of_q = match dq {
            None => None,
            Some(dq) => Some(Gradient {
                name: "dq",
                sum: group.take_of(DType::F32, dq.layout.shape(), parts)?,
                part: group.take_like(&dq, parts)?,
            }),
        };
        let of_heads = self.of_heads();
        if of_heads.dsinks.is_some() {
            // What sinks get depends on no key.
            let [q, out, dout] = queries.tensors;
            let none = |t: RawTensor| t.narrowed(TOKENS, 0, 0);
            let tensors = [q, none(k)?, none(v)?, out, dout];
            let call = self.unmasked(tensors, lse, [None; 3], of_heads);
            parts.push(call.problem(), &[])?;
        }
        let (all_queries, all_keys) = (0..division.queries, 0..division.keys);
        // Whether the sums that are here hold anything yet.
        let (mut of_queries, mut of_keys) = (false, false);
        for step in 0..ring.steps {
            let here = keys.pair([k, v]);
            let gradients = |sums: &Travelling| -> [Option<Gradient>; 2] {
                [0, 1].map(|i| {
                    Some(Gradient {
                        name: sums.names[i],
                        sum: sums.here[i]?,
                        part: given[i]?,
                    })
                })
            };
            let of_kv = gradients(&sums);
            for block in division.blocks(rank, ring.owner(step), sight) {
                // Sums begin with all that they are of: what no call gives them yet is zero.
                if !of_queries && block.queries != all_queries {
                    let nothing = Block::nothing(division.queries);
                    self.push_of_block(&queries, here, &nothing, (of_q, [None; 2]), parts)?;
                    push_sum(group, of_q, &all_queries, false, parts)?;
                    of_queries = true;
                }
                if !of_keys && block.keys != all_keys {
                    self.push_zeros(group, &queries, here, of_kv, parts)?;
                    of_keys = true;
                }
                self.push_of_block(&queries, here, &block, (of_q, of_kv), parts)?;
                push_sum(group, of_q, &block.queries, of_queries, parts)?;
                for gradient in of_kv {
                    push_sum(group, gradient, &block.keys, of_keys, parts)?;
                }
                (of_queries, of_keys) = (true, true);
            }
            if !of_keys {
                self.push_zeros(group, &queries, here, of_kv, parts)?;
                of_keys = true;
            }
            if step + 1 < ring.steps {
                keys.hop(group, ring.next(), parts)?;
                sums.hop(group, ring.next(), parts)?;
            }
        }
        if !of_queries {
            let nothing = Block::nothing(division.queries);
            self.push_of_block(&queries, [k, v], &nothing, (of_q, [None; 2]), parts)?;
            push_sum(group, of_q, &all_queries, false, parts)?;
        }
        if ring.steps > 1 {
            sums.hop(group, ring.home(), parts)?;
        }
        if let (Some(dq), Some(of_q)) = (dq, of_q) {
            group.copy("dq", of_q.sum, dq, parts)?;
        }
        for (name, sum, own) in [("dk", sums.here[0], dk), ("dv", sums.here[1], dv)] {
            if let (Some(sum), Some(own)) = (sum, own) {
                group.copy(name, sum, own, parts)?;
            }
        }
        self.push_sum_of_sinks(group, parts)
    }

    /// What the queries of a block, and the keys that they see, get from each other.
    fn push_of_block<const N: usize>(
        &self,
        queries: &Queries,
        [k, v]: Pair,
        block: &Block,
        (of_q, [of_k, of_v]): (Option<Gradient>, [Option<Gradient>; 2]),
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        if of_q.is_none() && of_k.is_none() && of_v.is_none() {
            return Ok(());
        }
        let [q, out, dout] = queries.tensors;
        let tensors = [
            narrowed(q, TOKENS, &block.queries)?,
            narrowed(k, TOKENS, &block.keys)?,
            narrowed(v, TOKENS, &block.keys)?,
            narrowed(out, TOKENS, &block.queries)?,
            narrowed(dout, TOKENS, &block.queries)?,
        ];
        let part = |of: Option<Gradient>, tokens| {
            of.map(|of| narrowed(of.part, TOKENS, tokens)).transpose()
        };
        let gradients = [
            part(of_q, &block.queries)?,
            part(of_k, &block.keys)?,
            part(of_v, &block.keys)?,
        ];
        let lse = narrowed(queries.lse, TOKENS_OF_LSE, &block.queries)?;
        let call = attention::backward::Params {
            window_left: block.window_left,
            window_right: block.window_right,
            ..self.unmasked(tensors, lse, gradients, OfHeads::default())
        };
        parts.push(call.problem(), &[])
    }

    /// Gradients of keys begin at zero: no queries give them that.
    fn push_zeros<const N: usize>(
        &self,
        group: &Group<'a>,
        queries: &Queries,
        here: Pair,
        of_kv: [Option<Gradient>; 2],
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        let all = 0..here[0].layout.dim(TOKENS);
        let none = Block {
            queries: 0..0,
            keys: all.clone(),
            window_left: 0,
            window_right: 0,
        };
        self.push_of_block(queries, here, &none, (None, of_kv), parts)?;
        of_kv
            .into_iter()
            .try_for_each(|of| push_sum(group, of, &all, false, parts))
    }
}

fn push_sum<'a, const N: usize>(
    group: &Group<'a>,
    of: Option<Gradient>,
    tokens: &Range<usize>,
    add: bool,
    parts: &mut Parts<'a, N>,
) -> Result<()> {
    of.map_or(Ok(()), |of| of.push(group, tokens, add, parts))
}

impl<'a> Group<'a> {
    /// A rank's keys and values, and room for those of others where there are so many steps.
    fn travelling_keys<const N: usize>(
        &self,
        own: Pair,
        steps: usize,
        parts: &mut Parts<'a, N>,
    ) -> Result<Travelling> {
        let names = ["k", "v"];
        let mut travelling = Travelling {
            names,
            here: own.map(Some),
            rooms: [[None; 2]; 2],
            hops: 0,
        };
        for (i, (name, own)) in names.into_iter().zip(own).enumerate() {
            for rooms in travelling.rooms.iter_mut().take(steps - 1) {
                rooms[i] = Some(self.take_like(&own, parts)?);
            }
            // What is sent has no gaps; its copy has room where the second rank's is to be.
            if steps > 1 && !own.layout.is_contiguous() {
                let copy = match travelling.rooms[1][i] {
                    Some(room) => room,
                    None => self.take_like(&own, parts)?,
                };
                self.copy(name, own, copy, parts)?;
                travelling.here[i] = Some(copy);
            }
        }
        Ok(travelling)
    }

    /// Sums of a rank's gradients of keys and values, f32, and room for those of others.
    fn travelling_gradients<const N: usize>(
        &self,
        own: [Option<RawTensor>; 2],
        steps: usize,
        parts: &mut Parts<'a, N>,
    ) -> Result<Travelling> {
        let mut travelling = Travelling {
            names: ["dk", "dv"],
            here: [None; 2],
            rooms: [[None; 2]; 2],
            hops: 0,
        };
        for (i, own) in own.iter().enumerate() {
            let Some(own) = own else { continue };
            for rooms in travelling.rooms.iter_mut().take(steps) {
                rooms[i] = Some(self.take_of(DType::F32, own.layout.shape(), parts)?);
            }
            // What is received first is in the first room.
            travelling.here[i] = travelling.rooms[1.min(steps - 1)][i];
        }
        Ok(travelling)
    }
}
