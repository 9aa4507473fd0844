//! Weights and moments of a step.

use std::ops::Range;

use half::bf16;

use super::philox::{LANES, philox};
use super::{part, part_mut, within};
use crate::cpu::float::{BLOCK, Float, blocks, with_float};
use crate::cpu::{Cpu, Run};
use crate::error::Result;
use crate::problem::optimizer::{CHUNK, Control, Group, PACK, Rule, Storage, Tensor, Update};
use crate::tensor::Scratch;

/// Elements that one draw of random numbers serves, a word each.
const DRAW: usize = 4;

impl Run for Update<'_> {
    fn run(&self, cpu: &Cpu, _: Scratch) -> Result<()> {
        let table = &self.table;
        let control = table.control();
        let skipped = control.found_inf != 0;
        if skipped && !self.zero_gradients {
            return Ok(());
        }
        cpu.for_each_range(table.num_chunks, 8 * CHUNK, |chunks| {
            for chunk in chunks {
                let (tensor, elements) = table.chunk(chunk);
                with_float!(tensor.gradient_dtype, G => {
                    if !skipped {
                        let group = table.groups.cast::<Group>().wrapping_add(tensor.group);
                        // SAFETY: the group exists, as was checked, in the optimizer's own memory.
                        let group = unsafe { group.read() };
                        let numbers = Numbers::new(&self.rule, group, &control);
                        with_float!(tensor.weight_dtype, W => {
                            cpu.vectorize(#[inline(always)] || {
                                // SAFETY: the elements exist, and no other thread has this chunk.
                                unsafe { self.chunk::<W, G>(tensor, &elements, &numbers, &control) }
                            });
                        });
                    }
                    if self.zero_gradients {
                        // SAFETY: as above; zero bits are the number zero.
                        unsafe {
                            let start = tensor.gradient.cast::<G>().add(elements.start);
                            std::ptr::write_bytes(start, 0, elements.len());
                        }
                    }
                });
            }
        });
        Ok(())
    }
}

/// What the elements of a chunk have in common.
struct Numbers {
    coefficient: f32,
    learning_rate: f32,
    /// Added to the gradient, times the weight; 0 where it is decoupled.
    decay: f32,
    /// What the weight is multiplied by.
    keep: f32,
    /// `learning_rate / (1 - beta1^step)`.
    step_size: f32,
    bias2: f32,
}

impl Numbers {
    fn new(rule: &Rule, group: Group, control: &Control) -> Numbers {
        let (Rule::Adam { decoupled, .. } | Rule::Sgd { decoupled, .. }) = *rule;
        let rate = group.learning_rate;
        let (decay, keep) = match decoupled {
            true => (0.0, 1.0 - rate * group.weight_decay),
            false => (group.weight_decay, 1.0),
        };
        Numbers {
            coefficient: control.coefficient,
            learning_rate: rate,
            decay,
            keep,
            step_size: rate * control.bias1,
            bias2: control.bias2,
        }
    }
}

impl Update<'_> {
    /// # Safety
    /// The elements exist in the parameter, whose weight is of W and whose gradient is of G, and in
    /// what the state has for it; nobody else accesses them.
    #[inline(always)]
    unsafe fn chunk<W: Float, G: Float>(
        &self,
        tensor: &Tensor,
        elements: &Range<usize>,
        numbers: &Numbers,
        control: &Control,
    ) {
        let mut room = [[0.0f32; BLOCK]; 2];
        for block in blocks(elements.len()) {
            let range = within(elements, &block);
            let [g, p] = room.each_mut().map(|room| &mut room[..range.len()]);
            // SAFETY: the caller's promise; the moments are there that the rule has.
            unsafe {
                G::load(part::<G>(tensor.gradient, &range), g);
                load::<W>(tensor, &range, p);
                for (g, p) in g.iter_mut().zip(p.iter_mut()) {
                    *g = p.mul_add(numbers.decay, *g * numbers.coefficient);
                    *p *= numbers.keep;
                }
                match self.rule {
                    Rule::Adam {
                        beta1,
                        beta2,
                        epsilon,
                        ..
                    } => {
                        let [m, v] = tensor.moments.map(|start| part_mut::<f32>(start, &range));
                        adam(
                            (beta1, beta2, epsilon),
                            self.rule.new_shares(),
                            numbers,
                            (p, g),
                            (m, v),
                        );
                    }
                    Rule::Sgd {
                        momentum, nesterov, ..
                    } => {
                        if momentum != 0.0 {
                            let b = part_mut::<f32>(tensor.moments[0], &range);
                            gain_momentum((momentum, nesterov), g, b);
                        }
                        for (p, g) in p.iter_mut().zip(g.iter()) {
                            *p = g.mul_add(-numbers.learning_rate, *p);
                        }
                    }
                }
                self.store::<W>(tensor, &range, control.step, p);
            }
        }
    }

    /// Rounds f32 weights to what is kept of them.
    ///
    /// # Safety
    /// As [`Update::chunk`].
    #[inline(always)]
    unsafe fn store<W: Float>(
        &self,
        tensor: &Tensor,
        range: &Range<usize>,
        step: u64,
        p: &mut [f32],
    ) {
        // SAFETY: the caller's promise; weights of the last two are bf16, as was checked.
        unsafe {
            match tensor.storage {
                Storage::Weight => W::store(p, part_mut(tensor.weight, range)),
                Storage::F32 => {
                    part_mut::<f32>(tensor.master, range).copy_from_slice(p);
                    W::store(p, part_mut(tensor.weight, range));
                }
                Storage::Remainder => {
                    split(
                        p,
                        part_mut(tensor.weight, range),
                        part_mut(tensor.master, range),
                    );
                }
                Storage::Stochastic => {
                    // Parameters and blocks begin at whole draws.
                    let first = (tensor.first_pack * PACK + range.start) / DRAW;
                    let weight = part_mut(tensor.weight, range);
                    round(p, weight, self.seed, step, first as u64);
                }
            }
        }
    }
}

/// Reads f32 weights from where they are kept.
///
/// # Safety
/// As [`Update::chunk`].
#[inline(always)]
unsafe fn load<W: Float>(tensor: &Tensor, range: &Range<usize>, p: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        match tensor.storage {
            Storage::Weight | Storage::Stochastic => W::load(part(tensor.weight, range), p),
            Storage::F32 => p.copy_from_slice(part(tensor.master, range)),
            Storage::Remainder => {
                let (upper, lower) = (part(tensor.weight, range), part(tensor.master, range));
                join(upper, lower, p);
            }
        }
    }
}

/// The f32 of which `upper` is the rounded upper half and `lower` the lower half.
#[inline(always)]
fn join(upper: &[u16], lower: &[u16], p: &mut [f32]) {
    for ((p, upper), lower) in p.iter_mut().zip(upper).zip(lower) {
        // A lower half from a half on has rounded the upper half up.
        let whole = (u32::from(*upper) << 16).wrapping_sub(u32::from(*lower >> 15) << 16);
        *p = f32::from_bits(whole | u32::from(*lower));
    }
}

/// What [`join`] joins: the weight rounded to nearest, and the lower half.
#[inline(always)]
fn split(p: &[f32], upper: &mut [u16], lower: &mut [u16]) {
    for ((p, upper), lower) in p.iter().zip(upper).zip(lower) {
        let bits = p.to_bits();
        let rounded = (bits.wrapping_add(0x8000) >> 16) as u16;
        // NaN, which adding could turn into a zero, is kept without a payload that rounds.
        *upper = if p.is_nan() {
            (bits >> 16) as u16 | 0x40
        } else {
            rounded
        };
        *lower = if p.is_nan() { 0 } else { bits as u16 };
    }
}

/// Rounds to bf16, up with the probability that the lower half says. The random bits are those of
/// the seed, the step, and the element's place among all, of which `first_draw` elements come
/// before in fours.
#[inline(always)]
fn round(p: &[f32], weight: &mut [bf16], seed: u64, step: u64, first_draw: u64) {
    const SPAN: usize = DRAW * LANES;
    let key = [seed as u32, (seed >> 32) as u32];
    let spans = p.chunks(SPAN).zip(weight.chunks_mut(SPAN));
    for (first, (p, weight)) in (first_draw..).step_by(LANES).zip(spans) {
        let mut counter = [0, 0, step as u32, (step >> 32) as u32].map(|word| [word; LANES]);
        for (i, draw) in (0..LANES).zip(first..) {
            counter[0][i] = draw as u32;
            counter[1][i] = (draw >> 32) as u32;
        }
        let words = philox(counter, key);
        let mut random = [0u32; SPAN];
        for (i, random) in random.iter_mut().enumerate() {
            *random = words[i % DRAW][i / DRAW] >> 16;
        }
        for ((p, weight), random) in p.iter().zip(weight).zip(random) {
            let bits = p.to_bits();
            let rounded = (bits.wrapping_add(random) >> 16) as u16;
            let quiet = (bits >> 16) as u16 | 0x40;
            *weight = bf16::from_bits(if p.is_nan() { quiet } else { rounded });
        }
    }
}

#[inline(always)]
fn adam(
    (beta1, beta2, epsilon): (f32, f32, f32),
    [new1, new2]: [f32; 2],
    numbers: &Numbers,
    (p, g): (&mut [f32], &[f32]),
    (m, v): (&mut [f32], &mut [f32]),
) {
    for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
        *m = beta1.mul_add(*m, new1 * g);
        *v = beta2.mul_add(*v, new2 * (g * g));
        let denominator = v.sqrt().mul_add(numbers.bias2, epsilon);
        *p = (-numbers.step_size).mul_add(*m / denominator, *p);
    }
}

/// Adds the gradient to the momentum, and makes it what the weight is changed by.
#[inline(always)]
fn gain_momentum((momentum, nesterov): (f32, bool), g: &mut [f32], b: &mut [f32]) {
    for (g, b) in g.iter_mut().zip(b) {
        *b = momentum.mul_add(*b, *g);
        *g = match nesterov {
            true => momentum.mul_add(*b, *g),
            false => *b,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Joined again a value is itself; its weight is the nearest, ties upwards in magnitude.
    #[test]
    fn halves_make_a_whole() {
        let edges = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
        for upper in 0..=u16::MAX {
            let values = edges.map(|lower| f32::from_bits(u32::from(upper) << 16 | lower));
            let (mut weights, mut lower, mut joined) = ([0; 6], [0; 6], [0.0; 6]);
            split(&values, &mut weights, &mut lower);
            join(&weights, &lower, &mut joined);
            for i in 0..6 {
                let (value, weight) = (values[i], bf16::from_bits(weights[i]));
                if value.is_nan() {
                    assert!(joined[i].is_nan() && weight.is_nan());
                    continue;
                }
                assert_eq!(joined[i].to_bits(), value.to_bits());
                if edges[i] != 0x8000 {
                    assert_eq!(weight.to_bits(), bf16::from_f32(value).to_bits(), "{value}");
                }
            }
        }
    }

    /// Rounding is one of two neighbours, leaves what bf16 holds as it is, and on average loses
    /// nothing.
    #[test]
    fn random_rounding_is_unbiased() {
        const TIMES: usize = 1 << 16;
        for x in [1.0f32 + 1.0 / 512.0, -3.000_01, 1e-30, 0.1] {
            let mut weights = vec![bf16::ZERO; TIMES];
            round(&vec![x; TIMES], &mut weights, 7, 1, 0);
            let below = bf16::from_bits((x.to_bits() >> 16) as u16);
            let above = bf16::from_bits((x.to_bits() >> 16) as u16 + 1);
            assert!(weights.iter().all(|w| *w == below || *w == above));
            let mean = weights.iter().map(|w| w.to_f64()).sum::<f64>() / TIMES as f64;
            let gap = (above.to_f64() - below.to_f64()).abs();
            // Five deviations of a mean of so many coins.
            let allowed = gap * 5.0 * 0.5 / (TIMES as f64).sqrt();
            assert!((mean - f64::from(x)).abs() < allowed, "{x}: {mean}");
        }
        let held = [1.0f32, -0.0, f32::INFINITY, f32::NEG_INFINITY, 2.5];
        let mut weights = [bf16::ONE; 5];
        round(&held, &mut weights, 7, 2, 3);
        assert_eq!(weights.map(|w| w.to_f32()), held);
        round(&[f32::from_bits(0x7fff_ffff)], &mut weights[..1], 7, 2, 3);
        assert!(weights[0].is_nan());
    }
}
