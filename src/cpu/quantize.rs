//! Quantisation on the CPU: rows in parallel. One scale for all takes passes of its own before that
//! of the codes.

use std::ops::Range;

use crate::cpu::float::{BLOCK, Float, blocks, with_float};
use crate::cpu::rows::part_of;
use crate::cpu::scratch::Floats;
use crate::cpu::{Cpu, Run};
use crate::dtype::{DType, E4m3};
use crate::error::Result;
use crate::problem::quantize::{Problem, Rule, Scope};
use crate::tensor::{RawTensor, Scratch};

/// Rows whose statistics a part of the scratch has.
const ROWS: usize = 64;

/// Neighbours whose magnitudes are added in f32.
const PIECE: usize = 4096;

/// Sums of a piece.
const LANES: usize = 32;

/// Codes of a block of the ternary dtype, and its bytes.
const CODES: usize = 128;
const BYTES: usize = CODES / 4;

impl Run for Problem {
    fn without_allocating(&self, _: &Cpu) -> usize {
        match self.scope {
            Scope::Tensor => self.floats_bytes(),
            Scope::Groups(_) => 0,
        }
    }

    fn run(&self, cpu: &Cpu, scratch: Scratch) -> Result<()> {
        match self.scope {
            Scope::Tensor => {
                let scale = self.scale_of_all(cpu, scratch)?;
                // SAFETY: the one element of the checked tensor.
                unsafe { self.scale.ptr.cast::<f32>().write(scale.scale) };
                self.encode(cpu, Some(scale));
            }
            Scope::Groups(_) => self.encode(cpu, None),
        }
        Ok(())
    }
}

/// What codes follow from.
#[derive(Clone, Copy)]
struct Scale {
    scale: f32,
    /// Where [`Rule::Threshold`] cuts.
    threshold: f32,
}

/// Magnitudes above some threshold.
#[derive(Clone, Copy, Default)]
struct Magnitudes {
    sum: f64,
    count: usize,
}

impl Magnitudes {
    fn mean(self) -> f32 {
        match self.count {
            0 => 0.0,
            count => (self.sum / count as f64) as f32,
        }
    }
}

/// The scale of [`Rule::Threshold`], given the mean of all and what is above the threshold.
fn scale_above(mean: f32, above: Magnitudes) -> f32 {
    match mean.is_finite() {
        true => above.mean(),
        false => mean,
    }
}

impl Problem {
    fn columns(&self) -> usize {
        self.x.layout.dim(self.x.layout.rank() - 1)
    }

    /// The greatest code.
    fn most(&self) -> f32 {
        match self.out.dtype {
            DType::Ternary => 1.0,
            DType::F8E4M3 => E4m3::MAX,
            _ => 127.0,
        }
    }

    fn parts(&self) -> usize {
        self.x.layout.num_rows().div_ceil(ROWS)
    }

    fn floats_bytes(&self) -> usize {
        Floats::bytes(self.parts(), 2 * ROWS)
    }

    /// The scale that all share.
    fn scale_of_all(&self, cpu: &Cpu, scratch: Scratch) -> Result<Scale> {
        let memory = Floats::in_or_new("quantize", scratch, (self.parts(), 2 * ROWS), 0)?;
        if self.rule == Rule::AbsMax {
            self.for_each_row(cpu, &memory, |row| {
                [self.greatest(cpu, row), 0.0] // the greatest alone
            });
            let most = self.rows_of(&memory).map(|[most, _]| most.to_bits());
            let scale = f32::from_bits(most.fold(0, u32::max)) / self.most();
            let threshold = 0.0;
            return Ok(Scale { scale, threshold });
        }
        let sum = |least: f32| {
            self.for_each_row(cpu, &memory, |row| {
                let found = self.magnitudes(cpu, row, least);
                [found.sum as f32, f32::from_bits(found.count as u32)]
            });
            let zero = Magnitudes::default();
            self.rows_of(&memory)
                .fold(zero, |all, [sum, count]| Magnitudes {
                    sum: all.sum + f64::from(sum),
                    count: all.count + count.to_bits() as usize,
                })
        };
        let mean = sum(-1.0).mean();
        let threshold = 0.7 * mean;
        let scale = match self.rule {
            Rule::Threshold => scale_above(mean, sum(threshold)),
            _ => mean,
        };
        Ok(Scale { scale, threshold })
    }

    /// Two numbers for each row.
    fn for_each_row(&self, cpu: &Cpu, memory: &Floats, of: impl Fn(usize) -> [f32; 2] + Sync) {
        let rows = self.x.layout.num_rows();
        let cost = ROWS.saturating_mul(self.columns());
        cpu.for_each_range(self.parts(), cost, |parts| {
            for part in parts {
                // SAFETY: a part is one thread's.
                let (numbers, _) = unsafe { memory.part(part) }.as_chunks_mut::<2>();
                let here = part * ROWS..rows.min((part + 1) * ROWS);
                for (numbers, row) in numbers.iter_mut().zip(here) {
                    *numbers = of(row);
                }
            }
        });
    }

    /// What [`Problem::for_each_row`] wrote, in the order of the rows.
    fn rows_of<'a>(&self, memory: &'a Floats) -> impl Iterator<Item = [f32; 2]> + 'a {
        let rows = self.x.layout.num_rows();
        (0..rows).map(|row| {
            // SAFETY: nobody writes meanwhile.
            let part = unsafe { memory.part(row / ROWS) };
            let at = 2 * (row % ROWS);
            [part[at], part[at + 1]]
        })
    }

    fn greatest(&self, cpu: &Cpu, row: usize) -> f32 {
        with_float!(self.x.dtype, T => cpu.vectorize(#[inline(always)] || {
            // SAFETY: a row of the checked tensor.
            greatest(unsafe { part_of::<T>(&self.x, row, 0..self.columns()) })
        }))
    }

    fn magnitudes(&self, cpu: &Cpu, row: usize, least: f32) -> Magnitudes {
        with_float!(self.x.dtype, T => cpu.vectorize(#[inline(always)] || {
            // SAFETY: a row of the checked tensor.
            magnitudes(unsafe { part_of::<T>(&self.x, row, 0..self.columns()) }, least)
        }))
    }

    /// Codes, sums, and the scales unless all share one.
    fn encode(&self, cpu: &Cpu, scale: Option<Scale>) {
        let (rows, columns) = (self.x.layout.num_rows(), self.columns());
        let groups = match self.scope {
            Scope::Tensor => 1,
            Scope::Groups(groups) => groups,
        };
        let len = columns / groups;
        cpu.for_each_range(rows, columns.saturating_mul(4), |range| {
            with_float!(self.x.dtype, T => cpu.vectorize(#[inline(always)] || {
                for group in range.start * groups..range.end * groups {
                    let start = group % groups * len;
                    let columns = start..start + len;
                    let row = group / groups;
                    // SAFETY: a part of a row of the checked tensor.
                    let x = unsafe { part_of::<T>(&self.x, row, columns.clone()) };
                    let of_group = scale.unwrap_or_else(#[inline(always)] || self.scale_of(x));
                    let sum = self.encode_group(x, row, columns, of_group);
                    // SAFETY: there is an element for each group, which no other thread has.
                    unsafe {
                        if scale.is_none() {
                            self.scale.ptr.cast::<f32>().add(group).write(of_group.scale);
                        }
                        if let Some(to) = &self.sum {
                            to.ptr.cast::<i32>().add(group).write(sum);
                        }
                    }
                }
            }));
        });
    }

    #[inline(always)]
    fn scale_of<T: Float>(&self, x: &[T]) -> Scale {
        let mean = match self.rule {
            Rule::AbsMax => 0.0,
            _ => magnitudes(x, -1.0).mean(),
        };
        let threshold = 0.7 * mean;
        let scale = match self.rule {
            Rule::AbsMax => greatest(x) / self.most(),
            Rule::AbsMean => mean,
            Rule::Threshold => scale_above(mean, magnitudes(x, threshold)),
        };
        Scale { scale, threshold }
    }

    /// Writes the codes of some columns, and gives their sum.
    #[inline(always)]
    fn encode_group<T: Float>(
        &self,
        x: &[T],
        row: usize,
        columns: Range<usize>,
        scale: Scale,
    ) -> i32 {
        const { assert!(BLOCK.is_multiple_of(CODES)) };
        let (mut wide, mut codes) = ([0.0f32; BLOCK], [0i8; BLOCK]);
        let mut sum = 0;
        for block in blocks(x.len()) {
            let wide = &mut wide[..block.len()];
            T::load(&x[block.clone()], wide);
            let start = columns.start + block.start;
            // SAFETY: a part of a row of the checked tensor, of whole blocks, that no other thread
            // has.
            let out = unsafe { bytes_of(&self.out, row, start..start + block.len()) };
            if self.out.dtype == DType::F8E4M3 {
                round_to_floats(wide, scale.scale, out);
                continue;
            }
            let codes = &mut codes[..block.len()];
            round(wide, scale, self.rule, self.most(), codes);
            sum += codes.iter().map(|code| i32::from(*code)).sum::<i32>();
            match self.out.dtype {
                DType::Ternary => pack(codes, out),
                _ => {
                    for (out, code) in out.iter_mut().zip(codes) {
                        *out = code.cast_unsigned();
                    }
                }
            }
        }
        sum
    }
}

/// Rounds a row to 8 bits as [`Rule::AbsMax`] does. Gives its scale and the sum of its codes.
#[inline(always)]
pub(crate) fn round_row<T: Float>(x: &[T], codes: &mut [i8]) -> (f32, i32) {
    const MOST: f32 = 127.0;
    let (scale, threshold) = (greatest(x) / MOST, 0.0);
    let mut wide = [0.0f32; BLOCK];
    let mut sum = 0;
    for block in blocks(x.len()) {
        let wide = &mut wide[..block.len()];
        T::load(&x[block.clone()], wide);
        let codes = &mut codes[block];
        round(wide, Scale { scale, threshold }, Rule::AbsMax, MOST, codes);
        sum += codes.iter().map(|code| i32::from(*code)).sum::<i32>();
    }
    (scale, sum)
}

/// The bytes of some columns of a row.
///
/// # Safety
/// `columns` are whole blocks of row `row` of the checked tensor, and nothing else accesses them.
#[inline(always)]
unsafe fn bytes_of<'a>(t: &RawTensor, row: usize, columns: Range<usize>) -> &'a mut [u8] {
    if columns.is_empty() {
        return &mut [];
    }
    let start = t.dtype.row_bytes(t.layout.row_offset(row) + columns.start);
    // SAFETY: the caller's promise; offsets of existing elements fit an isize (see Layout).
    unsafe { std::slice::from_raw_parts_mut(t.ptr.add(start), t.dtype.row_bytes(columns.len())) }
}

/// The greatest magnitude; NaN is above all.
#[inline(always)]
fn greatest<T: Float>(x: &[T]) -> f32 {
    let mut wide = [0.0f32; BLOCK];
    let mut most = 0;
    for block in blocks(x.len()) {
        let wide = &mut wide[..block.len()];
        T::load(&x[block], wide);
        // As integers, magnitudes are in the order of the numbers.
        let magnitudes = wide.iter().map(|x| x.to_bits() & 0x7fff_ffff);
        most = magnitudes.fold(most, u32::max);
    }
    f32::from_bits(most)
}

/// The sum and the number of the magnitudes above `least`, in the order that the operation's
/// documentation gives.
#[inline(always)]
fn magnitudes<T: Float>(x: &[T], least: f32) -> Magnitudes {
    const { assert!(PIECE.is_multiple_of(BLOCK) && BLOCK.is_multiple_of(LANES)) };
    let mut wide = [0.0f32; BLOCK];
    let mut found = Magnitudes::default();
    for piece in x.chunks(PIECE) {
        let (mut sums, mut counts) = ([0.0f32; LANES], [0u32; LANES]);
        for block in blocks(piece.len()) {
            // Zeros past the end, which add nothing and are above no threshold.
            let len = block.len().next_multiple_of(LANES);
            let wide = &mut wide[..len];
            wide[block.len()..].fill(0.0);
            T::load(&piece[block.clone()], &mut wide[..block.len()]);
            for lanes in wide.as_chunks::<LANES>().0 {
                for ((sum, count), x) in sums.iter_mut().zip(&mut counts).zip(lanes) {
                    // NaN shows in the sum.
                    let taken = x.abs() > least || x.is_nan();
                    *sum += if taken { x.abs() } else { 0.0 };
                    *count += u32::from(taken);
                }
            }
        }
        let mut lanes = LANES;
        while lanes > 1 {
            lanes /= 2;
            for lane in 0..lanes {
                sums[lane] += sums[lane + lanes];
            }
        }
        found.sum += f64::from(sums[0]);
        found.count += match least < 0.0 {
            true => piece.len(),
            false => counts.iter().sum::<u32>() as usize,
        };
    }
    found
}

/// The codes of some values.
#[inline(always)]
fn round(x: &[f32], scale: Scale, rule: Rule, most: f32, codes: &mut [i8]) {
    let Scale { scale, threshold } = scale;
    if !scale.is_finite() || scale == 0.0 {
        codes.fill(0);
        return;
    }
    for (code, x) in codes.iter_mut().zip(x) {
        *code = match rule {
            Rule::Threshold => i8::from(*x > threshold) - i8::from(*x < -threshold),
            _ => (x / scale).round_ties_even().clamp(-most, most) as i8,
        };
    }
}

/// The codes of some values in floats of 8 bits.
#[inline(always)]
fn round_to_floats(x: &mut [f32], scale: f32, codes: &mut [u8]) {
    if !scale.is_finite() || scale == 0.0 {
        codes.fill(0);
        return;
    }
    for x in x.iter_mut() {
        *x /= scale;
    }
    // SAFETY: a code is its byte.
    let codes = unsafe { std::slice::from_raw_parts_mut(codes.as_mut_ptr().cast(), codes.len()) };
    E4m3::store(x, codes);
}

/// Packs whole blocks of codes.
#[inline(always)]
fn pack(codes: &[i8], out: &mut [u8]) {
    let blocks = codes.as_chunks::<CODES>().0.iter();
    for (codes, out) in blocks.zip(out.as_chunks_mut::<BYTES>().0) {
        for (p, byte) in out.iter_mut().enumerate() {
            let code = |i: usize| (codes[p + BYTES * i] + 1).cast_unsigned();
            *byte = code(0) | code(1) << 2 | code(2) << 4 | code(3) << 6;
        }
    }
}
