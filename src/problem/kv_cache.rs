//! The device work of the KV cache: writing new tokens to pages, and copying pages.

use super::rope::Rotation;
use crate::tensor::RawTensor;

/// Validated append of new tokens. Token `t` of sequence `b`, of which `cu_seqlens[b]..cu_seqlens[b + 1]` are
/// the new ones, is written at index `i = seq_lens[b] - (cu_seqlens[b + 1] - t)` of the sequence: to page
/// `block_table[b, i / page_size]`, slot `i % page_size`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Append {
    /// `[num_tokens, num_kv_heads, head_dim]`.
    pub k: RawTensor,
    /// `[num_tokens, num_kv_heads, v_head_dim]`.
    pub v: RawTensor,
    /// `[num_pages, page_size, num_kv_heads, head_dim]`, strided.
    pub k_pages: RawTensor,
    /// `[num_pages, page_size, num_kv_heads, v_head_dim]`, strided.
    pub v_pages: RawTensor,
    /// Of pages of codes: what keys and values are multiplied by before they are rounded to them.
    pub factors: Option<Factors>,
    /// i32 `[num_sequences]`, contiguous.
    pub seq_lens: RawTensor,
    /// i32 `[num_sequences + 1]`, contiguous.
    pub cu_seqlens: RawTensor,
    /// i32 `[num_tokens]`, contiguous: where the rotation finds each token's position.
    pub positions: RawTensor,
    /// Queries of the same tokens and where they go once they are rotated as the keys are, of the dtype of `k`:
    /// `[num_tokens, num_heads, head_dim]`. Only with a rotation.
    pub q: Option<(RawTensor, RawTensor)>,
    /// Of the keys.
    pub rotation: Option<Rotation>,
    /// i32 `[num_sequences, max_pages_per_sequence]`, contiguous.
    pub block_table: RawTensor,
}

/// f32 `[num_kv_heads]`, contiguous: the reciprocals of the scales of keys, and of values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Factors {
    pub k: RawTensor,
    pub v: RawTensor,
}

/// Copies of whole pages, in every layer. Sources and destinations are all different; the cache that asks for
/// them owns the pages, holds them exclusively, and took the indices from its allocator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyPages<'a> {
    /// Start of the first page of the first layer; layers follow one another.
    pub pages: *mut u8,
    /// Bytes of one page of one layer.
    pub page_bytes: usize,
    /// Pages per layer.
    pub num_pages: usize,
    pub num_layers: usize,
    /// (source, destination) page indices.
    pub copies: &'a [(u32, u32)],
}
