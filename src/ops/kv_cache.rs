//! A layer of a paged cache as operations see it, and the writing of new tokens to its pages. Reached through
//! [`KvCache`](crate::KvCache).

use std::marker::PhantomData;

use crate::context::Context;
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::ops::attention::{self, PageLayout};
use crate::ops::check::{self, Arg};
use crate::ops::operation::{Operation, Tensors};
use crate::ops::rope::Rotation;
use crate::problem::{self, kv_cache as problems};
use crate::tensor::{InOut, RawTensor, Scales, TensorMut, TensorRef};

/// The tables of a cache's current batch, in the order of the list given to
/// [`KvCache::extend`](crate::KvCache::extend). Tensors are on the context's device, i32; slices are their copies
/// on the host.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Sequences.
    pub num_sequences: usize,
    /// New tokens of all sequences.
    pub num_tokens: usize,
    /// New tokens of the sequence that has the most.
    pub max_query_length: usize,
    /// Tokens of the longest sequence, new ones included.
    pub max_sequence_length: usize,
    /// Tokens of each sequence, new ones included: `[num_sequences]`.
    pub seq_lens: TensorRef<'a>,
    /// Where each sequence's new tokens start among those of the batch, and their number: `[num_sequences + 1]`.
    pub cu_seqlens: TensorRef<'a>,
    /// Position of each new token: `[num_tokens]`.
    pub positions: TensorRef<'a>,
    /// Pages of each sequence: `[num_sequences, max_pages_per_sequence]`. Entries past a sequence's last page are
    /// some page or other.
    pub block_table: TensorRef<'a>,
    /// `seq_lens` on the host.
    pub host_seq_lens: &'a [i32],
    /// `cu_seqlens` on the host.
    pub host_cu_seqlens: &'a [i32],
    /// `positions` on the host.
    pub host_positions: &'a [i32],
    /// `block_table` on the host.
    pub host_block_table: &'a [i32],
}

/// One layer of a cache, lent to an operation that writes the current batch's new tokens to it: what
/// [`KvCache::lend`](crate::KvCache::lend) gives.
#[derive(Debug)]
pub struct Layer<'a> {
    pub(crate) context: &'a Context,
    /// As the page layout says.
    pub(crate) k_pages: RawTensor,
    pub(crate) v_pages: RawTensor,
    /// Where pages hold codes.
    pub(crate) scales: Option<LayerScales>,
    pub(crate) page_layout: PageLayout,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) v_head_dim: usize,
    /// Of any sequence of the cache.
    pub(crate) max_sequence_length: usize,
    /// Of a batch.
    pub(crate) max_batch_tokens: usize,
    pub(crate) batch: Batch<'a>,
    /// Whether `batch` stands for every batch of as many tokens: it has no tables, and only queries
    /// are made.
    pub(crate) any_batch: bool,
    pub(crate) pages: PhantomData<&'a mut [u8]>,
}

/// What codes of a layer's keys and values are multiplied by: f32 `[num_kv_heads]`, on the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayerScales {
    pub k: Scales,
    pub v: Scales,
    /// The reciprocals.
    pub k_factors: RawTensor,
    pub v_factors: RawTensor,
}

/// What is wrong with a cache that is to be used and has no current batch.
pub(crate) const NO_BATCH: &str =
    "has no current batch: it must be extended first, and again after its sequences changed";

/// The name under which pages stand in messages.
pub(crate) const PAGES: &str = "the pages of the layer";

impl Layer<'_> {
    /// The same once more, for a part of the operation that it is lent to.
    pub(crate) fn again(&self) -> Layer<'_> {
        Layer { ..*self }
    }

    /// Attention of the batch's new tokens over everything their sequences hold; see
    /// [`KvCache::attention`](crate::KvCache::attention).
    ///
    /// # Safety
    /// Pages are written only by work that is queued before, as long as the result is used.
    pub(crate) unsafe fn attention<'a>(
        &'a self,
        q: TensorRef<'a>,
        out: TensorMut<'a>,
    ) -> attention::Params<'a> {
        // SAFETY: the pages are the cache's own, initialised when they were allocated, and borrowed for as long
        // as this value lives; the caller promises that no write of them runs meanwhile.
        let [k, v] = [self.k_pages, self.v_pages]
            .map(|t| unsafe { TensorRef::from_raw(t.ptr, t.dtype, t.layout) });
        let k = k.scaled(self.scales.map(|scales| scales.k));
        let v = v.scaled(self.scales.map(|scales| scales.v));
        attention::Params {
            cu_seqlens_q: Some(self.batch.cu_seqlens),
            seq_lens_k: Some(self.batch.seq_lens),
            block_table: Some(self.batch.block_table),
            page_layout: self.page_layout,
            max_seqlen_q: self.batch.max_query_length,
            max_seqlen_k: self.max_sequence_length,
            causal: true,
            ..attention::Params::new(q, k, v, out)
        }
    }

    /// Its pages, for the checks of data.
    pub(crate) fn own(&self, tensors: &mut Tensors) {
        tensors.own(PAGES, self.k_pages);
        tensors.own(PAGES, self.v_pages);
        if let Some(scales) = &self.scales {
            for own in [
                scales.k.raw(),
                scales.v.raw(),
                scales.k_factors,
                scales.v_factors,
            ] {
                tensors.own("the scales of the layer", own);
            }
        }
    }

    /// Validates an append of new keys and values to it, on behalf of `op`, and the rotation of queries with
    /// the keys.
    pub(crate) fn append(
        &self,
        op: &'static str,
        (k, v): (RawTensor, RawTensor),
        q: Option<&InOut<'_>>,
        rotation: Option<&Rotation<'_>>,
    ) -> Result<problems::Append> {
        for (name, t, dim) in [("k", &k, self.head_dim), ("v", &v, self.v_head_dim)] {
            Arg::new(op, name, t)
                .rank(&[3])?
                .dtype(DType::FLOATS)?
                .shape(&[self.batch.num_tokens, self.num_kv_heads, dim])?
                .last_contiguous()?;
        }
        if let Some(pair) = q {
            if rotation.is_none() {
                let problem = "is there without a rotation: queries are only rotated";
                return Err(Error::invalid(op, "q", problem));
            }
            let input = pair.input();
            let q = Arg::new(op, "q", &input).rank(&[3])?;
            q.dtype_of(Arg::new(op, "k", &k))?.shape(&[
                self.batch.num_tokens,
                input.layout.dim(1),
                self.head_dim,
            ])?;
            check::in_out(op, ("q", "q_out"), pair)?;
        }
        let rotation = match rotation {
            Some(rotation) => Some(self.rotation(op, rotation)?),
            None => None,
        };
        let token_major = |mut pages: RawTensor| -> Result<RawTensor> {
            if self.page_layout == PageLayout::HeadMajor {
                pages.layout = pages.layout.transposed(1, 2)?;
            }
            Ok(pages)
        };
        Ok(problems::Append {
            k,
            v,
            k_pages: token_major(self.k_pages)?,
            v_pages: token_major(self.v_pages)?,
            factors: self.scales.map(|scales| problems::Factors {
                k: scales.k_factors,
                v: scales.v_factors,
            }),
            seq_lens: self.batch.seq_lens.raw(),
            cu_seqlens: self.batch.cu_seqlens.raw(),
            positions: self.batch.positions.raw(),
            q: q.map(|pair| (pair.input(), pair.output())),
            rotation,
            block_table: self.batch.block_table.raw(),
        })
    }

    /// Validates a rotation by the positions of the batch.
    fn rotation(
        &self,
        op: &'static str,
        rotation: &Rotation<'_>,
    ) -> Result<problem::rope::Rotation> {
        let problem = rotation.problem(op, self.head_dim)?;
        if let Some(max) = problem.max_positions() {
            let positions = self.batch.host_positions.iter().copied();
            let last = positions.max().unwrap_or(-1);
            if usize::try_from(last).is_ok_and(|last| last >= max) {
                let text = text!("has {max} positions, the batch reaches position {last}");
                return Err(Error::invalid(op, "cos", text));
            }
        }
        Ok(problem)
    }
}

/// Arguments of an append.
#[derive(Debug)]
pub(crate) struct Params<'a> {
    pub layer: Layer<'a>,
    /// `[num_tokens, num_kv_heads, head_dim]`.
    pub k: TensorRef<'a>,
    /// `[num_tokens, num_kv_heads, v_head_dim]`.
    pub v: TensorRef<'a>,
    /// `[num_tokens, num_heads, head_dim]`, rotated as the keys are.
    pub q: Option<&'a InOut<'a>>,
    /// Of the keys.
    pub rotation: Option<Rotation<'a>>,
}

impl Operation for Params<'_> {
    const NAME: &'static str = "kv_cache_append";
    type Problem = problems::Append;

    fn problem(&self) -> Result<problems::Append> {
        let rotation = self.rotation.as_ref();
        let tokens = (self.k.raw(), self.v.raw());
        self.layer.append(Self::NAME, tokens, self.q, rotation)
    }

    fn tensors(&self, tensors: &mut Tensors) {
        tensors.read("k", &self.k);
        tensors.read("v", &self.v);
        if let Some(q) = self.q {
            tensors.in_out(("q", "q_out"), q);
        }
        if let Some(rotation) = &self.rotation {
            rotation.tensors(tensors);
        }
        self.layer.own(tensors);
    }
}
