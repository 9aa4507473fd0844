//! RoPE on the CPU: tokens in parallel; each token's sines and cosines are computed once and serve all of its heads.

use std::ops::Range;

use crate::cpu::float::{Float, convert, with_float};
use crate::cpu::math;
use crate::cpu::rows::{Integers, row_of};
use crate::cpu::{Cpu, Run};
use crate::error::{Error, Result, text};
use crate::problem::rope::{Angles, PositionSource, Problem, Rotation, Style, scaled_frequencies};
use crate::tensor::{RawTensor, Scratch};

/// Rotates heads: what RoPE and a KV cache that rotates keys as it stores them have in common.
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

/// Pairs of components that are turned at a time: their angles and components stay on the stack.
const PAIRS: usize = 128;

/// What a thread turns heads with: the cosines and sines of a part's pairs, and room for the pairs.
pub(crate) struct Turning {
    cos: [f32; PAIRS],
    sin: [f32; PAIRS],
    pairs: [f32; 2 * PAIRS],
}

impl Default for Turning {
    fn default() -> Self {
        Turning {
            cos: [0.0; PAIRS],
            sin: [0.0; PAIRS],
            pairs: [0.0; 2 * PAIRS],
        }
    }
}

/// Components of a head that follow each other, and where they lie in scratch memory.
#[derive(Clone, Copy)]
pub(crate) struct Piece {
    start: usize,
    at: usize,
    len: usize,
}

impl Piece {
    /// Where they lie in the head.
    #[inline(always)]
    pub fn columns(&self) -> Range<usize> {
        self.start..self.start + self.len
    }

    /// What was loaded of them.
    #[inline(always)]
    pub fn of_mut<'s>(&self, scratch: &'s mut Turning) -> &'s mut [f32] {
        &mut scratch.pairs[self.at..self.at + self.len]
    }
}

impl Rotator {
    /// Prepares a rotation: computes its frequencies once.
    ///
    /// # Safety
    /// The tensors of `p` are initialised memory for as long as the rotator is used.
    pub unsafe fn new(op: &'static str, p: &Rotation, inverse: bool) -> Result<Rotator> {
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
                let mut inv_freq = Vec::new();
                inv_freq
                    .try_reserve_exact(half)
                    .map_err(|_| Error::out_of_host_memory(op, half.saturating_mul(4)))?;
                inv_freq.resize(half, 0.0);
                let own = scaled_frequencies(*theta, *scaling, &mut inv_freq);
                if let Some(factors) = freq_factors {
                    // SAFETY: checked to be `half` contiguous f32, which are initialised as the
                    // caller has promised.
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
        Ok(Rotator {
            style: p.style,
            half,
            angles,
            inverse,
        })
    }

    /// Pairs of components that turn.
    pub fn half(&self) -> usize {
        self.half
    }

    /// The pairs that turn, a part at a time.
    #[inline(always)]
    pub fn parts(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let half = self.half;
        (0..half)
            .step_by(PAIRS)
            .map(move |start| start..half.min(start + PAIRS))
    }

    /// Computes the cosines and sines of a part's pairs at a position. Positions outside a table
    /// must have been refused. Inside `Cpu::vectorize`.
    #[inline(always)]
    pub fn angles(&self, position: i64, part: &Range<usize>, scratch: &mut Turning) {
        let Turning { cos, sin, .. } = scratch;
        let (cos, sin) = (&mut cos[..part.len()], &mut sin[..part.len()]);
        match &self.angles {
            RotatorAngles::Frequencies {
                inv_freq,
                scale,
                fastest,
            } => {
                let position = position as f32;
                let angles = inv_freq[part.clone()].iter().map(|f| position * f);
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
                // SAFETY: the position was checked to be a row of the tables, whose rows are `half`
                // contiguous f32.
                let [from_cos, from_sin] = [cos_table, sin_table]
                    .map(|table| unsafe { row_of::<f32>(table, position as usize, self.half) });
                cos.copy_from_slice(&from_cos[part.clone()]);
                sin.copy_from_slice(&from_sin[part.clone()]);
            }
        }
        if self.inverse {
            for s in sin {
                *s = -*s;
            }
        }
    }

    /// Turns a part's pairs of one head on their way from `from` to `to`, which may be the same
    /// head, by the part's angles, which were computed last. Inside `Cpu::vectorize`.
    ///
    /// # Safety
    /// Both are heads of at least the rotary dimension, readable and writable; unless they are the
    /// same, they do not overlap, and nothing else accesses `to`.
    #[inline(always)]
    pub unsafe fn turn<S: Float, D: Float>(
        &self,
        from: *const S,
        to: *mut D,
        part: &Range<usize>,
        scratch: &mut Turning,
    ) {
        // SAFETY: the caller's promise; all of the part is read before any of it is written.
        unsafe {
            self.load(from, part, scratch);
            self.turn_loaded(part, scratch);
            self.store(to, part, scratch);
        }
    }

    /// Where the components of a part's pairs lie in a head, and where in the scratch memory: in two
    /// pieces, of which the second may be empty.
    #[inline(always)]
    pub fn pieces(&self, part: &Range<usize>) -> [Piece; 2] {
        let n = part.len();
        match self.style {
            Style::HalfSplit => [(part.start, 0), (self.half + part.start, PAIRS)]
                .map(|(start, at)| Piece { start, at, len: n }),
            Style::Interleaved => [(2 * n, 0), (0, 2 * PAIRS)].map(|(len, at)| Piece {
                start: 2 * part.start,
                at,
                len,
            }),
        }
    }

    /// Loads a part's pairs of a head. Inside `Cpu::vectorize`.
    ///
    /// # Safety
    /// It is a head of at least the rotary dimension, readable.
    #[inline(always)]
    pub unsafe fn load<S: Float>(
        &self,
        from: *const S,
        part: &Range<usize>,
        scratch: &mut Turning,
    ) {
        for piece in self.pieces(part) {
            // SAFETY: the part's pairs lie inside the head.
            let from = unsafe { std::slice::from_raw_parts(from.add(piece.start), piece.len) };
            S::load(from, piece.of_mut(scratch));
        }
    }

    /// Turns a part's pairs, which were loaded, by its angles. Inside `Cpu::vectorize`.
    #[inline(always)]
    pub fn turn_loaded(&self, part: &Range<usize>, scratch: &mut Turning) {
        let n = part.len();
        let Turning { cos, sin, pairs } = scratch;
        let turn = |a: f32, b: f32, c: f32, s: f32| (a.mul_add(c, -(b * s)), b.mul_add(c, a * s));
        let angles = cos[..n].iter().zip(&sin[..n]);
        match self.style {
            Style::HalfSplit => {
                let (first, second) = pairs.split_at_mut(PAIRS);
                let both = first[..n].iter_mut().zip(&mut second[..n]);
                for ((a, b), (c, s)) in both.zip(angles) {
                    (*a, *b) = turn(*a, *b, *c, *s);
                }
            }
            Style::Interleaved => {
                for (pair, (c, s)) in pairs[..2 * n].chunks_exact_mut(2).zip(angles) {
                    (pair[0], pair[1]) = turn(pair[0], pair[1], *c, *s);
                }
            }
        }
    }

    /// Stores a part's pairs to a head. Inside `Cpu::vectorize`.
    ///
    /// # Safety
    /// It is a head of at least the rotary dimension, writable, and nothing else accesses it.
    #[inline(always)]
    pub unsafe fn store<D: Float>(&self, to: *mut D, part: &Range<usize>, scratch: &mut Turning) {
        for piece in self.pieces(part) {
            // SAFETY: the part's pairs lie inside the head.
            let to = unsafe { std::slice::from_raw_parts_mut(to.add(piece.start), piece.len) };
            D::store(piece.of_mut(scratch), to);
        }
    }

    /// Copies the components of a head that do not turn. Inside `Cpu::vectorize`.
    ///
    /// # Safety
    /// As [`Rotator::turn`], of heads of `head_dim`.
    #[inline(always)]
    pub unsafe fn pass<S: Float, D: Float>(&self, from: *const S, to: *mut D, head_dim: usize) {
        let turned = 2 * self.half;
        if head_dim == turned || from.cast::<u8>() == to.cast_const().cast::<u8>() {
            return;
        }
        // SAFETY: the rest of two heads that are not the same, and so do not overlap.
        unsafe {
            let rest = head_dim - turned;
            let from = std::slice::from_raw_parts(from.add(turned), rest);
            convert(from, std::slice::from_raw_parts_mut(to.add(turned), rest));
        }
    }
}

impl Run for Problem {
    fn probe(&self, _: &Cpu) -> Result<()> {
        let mut inputs = self.tensors.iter().flatten().map(|(input, _)| input);
        match inputs.any(|input| !input.layout.is_empty()) {
            true => Places::new("rope", &self.positions, &self.rotation, 1).map(drop),
            false => Ok(()),
        }
    }

    fn run(&self, cpu: &Cpu, _: Scratch) -> Result<()> {
        forward(cpu, self)
    }
}

/// Where tokens stand.
pub(crate) struct Places<'a> {
    source: &'a PositionSource,
    listed: Option<Integers<'a>>,
    /// Tokens of a sequence.
    len: usize,
}

impl<'a> Places<'a> {
    /// Of tokens of which a sequence has `len`. Those that are listed have to be in the table, where
    /// there is one.
    pub fn new(
        op: &'static str,
        source: &'a PositionSource,
        rotation: &Rotation,
        len: usize,
    ) -> Result<Self> {
        let listed = match source {
            PositionSource::From(_) => None,
            PositionSource::PerToken(t) => {
                // SAFETY: the tensor was checked, and whoever made it has promised that it is
                // initialised memory which nobody writes during the call.
                let positions = unsafe { Integers::new(t) };
                let max = rotation.max_positions();
                let outside = max.and_then(|max| Some((max, positions.find_outside(max)?)));
                if let Some((max, (i, position))) = outside {
                    let problem = text!("has {position} at index {i}, the table has {max}");
                    return Err(Error::invalid(op, "positions", problem));
                }
                Some(positions)
            }
        };
        Ok(Places {
            source,
            listed,
            len,
        })
    }

    /// Of token `token` of all sequences.
    #[inline(always)]
    pub fn of(&self, token: usize) -> i64 {
        match (self.source, self.listed) {
            // Validation has seen to it that the sum does not overflow.
            (PositionSource::From(offset), _) => offset + (token % self.len) as i64,
            (_, Some(positions)) => positions.get(token),
            (_, None) => 0,
        }
    }
}

fn forward(cpu: &Cpu, p: &Problem) -> Result<()> {
    let mut pairs = p.tensors.iter().flatten();
    let Some((first, _)) = pairs.find(|(input, _)| !input.layout.is_empty()) else {
        return Ok(());
    };
    let tokens = &first.layout.shape()[..first.layout.rank() - 2];
    let len = tokens.last().copied().unwrap_or(0);
    let num_tokens: usize = tokens.iter().product();
    let places = Places::new("rope", &p.positions, &p.rotation, len)?;
    // SAFETY: the tables were checked, and are initialised as whoever made them has promised; `p`
    // outlives the rotator.
    let rotator = unsafe { Rotator::new("rope", &p.rotation, p.inverse)? };
    // Elementary operations per token: a sine and cosine cost a few dozen.
    let cost = (p.tensors.iter().flatten())
        .map(|(input, _)| heads(input).0 * heads(input).1)
        .sum::<usize>()
        .saturating_mul(2)
        .saturating_add(32 * rotator.half());
    with_float!(first.dtype, T => {
        cpu.for_each_range(num_tokens, cost, |tokens| {
            let mut scratch = Turning::default();
            cpu.vectorize(#[inline(always)] || {
                for token in tokens.clone() {
                    let position = places.of(token);
                    // SAFETY: the token lies inside the tensors, and no other thread has it.
                    unsafe { rotate_token::<T>(&rotator, p, token, position, &mut scratch) };
                }
            });
        });
    });
    Ok(())
}

/// Heads and their dimension.
pub(crate) fn heads(t: &RawTensor) -> (usize, usize) {
    let rank = t.layout.rank();
    (t.layout.dim(rank - 2), t.layout.dim(rank - 1))
}

/// Where the heads of a token begin in a tensor of elements T.
#[inline(always)]
pub(crate) fn heads_of<T>(t: &RawTensor, token: usize) -> impl Fn(usize) -> *mut T + use<T> {
    let start = t.layout.row_offset(token * heads(t).0);
    let stride = t.layout.stride(t.layout.rank() - 2);
    // Offsets of existing rows fit an isize (see Layout).
    let first = t.ptr.cast::<T>();
    move |head: usize| first.wrapping_add(start + head * stride)
}

/// # Safety
/// `token` is one of every tensor, all of type T and initialised; no other thread works on it.
#[inline(always)]
unsafe fn rotate_token<T: Float>(
    rotator: &Rotator,
    p: &Problem,
    token: usize,
    position: i64,
    scratch: &mut Turning,
) {
    let rows = |t: &RawTensor| heads_of::<T>(t, token);
    let tensors = || p.tensors.iter().flatten();
    for part in rotator.parts() {
        rotator.angles(position, &part, scratch);
        for (input, output) in tensors() {
            let (from, to) = (rows(input), rows(output));
            for head in 0..heads(input).0 {
                // SAFETY: heads are rows of contiguous elements, at least as many as turn. The
                // output was checked to be its input, or apart from it.
                unsafe { rotator.turn(from(head).cast_const(), to(head), &part, scratch) };
            }
        }
    }
    for (input, output) in tensors() {
        let ((num_heads, head_dim), from, to) = (heads(input), rows(input), rows(output));
        for head in 0..num_heads {
            // SAFETY: as above.
            unsafe { rotator.pass(from(head).cast_const(), to(head), head_dim) };
        }
    }
}
