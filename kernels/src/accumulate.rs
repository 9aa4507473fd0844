//! Adding one tensor to another, in f32, rounded once; four vectors per thread in flight.

use cubecl::prelude::*;

use crate::Error;
use crate::emit::{Builder, Float as Dtype, Kernel, ScalarType, with_vector};
use crate::rows::{self, Divisor, Sizes, Strides, divide, row_index, row_start};

const THREADS: u32 = 256;
/// Vectors that a thread loads before it stores.
const UNROLL: u32 = 4;

#[cube]
fn accumulate<T: Float, U: Float, N: Size>(
    x: &Array<Vector<T, N>>,
    out: &mut Array<Vector<U, N>>,
    sizes: Sizes,
    length: usize,
    blocks_per_row: Divisor,
    x_strides: Strides,
    out_strides: Strides,
) {
    let row = divide(CUBE_POS_X, blocks_per_row);
    let index = row_index(row, sizes);
    let block = CUBE_POS_X - row * blocks_per_row.size;
    let first = block as usize * comptime!((THREADS * UNROLL) as usize) + UNIT_POS_X as usize;
    let x_start = row_start(index, x_strides);
    let out_start = row_start(index, out_strides);
    let mut sums = Sequence::<Vector<f32, N>>::new();
    #[unroll]
    for k in 0..UNROLL {
        let i = first + (k * THREADS) as usize;
        let mut sum = Vector::<f32, N>::zeroed();
        if i < length {
            let added = Vector::<f32, N>::cast_from(x[x_start + i]);
            sum = Vector::<f32, N>::cast_from(out[out_start + i]) + added;
        }
        sums.push(sum);
    }
    #[unroll]
    for k in 0..UNROLL {
        let i = first + (k * THREADS) as usize;
        if i < length {
            out[out_start + i] = Vector::cast_from(*sums.index(k as usize));
        }
    }
}

macro_rules! kernel {
    ($b:ident, $t:ty, $u:ty, $n:ty) => {{
        let (from, to) = (
            $b.type_of::<Vector<$t, $n>>(),
            $b.type_of::<Vector<$u, $n>>(),
        );
        let x = $b.read("x", from);
        let out = $b.write("out", to);
        let sizes = rows::sizes(&mut $b);
        let length = $b.scalar("length", ScalarType::U64);
        let blocks_per_row = rows::blocks_per_row(&mut $b);
        let x_strides = rows::strides(&mut $b, ["x_0", "x_1", "x_2"]);
        let out_strides = rows::strides(&mut $b, ["out_0", "out_1", "out_2"]);
        accumulate::expand::<$t, $u, $n>(
            $b.scope(),
            x.into(),
            out.into(),
            sizes,
            length.into(),
            blocks_per_row,
            x_strides,
            out_strides,
        );
    }};
}

fn kernel(from: Dtype, to: Dtype, vectors: bool) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    // Vectors of 16 bytes on the wider side.
    let width = from.per_vector().min(to.per_vector());
    with_vector!(from, T, _N => with_vector!(to, U, _M => match (vectors, width) {
        (false, _) => kernel!(b, T, U, Const<1>),
        (true, 4) => kernel!(b, T, U, Const<4>),
        (true, _) => kernel!(b, T, U, Const<8>),
    }));
    let width = if vectors { width } else { 1 };
    let symbol = format!("accumulate_{}_{}x{width}", from.name(), to.name());
    let choices = vec![
        ("from", from.code()),
        ("to", to.code()),
        ("width", width),
        ("per_block", THREADS * UNROLL),
    ];
    b.finish(symbol, choices, THREADS)
}

/// Every form: to f32 or the same dtype, in vectors and by element.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    let mut kernels = Vec::new();
    for from in Dtype::ALL.iter().copied() {
        for to in Dtype::ALL.iter().copied() {
            for vectors in [true, false] {
                if to == Dtype::F32 || to == from {
                    kernels.push(kernel(from, to, vectors)?);
                }
            }
        }
    }
    Ok(kernels)
}
