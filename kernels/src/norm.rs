//! What the kernels that normalise rows share: how threads share a row, sums over it, and gains.
//!
//! A row stays in the registers of the threads that share it. It is summed in one order whatever the threads: the elements of a
//! vector, 32 vectors by halves, then the sums of these. So a row has the same bits alone as among many, although few rows get more
//! threads.

use cubecl::prelude::*;

use crate::emit::Kernel;

/// Threads per row, and 16-byte vectors per thread. Rows of a warp or less share a block; of two shapes for rows of one length, that of
/// more threads is for few rows, which wait for nothing but memory, and the other for many, which fill it.
pub(crate) const SHAPES: [(u32, u32); 15] = [
    (8, 1),
    (16, 1),
    (32, 1),
    (32, 2),
    (128, 1),
    (32, 4),
    (256, 1),
    (64, 4),
    (512, 1),
    (128, 4),
    (512, 2),
    (256, 4),
    (1024, 2),
    (512, 4),
    (1024, 4),
];

/// Threads of a block whose rows need fewer.
pub(crate) const MIN_BLOCK: u32 = 128;

/// Threads of a block whose rows need so many.
pub(crate) const fn block(threads: u32) -> u32 {
    if threads < MIN_BLOCK {
        MIN_BLOCK
    } else {
        threads
    }
}

/// Rows of a block.
pub(crate) const fn rows_per_block(threads: u32) -> u32 {
    block(threads) / threads
}

/// A kernel, with its registers bounded where it would take so many that few blocks run at a time.
pub(crate) fn bounded(kernel: Kernel, threads: u32, vectors: u32) -> Kernel {
    match (threads < MIN_BLOCK, vectors) {
        // 64 registers for each thread.
        (true, 4) => kernel.for_blocks(1024 / block(threads)),
        _ => kernel,
    }
}

/// The row that a thread has a share of, `row` being the block's number, and how many of its vectors are stored: `stored`, or none. Grid:
/// rows, in groups of as many as a block has threads for.
#[cube]
pub(crate) fn take_share(row: &mut u32, stored: &mut u32, rows: u32, #[comptime] threads: u32) {
    if comptime!(threads < MIN_BLOCK) {
        *row = CUBE_POS_X * comptime!(MIN_BLOCK / threads) + UNIT_POS_X / threads;
        // A row past the last one reads that, and stores nothing.
        if *row >= rows {
            *row = rows - 1;
            *stored = 0u32;
        }
    }
}

/// Starts loading a thread's vectors of a row that begins at `from`. Past the row's end its last vector is read again.
#[cube]
pub(crate) fn load_row(
    x: &Array<Words>,
    from: usize,
    lane: u32,
    length: u32,
    to: &mut Sequence<Words>,
    #[comptime] threads: u32,
    #[comptime] vectors: u32,
) {
    #[unroll]
    for k in 0..vectors {
        let i = min(lane + k * threads, length - 1u32);
        to.push(x[from + i as usize]);
    }
}

/// The sum over the `threads` threads of a row, on each of them; the same on all. `sums` has a value per vector of the thread.
#[cube]
pub(crate) fn row_sum(
    sums: &mut Array<f32>,
    #[comptime] threads: u32,
    #[comptime] vectors: u32,
) -> f32 {
    let lanes = comptime!(threads.min(32));
    let lane = UNIT_POS_X % lanes;
    // Of several values, each lane passes on the half that it does not keep: with bit 0 of its number set it keeps the odd ones, and so on.
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
    if threads <= 32 && vectors == 1 {
        sums[0]
    } else {
        // A part is what 32 lanes have in one vector each: lane k of a warp has the k-th of the warp's.
        let warps = comptime!(threads.div_ceil(32));
        let parts = comptime!(warps * vectors);
        let rows = comptime!(block(threads) / threads);
        let mut partial = SharedMemory::<f32>::new(comptime!((rows * parts) as usize));
        let row = UNIT_POS_X / threads;
        let warp = UNIT_POS_X % threads / 32;
        if lane < vectors {
            partial[(row * parts + lane * warps + warp) as usize] = sums[0];
        }
        sync_cube();
        // Four sums at a time, which do not wait for each other.
        let chains = comptime!(parts.min(4));
        let mut totals = Array::<f32>::new(chains as usize);
        #[unroll]
        for part in 0..parts {
            let value = partial[(row * parts + part) as usize];
            if part < chains {
                totals[part as usize] = value;
            } else {
                totals[comptime!((part % chains) as usize)] += value;
            }
        }
        let mut sum = totals[0];
        #[unroll]
        for chain in 1..chains {
            sum += totals[chain as usize];
        }
        sum
    }
}

/// 16 bytes of a row.
pub(crate) type Words = Vector<u32, Const<4>>;

/// Their elements. What is loaded ahead stays words until then: elements of 16 bits would take a register each.
#[cube]
pub(crate) fn unpack<F: Float, N: Size>(words: Words) -> Vector<f32, N> {
    Vector::cast_from(Vector::<F, N>::reinterpret(words))
}

/// What `kind` is where gains are like x, and where they are f32; anything else says that there are none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Codes {
    pub like_x: u32,
    pub f32: u32,
}

/// The first words of a vector's gains; those of f32 fill as many vectors as `parts`.
#[cube]
pub(crate) fn load_gains(
    weight: &Array<Words>,
    kind: u32,
    i: u32,
    #[comptime] parts: u32,
    #[comptime] codes: Codes,
) -> Words {
    let mut at = i;
    if kind == comptime!(codes.f32) {
        at = i * parts;
    }
    weight[at as usize]
}

/// The gains of vector `i`, whose first words were loaded.
#[cube]
pub(crate) fn gains<F: Float, N: Size>(
    first: Words,
    weight: &Array<Words>,
    kind: u32,
    offset: f32,
    i: u32,
    #[comptime] codes: Codes,
) -> Vector<f32, N> {
    let parts = comptime!(N::value() / 4);
    let mut gains = Vector::<f32, N>::new(1.0f32);
    if kind == comptime!(codes.like_x) {
        gains = unpack::<F, N>(first) + Vector::new(offset);
    }
    if kind == comptime!(codes.f32) {
        #[unroll]
        for part in 0..parts {
            let words = if part == 0 {
                first
            } else {
                weight[i as usize * parts + part]
            };
            let g = Vector::<f32, Const<4>>::reinterpret(words);
            #[unroll]
            for j in 0..4usize {
                gains[comptime!(part * 4 + j)] = g[j] + offset;
            }
        }
    }
    gains
}
