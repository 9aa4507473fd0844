//! What a block decides for all: the norm of the gradients, whether the step is skipped, and what
//! follows for the loss scale and the corrections of bias; of one rank, and of all that share.

use cubecl::prelude::*;

use super::{Args, Control, INFINITY};
use crate::math::nan;

/// Threads of a block that adds the sums of chunks, and of one that adds those of ranks.
pub const THREADS: u32 = 1024;
pub const FEW: u32 = 32;

/// Bits of infinity in f64.
const INFINITY_F64: u64 = 0x7ff0_0000_0000_0000;

/// The loss scale of the next step.
#[cube]
fn rescale(control: &mut Control, found: u32, args: &Args) {
    let scale = control.f32s[0];
    if found != 0u32 {
        control.u32s[4] = 0u32;
        let left = max(control.u32s[5], 1u32) - 1u32;
        control.u32s[5] = left;
        // A scale of zero would have no inverse.
        let smaller = scale * args.backoff;
        if left == 0u32 && smaller >= 1.175_494_4e-38f32 {
            control.f32s[0] = smaller;
        }
    } else {
        control.u32s[5] = args.hysteresis;
        let tracker = control.u32s[4] + 1u32;
        if tracker >= args.interval {
            control.u32s[4] = 0u32;
            let greater = scale * args.growth;
            if u32::reinterpret(greater) & INFINITY != INFINITY {
                control.f32s[0] = greater;
            }
        } else {
            control.u32s[4] = tracker;
        }
    }
}

/// Sums in f64, and whether something was not finite; the first of each is of all chunks.
#[derive(CubeType)]
struct Totals {
    sums: SharedMemory<f64>,
    finds: SharedMemory<u32>,
}

/// Adds the sums of chunks in one order.
#[cube]
fn total(partials: &Array<f32>, args: &Args) -> Totals {
    let mut sum = f64::cast_from(0.0f32);
    let mut found = 0u32;
    let mut i = UNIT_POS_X;
    while i < args.num_chunks {
        let partial = partials[i as usize];
        if u32::reinterpret(partial) & 0x7fff_ffffu32 > INFINITY {
            found = 1u32;
        }
        sum += f64::cast_from(partial);
        i += THREADS;
    }
    let mut sums = SharedMemory::<f64>::new(comptime!(THREADS as usize));
    let mut finds = SharedMemory::<u32>::new(comptime!(THREADS as usize));
    sums[UNIT_POS_X as usize] = sum;
    finds[UNIT_POS_X as usize] = found;
    sync_cube();
    #[unroll]
    for step in 0..10u32 {
        let half = comptime!((THREADS / 2) >> step);
        if UNIT_POS_X < half {
            let other = (UNIT_POS_X + half) as usize;
            sums[UNIT_POS_X as usize] = sums[UNIT_POS_X as usize] + sums[other];
            finds[UNIT_POS_X as usize] = finds[UNIT_POS_X as usize] | finds[other];
        }
        sync_cube();
    }
    Totals { sums, finds }
}

/// What follows from the sum of squares of all gradients.
#[cube]
fn conclude(control: &mut Control, square: f64, found: u32, args: &Args) {
    let mut norm = f32::cast_from(square.sqrt());
    if found != 0u32 {
        norm = nan();
    }
    let mut coefficient = 1.0f32 / control.f32s[0];
    if args.max_norm > 0.0f32 {
        let by = args.max_norm / (norm + 1e-6f32);
        if by < 1.0f32 {
            coefficient *= by;
        }
    }
    control.f32s[1] = coefficient;
    control.f32s[2] = norm;
    control.u32s[3] = found;
    if args.dynamic != 0u32 {
        rescale(control, found, args);
    }
    if found != 0u32 {
        control.u64s[5] = control.u64s[5] + 1u64;
    } else {
        control.u64s[4] = control.u64s[4] + 1u64;
        let one = f64::cast_from(1.0f32);
        let power1 = control.f64s[6] * f64::cast_from(args.beta1);
        let power2 = control.f64s[7] * f64::cast_from(args.beta2);
        control.f64s[6] = power1;
        control.f64s[7] = power2;
        control.f32s[6] = f32::cast_from(one / (one - power1));
        control.f32s[7] = f32::cast_from(one / (one - power2).sqrt());
    }
}

/// Decides on what the sums of chunks come to. Grid: one block.
#[cube]
pub fn decide(control: &mut Control, partials: &Array<f32>, args: &Args) {
    let all = total(partials, args);
    if UNIT_POS_X == 0u32 {
        let found = all.finds[0];
        conclude(control, all.sums[0], found, args);
    }
}

/// Adds the sums of chunks for the other ranks, who add up what each of them has found; NaN where
/// something was not finite. The words of `control` begin at this rank's. Grid: one block.
#[cube]
pub fn sum(control: &mut Control, partials: &Array<f32>, args: &Args) {
    let own = total(partials, args);
    if UNIT_POS_X == 0u32 {
        let mut sum = own.sums[0];
        if own.finds[0] != 0u32 {
            sum = f64::cast_from(nan());
        }
        control.f64s[0] = sum;
    }
}

/// Adds the sums of ranks in their order, which gives all the same bits, and decides on what they
/// come to. Grid: one block, of which a thread works.
#[cube]
pub fn agree(control: &mut Control, of_ranks: &Array<u64>, args: &Args) {
    if UNIT_POS_X == 0u32 {
        let mut sum = f64::cast_from(0.0f32);
        let mut found = 0u32;
        for i in 0..args.num_chunks {
            let word = of_ranks[i as usize];
            if word & 0x7fff_ffff_ffff_ffffu64 > INFINITY_F64 {
                found = 1u32;
            }
            sum += f64::reinterpret(word);
        }
        conclude(control, sum, found, args);
    }
}
