//! Rows of tensors as slices.

use std::ops::Range;

use crate::dtype::DType;
use crate::tensor::RawTensor;

/// # Safety
/// Row `row` of `t` is `dim` contiguous, initialised elements of type T.
#[inline(always)]
pub(crate) unsafe fn row_of<'a, T>(t: &RawTensor, row: usize, dim: usize) -> &'a [T] {
    if dim == 0 {
        return &[]; // an empty tensor's pointer may be NULL
    }
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
    if dim == 0 {
        return &mut [];
    }
    // SAFETY: the caller's promise; offsets of existing rows fit an isize (see Layout).
    unsafe { std::slice::from_raw_parts_mut(t.ptr.cast::<T>().add(t.layout.row_offset(row)), dim) }
}

/// # Safety
/// Columns `columns` of row `row` of `t` are contiguous, initialised elements of type T.
#[inline(always)]
pub(crate) unsafe fn part_of<'a, T>(t: &RawTensor, row: usize, columns: Range<usize>) -> &'a [T] {
    if columns.is_empty() {
        return &[];
    }
    let offset = t.layout.row_offset(row) + columns.start;
    // SAFETY: the caller's promise; offsets of existing elements fit an isize (see Layout).
    unsafe { std::slice::from_raw_parts(t.ptr.cast::<T>().cast_const().add(offset), columns.len()) }
}

/// # Safety
/// Columns `columns` of row `row` of `t` are contiguous elements of type T, and nothing else accesses them.
#[inline(always)]
pub(crate) unsafe fn part_of_mut<'a, T>(
    t: &RawTensor,
    row: usize,
    columns: Range<usize>,
) -> &'a mut [T] {
    if columns.is_empty() {
        return &mut [];
    }
    let offset = t.layout.row_offset(row) + columns.start;
    // SAFETY: the caller's promise; offsets of existing elements fit an isize (see Layout).
    unsafe { std::slice::from_raw_parts_mut(t.ptr.cast::<T>().add(offset), columns.len()) }
}

/// The integers of an i32 or i64 tensor, in row-major order.
///
/// # Safety
/// Every element is initialised memory of the tensor's dtype.
pub(crate) unsafe fn integers(t: &RawTensor) -> Vec<i64> {
    let layout = &t.layout;
    if layout.is_empty() {
        return Vec::new();
    }
    let last = layout.rank().saturating_sub(1);
    let (columns, stride) = (layout.dim(last), layout.stride(last));
    let mut values = Vec::with_capacity(layout.num_elements());
    for row in 0..layout.num_rows() {
        let start = layout.row_offset(row);
        for column in 0..columns {
            let offset = start + column * stride;
            // SAFETY: the caller's promise; offsets of existing elements fit an isize (see Layout).
            values.push(unsafe {
                match t.dtype {
                    DType::I32 => i64::from(t.ptr.cast::<i32>().add(offset).read()),
                    DType::I64 => t.ptr.cast::<i64>().add(offset).read(),
                    other => unreachable!("indices were checked to be integers, not {other}"),
                }
            });
        }
    }
    values
}
