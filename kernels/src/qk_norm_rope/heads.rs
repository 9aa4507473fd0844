//! What a thread has of a head: up to [`SHARE`] components, both of every pair that it turns.
//!
//! Threads that share a head are neighbours in a warp, as many as it takes, and every head is summed
//! in one order: of a thread's components, then over the threads by halves. Heads that are moved by
//! element have their components where those in vectors do, and so the same bits.

use contract::qk_norm_rope::{MAX_HEAD_DIM, SHARE, THREADS};
use contract::rotation::{MAX_PAIRS, Style};
use cubecl::prelude::*;

use crate::emit::{Builder, ScalarType};
use crate::norm::parameter;
use crate::rotation::{turn_first, turn_second};

/// Components of a thread that follow each other.
const PART: u32 = SHARE / 2;

/// What heads and norms are, whatever the tensors.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Sizes {
    pub q_heads: u32,
    pub k_heads: u32,
    pub head_dim: u32,
    /// Threads that share a head: two to this power.
    pub lanes_log2: u32,
    /// A `contract::Float` each, or 0 for none.
    pub q_weight_dtype: u32,
    pub k_weight_dtype: u32,
    /// 0 without weights.
    pub weight_offset: f32,
    pub epsilon: f32,
    /// 1 / components of a head.
    pub inverse_length: f32,
}

/// From one batch entry, token and head to the next, in vectors.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Strides {
    pub batch: usize,
    pub token: usize,
    pub head: usize,
}

/// Where a head begins: of queries or, counted from the first of them, of keys.
#[cube]
pub(super) fn start_of(
    q: Strides,
    k: Strides,
    is_q: bool,
    batch: u32,
    token: u32,
    head: u32,
) -> usize {
    let mut of_batch = k.batch;
    let mut of_token = k.token;
    let mut of_head = k.head;
    if is_q {
        of_batch = q.batch;
        of_token = q.token;
        of_head = q.head;
    }
    batch as usize * of_batch + token as usize * of_token + head as usize * of_head
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

/// Loads a thread's vectors of the head that begins at `from`, of queries or of keys; zeros where it
/// has none. As words, as elements of 16 bits would take a register each.
#[cube]
pub(super) fn load<L: Numeric, M: Size, N: Size>(
    q: &Array<Vector<L, M>>,
    k: &Array<Vector<L, M>>,
    is_q: bool,
    from: usize,
    place: Place,
    there: bool,
) -> Sequence<Vector<L, M>> {
    let width = comptime!(N::value() as u32);
    let mut vectors = Sequence::<Vector<L, M>>::new();
    #[unroll]
    for v in 0..comptime!(SHARE / width) {
        let mut vector = Vector::<L, M>::zeroed();
        let (at, is_there) = component(place, comptime!(v * width));
        if there && is_there {
            if is_q {
                vector = q[from + (at / width) as usize];
            } else {
                vector = k[from + (at / width) as usize];
            }
        }
        vectors.push(vector);
    }
    vectors
}

/// A thread's components as f32.
#[cube]
pub(super) fn unpack<F: Float, N: Size, L: Numeric, M: Size>(
    vectors: &Sequence<Vector<L, M>>,
) -> Array<f32> {
    let width = comptime!(N::value() as u32);
    let mut values = Array::<f32>::new(comptime!(SHARE as usize));
    #[unroll]
    for v in 0..comptime!(SHARE / width) {
        let words = *vectors.index(v as usize);
        let vector = Vector::<f32, N>::cast_from(Vector::<F, N>::reinterpret(words));
        #[unroll]
        for j in 0..width {
            values[comptime!((v * width + j) as usize)] = vector[j as usize];
        }
    }
    values
}

/// Rounds a thread's components and stores them to the head that begins at `to`, of queries or of
/// keys.
#[cube]
pub(super) fn store<F: Float, N: Size>(
    values: &Array<f32>,
    q_out: &mut Array<Vector<F, N>>,
    k_out: &mut Array<Vector<F, N>>,
    is_q: bool,
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
            if is_q {
                q_out[to + (at / width) as usize] = Vector::cast_from(vector);
            } else {
                k_out[to + (at / width) as usize] = Vector::cast_from(vector);
            }
        }
    }
}

/// Turns a thread's pairs. Cosines begin at `first` of `turns`, sines [`MAX_PAIRS`] further.
#[cube]
pub(super) fn turn(
    values: &mut Array<f32>,
    turns: &SharedMemory<f32>,
    first: u32,
    place: Place,
    #[comptime] style: Style,
) {
    #[unroll]
    for i in 0..PART {
        let pair = place.pair + i;
        if pair < place.pairs {
            let (a, b) = comptime!(match style {
                Style::HalfSplit => (i, i + PART),
                _ => (2 * i, 2 * i + 1),
            });
            let cos = turns[(first + pair) as usize];
            let sin = turns[(first + MAX_PAIRS + pair) as usize];
            let x = values[a as usize];
            let y = values[b as usize];
            values[a as usize] = turn_first(x, y, cos, sin);
            values[b as usize] = turn_second(x, y, cos, sin);
        }
    }
}

/// Multiplies a thread's components by gains, which lie from `first` on in shared memory, and by a
/// factor.
#[cube]
pub(super) fn multiply(
    values: &mut Array<f32>,
    gains: &SharedMemory<f32>,
    first: u32,
    factor: f32,
    place: Place,
) {
    #[unroll]
    for i in 0..SHARE {
        let (at, is_there) = component(place, i);
        if is_there {
            values[i as usize] *= gains[(first + at) as usize] * factor;
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
    let mut step = 1u32;
    while step < lanes {
        sum += plane_shuffle_xor(sum, step);
        step *= 2u32;
    }
    sum
}

/// Places the gains of queries and, [`MAX_HEAD_DIM`] behind them, of keys in shared memory, as f32:
/// ones where there are none.
#[cube]
pub(super) fn fill_gains(
    gains: &mut SharedMemory<f32>,
    q_weight: &Array<u16>,
    k_weight: &Array<u16>,
    sizes: Sizes,
) {
    let mut i = UNIT_POS_X;
    while i < sizes.head_dim {
        let mut of_q = 1.0f32;
        if sizes.q_weight_dtype != 0u32 {
            of_q = parameter(q_weight, sizes.q_weight_dtype, i) + sizes.weight_offset;
        }
        let mut of_k = 1.0f32;
        if sizes.k_weight_dtype != 0u32 {
            of_k = parameter(k_weight, sizes.k_weight_dtype, i) + sizes.weight_offset;
        }
        gains[i as usize] = of_q;
        gains[(MAX_HEAD_DIM + i) as usize] = of_k;
        i += THREADS;
    }
}

pub(super) fn sizes(b: &mut Builder) -> SizesExpand {
    use ScalarType::{F32, U32};
    SizesExpand {
        q_heads: b.scalar("q_heads", U32).into(),
        k_heads: b.scalar("k_heads", U32).into(),
        head_dim: b.scalar("head_dim", U32).into(),
        lanes_log2: b.scalar("lanes_log2", U32).into(),
        q_weight_dtype: b.scalar("q_weight_dtype", U32).into(),
        k_weight_dtype: b.scalar("k_weight_dtype", U32).into(),
        weight_offset: b.scalar("weight_offset", F32).into(),
        epsilon: b.scalar("epsilon", F32).into(),
        inverse_length: b.scalar("inverse_length", F32).into(),
    }
}

pub(super) fn strides(b: &mut Builder, names: [&'static str; 3]) -> StridesExpand {
    let [batch, token, head] = names.map(|name| b.scalar(name, ScalarType::U64).into());
    StridesExpand { batch, token, head }
}
