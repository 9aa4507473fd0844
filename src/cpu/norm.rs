//! The backward pass of RMSNorm and LayerNorm on the CPU.
//!
//! Rows are cut into parts by their number alone. A part's rows are done in order, and its share of
//! the parameters' gradients lies in the workspace; then the shares are added in order, columns in
//! parallel.

use std::ops::Range;

use crate::cpu::float::{BLOCK, Float, blocks, with_float};
use crate::cpu::rms_norm::LANES;
use crate::cpu::rows::{part_of, part_of_mut, row_of_mut};
use crate::cpu::{Cpu, Run};
use crate::dtype::DType;
use crate::error::Result;
use crate::layout::Layout;
use crate::problem::norm::Backward;
use crate::tensor::{RawTensor, Scratch};

/// The most parts of the rows, and the fewest rows that make one.
const MAX_PARTS: usize = 64;
const MIN_ROWS: usize = 16;

/// The shares of one parameter's gradient, `[parts, dim]`, if it is asked for.
type Shares = Option<RawTensor>;

impl Run for Backward {
    fn needed(&self) -> usize {
        let shares = parts(self).saturating_mul(self.dim());
        shares.saturating_mul(size_of::<f32>() * self.parameters.iter().count())
    }

    fn run(&self, cpu: &Cpu, scratch: Scratch) -> Result<()> {
        let parts = parts(self);
        let (mut next, layout) = (scratch.ptr, Layout::contiguous(&[parts, self.dim()])?);
        let mut shares = |wanted: &Option<RawTensor>| {
            wanted.map(|_| {
                let ptr = next;
                next = next.wrapping_add(layout.span() * size_of::<f32>());
                let dtype = DType::F32;
                RawTensor { ptr, dtype, layout }
            })
        };
        let dweight = shares(&self.parameters.dweight);
        let dbias = shares(&self.parameters.dbias);
        if !self.x.layout.is_empty() {
            differentiate(cpu, self, parts, [dweight, dbias]);
        }
        let asked = [&self.parameters.dweight, &self.parameters.dbias];
        for (gradient, shares) in asked.into_iter().zip([dweight, dbias]) {
            if let (Some(gradient), Some(shares)) = (gradient, shares) {
                add_up(cpu, &shares, parts, gradient, self.parameters.accumulate);
            }
        }
        Ok(())
    }
}

/// How many parts the rows are cut into: none without rows.
fn parts(p: &Backward) -> usize {
    if p.x.layout.is_empty() {
        return 0;
    }
    p.x.layout.num_rows().div_ceil(MIN_ROWS).min(MAX_PARTS)
}

fn differentiate(cpu: &Cpu, p: &Backward, parts: usize, shares: [Shares; 2]) {
    let (rows, dim) = (p.x.layout.num_rows(), p.dim());
    let of_part = |part: usize| part * rows / parts..(part + 1) * rows / parts;
    let cost = dim.saturating_mul(12).saturating_mul(rows.div_ceil(parts));
    with_float!(p.x.dtype, T => {
        cpu.for_each_range(parts, cost, |range| {
            cpu.vectorize(#[inline(always)] || {
                for part in range.clone() {
                    let mut shares = shares.each_ref().map(|shares| {
                        // SAFETY: the workspace has `parts` shares of `dim` floats, and this part
                        // is this thread's alone.
                        shares.as_ref().map(|s| unsafe { row_of_mut::<f32>(s, part, dim) })
                    });
                    shares.iter_mut().flatten().for_each(|share| share.fill(0.0));
                    for row in of_part(part) {
                        // SAFETY: rows of the checked tensors, which no other thread has.
                        unsafe { one_row::<T>(p, row, dim, &mut shares) };
                    }
                }
            });
        });
    });
}

/// What is known of a row once it has been read: its mean, 1 / its deviation, and the means of the
/// gradient and of its product with the normalised row.
#[derive(Clone, Copy)]
struct Means {
    mean: f32,
    scale: f32,
    gradient: f32,
    product: f32,
}

/// # Safety
/// `row` is a row of the checked tensors, whose dtype is T and which nobody else has; the shares have
/// `dim` elements.
#[inline(always)]
unsafe fn one_row<T: Float>(
    p: &Backward,
    row: usize,
    dim: usize,
    [dweight, dbias]: &mut [Option<&mut [f32]>; 2],
) {
    // SAFETY: the caller's promise.
    let means = unsafe { means_of::<T>(p, row, dim) };
    let (mut x, mut dout, mut gains) = ([0.0; BLOCK], [0.0; BLOCK], [1.0; BLOCK]);
    for columns in blocks(dim) {
        let n = columns.len();
        let (x, dout, gains) = (&mut x[..n], &mut dout[..n], &mut gains[..n]);
        // SAFETY: columns of the row. `dx` is borrowed after `dout`, which may be the same memory,
        // was read.
        unsafe {
            load::<T>(p, row, &columns, x, dout, gains);
            for x in x.iter_mut() {
                *x = (*x - means.mean) * means.scale;
            }
            if let Some(dweight) = dweight {
                let sums = dweight[columns.clone()].iter_mut();
                for ((sum, x), dout) in sums.zip(x.iter()).zip(dout.iter()) {
                    *sum += dout * x;
                }
            }
            if let Some(dbias) = dbias {
                for (sum, dout) in dbias[columns.clone()].iter_mut().zip(dout.iter()) {
                    *sum += dout;
                }
            }
            for ((x, dout), gain) in x.iter_mut().zip(dout.iter()).zip(gains.iter()) {
                *x = means.scale * ((dout * gain - means.gradient) - *x * means.product);
            }
            if let Some(dresidual) = &p.dresidual {
                T::load(part_of::<T>(dresidual, row, columns.clone()), dout);
                for (x, dresidual) in x.iter_mut().zip(dout.iter()) {
                    *x += dresidual;
                }
            }
            T::store(x, part_of_mut::<T>(&p.dx, row, columns));
        }
    }
}

/// # Safety
/// As [`one_row`].
#[inline(always)]
unsafe fn means_of<T: Float>(p: &Backward, row: usize, dim: usize) -> Means {
    let (mut x, mut dout, mut gains) = ([0.0; BLOCK], [0.0; BLOCK], [1.0; BLOCK]);
    let whole = |sums: [f32; LANES]| sums.iter().sum::<f32>() / dim as f32;
    let mut mean = 0.0;
    if p.centered {
        let mut sums = [0.0; LANES];
        for columns in blocks(dim) {
            let x = &mut x[..columns.len()];
            // SAFETY: columns of the row.
            T::load(unsafe { part_of::<T>(&p.x, row, columns) }, x);
            for chunk in x.chunks(LANES) {
                for (sum, x) in sums.iter_mut().zip(chunk) {
                    *sum += x;
                }
            }
        }
        mean = whole(sums);
    }
    let (mut squares, mut gradients) = ([0.0; LANES], [0.0; LANES]);
    let mut products = [0.0; LANES];
    for columns in blocks(dim) {
        let n = columns.len();
        let (x, dout, gains) = (&mut x[..n], &mut dout[..n], &mut gains[..n]);
        // SAFETY: columns of the row.
        unsafe { load::<T>(p, row, &columns, x, dout, gains) };
        for ((x, dout), gains) in x
            .chunks(LANES)
            .zip(dout.chunks(LANES))
            .zip(gains.chunks(LANES))
        {
            for (lane, ((x, dout), gain)) in x.iter().zip(dout).zip(gains).enumerate() {
                let (d, g) = (x - mean, dout * gain);
                squares[lane] += d * d;
                products[lane] += g * d;
                gradients[lane] += g;
            }
        }
    }
    let scale = (whole(squares) + p.epsilon).sqrt().recip();
    Means {
        mean,
        scale,
        gradient: if p.centered { whole(gradients) } else { 0.0 },
        product: whole(products) * scale,
    }
}

/// Columns of a row of `x` and `dout`, and of the gains, which stay as they are without a weight.
///
/// # Safety
/// As [`one_row`], and the columns lie in the row.
#[inline(always)]
unsafe fn load<T: Float>(
    p: &Backward,
    row: usize,
    columns: &Range<usize>,
    x: &mut [f32],
    dout: &mut [f32],
    gains: &mut [f32],
) {
    // SAFETY: the caller's promise; a weight is a single row of `dim` elements.
    unsafe {
        T::load(part_of::<T>(&p.x, row, columns.clone()), x);
        T::load(part_of::<T>(&p.dout, row, columns.clone()), dout);
        if let Some(weight) = &p.weight {
            with_float!(weight.dtype, W => W::load(part_of::<W>(weight, 0, columns.clone()), gains));
            gains.iter_mut().for_each(|gain| *gain += p.weight_offset);
        }
    }
}

/// Adds the shares in order, to what is there if the gradient accumulates, and stores the sums.
pub(super) fn add_up(
    cpu: &Cpu,
    shares: &RawTensor,
    parts: usize,
    gradient: &RawTensor,
    accumulate: bool,
) {
    let dim = gradient.layout.num_elements();
    cpu.for_each_range(dim.div_ceil(BLOCK), parts * BLOCK, |range| {
        cpu.vectorize(
            #[inline(always)]
            || {
                for block in range.clone() {
                    let columns = block * BLOCK..dim.min((block + 1) * BLOCK);
                    let sums = &mut [0.0; BLOCK][..columns.len()];
                    // SAFETY: columns of the shares and of the gradient, which no other thread has.
                    unsafe {
                        if accumulate {
                            f32::load(part_of::<f32>(gradient, 0, columns.clone()), sums);
                        }
                        for part in 0..parts {
                            let share = part_of::<f32>(shares, part, columns.clone());
                            for (sum, term) in sums.iter_mut().zip(share) {
                                *sum += term;
                            }
                        }
                        with_float!(gradient.dtype, G => {
                            G::store(sums, part_of_mut::<G>(gradient, 0, columns));
                        });
                    }
                }
            },
        );
    });
}
