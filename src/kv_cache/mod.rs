//! The paged KV cache (Kwon et al. 2023, arXiv:2309.06180): keys and values of many sequences in pages that are handed out as
//! sequences grow, shared between sequences that begin alike, and taken back when they end or are evicted.
//!
//! A step of a model is one batch: [`KvCache::extend`] makes room for the new tokens of a few sequences and advances their
//! lengths; for every layer [`KvCache::append`] then writes the keys and values of these tokens, and attention reads the layer's
//! pages ([`KvCache::layer`]) through the batch's block table and lengths ([`KvCache::batch`]). To undo a step, truncate.
//!
//! ```
//! use unsloth::{Context, DType, Stream, TensorRef, kv_cache};
//!
//! let ctx = Context::cpu()?;
//! let mut cache = kv_cache::KvCache::new(&ctx, &kv_cache::Config::new(1, 1, 4, 8, DType::F32))?;
//! let sequence = cache.create_sequence()?;
//! cache.extend(&[(sequence, 2)], Stream::DEFAULT)?;
//! let (k, v) = ([1.0f32; 8], [2.0f32; 8]);
//! cache.append(
//!     &kv_cache::Append {
//!         layer: 0,
//!         k: TensorRef::from_slice(&k, &[2, 1, 4])?,
//!         v: TensorRef::from_slice(&v, &[2, 1, 4])?,
//!         q: None,
//!         rotation: None,
//!     },
//!     Stream::DEFAULT,
//! )?;
//! assert_eq!(cache.sequence(sequence)?.length, 2);
//! # Ok::<(), unsloth::Error>(())
//! ```
//!
//! Bookkeeping is on the host; keys, values, and the tables that kernels read are on the context's device. A call that fails
//! leaves every sequence as it was. Work is queued on the stream given; calls on one cache belong on one stream, or on streams
//! that the caller orders, since pages move between sequences without waiting for the device.

mod batch;
mod config;
mod growth;
mod pages;
mod scales;
mod sequences;
mod stats;

pub use crate::ops::attention::PageLayout;
pub use crate::ops::kv_cache::{Batch, Layer};
pub use config::{CacheSize, Config};
pub use sequences::SequenceId;
pub use stats::{CacheStats, SequenceInfo};

use std::marker::PhantomData;

use crate::backend::Stream;
use crate::context::Context;
use crate::error::{Error, Result, text};
use crate::memory::Buffer;
use crate::ops::attention;
use crate::ops::rope::Rotation;
use crate::ops::{kv_cache as ops, operation};
use crate::tensor::{InOut, RawTensor, TensorMut, TensorRef};
use batch::Step;
use growth::Growth;
use pages::Pages;
use scales::LayersScales;
use sequences::{Sequence, Sequences};

const OP: &str = "kv_cache";

/// Makes room in a vector of the cache's bookkeeping.
fn reserve<T>(op: &'static str, vec: &mut Vec<T>, additional: usize) -> Result<()> {
    vec.try_reserve(additional)
        .map_err(|_| Error::out_of_host_memory(op, additional.saturating_mul(size_of::<T>())))
}

const EXTEND_OUTSIDE: &str = "extend before the capture and before each launch of the graph";
const RESERVE_OUTSIDE: &str = "reserve before the capture";

/// A paged cache of keys and values. See the [module](self).
#[derive(Debug)]
pub struct KvCache {
    config: Config,
    /// `num_layers` times a layer's key pages.
    keys: Buffer,
    /// `num_layers` times a layer's value pages.
    values: Buffer,
    /// Of a cache of codes.
    scales: Option<LayersScales>,
    pages: Pages,
    sequences: Sequences,
    step: Step,
}

/// Arguments of [`KvCache::append`].
#[derive(Debug)]
pub struct Append<'a> {
    /// The layer.
    pub layer: usize,
    /// Keys of the batch's new tokens `[num_tokens, num_kv_heads, head_dim]`, in the order of the batch; f32, f16 or bf16, rounded to
    /// the cache's dtype, f8e4m3 by the layer's scales; strided, contiguous in the last dimension.
    pub k: TensorRef<'a>,
    /// Values `[num_tokens, num_kv_heads, v_head_dim]`, otherwise like `k`.
    pub v: TensorRef<'a>,
    /// Queries of the new tokens and where they go once they are rotated as the keys are, in the same launch: of the dtype of `k`,
    /// `[num_tokens, num_heads, head_dim]` with any number of heads; strided, contiguous in the last dimension. Only with `rotation`;
    /// the same bits as [`rope`](crate::ops::rope) gives.
    pub q: Option<InOut<'a>>,
    /// Rotates keys by their tokens' positions, in f32, before they are rounded to the cache's dtype; `None` if they are rotated
    /// already, or never.
    pub rotation: Option<Rotation<'a>>,
}

impl KvCache {
    /// Allocates an empty cache: exactly [`Config::size`] bytes.
    ///
    /// # Errors
    /// As [`Config::validate`]; [`Error::OutOfMemory`].
    pub fn new(context: &Context, config: &Config) -> Result<KvCache> {
        let size = config.size()?;
        // Sizes fit an isize (Config::size).
        Ok(KvCache {
            keys: Buffer::new(context, size.keys as usize)?,
            values: Buffer::new(context, size.values as usize)?,
            scales: LayersScales::new(context, config)?,
            step: Step::new(context, config)?,
            pages: Pages::new(OP, config.num_pages)?,
            sequences: Sequences::default(),
            config: config.clone(),
        })
    }

    /// Its shape.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The context it belongs to.
    pub fn context(&self) -> &Context {
        self.keys.context()
    }

    /// A new, empty sequence.
    ///
    /// # Errors
    /// 2³² sequences are live.
    pub fn create_sequence(&mut self) -> Result<SequenceId> {
        self.sequences
            .insert("kv_cache_sequence_create", Sequence::default())
    }

    /// Ends a sequence and gives back its pages.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`] if there is no such sequence.
    pub fn free_sequence(&mut self, id: SequenceId) -> Result<()> {
        let sequence = self.sequences.remove("kv_cache_sequence_free", id)?;
        self.step.forget(id);
        // The first page is the next to be taken again.
        for &page in sequence.pages.iter().rev() {
            self.pages.release(page);
        }
        Ok(())
    }

    /// A new sequence with the same tokens. The two share every page until one of them writes to it: the last page, if it is not
    /// full, is copied by the first of them to be extended.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`] if there is no such sequence.
    pub fn fork_sequence(&mut self, id: SequenceId) -> Result<SequenceId> {
        let op = "kv_cache_sequence_fork";
        let parent = self.sequences.get(op, id)?;
        let filled = &parent.pages[..parent.num_filled(self.config.page_size)];
        let mut pages = Vec::new();
        reserve(op, &mut pages, filled.len())?;
        pages.extend_from_slice(filled);
        let fork = Sequence { pages, ..*parent };
        let fork = self.sequences.insert(op, fork)?;
        for &page in &self.sequences.get(op, fork)?.pages {
            self.pages.share(page);
        }
        self.step.forget(id);
        Ok(fork)
    }

    /// Cuts a sequence to the tokens before position `num_tokens`, and gives back pages beyond them, reserved ones too.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`] if there is no such sequence; [`Error::InvalidArgument`] if `num_tokens` is beyond its end or cuts
    /// inside what was evicted.
    pub fn truncate_sequence(&mut self, id: SequenceId, num_tokens: usize) -> Result<()> {
        let op = "kv_cache_sequence_truncate";
        let page_size = self.config.page_size;
        let sequence = self.sequences.get_mut(op, id)?;
        let resume = sequence.gap_start + sequence.evicted;
        if num_tokens > sequence.position() {
            let problem = text!(
                "is {num_tokens}, the sequence ends at {}",
                sequence.position()
            );
            return Err(Error::invalid(op, "num_tokens", problem));
        }
        if sequence.evicted == 0 || num_tokens <= sequence.gap_start {
            sequence.length = num_tokens;
            (sequence.gap_start, sequence.evicted) = (0, 0);
        } else if num_tokens >= resume {
            sequence.length = num_tokens - sequence.evicted;
        } else {
            let problem = text!(
                "is {num_tokens}, positions {} to {} were evicted",
                sequence.gap_start,
                resume - 1
            );
            return Err(Error::invalid(op, "num_tokens", problem));
        }
        let kept = sequence.num_filled(page_size);
        for &page in sequence.pages.iter().skip(kept).rev() {
            self.pages.release(page);
        }
        sequence.pages.truncate(kept);
        self.step.forget(id);
        Ok(())
    }

    /// Gives back the pages between the first `num_sinks` and the last `window` tokens, and says how many tokens that were.
    ///
    /// Whole pages go: up to `page_size - 1` tokens more than asked for stay on either side. The positions of the tokens that stay
    /// do not change, nor does that of the next one; block tables and lengths count only what stays, so attention sees the sinks
    /// directly followed by the window (Xiao et al. 2023, arXiv:2309.17453, with the rotations of the original positions). What is
    /// evicted stays one range of positions: where a larger window and fewer sinks than before would split it, nothing happens.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`] if there is no such sequence.
    pub fn evict_sequence(
        &mut self,
        id: SequenceId,
        num_sinks: usize,
        window: usize,
    ) -> Result<usize> {
        let page_size = self.config.page_size;
        let sequence = self.sequences.get_mut("kv_cache_sequence_evict", id)?;
        let range = sequence.evictable(num_sinks, window, page_size);
        if range.is_empty() {
            return Ok(0);
        }
        let gone = sequence
            .pages
            .drain(range.start / page_size..range.end / page_size);
        for page in gone.rev() {
            self.pages.release(page);
        }
        sequence.gap_start = range.start;
        sequence.evicted += range.len();
        sequence.length -= range.len();
        self.step.forget(id);
        Ok(range.len())
    }

    /// Takes pages for `num_tokens` more tokens, so that extending the sequence by these cannot run out of pages (unless the
    /// sequence is forked in between).
    ///
    /// # Errors
    /// [`Error::OutOfPages`]; [`Error::InvalidHandle`] if there is no such sequence; [`Error::InvalidArgument`] if it would pass
    /// `max_sequence_length`. Everything is as it was.
    pub fn reserve_sequence(
        &mut self,
        id: SequenceId,
        num_tokens: usize,
        stream: Stream,
    ) -> Result<()> {
        let op = "kv_cache_sequence_reserve";
        let context = self.keys.context();
        context.check_not_capturing(op, stream, RESERVE_OUTSIDE)?;
        let growth = self.grow(op, &[(id, num_tokens)], stream)?;
        if !growth.is_empty() {
            self.step.forget(id);
        }
        self.commit(op, growth)
    }

    /// Makes `batch`, a list of sequences with their numbers of new tokens, the current batch: finds pages for the new tokens,
    /// advances lengths and positions, and puts the batch's tables on the device by at most one copy on `stream`, from page-locked
    /// memory and without waiting: what changed since the last batch, or nothing.
    ///
    /// [`KvCache::append`] must then write the new tokens in every layer. A number may be zero. The tables stay at the same
    /// addresses for the life of the cache; a captured graph of appends and attention can be launched again after extending a
    /// batch with the same numbers of tokens.
    ///
    /// # Errors
    /// [`Error::OutOfPages`]; [`Error::InvalidHandle`] if there is no such sequence; [`Error::InvalidArgument`] if a sequence occurs
    /// twice or would pass `max_sequence_length`, or the batch passes `max_batch_size` or `max_batch_tokens`, or the stream is being
    /// captured. Every sequence is as it was, and so is the current batch unless the device failed.
    pub fn extend(&mut self, batch: &[(SequenceId, usize)], stream: Stream) -> Result<()> {
        let op = "kv_cache_extend";
        let context = self.keys.context();
        context.check_not_capturing(op, stream, EXTEND_OUTSIDE)?;
        if batch.len() > self.config.max_batch_size {
            let problem = text!(
                "is {}, above max_batch_size {}",
                batch.len(),
                self.config.max_batch_size
            );
            return Err(Error::invalid(op, "num_sequences", problem));
        }
        let total = batch
            .iter()
            .try_fold(0usize, |sum, (_, n)| sum.checked_add(*n));
        if total.is_none_or(|total| total > self.config.max_batch_tokens) {
            let total = match total {
                Some(total) => text!("{total}"),
                None => text!("more than an integer holds"),
            };
            let problem = text!(
                "sum to {total}, above max_batch_tokens {}",
                self.config.max_batch_tokens
            );
            return Err(Error::invalid(op, "num_tokens", problem));
        }
        if let Some(twice) = self.step.find_twice(batch) {
            let problem = text!("contains {:#x} twice", twice.as_raw());
            return Err(Error::invalid(op, "sequences", problem));
        }
        let growth = self.grow(op, batch, stream)?;
        if let Err(error) = self.stage(op, batch, &growth, stream) {
            self.undo(growth);
            return Err(error);
        }
        self.commit(op, growth)?;
        for &(id, num_tokens) in batch {
            self.sequences.get_mut(op, id)?.length += num_tokens;
        }
        Ok(())
    }

    /// The current batch: that of the last [`KvCache::extend`], until one of its sequences is forked, truncated, evicted from,
    /// given more pages, or freed.
    ///
    /// # Errors
    /// There is none.
    pub fn batch(&self) -> Result<Batch<'_>> {
        self.step.batch("kv_cache_batch")
    }

    /// Gives a layer of a cache of [`DType::F8E4M3`](crate::DType::F8E4M3) the scales of its keys and of its values: one number for
    /// all heads, or one for each of `num_kv_heads`. Until then they are 1.
    ///
    /// A scale is what codes are multiplied by: [`KvCache::append`] stores the code nearest to
    /// `x * (1 / scale)`, of those beyond ±448 the last, and attention, which finds them with the
    /// layer, multiplies. The greatest magnitude of a layer's keys, divided by 448, is a good one.
    ///
    /// The numbers are copied on `stream`, and may be dropped when this returns. Scales are part of
    /// what a token is, so they are set before there are any.
    ///
    /// # Errors
    /// The cache has another dtype, there is no such layer, a sequence holds tokens, a number of
    /// scales is neither, one is not positive or has no reciprocal, or the stream is being captured.
    pub fn set_scales(&mut self, layer: usize, k: &[f32], v: &[f32], stream: Stream) -> Result<()> {
        let op = "kv_cache_scales_set";
        self.layer_tensors(op, layer)?;
        let Some(scales) = &mut self.scales else {
            let problem = text!("stores {}, scales are of f8e4m3", self.config.dtype);
            return Err(Error::invalid(op, "cache", problem));
        };
        if self.sequences.iter().any(|sequence| sequence.length > 0) {
            let problem = "holds tokens: their scales are those that they were stored with";
            return Err(Error::invalid(op, "cache", problem));
        }
        let context = self.keys.context();
        context.check_not_capturing(op, stream, "set scales before the capture")?;
        scales.set(op, layer, [("k_scale", k), ("v_scale", v)], stream)
    }

    /// Writes the keys and values of the current batch's new tokens to one layer's pages. Neither allocates nor synchronises.
    ///
    /// # Errors
    /// There is no current batch, or an argument is wrong (nothing was written), or the launch failed.
    pub fn append(&mut self, params: &Append<'_>, stream: Stream) -> Result<()> {
        let append = ops::Params {
            layer: self.lent("kv_cache_append", params.layer)?,
            k: params.k,
            v: params.v,
            q: params.q.as_ref(),
            rotation: params.rotation,
        };
        operation::launch(self.context(), &append, stream)
    }

    /// Lends a layer to an operation that appends the current batch's new tokens to it: an
    /// [`attention_block`](crate::ops::attention_block).
    ///
    /// # Errors
    /// There is no current batch or no such layer.
    pub fn lend(&mut self, layer: usize) -> Result<Layer<'_>> {
        self.lent("kv_cache_lend", layer)
    }

    /// Whether there is a current batch.
    pub fn has_batch(&self) -> bool {
        self.step.is_current()
    }

    /// Describes a layer as every batch of `num_tokens` tokens finds it, for the queries of an
    /// operation before there is a batch: `supported`, and `workspace_size`, which answers what is
    /// enough for each of these batches. What is run with it is refused.
    ///
    /// # Errors
    /// There is no such layer.
    pub fn describe(&self, layer: usize, num_tokens: usize) -> Result<Layer<'_>> {
        let any = self.step.any(&self.config, num_tokens)?;
        self.layer_of("kv_cache_describe", layer, any, true)
    }

    fn lent(&self, op: &'static str, layer: usize) -> Result<Layer<'_>> {
        self.layer_of(op, layer, self.step.batch(op)?, false)
    }

    fn layer_of<'a>(
        &'a self,
        op: &'static str,
        layer: usize,
        batch: Batch<'a>,
        any_batch: bool,
    ) -> Result<Layer<'a>> {
        let (k_pages, v_pages) = self.layer_tensors(op, layer)?;
        Ok(Layer {
            context: self.context(),
            k_pages,
            v_pages,
            scales: self.layer_scales(layer)?,
            page_layout: self.config.page_layout,
            num_kv_heads: self.config.num_kv_heads,
            head_dim: self.config.head_dim,
            v_head_dim: self.config.v_head_dim,
            max_sequence_length: self.config.max_sequence_length,
            max_batch_tokens: self.config.max_batch_tokens,
            batch,
            any_batch,
            pages: PhantomData,
        })
    }

    /// Attention of the current batch's new tokens over everything their sequences hold in a layer: arguments for
    /// [`attention::forward`], to be completed by the caller (scale, softcap, workspace).
    ///
    /// `q` and `out` are packed, `[num_tokens, num_heads, head_dim]` and `[num_tokens, num_heads, v_head_dim]`. Attention is causal.
    /// `max_seqlen_k` is the cache's `max_sequence_length`, so that workspace and launch suit every later step, those of a
    /// captured graph among them; [`Batch::max_sequence_length`] is a tighter bound for this step alone. A sliding window of
    /// attention counts the tokens held, so after an eviction it is right as long as no sinks were kept.
    ///
    /// # Errors
    /// There is no current batch or no such layer.
    pub fn attention<'a>(
        &'a self,
        layer: usize,
        q: TensorRef<'a>,
        out: TensorMut<'a>,
    ) -> Result<attention::Params<'a>> {
        let batch = self.step.batch("kv_cache_attention")?;
        let (k, v) = self.layer(layer)?;
        Ok(attention::Params {
            cu_seqlens_q: Some(batch.cu_seqlens),
            seq_lens_k: Some(batch.seq_lens),
            block_table: Some(batch.block_table),
            page_layout: self.config.page_layout,
            max_seqlen_q: batch.max_query_length,
            max_seqlen_k: self.config.max_sequence_length,
            causal: true,
            ..attention::Params::new(q, k, v, out)
        })
    }

    /// The key and value pages of a layer: `[num_pages, page_size, num_kv_heads, dim]`, or head-major
    /// `[num_pages, num_kv_heads, page_size, dim]`, with the layer's scales where they are codes.
    ///
    /// # Errors
    /// There is no such layer.
    pub fn layer(&self, layer: usize) -> Result<(TensorRef<'_>, TensorRef<'_>)> {
        let (k, v) = self.layer_tensors("kv_cache_layer", layer)?;
        let view = |t: RawTensor| {
            // SAFETY: the pages are memory that `self` owns, initialised when it was allocated, and borrowed for as long as the view
            // lives; writing takes `&mut self`.
            let view = unsafe { TensorRef::from_raw(t.ptr, t.dtype, t.layout) };
            view.on(self.context().place())
        };
        let scales = self.layer_scales(layer)?;
        Ok((
            view(k).scaled(scales.map(|scales| scales.k)),
            view(v).scaled(scales.map(|scales| scales.v)),
        ))
    }

    /// Of a layer that there is.
    fn layer_scales(&self, layer: usize) -> Result<Option<ops::LayerScales>> {
        let scales = self.scales.as_ref();
        scales.map(|scales| scales.layer(layer)).transpose()
    }

    fn layer_tensors(&self, op: &'static str, layer: usize) -> Result<(RawTensor, RawTensor)> {
        if layer >= self.config.num_layers {
            let problem = text!(
                "is {layer}, the cache has {} layers",
                self.config.num_layers
            );
            return Err(Error::invalid(op, "layer", problem));
        }
        let tensor = |buffer: &Buffer, dim| -> Result<RawTensor> {
            let offset = layer * (buffer.size() / self.config.num_layers);
            let layout = self.config.pages_of(dim)?;
            Ok(buffer.tensor(offset, self.config.dtype, layout)?.raw())
        };
        Ok((
            tensor(&self.keys, self.config.head_dim)?,
            tensor(&self.values, self.config.v_head_dim)?,
        ))
    }
}
