//! Rows of tensors as slices.

use crate::tensor::RawTensor;

/// # Safety
/// Row `row` of `t` is `dim` contiguous, initialised elements of type T.
#[inline(always)]
pub(crate) unsafe fn row_of<'a, T>(t: &RawTensor, row: usize, dim: usize) -> &'a [T] {
    // SAFETY: the caller's promise; offsets of existing rows fit an isize (see Layout).
    unsafe {
        std::slice::from_raw_parts(
            t.ptr.cast::<T>().cast_const().add(t.layout.row_offset(row)),
            dim,
        )
    }
}

/// # Safety
/// Row `row` of `t` is `dim` contiguous elements of type T, and nothing else accesses it.
#[inline(always)]
pub(crate) unsafe fn row_of_mut<'a, T>(t: &RawTensor, row: usize, dim: usize) -> &'a mut [T] {
    // SAFETY: the caller's promise; offsets of existing rows fit an isize (see Layout).
    unsafe { std::slice::from_raw_parts_mut(t.ptr.cast::<T>().add(t.layout.row_offset(row)), dim) }
}
