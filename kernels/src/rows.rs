//! Rows of strided tensors: up to three row dimensions, of which the last two may be absent (size 1).

use cubecl::prelude::*;

use crate::emit::{Builder, ScalarType, scalars};

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

scalars! { Dims, DimsExpand {
    /// The sizes of as many row dimensions as there may be, but the first, as divisors.
    size_1: u32,
    size_1_multiplier: u32,
    size_1_shift: u32,
    size_2: u32,
    size_2_multiplier: u32,
    size_2_shift: u32,
    size_3: u32,
    size_3_multiplier: u32,
    size_3_shift: u32,
    size_4: u32,
    size_4_multiplier: u32,
    size_4_shift: u32,
    /// Their strides in one tensor, and in another.
    first_0: u64,
    first_1: u64,
    first_2: u64,
    first_3: u64,
    first_4: u64,
    second_0: u64,
    second_1: u64,
    second_2: u64,
    second_3: u64,
    second_4: u64,
} }

/// The index of a row in every row dimension.
#[derive(CubeType, Clone, Copy)]
struct Index {
    i0: u64,
    i1: u64,
    i2: u64,
    i3: u64,
    i4: u64,
}

#[cube]
fn index_of(row: u32, dims: &Dims) -> Index {
    let mut i0 = row;
    let mut i1 = 0u32;
    let mut i2 = 0u32;
    let mut i3 = 0u32;
    let mut i4 = 0u32;
    // Equally spaced rows, the usual case, have one dimension.
    if dims.size_1 > 1u32 {
        let n4 = Divisor {
            size: dims.size_4,
            multiplier: dims.size_4_multiplier,
            shift: dims.size_4_shift,
        };
        let n3 = Divisor {
            size: dims.size_3,
            multiplier: dims.size_3_multiplier,
            shift: dims.size_3_shift,
        };
        let n2 = Divisor {
            size: dims.size_2,
            multiplier: dims.size_2_multiplier,
            shift: dims.size_2_shift,
        };
        let n1 = Divisor {
            size: dims.size_1,
            multiplier: dims.size_1_multiplier,
            shift: dims.size_1_shift,
        };
        let above_4 = divide(row, n4);
        i4 = row - above_4 * dims.size_4;
        let above_3 = divide(above_4, n3);
        i3 = above_4 - above_3 * dims.size_3;
        let above_2 = divide(above_3, n2);
        i2 = above_3 - above_2 * dims.size_2;
        i0 = divide(above_2, n1);
        i1 = above_2 - i0 * dims.size_1;
    }
    Index {
        i0: u64::cast_from(i0),
        i1: u64::cast_from(i1),
        i2: u64::cast_from(i2),
        i3: u64::cast_from(i3),
        i4: u64::cast_from(i4),
    }
}

/// Where a row of the one tensor begins.
#[cube]
pub(crate) fn first_row(row: u32, dims: &Dims) -> u64 {
    let at = index_of(row, dims);
    at.i0 * dims.first_0
        + at.i1 * dims.first_1
        + at.i2 * dims.first_2
        + at.i3 * dims.first_3
        + at.i4 * dims.first_4
}

/// Where the same row of the other begins.
#[cube]
pub(crate) fn second_row(row: u32, dims: &Dims) -> u64 {
    let at = index_of(row, dims);
    at.i0 * dims.second_0
        + at.i1 * dims.second_1
        + at.i2 * dims.second_2
        + at.i3 * dims.second_3
        + at.i4 * dims.second_4
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
