//! Schedules of a pipeline, and how long they take.

use crate::error::{Error, Result, text};
use crate::ffi::params::{self, params};
use crate::ffi::status::unsloth_status;
use crate::ffi::{check_optional_out, check_out, count, flag, guard};
use crate::training::pipeline::{Action, Costs, Kind, Params, RankUse, Schedule, Simulation, Step};

/// In which order the ranks of a pipeline go forward and back.
pub type unsloth_pipeline_kind = u32;
/// A rank goes forward until the first gradient can be there, then in turns back and forward
/// (arXiv:2104.04473). It holds `min(micro_batches, stages - rank)` micro-batches.
pub const UNSLOTH_PIPELINE_ONE_F_ONE_B: unsloth_pipeline_kind = 0;
/// All micro-batches go forward, then all go back (arXiv:1811.06965), and all are held.
pub const UNSLOTH_PIPELINE_GPIPE: unsloth_pipeline_kind = 1;
/// As `UNSLOTH_PIPELINE_ONE_F_ONE_B`, with two or more chunks on a rank, which divide the idle time; the ranks
/// divide the micro-batches evenly.
pub const UNSLOTH_PIPELINE_INTERLEAVED: unsloth_pipeline_kind = 2;
/// ZB-H1 (arXiv:2401.10241): as `UNSLOTH_PIPELINE_ONE_F_ONE_B`, with backward passes in two, of which the
/// second, of weights, is put off by as many micro-batches as the rank's number. A third of the idle time,
/// where all passes take as long, and on each rank as many micro-batches as on the first.
pub const UNSLOTH_PIPELINE_ZERO_BUBBLE: unsloth_pipeline_kind = 3;

/// What a rank of a pipeline does.
pub type unsloth_pipeline_step = u32;
/// The chunk's layers take the micro-batch's activation.
pub const UNSLOTH_PIPELINE_STEP_FORWARD: unsloth_pipeline_step = 1;
/// The chunk's layers take its gradient: gradients of the input and of weights.
pub const UNSLOTH_PIPELINE_STEP_BACKWARD: unsloth_pipeline_step = 2;
/// Only the gradient of the input.
pub const UNSLOTH_PIPELINE_STEP_BACKWARD_INPUT: unsloth_pipeline_step = 3;
/// Those of weights, of a micro-batch whose gradient of the input has been computed.
pub const UNSLOTH_PIPELINE_STEP_BACKWARD_WEIGHT: unsloth_pipeline_step = 4;
/// The chunk's output goes to the rank of the next part of the model.
pub const UNSLOTH_PIPELINE_STEP_SEND_ACTIVATION: unsloth_pipeline_step = 5;
/// The chunk's input comes from the rank of the part before.
pub const UNSLOTH_PIPELINE_STEP_RECEIVE_ACTIVATION: unsloth_pipeline_step = 6;
/// The gradient of the chunk's input goes to the rank of the part before.
pub const UNSLOTH_PIPELINE_STEP_SEND_GRADIENT: unsloth_pipeline_step = 7;
/// The gradient of the chunk's output comes from the rank of the next part.
pub const UNSLOTH_PIPELINE_STEP_RECEIVE_GRADIENT: unsloth_pipeline_step = 8;

/// Arguments of `unsloth_pipeline_schedule`: a model in `stages * chunks` parts of layers, of which part
/// `chunk * stages + rank` is the rank's chunk `chunk`, and a batch in micro-batches. `stages * chunks *
/// micro_batches` is at most 1048576.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_pipeline_schedule_params {
    /// `sizeof(unsloth_pipeline_schedule_params)`.
    pub struct_size: u32,
    /// One of `UNSLOTH_PIPELINE_*`.
    pub kind: unsloth_pipeline_kind,
    /// Ranks, 1 to 1024.
    pub stages: i32,
    /// Which of them, from 0.
    pub rank: i32,
    /// Groups of layers of each rank: 2 to 1024 interleaved, else 1. 0 is 1.
    pub chunks: i32,
    /// Zero.
    pub reserved: u32,
    /// Micro-batches of a step, at least 1; interleaved, a multiple of `stages`.
    pub micro_batches: i64,
}
params!(unsloth_pipeline_schedule_params, [reserved]);

/// How much a rank of a pipeline has to do and to hold.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_pipeline_summary {
    /// `sizeof(unsloth_pipeline_summary)`, set by the caller.
    pub struct_size: u32,
    /// Zero.
    pub reserved: u32,
    /// Actions of the rank.
    pub num_actions: i64,
    /// Micro-batches of single chunks that it holds at most: slots that actions name.
    pub num_slots: i64,
}
params!(unsloth_pipeline_summary, [reserved]);

/// One line of a rank's schedule.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_pipeline_action {
    /// What to do: one of `UNSLOTH_PIPELINE_STEP_*`.
    pub step: unsloth_pipeline_step,
    /// With which micro-batch.
    pub micro_batch: i32,
    /// In which of this rank's chunks.
    pub chunk: i32,
    /// The other rank of a transfer; -1 of a pass.
    pub peer: i32,
    /// Where what is held of the micro-batch in this chunk lies, from the forward pass and the receipt of
    /// its input to the last backward pass; -1 of a gradient that is sent, when the slot may have been taken
    /// again.
    pub slot: i32,
    /// 1 if this transfer and the next action, a transfer in the other direction, may be one call of
    /// `unsloth_send_receive_forward`.
    pub joined: u32,
}

/// Arguments of `unsloth_pipeline_simulate`: a pipeline as in `unsloth_pipeline_schedule_params`, and what its
/// passes take. Times are in any unit, 0 to 1e18.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_pipeline_simulate_params {
    /// `sizeof(unsloth_pipeline_simulate_params)`.
    pub struct_size: u32,
    /// One of `UNSLOTH_PIPELINE_*`.
    pub kind: unsloth_pipeline_kind,
    /// Ranks.
    pub stages: i32,
    /// Groups of layers of each rank. 0 is 1.
    pub chunks: i32,
    /// Micro-batches of a step.
    pub micro_batches: i64,
    /// The time of a micro-batch forward through all chunks of a rank; a chunk takes an equal part of it.
    pub forward: f64,
    /// Of the gradient of the input, likewise.
    pub backward_input: f64,
    /// Of the gradients of weights, likewise. `UNSLOTH_PIPELINE_STEP_BACKWARD` takes both.
    pub backward_weight: f64,
    /// The time of an activation or a gradient from one rank to another.
    pub transfer: f64,
    /// 1 if a rank's transfers run on a stream of their own, beside its passes and in their order; 0 if all
    /// that a rank does is on one stream.
    pub overlap: u32,
    /// Zero.
    pub reserved: u32,
    /// Bytes that all chunks of a rank hold of a micro-batch from the forward pass to the gradient of the
    /// input.
    pub activation_bytes: u64,
    /// Bytes that they hold from there to the gradients of weights, where the two are apart.
    pub split_bytes: u64,
}
params!(unsloth_pipeline_simulate_params, [reserved]);

/// What a step of a pipeline takes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_pipeline_simulation {
    /// `sizeof(unsloth_pipeline_simulation)`, set by the caller.
    pub struct_size: u32,
    /// Zero.
    pub reserved: u32,
    /// From the first pass's begin to the end of the last pass or transfer.
    pub time: f64,
    /// The share of it, 0 to 1, in which ranks run no pass, in the mean.
    pub idle: f64,
    /// The most micro-batches of single chunks that any rank holds.
    pub peak_live: i64,
    /// The most bytes of these.
    pub peak_bytes: u64,
}
params!(unsloth_pipeline_simulation, [reserved]);

/// What one rank takes in a step.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_pipeline_rank_use {
    /// The time in its passes.
    pub busy: f64,
    /// The most micro-batches of single chunks that it holds, each from its forward pass to its last
    /// backward pass.
    pub peak_live: i64,
    /// The most bytes of these.
    pub peak_bytes: u64,
}

/// A pipeline of what both functions are told.
fn pipeline(
    op: &'static str,
    kind: unsloth_pipeline_kind,
    stages: i32,
    chunks: i32,
    micro_batches: i64,
) -> Result<Params> {
    Ok(Params {
        kind: Kind::from_raw(kind).ok_or_else(|| {
            let problem = text!("is {kind}, allowed: 0 to {}", Kind::ALL.len() - 1);
            Error::invalid(op, "kind", problem)
        })?,
        stages: count(op, "stages", stages.into())?,
        chunks: count(op, "chunks", chunks.into())?,
        micro_batches: count(op, "micro_batches", micro_batches)?,
    })
}

fn action(of: &Action) -> unsloth_pipeline_action {
    // There are at most 2^20 of anything.
    let number = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
    unsloth_pipeline_action {
        step: match of.step {
            Step::Forward => UNSLOTH_PIPELINE_STEP_FORWARD,
            Step::Backward => UNSLOTH_PIPELINE_STEP_BACKWARD,
            Step::BackwardInput => UNSLOTH_PIPELINE_STEP_BACKWARD_INPUT,
            Step::BackwardWeight => UNSLOTH_PIPELINE_STEP_BACKWARD_WEIGHT,
            Step::SendActivation => UNSLOTH_PIPELINE_STEP_SEND_ACTIVATION,
            Step::ReceiveActivation => UNSLOTH_PIPELINE_STEP_RECEIVE_ACTIVATION,
            Step::SendGradient => UNSLOTH_PIPELINE_STEP_SEND_GRADIENT,
            Step::ReceiveGradient => UNSLOTH_PIPELINE_STEP_RECEIVE_GRADIENT,
        },
        micro_batch: number(of.micro_batch),
        chunk: number(of.chunk),
        peer: of.peer.map_or(-1, number),
        slot: of.slot.map_or(-1, number),
        joined: of.joined.into(),
    }
}

/// # Safety
/// As [`unsloth_pipeline_schedule`].
unsafe fn schedule(
    params: *const unsloth_pipeline_schedule_params,
    summary: *mut unsloth_pipeline_summary,
    actions: *mut unsloth_pipeline_action,
    capacity: usize,
) -> Result<()> {
    const OP: &str = "pipeline_schedule";
    check_out(OP, "summary", summary)?;
    check_optional_out(OP, "actions", actions)?;
    // SAFETY: the caller's promises.
    let (p, mut out) = unsafe { (params::read(OP, params)?, params::read(OP, summary)?) };
    let of = pipeline(OP, p.kind, p.stages, p.chunks, p.micro_batches)?;
    let rank = count(OP, "rank", p.rank.into())?;
    let schedule = Schedule::new(&of)?;
    let (num_actions, num_slots) = (schedule.num_actions(rank)?, schedule.num_slots(rank)?);
    if !actions.is_null() {
        if capacity < num_actions {
            let problem = text!("is {capacity}, the rank has {num_actions} actions");
            return Err(Error::invalid(OP, "capacity", problem));
        }
        let found = schedule.actions(rank)?;
        for (i, of) in found.iter().enumerate() {
            // SAFETY: the caller promises room for `capacity` actions, and there are no more.
            unsafe { actions.add(i).write(action(of)) };
        }
    }
    let number = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
    out.num_actions = number(num_actions);
    out.num_slots = number(num_slots);
    // SAFETY: the caller's promise.
    unsafe { params::write(&out, summary) };
    Ok(())
}

/// Says what a rank of a pipeline does in a training step, in order: passes through its chunks of the
/// model's layers, and transfers to and from the ranks before and behind it.
///
/// Nothing runs and no device is needed: the caller runs the actions one after the other, the passes with
/// layers of this library or its own, the transfers with `unsloth_send_receive_forward` or its own. All ranks'
/// actions are drawn from one order of them all, so transfers that wait for their other side never wait in
/// a circle. Two that are `joined` may be one call, so that both directions move at once; they need not.
/// What is received is taken by the next pass.
///
/// With NULL for `actions` only `summary` is written: first ask for the number, then for the actions. The
/// caller has set the summary's `struct_size` (`UNSLOTH_PIPELINE_SUMMARY_INIT`).
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `summary` is NULL or points to
/// `summary->struct_size` bytes valid for reads and writes; `actions` is NULL or valid for writes of
/// `capacity` actions.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_pipeline_schedule(
    params: *const unsloth_pipeline_schedule_params,
    summary: *mut unsloth_pipeline_summary,
    actions: *mut unsloth_pipeline_action,
    capacity: usize,
) -> unsloth_status {
    // SAFETY: the caller's promises.
    guard("pipeline_schedule", || unsafe {
        schedule(params, summary, actions, capacity)
    })
}

/// # Safety
/// As [`unsloth_pipeline_simulate`].
unsafe fn simulate(
    params: *const unsloth_pipeline_simulate_params,
    simulation: *mut unsloth_pipeline_simulation,
    ranks: *mut unsloth_pipeline_rank_use,
    capacity: usize,
) -> Result<()> {
    const OP: &str = "pipeline_simulate";
    check_out(OP, "simulation", simulation)?;
    check_optional_out(OP, "ranks", ranks)?;
    // SAFETY: the caller's promises.
    let (p, mut out) = unsafe { (params::read(OP, params)?, params::read(OP, simulation)?) };
    let of = pipeline(OP, p.kind, p.stages, p.chunks, p.micro_batches)?;
    if !ranks.is_null() && capacity < of.stages {
        let problem = text!("is {capacity}, stages is {}", of.stages);
        return Err(Error::invalid(OP, "capacity", problem));
    }
    let Simulation {
        time,
        idle,
        ranks: found,
    } = Schedule::of(OP, &of)?.simulate(&Costs {
        forward: p.forward,
        backward_input: p.backward_input,
        backward_weight: p.backward_weight,
        transfer: p.transfer,
        overlap: flag(OP, "overlap", p.overlap)?,
        activation_bytes: p.activation_bytes,
        split_bytes: p.split_bytes,
    })?;
    let rank_use = |of: &RankUse| unsloth_pipeline_rank_use {
        busy: of.busy,
        peak_live: i64::try_from(of.peak_live).unwrap_or(i64::MAX),
        peak_bytes: of.peak_bytes,
    };
    if !ranks.is_null() {
        for (i, of) in found.iter().enumerate() {
            // SAFETY: the caller promises room for `capacity` ranks, and there are no more.
            unsafe { ranks.add(i).write(rank_use(of)) };
        }
    }
    (out.time, out.idle) = (time, idle);
    let live = found.iter().map(|of| rank_use(of).peak_live).max();
    out.peak_live = live.unwrap_or_default();
    let bytes = found.iter().map(|of| of.peak_bytes).max();
    out.peak_bytes = bytes.unwrap_or_default();
    // SAFETY: the caller's promise.
    unsafe { params::write(&out, simulation) };
    Ok(())
}

/// Says how long a pipeline's step takes, how much of that ranks are idle, and how much they hold: follows
/// the actions that `unsloth_pipeline_schedule` gives to all ranks. A transfer takes both of its ranks from
/// when the later one comes to it; two that are joined run at the same time.
///
/// The caller has set the `struct_size` of `simulation` (`UNSLOTH_PIPELINE_SIMULATION_INIT`). `ranks` takes
/// what each rank has; NULL if that is not wanted.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `simulation` is NULL or points to
/// `simulation->struct_size` bytes valid for reads and writes; `ranks` is NULL or valid for writes of
/// `capacity` of them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_pipeline_simulate(
    params: *const unsloth_pipeline_simulate_params,
    simulation: *mut unsloth_pipeline_simulation,
    ranks: *mut unsloth_pipeline_rank_use,
    capacity: usize,
) -> unsloth_status {
    // SAFETY: the caller's promises.
    guard("pipeline_simulate", || unsafe {
        simulate(params, simulation, ranks, capacity)
    })
}
