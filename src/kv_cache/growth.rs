//! Growing sequences: pages are taken first, and become part of their sequences once nothing can fail any more.

use crate::backend::Stream;
use crate::context::Planned;
use crate::error::{Error, Result, text};
use crate::problem::{Plan, kv_cache::CopyPages};
use crate::tensor::Scratch;

use super::config;
use super::pages::Page;
use super::sequences::Sequence;
use super::{KvCache, SequenceId, reserve};

/// Pages taken for a sequence and not yet part of it.
#[derive(Debug)]
pub(super) struct Growth {
    pub id: SequenceId,
    /// A shared page that will be written, by its index in the sequence: the first taken page is its copy.
    pub replaced: Option<(usize, Page)>,
    pub pages: Vec<Page>,
    wanted: usize,
}

impl KvCache {
    /// Takes the pages that the sequences need for their new tokens, and copies shared pages that will be written. The sequences
    /// themselves stay as they are until [`KvCache::commit`].
    pub(super) fn grow(
        &mut self,
        op: &'static str,
        batch: &[(SequenceId, usize)],
        stream: Stream,
    ) -> Result<Vec<Growth>> {
        let page_size = self.config.page_size;
        let mut growths = Vec::new();
        reserve(op, &mut growths, batch.len())?;
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
                        None => {
                            reserve(op, &mut leaving, 1)?;
                            leaving.push((page, 1));
                        }
                    }
                }
            }
            let wanted = num_new + usize::from(replaced.is_some());
            if wanted > 0 {
                needed += wanted;
                growths.push(Growth {
                    id,
                    replaced,
                    pages: Vec::new(),
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
        // All memory is had before the first page is taken: for these, and for `commit`.
        let mut copies = Vec::new();
        reserve(op, &mut copies, growths.len())?;
        for growth in &mut growths {
            reserve(op, &mut growth.pages, growth.wanted)?;
            let sequence = self.sequences.get_mut(op, growth.id)?;
            reserve(op, &mut sequence.pages, growth.wanted)?;
        }
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
                let problem = CopyPages {
                    pages: buffer.as_ptr(),
                    page_bytes: buffer.size() / (self.config.num_layers * self.config.num_pages),
                    num_pages: self.config.num_pages,
                    num_layers: self.config.num_layers,
                    copies: &copies,
                };
                problem
                    .plan(self.keys.context())?
                    .launch(Scratch::NONE, stream)
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
            let problem = text!(
                "is {num_tokens}, {} of max_sequence_length {limit} are in use",
                sequence.length
            );
            return Err(Error::invalid(op, "num_tokens", problem));
        }
        if num_tokens > config::MAX_LENGTH - sequence.position() {
            let problem = text!(
                "is {num_tokens}: positions would pass {}",
                config::MAX_LENGTH
            );
            return Err(Error::invalid(op, "num_tokens", problem));
        }
        Ok(())
    }

    /// Writes the tables of a batch as they will be once `growths` are committed.
    pub(super) fn stage(
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

    pub(super) fn commit(&mut self, op: &'static str, growths: Vec<Growth>) -> Result<()> {
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
    pub(super) fn undo(&mut self, growths: Vec<Growth>) {
        for growth in growths.iter().rev() {
            for &page in growth.pages.iter().rev() {
                self.pages.release(page);
            }
        }
    }
}
