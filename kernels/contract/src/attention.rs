//! Attention.

/// A window without a limit, in keys. Lengths and positions are below it, and two of it fit 32 bits.
pub const NO_LIMIT: u32 = 1 << 30;

/// The greatest head dimension.
pub const MAX_HEAD_DIM: u32 = 256;

codes! {
    /// What a kernel for every architecture is made for.
    pub enum Kind {
        /// A block of queries of one head, on tensor cores.
        Forward = 0,
        /// Few queries: the heads that share a key head are packed, and keys may be split.
        Decode = 1,
        /// Everything, packed and split like [`Decode`](Kind::Decode), without tensor cores.
        Simt = 2,
    }
}

codes! {
    /// What a kernel of the backward pass computes.
    pub enum Gradient {
        /// `dq`, a block of queries of one head.
        Queries = 0,
        /// `dk` and `dv`, a block of keys of one key head.
        KeysAndValues = 1,
        /// `dk` alone.
        Keys = 2,
        /// `dv` alone.
        Values = 3,
        /// `dbias`, a tile of it.
        Bias = 4,
    }
}

codes! {
    /// What a kernel of the bias's own image computes.
    pub enum BiasSum {
        /// A tile of the gradient, or a part of its sums.
        Tile = 0,
        /// The sum of the parts.
        Join = 1,
    }
}

codes! {
    /// What a kernel computes that the backward pass needs of rows.
    pub enum RowSum {
        /// What the softmax's denominator contributes, for each row.
        Delta = 0,
        /// The gradients of the sinks.
        Sinks = 1,
    }
}

codes! {
    /// Which keys a Hopper kernel hides.
    pub enum Mask {
        /// None but those past the end.
        None = 0,
        /// Those after the query.
        Causal = 1,
        /// Those outside a window of any two sizes.
        Window = 2,
    }
}

codes! {
    /// What a Hopper kernel of the backward pass does.
    pub enum Part {
        /// Statistics of queries, and zeros for sums that begin with them.
        Prepare = 0,
        /// The gradients.
        Gradients = 1,
        /// `dq` from its sums.
        Finish = 2,
        /// `dk` and `dv` alone.
        Keys = 3,
        /// `dq` alone.
        Queries = 4,
        /// `dsinks`.
        Sinks = 5,
    }
}

/// Bits of the argument `flags`: which arguments are given, and what is asked for.
pub mod flag {
    /// Queries are packed.
    pub const CU_SEQLENS_Q: u32 = 1;
    /// Keys are packed.
    pub const CU_SEQLENS_K: u32 = 2;
    /// Sequences have lengths of their own.
    pub const SEQ_LENS_K: u32 = 4;
    /// Keys and values lie in pages.
    pub const PAGED: u32 = 8;
    /// The logarithms of the sums are written.
    pub const LSE: u32 = 16;
    /// Heads have sinks.
    pub const SINKS: u32 = 32;
    /// There is a boolean mask.
    pub const MASK: u32 = 64;
    /// Heads have slopes.
    pub const ALIBI: u32 = 128;
    /// The output is f32 whatever the queries are.
    pub const OUT_F32: u32 = 256;
    /// The gradient of the keys is wanted.
    pub const DK: u32 = 512;
    /// The gradient of the values is wanted.
    pub const DV: u32 = 1024;
    /// The LSE has a gradient.
    pub const DLSE: u32 = 2048;
    /// Sums are added to what is there.
    pub const ACCUMULATE: u32 = 4096;
    /// Keys, which are codes, have a scale.
    pub const K_SCALE: u32 = 8192;
    /// Values, which are codes, have a scale.
    pub const V_SCALE: u32 = 16384;
}
