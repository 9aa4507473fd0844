//! The device work of the KV cache: writing new tokens to pages, and copying pages. Reached through
//! [`KvCache`](crate::kv_cache::KvCache).

use crate::context::{Context, Device, Stream};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kv_cache::{self, Batch, Config};
use crate::ops::attention::PageLayout;
use crate::ops::check::Arg;
use crate::ops::rope::{Rotation, RotationProblem};
use crate::tensor::RawTensor;

/// Validated arguments of [`append`]. Token `t` of sequence `b`, of which `cu_seqlens[b]..cu_seqlens[b + 1]` are the new ones, is
/// written at index `i = seq_lens[b] - (cu_seqlens[b + 1] - t)` of the sequence: to page `block_table[b, i / page_size]`, slot
/// `i % page_size`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Append {
    /// `[num_tokens, num_kv_heads, head_dim]`.
    pub k: RawTensor,
    /// `[num_tokens, num_kv_heads, v_head_dim]`.
    pub v: RawTensor,
    /// `[num_pages, page_size, num_kv_heads, head_dim]`, strided.
    pub k_pages: RawTensor,
    /// `[num_pages, page_size, num_kv_heads, v_head_dim]`, strided.
    pub v_pages: RawTensor,
    /// i32 `[num_sequences]`, contiguous.
    pub seq_lens: RawTensor,
    /// i32 `[num_sequences + 1]`, contiguous.
    pub cu_seqlens: RawTensor,
    /// i32 `[num_tokens]`, contiguous: where the rotation finds each token's position.
    pub positions: RawTensor,
    /// Of the keys.
    pub rotation: Option<RotationProblem>,
    /// i32 `[num_sequences, max_pages_per_sequence]`, contiguous.
    pub block_table: RawTensor,
}

impl Append {
    pub fn new(
        op: &'static str,
        params: &kv_cache::Append<'_>,
        (k_pages, v_pages): (RawTensor, RawTensor),
        batch: &Batch<'_>,
        config: &Config,
    ) -> Result<Append> {
        let (k, v) = (params.k.raw(), params.v.raw());
        for (name, t, dim) in [("k", &k, config.head_dim), ("v", &v, config.v_head_dim)] {
            Arg::new(op, name, t)
                .rank(&[3])?
                .dtype(DType::FLOATS)?
                .shape(&[batch.num_tokens, config.num_kv_heads, dim])?
                .last_contiguous()?
                .data()?;
        }
        let rotation = params
            .rotation
            .map(|rotation| rotation_of(op, &rotation, batch, config))
            .transpose()?;
        let token_major = |mut pages: RawTensor| -> Result<RawTensor> {
            if config.page_layout == PageLayout::HeadMajor {
                pages.layout = pages.layout.transposed(1, 2)?;
            }
            Ok(pages)
        };
        let problem = Append {
            k,
            v,
            k_pages: token_major(k_pages)?,
            v_pages: token_major(v_pages)?,
            seq_lens: batch.seq_lens.raw(),
            cu_seqlens: batch.cu_seqlens.raw(),
            positions: batch.positions.raw(),
            rotation,
            block_table: batch.block_table.raw(),
        };
        let inputs = [("k", &problem.k), ("v", &problem.v)];
        let of_rotation = problem.rotation.iter().flat_map(|r| r.tensors());
        for (name, t) in inputs.into_iter().chain(of_rotation) {
            if t.overlaps(&problem.k_pages) || t.overlaps(&problem.v_pages) {
                return Err(Error::invalid(op, name, "overlaps the pages of the layer"));
            }
        }
        Ok(problem)
    }
}

fn rotation_of(
    op: &'static str,
    rotation: &Rotation<'_>,
    batch: &Batch<'_>,
    config: &Config,
) -> Result<RotationProblem> {
    let problem = rotation.problem(op, config.head_dim)?;
    problem.check_data(op)?;
    if let Some(max) = problem.max_positions() {
        let last = batch.host_positions.iter().copied().max().unwrap_or(-1);
        if usize::try_from(last).is_ok_and(|last| last >= max) {
            let text = format!("has {max} positions, the batch reaches position {last}");
            return Err(Error::invalid(op, "cos", text));
        }
    }
    Ok(problem)
}

/// Writes new tokens to their pages.
#[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
pub(crate) fn append(ctx: &Context, problem: &Append, stream: Stream) -> Result<()> {
    match ctx.device() {
        Device::Cpu(cpu) => crate::cpu::kv_cache::append(cpu, problem),
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => crate::cuda::kv_cache::append(cuda, problem, stream)?,
    }
    Ok(())
}

/// Copies of whole pages, in every layer. Sources and destinations are all different.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyPages<'a> {
    /// Start of the first page of the first layer; layers follow one another.
    pub pages: *mut u8,
    /// Bytes of one page of one layer.
    pub page_bytes: usize,
    /// Pages per layer.
    pub num_pages: usize,
    pub num_layers: usize,
    /// (source, destination) page indices.
    pub copies: &'a [(u32, u32)],
}

/// Copies pages.
#[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
pub(crate) fn copy_pages(ctx: &Context, problem: &CopyPages<'_>, stream: Stream) -> Result<()> {
    match ctx.device() {
        Device::Cpu(_) => {
            // SAFETY: the cache owns the pages and holds them exclusively; indices come from its allocator.
            unsafe { crate::cpu::kv_cache::copy_pages(problem) };
            Ok(())
        }
        #[cfg(feature = "cuda")]
        // SAFETY: as above.
        Device::Cuda(cuda) => unsafe { crate::cuda::kv_cache::copy_pages(cuda, problem, stream) },
    }
}
