//! Tensor maps, the kernels' argument, and the launch.

use contract::attention::Mask;

use super::super::OP;
use super::choose;
use super::{Chunk, Plan, sizes_of_keys, sizes_of_queries};
use crate::backend::Stream;
use crate::cuda::Cuda;
use crate::cuda::claims;
use crate::cuda::driver::Driver;
use crate::cuda::images::attention_forward::Arguments;
use crate::cuda::tensor_map::{COLUMNS, Fetch, TensorMap};
use crate::cuda::tuning::Hopper;
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::attention::{Keys, Problem, Queries, Rows};

/// An unlimited window: positions are below it.
const NO_LIMIT: usize = contract::attention::NO_LIMIT as usize;

/// Queues a problem that [`Plan::reaches`], with the chunk of queries before it that the plan has. `workspace` has the planned size.
pub(crate) fn forward(
    cuda: &Cuda,
    plan: &Plan<'_>,
    (p, earlier): (&Problem, Option<&Problem>),
    workspace: *mut u8,
    stream: Stream,
) -> Result<()> {
    let driver = cuda.resources.primary.driver;
    // Tensor maps are made in a context, too.
    let _entered = cuda.resources.primary.enter(OP)?;
    let mut arguments = arguments(&cuda.resources.tuning.hopper, plan, p);
    // Rows are counted from the first of all.
    let first = match (&plan.chunk, earlier) {
        (Some(chunk), Some(earlier)) => {
            add_chunk(&mut arguments, chunk, earlier);
            earlier
        }
        _ => p,
    };
    arguments.q = rows_of_queries(driver, plan, p, &first.q, p.head_dim)?;
    arguments.o = rows_of_queries(driver, plan, p, &first.out, p.head_dim_v)?;
    let box_rows = arguments.kv_box_rows as u32;
    arguments.k = rows_of_keys(driver, p, &p.k, p.head_dim, box_rows)?;
    arguments.v = rows_of_keys(driver, p, &p.v, p.head_dim_v, box_rows)?;
    if plan.counts {
        arguments.tile_counter = workspace.addr() as u64;
        arguments.launch_tag = claims::tag();
    }
    let [rows, keys] = plan.form.block;
    tracing::trace!(
        "{OP}: Hopper's kernels: {} tiles of {rows} rows and {keys} keys on {} blocks, {} heads in a tile, keys of \
         {} pairs in L2{}",
        plan.tiles,
        plan.blocks,
        1 << plan.pack_log2,
        arguments.pairs_in_l2,
        match plan.form.for_short {
            true => ", the sibling for short sequences",
            false => "",
        },
    );
    // SAFETY: the problem was checked: its tensors have the rows that the argument describes, as far as lengths and pages in device
    // memory are what the caller promises.
    unsafe { cuda.launch(OP, &plan.form.kernel, plan.blocks, &arguments, stream) }
}

/// Everything but tensor maps and the counter.
fn arguments(hopper: &Hopper, plan: &Plan<'_>, p: &Problem) -> Arguments {
    let pack = 1 << plan.pack_log2;
    let group = p.num_heads / p.num_kv_heads;
    let key_bytes = (p.head_dim + p.head_dim_v) * p.q.dtype.size();
    let mut arguments = Arguments {
        o_pointer: p.out.ptr.addr() as u64,
        o_batch_stride: p.out.outer as i64,
        o_sequence_stride: p.out.token as i64,
        o_head_stride: p.out.head as i64,
        batch: p.batch as i32,
        heads_q: p.num_heads as i32,
        heads_kv: p.num_kv_heads as i32,
        head_dim_v: p.head_dim_v as i32,
        seqlen_q: p.max_seqlen_q as i32,
        seqlen_k: p.max_seqlen_k as i32,
        pack_log2: plan.pack_log2 as i32,
        kv_box_rows: plan.form.block[1] as i32,
        window_left: window(p.window_left),
        window_right: window(p.window_right),
        ragged: i32::from(p.ragged),
        tiles: plan.tiles as i32,
        chunk_from: plan.tiles as i32,
        row_blocks: plan.row_blocks as i32,
        keys_in_l2: choose::keys_in_l2(key_bytes) as i32,
        ..Arguments::ZERO
    };
    if plan.mask != Mask::None {
        let pairs = p.batch * p.num_heads / pack;
        let bytes = p.max_seqlen_k.saturating_mul(key_bytes);
        let dim = plan.form.dims[0];
        let group = (group / pack).max(1);
        let together = choose::pairs_in_l2(hopper, dim, plan.row_blocks, bytes, group);
        arguments.pairs_in_l2 = pairs.min(together) as i32;
    }
    let factor = match p.softcap > 0.0 {
        true => {
            arguments.softcap_scale = p.scale / p.softcap;
            p.softcap
        }
        false => p.scale,
    };
    arguments.scale_log2 = factor * std::f32::consts::LOG2_E;
    if let Some(lse) = &p.lse {
        arguments.lse = lse.ptr.addr() as u64;
        arguments.lse_batch_stride = lse.outer as i64;
        arguments.lse_head_stride = lse.head as i64;
        arguments.lse_sequence_stride = lse.token as i64;
    }
    if let Some(sinks) = p.sinks {
        arguments.sinks = sinks.addr() as u64;
    }
    if let Queries::Packed { cu_seqlens, .. } = p.queries {
        arguments.cu_seqlens_q = cu_seqlens.addr() as u64;
    }
    match p.keys {
        Keys::Batched { seq_lens, .. } => arguments.seqlens_k = seq_lens.addr() as u64,
        Keys::Packed { cu_seqlens, .. } => arguments.cu_seqlens_k = cu_seqlens.addr() as u64,
        Keys::Paged {
            block_table,
            table_stride,
            page_size,
            seq_lens,
            ..
        } => {
            arguments.seqlens_k = seq_lens.addr() as u64;
            arguments.block_table = block_table.addr() as u64;
            arguments.block_table_stride = table_stride as i32;
            arguments.page_log2 = page_size.ilog2() as i32;
            // Whole boxes make up a page as well as a tile.
            let in_tile = 1 << plan.form.block[1].trailing_zeros();
            arguments.kv_box_rows = page_size.min(in_tile) as i32;
        }
    }
    arguments
}

/// Puts another chunk of queries before those of the problem.
fn add_chunk(arguments: &mut Arguments, chunk: &Chunk, earlier: &Problem) {
    arguments.o_pointer = earlier.out.ptr.addr() as u64;
    if let Some(lse) = &earlier.lse {
        arguments.lse = lse.ptr.addr() as u64;
    }
    arguments.q_begin = chunk.distance as i32;
    arguments.chunk_from = chunk.from as i32;
    arguments.chunk_seqlen_q = earlier.max_seqlen_q as i32;
    arguments.chunk_seqlen_k = earlier.max_seqlen_k as i32;
    arguments.chunk_row_blocks = chunk.row_blocks as i32;
}

/// How many keys a query sees beyond its own.
pub(super) fn window(keys: usize) -> i32 {
    keys.saturating_sub(1).min(NO_LIMIT) as i32
}

/// Of queries or output: (dim, packed heads, tokens, heads, batch).
fn rows_of_queries(
    driver: &Driver,
    plan: &Plan<'_>,
    p: &Problem,
    rows: &Rows,
    dim: usize,
) -> Result<TensorMap> {
    let pack = 1 << plan.pack_log2;
    let [outer, tokens, heads] = sizes_of_queries(p);
    let tokens = tokens + plan.chunk.map_or(0, |chunk| chunk.distance);
    let sizes = [dim, pack, tokens, heads / pack, outer];
    let strides = [rows.head, rows.token, rows.head * pack, rows.outer];
    let counts = [COLUMNS, pack as u32, 64 / pack as u32, 1, 1];
    TensorMap::new(driver, OP, rows.ptr, rows.dtype, sizes, &strides, counts)
}

/// Of keys or values: (dim, tokens, heads, sequences or pages).
pub(super) fn rows_of_keys(
    driver: &Driver,
    p: &Problem,
    rows: &Rows,
    dim: usize,
    box_rows: u32,
) -> Result<TensorMap> {
    let [outer, tokens, heads] = sizes_of_keys(p);
    let sizes = [dim, tokens, heads, outer];
    let strides = [rows.token, rows.head, rows.outer];
    let counts = [COLUMNS, box_rows, 1, 1];
    TensorMap::new(driver, OP, rows.ptr, rows.dtype, sizes, &strides, counts)
}

/// Of keys or values, or their codes, in boxes of so many whole rows of so many heads: (columns that a swizzle spans, tokens, spans of
/// a row, heads, sequences or pages).
pub(super) fn whole_rows_of_keys(
    driver: &Driver,
    fetch: Fetch,
    p: &Problem,
    rows: &Rows,
    dim: usize,
    [box_rows, box_heads]: [u32; 2],
) -> Result<TensorMap> {
    let [outer, tokens, heads] = sizes_of_keys(p);
    let columns = match rows.dtype {
        DType::F8E4M3 => dim.min(2 * COLUMNS as usize),
        _ => COLUMNS as usize,
    };
    let spans = dim / columns;
    let sizes = [columns, tokens, spans, heads, outer];
    let strides = [rows.token, columns, rows.head, rows.outer];
    let counts = [columns as u32, box_rows, spans as u32, box_heads, 1];
    let elements = (rows.dtype, fetch);
    TensorMap::fetching(driver, OP, rows.ptr, elements, sizes, &strides, counts)
}
