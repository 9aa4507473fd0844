//! The current batch: its tables on the host and on the device.

use std::ops::Range;

use crate::context::{Context, Stream};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::memory::{Buffer, Staging};
use crate::ops::kv_cache::{Batch, NO_BATCH};
use crate::tensor::TensorRef;

use super::config::{Config, Tables};
use super::sequences::Sequence;
use super::{Growth, SequenceId, reserve};

/// The tables' memory and what the last batch left in it.
#[derive(Debug)]
pub(super) struct Step {
    tables: Tables,
    device: Buffer,
    host: Vec<i32>,
    /// On the way from one to the other, so that `host` may change while earlier copies are queued.
    staging: Staging,
    /// Words in which the device may differ from the host.
    dirty: Range<usize>,
    /// With room for the largest batch, as `sorted`.
    sequences: Vec<SequenceId>,
    /// Scratch of [`Step::find_twice`].
    sorted: Vec<SequenceId>,
    num_tokens: usize,
    max_query_length: usize,
    max_sequence_length: usize,
    current: bool,
}

impl Step {
    /// Of a sequence on the host, beside the tables.
    pub const BYTES: usize = 2 * size_of::<SequenceId>();

    pub fn new(context: &Context, config: &Config) -> Result<Step> {
        let tables = Tables::new(config).ok_or_else(|| {
            Error::invalid(super::OP, "max_batch_size", "overflows the address space")
        })?;
        let bytes = tables.num_words() * size_of::<i32>();
        let device = Buffer::new(context, bytes)?;
        let mut host = Vec::new();
        reserve(super::OP, &mut host, tables.num_words())?;
        host.resize(tables.num_words(), 0);
        let (mut sequences, mut sorted) = (Vec::new(), Vec::new());
        reserve(super::OP, &mut sequences, config.max_batch_size)?;
        reserve(super::OP, &mut sorted, config.max_batch_size)?;
        Ok(Step {
            tables,
            device,
            host,
            staging: Staging::new(super::OP, context, bytes)?,
            dirty: 0..0,
            sequences,
            sorted,
            num_tokens: 0,
            max_query_length: 0,
            max_sequence_length: 0,
            current: false,
        })
    }

    /// What it has allocated on the host.
    #[cfg(test)]
    pub fn bytes(&self) -> usize {
        let sequences = self.sequences.capacity() + self.sorted.capacity();
        self.host.capacity() * size_of::<i32>() + sequences * size_of::<SequenceId>()
    }

    /// The batch is no longer current if `id` is part of it.
    pub fn forget(&mut self, id: SequenceId) {
        if self.sequences.contains(&id) {
            self.current = false;
        }
    }

    /// A sequence that a batch, which is not too large, contains twice.
    pub fn find_twice(&mut self, batch: &[(SequenceId, usize)]) -> Option<SequenceId> {
        self.sorted.clear();
        self.sorted.extend(batch.iter().map(|(id, _)| *id));
        self.sorted.sort_unstable_by_key(|id| id.as_raw());
        let twice = self.sorted.windows(2).find(|pair| pair[0] == pair[1])?;
        Some(twice[0])
    }

    /// Begins a new batch in place of the last one.
    pub fn write<'a>(&'a mut self, config: &Config) -> Writer<'a> {
        self.current = false;
        self.sequences.clear();
        (
            self.num_tokens,
            self.max_query_length,
            self.max_sequence_length,
        ) = (0, 0, 0);
        let start = self.tables.cu_seqlens();
        self.set(start, 0);
        Writer {
            step: self,
            page_size: config.page_size,
        }
    }

    pub fn batch(&self, op: &'static str) -> Result<Batch<'_>> {
        if !self.current {
            return Err(Error::invalid(op, "cache", NO_BATCH));
        }
        let tensor = |start: usize, shape: &[usize]| {
            let layout = Layout::contiguous(shape)?;
            self.device
                .tensor(start * size_of::<i32>(), DType::I32, layout)
        };
        let slice = |start: usize, len: usize| &self.host[start..start + len];
        let (t, n) = (&self.tables, self.sequences.len());
        Ok(Batch {
            num_sequences: n,
            num_tokens: self.num_tokens,
            max_query_length: self.max_query_length,
            max_sequence_length: self.max_sequence_length,
            seq_lens: tensor(t.seq_lens(), &[n])?,
            cu_seqlens: tensor(t.cu_seqlens(), &[n + 1])?,
            positions: tensor(t.positions(), &[self.num_tokens])?,
            block_table: tensor(t.block_table(), &[n, t.row])?,
            host_seq_lens: slice(t.seq_lens(), n),
            host_cu_seqlens: slice(t.cu_seqlens(), n + 1),
            host_positions: slice(t.positions(), self.num_tokens),
            host_block_table: slice(t.block_table(), n * t.row),
        })
    }

    /// Whether there is a current batch.
    pub fn is_current(&self) -> bool {
        self.current
    }

    /// What stands for every batch of so many tokens, for queries: as many sequences as there may
    /// be, with the tokens spread over them, and no tables.
    pub fn any(&self, config: &Config, num_tokens: usize) -> Result<Batch<'static>> {
        let described = |shape: &[usize]| -> Result<TensorRef<'static>> {
            let layout = Layout::contiguous(shape)?;
            // SAFETY: a view of nothing, of which queries take the shape.
            Ok(unsafe { TensorRef::from_raw(std::ptr::null(), DType::I32, layout) })
        };
        let num_sequences = config.max_batch_size;
        Ok(Batch {
            num_sequences,
            num_tokens,
            max_query_length: num_tokens.div_ceil(num_sequences),
            max_sequence_length: config.max_sequence_length,
            seq_lens: described(&[num_sequences])?,
            cu_seqlens: described(&[num_sequences + 1])?,
            positions: described(&[num_tokens])?,
            block_table: described(&[num_sequences, self.tables.row])?,
            host_seq_lens: &[],
            host_cu_seqlens: &[],
            host_positions: &[],
            host_block_table: &[],
        })
    }

    fn set(&mut self, index: usize, value: i32) {
        let word = &mut self.host[index];
        if *word != value {
            *word = value;
            self.dirty = if self.dirty.is_empty() {
                index..index + 1
            } else {
                self.dirty.start.min(index)..self.dirty.end.max(index + 1)
            };
        }
    }
}

/// Writes the tables of one batch.
pub(super) struct Writer<'a> {
    step: &'a mut Step,
    page_size: usize,
}

impl Writer<'_> {
    /// Adds a sequence with its new tokens. Sizes were checked against the tables' capacity.
    pub fn sequence(
        &mut self,
        id: SequenceId,
        sequence: &Sequence,
        num_tokens: usize,
        growth: Option<&Growth>,
    ) {
        let step = &mut *self.step;
        let (t, i) = (step.tables, step.sequences.len());
        let length = sequence.length + num_tokens;
        step.set(t.seq_lens() + i, length as i32);
        for n in 0..num_tokens {
            let position = sequence.position() + n;
            step.set(t.positions() + step.num_tokens + n, position as i32);
        }
        step.num_tokens += num_tokens;
        step.set(t.cu_seqlens() + i + 1, step.num_tokens as i32);
        step.max_query_length = step.max_query_length.max(num_tokens);
        step.max_sequence_length = step.max_sequence_length.max(length);
        let row = t.block_table() + i * t.row;
        let replaced = growth.and_then(|g| g.replaced);
        let taken = growth.map_or(&[][..], |g| &g.pages);
        let (copy, added) = taken.split_at(usize::from(replaced.is_some()).min(taken.len()));
        let filled = length.div_ceil(self.page_size);
        for (j, &page) in sequence.pages.iter().chain(added).take(filled).enumerate() {
            let page = match (replaced, copy.first()) {
                (Some((index, _)), Some(&to)) if index == j => to,
                _ => page,
            };
            step.set(row + j, page as i32);
        }
        step.sequences.push(id);
    }

    /// Brings the device up to date and makes the batch current.
    pub fn finish(self, stream: Stream) -> Result<()> {
        let step = self.step;
        // Where nothing changed, a number is written again: kernels rely on a copy before each batch, which waits for those that wrote
        // the cache (`kernels/cuda/attention/step`).
        let written = match step.dirty.is_empty() {
            true => 0..step.host.len().min(1),
            false => step.dirty.clone(),
        };
        let offset = written.start * size_of::<i32>();
        step.staging.upload(
            super::OP,
            &mut step.device,
            offset,
            &step.host[written],
            stream,
        )?;
        step.dirty = 0..0;
        step.current = true;
        Ok(())
    }
}
