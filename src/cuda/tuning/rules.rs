//! What follows from a device's properties where there is no record, and what no record tells
//! devices apart by.

use super::linear::{FewRows, Linear, Server, Shape};
use super::{Argmax, Fetch, Hopper, Mlp, NormBackward, Properties, Refill, Tuning};

/// A device without a record.
pub(super) fn tuning(properties: &Properties) -> Tuning {
    Tuning {
        argmax: Argmax {
            thin_blocks: 0,
            // As many as an H200's 528 are for its multiprocessors.
            full_blocks: 4 * properties.multiprocessors,
        },
        linear: Linear {
            halves: HALVES,
            f32: F32,
        },
        mlp: Mlp {
            tokens: 4096,
            asked_tokens: 2048,
            tokens_by_kernels: 64,
        },
        // Hopper's kernels are not loaded.
        hopper: Hopper {
            short: &[],
            together: &[],
            decoding: &[],
            decoding_fetch: Fetch::Bytes256,
        },
        norm_backward: NormBackward {
            group_bytes: 0,
            rms_norm: (2, Refill::AfterSums),
            rms_norm_full: (2, Refill::AfterSums),
            rms_norm_single_bytes: 0,
            layer_norm: (2, Refill::AfterSums),
            layer_norm_single: (2, Refill::AfterSums),
        },
    }
}

/// What holds on both Hoppers: weights of few rows are read at the memory's speed by kernels of
/// this library; cuBLASLt takes over sooner where there are many columns to share out.
const HALVES: &[Shape] = &[
    Shape {
        columns: 1024,
        in_features: 2048,
        alone: &[(16, Server::Own), (usize::MAX, Server::Library)],
        with: &[(16, Server::Own), (usize::MAX, Server::Workspace)],
    },
    Shape {
        columns: 8192,
        in_features: 2048,
        alone: &[(8, Server::Own), (usize::MAX, Server::Library)],
        with: &[(8, Server::Own), (usize::MAX, Server::Library)],
    },
];

/// Products of f32, on every device. Timed on an H200; the records of [`super::h100`] and
/// [`super::h200`] cover some of these sizes and bear them out, and what they have of 576 columns
/// is here. Without a workspace, cuBLASLt gives such products to few multiprocessors.
pub(super) const F32: [&[FewRows]; 2] = [
    &[(32, ANY, ANY), (64, (0, 8192), ANY), (128, (0, 2048), ANY)],
    &[
        (16, ANY, ANY),
        (32, (0, 2048), (0, 4096)),
        (32, (8192, usize::MAX), (2049, 4096)),
        (64, (0, 768), (0, 2048)),
    ],
];
const ANY: (usize, usize) = (0, usize::MAX);

/// How the portable attention kernels split keys: by the multiprocessors that blocks keep busy, on
/// every device.
pub(in crate::cuda) mod attention {
    /// The least keys of a part.
    pub(in crate::cuda) const LEAST_KEYS: usize = 256;
    /// More parts would make joining them slow.
    pub(in crate::cuda) const MAX_SPLITS: usize = 256;
    /// Rounds in which blocks of split keys run, at most: beyond them the last one matters little.
    pub(in crate::cuda) const ROUNDS: usize = 3;
    /// The least bytes of K and V of a block of Hopper's kernels for few queries: less would take longer to join than to read. Half of
    /// it and twice as many took as long, or longer (`kernels/cuda/attention/decode/LADDER.md`).
    pub(in crate::cuda) const LEAST_BYTES_OF_SHARE: usize = 64 << 10;
    /// Bytes of K and V of a sequence and key head that one block reads in the time that parts would take to be joined. 440 keys of 128
    /// dimensions were read whole in 6.0 µs, in parts in 6.9; in pages, of eight sequences, in 9.3 and 10.9.
    pub(in crate::cuda) const BYTES_OF_WHOLE_SHARE: usize = 256 << 10;
    /// In pages so few pairs of a sequence and a key head are read in parts however short they are: 440 keys of one sequence took 7.1 µs in
    /// parts and 8.1 whole, those of four sequences 8.6 and 8.2.
    pub(in crate::cuda) const FEW_PAIRS_IN_PAGES: usize = 8;
    /// Pairs of a sequence and a key head from which on two small blocks on a multiprocessor read heads of 128 dimensions faster than one
    /// large one: of 384 pairs they took as long or 1 % longer, of 512 as long or up to 12 % less (`kernels/cuda/attention/decode/LADDER.md`).
    pub(in crate::cuda) const MANY_PAIRS: usize = 512;
    /// Bytes of K and V that a block may read beyond its equal share, if no pair of a sequence and a key head is then cut, or a pair's
    /// parts are alike: on an H100 reads of codes took 97 µs in parts, 92 without (`kernels/cuda/attention/decode/LADDER.md`).
    pub(in crate::cuda) const BYTES_OF_EVEN_SHARE: usize = 96 << 10;
    /// Bytes of K and V that a block reads, up to which heads of 64 dimensions are read apart where a token's lie side by side: beyond
    /// them memory's shorter rows cost more than joining fewer parts gains (`kernels/cuda/attention/decode/LADDER.md`).
    pub(in crate::cuda) const SHARE_OF_SHORT_ROWS: usize = 256 << 10;
    /// Pairs of a sequence and a key head, each counted for every block that has a part of it, up to which a step of decoding is one
    /// kernel: all of its blocks then run at once.
    pub(in crate::cuda) const STEP_PAIRS: usize = 128;
    /// Keys of its own, in what it reads at a time, that a block of such a kernel has at most. With 8192 keys of one sequence, eight
    /// times as many, a layer took 129 µs for 136; longer ones were not measured (`kernels/cuda/attention/step/LADDER.md`).
    pub(in crate::cuda) const STEP_ROUNDS: usize = 8;
    /// Bytes of K and V that a block of that kernel reads, up to which it is for attention alone, too: with 128 KiB 8.0 µs for 8.4, with
    /// 256 11.7 for 10.2 (`kernels/cuda/attention/step/LADDER.md`).
    pub(in crate::cuda) const BYTES_OF_STEP: usize = 128 << 10;
    /// The same where there are so many blocks that some share a multiprocessor. In pages twice as many.
    pub(in crate::cuda) const BYTES_OF_NEIGHBOURS: usize = 32 << 10;
    /// Packed query rows up to which the heads of a key head are packed rather than tiled.
    pub(in crate::cuda) const FEW_QUERIES: usize = 64;
    /// Bytes of L2 that keys and values which are read together may take.
    pub(in crate::cuda) const L2: usize = 32 << 20;
}

/// Sums of ranks' products in chunks. On every device the same: ranks with different ones make the same sums.
pub(in crate::cuda) mod sums {
    /// Rows of a chunk, at least: a product of so many keeps a GPU as busy as one of more, within a few percent.
    const LEAST_ROWS: usize = 2048;
    /// Bytes of a chunk, at least: a shorter sum takes hardly longer than two streams to wait for each other.
    const LEAST_BYTES: usize = 4 << 20;
    /// Chunks, at most: the last one's sum has nothing to run beside, and is short enough.
    const MOST: usize = 4;

    /// Rows of a chunk of so many with so many bytes each, at least.
    pub(in crate::cuda) fn chunk_rows(rows: usize, row_bytes: usize) -> usize {
        let of_bytes = LEAST_BYTES.div_ceil(row_bytes.max(1));
        LEAST_ROWS.max(of_bytes).max(rows.div_ceil(MOST))
    }

    #[test]
    fn long_products_are_in_few_chunks() {
        for (rows, row_bytes, chunks) in [
            (1, 8192, 0),
            (4095, 8192, 1),
            (4096, 8192, 2),
            (8192, 8192, 4),
            (1 << 20, 8192, 4),
            (8192, 1024, 2),
            (8192, 512, 1),
            (8192, 0, 0),
        ] {
            assert_eq!(
                rows / chunk_rows(rows, row_bytes),
                chunks,
                "{rows} x {row_bytes}"
            );
        }
    }
}

/// Kernels of products, on every device.
pub(in crate::cuda) mod products {
    /// Rows up to which reading the weights for every 32 costs less than tiles do.
    pub(in crate::cuda) const MODERATE: usize = 512;
    /// Elements of a row from which on x does not stay in the caches.
    pub(in crate::cuda) const DEEP: usize = 8192;
    /// Columns up to which narrow tiles are worth more: those of another kernel.
    pub(in crate::cuda) const NARROW: usize = 1024;
    /// Tokens up to which one product by gate and up, and an activation, are faster than two, the
    /// second of which activates, by kernels of this library: by 1 to 9 % in the records of
    /// [`super::super::h100`] and [`super::super::h200`].
    pub(in crate::cuda) const JOINED_TOKENS: usize = 16;
    /// Columns of an intermediate below which nothing is gained by storing gate and up together.
    pub(in crate::cuda) const LEAST_INTERMEDIATE: usize = 512;
    /// Rows of x up to which 16-bit weights on Hopper are for the kernels that keep a multiprocessor's shared memory full of
    /// them, and the elements of weights from which on: eight rows by 4096 x 4096 took 0.93 of the time of the kernels for
    /// more, by 14336 x 4096 0.99 (H200); one by 576 x 576 1.27 of those of registers (H100).
    pub(in crate::cuda) const FEW_ROWS: usize = 8;
    pub(in crate::cuda) const FEW_LEAST_ELEMENTS: usize = 1 << 20;
    /// Rows of x up to which kernels read weights in blocks as they are. They read the whole matrix once
    /// for every eight rows: three times take as long on an H200 (31 µs of 16 M weights in Q4_0, by its
    /// record) as decoding the matrix and multiplying by it (30 µs).
    pub(in crate::cuda) const BLOCKS_FEW_ROWS: usize = 24;
    /// Rows of x of 16 bits from which on kernels that leave it as it is are faster than those of integers,
    /// which read the whole matrix again for every eight, and up to which they are faster than decoding:
    /// 16 rows by 16 M weights in Q4_0 took 11 µs, where integers take 21.5; 32 took 14, where decoding
    /// takes 30 (H200; no record exists).
    pub(in crate::cuda) const BLOCKS_TILES_LEAST_ROWS: usize = 9;
    pub(in crate::cuda) const BLOCKS_TILES_ROWS: usize = 32;
    /// Rows of x up to which tiles take weights in blocks and 8-bit floats as they are: more are faster by the decoded
    /// weight. 3584 by 14336x4096 in Q4_0 take 1.07 times as long as by weights of bf16, decoded 1.16; 6144 1.13, decoded
    /// 1.07 (H200). Q6_K takes longest to be taken apart.
    pub(in crate::cuda) const WIDE_MOST_ROWS: usize = 4096;
    pub(in crate::cuda) const WIDE_MOST_ROWS_Q6_K: usize = 2816;
    /// Where kernels of tiles could multiply by codes, too, the blocks of another kernel round these rows of `x` and
    /// multiply them (`kernels/cuda/linear/few_codes`): one row; up to so many with up to so many elements in all, by weights of
    /// 2 bits or of 8; and by matrices of up to so many weights as many rows as that kernel takes.
    pub(in crate::cuda) const CODES_ROWS: usize = 4;
    pub(in crate::cuda) const CODES_OF_TERNARY: usize = 28 << 10;
    pub(in crate::cuda) const CODES_OF_I8: usize = 20 << 10;
    pub(in crate::cuda) const CODES_SMALL: usize = 10 << 20;
    /// Rows of x of 16 bits up to which such weights on Hopper are for kernels that keep a multiprocessor's shared
    /// memory full of them.
    pub(in crate::cuda) const BLOCKS_FEW: usize = 8;
    /// Columns of such weights of which a row of x fits, as integers, the shared memory of every device.
    pub(in crate::cuda) const BLOCKS_FEW_COLUMNS: usize = 28672;
    /// Rows of x up to which kernels read weights of 8-bit floats as they are. They read the matrix again for
    /// every 32: 64 rows by 14336 x 4096 took 87 µs, where decoding and multiplying took 120 (H100,
    /// `kernels/cuda/linear/e4m3/LADDER.md`).
    pub(in crate::cuda) const E4M3_ROWS: usize = 64;
    /// Bytes of decoded weights at a time: the matrices of a layer of 8 B parameters are one part.
    pub(in crate::cuda) const BLOCKS_PART_BYTES: usize = 128 << 20;
}
