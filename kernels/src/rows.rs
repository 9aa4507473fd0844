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

/// The sizes of the last two row dimensions; the first needs none.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Sizes {
    pub n1: u32,
    pub n2: u32,
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
    // Equally spaced rows, the usual case, need no division.
    if sizes.n2 > 1 {
        i2 = i0 % sizes.n2;
        i0 /= sizes.n2;
    }
    if sizes.n1 > 1 {
        i1 = i0 % sizes.n1;
        i0 /= sizes.n1;
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

/// Declares the sizes of the last two row dimensions.
pub(crate) fn sizes(b: &mut Builder) -> SizesExpand {
    SizesExpand {
        n1: b.scalar("size_1", ScalarType::U32).into(),
        n2: b.scalar("size_2", ScalarType::U32).into(),
    }
}
