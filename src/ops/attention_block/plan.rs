//! What the block does, step by step. The same steps are first checked and then run, so that the answers of the queries are those
//! of the call.

use super::{OP, Params, Projections};
use crate::context::{Context, Stream};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kv_cache::{Append, Config, KvCache};
use crate::layout::Layout;
use crate::ops::check::Arg;
use crate::ops::linear::{Output, Weights};
use crate::ops::rope::Positions;
use crate::ops::{attention, linear, rms_norm, rope};
use crate::tensor::{InOut, RawTensor, TensorMut, TensorRef, Workspace};

/// Whether steps are only checked, with data pointers that may be NULL, or run.
#[derive(Clone, Copy)]
enum Mode {
    Check,
    Run(Stream),
}

/// Sizes of a validated call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    dtype: DType,
    num_tokens: usize,
    /// Batch size and sequence length of tokens in a batch.
    batched: Option<(usize, usize)>,
    heads: Heads,
    attention_workspace: usize,
    pub workspace_size: usize,
}

/// Heads and their dimensions, known to have a product with the number of tokens that fits.
#[derive(Clone, Copy, Debug)]
struct Heads {
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    v_head_dim: usize,
}

impl Heads {
    /// Columns of queries, keys and values.
    fn columns(&self) -> [usize; 3] {
        [
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
            self.num_kv_heads * self.v_head_dim,
        ]
    }

    /// Columns of attention's output.
    fn attended(&self) -> usize {
        self.num_heads * self.v_head_dim
    }

    fn check(&self) -> Result<()> {
        for (name, value) in [
            ("num_heads", self.num_heads),
            ("num_kv_heads", self.num_kv_heads),
        ] {
            // Far above any model, and low enough that products of two fit.
            if !(1..=1 << 20).contains(&value) {
                let problem = format!("is {value}, allowed: 1 to {}", 1 << 20);
                return Err(Error::invalid(OP, name, problem));
            }
        }
        for (name, value) in [("head_dim", self.head_dim), ("v_head_dim", self.v_head_dim)] {
            if !(1..=attention::MAX_HEAD_DIM).contains(&value) {
                let problem = format!("is {value}, allowed: 1 to {}", attention::MAX_HEAD_DIM);
                return Err(Error::invalid(OP, name, problem));
            }
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            let problem = format!(
                "is {}, a multiple of num_kv_heads {} is needed",
                self.num_heads, self.num_kv_heads
            );
            return Err(Error::invalid(OP, "num_heads", problem));
        }
        Ok(())
    }
}

/// Rounds up to the alignment of a workspace.
fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(Workspace::ALIGNMENT)
}

/// The views that steps work on. They may lie at NULL while steps are only checked.
struct Views {
    qkv: RawTensor,
    attended: RawTensor,
    heads: Heads,
    batched: Option<(usize, usize)>,
}

impl Views {
    fn new(plan: &Plan, workspace: *mut u8) -> Result<Views> {
        let columns: usize = plan.heads.columns().iter().sum();
        let contiguous = |columns| -> Result<Layout> {
            Layout::contiguous(&[plan.num_tokens, columns]).map_err(|_| too_many(plan.num_tokens))
        };
        let qkv = RawTensor {
            ptr: workspace,
            dtype: plan.dtype,
            layout: contiguous(columns)?,
        };
        let offset = aligned(qkv.layout.span() * plan.dtype.size());
        Ok(Views {
            attended: RawTensor {
                ptr: workspace.wrapping_add(offset),
                dtype: plan.dtype,
                layout: contiguous(plan.heads.attended())?,
            },
            qkv,
            heads: plan.heads,
            batched: plan.batched,
        })
    }

    /// Queries (0), keys (1) or values (2) of every token: `[tokens, columns]`.
    fn flat(&self, which: usize) -> Result<TensorMut<'static>> {
        let columns = self.heads.columns();
        let start = columns[..which].iter().sum();
        // SAFETY: a checked workspace covers the view, or the view is only described.
        unsafe { view_mut(&self.qkv) }.narrowed(1, start, columns[which])
    }

    /// As [`Views::flat`], with heads: `[tokens, heads, dim]`.
    fn heads(&self, which: usize) -> Result<TensorMut<'static>> {
        let h = &self.heads;
        let (num, dim) = [
            (h.num_heads, h.head_dim),
            (h.num_kv_heads, h.head_dim),
            (h.num_kv_heads, h.v_head_dim),
        ][which];
        self.flat(which)?.unflattened(1, &[num, dim])
    }

    /// A tensor of tokens in the form that attention without `cu_seqlens` takes: with a batch dimension.
    fn batch<'a>(&self, tokens: TensorMut<'a>) -> Result<TensorMut<'a>> {
        let (batch, len) = self.batched.unwrap_or((1, self.qkv.layout.dim(0)));
        tokens.unflattened(0, &[batch, len])
    }

    /// Attention's output with heads.
    fn attended(&self) -> Result<TensorMut<'static>> {
        // SAFETY: as in `flat`.
        unsafe { view_mut(&self.attended) }
            .unflattened(1, &[self.heads.num_heads, self.heads.v_head_dim])
    }
}

/// # Safety
/// The memory is a workspace's that the caller of the block lends, or is not accessed.
unsafe fn view_mut(t: &RawTensor) -> TensorMut<'static> {
    // SAFETY: the caller's promise.
    unsafe { TensorMut::from_raw(t.ptr, t.dtype, t.layout) }
}

/// # Safety
/// As [`view_mut`].
unsafe fn view<'a>(t: &TensorMut<'a>) -> TensorRef<'a> {
    let raw = t.raw();
    // SAFETY: the caller's promise.
    unsafe { TensorRef::from_raw(raw.ptr, raw.dtype, raw.layout) }
}

fn too_many(num_tokens: usize) -> Error {
    let problem = format!("has {num_tokens} tokens: the workspace would not fit the address space");
    Error::invalid(OP, "x", problem)
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
        params
            .output
            .check(OP, arg, &linear::with_columns(&x, out.out_features()))?;
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
    fn scratch(&self) -> Result<usize> {
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

    /// Pointers, alignment, overlap and workspace; gives the workspace's address.
    pub fn check_data(
        &self,
        params: &Params<'_>,
        cached: Option<(&KvCache, usize)>,
    ) -> Result<*mut u8> {
        let mut tensors = vec![("x", params.x.raw())];
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
        let mut inputs = Vec::with_capacity(tensors.len() + 2);
        for (name, tensor) in &tensors {
            inputs.push(Arg::new(OP, name, tensor).data()?);
        }
        let pages = match cached {
            None => None,
            Some((cache, layer)) => {
                let (k, v) = cache.layer(layer)?;
                Some([k.raw(), v.raw()])
            }
        };
        for (name, t) in ["the cache's keys", "the cache's values"]
            .iter()
            .zip(pages.iter().flatten())
        {
            inputs.push(Arg::new(OP, name, t));
        }
        params.output.check_data(OP, &inputs)?;
        let workspace = params.workspace.check(OP, self.workspace_size)?;
        let scratch = RawTensor {
            ptr: workspace,
            dtype: DType::Bool,
            layout: Layout::contiguous(&[self.workspace_size])?,
        };
        let scratch = Arg::new(OP, "workspace", &scratch);
        for input in inputs {
            scratch.disjoint(input)?;
        }
        scratch.disjoint(Arg::new(OP, "out", &params.output.out()))?;
        if let Some(residual) = params.output.residual() {
            scratch.disjoint(Arg::new(OP, "residual", &residual))?;
        }
        Ok(workspace)
    }

    /// The steps before attention.
    fn prepare(
        &self,
        ctx: &Context,
        params: &Params<'_>,
        cache: Option<&KvCache>,
        views: &Views,
        mode: Mode,
    ) -> Result<()> {
        self.project(ctx, params, views, mode)?;
        self.normalise(ctx, params, views, mode)?;
        self.rotate(ctx, params, cache, views, mode)
    }

    /// Runs every step over a checked workspace.
    pub fn run(
        &self,
        ctx: &Context,
        params: &Params<'_>,
        mut cached: Option<(&mut KvCache, usize)>,
        workspace: *mut u8,
        stream: Stream,
    ) -> Result<()> {
        let views = Views::new(self, workspace)?;
        let cache = cached.as_ref().map(|(cache, _)| &**cache);
        self.prepare(ctx, params, cache, &views, Mode::Run(stream))?;
        if let Some((cache, layer)) = &mut cached {
            let (k, v) = (views.heads(1)?, views.heads(2)?);
            // SAFETY: the views lie in the workspace, whose queued writes come before.
            let (k, v) = unsafe { (view(&k), view(&v)) };
            let append = Append {
                layer: *layer,
                k,
                v,
                rotation: params.rotation,
            };
            within(cache.append(&append, stream))?;
        }
        let start = workspace.wrapping_add(self.scratch()?);
        // SAFETY: the tail of the checked workspace.
        let tail = unsafe { Workspace::from_raw(start, self.attention_workspace) };
        let cached = cached.as_ref().map(|(c, layer)| (&**c, *layer));
        let attention = self.attention(params, cached, &views, tail)?;
        within(attention::forward(ctx, &attention, stream))?;
        self.project_out(ctx, params, &views, stream)
    }

    /// Queries, keys and values.
    fn project(&self, ctx: &Context, params: &Params<'_>, views: &Views, mode: Mode) -> Result<()> {
        let step = |weights: &Weights<'_>, out: TensorMut<'static>| {
            let out = match self.batched {
                Some(_) => views.batch(out)?,
                None => out,
            };
            let params = linear::Params {
                x: params.x,
                weights: *weights,
                output: Output::Write(out),
            };
            within(match mode {
                Mode::Check => linear::supported(ctx, &params).map(drop),
                Mode::Run(stream) => linear::forward(ctx, &params, stream),
            })
        };
        match &params.projections {
            // SAFETY: as in `Views::flat`.
            Projections::Packed(weights) => step(weights, unsafe { view_mut(&views.qkv) }),
            Projections::Apart { q, k, v } => {
                step(q, views.flat(0)?)?;
                step(k, views.flat(1)?)?;
                step(v, views.flat(2)?)
            }
        }
    }

    fn normalise(
        &self,
        ctx: &Context,
        params: &Params<'_>,
        views: &Views,
        mode: Mode,
    ) -> Result<()> {
        for (which, name, weight) in [(0, "q_norm", params.q_norm), (1, "k_norm", params.k_norm)] {
            let Some(weight) = weight else { continue };
            let all = self.heads.columns()[which];
            let x = match weight.layout().shape() {
                [n] if *n == self.heads.head_dim => views.heads(which)?,
                [n] if *n == all => views.flat(which)?,
                shape => {
                    let head_dim = self.heads.head_dim;
                    let problem = format!("has shape {shape:?}, allowed: [{head_dim}] or [{all}]");
                    return Err(Error::invalid(OP, name, problem));
                }
            };
            let params = rms_norm::Params {
                x: InOut::InPlace(x),
                residual: None,
                weight: Some(weight),
                weight_offset: params.norm_weight_offset,
                epsilon: params.norm_epsilon,
            };
            within(match mode {
                Mode::Check => rms_norm::supported(ctx, &params).map(drop),
                Mode::Run(stream) => rms_norm::forward(ctx, &params, stream),
            })?;
        }
        Ok(())
    }

    /// Rotates queries, and keys unless the cache does so when they are appended.
    fn rotate(
        &self,
        ctx: &Context,
        params: &Params<'_>,
        cache: Option<&KvCache>,
        views: &Views,
        mode: Mode,
    ) -> Result<()> {
        let Some(rotation) = params.rotation else {
            return Ok(());
        };
        let (mut q, mut k) = (views.heads(0)?, Some(views.heads(1)?));
        let mut positions = params.positions;
        match cache {
            Some(cache) => {
                positions = Positions::PerToken(within(cache.batch())?.positions);
                k = None;
            }
            None if self.batched.is_some() => {
                q = views.batch(q)?;
                k = k.map(|k| views.batch(k)).transpose()?;
            }
            None => {}
        }
        let params = rope::Params {
            q: Some(InOut::InPlace(q)),
            k: k.map(InOut::InPlace),
            positions,
            rotation,
            inverse: false,
        };
        within(match mode {
            Mode::Check => rope::supported(ctx, &params).map(drop),
            Mode::Run(stream) => rope::forward(ctx, &params, stream),
        })
    }

    fn attention<'a>(
        &self,
        params: &Params<'a>,
        cached: Option<(&'a KvCache, usize)>,
        views: &Views,
        workspace: Workspace<'a>,
    ) -> Result<attention::Params<'a>> {
        let (q, out) = (views.heads(0)?, views.attended()?);
        let mut arguments = match cached {
            // SAFETY: views lie in the workspace, whose queued writes come before, or are only described.
            Some((cache, layer)) => within(cache.attention(layer, unsafe { view(&q) }, out))?,
            None => {
                let (mut q, mut k, mut v, mut out) = (q, views.heads(1)?, views.heads(2)?, out);
                if params.cu_seqlens.is_none() {
                    q = views.batch(q)?;
                    k = views.batch(k)?;
                    v = views.batch(v)?;
                    out = views.batch(out)?;
                }
                // SAFETY: as above.
                let (q, k, v) = unsafe { (view(&q), view(&k), view(&v)) };
                attention::Params {
                    cu_seqlens_q: params.cu_seqlens,
                    cu_seqlens_k: params.cu_seqlens,
                    max_seqlen_q: params.max_seqlen,
                    max_seqlen_k: params.max_seqlen,
                    causal: !params.bidirectional,
                    ..attention::Params::new(q, k, v, out)
                }
            }
        };
        arguments.scale = params.scale;
        arguments.softcap = params.softcap;
        arguments.window_left = params.window;
        if params.bidirectional {
            arguments.window_right = params.window;
        }
        arguments.alibi_slopes = params.alibi_slopes;
        arguments.sinks = params.sinks;
        arguments.workspace = workspace;
        Ok(arguments)
    }

    fn project_out(
        &self,
        ctx: &Context,
        params: &Params<'_>,
        views: &Views,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: attention's output lies in the workspace; the caller's output is lent for this call, and used once.
        let (attended, output) = unsafe {
            let attended = view_mut(&views.attended);
            let out = params.output.out();
            let out = TensorMut::from_raw(out.ptr, out.dtype, out.layout);
            let output = match &params.output {
                Output::Write(_) => Output::Write(out),
                Output::Add(InOut::InPlace(_)) => Output::Add(InOut::InPlace(out)),
                Output::Add(InOut::Apart { input, .. }) => Output::Add(InOut::Apart {
                    input: *input,
                    output: out,
                }),
            };
            (view(&attended), output)
        };
        let x = match self.batched {
            Some((batch, len)) => attended.unflattened(0, &[batch, len])?,
            None => attended,
        };
        let params = linear::Params {
            x,
            weights: params.out_projection,
            output,
        };
        within(linear::forward(ctx, &params, stream))
    }
}

impl Params<'_> {
    /// The projections to queries, keys and values, with the names of their arguments and the rows that they must have.
    fn weights(&self, heads: Heads) -> Vec<(Weights<'_>, (&'static str, &'static str), usize)> {
        let columns = heads.columns();
        match &self.projections {
            Projections::Packed(qkv) => {
                vec![(*qkv, ("qkv_weight", "qkv_bias"), columns.iter().sum())]
            }
            Projections::Apart { q, k, v } => vec![
                (*q, ("q_weight", "q_bias"), columns[0]),
                (*k, ("k_weight", "k_bias"), columns[1]),
                (*v, ("v_weight", "v_bias"), columns[2]),
            ],
        }
    }
}

/// An error of one of the block's operations, as the block's own.
fn within<T>(result: Result<T>) -> Result<T> {
    result.map_err(|error| error.within(OP))
}

fn expect_rows(name: &'static str, rows: usize, expected: usize) -> Result<()> {
    if rows == expected {
        return Ok(());
    }
    let problem = format!("has {rows} rows, {expected} are needed");
    Err(Error::invalid(OP, name, problem))
}

/// The bytes that [`forward_cached`](super::forward_cached) needs for a batch of a cache of this shape: what
/// [`workspace_size_cached`](super::workspace_size_cached) answers once there is one.
pub(crate) fn cached_workspace_size(
    ctx: &Context,
    config: &Config,
    num_heads: usize,
    dtype: DType,
    (num_sequences, num_tokens): (usize, usize),
) -> Result<usize> {
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
    let attention = attention::Params {
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
    plan.attention_workspace = attention::workspace_size(ctx, &attention)?;
    Ok(plan.scratch()? + plan.attention_workspace)
}
