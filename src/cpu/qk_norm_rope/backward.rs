//! The gradients of QK-norm and RoPE on the CPU.
//!
//! Tokens are cut into parts by their number alone. A part's tokens are done in order, and its share
//! of the weights' gradients lies in the workspace; then the shares are added in order, columns in
//! parallel.

use std::ops::Range;

use super::{Turner, tokens};
use crate::cpu::float::{BLOCK, Float, with_float};
use crate::cpu::norm::add_up;
use crate::cpu::rms_norm::LANES;
use crate::cpu::rope::{Places, Rotator, heads, heads_of};
use crate::cpu::rows::{part_of, row_of_mut};
use crate::cpu::{Cpu, Run};
use crate::dtype::DType;
use crate::error::Result;
use crate::layout::Layout;
use crate::problem::qk_norm_rope::{Backward, Heads};
use crate::tensor::{RawTensor, Scratch};

const OP: &str = "qk_norm_rope_backward";

/// The most parts of the tokens, and the fewest tokens that make one.
const MAX_PARTS: usize = 64;
const MIN_TOKENS: usize = 4;

/// The shares of one weight's gradient, `[parts, head_dim]`, if it is asked for.
type Shares = Option<RawTensor>;

impl Run for Backward {
    fn needed(&self) -> usize {
        let shares = parts(self).saturating_mul(self.head_dim());
        let count = self.dweights.iter().flatten().count();
        shares.saturating_mul(size_of::<f32>() * count)
    }

    fn probe(&self, _: &Cpu) -> Result<()> {
        match self.is_empty() {
            true => Ok(()),
            false => Places::new(OP, &self.positions, &self.rotation, 1).map(drop),
        }
    }

    fn run(&self, cpu: &Cpu, scratch: Scratch) -> Result<()> {
        let parts = parts(self);
        let layout = Layout::contiguous(&[parts, self.head_dim()])?;
        let mut next = scratch.ptr;
        let shares = self.dweights.map(|wanted| {
            wanted.map(|_| {
                let ptr = next;
                next = next.wrapping_add(layout.span() * size_of::<f32>());
                let dtype = DType::F32;
                RawTensor { ptr, dtype, layout }
            })
        });
        if !self.is_empty() {
            differentiate(cpu, self, parts, shares)?;
        }
        for (gradient, shares) in self.dweights.iter().zip(shares) {
            if let (Some(gradient), Some(shares)) = (gradient, shares) {
                add_up(cpu, &shares, parts, gradient, self.accumulate);
            }
        }
        Ok(())
    }
}

/// Tokens of a sequence, of all, and the components that each has.
fn sizes(p: &Backward) -> (usize, usize, usize) {
    let all = p.heads.iter().flatten().map(|of| heads(&of.x));
    let components = all.map(|(heads, dim)| heads * dim).sum();
    let first = p.heads.iter().flatten().next();
    let (len, num_tokens) = first.map_or((0, 0), |of| tokens(&of.x));
    (len, num_tokens, components)
}

/// How many parts the tokens are cut into: none without components.
fn parts(p: &Backward) -> usize {
    match p.is_empty() {
        true => 0,
        false => sizes(p).1.div_ceil(MIN_TOKENS).min(MAX_PARTS),
    }
}

fn differentiate(cpu: &Cpu, p: &Backward, parts: usize, shares: [Shares; 2]) -> Result<()> {
    let (len, num_tokens, components) = sizes(p);
    let places = Places::new(OP, &p.positions, &p.rotation, len)?;
    // SAFETY: the tables were checked, and are initialised as whoever made them has promised; `p`
    // outlives the rotator.
    let rotator = unsafe { Rotator::new(OP, &p.rotation, true)? };
    let of_part = |part: usize| part * num_tokens / parts..(part + 1) * num_tokens / parts;
    let cost = (components.saturating_mul(16)).saturating_add(32 * rotator.half());
    let cost = cost.saturating_mul(num_tokens.div_ceil(parts));
    let dim = p.head_dim();
    let dtype = p.heads.iter().flatten().next().map(|of| of.x.dtype);
    with_float!(dtype.unwrap_or(DType::F32), T => {
        cpu.for_each_range(parts, cost, |range| {
            let mut turner = Turner::new(&rotator);
            cpu.vectorize(#[inline(always)] || {
                for part in range.clone() {
                    let mut shares = shares.each_ref().map(|shares| {
                        // SAFETY: the workspace has `parts` shares of `dim` floats, and this part
                        // is this thread's alone.
                        shares.as_ref().map(|s| unsafe { row_of_mut::<f32>(s, part, dim) })
                    });
                    shares.iter_mut().flatten().for_each(|share| share.fill(0.0));
                    for token in of_part(part) {
                        turner.at(places.of(token));
                        // SAFETY: a token of the checked tensors, which no other thread has.
                        unsafe { one_token::<T>(p, token, &mut turner, &mut shares) };
                    }
                }
            });
        });
    });
    Ok(())
}

/// # Safety
/// `token` is one of every tensor, all of type T and initialised; no other thread works on it. The
/// shares have as many elements as a head.
#[inline(always)]
unsafe fn one_token<T: Float>(
    p: &Backward,
    token: usize,
    turner: &mut Turner<'_>,
    shares: &mut [Option<&mut [f32]>; 2],
) {
    for (which, (of, share)) in p.heads.iter().zip(shares).enumerate() {
        let Some(Heads { x, dout, dx }) = of else {
            continue;
        };
        let [x_at, dout_at, dx_at] = [x, dout, dx].map(|t| heads_of::<T>(t, token));
        for head in 0..heads(x).0 {
            let (x, dout) = (x_at(head).cast_const(), dout_at(head).cast_const());
            // SAFETY: heads are rows of contiguous elements, as many as the weight has; `dx` was
            // checked to be `dout`, or apart from it.
            unsafe { one_head(p, which, x, dout, dx_at(head), turner, share) };
        }
    }
}

/// # Safety
/// All three are heads of the checked tensors, of elements T, which nobody else has; `dx` may be
/// `dout`.
#[inline(always)]
unsafe fn one_head<T: Float>(
    p: &Backward,
    which: usize,
    x: *const T,
    dout: *const T,
    dx: *mut T,
    turner: &mut Turner<'_>,
    share: &mut Option<&mut [f32]>,
) {
    let dim = p.head_dim();
    let (mut xs, mut gains) = ([0.0f32; BLOCK], [1.0f32; BLOCK]);
    let (mut squares, mut products) = ([0.0f32; LANES], [0.0f32; LANES]);
    // SAFETY: the caller's promise.
    unsafe {
        turner.pass::<T, true>(dout, None, dim, |columns, g| {
            let (xs, gains) = (&mut xs[..g.len()], &mut gains[..g.len()]);
            load(p, which, x, columns, xs, gains);
            let chunks = xs.chunks(LANES).zip(gains.chunks(LANES));
            for (g, (xs, gains)) in g.chunks(LANES).zip(chunks) {
                for (lane, (g, (x, gain))) in g.iter().zip(xs.iter().zip(gains)).enumerate() {
                    squares[lane] += x * x;
                    products[lane] += g * gain * x;
                }
            }
        });
    }
    let mean = |sums: [f32; LANES]| sums.iter().sum::<f32>() / dim as f32;
    let scale = (mean(squares) + p.norms.epsilon).sqrt().recip();
    let product = mean(products) * scale;
    // SAFETY: as above; a part of `dout` is read again before it is overwritten.
    unsafe {
        turner.pass::<T, true>(dout, Some(dx), dim, |columns, g| {
            let (xs, gains) = (&mut xs[..g.len()], &mut gains[..g.len()]);
            load(p, which, x, columns.clone(), xs, gains);
            xs.iter_mut().for_each(|x| *x *= scale);
            if let Some(share) = share {
                let sums = share[columns].iter_mut();
                for ((sum, g), normal) in sums.zip(g.iter()).zip(xs.iter()) {
                    *sum += g * normal;
                }
            }
            for ((g, normal), gain) in g.iter_mut().zip(xs.iter()).zip(gains.iter()) {
                *g = scale * (*g * gain - normal * product);
            }
        });
    }
}

/// Columns of a head and of its gains, which stay as they are without a weight.
///
/// # Safety
/// The columns are of the head, of elements T, and of the weight.
#[inline(always)]
unsafe fn load<T: Float>(
    p: &Backward,
    which: usize,
    head: *const T,
    columns: Range<usize>,
    xs: &mut [f32],
    gains: &mut [f32],
) {
    // SAFETY: the caller's promise.
    unsafe {
        T::load(
            std::slice::from_raw_parts(head.add(columns.start), columns.len()),
            xs,
        );
        if let Some(weight) = &p.norms.weights[which] {
            with_float!(weight.dtype, W => W::load(part_of::<W>(weight, 0, columns), gains));
            gains
                .iter_mut()
                .for_each(|gain| *gain += p.norms.weight_offset);
        }
    }
}
