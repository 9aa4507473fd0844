//! The share of a cube that has a block of queries of one head: which rows, and which keys.

use cubecl::prelude::*;

use super::arguments::*;
use super::fragments::*;

/// Up to so many rows of one head of one sequence.
#[derive(CubeType, Clone)]
pub struct QueryBlock {
    pub batch: u32,
    pub head: u32,
    pub row0: u32,
    pub span: Span,
}

/// The cube's, in a grid of row blocks × heads × sequences, the first fastest.
#[cube]
pub fn query_block(args: &Args, buffers: &Buffers, #[comptime] rows: u32) -> QueryBlock {
    // The last rows first: under a causal mask they have the most keys.
    let block = args.row_blocks - 1u32 - CUBE_POS_X % args.row_blocks;
    let head = (CUBE_POS_X / args.row_blocks) % args.num_heads;
    let batch = CUBE_POS_X / args.row_blocks / args.num_heads;
    let span = sequence(args, buffers, batch);
    QueryBlock {
        batch,
        head,
        row0: block * rows,
        span,
    }
}

/// Where the queries of the block's head lie, and the keys and values that they see; how wide their
/// rows are.
#[derive(CubeType, Clone)]
pub struct Sources {
    pub width_qk: u32,
    pub width_v: u32,
    pub q: Rows,
    pub k: Rows,
    pub v: Rows,
}

/// Widths in units of so many elements.
#[cube]
pub fn sources(args: &Args, block: &QueryBlock, #[comptime] unit: u32) -> Sources {
    let width_qk = args.head_dim / unit;
    let width_v = args.head_dim_v / unit;
    let q = Rows {
        base: query_at(args, block.batch, block.span.q_first, block.head),
        token: args.q_token,
        page: 0u64,
        page_log2: 0u32,
        paged: false.runtime(),
        table: 0u64,
    };
    let k = key_rows(args, &block.span, block.batch, block.head / args.group);
    let v = value_rows(args, &block.span, block.batch, block.head / args.group);
    Sources {
        width_qk,
        width_v,
        q,
        k,
        v,
    }
}

/// Positions of the block's first and last query among the keys, and the tiles `begin..end` of the
/// keys that any row sees.
#[derive(CubeType, Clone)]
pub struct SeenTiles {
    pub first: i32,
    pub last: i32,
    pub window_left: i32,
    pub window_right: i32,
    /// Past the last key.
    pub key_end: i32,
    pub begin: u32,
    pub end: u32,
}

#[cube]
pub fn seen_tiles(
    args: &Args,
    block: &QueryBlock,
    #[comptime] rows: u32,
    #[comptime] tile_keys: u32,
) -> SeenTiles {
    let q_count = block.span.q_count;
    let k_count = block.span.k_count;
    let shift = i32::cast_from(k_count) - i32::cast_from(q_count);
    let window_left = i32::cast_from(args.window_left);
    let window_right = i32::cast_from(args.window_right);
    let first = i32::cast_from(block.row0) + shift;
    let last = i32::cast_from(min(block.row0 + rows, q_count)) - 1 + shift;
    let key_end = max(min(i32::cast_from(k_count), last + window_right), 0);
    let key_begin = max(first - window_left + 1, 0);
    let begin = u32::cast_from(key_begin) / tile_keys;
    let mut end = (u32::cast_from(key_end) + comptime!(tile_keys - 1)) / tile_keys;
    if key_begin >= key_end {
        end = begin;
    }
    SeenTiles {
        first,
        last,
        window_left,
        window_right,
        key_end,
        begin,
        end,
    }
}

/// The first key of those that every row of the block sees: tiles from it on, up to
/// [`clear_end`], need no mask.
#[cube]
pub fn clear_begin(seen: &SeenTiles) -> i32 {
    seen.last - seen.window_left + 1
}

/// Past the last key that every row sees.
#[cube]
pub fn clear_end(seen: &SeenTiles, block: &QueryBlock) -> i32 {
    min(
        i32::cast_from(block.span.k_count),
        seen.first + seen.window_right,
    )
}

/// All that a lane has to do.
#[derive(CubeType, Clone)]
pub struct Work {
    pub block: QueryBlock,
    pub sources: Sources,
    pub seen: SeenTiles,
    pub lane: Lane,
    /// The plane's first row in the block.
    pub plane_row: u32,
}

/// Adds what the scores of a lane's rows are adjusted by: so many rows, eight apart.
#[cube]
pub fn push_score_rows(
    to: &mut Sequence<ScoreRow>,
    args: &Args,
    buffers: &Buffers,
    work: &Work,
    #[comptime] rows: usize,
) {
    let block = &work.block;
    #[unroll]
    for i in 0..rows {
        let offset = comptime!(i as u32 * 8);
        let row = block.row0 + work.plane_row + work.lane.group_row + offset;
        to.push(score_row(
            args,
            buffers,
            &block.span,
            block.batch,
            min(row, block.span.q_count - 1u32),
            block.head,
            true,
        ));
    }
}
