//! What the backward pass needs of rows: statistics of each, and sums over all for the sinks.

use contract::attention::flag;
use cubecl::prelude::*;

use crate::emit::scalars;

scalars! { Args, ArgsExpand {
    num_heads: u32,
    batch: u32,
    /// Of every sequence, where queries are not packed.
    seqlen_q: u32,
    head_dim_v: u32,
    flags: u32,
    /// Rows of a head, those that belong to no sequence too.
    tokens: u64,
    /// Strides in elements.
    out_outer: u64,
    out_token: u64,
    out_head: u64,
    dout_outer: u64,
    dout_token: u64,
    dout_head: u64,
    lse_outer: u64,
    lse_token: u64,
    lse_head: u64,
    dlse_outer: u64,
    dlse_token: u64,
    dlse_head: u64,
} }

/// Rows of a cube of [`delta`], one per plane.
pub const PLANES: u32 = 4;

/// Threads of a cube of [`sinks`].
pub const THREADS: u32 = 256;

#[cube]
fn has(args: &Args, #[comptime] flag: u32) -> bool {
    args.flags & flag != 0u32
}

/// Writes of every row its LSE, one above all scores in place of −∞, and its delta: `dout · out - dlse`.
/// Grid: heads × tokens / `PLANES`.
#[cube]
pub fn delta<O: Float, D: Float>(
    out: &Array<O>,
    dout: &Array<D>,
    lse: &Array<f32>,
    dlse: &Array<f32>,
    statistics: &mut Array<f32>,
    args: &Args,
) {
    let index =
        u64::cast_from(CUBE_POS_X) * comptime!(PLANES as u64) + u64::cast_from(UNIT_POS_X / 32u32);
    let rows = args.tokens * u64::cast_from(args.num_heads);
    if index >= rows {
        terminate!();
    }
    let lane = UNIT_POS_X % 32u32;
    let head = index / args.tokens;
    let mut token = index % args.tokens;
    let mut batch = 0u64;
    if !has(args, flag::CU_SEQLENS_Q) {
        batch = token / u64::cast_from(args.seqlen_q);
        token = token % u64::cast_from(args.seqlen_q);
    }
    let out_at = batch * args.out_outer + token * args.out_token + head * args.out_head;
    let dout_at = batch * args.dout_outer + token * args.dout_token + head * args.dout_head;
    let mut sum = 0.0f32;
    let mut i = lane;
    while i < args.head_dim_v {
        let a = f32::cast_from(out[(out_at + u64::cast_from(i)) as usize]);
        let b = f32::cast_from(dout[(dout_at + u64::cast_from(i)) as usize]);
        sum += a * b;
        i += 32u32;
    }
    sum = plane_sum(sum);
    if lane == 0u32 {
        let at = batch * args.lse_outer + token * args.lse_token + head * args.lse_head;
        let mut value = lse[at as usize];
        if has(args, flag::DLSE) {
            let at = batch * args.dlse_outer + token * args.dlse_token + head * args.dlse_head;
            sum -= dlse[at as usize];
        }
        // −∞: no key is seen, whatever the gradients are.
        if value < f32::new(f32::MIN) {
            value = f32::new(3.0e38);
            sum = 0.0f32;
        }
        statistics[index as usize] = value;
        statistics[(rows + index) as usize] = sum;
    }
}

/// Adds up `-exp(sink - lse) delta` for a head. Grid: heads.
#[cube]
pub fn sinks(
    cu_seqlens_q: &Array<u32>,
    sinks: &Array<f32>,
    statistics: &Array<f32>,
    dsinks: &mut Array<f32>,
    args: &Args,
) {
    let head = CUBE_POS_X;
    let sink = sinks[head as usize];
    let first = u64::cast_from(head) * args.tokens;
    let half = u64::cast_from(args.num_heads) * args.tokens;
    let mut sum = 0.0f32;
    let mut batch = 0u32;
    while batch < args.batch {
        let mut row = u64::cast_from(batch) * u64::cast_from(args.seqlen_q);
        let mut end = row + u64::cast_from(args.seqlen_q);
        if has(args, flag::CU_SEQLENS_Q) {
            row = u64::cast_from(cu_seqlens_q[batch as usize]);
            end = u64::cast_from(cu_seqlens_q[batch as usize + 1]);
        }
        row += u64::cast_from(UNIT_POS_X);
        while row < end {
            let weight = (sink - statistics[(first + row) as usize]).exp();
            sum += weight * statistics[(first + half + row) as usize];
            row += comptime!(THREADS as u64);
        }
        batch += 1u32;
    }
    sum = plane_sum(sum);
    let mut sums = SharedMemory::<f32>::new(comptime!((THREADS / 32) as usize));
    if UNIT_POS_X % 32u32 == 0u32 {
        sums[(UNIT_POS_X / 32u32) as usize] = sum;
    }
    sync_cube();
    if UNIT_POS_X == 0u32 {
        let mut total = 0.0f32;
        #[unroll]
        for i in 0..comptime!((THREADS / 32) as usize) {
            total += sums[i];
        }
        let mut before = 0.0f32;
        if has(args, flag::ACCUMULATE) {
            before = dsinks[head as usize];
        }
        dsinks[head as usize] = before - total;
    }
}
