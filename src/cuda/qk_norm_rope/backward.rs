//! The backward pass of QK-norm and RoPE on the GPU: its workspace, and its launches: one for the
//! heads, then one for each weight's gradient.

use super::forms::{Form, Forms, Split, head_counts, quads};
use super::{Shape, address, code, ring, strides_of, width};
use crate::backend::{Implementation, Stream};
use crate::cuda::column_sums::Shares;
use crate::cuda::device::Resources;
use crate::cuda::images::qk_norm_rope_backward::Arguments;
use crate::cuda::rotation::{Position, Rotation};
use crate::cuda::rows::Divisor;
use crate::cuda::{Cuda, codes};
use crate::error::Result;
use crate::problem::qk_norm_rope::{Backward, Heads};
use crate::problem::{Plan, Plans};
use crate::tensor::{RawTensor, Scratch};

const OP: &str = "qk_norm_rope_backward";

/// The kernels of a pass.
pub(in crate::cuda) struct Kernels {
    /// For any heads.
    portable: Forms<Arguments>,
    ring: ring::Kernels,
}

pub(in crate::cuda) fn kernels(resources: &Resources) -> Result<Kernels> {
    Ok(Kernels {
        portable: Forms::<Arguments>::new(OP, resources, |c| [c.dtype, c.style, c.width])?,
        ring: ring::Kernels::new(OP, resources, true)?,
    })
}

/// A kernel, and how its blocks share tokens out.
enum Chosen<'a> {
    Ring {
        form: &'a ring::Form,
        split: ring::Split,
    },
    Portable(Portable<'a>),
}

struct Portable<'a> {
    form: &'a Form<Arguments>,
    /// Elements that the kernel moves at a time.
    width: usize,
    split: Split,
}

impl Chosen<'_> {
    /// Shares of the gradient of each weight.
    fn shares(&self) -> [usize; 2] {
        match self {
            Chosen::Ring { split, .. } => split.blocks,
            Chosen::Portable(Portable { split, .. }) => [split.groups; 2],
        }
    }
}

/// A problem with its kernel.
pub(crate) struct Ready<'a> {
    cuda: &'a Cuda,
    problem: Backward,
    shape: Shape,
    chosen: Chosen<'a>,
}

impl Backward {
    /// The same tensor of queries and of keys.
    fn each(&self, which: fn(&Heads) -> &RawTensor) -> [Option<&RawTensor>; 2] {
        self.heads.each_ref().map(|heads| heads.as_ref().map(which))
    }
}

impl Plans<Backward> for Cuda {
    type Plan<'a> = Ready<'a>;

    fn plan(&self, problem: Backward) -> Result<Ready<'_>> {
        let shape = Shape::new(OP, problem.each(|heads| &heads.x), &problem.rotation)?;
        let tensors = problem.heads.iter().flatten();
        let tensors = tensors.flat_map(|heads| [&heads.x, &heads.dout, &heads.dx]);
        let width = width(&shape, &problem.rotation, tensors.clone());
        let dtype = tensors.map(|t| t.dtype as u32).next().unwrap_or_default();
        let kernels = &self.qk_norm_rope_backward;
        let ring = kernels
            .ring
            .choose(&shape, &problem.rotation, dtype, width)
            .map(|form| Chosen::Ring {
                split: form.split(&shape),
                form,
            });
        let chosen = match ring {
            Some(ring) => ring,
            None => {
                let style = codes::style(problem.rotation.style).code();
                let form = kernels.portable.get([dtype, style, width as u32])?;
                let split = match shape.is_empty() {
                    true => Split::default(),
                    // Each part would leave shares of its own.
                    false => Split::new(
                        shape.tokens(),
                        quads(&problem.rotation),
                        form.resident,
                        [1, 1],
                    ),
                };
                Chosen::Portable(Portable { form, width, split })
            }
        };
        Ok(Ready {
            cuda: self,
            problem,
            shape,
            chosen,
        })
    }
}

impl Ready<'_> {
    /// Bytes of each weight's shares, whose gradient is asked for.
    fn bytes(&self) -> [usize; 2] {
        let share = self.shape.head_dim.saturating_mul(size_of::<f32>());
        let shares = self.chosen.shares();
        [0, 1].map(|i| match self.problem.dweights[i] {
            Some(_) => shares[i].saturating_mul(share),
            None => 0,
        })
    }

    fn arguments(&self, chosen: &Portable, shares: [u64; 2]) -> Arguments {
        let (p, shape) = (&self.problem, &self.shape);
        let (width, split) = (chosen.width, &chosen.split);
        let rotation = Rotation::new(&p.rotation, true, width);
        let position = Position::new(&p.positions);
        let [q, k] = p.each(|heads| &heads.x);
        let [dq_out, dk_out] = p.each(|heads| &heads.dout);
        let [dq, dk] = p.each(|heads| &heads.dx);
        let [q_weight, k_weight] = p.norms.weights.each_ref().map(Option::as_ref);
        let [q_step, k_step] = shape.steps(split.parts);
        let tokens_per_batch = Divisor::new(shape.seq.max(1));
        let quads = Divisor::new(quads(&p.rotation).max(1));
        let [q_heads, k_heads] = head_counts(shape);
        let [of_q, of_dq_out, of_dq] = [q, dq_out, dq].map(|t| strides_of(t, width, q_step));
        let [of_k, of_dk_out, of_dk] = [k, dk_out, dk].map(|t| strides_of(t, width, k_step));
        let [has_dq_weight, has_dk_weight] = p.dweights.map(|d| u32::from(d.is_some()));
        Arguments {
            q: address(q),
            k: address(k),
            dq_out: address(dq_out),
            dk_out: address(dk_out),
            dq: address(dq),
            dk: address(dk),
            dq_weights: shares[0],
            dk_weights: shares[1],
            positions: position.address,
            positions_i64: position.address,
            q_weight: address(q_weight),
            k_weight: address(k_weight),
            factors: rotation.factors,
            cos_table: rotation.cos_table,
            sin_table: rotation.sin_table,
            tokens_per_batch: tokens_per_batch.size,
            tokens_per_batch_multiplier: tokens_per_batch.multiplier,
            tokens_per_batch_shift: tokens_per_batch.shift,
            tokens: shape.tokens() as u32,
            groups: split.groups as u32,
            tokens_per_block: split.tokens_per_block as u32,
            tokens_at_once: split.tokens_at_once as u32,
            q_parts: split.parts[0] as u32,
            k_parts: split.parts[1] as u32,
            has_dq_weight,
            has_dk_weight,
            position_kind: position.kind,
            position_first: position.first,
            position_batch: position.batch,
            position_token: position.token,
            angle_kind: rotation.kind,
            pairs: rotation.pairs,
            scale: rotation.scale,
            direction: rotation.direction,
            table_rows: rotation.table_rows,
            cos_stride: rotation.cos_stride,
            sin_stride: rotation.sin_stride,
            quads: quads.size,
            quads_multiplier: quads.multiplier,
            quads_shift: quads.shift,
            q_heads: q_heads.size,
            q_heads_multiplier: q_heads.multiplier,
            q_heads_shift: q_heads.shift,
            k_heads: k_heads.size,
            k_heads_multiplier: k_heads.multiplier,
            k_heads_shift: k_heads.shift,
            q_step_tokens: q_step.tokens as u32,
            q_step_heads: q_step.heads as u32,
            k_step_tokens: k_step.tokens as u32,
            k_step_heads: k_step.heads as u32,
            head_dim: shape.head_dim as u32,
            lanes_log2: shape.lanes.ilog2(),
            q_weight_dtype: code(q_weight),
            k_weight_dtype: code(k_weight),
            weight_offset: p.norms.weight_offset,
            epsilon: p.norms.epsilon,
            inverse_length: 1.0 / shape.head_dim as f32,
            q_batch: of_q.batch,
            q_token: of_q.token,
            q_head: of_q.head,
            q_step: of_q.step,
            q_step_token: of_q.step_token,
            q_step_batch: of_q.step_batch,
            dq_out_batch: of_dq_out.batch,
            dq_out_token: of_dq_out.token,
            dq_out_head: of_dq_out.head,
            dq_out_step: of_dq_out.step,
            dq_out_step_token: of_dq_out.step_token,
            dq_out_step_batch: of_dq_out.step_batch,
            dq_batch: of_dq.batch,
            dq_token: of_dq.token,
            dq_head: of_dq.head,
            dq_step: of_dq.step,
            dq_step_token: of_dq.step_token,
            dq_step_batch: of_dq.step_batch,
            k_batch: of_k.batch,
            k_token: of_k.token,
            k_head: of_k.head,
            k_step: of_k.step,
            k_step_token: of_k.step_token,
            k_step_batch: of_k.step_batch,
            dk_out_batch: of_dk_out.batch,
            dk_out_token: of_dk_out.token,
            dk_out_head: of_dk_out.head,
            dk_out_step: of_dk_out.step,
            dk_out_step_token: of_dk_out.step_token,
            dk_out_step_batch: of_dk_out.step_batch,
            dk_batch: of_dk.batch,
            dk_token: of_dk.token,
            dk_head: of_dk.head,
            dk_step: of_dk.step,
            dk_step_token: of_dk.step_token,
            dk_step_batch: of_dk.step_batch,
            frequencies: rotation.frequencies,
            ..Arguments::ZERO
        }
    }
}

impl Ready<'_> {
    /// Queues the gradients of heads, and the shares of those of weights.
    ///
    /// # Safety
    /// The tensors have the heads that the shape has; where a weight's gradient is asked for, there is
    /// a share for each block. The stream is live.
    unsafe fn heads(&self, shares: [u64; 2], stream: Stream) -> Result<()> {
        let (cuda, p) = (self.cuda, &self.problem);
        match &self.chosen {
            Chosen::Ring { form, split } => {
                let call = ring::Call {
                    x: p.each(|heads| &heads.x),
                    dout: p.each(|heads| &heads.dout),
                    to: p.each(|heads| &heads.dx),
                    norms: &p.norms,
                    positions: &p.positions,
                    rotation: &p.rotation,
                    dweights: [0, 1].map(|i| p.dweights[i].map_or(0, |_| shares[i])),
                    inverse: true,
                };
                // SAFETY: the caller's promise; tensors are aligned, by `width`.
                unsafe { form.launch(cuda, OP, &call, &self.shape, split, stream) }
            }
            Chosen::Portable(chosen) => {
                let arguments = self.arguments(chosen, shares);
                let (kernel, blocks) = (&chosen.form.kernel, chosen.split.blocks() as u32);
                // SAFETY: the caller's promise.
                unsafe { cuda.launch(OP, kernel, blocks, &arguments, stream) }
            }
        }
    }
}

impl Plan for Ready<'_> {
    fn implementation(&self) -> Implementation {
        Implementation::Cuda
    }

    fn needed(&self) -> usize {
        let [of_q, of_k] = self.bytes();
        of_q.saturating_add(of_k)
    }

    fn launch(&self, scratch: Scratch, stream: Stream) -> Result<()> {
        let p = &self.problem;
        // Shares of the gradients that are asked for, one after the other.
        let begin = scratch.ptr.addr() as u64;
        let begins = [begin, begin + self.bytes()[0] as u64];
        if !self.shape.is_empty() {
            // SAFETY: the problem was checked: its tensors have the heads that the arguments
            // describe, and the workspace a share for each block; positions outside a table are seen
            // to by the kernel.
            unsafe { self.heads(begins, stream) }?;
        }
        let shares = Shares {
            addresses: begins,
            rows: self.chosen.shares(),
            columns: self.shape.head_dim,
        };
        // SAFETY: the launch above leaves so many shares of `head_dim` sums there.
        unsafe { shares.add(self.cuda, OP, p.dweights, p.accumulate, stream) }
    }
}
