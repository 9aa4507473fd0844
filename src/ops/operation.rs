//! What every operation is: parameters that become a problem, and the path from there to a launch,
//! written once.
//!
//! [`supported`], [`workspace_size`] and [`launch`] are three questions to one
//! [`Plan`]: what the queries say of a call is what the call does.

use arrayvec::ArrayVec;

use crate::backend::{Implementation, Stream};
use crate::comm::Comm;
use crate::context::{Context, Planned};
use crate::error::{Error, Result, text};
use crate::ops::check::Arg;
use crate::problem::Plan;
use crate::tensor::{InOut, Place, RawTensor, Scales, Scratch, TensorMut, TensorRef, Workspace};

/// The parameters of an operation.
pub(crate) trait Operation {
    /// The operation's name in errors.
    const NAME: &'static str;

    /// What validation makes of the parameters.
    type Problem: Planned;

    /// Checks ranks, dtypes, shapes, strides and numbers. Addresses are taken over and not looked at.
    fn problem(&self) -> Result<Self::Problem>;

    /// Every tensor, by name, for the checks of data.
    fn tensors(&self, tensors: &mut Tensors);

    /// What a launch lacks, though queries are answered.
    fn ready(&self) -> Result<()> {
        Ok(())
    }

    /// The caller's scratch memory.
    fn workspace(&self) -> Option<&Workspace<'_>> {
        None
    }

    /// The context that what the parameters refer to belongs to, with that argument's name.
    fn context(&self) -> Option<(&'static str, &Context)> {
        None
    }

    /// The group that the work is divided among.
    fn comm(&self) -> Option<&Comm> {
        None
    }
}

/// The functions of an operation's module for its `Params`. The one that computes is named `forward`,
/// or as the macro is told.
macro_rules! functions {
    () => {
        $crate::ops::operation::functions!(forward);
    };
    ($launch:ident) => {
        #[doc = concat!("Which implementation [`", stringify!($launch), "`] would run with these")]
        /// arguments. Data pointers and the workspace are not looked at.
        ///
        /// # Errors
        /// Why there is none.
        pub fn supported(
            ctx: &$crate::Context,
            params: &Params<'_>,
        ) -> $crate::Result<$crate::backend::Implementation> {
            $crate::ops::operation::supported(ctx, params)
        }

        #[doc = concat!("The workspace with which [`", stringify!($launch), "`] is fastest with these")]
        /// arguments, in bytes. What it needs is in it and refused below; the rest is an offer,
        /// without which it is slower. Data pointers and the workspace are not looked at.
        ///
        /// # Errors
        /// As [`supported`].
        pub fn workspace_size(ctx: &$crate::Context, params: &Params<'_>) -> $crate::Result<usize> {
            $crate::ops::operation::workspace_size(ctx, params)
        }

        /// Computes on `stream`. Does not allocate device memory or synchronise, and may be captured
        /// into a graph.
        ///
        /// # Errors
        /// An argument is wrong (nothing was written but the workspace), or the launch failed.
        pub fn $launch(
            ctx: &$crate::Context,
            params: &Params<'_>,
            stream: $crate::Stream,
        ) -> $crate::Result<()> {
            $crate::ops::operation::launch(ctx, params, stream)
        }
    };
}
pub(crate) use functions;

/// Which implementation [`launch`] would run.
pub(crate) fn supported<O: Operation>(ctx: &Context, params: &O) -> Result<Implementation> {
    check_context(ctx, params)?;
    Ok(params.problem()?.plan(ctx)?.implementation())
}

/// The workspace with which [`launch`] is fastest, in bytes.
pub(crate) fn workspace_size<O: Operation>(ctx: &Context, params: &O) -> Result<usize> {
    check_context(ctx, params)?;
    params.problem()?.plan(ctx)?.useful()
}

/// Checks everything, then launches.
pub(crate) fn launch<O: Operation>(ctx: &Context, params: &O, stream: Stream) -> Result<()> {
    let _range = crate::log::range(O::NAME);
    check_context(ctx, params)?;
    ctx.device().check_stream(O::NAME, stream)?;
    // Borrowed, for a move would copy a plan, which is long.
    let planned = params.problem()?.plan(ctx);
    let plan = match planned {
        Ok(ref plan) => plan,
        Err(error) => return Err(error),
    };
    // After the plan: a call that queries refuse is refused for the same reason.
    params.ready()?;
    let scratch = match params.workspace() {
        Some(workspace) => workspace.scratch(O::NAME, plan.needed(), |given| plan.used(given))?,
        None => Scratch::NONE,
    };
    let mut tensors = Tensors::default();
    params.tensors(&mut tensors);
    tensors.check_places(O::NAME, ctx.place(), params.workspace())?;
    tensors.check(O::NAME, scratch)?;
    tracing::trace!(
        "{}: {:?}, {} bytes of workspace used",
        O::NAME,
        plan.implementation(),
        scratch.size,
    );
    plan.launch(scratch, stream)
}

fn check_context<O: Operation>(ctx: &Context, params: &O) -> Result<()> {
    let comm = params.comm().map(|comm| ("comm", comm.context()));
    for (name, other) in params.context().into_iter().chain(comm) {
        if !other.is(ctx) {
            return Err(Error::invalid(O::NAME, name, "belongs to another context"));
        }
    }
    Ok(())
}

/// What an operation does with a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    Read,
    /// Written, and read first if it is in place.
    Write,
    /// Memory of the library's own, which is written and which nothing of the caller's may overlap.
    Own,
}

/// The most tensors of an operation: those of a decoder layer's backward pass.
const MAX_TENSORS: usize = 64;

/// The tensors of a call, by name.
#[derive(Default)]
pub(crate) struct Tensors {
    list: ArrayVec<Tensor, MAX_TENSORS>,
}

struct Tensor {
    name: &'static str,
    raw: RawTensor,
    place: Option<Place>,
    access: Access,
}

impl Tensors {
    fn push(&mut self, name: &'static str, raw: RawTensor, place: Option<Place>, access: Access) {
        debug_assert!(!self.list.is_full(), "{name} is one tensor too many");
        // A full list means that MAX_TENSORS is too small for an operation, which its tests see.
        let _ = self.list.try_push(Tensor {
            name,
            raw,
            place,
            access,
        });
    }

    /// An input.
    pub fn read(&mut self, name: &'static str, tensor: &TensorRef<'_>) {
        self.push(name, tensor.raw(), tensor.place(), Access::Read);
    }

    /// The scales of an input.
    pub fn scales(&mut self, scales: Scales) {
        self.named_scales("scales", scales);
    }

    /// The scales of one of several inputs that have some.
    pub fn named_scales(&mut self, name: &'static str, scales: Scales) {
        self.push(name, scales.raw(), scales.place, Access::Read);
    }

    /// An input that may be absent.
    pub fn read_optional(&mut self, name: &'static str, tensor: Option<&TensorRef<'_>>) {
        if let Some(tensor) = tensor {
            self.read(name, tensor);
        }
    }

    /// An output.
    pub fn write(&mut self, name: &'static str, tensor: &TensorMut<'_>) {
        self.push(name, tensor.raw(), tensor.place(), Access::Write);
    }

    /// An output that may be absent.
    pub fn write_optional(&mut self, name: &'static str, tensor: Option<&TensorMut<'_>>) {
        if let Some(tensor) = tensor {
            self.write(name, tensor);
        }
    }

    /// An input and what it becomes.
    pub fn in_out(&mut self, names: (&'static str, &'static str), pair: &InOut<'_>) {
        if let InOut::Apart { input, .. } = pair {
            self.read(names.0, input);
        }
        self.write(names.1, pair.written());
    }

    /// Memory of the library's own.
    pub fn own(&mut self, name: &'static str, tensor: RawTensor) {
        self.push(name, tensor, None, Access::Own);
    }

    /// Checks that what is known of tensors and workspace is that they are `ours`, the context's
    /// device's memory.
    fn check_places(
        &self,
        op: &'static str,
        ours: Place,
        workspace: Option<&Workspace<'_>>,
    ) -> Result<()> {
        let workspace = workspace.map(|workspace| ("workspace", workspace.place()));
        let places = self.list.iter().map(|tensor| (tensor.name, tensor.place));
        for (name, place) in places.chain(workspace) {
            if let Some(place) = place
                && place != ours
            {
                let problem = text!("is {place}, ctx takes {ours}");
                return Err(Error::invalid(op, name, problem));
            }
        }
        Ok(())
    }

    /// Checks that every tensor's data is there and aligned, and that what is written, scratch memory
    /// among it, overlaps nothing else.
    fn check(&self, op: &'static str, scratch: Scratch) -> Result<()> {
        fn arg<'a>(op: &'static str, of: &'a Tensor) -> Arg<'a> {
            Arg::new(op, of.name, &of.raw)
        }
        for tensor in &self.list {
            if tensor.access != Access::Own {
                arg(op, tensor).data()?;
            }
        }
        for (i, written) in self.list.iter().enumerate() {
            if written.access == Access::Read {
                continue;
            }
            for (j, other) in self.list.iter().enumerate() {
                let later_write = j > i && other.access != Access::Read;
                if i == j || later_write {
                    continue;
                }
                match written.access {
                    Access::Own => arg(op, other).disjoint(arg(op, written))?,
                    _ => arg(op, written).disjoint(arg(op, other))?,
                };
            }
        }
        if scratch.size > 0 {
            let scratch = scratch.raw()?;
            for tensor in &self.list {
                Arg::new(op, "workspace", &scratch).disjoint(arg(op, tensor))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Backend;
    use crate::dtype::DType;
    use crate::layout::Layout;

    fn gpu(ordinal: i32) -> Place {
        Place {
            backend: Backend::Cuda,
            ordinal,
        }
    }

    /// Where a tensor and a workspace are, the context, and what is wrong. What an `unsafe`
    /// constructor was promised is believed.
    #[test]
    fn memory_is_the_devices() {
        const HOST: Place = Place::HOST;
        let cases = [
            (Some(HOST), None, HOST, ""),
            (None, Some(HOST), HOST, ""),
            (None, None, gpu(1), ""),
            (Some(gpu(1)), Some(gpu(1)), gpu(1), ""),
            (
                Some(gpu(0)),
                None,
                HOST,
                "op: x is memory of cuda device 0, ctx takes host memory",
            ),
            (
                Some(HOST),
                None,
                gpu(0),
                "op: x is host memory, ctx takes memory of cuda device 0",
            ),
            (
                Some(gpu(2)),
                None,
                gpu(0),
                "op: x is memory of cuda device 2, ctx takes memory of cuda device 0",
            ),
            (
                None,
                Some(HOST),
                gpu(3),
                "op: workspace is host memory, ctx takes memory of cuda device 3",
            ),
        ];
        for (of_x, of_workspace, ours, expected) in cases {
            let layout = Layout::contiguous(&[2]).unwrap();
            // SAFETY: nothing looks at data.
            let mut x = unsafe { TensorRef::from_raw(std::ptr::null(), DType::F32, layout) };
            let mut workspace = Workspace::none();
            if let Some(place) = of_x {
                x = x.on(place);
            }
            if let Some(place) = of_workspace {
                workspace = workspace.on(place);
            }
            let mut tensors = Tensors::default();
            tensors.read("x", &x.transposed(0, 0).unwrap().narrowed(0, 0, 1).unwrap());
            let checked = tensors.check_places("op", ours, Some(&workspace));
            let found = checked.map_or_else(|error| error.to_string(), |()| String::new());
            assert_eq!(found, expected);
        }
    }
}
