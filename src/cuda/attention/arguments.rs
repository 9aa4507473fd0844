//! What the portable kernels are told.

use contract::attention::flag;

use super::portable::{LEAST_KEYS, Launch};
use crate::cuda::images::{attention, attention_combine, attention_e4m3};
use crate::dtype::DType;
use crate::problem::attention::{HeadScales, Keys, Problem, Queries, Rows};

/// An unlimited window: lengths are below it.
const NO_LIMIT: usize = contract::attention::NO_LIMIT as usize;

fn window(keys: usize) -> u32 {
    keys.min(NO_LIMIT) as u32
}

pub(super) fn address<T>(ptr: *const T) -> u64 {
    ptr.addr() as u64
}

/// Strides in units of `width` elements, which divide them.
pub(super) fn strides(rows: &Rows, width: usize) -> [u64; 3] {
    [rows.outer, rows.token, rows.head].map(|stride| (stride / width) as u64)
}

/// Addresses of the lengths, zero where they are not given.
struct Lengths {
    cu_seqlens_q: u64,
    cu_seqlens_k: u64,
    seq_lens_k: u64,
    flags: u32,
}

impl Lengths {
    fn new(p: &Problem) -> Lengths {
        let cu_seqlens_q = match p.queries {
            Queries::Batched { .. } => 0,
            Queries::Packed { cu_seqlens, .. } => address(cu_seqlens),
        };
        let (cu_seqlens_k, seq_lens_k) = match p.keys {
            Keys::Packed { cu_seqlens, .. } => (address(cu_seqlens), 0),
            Keys::Batched { seq_lens, .. } | Keys::Paged { seq_lens, .. } => (0, address(seq_lens)),
        };
        let given = [
            (cu_seqlens_q, flag::CU_SEQLENS_Q),
            (cu_seqlens_k, flag::CU_SEQLENS_K),
            (seq_lens_k, flag::SEQ_LENS_K),
        ];
        let flags = given.iter().filter(|(address, _)| *address != 0);
        Lengths {
            cu_seqlens_q,
            cu_seqlens_k,
            seq_lens_k,
            flags: flags.fold(0, |flags, (_, flag)| flags | flag),
        }
    }
}

/// Of the kernels that compute attention, or parts of it.
pub(super) fn first(p: &Problem, launch: &Launch<'_>) -> attention::Arguments {
    attention::Arguments {
        partial: launch.partial,
        partial_lse: launch.partial_lse,
        row_blocks: launch.form.row_blocks(p) as u32,
        splits: launch.splits as u32,
        ..problem(p, launch.form.width)
    }
}

/// What a problem says, for accesses of `width` elements.
pub(super) fn problem(p: &Problem, width: usize) -> attention::Arguments {
    let lengths = Lengths::new(p);
    let mut a = attention::Arguments {
        q: address(p.q.ptr),
        k: address(p.k.ptr),
        v: address(p.v.ptr),
        out: address(p.out.ptr),
        out_f32: address(p.out.ptr),
        cu_seqlens_q: lengths.cu_seqlens_q,
        cu_seqlens_k: lengths.cu_seqlens_k,
        seq_lens_k: lengths.seq_lens_k,
        scale: p.scale,
        softcap: p.softcap,
        softcap_inverse: if p.softcap > 0.0 {
            1.0 / p.softcap
        } else {
            0.0
        },
        num_heads: p.num_heads as u32,
        num_kv_heads: p.num_kv_heads as u32,
        group: (p.num_heads / p.num_kv_heads) as u32,
        seqlen_q: p.max_seqlen_q as u32,
        seqlen_k: p.max_seqlen_k as u32,
        split_keys: LEAST_KEYS as u32,
        rows: (p.batch * p.max_seqlen_q * p.num_heads) as u32,
        head_dim: p.head_dim as u32,
        head_dim_v: p.head_dim_v as u32,
        window_left: window(p.window_left),
        window_right: window(p.window_right),
        flags: lengths.flags,
        ..attention::Arguments::ZERO
    };
    [a.q_outer, a.q_token, a.q_head] = strides(&p.q, width);
    [a.k_outer, a.k_token, a.k_head] = strides(&p.k, width);
    [a.v_outer, a.v_token, a.v_head] = strides(&p.v, width);
    [a.out_outer, a.out_token, a.out_head] = strides(&p.out, width);
    if p.out.dtype != p.q.dtype {
        a.flags |= flag::OUT_F32;
    }
    if let Some(lse) = &p.lse {
        a.flags |= flag::LSE;
        a.lse = address(lse.ptr);
        [a.lse_outer, a.lse_token, a.lse_head] = strides(lse, 1);
    }
    if let Keys::Paged {
        block_table,
        table_stride,
        page_size,
        ..
    } = p.keys
    {
        a.flags |= flag::PAGED;
        a.block_table = address(block_table);
        a.table_outer = table_stride as u64;
        // No key of a longer page has a higher index.
        a.page_log2 = page_size.min(NO_LIMIT).trailing_zeros();
    }
    if let Some(sinks) = p.sinks {
        a.flags |= flag::SINKS;
        a.sinks = address(sinks);
    }
    if let Some((slopes, stride)) = p.alibi_slopes {
        a.flags |= flag::ALIBI;
        a.alibi_slopes = address(slopes);
        a.alibi_outer = stride as u64;
    }
    if let Some(mask) = &p.mask {
        a.flags |= flag::MASK;
        a.mask = address(mask.ptr);
        [a.mask_outer, a.mask_head, a.mask_token, a.mask_key] =
            [mask.batch, mask.head, mask.query, mask.key].map(|stride| stride as u64);
    }
    if let Some(bias) = &p.bias {
        let bias_at = match bias.dtype {
            DType::F16 => &mut a.bias_f16,
            DType::Bf16 => &mut a.bias_bf16,
            DType::F32 => &mut a.bias_f32,
            other => unreachable!("the bias was checked to be of floats, not {other}"),
        };
        *bias_at = address(bias.ptr);
        a.bias_dtype = bias.dtype as u32;
        [a.bias_outer, a.bias_head, a.bias_token, a.bias_key] =
            [bias.batch, bias.head, bias.query, bias.key].map(|stride| stride as u64);
    }
    a
}

/// The same for kernels of codes.
pub(super) fn with_scales(p: &Problem, a: &attention::Arguments) -> attention_e4m3::Arguments {
    macro_rules! with_those_of {
        ($($field:ident,)*) => {
            attention_e4m3::Arguments {
                $($field: a.$field,)*
                ..attention_e4m3::Arguments::ZERO
            }
        };
    }
    #[rustfmt::skip]
    let mut arguments = with_those_of!(
            q, k, v, out, cu_seqlens_q, cu_seqlens_k, seq_lens_k, block_table, sinks, bias_f32,
            bias_f16, bias_bf16, mask, alibi_slopes, out_f32, lse, partial, partial_lse, scale,
            softcap, softcap_inverse, num_heads, num_kv_heads, group, seqlen_q, seqlen_k,
            row_blocks, splits, split_keys, rows, head_dim, head_dim_v, window_left, window_right,
            flags, page_log2, bias_dtype, q_outer, q_token, q_head, k_outer, k_token, k_head,
            v_outer, v_token, v_head, out_outer, out_token, out_head, lse_outer, lse_token,
            lse_head, table_outer, bias_outer, bias_head, bias_token, bias_key, mask_outer,
            mask_head, mask_token, mask_key, alibi_outer,
    );
    let scale = |scales: Option<HeadScales>, flag| match scales {
        Some(scales) => (address(scales.ptr), scales.stride as u32, flag),
        None => (0, 0, 0),
    };
    let (k, v) = (
        scale(p.k_scale, flag::K_SCALE),
        scale(p.v_scale, flag::V_SCALE),
    );
    (arguments.k_scale, arguments.k_scale_head) = (k.0, k.1);
    (arguments.v_scale, arguments.v_scale_head) = (v.0, v.1);
    arguments.flags |= k.2 | v.2;
    arguments
}

/// Of the kernel that joins parts.
pub(super) fn combining(p: &Problem, launch: &Launch<'_>) -> attention_combine::Arguments {
    let lengths = Lengths::new(p);
    let mut a = attention_combine::Arguments {
        partial: launch.partial,
        partial_lse: launch.partial_lse,
        cu_seqlens_q: lengths.cu_seqlens_q,
        cu_seqlens_k: lengths.cu_seqlens_k,
        seq_lens_k: lengths.seq_lens_k,
        out: address(p.out.ptr),
        num_heads: p.num_heads as u32,
        seqlen_q: p.max_seqlen_q as u32,
        seqlen_k: p.max_seqlen_k as u32,
        splits: launch.splits as u32,
        split_keys: LEAST_KEYS as u32,
        rows: (p.batch * p.max_seqlen_q * p.num_heads) as u32,
        head_dim_v: p.head_dim_v as u32,
        window_left: window(p.window_left),
        flags: lengths.flags,
        ..attention_combine::Arguments::ZERO
    };
    [a.out_outer, a.out_token, a.out_head] = strides(&p.out, 1);
    if let Some(lse) = &p.lse {
        a.flags |= flag::LSE;
        a.lse = address(lse.ptr);
        [a.lse_outer, a.lse_token, a.lse_head] = strides(lse, 1);
    }
    if let Some(sinks) = p.sinks {
        a.flags |= flag::SINKS;
        a.sinks = address(sinks);
    }
    a
}
