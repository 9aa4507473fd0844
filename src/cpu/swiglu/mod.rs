//! Gated activations on the CPU: one pass, in blocks that stay in the L1 cache.

mod backward;

use crate::cpu::float::{BLOCK, Float, with_float};
use crate::cpu::math;
use crate::cpu::rows::{part_of, part_of_mut};
use crate::cpu::{Cpu, Run};
use crate::error::Result;
use crate::problem::swiglu::{Activation, Problem};
use crate::tensor::Scratch;

/// Elementary operations per element: an exponential and a division.
pub(crate) const COST: usize = 16;

impl Run for Problem {
    fn run(&self, cpu: &Cpu, _: Scratch) -> Result<()> {
        forward(cpu, self);
        Ok(())
    }
}

fn forward(cpu: &Cpu, p: &Problem) {
    let layout = &p.gate.layout;
    if layout.is_empty() {
        return;
    }
    let contiguous = [&p.gate, &p.up, &p.out]
        .iter()
        .all(|t| t.layout.is_contiguous());
    // Rows without gaps are treated as one long row, which is cut into blocks.
    let (rows, dim) = match contiguous {
        true => (1, layout.num_elements()),
        false => (layout.num_rows(), layout.dim(layout.rank() - 1)),
    };
    let blocks = dim.div_ceil(BLOCK);
    with_float!(p.gate.dtype, T => {
        cpu.for_each_range(rows * blocks, COST * dim.min(BLOCK), |range| {
            cpu.vectorize(#[inline(always)] || {
                let mut gate = [0.0f32; BLOCK];
                let mut up = [0.0f32; BLOCK];
                for item in range.clone() {
                    let (row, start) = (item / blocks, item % blocks * BLOCK);
                    let part = start..dim.min(start + BLOCK);
                    let (gate, up) = (&mut gate[..part.len()], &mut up[..part.len()]);
                    // SAFETY: the block lies inside row `row` of each tensor (a contiguous tensor's only row starts at zero), and
                    // no other thread has it. The gate is read before the output, which may be the same memory, is borrowed.
                    unsafe {
                        T::load(part_of::<T>(&p.gate, row, part.clone()), gate);
                        T::load(part_of::<T>(&p.up, row, part.clone()), up);
                        activate(p.activation, gate, up);
                        T::store(gate, part_of_mut::<T>(&p.out, row, part));
                    }
                }
            });
        });
    });
}

/// `gate = activation(gate) * up`.
#[inline(always)]
pub(crate) fn activate(activation: Activation, gate: &mut [f32], up: &[f32]) {
    match activation {
        Activation::Silu => combine(gate, up, |x| x * math::logistic(x)),
        Activation::Gelu => combine(gate, up, |x| x * math::normal_cdf(x)),
        Activation::GeluTanh => combine(gate, up, |x| {
            // (1 + tanh(u)) / 2 is the logistic function of 2u.
            const SCALE: f32 = 1.595_769; // 2 √(2/π)
            let u = SCALE * (0.044_715 * x * x).mul_add(x, x);
            x * math::logistic(u)
        }),
        Activation::ReluSquared => combine(gate, up, |x| math::relu(x) * math::relu(x)),
    }
}

#[inline(always)]
fn combine(gate: &mut [f32], up: &[f32], f: impl Fn(f32) -> f32) {
    for (g, u) in gate.iter_mut().zip(up) {
        *g = f(*g) * u;
    }
}
