//! The KV cache on the CPU: new tokens in parallel, each head row converted to the cache's dtype on its way to its page.

use crate::cpu::float::{BLOCK, Float, convert, with_float};
use crate::cpu::rope::{Rotator, Turning};
use crate::cpu::{Cpu, Run};
use crate::dtype::E4m3;
use crate::error::Result;
use crate::problem::kv_cache::{Append, CopyPages, Factors};
use crate::tensor::{RawTensor, Scratch};

impl Run for Append {
    fn run(&self, cpu: &Cpu, _: Scratch) -> Result<()> {
        append(cpu, self)
    }
}

impl Run for CopyPages<'_> {
    fn run(&self, _: &Cpu, _: Scratch) -> Result<()> {
        // SAFETY: the cache that asks owns the pages and holds them exclusively; indices come from its
        // allocator, which gives a destination only once.
        unsafe { copy_pages(self) };
        Ok(())
    }
}

fn append(cpu: &Cpu, p: &Append) -> Result<()> {
    let (num_tokens, num_heads) = (p.k.layout.dim(0), p.k.layout.dim(1));
    if num_tokens == 0 {
        return Ok(());
    }
    let q_heads = p.q.as_ref().map_or(0, |(q, _)| q.layout.dim(1));
    let dims = p.k.layout.dim(2) + p.v.layout.dim(2);
    let rotator = match &p.rotation {
        // SAFETY: the rotation's tensors were checked, and are initialised as whoever made them has
        // promised; `p` outlives the rotator.
        Some(rotation) => Some(unsafe { Rotator::new("kv_cache_append", rotation, false)? }),
        None => None,
    };
    let half = rotator.as_ref().map_or(0, Rotator::half);
    let cost = num_heads
        .saturating_mul(dims)
        .saturating_add(q_heads.saturating_mul(p.k.layout.dim(2)))
        .saturating_add(32 * half);
    if let Some(factors) = &p.factors {
        return append_codes(cpu, p, (rotator.as_ref(), factors), cost);
    }
    cpu.for_each_range(num_tokens, cost, |tokens| {
        // SAFETY: the cache wrote its tables with this many entries, and is borrowed for the call.
        let slots = unsafe { Slots::new(p) };
        let mut scratch = Turning::default();
        cpu.vectorize(
            #[inline(always)]
            || {
                for token in tokens.clone() {
                    let place = slots.find(token);
                    // SAFETY: token and heads are below the shape; page and slot are the token's
                    // own, as the cache has given them out.
                    unsafe {
                        match &rotator {
                            None => store_rows(&p.k, &p.k_pages, token, place),
                            Some(rotator) => {
                                let position = slots.positions[token].into();
                                rotate_rows(rotator, p, token, place, position, &mut scratch);
                            }
                        }
                        store_rows(&p.v, &p.v_pages, token, place);
                    }
                }
            },
        );
    });
    Ok(())
}

/// The same to pages of codes: rotated keys are f32 until they are multiplied by their factors and rounded.
fn append_codes(
    cpu: &Cpu,
    p: &Append,
    (rotator, factors): (Option<&Rotator>, &Factors),
    cost: usize,
) -> Result<()> {
    let (num_tokens, num_heads, dim) = (p.k.layout.dim(0), p.k.layout.dim(1), p.k.layout.dim(2));
    let len = rotator.map_or(0, |_| num_heads.saturating_mul(dim));
    let items = (num_tokens, cost);
    cpu.for_each_range_with("kv_cache_append", items, len, |turned, tokens| {
        // SAFETY: as in `append`; the factors were checked to have one for each head.
        let (slots, k_factors, v_factors) = unsafe {
            let of_heads =
                |t: &RawTensor| std::slice::from_raw_parts(t.ptr.cast_const().cast(), num_heads);
            (Slots::new(p), of_heads(&factors.k), of_heads(&factors.v))
        };
        let mut scratch = Turning::default();
        cpu.vectorize(
            #[inline(always)]
            || {
                for token in tokens.clone() {
                    let place = slots.find(token);
                    // SAFETY: as in `append`.
                    unsafe {
                        match rotator {
                            None => store_codes(&p.k, &p.k_pages, k_factors, token, place),
                            Some(rotator) => {
                                let position = slots.positions[token].into();
                                turn_rows(rotator, p, token, position, &mut scratch, turned);
                                for (head, row) in turned.chunks_exact(dim).enumerate() {
                                    let to = codes_at(&p.k_pages, head, place);
                                    encode(row, k_factors[head], to);
                                }
                            }
                        }
                        store_codes(&p.v, &p.v_pages, v_factors, token, place);
                    }
                }
            },
        );
    })
}

/// One head of one slot of pages of codes.
///
/// # Safety
/// Page and slot exist, and nothing else accesses what is there.
#[inline(always)]
unsafe fn codes_at<'a>(pages: &RawTensor, head: usize, place: (usize, usize)) -> &'a mut [E4m3] {
    // SAFETY: rows are contiguous, and the caller's promise.
    unsafe {
        let to = pages.ptr.cast::<E4m3>();
        std::slice::from_raw_parts_mut(to.add(page_offset(pages, head, place)), pages.layout.dim(3))
    }
}

/// Writes the heads of one token to pages of codes.
///
/// # Safety
/// As [`store_rows`].
#[inline(always)]
unsafe fn store_codes(
    from: &RawTensor,
    pages: &RawTensor,
    factors: &[f32],
    token: usize,
    place: (usize, usize),
) {
    with_float!(from.dtype, S => {
        for (head, &factor) in factors.iter().enumerate() {
            // SAFETY: as in `store_rows`.
            let (source, target) = unsafe {
                let source = from.ptr.cast::<S>().add(token_offset(from, (token, head)));
                let target = codes_at(pages, head, place);
                (std::slice::from_raw_parts(source.cast_const(), target.len()), target)
            };
            encode(source, factor, target);
        }
    });
}

/// Elements times a factor, rounded to codes; both slices have the same length.
#[inline(always)]
fn encode<S: Float>(from: &[S], factor: f32, to: &mut [E4m3]) {
    let mut block = [0.0f32; BLOCK];
    for (from, to) in from.chunks(BLOCK).zip(to.chunks_mut(BLOCK)) {
        let block = &mut block[..from.len()];
        S::load(from, block);
        for x in block.iter_mut() {
            *x *= factor;
        }
        E4m3::store(block, to);
    }
}

/// The keys of one token, rotated, in f32: `turned` has room for all heads, one behind the other. Queries go where they go.
///
/// # Safety
/// The token exists.
#[inline(always)]
unsafe fn turn_rows(
    rotator: &Rotator,
    p: &Append,
    token: usize,
    position: i64,
    scratch: &mut Turning,
    turned: &mut [f32],
) {
    let dim = p.k.layout.dim(2);
    let q_heads = p.q.as_ref().map_or(0, |(q, _)| q.layout.dim(1));
    with_float!(p.k.dtype, S => {
        // Offsets of existing rows fit an isize (see Layout).
        let at = |t: &RawTensor, head: usize| {
            t.ptr.cast::<S>().wrapping_add(token_offset(t, (token, head)))
        };
        let row = |head: usize| at(&p.k, head).cast_const();
        for part in rotator.parts() {
            rotator.angles(position, &part, scratch);
            for (head, to) in turned.chunks_exact_mut(dim).enumerate() {
                // SAFETY: as in `rotate_rows`.
                unsafe { rotator.turn(row(head), to.as_mut_ptr(), &part, scratch) };
            }
            if let Some((from, to)) = &p.q {
                for head in 0..q_heads {
                    let (source, target) = (at(from, head).cast_const(), at(to, head));
                    // SAFETY: as above, of queries, which have the dtype of the keys.
                    unsafe { rotator.turn(source, target, &part, scratch) };
                }
            }
        }
        for (head, to) in turned.chunks_exact_mut(dim).enumerate() {
            // SAFETY: as above.
            unsafe { rotator.pass(row(head), to.as_mut_ptr(), dim) };
        }
        if let Some((from, to)) = &p.q {
            for head in 0..q_heads {
                // SAFETY: as above.
                unsafe { rotator.pass(at(from, head).cast_const(), at(to, head), dim) };
            }
        }
    });
}

/// Where new tokens go.
struct Slots<'a> {
    seq_lens: &'a [i32],
    cu_seqlens: &'a [i32],
    positions: &'a [i32],
    block_table: &'a [i32],
    row: usize,
    page_size: usize,
}

impl Slots<'_> {
    /// # Safety
    /// The tables are contiguous, initialised and not written for the lifetime of the result.
    unsafe fn new(p: &Append) -> Self {
        let table = |t: &RawTensor| {
            // SAFETY: that the table has its elements, and that they stay, is what `new` asks for.
            unsafe { std::slice::from_raw_parts(t.ptr.cast_const().cast(), t.layout.span()) }
        };
        Slots {
            seq_lens: table(&p.seq_lens),
            cu_seqlens: table(&p.cu_seqlens),
            positions: table(&p.positions),
            block_table: table(&p.block_table),
            row: p.block_table.layout.dim(1),
            page_size: p.k_pages.layout.dim(1),
        }
    }

    /// Page and slot of new token `token`.
    fn find(&self, token: usize) -> (usize, usize) {
        // The last sequence that starts at or before the token: those before it may be empty.
        let sequence = self.cu_seqlens.partition_point(|&c| c as usize <= token) - 1;
        let behind = self.cu_seqlens[sequence + 1] as usize - token;
        let index = self.seq_lens[sequence] as usize - behind;
        let page = self.block_table[sequence * self.row + index / self.page_size];
        (page as usize, index % self.page_size)
    }
}

/// Offset in elements of one head of one slot.
#[inline(always)]
fn page_offset(pages: &RawTensor, head: usize, (page, slot): (usize, usize)) -> usize {
    let strides = pages.layout.strides();
    page * strides[0] + slot * strides[1] + head * strides[2]
}

/// Offset in elements of one head of one new token.
#[inline(always)]
fn token_offset(from: &RawTensor, (token, head): (usize, usize)) -> usize {
    token * from.layout.stride(0) + head * from.layout.stride(1)
}

/// Writes the heads of one token.
///
/// # Safety
/// The token exists in `from`, page and slot in `pages`; nothing else accesses the destination.
#[inline(always)]
unsafe fn store_rows(from: &RawTensor, pages: &RawTensor, token: usize, place: (usize, usize)) {
    let (num_heads, dim) = (from.layout.dim(1), from.layout.dim(2));
    with_float!(from.dtype, S => with_float!(pages.dtype, D => {
        for head in 0..num_heads {
            // SAFETY: rows are contiguous and exist, as promised; pages are the cache's own memory,
            // which tensors of callers were checked to be apart from.
            let (source, target) = unsafe {
                let source = from.ptr.cast::<S>().add(token_offset(from, (token, head)));
                let target = pages.ptr.cast::<D>().add(page_offset(pages, head, place));
                (
                    std::slice::from_raw_parts(source.cast_const(), dim),
                    std::slice::from_raw_parts_mut(target, dim),
                )
            };
            convert(source, target);
        }
    }));
}

/// Writes the keys of one token, rotated, and turns its queries.
///
/// # Safety
/// As [`store_rows`]; queries and their outputs have the token, and nothing else accesses these.
#[inline(always)]
unsafe fn rotate_rows(
    rotator: &Rotator,
    p: &Append,
    token: usize,
    place: (usize, usize),
    position: i64,
    scratch: &mut Turning,
) {
    let (from, pages) = (&p.k, &p.k_pages);
    let (num_heads, dim) = (from.layout.dim(1), from.layout.dim(2));
    with_float!(from.dtype, S => with_float!(pages.dtype, D => {
        // Offsets of existing rows fit an isize (see Layout).
        let row = |head: usize| {
            let source = token_offset(from, (token, head));
            let target = page_offset(pages, head, place);
            (
                from.ptr.cast::<S>().cast_const().wrapping_add(source),
                pages.ptr.cast::<D>().wrapping_add(target),
            )
        };
        let query = |(from, to): &(RawTensor, RawTensor), head: usize| {
            let at = |t: &RawTensor| t.ptr.cast::<S>().wrapping_add(token_offset(t, (token, head)));
            (at(from).cast_const(), at(to))
        };
        let q_heads = p.q.as_ref().map_or(0, |(q, _)| q.layout.dim(1));
        for part in rotator.parts() {
            rotator.angles(position, &part, scratch);
            for head in 0..num_heads {
                let (source, target) = row(head);
                // SAFETY: as in `store_rows`; a head has at least the components that turn.
                unsafe { rotator.turn(source, target, &part, scratch) };
            }
            if let Some(q) = &p.q {
                for head in 0..q_heads {
                    let (source, target) = query(q, head);
                    // SAFETY: as above, of queries, which have the dtype of the keys.
                    unsafe { rotator.turn(source, target, &part, scratch) };
                }
            }
        }
        for head in 0..num_heads {
            let (source, target) = row(head);
            // SAFETY: as above.
            unsafe { rotator.pass(source, target, dim) };
        }
        if let Some(q) = &p.q {
            for head in 0..q_heads {
                let (source, target) = query(q, head);
                // SAFETY: as above.
                unsafe { rotator.pass(source, target, dim) };
            }
        }
    }));
}

/// # Safety
/// Every page index is below `num_pages`, sources and destinations differ, and nothing else accesses the pages.
unsafe fn copy_pages(p: &CopyPages<'_>) {
    for layer in 0..p.num_layers {
        for &(from, to) in p.copies {
            let at = |page: u32| (layer * p.num_pages + page as usize) * p.page_bytes;
            // SAFETY: both pages exist and are not the same one, and nothing else accesses them, as
            // the caller promises; pages do not overlap.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    p.pages.add(at(from)),
                    p.pages.add(at(to)),
                    p.page_bytes,
                );
            }
        }
    }
}
