//! Attention on the CPU: tiles of keys against tiles of query rows with an online softmax, in memory that grows with neither.
//!
//! Work is cut into units (see [`Sequence`]) in a way that depends on the problem alone, and each is computed by one thread from start
//! to end; so the same inputs give the same bits with any number of threads. Sequences with few queries and many keys are cut
//! along the keys too, and their parts merged by their softmax sums in order.

mod backward;
mod few;
mod panel;
mod scores;
mod sequences;
mod simd;
mod unit;

use std::ops::Range;

use pulp::{Simd, WithSimd};

use crate::cpu::{self, Cpu, Run, math};
use crate::error::Result;
use crate::problem::attention::{MAX_HEAD_DIM, Pair, Problem, Queries, Step};
use crate::tensor::Scratch;
use sequences::{Sequence, TILE_ROWS, sequences};
use unit::{Softmax, Unit, partial_size, store_output};

const OP: &str = "attention";

impl Run for Problem {
    fn probe(&self, _: &Cpu) -> Result<()> {
        match self.batch {
            0 => Ok(()),
            _ => sequences(OP, self).map(drop),
        }
    }

    fn run(&self, cpu: &Cpu, _: Scratch) -> Result<()> {
        forward(cpu, self)
    }
}

/// One after the other.
impl Run for Pair {
    fn probe(&self, cpu: &Cpu) -> Result<()> {
        self.earlier().probe(cpu)?;
        self.later.probe(cpu)
    }

    fn run(&self, cpu: &Cpu, scratch: Scratch) -> Result<()> {
        self.earlier().run(cpu, scratch)?;
        self.later.run(cpu, scratch)
    }
}

/// The same.
impl Run for Step {
    fn probe(&self, cpu: &Cpu) -> Result<()> {
        self.append.probe(cpu)?;
        self.attention.probe(cpu)
    }

    fn run(&self, cpu: &Cpu, scratch: Scratch) -> Result<()> {
        self.append.run(cpu, scratch)?;
        self.attention.run(cpu, scratch)
    }
}

fn forward(cpu: &Cpu, p: &Problem) -> Result<()> {
    if p.batch == 0 || matches!(p.queries, Queries::Batched { len: 0 }) {
        return Ok(());
    }
    let sequences = sequences(OP, p)?;
    let Some(last) = sequences.last() else {
        return Ok(());
    };
    let units = last.first_unit + last.units(p);
    let partial_rows: usize = sequences.iter().map(|s| partial_rows(s, p)).sum();
    let partials = cpu::scratch::Floats::new(OP, 1, partial_rows.saturating_mul(partial_size(p)))?;
    // SAFETY: the only part, borrowed once.
    let partials = unsafe { partials.part(0) };
    let shared = Partials(partials.as_mut_ptr());
    // An estimate, hence floating-point; a vector instruction does at least eight multiplications, and the softmax and
    // adding up vectors' lanes take about as long as these.
    let products: f64 = (sequences.iter())
        .map(|s| s.rows(p) as f64 * s.k_len as f64)
        .sum();
    let per_unit = products * p.num_kv_heads as f64 / units.max(1) as f64;
    let cost = per_unit * (p.head_dim + p.head_dim_v) as f64 / 4.0;
    let kinds = Kinds::of(p, &sequences);
    let size = kinds.few_size(p) + kinds.panel_size(p);
    cpu.for_each_range_with(OP, (units, cost as usize), size, |floats, range| {
        let partials = shared.get();
        cpu.arch().dispatch(Units {
            p,
            sequences: &sequences,
            range,
            partials,
            kinds,
            floats,
        });
    })?;
    for (batch, sequence) in sequences.iter().enumerate() {
        if sequence.splits > 1 {
            merge(cpu, p, sequence, batch, partials);
        }
    }
    Ok(())
}

/// Lanes of the longest vectors that there are.
const MAX_LANES: usize = 16;

/// Which kernels the units of some sequences go to: what threads need scratch for.
#[derive(Clone, Copy)]
struct Kinds {
    few: bool,
    /// Rows of the largest unit that has more than few.
    panel: Option<usize>,
}

impl Kinds {
    fn of(p: &Problem, sequences: &[Sequence]) -> Kinds {
        let mut kinds = Kinds {
            few: false,
            panel: None,
        };
        for rows in sequences.iter().map(|s| s.rows(p)) {
            for rows in [rows.min(TILE_ROWS), rows % TILE_ROWS] {
                match rows {
                    0 => {}
                    1..=few::MAX_ROWS => kinds.few = true,
                    _ => kinds.panel = kinds.panel.max(Some(rows)),
                }
            }
        }
        kinds
    }

    fn few_size(self, p: &Problem) -> usize {
        match self.few {
            true => few::Scratch::size(p, MAX_LANES),
            false => 0,
        }
    }

    fn panel_size(self, p: &Problem) -> usize {
        self.panel
            .map_or(0, |rows| panel::Scratch::size(p, rows, MAX_LANES))
    }
}

fn partial_rows(sequence: &Sequence, p: &Problem) -> usize {
    match sequence.splits {
        0 | 1 => 0,
        splits => sequence.rows(p) * p.num_kv_heads * splits,
    }
}

/// Partial results, each row written by one unit.
struct Partials(*mut f32);

// SAFETY: units write to rows of their own.
unsafe impl Sync for Partials {}

impl Partials {
    fn get(&self) -> *mut f32 {
        self.0
    }
}

/// The units that one thread computes.
struct Units<'a> {
    p: &'a Problem,
    sequences: &'a [Sequence],
    range: Range<usize>,
    partials: *mut f32,
    kinds: Kinds,
    /// Scratch of the thread, the same for all of its ranges.
    floats: &'a mut [f32],
}

impl WithSimd for Units<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let p = self.p;
        debug_assert!(S::F32_LANES <= MAX_LANES);
        let (few, panels) = self.floats.split_at_mut(self.kinds.few_size(p));
        let lanes = S::F32_LANES;
        let mut few = (self.kinds.few).then(|| few::Scratch::new(p, lanes, few));
        let mut panels = (self.kinds.panel).map(|rows| panel::Scratch::new(p, rows, lanes, panels));
        for index in self.range {
            let unit = Unit::new(p, self.sequences, index, self.partials);
            match (unit.rows.len() <= few::MAX_ROWS, &mut few, &mut panels) {
                (true, Some(scratch), _) => few::run(simd, &unit, scratch),
                (false, _, Some(scratch)) => panel::run(simd, &unit, scratch),
                _ => debug_assert!(false, "a unit that no sequence has"),
            }
        }
    }
}

/// Averages the parts of a split sequence, weighted by their softmax sums.
fn merge(cpu: &Cpu, p: &Problem, sequence: &Sequence, batch: usize, partials: &[f32]) {
    let (rows, splits, size) = (sequence.rows(p), sequence.splits, partial_size(p));
    let dim_v = p.head_dim_v;
    let items = rows * p.num_kv_heads;
    cpu.for_each_range(items, splits * size, |range| {
        let mut room = [0.0f32; MAX_HEAD_DIM];
        let out = &mut room[..dim_v];
        cpu.vectorize(
            #[inline(always)]
            || {
                for item in range.clone() {
                    let (kv_head, row) = (item / rows, item % rows);
                    let part = |split: usize| {
                        let index =
                            sequence.first_partial + (kv_head * splits + split) * rows + row;
                        let part = &partials[index * size..][..size];
                        (&part[..dim_v], part[dim_v], part[dim_v + 1])
                    };
                    // NaN is not lost: its part's sum is NaN too.
                    let max = (0..splits).fold(f32::NEG_INFINITY, |max, i| max.max(part(i).1));
                    let shift = if max == f32::NEG_INFINITY { 0.0 } else { max };
                    let mut sum = 0.0;
                    out.fill(0.0);
                    for i in 0..splits {
                        let (values, part_max, part_sum) = part(i);
                        let weight = math::exp(part_max - shift);
                        sum += weight * part_sum;
                        for (o, v) in out.iter_mut().zip(values) {
                            *o += weight * v;
                        }
                    }
                    let group = p.group();
                    let query_head = (row / group, kv_head * group + row % group);
                    let softmax = Softmax { max, sum };
                    store_output(p, sequence, batch, query_head, out, softmax);
                }
            },
        );
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::attention::Params;
    use crate::ops::operation::Operation;
    use crate::tensor::{TensorMut, TensorRef};

    /// The machine's instruction set decides which kernels the integration tests run; here every one that it has is compared.
    #[test]
    fn instruction_sets_agree() {
        let mut sets = vec![pulp::Arch::new(), pulp::Arch::Scalar];
        #[cfg(target_arch = "x86_64")]
        sets.extend(pulp::x86::V3::try_new().map(pulp::Arch::V3));
        // Few rows, one panel, several; ragged keys and dimensions; split keys.
        for (queries, keys, dim, dim_v) in [
            (1, 150, 40, 24),
            (3, 1100, 64, 64),
            (7, 90, 33, 9),
            (150, 170, 24, 40),
        ] {
            let (heads, kv_heads) = (4, 2);
            let wave = |n: usize, step: f32| -> Vec<f32> {
                (0..n).map(|i| (i as f32 * step).sin()).collect()
            };
            let q = wave(queries * heads * dim, 0.37);
            let k = wave(keys * kv_heads * dim, 0.73);
            let v = wave(keys * kv_heads * dim_v, 0.11);
            let results = sets.iter().map(|arch| {
                let mut cpu = Cpu::new(2).unwrap();
                cpu.arch = *arch;
                let mut out = vec![f32::NAN; queries * heads * dim_v];
                let mut params = Params::new(
                    TensorRef::from_slice(&q, &[1, queries, heads, dim]).unwrap(),
                    TensorRef::from_slice(&k, &[1, keys, kv_heads, dim]).unwrap(),
                    TensorRef::from_slice(&v, &[1, keys, kv_heads, dim_v]).unwrap(),
                    TensorMut::from_slice(&mut out, &[1, queries, heads, dim_v]).unwrap(),
                );
                params.causal = true;
                params.softcap = 3.0;
                forward(&cpu, &params.problem().unwrap()).unwrap();
                out
            });
            let results: Vec<Vec<f32>> = results.collect();
            for other in &results[1..] {
                for (a, b) in results[0].iter().zip(other) {
                    assert!((a - b).abs() < 2e-6, "{a} {b}");
                }
            }
        }
    }
}
