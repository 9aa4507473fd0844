//! The KV cache's work on the GPU.

use contract::rotation::Style;

use super::device::Resources;
use super::images::{kv_append, kv_append_e4m3};
use super::rotation::{self, Rotation};
use super::rows::Divisor;
use super::table::Table;
use super::{Cuda, Run, VECTOR, check_blocks, codes, is_aligned};
use crate::backend::{CopyKind, Device, Stream};
use crate::error::Result;
use crate::problem::kv_cache::{Append, CopyPages, Factors};
use crate::tensor::RawTensor;

const OP: &str = "kv_cache_append";

/// By dtype of the new tokens, dtype of the cache, style of rotation, and elements per access.
pub(super) struct Kernels {
    floats: Table<kv_append::Arguments, 4>,
    codes: Table<kv_append_e4m3::Arguments, 4>,
}

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    Ok(Kernels {
        floats: Table::<kv_append::Arguments, 4>::new(OP, resources, |c| {
            [c.from, c.dtype, c.style, c.width]
        })?,
        codes: Table::<kv_append_e4m3::Arguments, 4>::new(OP, resources, |c| {
            [c.from, c.dtype, c.style, c.width]
        })?,
    })
}

impl Run for Append {
    fn check(&self) -> Result<()> {
        self.rotation
            .as_ref()
            .map_or(Ok(()), |rotation| rotation::check(OP, rotation))
    }

    fn run(&self, cuda: &Cuda, stream: Stream) -> Result<()> {
        append(cuda, self, stream)
    }
}

impl Run for CopyPages<'_> {
    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn run(&self, cuda: &Cuda, stream: Stream) -> Result<()> {
        // SAFETY: the cache that asks owns the pages and holds them exclusively; indices come from its
        // allocator, which gives a destination only once.
        unsafe { copy_pages(cuda, self, stream) }
    }
}

/// Writes new tokens to their pages. The tensors of new keys and values have one dtype each; they may differ.
fn append(cuda: &Cuda, p: &Append, stream: Stream) -> Result<()> {
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
        let head_dim = p.k.layout.dim(2);
        let rotation = p.rotation.as_ref().filter(|_| keys);
        let queries = p.q.as_ref().filter(|_| rotation.is_some());
        let fits = (!keys || in_vectors(&p.k, &p.k_pages, vector))
            && (!values || in_vectors(&p.v, &p.v_pages, vector))
            && queries.is_none_or(|(q, q_out)| in_vectors(q, q_out, vector))
            && rotation.is_none_or(|r| rotation::fits(r, head_dim, vector));
        let width = if fits { vector } else { 1 };
        let style = rotation
            .map_or(Style::Plain, |r| codes::style(r.style))
            .code();
        let choices = [dtype as u32, p.k_pages.dtype as u32, style, width as u32];
        // Rows are counted in 31 bits.
        let q_heads = queries.map_or(0, |(q, _)| q.layout.dim(1));
        let rows = (2 * num_heads).saturating_add(q_heads);
        let rows = check_blocks(OP, "k", num_tokens.saturating_mul(rows))? as usize;
        let blocks =
            |rows_per_block: u32| check_blocks(OP, "k", rows.div_ceil(rows_per_block as usize));
        let mut arguments = arguments(p, width, [keys, values]);
        if let Some(rotation) = rotation {
            rotate(&mut arguments, &Rotation::new(rotation, false, width));
        }
        if let Some(queries) = queries {
            turn(&mut arguments, queries, width);
        }
        // SAFETY: the problem was checked, and the cache wrote the tables: every page is one of its own.
        unsafe {
            match &p.factors {
                None => {
                    let kernel = cuda.kv_cache.floats.get(choices)?;
                    let blocks = blocks(kernel.choices.rows_per_block)?;
                    cuda.launch(OP, kernel, blocks, &arguments, stream)
                }
                Some(factors) => {
                    let kernel = cuda.kv_cache.codes.get(choices)?;
                    let blocks = blocks(kernel.choices.rows_per_block)?;
                    cuda.launch(
                        OP,
                        kernel,
                        blocks,
                        &with_factors(factors, &arguments),
                        stream,
                    )
                }
            }
        }?;
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

fn arguments(p: &Append, width: usize, [keys, values]: [bool; 2]) -> kv_append::Arguments {
    let address = |t: &RawTensor| t.ptr.addr() as u64;
    let stride = |t: &RawTensor, dim: usize| (t.layout.stride(dim) / width) as u64;
    let length = |t: &RawTensor, present: bool| match present {
        true => (t.layout.dim(2) / width) as u32,
        false => 0,
    };
    let [num_heads, page_size] = [p.k.layout.dim(1), p.k_pages.layout.dim(1)].map(Divisor::new);
    kv_append::Arguments {
        k: address(&p.k),
        v: address(&p.v),
        k_pages: address(&p.k_pages),
        v_pages: address(&p.v_pages),
        seq_lens: address(&p.seq_lens),
        cu_seqlens: address(&p.cu_seqlens),
        block_table: address(&p.block_table),
        positions: address(&p.positions),
        num_tokens: p.k.layout.dim(0) as u32,
        num_heads: num_heads.size,
        num_heads_multiplier: num_heads.multiplier,
        num_heads_shift: num_heads.shift,
        num_sequences: p.seq_lens.layout.dim(0) as u32,
        page_size: page_size.size,
        page_size_multiplier: page_size.multiplier,
        page_size_shift: page_size.shift,
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
        ..kv_append::Arguments::ZERO
    }
}

/// The same for pages of codes.
fn with_factors(factors: &Factors, a: &kv_append::Arguments) -> kv_append_e4m3::Arguments {
    macro_rules! with_those_of {
        ($($field:ident,)*) => {
            kv_append_e4m3::Arguments {
                k_factors: factors.k.ptr.addr() as u64,
                v_factors: factors.v.ptr.addr() as u64,
                $($field: a.$field,)*
            }
        };
    }
    #[rustfmt::skip]
    let arguments = with_those_of!(
            k, v, q, q_out, q_length, q_token, q_head, q_out_token, q_out_head, q_rows, q_heads,
            q_heads_multiplier, q_heads_shift, k_pages, v_pages, seq_lens, cu_seqlens, block_table, positions, factors,
            cos_table, sin_table, num_tokens, num_sequences, num_heads, num_heads_multiplier,
            num_heads_shift, page_size, page_size_multiplier, page_size_shift, pages_per_sequence,
            k_length, k_token, k_head, k_page, k_slot, k_page_head, v_length, v_token, v_head,
            v_page, v_slot, v_page_head, angle_kind, pairs, scale, direction, table_rows,
            cos_stride, sin_stride, per_head, per_half, rotated, frequencies,
    );
    arguments
}

/// Adds the rotation of the keys.
fn rotate(arguments: &mut kv_append::Arguments, rotation: &Rotation) {
    arguments.angle_kind = rotation.kind;
    arguments.pairs = rotation.pairs;
    arguments.scale = rotation.scale;
    arguments.direction = rotation.direction;
    arguments.factors = rotation.factors;
    arguments.cos_table = rotation.cos_table;
    arguments.sin_table = rotation.sin_table;
    arguments.table_rows = rotation.table_rows;
    arguments.cos_stride = rotation.cos_stride;
    arguments.sin_stride = rotation.sin_stride;
    arguments.per_head = rotation.per_head;
    arguments.per_half = rotation.per_half;
    arguments.rotated = rotation.rotated;
    arguments.frequencies = rotation.frequencies;
}

/// Adds the queries that turn with the keys.
fn turn(arguments: &mut kv_append::Arguments, (q, q_out): &(RawTensor, RawTensor), width: usize) {
    let stride = |t: &RawTensor, dim: usize| (t.layout.stride(dim) / width) as u64;
    let heads = Divisor::new(q.layout.dim(1).max(1));
    arguments.q = q.ptr.addr() as u64;
    arguments.q_out = q_out.ptr.addr() as u64;
    arguments.q_length = match q.same_as(q_out) {
        true => arguments.rotated,
        false => (q.layout.dim(2) / width) as u32,
    };
    arguments.q_token = stride(q, 0);
    arguments.q_head = stride(q, 1);
    arguments.q_out_token = stride(q_out, 0);
    arguments.q_out_head = stride(q_out, 1);
    arguments.q_rows = (q.layout.dim(0) * q.layout.dim(1)) as u32;
    arguments.q_heads = heads.size;
    arguments.q_heads_multiplier = heads.multiplier;
    arguments.q_heads_shift = heads.shift;
}

/// Queues copies of whole pages, in every layer.
///
/// # Safety
/// The cache owns the pages; every index is below their number; sources and destinations differ.
unsafe fn copy_pages(cuda: &Cuda, p: &CopyPages<'_>, stream: Stream) -> Result<()> {
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
