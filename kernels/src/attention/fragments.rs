//! Tensor-core fragments: the 16×8×16 `mma` and the loads that feed it.
//!
//! Lane `4 g + t` of an accumulator holds rows `g` and `g + 8` (index 0 and 1 of the array), columns `2 t` and `2 t + 1`.

use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;

/// Two neighbours of a row: one 32-bit register for 16-bit elements.
pub type Pair = Const<2>;
/// Eight 16-bit elements: the widest access, and a row of an 8×8 matrix.
pub type Line = Const<8>;

/// Which lane of which plane a thread is, and what it has of fragments: rows `group_row` and
/// `group_row + 8`, columns `2 pair` and `2 pair + 1`.
#[derive(CubeType, Clone)]
pub struct Lane {
    pub lane: u32,
    pub plane: u32,
    pub group_row: u32,
    pub pair: u32,
}

#[cube]
pub fn this_lane() -> Lane {
    let lane = UNIT_POS_X % 32u32;
    let plane = UNIT_POS_X / 32u32;
    let group_row = lane / 4u32;
    let pair = lane % 4u32;
    Lane {
        lane,
        plane,
        group_row,
        pair,
    }
}

#[cube]
pub fn mma<E: Float>(
    a: &Array<Vector<E, Pair>>,
    b: &Array<Vector<E, Pair>>,
    c: &mut Array<Vector<f32, Pair>>,
) {
    MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize).execute_inplace(a, b, c);
}

/// Four 8×8 matrices; lanes `8 i..8 i + 8` give the rows of matrix `i`.
#[cube]
pub fn load_matrices<E: Float>(
    tile: &SharedMemory<Vector<E, Line>>,
    line: u32,
    #[comptime] transpose: bool,
) -> Array<Vector<E, Pair>> {
    let line = line as usize;
    MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize).load_matrix::<Vector<E, Line>, Pair>(
        &tile.slice(line, line + 1),
        MatrixIdent::A,
        4usize,
        transpose,
    )
}

/// Registers `first` and `first + 1` as the right-hand side of a product.
#[cube]
pub fn registers<E: Float>(
    matrices: &Array<Vector<E, Pair>>,
    #[comptime] first: usize,
) -> Array<Vector<E, Pair>> {
    let mut out = Array::<Vector<E, Pair>>::new(2usize);
    out[0] = matrices[first];
    out[1] = matrices[first + 1];
    out
}

#[cube]
pub fn zeros() -> Array<Vector<f32, Pair>> {
    let mut out = Array::<Vector<f32, Pair>>::new(2usize);
    out[0] = Vector::new(0.0f32);
    out[1] = Vector::new(0.0f32);
    out
}

/// The largest of the four lanes that share a row.
#[cube]
pub fn row_max(x: f32) -> f32 {
    let x = max(x, plane_shuffle_xor(x, 1u32));
    max(x, plane_shuffle_xor(x, 2u32))
}

#[cube]
pub fn row_sum(x: f32) -> f32 {
    let x = x + plane_shuffle_xor(x, 1u32);
    x + plane_shuffle_xor(x, 2u32)
}

/// One multiplication and the hardware's 2ˣ: two units in the last place.
#[cube(fast_math = cubecl_core::ir::FastMath::all())]
pub fn fast_exp(x: f32) -> f32 {
    x.exp()
}
