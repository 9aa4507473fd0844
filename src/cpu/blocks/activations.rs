//! Rows of activations, rounded to 16 bits: 32 neighbours share a scale.

use std::ops::Range;

use super::CHUNK;
use crate::cpu::Cpu;
use crate::cpu::float::{Float, with_float};
use crate::cpu::rows::part_of;
use crate::cpu::scratch::Floats;
use crate::error::Result;
use crate::tensor::{RawTensor, Scratch};

/// Neighbours that share a scale.
const SHARED: usize = 32;

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

/// All rows of a tensor.
pub(crate) struct Activations {
    memory: Floats,
    sizes: Sizes,
}

/// Floats of a row: its codes, two of which are as long as one; its scales; its sums.
#[derive(Clone, Copy)]
struct Sizes {
    depth: usize,
    group: usize,
    rows: usize,
}

impl Sizes {
    fn new(x: &RawTensor, group: usize) -> Sizes {
        Sizes {
            depth: x.layout.dim(x.layout.rank() - 1),
            group,
            rows: x.layout.num_rows(),
        }
    }

    fn codes(&self) -> usize {
        self.depth / 2
    }

    fn factors(&self) -> usize {
        self.depth / self.group
    }

    fn row(&self) -> usize {
        self.codes() + 2 * self.factors()
    }

    fn of_floats<'a>(&self, row: &'a [f32]) -> Row<'a> {
        let (codes, factors) = row.split_at(self.codes());
        let (scales, sums) = factors.split_at(self.factors());
        // SAFETY: the bytes of the floats, which are initialised and may be of any bits.
        let codes = unsafe { std::slice::from_raw_parts(codes.as_ptr().cast(), 2 * codes.len()) };
        Row {
            codes,
            scales,
            sums,
        }
    }
}

impl Activations {
    /// Bytes of a workspace with which [`Activations::new`] allocates nothing.
    pub fn bytes(x: &RawTensor, group: usize) -> usize {
        let sizes = Sizes::new(x, group);
        Floats::bytes(sizes.rows, sizes.row())
    }

    /// Rounds every row of `x`, for weights in groups of `group`.
    ///
    /// # Errors
    /// There is no memory.
    pub fn new(
        cpu: &Cpu,
        op: &'static str,
        x: &RawTensor,
        group: usize,
        scratch: Scratch,
    ) -> Result<Activations> {
        let sizes = Sizes::new(x, group);
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

    pub fn row(&self, row: usize) -> Row<'_> {
        // SAFETY: nobody writes once they are made.
        self.sizes.of_floats(unsafe { self.memory.part(row) })
    }
}

/// Rounds a row of `x` into its floats.
#[inline(always)]
fn quantize<X: Float>(x: &RawTensor, row: usize, sizes: Sizes, out: &mut [f32]) {
    let (codes, factors) = out.split_at_mut(sizes.codes());
    let (scales, sums) = factors.split_at_mut(sizes.factors());
    // SAFETY: the bytes of the floats, which any integers may be.
    let codes: &mut [i16] =
        unsafe { std::slice::from_raw_parts_mut(codes.as_mut_ptr().cast(), 2 * codes.len()) };
    let per_scale = SHARED / sizes.group;
    let mut wide = [0.0f32; CHUNK];
    for start in (0..sizes.depth).step_by(CHUNK) {
        let columns = start..sizes.depth.min(start + CHUNK);
        let wide = &mut wide[..columns.len()];
        // SAFETY: a row of the checked tensor.
        X::load(unsafe { part_of::<X>(x, row, columns.clone()) }, wide);
        let shared = wide.as_chunks::<SHARED>().0;
        let codes = codes[columns.clone()].as_chunks_mut::<SHARED>().0;
        let first = start / sizes.group;
        for (i, (wide, codes)) in shared.iter().zip(codes).enumerate() {
            let scale = round_together(wide, codes);
            for part in 0..per_scale {
                let group = first + i * per_scale + part;
                let sum: i32 = (codes[part * sizes.group..][..sizes.group].iter())
                    .map(|code| i32::from(*code))
                    .sum();
                scales[group] = scale;
                sums[group] = scale * sum as f32;
            }
        }
    }
}

/// The nearest codes of -32767 to 32767 times a scale, which is given. It is not finite if a value
/// is not.
#[inline(always)]
fn round_together(values: &[f32; SHARED], codes: &mut [i16; SHARED]) -> f32 {
    const MOST: f32 = i16::MAX as f32;
    // As integers, magnitudes are in the order of the numbers, and NaN is above them.
    let magnitude = values.iter().map(|v| v.to_bits() & 0x7fff_ffff);
    let most = f32::from_bits(magnitude.fold(0, u32::max));
    let scale = most / MOST;
    for (code, value) in codes.iter_mut().zip(values) {
        // Without a scale that is a number there is no code, and any will do.
        *code = (value / scale).round_ties_even().clamp(-MOST, MOST) as i16;
    }
    scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_off_by_half_a_step() {
        let mut codes = [0; SHARED];
        for factor in [1.0, 1e-30, 3e36] {
            let values: [f32; SHARED] =
                std::array::from_fn(|i| factor * ((i * 37 % 64) as f32 - 31.5));
            let scale = round_together(&values, &mut codes);
            assert_eq!(codes.iter().map(|c| c.unsigned_abs()).max(), Some(32767));
            for (value, code) in values.iter().zip(&codes) {
                let error = f64::from(*value) - f64::from(scale) * f64::from(*code);
                let most = 0.51 * f64::from(scale);
                assert!(error.abs() <= most, "{factor}: {error}");
            }
        }
        assert_eq!(round_together(&[0.0; SHARED], &mut codes), 0.0);
        assert_eq!(codes, [0; SHARED]);
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = [1.0; SHARED];
            values[7] = odd;
            assert!(!round_together(&values, &mut codes).is_finite());
        }
    }
}
