//! The index of the greatest element of each row, the first of equals; NaN is greater than everything.

// CubeCL has no such method.
#![allow(clippy::manual_is_multiple_of)]

use cubecl::prelude::*;

use crate::Error;
use crate::emit::{Builder, Float as Dtype, Kernel, ScalarType, with_vector};
use crate::rows::{self, Sizes, Strides, row_index, row_start};

/// Threads of a block, which has a row.
const THREADS: u32 = 1024;
const PLANES: u32 = THREADS / 32;
/// Vectors of a thread in flight.
const UNROLL: u32 = 4;

/// An element's place in the order, and its index.
#[derive(CubeType, Clone, Copy)]
struct Candidate {
    key: u32,
    index: u32,
}

/// A number that grows with `x`; the greatest of all for NaN.
#[cube]
fn order(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    let magnitude = bits & 0x7fff_ffffu32;
    let mut key = magnitude | 0x8000_0000u32;
    // Zeros are equal whatever their signs.
    if bits > 0x8000_0000u32 {
        key = !bits;
    }
    if magnitude > 0x7f80_0000u32 {
        key = 0xffff_ffffu32;
    }
    key
}

/// The best of the lanes of a plane, in all of them.
#[cube]
fn best_of_plane(mine: Candidate) -> Candidate {
    let mut key = mine.key;
    let mut index = mine.index;
    #[unroll]
    for i in 0..5u32 {
        let other_key = plane_shuffle_xor(key, comptime!(1u32 << i));
        let other_index = plane_shuffle_xor(index, comptime!(1u32 << i));
        if other_key > key || (other_key == key && other_index < index) {
            key = other_key;
            index = other_index;
        }
    }
    Candidate { key, index }
}

/// `wide_ids`: 0 for i32, 1 for i64. `length` and the strides of x are in vectors.
///
/// Grid: rows.
#[cube]
fn argmax<T: Float, N: Size>(
    x: &Array<Vector<T, N>>,
    out: &mut Array<i32>,
    out_i64: &mut Array<i64>,
    sizes: Sizes,
    length: u32,
    wide_ids: u32,
    x_strides: Strides,
    out_strides: Strides,
) {
    let index = row_index(CUBE_POS_X, sizes);
    let start = row_start(index, x_strides);
    // Below every element's place.
    let mut key = 0u32;
    let mut at = 0xffff_ffffu32;
    let mut first = UNIT_POS_X;
    while first < length {
        let mut vectors = Sequence::<Vector<T, N>>::new();
        #[unroll]
        for k in 0..UNROLL {
            // Past the end the last vector is read again.
            let i = min(first + k * THREADS, length - 1u32);
            vectors.push(x[start + i as usize]);
        }
        #[unroll]
        for k in 0..UNROLL {
            let i = min(first + k * THREADS, length - 1u32);
            let v = Vector::<f32, N>::cast_from(*vectors.index(k as usize));
            #[unroll]
            for j in 0..N::value() {
                let place = order(v[j]);
                // A thread's indices only grow.
                if place > key {
                    key = place;
                    at = i * comptime!(N::value() as u32) + comptime!(j as u32);
                }
            }
        }
        first += comptime!(THREADS * UNROLL);
    }
    let mut keys = SharedMemory::<u32>::new(comptime!(PLANES as usize));
    let mut indices = SharedMemory::<u32>::new(comptime!(PLANES as usize));
    let of_plane = best_of_plane(Candidate { key, index: at });
    let lane = UNIT_POS_X % 32u32;
    if lane == 0u32 {
        keys[(UNIT_POS_X / 32u32) as usize] = of_plane.key;
        indices[(UNIT_POS_X / 32u32) as usize] = of_plane.index;
    }
    sync_cube();
    if UNIT_POS_X < 32u32 {
        let at = (UNIT_POS_X % PLANES) as usize;
        let found = best_of_plane(Candidate {
            key: keys[at],
            index: indices[at],
        });
        if UNIT_POS_X == 0u32 {
            let at = row_start(index, out_strides);
            if wide_ids == 1 {
                out_i64[at] = i64::cast_from(found.index);
            } else {
                out[at] = i32::cast_from(found.index);
            }
        }
    }
}

macro_rules! kernel {
    ($b:ident, $t:ty, $n:ty) => {{
        let ty = $b.type_of::<Vector<$t, $n>>();
        let (narrow, wide) = ($b.type_of::<i32>(), $b.type_of::<i64>());
        let x = $b.read("x", ty);
        let out = $b.write("out", narrow);
        let out_i64 = $b.write("out_i64", wide);
        let sizes = rows::sizes(&mut $b);
        let length = $b.scalar("length", ScalarType::U32);
        let wide_ids = $b.scalar("wide_ids", ScalarType::U32);
        let x_strides = rows::strides(&mut $b, ["x_0", "x_1", "x_2"]);
        let out_strides = rows::strides(&mut $b, ["out_0", "out_1", "out_2"]);
        argmax::expand::<$t, $n>(
            $b.scope(),
            x.into(),
            out.into(),
            out_i64.into(),
            sizes,
            length.into(),
            wide_ids.into(),
            x_strides,
            out_strides,
        );
    }};
}

fn kernel(dtype: Dtype, vectors: bool) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    with_vector!(dtype, T, N => match vectors {
        true => kernel!(b, T, N),
        false => kernel!(b, T, Const<1>),
    });
    let width = if vectors { dtype.per_vector() } else { 1 };
    let symbol = format!("argmax_{}x{width}", dtype.name());
    let choices = vec![("dtype", dtype as u32), ("width", width)];
    b.finish(symbol, choices, THREADS)
}

/// Every form: by dtype, in vectors and by element.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    let mut kernels = Vec::new();
    for dtype in Dtype::ALL {
        for vectors in [true, false] {
            kernels.push(kernel(dtype, vectors)?);
        }
    }
    Ok(kernels)
}
