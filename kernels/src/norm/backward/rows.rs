//! Gradients of rows in registers, 16 bytes per access: one pass over memory.

use cubecl::prelude::*;

use super::{Args, Form, Means, means_of, row_sums};
use crate::norm::any::parameter;
use crate::norm::share::{MIN_BLOCK, Words, block, load_row, rows_per_block};
use crate::rows::{RowIndex, row_index, row_start};

#[cube]
fn unpack<F: Float, N: Size>(words: Words) -> Vector<f32, N> {
    Vector::<f32, N>::cast_from(Vector::<F, N>::reinterpret(words))
}

/// The sum over a vector.
#[cube]
fn total<N: Size>(v: Vector<f32, N>) -> f32 {
    let mut sum = v[0];
    #[unroll]
    for j in 1..N::value() {
        sum += v[j];
    }
    sum
}

/// A thread's gains as f32, of any dtype: ones without a weight.
#[cube]
fn load_gains<N: Size>(
    weight: &Array<u16>,
    lane: u32,
    args: Args,
    #[comptime] form: Form,
) -> Array<Vector<f32, N>> {
    let mut gains = Array::<Vector<f32, N>>::new(comptime!(form.vectors as usize));
    #[unroll]
    for k in 0..form.vectors {
        let mut gain = Vector::<f32, N>::new(1.0f32);
        if args.weight_dtype != 0u32 {
            let i = min(lane + k * form.threads, args.length - 1u32);
            #[unroll]
            for j in 0..N::value() {
                let at = i * comptime!(N::value() as u32) + comptime!(j as u32);
                gain[j] = parameter(weight, args.weight_dtype, at) + args.weight_offset;
            }
        }
        gains[k as usize] = gain;
    }
    gains
}

/// Sums a row that a thread has a share of.
#[cube]
fn sum_row<F: Float, N: Size>(
    xs: &Array<Words>,
    douts: &Array<Words>,
    gains: &Array<Vector<f32, N>>,
    shared: &mut SharedMemory<f32>,
    shared_mean: &mut SharedMemory<f32>,
    half: u32,
    lane: u32,
    args: Args,
    #[comptime] form: Form,
) -> Means {
    let mut mean = 0.0f32;
    if comptime!(form.centered) {
        let mut sums = Array::<f32>::new(1usize);
        sums[0] = 0.0f32;
        #[unroll]
        for k in 0..form.vectors {
            if lane + k * form.threads < args.length {
                sums[0] += total::<N>(unpack::<F, N>(xs[k as usize]));
            }
        }
        row_sums(&mut sums, shared_mean, half, form.threads, 1u32);
        mean = sums[0] * args.inverse_length;
    }
    let count = comptime!(2 + form.centered as u32);
    let mut sums = Array::<f32>::new(comptime!(count as usize));
    #[unroll]
    for c in 0..count {
        sums[c as usize] = 0.0f32;
    }
    #[unroll]
    for k in 0..form.vectors {
        if lane + k * form.threads < args.length {
            let d = unpack::<F, N>(xs[k as usize]) - Vector::new(mean);
            let g = unpack::<F, N>(douts[k as usize]) * gains[k as usize];
            sums[0] += total::<N>(d * d);
            sums[1] += total::<N>(g * d);
            if comptime!(form.centered) {
                sums[2] += total::<N>(g);
            }
        }
    }
    row_sums(&mut sums, shared, half, form.threads, count);
    means_of(&sums, mean, args, form.centered)
}

/// Where a row begins in every tensor.
#[cube]
fn index_of(row: u32, args: Args) -> RowIndex {
    row_index(min(row, args.rows - 1u32), args.sizes)
}

/// Loads a thread's vectors of a row.
#[cube]
fn fetch(
    to: &mut Array<Words>,
    from: &Array<Words>,
    start: usize,
    lane: u32,
    length: u32,
    #[comptime] form: Form,
) {
    let words = load_row(from, start, lane, length, form.threads, form.vectors);
    #[unroll]
    for k in 0..form.vectors {
        to[k as usize] = *words.index(k as usize);
    }
}

/// Adds the shares of a block's rows and stores the sum: each slot of the block has one.
#[cube]
fn store_share<N: Size>(
    share: &Array<Vector<f32, N>>,
    to: &mut Array<Vector<f32, N>>,
    lane: u32,
    args: Args,
    #[comptime] form: Form,
) {
    let start = CUBE_POS_X as usize * args.length as usize + lane as usize;
    if comptime!(form.threads < MIN_BLOCK) {
        let slots = comptime!(rows_per_block(form.threads));
        let size = comptime!((MIN_BLOCK * form.vectors) as usize);
        let mut all = SharedMemory::<Vector<f32, N>>::new(size);
        #[unroll]
        for k in 0..form.vectors {
            all[(UNIT_POS_X * form.vectors + k) as usize] = share[k as usize];
        }
        sync_cube();
        if UNIT_POS_X < form.threads {
            #[unroll]
            for k in 0..form.vectors {
                let mut sum = share[k as usize];
                for slot in 1..slots {
                    let from = (slot * form.threads + lane) * form.vectors + k;
                    sum += all[from as usize];
                }
                if lane + k * form.threads < args.length {
                    to[start + comptime!((k * form.threads) as usize)] = sum;
                }
            }
        }
    } else {
        #[unroll]
        for k in 0..form.vectors {
            if lane + k * form.threads < args.length {
                to[start + comptime!((k * form.threads) as usize)] = share[k as usize];
            }
        }
    }
}

/// Stores a row's `dx`, and adds to the shares of the parameters' gradients.
#[cube]
fn finish_row<F: Float, N: Size>(
    xs: &Array<Words>,
    douts: &Array<Words>,
    residuals: &Sequence<Words>,
    gains: &Array<Vector<f32, N>>,
    dweight: &mut Array<Vector<f32, N>>,
    dbias: &mut Array<Vector<f32, N>>,
    dx: &mut Array<Vector<F, N>>,
    to: usize,
    means: Means,
    lane: u32,
    args: Args,
    #[comptime] form: Form,
) {
    #[unroll]
    for k in 0..form.vectors {
        let x = unpack::<F, N>(xs[k as usize]);
        let normal = (x - Vector::new(means.mean)) * Vector::new(means.scale);
        let dout = unpack::<F, N>(douts[k as usize]);
        dweight[k as usize] += dout * normal;
        if comptime!(form.centered) {
            dbias[k as usize] += dout;
        }
        let g = dout * gains[k as usize] - Vector::new(means.gradient);
        let mut y = (g - normal * Vector::new(means.product)) * Vector::new(means.scale);
        if comptime!(form.has_residual) {
            y += unpack::<F, N>(*residuals.index(k as usize));
        }
        if lane + k * form.threads < args.length {
            dx[to + comptime!((k * form.threads) as usize)] = Vector::cast_from(y);
        }
    }
}

/// Grid: `groups`.
#[cube]
pub(super) fn backward_rows<F: Float, N: Size>(
    x: &Array<Words>,
    dout: &Array<Words>,
    dresidual: &Array<Words>,
    weight: &Array<u16>,
    dx: &mut Array<Vector<F, N>>,
    dweights: &mut Array<Vector<f32, N>>,
    dbiases: &mut Array<Vector<f32, N>>,
    args: Args,
    #[comptime] form: Form,
) {
    let (threads, vectors) = comptime!((form.threads, form.vectors as usize));
    let slots = comptime!(rows_per_block(threads));
    let warps = comptime!((block(threads) / 32) as usize);
    let count = comptime!(2 + form.centered as usize);
    let mut shared = SharedMemory::<f32>::new(comptime!(2 * count * warps));
    let mut shared_mean = SharedMemory::<f32>::new(comptime!(2 * warps));
    let lane = UNIT_POS_X % threads;
    let slot = UNIT_POS_X / threads;
    let length = args.length;
    let step = args.groups * slots;

    let mut xs = Array::<Words>::new(vectors);
    let mut douts = Array::<Words>::new(vectors);
    let mut first = CUBE_POS_X * slots;
    let index = index_of(first + slot, args);
    fetch(&mut xs, x, row_start(index, args.x), lane, length, form);
    fetch(
        &mut douts,
        dout,
        row_start(index, args.dout),
        lane,
        length,
        form,
    );
    let gains = load_gains::<N>(weight, lane, args, form);
    let mut dweight = Array::<Vector<f32, N>>::new(vectors);
    let mut dbias = Array::<Vector<f32, N>>::new(vectors);
    #[unroll]
    for k in 0..form.vectors {
        dweight[k as usize] = Vector::new(0.0f32);
        dbias[k as usize] = Vector::new(0.0f32);
    }
    let mut half = 0u32;
    while first < args.rows {
        let index = index_of(first + slot, args);
        let with = comptime!(if form.has_residual { form.vectors } else { 0 });
        let from = row_start(index, args.dresidual);
        let residuals = load_row(dresidual, from, lane, length, threads, with);
        let mut next_xs = Array::<Words>::new(vectors);
        let mut next_douts = Array::<Words>::new(vectors);
        let next = first + step;
        if comptime!(!form.reads_ahead()) {
            fetch(&mut xs, x, row_start(index, args.x), lane, length, form);
            fetch(
                &mut douts,
                dout,
                row_start(index, args.dout),
                lane,
                length,
                form,
            );
        } else if next < args.rows {
            let index = index_of(next + slot, args);
            fetch(
                &mut next_xs,
                x,
                row_start(index, args.x),
                lane,
                length,
                form,
            );
            fetch(
                &mut next_douts,
                dout,
                row_start(index, args.dout),
                lane,
                length,
                form,
            );
        }
        let means = sum_row::<F, N>(
            &xs,
            &douts,
            &gains,
            &mut shared,
            &mut shared_mean,
            half,
            lane,
            args,
            form,
        );
        if first + slot < args.rows {
            let to = row_start(index, args.dx) + lane as usize;
            finish_row::<F, N>(
                &xs,
                &douts,
                &residuals,
                &gains,
                &mut dweight,
                &mut dbias,
                dx,
                to,
                means,
                lane,
                args,
                form,
            );
        }
        if comptime!(form.reads_ahead()) {
            #[unroll]
            for k in 0..form.vectors {
                xs[k as usize] = next_xs[k as usize];
                douts[k as usize] = next_douts[k as usize];
            }
        }
        first = next;
        half = 1u32 - half;
    }
    if args.has_dweight != 0u32 {
        store_share::<N>(&dweight, dweights, lane, args, form);
    }
    if comptime!(form.centered) {
        if args.has_dbias != 0u32 {
            store_share::<N>(&dbias, dbiases, lane, args, form);
        }
    }
}
