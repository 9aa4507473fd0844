//! The kernels whose warps walk over tokens (`kernels/cuda/qk_norm_rope`): heads of 16 bits and some
//! sizes, aligned and all of them turned in halves. They give the bits that the others give.

use super::{Shape, address, code};
use crate::alloc::push;
use crate::backend::Stream;
use crate::cuda::Cuda;
use crate::cuda::device::{Kernel, Resources};
use crate::cuda::images::qk_norm_rope_ring::Arguments;
use crate::cuda::rotation::{Position, Rotation, strides};
use crate::cuda::rows::Divisor;
use crate::error::Result;
use crate::problem::qk_norm_rope::Norms;
use crate::problem::rope::{self, PositionSource, Style};
use crate::tensor::RawTensor;

/// Of one pass.
pub(in crate::cuda) struct Kernels {
    forms: Vec<Form>,
}

/// A kernel.
pub(super) struct Form {
    kernel: Kernel<Arguments>,
    /// Blocks that the device runs at once.
    resident: usize,
}

impl Kernels {
    pub fn new(op: &'static str, resources: &Resources, backward: bool) -> Result<Kernels> {
        let mut forms = Vec::new();
        for kernel in resources.kernels::<Arguments>()? {
            if kernel.choices.backward == u32::from(backward) {
                let resident = resources.resident_blocks(&kernel)?.max(1);
                push(op, &mut forms, Form { kernel, resident })?;
            }
        }
        Ok(Kernels { forms })
    }

    /// The kernel for heads that are accessed in so many elements.
    pub fn choose(
        &self,
        shape: &Shape,
        rotation: &rope::Rotation,
        dtype: u32,
        width: usize,
    ) -> Option<&Form> {
        let whole = rotation.style == Style::HalfSplit && rotation.rotary_dim == shape.head_dim;
        let mut forms = self.forms.iter().filter(|_| whole && width > 1);
        forms.find(|form| {
            let choices = form.kernel.choices;
            choices.dtype == dtype && choices.head_dim as usize == shape.head_dim
        })
    }
}

/// How blocks share heads out: of queries, and of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Split {
    pub blocks: [usize; 2],
    /// Two to this power of warps share a token's heads.
    parts_log2: [u32; 2],
}

impl Split {
    /// For so many tokens, of which each is so many steps of a warp, where so many blocks of so many
    /// warps run at once: both kinds end at about one time. Measured on an H200.
    fn new(
        tokens: usize,
        steps: [usize; 2],
        resident: usize,
        warps: usize,
        backward: bool,
    ) -> Split {
        /// Steps of a warp, at the least, where more blocks are launched than run at once, and how many
        /// times as many. They start as others end, so that those that run are near each other in
        /// memory, however they drift apart. Of gradients each would leave shares of the weights'.
        const STEPS: usize = 5;
        let rounds = if backward { 1 } else { 8 };
        let all = (steps[0] + steps[1]).max(1);
        let blocks = tokens.saturating_mul(all) / (STEPS * warps.max(1));
        let blocks = blocks.min(rounds * resident).max(resident);
        let mut split = Split {
            blocks: [0; 2],
            parts_log2: [0; 2],
        };
        // To the nearest: of one block less, each of the others would have more to do.
        let of_queries = (blocks * steps[0] + all / 2) / all;
        let shares = [of_queries, blocks - of_queries];
        for (i, steps) in steps.into_iter().enumerate() {
            if steps == 0 || tokens == 0 {
                continue;
            }
            let at_once = (resident * steps / all).max(1) * warps;
            split.parts_log2[i] = match (at_once / tokens, steps, backward) {
                // Of many tokens warps share the heads for the same reason as above.
                (0 | 1, 8.., true) => 3,
                (0 | 1, 8.., false) => 2,
                (0 | 1, 4.., true) => 1,
                // Of few half as many as there are: each has the angles to compute.
                (of_token, ..) => {
                    let useful = steps.next_power_of_two().ilog2();
                    of_token.div_ceil(2).max(1).ilog2().min(useful)
                }
            };
            let units = tokens << split.parts_log2[i];
            split.blocks[i] = shares[i].clamp(1, units.div_ceil(warps));
        }
        split
    }
}

/// What a launch reads and writes, of queries and of keys.
pub(super) struct Call<'a> {
    pub x: [Option<&'a RawTensor>; 2],
    /// Of the backward pass.
    pub dout: [Option<&'a RawTensor>; 2],
    pub to: [Option<&'a RawTensor>; 2],
    pub norms: &'a Norms,
    pub positions: &'a PositionSource,
    pub rotation: &'a rope::Rotation,
    /// Addresses of the shares of the gains' gradients, a row for each block; 0 for none.
    pub dweights: [u64; 2],
    /// Whether gradients are turned back.
    pub inverse: bool,
}

/// From one batch entry, token and head to the next, in bytes.
fn byte_strides(t: Option<&RawTensor>) -> [i64; 3] {
    t.map_or([0; 3], |t| {
        strides(t, 1).map(|stride| stride.wrapping_mul(t.dtype.size() as u64) as i64)
    })
}

impl Form {
    pub fn split(&self, shape: &Shape) -> Split {
        let heads = self.kernel.choices.heads.max(1) as usize;
        let steps = shape.num_heads.map(|count| count.div_ceil(heads));
        let warps = self.kernel.info.block[0] as usize / 32;
        let backward = self.kernel.choices.backward != 0;
        Split::new(shape.tokens(), steps, self.resident, warps, backward)
    }

    /// Queues a pass.
    ///
    /// # Safety
    /// The tensors have the heads that the shape has, in vectors of 16 bytes; shares have a row for
    /// each block of the split. The stream is live.
    pub unsafe fn launch(
        &self,
        cuda: &Cuda,
        op: &'static str,
        call: &Call,
        shape: &Shape,
        split: &Split,
        stream: Stream,
    ) -> Result<()> {
        let [q_blocks, k_blocks] = split.blocks;
        let arguments = arguments(call, shape, split);
        let blocks = (q_blocks + k_blocks) as u32;
        // SAFETY: the caller's promise; positions outside a table are seen to by the kernel.
        unsafe { cuda.launch(op, &self.kernel, blocks, &arguments, stream) }
    }
}

fn arguments(call: &Call, shape: &Shape, split: &Split) -> Arguments {
    let rotation = Rotation::new(call.rotation, call.inverse, 1);
    let position = Position::new(call.positions);
    let [q_weight, k_weight] = call.norms.weights.each_ref().map(Option::as_ref);
    let [q, k] = call.x.map(byte_strides);
    let [dq_out, dk_out] = call.dout.map(byte_strides);
    let [q_to, k_to] = call.to.map(byte_strides);
    let tokens_per_batch = Divisor::new(shape.seq.max(1));
    let mut arguments = Arguments {
        q: address(call.x[0]),
        k: address(call.x[1]),
        dq_out: address(call.dout[0]),
        dk_out: address(call.dout[1]),
        q_to: address(call.to[0]),
        k_to: address(call.to[1]),
        q_weight: address(q_weight),
        k_weight: address(k_weight),
        dq_weights: call.dweights[0],
        dk_weights: call.dweights[1],
        positions: position.address,
        factors: rotation.factors,
        cos_table: rotation.cos_table,
        sin_table: rotation.sin_table,
        q_batch: q[0],
        q_token: q[1],
        q_head: q[2],
        k_batch: k[0],
        k_token: k[1],
        k_head: k[2],
        dq_out_batch: dq_out[0],
        dq_out_token: dq_out[1],
        dq_out_head: dq_out[2],
        dk_out_batch: dk_out[0],
        dk_out_token: dk_out[1],
        dk_out_head: dk_out[2],
        q_to_batch: q_to[0],
        q_to_token: q_to[1],
        q_to_head: q_to[2],
        k_to_batch: k_to[0],
        k_to_token: k_to[1],
        k_to_head: k_to[2],
        position_first: position.first,
        position_batch: position.batch,
        position_token: position.token,
        table_rows: rotation.table_rows,
        cos_stride: rotation.cos_stride,
        sin_stride: rotation.sin_stride,
        tokens: shape.tokens() as u32,
        tokens_per_batch: tokens_per_batch.size,
        tokens_per_batch_multiplier: tokens_per_batch.multiplier,
        tokens_per_batch_shift: tokens_per_batch.shift,
        q_heads: shape.num_heads[0] as u32,
        k_heads: shape.num_heads[1] as u32,
        q_blocks: split.blocks[0] as u32,
        q_parts_log2: split.parts_log2[0],
        k_parts_log2: split.parts_log2[1],
        position_kind: position.kind,
        angle_kind: rotation.kind,
        q_weight_dtype: code(q_weight),
        k_weight_dtype: code(k_weight),
        weight_offset: call.norms.weight_offset,
        epsilon: call.norms.epsilon,
        inverse_length: 1.0 / shape.head_dim as f32,
        scale: rotation.scale,
        direction: rotation.direction,
        ..Arguments::ZERO
    };
    // No head of these has more pairs than there is room for.
    let all = arguments.frequencies.iter_mut();
    for (to, frequency) in all.zip(rotation.frequencies) {
        *to = frequency;
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_share_heads_out() {
        // Tokens, steps of queries and of keys, the pass; blocks, and the parts of a token.
        for (tokens, steps, backward, blocks, parts_log2) in [
            (0, [8, 2], false, [0, 0], [0, 0]),
            (1, [8, 2], false, [2, 1], [3, 1]),
            (64, [8, 2], false, [128, 32], [3, 1]),
            (64, [8, 0], false, [128, 0], [3, 0]),
            (512, [8, 2], false, [256, 106], [1, 0]),
            (512, [8, 2], true, [256, 106], [1, 0]),
            (2048, [8, 2], false, [819, 205], [2, 0]),
            (2048, [8, 2], true, [422, 106], [3, 0]),
            (16_384, [8, 2], false, [3379, 845], [2, 0]),
            (16_384, [8, 2], true, [422, 106], [3, 0]),
            (16_384, [4, 2], false, [2816, 1408], [0, 0]),
            (16_384, [4, 2], true, [352, 176], [1, 0]),
            (16_384, [1000, 1], false, [4220, 4], [2, 0]),
            (3, [0, 9], false, [0, 12], [0, 4]),
        ] {
            let expected = Split { blocks, parts_log2 };
            let split = Split::new(tokens, steps, 528, 4, backward);
            assert_eq!(split, expected, "{tokens} {steps:?} {backward}");
        }
    }
}
