//! QK-norm and RoPE in one pass: every head of queries and keys is scaled by its root mean square and
//! gains, then rotated. It is read once and written once.
//!
//! | file | what it is for |
//! |-|-|
//! | `mod.rs` | the forward pass |
//! | `heads` | what a thread has of a head |
//! | `backward` | the gradients |

pub mod backward;
mod heads;

use contract::qk_norm_rope::{MAX_HEAD_DIM, THREADS};
use contract::rotation::{MAX_PAIRS, Style};
use cubecl::prelude::*;

use crate::Error;
use crate::emit::{Builder, Float as Dtype, Kernel, with_vector};
use crate::rotation::{
    AngleSource, PositionSource, angle_source, fill_turns, position_of, position_source, style_name,
};
use crate::rows::{self, Divisor, divide};
use heads::{
    Sizes, Strides, dot, fill_gains, load, multiply, place_of, sizes, start_of, store, strides,
    sum_of_lanes, turn, unpack,
};

/// Grid: tokens times the blocks of each, which have as many heads as threads for them. A thread reads
/// all that it overwrites before it does, so that outputs may be inputs.
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
    tokens_per_batch: Divisor,
    blocks_per_token: Divisor,
    position: PositionSource,
    angles: AngleSource,
    sizes: Sizes,
    q_strides: Strides,
    q_out_strides: Strides,
    k_strides: Strides,
    k_out_strides: Strides,
    #[comptime] style: Style,
) {
    // Of all loads the one that the most work waits for.
    let frequency = frequencies[UNIT_POS_X as usize];
    let row = divide(CUBE_POS_X, blocks_per_token);
    let batch = divide(row, tokens_per_batch);
    let token = row - batch * tokens_per_batch.size;
    let lanes = 1u32 << sizes.lanes_log2;
    let lane = UNIT_POS_X & (lanes - 1u32);
    let block = CUBE_POS_X - row * blocks_per_token.size;
    let head = (block * THREADS + UNIT_POS_X) >> sizes.lanes_log2;
    let there = head < sizes.q_heads + sizes.k_heads;
    let is_q = head < sizes.q_heads;
    let mut of_its = head;
    if !is_q {
        of_its = head - sizes.q_heads;
    }
    let place = place_of(lane, angles.pairs, sizes.head_dim, style);

    // Heads are on their way while angles are computed.
    let from = start_of(q_strides, k_strides, is_q, batch, token, of_its);
    let vectors = load::<L, M, N>(q, k, is_q, from, place, there);

    let stands = position_of(positions, positions_i64, position, batch, token);
    let mut turns = SharedMemory::<f32>::new(comptime!(2 * MAX_PAIRS as usize));
    let mut gains = SharedMemory::<f32>::new(comptime!(2 * MAX_HEAD_DIM as usize));
    fill_turns(
        &mut turns,
        0u32,
        stands,
        angles,
        factors,
        cos_table,
        sin_table,
        frequencies,
        frequency,
        THREADS,
    );
    fill_gains(&mut gains, q_weight, k_weight, sizes);
    sync_cube();

    let mut values = unpack::<F, N, L, M>(&vectors);
    let squares = sum_of_lanes(dot(&values, &values), lanes);
    let scale = (squares * sizes.inverse_length + sizes.epsilon).inverse_sqrt();
    let mut first = 0u32;
    if !is_q {
        first += MAX_HEAD_DIM;
    }
    multiply(&mut values, &gains, first, scale, place);
    turn(&mut values, &turns, 0u32, place, style);
    let to = start_of(q_out_strides, k_out_strides, is_q, batch, token, of_its);
    store::<F, N>(&values, q_out, k_out, is_q, to, place, there);
}

macro_rules! kernel {
    ($b:ident, $f:ty, $n:ty, $l:ty, $m:ty, $style:ident) => {{
        let ty = $b.type_of::<Vector<$f, $n>>();
        let loaded = $b.type_of::<Vector<$l, $m>>();
        let (narrow, wide) = ($b.type_of::<i32>(), $b.type_of::<i64>());
        let (halves, real) = ($b.type_of::<u16>(), $b.type_of::<f32>());
        // Queries and keys may be overwritten in place, hence not `read`.
        let q = $b.write("q", loaded);
        let k = $b.write("k", loaded);
        let q_out = $b.write("q_out", ty);
        let k_out = $b.write("k_out", ty);
        let positions = $b.read("positions", narrow);
        let positions_i64 = $b.read("positions_i64", wide);
        let q_weight = $b.read("q_weight", halves);
        let k_weight = $b.read("k_weight", halves);
        let factors = $b.read("factors", real);
        let cos_table = $b.read("cos_table", real);
        let sin_table = $b.read("sin_table", real);
        let frequencies = $b.by_value("frequencies", MAX_PAIRS as usize);
        let tokens_per_batch = tokens_per_batch(&mut $b);
        let blocks_per_token = rows::divisor(
            &mut $b,
            [
                "blocks_per_token",
                "blocks_per_token_multiplier",
                "blocks_per_token_shift",
            ],
        );
        let position = position_source(&mut $b);
        let angles = angle_source(&mut $b);
        let sizes = sizes(&mut $b);
        let [q_strides, q_out_strides, k_strides, k_out_strides] = [
            ["q_batch", "q_token", "q_head"],
            ["q_out_batch", "q_out_token", "q_out_head"],
            ["k_batch", "k_token", "k_head"],
            ["k_out_batch", "k_out_token", "k_out_head"],
        ]
        .map(|names| strides(&mut $b, names));
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
            tokens_per_batch,
            blocks_per_token,
            position,
            angles,
            sizes,
            q_strides,
            q_out_strides,
            k_strides,
            k_out_strides,
            $style,
        );
    }};
}

fn tokens_per_batch(b: &mut Builder) -> rows::DivisorExpand {
    let names = [
        "tokens_per_batch",
        "tokens_per_batch_multiplier",
        "tokens_per_batch_shift",
    ];
    rows::divisor(b, names)
}

/// What tells the kernels of a pass apart, and the end of their names.
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
        true => kernel!(b, F, N, u32, Const<4>, style),
        false => kernel!(b, F, Const<1>, F, Const<1>, style),
    });
    let (choices, name) = choices(dtype, style, vectors);
    let kernel = b.finish(format!("qk_norm_rope_{name}"), choices, THREADS)?;
    Ok(match (dtype, vectors) {
        // The compiler aims at more, and spills for it on sm_80.
        (Dtype::F32, true) => kernel.for_blocks(10),
        _ => kernel,
    })
}

/// Every form of the forward pass.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    forms(kernel)
}
