//! What an optimizer is made of, and its checks.

use super::state::check_index;
use super::{LossScale, Master, MixedPrecision, OP};
use crate::comm::Comm;
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::ops::check::{Arg, finite};
use crate::problem::optimizer::{Group, Rule, Scaling, Storage};
use crate::tensor::{Place, RawTensor, TensorMut, Workspace};

/// Most groups of parameters.
pub(super) const MAX_GROUPS: usize = 1 << 16;

/// A weight that is trained, and its gradient.
#[derive(Debug)]
pub struct Parameter<'a> {
    /// Of any shape, contiguous; f32, f16 or bf16.
    pub weight: TensorMut<'a>,
    /// The weight's shape, contiguous; f32, f16 or bf16.
    pub gradient: TensorMut<'a>,
    /// Index of its group.
    pub group: usize,
}

/// What an optimizer is made of.
#[derive(Debug)]
pub struct Params<'a> {
    /// The update rule.
    pub rule: Rule,
    /// Where 16-bit weights are kept in f32, and the loss scale.
    pub precision: MixedPrecision,
    /// The greatest norm of all gradients together, those of all ranks that share them: greater ones are multiplied by
    /// `max_norm / (norm + 1e-6)`, as PyTorch's `clip_grad_norm_` does. 0 for no limit.
    pub max_norm: f32,
    /// Whether a step leaves zeros in the gradients, for the next backward pass to accumulate in.
    pub zero_gradients: bool,
    /// Of stochastic rounding.
    pub seed: u64,
    /// At least one. Their order is part of what [`Optimizer::save`](super::Optimizer::save) saves.
    pub parameters: &'a [Parameter<'a>],
    /// At least one.
    pub groups: &'a [Group],
    /// Where ranks share what is trained, this rank's part in their group: `parameters` are its
    /// share, the norm and whether a step is skipped those of all ranks together; see the
    /// [module](super). A rank without a share has a parameter of no elements, and seeds of random
    /// rounding are to differ between ranks.
    pub comm: Option<&'a Comm>,
    /// Memory for moments and masters, of [`state_size`](super::state_size) bytes; not looked at by
    /// queries.
    pub state: Workspace<'a>,
}

impl<'a> Params<'a> {
    /// AdamW as PyTorch has it by default (β₁ 0.9, β₂ 0.999, ε 1e-8), without a limit of the norm
    /// or a loss scale; masters are f32.
    pub fn adamw(
        parameters: &'a [Parameter<'a>],
        groups: &'a [Group],
        state: Workspace<'a>,
    ) -> Params<'a> {
        Params {
            rule: Rule::Adam {
                beta1: 0.9,
                beta2: 0.999,
                epsilon: 1e-8,
                decoupled: true,
            },
            precision: MixedPrecision {
                compute: None,
                master: Master::F32,
                loss_scale: LossScale::NONE,
            },
            max_norm: 0.0,
            zero_gradients: false,
            seed: 0,
            parameters,
            groups,
            comm: None,
            state,
        }
    }

    /// Checks everything but data.
    pub(super) fn check(&self) -> Result<Scaling> {
        check_rule(&self.rule)?;
        at_least_zero("max_norm", self.max_norm)?;
        let counts = [
            ("num_parameters", self.parameters.len(), usize::MAX),
            ("num_groups", self.groups.len(), MAX_GROUPS),
        ];
        for (name, count, most) in counts {
            if count == 0 {
                return Err(Error::invalid(OP, name, "is 0, at least 1 is needed"));
            }
            if count > most {
                let problem = text!("is {count}, above the maximum {most}");
                return Err(Error::invalid(OP, name, problem));
            }
        }
        for (i, group) in self.groups.iter().enumerate() {
            check_group(group).map_err(|e| e.inside(format_args!("groups[{i}]")))?;
        }
        for (i, parameter) in self.parameters.iter().enumerate() {
            self.check_parameter(parameter)
                .map_err(|e| e.inside(format_args!("parameters[{i}]")))?;
        }
        self.precision.loss_scale.check()
    }

    fn check_parameter(&self, p: &Parameter<'_>) -> Result<()> {
        let (weight, gradient) = (p.weight.raw(), p.gradient.raw());
        let of = Arg::new(OP, "weight", &weight)
            .min_rank(1)?
            .dtype(DType::FLOATS)?
            .contiguous()?;
        Arg::new(OP, "gradient", &gradient)
            .dtype(DType::FLOATS)?
            .shape_of(of)?
            .contiguous()?;
        check_index(OP, p.group, self.groups.len())?;
        let dtype = weight.dtype;
        let MixedPrecision {
            compute, master, ..
        } = self.precision;
        if let Some(compute) = compute
            && dtype != DType::F32
            && dtype != compute
        {
            let problem = text!("has dtype {dtype}, the compute dtype is {compute}");
            return Err(Error::invalid(OP, "weight", problem));
        }
        check_master(dtype, master)
    }

    /// Checks data: what is known of where it is, that it is there, and that nothing overlaps.
    pub(super) fn check_data(&self, place: Place, state: &RawTensor) -> Result<()> {
        let mut ranges = Vec::new();
        let count = 2 * self.parameters.len() + 1;
        ranges
            .try_reserve_exact(count)
            .map_err(|_| Error::out_of_host_memory(OP, count.saturating_mul(32)))?;
        for (i, p) in self.parameters.iter().enumerate() {
            for (name, tensor) in [("weight", &p.weight), ("gradient", &p.gradient)] {
                let raw = tensor.raw();
                let at = |e: Error| e.inside(format_args!("parameters[{i}]"));
                Arg::new(OP, name, &raw).data().map_err(at)?;
                check_place(name, tensor.place(), place).map_err(at)?;
                ranges.push((raw.byte_range(), Some((i, name))));
            }
        }
        check_place("state", self.state.place(), place)?;
        ranges.push((state.byte_range(), None));
        ranges.retain(|(range, _)| !range.is_empty());
        ranges.sort_unstable_by_key(|(range, _)| range.start);
        let name = |owner: Option<(usize, &str)>| match owner {
            Some((i, name)) => text!("parameters[{i}].{name}"),
            None => text!("state"),
        };
        // Each begins behind the one before it, if none of those overlapped.
        for pair in ranges.windows(2) {
            let [(first, one), (second, other)] = pair else {
                continue;
            };
            if second.start < first.end {
                // That which the caller listed later is at fault.
                let (late, early) = match order(*one) > order(*other) {
                    true => (*one, *other),
                    false => (*other, *one),
                };
                let problem = text!("overlaps {}", name(early));
                return Err(Error::invalid(OP, name(late), problem));
            }
        }
        Ok(())
    }

    /// Where a parameter's f32 value is.
    pub(super) fn storage(&self, p: &Parameter<'_>) -> Storage {
        storage(p.weight.dtype(), self.precision.master)
    }
}

/// Where the f32 value of a weight of this dtype is.
pub(super) fn storage(dtype: DType, master: Master) -> Storage {
    if dtype == DType::F32 {
        return Storage::Weight;
    }
    match master {
        Master::None => Storage::Weight,
        Master::F32 => Storage::F32,
        Master::Remainder => Storage::Remainder,
        Master::Stochastic => Storage::Stochastic,
    }
}

/// Checks that a weight of this dtype may have its f32 value there.
pub(super) fn check_master(dtype: DType, master: Master) -> Result<()> {
    let of_bf16 = matches!(master, Master::Remainder | Master::Stochastic);
    if of_bf16 && dtype == DType::F16 {
        let problem = text!("has dtype f16, allowed with this master: f32, bf16");
        return Err(Error::unsupported(OP, "weight", problem));
    }
    Ok(())
}

/// Of tensors the order in which they are listed; the state is last.
fn order(owner: Option<(usize, &str)>) -> (bool, usize, bool) {
    match owner {
        Some((i, name)) => (false, i, name == "gradient"),
        None => (true, 0, false),
    }
}

fn check_place(name: &'static str, known: Option<Place>, ours: Place) -> Result<()> {
    match known {
        Some(place) if place != ours => {
            let problem = text!("is {place}, ctx takes {ours}");
            Err(Error::invalid(OP, name, problem))
        }
        _ => Ok(()),
    }
}

pub(super) fn at_least_zero(name: &'static str, value: f32) -> Result<()> {
    if finite(OP, name, value)? >= 0.0 {
        return Ok(());
    }
    let problem = text!("is {value}, at least 0 is needed");
    Err(Error::invalid(OP, name, problem))
}

/// What a group's values must be.
pub(super) fn check_group(group: &Group) -> Result<()> {
    at_least_zero("learning_rate", group.learning_rate)?;
    at_least_zero("weight_decay", group.weight_decay)
}

fn check_rule(rule: &Rule) -> Result<()> {
    let below_one = |name, value: f32| match (0.0..1.0).contains(&value) {
        true => Ok(()),
        false => {
            let problem = text!("is {value}, allowed: 0 to below 1");
            Err(Error::invalid(OP, name, problem))
        }
    };
    match *rule {
        Rule::Adam {
            beta1,
            beta2,
            epsilon,
            ..
        } => {
            below_one("beta1", beta1)?;
            below_one("beta2", beta2)?;
            if epsilon.is_finite() && epsilon > 0.0 {
                return Ok(());
            }
            let problem = text!("is {epsilon}, allowed: finite, above 0");
            Err(Error::invalid(OP, "epsilon", problem))
        }
        Rule::Sgd {
            momentum, nesterov, ..
        } => {
            below_one("momentum", momentum)?;
            if nesterov && momentum == 0.0 {
                let problem = "is set without momentum";
                return Err(Error::invalid(OP, "nesterov", problem));
            }
            Ok(())
        }
    }
}
