//! The KV cache on the CPU: new tokens in parallel, each head row converted to the cache's dtype on its way to its page.

use crate::cpu::float::{convert, with_float};
use crate::cpu::rope::{Rotator, Turning};
use crate::cpu::{Cpu, Run};
use crate::error::Result;
use crate::problem::kv_cache::{Append, CopyPages};
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
