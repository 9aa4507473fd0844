//! `x Wᵀ` for many rows: tiles of the output through `gemm`. Operands that are not f32 are widened a panel at a time into scratch that
//! stays in cache. How work is cut depends on the shapes alone, so the same inputs give the same bits with any number of threads.

use std::ops::Range;

use crate::cpu::Cpu;
use crate::cpu::float::{Float, with_float};
use crate::cpu::rows::part_of;
use crate::cpu::scratch::probe;
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::RawTensor;

/// Rows of a tile.
const ROWS: usize = 512;

/// The depth by which operands are widened.
const DEPTH: usize = 512;

/// Rows and columns by which `gemm` may fill up the panels that it packs.
const MARGIN: usize = 64;

/// Columns of a tile: wide tiles pack less, but there should be enough of them for every thread.
fn tile_columns(columns: usize) -> usize {
    columns.div_ceil(16).next_multiple_of(32).clamp(64, 256)
}

/// As [`for_each_row_part`](super::for_each_row_part).
pub(super) fn run<const N: usize>(
    cpu: &Cpu,
    x: &RawTensor,
    weights: [&RawTensor; N],
    done: impl Fn(usize, Range<usize>, [&mut [f32]; N]) + Sync,
) -> Result<()> {
    let (columns, depth) = (weights[0].layout.dim(0), weights[0].layout.dim(1));
    let rows = x.layout.num_rows();
    let (height, width) = (ROWS.min(rows), tile_columns(columns).min(columns));
    let (row_tiles, column_tiles) = (rows.div_ceil(ROWS), columns.div_ceil(width));
    let cost = (height * width * N).saturating_mul(depth);
    // What is in place needs no panel.
    let deep = DEPTH.min(depth);
    let panel = |t: &RawTensor, rows| {
        if in_place(t).is_some() {
            0
        } else {
            rows * deep
        }
    };
    let x_panel = panel(x, height);
    let w_panel = (weights.iter().map(|w| panel(w, width)).max()).unwrap_or(0);
    let sums = height * width;
    let items = (row_tiles * column_tiles, cost);
    let packed = deep.saturating_mul((height + width + MARGIN) * size_of::<f32>());
    probe(
        "linear",
        packed.saturating_mul(cpu.participants(items.0, cost)),
    )?;
    cpu.for_each_range_with(
        "linear",
        items,
        x_panel + w_panel + N * sums,
        |scratch, tiles| {
            let (x_panel, scratch) = scratch.split_at_mut(x_panel);
            let (w_panel, mut scratch) = scratch.split_at_mut(w_panel);
            let mut panels = Panels {
                x: x_panel,
                weight: w_panel,
            };
            let mut room = [(); N].map(|()| {
                let (here, rest) = std::mem::take(&mut scratch).split_at_mut(sums);
                scratch = rest;
                here
            });
            for tile in tiles {
                // Neighbouring tiles share their columns, so that the weights are found in cache.
                let (row, column) = (tile % row_tiles * ROWS, tile / row_tiles * width);
                let part = (
                    row..rows.min(row + ROWS),
                    column..columns.min(column + width),
                );
                let size = part.0.len() * part.1.len();
                for (sums, weight) in room.iter_mut().zip(weights) {
                    let sums = &mut sums[..size];
                    product(cpu, x, weight, part.clone(), depth, &mut panels, sums);
                }
                cpu.vectorize(
                    #[inline(always)]
                    || {
                        let width = part.1.len();
                        for (i, row) in part.0.clone().enumerate() {
                            let sums = room.each_mut().map(|s| &mut s[i * width..(i + 1) * width]);
                            done(row, part.1.clone(), sums);
                        }
                    },
                );
            }
        },
    )
}

/// Room for widened panels.
struct Panels<'a> {
    x: &'a mut [f32],
    weight: &'a mut [f32],
}

/// `sums = x[rows] weight[columns]ᵀ`, row-major.
fn product(
    cpu: &Cpu,
    x: &RawTensor,
    weight: &RawTensor,
    (rows, columns): (Range<usize>, Range<usize>),
    depth: usize,
    panels: &mut Panels<'_>,
    sums: &mut [f32],
) {
    let direct = (in_place(x), in_place(weight));
    // Only widening needs short panels.
    let step = if direct.0.is_some() && direct.1.is_some() {
        depth.max(1)
    } else {
        DEPTH
    };
    if depth == 0 {
        sums.fill(0.0);
    }
    for start in (0..depth).step_by(step) {
        let part = start..depth.min(start + step);
        let (x, x_stride) = operand(cpu, x, direct.0, rows.clone(), part.clone(), panels.x);
        let (w, w_stride) = operand(
            cpu,
            weight,
            direct.1,
            columns.clone(),
            part.clone(),
            panels.weight,
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
    scratch: &mut [f32],
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
    let scratch = &mut scratch[..rows.len() * width];
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
