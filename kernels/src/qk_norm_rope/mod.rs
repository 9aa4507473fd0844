//! QK-norm and RoPE in one pass: every head of queries and keys is scaled by its root mean square and
//! gains, then rotated. It is read once and written once.
//!
//! A block has a range of tokens, and goes first over the heads of queries and then over those of
//! keys; of few tokens several blocks share the heads. Angles are computed for several tokens at a
//! time, whose heads then follow one another: the next ones are loaded while these are computed.
//!
//! | file | what it is for |
//! |-|-|
//! | `mod.rs` | the forward pass |
//! | `heads` | what a thread has of a head |
//! | `tokens` | what a block has of tokens, and their angles |
//! | `backward` | the gradients |

pub mod backward;
mod heads;
mod tokens;

use contract::qk_norm_rope::{SHARE, THREADS};
use contract::rotation::{MAX_PAIRS, Style};
use cubecl::prelude::*;

use crate::Error;
use crate::emit::{Builder, Float as Dtype, Kernel, ScalarType, with_vector};
use crate::rotation::style_name;
use heads::{
    Sizes, Strides, dot, gains_of, load_head, place_of, sizes, start_of, store_head, strides,
    sum_of_lanes, unpack,
};
use tokens::{
    Count, Launch, Quad, TURNS, Turning, Work, count, distance, fill_turns, launch, row_of, step,
    turn, turning, work_of,
};

/// Queries or keys.
#[derive(CubeType, Clone, Copy)]
struct Heads {
    count: Count,
    x: Strides,
    out: Strides,
    /// A `contract::Float`, or 0 for none.
    weight_dtype: u32,
}

/// A block's queries or keys. A thread reads all that it overwrites before it does, so that outputs may
/// be inputs.
#[cube]
fn normalise<F: Float, N: Size, L: Numeric, M: Size>(
    x: &Array<Vector<L, M>>,
    out: &mut Array<Vector<F, N>>,
    weight: &Array<u16>,
    turns: &mut SharedMemory<Vector<f32, Quad>>,
    positions: &Array<i32>,
    positions_i64: &Array<i64>,
    factors: &Array<f32>,
    cos_table: &Array<f32>,
    sin_table: &Array<f32>,
    frequencies: &Array<f32>,
    work: Work,
    launch: Launch,
    turning: Turning,
    heads: Heads,
    sizes: Sizes,
    #[comptime] style: Style,
    #[comptime] dtype: Dtype,
) {
    let lanes = 1u32 << sizes.lanes_log2;
    let lane = UNIT_POS_X & (lanes - 1u32);
    let slots = THREADS >> sizes.lanes_log2;
    // Of the first row that the part has.
    let slot = work.part * slots + (UNIT_POS_X >> sizes.lanes_log2);
    let place = place_of(lane, turning.angles.pairs, sizes.head_dim, style);
    let gains = gains_of(weight, heads.weight_dtype, place, sizes);
    let mut xs = Array::<Vector<L, M>>::new(comptime!(SHARE as usize / N::value()));
    let mut first = work.group * launch.tokens_per_block;
    let end = u32::min(first + launch.tokens_per_block, launch.tokens);
    while first < end {
        let count = u32::min(launch.tokens_at_once, end - first);
        let rows = count * heads.count.of_token.size;
        let at = row_of(first, slot, heads.count.of_token, turning);
        let mut of_these = at.of_these;
        let mut token = at.token;
        let mut head = at.head;
        let mut from = start_of(heads.x, at.batch, at.token, at.head);
        let mut to = start_of(heads.out, at.batch, at.token, at.head);
        let mut row = slot;
        load_head::<L, M, N>(x, &mut xs, from, place, row < rows);
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
        let mut begin = work.part * slots;
        while begin < rows {
            let is_row = row < rows;
            let its_angles = 2u32 * of_these * turning.quads.size;
            let its_place = to;
            let mut values = unpack::<F, N, L, M>(&xs, dtype);
            begin += work.parts * slots;
            row += work.parts * slots;
            let step = step(token, head, heads.count, turning.tokens_per_batch);
            token = step.token;
            head = step.head;
            of_these += step.tokens;
            from += distance(step, heads.x);
            to += distance(step, heads.out);
            load_head::<L, M, N>(x, &mut xs, from, place, row < rows);
            let squares = sum_of_lanes(dot(&values, &values), lanes);
            let scale = (squares * sizes.inverse_length + sizes.epsilon).inverse_sqrt();
            #[unroll]
            for i in 0..SHARE {
                values[i as usize] *= gains[i as usize] * scale;
            }
            // Behind the last row there is no token, and maybe no angle.
            if is_row {
                turn(
                    &mut values,
                    turns,
                    its_angles,
                    turning.quads.size,
                    place,
                    style,
                    comptime!(N::value() as u32),
                );
            }
            store_head::<F, N>(&values, out, its_place, place, is_row);
        }
        first += count;
    }
}

/// Grid: groups of tokens, or their queries' parts and their keys' parts.
#[cube]
fn qk_norm_rope<F: Float, N: Size, L: Numeric, M: Size>(
    q: &Array<Vector<L, M>>,
    k: &Array<Vector<L, M>>,
    q_out: &mut Array<Vector<F, N>>,
    k_out: &mut Array<Vector<F, N>>,
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
    let work = work_of(launch, of_q.count.of_token, false);
    if work.any {
        normalise::<F, N, L, M>(
            q,
            q_out,
            q_weight,
            &mut turns,
            positions,
            positions_i64,
            factors,
            cos_table,
            sin_table,
            frequencies,
            work,
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
        normalise::<F, N, L, M>(
            k,
            k_out,
            k_weight,
            &mut turns,
            positions,
            positions_i64,
            factors,
            cos_table,
            sin_table,
            frequencies,
            work,
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
    [x, out]: [[&'static str; 6]; 2],
    weight_dtype: &'static str,
) -> HeadsExpand {
    HeadsExpand {
        count: count(b, of_token, steps),
        x: strides(b, x),
        out: strides(b, out),
        weight_dtype: b.scalar(weight_dtype, ScalarType::U32).into(),
    }
}

macro_rules! kernel {
    ($b:ident, $f:ty, $n:ty, $l:ty, $m:ty, $style:ident, $dtype:ident) => {{
        let ty = $b.type_of::<Vector<$f, $n>>();
        let loaded = $b.type_of::<Vector<$l, $m>>();
        let (narrow, wide) = ($b.type_of::<i32>(), $b.type_of::<i64>());
        let (halves, real) = ($b.type_of::<u16>(), $b.type_of::<f32>());
        // Queries and keys may be overwritten in place, hence not `read`.
        let [q, k] = ["q", "k"].map(|name| $b.write(name, loaded));
        let [q_out, k_out] = ["q_out", "k_out"].map(|name| $b.write(name, ty));
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
                    "q_out_batch",
                    "q_out_token",
                    "q_out_head",
                    "q_out_step",
                    "q_out_step_token",
                    "q_out_step_batch",
                ],
            ],
            "q_weight_dtype",
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
                    "k_out_batch",
                    "k_out_token",
                    "k_out_head",
                    "k_out_step",
                    "k_out_step_token",
                    "k_out_step_batch",
                ],
            ],
            "k_weight_dtype",
        );
        qk_norm_rope::expand::<$f, $n, $l, $m>(
            $b.scope(),
            q.into(),
            k.into(),
            q_out.into(),
            k_out.into(),
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

/// What tells the kernels of a pass and the end of their names.
fn choices(dtype: Dtype, style: Style, vectors: bool) -> (Vec<(&'static str, u32)>, String) {
    let width = if vectors { dtype.per_vector() } else { 1 };
    let name = format!("{}_{}x{width}", style_name(style), dtype.name());
    let choices = vec![
        ("dtype", dtype.code()),
        ("style", style.code()),
        ("width", width),
    ];
    (choices, name)
}

/// Every form: dtype by style, in vectors and by element.
fn forms(kernel: fn(Dtype, Style, bool) -> Result<Kernel, Error>) -> Result<Vec<Kernel>, Error> {
    let mut kernels = Vec::new();
    for dtype in Dtype::ALL.iter().copied() {
        for style in [Style::HalfSplit, Style::Interleaved] {
            for vectors in [true, false] {
                kernels.push(kernel(dtype, style, vectors)?);
            }
        }
    }
    Ok(kernels)
}

fn kernel(dtype: Dtype, style: Style, vectors: bool) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    with_vector!(dtype, F, N => match vectors {
        true => kernel!(b, F, N, u32, Const<4>, style, dtype),
        false => kernel!(b, F, Const<1>, F, Const<1>, style, dtype),
    });
    let (choices, name) = choices(dtype, style, vectors);
    let kernel = b.finish(format!("qk_norm_rope_{name}"), choices, THREADS)?;
    // Left to choose, the compiler takes fewer, and spills some in vain: of vectors of pairs on sm_80,
    // of elements on Blackwell.
    Ok(match (vectors, style) {
        (true, Style::HalfSplit) => kernel,
        (true, _) => kernel.for_blocks(5),
        (false, _) => kernel.with_registers(128),
    })
}

/// Every form of the forward pass.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    forms(kernel)
}
