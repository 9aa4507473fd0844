//! Validation: what a call is, its workspace, and whether its data is there.

use arrayvec::ArrayVec;

use super::steps::{Mode, within};
use super::views::{Heads, Views, aligned, too_many, view};
use super::{OP, Params, Projections};
use crate::context::Context;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kv_cache::{Config, KvCache};
use crate::layout::{Layout, MAX_RANK};
use crate::ops::check::{Arg, with_last};
use crate::ops::linear::Weights;
use crate::ops::rope::Positions;
use crate::ops::{attention, linear};
use crate::tensor::{RawTensor, Scratch, TensorRef, Workspace};

/// Sizes of a validated call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub dtype: DType,
    pub num_tokens: usize,
    /// Batch size and sequence length of tokens in a batch.
    pub batched: Option<(usize, usize)>,
    pub heads: Heads,
    pub attention_workspace: usize,
    /// What is needed: the projections may have use for more.
    pub workspace_size: usize,
}

impl Plan {
    /// Validates everything but data.
    pub fn new(
        ctx: &Context,
        params: &Params<'_>,
        cached: Option<(&KvCache, usize)>,
    ) -> Result<Plan> {
        let x = params.x.raw();
        let packed = cached.is_some() || params.cu_seqlens.is_some();
        let arg = Arg::new(OP, "x", &x)
            .rank(if packed { &[2] } else { &[2, 3] })?
            .dtype(DType::FLOATS)?
            .last_contiguous()?;
        let hidden = x.layout.dim(x.layout.rank() - 1);
        let heads = Heads {
            num_heads: params.num_heads,
            num_kv_heads: params.num_kv_heads,
            head_dim: params.head_dim,
            v_head_dim: params.v_head_dim,
        };
        heads.check()?;
        for (weights, names, rows) in params.weights(heads) {
            let problem = weights.problem(OP, names, hidden)?;
            expect_rows(names.0, problem.out_features(), rows)?;
        }
        let names = ("out_weight", "out_bias");
        let out = params.out_projection.problem(OP, names, heads.attended())?;
        let mut room = [0; MAX_RANK];
        params
            .output
            .check(OP, arg, with_last(&x, out.out_features(), &mut room))?;
        if params.cu_seqlens.is_some() && cached.is_some() {
            let problem = "is given together with a cache, which has its own";
            return Err(Error::invalid(OP, "cu_seqlens", problem));
        }
        if params.cu_seqlens.is_some()
            && params.rotation.is_some()
            && matches!(params.positions, Positions::From(_))
        {
            let problem = "are absent: packed sequences need them for the rotation";
            return Err(Error::invalid(OP, "positions", problem));
        }
        let mut plan = Plan {
            dtype: x.dtype,
            num_tokens: x.layout.num_rows(),
            batched: (x.layout.rank() == 3).then(|| (x.layout.dim(0), x.layout.dim(1))),
            heads,
            attention_workspace: 0,
            workspace_size: 0,
        };
        if let Some((cache, layer)) = cached {
            plan.check_cache(params, cache, layer)?;
        }
        let views = Views::new(&plan, std::ptr::null_mut())?;
        {
            let attention = plan.attention(params, cached, &views, Workspace::none())?;
            plan.attention_workspace = within(attention::workspace_size(ctx, &attention))?;
        }
        plan.workspace_size = plan.scratch()? + plan.attention_workspace;
        let cache = cached.map(|(cache, _)| cache);
        plan.prepare(ctx, params, cache, &views, Mode::Check)?;
        Ok(plan)
    }

    /// Bytes before attention's own workspace.
    pub fn scratch(&self) -> Result<usize> {
        let columns: usize = self.heads.columns().iter().sum();
        [columns, self.heads.attended()]
            .into_iter()
            .try_fold(0usize, |sum, columns| {
                let bytes = self
                    .num_tokens
                    .checked_mul(columns)?
                    .checked_mul(self.dtype.size())?;
                sum.checked_add(aligned(bytes))
            })
            .filter(|&bytes| bytes <= isize::MAX as usize / 2)
            .ok_or_else(|| too_many(self.num_tokens))
    }

    fn check_cache(&self, params: &Params<'_>, cache: &KvCache, layer: usize) -> Result<()> {
        let config = cache.config();
        if layer >= config.num_layers {
            let problem = format!("is {layer}, the cache has {} layers", config.num_layers);
            return Err(Error::invalid(OP, "layer", problem));
        }
        for (name, value, held) in [
            ("num_kv_heads", self.heads.num_kv_heads, config.num_kv_heads),
            ("head_dim", self.heads.head_dim, config.head_dim),
            ("v_head_dim", self.heads.v_head_dim, config.v_head_dim),
        ] {
            if value != held {
                let problem = format!("is {value}, the cache has {held}");
                return Err(Error::invalid(OP, name, problem));
            }
        }
        let batch = within(cache.batch())?;
        if batch.num_tokens != self.num_tokens {
            let problem = format!(
                "has {} tokens, the cache's batch has {}",
                self.num_tokens, batch.num_tokens
            );
            return Err(Error::invalid(OP, "x", problem));
        }
        if params.bidirectional {
            let problem = "is set: with a cache attention is causal";
            return Err(Error::invalid(OP, "bidirectional", problem));
        }
        Ok(())
    }

    /// The workspace with which the block is the fastest: behind its scratch memory, attention and the projections share the rest.
    pub fn wanted(&self, ctx: &Context, params: &Params<'_>) -> Result<usize> {
        let products = self.products_size(ctx, params)?;
        Ok(self.scratch()? + self.attention_workspace.max(products))
    }

    /// Pointers, alignment, overlap and workspace; gives the workspace's address, and the part of it that projections have use for.
    pub fn check_data(
        &self,
        ctx: &Context,
        params: &Params<'_>,
        cached: Option<(&KvCache, usize)>,
    ) -> Result<(*mut u8, Scratch)> {
        /// `x`, four weights and biases, five optional tensors, positions, two of a rotation; and a cache's two.
        const MOST: usize = 19;
        let mut tensors = ArrayVec::<(&str, RawTensor), MOST>::new();
        tensors.push(("x", params.x.raw()));
        let weights = params.weights(self.heads).into_iter();
        let out = (params.out_projection, ("out_weight", "out_bias"), 0);
        for (weights, names, _) in weights.chain([out]) {
            tensors.push((names.0, weights.weight.raw()));
            tensors.extend(weights.bias.map(|bias| (names.1, bias.raw())));
        }
        let optional = [
            ("q_norm", params.q_norm),
            ("k_norm", params.k_norm),
            ("cu_seqlens", params.cu_seqlens),
            ("alibi_slopes", params.alibi_slopes),
            ("sinks", params.sinks),
        ];
        tensors.extend(
            optional
                .iter()
                .filter_map(|(n, t)| t.map(|t| (*n, t.raw()))),
        );
        if let Positions::PerToken(positions) = &params.positions
            && cached.is_none()
        {
            tensors.push(("positions", positions.raw()));
        }
        if let Some(rotation) = &params.rotation {
            let rotation = rotation.problem(OP, self.heads.head_dim)?;
            tensors.extend(rotation.tensors().map(|(name, t)| (name, *t)));
        }
        let pages = match cached {
            None => None,
            Some((cache, layer)) => {
                let (k, v) = cache.layer(layer)?;
                Some([k.raw(), v.raw()])
            }
        };
        let mut inputs = ArrayVec::<Arg<'_>, MOST>::new();
        for (name, tensor) in &tensors {
            inputs.push(Arg::new(OP, name, tensor).data()?);
        }
        for (name, t) in ["the cache's keys", "the cache's values"]
            .iter()
            .zip(pages.iter().flatten())
        {
            inputs.push(Arg::new(OP, name, t));
        }
        params.output.check_data(OP, &inputs)?;
        let workspace = params.workspace.check(OP, self.workspace_size)?;
        let start = self.scratch()?;
        let tail = params.workspace.size() - start;
        let products = match tail {
            0 => 0,
            _ => self.products_size(ctx, params)?,
        };
        let products = if products <= tail { products } else { 0 };
        let scratch = Scratch {
            ptr: workspace,
            size: self.workspace_size.max(start + products),
        };
        let scratch = scratch.raw()?;
        let scratch = Arg::new(OP, "workspace", &scratch);
        for input in inputs {
            scratch.disjoint(input)?;
        }
        scratch.disjoint(Arg::new(OP, "out", &params.output.out()))?;
        if let Some(residual) = params.output.residual() {
            scratch.disjoint(Arg::new(OP, "residual", &residual))?;
        }
        let products = Scratch {
            ptr: workspace.wrapping_add(start),
            size: products,
        };
        Ok((workspace, products))
    }
}

impl Params<'_> {
    /// The projections to queries, keys and values.
    fn weights(&self, heads: Heads) -> ArrayVec<Projection<'_>, 3> {
        let columns = heads.columns();
        match &self.projections {
            Projections::Packed(qkv) => {
                let all = (*qkv, ("qkv_weight", "qkv_bias"), columns.iter().sum());
                ArrayVec::from_iter([all])
            }
            Projections::Apart { q, k, v } => ArrayVec::from([
                (*q, ("q_weight", "q_bias"), columns[0]),
                (*k, ("k_weight", "k_bias"), columns[1]),
                (*v, ("v_weight", "v_bias"), columns[2]),
            ]),
        }
    }
}

/// A projection's weights, their names, and the rows that they must have.
type Projection<'a> = (Weights<'a>, (&'static str, &'static str), usize);

fn expect_rows(name: &'static str, rows: usize, expected: usize) -> Result<()> {
    if rows == expected {
        return Ok(());
    }
    let problem = format!("has {rows} rows, {expected} are needed");
    Err(Error::invalid(OP, name, problem))
}

/// Sizes of the block of an engine, for [`cached_workspace_size`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub hidden: usize,
    pub num_heads: usize,
    pub dtype: DType,
    pub weight_dtype: DType,
    pub num_sequences: usize,
    pub num_tokens: usize,
}

/// What [`workspace_size_cached`](super::workspace_size_cached) answers for a batch of a cache of this shape, once there is one, with
/// packed projections.
pub(crate) fn cached_workspace_size(ctx: &Context, config: &Config, sizes: Sizes) -> Result<usize> {
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
    let mut plan = Plan {
        dtype,
        num_tokens,
        batched: None,
        heads,
        attention_workspace: 0,
        workspace_size: 0,
    };
    let views = Views::new(&plan, std::ptr::null_mut())?;
    let described =
        |shape: &[usize]| -> Result<TensorRef<'static>> {
            // SAFETY: queries do not look at data.
            Ok(unsafe {
                TensorRef::from_raw(std::ptr::null(), DType::I32, Layout::contiguous(shape)?)
            })
        };
    let (q, out) = (views.heads(0)?, views.attended()?);
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
    for max_seqlen_q in (least..num_tokens).take(FEW).chain([num_tokens]) {
        attention.max_seqlen_q = max_seqlen_q;
        let size = attention::workspace_size(ctx, &attention)?;
        plan.attention_workspace = plan.attention_workspace.max(size);
    }
    let columns: usize = heads.columns().iter().sum();
    let mut products = 0;
    for (rows, columns) in [(columns, hidden), (hidden, heads.attended())] {
        let size = linear::estimated_workspace_size(
            ctx,
            num_tokens,
            (rows, columns),
            (dtype, weight_dtype),
        )?;
        products = products.max(size);
    }
    Ok(plan.scratch()? + plan.attention_workspace.max(products))
}
