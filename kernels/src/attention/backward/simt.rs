//! The backward pass without tensor cores: exact products of f32, of rows at any address.
//!
//! A cube has 16 queries (or keys) and walks over the keys (or queries) 16 at a time. Of the 256 scores
//! each thread has one, and of the gradients a column.

use cubecl::prelude::*;

use super::arguments::*;
use crate::attention::arguments::*;
use crate::attention::block::{query_block, seen_tiles};

/// Queries or keys of a cube, and keys or queries of a tile.
pub const ROWS: u32 = 16;
/// Threads of a cube: one for each score of a tile.
pub const THREADS: u32 = ROWS * ROWS;
/// Room for a head.
pub const HEAD_DIM: u32 = contract::attention::MAX_HEAD_DIM;

/// Floats of a row in shared memory: one more than it has, so that the rows of a column lie in
/// different banks.
const PITCH: u32 = HEAD_DIM + 1;
const SCORE_PITCH: u32 = ROWS + 1;

/// Loads 16 rows from `first` on; zeros in place of those from `end` on.
#[cube]
fn load<E: Float>(
    to: &mut SharedMemory<f32>,
    from: &Array<E>,
    at: &Place,
    first: u32,
    end: u32,
    dims: u32,
) {
    // 32 neighbours read neighbours.
    let mut row = UNIT_POS_X / 32u32;
    while row < ROWS {
        let mut column = UNIT_POS_X % 32u32;
        while column < dims {
            let mut x = 0.0f32;
            if first + row < end {
                let from_row = at.base + u64::cast_from(first + row) * at.token;
                x = f32::cast_from(from[(from_row + u64::cast_from(column)) as usize]);
            }
            to[(row * PITCH + column) as usize] = x;
            column += 32u32;
        }
        row += comptime!(THREADS / 32);
    }
}

/// The product of a row of each.
#[cube]
fn dot(a: &SharedMemory<f32>, row: u32, b: &SharedMemory<f32>, column: u32, dims: u32) -> f32 {
    let mut sum = 0.0f32;
    let (a_at, b_at) = (row * PITCH, column * PITCH);
    for i in 0..dims {
        sum = fma(a[(a_at + i) as usize], b[(b_at + i) as usize], sum);
    }
    sum
}

/// Adds the products of 16 rows of a thread's column with the columns of a tile of scores.
#[cube]
fn accumulate(
    acc: &mut Array<f32>,
    scores: &SharedMemory<f32>,
    rows: &SharedMemory<f32>,
    dims: u32,
) {
    if UNIT_POS_X < dims {
        for j in 0..ROWS {
            let x = rows[(j * PITCH + UNIT_POS_X) as usize];
            #[unroll]
            for i in 0..comptime!(ROWS as usize) {
                acc[i] = fma(
                    scores[(j * SCORE_PITCH + comptime!(i as u32)) as usize],
                    x,
                    acc[i],
                );
            }
        }
    }
}

/// Writes a thread's column of up to 16 rows from `first` on.
#[cube]
fn store<E: Float>(
    acc: &Array<f32>,
    to: &mut Array<E>,
    at: &Place,
    first: u32,
    end: u32,
    dims: u32,
    factor: f32,
) {
    #[unroll]
    for i in 0..comptime!(ROWS as usize) {
        let row = first + comptime!(i as u32);
        if UNIT_POS_X < dims && row < end {
            let to_row = at.base + u64::cast_from(row) * at.token;
            to[(to_row + u64::cast_from(UNIT_POS_X)) as usize] = E::cast_from(acc[i] * factor);
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

#[cube]
fn tile() -> SharedMemory<f32> {
    SharedMemory::<f32>::new(comptime!((ROWS * PITCH) as usize))
}

#[cube]
fn score_tile() -> SharedMemory<f32> {
    SharedMemory::<f32>::new(comptime!((ROWS * SCORE_PITCH) as usize))
}

/// `dq`. Grid: row blocks × heads × sequences, the first fastest.
#[cube]
pub fn queries<E: Float>(
    q: &Array<E>,
    k: &Array<E>,
    v: &Array<E>,
    dout: &Array<E>,
    dq: &mut Array<E>,
    statistics: &Array<f32>,
    buffers: &Buffers,
    args: &Args,
    strides: &Strides,
) {
    let block = query_block(args, buffers, ROWS);
    let span = &block.span;
    if block.row0 >= span.q_count {
        terminate!();
    }
    let seen = seen_tiles(args, &block, ROWS, ROWS);
    let key_head = block.head / args.group;
    let (k_at, v_at) = (
        keys_at(args, span, block.batch, key_head),
        values_at(args, span, block.batch, key_head),
    );
    let (mut q_tile, mut dout_tile, mut k_tile, mut v_tile) = (tile(), tile(), tile(), tile());
    let mut scores = score_tile();
    let at = queries_at(args, span, block.batch, block.head);
    load::<E>(&mut q_tile, q, &at, block.row0, span.q_count, args.head_dim);
    let at = dout_at(strides, span, block.batch, block.head);
    load::<E>(
        &mut dout_tile,
        dout,
        &at,
        block.row0,
        span.q_count,
        args.head_dim_v,
    );

    // A thread's score: its row among the block's, its column among the tile's.
    let row = UNIT_POS_X / ROWS;
    let column = UNIT_POS_X % ROWS;
    let query = min(block.row0 + row, span.q_count - 1u32);
    let score_row = score_row(args, buffers, span, block.batch, query, block.head, true);
    let at = statistics_at(args, strides, span, block.batch, block.head) + u64::cast_from(query);
    let lse = statistics[at as usize];
    let delta = statistics[(at + half(args, strides)) as usize];

    let mut acc = begin();
    let mut index = seen.begin;
    while index < seen.end {
        let key0 = index * ROWS;
        sync_cube();
        load::<E>(&mut k_tile, k, &k_at, key0, span.k_count, args.head_dim);
        load::<E>(&mut v_tile, v, &v_at, key0, span.k_count, args.head_dim_v);
        sync_cube();
        let key = key0 + column;
        let mut score = 0.0f32;
        if sees(args, span, score_row.position, key) && block.row0 + row < span.q_count {
            let product = dot(&q_tile, row, &k_tile, column, args.head_dim);
            let dweight = dot(&dout_tile, row, &v_tile, column, args.head_dim_v);
            score = weigh(
                args, buffers, &score_row, key, product, dweight, lse, delta, true, true, true,
            )
            .score;
        }
        // Transposed: a line for each key, of which the products are.
        scores[(column * SCORE_PITCH + row) as usize] = score;
        sync_cube();
        accumulate(&mut acc, &scores, &k_tile, args.head_dim);
        index += 1u32;
    }
    let at = dq_at(strides, span, block.batch, block.head);
    store::<E>(
        &acc,
        dq,
        &at,
        block.row0,
        span.q_count,
        args.head_dim,
        args.scale,
    );
}

/// `dk` and `dv`. Grid: key blocks × key heads × sequences, the first fastest.
#[cube]
pub fn keys<E: Float>(
    q: &Array<E>,
    k: &Array<E>,
    v: &Array<E>,
    dout: &Array<E>,
    dk: &mut Array<E>,
    dv: &mut Array<E>,
    statistics: &Array<f32>,
    buffers: &Buffers,
    args: &Args,
    strides: &Strides,
) {
    let block = key_block(args, strides, buffers, ROWS);
    let span = &block.span;
    if block.key0 >= block.end {
        terminate!();
    }
    let (mut q_tile, mut dout_tile, mut k_tile, mut v_tile) = (tile(), tile(), tile(), tile());
    let (mut weights, mut scores) = (score_tile(), score_tile());
    let at = keys_at(args, span, block.batch, block.key_head);
    load::<E>(&mut k_tile, k, &at, block.key0, span.k_count, args.head_dim);
    let at = values_at(args, span, block.batch, block.key_head);
    load::<E>(
        &mut v_tile,
        v,
        &at,
        block.key0,
        span.k_count,
        args.head_dim_v,
    );

    // A thread's score: its row among the tile's, its column among the block's.
    let row = UNIT_POS_X / ROWS;
    let column = UNIT_POS_X % ROWS;
    let key = block.key0 + column;
    let (mut dk_acc, mut dv_acc) = (begin(), begin());
    let mut of_group = 0u32;
    while of_group < args.group {
        let head = block.key_head * args.group + of_group;
        let q_at = queries_at(args, span, block.batch, head);
        let d_at = dout_at(strides, span, block.batch, head);
        let rows_at = statistics_at(args, strides, span, block.batch, head);
        let mut row0 = block.begin;
        while row0 < block.seen {
            sync_cube();
            load::<E>(&mut q_tile, q, &q_at, row0, span.q_count, args.head_dim);
            load::<E>(
                &mut dout_tile,
                dout,
                &d_at,
                row0,
                span.q_count,
                args.head_dim_v,
            );
            sync_cube();
            let query = min(row0 + row, span.q_count - 1u32);
            let of_row = score_row(args, buffers, span, block.batch, query, head, true);
            let mut weight = 0.0f32;
            let mut score = 0.0f32;
            if sees(args, span, of_row.position, key) && row0 + row < span.q_count {
                let at = rows_at + u64::cast_from(query);
                let lse = statistics[at as usize];
                let delta = statistics[(at + half(args, strides)) as usize];
                let product = dot(&q_tile, row, &k_tile, column, args.head_dim);
                let dweight = dot(&dout_tile, row, &v_tile, column, args.head_dim_v);
                let both = weigh(
                    args, buffers, &of_row, key, product, dweight, lse, delta, true, true, true,
                );
                weight = both.weight;
                score = both.score;
            }
            weights[(row * SCORE_PITCH + column) as usize] = weight;
            scores[(row * SCORE_PITCH + column) as usize] = score;
            sync_cube();
            accumulate(&mut dv_acc, &weights, &dout_tile, args.head_dim_v);
            accumulate(&mut dk_acc, &scores, &q_tile, args.head_dim);
            row0 += ROWS;
        }
        of_group += 1u32;
    }
    if has(args, flag::DK) {
        let at = dk_at(strides, span, block.batch, block.key_head);
        store::<E>(
            &dk_acc,
            dk,
            &at,
            block.key0,
            block.end,
            args.head_dim,
            args.scale,
        );
    }
    if has(args, flag::DV) {
        let at = dv_at(strides, span, block.batch, block.key_head);
        store::<E>(
            &dv_acc,
            dv,
            &at,
            block.key0,
            block.end,
            args.head_dim_v,
            1.0f32,
        );
    }
}
