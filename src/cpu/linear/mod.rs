//! Linear layers on the CPU: the product, then bias, residual and rounding while its part of a row is in cache.

mod backward;
mod blocks;
mod few_rows;
mod integers;
mod many_rows;
mod panels;
mod parts;

use std::ops::Range;

use crate::cpu::blocks::Activations;
use crate::cpu::float::{BLOCK, Float, with_float};
use crate::cpu::rows::{part_of, part_of_mut};
use crate::cpu::{Cpu, Run};
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::linear::{Problem, Weights};
use crate::problem::rms_norm::OfInput;
use crate::tensor::{RawTensor, Scratch};
use blocks::Blocks;
use many_rows::{Operand, Tiles};
use panels::Panels;

impl Run for Problem {
    /// The input once it is normalised.
    fn needed(&self) -> usize {
        self.norm.as_ref().map_or(0, |_| OfInput::bytes(&self.x))
    }

    fn without_allocating(&self, cpu: &Cpu) -> usize {
        self.needed() + self.product_without_allocating(cpu)
    }

    fn probe(&self, cpu: &Cpu) -> Result<()> {
        match Way::new(&self.x, [&self.weights]) {
            Some(Way::Tiles) => self.tiles(cpu).probe("linear"),
            _ => Ok(()),
        }
    }

    fn run(&self, cpu: &Cpu, scratch: Scratch) -> Result<()> {
        let (x, scratch) = normalised(cpu, "linear", (&self.x, self.norm.as_ref()), scratch)?;
        forward(cpu, &Problem { x, ..*self }, scratch)
    }
}

/// An input as it is multiplied, normalised at the beginning of the scratch memory if it passes a norm, and
/// what is left of that.
pub(crate) fn normalised(
    cpu: &Cpu,
    op: &'static str,
    (x, norm): (&RawTensor, Option<&OfInput>),
    scratch: Scratch,
) -> Result<(RawTensor, Scratch)> {
    let Some(norm) = norm else {
        return Ok((*x, scratch));
    };
    let norm = norm.alone(*x, scratch.ptr)?;
    norm.run(cpu, Scratch::NONE).map_err(|e| e.within(op))?;
    Ok((norm.out, scratch.behind(OfInput::bytes(x))))
}

impl Problem {
    fn product_without_allocating(&self, cpu: &Cpu) -> usize {
        match Way::new(&self.x, [&self.weights]) {
            None => 0,
            Some(Way::Integers) => integers::bytes(&self.x),
            Some(Way::Panels(panels)) => panels.bytes(cpu),
            Some(Way::Blocks(blocks)) => Activations::bytes(&self.x, blocks.shape),
            Some(Way::Few) => few_rows::bytes(&self.x),
            Some(Way::Tiles) => self.tiles(cpu).bytes(),
        }
    }

    fn tiles(&self, cpu: &Cpu) -> Tiles<'_, 1> {
        let (x, weight) = (&self.x, &self.weights.weight);
        Tiles::new(cpu, Operand::by_rows(x), [Operand::by_rows(weight)])
    }
}

/// How a product is computed.
enum Way<const N: usize> {
    Integers,
    Panels(Panels<N>),
    Blocks(Blocks<N>),
    Few,
    Tiles,
}

impl<const N: usize> Way<N> {
    /// `None` where the product has no elements.
    fn new(x: &RawTensor, weights: [&Weights; N]) -> Option<Way<N>> {
        let rows = x.layout.num_rows();
        if rows == 0 || weights[0].out_features() == 0 {
            return None;
        }
        if integers::serve(weights) {
            return Some(Way::Integers);
        }
        if rows > blocks::MAX_ROWS
            && let Some(panels) = Panels::new(x, weights)
        {
            return Some(Way::Panels(panels));
        }
        Some(match rows {
            0..=parts::MAX_ROWS => Blocks::new(weights).map_or(Way::Few, Way::Blocks),
            _ => Way::Tiles,
        })
    }
}

fn forward(cpu: &Cpu, p: &Problem, scratch: Scratch) -> Result<()> {
    for_each_row_part(
        cpu,
        &p.x,
        [&p.weights],
        scratch,
        #[inline(always)]
        |row, columns, [sums]| finish(sums, row, columns, &p.weights, p.residual.as_ref(), &p.out),
    )
}

/// Adds bias and residual to a part of a row of products, and stores it.
#[inline(always)]
pub(crate) fn finish(
    sums: &mut [f32],
    row: usize,
    columns: Range<usize>,
    weights: &Weights,
    residual: Option<&RawTensor>,
    out: &RawTensor,
) {
    add_bias(sums, weights.bias.as_ref(), &columns);
    with_float!(out.dtype, T => {
        // SAFETY: `row` and `columns` lie inside the checked tensors, and no other thread has them. The residual is read before the
        // output, which may be the same memory, is borrowed.
        unsafe {
            if let Some(residual) = residual {
                add::<T>(sums, part_of::<T>(residual, row, columns.clone()));
            }
            T::store(sums, part_of_mut::<T>(out, row, columns));
        }
    });
}

/// Adds the part of a bias that belongs to `columns`.
#[inline(always)]
pub(crate) fn add_bias(sums: &mut [f32], bias: Option<&RawTensor>, columns: &Range<usize>) {
    if let Some(bias) = bias {
        with_float!(bias.dtype, B => {
            // SAFETY: checked to be contiguous, one element for each output column.
            add::<B>(sums, unsafe { part_of::<B>(bias, 0, columns.clone()) });
        });
    }
}

/// `done` of sums that are scaled where their weights' codes have scales.
#[inline(always)]
fn scaled<const N: usize>(
    weights: [&Weights; N],
    done: impl Fn(usize, Range<usize>, [&mut [f32]; N]) + Sync,
) -> impl Fn(usize, Range<usize>, [&mut [f32]; N]) + Sync {
    std::convert::identity(
        #[inline(always)]
        move |row: usize, columns: Range<usize>, mut sums: [&mut [f32]; N]| {
            for (sums, weights) in sums.iter_mut().zip(weights) {
                scale(sums, weights, &columns);
            }
            done(row, columns, sums);
        },
    )
}

/// Multiplies sums of codes of 8-bit floats by the scales of their columns.
#[inline(always)]
fn scale(sums: &mut [f32], weights: &Weights, columns: &Range<usize>) {
    if weights.weight.dtype != DType::F8E4M3 || weights.scales.is_none() {
        return;
    }
    for (sum, column) in sums.iter_mut().zip(columns.clone()) {
        *sum *= integers::scale_of(weights, column);
    }
}

#[inline(always)]
fn add<T: Float>(sums: &mut [f32], addend: &[T]) {
    if let Some(addend) = T::as_f32(addend) {
        for (s, a) in sums.iter_mut().zip(addend) {
            *s += *a;
        }
        return;
    }
    let mut block = [0.0f32; BLOCK];
    for (sums, addend) in sums.chunks_mut(BLOCK).zip(addend.chunks(BLOCK)) {
        let block = &mut block[..addend.len()];
        T::load(addend, block);
        for (s, a) in sums.iter_mut().zip(block.iter()) {
            *s += *a;
        }
    }
}

/// Multiplies `x` by the transposes of `N` matrices of equal shape, and calls `done(row, columns, sums)` for parts of rows that
/// cover every row and column once: `sums[i]` holds the f32 products of the row with those rows of matrix `i`. `done` is called
/// inside the vectorised dispatch. A `scratch` with room for what is widened or summed takes it, and
/// nothing is allocated.
///
/// # Errors
/// There is no memory for what is widened or summed; nothing has been computed. Where weights are not multiplied as integers, more than
/// [`parts::MAX_ROWS`] rows are multiplied by `gemm`, which ends the process where it cannot
/// allocate the panels that it packs: up to 2 MiB for each tile, and about the size of the L2 cache
/// at a thread's first product. Whether there is memory for the tiles is seen before the first of
/// them, and said as an error; another thread that takes it meanwhile still lets the process end.
pub(crate) fn for_each_row_part<const N: usize>(
    cpu: &Cpu,
    x: &RawTensor,
    weights: [&Weights; N],
    scratch: Scratch,
    done: impl Fn(usize, Range<usize>, [&mut [f32]; N]) + Sync,
) -> Result<()> {
    let Some(way) = Way::new(x, weights) else {
        return Ok(());
    };
    let matrices = weights.map(|w| &w.weight);
    match way {
        Way::Integers => integers::run(cpu, x, weights, scratch, done),
        Way::Panels(panels) => panels.run(cpu, x, weights, scratch, scaled(weights, done)),
        Way::Blocks(of) => blocks::run(cpu, x, weights, of, scratch, scaled(weights, done)),
        Way::Few => few_rows::run(cpu, x, matrices, scratch, scaled(weights, done)),
        Way::Tiles => {
            let tiles = Tiles::new(cpu, Operand::by_rows(x), matrices.map(Operand::by_rows));
            tiles.run(
                cpu,
                &tiles.memory("linear", scratch)?,
                scaled(weights, done),
            );
            Ok(())
        }
    }
}
