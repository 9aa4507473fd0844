//! A block's tokens: which they are, and the angles of several of them at a time.

use contract::qk_norm_rope::{THREADS, TURN_QUADS};
use contract::rotation::Style;
use cubecl::prelude::*;

use super::heads::{PART, Place, Strides};
use crate::emit::{Builder, ScalarType};
use crate::rotation::{
    AngleSource, PositionSource, angle, angle_source, position_of, position_source, turn_first,
    turn_second,
};
use crate::rows::{self, Divisor, divide};

pub(super) type Quad = Const<4>;

/// Quads of cosines and of sines that a block has room for.
pub(super) const TURNS: usize = 2 * TURN_QUADS as usize;

/// What the kernel takes of launches.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Launch {
    pub tokens: u32,
    /// Blocks that share the tokens out among them.
    pub groups: u32,
    /// Of a block, and of those as many as have their angles at a time.
    pub tokens_per_block: u32,
    pub tokens_at_once: u32,
    /// Blocks that share the heads of a group's queries, and of its keys; none where one block has
    /// both.
    pub q_parts: u32,
    pub k_parts: u32,
}

/// What a block does of its group's queries, or of its keys.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Work {
    pub group: u32,
    /// Which part of the heads, and of how many.
    pub part: u32,
    pub parts: u32,
    /// Whether there is any.
    pub any: bool,
}

/// This block's work on queries or on keys, of which a token has `heads`.
#[cube]
pub(super) fn work_of(launch: Launch, heads: Divisor, #[comptime] of_keys: bool) -> Work {
    let mut group = CUBE_POS_X;
    let mut part = 0u32;
    let mut parts = 1u32;
    let mut any = heads.size > 0u32;
    if launch.q_parts > 0u32 {
        part = CUBE_POS_X / launch.groups;
        group -= part * launch.groups;
        if comptime!(of_keys) {
            any = any && part >= launch.q_parts;
            part -= launch.q_parts;
            parts = launch.k_parts;
        } else {
            any = any && part < launch.q_parts;
            parts = launch.q_parts;
        }
    }
    Work {
        group,
        part,
        parts,
        any,
    }
}

/// What angles come from.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Turning {
    pub position: PositionSource,
    pub angles: AngleSource,
    /// Pairs of a head, rounded up, in quads.
    pub quads: Divisor,
    pub tokens_per_batch: Divisor,
}

/// Which head a row is, of those of a block's tokens from `first` on.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Row {
    pub batch: u32,
    pub token: u32,
    pub head: u32,
    /// Its token's number, counted from the first.
    pub of_these: u32,
}

/// Row `row`, counted from the heads of token `first` on, of which each has `heads`.
#[cube]
pub(super) fn row_of(first: u32, row: u32, heads: Divisor, turning: Turning) -> Row {
    let of_these = divide(row, heads);
    let batch = divide(first + of_these, turning.tokens_per_batch);
    Row {
        batch,
        token: first + of_these - batch * turning.tokens_per_batch.size,
        head: row - of_these * heads.size,
        of_these,
    }
}

/// A thread's heads of queries or of keys.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Count {
    /// Of a token.
    pub of_token: Divisor,
    /// From one of a thread's heads to its next: so many tokens and heads.
    pub step_tokens: u32,
    pub step_heads: u32,
}

/// From one of a thread's heads to its next.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Step {
    /// Where the next one stands.
    pub token: u32,
    pub head: u32,
    /// Tokens on the way.
    pub tokens: u32,
    /// Whether the end of a token lies on the way, and how many ends of a batch entry.
    ends_token: bool,
    batches: u32,
}

/// The step from a head that stands there.
#[cube]
pub(super) fn step(token: u32, head: u32, count: Count, tokens_per_batch: Divisor) -> Step {
    let mut head = head + count.step_heads;
    let mut tokens = count.step_tokens;
    let ends_token = head >= count.of_token.size;
    if ends_token {
        head -= count.of_token.size;
        tokens += 1u32;
    }
    let mut token = token + tokens;
    let mut batches = 0u32;
    if token >= tokens_per_batch.size {
        batches = divide(token, tokens_per_batch);
        token -= batches * tokens_per_batch.size;
    }
    Step {
        token,
        head,
        tokens,
        ends_token,
        batches,
    }
}

/// What a step adds to a place in a tensor.
#[cube]
pub(super) fn distance(step: Step, strides: Strides) -> usize {
    let mut distance = strides.step;
    if step.ends_token {
        distance += strides.step_token;
    }
    if step.batches > 0u32 {
        distance += step.batches as usize * strides.step_batch;
    }
    distance
}

/// Computes the cosines and sines of `count` tokens from `first` on: of each token all quads of
/// cosines, then those of sines.
#[cube]
pub(super) fn fill_turns(
    turns: &mut SharedMemory<Vector<f32, Quad>>,
    first: u32,
    count: u32,
    turning: Turning,
    positions: &Array<i32>,
    positions_i64: &Array<i64>,
    factors: &Array<f32>,
    cos_table: &Array<f32>,
    sin_table: &Array<f32>,
    frequencies: &Array<f32>,
) {
    let per_token = turning.quads.size;
    let mut i = UNIT_POS_X;
    while i < count * per_token {
        let of_these = divide(i, turning.quads);
        let quad = i - of_these * per_token;
        let row = first + of_these;
        let batch = divide(row, turning.tokens_per_batch);
        let token = row - batch * turning.tokens_per_batch.size;
        let stands = position_of(positions, positions_i64, turning.position, batch, token);
        let mut cos = Vector::<f32, Quad>::zeroed();
        let mut sin = Vector::<f32, Quad>::zeroed();
        #[unroll]
        for j in 0..4u32 {
            let pair = 4u32 * quad + j;
            if pair < turning.angles.pairs {
                let frequency = frequencies[pair as usize];
                let turned = angle(
                    stands,
                    pair,
                    turning.angles,
                    factors,
                    cos_table,
                    sin_table,
                    frequency,
                );
                cos[j as usize] = turned.cos;
                sin[j as usize] = turned.sin;
            }
        }
        let at = 2u32 * of_these * per_token + quad;
        turns[at as usize] = cos;
        turns[(at + per_token) as usize] = sin;
        i += THREADS;
    }
}

/// Turns a thread's pairs; the token's cosines begin at quad `first`.
#[cube]
pub(super) fn turn(
    values: &mut Array<f32>,
    turns: &SharedMemory<Vector<f32, Quad>>,
    first: u32,
    quads: u32,
    place: Place,
    #[comptime] style: Style,
    #[comptime] width: u32,
) {
    // Heads in such vectors have whole quads of pairs.
    let whole = comptime!(width == 8 || (width == 4 && style == Style::HalfSplit));
    #[unroll]
    for part in 0..comptime!(PART / 4) {
        let pair = place.pair + comptime!(4 * part);
        if pair < place.pairs {
            let at = first + pair / 4u32;
            let cos = turns[at as usize];
            let sin = turns[(at + quads) as usize];
            #[unroll]
            for j in 0..4u32 {
                // Behind the last pair a component may follow that does not turn.
                if whole || pair + j < place.pairs {
                    let i = comptime!(4 * part + j);
                    let (a, b) = comptime!(match style {
                        Style::HalfSplit => (i, i + PART),
                        _ => (2 * i, 2 * i + 1),
                    });
                    let x = values[a as usize];
                    let y = values[b as usize];
                    values[a as usize] = turn_first(x, y, cos[j as usize], sin[j as usize]);
                    values[b as usize] = turn_second(x, y, cos[j as usize], sin[j as usize]);
                }
            }
        }
    }
}

pub(super) fn launch(b: &mut Builder) -> LaunchExpand {
    let [
        tokens,
        groups,
        tokens_per_block,
        tokens_at_once,
        q_parts,
        k_parts,
    ] = [
        "tokens",
        "groups",
        "tokens_per_block",
        "tokens_at_once",
        "q_parts",
        "k_parts",
    ]
    .map(|name| b.scalar(name, ScalarType::U32).into());
    LaunchExpand {
        tokens,
        groups,
        tokens_per_block,
        tokens_at_once,
        q_parts,
        k_parts,
    }
}

pub(super) fn turning(b: &mut Builder) -> TurningExpand {
    TurningExpand {
        position: position_source(b),
        angles: angle_source(b),
        quads: rows::divisor(b, ["quads", "quads_multiplier", "quads_shift"]),
        tokens_per_batch: tokens_per_batch(b),
    }
}

pub(super) fn count(
    b: &mut Builder,
    of_token: [&'static str; 3],
    [step_tokens, step_heads]: [&'static str; 2],
) -> CountExpand {
    CountExpand {
        of_token: rows::divisor(b, of_token),
        step_tokens: b.scalar(step_tokens, ScalarType::U32).into(),
        step_heads: b.scalar(step_heads, ScalarType::U32).into(),
    }
}

fn tokens_per_batch(b: &mut Builder) -> rows::DivisorExpand {
    let names = [
        "tokens_per_batch",
        "tokens_per_batch_multiplier",
        "tokens_per_batch_shift",
    ];
    rows::divisor(b, names)
}
