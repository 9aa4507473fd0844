//! The KV cache's work on the GPU.

use super::device::Resources;
use super::images::kv_append::Arguments;
use super::table::Table;
use super::{Cuda, VECTOR, check_blocks, is_aligned};
use crate::context::Stream;
use crate::error::Result;
use crate::memory::CopyKind;
use crate::ops::kv_cache::{Append, CopyPages};
use crate::tensor::RawTensor;

const OP: &str = "kv_cache_append";

/// By dtype of the new tokens, dtype of the cache, and elements per access.
pub(super) type Kernels = Table<Arguments, 3>;

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    Table::new(OP, resources, ["from", "dtype", "width"])
}

/// Writes new tokens to their pages. The tensors of new keys and values have one dtype each; they may differ.
pub(crate) fn append(cuda: &Cuda, p: &Append, stream: Stream) -> Result<()> {
    let (num_tokens, num_heads) = (p.k.layout.dim(0), p.k.layout.dim(1));
    if num_tokens == 0 || num_heads == 0 {
        return Ok(());
    }
    // One launch where both sides have one dtype; else one each, the other side without rows' length.
    let dtypes = [p.k.dtype, p.v.dtype];
    let sides: &[[bool; 2]] = match dtypes[0] == dtypes[1] {
        true => &[[true, true]],
        false => &[[true, false], [false, true]],
    };
    for &[keys, values] in sides {
        let dtype = if keys { dtypes[0] } else { dtypes[1] };
        let vector = VECTOR / dtype.size().max(p.k_pages.dtype.size());
        let fits = (!keys || in_vectors(&p.k, &p.k_pages, vector))
            && (!values || in_vectors(&p.v, &p.v_pages, vector));
        let width = if fits { vector } else { 1 };
        let kernel = cuda
            .kv_append
            .get([dtype as u32, p.k_pages.dtype as u32, width as u32])?;
        let rows = 2 * num_tokens * num_heads;
        let rows_per_block = kernel.info.choice("rows_per_block").max(1) as usize;
        let blocks = check_blocks(OP, "k", rows.div_ceil(rows_per_block))?;
        let arguments = arguments(p, width, [keys, values]);
        // SAFETY: the problem was checked, and the cache wrote the tables: every page is one of its own.
        unsafe { cuda.launch(OP, kernel, blocks, &arguments, stream) }?;
    }
    Ok(())
}

/// Whether rows of both begin at, and consist of, whole vectors.
fn in_vectors(from: &RawTensor, pages: &RawTensor, width: usize) -> bool {
    let strides = [from, pages].into_iter().flat_map(|t| {
        t.layout
            .strides()
            .split_last()
            .map_or(&[][..], |(_, rows)| rows)
    });
    from.layout.dim(2).is_multiple_of(width)
        && strides.copied().all(|stride| stride.is_multiple_of(width))
        && is_aligned(from, width)
        && is_aligned(pages, width)
}

fn arguments(p: &Append, width: usize, [keys, values]: [bool; 2]) -> Arguments {
    let address = |t: &RawTensor| t.ptr.addr() as u64;
    let stride = |t: &RawTensor, dim: usize| (t.layout.stride(dim) / width) as u64;
    let length = |t: &RawTensor, present: bool| match present {
        true => (t.layout.dim(2) / width) as u32,
        false => 0,
    };
    Arguments {
        k: address(&p.k),
        v: address(&p.v),
        k_pages: address(&p.k_pages),
        v_pages: address(&p.v_pages),
        seq_lens: address(&p.seq_lens),
        cu_seqlens: address(&p.cu_seqlens),
        block_table: address(&p.block_table),
        num_tokens: p.k.layout.dim(0) as u32,
        num_heads: p.k.layout.dim(1) as u32,
        num_sequences: p.seq_lens.layout.dim(0) as u32,
        page_size: p.k_pages.layout.dim(1) as u32,
        pages_per_sequence: p.block_table.layout.dim(1) as u64,
        k_length: length(&p.k, keys),
        k_token: stride(&p.k, 0),
        k_head: stride(&p.k, 1),
        k_page: stride(&p.k_pages, 0),
        k_slot: stride(&p.k_pages, 1),
        k_page_head: stride(&p.k_pages, 2),
        v_length: length(&p.v, values),
        v_token: stride(&p.v, 0),
        v_head: stride(&p.v, 1),
        v_page: stride(&p.v_pages, 0),
        v_slot: stride(&p.v_pages, 1),
        v_page_head: stride(&p.v_pages, 2),
        ..Arguments::ZERO
    }
}

/// Queues copies of whole pages, in every layer.
///
/// # Safety
/// The cache owns the pages; every index is below their number; sources and destinations differ.
pub(crate) unsafe fn copy_pages(cuda: &Cuda, p: &CopyPages<'_>, stream: Stream) -> Result<()> {
    for layer in 0..p.num_layers {
        for &(from, to) in p.copies {
            let at = |page: u32| {
                let index = layer * p.num_pages + page as usize;
                p.pages.wrapping_add(index * p.page_bytes)
            };
            let kind = CopyKind::DeviceToDevice;
            // SAFETY: the caller's promise.
            unsafe { cuda.copy("kv_cache", at(to), at(from), p.page_bytes, kind, stream) }?;
        }
    }
    Ok(())
}
