//! QK-norm and RoPE on the CPU: tokens in parallel; each token's sines and cosines are computed once
//! and serve all of its heads. A head is read twice, the second time from cache.

mod backward;

use std::ops::Range;

use crate::cpu::float::{BLOCK, Float, blocks, with_float};
use crate::cpu::rms_norm::{LANES, add_squares, scale_columns};
use crate::cpu::rope::{Places, Rotator, Turning, heads, heads_of};
use crate::cpu::{Cpu, Run};
use crate::error::Result;
use crate::problem::qk_norm_rope::{Norms, Problem};
use crate::tensor::{RawTensor, Scratch};

impl Run for Problem {
    fn probe(&self, _: &Cpu) -> Result<()> {
        match first(self) {
            Some(_) => Places::new("qk_norm_rope", &self.positions, &self.rotation, 1).map(drop),
            None => Ok(()),
        }
    }

    fn run(&self, cpu: &Cpu, _: Scratch) -> Result<()> {
        forward(cpu, self)
    }
}

/// A tensor that has components.
fn first(p: &Problem) -> Option<&RawTensor> {
    let mut inputs = p.tensors.iter().flatten().map(|(input, _)| input);
    inputs.find(|input| !input.layout.is_empty())
}

/// Tokens of a sequence, and of all.
fn tokens(t: &RawTensor) -> (usize, usize) {
    let tokens = &t.layout.shape()[..t.layout.rank() - 2];
    (tokens.last().copied().unwrap_or(0), tokens.iter().product())
}

fn forward(cpu: &Cpu, p: &Problem) -> Result<()> {
    const OP: &str = "qk_norm_rope";
    let Some(first) = first(p) else {
        return Ok(());
    };
    let (len, num_tokens) = tokens(first);
    let places = Places::new(OP, &p.positions, &p.rotation, len)?;
    // SAFETY: the tables were checked, and are initialised as whoever made them has promised; `p`
    // outlives the rotator.
    let rotator = unsafe { Rotator::new(OP, &p.rotation, false)? };
    let inputs = p.tensors.iter().flatten().map(|(input, _)| heads(input));
    // Elementary operations per token: a sine and cosine cost a few dozen.
    let cost = (inputs.map(|(heads, dim)| heads * dim).sum::<usize>())
        .saturating_mul(6)
        .saturating_add(32 * rotator.half());
    with_float!(first.dtype, T => {
        cpu.for_each_range(num_tokens, cost, |tokens| {
            let mut turner = Turner::new(&rotator);
            cpu.vectorize(#[inline(always)] || {
                for token in tokens.clone() {
                    turner.at(places.of(token));
                    // SAFETY: the token lies inside the tensors, and no other thread has it.
                    unsafe { one_token::<T>(p, token, &mut turner) };
                }
            });
        });
    });
    Ok(())
}

/// # Safety
/// `token` is one of every tensor, all of type T and initialised; no other thread works on it.
#[inline(always)]
unsafe fn one_token<T: Float>(p: &Problem, token: usize, turner: &mut Turner<'_>) {
    let mut room = [0.0f32; BLOCK];
    for (which, pair) in p.tensors.iter().enumerate() {
        let Some((input, output)) = pair else {
            continue;
        };
        let (num_heads, dim) = heads(input);
        let (from, to) = (heads_of::<T>(input, token), heads_of::<T>(output, token));
        let gains = (p.norms.weights[which].as_ref(), p.norms.weight_offset);
        for head in 0..num_heads {
            let (from, to) = (from(head).cast_const(), to(head));
            // SAFETY: heads are rows of `dim` contiguous elements, as many as the weight has. The
            // output was checked to be its input, or apart from it.
            unsafe {
                let scale = scale_of(from, dim, &p.norms, &mut room);
                turner.pass::<T, false>(from, Some(to), dim, |columns, values| {
                    let room = &mut room[..values.len()];
                    scale_columns(values, columns, gains, scale, room);
                });
            }
        }
    }
}

/// 1 / the root of the mean square of a head.
///
/// # Safety
/// It is `dim` elements, readable.
#[inline(always)]
unsafe fn scale_of<T: Float>(
    head: *const T,
    dim: usize,
    norms: &Norms,
    room: &mut [f32; BLOCK],
) -> f32 {
    let mut partial = [0.0f32; LANES];
    let mut tail = 0.0;
    for columns in blocks(dim) {
        let values = &mut room[..columns.len()];
        // SAFETY: columns of the head.
        let from = unsafe { std::slice::from_raw_parts(head.add(columns.start), columns.len()) };
        T::load(from, values);
        tail += add_squares(values, &mut partial);
    }
    let mean = (partial.iter().sum::<f32>() + tail) / dim as f32;
    (mean + norms.epsilon).sqrt().recip()
}

/// What a thread rotates heads with.
struct Turner<'r> {
    rotator: &'r Rotator,
    scratch: Turning,
    /// Where the token stands, if angles have to be computed for every head, as there are too many
    /// of them to be kept.
    again: Option<i64>,
}

impl<'r> Turner<'r> {
    fn new(rotator: &'r Rotator) -> Self {
        Turner {
            rotator,
            scratch: Turning::default(),
            again: None,
        }
    }

    /// Goes to a token.
    #[inline(always)]
    fn at(&mut self, position: i64) {
        let mut parts = self.rotator.parts();
        match (parts.next(), parts.next()) {
            (Some(part), None) => self.rotator.angles(position, &part, &mut self.scratch),
            _ => self.again = Some(position),
        }
    }

    /// Rotates a head from one place to another, which may be the same, or only reads it. Hands all
    /// of its components to a function that may change them: before they are rotated or, if `AFTER`,
    /// then. Inside `Cpu::vectorize`.
    ///
    /// # Safety
    /// Both are heads of `dim` elements, readable and writable; unless they are the same, they do
    /// not overlap, and nothing else accesses `to`.
    #[inline(always)]
    unsafe fn pass<T: Float, const AFTER: bool>(
        &mut self,
        from: *const T,
        to: Option<*mut T>,
        dim: usize,
        mut f: impl FnMut(Range<usize>, &mut [f32]),
    ) {
        let (rotator, scratch) = (self.rotator, &mut self.scratch);
        for part in rotator.parts() {
            if let Some(position) = self.again {
                rotator.angles(position, &part, scratch);
            }
            // SAFETY: the rotary dimension is at most the head's.
            unsafe { rotator.load(from, &part, scratch) };
            if AFTER {
                rotator.turn_loaded(&part, scratch);
            }
            for piece in rotator.pieces(&part) {
                f(piece.columns(), piece.of_mut(scratch));
            }
            if !AFTER {
                rotator.turn_loaded(&part, scratch);
            }
            if let Some(to) = to {
                // SAFETY: as above; the part was read.
                unsafe { rotator.store(to, &part, scratch) };
            }
        }
        let turned = 2 * rotator.half();
        let mut room = [0.0f32; BLOCK];
        for block in blocks(dim - turned) {
            let (start, n) = (turned + block.start, block.len());
            let values = &mut room[..n];
            // SAFETY: components of the head behind those that turn; what is overwritten was read.
            unsafe {
                T::load(std::slice::from_raw_parts(from.add(start), n), values);
                f(start..start + n, values);
                if let Some(to) = to {
                    T::store(values, std::slice::from_raw_parts_mut(to.add(start), n));
                }
            }
        }
    }
}
