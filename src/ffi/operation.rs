//! What exported functions of operations do, written once: read the caller's struct, convert it, ask or launch.

use super::context::{context_from, unsloth_context};
use super::params::{self, Params};
use super::status::unsloth_status;
use super::{
    check_out, guard, stream_from, unsloth_implementation, unsloth_stream, write_optional,
};
use crate::context::Context;
use crate::error::Result;
use crate::ops::operation::{self, Operation};

/// A parameter struct of C's that becomes the parameters of an operation.
pub(crate) trait FromC: Params {
    type Operation<'a>: Operation;

    /// Converts.
    ///
    /// # Safety
    /// The struct's tensors and workspace are what the exported functions ask for: valid on the context's device
    /// until the work has run, unless only a query is made.
    unsafe fn convert<'a>(&self) -> Result<Self::Operation<'a>>;
}

/// As [`FromC`], for structs that name a handle, which is held while the parameters are used.
pub(crate) trait WithC: Params {
    type Operation<'a>: Operation;

    /// Converts, and calls `run` with the parameters.
    ///
    /// # Safety
    /// As [`FromC::convert`].
    unsafe fn with<R>(&self, run: impl FnOnce(&Self::Operation<'_>) -> Result<R>) -> Result<R>;
}

impl<P: FromC> WithC for P {
    type Operation<'a> = <P as FromC>::Operation<'a>;

    unsafe fn with<R>(&self, run: impl FnOnce(&Self::Operation<'_>) -> Result<R>) -> Result<R> {
        // SAFETY: the caller's promise is that of `convert`.
        run(&unsafe { self.convert() }?)
    }
}

/// The name of a struct's operation.
const fn name<P: WithC>() -> &'static str {
    <P::Operation<'static> as Operation>::NAME
}

/// # Safety
/// As the exported functions say: `params` is NULL or points to as many readable bytes as it states, and its
/// tensors are valid.
unsafe fn with_params<P: WithC>(
    ctx: *mut unsloth_context,
    params: *const P,
    run: impl FnOnce(&Context, &P::Operation<'_>) -> Result<()>,
) -> unsloth_status {
    guard(name::<P>(), || {
        let object = context_from(name::<P>(), ctx)?;
        // SAFETY: the caller's promise is what both ask for.
        unsafe {
            let params = params::read(name::<P>(), params)?;
            params.with(|params| run(&object.context, params))
        }
    })
}

/// `unsloth_<op>_supported`.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `implementation` is NULL or valid for a
/// write.
pub(crate) unsafe fn supported<P: WithC>(
    ctx: *mut unsloth_context,
    params: *const P,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    // SAFETY: the caller's promise; a query does not look at data.
    unsafe {
        with_params(ctx, params, |context, params| {
            let chosen = operation::supported(context, params)?;
            write_optional(name::<P>(), "implementation", implementation, || {
                chosen as u32
            })
        })
    }
}

/// `unsloth_<op>_workspace_size`.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `workspace_size` is NULL or valid for a
/// write.
pub(crate) unsafe fn workspace_size<P: WithC>(
    ctx: *mut unsloth_context,
    params: *const P,
    workspace_size: *mut usize,
) -> unsloth_status {
    // SAFETY: the caller's promise; a query does not look at data.
    unsafe {
        with_params(ctx, params, |context, params| {
            check_out(name::<P>(), "workspace_size", workspace_size)?;
            workspace_size.write(operation::workspace_size(context, params)?);
            Ok(())
        })
    }
}

/// `unsloth_<op>_forward` and `unsloth_<op>_backward`.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors and workspace are valid on the
/// context's device until the work has run; `stream` is NULL or a live stream of that device.
pub(crate) unsafe fn launch<P: WithC>(
    ctx: *mut unsloth_context,
    params: *const P,
    stream: unsloth_stream,
) -> unsloth_status {
    // SAFETY: the caller's promise.
    unsafe {
        let stream = stream_from(stream);
        with_params(ctx, params, |context, params| {
            operation::launch(context, params, stream)
        })
    }
}
