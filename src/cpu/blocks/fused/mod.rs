//! Products by weights in blocks that never leave the registers: each vector of codes is decoded
//! where it is multiplied, and so are scales.
//!
//! Activations are two planes of bytes, so that an instruction that multiplies bytes takes codes as
//! they are: a row's dot products are 256 times those with the high bytes, and those with the low.
//! They are exact, as are those of [`Dot`](super::Dot), whose chunks serve what has no kernel here.

#[cfg(target_arch = "x86_64")]
mod in_units;
#[cfg(target_arch = "x86_64")]
mod kernel;
#[cfg(target_arch = "x86_64")]
mod of_256;
#[cfg(target_arch = "x86_64")]
mod q8_0;
#[cfg(test)]
mod tests;

use super::{Dot, Form, Planes};
use crate::dtype::DType;

/// Rows of weights whose products are computed at a time.
pub(crate) const COLUMNS: usize = 4;

/// For weights of a dtype, on this processor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernel(DType);

impl Kernel {
    /// The kernel with these instructions, if there is one.
    pub fn new(dot: Dot, dtype: DType) -> Option<Kernel> {
        use DType::{Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
        let is_known = matches!(dtype, Q8_0 | Q4_0 | Q4_1 | Q5_0 | Q5_1 | Q4K | Q5K | Q6K);
        #[cfg(target_arch = "x86_64")]
        let is_known = is_known && dot == Dot::Avx512;
        #[cfg(not(target_arch = "x86_64"))]
        let is_known = is_known && dot != Dot::Portable;
        is_known.then_some(Kernel(dtype))
    }

    /// How the activations lie that it multiplies.
    pub fn form(self) -> Form {
        match self.0 {
            DType::Q4_0 | DType::Q4_1 | DType::Q5_0 | DType::Q5_1 => Form::Split,
            _ => Form::Planes,
        }
    }

    /// The products of some rows of activations, which lie in its form, and of up to [`COLUMNS`]
    /// rows of weights, each of which is the blocks of as many weights as a row of `x` has.
    #[cfg(target_arch = "x86_64")]
    pub fn products<const R: usize>(
        self,
        weights: &[&[u8]],
        x: [Planes<'_>; R],
    ) -> [[f32; COLUMNS]; R] {
        use super::{Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
        use in_units::InUnits;
        use kernel::{InSteps, multiply};
        // SAFETY: a kernel is made where the processor has the instructions.
        unsafe {
            match self.0 {
                DType::Q8_0 => multiply::<InSteps<Q8_0>, R>(weights, x),
                DType::Q4_0 => multiply::<InUnits<Q4_0>, R>(weights, x),
                DType::Q4_1 => multiply::<InUnits<Q4_1>, R>(weights, x),
                DType::Q5_0 => multiply::<InUnits<Q5_0>, R>(weights, x),
                DType::Q5_1 => multiply::<InUnits<Q5_1>, R>(weights, x),
                DType::Q4K => multiply::<InSteps<Q4K>, R>(weights, x),
                DType::Q5K => multiply::<InSteps<Q5K>, R>(weights, x),
                DType::Q6K => multiply::<InSteps<Q6K>, R>(weights, x),
                other => unreachable!("there is no kernel for {other}"),
            }
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub fn products<const R: usize>(self, _: &[&[u8]], _: [Planes<'_>; R]) -> [[f32; COLUMNS]; R] {
        unreachable!("no kernel is made here")
    }
}
