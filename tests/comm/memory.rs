//! Memory that a group gives: zero, one's own, and as good for sums as any other.

use std::ptr::NonNull;

use unsloth::comm::Comm;
use unsloth::memory::{CopyKind, copy};
use unsloth::ops::all_reduce::{self, ReduceOp};
use unsloth::{Context, DType, InOut, Layout, Stream, TensorMut, TensorRef};

use crate::group::{ranks, sizes};

fn read(ctx: &Context, from: NonNull<u8>, count: usize) -> Vec<f32> {
    let mut values = vec![f32::NAN; count];
    let to = values.as_mut_ptr().cast();
    // SAFETY: the memory has room for so many numbers, and so has the vector until the copy has run.
    unsafe {
        let kind = CopyKind::DeviceToHost;
        copy(ctx, to, from.as_ptr(), 4 * count, kind, Stream::DEFAULT).unwrap();
    }
    ctx.synchronize(Stream::DEFAULT).unwrap();
    values
}

fn write(ctx: &Context, to: NonNull<u8>, values: &[f32]) {
    // SAFETY: as above, the other way.
    unsafe {
        let (from, bytes) = (values.as_ptr().cast(), size_of_val(values));
        let kind = CopyKind::HostToDevice;
        copy(ctx, to.as_ptr(), from, bytes, kind, Stream::DEFAULT).unwrap();
    }
    ctx.synchronize(Stream::DEFAULT).unwrap();
}

/// What a rank adds; sums of them are exact.
fn numbers(rank: usize, count: usize) -> Vec<f32> {
    let of = |i: usize| (i * (rank + 1) % 511) as f32 - 200.0;
    (0..count).map(of).collect()
}

/// Sums `count` numbers of each rank, in place or apart, in memory of the group.
fn sum(ctx: &Context, comm: &Comm, count: usize, in_place: bool) {
    let bytes = 4 * count;
    let (x, out) = (comm.alloc(bytes).unwrap(), comm.alloc(bytes).unwrap());
    for memory in [x, out] {
        assert!(read(ctx, memory, count).iter().all(|v| v.to_bits() == 0));
        assert!(memory.addr().get().is_multiple_of(256));
    }
    write(ctx, x, &numbers(comm.rank(), count));
    let layout = Layout::contiguous(&[count]).unwrap();
    // SAFETY: the memory has so many numbers, which nothing else uses.
    let (given, written) = unsafe {
        let given = TensorRef::from_raw(x.as_ptr(), DType::F32, layout);
        let at = if in_place { x } else { out };
        (given, TensorMut::from_raw(at.as_ptr(), DType::F32, layout))
    };
    let params = all_reduce::Params {
        comm,
        x: match in_place {
            true => InOut::InPlace(written),
            false => InOut::Apart {
                input: given,
                output: written,
            },
        },
        op: ReduceOp::Sum,
    };
    all_reduce::forward(ctx, &params, Stream::DEFAULT).unwrap();
    let summed = read(ctx, if in_place { x } else { out }, count);
    let mut expected = vec![0.0; count];
    for rank in 0..comm.size() {
        let terms = numbers(rank, count);
        expected.iter_mut().zip(terms).for_each(|(e, t)| *e += t);
    }
    assert_eq!(summed, expected, "{count}, {in_place}");
    // SAFETY: nothing uses it any more.
    unsafe {
        comm.free(x).unwrap();
        comm.free(out).unwrap();
        let error = comm.free(x).unwrap_err().to_string();
        let expected = format!("comm_memory_free: ptr {x:p} is no memory of this group");
        assert_eq!(error, expected);
    }
}

#[test]
fn sums_in_memory_of_the_group_are_the_sums() {
    for size in sizes() {
        ranks(size, |ctx, comm| {
            for count in [1, 1000, 40_000] {
                for in_place in [true, false] {
                    sum(ctx, comm, count, in_place);
                }
            }
        });
    }
}

#[test]
fn memory_counts_as_the_contexts_and_is_freed_with_the_group() {
    for size in sizes() {
        ranks(size, |ctx, comm| {
            let before = ctx.memory_stats();
            let memory = comm.alloc(3000).unwrap();
            let with = ctx.memory_stats();
            assert_eq!(with.in_use, before.in_use + 3000);
            assert_eq!(with.num_allocations, before.num_allocations + 1);
            // SAFETY: nothing uses it.
            unsafe { comm.free(memory) }.unwrap();
            let after = ctx.memory_stats();
            assert_eq!(after.in_use, before.in_use);
            // What is left ends with the group, which may be one that is kept for later tests.
            comm.alloc(0).unwrap();
        });
    }
}
