//! Linear layers on the CPU.
//!
//! Few rows are bound by reading the weights: each weight is read once and multiplies every row (`dot`). Many rows go through
//! `gemm` in tiles; operands that are not f32 are widened a panel at a time into scratch that stays in cache. How work is cut
//! depends on the shapes alone, so the same inputs give the same bits with any number of threads.

use std::ops::Range;

use crate::cpu::Cpu;
use crate::cpu::float::{BLOCK, Float, with_float};
use crate::cpu::rows::{part_of, part_of_mut, row_of};
use crate::dtype::DType;
use crate::ops::linear::{Problem, WeightsProblem};
use crate::tensor::RawTensor;

/// Rows up to which dot products are used.
const FEW_ROWS: usize = 8;

/// Output columns that a dot-product task finishes at a time.
const DOT_COLUMNS: usize = 16;

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
    if rows <= FEW_ROWS {
        few_rows(cpu, x, weights, done);
    } else {
        many_rows(cpu, x, weights, done);
    }
}

fn few_rows<const N: usize>(
    cpu: &Cpu,
    x: &RawTensor,
    weights: [&RawTensor; N],
    done: impl Fn(usize, Range<usize>, [&mut [f32]; N]) + Sync,
) {
    let (columns, depth) = (weights[0].layout.dim(0), weights[0].layout.dim(1));
    let rows = x.layout.num_rows();
    let mut wide = vec![0.0f32; rows * depth];
    widen(cpu, x, 0..rows, 0..depth, &mut wide);
    let wide: Vec<&[f32]> = (0..rows)
        .map(|r| &wide[r * depth..(r + 1) * depth])
        .collect();
    let cost = depth.saturating_mul(rows * N);
    cpu.for_each_range(columns, cost, |range| {
        cpu.vectorize(
            #[inline(always)]
            || {
                let mut sums = [[[0.0f32; DOT_COLUMNS]; FEW_ROWS]; N];
                for start in range.clone().step_by(DOT_COLUMNS) {
                    let part = start..range.end.min(start + DOT_COLUMNS);
                    for (sums, weight) in sums.iter_mut().zip(weights) {
                        for column in part.clone() {
                            with_float!(weight.dtype, W => {
                                // SAFETY: a row of the checked matrix.
                                let w = unsafe { row_of::<W>(weight, column, depth) };
                                for (group, x) in wide.chunks(4).enumerate() {
                                    let products = match *x {
                                        [a] => { let [a] = dot([a], w); [a, 0.0, 0.0, 0.0] }
                                        [a, b] => { let [a, b] = dot([a, b], w); [a, b, 0.0, 0.0] }
                                        [a, b, c] => { let [a, b, c] = dot([a, b, c], w); [a, b, c, 0.0] }
                                        [a, b, c, d] => dot([a, b, c, d], w),
                                        _ => [0.0; 4],
                                    };
                                    for (i, product) in products.into_iter().take(x.len()).enumerate() {
                                        sums[4 * group + i][column - start] = product;
                                    }
                                }
                            });
                        }
                    }
                    for row in 0..rows {
                        done(row, part.clone(), sums.each_mut().map(|s| &mut s[row][..part.len()]));
                    }
                }
            },
        );
    });
}

/// Dot products of `M` rows with one row of weights, which is read once.
#[inline(always)]
fn dot<W: Float, const M: usize>(x: [&[f32]; M], w: &[W]) -> [f32; M] {
    /// Partial sums per row: enough independent chains to hide the latency of FMA.
    const LANES: usize = 32;
    let mut partial = [[0.0f32; LANES]; M];
    let mut block = [0.0f32; BLOCK];
    let mut tail = [0.0f32; M];
    for (i, w) in w.chunks(BLOCK).enumerate() {
        let block = &mut block[..w.len()];
        W::load(w, block);
        let x = x.map(|x| &x[i * BLOCK..i * BLOCK + w.len()]);
        let lanes = block.len() / LANES;
        for j in 0..lanes {
            for m in 0..M {
                let (x, w) = (
                    &x[m][j * LANES..(j + 1) * LANES],
                    &block[j * LANES..(j + 1) * LANES],
                );
                for l in 0..LANES {
                    partial[m][l] = x[l].mul_add(w[l], partial[m][l]);
                }
            }
        }
        for m in 0..M {
            for l in lanes * LANES..block.len() {
                tail[m] = x[m][l].mul_add(block[l], tail[m]);
            }
        }
    }
    let mut out = tail;
    for (out, partial) in out.iter_mut().zip(&partial) {
        *out += partial.iter().sum::<f32>();
    }
    out
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
