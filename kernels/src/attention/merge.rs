//! How the planes of a decoding cube join what each has of the same rows, and write it.

use cubecl::prelude::*;

use super::arguments::*;
use super::fragments::*;
use super::loads::Config;
use super::packed::*;
use super::softmax::Sums;

/// What the planes leave for each other: 16 rows of each.
#[derive(CubeType, Clone)]
pub struct Merged {
    values: SharedMemory<Vector<f32, Const<4>>>,
    /// Before that, what a codes' kernel has of its queries' rows.
    pub peaks: SharedMemory<f32>,
    totals: SharedMemory<f32>,
}

#[cube]
pub fn merged(#[comptime] config: Config) -> Merged {
    let rows = comptime!(config.planes as usize * 16);
    Merged {
        values: SharedMemory::new_aligned(
            comptime!(rows * config.merge_pitch() as usize),
            128usize,
        ),
        peaks: SharedMemory::new(rows),
        totals: SharedMemory::new(rows),
    }
}

/// Leaves a plane's. Accumulator `n i + j`, lines having `n` elements, has columns `8 n i + 2 n t + j` and `8 n i + 2 n t + n + j`.
#[cube]
pub fn leave(
    to: &mut Merged,
    sums: &Sums,
    rows_here: u32,
    lane: &Lane,
    #[comptime] config: Config,
) {
    let merge_pitch = comptime!(config.merge_pitch());
    let v_blocks = comptime!(config.value_blocks());
    let quads = comptime!(config.line() as usize / 4);
    #[unroll]
    for h in 0..2usize {
        let row = lane.plane * 16u32 + lane.group_row + comptime!(h as u32 * 8);
        let total = row_sum(sums.row_total[h]);
        if lane.pair == 0u32 {
            to.peaks[row as usize] = sums.row_peak[h];
            to.totals[row as usize] = total;
        }
        if lane.group_row + comptime!(h as u32 * 8) < rows_here {
            #[unroll]
            for i in 0..comptime!(v_blocks * quads * 2) {
                let mut four = Vector::<f32, Const<4>>::empty();
                #[unroll]
                for j in 0..4usize {
                    let first = comptime!((i / (2 * quads) * quads + i % quads) * 4);
                    four[j] = sums.acc.index(first + j)[h][comptime!(i / quads % 2)];
                }
                let at = row * merge_pitch
                    + lane.pair * comptime!(2 * quads as u32)
                    + comptime!((i / (2 * quads) * 8 * quads + i % (2 * quads)) as u32);
                to.values[at as usize] = four;
            }
        }
    }
}

/// Writes the rows: finished, or as a part of split keys.
#[cube]
pub fn write_rows<E: Float>(
    from: &Merged,
    out: &mut Lines<E>,
    buffers: &mut Buffers,
    args: &Args,
    block: &Block,
    rows_here: u32,
    lines_v: u32,
    scale: f32,
    v_scale: f32,
    #[comptime] config: Config,
) {
    let merge_pitch = comptime!(config.merge_pitch());
    let planes = comptime!(config.planes);
    let scores = comptime!(config.scores);
    let per_row = comptime!(config.head_dim / 8);
    let batch = block.batch;
    #[unroll]
    for i in 0..comptime!((16 * per_row).div_ceil(config.threads())) {
        let index = UNIT_POS_X + comptime!(i * config.threads());
        let row = index / per_row;
        let line = index % per_row;
        if row < rows_here && line < lines_v {
            let mut peak = no_peak(scores);
            #[unroll]
            for w in 0..planes {
                peak = max(peak, from.peaks[(row + comptime!(w * 16)) as usize]);
            }
            let mut total = 0.0f32;
            let mut left = Vector::<f32, Const<4>>::zeroed();
            let mut right = Vector::<f32, Const<4>>::zeroed();
            #[unroll]
            for w in 0..planes {
                let from_row = row + comptime!(w * 16);
                let weight = fast_exp((from.peaks[from_row as usize] - peak) * scale);
                let at = from_row * merge_pitch + line * 2u32;
                total += weight * from.totals[from_row as usize];
                left += from.values[at as usize] * Vector::new(weight);
                right += from.values[at as usize + 1] * Vector::new(weight);
            }
            let packed = block.row0 + row;
            let token = packed / args.group;
            let head = block.key_head * args.group + packed % args.group;
            let whole = args.splits == 1u32;
            let end = finish(args, buffers, peak * scale, total, head, whole);
            let factor = if comptime!(config.codes) {
                end.factor * v_scale
            } else {
                end.factor
            };
            left *= Vector::new(factor);
            right *= Vector::new(factor);
            if !whole {
                let at = partial_at(args, block, token, head);
                if line == 0u32 {
                    buffers.partial_lse[at as usize] = end.lse;
                }
                let at = (at * u64::cast_from(lines_v) + u64::cast_from(line)) * 2u64;
                buffers.partial[at as usize] = left;
                buffers.partial[at as usize + 1] = right;
            } else {
                let token = block.span.q_first + token;
                if has(args, flag::LSE) && line == 0u32 {
                    buffers.lse[lse_at(args, batch, token, head) as usize] = end.lse;
                }
                let at = out_at(args, batch, token, head) + u64::cast_from(line);
                if has(args, flag::OUT_F32) {
                    let at = (at * 8u64) as usize;
                    #[unroll]
                    for j in 0..4usize {
                        buffers.out_f32[at + j] = left[j];
                        buffers.out_f32[at + j + 4] = right[j];
                    }
                } else {
                    let mut eight = Vector::<E, Line>::empty();
                    #[unroll]
                    for j in 0..4usize {
                        eight[j] = E::cast_from(left[j]);
                        eight[j + 4] = E::cast_from(right[j]);
                    }
                    out[at as usize] = eight;
                }
            }
        }
    }
}
