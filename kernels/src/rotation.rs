//! Which angle each pair of components turns by, and the turn: what RoPE and a KV cache that rotates keys have in common, to the bit.

use contract::rotation::{Angles, MAX_PAIRS, Positions, Style};
use cubecl::prelude::*;

use crate::e4m3::stored;
use crate::emit::{Builder, ScalarType};
use crate::math;

/// A style's name in symbols.
pub(crate) fn style_name(style: Style) -> &'static str {
    match style {
        Style::HalfSplit => "half_split",
        Style::Interleaved => "interleaved",
        Style::Plain => "plain",
    }
}

/// Where positions come from.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct PositionSource {
    /// A [`Positions`]: counted from `first`, i32 tensor, i64 tensor.
    pub kind: u32,
    pub first: i64,
    pub batch: usize,
    pub token: usize,
}

/// Where a token stands.
#[cube]
pub(crate) fn position_of(
    positions: &Array<i32>,
    positions_i64: &Array<i64>,
    position: PositionSource,
    batch: u32,
    token: u32,
) -> i64 {
    let at = batch as usize * position.batch + token as usize * position.token;
    if position.kind == comptime!(Positions::From.code()) {
        position.first + i64::cast_from(token)
    } else if position.kind == comptime!(Positions::I32.code()) {
        i64::cast_from(positions[at])
    } else {
        positions_i64[at]
    }
}

/// Where angles come from.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct AngleSource {
    /// An [`Angles`].
    pub kind: u32,
    pub pairs: u32,
    pub scale: f32,
    /// 1, or -1 for the inverse rotation.
    pub direction: f32,
    /// Positions, and words from one to the next, of a table.
    pub table_rows: usize,
    pub cos_stride: usize,
    pub sin_stride: usize,
}

/// Cosine and sine of pair `pair` at a position, whose frequency is given; NaN outside a table.
#[cube]
pub(crate) fn angle(
    position: i64,
    pair: u32,
    source: AngleSource,
    factors: &Array<f32>,
    cos_table: &Array<f32>,
    sin_table: &Array<f32>,
    frequency: f32,
) -> math::SinCos {
    let i = pair as usize;
    let mut cos = math::nan();
    let mut sin = math::nan();
    if source.kind == comptime!(Angles::Table.code()) {
        // A negative position is a great one without its sign.
        let row = usize::cast_from(position);
        if row < source.table_rows {
            cos = cos_table[row * source.cos_stride + i];
            sin = sin_table[row * source.sin_stride + i];
        }
    } else {
        let mut of_pair = frequency;
        if source.kind == comptime!(Angles::Factors.code()) {
            of_pair /= factors[i];
        }
        let turned = math::sin_cos(f32::cast_from(position) * of_pair);
        cos = turned.cos * source.scale;
        sin = turned.sin * source.scale;
    }
    math::SinCos {
        sin: sin * source.direction,
        cos,
    }
}

/// Computes all cosines and sines of a position, a pair for each of `threads` threads at a time:
/// cosines from `first` of `turns` on, sines [`MAX_PAIRS`] further. `frequency` is that of the
/// thread's first pair.
#[cube]
pub(crate) fn fill_turns(
    turns: &mut SharedMemory<f32>,
    first: u32,
    position: i64,
    source: AngleSource,
    factors: &Array<f32>,
    cos_table: &Array<f32>,
    sin_table: &Array<f32>,
    frequencies: &Array<f32>,
    frequency: f32,
    #[comptime] threads: u32,
) {
    let mut frequency = frequency;
    let mut pair = UNIT_POS_X;
    while pair < source.pairs {
        let turned = angle(
            position, pair, source, factors, cos_table, sin_table, frequency,
        );
        turns[(first + pair) as usize] = turned.cos;
        turns[(first + MAX_PAIRS + pair) as usize] = turned.sin;
        pair += threads;
        if pair < source.pairs {
            frequency = frequencies[pair as usize];
        }
    }
}

/// The first component of a turned pair. Fused by hand, so that every kernel rounds alike.
#[cube]
pub(crate) fn turn_first(a: f32, b: f32, cos: f32, sin: f32) -> f32 {
    fma(a, cos, -(b * sin))
}

/// The second component of a turned pair.
#[cube]
pub(crate) fn turn_second(a: f32, b: f32, cos: f32, sin: f32) -> f32 {
    fma(b, cos, a * sin)
}

/// Loads what vector `vector` of a head that begins at `from` turns: in the half-split style a vector of the first half and its
/// partners, in the interleaved style a vector of pairs, or the pair `vector` where vectors are single elements.
#[cube]
pub(crate) fn load_pairs<L: Scalar, M: Size>(
    x: &Array<Vector<L, M>>,
    pairs: &mut Array<Vector<L, M>>,
    from: usize,
    vector: u32,
    per_half: u32,
    #[comptime] width: u32,
    #[comptime] style: Style,
) {
    if comptime!(style == Style::HalfSplit) {
        let at = from + vector as usize;
        pairs[0] = x[at];
        pairs[1] = x[at + per_half as usize];
    } else if width == 1 {
        let at = from + (2 * vector) as usize;
        pairs[0] = x[at];
        pairs[1] = x[at + 1];
    } else {
        pairs[0] = x[from + vector as usize];
    }
}

/// Turns what [`load_pairs`] loaded as L and holds elements S, and stores it to the head that begins at `to`. The head's cosines begin
/// at `first` of `turns`, its sines `sines` further: one array, since CubeCL lays several out in no particular order. Codes are
/// what is stored times `code_factor`.
#[cube]
pub(crate) fn store_turned<S: Float, D: Numeric, N: Size, L: Scalar, M: Size>(
    pairs: &Array<Vector<L, M>>,
    out: &mut Array<Vector<D, N>>,
    to: usize,
    vector: u32,
    per_half: u32,
    first: u32,
    turns: &SharedMemory<f32>,
    code_factor: f32,
    #[comptime] sines: u32,
    #[comptime] style: Style,
    #[comptime] codes: bool,
) {
    let width = comptime!(N::value() as u32);
    let a = Vector::<f32, N>::cast_from(Vector::<S, N>::reinterpret(pairs[0]));
    if comptime!(style == Style::HalfSplit) {
        let b = Vector::<f32, N>::cast_from(Vector::<S, N>::reinterpret(pairs[1]));
        let mut turned_a = Vector::<f32, N>::zeroed();
        let mut turned_b = Vector::<f32, N>::zeroed();
        #[unroll]
        for j in 0..N::value() {
            let c = turns[first as usize + vector as usize * N::value() + j];
            let s = turns[sines as usize + first as usize + vector as usize * N::value() + j];
            turned_a[j] = turn_first(a[j], b[j], c, s);
            turned_b[j] = turn_second(a[j], b[j], c, s);
        }
        out[to + vector as usize] = stored::<D, N>(turned_a, code_factor, codes);
        out[to + (vector + per_half) as usize] = stored::<D, N>(turned_b, code_factor, codes);
    } else if width == 1 {
        // Pairs lie within a vector, unless vectors are single elements.
        let b = Vector::<f32, N>::cast_from(Vector::<S, N>::reinterpret(pairs[1]));
        let at = (2 * vector) as usize;
        let c = turns[(first + vector) as usize];
        let s = turns[sines as usize + (first + vector) as usize];
        out[to + at] = stored::<D, N>(
            Vector::cast_from(turn_first(a[0], b[0], c, s)),
            code_factor,
            codes,
        );
        out[to + at + 1] = stored::<D, N>(
            Vector::cast_from(turn_second(a[0], b[0], c, s)),
            code_factor,
            codes,
        );
    } else {
        let mut turned = Vector::<f32, N>::zeroed();
        #[unroll]
        for j in 0..comptime!(N::value() / 2) {
            let pair = first as usize + vector as usize * comptime!(N::value() / 2) + j;
            let x = a[2 * j];
            let y = a[2 * j + 1];
            turned[2 * j] = turn_first(x, y, turns[pair], turns[sines as usize + pair]);
            turned[2 * j + 1] = turn_second(x, y, turns[pair], turns[sines as usize + pair]);
        }
        out[to + vector as usize] = stored::<D, N>(turned, code_factor, codes);
    }
}

/// Declares the scalars of a [`PositionSource`].
pub(crate) fn position_source(b: &mut Builder) -> PositionSourceExpand {
    PositionSourceExpand {
        kind: b.scalar("position_kind", ScalarType::U32).into(),
        first: b.scalar("position_first", ScalarType::I64).into(),
        batch: b.scalar("position_batch", ScalarType::U64).into(),
        token: b.scalar("position_token", ScalarType::U64).into(),
    }
}

/// Declares the scalars of an [`AngleSource`].
pub(crate) fn angle_source(b: &mut Builder) -> AngleSourceExpand {
    use ScalarType::{F32, U32, U64};
    AngleSourceExpand {
        kind: b.scalar("angle_kind", U32).into(),
        pairs: b.scalar("pairs", U32).into(),
        scale: b.scalar("scale", F32).into(),
        direction: b.scalar("direction", F32).into(),
        table_rows: b.scalar("table_rows", U64).into(),
        cos_stride: b.scalar("cos_stride", U64).into(),
        sin_stride: b.scalar("sin_stride", U64).into(),
    }
}
