//! Plans for gradient checkpointing.

use crate::error::{Error, Result, text};
use crate::ffi::params::{self, params};
use crate::ffi::status::unsloth_status;
use crate::ffi::{check_out, count, guard};
use crate::training::checkpoint::{Action, Params, Plan, Step};

const OP: &str = "checkpoint_plan";

/// What a plan says to do with a layer.
pub type unsloth_checkpoint_step = u32;
/// Run it for the first time.
pub const UNSLOTH_CHECKPOINT_STEP_FORWARD: unsloth_checkpoint_step = 1;
/// Its input is no longer needed: it will be computed again.
pub const UNSLOTH_CHECKPOINT_STEP_DROP: unsloth_checkpoint_step = 2;
/// Run it again, in the backward pass.
pub const UNSLOTH_CHECKPOINT_STEP_RECOMPUTE: unsloth_checkpoint_step = 3;
/// Go back through it. Then neither its input nor what it saved is needed any more.
pub const UNSLOTH_CHECKPOINT_STEP_BACKWARD: unsloth_checkpoint_step = 4;

/// Arguments of `unsloth_checkpoint_plan`: a stack of layers, each taking the output of the one
/// before.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_checkpoint_plan_params {
    /// `sizeof(unsloth_checkpoint_plan_params)`.
    pub struct_size: u32,
    /// Zero.
    pub reserved: u32,
    /// Layers, 1 to 65536.
    pub num_layers: i64,
    /// Layers in a segment, of which the input is kept: 1 keeps every layer's input, `num_layers`
    /// keeps everything and runs nothing twice. 0 for what has the least peak, which is near the
    /// square root of `num_layers` where layers save little.
    pub every: i64,
    /// Bytes of a hidden state: a layer's input, and its output.
    pub hidden_bytes: u64,
    /// Bytes of what a layer's forward saves for its backward, beside its input.
    pub saved_bytes: u64,
}
params!(unsloth_checkpoint_plan_params, [reserved]);

/// What a plan takes and costs.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_checkpoint_summary {
    /// `sizeof(unsloth_checkpoint_summary)`, set by the caller.
    pub struct_size: u32,
    /// Zero.
    pub reserved: u32,
    /// Layers in a segment; the last may be shorter.
    pub every: i64,
    /// Layers that run twice.
    pub num_recomputed: i64,
    /// Actions of the plan.
    pub num_actions: i64,
    /// Hidden states that actions name; the stack's input lies in slot 0.
    pub num_hidden_slots: i64,
    /// Layers whose saved tensors are held at once.
    pub num_saved_slots: i64,
    /// The slot of the stack's output after the last `UNSLOTH_CHECKPOINT_STEP_FORWARD`.
    pub output_slot: i64,
    /// The most bytes of hidden states and saved tensors that are held at once. What the arenas of
    /// all slots take may be a little more.
    pub peak_bytes: u64,
}
params!(unsloth_checkpoint_summary, [reserved]);

/// One line of a plan.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_checkpoint_action {
    /// What to do: one of `UNSLOTH_CHECKPOINT_STEP_*`.
    pub step: unsloth_checkpoint_step,
    /// With which layer.
    pub layer: i32,
    /// The slot of the hidden state that is the layer's input.
    pub input: i32,
    /// The slot of the hidden state that takes the layer's output; -1 where it does not run.
    pub output: i32,
    /// The slot of what the layer saves or has saved; -1 where it runs without saving.
    pub saved: i32,
    /// Zero.
    pub reserved: u32,
}

fn action(of: Action) -> unsloth_checkpoint_action {
    // There are at most two slots for each of 65536 layers.
    let slot = |slot: usize| i32::try_from(slot).unwrap_or(i32::MAX);
    unsloth_checkpoint_action {
        step: match of.step {
            Step::Forward => UNSLOTH_CHECKPOINT_STEP_FORWARD,
            Step::Drop => UNSLOTH_CHECKPOINT_STEP_DROP,
            Step::Recompute => UNSLOTH_CHECKPOINT_STEP_RECOMPUTE,
            Step::Backward => UNSLOTH_CHECKPOINT_STEP_BACKWARD,
        },
        layer: slot(of.layer),
        input: slot(of.input),
        output: of.output.map_or(-1, slot),
        saved: of.saved.map_or(-1, slot),
        reserved: 0,
    }
}

/// # Safety
/// As [`unsloth_checkpoint_plan`].
unsafe fn plan(
    params: *const unsloth_checkpoint_plan_params,
    summary: *mut unsloth_checkpoint_summary,
    actions: *mut unsloth_checkpoint_action,
    capacity: usize,
) -> Result<()> {
    check_out(OP, "summary", summary)?;
    // SAFETY: the caller's promises.
    let (p, mut out) = unsafe { (params::read(OP, params)?, params::read(OP, summary)?) };
    let plan = Plan::new(&Params {
        num_layers: count(OP, "num_layers", p.num_layers)?,
        every: count(OP, "every", p.every)?,
        hidden_bytes: p.hidden_bytes,
        saved_bytes: p.saved_bytes,
    })?;
    if !actions.is_null() {
        check_out(OP, "actions", actions)?;
        if capacity < plan.num_actions() {
            let problem = text!("is {capacity}, the plan has {} actions", plan.num_actions());
            return Err(Error::invalid(OP, "capacity", problem));
        }
        for (i, of) in plan.actions().enumerate() {
            // SAFETY: the caller promises room for `capacity` actions, and there are no more.
            unsafe { actions.add(i).write(action(of)) };
        }
    }
    let number = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
    out.every = number(plan.every());
    out.num_recomputed = number(plan.num_recomputed());
    out.num_actions = number(plan.num_actions());
    out.num_hidden_slots = number(plan.num_hidden_slots());
    out.num_saved_slots = number(plan.num_saved_slots());
    out.output_slot = number(plan.output_slot());
    out.peak_bytes = plan.peak_bytes();
    // SAFETY: the caller's promise.
    unsafe { params::write(&out, summary) };
    Ok(())
}

/// Says which layers of a stack run when, if not every layer's activations are kept from the forward
/// to the backward pass: at the cost of running most layers twice, memory falls to that of the
/// inputs of segments of `every` layers and the activations of one segment (arXiv:1604.06174).
///
/// Nothing runs and no memory is taken: the caller executes the actions one after the other, with
/// `unsloth_decoder_layer_forward` and `unsloth_decoder_layer_backward` or with layers of its own, over
/// arenas of `num_hidden_slots` hidden states and `num_saved_slots` layers' saved tensors. Between
/// the last forward and the first backward action the loss is computed from `output_slot`.
///
/// With NULL for `actions` only `summary` is written: first ask for the number, then for the actions.
/// The caller has set the summary's `struct_size` (`UNSLOTH_CHECKPOINT_SUMMARY_INIT`).
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `summary` is NULL or points to
/// `summary->struct_size` bytes valid for reads and writes; `actions` is NULL or valid for writes of
/// `capacity` actions.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_checkpoint_plan(
    params: *const unsloth_checkpoint_plan_params,
    summary: *mut unsloth_checkpoint_summary,
    actions: *mut unsloth_checkpoint_action,
    capacity: usize,
) -> unsloth_status {
    // SAFETY: the caller's promises.
    guard(OP, || unsafe { plan(params, summary, actions, capacity) })
}
