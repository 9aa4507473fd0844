//! The KV cache on the CPU: new tokens in parallel, each head row converted to the cache's dtype on its way to its page.

use crate::cpu::float::{BLOCK, Float, with_float};
use crate::cpu::rope::Rotator;
use crate::cpu::{Cpu, Run};
use crate::error::Result;
use crate::problem::kv_cache::{Append, CopyPages};
use crate::tensor::{RawTensor, Scratch};

impl Run for Append {
    fn run(&self, cpu: &Cpu, _: Scratch) -> Result<()> {
        append(cpu, self);
        Ok(())
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

fn append(cpu: &Cpu, p: &Append) {
    let (num_tokens, num_heads) = (p.k.layout.dim(0), p.k.layout.dim(1));
    if num_tokens == 0 {
        return;
    }
    let dims = p.k.layout.dim(2) + p.v.layout.dim(2);
    let rotator = p.rotation.as_ref().map(|rotation| {
        // SAFETY: the rotation's tensors were checked, and are initialised memory by the caller's promise.
        unsafe { Rotator::new(rotation, false) }
    });
    let half = rotator.as_ref().map_or(0, Rotator::half);
    let cost = num_heads.saturating_mul(dims).saturating_add(32 * half);
    cpu.for_each_range(num_tokens, cost, |tokens| {
        // SAFETY: the tables were written by the cache with this many entries.
        let slots = unsafe { Slots::new(p) };
        let (mut cos, mut sin) = (vec![0.0f32; half], vec![0.0f32; half]);
        let mut head_row = vec![
            0.0f32;
            if rotator.is_some() {
                p.k.layout.dim(2)
            } else {
                0
            }
        ];
        cpu.vectorize(
            #[inline(always)]
            || {
                for token in tokens.clone() {
                    let place = slots.find(token);
                    if let Some(rotator) = &rotator {
                        rotator.angles(slots.positions[token].into(), &mut cos, &mut sin);
                    }
                    for head in 0..num_heads {
                        // SAFETY: token and head are below the shape; the page and slot of each token are its own.
                        unsafe {
                            match &rotator {
                                None => store_row(&p.k, &p.k_pages, (token, head), place),
                                Some(rotator) => {
                                    load(&p.k, (token, head), &mut head_row);
                                    rotator.rotate(&mut head_row, &cos, &sin);
                                    store(&head_row, &p.k_pages, head, place);
                                }
                            }
                            store_row(&p.v, &p.v_pages, (token, head), place);
                        }
                    }
                }
            },
        );
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
            // SAFETY: the caller's promise.
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

/// Writes one head of one token.
///
/// # Safety
/// Token and head exist in `from`, page and slot in `pages`; nothing else accesses the destination.
#[inline(always)]
unsafe fn store_row(
    from: &RawTensor,
    pages: &RawTensor,
    (token, head): (usize, usize),
    place: (usize, usize),
) {
    let dim = from.layout.dim(2);
    let source = token_offset(from, (token, head));
    let target = page_offset(pages, head, place);
    if from.dtype == pages.dtype {
        let size = from.dtype.size();
        // SAFETY: the caller's promise; rows are contiguous and the tensors do not overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(
                from.ptr.add(source * size),
                pages.ptr.add(target * size),
                dim * size,
            );
        }
        return;
    }
    with_float!(from.dtype, S => with_float!(pages.dtype, D => {
        // SAFETY: as above.
        let (source, target) = unsafe {
            (
                std::slice::from_raw_parts(from.ptr.cast::<S>().add(source), dim),
                std::slice::from_raw_parts_mut(pages.ptr.cast::<D>().add(target), dim),
            )
        };
        let mut block = [0.0f32; BLOCK];
        for (source, target) in source.chunks(BLOCK).zip(target.chunks_mut(BLOCK)) {
            let block = &mut block[..source.len()];
            S::load(source, block);
            D::store(block, target);
        }
    }));
}

/// Widens one head of one token into `row`.
///
/// # Safety
/// Token and head exist in `from`, whose last dimension is as long as `row`.
#[inline(always)]
unsafe fn load(from: &RawTensor, (token, head): (usize, usize), row: &mut [f32]) {
    let source = token_offset(from, (token, head));
    with_float!(from.dtype, S => {
        // SAFETY: the caller's promise.
        let source = unsafe { std::slice::from_raw_parts(from.ptr.cast::<S>().add(source), row.len()) };
        S::load(source, row);
    });
}

/// Rounds `row` into one head of one slot.
///
/// # Safety
/// Head, page and slot exist in `pages`, whose last dimension is as long as `row`; nothing else accesses the destination.
#[inline(always)]
unsafe fn store(row: &[f32], pages: &RawTensor, head: usize, place: (usize, usize)) {
    let target = page_offset(pages, head, place);
    with_float!(pages.dtype, D => {
        // SAFETY: the caller's promise.
        let target = unsafe { std::slice::from_raw_parts_mut(pages.ptr.cast::<D>().add(target), row.len()) };
        D::store(row, target);
    });
}

/// # Safety
/// Every page index is below `num_pages`, sources and destinations differ, and nothing else accesses the pages.
unsafe fn copy_pages(p: &CopyPages<'_>) {
    for layer in 0..p.num_layers {
        for &(from, to) in p.copies {
            let at = |page: u32| (layer * p.num_pages + page as usize) * p.page_bytes;
            // SAFETY: the caller's promise.
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
