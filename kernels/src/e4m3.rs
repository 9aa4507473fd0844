//! Codes of 8-bit floats (e4m3), in arithmetic that every architecture has.

use cubecl::prelude::*;

use crate::emit::Kernel;

/// Two neighbours of a row: one 32-bit register for 16-bit elements.
type Pair = Const<2>;

/// Of f32's exponent less that of a normal code, in place.
const BIAS: u32 = (127 - 7) << 23;
/// The bits of the least normal number, 2^-6.
const LEAST: u32 = (127 - 6) << 23;
/// A number whose unit in the last place is that of subnormal codes, 2^-9, and its bits.
const SUBNORMAL: f32 = 16384.0;
const SUBNORMAL_BITS: u32 = (127 + 14) << 23;
/// Bits of f32's significand that a code lacks.
const DROPPED: u32 = 23 - 3;
/// NaN, whatever the sign; the code below it is the greatest number, 448.
const NAN: u32 = 0x7f;

/// The code nearest to a number, which of two is the even one; the last for what lies beyond. It is
/// `E4m3::store` of the CPU, to the bit.
#[cube]
pub fn encode(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    let magnitude = bits & 0x7fff_ffffu32;
    let sum = f32::reinterpret(magnitude) + SUBNORMAL;
    let subnormal = u32::reinterpret(sum) - SUBNORMAL_BITS;
    let odd = (magnitude >> DROPPED) & 1u32;
    let half = comptime!((1u32 << (DROPPED - 1)) - 1);
    let normal = (magnitude + odd + comptime!(half.wrapping_sub(BIAS))) >> DROPPED;
    let rounded = select(magnitude < LEAST, subnormal, normal);
    let finite = min(rounded, comptime!(NAN - 1));
    let code = select(magnitude > 0x7f80_0000u32, NAN, finite);
    code | ((bits >> 24u32) & 0x80u32)
}

/// The number of a code.
#[cube]
pub fn widen(bits: u32) -> f32 {
    let code = bits & NAN;
    let magnitude = code << DROPPED;
    // A subnormal is the excess over the least normal number, which takes it in exactly.
    let excess = f32::reinterpret(magnitude + LEAST) - comptime!(1.0f32 / 64.0);
    let normal = select(code == NAN, 0x7fc0_0000u32, magnitude + BIAS);
    let widened = select(code < 8u32, u32::reinterpret(excess), normal);
    f32::reinterpret(widened | ((bits & 0x80u32) << 24u32))
}

/// The codes in the lower half of a word, NaN among them. CubeCL has no word for the instruction: a reversal of bits, which these
/// kernels have no other use for, stands for it in their text until [`with_instruction`] puts it there.
#[cube]
pub fn pair(word: u32) -> Vector<half::f16, Pair> {
    Vector::<half::f16, Pair>::reinterpret(word.reverse_bits())
}

/// Where there is no instruction a number is 2^-8 of itself with its exponent where that of f16 is. NaN would be 480: what makes an
/// infinity of that, and of no other, is multiplied by zero and added.
const UNPACK: &str = "\
inline __device__ uint32
__e4m3x2_to_f16x2(uint32 codes) {
#if __CUDA_ARCH__ >= 890
    uint32 halves;
    asm(\"{.reg .b16 low;\\ncvt.u16.u32 low, %1;\\ncvt.rn.f16x2.e4m3x2 %0, low;}\" : \"=r\"(halves) : \"r\"(codes));
    return halves;
#else
    const uint32 upper = (codes & 0xffu) << 8 | (codes & 0xff00u) << 16;
    const uint32 bits = (upper & 0x80008000u) | (upper >> 1 & 0x3f803f80u);
    const __half2 small = reinterpret_cast<const __half2 &>(bits);
    const __half2 infinite = __hmul2(small, __float2half2_rn(140.0f * 256.0f));
    const __half2 number = __hmul2(small, __float2half2_rn(256.0f));
    const __half2 marked = __hfma2(infinite, __float2half2_rn(0.0f), number);
    return reinterpret_cast<const uint32 &>(marked);
#endif
    }
";

/// The kernel with the instruction that [`pair`] stands for.
pub fn with_instruction(mut kernel: Kernel) -> Kernel {
    let text = kernel.text.replace("__brev(", "__e4m3x2_to_f16x2(");
    const BEGINS: &str = "extern \"C\" __global__";
    kernel.text = text.replacen(BEGINS, &format!("{UNPACK}{BEGINS}"), 1);
    kernel
}

/// The elements of `x` times `factor` as what a cache stores: codes, or rounded to `D`.
#[cube]
pub fn stored<D: Numeric, N: Size>(
    x: Vector<f32, N>,
    factor: f32,
    #[comptime] codes: bool,
) -> Vector<D, N> {
    if comptime!(codes) {
        let mut out = Vector::<D, N>::empty();
        #[unroll]
        for j in 0..N::value() {
            out[j] = D::cast_from(encode(x[j] * factor));
        }
        out
    } else {
        Vector::cast_from(x)
    }
}
