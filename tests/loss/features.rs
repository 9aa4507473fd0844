//! What a loss is asked for, by the bits of a number: cases of every operation go through all of them.

use crate::common::reference::cross_entropy::Loss;
use unsloth::ops::cross_entropy::Reduction;

pub struct Features {
    pub loss: Loss,
    pub reduction: Reduction,
    /// Given from outside.
    pub denominator: Option<f64>,
    pub dloss: Option<f64>,
    /// Whether each token's loss is asked for.
    pub losses: bool,
}

impl Features {
    pub fn new(bits: usize, ignore_index: i64) -> Features {
        let bit = |n: usize| bits >> n & 1 == 1;
        Features {
            loss: Loss {
                ignore_index,
                label_smoothing: if bit(1) { 0.125 } else { 0.0 },
                z_loss: if bit(2) { 0.0625 } else { 0.0 },
                softcap: if bit(0) { 2.5 } else { 0.0 },
            },
            reduction: if bit(2) {
                Reduction::Sum
            } else {
                Reduction::Mean
            },
            denominator: (!bit(2) && bit(1)).then_some(7.0),
            dloss: bit(0).then_some(-1.5),
            losses: bit(2),
        }
    }
}
