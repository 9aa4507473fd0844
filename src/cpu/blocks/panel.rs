//! Many rows by weights in blocks: activations are rounded to 16 bits, as for few rows, and codes are
//! multiplied as integers, exactly: by the high bytes of activations, then by the low. 32 rows of weights
//! are a panel, which is unpacked once and multiplies every row of activations; these lie in blocks of
//! [`ROWS`]. Both lie in the order in which they are read.

use super::activations::SHARED;
use super::{CHUNK, Chunk, Dot, Format, blocks_of, group, with_format};
use crate::cpu::Cpu;
use crate::cpu::float::{Float, with_float};
use crate::cpu::rows::part_of;
use crate::cpu::scratch::Floats;
use crate::error::Result;
use crate::tensor::{RawTensor, Scratch};

/// Rows of weights of a panel.
pub(crate) const COLUMNS: usize = 32;

/// Rows of activations of a block: their sums, and the dot products that are added to them, leave some
/// of 32 registers. One row's word serves two vectors of codes; of 12 rows and one vector, loads are
/// what would be waited for.
pub(crate) const ROWS: usize = 6;

/// Where a panel begins, in bytes: vectors that lie across cache lines take twice as long to load.
pub(crate) const ALIGNMENT: usize = 64;

/// Codes that are multiplied at a time, and lie side by side.
const TOGETHER: usize = 4;

/// Words of activations for each word of codes: high bytes, and low.
const PLANES: usize = 2;

/// The kernel, where the processor has its instructions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernel(());

impl Kernel {
    /// The kernel with these instructions, if there is one.
    pub fn new(dot: Dot) -> Option<Kernel> {
        match dot {
            #[cfg(target_arch = "x86_64")]
            Dot::Avx512 => Some(Kernel(())),
            _ => None,
        }
    }

    /// Multiplies a block of activations by a panel. Sums of row `r` go to the [`COLUMNS`] floats from
    /// `r * stride` on; there are as many rows of sums as `sums` has room for.
    ///
    /// # Panics
    /// Lengths do not fit each other.
    #[cfg(target_arch = "x86_64")]
    pub fn multiply(self, shape: Shape, x: &[f32], panel: &[f32], sums: &mut [f32], stride: usize) {
        assert_eq!(x.len(), shape.of_block());
        assert_eq!(panel.len(), shape.of_panel());
        assert!(stride >= COLUMNS && sums.len() >= COLUMNS);
        let rows = ((sums.len() - COLUMNS) / stride + 1).min(ROWS);
        // SAFETY: a kernel is made where the processor has the instructions; lengths are checked.
        unsafe {
            match shape.group {
                16 => x86::multiply::<4>(shape, x, panel, rows, sums, stride),
                _ => x86::multiply::<8>(shape, x, panel, rows, sums, stride),
            }
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub fn multiply(self, _: Shape, _: &[f32], _: &[f32], _: &mut [f32], _: usize) {
        unreachable!("no kernel is made here")
    }

    /// Rounds neighbours, for groups of so many weights.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn round(self, values: &[f32; SHARED], group: usize) -> Group {
        // SAFETY: a kernel is made where the processor has the instructions.
        unsafe { x86::round(values, group) }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn round(self, _: &[f32; SHARED], _: usize) -> Group {
        unreachable!("no kernel is made here")
    }
}

/// Of rows, of activations as of weights.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Elements, which are whole groups.
    pub depth: usize,
    /// Weights that share a scale.
    pub group: usize,
}

impl Shape {
    /// Of rows of such a weight.
    pub fn new(weight: &RawTensor) -> Shape {
        Shape {
            depth: weight.layout.dim(1),
            group: group(weight.dtype),
        }
    }

    fn groups(self) -> usize {
        self.depth / self.group
    }

    /// Floats of a panel: codes, scales, offsets.
    pub fn of_panel(self) -> usize {
        COLUMNS * (self.depth / TOGETHER + 2 * self.groups())
    }

    /// Floats of a block of activations: codes, by groups their high bytes and then their low ones;
    /// scales; scales times sums of codes.
    pub fn of_block(self) -> usize {
        ROWS * (PLANES * self.depth / TOGETHER + 2 * self.groups())
    }

    /// The parts of a panel or block: lines of codes, as many as told, of scales, and of what is third.
    fn parts(self, all: &mut [f32], lines: usize) -> [&mut [f32]; 3] {
        let width = all.len() / (lines + 2 * self.groups());
        let (codes, factors) = all.split_at_mut(lines * width);
        let (scales, third) = factors.split_at_mut(self.groups() * width);
        [codes, scales, third]
    }
}

/// Unpacks up to [`COLUMNS`] rows of a weight from `first` on. What a panel has of others is of no use.
pub(crate) fn pack(cpu: &Cpu, weight: &RawTensor, first: usize, panel: &mut [f32]) {
    let shape = Shape::new(weight);
    let last = weight.layout.dim(0).min(first + COLUMNS);
    let [codes, scales, offsets] = shape.parts(panel, shape.depth / TOGETHER);
    let mut chunk = Chunk::new();
    with_format!(weight.dtype, F => cpu.vectorize(#[inline(always)] || {
        for start in (0..shape.depth).step_by(CHUNK) {
            let part = start..shape.depth.min(start + CHUNK);
            let codes = &mut codes[start / TOGETHER * COLUMNS..];
            let groups = start / F::GROUP * COLUMNS;
            let (scales, offsets) = (&mut scales[groups..], &mut offsets[groups..]);
            for column in first..last {
                // SAFETY: whole blocks of a row of the checked matrix.
                chunk.unpack::<F>(unsafe { blocks_of(weight, column, part.clone()) });
                let at = column - first;
                let words = chunk.codes[..part.len()].as_chunks::<TOGETHER>().0;
                for (to, word) in codes.chunks_exact_mut(COLUMNS).zip(words) {
                    to[at] = f32::from_bits(u32::from_le_bytes(*word));
                }
                let of_groups = part.len() / F::GROUP;
                for (to, scale) in scales.chunks_exact_mut(COLUMNS).zip(&chunk.scales[..of_groups]) {
                    to[at] = *scale;
                }
                for (to, offset) in offsets.chunks_exact_mut(COLUMNS).zip(&chunk.offsets[..of_groups]) {
                    to[at] = *offset;
                }
            }
        }
    }));
}

/// Some rows of a tensor, rounded.
pub(crate) struct Rounded {
    blocks: Floats,
}

impl Rounded {
    /// Bytes of a workspace with which [`Rounded::room`] allocates nothing.
    pub fn bytes(shape: Shape, rows: usize) -> usize {
        Floats::bytes(rows.div_ceil(ROWS), shape.of_block())
    }

    /// Room for so many rows.
    ///
    /// # Errors
    /// There is no memory.
    pub fn room(op: &'static str, shape: Shape, rows: usize, scratch: Scratch) -> Result<Rounded> {
        let sizes = (rows.div_ceil(ROWS), shape.of_block());
        let blocks = Floats::in_or_new(op, scratch, sizes, 0)?;
        Ok(Rounded { blocks })
    }

    /// Rounds rows of `x` from `first` on, no more than there is room for.
    pub fn round(
        &mut self,
        cpu: &Cpu,
        (kernel, shape): (Kernel, Shape),
        x: &RawTensor,
        first: usize,
        rows: usize,
    ) {
        let blocks = &self.blocks;
        cpu.for_each_range(rows.div_ceil(ROWS), ROWS * shape.depth, |range| {
            with_float!(x.dtype, X => cpu.vectorize(#[inline(always)] || {
                for i in range.clone() {
                    // SAFETY: a block is one thread's.
                    let block = unsafe { blocks.part(i) };
                    let here = (rows - i * ROWS).min(ROWS);
                    for row in 0..here {
                        round_row::<X>((kernel, shape), x, first + i * ROWS + row, row, block);
                    }
                    // Rows that the last block lacks are multiplied too.
                    if here < ROWS {
                        for line in block.chunks_exact_mut(ROWS) {
                            line[here..].fill(0.0);
                        }
                    }
                }
            }));
        });
    }

    /// The block of row `ROWS * i` and those behind it.
    pub fn block(&self, i: usize) -> &[f32] {
        // SAFETY: nobody writes while they are borrowed.
        unsafe { self.blocks.part(i) }
    }
}

/// Rounds a row of `x` to row `at` of a block.
#[inline(always)]
fn round_row<X: Float>(
    (kernel, shape): (Kernel, Shape),
    x: &RawTensor,
    row: usize,
    at: usize,
    block: &mut [f32],
) {
    let [words, scales, sums] = shape.parts(block, PLANES * shape.depth / TOGETHER);
    let mut wide = [0.0f32; CHUNK];
    for start in (0..shape.depth).step_by(CHUNK) {
        let columns = start..shape.depth.min(start + CHUNK);
        let wide = &mut wide[..columns.len()];
        // SAFETY: a row of the checked tensor.
        X::load(unsafe { part_of::<X>(x, row, columns.clone()) }, wide);
        for (wide, from) in wide
            .as_chunks::<SHARED>()
            .0
            .iter()
            .zip(columns.step_by(SHARED))
        {
            let rounded = kernel.round(wide, shape.group);
            let words = words[PLANES * from / TOGETHER * ROWS..].chunks_exact_mut(ROWS);
            for (to, word) in words.zip(rounded.words) {
                to[at] = f32::from_bits(word);
            }
            let groups = from / shape.group..(from + SHARED) / shape.group;
            for (group, sum) in groups.zip(rounded.sums) {
                scales[group * ROWS + at] = rounded.scale;
                sums[group * ROWS + at] = rounded.scale * sum as f32;
            }
        }
    }
}

/// Neighbours that were rounded together.
#[derive(Debug, PartialEq)]
struct Group {
    /// Not finite if one of them is not.
    scale: f32,
    /// In the order of a block.
    words: [u32; PLANES * SHARED / TOGETHER],
    /// Of the codes of each group of weights that they multiply; there may be one.
    sums: [i32; 2],
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{COLUMNS, Group, PLANES, ROWS, SHARED, Shape};
    use crate::cpu::blocks::activations::MOST;

    /// Adds the products of a group's codes and of one of its planes of bytes: of `WORDS` lines of both. They are
    /// spelled out, since in a loop that is not unrolled dot products are kept in memory.
    macro_rules! add_plane {
        ($codes:expr, $x:expr, $dots:ident, $($i:literal)*) => {$(
            if $i < WORDS {
                let mut codes = [_mm512_setzero_si512(); VECTORS];
                for (v, codes) in codes.iter_mut().enumerate() {
                    *codes = _mm512_loadu_si512($codes.add($i * COLUMNS + v * LANES).cast());
                }
                for (r, dots) in $dots.iter_mut().enumerate() {
                    let word = _mm512_set1_epi32($x.add($i * ROWS + r).cast::<i32>().read());
                    for (dots, codes) in dots.iter_mut().zip(codes) {
                        *dots = _mm512_dpbusd_epi32(*dots, codes, word);
                    }
                }
            }
        )*};
    }

    /// Of a vector, and vectors of a line of a panel.
    const LANES: usize = 16;
    const VECTORS: usize = COLUMNS / LANES;

    /// # Safety
    /// The processor has the instructions.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub unsafe fn round(values: &[f32; SHARED], group: usize) -> Group {
        // SAFETY: two vectors of values, and 16 words.
        unsafe {
            let halves = [0, 16].map(|at| _mm512_loadu_ps(values.as_ptr().add(at)));
            // As integers, magnitudes are in the order of the numbers, and NaN is above them.
            let [a, b] = halves.map(|x| _mm512_castps_si512(_mm512_abs_ps(x)));
            let most = _mm512_reduce_max_epu32(_mm512_max_epu32(a, b));
            let limit = f32::from(MOST);
            let scale = f32::from_bits(most) / limit;
            let codes = halves.map(|x| {
                // Without a scale that is a number there is no code, and any will do.
                let code = _mm512_div_ps(x, _mm512_set1_ps(scale));
                let code = _mm512_min_ps(code, _mm512_set1_ps(limit));
                _mm512_cvtps_epi32(_mm512_max_ps(code, _mm512_set1_ps(-limit)))
            });
            let sums = codes.map(|codes| _mm512_reduce_add_epi32(codes));
            // The low byte has a sign too; what it takes away is in the high one.
            let half = _mm512_set1_epi32(128);
            let high = codes
                .map(|c| _mm512_cvtepi32_epi8(_mm512_srai_epi32::<8>(_mm512_add_epi32(c, half))));
            let low = codes.map(|codes| _mm512_cvtepi32_epi8(codes));
            let (order, sums) = match group {
                16 => ([high[0], low[0], high[1], low[1]], sums),
                _ => ([high[0], high[1], low[0], low[1]], [sums[0] + sums[1], 0]),
            };
            let mut words = [0; 16];
            for (bytes, words) in order.into_iter().zip(words.chunks_exact_mut(4)) {
                _mm_storeu_si128(words.as_mut_ptr().cast(), bytes);
            }
            Group { scale, words, sums }
        }
    }

    /// For groups of `WORDS` times four weights.
    ///
    /// # Safety
    /// The processor has the instructions; `x` is a block, `panel` a panel of the shape, and there is
    /// room for so many rows of sums.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    pub unsafe fn multiply<const WORDS: usize>(
        shape: Shape,
        x: &[f32],
        panel: &[f32],
        rows: usize,
        sums: &mut [f32],
        stride: usize,
    ) {
        let groups = shape.groups();
        let (x, w) = (x.as_ptr(), panel.as_ptr());
        let mut totals = [[_mm512_setzero_ps(); VECTORS]; ROWS];
        // SAFETY: all lines are in the block and the panel, as their lengths say.
        unsafe {
            let (x_scales, w_scales) = (
                x.add(PLANES * groups * WORDS * ROWS),
                w.add(groups * WORDS * COLUMNS),
            );
            let (x_sums, w_offsets) = (x_scales.add(groups * ROWS), w_scales.add(groups * COLUMNS));
            for g in 0..groups {
                let mut dots = [[_mm512_setzero_si512(); VECTORS]; ROWS];
                let (codes, x) = (w.add(g * WORDS * COLUMNS), x.add(PLANES * g * WORDS * ROWS));
                add_plane!(codes, x, dots, 0 1 2 3 4 5 6 7);
                for dots in &mut dots {
                    for dots in dots {
                        *dots = _mm512_slli_epi32::<8>(*dots);
                    }
                }
                let low = x.add(WORDS * ROWS);
                add_plane!(codes, low, dots, 0 1 2 3 4 5 6 7);
                for v in 0..VECTORS {
                    let at = g * COLUMNS + v * LANES;
                    let scales = _mm512_loadu_ps(w_scales.add(at));
                    let offsets = _mm512_loadu_ps(w_offsets.add(at));
                    for r in 0..ROWS {
                        let scale = _mm512_set1_ps(*x_scales.add(g * ROWS + r));
                        let sum = _mm512_set1_ps(*x_sums.add(g * ROWS + r));
                        let (scale, dots) = (_mm512_mul_ps(scales, scale), dots[r][v]);
                        let total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), scale, totals[r][v]);
                        totals[r][v] = _mm512_fmadd_ps(offsets, sum, total);
                    }
                }
            }
            for (r, totals) in totals.iter().enumerate().take(rows) {
                for (v, total) in totals.iter().enumerate() {
                    _mm512_storeu_ps(sums.as_mut_ptr().add(r * stride + v * LANES), *total);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::activations::round_together;
    use super::*;

    /// Codes, scales and sums are those of few rows.
    #[test]
    fn rows_are_rounded_as_few_are() {
        let Some(kernel) = Kernel::new(Dot::new()) else {
            return;
        };
        for factor in [1.0, 0.0, 1e-30, 3e36] {
            let values = std::array::from_fn(|i| factor * ((i * 37 % 64) as f32 - 31.3));
            let mut codes = [0; SHARED];
            let scale = round_together(&values, &mut codes);
            for group in [16, 32] {
                let got = kernel.round(&values, group);
                assert_eq!(got.scale, scale);
                if scale == 0.0 {
                    continue;
                }
                for (i, code) in codes.into_iter().enumerate() {
                    let (of_group, at) = (i / group, i % group);
                    let byte = |plane: usize| {
                        let word = got.words[(2 * of_group + plane) * group / 4 + at / 4];
                        i32::from(word.to_le_bytes()[at % 4].cast_signed())
                    };
                    assert_eq!(
                        256 * byte(0) + byte(1),
                        i32::from(code),
                        "{factor} {group} {i}"
                    );
                }
                for (codes, sum) in codes.chunks(group).zip(got.sums) {
                    let expected: i32 = codes.iter().map(|code| i32::from(*code)).sum();
                    assert_eq!(sum, expected);
                }
            }
        }
        let mut odd = [1.0; SHARED];
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            odd[20] = value;
            assert!(!kernel.round(&odd, 32).scale.is_finite());
        }
    }
}
