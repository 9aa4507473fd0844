//! An optimizer's step on the CPU: chunks of parameters in parallel, each in blocks that stay in
//! the L1 cache. Sums are cut by the table alone.

mod philox;
mod update;

use std::ops::Range;

use crate::cpu::float::{BLOCK, Float, blocks, with_float};
use crate::cpu::{Cpu, Run};
use crate::error::Result;
use crate::problem::optimizer::{CHUNK, Control, Decide, Norm, ScaleGradients, Sum, Table, Tensor};
use crate::tensor::Scratch;

/// Partial sums of a chunk, so that loops vectorise and lose less to rounding.
const LANES: usize = 32;

/// Sums that the partial sums of chunks are added to in turn, as threads of a GPU do.
const SUMS: usize = 1024;

impl<'a> Table<'a> {
    /// The parameter that a chunk is of, and which of its elements.
    fn chunk(&self, chunk: usize) -> (&'a Tensor, Range<usize>) {
        let after = self.tensors.partition_point(|t| t.first_chunk <= chunk);
        let tensor = &self.tensors[after - 1];
        let first = (chunk - tensor.first_chunk) * CHUNK;
        (tensor, first..tensor.elements.min(first + CHUNK))
    }

    /// The sum of what chunks have, which the launch before has written.
    fn square(&self) -> f64 {
        // SAFETY: the state has a sum for each chunk, and nobody writes them now.
        let partials = unsafe { part::<f32>(self.partials, &(0..self.num_chunks)) };
        let mut sums = [0.0f64; SUMS];
        for some in partials.chunks(SUMS) {
            for (sum, partial) in sums.iter_mut().zip(some) {
                *sum += f64::from(*partial);
            }
        }
        let mut half = SUMS / 2;
        while half > 0 {
            for i in 0..half {
                sums[i] += sums[i + half];
            }
            half /= 2;
        }
        sums[0]
    }

    /// What the last step left.
    fn control(&self) -> Control {
        // SAFETY: the optimizer's own memory, written when it was made, and by nobody during a
        // call.
        unsafe { self.control.cast::<Control>().read() }
    }
}

/// Elements `range` of memory that a parameter has.
///
/// # Safety
/// There are that many elements of type T, initialised, and nobody writes them.
#[inline(always)]
unsafe fn part<'a, T>(start: *mut u8, range: &Range<usize>) -> &'a [T] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(start.cast::<T>().add(range.start), range.len()) }
}

/// As [`part`], to be written.
///
/// # Safety
/// As [`part`], and nobody else accesses them.
#[inline(always)]
unsafe fn part_mut<'a, T>(start: *mut u8, range: &Range<usize>) -> &'a mut [T] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(start.cast::<T>().add(range.start), range.len()) }
}

/// The block of a chunk, by its place there, in the parameter.
#[inline(always)]
fn within(elements: &Range<usize>, block: &Range<usize>) -> Range<usize> {
    elements.start + block.start..elements.start + block.end
}

impl Run for Norm<'_> {
    fn run(&self, cpu: &Cpu, _: Scratch) -> Result<()> {
        let table = &self.table;
        let inverse = 1.0 / table.control().scale;
        cpu.for_each_range(table.num_chunks, 2 * CHUNK, |chunks| {
            for chunk in chunks {
                let (tensor, elements) = table.chunk(chunk);
                let sum = with_float!(tensor.gradient_dtype, G => {
                    // SAFETY: the elements exist, of this dtype, and a step has them to itself.
                    let gradient = unsafe { part::<G>(tensor.gradient, &elements) };
                    cpu.vectorize(#[inline(always)] || sum_of_squares(gradient, inverse))
                });
                // SAFETY: the state has a sum for each chunk, and no other thread has this one's.
                unsafe { table.partials.cast::<f32>().add(chunk).write(sum) };
            }
        });
        Ok(())
    }
}

/// The sum of squares of `gradient`, each multiplied by `inverse` before; NaN where one is not
/// finite.
#[inline(always)]
fn sum_of_squares<G: Float>(gradient: &[G], inverse: f32) -> f32 {
    let mut room = [0.0f32; BLOCK];
    let (mut sums, mut check) = ([0.0f32; LANES], [0.0f32; LANES]);
    for block in blocks(gradient.len()) {
        let wide = &mut room[..block.len()];
        G::load(&gradient[block], wide);
        for lanes in wide.chunks(LANES) {
            for ((x, sum), check) in lanes.iter().zip(&mut sums).zip(&mut check) {
                let x = x * inverse;
                *sum = x.mul_add(x, *sum);
                // Zero, unless it is infinite or NaN.
                *check = x.mul_add(0.0, *check);
            }
        }
    }
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            sums[i] += sums[i + half];
            check[i] += check[i + half];
        }
        half /= 2;
    }
    sums[0] + check[0]
}

impl Run for Sum<'_> {
    fn run(&self, _: &Cpu, _: Scratch) -> Result<()> {
        let sum = self.table.square();
        // SAFETY: the state has a sum for each rank, which nobody else accesses during a call.
        unsafe { self.table.sums.cast::<f64>().add(self.rank).write(sum) };
        Ok(())
    }
}

impl Run for Decide<'_> {
    fn run(&self, _: &Cpu, _: Scratch) -> Result<()> {
        let table = &self.table;
        let square = match self.ranks {
            None => table.square(),
            Some(ranks) => {
                // SAFETY: the state has a sum for each rank, which the launches before have written.
                let sums = unsafe { part::<f64>(table.sums, &(0..ranks)) };
                sums.iter().sum()
            }
        };
        let control = self.decide(table.control(), square);
        // SAFETY: the optimizer's own memory, which nobody else accesses during a call.
        unsafe { table.control.cast::<Control>().write(control) };
        Ok(())
    }
}

impl Decide<'_> {
    fn decide(&self, mut c: Control, square: f64) -> Control {
        c.found_inf = u32::from(square.is_nan());
        c.norm = square.sqrt() as f32;
        c.coefficient = 1.0 / c.scale;
        if self.max_norm > 0.0 {
            c.coefficient *= (self.max_norm / (c.norm + 1e-6)).min(1.0);
        }
        self.rescale(&mut c);
        if c.found_inf != 0 {
            c.skipped = c.skipped.wrapping_add(1);
            return c;
        }
        c.step = c.step.wrapping_add(1);
        let [beta1, beta2] = self.betas.map(f64::from);
        c.power1 *= beta1;
        c.power2 *= beta2;
        c.bias1 = (1.0 / (1.0 - c.power1)) as f32;
        c.bias2 = (1.0 / (1.0 - c.power2).sqrt()) as f32;
        c
    }

    /// The scale of the next step.
    fn rescale(&self, c: &mut Control) {
        let scaling = &self.scaling;
        if !scaling.dynamic {
            return;
        }
        if c.found_inf != 0 {
            c.tracker = 0;
            c.hysteresis = c.hysteresis.saturating_sub(1);
            let smaller = c.scale * scaling.backoff;
            // A scale of zero would have no inverse.
            if c.hysteresis == 0 && smaller >= f32::MIN_POSITIVE {
                c.scale = smaller;
            }
            return;
        }
        c.hysteresis = scaling.hysteresis;
        c.tracker = c.tracker.saturating_add(1);
        if c.tracker >= scaling.interval {
            c.tracker = 0;
            let greater = c.scale * scaling.growth;
            if greater.is_finite() {
                c.scale = greater;
            }
        }
    }
}

impl Run for ScaleGradients<'_> {
    fn run(&self, cpu: &Cpu, _: Scratch) -> Result<()> {
        let table = &self.table;
        cpu.for_each_range(table.num_chunks, CHUNK, |chunks| {
            for chunk in chunks {
                let (tensor, elements) = table.chunk(chunk);
                with_float!(tensor.gradient_dtype, G => {
                    // SAFETY: the elements exist, of this dtype, and no other thread has this
                    // chunk.
                    let gradient = unsafe { part_mut::<G>(tensor.gradient, &elements) };
                    cpu.vectorize(#[inline(always)] || scale(gradient, self.factor));
                });
            }
        });
        Ok(())
    }
}

#[inline(always)]
fn scale<G: Float>(gradient: &mut [G], factor: f32) {
    let mut room = [0.0f32; BLOCK];
    for block in blocks(gradient.len()) {
        let wide = &mut room[..block.len()];
        G::load(&gradient[block.clone()], wide);
        wide.iter_mut().for_each(|x| *x *= factor);
        G::store(wide, &mut gradient[block]);
    }
}
