//! What launches choose: thresholds, tiles, splits and algorithms, as data.
//!
//! | file | where its figures come from |
//! |-|-|
//! | [`h100`], [`h200`] | `python3 benches/tuning.py write`, from the records that they name |
//! | [`rules`] | a device's properties, where there is no record; and what is the same everywhere |
//! | [`linear`] | how the tables of products are read |
//!
//! A choice depends on shapes, dtypes, strides and the device, so that a call does the same work
//! each time.

use super::tensor_map::Fetch;

mod h100;
mod h200;
mod linear;
pub(super) mod rules;

pub(super) use linear::{Linear, Server, Why};

/// What tells devices apart.
#[derive(Clone, Copy, Debug)]
pub(super) struct Properties {
    pub capability: (u32, u32),
    pub multiprocessors: usize,
    /// Bytes that memory moves in a microsecond.
    pub bandwidth: usize,
}

/// Everything that depends on the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tuning {
    pub argmax: Argmax,
    pub linear: Linear,
    pub mlp: Mlp,
    pub hopper: Hopper,
    pub norm_backward: NormBackward,
}

/// How rows are spread over blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Argmax {
    /// Up to so many blocks a thread has one vector.
    pub thin_blocks: usize,
    /// Beyond so many blocks rows are not cut further: the blocks of a row must agree on a maximum.
    pub full_blocks: usize,
}

/// The feed-forward block, where gate and up are stored side by side.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mlp {
    /// Tokens at a time, at most, where the workspace has room for them.
    pub tokens: usize,
    /// Tokens that a workspace is asked for: room for more gains little.
    pub asked_tokens: usize,
    /// Up to so many tokens the kernels that need one intermediate are faster than parts are, each
    /// of which reads the weights.
    pub tokens_by_kernels: usize,
}

/// Attention by Hopper's kernels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hopper {
    /// `(head_dim, queries)`: up to so many queries, the sibling for short sequences is the faster
    /// one, under a causal mask.
    pub short: &'static [(usize, usize)],
    /// `(head_dim, row blocks, pairs)`: where a (sequence, head) pair has up to so many blocks of
    /// rows, at most so many pairs are scheduled together.
    pub together: &'static [(usize, usize, usize)],
    /// Which decoding is faster here than by the portable kernels.
    pub decoding: &'static [Decoding],
    /// What the cache reads at a time where decoding streams keys and values.
    pub decoding_fetch: Fetch,
}

/// The gradients of norms by Hopper's kernels. Of those of rows in shared memory alone: how many stages
/// a ring of rows has, and when they are filled again. Rows short enough for one warp have the same
/// ring on every device.
#[derive(Clone, Copy, Debug)]
pub(super) struct NormBackward {
    /// Kernels that have several rows in registers take a launch whose x has no more bytes than this,
    /// or one that adds a residual's gradient. Beyond they are slower than those of rings.
    pub group_bytes: usize,
    /// RMSNorm, where a block has several rings.
    pub rms_norm: (usize, Refill),
    /// RMSNorm, of rows that take all vectors of all threads.
    pub rms_norm_full: (usize, Refill),
    /// RMSNorm, where a block has one ring: bytes that its stages may take, of three at least.
    pub rms_norm_single_bytes: usize,
    /// LayerNorm, where a block has several rings.
    pub layer_norm: (usize, Refill),
    /// LayerNorm, where a block has one ring.
    pub layer_norm_single: (usize, Refill),
}

/// When the stage of a row that is done is filled again; the kernels have these numbers too.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Refill {
    AtOnce = 0,
    BeforeSums = 1,
    AfterSums = 2,
}

/// One query per sequence, or few, of many sequences.
#[derive(Clone, Copy, Debug)]
pub(super) struct Decoding {
    /// Head dimensions, both included.
    pub head_dims: (usize, usize),
    /// Whether lengths are on the device. Then a long sequence among short ones keeps one
    /// multiprocessor busy alone, so only bounds that are short themselves are served.
    pub ragged: bool,
    /// The least tiles: sequences times key heads.
    pub tiles: usize,
    /// The most keys.
    pub keys: usize,
}

impl Tuning {
    /// The figures for a device: those of the measured one that is the most like it, or rules.
    pub fn of(properties: &Properties) -> Tuning {
        /// Between an H100's memory (25 kB a microsecond for each multiprocessor) and an H200's
        /// (36).
        const BANDWIDTH: usize = 30_000;
        match properties.capability {
            (9, 0) if properties.bandwidth / properties.multiprocessors.max(1) >= BANDWIDTH => {
                h200::TUNING
            }
            (9, 0) => h100::TUNING,
            _ => rules::tuning(properties),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_get_their_figures() {
        let hopper = |bandwidth| Properties {
            capability: (9, 0),
            multiprocessors: 132,
            bandwidth,
        };
        // As the driver tells: 5120 bits at 2619 MHz, 6016 bits at 3201 MHz, two transfers a clock.
        let h100 = Tuning::of(&hopper(3_352_320));
        let h200 = Tuning::of(&hopper(4_814_304));
        assert_eq!(
            h100.mlp.tokens_by_kernels,
            h100::TUNING.mlp.tokens_by_kernels
        );
        assert_eq!(
            h200.mlp.tokens_by_kernels,
            h200::TUNING.mlp.tokens_by_kernels
        );
        let other = Tuning::of(&Properties {
            capability: (8, 0),
            multiprocessors: 108,
            bandwidth: 2_039_000,
        });
        assert_eq!(other.argmax.full_blocks, 4 * 108);
        assert!(other.hopper.decoding.is_empty());
    }

    #[test]
    fn tables_are_in_order() {
        for tuning in [h100::TUNING, h200::TUNING] {
            assert!(tuning.mlp.asked_tokens <= tuning.mlp.tokens);
            // With other choices the portable kernels would serve these rows, and nobody would see why:
            // a ring has two stages, and no kernel of RMSNorm refills at once.
            let norms = tuning.norm_backward;
            for (stages, refill) in [norms.rms_norm, norms.rms_norm_full] {
                assert!(stages >= 2 && refill != Refill::AtOnce, "{norms:?}");
            }
            assert!(norms.layer_norm.0 >= 2 && norms.layer_norm_single.0 >= 2);
            for shape in tuning.linear.halves {
                for all in [shape.alone, shape.with] {
                    assert!(all.is_sorted_by(|a, b| a.0 < b.0), "{shape:?}");
                    assert_eq!(all.last().map(|last| last.0), Some(usize::MAX), "{shape:?}");
                }
            }
        }
    }
}
