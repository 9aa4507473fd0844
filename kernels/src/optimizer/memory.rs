//! All memory of the device, by address: vectors of four elements, and elements.

use contract::Float;
use cubecl::prelude::*;
use half::{bf16, f16};

use crate::emit::Builder;

/// Elements of a vector.
pub const FOUR: u32 = 4;

pub const F32: u32 = Float::F32.code();
const F16: u32 = Float::F16.code();

/// Arrays that begin at address zero.
#[derive(CubeType)]
pub struct Memory {
    pub f32x4: Array<Vector<f32, Const<4>>>,
    pub f16x4: Array<Vector<f16, Const<4>>>,
    pub bf16x4: Array<Vector<bf16, Const<4>>>,
    /// Four elements of 16 bits.
    pub u32x2: Array<Vector<u32, Const<2>>>,
    pub f32x1: Array<f32>,
    pub f16x1: Array<f16>,
    pub bf16x1: Array<bf16>,
}

/// Declares the arrays, which the host leaves at zero.
pub fn declare(b: &mut Builder) -> MemoryExpand {
    let f32x4 = b.type_of::<Vector<f32, Const<4>>>();
    let f16x4 = b.type_of::<Vector<f16, Const<4>>>();
    let bf16x4 = b.type_of::<Vector<bf16, Const<4>>>();
    let u32x2 = b.type_of::<Vector<u32, Const<2>>>();
    let [f32x1, f16x1, bf16x1] = [b.type_of::<f32>(), b.type_of::<f16>(), b.type_of::<bf16>()];
    MemoryExpand {
        f32x4: b.write("f32x4", f32x4).into(),
        f16x4: b.write("f16x4", f16x4).into(),
        bf16x4: b.write("bf16x4", bf16x4).into(),
        u32x2: b.write("u32x2", u32x2).into(),
        f32x1: b.write("f32x1", f32x1).into(),
        f16x1: b.write("f16x1", f16x1).into(),
        bf16x1: b.write("bf16x1", bf16x1).into(),
    }
}

/// The index of a vector, counted from element `start` of what begins at `address`, in vectors of
/// four elements of `1 << log2` bytes.
#[cube]
pub fn at(address: u64, start: u64, vector: u32, #[comptime] log2: u64) -> usize {
    let elements = start + u64::cast_from(vector) * 4u64;
    ((address >> comptime!(log2 + 2)) + (elements >> 2u64)) as usize
}

/// Loads a vector, whose bits become numbers by [`widened`] later: loads do not wait for one
/// another. Elements of 16 bits, which are not `wide`, lie in the first two.
#[cube]
pub fn load(
    memory: &Memory,
    address: u64,
    start: u64,
    vector: u32,
    #[comptime] wide: bool,
) -> Vector<f32, Const<4>> {
    let mut raw = Vector::<f32, Const<4>>::zeroed();
    if comptime!(wide) {
        raw = memory.f32x4[at(address, start, vector, 2u64)];
    } else {
        let halves = memory.u32x2[at(address, start, vector, 1u64)];
        raw[0] = f32::reinterpret(halves[0]);
        raw[1] = f32::reinterpret(halves[1]);
    }
    raw
}

/// What was loaded, as f32.
#[cube]
pub fn widened(
    raw: Vector<f32, Const<4>>,
    dtype: u32,
    #[comptime] wide: bool,
) -> Vector<f32, Const<4>> {
    let mut x = raw;
    if comptime!(!wide) {
        #[unroll]
        for j in 0..4usize {
            let upper = u32::reinterpret(raw[j / 2]) << comptime!(16 - 16 * (j as u32 % 2));
            if dtype == F16 {
                let half = f16::reinterpret(u16::cast_from(upper >> 16u32));
                x[j] = f32::cast_from(half);
            } else {
                x[j] = f32::reinterpret(upper & 0xffff_0000u32);
            }
        }
    }
    x
}

/// Stores a vector, rounded.
#[cube]
pub fn store(
    memory: &mut Memory,
    address: u64,
    dtype: u32,
    start: u64,
    vector: u32,
    x: Vector<f32, Const<4>>,
    #[comptime] wide: bool,
) {
    if comptime!(wide) {
        memory.f32x4[at(address, start, vector, 2u64)] = x;
    } else if dtype == F16 {
        memory.f16x4[at(address, start, vector, 1u64)] = Vector::cast_from(x);
    } else {
        memory.bf16x4[at(address, start, vector, 1u64)] = Vector::cast_from(x);
    }
}

/// The index of the first element of a vector.
#[cube]
fn element(address: u64, start: u64, vector: u32, #[comptime] log2: u64) -> usize {
    let elements = start + u64::cast_from(vector) * 4u64;
    ((address >> log2) + elements) as usize
}

/// The first `count` elements of a vector that may lie anywhere; zeros behind them.
#[cube]
pub fn load_one_by_one(
    memory: &Memory,
    address: u64,
    dtype: u32,
    start: u64,
    vector: u32,
    count: u32,
) -> Vector<f32, Const<4>> {
    let mut x = Vector::<f32, Const<4>>::zeroed();
    #[unroll]
    for j in 0..4usize {
        if (j as u32) < count {
            if dtype == F32 {
                x[j] = memory.f32x1[element(address, start, vector, 2u64) + j];
            } else if dtype == F16 {
                x[j] = f32::cast_from(memory.f16x1[element(address, start, vector, 1u64) + j]);
            } else {
                x[j] = f32::cast_from(memory.bf16x1[element(address, start, vector, 1u64) + j]);
            }
        }
    }
    x
}

/// Stores the first `count` elements of a vector that may lie anywhere, rounded.
#[cube]
pub fn store_one_by_one(
    memory: &mut Memory,
    address: u64,
    dtype: u32,
    start: u64,
    vector: u32,
    count: u32,
    x: Vector<f32, Const<4>>,
) {
    #[unroll]
    for j in 0..4usize {
        if (j as u32) < count {
            if dtype == F32 {
                memory.f32x1[element(address, start, vector, 2u64) + j] = x[j];
            } else if dtype == F16 {
                memory.f16x1[element(address, start, vector, 1u64) + j] = f16::cast_from(x[j]);
            } else {
                memory.bf16x1[element(address, start, vector, 1u64) + j] = bf16::cast_from(x[j]);
            }
        }
    }
}
