//! What a cache and its sequences hold.

use crate::error::Result;

use super::config::CacheSize;
use super::pages::Page;
use super::{KvCache, SequenceId, reserve};

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
    /// What a sequence holds.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`](crate::Error::InvalidHandle) if there is no such sequence.
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
    /// [`Error::InvalidHandle`](crate::Error::InvalidHandle) if there is no such sequence.
    pub fn sequence_pages(&self, id: SequenceId) -> Result<&[u32]> {
        Ok(&self.sequences.get("kv_cache_sequence_pages", id)?.pages)
    }

    /// How the cache is used. Takes time in proportion to the pages.
    ///
    /// # Errors
    /// None is expected.
    pub fn stats(&self) -> Result<CacheStats> {
        let page_size = self.config.page_size;
        let mut filled = Vec::new();
        reserve("kv_cache_stats", &mut filled, self.pages.capacity())?;
        filled.resize(self.pages.capacity(), 0usize);
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
}
