//! Linear layers on the CPU.
//!
//! Few rows are bound by reading the weights: each weight is read once and multiplies every row. Many rows go through
//! `gemm` in tiles; operands that are not f32 are widened a panel at a time into scratch that stays in cache. How work is cut
//! depends on the shapes alone, so the same inputs give the same bits with any number of threads.

mod few_rows;

use std::ops::Range;

use crate::cpu::Cpu;
use crate::cpu::float::{BLOCK, Float, with_float};
use crate::cpu::rows::{part_of, part_of_mut};
use crate::dtype::DType;
use crate::ops::linear::{Problem, WeightsProblem};
use crate::tensor::RawTensor;

/// A tile of `gemm`: rows, columns, and the depth by which operands are widened.
const TILE_ROWS: usize = 512;
const TILE_COLUMNS: usize = 128;
const TILE_DEPTH: usize = 512;

pub(crate) fn forward(cpu: &Cpu, p: &Problem) {
    for_each_row_part(
        cpu,
        &p.x,
        [&p.weights.weight],
        #[inline(always)]
        |row, columns, [sums]| finish(sums, row, columns, &p.weights, p.residual.as_ref(), &p.out),
    );
}

/// Adds bias and residual to a part of a row of products, and stores it.
#[inline(always)]
pub(crate) fn finish(
    sums: &mut [f32],
    row: usize,
    columns: Range<usize>,
    weights: &WeightsProblem,
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

#[inline(always)]
fn add<T: Float>(sums: &mut [f32], addend: &[T]) {
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
/// cover every row and column once: `sums[i]` holds the f32 products of the row with those rows of matrix `i`.
pub(crate) fn for_each_row_part<const N: usize>(
    cpu: &Cpu,
    x: &RawTensor,
    weights: [&RawTensor; N],
    done: impl Fn(usize, Range<usize>, [&mut [f32]; N]) + Sync,
) {
    let rows = x.layout.num_rows();
    let columns = weights[0].layout.dim(0);
    if rows == 0 || columns == 0 {
        return;
    }
    if rows <= few_rows::MAX_ROWS {
        few_rows::run(cpu, x, weights, done);
    } else {
        many_rows(cpu, x, weights, done);
    }
}

fn many_rows<const N: usize>(
    cpu: &Cpu,
    x: &RawTensor,
    weights: [&RawTensor; N],
    done: impl Fn(usize, Range<usize>, [&mut [f32]; N]) + Sync,
) {
    let (columns, depth) = (weights[0].layout.dim(0), weights[0].layout.dim(1));
    let rows = x.layout.num_rows();
    let (row_tiles, column_tiles) = (rows.div_ceil(TILE_ROWS), columns.div_ceil(TILE_COLUMNS));
    let cost = TILE_ROWS.min(rows) * TILE_COLUMNS * N;
    cpu.for_each_range(
        row_tiles * column_tiles,
        cost.saturating_mul(depth),
        |tiles| {
            let mut scratch = Scratch::default();
            for tile in tiles {
                // Neighbouring tiles share their columns, so that the weights are found in cache.
                let (row, column) = (
                    tile % row_tiles * TILE_ROWS,
                    tile / row_tiles * TILE_COLUMNS,
                );
                let part = (
                    row..rows.min(row + TILE_ROWS),
                    column..columns.min(column + TILE_COLUMNS),
                );
                let mut sums: [Vec<f32>; N] =
                    std::array::from_fn(|_| vec![0.0; part.0.len() * part.1.len()]);
                for (sums, weight) in sums.iter_mut().zip(weights) {
                    product(cpu, x, weight, part.clone(), depth, &mut scratch, sums);
                }
                cpu.vectorize(
                    #[inline(always)]
                    || {
                        let width = part.1.len();
                        for (i, row) in part.0.clone().enumerate() {
                            let sums = sums.each_mut().map(|s| &mut s[i * width..(i + 1) * width]);
                            done(row, part.1.clone(), sums);
                        }
                    },
                );
            }
        },
    );
}

/// Widened panels.
#[derive(Default)]
struct Scratch {
    x: Vec<f32>,
    weight: Vec<f32>,
}

/// `sums = x[rows] weight[columns]ᵀ`, row-major.
fn product(
    cpu: &Cpu,
    x: &RawTensor,
    weight: &RawTensor,
    (rows, columns): (Range<usize>, Range<usize>),
    depth: usize,
    scratch: &mut Scratch,
    sums: &mut [f32],
) {
    let direct = (in_place(x), in_place(weight));
    // Only widening needs short panels.
    let step = if direct.0.is_some() && direct.1.is_some() {
        depth.max(1)
    } else {
        TILE_DEPTH
    };
    for start in (0..depth).step_by(step) {
        let part = start..depth.min(start + step);
        let (x, x_stride) = operand(cpu, x, direct.0, rows.clone(), part.clone(), &mut scratch.x);
        let (w, w_stride) = operand(
            cpu,
            weight,
            direct.1,
            columns.clone(),
            part.clone(),
            &mut scratch.weight,
        );
        // SAFETY: `sums` has `rows * columns` elements; the operands are `rows` and `columns` rows of `part` columns each.
        unsafe {
            gemm::gemm(
                rows.len(),
                columns.len(),
                part.len(),
                sums.as_mut_ptr(),
                1,
                columns.len() as isize,
                start > 0,
                x,
                1,
                x_stride as isize,
                w,
                w_stride as isize,
                1,
                1.0,
                1.0,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
    }
}

/// The row stride of a tensor that `gemm` can read where it is: f32, its rows at equal distances.
fn in_place(t: &RawTensor) -> Option<usize> {
    let layout = &t.layout;
    if t.dtype != DType::F32 {
        return None;
    }
    let leading = layout.rank().saturating_sub(1);
    // Leading dimensions merge if each spans exactly the next one; sizes of one do not count.
    let mut merged: Option<(usize, usize)> = None;
    for i in (0..leading).rev().filter(|&i| layout.dim(i) != 1) {
        merged = match merged {
            None => Some((layout.stride(i), layout.dim(i))),
            Some((stride, n)) if layout.stride(i) == stride * n => {
                Some((stride, n * layout.dim(i)))
            }
            Some(_) => return None,
        };
    }
    Some(merged.map_or(layout.dim(leading), |(stride, _)| stride))
}

/// Pointer and row stride of a panel: in place, or widened into `scratch`.
fn operand(
    cpu: &Cpu,
    t: &RawTensor,
    stride: Option<usize>,
    rows: Range<usize>,
    columns: Range<usize>,
    scratch: &mut Vec<f32>,
) -> (*const f32, usize) {
    if let Some(stride) = stride {
        let start = t.ptr.cast::<f32>().cast_const();
        // Offsets of existing elements fit an isize (see Layout).
        return (
            start.wrapping_add(rows.start * stride + columns.start),
            stride,
        );
    }
    let width = columns.len();
    scratch.resize(rows.len() * width, 0.0);
    widen(cpu, t, rows, columns, scratch);
    (scratch.as_ptr(), width)
}

/// Copies a panel as f32, row-major.
fn widen(cpu: &Cpu, t: &RawTensor, rows: Range<usize>, columns: Range<usize>, out: &mut [f32]) {
    if columns.is_empty() {
        return;
    }
    with_float!(t.dtype, T => {
        cpu.vectorize(#[inline(always)] || {
            for (row, out) in rows.clone().zip(out.chunks_exact_mut(columns.len())) {
                // SAFETY: a row of the checked tensor.
                T::load(unsafe { part_of::<T>(t, row, columns.clone()) }, out);
            }
        });
    });
}
