//! Attention on the CPU: tiles of keys against tiles of query rows with an online softmax, in memory that grows with neither.
//!
//! Work is cut into units (see [`Sequence`]) in a way that depends on the problem alone, and each is computed by one thread from start
//! to end; so the same inputs give the same bits with any number of threads. Sequences with few queries and many keys are cut
//! along the keys too, and their parts merged by their softmax sums in order.

mod few;
mod panel;
mod scores;
mod sequences;
mod simd;
mod unit;

use std::ops::Range;

use pulp::{Simd, WithSimd};

use crate::cpu::{Cpu, Run, math};
use crate::error::{Error, Result, text};
use crate::problem::attention::{Problem, Queries};
use crate::tensor::Scratch;
use sequences::{Sequence, TILE_ROWS, sequences};
use unit::{Softmax, Unit, partial_size, store_output};

impl Run for Problem {
    fn run(&self, cpu: &Cpu, _: Scratch) -> Result<()> {
        forward(cpu, self)
    }
}

fn forward(cpu: &Cpu, p: &Problem) -> Result<()> {
    if matches!(p.queries, Queries::Batched { len: 0 }) {
        return Ok(());
    }
    let sequences = sequences(p)?;
    let Some(last) = sequences.last() else {
        return Ok(());
    };
    let units = last.first_unit + last.units(p);
    let partial_rows: usize = sequences.iter().map(|s| partial_rows(s, p)).sum();
    let mut partials = allocate(partial_rows.saturating_mul(partial_size(p)))?;
    let shared = Partials(partials.as_mut_ptr());
    // An estimate, hence floating-point; a vector instruction does at least eight multiplications.
    let products: f64 = (sequences.iter())
        .map(|s| s.rows(p) as f64 * s.k_len as f64)
        .sum();
    let per_unit = products * p.num_kv_heads as f64 / units.max(1) as f64;
    let cost = per_unit * (p.head_dim + p.head_dim_v) as f64 / 8.0;
    cpu.for_each_range(units, cost as usize, |range| {
        let partials = shared.get();
        cpu.arch().dispatch(Units {
            p,
            sequences: &sequences,
            range,
            partials,
        });
    });
    for (batch, sequence) in sequences.iter().enumerate() {
        if sequence.splits > 1 {
            merge(cpu, p, sequence, batch, &partials);
        }
    }
    Ok(())
}

/// Zeros; an absurd number of keys (repeated by a zero stride) is an error, not an abort.
fn allocate(len: usize) -> Result<Vec<f32>> {
    let mut buffer = Vec::new();
    buffer
        .try_reserve_exact(len)
        .map_err(|e| Error::OutOfMemory {
            op: "attention",
            requested: (len as u64).saturating_mul(4),
            reason: text!("partial results of split sequences: {e}"),
        })?;
    buffer.resize(len, 0.0);
    Ok(buffer)
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
}

impl WithSimd for Units<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let p = self.p;
        let mut panels = None;
        let mut few = None;
        for index in self.range {
            let unit = Unit::new(p, self.sequences, index, self.partials);
            if unit.rows.len() <= few::MAX_ROWS {
                let scratch = few.get_or_insert_with(|| few::Scratch::new(p, S::F32_LANES));
                few::run(simd, &unit, scratch);
            } else {
                let rows = TILE_ROWS.min(p.max_seqlen_q * p.group());
                let scratch =
                    panels.get_or_insert_with(|| panel::Scratch::new(p, rows, S::F32_LANES));
                panel::run(simd, &unit, scratch);
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
        let mut out = vec![0.0f32; dim_v];
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
                    store_output(p, sequence, batch, query_head, &mut out, softmax);
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
