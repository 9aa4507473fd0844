//! Attention, what rotates its heads, and the block around it.

use unsloth::ffi::attention::backward::*;
use unsloth::ffi::attention::*;
use unsloth::ffi::attention_block::backward::*;
use unsloth::ffi::attention_block::*;
use unsloth::ffi::attention_merge::*;
use unsloth::ffi::context_parallel_attention::backward::*;
use unsloth::ffi::context_parallel_attention::*;
use unsloth::ffi::kv_cache::unsloth_kv_cache;
use unsloth::ffi::qk_norm_rope::backward::*;
use unsloth::ffi::qk_norm_rope::*;
use unsloth::ffi::rope::*;
use unsloth::ffi::tensor::*;

use crate::arena::absent;
use crate::call::{Call, Stated, like, zeroed};

/// The current batch of a cache.
pub struct Batch {
    pub cache: *mut unsloth_kv_cache,
    pub layer: i64,
    pub heads: i64,
    pub dim: i64,
    pub num_tokens: i64,
}

impl Call<'_, '_> {
    pub fn attention(&mut self) -> Box<Stated<unsloth_attention_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_attention_params>> = unsafe { zeroed() };
        let dtype = self.float_dtype();
        let kv_dtype = match self.input.byte() % 8 {
            0 | 1 => self.float_dtype(),
            2 => UNSLOTH_DTYPE_F8E4M3,
            _ => dtype,
        };
        let out_dtype = if self.input.one_in(4) {
            UNSLOTH_DTYPE_F32
        } else {
            dtype
        };
        let (batch, queries, keys) = (self.dim(3), self.extent(9), self.extent(40));
        let kv_heads = self.dim(3);
        let heads = kv_heads * self.dim(3);
        let dim = self.input.pick(&[8, 1, 3, 16, 33, 64, 128]);
        let dim_v = if self.input.one_in(4) {
            self.dim(40)
        } else {
            dim
        };
        let p = &mut stated.params;

        let packed = self.input.one_in(3);
        let leading = if packed {
            vec![batch * queries]
        } else {
            vec![batch, queries]
        };
        let shape = |leading: &[i64], rest: &[i64]| [leading, rest].concat();
        p.q = self.tensor(dtype, &shape(&leading, &[heads, dim]));
        p.out = self.tensor(out_dtype, &shape(&leading, &[heads, dim_v]));
        let lse = if packed {
            vec![heads, batch * queries]
        } else {
            vec![batch, heads, queries]
        };
        p.lse = self.optional(UNSLOTH_DTYPE_F32, &lse);
        if packed {
            p.cu_seqlens_q = self.tensor(UNSLOTH_DTYPE_I32, &[batch + 1]);
        }
        match self.input.byte() % 4 {
            0 | 1 => {
                p.k = self.tensor(kv_dtype, &[batch, keys, kv_heads, dim]);
                p.v = self.tensor(kv_dtype, &[batch, keys, kv_heads, dim_v]);
                p.seq_lens_k = self.optional(UNSLOTH_DTYPE_I32, &[batch]);
            }
            2 => {
                p.k = self.tensor(kv_dtype, &[batch * keys, kv_heads, dim]);
                p.v = self.tensor(kv_dtype, &[batch * keys, kv_heads, dim_v]);
                p.cu_seqlens_k = self.tensor(UNSLOTH_DTYPE_I32, &[batch + 1]);
            }
            _ => {
                let page = 1 << self.input.up_to(3);
                let pages = self.input.up_to(12);
                p.page_layout = self.flag(1);
                let (first, second) = if p.page_layout == 1 {
                    (kv_heads, page)
                } else {
                    (page, kv_heads)
                };
                p.k = self.tensor(kv_dtype, &[pages, first, second, dim]);
                p.v = self.tensor(kv_dtype, &[pages, first, second, dim_v]);
                p.seq_lens_k = self.tensor(UNSLOTH_DTYPE_I32, &[batch]);
                let columns = self.input.up_to(6);
                p.block_table = self.tensor(UNSLOTH_DTYPE_I32, &[batch, columns]);
            }
        }
        if self.input.one_in(2) {
            p.k.quantization = self.quantization(kv_dtype, kv_heads);
            p.v.quantization = self.quantization(kv_dtype, kv_heads);
        }
        p.causal = self.flag(1);
        p.scale = self.factor();
        p.softcap = self.factor();
        p.window_left = self.limit();
        p.window_right = self.limit();
        p.max_seqlen_q = self.limit();
        p.max_seqlen_k = self.limit();
        let mut scores = [batch, heads, queries, keys];
        for size in &mut scores {
            if self.input.one_in(3) {
                *size = 1;
            }
        }
        let bias_dtype = self.float_dtype();
        p.bias = self.optional(bias_dtype, &scores);
        p.mask = self.optional(UNSLOTH_DTYPE_BOOL, &scores);
        let slopes = [batch, heads];
        p.alibi_slopes = self.optional(
            UNSLOTH_DTYPE_F32,
            if batch == 1 { &slopes[1..] } else { &slopes },
        );
        p.sinks = self.optional(UNSLOTH_DTYPE_F32, &[heads]);
        stated
    }

    /// Gradients of what [`Call::attention`] makes.
    pub fn attention_backward(&mut self) -> Box<Stated<unsloth_attention_backward_params>> {
        let forward = self.attention().params;
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_attention_backward_params>> = unsafe { zeroed() };
        let p = &mut stated.params;
        (p.q, p.k, p.v) = (forward.q, forward.k, forward.v);
        (p.out, p.lse) = (forward.out, forward.lse);
        (p.bias, p.mask) = (forward.bias, forward.mask);
        (p.alibi_slopes, p.sinks) = (forward.alibi_slopes, forward.sinks);
        (p.cu_seqlens_q, p.cu_seqlens_k) = (forward.cu_seqlens_q, forward.cu_seqlens_k);
        p.seq_lens_k = forward.seq_lens_k;
        (p.causal, p.scale, p.softcap) = (forward.causal, forward.scale, forward.softcap);
        (p.window_left, p.window_right) = (forward.window_left, forward.window_right);
        (p.max_seqlen_q, p.max_seqlen_k) = (forward.max_seqlen_q, forward.max_seqlen_k);
        let shape = |t: &unsloth_tensor| t.shape[..t.rank.min(6) as usize].to_vec();
        p.dout = self.tensor(p.out.dtype, &shape(&p.out));
        p.dq = self.optional(p.q.dtype, &shape(&p.q));
        p.dk = self.optional(p.k.dtype, &shape(&p.k));
        p.dv = self.optional(p.v.dtype, &shape(&p.v));
        if p.lse.rank > 0 {
            p.dlse = self.optional(UNSLOTH_DTYPE_F32, &shape(&p.lse));
        }
        if p.bias.rank > 0 {
            p.dbias = self.optional(UNSLOTH_DTYPE_F32, &shape(&p.bias));
        }
        if p.sinks.rank > 0 {
            p.dsinks = self.optional(UNSLOTH_DTYPE_F32, &shape(&p.sinks));
        }
        p.accumulate = self.flag(1);
        stated
    }

    pub fn attention_merge(&mut self) -> Box<Stated<unsloth_attention_merge_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_attention_merge_params>> = unsafe { zeroed() };
        let (from, to) = (self.float_dtype(), self.float_dtype());
        let (parts, tokens, heads) = (self.dim(3), self.extent(9), self.dim(3));
        let batch = self.dim(3);
        let dim = self.input.pick(&[8, 1, 3, 64, 600]);
        let p = &mut stated.params;
        let (tokens, lse) = match self.input.one_in(3) {
            true => (vec![tokens], vec![heads, tokens]),
            false => (vec![batch, tokens], vec![batch, heads, tokens]),
        };
        let row = [&tokens[..], &[heads, dim]].concat();
        p.outs = self.tensor(from, &[&[parts], &row[..]].concat());
        p.lses = self.tensor(UNSLOTH_DTYPE_F32, &[&[parts], &lse[..]].concat());
        p.out = self.tensor(to, &row);
        p.lse = self.optional(UNSLOTH_DTYPE_F32, &lse);
        p.reserved = self.flag(0);
        stated
    }

    pub fn context_parallel_attention(
        &mut self,
    ) -> Box<Stated<unsloth_context_parallel_attention_params>> {
        let alone = self.attention().params;
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_context_parallel_attention_params>> =
            unsafe { zeroed() };
        let p = &mut stated.params;
        p.comm = self.comm();
        (p.q, p.k, p.v) = (alone.q, alone.k, alone.v);
        (p.out, p.lse) = (alone.out, alone.lse);
        (p.causal, p.scale, p.softcap) = (alone.causal, alone.scale, alone.softcap);
        (p.window_left, p.window_right) = (alone.window_left, alone.window_right);
        p.method = self.flag(2);
        p.order = self.flag(1);
        (p.sinks, p.alibi_slopes) = (alone.sinks, alone.alibi_slopes);
        (p.cu_seqlens_q, p.cu_seqlens_k) = (alone.cu_seqlens_q, alone.cu_seqlens_k);
        (p.max_seqlen_q, p.max_seqlen_k) = (alone.max_seqlen_q, alone.max_seqlen_k);
        stated
    }

    pub fn context_parallel_attention_backward(
        &mut self,
    ) -> Box<Stated<unsloth_context_parallel_attention_backward_params>> {
        let alone = self.attention_backward().params;
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_context_parallel_attention_backward_params>> =
            unsafe { zeroed() };
        let p = &mut stated.params;
        p.comm = self.comm();
        (p.q, p.k, p.v) = (alone.q, alone.k, alone.v);
        (p.out, p.lse, p.dout) = (alone.out, alone.lse, alone.dout);
        (p.dq, p.dk, p.dv) = (alone.dq, alone.dk, alone.dv);
        (p.causal, p.scale, p.softcap) = (alone.causal, alone.scale, alone.softcap);
        (p.window_left, p.window_right) = (alone.window_left, alone.window_right);
        p.method = self.flag(2);
        p.order = self.flag(1);
        (p.sinks, p.alibi_slopes) = (alone.sinks, alone.alibi_slopes);
        (p.cu_seqlens_q, p.cu_seqlens_k) = (alone.cu_seqlens_q, alone.cu_seqlens_k);
        (p.max_seqlen_q, p.max_seqlen_k) = (alone.max_seqlen_q, alone.max_seqlen_k);
        p.dsinks = alone.dsinks;
        p.reserved = self.flag(0);
        p.deterministic = self.flag(1);
        stated
    }

    pub fn rope(&mut self) -> Box<Stated<unsloth_rope_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_rope_params>> = unsafe { zeroed() };
        let dtype = self.float_dtype();
        let (batch, tokens) = (self.dim(3), self.extent(6));
        let dim = 2 * self.dim(20);
        let p = &mut stated.params;
        let leading = if self.input.one_in(2) {
            vec![batch * tokens]
        } else {
            vec![batch, tokens]
        };
        for (x, out) in [(&mut p.q, &mut p.q_out), (&mut p.k, &mut p.k_out)] {
            let shape = [&leading[..], &[self.dim(4), dim]].concat();
            *x = self.tensor(dtype, &shape);
            *out = self.optional(dtype, &shape);
        }
        let integer = self.input.pick(&[UNSLOTH_DTYPE_I32, UNSLOTH_DTYPE_I64]);
        p.positions = self.optional(integer, &leading);
        p.inverse = self.flag(1);
        p.position_offset = self.limit();
        p.rotation = self.rotation(dim);
        stated
    }

    /// Heads and positions are RoPE's, and gains are added.
    pub fn qk_norm_rope(&mut self) -> Box<Stated<unsloth_qk_norm_rope_params>> {
        let rope = self.rope();
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_qk_norm_rope_params>> = unsafe { zeroed() };
        let (p, rope) = (&mut stated.params, &rope.params);
        (p.q, p.q_out, p.k, p.k_out) = (rope.q, rope.q_out, rope.k, rope.k_out);
        (p.positions, p.rotation) = (rope.positions, rope.rotation);
        p.position_offset = rope.position_offset;
        let dim = rope.q.shape[(rope.q.rank as usize).clamp(1, 6) - 1];
        for weight in [&mut p.q_weight, &mut p.k_weight] {
            let dtype = self.float_dtype();
            *weight = self.optional(dtype, &[dim]);
        }
        p.weight_offset = self.factor();
        p.epsilon = self.factor().max(1e-5);
        p.reserved = self.flag(0);
        stated
    }

    /// The same with gradients, which are like heads and gains.
    pub fn qk_norm_rope_backward(&mut self) -> Box<Stated<unsloth_qk_norm_rope_backward_params>> {
        let forward = self.qk_norm_rope();
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_qk_norm_rope_backward_params>> = unsafe { zeroed() };
        let (p, f) = (&mut stated.params, &forward.params);
        (p.q, p.dq, p.k, p.dk) = (f.q, f.q_out, f.k, f.k_out);
        (p.q_weight, p.k_weight) = (f.q_weight, f.k_weight);
        (p.positions, p.rotation) = (f.positions, f.rotation);
        (p.position_offset, p.weight_offset) = (f.position_offset, f.weight_offset);
        p.epsilon = f.epsilon;
        for (x, dout) in [(&f.q, &mut p.dq_out), (&f.k, &mut p.dk_out)] {
            let rank = (x.rank as usize).min(6);
            *dout = self.tensor(x.dtype, &x.shape[..rank]);
        }
        for (weight, gradient) in [
            (&f.q_weight, &mut p.dq_weight),
            (&f.k_weight, &mut p.dk_weight),
        ] {
            let dtype = self.float_dtype();
            *gradient = self.optional(dtype, &weight.shape[..1]);
        }
        p.accumulate = self.flag(1);
        stated
    }

    /// How heads of `dim` components are rotated.
    pub fn rotation(&mut self, dim: i64) -> unsloth_rotation {
        // SAFETY: a struct of the C ABI, for which all zero is a value.
        let mut rotation: unsloth_rotation = unsafe { std::mem::zeroed() };
        let rotary = if self.input.one_in(3) {
            2 * self.dim((dim / 2).max(1))
        } else {
            dim
        };
        let r = &mut rotation;
        r.style = self.flag(1);
        r.scaling = self.flag(4);
        r.rotary_dim = if rotary == dim { 0 } else { rotary as u32 };
        r.original_max_positions = self.limit() as u32;
        r.fractional_ramp = self.flag(1);
        for f in [
            &mut r.theta,
            &mut r.factor,
            &mut r.low_freq_factor,
            &mut r.high_freq_factor,
            &mut r.beta_fast,
            &mut r.beta_slow,
            &mut r.attention_factor,
            &mut r.extrapolation_factor,
        ] {
            *f = self.factor();
        }
        r.freq_factors = self.optional(UNSLOTH_DTYPE_F32, &[rotary / 2]);
        if self.input.one_in(3) {
            let positions = self.input.up_to(12);
            r.cos = self.tensor(UNSLOTH_DTYPE_F32, &[positions, rotary / 2]);
            r.sin = self.tensor(UNSLOTH_DTYPE_F32, &[positions, rotary / 2]);
        }
        rotation
    }

    /// A block with `cache`'s shape, or one of its own without a cache.
    pub fn attention_block(
        &mut self,
        cache: Option<&Batch>,
    ) -> Box<Stated<unsloth_attention_block_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_attention_block_params>> = unsafe { zeroed() };
        let dtype = self.float_dtype();
        let (hidden, outer) = (self.dim(20), self.dim(20));
        let (mut kv_heads, mut dim) = (self.dim(2), 2 * self.dim(8));
        let mut leading = vec![self.dim(3), self.extent(5)];
        let p = &mut stated.params;
        if let Some(batch) = cache {
            (kv_heads, dim) = (batch.heads, batch.dim);
            leading = vec![batch.num_tokens];
            (p.cache, p.layer) = (batch.cache, batch.layer);
        } else if self.input.one_in(3) {
            leading = vec![leading[0] * leading[1]];
            let offsets = self.input.up_to(4);
            p.cu_seqlens = self.tensor(UNSLOTH_DTYPE_I32, &[offsets]);
            p.max_seqlen = self.limit();
        }
        let heads = kv_heads * self.dim(2);
        (p.num_heads, p.num_kv_heads, p.head_dim) = (heads, kv_heads, dim);
        if self.input.one_in(8) {
            p.v_head_dim = self.limit();
        }
        let v_dim = if p.v_head_dim > 0 {
            p.v_head_dim.min(64)
        } else {
            dim
        };
        let with = |last: i64| [&leading[..], &[last]].concat();
        p.x = self.tensor(dtype, &with(hidden));
        let (q, k, v) = (heads * dim, kv_heads * dim, kv_heads * v_dim);
        if self.input.one_in(2) {
            p.qkv_weight = self.tensor(dtype, &[q + k + v, hidden]);
            p.qkv_bias = self.optional(dtype, &[q + k + v]);
        } else {
            p.q_weight = self.tensor(dtype, &[q, hidden]);
            p.k_weight = self.tensor(dtype, &[k, hidden]);
            p.v_weight = self.tensor(dtype, &[v, hidden]);
            p.q_bias = self.optional(dtype, &[q]);
            p.k_bias = self.optional(dtype, &[k]);
            p.v_bias = self.optional(dtype, &[v]);
        }
        let (q_norm, k_norm) = if self.input.one_in(2) {
            (q, k)
        } else {
            (dim, dim)
        };
        p.q_norm = self.optional(dtype, &[q_norm]);
        p.k_norm = self.optional(dtype, &[k_norm]);
        p.rotate = self.flag(1);
        if p.rotate == 1 {
            p.rotation = self.rotation(dim);
            let integer = self.input.pick(&[UNSLOTH_DTYPE_I32, UNSLOTH_DTYPE_I64]);
            if cache.is_none() {
                p.positions = self.optional(integer, &leading);
                p.position_offset = self.limit();
            }
        }
        if self.input.one_in(4) {
            p.bidirectional = self.flag(1);
        }
        p.window = self.limit();
        p.norm_epsilon = self.factor().max(1e-5);
        p.norm_weight_offset = self.factor();
        p.scale = self.factor();
        p.softcap = self.factor();
        p.alibi_slopes = self.optional(UNSLOTH_DTYPE_F32, &[heads]);
        p.sinks = self.optional(UNSLOTH_DTYPE_F32, &[heads]);
        p.out_weight = self.tensor(dtype, &[outer, heads * v_dim]);
        p.out_bias = self.optional(dtype, &[outer]);
        p.residual = self.optional(dtype, &with(outer));
        p.out = self.tensor(dtype, &with(outer));
        p.parallel = self.parallel(&p.x);
        if self.input.one_in(4) {
            p.qkv_out = self.tensor(dtype, &with(q + k + v));
        }
        if self.input.one_in(4) {
            p.attended_out = self.tensor(dtype, &with(heads * v_dim));
            let (last, outer) = (leading[leading.len() - 1], &leading[..leading.len() - 1]);
            p.lse_out = self.tensor(UNSLOTH_DTYPE_F32, &[outer, &[heads, last]].concat());
        }
        stated
    }

    pub fn attention_block_backward(
        &mut self,
    ) -> Box<Stated<unsloth_attention_block_backward_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_attention_block_backward_params>> = unsafe { zeroed() };
        let mut forward = self.attention_block(None);
        forward.params.struct_size = size_of::<unsloth_attention_block_params>() as u32;
        let f = forward.params;
        let p = &mut stated.params;
        p.forward = &raw const forward.params;
        self.kept.push(forward);
        p.accumulate = self.flag(1);
        let dtype = f.x.dtype;
        let grad_dtype = match p.accumulate {
            1 => UNSLOTH_DTYPE_F32,
            _ => dtype,
        };
        let of_nothing = like(&f.x).last() == Some(&0) || f.out_weight.shape[0] == 0;
        for (to, of, dtype) in [
            (&mut p.dq_weight, f.q_weight, grad_dtype),
            (&mut p.dq_bias, f.q_bias, grad_dtype),
            (&mut p.dk_weight, f.k_weight, grad_dtype),
            (&mut p.dk_bias, f.k_bias, grad_dtype),
            (&mut p.dv_weight, f.v_weight, grad_dtype),
            (&mut p.dv_bias, f.v_bias, grad_dtype),
            (&mut p.dqkv_weight, f.qkv_weight, grad_dtype),
            (&mut p.dqkv_bias, f.qkv_bias, grad_dtype),
            (&mut p.dq_norm, f.q_norm, grad_dtype),
            (&mut p.dk_norm, f.k_norm, grad_dtype),
            (&mut p.dsinks, f.sinks, UNSLOTH_DTYPE_F32),
            (&mut p.dout_weight, f.out_weight, grad_dtype),
            (&mut p.dout_bias, f.out_bias, grad_dtype),
            (&mut p.dx, f.x, dtype),
            (&mut p.qkv, f.qkv_out, dtype),
            (&mut p.attended, f.attended_out, dtype),
            (&mut p.lse, f.lse_out, UNSLOTH_DTYPE_F32),
        ] {
            // Vectors have elements where the large tensors of a call may have none.
            if of.rank > 1 || (of.rank == 1 && !of_nothing) {
                *to = self.optional(dtype, &like(&of));
            }
        }
        if p.attended.rank == 0 || p.lse.rank == 0 {
            (p.attended, p.lse) = (absent(), absent());
        }
        p.dout = self.tensor(dtype, &like(&f.out));
        stated
    }
}
