//! Which tokens of sequences a rank holds, where ranks divide sequences
//! ([`context_parallel_attention`](mod@crate::ops::context_parallel_attention)).
//!
//! It is arithmetic on the host, of lengths alone: a trainer or an engine asks once for a batch, and has the positions
//! that rotary embeddings need and the places of the tokens that the rank's inputs and labels are taken from.
//!
//! ```
//! use unsloth::comm::tokens::{Order, Params};
//!
//! // Ten tokens on two ranks: chunks of three, of which the last has but one. Rank 0 has the first and the last.
//! let of = Params { order: Order::Zigzag, ..Params::new(0, 2, 1, 10) };
//! assert_eq!(of.tokens()?, 6);
//! let (mut positions, mut ids) = ([0; 6], [0; 6]);
//! of.fill(Some(&mut positions), Some(&mut ids))?;
//! assert_eq!(positions, [0, 1, 2, 9, 0, 0]);
//! assert_eq!(ids, [0, 1, 2, 9, -1, -1]);
//! # Ok::<(), unsloth::Error>(())
//! ```

use crate::error::{Error, Result, text};

const OP: &str = "context_parallel_tokens_get";

/// Which tokens of a sequence ranks hold. The discriminants are those of the C ABI (`UNSLOTH_CONTEXT_ORDER_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Order {
    /// Rank 0 the first ones, the last rank the last.
    #[default]
    Contiguous = 0,
    /// Of two chunks for every rank, rank `r` of `n` has chunk `r` and behind it chunk `2n - 1 - r`: one whose queries
    /// see little, and one whose queries see much where attention is causal.
    Zigzag = 1,
}

impl Order {
    /// All of them.
    pub const ALL: [Order; 2] = [Order::Contiguous, Order::Zigzag];

    /// The order with this C ABI value.
    pub fn from_raw(value: u32) -> Option<Order> {
        Order::ALL.into_iter().find(|order| *order as u32 == value)
    }

    /// Chunks of a rank.
    pub fn chunks(self) -> usize {
        match self {
            Order::Contiguous => 1,
            Order::Zigzag => 2,
        }
    }

    /// Which of the chunks of all `size` ranks a rank's chunk is.
    pub(crate) fn chunk(self, (rank, size): (usize, usize), own: usize) -> usize {
        match own {
            0 => rank,
            _ => 2 * size - 1 - rank,
        }
    }
}

/// What to divide: a batch of sequences.
#[derive(Clone, Copy, Debug)]
pub struct Params<'a> {
    /// Which tokens ranks hold.
    pub order: Order,
    /// Which rank, below `size`.
    pub rank: usize,
    /// Ranks of the group.
    pub size: usize,
    /// Sequences of the batch.
    pub batch: usize,
    /// Tokens of each; of the longest one where `lengths` says more.
    pub length: usize,
    /// Tokens of every sequence, none above `length`, where they differ.
    pub lengths: Option<&'a [i64]>,
}

impl Params<'_> {
    /// Of sequences of one length, in contiguous parts.
    pub fn new(rank: usize, size: usize, batch: usize, length: usize) -> Self {
        Params {
            order: Order::default(),
            rank,
            size,
            batch,
            length,
            lengths: None,
        }
    }

    /// Tokens of a chunk: as many in each, so that the last chunks may have some that are of no sequence.
    fn chunk(&self) -> Result<usize> {
        let (rank, size) = (self.rank, self.size);
        if !(1..=i32::MAX as usize).contains(&size) {
            let problem = text!("is {size}, allowed: 1 to {}", i32::MAX);
            return Err(Error::invalid(OP, "size", problem));
        }
        if rank >= size {
            let problem = text!("is {rank}, allowed: 0 to {}", size - 1);
            return Err(Error::invalid(OP, "rank", problem));
        }
        if self.length > i32::MAX as usize {
            let problem = text!("is {}, allowed: 0 to {}", self.length, i32::MAX);
            return Err(Error::invalid(OP, "length", problem));
        }
        for (i, length) in self.lengths.iter().copied().flatten().enumerate() {
            if !usize::try_from(*length).is_ok_and(|length| length <= self.length) {
                let problem = text!("has {length} at index {i}, allowed: 0 to {}", self.length);
                return Err(Error::invalid(OP, "lengths", problem));
            }
        }
        if let Some(lengths) = self.lengths.filter(|lengths| lengths.len() != self.batch) {
            let problem = text!("has {} entries, batch is {}", lengths.len(), self.batch);
            return Err(Error::invalid(OP, "lengths", problem));
        }
        // Ranks and lengths are of 31 bits.
        Ok(self.length.div_ceil(size * self.order.chunks()))
    }

    /// How many tokens of each sequence a rank has: every rank as many. The last ones of a sequence may be padding.
    ///
    /// # Errors
    /// The rank is none of the group's, the group has none; a length is above 2³¹ - 1 or `length`, or negative;
    /// there are not as many lengths as sequences.
    pub fn tokens(&self) -> Result<usize> {
        Ok(self.chunk()? * self.order.chunks())
    }

    /// Of each token that the rank has, `[batch, tokens]` of them, where it is: its position in its sequence, and its
    /// id in the whole batch `[batch, length]`. Padding has position 0 and id -1.
    ///
    /// # Errors
    /// As [`Params::tokens`]; the batch has too many tokens to count.
    pub fn each(&self) -> Result<impl ExactSizeIterator<Item = (i32, i64)>> {
        let chunk = self.chunk()?;
        let tokens = chunk * self.order.chunks();
        let all = tokens.checked_mul(self.batch);
        let whole = self.length.checked_mul(self.batch);
        let (Some(all), Some(_)) = (all, whole.filter(|whole| i64::try_from(*whole).is_ok()))
        else {
            let problem = text!("is {}, too many of {} tokens each", self.batch, self.length);
            return Err(Error::invalid(OP, "batch", problem));
        };
        Ok((0..all).map(move |i| {
            let (sequence, token) = (i / tokens, i % tokens);
            let of = self.order.chunk((self.rank, self.size), token / chunk);
            let position = of * chunk + token % chunk;
            let length = match self.lengths {
                None => self.length,
                Some(lengths) => lengths[sequence] as usize,
            };
            // Positions before a length have 31 bits, and ids as many as the batch has tokens.
            match position < length {
                true => (position as i32, (sequence * self.length + position) as i64),
                false => (0, -1),
            }
        }))
    }

    /// Writes what [`Params::each`] gives.
    ///
    /// # Errors
    /// As [`Params::each`]; what is written to has not as many elements.
    pub fn fill(&self, positions: Option<&mut [i32]>, ids: Option<&mut [i64]>) -> Result<()> {
        let all = self.each()?.len();
        let room = [
            ("positions", positions.as_ref().map(|to| to.len())),
            ("ids", ids.as_ref().map(|to| to.len())),
        ];
        for (name, len) in room {
            if let Some(len) = len.filter(|len| *len != all) {
                let problem = text!("has room for {len}, the rank has {all} tokens");
                return Err(Error::invalid(OP, name, problem));
            }
        }
        let to = positions.into_iter().flatten();
        (to.zip(self.each()?)).for_each(|(to, (position, _))| *to = position);
        let to = ids.into_iter().flatten();
        (to.zip(self.each()?)).for_each(|(to, (_, id))| *to = id);
        Ok(())
    }
}
