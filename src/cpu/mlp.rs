//! The gated feed-forward block on the CPU: gate and up products meet tile by tile, so that only their activated product is stored.

use crate::cpu::float::with_float;
use crate::cpu::linear::{add_bias, finish, for_each_row_part, normalised};
use crate::cpu::rows::part_of_mut;
use crate::cpu::{Cpu, Run};
use crate::cpu::{float::Float, swiglu};
use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::problem::mlp::Problem;
use crate::problem::rms_norm::OfInput;
use crate::tensor::{RawTensor, Scratch};

impl Run for Problem {
    fn needed(&self) -> usize {
        if self.out.layout.is_empty() {
            return 0;
        }
        let intermediate = self.x.layout.num_rows() * self.intermediate * self.x.dtype.size();
        self.norm.as_ref().map_or(0, |_| OfInput::bytes(&self.x)) + intermediate
    }

    fn run(&self, cpu: &Cpu, scratch: Scratch) -> Result<()> {
        if self.out.layout.is_empty() {
            return Ok(());
        }
        let input = (&self.x, self.norm.as_ref());
        let (x, scratch) = normalised(cpu, "mlp", input, scratch)?;
        let intermediate = RawTensor {
            ptr: scratch.ptr,
            dtype: self.x.dtype,
            layout: Layout::contiguous(&[self.x.layout.num_rows(), self.intermediate])?,
        };
        forward(cpu, &Problem { x, ..*self }, intermediate)
    }
}

fn forward(cpu: &Cpu, p: &Problem, intermediate: RawTensor) -> Result<()> {
    if p.out.layout.is_empty() {
        return Ok(());
    }
    let within = |error: Error| error.within("mlp");
    with_float!(p.x.dtype, T => {
        let weights = [&p.gate, &p.up];
        for_each_row_part(
            cpu,
            &p.x,
            weights,
            Scratch::NONE,
            #[inline(always)]
            |row, columns, [gate, up]| {
                add_bias(gate, p.gate.bias.as_ref(), &columns);
                add_bias(up, p.up.bias.as_ref(), &columns);
                swiglu::activate(p.activation, gate, up);
                // SAFETY: the workspace holds the intermediate's rows; parts are disjoint.
                T::store(gate, unsafe { part_of_mut::<T>(&intermediate, row, columns) });
            },
        )
        .map_err(within)?;
    });
    for_each_row_part(
        cpu,
        &intermediate,
        [&p.down],
        Scratch::NONE,
        #[inline(always)]
        |row, columns, [sums]| finish(sums, row, columns, &p.down, p.residual.as_ref(), &p.out),
    )
    .map_err(within)
}
