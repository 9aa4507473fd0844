//! The gradient of the bias: a block of it, and every score that it was added to.

use pulp::Simd;

use super::queries::{self, Scratch, load_panel};
use super::{Statistics, TILE_ROWS};
use crate::cpu::attention::panel::tile_keys;
use crate::cpu::attention::sequences::Sequence;
use crate::cpu::attention::unit::Unit;
use crate::problem::attention::{Problem, ScoresGradient};

/// How the bias is cut into blocks. Where it repeats a dimension, every block is of all of it.
#[derive(Clone, Copy)]
pub(super) struct Blocks<'a> {
    statistics: &'a Statistics<'a>,
    dbias: &'a ScoresGradient,
    /// Sequences, key heads, tiles of queries and of keys that are told apart.
    counts: [usize; 4],
    /// Queries of a tile.
    queries: usize,
}

/// One block: where it begins in `dbias`, and its sizes.
struct Block {
    start: [usize; 4],
    sizes: [usize; 4],
}

impl<'a> Blocks<'a> {
    pub fn new(statistics: &'a Statistics<'a>, dbias: &'a ScoresGradient) -> Self {
        let p = &statistics.problem.forward;
        let queries = (TILE_ROWS / p.group()).max(1);
        let [batch, heads, q, k] = dbias.sizes;
        Blocks {
            statistics,
            dbias,
            counts: [
                batch,
                heads.min(p.num_kv_heads),
                q.div_ceil(queries),
                k.div_ceil(tile_keys(p)),
            ],
            queries,
        }
    }

    pub fn count(&self) -> usize {
        self.counts.iter().product()
    }

    /// The most rows of a tile of queries.
    pub fn rows(p: &Problem) -> usize {
        (TILE_ROWS / p.group()).max(1) * p.group()
    }

    /// The most floats of a block.
    pub fn size(p: &Problem) -> usize {
        Blocks::rows(p) * tile_keys(p)
    }

    fn get(&self, index: usize) -> Block {
        let [_, heads, q, k] = self.counts;
        let place = [
            index / (heads * q * k),
            index / (q * k) % heads,
            index / k % q,
            index % k,
        ];
        let p = &self.statistics.problem.forward;
        let steps = [1, p.group(), self.queries, tile_keys(p)];
        let mut block = Block {
            start: [0; 4],
            sizes: [1; 4],
        };
        for dim in 0..4 {
            block.start[dim] = place[dim] * steps[dim];
            block.sizes[dim] = steps[dim].min(self.dbias.sizes[dim] - block.start[dim]);
        }
        block
    }

    /// Computes a block: `sums` has room for one, `scratch` for rows of a tile of queries.
    #[inline(always)]
    pub fn run<S: Simd>(
        &self,
        simd: S,
        index: usize,
        sequences: &[Sequence],
        sums: &mut [f32],
        scratch: &mut Scratch<'_>,
    ) {
        let p = &self.statistics.problem.forward;
        let block = self.get(index);
        let size = block.sizes.iter().product();
        let sums = &mut sums[..size];
        sums.fill(0.0);
        // A dimension of size 1 that is repeated stands for all; otherwise there is nothing else.
        let all = |dim: usize, n: usize| match self.dbias.sizes[dim] {
            1 => 0..n,
            _ => block.start[dim]..(block.start[dim] + block.sizes[dim]).min(n),
        };
        let kv_heads = match self.dbias.sizes[1] {
            1 => 0..p.num_kv_heads,
            _ => block.start[1] / p.group()..block.start[1] / p.group() + 1,
        };
        for batch in all(0, p.batch) {
            let sequence = &sequences[batch];
            let queries = all(2, sequence.q_len);
            for kv_head in kv_heads.clone() {
                for first in queries.clone().step_by(self.queries) {
                    let end = queries.end.min(first + self.queries);
                    let rows = first * p.group()..end * p.group();
                    let visible = sequence.visible(p, &rows);
                    let keys = all(3, sequence.k_len);
                    let unit = Unit {
                        p,
                        sequence,
                        batch,
                        kv_head,
                        rows,
                        keys: visible.start.max(keys.start)..visible.end.min(keys.end),
                        has_sink: false,
                        partial: None,
                    };
                    self.add::<S, 2>(simd, &unit, &block, sums, scratch);
                }
            }
        }
        self.store(&block, sums);
    }

    /// Adds what a unit's scores give to the sums.
    #[inline(always)]
    fn add<S: Simd, const N: usize>(
        &self,
        simd: S,
        unit: &Unit<'_>,
        block: &Block,
        sums: &mut [f32],
        scratch: &mut Scratch<'_>,
    ) {
        let p = unit.p;
        let lanes = S::F32_LANES * N;
        let num_panels = unit.rows.len().div_ceil(lanes);
        for i in 0..num_panels {
            let rows = queries::panel_rows(unit, lanes, i);
            load_panel(unit, self.statistics, rows, (i, lanes), scratch);
        }
        let mut start = unit.keys.start;
        while start < unit.keys.end {
            let tile = start..unit.keys.end.min(start + tile_keys(p));
            scratch.load_tile(unit, &tile);
            for i in 0..num_panels {
                let rows = queries::panel_rows(unit, lanes, i);
                let of_panel = (i, rows.clone());
                let found = queries::panel::<S, N>(simd, unit, of_panel, &tile, scratch);
                let Some((skip, count)) = found else { continue };
                let gradients = &scratch.gradients()[..count * lanes];
                for (lane, row) in rows.enumerate() {
                    let (query, head) = unit.query_head(row);
                    let of_row = gradients[lane..].iter().step_by(lanes);
                    let sums = &mut sums[self.place(block, head, query)..];
                    if self.dbias.sizes[3] == 1 {
                        sums[0] += of_row.sum::<f32>();
                    } else {
                        let first = tile.start + skip - block.start[3];
                        for (sum, gradient) in sums[first..].iter_mut().zip(of_row) {
                            *sum += gradient;
                        }
                    }
                }
            }
            start = tile.end;
        }
    }

    /// Where the sums of a row of scores begin.
    fn place(&self, block: &Block, head: usize, query: usize) -> usize {
        let local = |dim: usize, index: usize| match self.dbias.sizes[dim] {
            1 => 0,
            _ => index - block.start[dim],
        };
        (local(1, head) * block.sizes[2] + local(2, query)) * block.sizes[3]
    }

    fn store(&self, block: &Block, sums: &[f32]) {
        let [batch, head, query, key] = block.start;
        let strides = self.dbias.strides;
        let mut rows = sums.chunks_exact(block.sizes[3].max(1));
        for h in head..head + block.sizes[1] {
            for q in query..query + block.sizes[2] {
                let Some(row) = rows.next() else { return };
                let offset = batch * strides[0] + h * strides[1] + q * strides[2] + key;
                for (i, sum) in row.iter().enumerate() {
                    // SAFETY: inside the tensor, whose keys are contiguous; blocks do not overlap, and
                    // each is computed by one thread.
                    let to = unsafe { &mut *self.dbias.ptr.add(offset + i) };
                    *to = match self.statistics.problem.accumulate {
                        true => *to + sum,
                        false => *sum,
                    };
                }
            }
        }
    }
}
