//! The gradients of QK-norm and RoPE, one pass over memory.
//!
//! A block has a range of tokens, and goes first over the heads of queries and then over those of
//! keys. Angles are computed for several tokens at a time, whose heads then follow one another: the
//! next ones are loaded while these are computed. A thread keeps its share of the gain's gradient in
//! registers; the block adds its threads' up at the end, and `column_sums` those of blocks.
//!
//! With `y = R(w · s x)` and `s = 1 / rms(x)`: `t = s Rᵀ dy`, `dw += t x`, `h = t w` and
//! `dx = h - x (h · x) s² / n`.

use contract::qk_norm_rope::{SHARE, THREADS};
use contract::rotation::{MAX_PAIRS, Style};
use cubecl::prelude::*;

use super::heads::{
    Sizes, Strides, component_at, dot, gains_of, load_head, place_of, sizes, start_of, store_head,
    strides, sum_of_lanes, unpack,
};
use super::tokens::{
    Count, Launch, Quad, TURNS, Turning, count, distance, fill_turns, launch, row_of, step, turn,
    turning, work_of,
};
use super::{choices, forms};
use crate::Error;
use crate::emit::{Builder, Float as Dtype, Kernel, ScalarType, with_vector};

/// Queries or keys.
#[derive(CubeType, Clone, Copy)]
struct Heads {
    count: Count,
    x: Strides,
    dout: Strides,
    dx: Strides,
    /// A `contract::Float`, or 0 for none.
    weight_dtype: u32,
    has_dweight: u32,
}

/// Adds the shares of a block's threads, in order, and stores the sums.
#[cube]
fn store_share(
    shares: &Array<f32>,
    all: &mut SharedMemory<f32>,
    to: &mut Array<f32>,
    group: u32,
    pairs: u32,
    sizes: Sizes,
    #[comptime] style: Style,
) {
    // A thread's components lie a column so that threads do not meet in a bank.
    #[unroll]
    for i in 0..SHARE {
        all[(i * THREADS + UNIT_POS_X) as usize] = shares[i as usize];
    }
    sync_cube();
    let lanes = 1u32 << sizes.lanes_log2;
    let mut c = UNIT_POS_X;
    while c < lanes * SHARE {
        let lane = c & (lanes - 1u32);
        let i = c >> sizes.lanes_log2;
        let place = place_of(lane, pairs, sizes.head_dim, style);
        let (at, is_there) = component_at(place, i);
        if is_there {
            let mut sum = 0.0f32;
            let mut other = lane;
            while other < THREADS {
                sum += all[(i * THREADS + other) as usize];
                other += lanes;
            }
            to[group as usize * sizes.head_dim as usize + at as usize] = sum;
        }
        c += THREADS;
    }
    sync_cube();
}

/// The gradients of a block's queries or keys. A thread reads all that it overwrites before it does, so
/// that gradients may take the place of those of the output.
#[cube]
fn differentiate<F: Float, N: Size, L: Numeric, M: Size>(
    x: &Array<Vector<L, M>>,
    dout: &Array<Vector<L, M>>,
    dx: &mut Array<Vector<F, N>>,
    dweights: &mut Array<f32>,
    weight: &Array<u16>,
    turns: &mut SharedMemory<Vector<f32, Quad>>,
    all: &mut SharedMemory<f32>,
    positions: &Array<i32>,
    positions_i64: &Array<i64>,
    factors: &Array<f32>,
    cos_table: &Array<f32>,
    sin_table: &Array<f32>,
    frequencies: &Array<f32>,
    group: u32,
    launch: Launch,
    turning: Turning,
    heads: Heads,
    sizes: Sizes,
    #[comptime] style: Style,
    #[comptime] dtype: Dtype,
) {
    let lanes = 1u32 << sizes.lanes_log2;
    let lane = UNIT_POS_X & (lanes - 1u32);
    let slot = UNIT_POS_X >> sizes.lanes_log2;
    let slots = THREADS >> sizes.lanes_log2;
    let pairs = turning.angles.pairs;
    let place = place_of(lane, pairs, sizes.head_dim, style);
    let gains = gains_of(weight, heads.weight_dtype, place, sizes);
    let mut shares = Array::<f32>::new(comptime!(SHARE as usize));
    #[unroll]
    for i in 0..SHARE {
        shares[i as usize] = 0.0f32;
    }
    let mut xs = Array::<Vector<L, M>>::new(comptime!(SHARE as usize / N::value()));
    let mut douts = Array::<Vector<L, M>>::new(comptime!(SHARE as usize / N::value()));
    let mut first = group * launch.tokens_per_block;
    let end = u32::min(first + launch.tokens_per_block, launch.tokens);
    while first < end {
        let count = u32::min(launch.tokens_at_once, end - first);
        let rows = count * heads.count.of_token.size;
        let at = row_of(first, slot, heads.count.of_token, turning);
        let mut of_these = at.of_these;
        let mut token = at.token;
        let mut head = at.head;
        let mut from_x = start_of(heads.x, at.batch, at.token, at.head);
        let mut from_dout = start_of(heads.dout, at.batch, at.token, at.head);
        let mut to = start_of(heads.dx, at.batch, at.token, at.head);
        let mut row = slot;
        load_head::<L, M, N>(x, &mut xs, from_x, place, row < rows);
        load_head::<L, M, N>(dout, &mut douts, from_dout, place, row < rows);
        // The angles of the tokens before are still read.
        sync_cube();
        fill_turns(
            turns,
            first,
            count,
            turning,
            positions,
            positions_i64,
            factors,
            cos_table,
            sin_table,
            frequencies,
        );
        sync_cube();
        let mut begin = 0u32;
        while begin < rows {
            let is_row = row < rows;
            let its_angles = 2u32 * of_these * turning.quads.size;
            let its_place = to;
            let values = unpack::<F, N, L, M>(&xs, dtype);
            let mut gradients = unpack::<F, N, L, M>(&douts, dtype);
            begin += slots;
            row += slots;
            let step = step(token, head, heads.count, turning.tokens_per_batch);
            token = step.token;
            head = step.head;
            of_these += step.tokens;
            from_x += distance(step, heads.x);
            from_dout += distance(step, heads.dout);
            to += distance(step, heads.dx);
            load_head::<L, M, N>(x, &mut xs, from_x, place, row < rows);
            load_head::<L, M, N>(dout, &mut douts, from_dout, place, row < rows);
            // Behind the last row there is no token, and maybe no angle.
            if is_row {
                let quads = turning.quads.size;
                let width = comptime!(N::value() as u32);
                turn(
                    &mut gradients,
                    turns,
                    its_angles,
                    quads,
                    place,
                    style,
                    width,
                );
            }
            let squares = sum_of_lanes(dot(&values, &values), lanes);
            let scale = (squares * sizes.inverse_length + sizes.epsilon).inverse_sqrt();
            #[unroll]
            for i in 0..SHARE {
                let scaled = gradients[i as usize] * scale;
                shares[i as usize] = fma(scaled, values[i as usize], shares[i as usize]);
                gradients[i as usize] = scaled * gains[i as usize];
            }
            let product = sum_of_lanes(dot(&gradients, &values), lanes);
            let back = -product * sizes.inverse_length * scale * scale;
            #[unroll]
            for i in 0..SHARE {
                gradients[i as usize] = fma(values[i as usize], back, gradients[i as usize]);
            }
            store_head::<F, N>(&gradients, dx, its_place, place, is_row);
        }
        first += count;
    }
    if heads.has_dweight != 0u32 {
        store_share(&shares, all, dweights, group, pairs, sizes, style);
    }
}

/// Grid: `groups`, or that of queries and that of keys.
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
    launch: Launch,
    turning: Turning,
    sizes: Sizes,
    of_q: Heads,
    of_k: Heads,
    #[comptime] style: Style,
    #[comptime] dtype: Dtype,
) {
    let mut turns = SharedMemory::<Vector<f32, Quad>>::new(comptime!(TURNS));
    let mut all = SharedMemory::<f32>::new(comptime!((SHARE * THREADS) as usize));
    let work = work_of(launch, of_q.count.of_token, false);
    if work.any {
        differentiate::<F, N, L, M>(
            q,
            dq_out,
            dq,
            dq_weights,
            q_weight,
            &mut turns,
            &mut all,
            positions,
            positions_i64,
            factors,
            cos_table,
            sin_table,
            frequencies,
            work.group,
            launch,
            turning,
            of_q,
            sizes,
            style,
            dtype,
        );
    }
    let work = work_of(launch, of_k.count.of_token, true);
    if work.any {
        differentiate::<F, N, L, M>(
            k,
            dk_out,
            dk,
            dk_weights,
            k_weight,
            &mut turns,
            &mut all,
            positions,
            positions_i64,
            factors,
            cos_table,
            sin_table,
            frequencies,
            work.group,
            launch,
            turning,
            of_k,
            sizes,
            style,
            dtype,
        );
    }
}

fn heads(
    b: &mut Builder,
    of_token: [&'static str; 3],
    steps: [&'static str; 2],
    [x, dout, dx]: [[&'static str; 6]; 3],
    flags: [&'static str; 2],
) -> HeadsExpand {
    let [weight_dtype, has_dweight] = flags.map(|name| b.scalar(name, ScalarType::U32).into());
    HeadsExpand {
        count: count(b, of_token, steps),
        x: strides(b, x),
        dout: strides(b, dout),
        dx: strides(b, dx),
        weight_dtype,
        has_dweight,
    }
}

macro_rules! kernel {
    ($b:ident, $f:ty, $n:ty, $l:ty, $m:ty, $style:ident, $dtype:ident) => {{
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
        let launch = launch(&mut $b);
        let turning = turning(&mut $b);
        let sizes = sizes(&mut $b);
        let of_q = heads(
            &mut $b,
            ["q_heads", "q_heads_multiplier", "q_heads_shift"],
            ["q_step_tokens", "q_step_heads"],
            [
                [
                    "q_batch",
                    "q_token",
                    "q_head",
                    "q_step",
                    "q_step_token",
                    "q_step_batch",
                ],
                [
                    "dq_out_batch",
                    "dq_out_token",
                    "dq_out_head",
                    "dq_out_step",
                    "dq_out_step_token",
                    "dq_out_step_batch",
                ],
                [
                    "dq_batch",
                    "dq_token",
                    "dq_head",
                    "dq_step",
                    "dq_step_token",
                    "dq_step_batch",
                ],
            ],
            ["q_weight_dtype", "has_dq_weight"],
        );
        let of_k = heads(
            &mut $b,
            ["k_heads", "k_heads_multiplier", "k_heads_shift"],
            ["k_step_tokens", "k_step_heads"],
            [
                [
                    "k_batch",
                    "k_token",
                    "k_head",
                    "k_step",
                    "k_step_token",
                    "k_step_batch",
                ],
                [
                    "dk_out_batch",
                    "dk_out_token",
                    "dk_out_head",
                    "dk_out_step",
                    "dk_out_step_token",
                    "dk_out_step_batch",
                ],
                [
                    "dk_batch",
                    "dk_token",
                    "dk_head",
                    "dk_step",
                    "dk_step_token",
                    "dk_step_batch",
                ],
            ],
            ["k_weight_dtype", "has_dk_weight"],
        );
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
            launch,
            turning,
            sizes,
            of_q,
            of_k,
            $style,
            $dtype,
        );
    }};
}

fn kernel(dtype: Dtype, style: Style, vectors: bool) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    with_vector!(dtype, F, N => match vectors {
        true => kernel!(b, F, N, u32, Const<4>, style, dtype),
        false => kernel!(b, F, Const<1>, F, Const<1>, style, dtype),
    });
    let (choices, name) = choices(dtype, style, vectors);
    b.finish(format!("qk_norm_rope_backward_{name}"), choices, THREADS)
}

/// Every form of the backward pass.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    forms(kernel)
}
