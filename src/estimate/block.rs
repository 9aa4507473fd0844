//! The workspace of an attention block over a cache that does not exist yet.

use crate::context::Context;
use crate::dtype::DType;
use crate::error::Result;
use crate::kv_cache::Config;
use crate::layout::Layout;
use crate::ops::attention_block::{Heads, OP, Views, view};
use crate::ops::parallel::{Parallel, Partition};
use crate::ops::parts::Parts;
use crate::ops::{attention, linear};
use crate::tensor::{TensorRef, Workspace};

/// Sizes of the block of an engine, for [`workspace_size`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub hidden: usize,
    pub num_heads: usize,
    pub dtype: DType,
    pub weight_dtype: DType,
    pub num_sequences: usize,
    pub num_tokens: usize,
}

/// What the block's query answers for a batch of a cache of this shape, once there is one, with packed projections:
/// the most that any batch of so many sequences and tokens asks for. With a group heads are a rank's.
pub(super) fn workspace_size(
    ctx: &Context,
    config: &Config,
    sizes: Sizes,
    parallel: Option<&Parallel<'_>>,
) -> Result<usize> {
    let Sizes {
        hidden,
        num_heads,
        dtype,
        weight_dtype,
        num_sequences,
        num_tokens,
    } = sizes;
    let heads = Heads {
        num_heads,
        num_kv_heads: config.num_kv_heads,
        head_dim: config.head_dim,
        v_head_dim: config.v_head_dim,
    };
    heads.check()?;
    let mut parts = Parts::<0>::new(OP, &Workspace::none());
    let views = Views::new(heads, num_tokens, None, dtype, &mut parts)?;
    let described =
        |shape: &[usize]| -> Result<TensorRef<'static>> {
            // SAFETY: queries do not look at data.
            Ok(unsafe {
                TensorRef::from_raw(std::ptr::null(), DType::I32, Layout::contiguous(shape)?)
            })
        };
    let (q, out) = (views.heads(0)?, views.attended(&views.attended)?);
    let pages = |dim| -> Result<TensorRef<'static>> {
        let layout = config.pages_of(dim)?;
        // SAFETY: as above.
        Ok(unsafe { TensorRef::from_raw(std::ptr::null(), config.dtype, layout) })
    };
    // SAFETY: as above.
    let q = unsafe { view(&q) };
    let mut attention = attention::Params {
        cu_seqlens_q: Some(described(&[num_sequences + 1])?),
        seq_lens_k: Some(described(&[num_sequences])?),
        block_table: Some(described(&[
            num_sequences,
            config.max_pages_per_sequence(),
        ])?),
        page_layout: config.page_layout,
        max_seqlen_q: num_tokens,
        max_seqlen_k: config.max_sequence_length,
        causal: true,
        ..attention::Params::new(q, pages(config.head_dim)?, pages(config.v_head_dim)?, out)
    };
    // How long the longest sequence is, is not known: the most that any may need. Only few queries need anything.
    const FEW: usize = 64;
    let least = num_tokens.div_ceil(num_sequences.max(1));
    let mut shared = 0;
    for max_seqlen_q in (least..num_tokens).take(FEW).chain([num_tokens]) {
        attention.max_seqlen_q = max_seqlen_q;
        shared = shared.max(attention::workspace_size(ctx, &attention)?);
    }
    let columns: usize = heads.columns().iter().sum();
    for (rows, columns, partition) in [
        (columns, hidden, Partition::Column),
        (hidden, heads.attended(), Partition::Row),
    ] {
        let size = linear::estimated_workspace_size(
            ctx,
            num_tokens,
            (rows, columns),
            (dtype, weight_dtype, dtype),
            parallel.map(|group| Parallel {
                partition,
                ..*group
            }),
        )?;
        shared = shared.max(size);
    }
    Ok(parts.taken() + shared)
}
