//! What the block does, step by step. The same steps are first checked and then run, so that the answers of the queries are those
//! of the call.

use super::plan::Plan;
use super::views::{Views, view, view_mut};
use super::{OP, Params, Projections};
use crate::context::{Context, Stream};
use crate::error::{Error, Result};
use crate::kv_cache::{Append, KvCache};
use crate::ops::linear::{Output, Weights};
use crate::ops::rope::Positions;
use crate::ops::{attention, linear, rms_norm, rope};
use crate::tensor::{InOut, Scratch, TensorMut, Workspace};

/// Whether steps are only checked, with data pointers that may be NULL, or run.
#[derive(Clone, Copy)]
pub(super) enum Mode {
    Check,
    /// With a workspace for the projections.
    Run(Stream, Scratch),
}

impl Plan {
    /// The steps before attention.
    pub fn prepare(
        &self,
        ctx: &Context,
        params: &Params<'_>,
        cache: Option<&KvCache>,
        views: &Views,
        mode: Mode,
    ) -> Result<()> {
        match mode {
            Mode::Check => self.project(params, views, Scratch::NONE, |linear| {
                within(linear::supported(ctx, linear).map(drop))
            }),
            Mode::Run(stream, products) => self.project(params, views, products, |linear| {
                within(linear::forward(ctx, linear, stream))
            }),
        }?;
        self.normalise(ctx, params, views, mode)?;
        self.rotate(ctx, params, cache, views, mode)
    }

    /// The workspace that the projections have use for, in bytes.
    pub fn products_size(&self, ctx: &Context, params: &Params<'_>) -> Result<usize> {
        let views = Views::new(self, std::ptr::null_mut())?;
        let mut most = 0;
        let mut measure = |linear: &linear::Params<'_>| {
            most = most.max(within(linear::workspace_size(ctx, linear))?);
            Ok(())
        };
        self.project(params, &views, Scratch::NONE, &mut measure)?;
        self.project_out(params, &views, Scratch::NONE, measure)?;
        Ok(most)
    }

    /// Runs every step over a checked workspace; `products` is the part of it that projections have use for.
    pub fn run(
        &self,
        ctx: &Context,
        params: &Params<'_>,
        mut cached: Option<(&mut KvCache, usize)>,
        (workspace, products): (*mut u8, Scratch),
        stream: Stream,
    ) -> Result<()> {
        let views = Views::new(self, workspace)?;
        let cache = cached.as_ref().map(|(cache, _)| &**cache);
        self.prepare(ctx, params, cache, &views, Mode::Run(stream, products))?;
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
        self.project_out(params, &views, products, |linear| {
            within(linear::forward(ctx, linear, stream))
        })
    }

    /// Queries, keys and values.
    fn project(
        &self,
        params: &Params<'_>,
        views: &Views,
        products: Scratch,
        mut each: impl FnMut(&linear::Params<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut step = |weights: &Weights<'_>, out: TensorMut<'static>| {
            let out = match self.batched {
                Some(_) => views.batch(out)?,
                None => out,
            };
            each(&linear::Params {
                x: params.x,
                weights: *weights,
                output: Output::Write(out),
                // SAFETY: a part of the checked workspace, which only this step uses meanwhile.
                workspace: unsafe { Workspace::from_raw(products.ptr, products.size) },
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
                Mode::Run(stream, _) => rms_norm::forward(ctx, &params, stream),
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
            Mode::Run(stream, _) => rope::forward(ctx, &params, stream),
        })
    }

    pub fn attention<'a>(
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
        params: &Params<'_>,
        views: &Views,
        products: Scratch,
        each: impl FnOnce(&linear::Params<'_>) -> Result<()>,
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
        each(&linear::Params {
            x,
            weights: params.out_projection,
            output,
            // SAFETY: as in `project`.
            workspace: unsafe { Workspace::from_raw(products.ptr, products.size) },
        })
    }
}

/// An error of one of the block's operations, as the block's own.
pub(super) fn within<T>(result: Result<T>) -> Result<T> {
    result.map_err(|error| error.within(OP))
}
