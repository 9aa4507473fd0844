//! Which of some keys some queries see, both of them neighbours in a sequence: attention of its own, whose last
//! query sees its last key.

use std::ops::Range;

use crate::comm::tokens::Order;

/// Tokens of a sequence that follow each other, there and in a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// Where they lie in the tensor.
    pub at: Range<usize>,
    /// Of the first one: which of the sequence's keys it is. Queries before all keys have negative ones.
    pub position: i128,
}

/// How a sequence of all ranks is made of what each has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Division {
    pub order: Order,
    pub size: usize,
    /// Queries and keys of one rank.
    pub queries: usize,
    pub keys: usize,
}

impl Division {
    /// The queries of a rank, in the order in which they lie.
    pub fn queries_of(self, rank: usize) -> impl Iterator<Item = Run> {
        // The last query of all is at the last key.
        let behind = self.size as i128 * (self.keys as i128 - self.queries as i128);
        self.runs(rank, self.queries, behind)
    }

    /// The keys of a rank.
    #[cfg(test)]
    pub fn keys_of(self, rank: usize) -> impl Iterator<Item = Run> {
        self.runs(rank, self.keys, 0)
    }

    fn runs(self, rank: usize, tokens: usize, first: i128) -> impl Iterator<Item = Run> {
        // One rank has all tokens, in either order.
        let chunks = if self.size == 1 {
            1
        } else {
            self.order.chunks()
        };
        let chunk = tokens / chunks;
        (0..chunks).map(move |own| Run {
            at: own * chunk..(own + 1) * chunk,
            position: first + (self.order.chunk((rank, self.size), own) * chunk) as i128,
        })
    }
}

/// How far queries see: as many keys up to their own position, and from it on, with the one that is there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sight {
    left: Option<i128>,
    right: Option<i128>,
}

impl Sight {
    /// Of what calls are given: windows, of which zero is all keys.
    pub fn new(causal: bool, window_left: usize, window_right: usize) -> Sight {
        let limit = |window: usize| (window > 0).then_some(window as i128);
        Sight {
            left: limit(window_left),
            right: if causal { Some(1) } else { limit(window_right) },
        }
    }
}

/// Queries and keys, as they lie in their tensors, and the windows of a call with them alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Block {
    pub queries: Range<usize>,
    pub keys: Range<usize>,
    pub window_left: usize,
    pub window_right: usize,
}

impl Block {
    /// What these queries see of these keys; `None` where that is nothing. Queries and keys that it does not have see
    /// and are seen by nothing; they are the last ones of their tensors.
    pub fn new(queries: &Run, keys: &Run, sight: Sight) -> Option<Block> {
        let (mut of_q, mut of_k) = (queries.at.len() as i128, keys.at.len() as i128);
        // By how much queries lie further behind than if the last one were at the last key.
        let ahead = (queries.position - keys.position) - (of_k - of_q);
        let mut left = sight.left.map(|left| left - ahead);
        let mut right = sight.right.map(|right| right + ahead);
        // Keys that lie too far behind even for the last query: without them, it is as many nearer to the last.
        if let Some(right) = right.as_mut().filter(|right| **right < 1) {
            let unseen = 1 - *right;
            of_k -= unseen;
            left = left.map(|left| left - unseen);
            *right = 1;
        }
        // Queries that even the last key lies too far before. Both windows together are of two keys at least.
        if let Some(left) = left.as_mut().filter(|left| **left < 1) {
            let unseeing = 1 - *left;
            of_q -= unseeing;
            right = right.map(|right| right - unseeing);
            *left = 1;
        }
        if of_q <= 0 || of_k <= 0 {
            return None;
        }
        // A window that ends behind the last key for the first query, or the other way round, limits nothing.
        let window = |limit: Option<i128>, all: i128| match limit {
            Some(limit) if limit < all => limit as usize,
            _ => 0,
        };
        Some(Block {
            queries: queries.at.start..queries.at.start + of_q as usize,
            keys: keys.at.start..keys.at.start + of_k as usize,
            window_left: window(left, of_k),
            window_right: window(right, of_q),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every query sees through its blocks what it sees of whole sequences, once.
    #[test]
    fn blocks_are_what_queries_see() {
        let windows = [
            (0, 0),
            (1, 0),
            (3, 0),
            (9, 0),
            (0, 1),
            (0, 4),
            (2, 3),
            (6, 6),
            (1, 2),
        ];
        for (order, size) in [
            (Order::Contiguous, 1),
            (Order::Contiguous, 3),
            (Order::Contiguous, 4),
            (Order::Zigzag, 1),
            (Order::Zigzag, 2),
            (Order::Zigzag, 3),
        ] {
            for (queries, keys) in [(4, 4), (2, 6), (6, 2), (0, 4), (4, 0), (2, 2)] {
                let division = Division {
                    order,
                    size,
                    queries,
                    keys,
                };
                for (window_left, window_right) in windows {
                    for causal in [false, true] {
                        check(division, (causal, window_left, window_right));
                    }
                }
            }
        }
    }

    fn check(division: Division, (causal, left, right): (bool, usize, usize)) {
        let sight = Sight::new(causal, left, right);
        let keys = division.size * division.keys;
        let all_keys = Run {
            at: 0..keys,
            position: 0,
        };
        for rank in 0..division.size {
            for queries in division.queries_of(rank) {
                let by_ranks = (0..division.size).flat_map(|of| division.keys_of(of));
                for of_keys in [vec![all_keys.clone()], by_ranks.collect()] {
                    let mut seen = vec![vec![0; keys]; queries.at.len()];
                    for keys in of_keys {
                        let block = Block::new(&queries, &keys, sight);
                        block
                            .iter()
                            .for_each(|b| mark(&mut seen, b, (&queries, &keys)));
                    }
                    for (i, seen) in seen.iter().enumerate() {
                        let at = queries.position + i as i128;
                        for (j, times) in seen.iter().enumerate() {
                            let key = j as i128;
                            let hidden = (causal && key > at)
                                || (left > 0 && key <= at - left as i128)
                                || (right > 0 && key >= at + right as i128);
                            assert_eq!(*times == 1, !hidden, "{division:?} {sight:?} {at} {key}");
                            assert!(*times < 2);
                        }
                    }
                }
            }
        }
    }

    /// Counts what a call with a block's queries and keys computes.
    fn mark(seen: &mut [Vec<i32>], block: &Block, (queries, keys): (&Run, &Run)) {
        let (q, k) = (block.queries.len() as i128, block.keys.len() as i128);
        for i in 0..q {
            let at = i + k - q;
            for j in 0..k {
                let (left, right) = (block.window_left as i128, block.window_right as i128);
                let hidden = (left > 0 && j <= at - left) || (right > 0 && j >= at + right);
                let query = block.queries.start - queries.at.start + i as usize;
                let key = keys.position as usize + block.keys.start - keys.at.start + j as usize;
                seen[query][key] += i32::from(!hidden);
            }
        }
    }
}
