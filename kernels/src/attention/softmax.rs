//! Online softmax over scores in fragments: a lane has two of 8 neighbouring keys in each part, of 2 rows in each fragment.
//!
//! Row `2 f + h` of a lane is element `h` of the parts `f * parts..(f + 1) * parts`.

use cubecl::prelude::*;

use super::arguments::{Args, Buffers, ScoreRow, adjusted, hidden};
use super::fragments::*;

/// Scores, or what is accumulated with them: parts of a lane.
pub type Parts = Sequence<Array<Vector<f32, Pair>>>;

/// Begins sums of so many parts.
#[cube]
pub fn begin_parts(parts: &mut Parts, #[comptime] count: usize) {
    #[unroll]
    for _ in 0..count {
        parts.push(zeros());
    }
}

/// Adjusts the scores of keys from `key0` on, of which the last is `end - 1`.
#[cube]
pub fn adjust(
    scores: &mut Parts,
    args: &Args,
    buffers: &Buffers,
    rows: &Sequence<ScoreRow>,
    key0: u32,
    end: u32,
    pair: u32,
    #[comptime] count: usize,
    #[comptime] parts: usize,
    #[comptime] precise: bool,
) {
    #[unroll]
    for i in 0..count {
        #[unroll]
        for n in 0..parts {
            let part = scores.index_mut(comptime!(i / 2 * parts) + n);
            let mut x = part[comptime!(i % 2)];
            #[unroll]
            for c in 0..2usize {
                let key = key0 + pair * 2u32 + comptime!((n * 8 + c) as u32);
                x[c] = adjusted(
                    args,
                    buffers,
                    rows.index(i),
                    x[c],
                    min(key, end - 1u32),
                    precise,
                );
            }
            part[comptime!(i % 2)] = x;
        }
    }
}

/// Hides what lies outside the keys that a plane's rows see. Its first row, and the first of a lane, are those of the block's `first`
/// position plus `row`; `key0` is the tile's first key, `end` past the last one.
#[cube]
pub fn mask(
    scores: &mut Parts,
    first: i32,
    row: u32,
    wl: i32,
    wr: i32,
    key0: i32,
    end: u32,
    pair: u32,
    #[comptime] count: usize,
    #[comptime] parts: usize,
    #[comptime] adjusted: bool,
) {
    #[unroll]
    for i in 0..count {
        let position = first + i32::cast_from(row + comptime!((i * 8) as u32));
        // Columns of this lane are 2 pair, 2 pair + 1 of each eight.
        let low = position - wl + 1 - key0 - i32::cast_from(pair * 2u32);
        let high = min(i32::cast_from(end), position + wr) - key0 - i32::cast_from(pair * 2u32);
        hide_outside(scores, low, high, i, parts, adjusted);
    }
}

/// Hides a row's scores of the keys outside `low..high`, relative to the lane's first.
#[cube]
pub fn hide_outside(
    scores: &mut Parts,
    low: i32,
    high: i32,
    #[comptime] row: usize,
    #[comptime] parts: usize,
    #[comptime] adjusted: bool,
) {
    #[unroll]
    for n in 0..parts {
        let part = scores.index_mut(comptime!(row / 2 * parts) + n);
        let mut x = part[comptime!(row % 2)];
        #[unroll]
        for c in 0..2usize {
            let column = comptime!((n * 8 + c) as i32);
            if column < low || column >= high {
                x[c] = hidden(adjusted);
            }
        }
        part[comptime!(row % 2)] = x;
    }
}

/// Takes new peaks into account. They are only taken when one grew so much that the old would let the exponentials grow past e^6; then what
/// was accumulated under the old ones shrinks.
#[cube]
pub fn raise_peaks(
    scores: &Parts,
    row_peak: &mut Array<f32>,
    row_total: &mut Array<f32>,
    acc: &mut Parts,
    scale: f32,
    #[comptime] rows: usize,
    #[comptime] parts: usize,
    #[comptime] acc_parts: usize,
) {
    let mut peaks = Array::<f32>::new(rows);
    let mut grown = false;
    #[unroll]
    for i in 0..rows {
        let mut peak = row_peak[i];
        #[unroll]
        for n in 0..parts {
            let x = scores.index(comptime!(i / 2 * parts) + n)[comptime!(i % 2)];
            peak = max(peak, max(x[0], x[1]));
        }
        peak = row_max(peak);
        peaks[i] = peak;
        grown = grown || (peak - row_peak[i]) * scale > 6.0f32;
    }
    if plane_any(grown) {
        #[unroll]
        for i in 0..rows {
            let shrink = fast_exp((row_peak[i] - peaks[i]) * scale);
            row_peak[i] = peaks[i];
            row_total[i] = row_total[i] * shrink;
            #[unroll]
            for n in 0..acc_parts {
                let part = acc.index_mut(comptime!(i / 2 * acc_parts) + n);
                part[comptime!(i % 2)] = part[comptime!(i % 2)] * Vector::new(shrink);
            }
        }
    }
}

/// Replaces scores by their exponentials relative to the peaks, and adds those up.
#[cube]
pub fn exponentiate(
    scores: &mut Parts,
    row_peak: &Array<f32>,
    row_total: &mut Array<f32>,
    scale: f32,
    #[comptime] rows: usize,
    #[comptime] parts: usize,
) {
    #[unroll]
    for i in 0..rows {
        let offset = row_peak[i] * scale;
        let mut total = row_total[i];
        #[unroll]
        for n in 0..parts {
            let part = scores.index_mut(comptime!(i / 2 * parts) + n);
            let mut x = part[comptime!(i % 2)];
            x[0] = fast_exp(fma(x[0], scale, -offset));
            x[1] = fast_exp(fma(x[1], scale, -offset));
            total += x[0] + x[1];
            part[comptime!(i % 2)] = x;
        }
        row_total[i] = total;
    }
}
