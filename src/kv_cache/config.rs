//! What a cache holds, and the memory that takes.

use crate::backend::page_locked;
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::layout::Layout;
use crate::ops::attention::PageLayout;

use super::OP;
use super::batch::Step;
use super::pages::{Page, Pages};
use super::scales::LayersScales;
use super::sequences::Sequences;

/// The shape of a cache. [`Config::new`] fills in what is usual; every field may then be changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Layers of the model, each with its own pages.
    pub num_layers: usize,
    /// Key and value heads per layer.
    pub num_kv_heads: usize,
    /// Elements of a key head.
    pub head_dim: usize,
    /// Elements of a value head.
    pub v_head_dim: usize,
    /// Tokens per page, a power of two.
    pub page_size: usize,
    /// Pages; one page holds `page_size` tokens of one sequence in every layer.
    pub num_pages: usize,
    /// What keys and values are stored as: f32, f16, bf16, or f8e4m3, whose scales
    /// [`KvCache::set_scales`](super::KvCache::set_scales) gives.
    pub dtype: DType,
    /// The order of a page's dimensions.
    pub page_layout: PageLayout,
    /// The most sequences of one batch.
    pub max_batch_size: usize,
    /// The most new tokens of one batch.
    pub max_batch_tokens: usize,
    /// The most tokens that a sequence may hold at a time.
    pub max_sequence_length: usize,
}

/// Bytes of a cache, by use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheSize {
    /// Key pages of every layer.
    pub keys: u64,
    /// Value pages of every layer.
    pub values: u64,
    /// Block tables, lengths and positions of a batch, and the scales of a cache of f8e4m3.
    pub tables: u64,
    /// On the host, beside the device's memory: what the cache knows of its pages, of its sequences
    /// and of a batch, whose tables it has here too. Counted for `max_batch_size` sequences that
    /// hold every page once; a further one takes 64 bytes or so, and 4 for each page that it
    /// shares.
    pub host: u64,
    /// On the host, for a cache on a GPU alone: page-locked memory, from which tables are copied.
    pub page_locked: u64,
}

impl CacheSize {
    /// Keys, values and tables: what [`KvCache::new`](super::KvCache::new) allocates on the device.
    pub fn total(&self) -> u64 {
        // Each part fits an isize (Config::validate), so the sum fits a u64.
        self.keys + self.values + self.tables
    }
}

impl Config {
    /// Tokens per page unless changed.
    pub const DEFAULT_PAGE_SIZE: usize = 16;
    /// Sequences per batch unless changed.
    pub const DEFAULT_MAX_BATCH_SIZE: usize = 64;
    /// New tokens per batch unless changed.
    pub const DEFAULT_MAX_BATCH_TOKENS: usize = 8192;

    /// A cache of `num_pages` pages of 16 tokens, token-major, for batches of up to 64 sequences
    /// and 8192 new tokens. A sequence may fill the whole cache.
    pub fn new(
        num_layers: usize,
        num_kv_heads: usize,
        head_dim: usize,
        num_pages: usize,
        dtype: DType,
    ) -> Config {
        Config {
            num_layers,
            num_kv_heads,
            head_dim,
            v_head_dim: head_dim,
            page_size: Self::DEFAULT_PAGE_SIZE,
            num_pages,
            dtype,
            page_layout: PageLayout::TokenMajor,
            max_batch_size: Self::DEFAULT_MAX_BATCH_SIZE,
            max_batch_tokens: Self::DEFAULT_MAX_BATCH_TOKENS,
            max_sequence_length: num_pages
                .saturating_mul(Self::DEFAULT_PAGE_SIZE)
                .min(MAX_LENGTH),
        }
    }

    /// Bytes that the cache allocates on the device: `num_layers · num_pages · page_size ·
    /// num_kv_heads · (head_dim + v_head_dim)` elements, and the tables, integers of 32 bits:
    /// `max_batch_size · (max_pages_per_sequence + 2) + 1 + max_batch_tokens`; of f8e4m3 as many words
    /// again as `4 · num_layers · num_kv_heads`. Beside them, what it keeps on the host.
    ///
    /// # Errors
    /// As [`Config::validate`].
    pub fn size(&self) -> Result<CacheSize> {
        self.validate()?;
        let pages = |dim| -> Result<u64> {
            let layer = self.pages_of(dim)?;
            let bytes = layer.span().checked_mul(self.dtype.size());
            bytes
                .and_then(|b| b.checked_mul(self.num_layers))
                .filter(|&b| b <= isize::MAX as usize)
                .map(|b| b as u64)
                .ok_or_else(|| self.too_large())
        };
        let tables = Tables::new(self).and_then(|t| t.num_words().checked_mul(size_of::<i32>()));
        let tables = tables
            .filter(|&b| b <= isize::MAX as usize)
            .ok_or_else(|| self.too_large())?;
        let scales = LayersScales::size(self).ok_or_else(|| self.too_large())?;
        // Counts are below 2^31 and the tables fit an isize, so the sum fits.
        let of_pages = self.num_pages * (Pages::BYTES + size_of::<Page>());
        let of_sequences = self.max_batch_size * (Sequences::BYTES + Step::BYTES);
        Ok(CacheSize {
            keys: pages(self.head_dim)?,
            values: pages(self.v_head_dim)?,
            tables: tables as u64 + scales as u64,
            host: tables as u64 + (of_pages + of_sequences) as u64,
            page_locked: page_locked(tables) as u64,
        })
    }

    /// Tokens that all pages hold together.
    pub fn all_tokens(&self) -> usize {
        self.num_pages
            .saturating_mul(self.page_size)
            .min(MAX_LENGTH)
    }

    /// Pages in a full row of the block table.
    pub fn max_pages_per_sequence(&self) -> usize {
        self.max_sequence_length.div_ceil(self.page_size.max(1))
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the first field that is zero, too large, or of a dtype
    /// that is not of [`DType::CACHED`].
    pub fn validate(&self) -> Result<()> {
        let fields = [
            ("num_layers", self.num_layers),
            ("num_kv_heads", self.num_kv_heads),
            ("head_dim", self.head_dim),
            ("v_head_dim", self.v_head_dim),
            ("page_size", self.page_size),
            ("num_pages", self.num_pages),
            ("max_batch_size", self.max_batch_size),
            ("max_batch_tokens", self.max_batch_tokens),
            ("max_sequence_length", self.max_sequence_length),
        ];
        for (name, value) in fields {
            // Tables are i32, so indices and lengths must fit one; for the other fields the bound
            // is merely generous.
            if value == 0 || value > MAX_LENGTH {
                let problem = text!("is {value}, allowed: 1 to {MAX_LENGTH}");
                return Err(Error::invalid(OP, name, problem));
            }
        }
        if !self.page_size.is_power_of_two() {
            let problem = text!("is {}, a power of two is needed", self.page_size);
            return Err(Error::invalid(OP, "page_size", problem));
        }
        if !DType::CACHED.contains(&self.dtype) {
            let problem = text!("is {}, allowed: f32, f16, bf16, f8e4m3", self.dtype);
            return Err(Error::invalid(OP, "dtype", problem));
        }
        Ok(())
    }

    /// The layout of one layer's pages.
    pub(crate) fn pages_of(&self, dim: usize) -> Result<Layout> {
        let shape = match self.page_layout {
            PageLayout::TokenMajor => [self.num_pages, self.page_size, self.num_kv_heads, dim],
            PageLayout::HeadMajor => [self.num_pages, self.num_kv_heads, self.page_size, dim],
        };
        Layout::contiguous(&shape).map_err(|_| self.too_large())
    }

    fn too_large(&self) -> Error {
        let problem = text!(
            "is {}: the cache would not fit the address space",
            self.num_pages
        );
        Error::invalid(OP, "num_pages", problem)
    }
}

/// The greatest length, position and page index.
pub(super) const MAX_LENGTH: usize = i32::MAX as usize;

/// Where the integers of a batch lie in the table buffer. What changes at every step comes first,
/// so that a decode step that needs no new page copies little.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tables {
    pub max_batch_size: usize,
    pub max_batch_tokens: usize,
    /// Entries of a row of the block table.
    pub row: usize,
}

impl Tables {
    pub fn new(config: &Config) -> Option<Tables> {
        let tables = Tables {
            max_batch_size: config.max_batch_size,
            max_batch_tokens: config.max_batch_tokens,
            row: config.max_pages_per_sequence(),
        };
        let rows = tables.max_batch_size.checked_mul(tables.row)?;
        // The other terms are below 2^33 (Config::validate).
        rows.checked_add(1 << 34)?;
        Some(tables)
    }

    pub fn seq_lens(&self) -> usize {
        0
    }

    pub fn cu_seqlens(&self) -> usize {
        self.max_batch_size
    }

    pub fn positions(&self) -> usize {
        self.cu_seqlens() + self.max_batch_size + 1
    }

    pub fn block_table(&self) -> usize {
        self.positions() + self.max_batch_tokens
    }

    pub fn num_words(&self) -> usize {
        self.block_table() + self.max_batch_size * self.row
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        let config = Config {
            v_head_dim: 8,
            max_batch_size: 2,
            max_batch_tokens: 10,
            ..Config::new(3, 2, 16, 5, DType::F16)
        };
        let size = config.size().unwrap();
        assert_eq!(size.keys, 3 * 5 * 16 * 2 * 16 * 2);
        assert_eq!(size.values, 3 * 5 * 16 * 2 * 8 * 2);
        assert_eq!(size.tables, (2 + 3 + 10 + 2 * 5) * 4);
        assert_eq!(size.total(), size.keys + size.values + size.tables);
        assert_eq!(size.page_locked, 2 * (32 << 10));
        let codes = Config {
            dtype: DType::F8E4M3,
            ..config
        };
        let of_codes = codes.size().unwrap();
        assert_eq!(
            [size.keys, size.values],
            [of_codes.keys, of_codes.values].map(|n| 2 * n)
        );
        assert_eq!(of_codes.tables, size.tables + 4 * 3 * 2 * 4);
        assert_eq!(of_codes.page_locked, size.page_locked);
    }

    /// A cache whose batch is full and whose pages are all taken has what the size says on the
    /// host.
    #[test]
    fn the_host_keeps_what_the_size_says() {
        let config = Config {
            max_batch_size: 4,
            max_batch_tokens: 96,
            ..Config::new(1, 1, 4, 8, DType::F32)
        };
        let ctx = crate::Context::cpu().unwrap();
        let mut cache = super::super::KvCache::new(&ctx, &config).unwrap();
        let batch = [(); 4].map(|()| (cache.create_sequence().unwrap(), 24));
        cache.extend(&batch, crate::Stream::DEFAULT).unwrap();
        let held = cache.step.bytes() + cache.pages.bytes() + cache.sequences.bytes();
        assert_eq!(held as u64, config.size().unwrap().host);
    }

    #[test]
    fn bad_fields_are_named() {
        let good = Config::new(1, 1, 8, 4, DType::F32);
        assert!(good.validate().is_ok());
        type Change = fn(&mut Config);
        let cases: [(Change, &str); 6] = [
            (
                |c| c.num_layers = 0,
                "kv_cache: num_layers is 0, allowed: 1 to 2147483647",
            ),
            (
                |c| c.page_size = 24,
                "kv_cache: page_size is 24, a power of two is needed",
            ),
            (
                |c| c.num_pages = 1 << 40,
                "kv_cache: num_pages is 1099511627776, allowed: 1 to 2147483647",
            ),
            (
                |c| c.dtype = DType::I32,
                "kv_cache: dtype is i32, allowed: f32, f16, bf16, f8e4m3",
            ),
            (
                |c| c.max_batch_size = 0,
                "kv_cache: max_batch_size is 0, allowed: 1 to 2147483647",
            ),
            (
                |c| {
                    c.num_pages = i32::MAX as usize;
                    c.num_kv_heads = 1 << 20;
                    c.head_dim = 1 << 20;
                },
                "kv_cache: num_pages is 2147483647: the cache would not fit the address space",
            ),
        ];
        for (change, message) in cases {
            let mut bad = good.clone();
            change(&mut bad);
            assert_eq!(bad.size().unwrap_err().to_string(), message);
        }
    }
}
