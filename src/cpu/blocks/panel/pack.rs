//! Packing of panels: a piece of each of their rows is unpacked, and then turned by squares of words that
//! fit into registers. Word by word, each would go to a cache line of its own.

use super::{Bits, Kernel, Shape};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::cpu::blocks::{Format, blocks_of, with_format};
use crate::cpu::{Cpu, vector};
use crate::tensor::RawTensor;

/// Rows of the widest panel.
const COLUMNS: usize = 32;

/// Weights of a row that are unpacked at a time: a block of the longest.
const CODES: usize = 256;

/// Their groups, at most.
const GROUPS: usize = CODES / 16;

/// Bytes of a cache line.
const LINE: usize = 64;

/// A piece of each row of a panel, unpacked.
#[repr(align(64))]
struct Piece {
    codes: [[u8; CODES]; COLUMNS],
    scales: [[f32; GROUPS]; COLUMNS],
    offsets: [[f32; GROUPS]; COLUMNS],
}

/// What of a piece becomes lines of a panel: line `i` has word `i` of each row. Rows are equally far apart.
#[derive(Clone, Copy)]
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "there are no kernels")
)]
pub(super) struct Words {
    pub from: *const u32,
    /// Words from row to row.
    pub apart: usize,
    /// Where the first line is written.
    pub to: *mut f32,
    pub lines: usize,
}

impl Words {
    /// So many words of each row of a piece, which make `each` lines of a panel.
    ///
    /// # Panics
    /// Rows are shorter, or `to` has no room for the lines.
    fn new<T, const N: usize>(
        rows: &[[T; N]; COLUMNS],
        lines: usize,
        kernel: Kernel,
        to: &mut [f32],
        each: usize,
    ) -> Words {
        let apart = N * size_of::<T>() / size_of::<u32>();
        assert!(lines <= apart && lines * each * kernel.columns() <= to.len());
        Words {
            from: rows.as_ptr().cast(),
            apart,
            to: to.as_mut_ptr(),
            lines,
        }
    }
}

/// Unpacks as many rows of a weight from `first` on as a panel has, or as there are. What it has of
/// others is of no use.
pub(crate) fn pack(
    cpu: &Cpu,
    (kernel, shape): (Kernel, Shape),
    weight: &RawTensor,
    first: usize,
    panel: &mut [f32],
) {
    let width = kernel.columns();
    let rows = (weight.layout.dim(0) - first).min(width);
    let together = kernel.together(shape.bits);
    let lines = shape.depth / together;
    let [codes, scales, offsets, starts] = shape.parts(panel, lines, width);
    let mut piece = Piece {
        codes: [[0; CODES]; COLUMNS],
        scales: [[0.0; GROUPS]; COLUMNS],
        offsets: [[0.0; GROUPS]; COLUMNS],
    };
    // The processor by itself does not follow as many rows as a panel has: a row's next piece is asked for.
    let ask = |row: usize, start: usize| {
        let part = start.min(shape.depth)..shape.depth.min(start + CODES);
        // SAFETY: whole blocks of a row of the checked matrix.
        let blocks = unsafe { blocks_of(weight, first + row, part) };
        for line in blocks.chunks(LINE) {
            vector::prefetch(line.as_ptr());
        }
    };
    (0..rows).for_each(|row| ask(row, 0));
    for start in (0..shape.depth).step_by(CODES) {
        let part = start..shape.depth.min(start + CODES);
        let (len, groups) = (part.len(), part.len() / shape.group);
        with_format!(weight.dtype, F => cpu.vectorize(#[inline(always)] || {
            for row in 0..rows {
                ask(row, start + CODES);
                // SAFETY: as above.
                let blocks = unsafe { blocks_of(weight, first + row, part.clone()) };
                F::unpack(
                    blocks,
                    &mut piece.codes[row][..len],
                    &mut piece.scales[row][..groups],
                    &mut piece.offsets[row][..groups],
                );
            }
        }));
        let codes = &mut codes[start / together * width..];
        let at = start / shape.group * width;
        // There are none where a panel has no starts.
        let starts = starts.get_mut(at..).unwrap_or_default();
        let words = Words::new(&piece.codes, len / 4, kernel, codes, 4 / together);
        kernel.place_codes(words, shape, starts);
        for (from, to) in [
            (&piece.scales, &mut *scales),
            (&piece.offsets, &mut *offsets),
        ] {
            kernel.place_factors(Words::new(from, groups, kernel, &mut to[at..], 1));
        }
    }
}

impl Kernel {
    /// Each word is four codes. It becomes a line, or two where a panel has two codes in a word. Where a panel has starts of
    /// dot products, a line of these is written for each group.
    fn place_codes(self, words: Words, shape: Shape, starts: &mut [f32]) {
        let groups = 4 * words.lines / shape.group;
        // SAFETY: a kernel is made where the processor has the instructions; words were checked, there are as many rows, and
        // there is room for as many starts as there are groups.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            match (self, shape.bits) {
                (Kernel::Avx2, Bits::Sixteen) => avx2::place_codes(words),
                // As they are.
                (Kernel::Avx2, Bits::Eight) => avx2::place_factors(words),
                (Kernel::Avx512, _) => {
                    assert!(starts.len() >= groups * self.columns());
                    let zero = shape.zero.unwrap_or(0);
                    avx512::place_codes(words, zero, shape.group, starts.as_mut_ptr());
                }
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        unreachable!("no panel of {groups} groups is made at {starts:p}")
    }

    /// Each word is a factor.
    fn place_factors(self, words: Words) {
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            match self {
                Kernel::Avx2 => avx2::place_factors(words),
                Kernel::Avx512 => avx512::place_factors(words),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        unreachable!("no panel of {} lines is made here", words.lines)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::every;
    use super::*;

    fn code(row: usize, i: usize) -> u8 {
        (37 * row + 11 * i) as u8
    }

    /// Whole squares of words, and parts of one; nothing is written behind the lines.
    #[test]
    fn words_of_codes_become_lines() {
        for kernel in every() {
            for bits in [Bits::Sixteen, Bits::Eight] {
                for lines in [8, 16, 24, CODES / 4] {
                    let shape = Shape {
                        depth: 4 * lines,
                        group: 32,
                        zero: Some(8),
                        code_bits: 4,
                        bits,
                    };
                    codes_become_lines(kernel, shape, lines);
                }
            }
        }
    }

    fn codes_become_lines(kernel: Kernel, shape: Shape, lines: usize) {
        let (width, together) = (kernel.columns(), kernel.together(shape.bits));
        let codes: [[u8; CODES]; COLUMNS] =
            std::array::from_fn(|row| std::array::from_fn(|i| code(row, i)));
        let each = 4 / together;
        let mut to = vec![-1.0; (lines * each + 1) * width];
        let mut starts = vec![0.0; shape.groups() * width];
        let words = Words::new(&codes, lines, kernel, &mut to, each);
        kernel.place_codes(words, shape, &mut starts);
        let has_starts =
            kernel.of_panel(shape) > width * (shape.depth / together + 2 * shape.groups());
        let zero = if has_starts { 8 } else { 0 };
        for (at, start) in starts.iter().enumerate().filter(|_| has_starts) {
            let (g, row) = (at / width, at % width);
            let codes = (32 * g..32 * (g + 1)).map(|i| code(row, i).wrapping_sub(zero));
            let sum: i32 = codes.map(|code| i32::from(code.cast_signed())).sum();
            assert_eq!(start.to_bits().cast_signed(), -128 * sum, "group {g}");
        }
        for (at, word) in to.iter().enumerate() {
            let (line, row) = (at / width, at % width);
            let expected = match together {
                _ if line == lines * each => (-1.0f32).to_le_bytes().to_vec(),
                2 => [2 * line, 2 * line + 1].map(|i| [code(row, i), 0]).concat(),
                _ => (4 * line..4 * line + 4)
                    .map(|i| code(row, i).wrapping_sub(zero))
                    .collect(),
            };
            let got = word.to_bits().to_le_bytes();
            assert_eq!(got, expected[..], "{kernel:?} {shape:?} {line}");
        }
    }

    #[test]
    fn words_of_factors_become_lines() {
        let factor = |row: usize, i: usize| (100 * row + i) as f32;
        let factors: [[f32; GROUPS]; COLUMNS] =
            std::array::from_fn(|row| std::array::from_fn(|i| factor(row, i)));
        for kernel in every() {
            let width = kernel.columns();
            for lines in [1, 2, 8, 9, GROUPS] {
                let mut to = vec![-1.0; (lines + 1) * width];
                kernel.place_factors(Words::new(&factors, lines, kernel, &mut to, 1));
                for (at, word) in to.iter().enumerate() {
                    let (line, row) = (at / width, at % width);
                    let expected = if line < lines {
                        factor(row, line)
                    } else {
                        -1.0
                    };
                    assert_eq!(*word, expected, "{kernel:?} {line}");
                }
            }
        }
    }
}
