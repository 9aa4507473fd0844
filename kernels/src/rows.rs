//! Rows of strided tensors: up to three row dimensions, of which the last two may be absent (size 1).

use cubecl::prelude::*;

use crate::emit::{Builder, ScalarType};

/// Strides of the row dimensions, in elements or vectors.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Strides {
    pub d0: usize,
    pub d1: usize,
    pub d2: usize,
}

/// A divisor, with what turns the division of a number below 2³¹ into a multiplication; the host computes it.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Divisor {
    pub size: u32,
    pub multiplier: u32,
    pub shift: u32,
}

/// `n / by`, rounded down (Granlund and Montgomery, "Division by invariant integers using multiplication", 1994).
#[cube]
pub(crate) fn divide(n: u32, by: Divisor) -> u32 {
    (u32::mul_hi(n, by.multiplier) + n) >> by.shift
}

/// The sizes of the last two row dimensions; the first needs none.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Sizes {
    pub n1: Divisor,
    pub n2: Divisor,
}

/// The index of a row in every row dimension.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct RowIndex {
    pub i0: u32,
    pub i1: u32,
    pub i2: u32,
}

/// The index of row `row`, counted in row-major order.
#[cube]
pub(crate) fn row_index(row: u32, sizes: Sizes) -> RowIndex {
    let mut i0 = row;
    let mut i1 = 0u32;
    let mut i2 = 0u32;
    // Equally spaced rows, the usual case, have one dimension.
    if sizes.n1.size > 1 {
        let outer = divide(row, sizes.n2);
        i2 = row - outer * sizes.n2.size;
        i0 = divide(outer, sizes.n1);
        i1 = outer - i0 * sizes.n1.size;
    }
    RowIndex { i0, i1, i2 }
}

/// Where a row begins.
#[cube]
pub(crate) fn row_start(index: RowIndex, strides: Strides) -> usize {
    index.i0 as usize * strides.d0 + index.i1 as usize * strides.d1 + index.i2 as usize * strides.d2
}

/// Declares the strides of a tensor's rows.
pub(crate) fn strides(b: &mut Builder, names: [&'static str; 3]) -> StridesExpand {
    let [d0, d1, d2] = names.map(|name| b.scalar(name, ScalarType::U64).into());
    StridesExpand { d0, d1, d2 }
}

/// Declares a divisor: its size, and what the host makes of it.
pub(crate) fn divisor(b: &mut Builder, names: [&'static str; 3]) -> DivisorExpand {
    let [size, multiplier, shift] = names.map(|name| b.scalar(name, ScalarType::U32).into());
    DivisorExpand {
        size,
        multiplier,
        shift,
    }
}

/// Declares the sizes of the last two row dimensions.
pub(crate) fn sizes(b: &mut Builder) -> SizesExpand {
    SizesExpand {
        n1: divisor(b, ["size_1", "size_1_multiplier", "size_1_shift"]),
        n2: divisor(b, ["size_2", "size_2_multiplier", "size_2_shift"]),
    }
}

/// Declares the number of blocks that share a row.
pub(crate) fn blocks_per_row(b: &mut Builder) -> DivisorExpand {
    divisor(
        b,
        [
            "blocks_per_row",
            "blocks_per_row_multiplier",
            "blocks_per_row_shift",
        ],
    )
}
