//! What the attention kernels are told, and what they make of it: where sequences, rows and scores lie.

use contract::Float as Dtype;
pub use contract::attention::flag;
use cubecl::prelude::*;

use super::fragments::{Line, fast_exp};
use crate::emit::{Builder, ScalarType, scalars};

scalars! { Args, ArgsExpand {
    scale: f32,
    softcap: f32,
    softcap_inverse: f32,
    num_heads: u32,
    num_kv_heads: u32,
    /// Query heads per key head.
    group: u32,
    /// Of every sequence, or the longest.
    seqlen_q: u32,
    seqlen_k: u32,
    /// Blocks of query rows of a head (of a key head where rows are packed).
    row_blocks: u32,
    /// Parts that the keys of a sequence are cut into, and the least keys of a part, in multiples of 64.
    splits: u32,
    split_keys: u32,
    /// Of the partial results: batch × `seqlen_q` × heads.
    rows: u32,
    head_dim: u32,
    head_dim_v: u32,
    /// Keys seen up to and with a query's own, and from it on. At most `contract::attention::NO_LIMIT`.
    window_left: u32,
    window_right: u32,
    /// Of [`flag`].
    flags: u32,
    page_log2: u32,
    /// A `contract::Float`, or 0 for no bias.
    bias_dtype: u32,
    /// Strides of q, k, v and out in units of the kernel's buffers: lines of eight elements, or elements.
    q_outer: u64,
    q_token: u64,
    q_head: u64,
    k_outer: u64,
    k_token: u64,
    k_head: u64,
    v_outer: u64,
    v_token: u64,
    v_head: u64,
    out_outer: u64,
    out_token: u64,
    out_head: u64,
    /// Strides of the others in elements.
    lse_outer: u64,
    lse_token: u64,
    lse_head: u64,
    table_outer: u64,
    bias_outer: u64,
    bias_head: u64,
    bias_token: u64,
    bias_key: u64,
    mask_outer: u64,
    mask_head: u64,
    mask_token: u64,
    mask_key: u64,
    alibi_outer: u64,
} }

#[cube]
pub fn has(args: &Args, #[comptime] flag: u32) -> bool {
    args.flags & flag != 0u32
}

/// Every buffer but q, k, v and out: the same for all kernels.
#[derive(CubeType)]
pub struct Buffers {
    pub cu_seqlens_q: Array<u32>,
    pub cu_seqlens_k: Array<u32>,
    pub seq_lens_k: Array<u32>,
    pub block_table: Array<u32>,
    pub sinks: Array<f32>,
    pub bias_f32: Array<f32>,
    pub bias_f16: Array<half::f16>,
    pub bias_bf16: Array<half::bf16>,
    pub mask: Array<u8>,
    pub alibi_slopes: Array<f32>,
    pub out_f32: Array<f32>,
    pub lse: Array<f32>,
    /// f32 `[splits, rows, head_dim_v]` and `[splits, rows]`, rows being `[batch, seqlen_q, num_heads]`.
    pub partial: Array<Vector<f32, Const<4>>>,
    pub partial_lse: Array<f32>,
}

impl Buffers {
    pub fn declare(b: &mut Builder) -> BuffersExpand {
        let (u32_, f32_) = (b.type_of::<u32>(), b.type_of::<f32>());
        let (f16_, bf16_, u8_) = (
            b.type_of::<half::f16>(),
            b.type_of::<half::bf16>(),
            b.type_of::<u8>(),
        );
        let quad = b.type_of::<Vector<f32, Const<4>>>();
        BuffersExpand {
            cu_seqlens_q: b.read("cu_seqlens_q", u32_).into(),
            cu_seqlens_k: b.read("cu_seqlens_k", u32_).into(),
            seq_lens_k: b.read("seq_lens_k", u32_).into(),
            block_table: b.read("block_table", u32_).into(),
            sinks: b.read("sinks", f32_).into(),
            bias_f32: b.read("bias_f32", f32_).into(),
            bias_f16: b.read("bias_f16", f16_).into(),
            bias_bf16: b.read("bias_bf16", bf16_).into(),
            mask: b.read("mask", u8_).into(),
            alibi_slopes: b.read("alibi_slopes", f32_).into(),
            out_f32: b.write("out_f32", f32_).into(),
            lse: b.write("lse", f32_).into(),
            partial: b.write("partial", quad).into(),
            partial_lse: b.write("partial_lse", f32_).into(),
        }
    }
}

/// What codes of keys and values are multiplied by: one number, or one for each key head.
#[derive(CubeType)]
pub struct Scales {
    pub k: Array<f32>,
    pub v: Array<f32>,
    /// From head to head: 0 or 1.
    pub k_head: u32,
    pub v_head: u32,
}

impl Scales {
    pub fn declare(b: &mut Builder) -> ScalesExpand {
        let real = b.type_of::<f32>();
        ScalesExpand {
            k: b.read("k_scale", real).into(),
            v: b.read("v_scale", real).into(),
            k_head: b.scalar("k_scale_head", ScalarType::U32).into(),
            v_head: b.scalar("v_scale_head", ScalarType::U32).into(),
        }
    }
}

/// That of the keys of a head.
#[cube]
pub fn key_scale(args: &Args, scales: &Scales, key_head: u32) -> f32 {
    let mut scale = 1.0f32;
    if has(args, flag::K_SCALE) {
        scale = scales.k[(key_head * scales.k_head) as usize];
    }
    scale
}

/// That of its values.
#[cube]
pub fn value_scale(args: &Args, scales: &Scales, key_head: u32) -> f32 {
    let mut scale = 1.0f32;
    if has(args, flag::V_SCALE) {
        scale = scales.v[(key_head * scales.v_head) as usize];
    }
    scale
}

/// One sequence of the batch.
#[derive(CubeType, Clone)]
pub struct Span {
    pub q_first: u32,
    pub q_count: u32,
    pub k_first: u32,
    pub k_count: u32,
}

#[cube]
pub fn sequence(args: &Args, buffers: &Buffers, batch: u32) -> Span {
    let batch = batch as usize;
    let mut q_first = 0u32;
    let mut q_count = args.seqlen_q;
    if has(args, flag::CU_SEQLENS_Q) {
        q_first = buffers.cu_seqlens_q[batch];
        q_count = buffers.cu_seqlens_q[batch + 1] - q_first;
    }
    let mut k_first = 0u32;
    let mut k_count = args.seqlen_k;
    if has(args, flag::CU_SEQLENS_K) {
        k_first = buffers.cu_seqlens_k[batch];
        k_count = buffers.cu_seqlens_k[batch + 1] - k_first;
    }
    if has(args, flag::SEQ_LENS_K) {
        k_count = buffers.seq_lens_k[batch];
    }
    Span {
        q_first,
        q_count,
        k_first,
        k_count,
    }
}

/// How the keys of a sequence are cut: part `i` begins at `base + i * keys`.
#[derive(CubeType, Clone)]
pub struct Cut {
    pub base: u32,
    pub keys: u32,
}

/// Cuts the keys that any query sees into parts of one size, which follows the length of the sequence: the host does not know it.
#[cube]
pub fn cut(q_count: u32, k_count: u32, window_left: u32, splits: u32, least: u32) -> Cut {
    let first = i32::cast_from(k_count) - i32::cast_from(q_count) - i32::cast_from(window_left);
    let base = u32::cast_from(max(first + 1, 0)) / 64u32 * 64u32;
    let each = (k_count - base + splits - 1u32) / splits;
    Cut {
        base,
        keys: max((each + 63u32) / 64u32 * 64u32, least),
    }
}

/// Where the rows of one head of one sequence lie.
#[derive(CubeType, Clone)]
pub struct Rows {
    pub base: u64,
    pub token: u64,
    pub page: u64,
    pub page_log2: u32,
    pub paged: bool,
    /// Of the sequence, in the block table.
    pub table: u64,
}

#[cube]
pub fn key_rows(args: &Args, s: &Span, batch: u32, key_head: u32) -> Rows {
    let paged = has(args, flag::PAGED);
    let batch = u64::cast_from(batch);
    let outer = select(paged, 0u64, batch * args.k_outer);
    Rows {
        base: outer
            + u64::cast_from(key_head) * args.k_head
            + u64::cast_from(s.k_first) * args.k_token,
        token: args.k_token,
        page: args.k_outer,
        page_log2: args.page_log2,
        paged,
        table: batch * args.table_outer,
    }
}

#[cube]
pub fn value_rows(args: &Args, s: &Span, batch: u32, key_head: u32) -> Rows {
    let paged = has(args, flag::PAGED);
    let batch = u64::cast_from(batch);
    let outer = select(paged, 0u64, batch * args.v_outer);
    Rows {
        base: outer
            + u64::cast_from(key_head) * args.v_head
            + u64::cast_from(s.k_first) * args.v_token,
        token: args.v_token,
        page: args.v_outer,
        page_log2: args.page_log2,
        paged,
        table: batch * args.table_outer,
    }
}

#[cube]
pub fn row_at(rows: &Rows, block_table: &Array<u32>, row: u32) -> u64 {
    let mut at = u64::cast_from(row) * rows.token;
    if rows.paged {
        let page = block_table[(rows.table + u64::cast_from(row >> rows.page_log2)) as usize];
        let inside = row & ((1u32 << rows.page_log2) - 1u32);
        at = u64::cast_from(page) * rows.page + u64::cast_from(inside) * rows.token;
    }
    rows.base + at
}

/// Where a row of queries lies. `q`, `out` and `lse` of tokens that do not exist are not to be touched.
#[cube]
pub fn query_at(args: &Args, batch: u32, token: u32, head: u32) -> u64 {
    u64::cast_from(batch) * args.q_outer
        + u64::cast_from(token) * args.q_token
        + u64::cast_from(head) * args.q_head
}

#[cube]
pub fn out_at(args: &Args, batch: u32, token: u32, head: u32) -> u64 {
    u64::cast_from(batch) * args.out_outer
        + u64::cast_from(token) * args.out_token
        + u64::cast_from(head) * args.out_head
}

#[cube]
pub fn lse_at(args: &Args, batch: u32, token: u32, head: u32) -> u64 {
    u64::cast_from(batch) * args.lse_outer
        + u64::cast_from(token) * args.lse_token
        + u64::cast_from(head) * args.lse_head
}

/// A row of scores: the position of its query among the keys, and where its biases lie.
#[derive(CubeType, Clone)]
pub struct ScoreRow {
    pub position: i32,
    pub slope: f32,
    pub bias: u64,
    pub mask: u64,
}

#[cube]
pub fn score_row(
    args: &Args,
    buffers: &Buffers,
    s: &Span,
    batch: u32,
    row: u32,
    head: u32,
    #[comptime] scores: bool,
) -> ScoreRow {
    let position = i32::cast_from(row) + i32::cast_from(s.k_count) - i32::cast_from(s.q_count);
    let mut slope = 0.0f32;
    let mut bias = 0u64;
    let mut mask = 0u64;
    if comptime!(scores) {
        let row = u64::cast_from(row);
        let head = u64::cast_from(head);
        let batch = u64::cast_from(batch);
        if has(args, flag::ALIBI) {
            slope = buffers.alibi_slopes[(batch * args.alibi_outer + head) as usize];
        }
        bias = batch * args.bias_outer + head * args.bias_head + row * args.bias_token;
        mask = batch * args.mask_outer + head * args.mask_head + row * args.mask_token;
    }
    ScoreRow {
        position,
        slope,
        bias,
        mask,
    }
}

/// A score with everything but the limits of causality and windows, in natural units.
#[cube]
pub fn adjusted(
    args: &Args,
    buffers: &Buffers,
    row: &ScoreRow,
    product: f32,
    key: u32,
    #[comptime] precise: bool,
) -> f32 {
    let mut s = product * args.scale;
    if args.softcap > 0.0f32 {
        s = capped(args, s, precise);
    }
    let key64 = u64::cast_from(key);
    if args.bias_dtype != 0u32 {
        let at = (row.bias + key64 * args.bias_key) as usize;
        if args.bias_dtype == comptime!(Dtype::F32.code()) {
            s += buffers.bias_f32[at];
        } else if args.bias_dtype == comptime!(Dtype::F16.code()) {
            s += f32::cast_from(buffers.bias_f16[at]);
        } else {
            s += f32::cast_from(buffers.bias_bf16[at]);
        }
    }
    if has(args, flag::ALIBI) {
        s -= row.slope * f32::cast_from((row.position - i32::cast_from(key)).abs());
    }
    if has(args, flag::MASK) {
        if buffers.mask[(row.mask + key64 * args.mask_key) as usize] == 0u8 {
            s = hidden(true);
        }
    }
    s
}

/// `softcap * tanh(s / softcap)`.
#[cube]
pub fn capped(args: &Args, s: f32, #[comptime] precise: bool) -> f32 {
    let x = s * args.softcap_inverse;
    let y = if comptime!(precise) {
        x.tanh()
    } else {
        // tanh x = 1 - 2 / (1 + e^2x): two of the special function unit's operations.
        1.0f32 - fast_divide(2.0f32, 1.0f32 + fast_exp(2.0f32 * x))
    };
    args.softcap * y
}

#[cube(fast_math = cubecl_core::ir::FastMath::all())]
fn fast_divide(a: f32, b: f32) -> f32 {
    a / b
}

/// A score that no query sees. Where biases may be as low as a float goes it is -inf, which CubeCL has no word for.
#[cube]
pub fn hidden(#[comptime] scores: bool) -> f32 {
    if comptime!(scores) {
        f32::new(f32::MIN) * 2.0f32
    } else {
        f32::new(-3.0e38)
    }
}

/// A peak below any score that is seen: minus a hidden score it leaves nothing of the exponential.
#[cube]
pub fn no_peak(#[comptime] scores: bool) -> f32 {
    if comptime!(scores) {
        f32::new(f32::MIN)
    } else {
        f32::new(-1.0e30)
    }
}

/// The end of softmax over a row: peak and sum with the sink, and what to multiply the accumulated values by.
#[derive(CubeType, Clone)]
pub struct Softmax {
    pub factor: f32,
    pub lse: f32,
}

/// `peak` in natural units; `total` counts exponentials relative to it.
#[cube]
pub fn finish(
    args: &Args,
    buffers: &Buffers,
    peak: f32,
    total: f32,
    head: u32,
    sink: bool,
) -> Softmax {
    let mut peak = peak;
    let mut total = total;
    let mut factor = 1.0f32;
    if sink && has(args, flag::SINKS) {
        let sink = buffers.sinks[head as usize];
        let top = max(peak, sink);
        factor = (peak - top).exp();
        total = total * factor + (sink - top).exp();
        peak = top;
    }
    // A row that saw no key has accumulated zeros; the logarithm of zero is -inf.
    if total > 0.0f32 {
        factor = factor / total;
    }
    Softmax {
        factor,
        lse: peak + total.ln(),
    }
}

/// q, k, v or out in 16-byte lines.
pub type Lines<E> = Array<Vector<E, Line>>;
