//! A plan for gradient checkpointing of a stack of layers, on the host alone.
//!
//! The stack is cut into segments of `every` layers (Chen et al. 2016, arXiv:1604.06174). The forward
//! pass keeps the input of each segment's first layer; the backward pass takes the segments from the
//! last to the first, runs a segment's layers again, this time saving what their backward passes
//! need, and goes back through them. The last segment saves in the forward pass itself: nothing is
//! to be gained by running it twice.
//!
//! With segments of one layer, every layer's input is kept and one layer's activations. With all
//! layers in one segment everything is kept and nothing runs twice. In between the peak is about
//! `(num_layers / every + every) · hidden_bytes + every · saved_bytes`; where the two are alike it is
//! least near the square root of the number of layers.
//!
//! An engine executes the plan with layers of its own or with the library's: it holds an arena of
//! [`Plan::num_hidden_slots`] hidden states and one of [`Plan::num_saved_slots`] layers' saved
//! tensors, and each [`Action`] names the slots that a layer reads and writes.
//!
//! ```
//! use unsloth::training::checkpoint::{Params, Plan, Step};
//!
//! let plan = Plan::new(&Params {
//!     num_layers: 30,
//!     every: 0, // what has the least peak
//!     hidden_bytes: 1 << 20,
//!     saved_bytes: 13 << 20,
//! })?;
//! let recomputed = plan.actions().filter(|action| action.step == Step::Recompute);
//! assert_eq!(recomputed.count(), plan.num_recomputed());
//! assert!(plan.peak_bytes() < 30 * (14 << 20) / 4);
//! # Ok::<(), unsloth::Error>(())
//! ```

use crate::error::{Error, Result, text};

const OP: &str = "checkpoint_plan";

/// The most layers of a plan.
pub const MAX_LAYERS: usize = 1 << 16;

/// A stack of layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Params {
    /// Layers, 1 to [`MAX_LAYERS`], each taking the output of the one before.
    pub num_layers: usize,
    /// Layers in a segment, the last of which may be shorter; above `num_layers` as `num_layers`. 0
    /// for what has the least peak, of equal ones what runs the fewest layers twice.
    pub every: usize,
    /// Bytes of a hidden state: a layer's input, and its output.
    pub hidden_bytes: u64,
    /// Bytes of what a layer's forward saves for its backward, beside its input.
    pub saved_bytes: u64,
}

/// What to do with a layer. The discriminants are those of the C ABI (`UNSLOTH_CHECKPOINT_STEP_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Step {
    /// Run it for the first time.
    Forward = 1,
    /// Its input is no longer needed: it will be computed again.
    Drop = 2,
    /// Run it again, in the backward pass.
    Recompute = 3,
    /// Go back through it. Then neither its input nor what it saved is needed any more.
    Backward = 4,
}

/// One line of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Action {
    /// What to do.
    pub step: Step,
    /// With which layer.
    pub layer: usize,
    /// The slot of the hidden state that is the layer's input.
    pub input: usize,
    /// The slot of the hidden state that takes its output, where the layer runs.
    pub output: Option<usize>,
    /// The slot of what the layer saves, or has saved. `None` where it runs without saving.
    pub saved: Option<usize>,
}

/// Which layers run when, and where their tensors lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    num_layers: usize,
    every: usize,
    peak_bytes: u64,
}

impl Plan {
    /// Makes a plan.
    ///
    /// # Errors
    /// `num_layers` is out of range, or bytes do not fit 64 bits.
    pub fn new(params: &Params) -> Result<Plan> {
        let num_layers = params.num_layers;
        if !(1..=MAX_LAYERS).contains(&num_layers) {
            let problem = text!("is {num_layers}, allowed: 1 to {MAX_LAYERS}");
            return Err(Error::invalid(OP, "num_layers", problem));
        }
        let with = |every: usize| {
            let mut plan = Plan {
                num_layers,
                every,
                peak_bytes: 0,
            };
            plan.peak_bytes = plan.peak(params)?;
            Some(plan)
        };
        let plan = match params.every {
            // Of equal peaks the last, which has the longest segments, wins.
            0 => (1..=num_layers)
                .rev()
                .filter_map(with)
                .min_by_key(|plan| (plan.peak_bytes, plan.num_recomputed())),
            every => with(every.min(num_layers)),
        };
        plan.ok_or_else(|| {
            let problem = text!(
                "is {}: with {num_layers} layers and saved_bytes {} the sum passes 64 bits",
                params.hidden_bytes,
                params.saved_bytes
            );
            Error::invalid(OP, "hidden_bytes", problem)
        })
    }

    /// Layers in a segment.
    pub fn every(&self) -> usize {
        self.every
    }

    /// Layers that run twice.
    pub fn num_recomputed(&self) -> usize {
        self.start(self.num_segments() - 1)
    }

    /// Hidden states that the actions name. The stack's input is in slot 0.
    pub fn num_hidden_slots(&self) -> usize {
        let last = self.num_layers - self.num_recomputed();
        self.num_segments() + last.max(self.every - 1)
    }

    /// The slot of the stack's output, after the last [`Step::Forward`].
    pub fn output_slot(&self) -> usize {
        self.inner(self.num_layers - self.num_recomputed())
    }

    /// Layers whose saved tensors are held at once.
    pub fn num_saved_slots(&self) -> usize {
        self.every
    }

    /// The most bytes of hidden states and saved tensors that are held at once. What the arenas of
    /// all slots take may be a little more.
    pub fn peak_bytes(&self) -> u64 {
        self.peak_bytes
    }

    /// How many actions there are.
    pub fn num_actions(&self) -> usize {
        let dropped = (self.num_segments() - 1) * (self.every - 1);
        2 * self.num_layers + self.num_recomputed() + dropped
    }

    /// What to do, from the first to the last.
    pub fn actions(&self) -> impl Iterator<Item = Action> + use<> {
        let plan = *self;
        let last = plan.num_segments() - 1;
        let forward = (0..plan.num_layers).flat_map(move |layer| {
            let run = plan.run(Step::Forward, layer);
            let dropped = layer / plan.every < last && !layer.is_multiple_of(plan.every);
            let drop = dropped.then_some(Action {
                step: Step::Drop,
                output: None,
                ..run
            });
            [Some(run), drop].into_iter().flatten()
        });
        let backward = (0..=last).rev().flat_map(move |segment| {
            let layers = plan.start(segment)..plan.start(segment + 1);
            let again = match segment == last {
                true => 0..0,
                false => layers.clone(),
            };
            let back = layers.rev().map(move |layer| Action {
                step: Step::Backward,
                output: None,
                ..plan.run(Step::Recompute, layer)
            });
            again
                .map(move |layer| plan.run(Step::Recompute, layer))
                .chain(back)
        });
        forward.chain(backward)
    }

    fn num_segments(&self) -> usize {
        self.num_layers.div_ceil(self.every)
    }

    /// The first layer of a segment; of the one past the last, the number of layers.
    fn start(&self, segment: usize) -> usize {
        (segment * self.every).min(self.num_layers)
    }

    /// The slot of the hidden state before a segment's layer `i`, or after its last, within the
    /// segment: its own input lies in the slot of its number, the others behind those of all.
    fn inner(&self, i: usize) -> usize {
        self.num_segments() + i - 1
    }

    /// A layer's run.
    fn run(&self, step: Step, layer: usize) -> Action {
        let (segment, i) = (layer / self.every, layer % self.every);
        let saves = step == Step::Recompute || segment + 1 == self.num_segments();
        // Where nothing is saved two slots take turns.
        let slot = |i: usize| match (i, saves) {
            (0, _) => segment,
            (i, true) => self.inner(i),
            (i, false) => self.inner(2 - i % 2),
        };
        let ends = i + 1 == self.every && segment + 1 < self.num_segments();
        Action {
            step,
            layer,
            input: slot(i),
            output: Some(match ends {
                // The input of the next segment; when this one runs again, that has been gone through.
                true => segment + 1,
                false => slot(i + 1),
            }),
            saved: saves.then_some(i),
        }
    }

    /// The most bytes held at once: at the end of the forward pass, or before going back through the
    /// last segment that runs twice. `None` if they do not fit.
    fn peak(&self, params: &Params) -> Option<u64> {
        let held = |hidden: usize, saved: usize| {
            let hidden = params.hidden_bytes.checked_mul(hidden as u64)?;
            hidden.checked_add(params.saved_bytes.checked_mul(saved as u64)?)
        };
        let segments = self.num_segments();
        let last = self.num_layers - self.num_recomputed();
        let forward = held(segments + last, last)?;
        Some(match segments {
            1 => forward,
            // The output of a layer that is run again is there while it runs.
            _ => forward.max(held(segments - 1 + self.every, self.every)?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, BTreeSet};

    /// What executing a plan shows: every layer reads its own input, nothing that is needed is
    /// overwritten, and the bytes held at once are those that the plan says.
    fn execute(params: &Params) -> Plan {
        let plan = Plan::new(params).unwrap();
        // What lies in each slot: the input of which layer; what which layer saved.
        let mut hidden = BTreeMap::from([(0, 0)]);
        let mut saved = BTreeMap::new();
        let mut forward = BTreeSet::new();
        let mut backward = params.num_layers;
        let (mut peak, mut recomputed, mut actions) = (0, 0, 0);
        for action in plan.actions() {
            let Action { layer, input, .. } = action;
            actions += 1;
            assert_eq!(hidden.get(&input), Some(&layer), "{action:?} of {params:?}");
            match action.step {
                Step::Forward => assert!(forward.insert(layer) && backward == params.num_layers),
                Step::Recompute => {
                    assert!(forward.contains(&layer) && layer < backward);
                    recomputed += 1;
                }
                Step::Drop => assert_eq!(hidden.remove(&input), Some(layer)),
                Step::Backward => {
                    assert_eq!(layer + 1, backward, "in order");
                    backward = layer;
                    assert_eq!(saved.remove(&action.saved.unwrap()), Some(layer));
                    hidden.remove(&input);
                    // The output's gradient is there in its place.
                    hidden.retain(|_, of| *of <= layer);
                }
            }
            assert_eq!(
                action.output.is_some(),
                matches!(action.step, Step::Forward | Step::Recompute)
            );
            if let Some(output) = action.output {
                assert!(output < plan.num_hidden_slots());
                let before = hidden.insert(output, layer + 1);
                assert!(
                    before.is_none_or(|of| of == layer + 1),
                    "{action:?} takes the place of the input of {before:?}, {params:?}"
                );
                if let Some(slot) = action.saved {
                    assert!(slot < plan.num_saved_slots());
                    assert_eq!(saved.insert(slot, layer), None);
                }
                if layer + 1 == params.num_layers {
                    assert_eq!(output, plan.output_slot());
                }
            }
            let bytes =
                hidden.len() as u64 * params.hidden_bytes + saved.len() as u64 * params.saved_bytes;
            peak = bytes.max(peak);
        }
        assert_eq!(backward, 0);
        assert!(hidden.is_empty() && saved.is_empty());
        assert_eq!(actions, plan.num_actions());
        assert_eq!(recomputed, plan.num_recomputed());
        assert_eq!(peak, plan.peak_bytes(), "{params:?}");
        plan
    }

    #[test]
    fn plans_can_be_executed() {
        for num_layers in 1..=20 {
            for every in 0..=num_layers + 1 {
                for (hidden_bytes, saved_bytes) in [(10, 135), (1, 1), (7, 0), (0, 3), (0, 0)] {
                    let plan = execute(&Params {
                        num_layers,
                        every,
                        hidden_bytes,
                        saved_bytes,
                    });
                    assert!(every == 0 || plan.every() == every.min(num_layers));
                }
            }
        }
    }

    #[test]
    fn none_has_a_lower_peak_than_the_chosen_one() {
        for (num_layers, hidden_bytes, saved_bytes) in [
            (30, 1, 13),
            (16, 1, 13),
            (64, 10, 1),
            (100, 1, 1),
            (1, 5, 5),
        ] {
            let params = |every| Params {
                num_layers,
                every,
                hidden_bytes,
                saved_bytes,
            };
            let best = execute(&params(0));
            for every in 1..=num_layers {
                let plan = execute(&params(every));
                let cost = |plan: &Plan| (plan.peak_bytes(), plan.num_recomputed());
                assert!(cost(&best) <= cost(&plan), "{every} of {num_layers}");
            }
        }
    }

    #[test]
    fn numbers_that_do_not_fit_are_refused() {
        let cases = [
            (0, 1, 1, "num_layers is 0, allowed: 1 to 65536"),
            (65537, 1, 1, "num_layers is 65537, allowed: 1 to 65536"),
            (
                4,
                u64::MAX / 3,
                9,
                "hidden_bytes is 6148914691236517205: with 4 layers and saved_bytes 9 the sum \
                 passes 64 bits",
            ),
        ];
        for (num_layers, hidden_bytes, saved_bytes, expected) in cases {
            for every in [0, 4] {
                let error = Plan::new(&Params {
                    num_layers,
                    every,
                    hidden_bytes,
                    saved_bytes,
                })
                .unwrap_err();
                assert_eq!(error.to_string(), format!("checkpoint_plan: {expected}"));
            }
        }
    }
}
