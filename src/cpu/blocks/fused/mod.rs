//! Products by weights in blocks that never leave the registers: each vector of codes is decoded
//! where it is multiplied, and so are scales. Dot products are exact, as are those of [`Dot`], whose
//! chunks serve what has no kernel here.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(test)]
pub(super) mod tests;

use super::{Bits, Codes, Dot, Form, group};
#[cfg(target_arch = "x86_64")]
use crate::cpu::vector;
use crate::dtype::DType;

/// Rows of weights whose products are computed by a call.
pub(crate) const COLUMNS: usize = 16;

/// Of these, how many vectors of sums are added up side by side.
#[cfg(target_arch = "x86_64")]
const SUMMED: usize = 4;

/// Rows of weights, equally far apart.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    first: &'a [u8],
    /// Bytes from row to row.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(dead_code, reason = "there are no kernels")
    )]
    apart: usize,
    count: usize,
}

impl<'a> Rows<'a> {
    /// # Safety
    /// There are so many rows as long as the first one and as readable, each so many bytes behind the one before.
    pub unsafe fn new(first: &'a [u8], apart: usize, count: usize) -> Self {
        Rows {
            first,
            apart,
            count,
        }
    }

    /// Where some of the rows begin, from `at` on.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn starts(self, at: usize) -> impl ExactSizeIterator<Item = *const u8> {
        let start = move |i| self.first.as_ptr().wrapping_add(i * self.apart);
        (at..self.count.min(at + SUMMED)).map(start)
    }
}

/// Whether there is a kernel for activations of 8 bits, which is faster than that for 16.
fn takes_bytes(dot: Dot, dtype: DType) -> bool {
    match (dot, dtype) {
        // Codes of Q8_0 have as many bits themselves; those of TQ1_0 and Q2_0 come as words when they are taken apart.
        #[cfg(target_arch = "x86_64")]
        (Dot::Avx2, dtype) => !matches!(dtype, DType::Q8_0 | DType::Tq1_0 | DType::Q2_0),
        _ => false,
    }
}

/// For weights of a dtype, by these instructions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernel {
    dtype: DType,
    dot: Dot,
    /// Of activations.
    bits: Bits,
}

impl Kernel {
    /// The kernel with these instructions for activations of so many bits, if there is one.
    pub fn new(dot: Dot, dtype: DType, bits: Bits) -> Option<Kernel> {
        let is_known = dtype.is_in_blocks() && dot != Dot::Portable;
        let takes_bits = match bits {
            Bits::Sixteen => true,
            // AVX-512 is as fast as memory with those of 16.
            Bits::Eight => is_known && takes_bytes(dot, dtype),
        };
        (is_known && takes_bits).then_some(Kernel { dtype, dot, bits })
    }

    /// How the activations lie that it multiplies.
    pub fn form(self) -> Form {
        match (self.dot, self.dtype) {
            #[cfg(target_arch = "x86_64")]
            (Dot::Avx512, DType::Q4_0 | DType::Q4_1 | DType::Q5_0 | DType::Q5_1) => Form::Split,
            #[cfg(target_arch = "x86_64")]
            (Dot::Avx512, DType::Tq1_0 | DType::Tq2_0) => Form::Eights,
            #[cfg(target_arch = "x86_64")]
            (Dot::Avx512, DType::Q2_0) => Form::Fourths,
            #[cfg(target_arch = "x86_64")]
            (Dot::Avx512, _) => Form::Planes,
            _ => match self.bits {
                Bits::Sixteen => Form::Pairs,
                Bits::Eight => Form::Bytes,
            },
        }
    }

    /// The products of some rows of activations, which lie in its form, and of up to [`COLUMNS`]
    /// rows of weights, each of which is the blocks of as many weights as a row of `x` has.
    ///
    /// # Panics
    /// Lengths do not fit each other.
    pub fn products<const R: usize>(
        self,
        weights: Rows<'_>,
        x: [Codes<'_>; R],
    ) -> [[f32; COLUMNS]; R] {
        let (len, bytes) = self.dtype.block();
        let blocks = weights.first.len() / bytes;
        assert!(weights.count <= COLUMNS && weights.first.len() == blocks * bytes);
        let (codes, factors) = self.form().lengths(blocks * len, group(self.dtype));
        for x in &x {
            assert!(x.bytes.len() >= self.form().bytes(codes));
            assert!(x.scales.len() >= factors && x.sums.len() >= factors);
        }
        // SAFETY: a kernel is made where the processor has the instructions; lengths are checked.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            match self.dot {
                Dot::Avx512 => avx512::products(self.dtype, weights, blocks, x),
                Dot::Avx2 => avx2::products((self.dtype, self.bits), weights, blocks, x),
                Dot::Portable => unreachable!("no such kernel is made"),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        unreachable!("no kernel of {} rows is made here", weights.count * x.len())
    }
}

/// Asks for what lies ahead of so many bytes.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn fetch(from: *const u8, bytes: usize) {
    for line in (0..bytes).step_by(64) {
        vector::fetch(from.wrapping_add(line));
    }
}
