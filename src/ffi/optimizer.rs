//! What an optimizer is made of.

use std::ffi::c_void;
use std::fmt;

use crate::alloc::Shared;
use crate::comm::Comm;
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::estimate::OptimizerKind;
use crate::ffi::comm::{comm_from, unsloth_comm};
use crate::ffi::context::{context_from, unsloth_context};
use crate::ffi::params::{self, Field, params};
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::{implemented, unsloth_dtype, unsloth_tensor, workspace_from};
use crate::ffi::{check_out, check_pointer, flag, guard, unsloth_implementation, write_optional};
use crate::optimizer::{
    Group, LossScale, Master, MixedPrecision, Parameter, Params, Rule, state_size, supported,
};

const OP: &str = "optimizer";

/// How an optimizer updates, and what it keeps for each trained parameter.
pub type unsloth_optimizer_kind = u32;
/// Adam or AdamW: two f32 moments, 8 bytes.
pub const UNSLOTH_OPTIMIZER_ADAM: unsloth_optimizer_kind = 0;
/// AdamW with 8-bit moments in blocks of 256 with an f32 scale each (arXiv:2110.02861): 2 bytes and
/// 1/32. Estimated; `unsloth_optimizer_create` of this version does not make one.
pub const UNSLOTH_OPTIMIZER_ADAM_8BIT: unsloth_optimizer_kind = 1;
/// Stochastic gradient descent: nothing.
pub const UNSLOTH_OPTIMIZER_SGD: unsloth_optimizer_kind = 2;
/// Stochastic gradient descent with momentum: one f32, 4 bytes.
pub const UNSLOTH_OPTIMIZER_SGD_MOMENTUM: unsloth_optimizer_kind = 3;

/// Where the f32 value of a 16-bit weight is kept between steps. A weight of f32 is its own,
/// whatever this says.
pub type unsloth_master = u32;
/// Nowhere: each update is rounded to the weight's dtype, and small ones are lost.
pub const UNSLOTH_MASTER_NONE: unsloth_master = 0;
/// In f32, 4 bytes (arXiv:1710.03740).
pub const UNSLOTH_MASTER_F32: unsloth_master = 1;
/// In the bf16 weight and 2 bytes that hold what rounding took from it. The value is that of
/// `UNSLOTH_MASTER_F32`, bit for bit; the weight too, unless the value lies halfway between two of
/// bf16: then it is the one further from zero. Not for f16.
pub const UNSLOTH_MASTER_REMAINDER: unsloth_master = 2;
/// Nowhere; updates are rounded to bf16 at random, so that on average none is lost. The random
/// numbers (Philox) depend on the seed, the step and the element's place among all. Not for f16.
pub const UNSLOTH_MASTER_STOCHASTIC: unsloth_master = 3;

/// A weight that is trained, and its gradient: on the context's device, of one shape, contiguous,
/// each f32, f16 or bf16.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_parameter {
    /// The weight.
    pub weight: unsloth_tensor,
    /// Its gradient.
    pub gradient: unsloth_tensor,
    /// Index of its group.
    pub group: u32,
    /// Zero.
    pub reserved: u32,
}

/// What may differ between parameters, and change between steps. Both are at least 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_parameter_group {
    /// The learning rate.
    pub learning_rate: f32,
    /// The weight decay; 0 for none.
    pub weight_decay: f32,
}

/// How the loss is scaled, so that small gradients of f16 do not vanish. The rule is that of
/// PyTorch's `GradScaler`, with Megatron-LM's hysteresis: after a step without an update, because
/// gradients were not finite, the scale is multiplied by `backoff`; after `interval` updates in a
/// row by `growth`. It stays what it is where it would be infinite or below the least normal
/// number. All zero is no scaling.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_loss_scale {
    /// 1 if the scale changes, 0 if it stays.
    pub dynamic: u32,
    /// The first scale; 0 for 65536 if it changes, else for 1.
    pub init: f32,
    /// At least 1; 0 for 2.
    pub growth: f32,
    /// At most 1; 0 for 0.5.
    pub backoff: f32,
    /// 0 for 2000.
    pub interval: u32,
    /// Steps in a row that must fail before the scale shrinks; 0 for 1, as in PyTorch.
    pub hysteresis: u32,
    /// Zero.
    pub reserved: [u32; 2],
}

/// The precision that a model is trained in. All zero is that of its weights.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_mixed_precision {
    /// The dtype of every weight but those of f32: f32, f16 or bf16; 0 asks nothing of them.
    pub compute_dtype: unsloth_dtype,
    /// Where weights of 16 bits are kept in f32, one of `UNSLOTH_MASTER_*`.
    pub master: unsloth_master,
    /// How the loss is scaled.
    pub loss_scale: unsloth_loss_scale,
    /// Zero.
    pub reserved: [u32; 2],
}

/// What an optimizer is made of.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_optimizer_params {
    /// `sizeof(unsloth_optimizer_params)`.
    pub struct_size: u32,
    /// One of `UNSLOTH_OPTIMIZER_*`.
    pub kind: unsloth_optimizer_kind,
    /// 1 if weight decay shrinks weights apart from the gradient, `weight *= 1 - learning_rate *
    /// weight_decay` (AdamW, arXiv:1711.05101); 0 if it is part of it, `gradient += weight_decay *
    /// weight`.
    pub decoupled: u32,
    /// With momentum: 1 for Nesterov's.
    pub nesterov: u32,
    /// 1 if a step leaves zeros in the gradients, for the next backward pass to accumulate in.
    pub zero_gradients: u32,
    /// Adam's decay of the first moment, below 1; 0 for 0.9.
    pub beta1: f32,
    /// Adam's decay of the second moment, below 1; 0 for 0.999.
    pub beta2: f32,
    /// Added to the root of Adam's second moment; 0 for 1e-8.
    pub epsilon: f32,
    /// Of `UNSLOTH_OPTIMIZER_SGD_MOMENTUM`, below 1; 0 for 0.9.
    pub momentum: f32,
    /// The greatest norm of all gradients together, of all ranks that share them: greater ones are
    /// multiplied by `max_norm / (norm + 1e-6)`, as PyTorch's `clip_grad_norm_` does. 0 for no limit.
    pub max_norm: f32,
    /// Where 16-bit weights are kept in f32, and the loss scale.
    pub precision: unsloth_mixed_precision,
    /// Of `UNSLOTH_MASTER_STOCHASTIC`.
    pub seed: u64,
    /// `num_parameters` of them, read by the call alone. Their order is part of what is saved. No
    /// two tensors of all overlap.
    pub parameters: *const unsloth_parameter,
    /// At least 1.
    pub num_parameters: usize,
    /// `num_groups` of them, read by the call alone.
    pub groups: *const unsloth_parameter_group,
    /// 1 to 65536.
    pub num_groups: usize,
    /// Memory of the context's device for moments and masters, aligned to 256 bytes: the
    /// optimizer's alone, from `unsloth_optimizer_create` on for its life. Not looked at by
    /// queries.
    pub state: *mut c_void,
    /// Its bytes, at least what `unsloth_optimizer_state_size` answers.
    pub state_size: usize,
    /// Optional: this rank's part in the group of ranks that share what is trained; of the same
    /// context. `parameters` are then this rank's share, which differs from the others' and may be any
    /// part of a weight, and all ranks make their steps together: the norm, what limits it, and whether
    /// a step is skipped are those of the gradients of all. The optimizer keeps the group alive on its
    /// own. With `unsloth_reduce_scatter_forward` of the gradients before a step, and
    /// `unsloth_all_gather_forward` of the weights after it, this is ZeRO's first stage
    /// (arXiv:1910.02054). Each rank saves and loads its own state. A rank without a share has a
    /// parameter of no elements. Seeds of random rounding are to differ between ranks.
    pub comm: *mut unsloth_comm,
}
params!(unsloth_optimizer_params, [precision]);

/// Where the f32 values of 16-bit weights are.
pub(super) fn master_from(
    op: &'static str,
    name: &'static str,
    value: unsloth_master,
) -> Result<Master> {
    Master::from_raw(value).ok_or_else(|| {
        let problem =
            text!("is {value}, allowed: 0 (none), 1 (f32), 2 (remainder), 3 (stochastic)");
        Error::invalid(op, name, problem)
    })
}

impl Field for unsloth_mixed_precision {
    fn check(&self, op: &'static str, name: fmt::Arguments<'_>) -> Result<()> {
        let loss_scale = format_args!("{name}.loss_scale.reserved");
        self.loss_scale.reserved.check(op, loss_scale)?;
        self.reserved.check(op, format_args!("{name}.reserved"))
    }
}

/// A number whose zero stands for a default.
fn or(value: f32, default: f32) -> f32 {
    if value == 0.0 { default } else { value }
}

/// As [`or`].
fn or_count(value: u32, default: u32) -> u32 {
    if value == 0 { default } else { value }
}

impl unsloth_loss_scale {
    fn convert(&self) -> Result<LossScale> {
        let dynamic = flag(OP, "precision.loss_scale.dynamic", self.dynamic)?;
        let default = match dynamic {
            true => LossScale::DYNAMIC,
            false => LossScale::NONE,
        };
        Ok(LossScale {
            dynamic,
            init: or(self.init, default.init),
            growth: or(self.growth, default.growth),
            backoff: or(self.backoff, default.backoff),
            interval: or_count(self.interval, default.interval),
            hysteresis: or_count(self.hysteresis, default.hysteresis),
        })
    }
}

impl unsloth_mixed_precision {
    fn convert(&self) -> Result<MixedPrecision> {
        const DTYPE: &str = "precision.compute_dtype";
        let compute = match self.compute_dtype {
            0 => None,
            raw => {
                let wrong = || {
                    let problem = text!("is {raw}, allowed: 0, 1 (f32), 2 (f16), 3 (bf16)");
                    Error::invalid(OP, DTYPE, problem)
                };
                let dtype = DType::from_raw(raw).ok_or_else(wrong)?;
                let dtype = implemented(OP, DTYPE, dtype)?;
                if !dtype.is_float() {
                    return Err(wrong());
                }
                Some(dtype)
            }
        };
        let master = master_from(OP, "precision.master", self.master)?;
        Ok(MixedPrecision {
            compute,
            master,
            loss_scale: self.loss_scale.convert()?,
        })
    }
}

impl unsloth_optimizer_params {
    fn rule(&self) -> Result<Rule> {
        let kind = OptimizerKind::from_raw(self.kind).ok_or_else(|| {
            let problem = text!(
                "is {}, allowed: 0 (adam), 2 (sgd), 3 (sgd with momentum)",
                self.kind
            );
            Error::invalid(OP, "kind", problem)
        })?;
        let decoupled = flag(OP, "decoupled", self.decoupled)?;
        let nesterov = flag(OP, "nesterov", self.nesterov)?;
        let momentum = match kind {
            OptimizerKind::Adam if nesterov => {
                return Err(Error::invalid(OP, "nesterov", "is set without momentum"));
            }
            OptimizerKind::Adam => {
                return Ok(Rule::Adam {
                    beta1: or(self.beta1, 0.9),
                    beta2: or(self.beta2, 0.999),
                    epsilon: or(self.epsilon, 1e-8),
                    decoupled,
                });
            }
            OptimizerKind::Sgd => 0.0,
            OptimizerKind::SgdMomentum => or(self.momentum, 0.9),
            OptimizerKind::Adam8bit => {
                let problem = "is 1 (adam 8-bit), which is estimated, but not made by this version";
                return Err(Error::unsupported(OP, "kind", problem));
            }
        };
        Ok(Rule::Sgd {
            momentum,
            nesterov,
            decoupled,
        })
    }

    /// Converts, and calls `run` with what came out, and with the owner of its `comm`.
    ///
    /// # Safety
    /// The lists have as many entries as are stated; the rest is what `run` asks for.
    pub(crate) unsafe fn with<R>(
        &self,
        run: impl FnOnce(&Params<'_>, Option<Shared<Comm>>) -> Result<R>,
    ) -> Result<R> {
        let rule = self.rule()?;
        let precision = self.precision.convert()?;
        let zero_gradients = flag(OP, "zero_gradients", self.zero_gradients)?;
        // SAFETY: the caller's promise.
        let (of_c, groups) = unsafe {
            (
                list(OP, "parameters", self.parameters, self.num_parameters)?,
                list(OP, "groups", self.groups, self.num_groups)?,
            )
        };
        let of_rust = |group: &unsloth_parameter_group| {
            Ok(Group {
                learning_rate: group.learning_rate,
                weight_decay: group.weight_decay,
            })
        };
        let groups = collect(groups.iter().map(of_rust), groups.len())?;
        let at = |(i, p): (usize, &unsloth_parameter)| {
            // SAFETY: the caller's promise.
            unsafe { p.convert() }.map_err(|e| e.inside(format_args!("parameters[{i}]")))
        };
        let parameters = collect(of_c.iter().enumerate().map(at), of_c.len())?;
        // SAFETY: the caller's promise.
        let state = unsafe { workspace_from(OP, self.state, self.state_size) }
            .map_err(|e| e.renamed(&[("workspace_size", "state_size")]))?;
        let comm = match self.comm.is_null() {
            true => None,
            false => Some(comm_from(OP, self.comm)?),
        };
        let owner = comm.clone();
        let params = Params {
            rule,
            precision,
            max_norm: self.max_norm,
            zero_gradients,
            seed: self.seed,
            parameters: &parameters,
            groups: &groups,
            comm: comm.as_deref(),
            state,
        };
        run(&params, owner)
    }
}

impl unsloth_parameter {
    /// # Safety
    /// As the constructors of tensors ask for.
    unsafe fn convert<'a>(&self) -> Result<Parameter<'a>> {
        self.weight.check(OP, format_args!("weight"))?;
        self.gradient.check(OP, format_args!("gradient"))?;
        self.reserved.check(OP, format_args!("reserved"))?;
        // SAFETY: the caller's promise.
        unsafe {
            Ok(Parameter {
                weight: self.weight.output(OP, "weight")?,
                gradient: self.gradient.output(OP, "gradient")?,
                group: self.group as usize,
            })
        }
    }
}

/// A caller's list; of no entries, whatever the pointer.
///
/// # Safety
/// `entries` is NULL or has `count` entries.
unsafe fn list<'a, T>(
    op: &'static str,
    name: &'static str,
    entries: *const T,
    count: usize,
) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    check_pointer(op, name, entries)?;
    let bytes = count.checked_mul(size_of::<T>());
    let end = bytes.and_then(|bytes| entries.addr().checked_add(bytes));
    if end.is_none_or(|end| end > isize::MAX as usize) {
        let problem = text!("has {count} entries, more than the address space");
        return Err(Error::invalid(op, name, problem));
    }
    // SAFETY: not NULL, aligned, within the address space; the caller promises the entries.
    Ok(unsafe { std::slice::from_raw_parts(entries, count) })
}

/// A vector of at most `count` results.
fn collect<T>(results: impl Iterator<Item = Result<T>>, count: usize) -> Result<Vec<T>> {
    let mut collected = Vec::new();
    collected
        .try_reserve_exact(count)
        .map_err(|_| Error::out_of_host_memory(OP, count.saturating_mul(size_of::<T>())))?;
    for result in results {
        collected.push(result?);
    }
    Ok(collected)
}

/// Writes to `implementation` which implementation would run the steps of such an optimizer; NULL
/// if only the status is wanted. Data pointers and the state are not looked at.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes, and its lists have as many
/// entries as are stated; `implementation` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_optimizer_supported(
    ctx: *mut unsloth_context,
    params: *const unsloth_optimizer_params,
    implementation: *mut unsloth_implementation,
) -> unsloth_status {
    guard(OP, || {
        let object = context_from(OP, ctx)?;
        // SAFETY: the caller's promise; a query does not look at data.
        unsafe {
            let p = params::read(OP, params)?;
            let chosen = p.with(|params, _| supported(&object.context, params))?;
            write_optional(OP, "implementation", implementation, || chosen as u32)
        }
    })
}

/// Writes the bytes of the state of such an optimizer to `state_size`, exactly: moments, masters
/// and less than a thousandth beside them. Data pointers and the state are not looked at.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes, and its lists have as many
/// entries as are stated; `state_size` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_optimizer_state_size(
    ctx: *mut unsloth_context,
    params: *const unsloth_optimizer_params,
    state_size: *mut usize,
) -> unsloth_status {
    guard(OP, || {
        let object = context_from(OP, ctx)?;
        // SAFETY: the caller's promise; a query does not look at data.
        unsafe {
            let p = params::read(OP, params)?;
            check_out(OP, "state_size", state_size)?;
            let size = p.with(|params, _| self::state_size(&object.context, params))?;
            state_size.write(size);
            Ok(())
        }
    })
}
