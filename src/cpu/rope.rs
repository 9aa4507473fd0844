//! RoPE on the CPU: tokens in parallel; each token's sines and cosines are computed once and serve all of its heads.

use crate::cpu::float::{Float, with_float};
use crate::cpu::math;
use crate::cpu::rows::{integers, row_of, row_of_mut};
use crate::cpu::{Cpu, Run};
use crate::error::{Error, Result, text};
use crate::problem::rope::{Angles, PositionSource, Problem, Rotation, Style, scaled_frequencies};
use crate::tensor::{RawTensor, Scratch};

/// Rotates f32 heads: what RoPE and a KV cache that rotates keys as it stores them have in common.
pub(crate) struct Rotator {
    style: Style,
    half: usize,
    angles: RotatorAngles,
    inverse: bool,
}

#[expect(
    clippy::large_enum_variant,
    reason = "one value on the stack of a call; boxing would allocate"
)]
enum RotatorAngles {
    Frequencies {
        inv_freq: Vec<f32>,
        /// Multiplies sines and cosines.
        scale: f32,
        /// The greatest frequency.
        fastest: f32,
    },
    Table {
        cos: RawTensor,
        sin: RawTensor,
    },
}

impl Rotator {
    /// Prepares a rotation: computes its frequencies once.
    ///
    /// # Safety
    /// The tensors of `p` are initialised memory for as long as the rotator is used.
    pub unsafe fn new(p: &Rotation, inverse: bool) -> Rotator {
        let half = p.rotary_dim / 2;
        let angles = match &p.angles {
            Angles::Table { cos, sin } => RotatorAngles::Table {
                cos: *cos,
                sin: *sin,
            },
            Angles::Computed {
                theta,
                scaling,
                freq_factors,
                attention_factor,
            } => {
                let (mut inv_freq, own) = scaled_frequencies(*theta, *scaling, p.rotary_dim);
                if let Some(factors) = freq_factors {
                    // SAFETY: checked to be `half` contiguous f32, initialised by the caller's promise.
                    let factors = unsafe { row_of::<f32>(factors, 0, half) };
                    for (frequency, factor) in inv_freq.iter_mut().zip(factors) {
                        *frequency /= factor;
                    }
                }
                let scale = match *attention_factor {
                    0.0 => own,
                    factor => factor,
                };
                let fastest = inv_freq.iter().fold(0.0f32, |m, f| m.max(f.abs()));
                RotatorAngles::Frequencies {
                    inv_freq,
                    scale,
                    fastest,
                }
            }
        };
        Rotator {
            style: p.style,
            half,
            angles,
            inverse,
        }
    }

    /// Sines or cosines of a position: half the rotary dimension.
    pub fn half(&self) -> usize {
        self.half
    }

    /// Writes the cosines and sines of a position, [`Rotator::half`] of each. Positions outside a table must have been refused.
    /// Inside `Cpu::vectorize`.
    #[inline(always)]
    pub fn angles(&self, position: i64, cos: &mut [f32], sin: &mut [f32]) {
        match &self.angles {
            RotatorAngles::Frequencies {
                inv_freq,
                scale,
                fastest,
            } => {
                let position = position as f32;
                let angles = inv_freq.iter().map(|f| position * f);
                let out = cos.iter_mut().zip(sin.iter_mut());
                if (position * fastest).abs() <= math::MAX_ANGLE {
                    for (angle, (c, s)) in angles.zip(out) {
                        let (sine, cosine) = math::sin_cos(angle);
                        (*c, *s) = (cosine * scale, sine * scale);
                    }
                } else {
                    for (angle, (c, s)) in angles.zip(out) {
                        let (sine, cosine) = f64::from(angle).sin_cos();
                        (*c, *s) = (cosine as f32 * scale, sine as f32 * scale);
                    }
                }
            }
            RotatorAngles::Table {
                cos: cos_table,
                sin: sin_table,
            } => {
                // SAFETY: the position was checked to be a row of the tables, whose rows are `half` contiguous f32.
                unsafe {
                    cos.copy_from_slice(row_of::<f32>(cos_table, position as usize, self.half));
                    sin.copy_from_slice(row_of::<f32>(sin_table, position as usize, self.half));
                }
            }
        }
        if self.inverse {
            for s in sin {
                *s = -*s;
            }
        }
    }

    /// Rotates one head in place; components past the rotary dimension stay. Inside `Cpu::vectorize`.
    #[inline(always)]
    pub fn rotate(&self, head: &mut [f32], cos: &[f32], sin: &[f32]) {
        let head = &mut head[..2 * self.half];
        let turn = |a: f32, b: f32, c: f32, s: f32| (a.mul_add(c, -(b * s)), b.mul_add(c, a * s));
        match self.style {
            Style::HalfSplit => {
                let (first, second) = head.split_at_mut(self.half);
                let angles = cos.iter().zip(sin);
                for ((a, b), (c, s)) in first.iter_mut().zip(second).zip(angles) {
                    (*a, *b) = turn(*a, *b, *c, *s);
                }
            }
            Style::Interleaved => {
                for (pair, (c, s)) in head.chunks_exact_mut(2).zip(cos.iter().zip(sin)) {
                    (pair[0], pair[1]) = turn(pair[0], pair[1], *c, *s);
                }
            }
        }
    }
}

impl Run for Problem {
    fn run(&self, cpu: &Cpu, _: Scratch) -> Result<()> {
        forward(cpu, self)
    }
}

fn forward(cpu: &Cpu, p: &Problem) -> Result<()> {
    let positions = positions(p)?;
    // SAFETY: the tensors were checked, and are initialised memory by the caller's promise.
    let rotator = unsafe { Rotator::new(&p.rotation, p.inverse) };
    let pairs: Vec<(RawTensor, RawTensor)> = p.tensors.iter().flatten().copied().collect();
    let Some(dtype) = pairs.first().map(|(input, _)| input.dtype) else {
        return Ok(());
    };
    // Elementary operations per token: a sine and cosine cost a few dozen.
    let cost = pairs
        .iter()
        .map(|(input, _)| heads(input).0 * heads(input).1)
        .sum::<usize>()
        .saturating_mul(2)
        .saturating_add(32 * rotator.half());
    with_float!(dtype, T => {
        cpu.for_each_range(positions.len(), cost, |tokens| {
            let head_dim = heads(&pairs[0].0).1;
            let mut cos = vec![0.0f32; rotator.half()];
            let mut sin = vec![0.0f32; rotator.half()];
            let mut head = vec![0.0f32; head_dim];
            cpu.vectorize(#[inline(always)] || {
                for token in tokens.clone() {
                    rotator.angles(positions[token], &mut cos, &mut sin);
                    for (input, output) in &pairs {
                        // SAFETY: the token lies inside both tensors, and no other thread has it.
                        unsafe {
                            rotate_token::<T>(&rotator, input, output, token, &cos, &sin, &mut head);
                        }
                    }
                }
            });
        });
    });
    Ok(())
}

/// Heads and their dimension.
fn heads(t: &RawTensor) -> (usize, usize) {
    let rank = t.layout.rank();
    (t.layout.dim(rank - 2), t.layout.dim(rank - 1))
}

/// The position of every token, known to lie inside the table if there is one.
fn positions(p: &Problem) -> Result<Vec<i64>> {
    let Some((input, _)) = p.tensors.iter().flatten().next() else {
        return Ok(Vec::new());
    };
    let rank = input.layout.rank();
    let tokens = &input.layout.shape()[..rank - 2];
    match &p.positions {
        PositionSource::From(offset) => {
            let len = tokens.last().copied().unwrap_or(0);
            let count: usize = tokens.iter().product();
            // Validation has seen to it that the sum does not overflow.
            Ok((0..count).map(|i| offset + (i % len) as i64).collect())
        }
        PositionSource::PerToken(t) => {
            // SAFETY: the tensor was checked, and is initialised memory by the caller's promise.
            let positions = unsafe { integers(t) };
            if let Some(max) = p.rotation.max_positions() {
                let outside = |position: i64| !(0..max as i64).contains(&position);
                if let Some(i) = positions.iter().position(|&position| outside(position)) {
                    let problem = text!("has {} at index {i}, the table has {max}", positions[i]);
                    return Err(Error::invalid("rope", "positions", problem));
                }
            }
            Ok(positions)
        }
    }
}

/// # Safety
/// `token` is one of both tensors, which are initialised and of type T; no other thread works on it.
#[inline(always)]
unsafe fn rotate_token<T: Float>(
    rotator: &Rotator,
    input: &RawTensor,
    output: &RawTensor,
    token: usize,
    cos: &[f32],
    sin: &[f32],
    head: &mut [f32],
) {
    let (num_heads, head_dim) = heads(input);
    for h in 0..num_heads {
        // SAFETY: heads are rows of `head_dim` contiguous elements. The input is read before the output, which may be the same
        // memory, is borrowed.
        unsafe {
            let row = token * num_heads + h;
            T::load(row_of::<T>(input, row, head_dim), head);
            rotator.rotate(head, cos, sin);
            T::store(head, row_of_mut::<T>(output, row, head_dim));
        }
    }
}
