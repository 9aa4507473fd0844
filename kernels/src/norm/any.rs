//! Rows of any length and alignment, element by element: two passes over memory, LayerNorm three.

use cubecl::prelude::*;

use super::share::{row_sum, rows_per_block};
use super::{Args, Form};
use crate::emit::Float as Dtype;
use crate::rows::{row_index, row_start};

/// Element `i` of gains or biases of any dtype, in halves of words: f32 has two.
#[cube]
pub(crate) fn parameter(of: &Array<u16>, dtype: u32, i: u32) -> f32 {
    let i = i as usize;
    if dtype == comptime!(Dtype::F32.code()) {
        let low = u32::cast_from(of[2 * i]);
        let high = u32::cast_from(of[2 * i + 1]);
        f32::reinterpret(low | (high << 16u32))
    } else if dtype == comptime!(Dtype::F16.code()) {
        f32::cast_from(half::f16::reinterpret(of[i]))
    } else {
        f32::cast_from(half::bf16::reinterpret(of[i]))
    }
}

/// Element `i` of a row of x that begins at `x_0`, and the residual's where there is one.
#[cube]
fn element<F: Float>(
    x: &Array<F>,
    x_0: usize,
    residual: &Array<F>,
    residual_0: usize,
    i: u32,
    #[comptime] has_residual: bool,
) -> f32 {
    let mut value = f32::cast_from(x[x_0 + i as usize]);
    if has_residual {
        value += f32::cast_from(residual[residual_0 + i as usize]);
    }
    value
}

/// Grid: as of [`norm_rows`](super::norm_rows).
#[cube]
pub(super) fn norm_any<F: Float>(
    x: &Array<F>,
    residual: &Array<F>,
    weight: &Array<u16>,
    bias: &Array<u16>,
    out: &mut Array<F>,
    residual_out: &mut Array<F>,
    args: Args,
    #[comptime] form: Form,
) {
    let threads = comptime!(form.threads);
    let with = comptime!(form.has_residual);
    let row = CUBE_POS_X * comptime!(rows_per_block(threads)) + UNIT_POS_X / threads;
    let mut length = args.length;
    if row >= args.rows {
        length = 0u32;
    }
    let index = row_index(row, args.sizes);
    let from = row_start(index, args.x);
    let from_residual = row_start(index, args.residual);
    let to = row_start(index, args.out);
    let to_residual = row_start(index, args.residual_out);
    let mut sums = Array::<f32>::new(1usize);
    let mut mean = 0.0f32;
    if comptime!(form.centered) {
        sums[0] = 0.0f32;
        let mut i = UNIT_POS_X % threads;
        while i < length {
            sums[0] += element(x, from, residual, from_residual, i, with);
            i += threads;
        }
        mean = row_sum(&mut sums, threads, 1u32) * args.inverse_length;
    }
    sums[0] = 0.0f32;
    let mut i = UNIT_POS_X % threads;
    while i < length {
        let d = element(x, from, residual, from_residual, i, with) - mean;
        sums[0] = fma(d, d, sums[0]);
        i += threads;
    }
    let variance = row_sum(&mut sums, threads, 1u32) * args.inverse_length;
    let scale = (variance + args.epsilon).inverse_sqrt();
    // Each thread overwrites only elements that it alone reads, so the tensors may be the same.
    let mut i = UNIT_POS_X % threads;
    while i < length {
        let v = element(x, from, residual, from_residual, i, with);
        if with {
            residual_out[to_residual + i as usize] = F::cast_from(v);
        }
        let mut factor = scale;
        if args.weight_dtype != 0u32 {
            factor *= parameter(weight, args.weight_dtype, i) + args.weight_offset;
        }
        let mut y = (v - mean) * factor;
        if args.bias_dtype != 0u32 {
            y += parameter(bias, args.bias_dtype, i);
        }
        out[to + i as usize] = F::cast_from(y);
        i += threads;
    }
}
