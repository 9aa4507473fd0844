//! The backward pass of attention on the CPU: scores are computed again, tile by tile, and nothing of
//! their size is kept.
//!
//! Every gradient has a pass of its own over the tiles that it is a sum of, so that each element is
//! added up by one thread in one order: the same inputs give the same bits with any number of threads.
//! What the passes share is a number for every query and head, `delta`, in the workspace.

mod bias;
mod keys;
mod queries;
mod tile;

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::sequences::{Sequence, TILE_ROWS, sequences};
use super::unit::{Unit, load};
use super::{MAX_LANES, Partials};
use crate::cpu::{Cpu, Run, math};
use crate::error::Result;
use crate::problem::attention::{Backward, Keys, MAX_HEAD_DIM, Problem, Queries};
use crate::tensor::Scratch;
use bias::Blocks;

const OP: &str = "attention_backward";

/// Keys of a unit of `dk` and `dv`.
const TILE_KEYS: usize = 128;

/// Tokens of the queries, with those that belong to no sequence.
fn tokens(p: &Problem) -> usize {
    match p.queries {
        Queries::Batched { len } => p.batch * len,
        Queries::Packed { total, .. } => total,
    }
}

impl Run for Backward {
    fn needed(&self) -> usize {
        let needs_delta =
            self.dq.is_some() || self.dk.is_some() || self.dbias.is_some() || self.dsinks.is_some();
        match needs_delta {
            true => tokens(&self.forward)
                .saturating_mul(self.forward.num_heads)
                .saturating_mul(size_of::<f32>()),
            false => 0,
        }
    }

    fn probe(&self, _: &Cpu) -> Result<()> {
        sequences(OP, &self.forward).map(drop)
    }

    fn run(&self, cpu: &Cpu, scratch: Scratch) -> Result<()> {
        let sequences = sequences(OP, &self.forward)?;
        let statistics = Statistics {
            problem: self,
            delta: match self.needed() {
                0 => std::ptr::null_mut(),
                _ => scratch.ptr.cast(),
            },
            tokens: tokens(&self.forward),
        };
        statistics.compute(cpu);
        let call = Call {
            statistics: &statistics,
            sequences: &sequences,
        };
        call.run(cpu)?;
        dsinks(cpu, &statistics, &sequences);
        Ok(())
    }
}

/// What is known of a row of scores: its LSE, and how much of every gradient comes from the softmax's
/// denominator.
struct Statistics<'a> {
    problem: &'a Backward,
    /// f32 `[heads, tokens]`; NULL where nothing needs it.
    delta: *mut f32,
    tokens: usize,
}

// SAFETY: `delta` is written by one thread an entry, and read when it is complete.
unsafe impl Sync for Statistics<'_> {}

impl Statistics<'_> {
    /// `delta` of every token and head.
    fn compute(&self, cpu: &Cpu) {
        if self.delta.is_null() {
            return;
        }
        let p = &self.problem.forward;
        let to = Partials(self.delta);
        cpu.for_each_range(self.tokens * p.num_heads, 2 * p.head_dim_v, |range| {
            let mut room = [[0.0f32; MAX_HEAD_DIM]; 2];
            let [out, dout] = &mut room;
            let (out, dout) = (&mut out[..p.head_dim_v], &mut dout[..p.head_dim_v]);
            let to = to.get();
            cpu.vectorize(
                #[inline(always)]
                || {
                    for item in range.clone() {
                        let delta =
                            self.delta_of(item / self.tokens, item % self.tokens, out, dout);
                        // SAFETY: the workspace has an entry for every item, which is this thread's.
                        unsafe { *to.add(item) = delta };
                    }
                },
            );
        });
    }

    #[inline(always)]
    fn delta_of(&self, head: usize, token: usize, out: &mut [f32], dout: &mut [f32]) -> f32 {
        let p = &self.problem.forward;
        let (batch, token) = match p.queries {
            Queries::Batched { len } => (token / len, token % len),
            Queries::Packed { .. } => (0, token),
        };
        if self.lse(batch, token, head) == f32::INFINITY {
            return 0.0;
        }
        // SAFETY: the rows exist: the problem was checked.
        unsafe {
            load(&p.out, p.out.offset(batch, token, head), out);
            let rows = &self.problem.dout;
            load(rows, rows.offset(batch, token, head), dout);
        }
        let delta = dot(out, dout);
        match &self.problem.dlse {
            None => delta,
            // SAFETY: as above.
            Some(dlse) => unsafe {
                delta - *dlse.ptr.cast::<f32>().add(dlse.offset(batch, token, head))
            },
        }
    }

    /// The LSE of a query; +∞ in place of −∞, so that a row that sees no key has no weights.
    #[inline(always)]
    fn lse(&self, batch: usize, token: usize, head: usize) -> f32 {
        let Some(lse) = &self.problem.forward.lse else {
            return f32::INFINITY;
        };
        // SAFETY: the row exists: the problem was checked.
        let lse = unsafe { *lse.ptr.cast::<f32>().add(lse.offset(batch, token, head)) };
        match lse == f32::NEG_INFINITY {
            true => f32::INFINITY,
            false => lse,
        }
    }

    /// LSE and delta of a row of a unit.
    #[inline(always)]
    fn of(&self, unit: &Unit<'_>, row: usize) -> (f32, f32) {
        let (query, head) = unit.query_head(row);
        self.at(unit.batch, unit.sequence, query, head)
    }

    #[inline(always)]
    fn at(&self, batch: usize, sequence: &Sequence, query: usize, head: usize) -> (f32, f32) {
        let p = &self.problem.forward;
        let token = sequence.q_start + query;
        let place = match p.queries {
            Queries::Batched { len } => batch * len + token,
            Queries::Packed { .. } => token,
        };
        let delta = match self.delta.is_null() {
            true => 0.0,
            // SAFETY: an entry for every token and head, complete by now.
            false => unsafe { *self.delta.add(head * self.tokens + place) },
        };
        (self.lse(batch, token, head), delta)
    }
}

/// The sum of products, in as many chains as vectors are long.
#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; MAX_LANES];
    for (a, b) in a.chunks(MAX_LANES).zip(b.chunks(MAX_LANES)) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum = a.mul_add(*b, *sum);
        }
    }
    sums.iter().sum()
}

/// A pass over units of work, each computed by one thread from start to end.
#[derive(Clone, Copy)]
enum Pass<'a> {
    /// `dq`, tiles of query rows; no more than so many rows each.
    Queries { tiles: usize, rows: usize },
    /// `dk` and `dv`, tiles of keys.
    Keys { tiles: usize },
    /// `dbias`, its blocks.
    Bias(Blocks<'a>),
}

/// What the passes share.
#[derive(Clone, Copy)]
struct Call<'a> {
    statistics: &'a Statistics<'a>,
    sequences: &'a [Sequence],
}

impl<'a> Call<'a> {
    fn p(&self) -> &'a Problem {
        &self.statistics.problem.forward
    }

    fn passes(&self) -> [Option<Pass<'a>>; 3] {
        let (p, problem) = (self.p(), self.statistics.problem);
        let rows = self.most(|s| s.rows(p));
        [
            problem.dq.is_some().then(|| Pass::Queries {
                tiles: rows.div_ceil(TILE_ROWS),
                rows: rows.min(TILE_ROWS),
            }),
            (problem.dk.is_some() || problem.dv.is_some()).then(|| Pass::Keys {
                tiles: self.most(|s| self.room(s)).div_ceil(TILE_KEYS),
            }),
            (problem.dbias.as_ref()).map(|dbias| Pass::Bias(Blocks::new(self.statistics, dbias))),
        ]
    }

    /// The most that any sequence has.
    fn most(&self, of: impl Fn(&Sequence) -> usize) -> usize {
        self.sequences.iter().map(of).max().unwrap_or(0)
    }

    /// Keys of a sequence with its padding, whose gradients are written too.
    fn room(&self, sequence: &Sequence) -> usize {
        match self.p().keys {
            Keys::Batched { len, .. } => len,
            _ => sequence.k_len,
        }
    }

    /// Units of a pass, products of each tile, and floats of a thread's scratch.
    fn sizes(&self, pass: &Pass<'_>) -> (usize, usize, usize) {
        let p = self.p();
        match pass {
            Pass::Queries { tiles, rows } => {
                let size = queries::Scratch::size(p, *rows, MAX_LANES);
                (p.batch * p.num_kv_heads * tiles, 3, size)
            }
            Pass::Keys { tiles } => {
                let size = keys::Scratch::size(p, MAX_LANES);
                (p.batch * p.num_kv_heads * tiles, 4, size)
            }
            Pass::Bias(blocks) => {
                let size = queries::Scratch::size(p, Blocks::rows(p), MAX_LANES);
                (blocks.count(), 2, size + Blocks::size(p))
            }
        }
    }

    /// All passes at once: nothing is written before there is memory for them all, and threads that are
    /// done with one go on to the next.
    fn run(&self, cpu: &Cpu) -> Result<()> {
        let (p, passes) = (self.p(), self.passes());
        let (mut units, mut products, mut size) = (0, 0, 0);
        for (of_pass, n, floats) in passes.iter().flatten().map(|pass| self.sizes(pass)) {
            units += of_pass;
            products += n;
            size += floats;
        }
        // An estimate, hence floating-point; a vector instruction does at least eight multiplications.
        let scores: f64 = (self.sequences.iter())
            .map(|s| s.rows(p) as f64 * s.k_len as f64)
            .sum();
        let dims = (p.head_dim + p.head_dim_v) as f64 / 2.0;
        let all = scores * p.num_kv_heads as f64 * products as f64 * dims / 8.0;
        let cost = all / units.max(1) as f64;
        cpu.for_each_range_with(OP, (units, cost as usize), size, |floats, range| {
            cpu.arch().dispatch(Units {
                call: *self,
                passes,
                range,
                floats,
            });
        })
    }

    /// Unit `index` of a pass that cuts each key head of each sequence into `tiles`.
    #[inline(always)]
    fn unit(&self, index: usize, tiles: usize) -> (Unit<'a>, usize) {
        let p = self.p();
        let batch = index / tiles / p.num_kv_heads;
        let unit = Unit {
            p,
            sequence: &self.sequences[batch],
            batch,
            kv_head: index / tiles % p.num_kv_heads,
            rows: 0..0,
            keys: 0..0,
            has_sink: false,
            partial: None,
        };
        (unit, index % tiles)
    }
}

/// Units that one thread computes, counted through all passes.
struct Units<'a> {
    call: Call<'a>,
    passes: [Option<Pass<'a>>; 3],
    range: Range<usize>,
    /// Scratch of the thread, the same for all of its ranges; every pass has its own part.
    floats: &'a mut [f32],
}

impl WithSimd for Units<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        debug_assert!(S::F32_LANES <= MAX_LANES);
        let (mut first, mut rest) = (0, self.floats);
        for pass in self.passes.into_iter().flatten() {
            let (units, _, size) = self.call.sizes(&pass);
            let (floats, others) = rest.split_at_mut(size);
            rest = others;
            let start = self.range.start.clamp(first, first + units) - first;
            let end = self.range.end.clamp(first, first + units) - first;
            first += units;
            if start < end {
                run_pass(simd, self.call, pass, start..end, floats);
            }
        }
    }
}

/// Computes units of a pass.
#[inline(always)]
fn run_pass<S: Simd>(
    simd: S,
    call: Call<'_>,
    pass: Pass<'_>,
    range: Range<usize>,
    floats: &mut [f32],
) {
    let (p, statistics) = (call.p(), call.statistics);
    match pass {
        Pass::Queries { tiles, rows } => {
            let mut scratch = queries::Scratch::new(p, rows, S::F32_LANES, floats);
            for index in range {
                let (mut unit, tile) = call.unit(index, tiles);
                let all = unit.sequence.rows(p);
                let start = all.min(tile * TILE_ROWS);
                unit.rows = start..all.min(start + TILE_ROWS);
                unit.keys = unit.sequence.visible(p, &unit.rows);
                queries::run(simd, &unit, statistics, &mut scratch);
            }
        }
        Pass::Keys { tiles } => {
            let mut scratch = keys::Scratch::new(p, S::F32_LANES, floats);
            for index in range {
                let (mut unit, tile) = call.unit(index, tiles);
                let (k_len, room) = (unit.sequence.k_len, call.room(unit.sequence));
                let (start, end) = (tile * TILE_KEYS, (tile + 1) * TILE_KEYS);
                unit.keys = start.min(k_len)..end.min(k_len);
                unit.rows = unit.sequence.seeing(p, &unit.keys);
                let written = start.min(room)..end.min(room);
                keys::run(simd, &unit, written, statistics, &mut scratch);
            }
        }
        Pass::Bias(blocks) => {
            let (sums, floats) = floats.split_at_mut(Blocks::size(p));
            let rows = Blocks::rows(p);
            let mut scratch = queries::Scratch::new(p, rows, S::F32_LANES, floats);
            for index in range {
                blocks.run(simd, index, call.sequences, sums, &mut scratch);
            }
        }
    }
}

/// `-Σ exp(sink - lse) delta` for every head.
fn dsinks(cpu: &Cpu, statistics: &Statistics<'_>, sequences: &[Sequence]) {
    /// Terms that are added one to the next; their sums then are.
    const RUN: usize = 256;
    let p = &statistics.problem.forward;
    let Some(dsinks) = statistics.problem.dsinks else {
        return;
    };
    let to = Partials(dsinks);
    cpu.for_each_range(p.num_heads, statistics.tokens.saturating_mul(32), |heads| {
        let to = to.get();
        for head in heads {
            // SAFETY: checked to have an entry for every head.
            let sink = (p.sinks).map_or(f32::NEG_INFINITY, |sinks| unsafe { *sinks.add(head) });
            let mut sum = 0.0f32;
            for (batch, sequence) in sequences.iter().enumerate() {
                for first in (0..sequence.q_len).step_by(RUN) {
                    let queries = first..sequence.q_len.min(first + RUN);
                    let terms = queries.map(|query| {
                        let (lse, delta) = statistics.at(batch, sequence, query, head);
                        math::exp(sink - lse) * delta
                    });
                    sum += terms.sum::<f32>();
                }
            }
            // SAFETY: as above; a head is one thread's.
            let to = unsafe { &mut *to.add(head) };
            *to = match statistics.problem.accumulate {
                true => *to - sum,
                false => -sum,
            };
        }
    });
}
