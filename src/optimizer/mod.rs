//! Optimizers: parameters, their gradients, and the state between steps, all on the device. A step
//! is three launches, whatever the number of parameters, and no value is read by the host: it can
//! be captured into a graph together with the passes that it follows.
//!
//! 1. The sum of squares of each 16384 elements of the gradients, divided by the loss scale.
//! 2. Their sum in a fixed order: the norm and what limits it, whether all are finite, the next
//!    scale, the step's number and the correction of bias.
//! 3. The update, with the gradients multiplied by what step 2 found as they are read. Where one
//!    was not finite, weights, moments and the step's number stay as they are.
//!
//! The same inputs give the same bits, with any number of threads and on any grid.
//!
//! Ranks that train the same weights on different tokens may share the state: each keeps the moments
//! and masters of its part alone, gets the sum of all ranks' gradients for it
//! ([`reduce_scatter`](crate::ops::reduce_scatter)), and gives the others what its weights have become
//! ([`all_gather`](crate::ops::all_gather)). This is ZeRO's first stage (Rajbhandari et al. 2019,
//! arXiv:1910.02054). [`Params::comm`] makes one optimizer of what the ranks have: each adds up its
//! sums of squares, all gather these, 8 bytes of each, and add them in the order of ranks. So the norm
//! and the decision to skip a step have the same bits on all, and the loss scale evolves alike.
//!
//! ```
//! use unsloth::optimizer::{Group, Optimizer, Parameter, Params, state_size};
//! use unsloth::{Buffer, Context, DType, Layout, Stream, Workspace};
//!
//! let ctx = Context::cpu()?;
//! let mut weight = Buffer::from_slice(&ctx, &[1.0f32, -2.0])?;
//! let mut gradient = Buffer::from_slice(&ctx, &[0.5f32, 0.5])?;
//! let layout = Layout::contiguous(&[2])?;
//! let parameters = [Parameter {
//!     weight: weight.tensor_mut(0, DType::F32, layout)?,
//!     gradient: gradient.tensor_mut(0, DType::F32, layout)?,
//!     group: 0,
//! }];
//! let groups = [Group { learning_rate: 0.1, weight_decay: 0.0 }];
//! let params = Params::adamw(&parameters, &groups, Workspace::none());
//! let mut state = Buffer::new(&ctx, state_size(&ctx, &params)?)?;
//! let params = Params { state: state.workspace(), ..params };
//! // SAFETY: the buffers outlive the optimizer, and nothing else uses them during a step.
//! let mut optimizer = unsafe { Optimizer::new(&ctx, &params, Stream::DEFAULT) }?;
//! optimizer.step(Stream::DEFAULT)?;
//! assert_eq!(optimizer.status(Stream::DEFAULT)?.step, 1);
//! let weight = weight.to_vec::<f32>(0, 2, Stream::DEFAULT)?;
//! assert!((weight[0] - 0.9).abs() < 1e-6);
//! # Ok::<(), unsloth::Error>(())
//! ```

mod params;
mod precision;
mod saved;
mod state;

pub use crate::problem::optimizer::{Group, Rule};
pub use params::{Parameter, Params};
pub use precision::{LossScale, Master, MixedPrecision};

use crate::backend::{CopyKind, Implementation, Stream, Upload};
use crate::comm::Comm;
use crate::context::{Collective, Context, Planned};
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::layout::Layout;
use crate::ops::check;
use crate::problem::collective::{self, Parts};
use crate::problem::optimizer::{
    Control, Decide, Norm, ScaleGradients, Scaling, Storage, Sum, Table, Tensor, Update,
};
use crate::problem::{Plan, cast};
use crate::tensor::{RawTensor, Scratch, TensorRef};
use saved::Record;
use state::{Entry, Shape, State};
use std::ptr::NonNull;

const OP: &str = "optimizer";
const STEP: &str = "optimizer_step";

const OUTSIDE: &str = "call it before the capture";

/// A step's numbers, as the host reads them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Status {
    /// What the next loss is to be multiplied by.
    pub loss_scale: f32,
    /// The norm of the last step's gradients, those of all ranks that share them, unscaled and before
    /// it was limited; NaN if one was not finite.
    pub gradient_norm: f32,
    /// Whether one of the last step's gradients was infinite or NaN, on any rank.
    pub found_inf: bool,
    /// Steps with an update.
    pub step: u64,
    /// Steps without one.
    pub skipped: u64,
}

/// Which implementation would run the steps of such an optimizer. Data pointers and the state are
/// not looked at.
///
/// # Errors
/// Why there is none.
pub fn supported(ctx: &Context, params: &Params<'_>) -> Result<Implementation> {
    params.check()?;
    if params.comm.is_some_and(|comm| !comm.context().is(ctx)) {
        return Err(Error::invalid(OP, "comm", "belongs to another context"));
    }
    let state = State::new(params)?;
    let table = state.table(&[], std::ptr::null_mut());
    let plan = Norm { table }.plan(ctx)?;
    Ok(plan.implementation())
}

/// Bytes of the state of such an optimizer: moments, masters and less than a thousandth beside
/// them. Data pointers and the state are not looked at.
///
/// # Errors
/// As [`supported`].
pub fn state_size(ctx: &Context, params: &Params<'_>) -> Result<usize> {
    supported(ctx, params)?;
    Ok(State::new(params)?.size)
}

/// Bytes of the state of an optimizer that does not exist yet, and which of them are masters: of
/// parameters of these dtypes, numbers of elements, and counts. There are a few groups, up to 32.
pub(crate) fn estimated_state_size(
    num_moments: usize,
    master: Master,
    parameters: &[(DType, usize, usize)],
) -> Result<(usize, usize)> {
    for (dtype, ..) in parameters {
        params::check_master(*dtype, master)?;
    }
    let shapes = parameters.iter().map(|(dtype, elements, count)| Shape {
        elements: *elements,
        count: *count,
        storage: params::storage(*dtype, master),
    });
    let state = State::of(1, num_moments, 0, shapes)?;
    Ok((state.size, state.saved - state.masters))
}

impl State {
    fn table<'a>(&self, tensors: &'a [Tensor], memory: *mut u8) -> Table<'a> {
        let at = |offset| memory.wrapping_add(offset);
        Table {
            tensors,
            entries: at(self.entries),
            num_chunks: self.num_chunks,
            control: memory,
            groups: at(self.groups),
            partials: at(self.partials),
            sums: at(self.sums),
        }
    }
}

/// Weights, gradients, and what is between two steps. See the [module](self).
///
/// It keeps its context alive. Calls belong on one stream, or on streams that the caller orders.
#[derive(Debug)]
pub struct Optimizer {
    context: Context,
    rule: Rule,
    scaling: Scaling,
    max_norm: f32,
    zero_gradients: bool,
    seed: u64,
    num_groups: usize,
    records: Vec<Record>,
    tensors: Vec<Tensor>,
    state: State,
    memory: *mut u8,
    /// Of the ranks that share what is trained; alive, see [`Optimizer::new`].
    comm: Option<NonNull<Comm>>,
    /// For the values of groups.
    staging: Box<dyn Upload>,
}

// SAFETY: addresses of memory that whoever made the optimizer promised, and of a `Comm`, which
// threads may share; see `Optimizer::new`.
unsafe impl Send for Optimizer {}
// SAFETY: as above; shared access reads them alone.
unsafe impl Sync for Optimizer {}

impl Optimizer {
    /// Makes one, at step 0: zero moments, masters from the weights, queued on `stream`. The list
    /// of parameters is copied.
    ///
    /// # Safety
    /// The borrows of `params` end with the call, what they are of goes on being used: until the
    /// optimizer is dropped and work that was queued with it has run, weights, gradients and state
    /// are memory of the context's device, initialised but for the state; while work of this or of
    /// a method runs nothing else writes what it reads, or accesses what it writes; and nothing but
    /// the optimizer writes the state. [`Params::comm`] stays where it is, and is dropped after the
    /// optimizer.
    ///
    /// # Errors
    /// An argument is wrong, the state is too small, the stream is being captured, or the device
    /// fails; [`Error::Comm`] if the group is broken.
    pub unsafe fn new(ctx: &Context, params: &Params<'_>, stream: Stream) -> Result<Self> {
        ctx.device().check_stream(OP, stream)?;
        ctx.check_not_capturing(OP, stream, OUTSIDE)?;
        supported(ctx, params)?;
        if let Some(comm) = params.comm {
            comm.transport().health(OP)?;
        }
        let scaling = params.check()?;
        let state = State::new(params)?;
        let memory = params.state.check(OP, state.size).map_err(of_state)?;
        let whole = RawTensor {
            ptr: memory,
            dtype: DType::Bool,
            layout: Layout::contiguous(&[state.size])?,
        };
        params.check_data(ctx.place(), &whole)?;
        let optimizer = Optimizer {
            context: ctx.clone(),
            rule: params.rule,
            scaling,
            max_norm: params.max_norm,
            zero_gradients: params.zero_gradients,
            seed: params.seed,
            num_groups: params.groups.len(),
            records: saved::records(params)?,
            tensors: state.tensors(params, memory)?,
            state,
            memory,
            comm: params.comm.map(NonNull::from),
            staging: ctx.device().staging(OP, size_of::<Group>())?,
        };
        // Before anything is queued that an error would leave behind.
        let mut entries = Vec::new();
        let size = optimizer.tensors.len() * size_of::<Entry>();
        entries
            .try_reserve_exact(optimizer.tensors.len())
            .map_err(|_| Error::out_of_host_memory(OP, size))?;
        entries.extend(optimizer.tensors.iter().map(state::entry));
        optimizer.initialise(params, &entries, stream)?;
        Ok(optimizer)
    }

    fn initialise(&self, params: &Params<'_>, entries: &[Entry], stream: Stream) -> Result<()> {
        let device = self.context.device();
        // SAFETY: the range is the state's, which `new` was given; the stream was checked.
        unsafe { device.set(OP, self.memory, 0, self.state.size, stream) }?;
        let control = Control {
            scale: params.precision.loss_scale.init,
            coefficient: 0.0,
            norm: 0.0,
            found_inf: 0,
            tracker: 0,
            hysteresis: self.scaling.hysteresis,
            bias1: 1.0,
            bias2: 1.0,
            step: 0,
            skipped: 0,
            power1: 1.0,
            power2: 1.0,
        };
        self.upload(0, bytes_of(std::slice::from_ref(&control)), stream)?;
        self.upload(self.state.groups, bytes_of(params.groups), stream)?;
        self.upload(self.state.entries, bytes_of(entries), stream)?;
        for tensor in &self.tensors {
            if tensor.storage == Storage::F32 {
                let layout = Layout::contiguous(&[tensor.elements])?;
                let raw = |ptr, dtype| RawTensor { ptr, dtype, layout };
                let master = cast::Problem {
                    x: raw(tensor.weight, tensor.weight_dtype),
                    out: raw(tensor.master, DType::F32),
                };
                master.plan(&self.context)?.launch(Scratch::NONE, stream)?;
            }
        }
        Ok(())
    }

    /// Queues a copy of `data` to `offset` bytes into the state; has read it when it returns.
    fn upload(&self, offset: usize, data: &[u8], stream: Stream) -> Result<()> {
        let to = self.memory.wrapping_add(offset);
        // SAFETY: callers stay within the state, which is the optimizer's own; it is no part of
        // `data`.
        unsafe {
            let device = self.context.device();
            device.upload(OP, to, data.as_ptr(), data.len(), stream)
        }
    }

    fn table(&self) -> Table<'_> {
        self.state.table(&self.tensors, self.memory)
    }

    fn launch<P: Planned>(&self, problem: P, stream: Stream) -> Result<()> {
        problem.plan(&self.context)?.launch(Scratch::NONE, stream)
    }

    fn comm(&self) -> Option<&Comm> {
        // SAFETY: whoever made the optimizer promised that it outlives it, at its place.
        self.comm.map(|comm| unsafe { comm.as_ref() })
    }

    /// Tells the other ranks what the gradients here came to, and hears it of them.
    fn exchange(&self, table: Table<'_>, comm: &Comm, stream: Stream) -> Result<()> {
        let rank = comm.rank();
        self.launch(Sum { table, rank }, stream)?;
        // No collective is of f64, and bits are moved as they are.
        let words = |at: usize, count| {
            Ok(RawTensor {
                ptr: table.sums.wrapping_add(at * size_of::<f64>()),
                dtype: DType::I64,
                layout: Layout::contiguous(&[count])?,
            })
        };
        let problem = collective::Problem {
            op: STEP,
            kind: collective::Kind::AllGather,
            dtype: DType::I64,
            row: 1,
            x: Some(words(rank, 1)?),
            out: Some(words(0, comm.size())?),
            sent: Parts::Even(1),
            received: Parts::Even(1),
        };
        let transport = comm.transport();
        self.launch(Collective { transport, problem }, stream)
    }

    /// Queues a step: three launches, and one more and a collective where ranks share what is
    /// trained, each of which calls it. Neither allocates nor synchronises, and may be captured into
    /// a graph, whose every launch is a step of its own. A rank of a local group waits for the others.
    ///
    /// # Errors
    /// The launch failed, or the collective, as [`Error::Comm`]: then there was no step.
    pub fn step(&mut self, stream: Stream) -> Result<()> {
        let _range = crate::log::range(STEP);
        self.context.device().check_stream(STEP, stream)?;
        let table = self.table();
        self.launch(Norm { table }, stream)?;
        if let Some(comm) = self.comm() {
            self.exchange(table, comm, stream)?;
        }
        let decide = Decide {
            table,
            ranks: self.comm().map(Comm::size),
            scaling: self.scaling,
            betas: self.rule.betas(),
            max_norm: self.max_norm,
        };
        self.launch(decide, stream)?;
        let update = Update {
            table,
            rule: self.rule,
            zero_gradients: self.zero_gradients,
            seed: self.seed,
        };
        self.launch(update, stream)
    }

    /// Queues the multiplication of every gradient by `factor`, rounded once: one launch, as for
    /// the mean of accumulated gradients. May be captured.
    ///
    /// # Errors
    /// The factor is not finite, or the launch failed.
    pub fn scale_gradients(&mut self, factor: f32, stream: Stream) -> Result<()> {
        const OP: &str = "gradients_scale";
        let _range = crate::log::range(OP);
        self.context.device().check_stream(OP, stream)?;
        check::finite(OP, "factor", factor)?;
        let table = self.table();
        self.launch(ScaleGradients { table, factor }, stream)
    }

    /// Queues a change of a group's learning rate and weight decay, for the steps behind it; those
    /// of captured graphs too. Does not wait for the device.
    ///
    /// # Errors
    /// There is no such group, a value is wrong, or the stream is being captured.
    pub fn set_group(&mut self, group: usize, values: Group, stream: Stream) -> Result<()> {
        const OP: &str = "optimizer_set_group";
        state::check_index(OP, group, self.num_groups)?;
        params::check_group(&values).map_err(|e| e.within(OP))?;
        self.context.check_not_capturing(OP, stream, OUTSIDE)?;
        let to = self.memory.wrapping_add(self.state.group(group).start);
        let values = [values];
        // SAFETY: the group is within the state, which is the optimizer's own; the stream is live
        // by the promise of whoever made it, and not captured.
        unsafe { self.staging.upload(OP, to, bytes_of(&values), stream) }
    }

    /// The loss scale, f32 `[1]`, for a loss whose gradient is multiplied by it on the device
    /// (`dloss` of [`cross_entropy`](crate::ops::cross_entropy)). Each step may change it.
    ///
    /// # Errors
    /// None.
    pub fn loss_scale(&self) -> Result<TensorRef<'_>> {
        let layout = Layout::contiguous(&[1])?;
        // SAFETY: the first field of the control block, in memory that lives as long as the
        // optimizer and that its own queued steps alone write.
        let scale = unsafe { TensorRef::from_raw(self.memory, DType::F32, layout) };
        Ok(scale.on(self.context.place()))
    }

    /// What the last step queued on `stream` found. Waits for the stream.
    ///
    /// # Errors
    /// The stream is being captured, or an earlier operation of it failed.
    pub fn status(&self, stream: Stream) -> Result<Status> {
        const OP: &str = "optimizer_read";
        let mut control = std::mem::MaybeUninit::<Control>::uninit();
        // SAFETY: the destination has room for what is read of the state, and plain numbers of
        // every value; the device has written them once the copy is done.
        let control = unsafe {
            let to = control.as_mut_ptr().cast();
            self.download(OP, to, size_of::<Control>(), stream)?;
            control.assume_init()
        };
        Ok(Status {
            loss_scale: control.scale,
            gradient_norm: control.norm,
            found_inf: control.found_inf != 0,
            step: control.step,
            skipped: control.skipped,
        })
    }

    /// Copies the first bytes of the state to the host, and waits.
    ///
    /// # Safety
    /// `to` is valid for writes of `size` bytes, which are no more than the state has.
    unsafe fn download(
        &self,
        op: &'static str,
        to: *mut u8,
        size: usize,
        stream: Stream,
    ) -> Result<()> {
        self.context.check_not_capturing(op, stream, OUTSIDE)?;
        let device = self.context.device();
        // SAFETY: the caller's promise; the source is the optimizer's own; the copy is waited for.
        unsafe { device.copy(op, to, self.memory, size, CopyKind::DeviceToHost, stream) }?;
        device.synchronize(op, stream)
    }
}

/// The bytes of plain numbers.
fn bytes_of<T: Plain>(values: &[T]) -> &[u8] {
    let size = std::mem::size_of_val(values);
    // SAFETY: types without padding (Plain), whose bytes are all initialised.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size) }
}

/// # Safety
/// Without padding.
unsafe trait Plain: Copy {}
// SAFETY: six words of 32 bits, then of 64 (asserted).
unsafe impl Plain for Control {}
const _: () = assert!(size_of::<Control>() == 8 * 4 + 4 * 8);
// SAFETY: two words.
unsafe impl Plain for Group {}
// SAFETY: words.
unsafe impl Plain for Entry {}

/// Tells of the state what is told of workspaces.
fn of_state(error: Error) -> Error {
    match error {
        Error::WorkspaceTooSmall {
            required, provided, ..
        } => {
            let problem = text!("is {provided} bytes, {required} are required");
            Error::invalid(OP, "state_size", problem)
        }
        other => other.renamed(&[("workspace", "state")]),
    }
}
