//! The shares of ranks: what each copies and reduces once all have shown their calls.
//!
//! A sum is of the ranks in their order, in f32 (of integers in 64 bits), and rounded once. So one rank
//! computes an element for all of them, they have the same bits, and who computes it makes no
//! difference.

use std::ops::Range;

use half::{bf16, f16};

use super::group::Calls;
use crate::cpu::Cpu;
use crate::cpu::float::{Float, blocks};
use crate::dtype::DType;
use crate::problem::collective::{Kind, Problem, ReduceOp};
use crate::tensor::RawTensor;

/// Bytes of a copy that count as one elementary operation.
const COPIED: usize = 16;

/// Does a rank's share.
///
/// # Safety
/// All ranks have begun with calls that agree, each calls this, and none has ended. Tensors are checked:
/// those of all ranks are valid, and overlap only as in place.
pub(super) unsafe fn run(cpu: &Cpu, rank: usize, problem: &Problem<'_>, calls: Calls<'_>) {
    // SAFETY: the caller's promise is what each asks for; calls that agree have parts of equal sizes.
    unsafe {
        match problem.kind {
            Kind::AllReduce(op) => {
                // A rank reduces a part of the elements for all.
                const AT_ONCE: usize = 64;
                let share = problem.row.div_ceil(calls.len()).next_multiple_of(AT_ONCE);
                let start = problem.row.min(rank * share);
                let share = start..problem.row.min(start + share);
                reduce(cpu, op, problem.dtype, calls, share, None);
            }
            Kind::ReduceScatter(op) => {
                let (start, len) = problem.sent_to(rank);
                let own = problem.out.as_ref();
                reduce(cpu, op, problem.dtype, calls, start..start + len, own);
            }
            Kind::AllGather => {
                for from in 0..calls.len() {
                    gather(cpu, problem, (from, from), calls, 0);
                }
            }
            Kind::GatherBackwards => {
                for from in 0..calls.len() {
                    gather(cpu, problem, (from, calls.len() - 1 - from), calls, 0);
                }
            }
            Kind::AllToAll => {
                for from in 0..calls.len() {
                    let start = calls.get(from).map_or(0, |call| call.sent_to(rank).0);
                    gather(cpu, problem, (from, from), calls, start);
                }
            }
            Kind::Broadcast(root) => {
                let x = calls.get(root).and_then(|call| call.x);
                if let (Some(x), Some(out)) = (x, problem.out) {
                    copy(cpu, &out, 0, &x, 0, problem.row);
                }
            }
            // Not of all ranks.
            Kind::SendReceive { .. } => {}
        }
    }
}

/// Copies what a rank gets from another, whose tensor has it from `start` on, to where the part of one is.
///
/// # Safety
/// As [`run`].
unsafe fn gather(
    cpu: &Cpu,
    problem: &Problem<'_>,
    (from, part): (usize, usize),
    calls: Calls<'_>,
    start: usize,
) {
    let x = calls.get(from).and_then(|call| call.x);
    let (Some(x), Some(out)) = (x, problem.out) else {
        return;
    };
    let (to, len) = problem.received_from(part);
    // SAFETY: the caller's promise: the part is in both tensors.
    unsafe { copy(cpu, &out, to, &x, start, len) }
}

/// Copies `len` elements, from where the second tensor has them to where the first is to. What is
/// there already, in place, stays.
///
/// # Safety
/// Both have these elements, contiguous and of one dtype; they are the same or do not overlap, and
/// nobody else accesses the first.
pub(super) unsafe fn copy(
    cpu: &Cpu,
    to: &RawTensor,
    to_start: usize,
    from: &RawTensor,
    from_start: usize,
    len: usize,
) {
    let size = to.dtype.size();
    // SAFETY: elements of the tensors: the caller's promise.
    let (to, from) = unsafe {
        (
            at::<u8>(to, to_start * size),
            at::<u8>(from, from_start * size),
        )
    };
    if len == 0 || to.0 == from.0 {
        return;
    }
    cpu.for_each_range((len * size).div_ceil(COPIED), 1, |range| {
        let bytes = range.start * COPIED..(len * size).min(range.end * COPIED);
        // SAFETY: of the elements; ranges do not overlap, nor do the two.
        unsafe {
            let (to, from) = (to.get(bytes.start), from.get(bytes.start));
            std::ptr::copy_nonoverlapping(from, to, bytes.len());
        }
    });
}

/// An address that threads share.
#[derive(Clone, Copy)]
struct At<T>(*mut T);

// SAFETY: an address; who dereferences it carries the obligations.
unsafe impl<T> Sync for At<T> {}

impl<T> At<T> {
    /// # Safety
    /// The element is there, or one behind the last.
    unsafe fn get(&self, index: usize) -> *mut T {
        // SAFETY: the caller's promise.
        unsafe { self.0.add(index) }
    }
}

/// Where a tensor's element is, counted in `T`.
///
/// # Safety
/// It has the element, or ends there.
unsafe fn at<T>(tensor: &RawTensor, index: usize) -> At<T> {
    // An empty tensor may have no address.
    At(tensor.ptr.cast::<T>().wrapping_add(index))
}

/// Reduces a range of the elements of all ranks' `x`: to the beginning of `own`, or to where each rank's
/// `out` has them.
///
/// # Safety
/// As [`run`]; no other rank accesses these elements.
unsafe fn reduce(
    cpu: &Cpu,
    op: ReduceOp,
    dtype: DType,
    calls: Calls<'_>,
    range: Range<usize>,
    own: Option<&RawTensor>,
) {
    // SAFETY: the caller's promise; the type is that of the dtype.
    unsafe {
        match dtype {
            DType::F32 => reduce_as::<f32>(cpu, op, calls, range, own),
            DType::F16 => reduce_as::<f16>(cpu, op, calls, range, own),
            DType::Bf16 => reduce_as::<bf16>(cpu, op, calls, range, own),
            DType::I32 => reduce_as::<i32>(cpu, op, calls, range, own),
            DType::I64 => reduce_as::<i64>(cpu, op, calls, range, own),
            DType::I8 => reduce_as::<i8>(cpu, op, calls, range, own),
            other => unreachable!("the problem was checked to be of numbers, not {other}"),
        }
    }
}

/// # Safety
/// As [`reduce`], of tensors of `T`.
unsafe fn reduce_as<T: Number>(
    cpu: &Cpu,
    op: ReduceOp,
    calls: Calls<'_>,
    range: Range<usize>,
    own: Option<&RawTensor>,
) {
    let ranks = calls.len();
    cpu.for_each_range(range.len(), ranks, |part| {
        cpu.vectorize(
            #[inline(always)]
            || {
                let mut sum = [T::Wide::default(); crate::cpu::float::BLOCK];
                let mut next = [T::Wide::default(); crate::cpu::float::BLOCK];
                for block in blocks(part.len()) {
                    let len = block.len();
                    let start = part.start + block.start;
                    let (sum, next) = (&mut sum[..len], &mut next[..len]);
                    for rank in 0..ranks {
                        let Some(x) = calls.get(rank).and_then(|call| call.x) else {
                            continue;
                        };
                        // SAFETY: the range is of each rank's elements, which nobody writes before this
                        // thread does.
                        let x = unsafe {
                            std::slice::from_raw_parts(at::<T>(&x, range.start + start).0, len)
                        };
                        match rank {
                            0 => T::load(x, sum),
                            _ => {
                                T::load(x, next);
                                T::Wide::combine(op, sum, next);
                            }
                        }
                    }
                    if op == ReduceOp::Avg {
                        T::Wide::divide(sum, ranks);
                    }
                    let store = |out: &RawTensor, at_index: usize| {
                        // SAFETY: the elements are the output's, and this thread's alone.
                        let out = unsafe {
                            std::slice::from_raw_parts_mut(at::<T>(out, at_index).0, len)
                        };
                        T::store(sum, out);
                    };
                    if let Some(own) = own {
                        store(own, start);
                        continue;
                    }
                    for rank in 0..ranks {
                        if let Some(out) = calls.get(rank).and_then(|call| call.out) {
                            store(&out, range.start + start);
                        }
                    }
                }
            },
        );
    });
}

/// What can be reduced, and what it is reduced in.
trait Number: Copy + 'static {
    type Wide: Wide;

    fn load(src: &[Self], dst: &mut [Self::Wide]);
    fn store(src: &[Self::Wide], dst: &mut [Self]);
}

/// What sums are kept in.
trait Wide: Copy + Default {
    fn combine(op: ReduceOp, sum: &mut [Self], next: &[Self]);
    fn divide(sum: &mut [Self], by: usize);
}

macro_rules! floats {
    ($($t:ty),*) => {$(
        impl Number for $t {
            type Wide = f32;

            #[inline(always)]
            fn load(src: &[Self], dst: &mut [f32]) {
                Float::load(src, dst);
            }

            #[inline(always)]
            fn store(src: &[f32], dst: &mut [Self]) {
                Float::store(src, dst);
            }
        }
    )*};
}
floats!(f32, f16, bf16);

macro_rules! integers {
    ($($t:ty),*) => {$(
        impl Number for $t {
            type Wide = i64;

            #[inline(always)]
            fn load(src: &[Self], dst: &mut [i64]) {
                dst.iter_mut().zip(src).for_each(|(d, s)| *d = i64::from(*s));
            }

            #[inline(always)]
            fn store(src: &[i64], dst: &mut [Self]) {
                // What is cut off is what wraps around.
                dst.iter_mut().zip(src).for_each(|(d, s)| *d = *s as $t);
            }
        }
    )*};
}
integers!(i8, i32, i64);

/// `sum = of(sum, next)`, of each element.
#[inline(always)]
fn zip<T: Copy>(sum: &mut [T], next: &[T], of: impl Fn(T, T) -> T) {
    for (sum, next) in sum.iter_mut().zip(next) {
        *sum = of(*sum, *next);
    }
}

impl Wide for f32 {
    #[inline(always)]
    fn combine(op: ReduceOp, sum: &mut [f32], next: &[f32]) {
        match op {
            ReduceOp::Sum | ReduceOp::Avg => zip(sum, next, |a, b| a + b),
            ReduceOp::Prod => zip(sum, next, |a, b| a * b),
            // Of equal numbers the first, so that signs of zeros do not depend on how it is compiled.
            ReduceOp::Max => zip(sum, next, |a, b| if b > a || a.is_nan() { b } else { a }),
            ReduceOp::Min => zip(sum, next, |a, b| if b < a || a.is_nan() { b } else { a }),
        }
    }

    #[inline(always)]
    fn divide(sum: &mut [f32], by: usize) {
        sum.iter_mut().for_each(|a| *a /= by as f32);
    }
}

impl Wide for i64 {
    #[inline(always)]
    fn combine(op: ReduceOp, sum: &mut [i64], next: &[i64]) {
        match op {
            ReduceOp::Sum | ReduceOp::Avg => zip(sum, next, i64::wrapping_add),
            ReduceOp::Prod => zip(sum, next, i64::wrapping_mul),
            ReduceOp::Max => zip(sum, next, i64::max),
            ReduceOp::Min => zip(sum, next, i64::min),
        }
    }

    /// Refused before: an average of integers is none.
    fn divide(_: &mut [i64], _: usize) {}
}
