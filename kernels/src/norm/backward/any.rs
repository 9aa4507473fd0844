//! Gradients of rows of any length and alignment, element by element: two passes over memory,
//! LayerNorm three. A block's share of the parameters' gradients lies in memory all the time.

use cubecl::prelude::*;

use super::{ANY, Args, Form, means_of, row_sums};
use crate::norm::any::parameter;
use crate::rows::{row_index, row_start};

/// A row's distance from its mean, and its gradient before the normalisation.
#[cube]
fn element<F: Float>(
    x: &Array<F>,
    dout: &Array<F>,
    weight: &Array<u16>,
    from: usize,
    from_dout: usize,
    mean: f32,
    i: u32,
    args: Args,
) -> (f32, f32) {
    let d = f32::cast_from(x[from + i as usize]) - mean;
    let mut g = f32::cast_from(dout[from_dout + i as usize]);
    if args.weight_dtype != 0u32 {
        g *= parameter(weight, args.weight_dtype, i) + args.weight_offset;
    }
    (d, g)
}

/// Grid: `groups`. Each thread overwrites only elements that it alone reads, so `dx` may be `dout`.
#[cube]
pub(super) fn backward_any<F: Float>(
    x: &Array<F>,
    dout: &Array<F>,
    dresidual: &Array<F>,
    weight: &Array<u16>,
    dx: &mut Array<F>,
    dweights: &mut Array<f32>,
    dbiases: &mut Array<f32>,
    args: Args,
    #[comptime] form: Form,
) {
    let count = comptime!(2 + form.centered as u32);
    let warps = comptime!((ANY / 32) as usize);
    let mut shared = SharedMemory::<f32>::new(comptime!(2 * count as usize * warps));
    let mut shared_mean = SharedMemory::<f32>::new(comptime!(2 * warps));
    let share = CUBE_POS_X as usize * args.length as usize;
    let mut i = UNIT_POS_X;
    while i < args.length {
        if args.has_dweight != 0u32 {
            dweights[share + i as usize] = 0.0f32;
        }
        if args.has_dbias != 0u32 {
            dbiases[share + i as usize] = 0.0f32;
        }
        i += ANY;
    }
    let mut half = 0u32;
    let mut row = CUBE_POS_X;
    while row < args.rows {
        let index = row_index(row, args.sizes);
        let from = row_start(index, args.x);
        let from_dout = row_start(index, args.dout);
        let mut mean = 0.0f32;
        if comptime!(form.centered) {
            let mut sums = Array::<f32>::new(1usize);
            sums[0] = 0.0f32;
            let mut i = UNIT_POS_X;
            while i < args.length {
                sums[0] += f32::cast_from(x[from + i as usize]);
                i += ANY;
            }
            row_sums(&mut sums, &mut shared_mean, half, ANY, 1u32);
            mean = sums[0] * args.inverse_length;
        }
        let mut sums = Array::<f32>::new(comptime!(count as usize));
        #[unroll]
        for c in 0..count {
            sums[c as usize] = 0.0f32;
        }
        let mut i = UNIT_POS_X;
        while i < args.length {
            let (d, g) = element(x, dout, weight, from, from_dout, mean, i, args);
            sums[0] = fma(d, d, sums[0]);
            sums[1] = fma(g, d, sums[1]);
            if comptime!(form.centered) {
                sums[2] += g;
            }
            i += ANY;
        }
        row_sums(&mut sums, &mut shared, half, ANY, count);
        let means = means_of(&sums, mean, args, form.centered);
        let from_residual = row_start(index, args.dresidual);
        let to = row_start(index, args.dx);
        let mut i = UNIT_POS_X;
        while i < args.length {
            let (d, g) = element(x, dout, weight, from, from_dout, mean, i, args);
            let normal = d * means.scale;
            let gradient = f32::cast_from(dout[from_dout + i as usize]);
            if args.has_dweight != 0u32 {
                dweights[share + i as usize] += gradient * normal;
            }
            if args.has_dbias != 0u32 {
                dbiases[share + i as usize] += gradient;
            }
            let mut y = means.scale * ((g - means.gradient) - normal * means.product);
            if comptime!(form.has_residual) {
                y += f32::cast_from(dresidual[from_residual + i as usize]);
            }
            dx[to + i as usize] = F::cast_from(y);
            i += ANY;
        }
        row += args.groups;
        half = 1u32 - half;
    }
}
