//! Products of f32 on tensor cores, which multiply TF32, f32 with 11 bits of significand, and round their sums toward zero.
//!
//! After Ootomo and Yokota (2022, arXiv:2203.03341) both are made good. Each factor is the sum of a big and a small part to 2⁻²² of
//! itself; of the products of parts the smallest, of two small ones, is left out, and that of the big ones comes last. Sums are begun
//! anew every 16 terms and then added to others by the usual arithmetic, which rounds to nearest.

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use super::fragments::*;
use super::softmax::Parts;

/// Four elements: the widest access.
pub type Quad = Const<4>;

/// A register of TF32: the upper 19 bits of an f32, the others ignored.
type Tf32 = Vector<tf32, Const<1>>;

/// The 16×8×8 product of TF32: lane `4 g + t` holds terms `t` and `t + 4` of rows `g` and `g + 8`, rows first, and of column `g`.
#[cube]
fn mma_tf32(a: &Array<Tf32>, b: &Array<Tf32>, c: &mut Array<Vector<f32, Pair>>) {
    MmaDefinition::<tf32, tf32, f32>::new(16usize, 8usize, 8usize).execute_inplace(a, b, c);
}

/// What a lane has of a factor with 16 terms: for two `mma`, the registers of the first, then those of the second, each as it is,
/// which the tensor cores cut, and what they cut off.
#[derive(CubeType)]
pub struct Cut16 {
    big: Sequence<Array<Tf32>>,
    small: Sequence<Array<Tf32>>,
}

/// What the tensor cores cut is the nearest TF32 once half a unit is added to an element.
#[cube]
fn big_part(x: f32) -> u32 {
    u32::reinterpret(x) + 0x1000u32
}

/// What that leaves, exactly; the tensor cores cut it too.
#[cube]
fn small_part(x: f32, big: u32) -> Tf32 {
    Tf32::reinterpret(x - f32::reinterpret(big & 0xffff_e000u32))
}

/// Terms 4 t.. of 16 of rows g and g + 8.
#[cube]
pub fn cut_left(upper: Vector<f32, Quad>, lower: Vector<f32, Quad>) -> Cut16 {
    let mut big = Sequence::<Array<Tf32>>::new();
    let mut small = Sequence::<Array<Tf32>>::new();
    #[unroll]
    for i in 0..2usize {
        let mut of_big = Array::<Tf32>::new(4usize);
        let mut of_small = Array::<Tf32>::new(4usize);
        #[unroll]
        for j in 0..4usize {
            let term = comptime!(i * 2 + j / 2);
            let x = if comptime!(j % 2 == 0) {
                upper[term]
            } else {
                lower[term]
            };
            let part = big_part(x);
            of_big[j] = Tf32::reinterpret(part);
            of_small[j] = small_part(x, part);
        }
        big.push(of_big);
        small.push(of_small);
    }
    Cut16 { big, small }
}

/// Terms 4 t.. of 16 of column g.
#[cube]
pub fn cut_right(x: Vector<f32, Quad>) -> Cut16 {
    let mut big = Sequence::<Array<Tf32>>::new();
    let mut small = Sequence::<Array<Tf32>>::new();
    #[unroll]
    for i in 0..2usize {
        let mut of_big = Array::<Tf32>::new(2usize);
        let mut of_small = Array::<Tf32>::new(2usize);
        #[unroll]
        for j in 0..2usize {
            let x = x[comptime!(i * 2 + j)];
            let part = big_part(x);
            of_big[j] = Tf32::reinterpret(part);
            of_small[j] = small_part(x, part);
        }
        big.push(of_big);
        small.push(of_small);
    }
    Cut16 { big, small }
}

/// Adds sums of 16 products to parts `first..first + chains` of each fragment: the product of the big parts last, so that few of the
/// hardware's roundings are of the whole sum.
#[cube]
pub fn products(
    a: &Sequence<Cut16>,
    b: &Sequence<Cut16>,
    to: &mut Parts,
    #[comptime] parts: usize,
    #[comptime] first: usize,
    #[comptime] fragments: usize,
    #[comptime] chains: usize,
) {
    let mut sums = Sequence::<Array<Vector<f32, Pair>>>::new();
    #[unroll]
    for _ in 0..fragments * chains {
        sums.push(zeros());
    }
    #[unroll]
    for i in 0..6usize {
        #[unroll]
        for c in 0..chains {
            #[unroll]
            for f in 0..fragments {
                let a = a.index(f);
                let b = b.index(c);
                let sum = sums.index_mut(comptime!(f * chains + c));
                if comptime!(i < 2) {
                    mma_tf32(a.small.index(i), b.big.index(i), sum);
                } else if comptime!(i < 4) {
                    mma_tf32(
                        a.big.index(comptime!(i - 2)),
                        b.small.index(comptime!(i - 2)),
                        sum,
                    );
                } else {
                    mma_tf32(
                        a.big.index(comptime!(i - 4)),
                        b.big.index(comptime!(i - 4)),
                        sum,
                    );
                }
            }
        }
    }
    #[unroll]
    for c in 0..chains {
        #[unroll]
        for f in 0..fragments {
            let part = to.index_mut(comptime!(f * parts + first + c));
            let sum = sums.index(comptime!(f * chains + c));
            part[0] = part[0] + sum[0];
            part[1] = part[1] + sum[1];
        }
    }
}
