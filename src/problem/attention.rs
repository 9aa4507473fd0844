//! Validated attention: one description for every combination of forms.

use crate::dtype::DType;
use crate::problem::kv_cache::Append;
use crate::tensor::RawTensor;

/// The greatest head dimension of queries, keys and values.
pub const MAX_HEAD_DIM: usize = 512;

/// The order of the dimensions inside a page of keys or values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum PageLayout {
    /// `[num_pages, page_size, Hkv, D]`: tokens before heads, as vLLM and FlashInfer's NHD.
    #[default]
    TokenMajor = 0,
    /// `[num_pages, Hkv, page_size, D]`: heads before tokens, as FlashInfer's HND.
    HeadMajor = 1,
}

impl PageLayout {
    /// The layout with this C ABI value.
    pub fn from_raw(value: u32) -> Option<PageLayout> {
        [PageLayout::TokenMajor, PageLayout::HeadMajor]
            .into_iter()
            .find(|l| *l as u32 == value)
    }
}

/// Validated arguments. Strides are in elements throughout.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    pub batch: usize,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub head_dim_v: usize,
    pub q: Rows,
    pub k: Rows,
    pub v: Rows,
    pub out: Rows,
    /// f32; its rows have one element.
    pub lse: Option<Rows>,
    pub queries: Queries,
    pub keys: Keys,
    /// Whether lengths are in memory: `cu_seqlens_q`, `cu_seqlens_k` or `seq_lens_k` is given.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))] // the GPU's chooser asks
    pub ragged: bool,
    /// No sequence has more queries.
    pub max_seqlen_q: usize,
    /// No sequence has more keys.
    pub max_seqlen_k: usize,
    pub scale: f32,
    /// What keys are multiplied by, if they are codes.
    pub k_scale: Option<HeadScales>,
    /// What values are.
    pub v_scale: Option<HeadScales>,
    /// Zero for none.
    pub softcap: f32,
    /// Keys up to and with a query's own; `usize::MAX` for all.
    pub window_left: usize,
    /// Keys from a query's own on; 1 if causal, `usize::MAX` for all.
    pub window_right: usize,
    pub bias: Option<Scores>,
    /// Bool.
    pub mask: Option<Scores>,
    /// f32, with the stride over sequences (0 if they share slopes); contiguous over heads.
    pub alibi_slopes: Option<(*const f32, usize)>,
    /// f32, contiguous over heads.
    pub sinks: Option<*const f32>,
}

// SAFETY: addresses and sizes; the operations that dereference them carry the obligations.
unsafe impl Send for Problem {}
// SAFETY: as above.
unsafe impl Sync for Problem {}

/// f32 in the device's memory: one for all key heads, or one for each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadScales {
    pub ptr: *const f32,
    /// From head to head: 0 or 1.
    pub stride: usize,
}

impl HeadScales {
    /// That of a key head; 1 where there are none.
    ///
    /// # Safety
    /// The scales are on the host, and there is one for the head.
    #[inline(always)]
    pub unsafe fn of(scales: Option<HeadScales>, kv_head: usize) -> f32 {
        // SAFETY: the caller's promise.
        scales.map_or(1.0, |scales| unsafe {
            *scales.ptr.add(kv_head * scales.stride)
        })
    }
}

impl Problem {
    /// Whether so many tokens are one of each sequence.
    pub fn gives_each_one(&self, num_tokens: usize) -> bool {
        self.batch == num_tokens && self.max_seqlen_q == 1
    }
}

/// A step of decoding: new tokens go into a cache's pages, queries of the same tokens are rotated with them, and attend to what the
/// sequences hold. Each sequence has one of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub append: Append,
    /// Of the queries where the append leaves them: rotated in place, and then not read again.
    pub attention: Problem,
}

/// Two chunks of the same sequences' queries, which see the same keys from the first one on: to be one launch where a kernel can, with
/// the bits of two.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pair {
    /// Queries that lie behind the others in `q`, `out` and `lse`, and see no fewer keys.
    pub later: Problem,
    /// Tokens from the first of the others to the first of these.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))] // the GPU's launches of two
    pub distance: usize,
    /// Where the others are, their outputs and their `lse`; keys that they are given, and their windows.
    rows: (Rows, Rows, Option<Rows>),
    queries: usize,
    keys: usize,
    windows: [usize; 2],
}

impl Pair {
    /// Of two problems that differ in no more than what it has of both. Lengths are not in memory.
    pub fn new(earlier: &Problem, later: Problem, distance: usize) -> Pair {
        Pair {
            later,
            distance,
            rows: (earlier.q, earlier.out, earlier.lse),
            queries: earlier.max_seqlen_q,
            keys: earlier.max_seqlen_k,
            windows: [earlier.window_left, earlier.window_right],
        }
    }

    pub fn earlier(&self) -> Problem {
        let (q, out, lse) = self.rows;
        let [window_left, window_right] = self.windows;
        Problem {
            q,
            out,
            lse,
            queries: Queries::Batched { len: self.queries },
            keys: Keys::Batched {
                len: self.keys,
                seq_lens: std::ptr::null(),
            },
            max_seqlen_q: self.queries,
            max_seqlen_k: self.keys,
            window_left,
            window_right,
            ..self.later
        }
    }
}

/// Validated arguments of the backward pass. Gradients that are absent are not computed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backward {
    /// What was computed. `out` and `lse`, which is there, are read. Keys are not paged.
    pub forward: Problem,
    /// Like `out`, of the same dtype or f32.
    pub dout: Rows,
    /// Like `lse`.
    pub dlse: Option<Rows>,
    /// Like `q`, `k` and `v`, of their dtypes.
    pub dq: Option<Rows>,
    pub dk: Option<Rows>,
    pub dv: Option<Rows>,
    /// f32, of the bias's shape.
    pub dbias: Option<ScoresGradient>,
    /// f32, contiguous over heads.
    pub dsinks: Option<*mut f32>,
    /// Whether `dbias` and `dsinks` are added to what is there.
    pub accumulate: bool,
    /// Whether the same inputs must give the same bits. (On the CPU they do.)
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub deterministic: bool,
}

// SAFETY: as for `Problem`.
unsafe impl Send for Backward {}
// SAFETY: as above.
unsafe impl Sync for Backward {}

/// A tensor `[B, Hq, Sq, Sk]` of f32, any of whose sizes may be 1: then it is the sum over that
/// dimension. Contiguous over keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScoresGradient {
    pub ptr: *mut f32,
    pub sizes: [usize; 4],
    pub strides: [usize; 4],
}

// SAFETY: as for `Problem`.
unsafe impl Sync for ScoresGradient {}

/// Vectors of contiguous elements at `batch * outer + token * token + head * head`. In packed form `outer` is zero, in paged form
/// it is the distance of pages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    pub ptr: *mut u8,
    pub dtype: DType,
    pub outer: usize,
    pub token: usize,
    pub head: usize,
}

impl Rows {
    /// Whether both are of one tensor, as far as strides say.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))] // the GPU's launches of two
    pub fn continues(&self, other: &Rows) -> bool {
        let strides = |rows: &Rows| (rows.dtype, rows.outer, rows.token, rows.head);
        strides(self) == strides(other)
    }

    /// Dimensions `[outer, token, head, ..]` at the given places of a tensor's layout; `None` for a missing one. The stride of one
    /// that has a single entry says nothing: it is zero.
    pub fn new(t: &RawTensor, outer: Option<usize>, token: usize, head: usize) -> Rows {
        let stride = |dim| match t.layout.dim(dim) {
            1 => 0,
            _ => t.layout.stride(dim),
        };
        Rows {
            ptr: t.ptr,
            dtype: t.dtype,
            outer: outer.map_or(0, stride),
            token: stride(token),
            head: stride(head),
        }
    }

    /// Offset in elements of a row.
    #[inline(always)]
    pub fn offset(&self, outer: usize, token: usize, head: usize) -> usize {
        outer * self.outer + token * self.token + head * self.head
    }
}

/// How sequences of queries are found.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Queries {
    /// Every sequence has `len` queries.
    Batched { len: usize },
    /// i32 `[batch + 1]`, within `total` tokens.
    Packed {
        cu_seqlens: *const i32,
        total: usize,
    },
}

/// How sequences of keys are found.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Keys {
    /// Room for `len` keys each; i32 `[batch]` lengths unless NULL.
    Batched { len: usize, seq_lens: *const i32 },
    /// i32 `[batch + 1]`, within `total` tokens.
    Packed {
        cu_seqlens: *const i32,
        total: usize,
    },
    /// `block_table` i32 `[batch, max_pages]` with the given stride between sequences, `seq_lens` i32 `[batch]`. `page_size` is a
    /// power of two.
    Paged {
        block_table: *const i32,
        table_stride: usize,
        max_pages: usize,
        num_pages: usize,
        page_size: usize,
        seq_lens: *const i32,
    },
}

/// A tensor of the scores' shape `[B, Hq, Sq, Sk]`; strides of repeated dimensions are zero, that of keys is zero or one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scores {
    pub ptr: *const u8,
    pub dtype: DType,
    pub batch: usize,
    pub head: usize,
    pub query: usize,
    pub key: usize,
}

impl Scores {
    pub fn new(t: &RawTensor) -> Scores {
        let stride = |dim| match t.layout.dim(dim) {
            1 => 0,
            _ => t.layout.stride(dim),
        };
        Scores {
            ptr: t.ptr,
            dtype: t.dtype,
            batch: stride(0),
            head: stride(1),
            query: stride(2),
            key: stride(3),
        }
    }
}

/// Where the tokens and the heads are in a page's shape.
pub(crate) fn page_dims(layout: PageLayout) -> (usize, usize) {
    match layout {
        PageLayout::TokenMajor => (1, 2),
        PageLayout::HeadMajor => (2, 1),
    }
}
