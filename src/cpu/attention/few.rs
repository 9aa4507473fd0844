//! The kernel for few rows, as in decoding: vector lanes are elements of a key or value, so that each is read once and serves the
//! rows of all query heads that share it.

use pulp::Simd;

use super::scores::{MAX_KEYS, Tile, has_modifiers};
use super::simd::{exp_nonpositive, load, store};
use super::unit::{KeyRows, Softmax, Unit, carve};
use crate::cpu::vector;
use crate::problem::attention::Problem;

/// More rows than this are better off in panels.
pub(super) const MAX_ROWS: usize = 8;

/// Rows computed together; their accumulators share the registers.
const GROUP: usize = 4;

/// Buffers of one thread. Rows are padded with zeros to whole vectors.
pub(super) struct Scratch<'a> {
    dim: usize,
    dim_v: usize,
    q: &'a mut [f32],
    out: &'a mut [f32],
    scores: &'a mut [f32],
    k: &'a mut [f32],
    v: &'a mut [f32],
}

/// Sizes of the buffers, for vectors of at most `lanes` lanes.
fn sizes(p: &Problem, lanes: usize) -> [usize; 5] {
    let dim = p.head_dim.next_multiple_of(lanes);
    let dim_v = p.head_dim_v.next_multiple_of(lanes);
    [
        MAX_ROWS * dim,
        MAX_ROWS * dim_v,
        MAX_ROWS * MAX_KEYS,
        MAX_KEYS * dim,
        MAX_KEYS * dim_v,
    ]
}

impl<'a> Scratch<'a> {
    /// Floats that [`Scratch::new`] takes.
    pub fn size(p: &Problem, lanes: usize) -> usize {
        sizes(p, lanes).iter().sum()
    }

    /// In [`Scratch::size`] zeros.
    pub fn new(p: &Problem, lanes: usize, floats: &'a mut [f32]) -> Self {
        let [q, out, scores, k, v] = carve(sizes(p, lanes), floats);
        Scratch {
            dim: p.head_dim.next_multiple_of(lanes),
            dim_v: p.head_dim_v.next_multiple_of(lanes),
            q,
            out,
            scores,
            k,
            v,
        }
    }
}

/// Computes a unit of at most [`MAX_ROWS`] rows.
#[inline(always)]
pub(super) fn run<S: Simd>(simd: S, unit: &Unit<'_>, scratch: &mut Scratch<'_>) {
    let p = unit.p;
    let (dim, dim_v) = (scratch.dim, scratch.dim_v);
    let rows = unit.rows.len();
    let mut softmax = [Softmax {
        max: f32::NEG_INFINITY,
        sum: 0.0,
    }; MAX_ROWS];
    for (i, row) in unit.rows.clone().enumerate() {
        unit.load_query(row, &mut scratch.q[i * dim..][..p.head_dim]);
        softmax[i] = unit.start(row);
    }
    scratch.out.fill(0.0);

    let modifiers = has_modifiers(p);
    let common = unit.sequence.common(p, &unit.rows);
    let mut start = unit.keys.start;
    while start < unit.keys.end {
        let keys = start..unit.keys.end.min(start + MAX_KEYS);
        start = keys.end;
        let k = unit.tile(&p.k, p.head_dim, keys.clone(), dim, scratch.k);
        let v = unit.tile(&p.v, p.head_dim_v, keys.clone(), dim_v, scratch.v);
        let n = keys.len();
        for first in (0..rows).step_by(GROUP) {
            let q = &scratch.q[first * dim..];
            let scores = &mut scratch.scores[first * MAX_KEYS..];
            match rows - first {
                1 => products::<S, 1>(simd, k, q, dim, n, scores),
                2 => products::<S, 2>(simd, k, q, dim, n, scores),
                _ => products::<S, GROUP>(simd, k, q, dim, n, scores),
            }
        }
        let windows = common.start > keys.start || common.end < keys.end;
        if modifiers || windows {
            let mut tile = Tile {
                scores: scratch.scores,
                row_stride: MAX_KEYS,
                key_stride: 1,
                rows: unit.rows.clone(),
                keys,
            };
            if modifiers {
                tile.modify(unit);
            }
            if windows {
                tile.hide_outside_windows(unit);
            }
        }
        for (i, softmax) in softmax[..rows].iter_mut().enumerate() {
            let scores = &mut scratch.scores[i * MAX_KEYS..][..MAX_KEYS];
            // Whole vectors: what follows the last key weighs nothing.
            scores[n..].fill(f32::NEG_INFINITY);
            let factor = weigh(simd, scores, softmax);
            if factor != 1.0 {
                for x in &mut scratch.out[i * dim_v..][..dim_v] {
                    *x *= factor;
                }
            }
        }
        for first in (0..rows).step_by(GROUP) {
            let weights = &scratch.scores[first * MAX_KEYS..];
            let out = &mut scratch.out[first * dim_v..];
            match rows - first {
                1 => accumulate::<S, 1>(simd, v, weights, n, dim_v, out),
                2 => accumulate::<S, 2>(simd, v, weights, n, dim_v, out),
                _ => accumulate::<S, GROUP>(simd, v, weights, n, dim_v, out),
            }
        }
    }
    for (i, row) in unit.rows.clone().enumerate() {
        let out = &mut scratch.out[i * dim_v..][..p.head_dim_v];
        unit.store_row(row, out, softmax[i]);
    }
}

/// `scores[row, key] = Σ q[row, x] k[key, x]`.
#[inline(always)]
fn products<S: Simd, const R: usize>(
    simd: S,
    k: KeyRows<'_>,
    q: &[f32],
    dim: usize,
    keys: usize,
    scores: &mut [f32],
) {
    assert!(dim.is_multiple_of(S::F32_LANES) && (1..=MAX_KEYS).contains(&keys));
    assert!(q.len() >= R * dim && scores.len() >= R * MAX_KEYS);
    let (k, stride) = k.get(keys, dim);
    // SAFETY: asserted, and `k` has the rows that it gave.
    unsafe {
        let (q, scores) = (q.as_ptr(), scores.as_mut_ptr());
        let mut key = 0;
        while key + 4 <= keys {
            product_block::<S, R, 4>(simd, k.add(key * stride), stride, q, dim, scores.add(key));
            key += 4;
        }
        while key < keys {
            product_block::<S, R, 1>(simd, k.add(key * stride), stride, q, dim, scores.add(key));
            key += 1;
        }
    }
}

/// # Safety
/// `q` has `R` rows of `dim`, `k` has `M`, `stride` apart; `scores` has `R` rows, [`MAX_KEYS`] apart, of `M`.
#[inline(always)]
unsafe fn product_block<S: Simd, const R: usize, const M: usize>(
    simd: S,
    k: *const f32,
    stride: usize,
    q: *const f32,
    dim: usize,
    scores: *mut f32,
) {
    let mut acc = [[simd.splat_f32s(0.0); R]; M];
    // SAFETY: what is loaded and stored lies in the rows that the caller promises.
    unsafe {
        for x in (0..dim).step_by(S::F32_LANES) {
            let mut qs = [simd.splat_f32s(0.0); R];
            for (r, q_r) in qs.iter_mut().enumerate() {
                *q_r = load::<S>(q.add(r * dim + x));
            }
            for (m, acc) in acc.iter_mut().enumerate() {
                let k_m = load::<S>(k.add(m * stride + x));
                for (acc, q_r) in acc.iter_mut().zip(qs) {
                    *acc = simd.mul_add_f32s(k_m, q_r, *acc);
                }
            }
        }
        for r in 0..R {
            let scores = scores.add(r * MAX_KEYS);
            if M == 4 {
                // Where `M` is 1 this is not run, but the indices have to be in range.
                let four = [acc[0][r], acc[1 % M][r], acc[2 % M][r], acc[3 % M][r]];
                let sums = vector::sums_of_four(simd, four);
                scores.cast::<[f32; 4]>().write_unaligned(sums);
            } else {
                for (m, acc) in acc.iter().enumerate() {
                    *scores.add(m) = simd.reduce_sum_f32s(acc[r]);
                }
            }
        }
    }
}

/// Turns a row of scores into `exp(score - max)`, updates the softmax, and gives the factor of what was accumulated before.
#[inline(always)]
fn weigh<S: Simd>(simd: S, scores: &mut [f32], softmax: &mut Softmax) -> f32 {
    assert!(scores.len().is_multiple_of(S::F32_LANES));
    // SAFETY: whole vectors of `scores`.
    unsafe {
        let ptr = scores.as_mut_ptr();
        let mut max = simd.splat_f32s(softmax.max);
        for i in (0..scores.len()).step_by(S::F32_LANES) {
            max = simd.max_f32s(max, load::<S>(ptr.add(i)));
        }
        let max = simd.reduce_max_f32s(max);
        // A row that has seen no key: its scores less the maximum must be -∞, not NaN.
        let shift = if max == f32::NEG_INFINITY { 0.0 } else { max };
        let mut sum = simd.splat_f32s(0.0);
        for i in (0..scores.len()).step_by(S::F32_LANES) {
            let s = simd.sub_f32s(load::<S>(ptr.add(i)), simd.splat_f32s(shift));
            let e = exp_nonpositive(simd, s);
            store::<S>(ptr.add(i), e);
            sum = simd.add_f32s(sum, e);
        }
        let factor = crate::cpu::math::exp(softmax.max - shift);
        softmax.sum = softmax.sum.mul_add(factor, simd.reduce_sum_f32s(sum));
        softmax.max = max;
        factor
    }
}

/// `out[row, x] += Σ weights[row, key] v[key, x]`.
#[inline(always)]
fn accumulate<S: Simd, const R: usize>(
    simd: S,
    v: KeyRows<'_>,
    weights: &[f32],
    keys: usize,
    dim_v: usize,
    out: &mut [f32],
) {
    assert!(dim_v.is_multiple_of(S::F32_LANES) && (1..=MAX_KEYS).contains(&keys));
    assert!(weights.len() >= R * MAX_KEYS && out.len() >= R * dim_v);
    let (v, stride) = v.get(keys, dim_v);
    // SAFETY: asserted, and `v` has the rows that it gave.
    unsafe {
        let (weights, out) = (weights.as_ptr(), out.as_mut_ptr());
        let mut x = 0;
        while x + 2 * S::F32_LANES <= dim_v {
            accumulate_block::<S, R, 2>(simd, v.add(x), stride, weights, keys, out.add(x), dim_v);
            x += 2 * S::F32_LANES;
        }
        if x < dim_v {
            accumulate_block::<S, R, 1>(simd, v.add(x), stride, weights, keys, out.add(x), dim_v);
        }
    }
}

/// # Safety
/// `v` has `keys` rows, `stride` apart, and `out` has `R`, `dim_v` apart, of `N` vectors; `weights` has `R` rows, [`MAX_KEYS`] apart, of `keys`.
#[inline(always)]
unsafe fn accumulate_block<S: Simd, const R: usize, const N: usize>(
    simd: S,
    v: *const f32,
    stride: usize,
    weights: *const f32,
    keys: usize,
    out: *mut f32,
    dim_v: usize,
) {
    let lanes = S::F32_LANES;
    let mut acc = [[simd.splat_f32s(0.0); N]; R];
    // SAFETY: what is loaded and stored lies in the rows that the caller promises.
    unsafe {
        // The tile's own sum first: many small terms lose less to rounding beside one another than beside the whole.
        for key in 0..keys {
            let mut vs = [simd.splat_f32s(0.0); N];
            for (n, v_n) in vs.iter_mut().enumerate() {
                *v_n = load::<S>(v.add(key * stride + n * lanes));
            }
            for (r, acc) in acc.iter_mut().enumerate() {
                let w = simd.splat_f32s(*weights.add(r * MAX_KEYS + key));
                for (acc, v_n) in acc.iter_mut().zip(vs) {
                    *acc = simd.mul_add_f32s(w, v_n, *acc);
                }
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            for (n, acc) in acc.iter().enumerate() {
                let at = out.add(r * dim_v + n * lanes);
                store::<S>(at, simd.add_f32s(load::<S>(at), *acc));
            }
        }
    }
}
