//! Which of some keys some queries see, both of them neighbours in a sequence: attention of its own, whose last
//! query sees its last key.

use std::ops::Range;

use arrayvec::ArrayVec;

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
    pub fn keys_of(self, rank: usize) -> impl Iterator<Item = Run> {
        self.runs(rank, self.keys, 0)
    }

    /// What a rank's queries see of the keys of one, as few calls.
    pub fn blocks(self, rank: usize, owner: usize, sight: Sight) -> ArrayVec<Block, 4> {
        let mut blocks = ArrayVec::<Block, 4>::new();
        if self.queries == 0 || self.keys == 0 {
            return blocks;
        }
        if rank == owner && self.queries == self.keys && sight.is_causal() {
            // Chunks are in their order: what is between them hides nothing.
            blocks.push(Block {
                queries: 0..self.queries,
                keys: 0..self.keys,
                window_left: 0,
                window_right: usize::from(self.queries > 1),
            });
            return blocks;
        }
        for queries in self.queries_of(rank) {
            let mut of_queries = ArrayVec::<Block, 2>::new();
            for keys in self.keys_of(owner) {
                let Some(block) = Block::new(&queries, &keys, sight) else {
                    continue;
                };
                match of_queries.last_mut() {
                    Some(last) if last.is_before_keys_of(&block) => last.keys.end = block.keys.end,
                    _ => of_queries.push(block),
                }
            }
            match (blocks.last_mut(), &of_queries[..]) {
                (Some(last), [block]) if last.is_before_queries_of(block) => {
                    last.queries.end = block.queries.end;
                }
                _ => blocks.extend(of_queries),
            }
        }
        blocks
    }

    /// How many ranks' keys each rank's queries are to meet, its own first and then those of the rank before: all,
    /// unless windows are such that nobody sees the last ones.
    pub fn steps(self, sight: Sight) -> usize {
        let sees = |step: usize| {
            let mut ranks = 0..self.size;
            ranks.any(|rank| {
                let owner = (rank + self.size - step) % self.size;
                !self.blocks(rank, owner, sight).is_empty()
            })
        };
        let last = (1..self.size).rev().find(|step| sees(*step));
        last.map_or(1, |last| last + 1)
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

    /// Whether queries see all keys up to their own position, and no others.
    fn is_causal(self) -> bool {
        self.left.is_none() && self.right == Some(1)
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
    /// Queries that see no keys.
    pub fn nothing(queries: usize) -> Block {
        Block {
            queries: 0..queries,
            keys: 0..0,
            window_left: 0,
            window_right: 0,
        }
    }

    fn is_unmasked(&self) -> bool {
        self.window_left == 0 && self.window_right == 0
    }

    /// Whether the two are one, whose keys are those of both.
    fn is_before_keys_of(&self, other: &Block) -> bool {
        let behind = self.queries == other.queries && self.keys.end == other.keys.start;
        behind && self.is_unmasked() && other.is_unmasked()
    }

    /// Whether the two are one, whose queries are those of both.
    fn is_before_queries_of(&self, other: &Block) -> bool {
        let behind = self.keys == other.keys && self.queries.end == other.queries.start;
        behind && self.is_unmasked() && other.is_unmasked()
    }

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
        let positions = |runs: Vec<Run>| -> Vec<i128> {
            let of = |run: Run| (0..run.at.len()).map(move |i| run.position + i as i128);
            runs.into_iter().flat_map(of).collect()
        };
        for rank in 0..division.size {
            let queries = positions(division.queries_of(rank).collect());
            let mut seen = [0, 1].map(|_| vec![vec![0; keys]; queries.len()]);
            for of_queries in division.queries_of(rank) {
                let block = Block::new(&of_queries, &all_keys, sight);
                let of_keys: Vec<_> = (0..keys as i128).collect();
                block.iter().for_each(|b| mark(&mut seen[0], b, &of_keys));
            }
            for step in 0..division.steps(sight) {
                let owner = (rank + division.size - step) % division.size;
                let of_keys = positions(division.keys_of(owner).collect());
                for block in division.blocks(rank, owner, sight) {
                    mark(&mut seen[1], &block, &of_keys);
                }
            }
            for seen in seen {
                for (at, seen) in queries.iter().zip(seen) {
                    for (key, times) in (0..).zip(seen) {
                        let hidden = (causal && key > *at)
                            || (left > 0 && key <= at - left as i128)
                            || (right > 0 && key >= at + right as i128);
                        let expected = i32::from(!hidden);
                        assert_eq!(times, expected, "{division:?} {sight:?} {at} {key}");
                    }
                }
            }
        }
    }

    /// Counts what a call with a block's queries and keys computes.
    fn mark(seen: &mut [Vec<i32>], block: &Block, positions: &[i128]) {
        let (q, k) = (block.queries.len() as i128, block.keys.len() as i128);
        assert!(q > 0 && k > 0);
        for (i, query) in (0..).zip(block.queries.clone()) {
            let at: i128 = i + k - q;
            for (j, key) in (0..).zip(block.keys.clone()) {
                let (left, right) = (block.window_left as i128, block.window_right as i128);
                let hidden = (left > 0 && j <= at - left) || (right > 0 && j >= at + right);
                seen[query][positions[key] as usize] += i32::from(!hidden);
            }
        }
    }

    /// Without windows a step is one call; those that nobody needs are not made.
    #[test]
    fn steps_are_few() {
        let of = |order| Division {
            order,
            size: 4,
            queries: 8,
            keys: 8,
        };
        let (contiguous, zigzag) = (of(Order::Contiguous), of(Order::Zigzag));
        let causal = Sight::new(true, 0, 0);
        for rank in 0..4 {
            for owner in 0..4 {
                assert_eq!(zigzag.blocks(rank, owner, causal).len(), 1);
                let of_causal = contiguous.blocks(rank, owner, causal).len();
                assert_eq!(of_causal, usize::from(owner <= rank));
                let all = zigzag.blocks(rank, owner, Sight::new(false, 0, 0));
                assert_eq!(
                    (all.len(), all[0].queries.len(), all[0].keys.len()),
                    (1, 8, 8)
                );
            }
        }
        let steps = [1, 2, 9, 10, 17, 18].map(|w| contiguous.steps(Sight::new(true, w, 0)));
        assert_eq!(steps, [1, 2, 2, 3, 3, 4]);
        assert_eq!(contiguous.steps(Sight::new(false, 0, 1)), 4);
        assert_eq!(zigzag.steps(Sight::new(true, 1, 0)), 1);
    }
}
