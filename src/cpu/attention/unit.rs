//! A unit of work, and where its rows come from and go to.

use std::marker::PhantomData;
use std::ops::Range;

use super::sequences::{SPLIT_KEYS, Sequence, TILE_ROWS};
use crate::cpu::float::{Float, with_float, with_float_or_e4m3};
use crate::dtype::DType;
use crate::problem::attention::{HeadScales, Keys, Problem, Rows};

/// A tile of rows of one key head, over a range of keys. Row `r` is query `r / group` of query head `r % group` among those that
/// share the key head.
pub(super) struct Unit<'a> {
    pub p: &'a Problem,
    pub sequence: &'a Sequence,
    /// The sequence's place in the batch.
    pub batch: usize,
    pub kv_head: usize,
    pub rows: Range<usize>,
    pub keys: Range<usize>,
    /// The softmax denominator starts from the sink. False in all but the first of several ranges of keys.
    pub has_sink: bool,
    /// Where rows go unless to the output: `partial_size` floats per row.
    pub partial: Option<*mut f32>,
}

/// Rows of keys or values as floats: where they lie, or widened. Between rows there may be anything, even what another thread writes,
/// so only the rows themselves are ever borrowed or read.
#[derive(Clone, Copy)]
pub(super) struct KeyRows<'t> {
    first: *const f32,
    /// Floats from row to row.
    stride: usize,
    /// Rows, and floats of a row.
    size: (usize, usize),
    _floats: PhantomData<&'t [f32]>,
}

impl KeyRows<'_> {
    /// The first row's start and the distance of rows, if there are at least `rows` rows of `width` floats.
    #[inline(always)]
    pub fn get(self, rows: usize, width: usize) -> (*const f32, usize) {
        assert!(rows <= self.size.0 && width <= self.size.1);
        (self.first, self.stride)
    }
}

/// Running softmax of one row: the greatest score, and the sum of `exp(score - max)`.
#[derive(Clone, Copy)]
pub(super) struct Softmax {
    pub max: f32,
    pub sum: f32,
}

/// Cuts buffers of these sizes from the start of `floats`.
pub(super) fn carve<const N: usize>(sizes: [usize; N], mut floats: &mut [f32]) -> [&mut [f32]; N] {
    sizes.map(|size| {
        let (buffer, rest) = std::mem::take(&mut floats).split_at_mut(size);
        floats = rest;
        buffer
    })
}

/// Floats of a partial row: the unnormalised output, max and sum.
pub(super) fn partial_size(p: &Problem) -> usize {
    p.head_dim_v + 2
}

impl<'a> Unit<'a> {
    /// Unit `index` of all sequences.
    pub fn new(
        p: &'a Problem,
        sequences: &'a [Sequence],
        index: usize,
        partials: *mut f32,
    ) -> Self {
        let batch = sequences.partition_point(|s| s.first_unit <= index) - 1;
        let sequence = &sequences[batch];
        let local = index - sequence.first_unit;
        let split = local % sequence.splits;
        let tile = local / sequence.splits % sequence.tiles;
        let kv_head = local / sequence.splits / sequence.tiles;
        let start = tile * TILE_ROWS;
        let rows = start..sequence.rows(p).min(start + TILE_ROWS);
        let mut keys = sequence.visible(p, &rows);
        let mut partial = None;
        if sequence.splits > 1 {
            keys.start += split * SPLIT_KEYS;
            keys.end = keys.end.min(keys.start + SPLIT_KEYS);
            let before = (kv_head * sequence.splits + split) * sequence.rows(p);
            let row = sequence.first_partial + before;
            partial = Some(partials.wrapping_add(row * partial_size(p)));
        }
        Unit {
            p,
            sequence,
            batch,
            kv_head,
            rows,
            keys,
            has_sink: split == 0,
            partial,
        }
    }

    /// Query and head of a row.
    #[inline(always)]
    pub fn query_head(&self, row: usize) -> (usize, usize) {
        let group = self.p.group();
        (row / group, self.kv_head * group + row % group)
    }

    /// The softmax of a row before its first key.
    #[inline(always)]
    pub fn start(&self, row: usize) -> Softmax {
        let nothing = Softmax {
            max: f32::NEG_INFINITY,
            sum: 0.0,
        };
        match self.p.sinks {
            Some(sinks) if self.has_sink => {
                let (_, head) = self.query_head(row);
                // SAFETY: checked to have an entry for every head.
                let max = unsafe { *sinks.add(head) };
                let sum = if max == f32::NEG_INFINITY { 0.0 } else { 1.0 };
                Softmax { max, sum }
            }
            _ => nothing,
        }
    }

    /// Reads the query of a row, scaled by what scores and keys are.
    #[inline(always)]
    pub fn load_query(&self, row: usize, to: &mut [f32]) {
        let (query, head) = self.query_head(row);
        let token = self.sequence.q_start + query;
        // SAFETY: the row exists: the problem was checked, and so were the sequences. Nobody writes the inputs of a call while it runs:
        // the tensors they come from were borrowed or, in C, promised for that long.
        unsafe { load(&self.p.q, self.p.q.offset(self.batch, token, head), to) };
        // SAFETY: the scales are the caller's promise, and were checked to have one for the head.
        let scale = self.p.scale * unsafe { HeadScales::of(self.p.k_scale, self.kv_head) };
        for x in to {
            *x *= scale;
        }
    }

    /// Reads a row of a tensor like `q`.
    #[inline(always)]
    pub fn load_row(&self, rows: &Rows, row: usize, to: &mut [f32]) {
        let (query, head) = self.query_head(row);
        let token = self.sequence.q_start + query;
        // SAFETY: as for the query of the row.
        unsafe { load(rows, rows.offset(self.batch, token, head), to) };
    }

    /// Widens `keys` of `k` or `v` to rows of `stride` floats.
    #[inline(always)]
    pub fn load_tile(
        &self,
        rows: &Rows,
        dim: usize,
        keys: Range<usize>,
        stride: usize,
        to: &mut [f32],
    ) {
        with_float_or_e4m3!(rows.dtype, T => {
            for (j, to) in keys.zip(to.chunks_exact_mut(stride)) {
                let (outer, token) = self.locate(j);
                let offset = rows.offset(outer, token, self.kv_head);
                // SAFETY: the row exists: the problem was checked, and so were the sequences and the block table.
                let from = unsafe {
                    std::slice::from_raw_parts(rows.ptr.cast::<T>().add(offset), dim)
                };
                T::load(from, &mut to[..dim]);
            }
        });
    }

    /// `keys` of `k` or `v` as floats: where they lie, if they are floats a constant distance apart in whole vectors (`stride` is
    /// `dim` then); else widened into `to`, `stride` apart.
    #[inline(always)]
    pub fn tile<'t>(
        &self,
        rows: &Rows,
        dim: usize,
        keys: Range<usize>,
        stride: usize,
        to: &'t mut [f32],
    ) -> KeyRows<'t>
    where
        'a: 't,
    {
        let last = keys.end - 1;
        let regular = match self.p.keys {
            Keys::Paged { page_size, .. } => {
                let pages = keys.start / page_size..last / page_size;
                let page = |i: usize| self.locate(i * page_size).0;
                // Pages that follow one another in memory are one.
                pages.is_empty()
                    || rows.outer == page_size * rows.token
                        && pages.clone().all(|i| page(i + 1) == page(i) + 1)
            }
            _ => true,
        };
        let size = (keys.len(), stride);
        if rows.dtype != DType::F32 || dim != stride || !regular {
            assert!(to.len() >= size.0 * stride);
            self.load_tile(rows, dim, keys, stride, to);
            return KeyRows {
                first: to.as_ptr(),
                stride,
                size,
                _floats: PhantomData,
            };
        }
        let (outer, token) = self.locate(keys.start);
        // Every row exists, from the first to the last: the problem was checked, and so were the sequences and the block table. Their
        // offsets fit an isize (see Layout).
        let offset = rows.offset(outer, token, self.kv_head);
        KeyRows {
            first: rows.ptr.cast::<f32>().cast_const().wrapping_add(offset),
            stride: rows.token,
            size,
            _floats: PhantomData,
        }
    }

    /// Outer and token index of a key.
    #[inline(always)]
    fn locate(&self, key: usize) -> (usize, usize) {
        match self.p.keys {
            Keys::Paged {
                block_table,
                table_stride,
                page_size,
                ..
            } => {
                let shift = page_size.trailing_zeros();
                // SAFETY: the entries of a sequence's pages were checked to exist and to name pages.
                let page = unsafe { *block_table.add(self.batch * table_stride + (key >> shift)) };
                (page as usize, key & (page_size - 1))
            }
            _ => (self.batch, self.sequence.k_start + key),
        }
    }

    /// Writes a row's end: to the output, normalised, or to the partial results.
    #[inline(always)]
    pub fn store_row(&self, row: usize, out: &mut [f32], softmax: Softmax) {
        if let Some(partial) = self.partial {
            let size = partial_size(self.p);
            // SAFETY: every unit of a split sequence has its own rows of the partial results.
            let to = unsafe { std::slice::from_raw_parts_mut(partial.add(row * size), size) };
            let (values, ends) = to.split_at_mut(out.len());
            values.copy_from_slice(out);
            ends.copy_from_slice(&[softmax.max, softmax.sum]);
            return;
        }
        store_output(
            self.p,
            self.sequence,
            self.batch,
            self.query_head(row),
            out,
            softmax,
        );
    }
}

/// Normalises a row and writes it and its LSE.
#[inline(always)]
pub(super) fn store_output(
    p: &Problem,
    sequence: &Sequence,
    batch: usize,
    (query, head): (usize, usize),
    out: &mut [f32],
    softmax: Softmax,
) {
    // Not `sum > 0`: a NaN must come through.
    let factor = if softmax.sum == 0.0 {
        0.0
    } else {
        softmax.sum.recip()
    };
    // SAFETY: as for the scale of the keys.
    let factor = factor * unsafe { HeadScales::of(p.v_scale, head / p.group()) };
    for x in out.iter_mut() {
        *x *= factor;
    }
    let token = sequence.q_start + query;
    let offset = p.out.offset(batch, token, head);
    with_float!(p.out.dtype, T => {
        // SAFETY: the row exists and belongs to this unit alone.
        let to = unsafe {
            std::slice::from_raw_parts_mut(p.out.ptr.cast::<T>().add(offset), out.len())
        };
        T::store(out, to);
    });
    if let Some(lse) = &p.lse {
        let value = match softmax.sum {
            0.0 => f32::NEG_INFINITY,
            sum => softmax.max + sum.ln(),
        };
        // SAFETY: as above.
        unsafe { *lse.ptr.cast::<f32>().add(lse.offset(batch, token, head)) = value };
    }
}

/// # Safety
/// `to.len()` elements of `rows` at `offset` are readable.
#[inline(always)]
pub(super) unsafe fn load(rows: &Rows, offset: usize, to: &mut [f32]) {
    with_float!(rows.dtype, T => {
        // SAFETY: that the elements are there and readable is what this function asks for; T is their type.
        T::load(unsafe { std::slice::from_raw_parts(rows.ptr.cast::<T>().add(offset), to.len()) }, to);
    });
}

/// # Safety
/// `row.len()` elements of `rows` at `offset` are writable, and nobody else uses them.
#[inline(always)]
pub(super) unsafe fn store_row(rows: &Rows, offset: usize, row: &[f32]) {
    with_float!(rows.dtype, T => {
        // SAFETY: as this function asks for; T is the elements' type.
        T::store(row, unsafe {
            std::slice::from_raw_parts_mut(rows.ptr.cast::<T>().add(offset), row.len())
        });
    });
}
