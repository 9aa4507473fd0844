//! The lengths of the sequences, read and checked, and how the work on them is cut.

use std::ops::Range;

use crate::error::{Error, Result, text};
use crate::problem::attention::{Keys, Problem, Queries};

/// Query rows of a unit: those of every query head that shares a key head, so that a tile of keys is widened once for all.
pub(super) const TILE_ROWS: usize = 128;

/// Keys of a unit where the queries of a sequence are too few to occupy the threads. Fixed, so that results do not depend on how many
/// threads there are.
pub(super) const SPLIT_KEYS: usize = 1024;

/// One sequence and its units of work, each being a tile of rows, of one key head, over a range of keys.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sequence {
    /// Its first query's place among packed ones.
    pub q_start: usize,
    pub q_len: usize,
    /// Its first key's place among packed ones.
    pub k_start: usize,
    pub k_len: usize,
    /// Tiles of rows of one key head.
    pub tiles: usize,
    /// Ranges of keys of one tile.
    pub splits: usize,
    /// Units of the sequences before it.
    pub first_unit: usize,
    /// Partial rows of the sequences before it; it has some if `splits > 1`.
    pub first_partial: usize,
}

impl Sequence {
    /// Rows of one key head.
    pub fn rows(&self, p: &Problem) -> usize {
        self.q_len * p.group()
    }

    pub fn units(&self, p: &Problem) -> usize {
        self.tiles * self.splits * p.num_kv_heads
    }

    /// Keys that any of these rows of a key head may see, as far as windows go.
    #[inline(always)]
    pub fn visible(&self, p: &Problem, rows: &Range<usize>) -> Range<usize> {
        if rows.is_empty() {
            return 0..0;
        }
        let first = self.position(rows.start / p.group());
        let last = self.position((rows.end - 1) / p.group());
        let start = self.window(p, first).start;
        let end = self.window(p, last).end;
        start..end.max(start)
    }

    /// Keys that every one of these rows sees, as far as windows go. Windows move forward with the rows.
    #[inline(always)]
    pub fn common(&self, p: &Problem, rows: &Range<usize>) -> Range<usize> {
        let first = self.position(rows.start / p.group());
        let last = self.position((rows.end - 1) / p.group());
        self.window(p, last).start..self.window(p, first).end
    }

    /// Rows that may see any of these keys, as far as windows go.
    pub fn seeing(&self, p: &Problem, keys: &Range<usize>) -> Range<usize> {
        if keys.is_empty() {
            return 0..0;
        }
        let bounded = |window: usize| i64::try_from(window).unwrap_or(i64::MAX);
        let (first, last) = (keys.start as i64, keys.end as i64 - 1);
        // A query at position p sees key j if j > p - window_left and j < p + window_right.
        let start = first
            .saturating_sub(bounded(p.window_right))
            .saturating_add(1);
        let end = last.saturating_add(bounded(p.window_left));
        let query = |position: i64| {
            let query = position.saturating_sub(self.position(0));
            query.clamp(0, self.q_len as i64) as usize
        };
        let (start, end) = (query(start), query(end));
        start * p.group()..end.max(start) * p.group()
    }

    /// Position of a query among the keys; negative where there are fewer keys than queries.
    #[inline(always)]
    pub fn position(&self, query: usize) -> i64 {
        query as i64 + self.k_len as i64 - self.q_len as i64
    }

    /// Keys that a query at this position sees.
    #[inline(always)]
    pub fn window(&self, p: &Problem, position: i64) -> Range<usize> {
        let bounded = |window: usize| i64::try_from(window).unwrap_or(i64::MAX);
        let clamped = |key: i64| key.clamp(0, self.k_len as i64) as usize;
        let start = clamped(
            position
                .saturating_sub(bounded(p.window_left))
                .saturating_add(1),
        );
        let end = clamped(position.saturating_add(bounded(p.window_right)));
        start..end
    }
}

impl Problem {
    /// Query heads that share a key head.
    pub(super) fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }
}

/// Where sequences start and how long they are, checked.
enum Lengths<'a> {
    /// All of one length, at the start of entries of their own.
    Equal(usize),
    /// At the start of entries of their own.
    Padded(&'a [i32]),
    /// One after another, by where they start and end.
    Packed(&'a [i32]),
}

impl Lengths<'_> {
    /// Start and length of a sequence. Entries were checked not to be negative.
    fn get(&self, index: usize) -> (usize, usize) {
        match self {
            Lengths::Equal(len) => (0, *len),
            Lengths::Padded(lens) => (0, lens[index] as usize),
            Lengths::Packed(cu) => {
                let [start, end] = [cu[index], cu[index + 1]];
                (start as usize, (end - start) as usize)
            }
        }
    }
}

/// Every sequence, in order. Nothing has been written when this fails.
pub(super) fn sequences(op: &'static str, p: &Problem) -> Result<Vec<Sequence>> {
    let queries = match p.queries {
        Queries::Batched { len } => Lengths::Equal(len),
        Queries::Packed { cu_seqlens, total } => {
            // SAFETY: checked to be `batch + 1` aligned entries, which are initialised as whoever made the tensor has promised.
            let cu = unsafe { entries(cu_seqlens, p.batch + 1) };
            let names = ["cu_seqlens_q", "q", "max_seqlen_q"];
            packed(op, names, cu, total, p.max_seqlen_q)?
        }
    };
    let keys = match p.keys {
        Keys::Batched { len, seq_lens } if seq_lens.is_null() => Lengths::Equal(len),
        // SAFETY: checked to be `batch` aligned entries, otherwise as above.
        Keys::Batched { seq_lens, .. } => padded(op, unsafe { entries(seq_lens, p.batch) }, p)?,
        Keys::Packed { cu_seqlens, total } => {
            // SAFETY: as those of the queries.
            let cu = unsafe { entries(cu_seqlens, p.batch + 1) };
            let names = ["cu_seqlens_k", "k", "max_seqlen_k"];
            packed(op, names, cu, total, p.max_seqlen_k)?
        }
        Keys::Paged { seq_lens, .. } => {
            // SAFETY: checked to be `batch` aligned entries, otherwise as above.
            let keys = padded(op, unsafe { entries(seq_lens, p.batch) }, p)?;
            check_block_table(op, p, &keys)?;
            keys
        }
    };
    let mut sequences = Vec::new();
    if sequences.try_reserve_exact(p.batch).is_err() {
        let bytes = p.batch.saturating_mul(size_of::<Sequence>());
        return Err(Error::out_of_host_memory(op, bytes));
    }
    let (mut first_unit, mut first_partial) = (0, 0);
    for batch in 0..p.batch {
        let ((q_start, q_len), (k_start, k_len)) = (queries.get(batch), keys.get(batch));
        let mut sequence = Sequence {
            q_start,
            q_len,
            k_start,
            k_len,
            tiles: 0,
            splits: 1,
            first_unit,
            first_partial,
        };
        let rows = sequence.rows(p);
        sequence.tiles = rows.div_ceil(TILE_ROWS);
        if sequence.tiles == 1 {
            let keys = sequence.visible(p, &(0..rows)).len();
            sequence.splits = keys.div_ceil(SPLIT_KEYS).max(1);
        }
        first_unit += sequence.units(p);
        if sequence.splits > 1 {
            first_partial += rows * p.num_kv_heads * sequence.splits;
        }
        sequences.push(sequence);
    }
    Ok(sequences)
}

/// # Safety
/// `ptr` points to `len` aligned, initialised entries, or `len` is 0.
unsafe fn entries<'a>(ptr: *const i32, len: usize) -> &'a [i32] {
    if len == 0 {
        return &[];
    }
    // SAFETY: that the entries are there is what this function asks for.
    unsafe { std::slice::from_raw_parts(ptr, len) }
}

/// Checks cumulative lengths.
fn packed<'a>(
    op: &'static str,
    [name, of, bound]: [&'static str; 3],
    cu: &'a [i32],
    total: usize,
    max: usize,
) -> Result<Lengths<'a>> {
    for (i, end) in cu.iter().enumerate() {
        if !usize::try_from(*end).is_ok_and(|end| end <= total) {
            let problem = text!("has {end} at index {i}, allowed: 0 to the {total} tokens of {of}");
            return Err(Error::invalid(op, name, problem));
        }
    }
    for (i, pair) in cu.windows(2).enumerate() {
        let (start, end) = (pair[0], pair[1]);
        if end < start {
            let problem = text!("falls from {start} to {end} at index {}", i + 1);
            return Err(Error::invalid(op, name, problem));
        }
        let len = (end - start) as usize;
        if len > max {
            let problem = text!("has a sequence of {len} at index {i}, above {bound} {max}");
            return Err(Error::invalid(op, name, problem));
        }
    }
    Ok(Lengths::Packed(cu))
}

/// Checks lengths of keys.
fn padded<'a>(op: &'static str, lens: &'a [i32], p: &Problem) -> Result<Lengths<'a>> {
    for (i, &len) in lens.iter().enumerate() {
        if !usize::try_from(len).is_ok_and(|len| len <= p.max_seqlen_k) {
            let problem = text!("has {len} at index {i}, allowed: 0 to {}", p.max_seqlen_k);
            return Err(Error::invalid(op, "seq_lens_k", problem));
        }
    }
    Ok(Lengths::Padded(lens))
}

/// Every entry that will be read names a page that exists.
fn check_block_table(op: &'static str, p: &Problem, keys: &Lengths<'_>) -> Result<()> {
    let Keys::Paged {
        block_table,
        table_stride,
        num_pages,
        page_size,
        ..
    } = p.keys
    else {
        return Ok(());
    };
    for b in 0..p.batch {
        let used = keys.get(b).1.div_ceil(page_size);
        if used == 0 {
            continue;
        }
        // SAFETY: `len` fits the table's row (`padded`), which was checked to be contiguous.
        let row = unsafe { entries(block_table.add(b * table_stride), used) };
        for (i, &page) in row.iter().enumerate() {
            if !usize::try_from(page).is_ok_and(|page| page < num_pages) {
                let problem = text!(
                    "has page {page} at [{b}, {i}], allowed: 0 to before the {num_pages} pages of k"
                );
                return Err(Error::invalid(op, "block_table", problem));
            }
        }
    }
    Ok(())
}
