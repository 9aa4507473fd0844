//! Averages the parts of split attention, weighted by what they sum to.

use cubecl::prelude::*;

use super::arguments::{cut, flag};
use crate::emit::scalars;

scalars! { Args, ArgsExpand {
    num_heads: u32,
    seqlen_q: u32,
    seqlen_k: u32,
    splits: u32,
    split_keys: u32,
    /// Batch × `seqlen_q` × heads.
    rows: u32,
    head_dim_v: u32,
    window_left: u32,
    flags: u32,
    /// Strides of out in elements.
    out_outer: u64,
    out_token: u64,
    out_head: u64,
    lse_outer: u64,
    lse_token: u64,
    lse_head: u64,
} }

/// Rows of a cube, one per plane.
pub const PLANES: u32 = 4;

/// Grid: rows / `PLANES`. `width` quads of a row at most, per lane.
#[cube]
pub fn combine<E: Float>(
    partial: &Array<Vector<f32, Const<4>>>,
    partial_lse: &Array<f32>,
    cu_seqlens_q: &Array<u32>,
    cu_seqlens_k: &Array<u32>,
    seq_lens_k: &Array<u32>,
    sinks: &Array<f32>,
    out: &mut Array<Vector<E, Const<4>>>,
    lse: &mut Array<f32>,
    args: &Args,
    #[comptime] width: u32,
) {
    let row = CUBE_POS_X * PLANES + UNIT_POS_X / 32u32;
    if row >= args.rows {
        terminate!();
    }
    let lane = UNIT_POS_X % 32u32;
    let head = row % args.num_heads;
    let query = row / args.num_heads % args.seqlen_q;
    let batch = row / args.num_heads / args.seqlen_q;
    let mut token = query;
    let mut q_count = args.seqlen_q;
    if args.flags & comptime!(flag::CU_SEQLENS_Q) != 0u32 {
        let first = cu_seqlens_q[batch as usize];
        token += first;
        q_count = cu_seqlens_q[batch as usize + 1] - first;
        if query >= q_count {
            terminate!();
        }
    }
    let splits = written_splits(args, cu_seqlens_k, seq_lens_k, batch, q_count);
    let mut peak = greatest(args, partial_lse, row, lane, splits);
    if args.flags & comptime!(flag::SINKS) != 0u32 {
        peak = max(peak, sinks[head as usize]);
    }

    let quads = args.head_dim_v / 4u32;
    let mut sums = Array::<Vector<f32, Const<4>>>::new(width as usize);
    let mut total = add_up(
        &mut sums,
        args,
        partial,
        partial_lse,
        row,
        lane,
        splits,
        peak,
        quads,
        width,
    );
    if args.flags & comptime!(flag::SINKS) != 0u32 {
        total += (sinks[head as usize] - peak).exp();
    }
    // Not `> 0`: a NaN is to come through.
    let mut factor = 0.0f32;
    if total != 0.0f32 {
        factor = 1.0f32 / total;
    }
    let batch64 = u64::cast_from(batch);
    let token64 = u64::cast_from(token);
    let head64 = u64::cast_from(head);
    if args.flags & comptime!(flag::LSE) != 0u32 && lane == 0u32 {
        lse[(batch64 * args.lse_outer + token64 * args.lse_token + head64 * args.lse_head)
            as usize] = peak + total.ln();
    }
    let to = (batch64 * args.out_outer + token64 * args.out_token + head64 * args.out_head) / 4u64;
    #[unroll]
    for j in 0..width {
        let quad = lane + comptime!(j * 32);
        if quad < quads {
            let value = sums[j as usize] * Vector::new(factor);
            out[(to + u64::cast_from(quad)) as usize] = Vector::cast_from(value);
        }
    }
}

/// Parts of a sequence's keys that were written: those that begin past its keys were not, but for
/// the first.
#[cube]
fn written_splits(
    args: &Args,
    cu_seqlens_k: &Array<u32>,
    seq_lens_k: &Array<u32>,
    batch: u32,
    q_count: u32,
) -> u32 {
    let mut k_count = args.seqlen_k;
    if args.flags & comptime!(flag::CU_SEQLENS_K) != 0u32 {
        k_count = cu_seqlens_k[batch as usize + 1] - cu_seqlens_k[batch as usize];
    }
    if args.flags & comptime!(flag::SEQ_LENS_K) != 0u32 {
        k_count = seq_lens_k[batch as usize];
    }
    let parts = cut(
        q_count,
        k_count,
        args.window_left,
        args.splits,
        args.split_keys,
    );
    min(
        max(
            (k_count - parts.base + parts.keys - 1u32) / parts.keys,
            1u32,
        ),
        args.splits,
    )
}

/// Where a part's sum of a row is.
#[cube]
fn part_at(args: &Args, split: u32, row: u32) -> u64 {
    u64::cast_from(split) * u64::cast_from(args.rows) + u64::cast_from(row)
}

/// The greatest logarithm of a part's sum.
#[cube]
fn greatest(args: &Args, partial_lse: &Array<f32>, row: u32, lane: u32, splits: u32) -> f32 {
    let mut peak = f32::new(f32::MIN);
    let mut split = lane;
    while split < splits {
        peak = max(peak, partial_lse[part_at(args, split, row) as usize]);
        split += 32u32;
    }
    plane_max(peak)
}

/// Adds up the parts, weighted by what they sum to relative to the peak, and gives the sum of the
/// weights.
#[cube]
fn add_up(
    sums: &mut Array<Vector<f32, Const<4>>>,
    args: &Args,
    partial: &Array<Vector<f32, Const<4>>>,
    partial_lse: &Array<f32>,
    row: u32,
    lane: u32,
    splits: u32,
    peak: f32,
    quads: u32,
    #[comptime] width: u32,
) -> f32 {
    #[unroll]
    for i in 0..width as usize {
        sums[i] = Vector::zeroed();
    }
    let mut total = 0.0f32;
    let mut first = 0u32;
    while first < splits {
        let mut weight = 0.0f32;
        if first + lane < splits {
            weight = (partial_lse[part_at(args, first + lane, row) as usize] - peak).exp();
        }
        total += weight;
        for i in 0..min(splits - first, 32u32) {
            let share = plane_shuffle(weight, i);
            // A part that saw no key says so by its weight alone where its rows were not written.
            if share > 0.0f32 {
                let from = part_at(args, first + i, row) * u64::cast_from(quads);
                #[unroll]
                for j in 0..width {
                    let quad = lane + comptime!(j * 32);
                    if quad < quads {
                        sums[j as usize] +=
                            partial[(from + u64::cast_from(quad)) as usize] * Vector::new(share);
                    }
                }
            }
        }
        first += 32u32;
    }
    plane_sum(total)
}
