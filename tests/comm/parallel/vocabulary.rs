//! Which rows of a vocabulary ranks have, and what is refused of them.

use std::ops::Range;

use unsloth::comm::Comm;
use unsloth::ops::parallel::Vocabulary;

use super::Rows;

/// How many rows ranks have of a vocabulary: as `unsloth_shard_get` says, evenly or not; and parts of all
/// sizes, among them none.
pub fn tables(size: usize) -> Vec<Vec<usize>> {
    const UNEVEN: [usize; 8] = [0, 5, 1, 0, 7, 2, 3, 4];
    let by_shard = |vocab: usize| {
        let each = vocab.div_ceil(size);
        let of = |rank: usize| each.min(vocab - (each * rank).min(vocab));
        (0..size).map(of).collect()
    };
    let mut uneven = UNEVEN[..size].to_vec();
    uneven[size / 2] += 6;
    vec![by_shard(16), by_shard(9), uneven]
}

pub fn range(table: &[usize], rank: usize) -> Range<usize> {
    let begin = table[..rank].iter().sum();
    begin..begin + table[rank]
}

pub fn vocabulary<'a>(rows: &'a Rows, comm: &'a Comm, table: &[usize]) -> Vocabulary<'a> {
    Vocabulary {
        parallel: rows.parallel(comm),
        begin: range(table, comm.rank()).start,
        size: table.iter().sum(),
    }
}

/// What is refused of any part of a vocabulary.
macro_rules! of_vocabularies {
    ($p:ty, $op:literal, $table:literal) => {
        &[
            (
                |p: &mut $p| p.parallel.partition = 1,
                UNSLOTH_STATUS_INVALID_ARGUMENT,
                concat!($op, ": partition is 1, allowed of a block: 0"),
            ),
            (
                |p: &mut $p| p.parallel.chunk_rows = 4,
                UNSLOTH_STATUS_INVALID_ARGUMENT,
                concat!($op, ": chunk_rows is 4, allowed of a vocabulary: 0"),
            ),
            (
                |p: &mut $p| {
                    p.parallel.comm = std::ptr::null_mut();
                    p.parallel.sequence = 0;
                },
                UNSLOTH_STATUS_INVALID_ARGUMENT,
                concat!($op, ": vocab_begin is set without comm"),
            ),
            (
                |p: &mut $p| {
                    p.parallel.comm = std::ptr::null_mut();
                    (p.parallel.sequence, p.vocab_begin) = (0, 0);
                },
                UNSLOTH_STATUS_INVALID_ARGUMENT,
                concat!($op, ": vocab_size is set without comm"),
            ),
            (
                |p: &mut $p| p.vocab_begin = -1,
                UNSLOTH_STATUS_INVALID_ARGUMENT,
                concat!($op, ": vocab_begin is -1, at least 0 is needed"),
            ),
            (
                |p: &mut $p| p.vocab_size = -1,
                UNSLOTH_STATUS_INVALID_ARGUMENT,
                concat!($op, ": vocab_size is -1, at least 0 is needed"),
            ),
            (
                |p: &mut $p| p.vocab_begin = 5,
                UNSLOTH_STATUS_INVALID_ARGUMENT,
                concat!(
                    $op,
                    ": vocab_begin is 5, and ",
                    $table,
                    " has 4 rows: vocab_size 8 has fewer"
                ),
            ),
            (
                |p: &mut $p| p.vocab_begin = i64::MAX,
                UNSLOTH_STATUS_INVALID_ARGUMENT,
                concat!(
                    $op,
                    ": vocab_begin is 9223372036854775807, and ",
                    $table,
                    " has 4 rows: vocab_size 8 has fewer"
                ),
            ),
            (
                |p: &mut $p| p.vocab_size = 4,
                UNSLOTH_STATUS_INVALID_ARGUMENT,
                concat!(
                    $op,
                    ": vocab_begin is 1, and ",
                    $table,
                    " has 4 rows: vocab_size 4 has fewer"
                ),
            ),
            (
                |p: &mut $p| {
                    p.parallel.sequence = 0;
                    p.parallel.row_counts = $crate::parallel::misuse::EVEN.as_ptr();
                },
                UNSLOTH_STATUS_INVALID_ARGUMENT,
                concat!(
                    $op,
                    ": row_counts is there without sequence, which divides rows"
                ),
            ),
        ]
    };
}
pub(super) use of_vocabularies;
