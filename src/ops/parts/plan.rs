//! The plan of an operation that is made of others, and its launch.

use arrayvec::ArrayVec;

use super::any::AnyPlan;
use super::{Names, Part, Parts, named};
use crate::alloc::push;
use crate::backend::{Implementation, Stream};
use crate::context::{Collective, Context, Planned};
use crate::error::{Error, Result};
use crate::problem::Plan;
use crate::tensor::Scratch;

/// The plan of what ranks do together.
type CollectivePart<'t, 'a> = Part<<Collective<'t> as Planned>::Plan<'a>>;

/// One plan for each part.
pub(crate) struct PartsPlan<'t, 'a, const N: usize> {
    op: &'static str,
    first: Option<CollectivePart<'t, 'a>>,
    list: ArrayVec<Part<AnyPlan<'t, 'a>>, N>,
    more: Vec<Part<AnyPlan<'t, 'a>>>,
    last: Option<CollectivePart<'t, 'a>>,
    /// Bytes of what passes between parts, of what they share at least, and of what they have use
    /// for.
    between: usize,
    shared: usize,
    useful: usize,
    exact: bool,
    idle: bool,
}

impl<'t, const N: usize> Planned for Parts<'t, N> {
    type Plan<'a> = PartsPlan<'t, 'a, N>;

    fn plan(mut self, ctx: &Context) -> Result<PartsPlan<'t, '_, N>> {
        let op = self.op;
        // These use no workspace.
        let collective = |part: Option<Part<Collective<'t>>>| {
            let planned = part.map(|Part { is, names }| {
                let is = named(op, is.plan(ctx), names)?;
                Ok::<_, Error>(Part { is, names })
            });
            planned.transpose()
        };
        let (first, last) = (collective(self.first)?, collective(self.last)?);
        let (mut list, mut more) = (ArrayVec::new(), Vec::new());
        let (mut shared, mut useful) = (0, 0);
        let rest = self.more.take().unwrap_or_default();
        for Part { is, names } in self.list.drain(..).chain(rest) {
            let plan = named(op, is.plan(ctx), names)?;
            let of_part = match self.any_batch {
                true => plan.as_plan().useful_for_any(),
                false => plan.as_plan().useful(),
            };
            useful = named(op, of_part, names)?.max(useful);
            if self.exact {
                useful = plan.as_plan().without_allocating().max(useful);
            }
            shared = plan.as_plan().needed().max(shared);
            if let Err(full) = list.try_push(Part { is: plan, names }) {
                push(op, &mut more, full.element())?;
            }
        }
        Ok(PartsPlan {
            op,
            first,
            list,
            more,
            last,
            between: self.most_taken,
            shared: if self.exact { useful } else { shared },
            useful,
            exact: self.exact,
            idle: self.idle,
        })
    }
}

impl<const N: usize> Plan for PartsPlan<'_, '_, N> {
    /// The most particular one of the parts'.
    fn implementation(&self) -> Implementation {
        let all = self.each().map(|(plan, _)| plan.implementation());
        all.max_by_key(|i| *i as u32).unwrap_or(Implementation::Cpu)
    }

    fn needed(&self) -> usize {
        match self.idle {
            true => 0,
            false => self.between.saturating_add(self.shared),
        }
    }

    fn useful(&self) -> Result<usize> {
        Ok(match self.idle {
            true => 0,
            false => self.between.saturating_add(self.useful),
        })
    }

    /// The most that a part uses of what is left for all.
    fn used(&self, given: usize) -> Result<usize> {
        if self.idle {
            return Ok(0);
        }
        let left = given.saturating_sub(self.between);
        let mut shared = self.shared;
        for (plan, names) in self.each() {
            let used = named(self.op, self.size_of(plan, left), names)?;
            shared = shared.max(used);
        }
        Ok(self.between.saturating_add(shared))
    }

    fn launch(&self, scratch: Scratch, stream: Stream) -> Result<()> {
        if self.idle {
            return Ok(());
        }
        let shared = Scratch {
            ptr: scratch.ptr.wrapping_add(self.between),
            size: scratch.size.saturating_sub(self.between),
        };
        for (plan, names) in self.each().filter(|_| self.exact) {
            named(self.op, plan.probe(), names)?;
        }
        for (i, (plan, names)) in self.each().enumerate() {
            let launched = self.launch_one(plan, shared, stream);
            if launched.is_err() {
                // The caller's stream goes on, behind all that uses the caller's tensors.
                self.each()
                    .take(i)
                    .for_each(|(plan, _)| plan.settle(stream));
            }
            named(self.op, launched, names)?;
        }
        Ok(())
    }
}

impl<const N: usize> PartsPlan<'_, '_, N> {
    /// All parts, in the order in which they run.
    fn each(&self) -> impl Iterator<Item = (&dyn Plan, Names)> {
        let list = self.list.iter().chain(&self.more);
        let list = list.map(|part| (part.is.as_plan(), part.names));
        let [first, last] = [&self.first, &self.last].map(|part| part.iter().map(of_collective));
        first.chain(list).chain(last)
    }

    /// As much of `given` bytes as a call of its own would use for a part, or as keeps it from
    /// allocating.
    fn size_of(&self, plan: &dyn Plan, given: usize) -> Result<usize> {
        let needed = plan.needed();
        let mut used = needed;
        if given > needed {
            used = plan.used(given)?.clamp(needed, given);
        }
        Ok(match self.exact {
            true => plan.without_allocating().min(given).max(used),
            false => used,
        })
    }

    fn launch_one(&self, plan: &dyn Plan, shared: Scratch, stream: Stream) -> Result<()> {
        let scratch = match self.size_of(plan, shared.size)? {
            0 => Scratch::NONE,
            size => Scratch { size, ..shared },
        };
        plan.launch(scratch, stream)
    }
}

/// A collective as any part.
fn of_collective<'p>(part: &'p CollectivePart<'_, '_>) -> (&'p dyn Plan, Names) {
    (&part.is, part.names)
}
