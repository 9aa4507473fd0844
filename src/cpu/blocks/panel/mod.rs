//! Many rows by weights in blocks: activations are rounded to 16 bits, as for few rows, or to 8, and codes are
//! multiplied as integers, exactly. Some rows of weights are a panel, which is unpacked once and multiplies
//! every row of activations; these lie in blocks of [`ROWS`]. Both lie in the order in which they are read,
//! in words of 32 bits.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod pack;
#[cfg(test)]
mod tests;

use super::activations::SHARED;
use super::{Bits, CHUNK, Dot, Format, code_bits, group, with_format};
use crate::cpu::Cpu;
use crate::cpu::float::{Float, with_float};
use crate::cpu::rows::part_of;
use crate::cpu::scratch::Floats;
use crate::error::Result;
use crate::tensor::{RawTensor, Scratch};
pub(crate) use pack::pack;

/// Rows of activations of a block. One row's word serves two vectors of codes; of 12 rows and one vector,
/// loads are what would be waited for. Their dot products fit into registers beside these; with AVX-512 their
/// sums do too.
pub(crate) const ROWS: usize = 6;

/// Where a panel begins, in bytes: vectors that lie across cache lines take twice as long to load.
pub(crate) const ALIGNMENT: usize = 64;

/// A kernel, where the processor has its instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// Of words that are two codes of 16 bits, or four of 8.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// Of words that are four codes of weights, which are multiplied by the high bytes of activations, then by
    /// the low, where there are such.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Kernel {
    /// The kernel with these instructions, if there is one.
    pub fn new(dot: Dot) -> Option<Kernel> {
        match dot {
            #[cfg(target_arch = "x86_64")]
            Dot::Avx512 => Some(Kernel::Avx512),
            #[cfg(target_arch = "x86_64")]
            Dot::Avx2 => Some(Kernel::Avx2),
            Dot::Portable => None,
        }
    }

    /// Rows of weights of a panel: two vectors of words.
    pub fn columns(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx2 => avx2::COLUMNS,
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx512 => avx512::COLUMNS,
        }
    }

    /// Codes of weights in a word.
    fn together(self, bits: Bits) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx2 => bits.together(),
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx512 => 4,
        }
    }

    /// Whether it multiplies codes of so many bits by activations of 8: by AVX2 sums of their products are of 16.
    pub fn takes_bytes(self, code_bits: u32) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx2 => code_bits <= 6,
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx512 => code_bits <= 8,
        }
    }

    /// Floats of a panel: codes, scales, offsets, and by AVX-512 what dot products start with.
    pub fn of_panel(self, shape: Shape) -> usize {
        let of_groups = match self {
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx2 => 2,
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx512 => 3,
        };
        self.columns() * (shape.depth / self.together(shape.bits) + of_groups * shape.groups())
    }

    /// Multiplies a block of activations by a panel. Sums of row `r` go to as many floats from
    /// `r * stride` on as a panel has rows; there are as many rows of sums as `sums` has room for.
    ///
    /// # Panics
    /// Lengths do not fit each other, or it does not take such codes.
    pub fn multiply(self, shape: Shape, x: &[f32], panel: &[f32], sums: &mut [f32], stride: usize) {
        let columns = self.columns();
        assert_eq!(x.len(), shape.of_block());
        assert_eq!(panel.len(), self.of_panel(shape));
        assert!(stride >= columns && sums.len() >= columns);
        assert!(shape.bits == Bits::Sixteen || self.takes_bytes(shape.code_bits));
        let rows = ((sums.len() - columns) / stride + 1).min(ROWS);
        // SAFETY: a kernel is made where the processor has the instructions; lengths are checked.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            let multiply = match (self, shape.group, shape.zero, shape.bits) {
                (Kernel::Avx2, _, _, Bits::Sixteen) => avx2::multiply,
                // A number of 16 bits has room for 16 products of codes of 4 bits (30,480 at most), 8 of 5 bits
                // (31,496) or 4 of 6 bits (32,004): those of a group of 32, half of one, or half of one of 16.
                (Kernel::Avx2, _, _, Bits::Eight) if shape.code_bits <= 4 => {
                    avx2::multiply_bytes::<1>
                }
                (Kernel::Avx2, _, _, Bits::Eight) => avx2::multiply_bytes::<2>,
                (Kernel::Avx512, 16, None, Bits::Sixteen) => avx512::multiply::<4, false, 2>,
                (Kernel::Avx512, 16, None, Bits::Eight) => avx512::multiply::<4, false, 1>,
                (Kernel::Avx512, 16, Some(_), Bits::Sixteen) => avx512::multiply::<4, true, 2>,
                (Kernel::Avx512, 16, Some(_), Bits::Eight) => avx512::multiply::<4, true, 1>,
                (Kernel::Avx512, _, None, Bits::Sixteen) => avx512::multiply::<8, false, 2>,
                (Kernel::Avx512, _, None, Bits::Eight) => avx512::multiply::<8, false, 1>,
                (Kernel::Avx512, _, Some(_), Bits::Sixteen) => avx512::multiply::<8, true, 2>,
                (Kernel::Avx512, _, Some(_), Bits::Eight) => avx512::multiply::<8, true, 1>,
            };
            multiply(shape, x, panel, rows, sums, stride);
        }
        #[cfg(not(target_arch = "x86_64"))]
        unreachable!("no kernel of {rows} rows is made here")
    }

    /// Rounds neighbours, for groups of so many weights.
    #[inline(always)]
    fn round(self, values: &[f32; SHARED], group: usize, bits: Bits) -> Group {
        match self {
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx2 => avx2::round(values, group, bits),
            // SAFETY: a kernel is made where the processor has the instructions.
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx512 => unsafe { avx512::round(values, group, bits) },
        }
    }
}

/// Of rows, of activations as of weights.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Elements, which are whole groups.
    pub depth: usize,
    /// Weights that share a scale.
    pub group: usize,
    /// The code of zero, if all groups have the same.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(dead_code, reason = "there are no kernels")
    )]
    pub zero: Option<u8>,
    /// Of a code.
    pub code_bits: u32,
    /// Of activations.
    pub bits: Bits,
}

impl Shape {
    /// Of rows of such a weight.
    pub fn new(weight: &RawTensor, bits: Bits) -> Shape {
        Shape {
            bits,
            depth: weight.layout.dim(1),
            group: group(weight.dtype),
            zero: with_format!(weight.dtype, F => F::ZERO),
            code_bits: code_bits(weight.dtype),
        }
    }

    fn groups(self) -> usize {
        self.depth / self.group
    }

    /// Floats of a block of activations: codes; scales; scales times sums of codes.
    pub fn of_block(self) -> usize {
        ROWS * (self.depth / self.bits.together() + 2 * self.groups())
    }

    /// The parts of a panel or block: lines of codes, as many as told, of scales, of what is third, and what there is
    /// behind that.
    fn parts(self, all: &mut [f32], lines: usize, width: usize) -> [&mut [f32]; 4] {
        let (codes, factors) = all.split_at_mut(lines * width);
        let (scales, rest) = factors.split_at_mut(self.groups() * width);
        let (third, fourth) = rest.split_at_mut(self.groups() * width);
        [codes, scales, third, fourth]
    }
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
    let together = shape.bits.together();
    let [words, scales, sums, _] = shape.parts(block, shape.depth / together, ROWS);
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
            let rounded = kernel.round(wide, shape.group, shape.bits);
            let words = words[from / together * ROWS..].chunks_exact_mut(ROWS);
            for (to, word) in words.zip(&rounded.words[..SHARED / together]) {
                to[at] = f32::from_bits(*word);
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
    /// In the order of a block; of 8 bits the first half.
    words: [u32; SHARED / 2],
    /// Of the codes of each group of weights that they multiply; there may be one.
    sums: [i32; 2],
}
