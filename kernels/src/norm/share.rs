//! How threads share a row, and sums over it.
//!
//! A row stays in the registers of the threads that share it. It is summed in one order whatever
//! the threads: the elements of a vector, 32 vectors by halves, then the sums of these. So a row
//! has the same bits alone as among many, although few rows get more threads.

use cubecl::prelude::*;

use crate::emit::Kernel;

/// Threads per row, and 16-byte vectors per thread. Rows of a warp or less share a block; of two
/// shapes for rows of one length, that of more threads is for few rows, which wait for nothing but
/// memory, and the other for many, which fill it.
pub(super) const SHAPES: [(u32, u32); 15] = [
    (8, 1),
    (16, 1),
    (32, 1),
    (32, 2),
    (128, 1),
    (32, 4),
    (128, 2),
    (64, 4),
    (256, 2),
    (128, 4),
    (512, 2),
    (256, 4),
    (1024, 2),
    (512, 4),
    (1024, 4),
];

/// A shape that only LayerNorm is compiled for: it is faster for many rows of 2048 16-bit elements
/// than two vectors for each of 128 threads, and RMSNorm is slower with it.
pub(super) const CENTERED_ONLY: (u32, u32) = (64, 4);

/// Threads of a block whose rows need fewer.
pub(super) const MIN_BLOCK: u32 = 128;

/// Threads of a block whose rows need so many.
pub(super) const fn block(threads: u32) -> u32 {
    if threads < MIN_BLOCK {
        MIN_BLOCK
    } else {
        threads
    }
}

/// Rows of a block.
pub(super) const fn rows_per_block(threads: u32) -> u32 {
    block(threads) / threads
}

/// A kernel, with its registers bounded to 64 where it would take so many that few blocks run at a
/// time; to 72 in small blocks with `wide` gains, which would not fit on sm_80.
pub(super) fn bounded(kernel: Kernel, threads: u32, vectors: u32, wide: bool) -> Kernel {
    match (vectors, block(threads)) {
        (4, MIN_BLOCK) if wide => kernel.for_blocks(7),
        (4, block) => kernel.for_blocks(1024 / block),
        _ => kernel,
    }
}

/// The row that a thread has a share of, `row` being the block's number, and how many of its
/// vectors are stored: `stored`, or none. Grid: rows, in groups of as many as a block has threads
/// for.
#[cube]
pub(super) fn take_share(row: &mut u32, stored: &mut u32, rows: u32, #[comptime] threads: u32) {
    if comptime!(threads < MIN_BLOCK) {
        *row = CUBE_POS_X * comptime!(MIN_BLOCK / threads) + UNIT_POS_X / threads;
        // A row past the last one reads that, and stores nothing.
        if *row >= rows {
            *row = rows - 1;
            *stored = 0u32;
        }
    }
}

/// A thread's vectors of a row that begins at `from`. Past the row's end its last vector is read
/// again.
#[cube]
pub(super) fn load_row(
    x: &Array<Words>,
    from: usize,
    lane: u32,
    length: u32,
    #[comptime] threads: u32,
    #[comptime] vectors: u32,
) -> Sequence<Words> {
    let mut words = Sequence::<Words>::new();
    #[unroll]
    for k in 0..vectors {
        let i = min(lane + k * threads, length - 1u32);
        words.push(x[from + i as usize]);
    }
    words
}

/// The sum over the `threads` threads of a row, on each of them; the same on all. `sums` has a
/// value per vector of the thread.
#[cube]
pub(super) fn row_sum(
    sums: &mut Array<f32>,
    #[comptime] threads: u32,
    #[comptime] vectors: u32,
) -> f32 {
    let lanes = comptime!(threads.min(32));
    let lane = UNIT_POS_X % lanes;
    // Of several values, each lane passes on the half that it does not keep: with bit 0 of its
    // number set it keeps the odd ones, and so on.
    let halvings = comptime!(vectors.ilog2());
    #[unroll]
    for step in 0..comptime!(lanes.ilog2()) {
        let left = comptime!(if step < halvings {
            vectors >> (step + 1)
        } else {
            0
        });
        if left > 0 {
            let keeps_odd = (lane >> step) & 1u32 == 1u32;
            #[unroll]
            for k in 0..left {
                let even = sums[comptime!(2 * k as usize)];
                let odd = sums[comptime!(2 * k as usize + 1)];
                let mut kept = even;
                let mut passed = odd;
                if keeps_odd {
                    kept = odd;
                    passed = even;
                }
                sums[k as usize] = kept + plane_shuffle_xor(passed, comptime!(1u32 << step));
            }
        } else {
            let mine = sums[0];
            sums[0] = mine + plane_shuffle_xor(mine, comptime!(1u32 << step));
        }
    }
    if threads <= 32 {
        // Lane k has the sum of the vectors k, modulo their number.
        #[unroll]
        for step in 0..halvings {
            let mine = sums[0];
            sums[0] = mine + plane_shuffle_xor(mine, comptime!(1u32 << step));
        }
        sums[0]
    } else {
        // A part is what 32 lanes have in one vector each: lane k of a warp has the k-th of the
        // warp's.
        let warps = comptime!(threads / 32);
        let parts = comptime!(warps * vectors);
        let rows = comptime!(block(threads) / threads);
        let mut partial = SharedMemory::<f32>::new(comptime!((rows * parts) as usize));
        let first = UNIT_POS_X / threads * parts;
        let warp = UNIT_POS_X % threads / 32;
        if lane < vectors {
            partial[(first + lane * warps + warp) as usize] = sums[0];
        }
        sync_cube();
        if parts >= 32 {
            // More than each thread should read: each lane takes its share of them.
            let mut sum = partial[(first + lane) as usize];
            #[unroll]
            for part in 1..comptime!(parts / 32) {
                sum += partial[(first + part * 32 + lane) as usize];
            }
            #[unroll]
            for step in 0..5u32 {
                sum += plane_shuffle_xor(sum, comptime!(1u32 << step));
            }
            sum
        } else {
            // Four sums at a time, which do not wait for each other.
            let mut totals = Array::<f32>::new(4usize);
            #[unroll]
            for part in 0..parts {
                let value = partial[(first + part) as usize];
                if part < 4 {
                    totals[part as usize] = value;
                } else {
                    totals[comptime!((part % 4) as usize)] += value;
                }
            }
            (totals[0] + totals[1]) + (totals[2] + totals[3])
        }
    }
}

/// 16 bytes of a row.
pub(super) type Words = Vector<u32, Const<4>>;
