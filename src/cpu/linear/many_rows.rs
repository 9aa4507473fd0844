//! Products of many rows, and of gradients: tiles of the output through `gemm`. Operands that are
//! not f32 are widened a panel at a time into scratch that stays in cache; what is summed over may
//! lie along the rows or the columns of either, and nothing is transposed. How work is cut depends
//! on the shapes alone, so the same inputs give the same bits with any number of threads.

use std::ops::Range;

use crate::cpu::Cpu;
use crate::cpu::blocks::{Chunk, blocks_of, decode};
use crate::cpu::float::{Float, with_float_or_e4m3};
use crate::cpu::rows::part_of;
use crate::cpu::scratch::{Floats, probe};
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::{RawTensor, Scratch};

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

/// A matrix of a product.
#[derive(Clone, Copy)]
pub(super) struct Operand<'a> {
    tensor: &'a RawTensor,
    /// Whether what is summed over are its rows, and not its columns.
    depth_is_rows: bool,
}

impl<'a> Operand<'a> {
    /// Whose rows are multiplied, and columns summed over.
    pub fn by_rows(tensor: &'a RawTensor) -> Self {
        let depth_is_rows = false;
        Operand {
            tensor,
            depth_is_rows,
        }
    }

    /// Whose columns are multiplied, and rows summed over.
    pub fn by_columns(tensor: &'a RawTensor) -> Self {
        let depth_is_rows = true;
        Operand {
            tensor,
            depth_is_rows,
        }
    }

    /// How much is multiplied, and how much summed over.
    fn sizes(&self) -> (usize, usize) {
        let layout = &self.tensor.layout;
        let columns = layout.dim(layout.rank().saturating_sub(1));
        match self.depth_is_rows {
            false => (layout.num_rows(), columns),
            true => (columns, layout.num_rows()),
        }
    }
}

/// The tiles of the products of `x` and the transposes of `N` matrices of equal sizes. The products
/// have rows and columns.
pub(super) struct Tiles<'a, const N: usize> {
    x: Operand<'a>,
    weights: [Operand<'a>; N],
    /// Of the products.
    rows: usize,
    columns: usize,
    depth: usize,
    /// Columns of a tile; its rows are [`ROWS`].
    width: usize,
    /// Of the scratch: widened panels, and the sums of a product.
    x_panel: usize,
    w_panel: usize,
    sums: usize,
    /// Tiles, and what each costs.
    items: (usize, usize),
    /// Threads that multiply.
    threads: usize,
    /// Bytes that `gemm` packs.
    packed: usize,
}

impl<'a, const N: usize> Tiles<'a, N> {
    pub fn new(cpu: &Cpu, x: Operand<'a>, weights: [Operand<'a>; N]) -> Self {
        let ((rows, depth), (columns, _)) = (x.sizes(), weights[0].sizes());
        let (height, width) = (ROWS.min(rows), tile_columns(columns).min(columns));
        let cost = (height * width * N).saturating_mul(depth);
        // What is in place needs no panel.
        let deep = DEPTH.min(depth);
        let panel = |t: &Operand<'_>, rows| {
            if in_place(t.tensor).is_some() {
                0
            } else {
                rows * deep
            }
        };
        let x_panel = panel(&x, height);
        let w_panel = (weights.iter().map(|w| panel(w, width)).max()).unwrap_or(0);
        let sums = height * width;
        let items = (rows.div_ceil(ROWS) * columns.div_ceil(width), cost);
        let packed = deep.saturating_mul((height + width + MARGIN) * size_of::<f32>());
        let threads = cpu.participants(items.0, cost);
        Tiles {
            x,
            weights,
            rows,
            columns,
            depth,
            width,
            x_panel,
            w_panel,
            sums,
            items,
            threads,
            packed: packed.saturating_mul(threads),
        }
    }

    /// Floats that a thread widens to and sums in.
    fn floats(&self) -> usize {
        self.x_panel + self.w_panel + N * self.sums
    }

    /// Bytes of a workspace with which [`Tiles::memory`] allocates nothing.
    pub fn bytes(&self) -> usize {
        Floats::bytes(self.threads, self.floats())
    }

    /// Sees whether there is memory for what `gemm` packs.
    ///
    /// # Errors
    /// There is none.
    pub fn probe(&self, op: &'static str) -> Result<()> {
        probe(op, self.packed)
    }

    /// Memory for what is widened and summed: in a workspace that has room for it, or allocated once
    /// it is seen that there is memory for what is packed too.
    ///
    /// # Errors
    /// There is no memory.
    pub fn memory(&self, op: &'static str, scratch: Scratch) -> Result<Floats> {
        Floats::in_or_new(op, scratch, (self.threads, self.floats()), self.packed)
    }

    /// Multiplies; `done(row, columns, sums)` is called as by
    /// [`for_each_row_part`](super::for_each_row_part), for rows of the products and some columns.
    /// `memory` is that of [`Tiles::memory`].
    pub fn run(
        &self,
        cpu: &Cpu,
        memory: &Floats,
        done: impl Fn(usize, Range<usize>, [&mut [f32]; N]) + Sync,
    ) {
        let row_tiles = self.rows.div_ceil(ROWS);
        cpu.for_each_range_in(memory, self.items, |scratch, tiles| {
            let (x_panel, scratch) = scratch.split_at_mut(self.x_panel);
            let (w_panel, mut scratch) = scratch.split_at_mut(self.w_panel);
            let mut panels = Panels {
                x: x_panel,
                weight: w_panel,
            };
            let mut room = [(); N].map(|()| {
                let (here, rest) = std::mem::take(&mut scratch).split_at_mut(self.sums);
                scratch = rest;
                here
            });
            for tile in tiles {
                // Neighbouring tiles share their columns, so that the weights are found in cache.
                let (row, column) = (tile % row_tiles * ROWS, tile / row_tiles * self.width);
                let part = (
                    row..self.rows.min(row + ROWS),
                    column..self.columns.min(column + self.width),
                );
                let size = part.0.len() * part.1.len();
                for (sums, weight) in room.iter_mut().zip(self.weights) {
                    let sums = &mut sums[..size];
                    let (x, depth) = (self.x, self.depth);
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
        });
    }
}

/// Room for widened panels.
struct Panels<'a> {
    x: &'a mut [f32],
    weight: &'a mut [f32],
}

/// `sums = x[rows] weight[columns]ᵀ`, row-major.
fn product(
    cpu: &Cpu,
    x: Operand<'_>,
    weight: Operand<'_>,
    (rows, columns): (Range<usize>, Range<usize>),
    depth: usize,
    panels: &mut Panels<'_>,
    sums: &mut [f32],
) {
    let direct = (in_place(x.tensor), in_place(weight.tensor));
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
        let x = panel(cpu, x, direct.0, rows.clone(), part.clone(), panels.x);
        let w = panel(
            cpu,
            weight,
            direct.1,
            columns.clone(),
            part.clone(),
            panels.weight,
        );
        // SAFETY: `sums` has `rows * columns` elements; the panels have `rows` and `columns` by
        // `part` elements, where their strides say.
        unsafe {
            // Its kernels write columns, so rows are those of the transposed product.
            gemm_f32::gemm::f32::get_gemm_fn()(
                columns.len(),
                rows.len(),
                part.len(),
                sums.as_mut_ptr(),
                columns.len() as isize,
                1,
                start > 0,
                w.ptr,
                w.depth_stride as isize,
                w.stride as isize,
                x.ptr,
                x.stride as isize,
                x.depth_stride as isize,
                1.0,
                1.0,
                false,
                false,
                false,
                gemm_common::Parallelism::None,
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

/// A part of an operand, as f32.
struct Panel {
    ptr: *const f32,
    /// Between what is multiplied, in elements.
    stride: usize,
    /// Between what is summed over.
    depth_stride: usize,
}

/// The part of an operand that has `range` of what is multiplied and `depth` of what is summed
/// over: in place, where its rows are `stride` apart, or widened into `scratch`.
fn panel(
    cpu: &Cpu,
    operand: Operand<'_>,
    stride: Option<usize>,
    range: Range<usize>,
    depth: Range<usize>,
    scratch: &mut [f32],
) -> Panel {
    let Operand {
        tensor,
        depth_is_rows,
    } = operand;
    let (rows, columns) = match depth_is_rows {
        false => (range, depth),
        true => (depth, range),
    };
    let (ptr, pitch) = match stride {
        Some(stride) => {
            let start = tensor.ptr.cast::<f32>().cast_const();
            // Offsets of existing elements fit an isize (see Layout).
            let offset = rows.start * stride + columns.start;
            (start.wrapping_add(offset), stride)
        }
        None => {
            let width = columns.len();
            let scratch = &mut scratch[..rows.len() * width];
            widen(cpu, tensor, rows, columns, scratch);
            (scratch.as_ptr(), width)
        }
    };
    let (stride, depth_stride) = match depth_is_rows {
        false => (pitch, 1),
        true => (1, pitch),
    };
    Panel {
        ptr,
        stride,
        depth_stride,
    }
}

/// Copies a panel as f32, row-major.
fn widen(cpu: &Cpu, t: &RawTensor, rows: Range<usize>, columns: Range<usize>, out: &mut [f32]) {
    if columns.is_empty() {
        return;
    }
    if t.dtype.is_in_blocks() {
        return widen_blocks(cpu, t, rows, columns, out);
    }
    with_float_or_e4m3!(t.dtype, T => {
        cpu.vectorize(#[inline(always)] || {
            for (row, out) in rows.clone().zip(out.chunks_exact_mut(columns.len())) {
                // SAFETY: a row of the checked tensor.
                T::load(unsafe { part_of::<T>(t, row, columns.clone()) }, out);
            }
        });
    });
}

/// [`widen`] of a tensor in blocks. `columns` begin at a multiple of [`DEPTH`], and end at one or with
/// the row.
fn widen_blocks(
    cpu: &Cpu,
    t: &RawTensor,
    rows: Range<usize>,
    columns: Range<usize>,
    out: &mut [f32],
) {
    let mut chunk = Chunk::new();
    for (row, out) in rows.zip(out.chunks_exact_mut(columns.len())) {
        // SAFETY: whole blocks of a row of the checked tensor: a panel is of a multiple of every
        // format's.
        let bytes = unsafe { blocks_of(t, row, columns.clone()) };
        decode(cpu, t.dtype, bytes, out, &mut chunk);
    }
}
