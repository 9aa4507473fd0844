//! Kernels against the codes that they multiply.

use super::super::activations::round_together;
use super::super::fused::tests::{blocks, noise};
use super::super::{Chunk, dot};
use super::*;
use crate::dtype::DType;
use crate::layout::Layout;

/// All that this processor has.
pub fn every() -> impl Iterator<Item = Kernel> {
    dot::tests::every().into_iter().filter_map(Kernel::new)
}

/// Codes, scales and sums are those of few rows.
#[test]
fn rows_are_rounded_as_few_are() {
    for kernel in every() {
        for bits in [Bits::Sixteen, Bits::Eight] {
            rows_are_rounded_by(kernel, bits);
        }
    }
}

fn rows_are_rounded_by(kernel: Kernel, bits: Bits) {
    for factor in [1.0, 0.0, 1e-30, 3e36] {
        let values = std::array::from_fn(|i| factor * ((i * 37 % 64) as f32 - 31.3));
        let mut codes = [0; SHARED];
        let scale = round_together(&values, bits, &mut codes);
        for group in [16, 32] {
            let got = kernel.round(&values, group, bits);
            assert_eq!(got.scale, scale);
            if scale == 0.0 {
                continue;
            }
            for (i, code) in codes.into_iter().enumerate() {
                assert_eq!(
                    code_of(kernel, &got, (group, bits), i),
                    code,
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
        assert!(!kernel.round(&odd, 32, bits).scale.is_finite());
    }
}

/// A code of rounded neighbours.
fn code_of(kernel: Kernel, rounded: &Group, (group, bits): (usize, Bits), i: usize) -> i16 {
    if kernel.together(bits) == 2 {
        return (rounded.words[i / 2] >> (16 * (i % 2))) as i16;
    }
    let byte = |word: usize| rounded.words[word].to_le_bytes()[i % 4];
    match (kernel, bits) {
        #[cfg(target_arch = "x86_64")]
        (Kernel::Avx2, _) => i16::from(byte(i / 4).cast_signed()),
        (_, Bits::Eight) => i16::from(byte(i / 4)) - 128,
        (_, Bits::Sixteen) => {
            let plane =
                |plane| i16::from(byte((2 * (i / group) + plane) * group / 4 + i % group / 4));
            256 * (plane(0) - 128) + plane(1)
        }
    }
}

/// Sums are those of codes times factors, of whole panels and of what is left, of any codes and of the greatest.
#[test]
fn panels_multiply_what_was_rounded() {
    for kernel in every() {
        for bits in [Bits::Sixteen, Bits::Eight] {
            for dtype in DType::BLOCKS {
                for number in [1, 3] {
                    if bits == Bits::Eight && !kernel.takes_bytes(code_bits(dtype)) {
                        continue;
                    }
                    for extreme in [false, true] {
                        let depth = number * dtype.block().0;
                        panels_multiply(kernel, bits, (dtype, depth), extreme);
                    }
                }
            }
        }
    }
}

fn panels_multiply(kernel: Kernel, bits: Bits, (dtype, depth): (DType, usize), extreme: bool) {
    let (rows, columns) = (ROWS + 2, kernel.columns() + 3);
    let cpu = Cpu::new(1).unwrap();
    let mut of_weights: Vec<_> = (0..columns)
        .map(|c| blocks(dtype, depth, 7 + c, extreme))
        .collect();
    let mut bytes = of_weights.concat();
    let mut x: Vec<f32> = (0..rows * depth)
        .map(|i| match (extreme, noise(5, i) as i16) {
            (true, sign) => {
                if sign % 8 == 0 {
                    1.0
                } else {
                    -1.0
                }
            }
            (false, value) => f32::from(value) / 1e4,
        })
        .collect();
    let tensor = |ptr, dtype, shape: [usize; 2]| RawTensor {
        ptr,
        dtype,
        layout: Layout::contiguous(&shape).unwrap(),
    };
    let weight = tensor(bytes.as_mut_ptr(), dtype, [columns, depth]);
    let of_x = tensor(x.as_mut_ptr().cast(), DType::F32, [rows, depth]);
    let shape = Shape::new(&weight, bits);
    let mut rounded = Rounded::room("test", shape, rows, Scratch::NONE).unwrap();
    rounded.round(&cpu, (kernel, shape), &of_x, 0, rows);
    let mut sums = vec![0.0; rows.next_multiple_of(ROWS) * 2 * kernel.columns()];
    let stride = 2 * kernel.columns();
    for first in [0, kernel.columns()] {
        // At a cache line.
        let mut memory = vec![0.0; kernel.of_panel(shape) + ALIGNMENT / 4];
        let start = memory.as_ptr().align_offset(ALIGNMENT);
        let panel = &mut memory[start..][..kernel.of_panel(shape)];
        pack(&cpu, (kernel, shape), &weight, first, panel);
        for (i, sums) in sums.chunks_mut(ROWS * stride).enumerate() {
            kernel.multiply(shape, rounded.block(i), panel, &mut sums[first..], stride);
        }
    }
    for (row, x) in x.chunks(depth).enumerate() {
        let mut of_row = Vec::new();
        for values in x.as_chunks().0 {
            let mut codes = [0; SHARED];
            let scale = f64::from(round_together(values, bits, &mut codes));
            of_row.extend(codes.map(|code| scale * f64::from(code)));
        }
        for (column, blocks) in of_weights.iter_mut().enumerate() {
            let mut chunk = Chunk::new();
            with_format!(dtype, F => chunk.unpack::<F>(blocks));
            let (mut sum, mut most) = (0.0, 0.0);
            for (i, x) in of_row.iter().enumerate() {
                let [weight, offset] = chunk.number(i, shape.group).map(f64::from);
                sum += (weight + offset) * x;
                most += (weight.abs() + offset.abs()) * x.abs();
            }
            let got = f64::from(sums[row * stride + column]);
            assert!(
                (got - sum).abs() <= 2e-6 * most,
                "{kernel:?} {bits:?} {dtype} {depth}: {got}, not {sum}"
            );
        }
    }
}
