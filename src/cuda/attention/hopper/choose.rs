//! The heuristics. Their figures are in [`crate::cuda::tuning`].

use contract::attention::Mask;

use crate::cuda::tuning::Hopper;
use crate::cuda::tuning::rules::attention::{FEW_QUERIES, L2};

/// Whether sequences of so many queries are short for the kernels of this head dimension and mask.
pub(super) fn is_short(hopper: &Hopper, head_dim: usize, mask: Mask, queries: usize) -> bool {
    let mut short = hopper.short.iter();
    mask == Mask::Causal && short.any(|(dim, most)| *dim == head_dim && queries <= *most)
}

/// What decides who decodes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Decode {
    /// Queries times the query heads of a key head.
    pub rows: usize,
    /// Sequences times key heads.
    pub pairs: usize,
    pub head_dim: usize,
    /// The longest keys.
    pub keys: usize,
    /// What would be launched here.
    pub tiles: usize,
    /// Whether lengths are on the device.
    pub ragged: bool,
}

/// Whether the portable decoding kernels, which split the keys, are better: for up to
/// [`FEW_QUERIES`] rows.
///
/// Up to 16 rows they read keys at the memory's speed, but for many sequences of few keys. Then
/// their time is that of as many blocks of 16 rows, spread over the device; here a round of tiles
/// takes as long as about a block for each multiprocessor does, however few its tiles are. Where
/// lengths are on the device, the longest sequence makes a round, and the others are taken to be
/// half as long.
pub(super) fn decodes(hopper: &Hopper, multiprocessors: usize, d: &Decode) -> bool {
    const BLOCK: usize = 16;
    let quarters = if d.head_dim <= 64 { 5 } else { 3 };
    let round = multiprocessors * quarters / 4 * if d.ragged { 2 } else { 1 };
    let rounds = d.tiles.div_ceil(multiprocessors);
    let blocks = d.rows.div_ceil(BLOCK).saturating_mul(d.pairs);
    if d.rows <= BLOCK {
        return !hopper.decoding.iter().any(|here| {
            let (least, most) = here.head_dims;
            (least..=most).contains(&d.head_dim)
                && here.ragged == d.ragged
                && d.tiles >= here.tiles
                && d.keys <= here.keys
        });
    }
    d.rows <= FEW_QUERIES && blocks <= rounds * round
}

/// (sequence, head) pairs whose tiles are scheduled together, the longest first, so that their keys
/// and values, of so many `bytes`, stay in L2. `group` pairs share them.
///
/// Where a pair has few tiles, fewer pairs: a wave of tiles then reads the keys of fewer pairs for
/// the first time, which keeps memory busy more evenly.
pub(super) fn pairs_in_l2(
    hopper: &Hopper,
    head_dim: usize,
    row_blocks: usize,
    bytes: usize,
    group: usize,
) -> usize {
    let budget = match row_blocks {
        0..=4 => L2 / 4,
        5..=16 => L2 / 2,
        _ => L2,
    };
    let fitting = (budget / bytes.max(1)).max(1);
    let mut measured = hopper.together.iter();
    let most = measured.find(|(dim, blocks, _)| *dim == head_dim && row_blocks <= *blocks);
    let most = most.map_or(usize::MAX, |(_, _, pairs)| *pairs);
    (1 << fitting.min(most).ilog2()) * group
}

/// Keys of one head for which L2 has room, of `bytes` each with their values.
pub(super) fn keys_in_l2(bytes: usize) -> usize {
    L2 / bytes.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::tuning::{Properties, Tuning};

    fn hopper(bandwidth: usize) -> Hopper {
        let properties = Properties {
            capability: (9, 0),
            multiprocessors: 132,
            bandwidth,
        };
        Tuning::of(&properties).hopper
    }

    #[test]
    fn many_short_sequences_are_decoded_here() {
        let many = Decode {
            rows: 4,
            pairs: 4096,
            head_dim: 128,
            keys: 333,
            tiles: 4096,
            ragged: false,
        };
        let few = Decode {
            pairs: 64,
            tiles: 64,
            ..many
        };
        let long = Decode { keys: 8192, ..many };
        let ragged = Decode {
            ragged: true,
            keys: 2048,
            ..many
        };
        for bandwidth in [3_352_320, 4_814_304] {
            let hopper = hopper(bandwidth);
            assert!(!decodes(&hopper, 132, &many));
            for other in [few, long, ragged] {
                assert!(decodes(&hopper, 132, &other), "{other:?}");
            }
        }
    }

    #[test]
    fn pairs_that_are_scheduled_together_are_a_power_of_two_of_groups() {
        for bandwidth in [3_352_320, 4_814_304] {
            let hopper = hopper(bandwidth);
            for head_dim in [64, 128, 256] {
                for row_blocks in [1, 4, 5, 16, 17, 1000] {
                    for bytes in [0, 1, 1000, 1 << 20, usize::MAX] {
                        let pairs = pairs_in_l2(&hopper, head_dim, row_blocks, bytes, 3);
                        assert!((pairs / 3).is_power_of_two() && pairs.is_multiple_of(3));
                    }
                }
            }
        }
    }
}
