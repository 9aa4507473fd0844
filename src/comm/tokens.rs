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

/// Packed sequences, whose tokens ranks divide as one run of them, in contiguous parts: `tokens` each.
#[derive(Clone, Copy, Debug)]
pub struct Packed<'a> {
    /// Which rank, below `size`.
    pub rank: usize,
    /// Ranks of the group.
    pub size: usize,
    /// Tokens of each rank.
    pub tokens: usize,
    /// Where each sequence begins among the tokens of all ranks, and the last one's end. Behind that is padding.
    pub cu_seqlens: &'a [i32],
    /// Whether attention is.
    pub causal: bool,
}

impl Packed<'_> {
    /// Tokens of all ranks, and where this rank's begin and end.
    fn check(&self) -> Result<[i32; 2]> {
        const OP: &str = "context_parallel_packed_get";
        let (rank, size) = (self.rank, self.size);
        if size == 0 {
            return Err(Error::invalid(OP, "size", "is 0, at least 1 is needed"));
        }
        if rank >= size {
            let problem = text!("is {rank}, allowed: 0 to {}", size - 1);
            return Err(Error::invalid(OP, "rank", problem));
        }
        let all = self.tokens.checked_mul(size);
        let Some(all) = all.and_then(|all| i32::try_from(all).ok()) else {
            let problem = text!(
                "is {}, too many on {size} ranks: at most {}",
                self.tokens,
                i32::MAX
            );
            return Err(Error::invalid(OP, "tokens", problem));
        };
        if self.cu_seqlens.is_empty() {
            let problem = "has no entries, at least 1 is needed";
            return Err(Error::invalid(OP, "cu_seqlens", problem));
        }
        let mut before = 0;
        for (i, start) in self.cu_seqlens.iter().enumerate() {
            if !(before..=all).contains(start) {
                let problem = text!("has {start} at index {i}, allowed: {before} to {all}");
                return Err(Error::invalid(OP, "cu_seqlens", problem));
            }
            before = *start;
        }
        // Both are at most as great as the tokens of all ranks.
        Ok([rank, rank + 1].map(|rank| (rank * self.tokens) as i32))
    }

    /// Where each sequence begins among this rank's queries, and among the keys of all ranks: `cu_seqlens_q` and
    /// `cu_seqlens_k` of gathered keys. Causal, keys end with the rank's queries, whose last one sees the last key.
    ///
    /// # Errors
    /// The rank is none of the group's; all ranks have 2³¹ tokens or more; sequences begin before the ones before them
    /// or behind all tokens.
    pub fn each(&self) -> Result<impl ExactSizeIterator<Item = (i32, i32)>> {
        let [first, end] = self.check()?;
        Ok(self.cu_seqlens.iter().map(move |start| {
            let of_keys = if self.causal { end } else { i32::MAX };
            ((*start).clamp(first, end) - first, (*start).min(of_keys))
        }))
    }

    /// Of each of this rank's tokens its position in its sequence; 0 of padding.
    ///
    /// # Errors
    /// As [`Packed::each`].
    pub fn positions(&self) -> Result<impl Iterator<Item = i32>> {
        let [first, end] = self.check()?;
        let mut next = 0;
        Ok((first..end).map(move |token| {
            while self
                .cu_seqlens
                .get(next)
                .is_some_and(|start| *start <= token)
            {
                next += 1;
            }
            // Before the first sequence and behind the last one is padding.
            match next == 0 || next == self.cu_seqlens.len() {
                true => 0,
                false => token - self.cu_seqlens[next - 1],
            }
        }))
    }
}
