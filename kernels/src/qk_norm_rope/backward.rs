//! The gradients of QK-norm and RoPE, one pass over memory.
//!
//! A block takes every `groups`-th token and keeps its share of the gradients of both gains in
//! registers, which it stores at the end; `column_sums` adds the shares. The gradient of a head is
//! rotated back first, and then is that of an RMSNorm.

use contract::qk_norm_rope::{MAX_HEAD_DIM, SHARE, THREADS};
use contract::rotation::{MAX_PAIRS, Style};
use cubecl::prelude::*;

use super::heads::{
    Place, Sizes, Strides, component, dot, fill_gains, load, multiply, place_of, sizes, start_of,
    store, strides, sum_of_lanes, turn, unpack,
};
use super::{choices, forms, tokens_per_batch};
use crate::Error;
use crate::emit::{Builder, Float as Dtype, Kernel, ScalarType, with_vector};
use crate::rotation::{
    AngleSource, PositionSource, angle_source, fill_turns, position_of, position_source,
};
use crate::rows::{Divisor, divide};

/// What the kernel takes of launches.
#[derive(CubeType, Clone, Copy)]
struct Launch {
    tokens: u32,
    /// Blocks.
    groups: u32,
    /// Whether the gradients of gains are asked for.
    has_dq_weight: u32,
    has_dk_weight: u32,
}

/// Adds a head's share to that of its gains, and makes its gradient of what was multiplied by them.
#[cube]
fn differentiate(
    xs: &Array<f32>,
    gradients: &mut Array<f32>,
    shares: &mut Array<f32>,
    gains: &SharedMemory<f32>,
    first: u32,
    place: Place,
    sizes: Sizes,
) {
    let lanes = 1u32 << sizes.lanes_log2;
    let squares = sum_of_lanes(dot(xs, xs), lanes);
    let scale = (squares * sizes.inverse_length + sizes.epsilon).inverse_sqrt();
    #[unroll]
    for i in 0..SHARE {
        shares[i as usize] += gradients[i as usize] * (xs[i as usize] * scale);
    }
    multiply(gradients, gains, first, 1.0f32, place);
    let products = sum_of_lanes(dot(gradients, xs), lanes);
    let product = products * sizes.inverse_length * scale;
    #[unroll]
    for i in 0..SHARE {
        let normal = xs[i as usize] * scale;
        gradients[i as usize] = scale * (gradients[i as usize] - normal * product);
    }
}

/// Adds the shares of the heads that a block had at a time, in order, and stores the sum.
#[cube]
fn store_share(
    shares: &Array<f32>,
    all: &mut SharedMemory<f32>,
    to: &mut Array<f32>,
    place: Place,
    sizes: Sizes,
) {
    // A thread's components lie a column apart, so that threads do not meet in a bank.
    #[unroll]
    for i in 0..SHARE {
        all[(i * THREADS + UNIT_POS_X) as usize] = shares[i as usize];
    }
    sync_cube();
    let lanes = 1u32 << sizes.lanes_log2;
    if UNIT_POS_X < lanes {
        #[unroll]
        for i in 0..SHARE {
            let (at, is_there) = component(place, i);
            if is_there {
                let mut sum = shares[i as usize];
                let mut other = UNIT_POS_X + lanes;
                while other < THREADS {
                    sum += all[(i * THREADS + other) as usize];
                    other += lanes;
                }
                to[CUBE_POS_X as usize * sizes.head_dim as usize + at as usize] = sum;
            }
        }
    }
    sync_cube();
}

/// Grid: `groups`. A thread reads all that it overwrites before it does, so that gradients may take the
/// place of those of the output.
#[cube]
fn backward<F: Float, N: Size, L: Numeric, M: Size>(
    q: &Array<Vector<L, M>>,
    k: &Array<Vector<L, M>>,
    dq_out: &Array<Vector<L, M>>,
    dk_out: &Array<Vector<L, M>>,
    dq: &mut Array<Vector<F, N>>,
    dk: &mut Array<Vector<F, N>>,
    dq_weights: &mut Array<f32>,
    dk_weights: &mut Array<f32>,
    positions: &Array<i32>,
    positions_i64: &Array<i64>,
    q_weight: &Array<u16>,
    k_weight: &Array<u16>,
    factors: &Array<f32>,
    cos_table: &Array<f32>,
    sin_table: &Array<f32>,
    frequencies: &Array<f32>,
    tokens_per_batch: Divisor,
    launch: Launch,
    position: PositionSource,
    angles: AngleSource,
    sizes: Sizes,
    q_strides: Strides,
    dq_out_strides: Strides,
    dq_strides: Strides,
    k_strides: Strides,
    dk_out_strides: Strides,
    dk_strides: Strides,
    #[comptime] style: Style,
) {
    let lane = UNIT_POS_X & ((1u32 << sizes.lanes_log2) - 1u32);
    let slot = UNIT_POS_X >> sizes.lanes_log2;
    let slots_log2 = comptime!(THREADS.ilog2()) - sizes.lanes_log2;
    let slots = 1u32 << slots_log2;
    let q_steps = (sizes.q_heads + slots - 1u32) >> slots_log2;
    let steps = q_steps + ((sizes.k_heads + slots - 1u32) >> slots_log2);
    let place = place_of(lane, angles.pairs, sizes.head_dim, style);
    let frequency = frequencies[UNIT_POS_X as usize];
    // Angles of two tokens, so that those of one are computed while the other's are still read.
    let mut turns = SharedMemory::<f32>::new(comptime!(4 * MAX_PAIRS as usize));
    let mut gains = SharedMemory::<f32>::new(comptime!(2 * MAX_HEAD_DIM as usize));
    fill_gains(&mut gains, q_weight, k_weight, sizes);
    let mut of_q = Array::<f32>::new(comptime!(SHARE as usize));
    let mut of_k = Array::<f32>::new(comptime!(SHARE as usize));
    #[unroll]
    for i in 0..SHARE {
        of_q[i as usize] = 0.0f32;
        of_k[i as usize] = 0.0f32;
    }
    let mut first = 0u32;
    let mut row = CUBE_POS_X;
    while row < launch.tokens {
        let batch = divide(row, tokens_per_batch);
        let token = row - batch * tokens_per_batch.size;
        let stands = position_of(positions, positions_i64, position, batch, token);
        fill_turns(
            &mut turns,
            first,
            stands,
            angles,
            factors,
            cos_table,
            sin_table,
            frequencies,
            frequency,
            THREADS,
        );
        sync_cube();
        let mut step = 0u32;
        while step < steps {
            let is_q = step < q_steps;
            let mut head = step * slots + slot;
            let mut heads = sizes.q_heads;
            if !is_q {
                head = (step - q_steps) * slots + slot;
                heads = sizes.k_heads;
            }
            let there = head < heads;
            let from = start_of(q_strides, k_strides, is_q, batch, token, head);
            let x = load::<L, M, N>(q, k, is_q, from, place, there);
            let from = start_of(dq_out_strides, dk_out_strides, is_q, batch, token, head);
            let dout = load::<L, M, N>(dq_out, dk_out, is_q, from, place, there);
            let xs = unpack::<F, N, L, M>(&x);
            let mut gradients = unpack::<F, N, L, M>(&dout);
            turn(&mut gradients, &turns, first, place, style);
            if is_q {
                differentiate(&xs, &mut gradients, &mut of_q, &gains, 0u32, place, sizes);
            } else {
                differentiate(
                    &xs,
                    &mut gradients,
                    &mut of_k,
                    &gains,
                    MAX_HEAD_DIM,
                    place,
                    sizes,
                );
            }
            let to = start_of(dq_strides, dk_strides, is_q, batch, token, head);
            store::<F, N>(&gradients, dq, dk, is_q, to, place, there);
            step += 1u32;
        }
        first = comptime!(2 * MAX_PAIRS) - first;
        row += launch.groups;
    }
    let mut all = SharedMemory::<f32>::new(comptime!((SHARE * THREADS) as usize));
    if launch.has_dq_weight != 0u32 {
        store_share(&of_q, &mut all, dq_weights, place, sizes);
    }
    if launch.has_dk_weight != 0u32 {
        store_share(&of_k, &mut all, dk_weights, place, sizes);
    }
}

fn launch(b: &mut Builder) -> LaunchExpand {
    let [tokens, groups, has_dq_weight, has_dk_weight] =
        ["tokens", "groups", "has_dq_weight", "has_dk_weight"]
            .map(|name| b.scalar(name, ScalarType::U32).into());
    LaunchExpand {
        tokens,
        groups,
        has_dq_weight,
        has_dk_weight,
    }
}

macro_rules! kernel {
    ($b:ident, $f:ty, $n:ty, $l:ty, $m:ty, $style:ident) => {{
        let ty = $b.type_of::<Vector<$f, $n>>();
        let loaded = $b.type_of::<Vector<$l, $m>>();
        let (narrow, wide) = ($b.type_of::<i32>(), $b.type_of::<i64>());
        let (halves, real) = ($b.type_of::<u16>(), $b.type_of::<f32>());
        let [q, k] = ["q", "k"].map(|name| $b.read(name, loaded));
        // May be overwritten in place, hence not `read`.
        let [dq_out, dk_out] = ["dq_out", "dk_out"].map(|name| $b.write(name, loaded));
        let [dq, dk] = ["dq", "dk"].map(|name| $b.write(name, ty));
        let [dq_weights, dk_weights] =
            ["dq_weights", "dk_weights"].map(|name| $b.write(name, real));
        let positions = $b.read("positions", narrow);
        let positions_i64 = $b.read("positions_i64", wide);
        let [q_weight, k_weight] = ["q_weight", "k_weight"].map(|name| $b.read(name, halves));
        let [factors, cos_table, sin_table] =
            ["factors", "cos_table", "sin_table"].map(|name| $b.read(name, real));
        let frequencies = $b.by_value("frequencies", MAX_PAIRS as usize);
        let tokens_per_batch = tokens_per_batch(&mut $b);
        let launch = launch(&mut $b);
        let position = position_source(&mut $b);
        let angles = angle_source(&mut $b);
        let sizes = sizes(&mut $b);
        let [
            q_strides,
            dq_out_strides,
            dq_strides,
            k_strides,
            dk_out_strides,
            dk_strides,
        ] = [
            ["q_batch", "q_token", "q_head"],
            ["dq_out_batch", "dq_out_token", "dq_out_head"],
            ["dq_batch", "dq_token", "dq_head"],
            ["k_batch", "k_token", "k_head"],
            ["dk_out_batch", "dk_out_token", "dk_out_head"],
            ["dk_batch", "dk_token", "dk_head"],
        ]
        .map(|names| strides(&mut $b, names));
        backward::expand::<$f, $n, $l, $m>(
            $b.scope(),
            q.into(),
            k.into(),
            dq_out.into(),
            dk_out.into(),
            dq.into(),
            dk.into(),
            dq_weights.into(),
            dk_weights.into(),
            positions.into(),
            positions_i64.into(),
            q_weight.into(),
            k_weight.into(),
            factors.into(),
            cos_table.into(),
            sin_table.into(),
            frequencies.into(),
            tokens_per_batch,
            launch,
            position,
            angles,
            sizes,
            q_strides,
            dq_out_strides,
            dq_strides,
            k_strides,
            dk_out_strides,
            dk_strides,
            $style,
        );
    }};
}

fn kernel(dtype: Dtype, style: Style, vectors: bool) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    with_vector!(dtype, F, N => match vectors {
        true => kernel!(b, F, N, u32, Const<4>, style),
        false => kernel!(b, F, Const<1>, F, Const<1>, style),
    });
    let (choices, name) = choices(dtype, style, vectors);
    b.finish(format!("qk_norm_rope_backward_{name}"), choices, THREADS)
}

/// Every form of the backward pass.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    forms(kernel)
}
