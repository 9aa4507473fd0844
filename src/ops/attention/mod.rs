//! Attention: `softmax(scale · q kᵀ + …) v`, exact, in memory linear in the sequence lengths (FlashAttention, Dao et al. 2022,
//! arXiv:2205.14135; online softmax, Milakov and Gimelshein 2018, arXiv:1805.02867).
//!
//! # What is computed
//!
//! For query `i` of a sequence with `Sq` queries and `Sk` keys, and query head `h` with key head `h / (Hq / Hkv)`, let
//! `p = i + Sk - Sq` be the query's position among the keys (the last query is at the last key). For each key `j`
//!
//! ```text
//! s = scale * q[i] · k[j]                                    scale 0 means 1 / sqrt(D)
//! s = softcap * tanh(s / softcap)                            if softcap > 0
//! s = s + bias[b, h, i, j] - alibi_slopes[b, h] * |p - j|    those that are given
//! s = -inf  where  mask[b, h, i, j] is false,
//!                  causal and j > p,
//!                  window_left  > 0 and j <= p - window_left,
//!                  window_right > 0 and j >= p + window_right
//! lse[i] = ln(Σ exp(s[j]) + exp(sinks[h]))                   the last term if sinks are given
//! out[i] = Σ exp(s[j] - lse[i]) v[j]
//! ```
//!
//! A query that sees no key gives zeros and LSE −inf (the sink, if there is one).
//!
//! Both windows count keys *with the query's own*, so zero is free to mean "unlimited": `window_left: 4096` is what model
//! configurations call `sliding_window = 4096`, and `window_right: 1` is the same as `causal`.
//!
//! # Where peers differ
//!
//! FlashAttention's `window_size = (l, r)` leaves the query's own key uncounted and marks no limit with −1: `(l, r)` is
//! `window_left: l + 1, window_right: r + 1` here. PyTorch's `is_causal` aligns the first query with the first key (top-left);
//! here, as in FlashAttention 2.1 and later, the last with the last. FlashInfer's LSE is base 2; here it is natural. ALiBi is
//! `-slope * |p - j|` as in FlashAttention, which for causal attention differs by a constant per row from the `+slope * j` that
//! the paper and ggml use: the outputs are the same, the LSE is not. PyTorch gives NaN for a query that sees no key.
//!
//! # Layouts
//!
//! Queries and keys have independent forms; heads and head dimensions are `Hq`, `Hkv` (a divisor of `Hq`), `D` and `Dv`.
//!
//! | `q`, `out` | chosen by |
//! |-|-|
//! | batched `[B, Sq, Hq, D]`, `[B, Sq, Hq, Dv]` | neither |
//! | packed ("varlen") `[total_q, Hq, D]`, `[total_q, Hq, Dv]` | `cu_seqlens_q` `[B + 1]` |
//!
//! | `k`, `v` | chosen by |
//! |-|-|
//! | batched `[B, Sk, Hkv, D]`, `[B, Sk, Hkv, Dv]` | neither; `seq_lens_k` `[B]` gives the lengths of a padded batch |
//! | packed `[total_k, Hkv, D]`, `[total_k, Hkv, Dv]` | `cu_seqlens_k` `[B + 1]` |
//! | paged `[num_pages, page_size, Hkv, D or Dv]`, or heads before tokens | `block_table` `[B, max_pages]` and `seq_lens_k` |
//!
//! Strides are free as long as the last dimension is contiguous. `cu_seqlens` are the sums of the lengths before each sequence:
//! sequence `b` has tokens `cu_seqlens[b]..cu_seqlens[b + 1]`. Tokens of `q` that belong to no sequence leave `out` and `lse`
//! untouched. Lengths, `cu_seqlens` and block tables lie in the device's memory: only the CPU backend can look at them before
//! it launches, and does, refusing what is out of range. On other backends they are the caller's responsibility.
//!
//! # Splitting
//!
//! Attention over a union of disjoint sets of keys is the average of the parts' outputs, weighted by their `exp(lse)`:
//! `lse = ln(exp(lse1) + exp(lse2))`, `out = exp(lse1 - lse) * out1 + exp(lse2 - lse) * out2`, which
//! [`attention_merge`](super::attention_merge) computes. Ask for f32 `out` in the parts. Give a sink to one part only.
//!
//! # On a GPU
//!
//! The CUDA backend takes head dimensions up to 256, keys and values of one dtype, and less than 2³⁰ queries and keys per sequence; it
//! says [`Unsupported`](crate::Error::Unsupported) to the rest. Head dimensions, strides and addresses that are multiples of 8
//! elements, and keys of the queries' dtype or of 8-bit floats, run on tensor cores if queries are f16 or bf16; anything else takes
//! slower kernels. Where
//! few queries see many keys, keys are split over the GPU, and the parts need a workspace. Its size depends on shapes and on the
//! `max_seqlen`s, never on lengths in memory: a captured graph may be replayed while sequences grow, and a tight `max_seqlen_q` tells
//! that a packed batch is decoding. The same call gives the same bits on the same kind of GPU.
//!
//! # Numerics
//!
//! Scores, softmax and sums are f32 whatever the storage; the result is rounded once. Tensor cores take the weights of the values
//! rounded to the values' dtype, as in FlashAttention. Those of f32 they multiply in two parts of TF32 each, which loses no more than f32's
//! own rounding does, but makes a NaN of an infinity in `q`, `k` or `v`. Keys that a mask hides may still be read,
//! and a NaN or an infinity in their `v` may reach the output; what lies beyond a sequence's length is never read.
//!
//! # Keys and values of 8 bits
//!
//! Keys and values of [`F8E4M3`](crate::DType::F8E4M3) are codes, and stand for themselves times their scale: one, or one for each key head,
//! given by [`TensorRef::with_scales`]. Everything above is said of what they stand for. The scale of the keys multiplies scores, that
//! of the values results, in f32. Tensor cores multiply codes as f16, with queries whose rows are scaled by powers of two for that, and
//! take the weights of the values rounded to f16. A code that is NaN makes NaN of what it takes part in. Gradients are not
//! computed of codes.
//!
//! # Example
//!
//! Eight query heads on two key heads, causal:
//!
//! ```
//! use unsloth::ops::attention::{self, Params};
//! use unsloth::{Context, Stream, TensorMut, TensorRef};
//!
//! let ctx = Context::cpu()?;
//! let (seq, heads, kv_heads, dim) = (5, 8, 2, 64);
//! let q = vec![0.1f32; seq * heads * dim];
//! let (k, v) = (vec![0.2f32; seq * kv_heads * dim], vec![0.3f32; seq * kv_heads * dim]);
//! let mut out = vec![0.0f32; seq * heads * dim];
//! let mut params = Params::new(
//!     TensorRef::from_slice(&q, &[1, seq, heads, dim])?,
//!     TensorRef::from_slice(&k, &[1, seq, kv_heads, dim])?,
//!     TensorRef::from_slice(&v, &[1, seq, kv_heads, dim])?,
//!     TensorMut::from_slice(&mut out, &[1, seq, heads, dim])?,
//! );
//! params.causal = true;
//! attention::forward(&ctx, &params, Stream::DEFAULT)?;
//! assert!(out.iter().all(|x| (x - 0.3).abs() < 1e-6));
//! # Ok::<(), unsloth::Error>(())
//! ```

pub mod backward;
mod check;

use crate::ops::operation;
pub use crate::problem::attention::PageLayout;
use crate::tensor::{TensorMut, TensorRef, Workspace};
pub use backward::backward;

const OP: &str = "attention";

pub use crate::problem::attention::MAX_HEAD_DIM;

/// Arguments of [`forward`]. Make one with [`Params::new`], then set what is needed.
#[derive(Debug)]
pub struct Params<'a> {
    /// Queries `[B, Sq, Hq, D]`, or `[total_q, Hq, D]` with `cu_seqlens_q`; f32, f16 or bf16.
    pub q: TensorRef<'a>,
    /// Keys `[B, Sk, Hkv, D]`, `[total_k, Hkv, D]` with `cu_seqlens_k`, or pages with `block_table`; any float dtype, or
    /// [`F8E4M3`](crate::DType::F8E4M3) with scales ([`TensorRef::with_scales`]): f32, `[1]` or `[Hkv]`, 1 without them.
    pub k: TensorRef<'a>,
    /// Values like `k`, with head dimension `Dv`; any float dtype, or F8E4M3 where `k` is, with scales of their own.
    pub v: TensorRef<'a>,
    /// Output, like `q` with head dimension `Dv`; the dtype of `q`, or f32.
    pub out: TensorMut<'a>,
    /// Receives the natural logarithm of the softmax denominator: f32 `[B, Hq, Sq]`, or `[Hq, total_q]` with `cu_seqlens_q`.
    pub lse: Option<TensorMut<'a>>,
    /// Added to the scores: any float dtype, `[B, Hq, max_q, max_k]`, any of these sizes may be 1 to repeat; contiguous (or
    /// repeated) in the last dimension. `max_q` is `Sq`, or `max_seqlen_q` with `cu_seqlens_q`; `max_k` likewise.
    pub bias: Option<TensorRef<'a>>,
    /// True where a query may see a key: bool, sizes as `bias`. May be combined with `bias`.
    pub mask: Option<TensorRef<'a>>,
    /// ALiBi slopes (Press et al. 2021, arXiv:2108.12409), f32 `[Hq]` or `[B, Hq]`.
    pub alibi_slopes: Option<TensorRef<'a>>,
    /// A logit per query head that takes part in the softmax and has no value (Xiao et al. 2023, arXiv:2309.17453; gpt-oss), f32
    /// `[Hq]`.
    pub sinks: Option<TensorRef<'a>>,
    /// Where each sequence of packed queries begins, and the last one's end: i32 `[B + 1]`.
    pub cu_seqlens_q: Option<TensorRef<'a>>,
    /// Where each sequence of packed keys begins, and the last one's end: i32 `[B + 1]`.
    pub cu_seqlens_k: Option<TensorRef<'a>>,
    /// The number of keys of each sequence of a padded batch or of pages: i32 `[B]`.
    pub seq_lens_k: Option<TensorRef<'a>>,
    /// The pages of each sequence, in order: i32 `[B, max_pages]`. Entries past the pages that hold keys are not read.
    pub block_table: Option<TensorRef<'a>>,
    /// The order of the dimensions of paged `k` and `v`.
    pub page_layout: PageLayout,
    /// No sequence has more queries than this; used with `cu_seqlens_q`. Zero: `total_q`.
    pub max_seqlen_q: usize,
    /// No sequence has more keys than this; used with `cu_seqlens_k`, `seq_lens_k` and pages. Zero: as many as `k` (or the block
    /// table) has room for. Queries such as [`workspace_size`] answer for it, so a tight value may need less.
    pub max_seqlen_k: usize,
    /// Factor of the scores; zero for `1 / sqrt(D)`.
    pub scale: f32,
    /// Bound of the scores through `softcap * tanh(s / softcap)`; zero for none.
    pub softcap: f32,
    /// Whether a query sees only keys up to its own position; positions are aligned at the end.
    pub causal: bool,
    /// How many keys a query sees up to and with its own position; zero for all.
    pub window_left: usize,
    /// How many keys a query sees from its own position on, with its own; zero for all.
    pub window_right: usize,
    /// Scratch of [`workspace_size`] bytes.
    pub workspace: Workspace<'a>,
}

impl<'a> Params<'a> {
    /// Plain attention: every query sees every key, default scale, no workspace.
    pub fn new(q: TensorRef<'a>, k: TensorRef<'a>, v: TensorRef<'a>, out: TensorMut<'a>) -> Self {
        Params {
            q,
            k,
            v,
            out,
            lse: None,
            bias: None,
            mask: None,
            alibi_slopes: None,
            sinks: None,
            cu_seqlens_q: None,
            cu_seqlens_k: None,
            seq_lens_k: None,
            block_table: None,
            page_layout: PageLayout::TokenMajor,
            max_seqlen_q: 0,
            max_seqlen_k: 0,
            scale: 0.0,
            softcap: 0.0,
            causal: false,
            window_left: 0,
            window_right: 0,
            workspace: Workspace::none(),
        }
    }
}

operation::functions!();
