//! The backward pass of what no other kernel takes: dtypes that differ, rows at any address, any
//! head dimension. Exact products of f32.
//!
//! Dtypes are told when a kernel is launched. A cube computes tiles of 32×32 scores, of which each
//! thread has four: rows and columns 16 apart. Head dimensions go by in chunks.

use contract::Float as Dtype;
use cubecl::ir::{ManagedVariable, Type};
use cubecl::prelude::*;

use super::arguments::*;
use crate::attention::arguments::*;
use crate::attention::block::QueryBlock;
use crate::emit::{Builder, scalars};
pub use sums::{bias, keys, queries};

mod sums;

scalars! { Dtypes, DtypesExpand {
    /// Each a `contract::Float`.
    q_dtype: u32,
    k_dtype: u32,
    v_dtype: u32,
    dout_dtype: u32,
} }

/// Threads of a cube.
pub const THREADS: u32 = 256;
/// Queries and keys of a tile, and dimensions of a chunk.
pub const ROWS: u32 = 32;
const PITCH: u32 = ROWS + 1;

/// The elements of a tensor, one of these by its dtype.
#[derive(CubeType)]
pub struct Elements {
    of_f32: Array<f32>,
    of_f16: Array<::half::f16>,
    of_bf16: Array<::half::bf16>,
}

impl Elements {
    /// Declares the three, by these names, with what [`Builder`] has for what is read or written.
    fn declare(
        b: &mut Builder,
        [of_f32, of_f16, of_bf16]: [&'static str; 3],
        array: fn(&mut Builder, &'static str, Type) -> ManagedVariable,
    ) -> ElementsExpand {
        let f32_ = b.type_of::<f32>();
        let f16_ = b.type_of::<::half::f16>();
        let bf16_ = b.type_of::<::half::bf16>();
        ElementsExpand {
            of_f32: array(b, of_f32, f32_).into(),
            of_f16: array(b, of_f16, f16_).into(),
            of_bf16: array(b, of_bf16, bf16_).into(),
        }
    }

    /// The gradient that a kernel writes.
    pub fn written(b: &mut Builder) -> ElementsExpand {
        Elements::declare(b, ["to_f32", "to_f16", "to_bf16"], Builder::write)
    }
}

#[cube]
fn element(from: &Elements, dtype: u32, at: u64) -> f32 {
    let at = at as usize;
    if dtype == comptime!(Dtype::F32.code()) {
        from.of_f32[at]
    } else if dtype == comptime!(Dtype::F16.code()) {
        f32::cast_from(from.of_f16[at])
    } else {
        f32::cast_from(from.of_bf16[at])
    }
}

#[cube]
fn set_element(to: &mut Elements, dtype: u32, at: u64, x: f32) {
    let at = at as usize;
    if dtype == comptime!(Dtype::F32.code()) {
        to.of_f32[at] = x;
    } else if dtype == comptime!(Dtype::F16.code()) {
        to.of_f16[at] = ::half::f16::cast_from(x);
    } else {
        to.of_bf16[at] = ::half::bf16::cast_from(x);
    }
}

/// What is read.
#[derive(CubeType)]
pub struct Inputs {
    pub q: Elements,
    pub k: Elements,
    pub v: Elements,
    pub dout: Elements,
}

impl Inputs {
    pub fn declare(b: &mut Builder) -> InputsExpand {
        let mut read = |names| Elements::declare(b, names, Builder::read);
        InputsExpand {
            q: read(["q_f32", "q_f16", "q_bf16"]),
            k: read(["k_f32", "k_f16", "k_bf16"]),
            v: read(["v_f32", "v_f16", "v_bf16"]),
            dout: read(["dout_f32", "dout_f16", "dout_bf16"]),
        }
    }
}

/// A chunk of the rows of a tile, and of its columns.
#[derive(CubeType)]
struct Chunks {
    rows: SharedMemory<f32>,
    columns: SharedMemory<f32>,
}

#[cube]
fn chunks() -> Chunks {
    Chunks {
        rows: square(),
        columns: square(),
    }
}

#[cube]
fn square() -> SharedMemory<f32> {
    SharedMemory::<f32>::new(comptime!((ROWS * PITCH) as usize))
}

/// Loads a chunk of 32 rows from `first` on; zeros in place of rows from `end` on and of columns
/// from `dims` on.
#[cube]
fn load(
    to: &mut SharedMemory<f32>,
    from: &Elements,
    dtype: u32,
    at: &Place,
    first: u32,
    end: u32,
    dim0: u32,
    dims: u32,
) {
    // 32 neighbours read neighbours.
    let column = UNIT_POS_X % ROWS;
    let mut row = UNIT_POS_X / ROWS;
    while row < ROWS {
        let mut x = 0.0f32;
        if first + row < end && dim0 + column < dims {
            let to_row = at.base + u64::cast_from(first + row) * at.token;
            x = element(from, dtype, to_row + u64::cast_from(dim0 + column));
        }
        to[(row * PITCH + column) as usize] = x;
        row += comptime!(THREADS / ROWS);
    }
}

/// The products of 32 rows with 32 others: of a thread's two rows and two columns.
#[cube]
fn products(
    chunks: &mut Chunks,
    rows: &Elements,
    columns: &Elements,
    rows_dtype: u32,
    columns_dtype: u32,
    rows_at: &Place,
    columns_at: &Place,
    row0: u32,
    column0: u32,
    row_end: u32,
    column_end: u32,
    dims: u32,
) -> Array<f32> {
    let mut sums = Array::<f32>::new(4usize);
    #[unroll]
    for i in 0..4usize {
        sums[i] = 0.0f32;
    }
    let row = UNIT_POS_X / 16u32;
    let column = UNIT_POS_X % 16u32;
    let mut dim0 = 0u32;
    while dim0 < dims {
        sync_cube();
        load(
            &mut chunks.rows,
            rows,
            rows_dtype,
            rows_at,
            row0,
            row_end,
            dim0,
            dims,
        );
        load(
            &mut chunks.columns,
            columns,
            columns_dtype,
            columns_at,
            column0,
            column_end,
            dim0,
            dims,
        );
        sync_cube();
        for i in 0..ROWS {
            let a0 = chunks.rows[(row * PITCH + i) as usize];
            let a1 = chunks.rows[((row + 16u32) * PITCH + i) as usize];
            let b0 = chunks.columns[(column * PITCH + i) as usize];
            let b1 = chunks.columns[((column + 16u32) * PITCH + i) as usize];
            sums[0] = fma(a0, b0, sums[0]);
            sums[1] = fma(a0, b1, sums[1]);
            sums[2] = fma(a1, b0, sums[2]);
            sums[3] = fma(a1, b1, sums[3]);
        }
        dim0 += ROWS;
    }
    sums
}

/// Of a thread's four pairs of a query and a key, those of a row beside each other.
#[derive(CubeType)]
struct Pairs {
    weights: Array<f32>,
    scores: Array<f32>,
}

/// Weights, and gradients of scores, of queries from the block's first on and keys from `key0` on.
#[cube]
fn pairs(
    chunks: &mut Chunks,
    inputs: &Inputs,
    statistics: &Array<f32>,
    buffers: &Buffers,
    args: &Args,
    strides: &Strides,
    dtypes: &Dtypes,
    block: &QueryBlock,
    key0: u32,
    #[comptime] before_cap: bool,
) -> Pairs {
    let (span, batch) = (&block.span, block.batch);
    let (q_count, k_count) = (span.q_count, span.k_count);
    let key_head = block.head / args.group;
    let s = products(
        chunks,
        &inputs.q,
        &inputs.k,
        dtypes.q_dtype,
        dtypes.k_dtype,
        &queries_at(args, span, batch, block.head),
        &keys_at(args, span, batch, key_head),
        block.row0,
        key0,
        q_count,
        k_count,
        args.head_dim,
    );
    let d = products(
        chunks,
        &inputs.dout,
        &inputs.v,
        dtypes.dout_dtype,
        dtypes.v_dtype,
        &dout_at(strides, span, batch, block.head),
        &values_at(args, span, batch, key_head),
        block.row0,
        key0,
        q_count,
        k_count,
        args.head_dim_v,
    );
    let mut weights = Array::<f32>::new(4usize);
    let mut scores = Array::<f32>::new(4usize);
    #[unroll]
    for r in 0..2usize {
        let row = block.row0 + UNIT_POS_X / 16u32 + comptime!(r as u32 * 16);
        let query = min(row, q_count - 1u32);
        let of_row = score_row(args, buffers, span, batch, query, block.head, true);
        let at = statistics_at(args, strides, span, batch, block.head) + u64::cast_from(query);
        let lse = statistics[at as usize];
        let delta = statistics[(at + half(args, strides)) as usize];
        #[unroll]
        for c in 0..2usize {
            let key = key0 + UNIT_POS_X % 16u32 + comptime!(c as u32 * 16);
            let mut weight = 0.0f32;
            let mut score = 0.0f32;
            if sees(args, span, of_row.position, key) && row < q_count {
                let both = weigh(
                    args,
                    buffers,
                    &of_row,
                    key,
                    s[comptime!(r * 2 + c)],
                    d[comptime!(r * 2 + c)],
                    lse,
                    delta,
                    true,
                    true,
                    before_cap,
                );
                weight = both.weight;
                score = both.score;
            }
            weights[comptime!(r * 2 + c)] = weight;
            scores[comptime!(r * 2 + c)] = score;
        }
    }
    Pairs { weights, scores }
}
