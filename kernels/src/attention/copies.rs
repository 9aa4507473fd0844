//! Copies to shared memory that go on while others compute, 16 bytes each.

use cubecl::prelude::barrier::{Barrier, copy_async_checked};
use cubecl::prelude::*;

/// One line, or zeros: then the source is not read, wherever it may be.
#[cube]
pub fn copy_line<E: Float, N: Size>(
    source: &Array<Vector<E, N>>,
    tile: &mut SharedMemory<Vector<E, N>>,
    from: u64,
    to: u32,
    valid: bool,
) {
    let elements = N::value();
    let from = from as usize;
    let to = to as usize;
    let length = select(valid, 1usize, 0usize);
    copy_async_checked(
        &source.slice(from, from + length),
        &mut tile.slice_mut(to, to + 1),
        comptime!(elements as u32),
    );
}

/// `barrier` completes when all threads have arrived, and all that they began to copy.
#[cube]
pub fn arrive(barrier: &Barrier) {
    barrier.commit_copy_async();
    barrier.arrive();
}
