//! Kernels of AVX-512 with VNNI. Activations are two planes of bytes, so that an instruction that
//! multiplies bytes takes codes as they are: a row's dot products are 256 times those with the high
//! bytes, and those with the low.

mod in_units;
mod of_256;
mod q8_0;
mod ternary;

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::{COLUMNS, Rows, SUMMED, fetch};
use crate::cpu::blocks::{Codes, Format};
use crate::cpu::vector::of_512::sums_of_four;
use crate::dtype::DType;

/// Codes of a vector.
pub(super) const CODES: usize = 64;

/// Factors of a vector: one for each of as many neighbouring groups, which are a step.
pub(super) const FACTORS: usize = 16;

/// A format that can be decoded in registers. What its functions read lies in the blocks whose
/// number they are told.
pub(super) trait Fused: Format {
    /// Weights of a block, and its bytes.
    const BLOCK: (usize, usize) = Self::DTYPE.block();

    /// Blocks of a step.
    const BLOCKS: usize = FACTORS * Self::GROUP / Self::BLOCK.0;

    /// Scales and offsets of the groups of a step, and zeros for blocks that it lacks.
    ///
    /// # Safety
    /// The processor has the instructions. There are so many blocks, from 1 to `BLOCKS`.
    unsafe fn factors(step: *const u8, blocks: usize) -> (__m512, __m512);

    /// Vector `z` of the codes of a step: those of groups, one after another. What it has for
    /// blocks that the step lacks may be any codes.
    ///
    /// # Safety
    /// As above. One of the vector's codes is of these blocks.
    unsafe fn codes(step: *const u8, blocks: usize, z: usize) -> __m512i;
}

/// Products by a format, by one way or another.
pub(super) trait Product {
    /// A row of so many blocks by rows of as many activations, with zeros behind them.
    ///
    /// # Safety
    /// These are there, and the processor has the instructions.
    unsafe fn column<const R: usize>(row: *const u8, blocks: usize, x: [Row; R]) -> [__m512; R];

    /// Whether [`Product::four`] is faster than row by row.
    const HAS_FOUR: bool = false;

    /// Four such rows by one of activations, with the bits of each alone.
    ///
    /// # Safety
    /// As above, and [`Product::HAS_FOUR`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn four(_: [*const u8; 4], _: usize, _: Row) -> [__m512; 4] {
        unreachable!("not asked for where there is none")
    }
}

/// Products in steps.
pub(super) struct InSteps<F>(PhantomData<F>);

/// For each vector of codes of a step: which factor each of the 16 sums of four products takes.
struct Lanes<const GROUP: usize>([[i32; 16]; 8]);

impl<const GROUP: usize> Lanes<GROUP> {
    const ALL: &'static Self = &{
        let mut all = [[0; 16]; 8];
        let mut sum = 0;
        while sum < FACTORS * GROUP / 4 {
            all[sum / 16][sum % 16] = (sum * 4 / GROUP) as i32;
            sum += 1;
        }
        Lanes(all)
    };
}

/// Where a row of activations lies.
#[derive(Clone, Copy)]
pub(super) struct Row {
    pub high: *const i8,
    pub low: *const i8,
    pub scales: *const f32,
    pub sums: *const f32,
}

/// See [`Kernel::products`](super::Kernel::products).
///
/// # Safety
/// The processor has the instructions. There are up to [`COLUMNS`] rows of so many blocks, and activations in
/// the dtype's form.
pub(super) unsafe fn products<const R: usize>(
    dtype: DType,
    weights: Rows<'_>,
    blocks: usize,
    x: [Codes<'_>; R],
) -> [[f32; COLUMNS]; R] {
    use crate::cpu::blocks::{Q2_0, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, Tq1_0, Tq2_0};
    use in_units::InUnits;
    use ternary::ByGroups;
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::Q8_0 => multiply::<InSteps<Q8_0>, R>(weights, blocks, x),
            DType::Q4_0 => multiply::<InUnits<Q4_0>, R>(weights, blocks, x),
            DType::Q4_1 => multiply::<InUnits<Q4_1>, R>(weights, blocks, x),
            DType::Q5_0 => multiply::<InUnits<Q5_0>, R>(weights, blocks, x),
            DType::Q5_1 => multiply::<InUnits<Q5_1>, R>(weights, blocks, x),
            DType::Q4K => multiply::<InSteps<Q4K>, R>(weights, blocks, x),
            DType::Q5K => multiply::<InSteps<Q5K>, R>(weights, blocks, x),
            DType::Q6K => multiply::<InSteps<Q6K>, R>(weights, blocks, x),
            DType::Tq1_0 => multiply::<ByGroups<Tq1_0>, R>(weights, blocks, x),
            DType::Tq2_0 => multiply::<ByGroups<Tq2_0>, R>(weights, blocks, x),
            DType::Q2_0 => multiply::<ByGroups<Q2_0>, R>(weights, blocks, x),
            other => unreachable!("there is no kernel for {other}"),
        }
    }
}

/// # Safety
/// As [`products`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn multiply<P: Product, const R: usize>(
    weights: Rows<'_>,
    blocks: usize,
    x: [Codes<'_>; R],
) -> [[f32; COLUMNS]; R] {
    let x = x.map(|x| {
        let (high, low) = x.bytes.split_at(x.bytes.len() / 2);
        Row {
            high: high.as_ptr(),
            low: low.as_ptr(),
            scales: x.scales.as_ptr(),
            sums: x.sums.as_ptr(),
        }
    });
    let mut sums = [[0.0; COLUMNS]; R];
    for at in (0..weights.count).step_by(SUMMED) {
        // By rows of x.
        let mut totals = [[_mm512_setzero_ps(); SUMMED]; R];
        let rows = weights.starts(at);
        if P::HAS_FOUR && R == 1 && rows.len() == SUMMED {
            let mut four = [std::ptr::null(); SUMMED];
            four.iter_mut().zip(rows).for_each(|(to, row)| *to = row);
            // SAFETY: the caller's promise.
            totals[0] = unsafe { P::four(four, blocks, x[0]) };
        } else {
            for (c, row) in rows.enumerate() {
                // SAFETY: the caller's promise.
                let of_column = unsafe { P::column(row, blocks, x) };
                for r in 0..R {
                    totals[r][c] = of_column[r];
                }
            }
        }
        for (totals, sums) in totals.iter().zip(&mut sums) {
            let sums = &mut sums[at..at + SUMMED];
            // SAFETY: as many floats.
            unsafe { _mm_storeu_ps(sums.as_mut_ptr(), sums_of_four(*totals)) };
        }
    }
    sums
}

impl<F: Fused> Product for InSteps<F> {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn column<const R: usize>(row: *const u8, blocks: usize, x: [Row; R]) -> [__m512; R] {
        let mut totals = [_mm512_setzero_ps(); R];
        let whole = blocks / F::BLOCKS;
        // SAFETY: steps and vectors end with the row and with activations.
        unsafe {
            for i in 0..whole {
                const { assert!(F::GROUP == 16 || F::GROUP == 32) };
                let step = row.add(i * F::BLOCKS * F::BLOCK.1);
                fetch(step, F::BLOCKS * F::BLOCK.1);
                let scales = begin::<F, R>(step, F::BLOCKS, x, i, &mut totals);
                match F::GROUP {
                    16 => {
                        for z in 0..4 {
                            add::<F, R>(step, F::BLOCKS, x, (i, z), &scales, &mut totals);
                        }
                    }
                    _ => {
                        for z in 0..8 {
                            add::<F, R>(step, F::BLOCKS, x, (i, z), &scales, &mut totals);
                        }
                    }
                }
            }
            let rest = blocks % F::BLOCKS;
            if rest > 0 {
                let step = row.add(whole * F::BLOCKS * F::BLOCK.1);
                fetch(step, rest * F::BLOCK.1);
                let scales = begin::<F, R>(step, rest, x, whole, &mut totals);
                for z in 0..(rest * F::BLOCK.0).div_ceil(CODES) {
                    add::<F, R>(step, rest, x, (whole, z), &scales, &mut totals);
                }
            }
        }
        totals
    }
}

/// The scales of step `i` with each row, to whose totals what offsets give is added.
///
/// # Safety
/// As [`Product::column`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn begin<F: Fused, const R: usize>(
    step: *const u8,
    blocks: usize,
    x: [Row; R],
    i: usize,
    totals: &mut [__m512; R],
) -> [__m512; R] {
    let mut scales = [_mm512_setzero_ps(); R];
    // SAFETY: the caller's promise.
    unsafe {
        let (w_scales, offsets) = F::factors(step, blocks);
        for r in 0..R {
            let sums = _mm512_loadu_ps(x[r].sums.add(i * FACTORS));
            totals[r] = _mm512_fmadd_ps(offsets, sums, totals[r]);
            scales[r] = _mm512_mul_ps(w_scales, _mm512_loadu_ps(x[r].scales.add(i * FACTORS)));
        }
    }
    scales
}

/// Adds the products of vector `z` of step `i`.
///
/// # Safety
/// As [`Product::column`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn add<F: Fused, const R: usize>(
    step: *const u8,
    blocks: usize,
    x: [Row; R],
    (i, z): (usize, usize),
    scales: &[__m512; R],
    totals: &mut [__m512; R],
) {
    let at = i * FACTORS * F::GROUP + z * CODES;
    // SAFETY: the caller's promise.
    unsafe {
        let codes = F::codes(step, blocks, z);
        let lanes = match F::GROUP {
            16 => &Lanes::<16>::ALL.0[z],
            _ => &Lanes::<32>::ALL.0[z],
        };
        let lanes = _mm512_loadu_si512(lanes.as_ptr().cast());
        for r in 0..R {
            let (high, low) = (x[r].high.add(at), x[r].low.add(at));
            let zero = _mm512_setzero_si512();
            let dots = _mm512_dpbusd_epi32(zero, codes, _mm512_loadu_si512(high.cast()));
            let dots = _mm512_slli_epi32::<8>(dots);
            let dots = _mm512_dpbusd_epi32(dots, codes, _mm512_loadu_si512(low.cast()));
            let scale = _mm512_permutexvar_ps(lanes, scales[r]);
            totals[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), scale, totals[r]);
        }
    }
}
