//! What the kernels make of pairs of queries and keys: sums over either, or of pairs at one place
//! of a bias.

use cubecl::prelude::*;

use super::*;
use crate::attention::backward::bias::{Bias, block, end_keys, first_keys, store_sums, tile};
use crate::attention::block::{query_block, seen_tiles};

/// Stores a thread's four pairs, with a line for each query or each key.
#[cube]
fn stage(to: &mut SharedMemory<f32>, pairs: &Array<f32>, #[comptime] lines_are_keys: bool) {
    let (row, column) = (UNIT_POS_X / 16u32, UNIT_POS_X % 16u32);
    #[unroll]
    for r in 0..2usize {
        #[unroll]
        for c in 0..2usize {
            let row = row + comptime!(r as u32 * 16);
            let column = column + comptime!(c as u32 * 16);
            let at = if comptime!(lines_are_keys) {
                column * PITCH + row
            } else {
                row * PITCH + column
            };
            to[at as usize] = pairs[comptime!(r * 2 + c)];
        }
    }
}

#[cube]
fn begin() -> Array<f32> {
    let mut acc = Array::<f32>::new(comptime!(ROWS as usize));
    #[unroll]
    for i in 0..comptime!(ROWS as usize) {
        acc[i] = 0.0f32;
    }
    acc
}

/// Adds the products of staged lines with as many rows from `first` on, of which a thread has a
/// column.
#[cube]
fn accumulate(
    acc: &mut Array<f32>,
    staged: &SharedMemory<f32>,
    from: &Elements,
    dtype: u32,
    at: &Place,
    first: u32,
    end: u32,
    column: u32,
    dims: u32,
) {
    if column < dims {
        let lines = min(end - first, ROWS);
        for j in 0..lines {
            let to_row = at.base + u64::cast_from(first + j) * at.token;
            let x = element(from, dtype, to_row + u64::cast_from(column));
            #[unroll]
            for i in 0..comptime!(ROWS as usize) {
                let weight = staged[(j * PITCH + comptime!(i as u32)) as usize];
                acc[i] = fma(weight, x, acc[i]);
            }
        }
    }
}

/// Writes a thread's column of up to 32 rows from `first` on.
#[cube]
fn store(
    acc: &Array<f32>,
    to: &mut Elements,
    dtype: u32,
    at: &Place,
    first: u32,
    end: u32,
    column: u32,
    dims: u32,
    factor: f32,
) {
    #[unroll]
    for i in 0..comptime!(ROWS as usize) {
        let row = first + comptime!(i as u32);
        if column < dims && row < end {
            let to_row = at.base + u64::cast_from(row) * at.token;
            let x = acc[i] * factor;
            set_element(to, dtype, to_row + u64::cast_from(column), x);
        }
    }
}

/// `dq`. Grid: row blocks × heads × sequences, the first fastest. What a cube has no threads for is
/// computed after the rest.
#[cube]
pub fn queries(
    inputs: &Inputs,
    to: &mut Elements,
    statistics: &Array<f32>,
    buffers: &Buffers,
    args: &Args,
    strides: &Strides,
    dtypes: &Dtypes,
) {
    let block = query_block(args, buffers, ROWS);
    let span = &block.span;
    if block.row0 >= span.q_count {
        terminate!();
    }
    let seen = seen_tiles(args, &block, ROWS, ROWS);
    let k_at = keys_at(args, span, block.batch, block.head / args.group);
    let to_at = dq_at(strides, span, block.batch, block.head);
    let (mut chunks, mut staged) = (chunks(), square());
    let mut column = UNIT_POS_X;
    // As many rounds for every thread: they wait for each other.
    let mut column0 = 0u32;
    while column0 < args.head_dim {
        let mut acc = begin();
        let mut keys = seen.begin;
        while keys < seen.end {
            let key0 = keys * ROWS;
            let pairs = pairs(
                &mut chunks,
                inputs,
                statistics,
                buffers,
                args,
                strides,
                dtypes,
                &block,
                key0,
                true,
            );
            stage(&mut staged, &pairs.scores, true);
            sync_cube();
            accumulate(
                &mut acc,
                &staged,
                &inputs.k,
                dtypes.k_dtype,
                &k_at,
                key0,
                span.k_count,
                column,
                args.head_dim,
            );
            keys += 1u32;
        }
        store(
            &acc,
            to,
            dtypes.q_dtype,
            &to_at,
            block.row0,
            span.q_count,
            column,
            args.head_dim,
            args.scale,
        );
        column += THREADS;
        column0 += THREADS;
    }
}

/// `dk`, or `dv`. Grid: key blocks × key heads × sequences, the first fastest.
#[cube]
pub fn keys(
    inputs: &Inputs,
    to: &mut Elements,
    statistics: &Array<f32>,
    buffers: &Buffers,
    args: &Args,
    strides: &Strides,
    dtypes: &Dtypes,
    #[comptime] values: bool,
) {
    let block = key_block(args, strides, buffers, ROWS);
    if block.key0 >= block.end {
        terminate!();
    }
    let (batch, key_head, key0) = (block.batch, block.key_head, block.key0);
    let span = &block.span;
    let mut dims = args.head_dim;
    let mut factor = args.scale;
    let mut dtype = dtypes.k_dtype;
    if comptime!(values) {
        dims = args.head_dim_v;
        factor = 1.0f32;
        dtype = dtypes.v_dtype;
    }
    let to_at = if comptime!(values) {
        dv_at(strides, span, batch, key_head)
    } else {
        dk_at(strides, span, batch, key_head)
    };
    let (mut chunks, mut staged) = (chunks(), square());
    let mut column = UNIT_POS_X;
    let mut column0 = 0u32;
    while column0 < dims {
        let mut acc = begin();
        let mut of_group = 0u32;
        while of_group < args.group {
            let head = key_head * args.group + of_group;
            let mut row0 = block.begin;
            while row0 < block.seen {
                let rows = QueryBlock {
                    batch,
                    head,
                    row0,
                    span: span.clone(),
                };
                let pairs = pairs(
                    &mut chunks,
                    inputs,
                    statistics,
                    buffers,
                    args,
                    strides,
                    dtypes,
                    &rows,
                    key0,
                    true,
                );
                if comptime!(values) {
                    stage(&mut staged, &pairs.weights, false);
                    sync_cube();
                    let at = dout_at(strides, span, batch, head);
                    accumulate(
                        &mut acc,
                        &staged,
                        &inputs.dout,
                        dtypes.dout_dtype,
                        &at,
                        row0,
                        span.q_count,
                        column,
                        dims,
                    );
                } else {
                    stage(&mut staged, &pairs.scores, false);
                    sync_cube();
                    let at = queries_at(args, span, batch, head);
                    accumulate(
                        &mut acc,
                        &staged,
                        &inputs.q,
                        dtypes.q_dtype,
                        &at,
                        row0,
                        span.q_count,
                        column,
                        dims,
                    );
                }
                row0 += ROWS;
            }
            of_group += 1u32;
        }
        store(
            &acc, to, dtype, &to_at, key0, block.end, column, dims, factor,
        );
        column += THREADS;
        column0 += THREADS;
    }
}

/// The gradient of the bias. Grid: as [`tile`] says.
#[cube]
pub fn bias(
    inputs: &Inputs,
    dbias: &mut Array<f32>,
    statistics: &Array<f32>,
    buffers: &Buffers,
    args: &Args,
    strides: &Strides,
    dtypes: &Dtypes,
    of: &Bias,
) {
    let tile = tile(args, of, ROWS, ROWS);
    let mut chunks = chunks();
    let mut sums = Array::<f32>::new(4usize);
    #[unroll]
    for i in 0..4usize {
        sums[i] = 0.0f32;
    }
    let mut index = tile.begin;
    while index < tile.end {
        let block = block(args, buffers, &tile, index, ROWS);
        if block.row0 < block.span.q_count {
            let seen = seen_tiles(args, &block, ROWS, ROWS);
            let end = end_keys(of, &tile, &seen);
            let mut keys = first_keys(of, &tile, &seen);
            while keys < end {
                let key0 = keys * ROWS;
                let pairs = pairs(
                    &mut chunks,
                    inputs,
                    statistics,
                    buffers,
                    args,
                    strides,
                    dtypes,
                    &block,
                    key0,
                    false,
                );
                #[unroll]
                for i in 0..4usize {
                    sums[i] += pairs.scores[i];
                }
                keys += 1u32;
            }
        }
        index += 1u32;
    }
    sync_cube();
    stage(&mut chunks.rows, &sums, false);
    store_sums(
        &mut chunks.rows,
        dbias,
        args,
        of,
        &tile,
        ROWS,
        ROWS,
        THREADS,
    );
}
