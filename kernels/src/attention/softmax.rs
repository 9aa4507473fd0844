//! Online softmax over scores in fragments: a lane has two of 8 neighbouring keys in each part, of 2 rows in each fragment.
//!
//! Row `2 f + h` of a lane is element `h` of the parts `f * parts..(f + 1) * parts`.

use cubecl::prelude::*;

use super::arguments::{Args, Buffers, ScoreRow, adjusted, hidden, no_peak};
use super::block::Work;
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

/// What a lane has of its rows: sums of values, the greatest score of each row, and the sum of the
/// exponentials relative to it.
#[derive(CubeType)]
pub struct Sums {
    pub acc: Parts,
    pub row_peak: Array<f32>,
    pub row_total: Array<f32>,
}

/// Sums of nothing, of `parts` parts; peaks and totals are to be set.
#[cube]
pub fn begin_sums(#[comptime] parts: usize, #[comptime] rows: usize) -> Sums {
    let mut acc = Parts::new();
    begin_parts(&mut acc, parts);
    Sums {
        acc,
        row_peak: Array::new(rows),
        row_total: Array::new(rows),
    }
}

/// Before any key was seen.
#[cube]
pub fn begin_rows(sums: &mut Sums, #[comptime] rows: usize, #[comptime] scores: bool) {
    #[unroll]
    for i in 0..rows {
        sums.row_peak[i] = no_peak(scores);
        sums.row_total[i] = 0.0f32;
    }
}

/// Replaces the scores of a tile by their exponentials, which are added up, what was summed before
/// shrinking where peaks grew.
#[cube]
pub fn update(
    sums: &mut Sums,
    scores: &mut Parts,
    scale: f32,
    #[comptime] rows: usize,
    #[comptime] parts: usize,
    #[comptime] acc_parts: usize,
) {
    raise_peaks(sums, scores, scale, rows, parts, acc_parts);
    exponentiate(sums, scores, scale, rows, parts);
}

/// Adjusts the scores of keys from `key0` on.
#[cube]
pub fn adjust(
    scores: &mut Parts,
    args: &Args,
    buffers: &Buffers,
    work: &Work,
    rows: &Sequence<ScoreRow>,
    key0: u32,
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
                let key = key0 + work.lane.pair * 2u32 + comptime!((n * 8 + c) as u32);
                x[c] = adjusted(
                    args,
                    buffers,
                    rows.index(i),
                    x[c],
                    min(key, work.block.span.k_count - 1u32),
                    precise,
                );
            }
            part[comptime!(i % 2)] = x;
        }
    }
}

/// Hides what lies outside the keys that a lane's rows see; `key0` is the tile's first key, `end`
/// past the last one.
#[cube]
pub fn mask(
    scores: &mut Parts,
    work: &Work,
    key0: i32,
    end: u32,
    #[comptime] count: usize,
    #[comptime] parts: usize,
    #[comptime] adjusted: bool,
) {
    let seen = &work.seen;
    let pair = work.lane.pair;
    let row = work.plane_row + work.lane.group_row;
    #[unroll]
    for i in 0..count {
        let position = seen.first + i32::cast_from(row + comptime!((i * 8) as u32));
        // Columns of this lane are 2 pair, 2 pair + 1 of each eight.
        let low = position - seen.window_left + 1 - key0 - i32::cast_from(pair * 2u32);
        let high = min(i32::cast_from(end), position + seen.window_right)
            - key0
            - i32::cast_from(pair * 2u32);
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
fn raise_peaks(
    sums: &mut Sums,
    scores: &Parts,
    scale: f32,
    #[comptime] rows: usize,
    #[comptime] parts: usize,
    #[comptime] acc_parts: usize,
) {
    let mut peaks = Array::<f32>::new(rows);
    let mut grown = false;
    #[unroll]
    for i in 0..rows {
        let mut peak = sums.row_peak[i];
        #[unroll]
        for n in 0..parts {
            let x = scores.index(comptime!(i / 2 * parts) + n)[comptime!(i % 2)];
            peak = max(peak, max(x[0], x[1]));
        }
        peak = row_max(peak);
        peaks[i] = peak;
        grown = grown || (peak - sums.row_peak[i]) * scale > 6.0f32;
    }
    if plane_any(grown) {
        #[unroll]
        for i in 0..rows {
            let shrink = fast_exp((sums.row_peak[i] - peaks[i]) * scale);
            sums.row_peak[i] = peaks[i];
            sums.row_total[i] = sums.row_total[i] * shrink;
            #[unroll]
            for n in 0..acc_parts {
                let part = sums.acc.index_mut(comptime!(i / 2 * acc_parts) + n);
                part[comptime!(i % 2)] = part[comptime!(i % 2)] * Vector::new(shrink);
            }
        }
    }
}

/// Replaces scores by their exponentials relative to the peaks, and adds those up.
#[cube]
fn exponentiate(
    sums: &mut Sums,
    scores: &mut Parts,
    scale: f32,
    #[comptime] rows: usize,
    #[comptime] parts: usize,
) {
    #[unroll]
    for i in 0..rows {
        let offset = sums.row_peak[i] * scale;
        let mut total = sums.row_total[i];
        #[unroll]
        for n in 0..parts {
            let part = scores.index_mut(comptime!(i / 2 * parts) + n);
            let mut x = part[comptime!(i % 2)];
            x[0] = fast_exp(fma(x[0], scale, -offset));
            x[1] = fast_exp(fma(x[1], scale, -offset));
            total += x[0] + x[1];
            part[comptime!(i % 2)] = x;
        }
        sums.row_total[i] = total;
    }
}
