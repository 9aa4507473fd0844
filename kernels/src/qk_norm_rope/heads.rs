//! What a thread has of a head: up to [`SHARE`] components, both of every pair that it turns.
//!
//! Threads that share a head are neighbours in a warp, as many as it takes, and every head is summed
//! in one order: of a thread's components, then over the threads by halves. Heads that are moved by
//! element have their components where those in vectors do, and so the same bits.

use contract::qk_norm_rope::SHARE;
use contract::rotation::Style;
use cubecl::prelude::*;

use crate::emit::{Builder, Float as Dtype, ScalarType};
use crate::norm::parameter;

/// Components of a thread that follow each other.
pub(super) const PART: u32 = SHARE / 2;

/// What heads and norms are, whatever the tensors.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Sizes {
    pub head_dim: u32,
    /// Threads that share a head: two to this power.
    pub lanes_log2: u32,
    /// 0 without weights.
    pub weight_offset: f32,
    pub epsilon: f32,
    /// 1 / components of a head.
    pub inverse_length: f32,
}

/// From one batch entry, token and head to the next, in vectors; and what a thread's step to its next
/// head adds, modulo 2⁶⁴. The host computes it, since the compiler would do so anew at every step.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Strides {
    pub batch: usize,
    pub token: usize,
    pub head: usize,
    /// At each step.
    pub step: usize,
    /// If the end of a token lies on the way.
    pub step_token: usize,
    /// For every end of a batch entry.
    pub step_batch: usize,
}

/// Where a head begins.
#[cube]
pub(super) fn start_of(strides: Strides, batch: u32, token: u32, head: u32) -> usize {
    batch as usize * strides.batch + token as usize * strides.token + head as usize * strides.head
}

/// Where a thread's components lie in a head: two parts, each up to its end, which may come before
/// it begins.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Place {
    pub first: u32,
    pub first_end: u32,
    pub second: u32,
    pub second_end: u32,
    /// The first of its pairs, which turn if they are below `pairs`.
    pub pair: u32,
    pub pairs: u32,
}

/// The place of a lane. In the half-split style its parts are partners; behind the rotated
/// components, and in the interleaved style, one follows the other.
#[cube]
pub(super) fn place_of(lane: u32, pairs: u32, head_dim: u32, #[comptime] style: Style) -> Place {
    let mut place = Place {
        first: lane * SHARE,
        first_end: head_dim,
        second: lane * SHARE + PART,
        second_end: head_dim,
        pair: lane * PART,
        pairs,
    };
    if comptime!(style == Style::HalfSplit) {
        let turning = (pairs + comptime!(PART - 1)) / PART;
        if lane < turning {
            place.first = lane * PART;
            place.first_end = pairs;
            place.second = pairs + lane * PART;
            place.second_end = 2u32 * pairs;
        } else {
            place.first = 2u32 * pairs + (lane - turning) * SHARE;
            place.second = place.first + PART;
        }
    }
    place
}

/// Where component `i` of a thread lies, and whether there is one.
#[cube]
pub(super) fn component(place: Place, #[comptime] i: u32) -> (u32, bool) {
    if comptime!(i < PART) {
        let at = place.first + i;
        (at, at < place.first_end)
    } else {
        let at = place.second + comptime!(i - PART);
        (at, at < place.second_end)
    }
}

/// As [`component`], for any of them.
#[cube]
pub(super) fn component_at(place: Place, i: u32) -> (u32, bool) {
    let mut at = place.first + i;
    let mut end = place.first_end;
    if i >= PART {
        at = place.second + i - PART;
        end = place.second_end;
    }
    (at, at < end)
}

/// Loads a thread's vectors of the head that begins at `from`; zeros where it has none. As words, as
/// elements of 16 bits would take a register each.
#[cube]
pub(super) fn load_head<L: Numeric, M: Size, N: Size>(
    x: &Array<Vector<L, M>>,
    vectors: &mut Array<Vector<L, M>>,
    from: usize,
    place: Place,
    there: bool,
) {
    let width = comptime!(N::value() as u32);
    #[unroll]
    for v in 0..comptime!(SHARE / width) {
        let mut vector = Vector::<L, M>::zeroed();
        let (at, is_there) = component(place, comptime!(v * width));
        if there && is_there {
            vector = x[from + (at / width) as usize];
        }
        vectors[v as usize] = vector;
    }
}

/// A thread's components as f32.
#[cube]
pub(super) fn unpack<F: Float, N: Size, L: Numeric, M: Size>(
    vectors: &Array<Vector<L, M>>,
    #[comptime] dtype: Dtype,
) -> Array<f32> {
    let width = comptime!(N::value() as u32);
    let mut values = Array::<f32>::new(comptime!(SHARE as usize));
    #[unroll]
    for v in 0..comptime!(SHARE / width) {
        let loaded = vectors[v as usize];
        if comptime!(dtype == Dtype::Bf16 && width == 8) {
            // bf16 is the upper half of f32. The compiler needs three instructions for a pair, this
            // is two.
            let words = Vector::<u32, Const<4>>::reinterpret(loaded);
            #[unroll]
            for j in 0..4u32 {
                let word = words[j as usize];
                let at = comptime!((v * width + 2 * j) as usize);
                values[at] = f32::reinterpret(word << 16u32);
                values[comptime!(at + 1)] = f32::reinterpret(word & 0xffff_0000u32);
            }
        } else {
            let vector = Vector::<f32, N>::cast_from(Vector::<F, N>::reinterpret(loaded));
            #[unroll]
            for j in 0..width {
                values[comptime!((v * width + j) as usize)] = vector[j as usize];
            }
        }
    }
    values
}

/// Rounds a thread's components and stores them to the head that begins at `to`.
#[cube]
pub(super) fn store_head<F: Float, N: Size>(
    values: &Array<f32>,
    out: &mut Array<Vector<F, N>>,
    to: usize,
    place: Place,
    there: bool,
) {
    let width = comptime!(N::value() as u32);
    #[unroll]
    for v in 0..comptime!(SHARE / width) {
        let mut vector = Vector::<f32, N>::zeroed();
        #[unroll]
        for j in 0..width {
            vector[j as usize] = values[comptime!((v * width + j) as usize)];
        }
        let (at, is_there) = component(place, comptime!(v * width));
        if there && is_there {
            out[to + (at / width) as usize] = Vector::cast_from(vector);
        }
    }
}

/// The sum of products of a thread's components.
#[cube]
pub(super) fn dot(a: &Array<f32>, b: &Array<f32>) -> f32 {
    let mut sum = 0.0f32;
    #[unroll]
    for i in 0..SHARE {
        sum = fma(a[i as usize], b[i as usize], sum);
    }
    sum
}

/// The sum over the threads that share a head, on each of them. All of a warp come here.
#[cube]
pub(super) fn sum_of_lanes(sum: f32, lanes: u32) -> f32 {
    let mut sum = sum;
    #[unroll]
    for i in 0..5u32 {
        let step = comptime!(1u32 << i);
        if step < lanes {
            sum += plane_shuffle_xor(sum, step);
        }
    }
    sum
}

/// The gains of a thread's components: ones where there are none.
#[cube]
pub(super) fn gains_of(
    weight: &Array<u16>,
    weight_dtype: u32,
    place: Place,
    sizes: Sizes,
) -> Array<f32> {
    let mut gains = Array::<f32>::new(comptime!(SHARE as usize));
    #[unroll]
    for i in 0..SHARE {
        let (at, is_there) = component(place, i);
        let mut gain = 1.0f32;
        if is_there && weight_dtype != 0u32 {
            gain = parameter(weight, weight_dtype, at) + sizes.weight_offset;
        }
        gains[i as usize] = gain;
    }
    gains
}

pub(super) fn sizes(b: &mut Builder) -> SizesExpand {
    use ScalarType::{F32, U32};
    SizesExpand {
        head_dim: b.scalar("head_dim", U32).into(),
        lanes_log2: b.scalar("lanes_log2", U32).into(),
        weight_offset: b.scalar("weight_offset", F32).into(),
        epsilon: b.scalar("epsilon", F32).into(),
        inverse_length: b.scalar("inverse_length", F32).into(),
    }
}

pub(super) fn strides(b: &mut Builder, names: [&'static str; 6]) -> StridesExpand {
    let [batch, token, head, step, step_token, step_batch] =
        names.map(|name| b.scalar(name, ScalarType::U64).into());
    StridesExpand {
        batch,
        token,
        head,
        step,
        step_token,
        step_batch,
    }
}
