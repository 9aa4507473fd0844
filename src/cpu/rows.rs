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

/// The integers of an i32 or i64 tensor, in row-major order, where they lie.
#[derive(Clone, Copy)]
pub(crate) struct Integers<'a>(&'a RawTensor);

impl<'a> Integers<'a> {
    /// # Safety
    /// Every element is initialised memory of the tensor's dtype for as long as the result lives.
    pub unsafe fn new(t: &'a RawTensor) -> Self {
        Integers(t)
    }

    pub fn len(self) -> usize {
        self.0.layout.num_elements()
    }

    /// Element `index`, which is below [`Integers::len`].
    #[inline(always)]
    pub fn get(self, index: usize) -> i64 {
        let (t, layout) = (self.0, &self.0.layout);
        debug_assert!(index < self.len());
        let (mut offset, mut rest) = (0, index);
        for dim in (0..layout.rank()).rev() {
            let n = layout.dim(dim).max(1);
            // The first dimension, often the only one, takes what is left without a division.
            let (here, left) = if dim == 0 {
                (rest, 0)
            } else {
                (rest % n, rest / n)
            };
            offset += here * layout.stride(dim);
            rest = left;
        }
        // SAFETY: `new` was promised that the elements are there; offsets of existing elements fit
        // an isize (see Layout).
        unsafe {
            match t.dtype {
                DType::I32 => i64::from(t.ptr.cast::<i32>().add(offset).read()),
                DType::I64 => t.ptr.cast::<i64>().add(offset).read(),
                other => unreachable!("indices were checked to be integers, not {other}"),
            }
        }
    }

    /// The first element that is outside `0..end`, and where it is.
    pub fn find_outside(self, end: usize) -> Option<(usize, i64)> {
        // Sizes fit an i64 (see Layout).
        (0..self.len())
            .map(|i| (i, self.get(i)))
            .find(|(_, value)| !(0..end as i64).contains(value))
    }
}
