//! What the kernels of the backward pass are told beyond the forward's arguments, and what they make of
//! it.

use cubecl::prelude::*;

use crate::attention::arguments::*;
use crate::emit::scalars;

scalars! { Strides, StridesExpand {
    /// Entries of a head in either half of the statistics.
    tokens: u64,
    /// Keys of every sequence that get gradients, where keys are not packed.
    room: u32,
    /// In units of the kernel's buffers.
    dout_outer: u64,
    dout_token: u64,
    dout_head: u64,
    dq_outer: u64,
    dq_token: u64,
    dq_head: u64,
    dk_outer: u64,
    dk_token: u64,
    dk_head: u64,
    dv_outer: u64,
    dv_token: u64,
    dv_head: u64,
} }

/// Where the first row of a head of a sequence lies in a tensor, and how far its rows are apart.
#[derive(CubeType, Clone)]
pub struct Place {
    pub base: u64,
    pub token: u64,
}

/// Row `first` of a head, with the strides of a tensor.
#[cube]
pub fn place(batch: u32, first: u32, head: u32, outer: u64, token: u64, of_head: u64) -> Place {
    Place {
        base: u64::cast_from(batch) * outer
            + u64::cast_from(first) * token
            + u64::cast_from(head) * of_head,
        token,
    }
}

#[cube]
pub fn queries_at(args: &Args, span: &Span, batch: u32, head: u32) -> Place {
    let first = span.q_first;
    place(batch, first, head, args.q_outer, args.q_token, args.q_head)
}

#[cube]
pub fn dout_at(strides: &Strides, span: &Span, batch: u32, head: u32) -> Place {
    let (outer, token) = (strides.dout_outer, strides.dout_token);
    place(batch, span.q_first, head, outer, token, strides.dout_head)
}

#[cube]
pub fn dq_at(strides: &Strides, span: &Span, batch: u32, head: u32) -> Place {
    let (outer, token) = (strides.dq_outer, strides.dq_token);
    place(batch, span.q_first, head, outer, token, strides.dq_head)
}

#[cube]
pub fn keys_at(args: &Args, span: &Span, batch: u32, head: u32) -> Place {
    let first = span.k_first;
    place(batch, first, head, args.k_outer, args.k_token, args.k_head)
}

#[cube]
pub fn values_at(args: &Args, span: &Span, batch: u32, head: u32) -> Place {
    let first = span.k_first;
    place(batch, first, head, args.v_outer, args.v_token, args.v_head)
}

#[cube]
pub fn dk_at(strides: &Strides, span: &Span, batch: u32, head: u32) -> Place {
    let (outer, token) = (strides.dk_outer, strides.dk_token);
    place(batch, span.k_first, head, outer, token, strides.dk_head)
}

#[cube]
pub fn dv_at(strides: &Strides, span: &Span, batch: u32, head: u32) -> Place {
    let (outer, token) = (strides.dv_outer, strides.dv_token);
    place(batch, span.k_first, head, outer, token, strides.dv_head)
}

/// Where a head's statistics of a sequence begin: the LSE of each row, and half the buffer further on
/// its delta.
#[cube]
pub fn statistics_at(args: &Args, strides: &Strides, span: &Span, batch: u32, head: u32) -> u64 {
    // Of packed queries the first says where they are; of others the batch does.
    let mut first = u64::cast_from(span.q_first);
    if !has(args, flag::CU_SEQLENS_Q) {
        first = u64::cast_from(batch) * u64::cast_from(args.seqlen_q);
    }
    u64::cast_from(head) * strides.tokens + first
}

/// Entries between a row's LSE and its delta.
#[cube]
pub fn half(args: &Args, strides: &Strides) -> u64 {
    u64::cast_from(args.num_heads) * strides.tokens
}

/// A block of keys of one key head of one sequence.
#[derive(CubeType, Clone)]
pub struct KeyBlock {
    pub batch: u32,
    pub key_head: u32,
    pub key0: u32,
    /// Past the last key that gets gradients, which is past the last one there is where the sequence is
    /// padded.
    pub end: u32,
    pub span: Span,
    /// Rows of queries `begin..seen` that may see any of these keys.
    pub begin: u32,
    pub seen: u32,
}

/// The cube's, in a grid of key blocks × key heads × sequences, the first fastest.
#[cube]
pub fn key_block(
    args: &Args,
    strides: &Strides,
    buffers: &Buffers,
    #[comptime] keys: u32,
) -> KeyBlock {
    // The first keys first: under a causal mask most queries see them.
    let key0 = CUBE_POS_X % args.row_blocks * keys;
    let key_head = (CUBE_POS_X / args.row_blocks) % args.num_kv_heads;
    let batch = CUBE_POS_X / args.row_blocks / args.num_kv_heads;
    let span = sequence(args, buffers, batch);
    let mut end = strides.room;
    if has(args, flag::CU_SEQLENS_K) {
        end = span.k_count;
    }
    // A query at position p sees keys above p - window_left and below p + window_right. Distances of lengths are below 2³⁰, so that
    // none of this leaves 32 bits.
    let q_count = i32::cast_from(span.q_count);
    let shift = i32::cast_from(span.k_count) - q_count;
    let first = i32::cast_from(key0) - shift;
    let last = i32::cast_from(min(key0 + keys, span.k_count)) - 1 - shift;
    let begin = max(first - i32::cast_from(args.window_right) + 1, 0);
    let mut seen = last + min(q_count - last, i32::cast_from(args.window_left));
    if key0 >= span.k_count {
        seen = begin;
    }
    KeyBlock {
        batch,
        key_head,
        key0,
        end,
        span,
        begin: u32::cast_from(begin),
        seen: u32::cast_from(max(seen, begin)),
    }
}

/// Whether the query at a position sees a key, as far as windows and the sequence's end go.
#[cube]
pub fn sees(args: &Args, span: &Span, position: i32, key: u32) -> bool {
    let at = i32::cast_from(key);
    key < span.k_count
        && at > position - i32::cast_from(args.window_left)
        && at < position + i32::cast_from(args.window_right)
}

/// The weight of a score, and its gradient before the scale.
#[derive(CubeType, Clone)]
pub struct Weighed {
    pub weight: f32,
    pub score: f32,
}

/// What a pair of a query and a key has, of their product, that of `dout` and the value, and the
/// query's statistics. `key` exists. The gradient is that of the product, `before_cap`, or that of what
/// the softmax is of, bias included.
#[cube]
pub fn weigh(
    args: &Args,
    buffers: &Buffers,
    row: &ScoreRow,
    key: u32,
    product: f32,
    dweight: f32,
    lse: f32,
    delta: f32,
    #[comptime] scores: bool,
    #[comptime] precise: bool,
    #[comptime] before_cap: bool,
) -> Weighed {
    let mut s = product * args.scale;
    if comptime!(scores) {
        s = adjusted(args, buffers, row, product, key, precise);
    }
    let weight = exponential(s - lse, precise);
    let mut score = weight * (dweight - delta);
    if comptime!(scores && before_cap) {
        if args.softcap > 0.0f32 {
            let t = capped(args, product * args.scale, precise) * args.softcap_inverse;
            score *= (1.0f32 - t) * (1.0f32 + t);
        }
    }
    Weighed { weight, score }
}

#[cube]
fn exponential(x: f32, #[comptime] precise: bool) -> f32 {
    if comptime!(precise) {
        x.exp()
    } else {
        crate::attention::fragments::fast_exp(x)
    }
}
