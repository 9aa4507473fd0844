//! Many rows by weights in blocks, in panels: see [`panel`].

use std::ops::Range;

use super::blocks::{Blocks, bits};
use crate::cpu::Cpu;
use crate::cpu::blocks::panel::{self, ALIGNMENT, Kernel, ROWS, Rounded, Shape};
use crate::cpu::blocks::{Bits, code_bits};
use crate::cpu::scratch::Floats;
use crate::error::Result;
use crate::problem::linear::Weights;
use crate::tensor::{RawTensor, Scratch};

/// Rows that are rounded at a time, and for which panels are unpacked once.
const MOST: usize = 172 * ROWS;

/// The most columns that are finished together.
const WIDEST: usize = 64;

/// How the product of `N` weights is cut.
pub(super) struct Panels<const N: usize> {
    kernel: Kernel,
    shape: Shape,
    /// Of the product.
    rows: usize,
    columns: usize,
    /// Columns that are finished together, which are an item.
    width: usize,
}

impl<const N: usize> Panels<N> {
    /// If all weights may be multiplied so.
    pub fn new(x: &RawTensor, weights: [&Weights; N]) -> Option<Panels<N>> {
        let blocks = Blocks::new(weights)?;
        let kernel = Kernel::new(blocks.dot)?;
        let takes = |w: &&Weights| kernel.takes_bytes(code_bits(w.weight.dtype));
        let bits = match bits(weights) {
            Bits::Eight if weights.iter().all(takes) => Bits::Eight,
            _ => Bits::Sixteen,
        };
        let shape = Shape::new(&weights[0].weight, bits);
        if shape.depth == 0 {
            return None;
        }
        let columns = weights[0].out_features();
        // There should be some items for each thread.
        let most = WIDEST / kernel.columns();
        let panels = columns
            .div_ceil(kernel.columns())
            .div_ceil(32)
            .clamp(1, most);
        Some(Panels {
            kernel,
            shape,
            rows: x.layout.num_rows(),
            columns,
            width: panels * kernel.columns(),
        })
    }

    fn most(&self) -> usize {
        self.rows.min(MOST)
    }

    /// Items, and what each costs.
    fn items(&self) -> (usize, usize) {
        let cost = self
            .shape
            .depth
            .saturating_mul(self.most() * self.width * N)
            / 4;
        (self.columns.div_ceil(self.width), cost)
    }

    /// Threads, and floats of each: a panel, and sums of each weight.
    fn threads(&self, cpu: &Cpu) -> (usize, usize) {
        let (items, cost) = self.items();
        let threads = cpu.participants(items, cost);
        let floats = self.kernel.of_panel(self.shape) + N * self.sums();
        (threads, floats + ALIGNMENT / size_of::<f32>())
    }

    /// Floats of the sums of a weight.
    fn sums(&self) -> usize {
        self.most().next_multiple_of(ROWS) * self.width
    }

    /// Bytes of a workspace with which [`Panels::run`] allocates nothing.
    pub fn bytes(&self, cpu: &Cpu) -> usize {
        let (threads, floats) = self.threads(cpu);
        Rounded::bytes(self.shape, self.most()).saturating_add(Floats::bytes(threads, floats))
    }

    /// As [`for_each_row_part`](super::for_each_row_part).
    pub fn run(
        &self,
        cpu: &Cpu,
        x: &RawTensor,
        weights: [&Weights; N],
        scratch: Scratch,
        done: impl Fn(usize, Range<usize>, [&mut [f32]; N]) + Sync,
    ) -> Result<()> {
        let mut rounded = Rounded::room("linear", self.shape, self.most(), scratch)?;
        let behind = scratch.behind(Rounded::bytes(self.shape, self.most()));
        let memory = Floats::in_or_new("linear", behind, self.threads(cpu), 0)?;
        for first in (0..self.rows).step_by(MOST) {
            let rows = (self.rows - first).min(MOST);
            rounded.round(cpu, (self.kernel, self.shape), x, first, rows);
            let rounded = &rounded;
            cpu.for_each_range_in(&memory, self.items(), |memory, items| {
                let start = memory.as_ptr().align_offset(ALIGNMENT);
                let memory = &mut memory[start.min(ALIGNMENT / size_of::<f32>())..];
                let (panel, mut rest) = memory.split_at_mut(self.kernel.of_panel(self.shape));
                let mut room = [(); N].map(|()| {
                    let (here, behind) = std::mem::take(&mut rest).split_at_mut(self.sums());
                    rest = behind;
                    here
                });
                for item in items {
                    let columns = item * self.width..self.columns.min((item + 1) * self.width);
                    for (sums, weights) in room.iter_mut().zip(weights) {
                        let shape = Shape::new(&weights.weight, self.shape.bits);
                        let kind = (self.kernel, shape);
                        for at in (0..columns.len()).step_by(self.kernel.columns()) {
                            let first = columns.start + at;
                            panel::pack(cpu, kind, &weights.weight, first, panel);
                            let blocks = sums.chunks_mut(ROWS * self.width).enumerate();
                            for (i, sums) in blocks.take(rows.div_ceil(ROWS)) {
                                let (x, sums) = (rounded.block(i), &mut sums[at..]);
                                self.kernel.multiply(shape, x, panel, sums, self.width);
                            }
                        }
                    }
                    cpu.vectorize(
                        #[inline(always)]
                        || {
                            for row in 0..rows {
                                let here = row * self.width..row * self.width + columns.len();
                                let sums = room.each_mut().map(
                                    #[inline(always)]
                                    |sums| &mut sums[here.clone()],
                                );
                                done(first + row, columns.clone(), sums);
                            }
                        },
                    );
                }
            });
        }
        Ok(())
    }
}
