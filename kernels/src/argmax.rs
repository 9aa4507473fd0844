//! The index of the greatest element of each row, the first of equals; NaN is greater than everything.

// CubeCL has no such method.
#![allow(clippy::manual_is_multiple_of)]

use contract::argmax::UNROLLS;
use cubecl::prelude::*;

use crate::Error;
use crate::emit::{Builder, Float as Dtype, Kernel, ScalarType, with_vector};
use crate::rows::{self, Divisor, Sizes, Strides, divide, row_index, row_start};

/// Threads of a block.
const THREADS: u32 = 256;
const WARP: u32 = 32;
const WARPS: u32 = THREADS / WARP;
/// Below every element's place.
const NOWHERE: i32 = i32::MIN;

/// An element's place in the order, and its index.
#[derive(CubeType, Clone, Copy)]
struct Candidate {
    place: i32,
    index: u32,
}

/// A number that grows with `x`; the greatest of all for NaN.
#[cube]
fn place_of(x: f32) -> i32 {
    // The sum turns a negative zero into a positive one, and any NaN into 0x7fffffff, which is the one that CUDA's arithmetic gives.
    let bits = i32::reinterpret(x + 0.0f32);
    bits ^ ((bits >> 31) & 0x7fff_ffffi32)
}

#[cube]
fn is_better(a: Candidate, place: i32, index: u32) -> bool {
    a.place > place || (a.place == place && a.index < index)
}

/// The best of the lanes of a warp, in all of them.
#[cube]
fn best_of_warp(mine: Candidate) -> Candidate {
    let mut place = mine.place;
    let mut index = mine.index;
    #[unroll]
    for i in 0..5u32 {
        let other = Candidate {
            place: plane_shuffle_xor(place, comptime!(1u32 << i)),
            index: plane_shuffle_xor(index, comptime!(1u32 << i)),
        };
        if is_better(other, place, index) {
            place = other.place;
            index = other.index;
        }
    }
    Candidate { place, index }
}

/// The place of a row's element at an index that may be anything: outside the row there is none.
#[cube]
fn place_at<T: Float, N: Size>(
    x: &Array<Vector<T, N>>,
    start: usize,
    length: u32,
    index: u32,
) -> i32 {
    let width = comptime!(N::value() as u32);
    let mut place = i32::new(NOWHERE as i64);
    if index / width < length {
        let v = Vector::<f32, N>::cast_from(x[start + (index / width) as usize]);
        let mut element = v[0];
        #[unroll]
        for j in 1..N::value() {
            if index % width == comptime!(j as u32) {
                element = v[j];
            }
        }
        place = place_of(element);
    }
    place
}

/// `length` and the strides of x are in vectors, the strides of the output in words: an index of 64 bits is two, of which the second
/// is zero.
///
/// Where several blocks share a row, each offers its best element to the output: it takes the place of the one that is there if it is
/// better. What was there before needs no care, as any index into the row names an element of it, and anything else gives way. It is
/// read ahead, through `out_plain`, which is the same memory: until the row is known nothing waits for it.
///
/// Grid: rows times the blocks of each.
#[cube]
fn argmax<T: Float, N: Size>(
    x: &Array<Vector<T, N>>,
    out: &mut Array<Atomic<u32>>,
    out_plain: &Array<u32>,
    sizes: Sizes,
    length: u32,
    blocks_per_row: Divisor,
    wide_ids: u32,
    x_strides: Strides,
    out_strides: Strides,
    #[comptime] unroll: u32,
) {
    let row = divide(CUBE_POS_X, blocks_per_row);
    let block = CUBE_POS_X - row * blocks_per_row.size;
    let index = row_index(row, sizes);
    let start = row_start(index, x_strides);
    let out_at = row_start(index, out_strides);
    let shared = blocks_per_row.size > 1;
    let mut held = 0xffff_ffffu32;
    if shared && UNIT_POS_X == 0u32 {
        held = out_plain[out_at];
    }
    let mut place = i32::new(NOWHERE as i64);
    let mut vector = 0u32;
    let mut element = 0u32;
    let mut first = block * comptime!(THREADS * unroll) + UNIT_POS_X;
    while first < length {
        let mut vectors = Sequence::<Vector<T, N>>::new();
        #[unroll]
        for k in 0..unroll {
            // Past the end the last vector is read again.
            let i = min(first + k * THREADS, length - 1u32);
            vectors.push(x[start + i as usize]);
        }
        #[unroll]
        for k in 0..unroll {
            let v = Vector::<f32, N>::cast_from(*vectors.index(k as usize));
            let before = place;
            #[unroll]
            for j in 0..N::value() {
                let other = place_of(v[j]);
                // A thread's indices only grow.
                if other > place {
                    place = other;
                    element = comptime!(j as u32);
                }
            }
            if place > before {
                vector = min(first + k * THREADS, length - 1u32);
            }
        }
        first += blocks_per_row.size * comptime!(THREADS * unroll);
    }
    let mut place_held = i32::new(NOWHERE as i64);
    if shared && UNIT_POS_X == 0u32 {
        place_held = place_at::<T, N>(x, start, length, held);
    }
    let mut places = SharedMemory::<i32>::new(comptime!(WARPS as usize));
    let mut indices = SharedMemory::<u32>::new(comptime!(WARPS as usize));
    let of_warp = best_of_warp(Candidate {
        place,
        index: vector * comptime!(N::value() as u32) + element,
    });
    if UNIT_POS_X % WARP == 0u32 {
        places[(UNIT_POS_X / WARP) as usize] = of_warp.place;
        indices[(UNIT_POS_X / WARP) as usize] = of_warp.index;
    }
    sync_cube();
    if UNIT_POS_X < WARP {
        let at = (UNIT_POS_X % WARPS) as usize;
        let found = best_of_warp(Candidate {
            place: places[at],
            index: indices[at],
        });
        if UNIT_POS_X == 0u32 {
            if shared {
                let mut offers = is_better(found, place_held, held);
                while offers {
                    let old = out[out_at].compare_exchange_weak(held, found.index);
                    offers = old != held;
                    if offers {
                        held = old;
                        place_held = place_at::<T, N>(x, start, length, held);
                        offers = is_better(found, place_held, held);
                    }
                }
            } else {
                out[out_at].store(found.index);
            }
            if wide_ids == 1 && block == 0 {
                out[out_at + 1].store(0u32);
            }
        }
    }
}

macro_rules! kernel {
    ($b:ident, $t:ty, $n:ty, $unroll:ident) => {{
        let ty = $b.type_of::<Vector<$t, $n>>();
        let word = $b.type_of::<Atomic<u32>>();
        let x = $b.read("x", ty);
        let out = $b.write("out", word);
        let plain = $b.type_of::<u32>();
        let out_plain = $b.write("out_plain", plain);
        let sizes = rows::sizes(&mut $b);
        let length = $b.scalar("length", ScalarType::U32);
        let blocks_per_row = rows::blocks_per_row(&mut $b);
        let wide_ids = $b.scalar("wide_ids", ScalarType::U32);
        let x_strides = rows::strides(&mut $b, ["x_0", "x_1", "x_2"]);
        let out_strides = rows::strides(&mut $b, ["out_0", "out_1", "out_2"]);
        argmax::expand::<$t, $n>(
            $b.scope(),
            x.into(),
            out.into(),
            out_plain.into(),
            sizes,
            length.into(),
            blocks_per_row,
            wide_ids.into(),
            x_strides,
            out_strides,
            $unroll,
        );
    }};
}

fn kernel(dtype: Dtype, vectors: bool, unroll: u32) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    with_vector!(dtype, T, N => match vectors {
        true => kernel!(b, T, N, unroll),
        false => kernel!(b, T, Const<1>, unroll),
    });
    let width = if vectors { dtype.per_vector() } else { 1 };
    let symbol = format!("argmax_{}x{width}x{unroll}", dtype.name());
    let choices = vec![
        ("dtype", dtype.code()),
        ("width", width),
        ("unroll", unroll),
        ("per_block", THREADS * unroll),
    ];
    b.finish(symbol, choices, THREADS)
}

/// Every form: by dtype, in vectors and by element, by the loads of a thread.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    let mut kernels = Vec::new();
    for dtype in Dtype::ALL.iter().copied() {
        for vectors in [true, false] {
            for unroll in UNROLLS {
                kernels.push(kernel(dtype, vectors, unroll)?);
            }
        }
    }
    Ok(kernels)
}
