//! The backward pass of gated activations on the CPU: one pass, in blocks that stay in the L1 cache.

use std::ops::Range;

use crate::cpu::float::{BLOCK, Float, with_float};
use crate::cpu::math;
use crate::cpu::rows::{part_of, part_of_mut};
use crate::cpu::swiglu::COST;
use crate::cpu::{Cpu, Run};
use crate::error::Result;
use crate::problem::swiglu::{Activation, Backward};
use crate::tensor::Scratch;

impl Run for Backward {
    fn run(&self, cpu: &Cpu, _: Scratch) -> Result<()> {
        let layout = &self.gate.layout;
        if layout.is_empty() {
            return Ok(());
        }
        // Rows without gaps are treated as one long row, which is cut into blocks.
        let contiguous = self.tensors().iter().all(|t| t.layout.is_contiguous());
        let (rows, dim) = match contiguous {
            true => (1, layout.num_elements()),
            false => (layout.num_rows(), layout.dim(layout.rank() - 1)),
        };
        let blocks = dim.div_ceil(BLOCK);
        with_float!(self.gate.dtype, T => {
            cpu.for_each_range(rows * blocks, 2 * COST * dim.min(BLOCK), |range| {
                cpu.vectorize(#[inline(always)] || {
                    let mut room = [[0.0; BLOCK]; 3];
                    for item in range.clone() {
                        let (row, start) = (item / blocks, item % blocks * BLOCK);
                        let columns = start..dim.min(start + BLOCK);
                        // SAFETY: the block lies inside row `row` of each tensor (a contiguous
                        // tensor's only row starts at zero), and no other thread has it.
                        unsafe { one_block::<T>(self, row, columns, &mut room) };
                    }
                });
            });
        });
        Ok(())
    }
}

/// # Safety
/// The columns lie in row `row` of each of the checked tensors, whose dtype is T, and nobody else has
/// them.
#[inline(always)]
unsafe fn one_block<T: Float>(
    p: &Backward,
    row: usize,
    columns: Range<usize>,
    room: &mut [[f32; BLOCK]; 3],
) {
    let [gate, up, dout] = room.each_mut().map(|block| &mut block[..columns.len()]);
    // SAFETY: the caller's promise. What is written may be the memory of what is read, which was
    // read before.
    unsafe {
        T::load(part_of::<T>(&p.gate, row, columns.clone()), gate);
        T::load(part_of::<T>(&p.up, row, columns.clone()), up);
        T::load(part_of::<T>(&p.dout, row, columns.clone()), dout);
        differentiate(p.activation, gate, up, dout);
        T::store(gate, part_of_mut::<T>(&p.dgate, row, columns.clone()));
        T::store(up, part_of_mut::<T>(&p.dup, row, columns.clone()));
        if let Some(out) = &p.out {
            T::store(dout, part_of_mut::<T>(out, row, columns));
        }
    }
}

/// Makes of gate, up and the gradient of the output the gradients of gate and up, and the output.
#[inline(always)]
fn differentiate(activation: Activation, gate: &mut [f32], up: &mut [f32], dout: &mut [f32]) {
    match activation {
        Activation::Silu => combine(gate, up, dout, |x| {
            let s = math::logistic(x);
            (x * s, s + x * s * (1.0 - s))
        }),
        Activation::Gelu => combine(gate, up, dout, |x| {
            let cdf = math::normal_cdf(x);
            (x * cdf, x.mul_add(math::normal_density(x), cdf))
        }),
        Activation::GeluTanh => combine(gate, up, dout, |x| {
            // (1 + tanh(u)) / 2 is the logistic function of 2u.
            const SCALE: f32 = 1.595_769; // 2 √(2/π)
            let square = x * x;
            let s = math::logistic(SCALE * (0.044_715 * square).mul_add(x, x));
            let slope = SCALE * (3.0 * 0.044_715_f32).mul_add(square, 1.0);
            (x * s, s + x * s * (1.0 - s) * slope)
        }),
        Activation::ReluSquared => combine(gate, up, dout, |x| {
            let positive = math::relu(x);
            (positive * positive, 2.0 * positive)
        }),
    }
}

/// `f` gives the activation and its derivative.
#[inline(always)]
fn combine(gate: &mut [f32], up: &mut [f32], dout: &mut [f32], f: impl Fn(f32) -> (f32, f32)) {
    for ((gate, up), dout) in gate.iter_mut().zip(up).zip(dout) {
        let (value, derivative) = f(*gate);
        let (u, d) = (*up, *dout);
        *gate = d * u * derivative;
        *up = d * value;
        *dout = value * u;
    }
}
