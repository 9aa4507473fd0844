//! The share of a cube where the rows of all heads of a key head are packed, and keys are split: which rows, and which keys.

use cubecl::prelude::*;

use super::arguments::*;

/// Up to so many packed rows of one key head, in one part of the keys.
#[derive(CubeType, Clone)]
pub struct Block {
    pub batch: u32,
    pub key_head: u32,
    pub split: u32,
    /// The first key of the part.
    pub split_begin: u32,
    /// Keys of a part.
    pub split_keys: u32,
    pub row0: u32,
    /// Of the whole sequence and key head.
    pub row_count: u32,
    pub span: Span,
}

/// The cube's, in a grid of splits × row blocks × key heads × sequences, the first fastest.
#[cube]
pub fn block(
    args: &Args,
    buffers: &Buffers,
    #[comptime] rows: u32,
    #[comptime] last_first: bool,
) -> Block {
    let split = CUBE_POS_X % args.splits;
    let rest = CUBE_POS_X / args.splits;
    let block = if comptime!(last_first) {
        args.row_blocks - 1u32 - rest % args.row_blocks
    } else {
        rest % args.row_blocks
    };
    let rest = rest / args.row_blocks;
    let key_head = rest % args.num_kv_heads;
    let batch = rest / args.num_kv_heads;
    let span = sequence(args, buffers, batch);
    let row0 = block * rows;
    let row_count = span.q_count * args.group;
    let parts = cut(
        span.q_count,
        span.k_count,
        args.window_left,
        args.splits,
        args.split_keys,
    );
    Block {
        batch,
        key_head,
        split,
        split_begin: parts.base + split * parts.keys,
        split_keys: parts.keys,
        row0,
        row_count,
        span,
    }
}

/// Whether there is nothing to do. The combining kernel leaves out the splits that begin past the keys; the first always answers, if
/// only with zeros.
#[cube]
pub fn is_absent(block: &Block) -> bool {
    block.row0 >= block.row_count || (block.split > 0u32 && block.split_begin >= block.span.k_count)
}

/// Where in the partial results a row of the block's part is.
#[cube]
pub fn partial_at(args: &Args, block: &Block, token: u32, head: u32) -> u64 {
    u64::cast_from(block.split) * u64::cast_from(args.rows)
        + u64::cast_from((block.batch * args.seqlen_q + token) * args.num_heads + head)
}

/// Adds what the scores of a lane's two rows are adjusted by, the first being `first` and the other
/// `apart` rows on.
#[cube]
pub fn push_packed_rows(
    to: &mut Sequence<ScoreRow>,
    args: &Args,
    buffers: &Buffers,
    block: &Block,
    rows_here: u32,
    first: u32,
    #[comptime] apart: u32,
    #[comptime] scores: bool,
) {
    #[unroll]
    for i in 0..2usize {
        let packed = block.row0 + min(first + comptime!(i as u32 * apart), rows_here - 1u32);
        let head = block.key_head * args.group + packed % args.group;
        to.push(score_row(
            args,
            buffers,
            &block.span,
            block.batch,
            packed / args.group,
            head,
            scores,
        ));
    }
}

/// Positions of the first and last row's query among the keys, and the keys `begin..end` of the part that any row sees.
#[derive(CubeType, Clone)]
pub struct Seen {
    pub first: i32,
    pub last: i32,
    pub begin: i32,
    pub end: i32,
}

#[cube]
pub fn seen(args: &Args, block: &Block, rows_here: u32) -> Seen {
    let shift = i32::cast_from(block.span.k_count) - i32::cast_from(block.span.q_count);
    let wl = i32::cast_from(args.window_left);
    let wr = i32::cast_from(args.window_right);
    let first = i32::cast_from(block.row0 / args.group) + shift;
    let last = i32::cast_from((block.row0 + rows_here - 1u32) / args.group) + shift;
    let k_end = i32::cast_from(block.span.k_count);
    let end = max(
        min(
            min(k_end, last + wr),
            i32::cast_from(block.split_begin + block.split_keys),
        ),
        0,
    );
    let begin = max(max(first - wl + 1, 0), i32::cast_from(block.split_begin));
    Seen {
        first,
        last,
        begin,
        end,
    }
}
