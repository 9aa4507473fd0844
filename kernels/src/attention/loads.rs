//! Keys and values from memory to fragments: 16-byte lines that are fragments as they come, so nothing is staged.

use cubecl::prelude::*;

use super::arguments::*;
use super::fragments::*;
use super::packed::Block;

/// When keys and values are loaded: the earlier, the more registers hold them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Loads {
    /// Right before they are used.
    Late,
    /// Together, when a step begins.
    Together,
    /// Those of the next step, while the current ones are used.
    Ahead,
}

/// A kernel's shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Config {
    /// Room for a head: the dimension rounded up.
    pub head_dim: u32,
    /// Planes of a cube.
    pub planes: u32,
    /// Times 16 keys that a plane takes at once.
    pub groups: u32,
    /// Whether scores have more than a scale and the limits of causality and windows.
    pub scores: bool,
    pub loads: Loads,
    /// Whether keys and values are codes.
    pub codes: bool,
}

impl Config {
    /// Threads of a cube.
    pub fn threads(&self) -> u32 {
        self.planes * 32
    }

    /// Whether the lines of 16 queries, or of their results, are dealt out to the threads evenly, without one for what lies past them.
    pub fn deals_evenly(&self) -> bool {
        (16 * self.head_dim / 8).is_multiple_of(self.threads())
    }

    /// Whether lines have 16 elements in place of eight: codes, where eight lines are no more than a value.
    pub fn is_wide(&self) -> bool {
        self.codes && self.head_dim >= 128
    }

    /// Elements of a line of keys and values.
    pub fn line(&self) -> u32 {
        if self.is_wide() { 16 } else { 8 }
    }

    /// Times four lines of a key, of which a lane holds one.
    pub fn key_blocks(&self) -> usize {
        (self.head_dim / self.line()) as usize / 4
    }

    /// Times eight lines of a value.
    pub fn value_blocks(&self) -> usize {
        (self.head_dim / self.line()) as usize / 8
    }

    /// Lines of a query in shared memory.
    pub fn pitch(&self) -> u32 {
        self.head_dim / 8 + 1
    }

    /// Quads of a row of accumulators in shared memory.
    pub fn merge_pitch(&self) -> u32 {
        self.head_dim / 4 + 1
    }
}

/// Lines that a lane holds of keys or values as they are in memory, in `W` of `S`: an array for each 16 of them.
pub type Held<S, W> = Sequence<Array<Vector<S, W>>>;

/// Where the keys and values of the block's key head lie, and how many lines of eight elements a row of queries and keys, or of
/// values, has; and how many lines as they are loaded.
#[derive(CubeType, Clone)]
pub struct Sources {
    pub lines_qk: u32,
    pub lines_v: u32,
    pub loads_k: u32,
    pub loads_v: u32,
    pub k: Rows,
    pub v: Rows,
}

#[cube]
pub fn sources(args: &Args, block: &Block, #[comptime] config: Config) -> Sources {
    let lines_qk = args.head_dim / 8u32;
    let lines_v = args.head_dim_v / 8u32;
    let k = key_rows(args, &block.span, block.batch, block.key_head);
    let v = value_rows(args, &block.span, block.batch, block.key_head);
    let loads_k = if comptime!(config.is_wide()) {
        lines_qk / 2u32
    } else {
        lines_qk
    };
    let loads_v = if comptime!(config.is_wide()) {
        lines_v / 2u32
    } else {
        lines_v
    };
    Sources {
        lines_qk,
        lines_v,
        loads_k,
        loads_v,
        k,
        v,
    }
}

/// What a lane holds of keys and values.
#[derive(CubeType)]
pub struct Loaded<S: Scalar, W: Size> {
    pub keys: Held<S, W>,
    pub values: Held<S, W>,
}

#[cube]
pub fn nothing_loaded<S: Scalar, W: Size>(#[comptime] config: Config) -> Loaded<S, W> {
    let mut keys = Held::<S, W>::new();
    let mut values = Held::<S, W>::new();
    #[unroll]
    for _ in 0..comptime!(config.groups as usize) {
        keys.push(Array::new(comptime!(config.key_blocks() * 2)));
        values.push(Array::new(comptime!(config.value_blocks() * 4)));
    }
    Loaded::<S, W> { keys, values }
}

/// Lines of the keys from `key0` on: of each 16, for keys `g` and `g + 8`, the `t`-th of each four lines.
#[cube]
pub fn load_keys<S: Scalar, W: Size>(
    to: &mut Loaded<S, W>,
    k: &Array<Vector<S, W>>,
    buffers: &Buffers,
    block: &Block,
    sources: &Sources,
    key0: u32,
    #[comptime] config: Config,
) {
    let blocks = comptime!(config.key_blocks());
    let lane = UNIT_POS_X % 32u32;
    #[unroll]
    for g in 0..comptime!(config.groups as usize) {
        let first = key0 + comptime!(g as u32 * 16);
        let to = to.keys.index_mut(g);
        #[unroll]
        for n in 0..2usize {
            // What is past the end is hidden later; its products only have to be finite.
            let key = first + lane / 4u32 + comptime!(n as u32 * 8);
            let key = min(key, block.span.k_count - 1u32);
            let at = row_at(&sources.k, &buffers.block_table, key);
            let at = in_lines(at, config);
            #[unroll]
            for i in 0..blocks {
                let line = min(
                    lane % 4u32 + comptime!(i as u32 * 4),
                    sources.loads_k - 1u32,
                );
                to[n * blocks + i] = k[(at + u64::cast_from(line)) as usize];
            }
        }
    }
}

/// What counts eight elements, in lines.
#[cube]
fn in_lines(at: u64, #[comptime] config: Config) -> u64 {
    if comptime!(config.is_wide()) {
        at / 2u64
    } else {
        at
    }
}

/// The same of values.
#[cube]
pub fn load_values<S: Scalar, W: Size>(
    to: &mut Loaded<S, W>,
    v: &Array<Vector<S, W>>,
    buffers: &Buffers,
    block: &Block,
    sources: &Sources,
    key0: u32,
    #[comptime] config: Config,
) {
    let blocks = comptime!(config.value_blocks());
    #[unroll]
    for g in 0..comptime!(config.groups as usize) {
        let first = key0 + comptime!(g as u32 * 16);
        load_16_values::<S, W>(
            to, v, buffers, block, sources, first, g, 0usize, blocks, config,
        );
    }
}

/// Blocks `first..last` of the lines of 16 values, the `g`-th of those held: for values `2 t`, `2 t
/// + 1`, `2 t + 8` and `2 t + 9` the `g`-th of each eight lines.
#[cube]
pub fn load_16_values<S: Scalar, W: Size>(
    to: &mut Loaded<S, W>,
    v: &Array<Vector<S, W>>,
    buffers: &Buffers,
    block: &Block,
    sources: &Sources,
    key0: u32,
    #[comptime] g: usize,
    #[comptime] first: usize,
    #[comptime] last: usize,
    #[comptime] config: Config,
) {
    let blocks = comptime!(config.value_blocks());
    let lane = UNIT_POS_X % 32u32;
    let to = to.values.index_mut(g);
    #[unroll]
    for n in 0..4usize {
        let offset = comptime!((n as u32 % 2) + (n as u32 / 2) * 8);
        let key = key0 + lane % 4u32 * 2u32 + offset;
        let key = min(key, block.span.k_count - 1u32);
        let at = row_at(&sources.v, &buffers.block_table, key);
        let at = in_lines(at, config);
        #[unroll]
        for i in first..last {
            let line = min(
                lane / 4u32 + comptime!(i as u32 * 8),
                sources.loads_v - 1u32,
            );
            to[n * blocks + i] = v[(at + u64::cast_from(line)) as usize];
        }
    }
}

/// Elements `first..first + 4` of a line as the right-hand side of a product.
#[cube]
pub fn pairs<E: Float>(line: Vector<E, Line>, #[comptime] first: usize) -> Array<Vector<E, Pair>> {
    let mut out = Array::<Vector<E, Pair>>::new(2usize);
    #[unroll]
    for i in 0..2usize {
        let mut two = Vector::<E, Pair>::empty();
        two[0] = line[comptime!(first + i * 2)];
        two[1] = line[comptime!(first + i * 2 + 1)];
        out[i] = two;
    }
    out
}

/// The same element of two lines.
#[cube]
pub fn across<E: Float>(
    a: Vector<E, Line>,
    b: Vector<E, Line>,
    #[comptime] i: usize,
) -> Vector<E, Pair> {
    let mut two = Vector::<E, Pair>::empty();
    two[0] = a[i];
    two[1] = b[i];
    two
}
