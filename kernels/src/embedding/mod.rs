//! Embedding: rows of a table, copied or converted. An id outside the vocabulary gives a row of NaN, one
//! of rows that the table does not have negative zeros, which change nothing that they are added to.

pub mod backward;

use cubecl::prelude::*;

use crate::Error;
use crate::emit::{Builder, Float as Dtype, Kernel, ScalarType, with_vector};
use crate::math;
use crate::rows::{self, Divisor, Sizes, Strides, divide, row_index, row_start};

const THREADS: u32 = 128;
/// Vectors that a thread loads before it stores: two halve the loads of ids, four would leave the GPU idle where rows are few.
const UNROLL: u32 = 2;

/// The table has `rows` of the `vocab` of a vocabulary, from `begin` on.
/// `wide_ids`: 0 for i32, 1 for i64. `length` and the strides of table and output are in vectors.
#[cube]
fn embedding<T: Float, U: Float, N: Size>(
    table: &Array<Vector<T, N>>,
    ids: &Array<i32>,
    ids_i64: &Array<i64>,
    out: &mut Array<Vector<U, N>>,
    sizes: Sizes,
    length: u32,
    blocks_per_row: Divisor,
    rows: usize,
    begin: usize,
    vocab: usize,
    table_stride: usize,
    wide_ids: u32,
    ids_strides: Strides,
    out_strides: Strides,
) {
    let row = divide(CUBE_POS_X, blocks_per_row);
    let index = row_index(row, sizes);
    let block = CUBE_POS_X - row * blocks_per_row.size;
    let first = block * comptime!(THREADS * UNROLL) + UNIT_POS_X;
    let at = row_start(index, ids_strides);
    let id = if wide_ids == 1 {
        ids_i64[at]
    } else {
        i64::cast_from(ids[at])
    };
    // A negative id is a great one without its sign, and so is one before the first row.
    let id = usize::cast_from(id);
    let row = id - begin;
    let inside = row < rows;
    let mut other = math::nan();
    if id < vocab {
        other = math::negative_zero();
    }
    let start = row * table_stride;
    let out_start = row_start(index, out_strides);
    let mut vectors = Sequence::<Vector<U, N>>::new();
    #[unroll]
    for k in 0..UNROLL {
        let i = first + k * THREADS;
        let mut v = Vector::<U, N>::cast_from(Vector::<f32, N>::new(other));
        if inside && i < length {
            v = Vector::cast_from(table[start + i as usize]);
        }
        vectors.push(v);
    }
    #[unroll]
    for k in 0..UNROLL {
        let i = first + k * THREADS;
        if i < length {
            out[out_start + i as usize] = *vectors.index(k as usize);
        }
    }
}

macro_rules! kernel {
    ($b:ident, $t:ty, $u:ty, $n:ty) => {{
        let from = $b.type_of::<Vector<$t, $n>>();
        let to = $b.type_of::<Vector<$u, $n>>();
        let (narrow, wide) = ($b.type_of::<i32>(), $b.type_of::<i64>());
        let table = $b.read("table", from);
        let ids = $b.read("ids", narrow);
        let ids_i64 = $b.read("ids_i64", wide);
        let out = $b.write("out", to);
        let sizes = rows::sizes(&mut $b);
        let length = $b.scalar("length", ScalarType::U32);
        let blocks_per_row = rows::blocks_per_row(&mut $b);
        let in_table = $b.scalar("rows", ScalarType::U64);
        let begin = $b.scalar("begin", ScalarType::U64);
        let vocab = $b.scalar("vocab", ScalarType::U64);
        let table_stride = $b.scalar("table_stride", ScalarType::U64);
        let wide_ids = $b.scalar("wide_ids", ScalarType::U32);
        let ids_strides = rows::strides(&mut $b, ["ids_0", "ids_1", "ids_2"]);
        let out_strides = rows::strides(&mut $b, ["out_0", "out_1", "out_2"]);
        embedding::expand::<$t, $u, $n>(
            $b.scope(),
            table.into(),
            ids.into(),
            ids_i64.into(),
            out.into(),
            sizes,
            length.into(),
            blocks_per_row,
            in_table.into(),
            begin.into(),
            vocab.into(),
            table_stride.into(),
            wide_ids.into(),
            ids_strides,
            out_strides,
        );
    }};
}

fn kernel(table: Dtype, out: Dtype, vectors: bool) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    // Vectors of 16 bytes on the wider side.
    let width = table.per_vector().min(out.per_vector());
    with_vector!(table, T, _N => with_vector!(out, U, _M => match (vectors, width) {
        (false, _) => kernel!(b, T, U, Const<1>),
        (true, 4) => kernel!(b, T, U, Const<4>),
        (true, _) => kernel!(b, T, U, Const<8>),
    }));
    let width = if vectors { width } else { 1 };
    let symbol = format!("embedding_{}_{}x{width}", table.name(), out.name());
    let choices = vec![
        ("table", table.code()),
        ("dtype", out.code()),
        ("width", width),
        ("per_block", THREADS * UNROLL),
    ];
    b.finish(symbol, choices, THREADS)
}

/// Every form: the table's dtype by the output's, in vectors and by element.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    let mut kernels = Vec::new();
    for table in Dtype::ALL.iter().copied() {
        for out in Dtype::ALL.iter().copied() {
            for vectors in [true, false] {
                kernels.push(kernel(table, out, vectors)?);
            }
        }
    }
    Ok(kernels)
}
