//! The kernels of both passes, and how their blocks share tokens out.

use contract::qk_norm_rope::{MAX_TOKENS, TURN_QUADS};

use super::Shape;
use crate::alloc::push;
use crate::cuda::device::{Kernel, Resources};
use crate::cuda::images;
use crate::cuda::rows::Divisor;
use crate::error::{Error, Result, text};
use crate::problem::rope::Rotation;

/// A kernel, by dtype, style and elements per access.
pub(super) struct Form<A: images::Arguments> {
    choices: [u32; 3],
    pub kernel: Kernel<A>,
    /// Blocks that the device runs at once.
    pub resident: usize,
}

/// The kernels of a pass.
pub(in crate::cuda) struct Forms<A: images::Arguments> {
    op: &'static str,
    list: Vec<Form<A>>,
}

impl<A: images::Arguments> Forms<A> {
    pub fn new(
        op: &'static str,
        resources: &Resources,
        choices: fn(&A::Choices) -> [u32; 3],
    ) -> Result<Self> {
        let mut list = Vec::new();
        for kernel in resources.kernels::<A>()? {
            let form = Form {
                choices: choices(kernel.choices),
                resident: resources.resident_blocks(&kernel)?.max(1),
                kernel,
            };
            push(op, &mut list, form)?;
        }
        Ok(Forms { op, list })
    }

    pub(super) fn get(&self, choices: [u32; 3]) -> Result<&Form<A>> {
        let found = self.list.iter().find(|form| form.choices == choices);
        found.ok_or_else(|| Error::Internal {
            op: self.op,
            message: text!("no kernel with choices {choices:?}"),
        })
    }
}

/// How blocks share tokens out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Split {
    /// Groups of tokens.
    pub groups: usize,
    pub tokens_per_block: usize,
    /// Tokens whose angles a block has at a time.
    pub tokens_at_once: usize,
    /// Blocks that share the heads of a group's queries and of its keys; none where one block has both.
    pub parts: [usize; 2],
}

impl Split {
    /// For so many tokens, of which each has so many quads of pairs, on so many blocks, of which no
    /// more than `most` are of use for the queries and for the keys of a group.
    pub fn new(tokens: usize, quads: usize, resident: usize, most: [usize; 2]) -> Split {
        let tokens_per_block = tokens.div_ceil(resident);
        if tokens_per_block == 0 {
            return Split::default();
        }
        let fit = (TURN_QUADS as usize / quads.max(1)).clamp(1, MAX_TOKENS as usize);
        let turns = tokens_per_block.div_ceil(fit);
        let groups = tokens.div_ceil(tokens_per_block);
        let parts = match resident / groups {
            of_group if of_group >= most[0] + most[1] => most,
            of_group if of_group >= 2 => [1, 1],
            _ => [0, 0],
        };
        Split {
            groups,
            tokens_per_block,
            tokens_at_once: tokens_per_block.div_ceil(turns),
            parts,
        }
    }

    /// Blocks of a launch.
    pub fn blocks(&self) -> usize {
        let [q, k] = self.parts;
        self.groups * (q + k).max(1)
    }
}

/// Quads of a head's pairs that turn.
pub(super) fn quads(rotation: &Rotation) -> usize {
    (rotation.rotary_dim / 2).div_ceil(4)
}

/// Heads of a token, of which there may be none.
pub(super) fn head_counts(shape: &Shape) -> [Divisor; 2] {
    shape.num_heads.map(|count| Divisor {
        size: count as u32,
        ..Divisor::new(count.max(1))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_share_tokens_out() {
        let split = |groups, tokens_per_block, tokens_at_once, parts| Split {
            groups,
            tokens_per_block,
            tokens_at_once,
            parts,
        };
        for ((tokens, quads, resident), expected, blocks) in [
            ((0, 16, 660), Split::default(), 0),
            ((1, 16, 660), split(1, 1, 1, [2, 1]), 3),
            ((220, 16, 660), split(220, 1, 1, [2, 1]), 660),
            ((221, 16, 660), split(221, 1, 1, [1, 1]), 442),
            ((331, 16, 660), split(331, 1, 1, [0, 0]), 331),
            ((16_384, 16, 660), split(656, 25, 13, [0, 0]), 656),
            // Angles of four tokens fit.
            ((16_384, 64, 660), split(656, 25, 4, [0, 0]), 656),
            ((16_384, 0, 660), split(656, 25, 13, [0, 0]), 656),
        ] {
            let got = Split::new(tokens, quads, resident, [2, 1]);
            assert_eq!((got, got.blocks()), (expected, blocks));
        }
    }
}
