//! `x Wᵀ` for few rows, which is bound by reading the weights: each is read once and multiplies every row.
//!
//! Rows of `x` and of `W` both lie along the depth, so the product is made of dot products, and needs neither packing nor transposition:
//! a few rows of each are multiplied by vectors that lie along the depth, with one vector of partial sums for each pair of rows in a
//! register. Every sum is computed in the same order whatever stands beside it, so a row's result depends neither on the number of
//! threads nor on how many rows are multiplied at a time.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::parts::{self, MAX_ROWS, PART};
use crate::cpu::Cpu;
use crate::cpu::blocks::{Chunk, blocks_of, decode};
use crate::cpu::float::{BLOCK, Float, blocks, with_float, with_float_or_e4m3};
use crate::cpu::rows::row_of;
use crate::cpu::scratch::Floats;
use crate::cpu::vector;
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::{RawTensor, Scratch};

/// Rows of weights that are multiplied at a time, where `x` has more than [`MEMORY_BOUND`] rows.
const GROUP: usize = 4;

/// Rows up to which nothing but reading the weights counts. They are read from one end to the other then: what
/// fetches ahead of a processor's reads follows one stream of them far better than several short ones.
const MEMORY_BOUND: usize = 4;

/// Floats of the rows of `x`, where they are widened.
fn widened(x: &RawTensor) -> usize {
    match x.dtype {
        DType::F32 => 0,
        _ => x.layout.num_elements(),
    }
}

/// Bytes of a workspace with which [`run`] allocates nothing.
pub(super) fn bytes(x: &RawTensor) -> usize {
    Floats::bytes(1, widened(x))
}

/// As [`for_each_row_part`](super::for_each_row_part).
pub(super) fn run<const N: usize>(
    cpu: &Cpu,
    x: &RawTensor,
    weights: [&RawTensor; N],
    scratch: Scratch,
    done: impl Fn(usize, Range<usize>, [&mut [f32]; N]) + Sync,
) -> Result<()> {
    let rows = x.layout.num_rows();
    let (columns, depth) = (weights[0].layout.dim(0), weights[0].layout.dim(1));
    let scratch = Floats::in_or_new("linear", scratch, (1, widened(x)), 0)?;
    // SAFETY: the only part, borrowed once.
    let scratch = unsafe { scratch.part(0) };
    let mut wide: [&[f32]; MAX_ROWS] = [&[]; MAX_ROWS];
    let wide = &mut wide[..rows];
    with_float!(x.dtype, X => rows_as_f32::<X>(x, depth, scratch, wide));
    let wide = &*wide;
    let cost = depth.saturating_mul(rows * N * PART);
    parts::for_each(
        cpu,
        (rows, columns),
        cost,
        || [[0.0f32; BLOCK]; GROUP],
        |scratch, i, (_, columns), sums| {
            cpu.arch().dispatch(Part {
                cpu,
                x: wide,
                weight: weights[i],
                columns,
                scratch,
                sums,
            });
        },
        done,
    );
    Ok(())
}

/// The products of every row by some rows of a weight. It knows nothing of what becomes of them: there is one of it, then, for
/// all operations that multiply.
struct Part<'a> {
    cpu: &'a Cpu,
    x: &'a [&'a [f32]],
    weight: &'a RawTensor,
    /// Of the output.
    columns: Range<usize>,
    /// Blocks of weights that are not f32, widened.
    scratch: &'a mut [[f32; BLOCK]; GROUP],
    /// For each row of `x`.
    sums: &'a mut [[f32; PART]],
}

impl WithSimd for Part<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // What is set up for each group of columns grows with the rows that there is room for.
        match self.x.len() {
            0..=MEMORY_BOUND => self.run::<S, MEMORY_BOUND>(simd),
            _ => self.run::<S, MAX_ROWS>(simd),
        }
    }
}

impl Part<'_> {
    #[inline(always)]
    fn run<S: Simd, const ROOM: usize>(self, simd: S) {
        let Part {
            cpu,
            x,
            weight,
            columns,
            scratch,
            sums,
        } = self;
        if weight.dtype.is_in_blocks() {
            return products_of_blocks::<S, ROOM>(simd, cpu, x, weight, columns, scratch, sums);
        }
        with_float_or_e4m3!(weight.dtype, W => {
            products::<S, W, ROOM>(simd, x, weight, columns, scratch, sums);
        });
    }
}

/// The rows where they are if they are f32, else their copies in `scratch`, which has room for all.
fn rows_as_f32<'a, X: Float>(
    x: &RawTensor,
    depth: usize,
    mut scratch: &'a mut [f32],
    out: &mut [&'a [f32]],
) {
    for (row, out) in out.iter_mut().enumerate() {
        // SAFETY: a row of the checked tensor.
        let from = unsafe { row_of::<X>(x, row, depth) };
        *out = match X::as_f32(from) {
            Some(row) => row,
            None => {
                let (copy, rest) = std::mem::take(&mut scratch).split_at_mut(depth);
                scratch = rest;
                X::load(from, copy);
                copy
            }
        };
    }
}

/// Every row of `x` by the weights' rows `columns`.
#[inline(always)]
fn products<S: Simd, W: Float, const ROOM: usize>(
    simd: S,
    x: &[&[f32]],
    weight: &RawTensor,
    columns: Range<usize>,
    scratch: &mut [[f32; BLOCK]; GROUP],
    sums: &mut [[f32; PART]],
) {
    let depth = weight.layout.dim(1);
    let (mut column, mut at) = (columns.start, 0);
    while ROOM > MEMORY_BOUND && column + GROUP <= columns.end {
        let mut w: [&[W]; GROUP] = [&[]; GROUP];
        for (i, w) in w.iter_mut().enumerate() {
            // SAFETY: a row of the checked matrix.
            *w = unsafe { row_of::<W>(weight, column + i, depth) };
        }
        group::<S, W, _, ROOM>(simd, x, w, scratch, sums, at);
        (column, at) = (column + GROUP, at + GROUP);
    }
    while column < columns.end {
        // SAFETY: a row of the checked matrix.
        let w = [unsafe { row_of::<W>(weight, column, depth) }];
        group::<S, W, _, ROOM>(simd, x, w, scratch, sums, at);
        (column, at) = (column + 1, at + 1);
    }
}

/// Every row of `x` by the rows `columns` of weights in blocks, which are decoded.
#[inline(always)]
fn products_of_blocks<S: Simd, const ROOM: usize>(
    simd: S,
    cpu: &Cpu,
    x: &[&[f32]],
    weight: &RawTensor,
    columns: Range<usize>,
    scratch: &mut [[f32; BLOCK]; GROUP],
    sums: &mut [[f32; PART]],
) {
    let mut chunk = Chunk::new();
    let [scratch, ..] = scratch;
    let at_once = if S::REGISTER_COUNT >= 32 { 4 } else { 2 };
    for (at, column) in columns.enumerate() {
        let mut partial = [[simd.splat_f32s(0.0)]; ROOM];
        let mut tails = [[0.0f32]; ROOM];
        for block in blocks(weight.layout.dim(1)) {
            // SAFETY: blocks begin at multiples of a length that formats' divide, in a row of the
            // checked matrix.
            let bytes = unsafe { blocks_of(weight, column, block.clone()) };
            let wide = &mut scratch[..block.len()];
            decode(cpu, weight.dtype, bytes, wide, &mut chunk);
            add_block(simd, x, block, [&*wide], at_once, &mut partial, &mut tails);
        }
        for ((sums, partial), tails) in sums.iter_mut().zip(partial).zip(tails).take(x.len()) {
            sums[at] = simd.reduce_sum_f32s(partial[0]) + tails[0];
        }
    }
}

/// Every row of `x` by `C` rows of weights, whose sums go to the columns from `at`.
#[inline(always)]
fn group<S: Simd, W: Float, const C: usize, const ROOM: usize>(
    simd: S,
    x: &[&[f32]],
    w: [&[W]; C],
    scratch: &mut [[f32; BLOCK]; GROUP],
    sums: &mut [[f32; PART]],
    at: usize,
) {
    let depth = w[0].len();
    let mut partial = [[simd.splat_f32s(0.0); C]; ROOM];
    let mut tails = [[0.0f32; C]; ROOM];
    // Partial sums, a vector of each operand's rows and one to spare must fit the registers.
    let at_once = if S::REGISTER_COUNT >= 32 { 4 } else { 2 };
    // Weights that widen in registers, times too little of `x` to fall out of cache or to widen them for again, are gone through
    // without a pause.
    if ROOM <= MEMORY_BOUND && vector::in_registers::<S, W>() {
        add_block(simd, x, 0..depth, w, at_once, &mut partial, &mut tails);
    } else {
        for start in (0..depth).step_by(BLOCK) {
            let block = start..depth.min(start + BLOCK);
            let mut wide: [&[f32]; C] = [&[]; C];
            for ((wide, w), scratch) in wide.iter_mut().zip(w).zip(scratch.iter_mut()) {
                let w = &w[block.clone()];
                *wide = match W::as_f32(w) {
                    Some(w) => w,
                    None => {
                        let scratch = &mut scratch[..block.len()];
                        W::load(w, scratch);
                        scratch
                    }
                };
            }
            add_block(simd, x, block, wide, at_once, &mut partial, &mut tails);
        }
    }
    for ((sums, partial), tails) in sums.iter_mut().zip(partial).zip(tails).take(x.len()) {
        for c in 0..C {
            sums[at + c] = simd.reduce_sum_f32s(partial[c]) + tails[c];
        }
    }
}

/// Adds the products of a block of every row of `x` and of `C` rows of weights, which are given from the start of the block.
#[inline(always)]
fn add_block<S: Simd, W: Float, const C: usize, const ROOM: usize>(
    simd: S,
    x: &[&[f32]],
    block: Range<usize>,
    w: [&[W]; C],
    at_once: usize,
    partial: &mut [[S::f32s; C]; ROOM],
    tails: &mut [[f32; C]; ROOM],
) {
    let mut row = 0;
    while row < x.len() {
        let (partial, tails) = (&mut partial[row..], &mut tails[row..]);
        row += match at_once.min(x.len() - row) {
            1 => step::<S, W, 1, C>(simd, &x[row..], &block, w, partial, tails),
            2 => step::<S, W, 2, C>(simd, &x[row..], &block, w, partial, tails),
            3 => step::<S, W, 3, C>(simd, &x[row..], &block, w, partial, tails),
            _ => step::<S, W, 4, C>(simd, &x[row..], &block, w, partial, tails),
        };
    }
}

/// As [`add_block`], for `R` rows: to vectors of partial sums, and what the elements left over give to sums of their own. Gives `R`.
#[inline(always)]
fn step<S: Simd, W: Float, const R: usize, const C: usize>(
    simd: S,
    x: &[&[f32]],
    block: &Range<usize>,
    w: [&[W]; C],
    partial: &mut [[S::f32s; C]],
    tails: &mut [[f32; C]],
) -> usize {
    let mut rows: [&[f32]; R] = [&[]; R];
    for (row, x) in rows.iter_mut().zip(x) {
        *row = &x[block.clone()];
    }
    let len = block.len();
    let whole = len / S::F32_LANES * S::F32_LANES;
    let mut sums = [[simd.splat_f32s(0.0); C]; R];
    sums.copy_from_slice(&partial[..R]);
    for i in (0..whole).step_by(S::F32_LANES) {
        // A single row of weights is part of a stream that is read from one end to the other.
        if C == 1 {
            vector::fetch(w[0].as_ptr().wrapping_add(i));
        }
        let mut vectors = [simd.splat_f32s(0.0); C];
        for c in 0..C {
            debug_assert!(i + S::F32_LANES <= w[c].len());
            // SAFETY: a vector from `i` ends within `whole`, no further than the block.
            vectors[c] = unsafe { vector::load(simd, w[c].as_ptr().add(i)) };
        }
        for r in 0..R {
            // SAFETY: as above.
            let x = unsafe { vector::load(simd, rows[r].as_ptr().add(i)) };
            for c in 0..C {
                sums[r][c] = simd.mul_add_f32s(x, vectors[c], sums[r][c]);
            }
        }
    }
    partial[..R].copy_from_slice(&sums);
    for i in whole..len {
        for r in 0..R {
            for c in 0..C {
                tails[r][c] = rows[r][i].mul_add(w[c][i].widen(), tails[r][c]);
            }
        }
    }
    R
}
