//! Rows of activations, rounded to 16 bits, or to 8: 32 neighbours share a scale.

use std::ops::Range;

use super::form::TOGETHER;
use super::{Bits, CHUNK, Form};
use crate::cpu::Cpu;
use crate::cpu::float::{Float, with_float};
use crate::cpu::rows::part_of;
use crate::cpu::scratch::Floats;
use crate::error::Result;
use crate::tensor::{RawTensor, Scratch};

/// Neighbours that share a scale.
pub(super) const SHARED: usize = 32;

/// Where a row's codes begin, in bytes: at cache lines.
const ALIGNMENT: usize = 64;

/// Codes, and for each group of the weights that multiply them a scale and the sum that an offset
/// counts for.
#[derive(Clone, Copy)]
pub(crate) struct Row<'a> {
    pub codes: &'a [i16],
    pub scales: &'a [f32],
    /// Scale times sum of codes.
    pub sums: &'a [f32],
}

impl<'a> Row<'a> {
    pub const EMPTY: Row<'static> = Row {
        codes: &[],
        scales: &[],
        sums: &[],
    };

    /// What is multiplied by a chunk of weights; `columns` begin at a multiple of it.
    #[inline(always)]
    pub fn part(&self, columns: Range<usize>, group: usize) -> Row<'a> {
        let groups = columns.start / group..columns.end / group;
        Row {
            codes: &self.codes[columns],
            scales: &self.scales[groups.clone()],
            sums: &self.sums[groups],
        }
    }
}

/// As [`Row`], with the bytes of codes in any [`Form`].
#[derive(Clone, Copy)]
pub(crate) struct Codes<'a> {
    pub bytes: &'a [i8],
    pub scales: &'a [f32],
    pub sums: &'a [f32],
}

impl Codes<'_> {
    pub const EMPTY: Codes<'static> = Codes {
        bytes: &[],
        scales: &[],
        sums: &[],
    };
}

/// All rows of a tensor.
pub(crate) struct Activations {
    memory: Floats,
    sizes: Sizes,
}

/// Floats of a row: its codes, two or four of which are as long as one; its scales; its sums.
#[derive(Clone, Copy)]
struct Sizes {
    depth: usize,
    group: usize,
    form: Form,
    rows: usize,
}

impl Sizes {
    fn new(x: &RawTensor, (group, form): (usize, Form)) -> Sizes {
        Sizes {
            depth: x.layout.dim(x.layout.rank() - 1),
            group,
            form,
            rows: x.layout.num_rows(),
        }
    }

    fn codes(&self) -> usize {
        self.form.lengths(self.depth, self.group).0 / self.form.bits().together()
    }

    fn factors(&self) -> usize {
        self.form.lengths(self.depth, self.group).1
    }

    fn row(&self) -> usize {
        self.codes() + 2 * self.factors() + ALIGNMENT / size_of::<f32>()
    }

    /// Where the codes of a row begin.
    fn start(&self, row: &[f32]) -> usize {
        let start = row.as_ptr().align_offset(ALIGNMENT);
        start.min(ALIGNMENT / size_of::<f32>())
    }

    /// Codes, scales and sums.
    fn parts<'a>(&self, row: &'a [f32]) -> [&'a [f32]; 3] {
        let (codes, factors) = row[self.start(row)..].split_at(self.codes());
        let (scales, sums) = factors.split_at(self.factors());
        [codes, scales, &sums[..self.factors()]]
    }

    /// As [`Sizes::parts`].
    fn parts_mut<'a>(&self, row: &'a mut [f32]) -> [&'a mut [f32]; 3] {
        let start = self.start(row);
        let (codes, factors) = row[start..].split_at_mut(self.codes());
        let (scales, sums) = factors.split_at_mut(self.factors());
        [codes, scales, &mut sums[..self.factors()]]
    }
}

impl Activations {
    /// Bytes of a workspace with which [`Activations::new`] allocates nothing.
    pub fn bytes(x: &RawTensor, shape: (usize, Form)) -> usize {
        let sizes = Sizes::new(x, shape);
        Floats::bytes(sizes.rows, sizes.row())
    }

    /// Rounds every row of `x`, for weights in groups of so many, in a form.
    ///
    /// # Errors
    /// There is no memory.
    pub fn new(
        cpu: &Cpu,
        op: &'static str,
        x: &RawTensor,
        shape: (usize, Form),
        scratch: Scratch,
    ) -> Result<Activations> {
        let sizes = Sizes::new(x, shape);
        let memory = Floats::in_or_new(op, scratch, (sizes.rows, sizes.row()), 0)?;
        cpu.for_each_range(sizes.rows, sizes.depth, |rows| {
            with_float!(x.dtype, X => cpu.vectorize(#[inline(always)] || {
                for row in rows.clone() {
                    // SAFETY: a row is one thread's.
                    quantize::<X>(x, row, sizes, unsafe { memory.part(row) });
                }
            }));
        });
        Ok(Activations { memory, sizes })
    }

    /// Of [`Form::Words`].
    pub fn row(&self, row: usize) -> Row<'_> {
        debug_assert_eq!(self.sizes.form, Form::Words);
        // SAFETY: nobody writes once they are made.
        let [codes, scales, sums] = self.sizes.parts(unsafe { self.memory.part(row) });
        // SAFETY: the bytes of the floats, which are initialised and may be of any bits.
        let codes = unsafe { std::slice::from_raw_parts(codes.as_ptr().cast(), 2 * codes.len()) };
        Row {
            codes,
            scales,
            sums,
        }
    }

    /// Of any form.
    pub fn codes(&self, row: usize) -> Codes<'_> {
        // SAFETY: nobody writes once they are made.
        let [codes, scales, sums] = self.sizes.parts(unsafe { self.memory.part(row) });
        // SAFETY: the bytes of the floats, which are initialised and may be of any bits.
        let bytes = unsafe { std::slice::from_raw_parts(codes.as_ptr().cast(), 4 * codes.len()) };
        Codes {
            bytes,
            scales,
            sums,
        }
    }
}

/// Rounds a row of `x` into its floats.
#[inline(always)]
fn quantize<X: Float>(x: &RawTensor, row: usize, sizes: Sizes, out: &mut [f32]) {
    let [out, scales, sums] = sizes.parts_mut(out);
    // What is behind the last.
    scales.fill(0.0);
    sums.fill(0.0);
    if !sizes.depth.is_multiple_of(TOGETHER) {
        out.fill(0.0);
    }
    let mut wide = [0.0f32; CHUNK];
    for start in (0..sizes.depth).step_by(CHUNK) {
        let columns = start..sizes.depth.min(start + CHUNK);
        let wide = &mut wide[..columns.len()];
        // SAFETY: a row of the checked tensor.
        X::load(unsafe { part_of::<X>(x, row, columns.clone()) }, wide);
        for (wide, at) in wide.as_chunks().0.iter().zip(columns.step_by(SHARED)) {
            let mut codes = [0; SHARED];
            let scale = round_together(wide, sizes.form.bits(), &mut codes);
            match sizes.form {
                Form::Split => {
                    let at = at / SHARED * 4;
                    scales[at..at + 4].fill(scale);
                    // Codes that are 16 apart have the same sum: they are added as vectors, then four neighbours.
                    let mut pairs = [0i32; SHARED / 2];
                    for (i, pair) in pairs.iter_mut().enumerate() {
                        *pair = i32::from(codes[i]) + i32::from(codes[i + 16]);
                    }
                    for (sum, pairs) in sums[at..at + 4].iter_mut().zip(pairs.as_chunks().0) {
                        let [a, b, c, d]: [i32; 4] = *pairs;
                        *sum = scale * ((a + b) + (c + d)) as f32;
                    }
                }
                Form::Eights | Form::Fourths => {
                    let at = at / SHARED * 2;
                    scales[at..at + 2].fill(scale);
                    sums[at] = scale * sum_of(&codes);
                }
                _ => {
                    let of_groups = codes.chunks_exact(sizes.group).zip(at / sizes.group..);
                    for (codes, group) in of_groups {
                        let group = sizes.form.place_of_group(group, sizes.group);
                        (scales[group], sums[group]) = (scale, scale * sum_of(codes));
                    }
                }
            }
            store(&codes, sizes.form, at, out);
        }
    }
}

/// The sum of codes, which is exact.
#[inline(always)]
fn sum_of(codes: &[i16]) -> f32 {
    codes.iter().map(|code| i32::from(*code)).sum::<i32>() as f32
}

/// Writes the codes from the `at`th of a row.
#[inline(always)]
fn store(codes: &[i16; SHARED], form: Form, at: usize, out: &mut [f32]) {
    // SAFETY: the bytes of the floats, which any integers may be.
    let out: &mut [u8] =
        unsafe { std::slice::from_raw_parts_mut(out.as_mut_ptr().cast(), 4 * out.len()) };
    // Bytes are put together in arrays of their own and then copied: the compiler does not make vectors of stores to
    // slices that may overlap.
    if form == Form::Words {
        let mut bytes = [[0; 2]; SHARED];
        for (bytes, code) in bytes.iter_mut().zip(codes) {
            *bytes = code.to_ne_bytes();
        }
        out[2 * at..][..2 * SHARED].copy_from_slice(bytes.as_flattened());
        return;
    }
    if form == Form::Pairs {
        for v in 0..4 {
            let (first, at) = (v / 2 * 16 + v % 2, form.place(at) + 16 * v);
            let mut bytes = [[0; 2]; 8];
            for (i, bytes) in bytes.iter_mut().enumerate() {
                *bytes = codes[first + 2 * i].to_ne_bytes();
            }
            out[2 * at..][..16].copy_from_slice(bytes.as_flattened());
        }
        return;
    }
    if form == Form::Bytes {
        for (i, codes) in codes.as_chunks::<16>().0.iter().enumerate() {
            let at = form.place(at + 16 * i);
            out[at..at + 16].copy_from_slice(&codes.map(|code| code as u8));
        }
        return;
    }
    let (high, low) = out.split_at_mut(out.len() / 2);
    let planes = planes(codes);
    for (out, plane) in [high, low].into_iter().zip(planes) {
        match form {
            Form::Eights | Form::Fourths => {
                for (i, eight) in by_eight(plane, form).into_iter().enumerate() {
                    out[form.place(at) + 64 * i..][..8].copy_from_slice(&eight);
                }
            }
            _ => {
                for (i, sixteen) in plane.as_chunks::<16>().0.iter().enumerate() {
                    let at = form.place(at + 16 * i);
                    out[at..at + 16].copy_from_slice(sixteen);
                }
            }
        }
    }
}

/// The high bytes of codes, and the low.
#[inline(always)]
fn planes(codes: &[i16; SHARED]) -> [[u8; SHARED]; 2] {
    let (mut high, mut low) = ([0; SHARED], [0; SHARED]);
    for (i, code) in codes.iter().enumerate() {
        // The low byte has a sign too; what it takes away is in the high one.
        high[i] = (code.wrapping_add(128) >> 8) as u8;
        low[i] = *code as u8;
    }
    [high, low]
}

/// The bytes of a group that lie together.
#[inline(always)]
fn by_eight(plane: [u8; SHARED], form: Form) -> [[u8; 8]; 4] {
    let mut eights = [[0; 8]; 4];
    for (i, eight) in eights.iter_mut().enumerate() {
        for (j, byte) in eight.iter_mut().enumerate() {
            *byte = match form {
                Form::Fourths => plane[4 * j + i],
                _ => plane[8 * i + j],
            };
        }
    }
    eights
}

/// The nearest codes of so many bits times a scale, which is given. It is not finite if a value is not.
#[inline(always)]
pub(super) fn round_together(values: &[f32; SHARED], bits: Bits, codes: &mut [i16; SHARED]) -> f32 {
    let limit = f32::from(bits.most());
    // As integers, magnitudes are in the order of the numbers, and NaN is above them.
    let magnitude = values.iter().map(|v| v.to_bits() & 0x7fff_ffff);
    let most = f32::from_bits(magnitude.fold(0, u32::max));
    let scale = most / limit;
    // Adding this to a number as small as a code rounds it to an integer, which the last bits of the sum then hold. The
    // compiler makes vectors of that, and does not of `as`, which checks for each number whether it fits.
    const SHIFT: f32 = 1.5 * (1 << 23) as f32;
    for (code, value) in codes.iter_mut().zip(values) {
        // Without a scale that is a number there is no code, and any will do; 0 / 0 is a NaN whose last bits are zeros.
        let shifted = (value / scale).clamp(-limit, limit) + SHIFT;
        *code = shifted.to_bits().wrapping_sub(SHIFT.to_bits()) as i16;
    }
    scale
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All codes of a row, to its end.
    #[test]
    fn codes_lie_where_their_form_says() {
        for form in [
            Form::Words,
            Form::Planes,
            Form::Split,
            Form::Eights,
            Form::Fourths,
            Form::Pairs,
            Form::Bytes,
        ] {
            let (depth, _) = form.lengths(2 * TOGETHER, 32);
            let all: Vec<i16> = (0..depth as i16)
                .map(|i| match form {
                    Form::Bytes => i * 37 % 255 - 127,
                    _ => 50 * i - 12_000,
                })
                .collect();
            let mut out = vec![0.0; form.bytes(depth) / 4];
            for (i, codes) in all.as_chunks().0.iter().enumerate() {
                store(codes, form, SHARED * i, &mut out);
            }
            let bytes: Vec<u8> = out.iter().flat_map(|pair| pair.to_ne_bytes()).collect();
            for (i, code) in all.iter().enumerate() {
                let at = form.place(i);
                let got = match form {
                    Form::Words | Form::Pairs => {
                        i16::from_ne_bytes([bytes[2 * at], bytes[2 * at + 1]])
                    }
                    Form::Bytes => i16::from(bytes[at].cast_signed()),
                    _ => {
                        let [high, low] = [at, depth + at].map(|at| bytes[at].cast_signed());
                        256 * i16::from(high) + i16::from(low)
                    }
                };
                assert_eq!(got, *code, "{form:?} {i}");
            }
        }
    }

    #[test]
    fn values_are_off_by_half_a_step() {
        for bits in [Bits::Sixteen, Bits::Eight] {
            let mut codes = [0; SHARED];
            for factor in [1.0, 1e-30, 3e36] {
                let values: [f32; SHARED] =
                    std::array::from_fn(|i| factor * ((i * 37 % 64) as f32 - 31.5));
                let scale = round_together(&values, bits, &mut codes);
                assert_eq!(codes.iter().map(|c| c.abs()).max(), Some(bits.most()));
                for (value, code) in values.iter().zip(&codes) {
                    let error = f64::from(*value) - f64::from(scale) * f64::from(*code);
                    let most = 0.51 * f64::from(scale);
                    assert!(error.abs() <= most, "{bits:?} {factor}: {error}");
                }
            }
            assert_eq!(round_together(&[0.0; SHARED], bits, &mut codes), 0.0);
            assert_eq!(codes, [0; SHARED]);
            for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut values = [1.0; SHARED];
                values[7] = odd;
                assert!(!round_together(&values, bits, &mut codes).is_finite());
            }
        }
    }
}
