//! Ternary codes the other way round in each byte; four vectors per thread in flight.

use cubecl::prelude::*;

use crate::Error;
use crate::emit::{Builder, Kernel, ScalarType};

const THREADS: u32 = 256;
/// Vectors that a thread loads before it stores.
const UNROLL: u32 = 4;

/// The four codes of each byte in the other order.
#[cube]
fn reversed(word: u32) -> u32 {
    let pairs = ((word & 0x0f0f_0f0fu32) << 4) | ((word >> 4) & 0x0f0f_0f0fu32);
    ((pairs & 0x3333_3333u32) << 2) | ((pairs >> 2) & 0x3333_3333u32)
}

/// `length` is in vectors. `packed` and `out` may be the same memory: a thread stores where it has
/// loaded. The scale's bytes may lie at any address.
#[cube]
fn weight_repack<T: Int, N: Size>(
    packed: &Array<Vector<T, N>>,
    tail: &Array<u8>,
    out: &mut Array<Vector<T, N>>,
    scale: &mut Array<u32>,
    length: usize,
    has_scale: u32,
) {
    if has_scale != 0u32 && CUBE_POS_X == 0u32 && UNIT_POS_X == 0u32 {
        let mut bits = 0u32;
        #[unroll]
        for i in 0..4u32 {
            bits |= u32::cast_from(tail[i as usize]) << comptime!(8 * i);
        }
        scale[0] = bits;
    }
    let first = CUBE_POS_X as usize * comptime!((THREADS * UNROLL) as usize) + UNIT_POS_X as usize;
    let mut vectors = Sequence::<Vector<T, N>>::new();
    #[unroll]
    for k in 0..UNROLL {
        let i = first + (k * THREADS) as usize;
        let mut v = Vector::<T, N>::zeroed();
        if i < length {
            v = packed[i];
        }
        vectors.push(v);
    }
    #[unroll]
    for k in 0..UNROLL {
        let i = first + (k * THREADS) as usize;
        let mut v = *vectors.index(k as usize);
        #[unroll]
        for j in 0..N::value() {
            v[j] = T::cast_from(reversed(u32::cast_from(v[j])));
        }
        if i < length {
            out[i] = v;
        }
    }
}

macro_rules! kernel {
    ($t:ty, $n:ty, $width:expr) => {{
        let mut b = Builder::default();
        let vector = b.type_of::<Vector<$t, $n>>();
        // Not read-only: what is written may be the same memory.
        let packed = b.write("packed", vector);
        let byte = b.type_of::<u8>();
        let tail = b.read("tail", byte);
        let out = b.write("out", vector);
        let word = b.type_of::<u32>();
        let scale = b.write("scale", word);
        let length = b.scalar("length", ScalarType::U64);
        let has_scale = b.scalar("has_scale", ScalarType::U32);
        weight_repack::expand::<$t, $n>(
            b.scope(),
            packed.into(),
            tail.into(),
            out.into(),
            scale.into(),
            length.into(),
            has_scale.into(),
        );
        let choices = vec![("width", $width), ("per_block", THREADS * UNROLL)];
        b.finish(format!("weight_repack_x{}", $width), choices, THREADS)
    }};
}

/// In vectors of 16 bytes, and by the byte.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    Ok(vec![kernel!(u32, Const<4>, 16)?, kernel!(u8, Const<1>, 1)?])
}
