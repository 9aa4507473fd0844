//! Optimizers: steps, and what is read and saved of them.

use std::ffi::c_void;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard};

use crate::alloc::Shared;
use crate::comm::Comm;
use crate::error::Result;
use crate::ffi::context::{context_from, unsloth_context};
use crate::ffi::handle::Table;
use crate::ffi::optimizer::{unsloth_optimizer_params, unsloth_parameter_group};
use crate::ffi::params::{self, params};
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::unsloth_tensor;
use crate::ffi::{check_out, check_pointer, guard, stream_from, unsloth_stream};
use crate::optimizer::{Group, Optimizer};

/// Parameters, their gradients, and the state between steps, all on the device. Opaque; made by
/// `unsloth_optimizer_create`, ended by `unsloth_optimizer_destroy`. Several threads may use one at
/// a time; calls take turns.
///
/// A step is three launches, whatever the number of parameters, and may be captured into a graph:
/// no value is read by the host. The loss scale is a tensor for the gradient of the loss; the step
/// divides by it, limits the norm, and where a gradient is infinite or NaN leaves weights, moments
/// and the step's number as they are. Learning rate and weight decay lie on the device too.
///
/// The same inputs give the same bits, with any number of threads and on any grid. Calls on one
/// optimizer belong on one stream, or on streams that the caller orders.
pub struct unsloth_optimizer {
    _opaque: [u8; 0],
}

/// What the last step found.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_optimizer_status {
    /// `sizeof(unsloth_optimizer_status)`, set by the caller.
    pub struct_size: u32,
    /// 1 if one of the last step's gradients was infinite or NaN, on any rank that shares them.
    pub found_inf: u32,
    /// What the next loss is multiplied by.
    pub loss_scale: f32,
    /// The norm of the last step's gradients, of all ranks that share them, unscaled and before it was
    /// limited; NaN if one was not finite.
    pub gradient_norm: f32,
    /// Steps with an update.
    pub step: u64,
    /// Steps without one.
    pub skipped: u64,
}
params!(unsloth_optimizer_status, []);

static OPTIMIZERS: Table<Mutex<Owner>> = Table::new("unsloth_optimizer", 4);

/// An optimizer, and what it needs for its life.
struct Owner {
    // Dropped first, as the first field: it uses the group.
    optimizer: Optimizer,
    _comm: Option<Shared<Comm>>,
}

/// An optimizer for this thread alone, which lives at least as long.
struct Locked {
    // Dropped first, as the first field: it borrows from what the second keeps alive.
    guard: MutexGuard<'static, Owner>,
    _alive: Shared<Mutex<Owner>>,
}

impl Deref for Locked {
    type Target = Optimizer;

    fn deref(&self) -> &Optimizer {
        &self.guard.optimizer
    }
}

impl DerefMut for Locked {
    fn deref_mut(&mut self) -> &mut Optimizer {
        &mut self.guard.optimizer
    }
}

/// The optimizer behind a handle. A panic inside an earlier call left nothing half-changed: what
/// changes is on the device.
fn optimizer_from(op: &'static str, optimizer: *const unsloth_optimizer) -> Result<Locked> {
    let alive = OPTIMIZERS.get(op, "optimizer", optimizer)?;
    // SAFETY: the mutex stays where it is while `_alive` counts, and the guard is dropped before
    // that.
    let mutex: &'static Mutex<Owner> = unsafe { &*std::ptr::from_ref(&*alive) };
    Ok(Locked {
        guard: mutex.lock().unwrap_or_else(|p| p.into_inner()),
        _alive: alive,
    })
}

/// Makes an optimizer at step 0 and writes its handle to `optimizer`; the caller ends it with
/// `unsloth_optimizer_destroy`. Moments are zero and masters are copied from the weights, by work
/// that is queued on `stream`; the lists of `params` are copied. The optimizer keeps the context's
/// device alive on its own, and the group of `comm`. Not during a capture.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes, and its lists have as many
/// entries as are stated; weights, gradients and state are memory of the context's device for the
/// life of the optimizer and until work that was queued with it has run; `stream` is NULL or a live
/// stream of that device; `optimizer` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_optimizer_create(
    ctx: *mut unsloth_context,
    params: *const unsloth_optimizer_params,
    stream: unsloth_stream,
    optimizer: *mut *mut unsloth_optimizer,
) -> unsloth_status {
    const OP: &str = "optimizer_create";
    guard(OP, || {
        check_out(OP, "optimizer", optimizer)?;
        let object = context_from(OP, ctx)?;
        // SAFETY: the caller's promise is what all of these ask for.
        unsafe {
            let stream = stream_from(stream);
            let p = params::read(OP, params)?;
            let made = p.with(|params, comm| {
                Ok(Owner {
                    optimizer: Optimizer::new(&object.context, params, stream)?,
                    _comm: comm,
                })
            })?;
            optimizer.write(OPTIMIZERS.insert(OP, Mutex::new(made))?);
        }
        Ok(())
    })
}

/// Ends an optimizer. NULL is fine. The state is the caller's again when the work that was queued
/// with it has run; graphs that captured a step go on using it.
///
/// # Safety
/// `optimizer` is NULL or was made by `unsloth_optimizer_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_optimizer_destroy(
    optimizer: *mut unsloth_optimizer,
) -> unsloth_status {
    const OP: &str = "optimizer_destroy";
    guard(OP, || {
        if !optimizer.is_null() {
            drop(OPTIMIZERS.remove(OP, "optimizer", optimizer)?);
        }
        Ok(())
    })
}

/// Queues a step. Gradients are read once for their norm and once for the update, and zeroed with
/// it if the optimizer was told so, also where there is no update.
///
/// Three launches, which neither allocate nor synchronise and may be captured into a graph; each
/// launch of the graph is a step of its own, with the groups' values of then. Where ranks share what
/// is trained (`comm`), every rank calls it, and there are one more launch and a collective of 8 bytes
/// of each rank; a rank of a local group waits for the others, and where one fails there is no step.
///
/// # Safety
/// `stream` is NULL or a live stream of the optimizer's device; until the work has run nothing else
/// writes weights or gradients, or reads what the step writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_optimizer_step(
    optimizer: *mut unsloth_optimizer,
    stream: unsloth_stream,
) -> unsloth_status {
    const OP: &str = "optimizer_step";
    guard(OP, || {
        // SAFETY: the caller's promise.
        optimizer_from(OP, optimizer)?.step(unsafe { stream_from(stream) })
    })
}

/// Queues the multiplication of every gradient by `factor`, rounded once: `1 / n` makes a mean of
/// what `n` backward passes have accumulated. One launch, which may be captured.
///
/// # Safety
/// `stream` is NULL or a live stream of the optimizer's device; until the work has run nothing else
/// accesses the gradients.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_gradients_scale(
    optimizer: *mut unsloth_optimizer,
    factor: f32,
    stream: unsloth_stream,
) -> unsloth_status {
    const OP: &str = "gradients_scale";
    guard(OP, || {
        // SAFETY: the caller's promise.
        let stream = unsafe { stream_from(stream) };
        optimizer_from(OP, optimizer)?.scale_gradients(factor, stream)
    })
}

/// Queues a change of a group's learning rate and weight decay for the steps behind it, those of
/// captured graphs among them. Does not wait for the device, has read `values` when it returns, and
/// is not for a stream that is being captured.
///
/// # Safety
/// `values` is NULL or valid for reads; `stream` is NULL or a live stream of the optimizer's
/// device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_optimizer_set_group(
    optimizer: *mut unsloth_optimizer,
    group: u32,
    values: *const unsloth_parameter_group,
    stream: unsloth_stream,
) -> unsloth_status {
    const OP: &str = "optimizer_set_group";
    guard(OP, || {
        let mut optimizer = optimizer_from(OP, optimizer)?;
        check_pointer(OP, "values", values)?;
        // SAFETY: not NULL and aligned; the caller's promise.
        let (values, stream) = unsafe { (values.read(), stream_from(stream)) };
        let values = Group {
            learning_rate: values.learning_rate,
            weight_decay: values.weight_decay,
        };
        optimizer.set_group(group as usize, values, stream)
    })
}

/// Describes the loss scale in `scale`: f32 `[1]` on the device, valid for the optimizer's life,
/// and changed by its steps alone. It is what `dloss` of `unsloth_cross_entropy_forward` takes.
///
/// # Safety
/// `scale` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_optimizer_loss_scale(
    optimizer: *mut unsloth_optimizer,
    scale: *mut unsloth_tensor,
) -> unsloth_status {
    const OP: &str = "optimizer_loss_scale";
    guard(OP, || {
        let optimizer = optimizer_from(OP, optimizer)?;
        check_out(OP, "scale", scale)?;
        let tensor = unsloth_tensor::of(&optimizer.loss_scale()?);
        // SAFETY: checked; the caller promises that it is valid.
        unsafe { scale.write(tensor) };
        Ok(())
    })
}

/// Writes what the last step queued on `stream` found to `status`, whose `struct_size` the caller
/// has set (`UNSLOTH_OPTIMIZER_STATUS_INIT`). Waits for the stream, and is not for one that is
/// being captured.
///
/// # Safety
/// `status` is NULL or points to `status->struct_size` bytes valid for reads and writes; `stream`
/// is NULL or a live stream of the optimizer's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_optimizer_read(
    optimizer: *mut unsloth_optimizer,
    stream: unsloth_stream,
    status: *mut unsloth_optimizer_status,
) -> unsloth_status {
    const OP: &str = "optimizer_read";
    guard(OP, || {
        check_out(OP, "status", status)?;
        // SAFETY: the caller's promise.
        let mut out = unsafe { params::read(OP, status.cast_const()) }?;
        // SAFETY: the caller's promise.
        let found = optimizer_from(OP, optimizer)?.status(unsafe { stream_from(stream) })?;
        out.found_inf = u32::from(found.found_inf);
        out.loss_scale = found.loss_scale;
        out.gradient_norm = found.gradient_norm;
        out.step = found.step;
        out.skipped = found.skipped;
        // SAFETY: the caller promises `struct_size` writable bytes.
        unsafe { params::write(&out, status) };
        Ok(())
    })
}

/// Writes the bytes that `unsloth_optimizer_save` writes to `size`.
///
/// # Safety
/// `size` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_optimizer_saved_size(
    optimizer: *mut unsloth_optimizer,
    size: *mut usize,
) -> unsloth_status {
    const OP: &str = "optimizer_saved_size";
    guard(OP, || {
        let optimizer = optimizer_from(OP, optimizer)?;
        check_out(OP, "size", size)?;
        // SAFETY: checked; the caller promises that it is valid.
        unsafe { size.write(optimizer.saved_size()) };
        Ok(())
    })
}

/// Copies moments, masters or remainders, counters, the loss scale and the groups' values to `data`
/// on the host, after everything queued on `stream`, and waits; with a header by which
/// `unsloth_optimizer_load` knows them. What the params say otherwise, and weights and gradients,
/// are not in it.
///
/// # Safety
/// `data` is NULL or valid for writes of `size` bytes; `stream` is NULL or a live stream of the
/// optimizer's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_optimizer_save(
    optimizer: *mut unsloth_optimizer,
    data: *mut c_void,
    size: usize,
    stream: unsloth_stream,
) -> unsloth_status {
    const OP: &str = "optimizer_save";
    guard(OP, || {
        let optimizer = optimizer_from(OP, optimizer)?;
        let data = data.cast::<u8>();
        check_out(OP, "data", data)?;
        optimizer.check_size(OP, size)?;
        // SAFETY: not NULL; the caller promises `size` bytes, which are as many as are saved.
        unsafe { optimizer.save_to(data, stream_from(stream)) }
    })
}

/// Takes over what an optimizer of the same kind, parameters and groups saved; has read it when it
/// returns. With the weights and params of then, steps go on with the same bits as if they had not
/// been interrupted.
///
/// Weights stay as they are, those that have f32 masters too: the caller saves and restores them.
/// An error leaves the state as it was, unless the device failed. Not during a capture.
///
/// # Safety
/// `data` is NULL or valid for reads of `size` bytes; `stream` is NULL or a live stream of the
/// optimizer's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_optimizer_load(
    optimizer: *mut unsloth_optimizer,
    data: *const c_void,
    size: usize,
    stream: unsloth_stream,
) -> unsloth_status {
    const OP: &str = "optimizer_load";
    guard(OP, || {
        let mut optimizer = optimizer_from(OP, optimizer)?;
        let data = data.cast::<u8>();
        check_pointer(OP, "data", data)?;
        if size > isize::MAX as usize {
            return optimizer.check_size(OP, size);
        }
        // SAFETY: not NULL; the caller promises `size` readable bytes.
        let (data, stream) =
            unsafe { (std::slice::from_raw_parts(data, size), stream_from(stream)) };
        optimizer.load(data, stream)
    })
}
