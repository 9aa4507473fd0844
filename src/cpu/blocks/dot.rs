//! Dot products of unpacked weights and rounded activations: codes are multiplied and summed as
//! integers, exactly, and the sum of a group is scaled in f32.

use super::{Chunk, Row};

/// By which instructions. The sums of groups are exact with all; they are added in another order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dot {
    /// Any processor's.
    Portable,
    /// AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 with VNNI, for vectors of any length.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Dot {
    /// The fastest that this processor has.
    pub fn new() -> Dot {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni")
            {
                return Dot::Avx512;
            }
            if is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
            {
                return Dot::Avx2;
            }
        }
        Dot::Portable
    }

    /// Adds the products of the chunk's first `weights`, in groups of 16 or 32, and of the same part
    /// of some rows.
    #[inline(always)]
    pub fn add<const R: usize>(
        self,
        chunk: &Chunk,
        (weights, group): (usize, usize),
        x: [Row<'_>; R],
        sums: &mut [f32; R],
    ) {
        match group {
            16 => self.add_groups::<R, 16>(chunk, weights, x, sums),
            _ => self.add_groups::<R, 32>(chunk, weights, x, sums),
        }
    }

    #[inline(always)]
    fn add_groups<const R: usize, const GROUP: usize>(
        self,
        chunk: &Chunk,
        weights: usize,
        x: [Row<'_>; R],
        sums: &mut [f32; R],
    ) {
        let groups = weights / GROUP;
        assert!(weights <= chunk.codes.len() && weights.is_multiple_of(32));
        for x in &x {
            assert!(x.codes.len() >= weights);
            assert!(x.scales.len() >= groups && x.sums.len() >= groups);
        }
        match self {
            Dot::Portable => portable::<R, GROUP>(chunk, groups, x, sums),
            // SAFETY: such a value is made where the processor has the instructions, and the
            // lengths have been checked.
            #[cfg(target_arch = "x86_64")]
            Dot::Avx2 => unsafe { x86::avx2::<R, GROUP>(chunk, groups, x, sums) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Dot::Avx512 => unsafe { x86::avx512::<R, GROUP>(chunk, groups, x, sums) },
        }
    }
}

fn portable<const R: usize, const GROUP: usize>(
    chunk: &Chunk,
    groups: usize,
    x: [Row<'_>; R],
    sums: &mut [f32; R],
) {
    for (x, sum) in x.iter().zip(sums) {
        let codes = chunk.codes.as_chunks::<GROUP>().0[..groups].iter();
        let codes = codes.zip(x.codes.as_chunks::<GROUP>().0);
        for (i, (w, x_codes)) in codes.enumerate() {
            let products = w.iter().zip(x_codes);
            let dot: i32 = products.map(|(w, x)| i32::from(*w) * i32::from(*x)).sum();
            *sum += chunk.scales[i] * x.scales[i] * dot as f32;
            *sum += chunk.offsets[i] * x.sums[i];
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Chunk, Row};

    /// Codes of a vector.
    const CODES: usize = 32;

    /// Factors of a vector.
    const FACTORS: usize = 16;

    /// For vector `z` of codes of those that share a vector of factors: which factor each of the 16
    /// sums of two products takes.
    const fn lanes<const GROUP: usize>(z: usize) -> [i32; 16] {
        let mut lanes = [0; 16];
        let mut lane = 0;
        while lane < 16 {
            lanes[lane] = ((z * CODES + 2 * lane) / GROUP) as i32;
            lane += 1;
        }
        lanes
    }

    /// # Safety
    /// The processor has the instructions. `chunk` and every row have `groups` groups, of a multiple
    /// of 32 weights.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    pub unsafe fn avx512<const R: usize, const GROUP: usize>(
        chunk: &Chunk,
        groups: usize,
        x: [Row<'_>; R],
        sums: &mut [f32; R],
    ) {
        let zero = _mm512_setzero_si512();
        let mut total = [_mm512_setzero_ps(); R];
        for first in (0..groups).step_by(FACTORS) {
            let here = (groups - first).min(FACTORS);
            let mask = (0xffff_u32 >> (FACTORS - here)) as __mmask16;
            let mut scales = [_mm512_setzero_ps(); R];
            // SAFETY: masked loads read no factor past the groups, and vectors of codes end with them
            // or before.
            unsafe {
                let w_scales = _mm512_maskz_loadu_ps(mask, chunk.scales.as_ptr().add(first));
                let offsets = _mm512_maskz_loadu_ps(mask, chunk.offsets.as_ptr().add(first));
                for r in 0..R {
                    let x_scales = _mm512_maskz_loadu_ps(mask, x[r].scales.as_ptr().add(first));
                    let x_sums = _mm512_maskz_loadu_ps(mask, x[r].sums.as_ptr().add(first));
                    scales[r] = _mm512_mul_ps(w_scales, x_scales);
                    total[r] = _mm512_fmadd_ps(offsets, x_sums, total[r]);
                }
                let vectors = here * GROUP / CODES;
                for z in 0..vectors {
                    let at = first * GROUP + z * CODES;
                    let codes = _mm256_loadu_si256(chunk.codes.as_ptr().add(at).cast());
                    let codes = _mm512_cvtepu8_epi16(codes);
                    let lanes =
                        _mm512_loadu_si512(const { Lanes::<GROUP>::ALL }.0[z].as_ptr().cast());
                    for r in 0..R {
                        let x_codes = _mm512_loadu_si512(x[r].codes.as_ptr().add(at).cast());
                        let dots = _mm512_dpwssd_epi32(zero, codes, x_codes);
                        let scale = _mm512_permutexvar_ps(lanes, scales[r]);
                        total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), scale, total[r]);
                    }
                }
            }
        }
        for (sum, total) in sums.iter_mut().zip(total) {
            *sum += _mm512_reduce_add_ps(total);
        }
    }

    /// [`lanes`] of all vectors.
    struct Lanes<const GROUP: usize>([[i32; 16]; 16]);

    impl<const GROUP: usize> Lanes<GROUP> {
        const ALL: &'static Self = &{
            let mut all = [[0; 16]; 16];
            let mut z = 0;
            while z < all.len() {
                all[z] = lanes::<GROUP>(z);
                z += 1;
            }
            Lanes(all)
        };
    }

    /// # Safety
    /// As [`avx512`].
    #[target_feature(enable = "avx2,fma")]
    pub unsafe fn avx2<const R: usize, const GROUP: usize>(
        chunk: &Chunk,
        groups: usize,
        x: [Row<'_>; R],
        sums: &mut [f32; R],
    ) {
        let mut total = [_mm256_setzero_ps(); R];
        let mut of_offsets = [0.0f32; R];
        for group in 0..groups {
            let mut dots = [_mm256_setzero_si256(); R];
            for at in (group * GROUP..(group + 1) * GROUP).step_by(16) {
                // SAFETY: 16 codes from `at` end with the group. Sums of two products are of 32 bits.
                unsafe {
                    let codes = _mm_loadu_si128(chunk.codes.as_ptr().add(at).cast());
                    let codes = _mm256_cvtepu8_epi16(codes);
                    for r in 0..R {
                        let x_codes = _mm256_loadu_si256(x[r].codes.as_ptr().add(at).cast());
                        let products = _mm256_madd_epi16(codes, x_codes);
                        dots[r] = _mm256_add_epi32(dots[r], products);
                    }
                }
            }
            for r in 0..R {
                let scale = _mm256_set1_ps(chunk.scales[group] * x[r].scales[group]);
                total[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r]), scale, total[r]);
                of_offsets[r] = chunk.offsets[group].mul_add(x[r].sums[group], of_offsets[r]);
            }
        }
        for r in 0..R {
            let high = _mm256_extractf128_ps::<1>(total[r]);
            let four = _mm_add_ps(_mm256_castps256_ps128(total[r]), high);
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            let one = _mm_add_ss(two, _mm_movehdup_ps(two));
            sums[r] += _mm_cvtss_f32(one) + of_offsets[r];
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// All that this processor has.
    pub fn every() -> Vec<Dot> {
        let mut all = vec![Dot::Portable];
        #[cfg(target_arch = "x86_64")]
        if Dot::new() != Dot::Portable {
            all.push(Dot::Avx2);
        }
        if Dot::new() != *all.last().unwrap_or(&Dot::Portable) {
            all.push(Dot::new());
        }
        all
    }

    /// Numbers that only look random.
    fn noise(seed: u32, i: usize) -> u32 {
        let x = (i as u32).wrapping_mul(0x9e37_79b9) ^ seed.wrapping_mul(0x85eb_ca6b);
        (x ^ x >> 15).wrapping_mul(0xc2b2_ae35) >> 8
    }

    /// Extreme codes and all lengths, with memory past the end that is NaN where factors are.
    fn check<const R: usize>(weights: usize, group: usize, of_one_code: bool) {
        let mut chunk = Chunk::new();
        let groups = weights / group;
        for (i, code) in chunk.codes.iter_mut().enumerate() {
            *code = if of_one_code { 255 } else { noise(1, i) as u8 };
        }
        let factor = |seed, i| noise(seed, i) as f32 / 1e5 - 80.0;
        chunk.scales.fill(f32::NAN);
        chunk.offsets.fill(f32::INFINITY);
        for i in 0..groups {
            (chunk.scales[i], chunk.offsets[i]) = (factor(2, i), factor(3, i));
        }
        let codes: Vec<Vec<i16>> = (0..R)
            .map(|r| {
                let code = |i| match of_one_code {
                    true => -32767,
                    false => noise(r as u32 + 9, i) as i16,
                };
                (0..weights).map(code).collect()
            })
            .collect();
        let factors: Vec<[Vec<f32>; 2]> = (0..R as u32)
            .map(|r| [4, 5].map(|s| (0..groups).map(|i| factor(s + 16 * r, i)).collect()))
            .collect();
        let x: [Row<'_>; R] = std::array::from_fn(|r| Row {
            codes: &codes[r],
            scales: &factors[r][0],
            sums: &factors[r][1],
        });
        for dot in every() {
            let mut sums = [1.5; R];
            dot.add(&chunk, (weights, group), x, &mut sums);
            for (sum, x) in sums.iter().zip(&x) {
                let (mut expected, mut most) = (1.5, 1.0f64);
                let mut add = |term: f64| {
                    expected += term;
                    most += term.abs();
                };
                for i in 0..weights {
                    let scale = f64::from(chunk.scales[i / group]) * f64::from(x.scales[i / group]);
                    add(scale * f64::from(chunk.codes[i]) * f64::from(x.codes[i]));
                }
                for i in 0..groups {
                    add(f64::from(chunk.offsets[i]) * f64::from(x.sums[i]));
                }
                let error = (f64::from(*sum) - expected).abs();
                assert!(
                    error <= 2e-6 * most,
                    "{dot:?} {weights} {group}: {error} of {most}"
                );
            }
        }
    }

    #[test]
    fn all_instructions_agree() {
        for group in [16, 32] {
            for blocks in [1, 2, 3, 8, 15, 16, 17, 18, 33, 48, 64] {
                let groups = blocks * 32 / group;
                for of_one_code in [false, true] {
                    check::<1>(groups * group, group, of_one_code);
                    check::<4>(groups * group, group, of_one_code);
                }
            }
        }
    }
}
