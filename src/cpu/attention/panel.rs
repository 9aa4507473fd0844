//! The kernel for many rows: vector lanes are query rows.
//!
//! Queries are transposed once into panels of lanes; keys and values, in their natural order, are broadcast element by element.
//! So neither keys nor values are ever transposed, the softmax needs no horizontal reductions, and the three arrays a panel
//! works on (queries, scores, outputs) stay in the L1 cache while tiles of keys pass by.

use std::ops::Range;

use pulp::Simd;

use super::scores::{MAX_KEYS, Tile, has_modifiers};
use super::simd::{exp_nonpositive, finite_max, load, store};
use super::unit::{Softmax, Unit, carve};
use crate::problem::attention::Problem;

/// Keys, or elements of values, that a micro-kernel broadcasts. Times the vectors of a panel, they are its accumulators, which must
/// fit the registers: where there are 16, it takes half a block at a time.
pub(super) const BLOCK: usize = 8;
const HALF: usize = BLOCK / 2;

/// Products that are added one to the next. Longer rows are sums of such runs: rounding grows with the longest chain of additions.
const RUN: usize = 64;

/// Vectors in the widest panel.
pub(super) const MAX_VECTORS: usize = 2;

/// Buffers of one thread.
pub(super) struct Scratch<'a> {
    /// Per panel `[head_dim, lanes]`.
    q: &'a mut [f32],
    /// Per panel `[head_dim_v, lanes]`, its rows rounded up to a block.
    out: &'a mut [f32],
    /// Per panel `[lanes]`.
    max: &'a mut [f32],
    sum: &'a mut [f32],
    /// `[keys, lanes]`.
    scores: &'a mut [f32],
    /// `[keys, head_dim]`.
    k: &'a mut [f32],
    /// `[keys, head_dim_v]`, rows rounded up to a block.
    v: &'a mut [f32],
    /// One row of queries or of output.
    row: &'a mut [f32],
}

/// Sizes of the buffers, for units of at most `rows` rows and vectors of at most `lanes` lanes.
fn sizes(p: &Problem, rows: usize, lanes: usize) -> [usize; 8] {
    let width = lanes * MAX_VECTORS;
    let rows = rows.next_multiple_of(width);
    let tile = tile_keys(p);
    let dim_v = p.head_dim_v.next_multiple_of(BLOCK);
    [
        rows * p.head_dim,
        rows * dim_v,
        rows,
        rows,
        // Products are made in whole blocks, so both have room for one that begins at the last key.
        (tile + BLOCK) * width,
        (tile + BLOCK) * p.head_dim,
        tile * dim_v,
        p.head_dim.max(p.head_dim_v),
    ]
}

impl<'a> Scratch<'a> {
    /// Floats that [`Scratch::new`] takes.
    pub fn size(p: &Problem, rows: usize, lanes: usize) -> usize {
        sizes(p, rows, lanes).iter().sum()
    }

    /// In [`Scratch::size`] zeros.
    pub fn new(p: &Problem, rows: usize, lanes: usize, floats: &'a mut [f32]) -> Self {
        let [q, out, max, sum, scores, k, v, row] = carve(sizes(p, rows, lanes), floats);
        Scratch {
            q,
            out,
            max,
            sum,
            scores,
            k,
            v,
            row,
        }
    }
}

/// Keys per tile: a multiple of [`BLOCK`]; fewer where rows are long, so that tiles stay in the L2 cache beside the panels.
pub(super) fn tile_keys(p: &Problem) -> usize {
    if p.head_dim + p.head_dim_v > 512 {
        MAX_KEYS / 2
    } else {
        MAX_KEYS
    }
}

/// Computes a unit.
#[inline(always)]
pub(super) fn run<S: Simd>(simd: S, unit: &Unit<'_>, scratch: &mut Scratch<'_>) {
    if unit.rows.len() <= S::F32_LANES {
        run_panels::<S, 1>(simd, unit, scratch);
    } else {
        run_panels::<S, MAX_VECTORS>(simd, unit, scratch);
    }
}

#[inline(always)]
fn run_panels<S: Simd, const N: usize>(simd: S, unit: &Unit<'_>, scratch: &mut Scratch<'_>) {
    let p = unit.p;
    let lanes = S::F32_LANES * N;
    let dim_v = p.head_dim_v.next_multiple_of(BLOCK);
    let tile_keys = tile_keys(p);
    let num_panels = unit.rows.len().div_ceil(lanes);
    for i in 0..num_panels {
        load_panel(unit, panel_rows(unit, lanes, i), lanes, i * lanes, scratch);
    }
    scratch.out[..num_panels * lanes * dim_v].fill(0.0);

    let modifiers = has_modifiers(p);
    let mut start = unit.keys.start;
    while start < unit.keys.end {
        let tile = start..unit.keys.end.min(start + tile_keys);
        unit.load_tile(&p.k, p.head_dim, tile.clone(), p.head_dim, scratch.k);
        unit.load_tile(&p.v, p.head_dim_v, tile.clone(), dim_v, scratch.v);
        for i in 0..num_panels {
            let rows = panel_rows(unit, lanes, i);
            let visible = unit.sequence.visible(p, &rows);
            let keys = tile.start.max(visible.start)..tile.end.min(visible.end);
            if keys.is_empty() {
                continue;
            }
            let skip = keys.start - tile.start;
            let k = &scratch.k[skip * p.head_dim..];
            let v = &scratch.v[skip * dim_v..];
            let q = &scratch.q[i * lanes * p.head_dim..][..lanes * p.head_dim];
            let out = &mut scratch.out[i * lanes * dim_v..][..lanes * dim_v];
            let max = &mut scratch.max[i * lanes..][..lanes];
            let sum = &mut scratch.sum[i * lanes..][..lanes];
            let scores = &mut *scratch.scores;
            products::<S, N>(simd, k, q, p.head_dim, keys.len(), scores);
            let common = unit.sequence.common(p, &rows);
            let windows = common.start > keys.start || common.end < keys.end;
            if modifiers || windows {
                let mut tile = Tile {
                    scores: &mut *scores,
                    row_stride: 1,
                    key_stride: lanes,
                    rows,
                    keys: keys.clone(),
                };
                if modifiers {
                    tile.modify(unit);
                }
                if windows {
                    tile.hide_outside_windows(unit);
                }
            }
            let factor = softmax::<S, N>(simd, &mut scores[..keys.len() * lanes], max, sum);
            accumulate::<S, N>(simd, v, dim_v, &scores[..keys.len() * lanes], factor, out);
        }
        start = tile.end;
    }
    for i in 0..num_panels {
        store_panel(
            unit,
            panel_rows(unit, lanes, i),
            lanes,
            i * lanes,
            dim_v,
            scratch,
        );
    }
}

#[inline(always)]
fn panel_rows(unit: &Unit<'_>, lanes: usize, i: usize) -> Range<usize> {
    let start = unit.rows.start + i * lanes;
    start..unit.rows.end.min(start + lanes)
}

/// Transposes queries into a panel; `first` is its first lane among those of all panels.
#[inline(always)]
fn load_panel(
    unit: &Unit<'_>,
    rows: Range<usize>,
    lanes: usize,
    first: usize,
    scratch: &mut Scratch<'_>,
) {
    let dim = unit.p.head_dim;
    let panel = &mut scratch.q[first * dim..][..lanes * dim];
    // Lanes without a row compute with zeros, and nothing is kept of them.
    panel.fill(0.0);
    let row_buffer = &mut scratch.row[..dim];
    scratch.max[first..][..lanes].fill(0.0);
    scratch.sum[first..][..lanes].fill(0.0);
    for (lane, row) in rows.enumerate() {
        unit.load_query(row, row_buffer);
        for (to, from) in panel[lane..]
            .iter_mut()
            .step_by(lanes)
            .zip(row_buffer.iter())
        {
            *to = *from;
        }
        let softmax = unit.start(row);
        scratch.max[first + lane] = softmax.max;
        scratch.sum[first + lane] = softmax.sum;
    }
}

#[inline(always)]
fn store_panel(
    unit: &Unit<'_>,
    rows: Range<usize>,
    lanes: usize,
    first: usize,
    dim_v: usize,
    scratch: &mut Scratch<'_>,
) {
    let panel = &scratch.out[first * dim_v..][..lanes * dim_v];
    let row_buffer = &mut scratch.row[..unit.p.head_dim_v];
    for (lane, row) in rows.enumerate() {
        for (to, from) in row_buffer
            .iter_mut()
            .zip(panel[lane..].iter().step_by(lanes))
        {
            *to = *from;
        }
        let softmax = Softmax {
            max: scratch.max[first + lane],
            sum: scratch.sum[first + lane],
        };
        unit.store_row(row, row_buffer, softmax);
    }
}

/// `scores[key, lane] = Σ k[key, x] q[x, lane]`, in whole blocks: what lies behind the last key is computed too and means nothing.
#[inline(always)]
pub(super) fn products<S: Simd, const N: usize>(
    simd: S,
    k: &[f32],
    q: &[f32],
    dim: usize,
    keys: usize,
    scores: &mut [f32],
) {
    let lanes = S::F32_LANES * N;
    let keys = keys.next_multiple_of(BLOCK);
    assert!(q.len() >= dim * lanes && k.len() >= keys * dim && scores.len() >= keys * lanes);
    for key in (0..keys).step_by(BLOCK) {
        // SAFETY: the block's rows of `k` and `scores`, and all of `q`, were asserted to exist.
        unsafe {
            let (k, q) = (k.as_ptr().add(key * dim), q.as_ptr());
            let scores = scores.as_mut_ptr().add(key * lanes);
            if S::REGISTER_COUNT >= 32 {
                product_block::<S, N, BLOCK>(simd, k, q, dim, scores);
            } else {
                product_block::<S, N, HALF>(simd, k, q, dim, scores);
                let (k, scores) = (k.add(HALF * dim), scores.add(HALF * lanes));
                product_block::<S, N, HALF>(simd, k, q, dim, scores);
            }
        }
    }
}

/// # Safety
/// `k` has `M` rows of `dim`, `q` has `dim` rows of the panel's lanes, `scores` has `M` such rows.
#[inline(always)]
unsafe fn product_block<S: Simd, const N: usize, const M: usize>(
    simd: S,
    k: *const f32,
    q: *const f32,
    dim: usize,
    scores: *mut f32,
) {
    let lanes = S::F32_LANES * N;
    // SAFETY: what is loaded and stored lies in the rows that the caller promises.
    unsafe {
        for start in (0..dim).step_by(RUN) {
            let mut acc = [[simd.splat_f32s(0.0); N]; M];
            for x in start..dim.min(start + RUN) {
                let mut qs = [simd.splat_f32s(0.0); N];
                for (n, q_n) in qs.iter_mut().enumerate() {
                    *q_n = load::<S>(q.add(x * lanes + n * S::F32_LANES));
                }
                for (m, acc) in acc.iter_mut().enumerate() {
                    let k_m = simd.splat_f32s(*k.add(m * dim + x));
                    for (acc, q_n) in acc.iter_mut().zip(qs) {
                        *acc = simd.mul_add_f32s(k_m, q_n, *acc);
                    }
                }
            }
            for (m, acc) in acc.iter().enumerate() {
                for (n, acc) in acc.iter().enumerate() {
                    let at = scores.add(m * lanes + n * S::F32_LANES);
                    let sum = match start {
                        0 => *acc,
                        _ => simd.add_f32s(load::<S>(at), *acc),
                    };
                    store::<S>(at, sum);
                }
            }
        }
    }
}

/// Turns scores into `exp(score - max)`, updates maxima and sums, and gives the factors of what was accumulated before.
#[inline(always)]
fn softmax<S: Simd, const N: usize>(
    simd: S,
    scores: &mut [f32],
    max: &mut [f32],
    sum: &mut [f32],
) -> [S::f32s; N] {
    let lanes = S::F32_LANES * N;
    assert!(max.len() == lanes && sum.len() == lanes);
    let keys = scores.len() / lanes;
    let mut factors = [simd.splat_f32s(0.0); N];
    for (n, factor) in factors.iter_mut().enumerate() {
        let first = n * S::F32_LANES;
        // SAFETY: vector `n` of the panel is inside `max`, `sum` and each of the `keys` rows.
        unsafe {
            let column = scores.as_mut_ptr().add(first);
            let old = load::<S>(max.as_ptr().add(first));
            // Two chains each, or the loops would wait for the latency of one.
            let (mut even, mut odd) = (old, old);
            for key in (0..keys / 2 * 2).step_by(2) {
                even = simd.max_f32s(even, load::<S>(column.add(key * lanes)));
                odd = simd.max_f32s(odd, load::<S>(column.add((key + 1) * lanes)));
            }
            if keys % 2 == 1 {
                even = simd.max_f32s(even, load::<S>(column.add((keys - 1) * lanes)));
            }
            let new = simd.max_f32s(even, odd);
            let shift = finite_max(simd, new);
            let zero = simd.splat_f32s(0.0);
            let (mut even, mut odd) = (zero, zero);
            for key in (0..keys / 2 * 2).step_by(2) {
                even = simd.add_f32s(even, weigh(simd, column.add(key * lanes), shift));
                odd = simd.add_f32s(odd, weigh(simd, column.add((key + 1) * lanes), shift));
            }
            if keys % 2 == 1 {
                even = simd.add_f32s(even, weigh(simd, column.add((keys - 1) * lanes), shift));
            }
            *factor = exp_nonpositive(simd, simd.sub_f32s(old, shift));
            let before = load::<S>(sum.as_ptr().add(first));
            let total = simd.mul_add_f32s(before, *factor, simd.add_f32s(even, odd));
            store::<S>(sum.as_mut_ptr().add(first), total);
            store::<S>(max.as_mut_ptr().add(first), new);
        }
    }
    factors
}

/// Replaces a vector of scores by `exp(score - shift)`.
///
/// # Safety
/// A vector is readable and writable at `at`.
#[inline(always)]
unsafe fn weigh<S: Simd>(simd: S, at: *mut f32, shift: S::f32s) -> S::f32s {
    // SAFETY: one vector, readable and writable as the caller promises.
    unsafe {
        let e = exp_nonpositive(simd, simd.sub_f32s(load::<S>(at), shift));
        store::<S>(at, e);
        e
    }
}

/// `out[x, lane] = out[x, lane] * factor[lane] + Σ v[key, x] weights[key, lane]`.
#[inline(always)]
pub(super) fn accumulate<S: Simd, const N: usize>(
    simd: S,
    v: &[f32],
    dim_v: usize,
    weights: &[f32],
    factor: [S::f32s; N],
    out: &mut [f32],
) {
    let lanes = S::F32_LANES * N;
    let keys = weights.len() / lanes;
    assert!(dim_v.is_multiple_of(BLOCK) && v.len() >= keys * dim_v && out.len() >= dim_v * lanes);
    for x in (0..dim_v).step_by(BLOCK) {
        // SAFETY: asserted: `BLOCK` columns of `v` and rows of `out` from `x` on exist, and `keys` rows of `weights`.
        unsafe {
            let (v, weights) = (v.as_ptr().add(x), weights.as_ptr());
            let out = out.as_mut_ptr().add(x * lanes);
            if S::REGISTER_COUNT >= 32 {
                accumulate_block::<S, N, BLOCK>(simd, v, dim_v, weights, keys, factor, out);
            } else {
                accumulate_block::<S, N, HALF>(simd, v, dim_v, weights, keys, factor, out);
                let (v, out) = (v.add(HALF), out.add(HALF * lanes));
                accumulate_block::<S, N, HALF>(simd, v, dim_v, weights, keys, factor, out);
            }
        }
    }
}

/// # Safety
/// `v` has `keys` rows, `dim_v` apart, of `M` columns; `weights` has `keys` rows of the panel's lanes, `out` has `M` such rows.
#[inline(always)]
unsafe fn accumulate_block<S: Simd, const N: usize, const M: usize>(
    simd: S,
    v: *const f32,
    dim_v: usize,
    weights: *const f32,
    keys: usize,
    factor: [S::f32s; N],
    out: *mut f32,
) {
    let lanes = S::F32_LANES * N;
    let mut acc = [[simd.splat_f32s(0.0); N]; M];
    // SAFETY: what is loaded and stored lies in the rows that the caller promises.
    unsafe {
        // The tile's own sum first: many small terms lose less to rounding beside one another than beside the whole.
        for key in 0..keys {
            let mut ws = [simd.splat_f32s(0.0); N];
            for (n, w) in ws.iter_mut().enumerate() {
                *w = load::<S>(weights.add(key * lanes + n * S::F32_LANES));
            }
            for (m, acc) in acc.iter_mut().enumerate() {
                let v_m = simd.splat_f32s(*v.add(key * dim_v + m));
                for (acc, w) in acc.iter_mut().zip(ws) {
                    *acc = simd.mul_add_f32s(v_m, w, *acc);
                }
            }
        }
        for (m, acc) in acc.iter().enumerate() {
            for (n, acc) in acc.iter().enumerate() {
                let at = out.add(m * lanes + n * S::F32_LANES);
                store::<S>(at, simd.mul_add_f32s(load::<S>(at), factor[n], *acc));
            }
        }
    }
}
