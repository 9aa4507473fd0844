//! Rotary position embedding of queries and keys in one launch: each block of a token computes its sines and cosines once, for all heads
//! that it turns.

use contract::rotation::{MAX_PAIRS, Style, THREADS};
use cubecl::prelude::*;

use crate::Error;
use crate::emit::{Builder, Float as Dtype, Kernel, ScalarType, with_vector};
use crate::rotation::{
    AngleSource, PositionSource, angle_source, fill_turns, load_pairs, position_of,
    position_source, store_turned, style_name,
};
use crate::rows::{self, Divisor, divide};

/// Where heads of an input and its output lie, in vectors.
#[derive(CubeType, Clone, Copy)]
struct Heads {
    count: u32,
    in_batch: usize,
    in_token: usize,
    in_head: usize,
    out_batch: usize,
    out_token: usize,
    out_head: usize,
}

/// Where a token's heads begin, in vectors.
#[derive(CubeType, Clone, Copy)]
struct Starts {
    from: usize,
    to: usize,
}

#[cube]
fn starts(heads: Heads, batch: u32, token: u32) -> Starts {
    Starts {
        from: batch as usize * heads.in_batch + token as usize * heads.in_token,
        to: batch as usize * heads.out_batch + token as usize * heads.out_token,
    }
}

/// `per_head` items of every head are rotated: vectors of one half, vectors of pairs, or pairs. `passed` vectors behind the rotated
/// ones are copied.
///
/// Grid: tokens times the blocks of each.
#[cube]
fn rope<F: Float, N: Size, L: Scalar, M: Size>(
    q: &Array<Vector<L, M>>,
    k: &Array<Vector<L, M>>,
    q_out: &mut Array<Vector<F, N>>,
    k_out: &mut Array<Vector<F, N>>,
    positions: &Array<i32>,
    positions_i64: &Array<i64>,
    factors: &Array<f32>,
    cos_table: &Array<f32>,
    sin_table: &Array<f32>,
    frequencies: &Array<f32>,
    tokens_per_batch: Divisor,
    blocks_per_token: Divisor,
    q_heads: Heads,
    k_heads: Heads,
    position: PositionSource,
    angles: AngleSource,
    per_head: Divisor,
    per_half: u32,
    rotated: u32,
    passed: u32,
    #[comptime] style: Style,
) {
    let width = comptime!(N::value() as u32);
    // Of all loads the one that the most work waits for.
    let frequency = frequencies[UNIT_POS_X as usize];
    let row = divide(CUBE_POS_X, blocks_per_token);
    let first = (CUBE_POS_X - row * blocks_per_token.size) * THREADS + UNIT_POS_X;
    let step = blocks_per_token.size * THREADS;
    let batch = divide(row, tokens_per_batch);
    let token = row - batch * tokens_per_batch.size;
    let q_starts = starts(q_heads, batch, token);
    let k_starts = starts(k_heads, batch, token);

    // What is turned is on its way while the angles are computed.
    let items = (q_heads.count + k_heads.count) * per_head.size;
    let mut item = first;
    let mut head = divide(item, per_head);
    let mut vector = item - head * per_head.size;
    let mut pairs = Array::<Vector<L, M>>::new(2usize);
    if item < items {
        load(
            q, k, &mut pairs, q_starts, k_starts, q_heads, k_heads, head, vector, per_half, width,
            style,
        );
    }

    let stands = position_of(positions, positions_i64, position, batch, token);
    let mut turns = SharedMemory::<f32>::new(comptime!(2 * MAX_PAIRS as usize));
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
    sync_cube();

    while item < items {
        if head < q_heads.count {
            let to = q_starts.to + head as usize * q_heads.out_head;
            store_turned::<F, F, N, L, M>(
                &pairs, q_out, to, vector, per_half, 0u32, &turns, 1.0f32, MAX_PAIRS, style, false,
            );
        } else {
            let to = k_starts.to + (head - q_heads.count) as usize * k_heads.out_head;
            store_turned::<F, F, N, L, M>(
                &pairs, k_out, to, vector, per_half, 0u32, &turns, 1.0f32, MAX_PAIRS, style, false,
            );
        }
        item += step;
        if item < items {
            head = divide(item, per_head);
            vector = item - head * per_head.size;
            load(
                q, k, &mut pairs, q_starts, k_starts, q_heads, k_heads, head, vector, per_half,
                width, style,
            );
        }
    }
    let items = (q_heads.count + k_heads.count) * passed;
    let mut item = first;
    while item < items {
        let head = item / passed;
        let vector = (rotated + item % passed) as usize;
        if head < q_heads.count {
            let from = q_starts.from + head as usize * q_heads.in_head;
            let to = q_starts.to + head as usize * q_heads.out_head;
            q_out[to + vector] = Vector::<F, N>::reinterpret(q[from + vector]);
        } else {
            let head = head - q_heads.count;
            let from = k_starts.from + head as usize * k_heads.in_head;
            let to = k_starts.to + head as usize * k_heads.out_head;
            k_out[to + vector] = Vector::<F, N>::reinterpret(k[from + vector]);
        }
        item += step;
    }
}

/// Loads what an item turns, of the queries or, behind them, of the keys.
#[cube]
fn load<L: Scalar, M: Size>(
    q: &Array<Vector<L, M>>,
    k: &Array<Vector<L, M>>,
    pairs: &mut Array<Vector<L, M>>,
    q_starts: Starts,
    k_starts: Starts,
    q_heads: Heads,
    k_heads: Heads,
    head: u32,
    vector: u32,
    per_half: u32,
    #[comptime] width: u32,
    #[comptime] style: Style,
) {
    if head < q_heads.count {
        let from = q_starts.from + head as usize * q_heads.in_head;
        load_pairs(q, pairs, from, vector, per_half, width, style);
    } else {
        let from = k_starts.from + (head - q_heads.count) as usize * k_heads.in_head;
        load_pairs(k, pairs, from, vector, per_half, width, style);
    }
}

fn heads(b: &mut Builder, names: [&'static str; 7]) -> HeadsExpand {
    let [count, rest @ ..] = names;
    let count = b.scalar(count, ScalarType::U32).into();
    let [in_batch, in_token, in_head, out_batch, out_token, out_head] =
        rest.map(|name| b.scalar(name, ScalarType::U64).into());
    HeadsExpand {
        count,
        in_batch,
        in_token,
        in_head,
        out_batch,
        out_token,
        out_head,
    }
}

macro_rules! kernel {
    ($b:ident, $f:ty, $n:ty, $l:ty, $m:ty, $style:ident) => {{
        let ty = $b.type_of::<Vector<$f, $n>>();
        let loaded = $b.type_of::<Vector<$l, $m>>();
        let (narrow, wide) = ($b.type_of::<i32>(), $b.type_of::<i64>());
        let real = $b.type_of::<f32>();
        // Queries and keys may be overwritten in place, hence not `read`.
        let q = $b.write("q", loaded);
        let k = $b.write("k", loaded);
        let q_out = $b.write("q_out", ty);
        let k_out = $b.write("k_out", ty);
        let positions = $b.read("positions", narrow);
        let positions_i64 = $b.read("positions_i64", wide);
        let factors = $b.read("factors", real);
        let cos_table = $b.read("cos_table", real);
        let sin_table = $b.read("sin_table", real);
        let frequencies = $b.by_value("frequencies", MAX_PAIRS as usize);
        let [tokens_per_batch, blocks_per_token, per_head] = [
            [
                "tokens_per_batch",
                "tokens_per_batch_multiplier",
                "tokens_per_batch_shift",
            ],
            [
                "blocks_per_token",
                "blocks_per_token_multiplier",
                "blocks_per_token_shift",
            ],
            ["per_head", "per_head_multiplier", "per_head_shift"],
        ]
        .map(|names| rows::divisor(&mut $b, names));
        let q_heads = heads(
            &mut $b,
            [
                "q_heads",
                "q_batch",
                "q_token",
                "q_head",
                "q_out_batch",
                "q_out_token",
                "q_out_head",
            ],
        );
        let k_heads = heads(
            &mut $b,
            [
                "k_heads",
                "k_batch",
                "k_token",
                "k_head",
                "k_out_batch",
                "k_out_token",
                "k_out_head",
            ],
        );
        let position = position_source(&mut $b);
        let angles = angle_source(&mut $b);
        let [per_half, rotated, passed] =
            ["per_half", "rotated", "passed"].map(|name| $b.scalar(name, ScalarType::U32));
        rope::expand::<$f, $n, $l, $m>(
            $b.scope(),
            q.into(),
            k.into(),
            q_out.into(),
            k_out.into(),
            positions.into(),
            positions_i64.into(),
            factors.into(),
            cos_table.into(),
            sin_table.into(),
            frequencies.into(),
            tokens_per_batch,
            blocks_per_token,
            q_heads,
            k_heads,
            position,
            angles,
            per_head,
            per_half.into(),
            rotated.into(),
            passed.into(),
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
    let width = if vectors { dtype.per_vector() } else { 1 };
    let symbol = format!("rope_{}_{}x{width}", style_name(style), dtype.name());
    let choices = vec![
        ("dtype", dtype.code()),
        ("style", style.code()),
        ("width", width),
    ];
    b.finish(symbol, choices, THREADS)
}

/// Every form: dtype by style, in vectors and by element.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
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
