//! What a whole batch comes to: the number of tokens that are not ignored, and the sum of losses
//! over it. One block adds in one order.

// CubeCL has no such method.
#![allow(clippy::manual_is_multiple_of)]

use cubecl::prelude::*;

use super::{THREADS, WARPS};
use crate::Error;
use crate::emit::{Builder, Kernel, ScalarType};
use crate::rows::{self, Sizes, Strides, row_index, row_start};

/// The sum over all threads of a block, in all of them.
#[cube]
fn of_block(mine: f32) -> f32 {
    let mut parts = SharedMemory::<f32>::new(comptime!(WARPS as usize));
    let mut sum = mine;
    #[unroll]
    for step in 0..5u32 {
        sum += plane_shuffle_xor(sum, comptime!(1u32 << step));
    }
    if UNIT_POS_X % 32 == 0u32 {
        parts[(UNIT_POS_X / 32) as usize] = sum;
    }
    sync_cube();
    let mut all = parts[(UNIT_POS_X % 32) as usize];
    #[unroll]
    for step in 0..5u32 {
        all += plane_shuffle_xor(all, comptime!(1u32 << step));
    }
    all
}

/// Stores in `out`, with `counts`, the number of targets that are not ignored, or 1 if all are; without,
/// the sum of `losses` over the denominator. Grid: one block.
#[cube]
fn cross_entropy_sums(
    targets: &Array<i32>,
    targets_i64: &Array<i64>,
    losses: &Array<f32>,
    denominator: &Array<f32>,
    out: &mut Array<f32>,
    tokens: u32,
    counts: u32,
    wide_targets: u32,
    has_denominator: u32,
    ignore_index: i64,
    sizes: Sizes,
    strides: Strides,
) {
    let mut sum = 0.0f32;
    let mut i = UNIT_POS_X;
    while i < tokens {
        if counts != 0u32 {
            let at = row_start(row_index(i, sizes), strides);
            let target = if wide_targets == 1u32 {
                targets_i64[at]
            } else {
                i64::cast_from(targets[at])
            };
            if target != ignore_index {
                sum += 1.0f32;
            }
        } else {
            sum += losses[i as usize];
        }
        i += THREADS;
    }
    let all = of_block(sum);
    if UNIT_POS_X == 0u32 {
        let mut result = all;
        if counts != 0u32 {
            result = max(all, 1.0f32);
        } else if has_denominator != 0u32 {
            result = all / denominator[0];
        }
        out[0] = result;
    }
}

/// The kernel.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    use ScalarType::{I64, U32};
    let mut b = Builder::default();
    let (narrow, wide) = (b.type_of::<i32>(), b.type_of::<i64>());
    let float = b.type_of::<f32>();
    let targets = b.read("targets", narrow);
    let targets_i64 = b.read("targets_i64", wide);
    let losses = b.read("losses", float);
    let denominator = b.read("denominator", float);
    let out = b.write("out", float);
    let tokens = b.scalar("tokens", U32);
    let counts = b.scalar("counts", U32);
    let wide_targets = b.scalar("wide_targets", U32);
    let has_denominator = b.scalar("has_denominator", U32);
    let ignore_index = b.scalar("ignore_index", I64);
    let sizes = rows::sizes(&mut b);
    let strides = rows::strides(&mut b, ["targets_0", "targets_1", "targets_2"]);
    cross_entropy_sums::expand(
        b.scope(),
        targets.into(),
        targets_i64.into(),
        losses.into(),
        denominator.into(),
        out.into(),
        tokens.into(),
        counts.into(),
        wide_targets.into(),
        has_denominator.into(),
        ignore_index.into(),
        sizes,
        strides,
    );
    let choices = vec![("threads", THREADS)];
    Ok(vec![b.finish(
        "cross_entropy_sums".into(),
        choices,
        THREADS,
    )?])
}
