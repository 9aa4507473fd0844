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
mod pages;
mod sequences;

pub use crate::ops::attention::PageLayout;
pub use batch::Batch;
pub use config::{CacheSize, Config};
pub use sequences::SequenceId;

use crate::context::{Context, Stream};
use crate::error::{Error, Result};
use crate::memory::Buffer;
use crate::ops::attention;
use crate::ops::kv_cache as ops;
use crate::ops::rope::Rotation;
use crate::tensor::{RawTensor, TensorMut, TensorRef};
use batch::Step;
use pages::{Page, Pages};
use sequences::{Sequence, Sequences};

const OP: &str = "kv_cache";

/// A paged cache of keys and values. See the [module](self).
#[derive(Debug)]
pub struct KvCache {
    config: Config,
    /// `num_layers` times a layer's key pages.
    keys: Buffer,
    /// `num_layers` times a layer's value pages.
    values: Buffer,
    pages: Pages,
    sequences: Sequences,
    step: Step,
}

/// Arguments of [`KvCache::append`].
#[derive(Clone, Copy, Debug)]
pub struct Append<'a> {
    /// The layer.
    pub layer: usize,
    /// Keys of the batch's new tokens `[num_tokens, num_kv_heads, head_dim]`, in the order of the batch; f32, f16 or bf16, rounded to
    /// the cache's dtype; strided, contiguous in the last dimension.
    pub k: TensorRef<'a>,
    /// Values `[num_tokens, num_kv_heads, v_head_dim]`, otherwise like `k`.
    pub v: TensorRef<'a>,
    /// Rotates keys by their tokens' positions, in f32, before they are rounded to the cache's dtype; `None` if they are rotated
    /// already, or never.
    pub rotation: Option<Rotation<'a>>,
}

/// What a sequence holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceInfo {
    /// Tokens in the cache.
    pub length: usize,
    /// Position of the next token: tokens in the cache and evicted ones.
    pub position: usize,
    /// The first evicted position; `length` if none was.
    pub evicted_from: usize,
    /// Evicted tokens, a range of positions that starts at `evicted_from`.
    pub num_evicted: usize,
    /// Pages held, reserved ones included.
    pub num_pages: usize,
    /// Pages that other sequences hold too.
    pub num_shared_pages: usize,
    /// Tokens that can be added before a page must be found.
    pub num_reserved: usize,
}

/// How a cache is used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CacheStats {
    /// Pages in the cache.
    pub num_pages: usize,
    /// Pages that a sequence holds.
    pub num_used_pages: usize,
    /// Pages that no sequence holds.
    pub num_free_pages: usize,
    /// Pages that more than one sequence holds.
    pub num_shared_pages: usize,
    /// The most pages that were used at a time.
    pub peak_used_pages: usize,
    /// Live sequences.
    pub num_sequences: usize,
    /// Tokens held, those of shared pages counted for each sequence.
    pub num_tokens: u64,
    /// Tokens stored, those of shared pages counted once.
    pub num_stored_tokens: u64,
    /// The part of the used pages' room that stores no token: 0 with none used.
    pub fragmentation: f64,
    /// Bytes of a page over all layers.
    pub page_bytes: u64,
    /// Bytes allocated.
    pub size: CacheSize,
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
            step: Step::new(context, config)?,
            pages: Pages::new(config.num_pages),
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
        let mut fork = parent.clone();
        fork.pages
            .truncate(parent.num_filled(self.config.page_size));
        let pages = fork.pages.clone();
        let fork = self.sequences.insert(op, fork)?;
        for page in pages {
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
            let problem = format!(
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
            let problem = format!(
                "is {num_tokens}, positions {} to {} were evicted",
                sequence.gap_start,
                resume - 1
            );
            return Err(Error::invalid(op, "num_tokens", problem));
        }
        let kept = sequence.num_filled(page_size);
        let surplus = sequence.pages.split_off(kept.min(sequence.pages.len()));
        for &page in surplus.iter().rev() {
            self.pages.release(page);
        }
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
        let growth = self.grow(op, &[(id, num_tokens)], stream)?;
        if !growth.is_empty() {
            self.step.forget(id);
        }
        self.commit(op, growth)
    }

    /// Makes `batch`, a list of sequences with their numbers of new tokens, the current batch: finds pages for the new tokens,
    /// advances lengths and positions, and puts the batch's tables on the device by at most one copy on `stream`.
    ///
    /// [`KvCache::append`] must then write the new tokens in every layer. A number may be zero. The tables stay at the same
    /// addresses for the life of the cache; a captured graph of appends and attention can be launched again after extending a
    /// batch with the same numbers of tokens.
    ///
    /// # Errors
    /// [`Error::OutOfPages`]; [`Error::InvalidHandle`] if there is no such sequence; [`Error::InvalidArgument`] if a sequence occurs
    /// twice or would pass `max_sequence_length`, or the batch passes `max_batch_size` or `max_batch_tokens`. Every sequence is as
    /// it was, and so is the current batch unless the device failed.
    pub fn extend(&mut self, batch: &[(SequenceId, usize)], stream: Stream) -> Result<()> {
        let op = "kv_cache_extend";
        if batch.len() > self.config.max_batch_size {
            let problem = format!(
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
            let total = total.map_or("more than an integer holds".into(), |t| t.to_string());
            let problem = format!(
                "sum to {total}, above max_batch_tokens {}",
                self.config.max_batch_tokens
            );
            return Err(Error::invalid(op, "num_tokens", problem));
        }
        let mut ids: Vec<_> = batch.iter().map(|(id, _)| id.as_raw()).collect();
        ids.sort_unstable();
        if let Some(twice) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
            let problem = format!("contains {:#x} twice", twice[0]);
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

    /// Writes the keys and values of the current batch's new tokens to one layer's pages. Neither allocates nor synchronises.
    ///
    /// # Errors
    /// There is no current batch, or an argument is wrong (nothing was written), or the launch failed.
    pub fn append(&mut self, params: &Append<'_>, stream: Stream) -> Result<()> {
        let op = "kv_cache_append";
        let (keys, values) = self.layer_tensors(op, params.layer)?;
        let batch = self.step.batch(op)?;
        let problem = ops::Append::new(op, params, (keys, values), &batch, &self.config)?;
        ops::append(self.keys.context(), &problem, stream)
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
    /// `[num_pages, num_kv_heads, page_size, dim]`.
    ///
    /// # Errors
    /// There is no such layer.
    pub fn layer(&self, layer: usize) -> Result<(TensorRef<'_>, TensorRef<'_>)> {
        let (k, v) = self.layer_tensors("kv_cache_layer", layer)?;
        let view = |t: RawTensor| {
            // SAFETY: the pages are memory that `self` owns, initialised when it was allocated, and borrowed for as long as the view
            // lives; writing takes `&mut self`.
            unsafe { TensorRef::from_raw(t.ptr, t.dtype, t.layout) }
        };
        Ok((view(k), view(v)))
    }

    /// What a sequence holds.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`] if there is no such sequence.
    pub fn sequence(&self, id: SequenceId) -> Result<SequenceInfo> {
        let sequence = self.sequences.get("kv_cache_sequence_info", id)?;
        let shared = |page: &&Page| self.pages.is_shared(**page);
        let room = sequence.pages.len() * self.config.page_size - sequence.length;
        let last_shared = !sequence.length.is_multiple_of(self.config.page_size)
            && sequence
                .pages
                .get(sequence.length / self.config.page_size)
                .is_some_and(|&page| self.pages.is_shared(page));
        Ok(SequenceInfo {
            length: sequence.length,
            position: sequence.position(),
            evicted_from: if sequence.evicted > 0 {
                sequence.gap_start
            } else {
                sequence.length
            },
            num_evicted: sequence.evicted,
            num_pages: sequence.pages.len(),
            num_shared_pages: sequence.pages.iter().filter(shared).count(),
            num_reserved: if last_shared { 0 } else { room },
        })
    }

    /// The pages of a sequence in the order of its tokens, reserved ones last.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`] if there is no such sequence.
    pub fn sequence_pages(&self, id: SequenceId) -> Result<&[u32]> {
        Ok(&self.sequences.get("kv_cache_sequence_pages", id)?.pages)
    }

    /// How the cache is used. Takes time in proportion to the pages.
    ///
    /// # Errors
    /// None is expected.
    pub fn stats(&self) -> Result<CacheStats> {
        let page_size = self.config.page_size;
        let mut filled = vec![0usize; self.pages.capacity()];
        let (mut num_sequences, mut num_tokens) = (0, 0u64);
        for sequence in self.sequences.iter() {
            num_sequences += 1;
            num_tokens += sequence.length as u64;
            for (i, &page) in sequence.pages.iter().enumerate() {
                let here = sequence.length.saturating_sub(i * page_size).min(page_size);
                let most = &mut filled[page as usize];
                *most = here.max(*most);
            }
        }
        let num_stored_tokens: u64 = filled.iter().map(|&n| n as u64).sum();
        let room = self.pages.num_used() as u64 * page_size as u64;
        let size = self.config.size()?;
        Ok(CacheStats {
            num_pages: self.pages.capacity(),
            num_used_pages: self.pages.num_used(),
            num_free_pages: self.pages.num_free(),
            num_shared_pages: self.pages.num_shared(),
            peak_used_pages: self.pages.peak_used(),
            num_sequences,
            num_tokens,
            num_stored_tokens,
            fragmentation: if room == 0 {
                0.0
            } else {
                1.0 - num_stored_tokens as f64 / room as f64
            },
            page_bytes: (size.keys + size.values) / self.pages.capacity() as u64,
            size,
        })
    }

    fn layer_tensors(&self, op: &'static str, layer: usize) -> Result<(RawTensor, RawTensor)> {
        if layer >= self.config.num_layers {
            let problem = format!(
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

    /// Takes the pages that the sequences need for their new tokens, and copies shared pages that will be written. The sequences
    /// themselves stay as they are until [`KvCache::commit`].
    fn grow(
        &mut self,
        op: &'static str,
        batch: &[(SequenceId, usize)],
        stream: Stream,
    ) -> Result<Vec<Growth>> {
        let page_size = self.config.page_size;
        let mut growths = Vec::new();
        let mut needed = 0usize;
        // Sequences of one batch may share a last page; all but the last of its holders to come need a copy.
        let mut leaving: Vec<(Page, u32)> = Vec::new();
        for &(id, num_tokens) in batch {
            let sequence = self.sequences.get(op, id)?;
            self.check_length(op, sequence, num_tokens)?;
            let length = sequence.length + num_tokens;
            let num_new = length
                .div_ceil(page_size)
                .saturating_sub(sequence.pages.len());
            let mut replaced = None;
            let written = sequence.length / page_size;
            if num_tokens > 0
                && let Some(&page) = sequence.pages.get(written)
            {
                let left = leaving
                    .iter()
                    .find(|(p, _)| *p == page)
                    .map_or(0, |(_, n)| *n);
                if self.pages.count(page) > left + 1 {
                    replaced = Some((written, page));
                    match leaving.iter_mut().find(|(p, _)| *p == page) {
                        Some((_, n)) => *n += 1,
                        None => leaving.push((page, 1)),
                    }
                }
            }
            let wanted = num_new + usize::from(replaced.is_some());
            if wanted > 0 {
                needed += wanted;
                growths.push(Growth {
                    id,
                    replaced,
                    pages: Vec::with_capacity(wanted),
                    wanted,
                });
            }
        }
        if needed > self.pages.num_free() {
            return Err(Error::OutOfPages {
                op,
                requested: needed,
                free: self.pages.num_free(),
                capacity: self.pages.capacity(),
            });
        }
        let mut copies = Vec::new();
        for growth in &mut growths {
            growth
                .pages
                .extend((0..growth.wanted).map_while(|_| self.pages.take()));
            if let (Some((_, from)), Some(&to)) = (growth.replaced, growth.pages.first()) {
                copies.push((from, to));
            }
        }
        let copied = [&self.keys, &self.values]
            .into_iter()
            .try_for_each(|buffer| {
                let problem = ops::CopyPages {
                    pages: buffer.as_ptr(),
                    page_bytes: buffer.size() / (self.config.num_layers * self.config.num_pages),
                    num_pages: self.config.num_pages,
                    num_layers: self.config.num_layers,
                    copies: &copies,
                };
                ops::copy_pages(self.keys.context(), &problem, stream)
            });
        if let Err(error) = copied {
            self.undo(growths);
            return Err(error);
        }
        Ok(growths)
    }

    fn check_length(&self, op: &'static str, sequence: &Sequence, num_tokens: usize) -> Result<()> {
        let limit = self.config.max_sequence_length;
        if num_tokens > limit - sequence.length.min(limit) {
            let problem = format!(
                "is {num_tokens}, {} of max_sequence_length {limit} are in use",
                sequence.length
            );
            return Err(Error::invalid(op, "num_tokens", problem));
        }
        if num_tokens > config::MAX_LENGTH - sequence.position() {
            let problem = format!(
                "is {num_tokens}: positions would pass {}",
                config::MAX_LENGTH
            );
            return Err(Error::invalid(op, "num_tokens", problem));
        }
        Ok(())
    }

    /// Writes the tables of a batch as they will be once `growths` are committed.
    fn stage(
        &mut self,
        op: &'static str,
        batch: &[(SequenceId, usize)],
        growths: &[Growth],
        stream: Stream,
    ) -> Result<()> {
        let mut writer = self.step.write(&self.config);
        let mut growths = growths.iter().peekable();
        for &(id, num_tokens) in batch {
            let sequence = self.sequences.get(op, id)?;
            // Growths are in the order of the batch.
            let growth = growths.next_if(|g| g.id == id);
            writer.sequence(id, sequence, num_tokens, growth);
        }
        writer.finish(stream)
    }

    fn commit(&mut self, op: &'static str, growths: Vec<Growth>) -> Result<()> {
        for growth in growths {
            let sequence = self.sequences.get_mut(op, growth.id)?;
            let mut pages = growth.pages.into_iter();
            if let Some((index, from)) = growth.replaced
                && let Some(to) = pages.next()
            {
                sequence.pages[index] = to;
                self.pages.release(from);
            }
            sequence.pages.extend(pages);
        }
        Ok(())
    }

    /// Gives back taken pages, so that the next take gives the same ones.
    fn undo(&mut self, growths: Vec<Growth>) {
        for growth in growths.iter().rev() {
            for &page in growth.pages.iter().rev() {
                self.pages.release(page);
            }
        }
    }
}

/// Pages taken for a sequence and not yet part of it.
#[derive(Debug)]
struct Growth {
    id: SequenceId,
    /// A shared page that will be written, by its index in the sequence: the first taken page is its copy.
    replaced: Option<(usize, Page)>,
    pages: Vec<Page>,
    wanted: usize,
}
