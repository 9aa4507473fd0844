//! The backward pass of QK-norm and RoPE on the GPU: its workspace, and its launches: one for the
//! heads, then one for each weight's gradient.

use super::{Shape, address, code, strides_of, width};
use crate::alloc::push;
use crate::backend::{Implementation, Stream};
use crate::cuda::column_sums::Shares;
use crate::cuda::device::{Kernel, Resources};
use crate::cuda::images::qk_norm_rope_backward::Arguments;
use crate::cuda::rotation::{Position, Rotation};
use crate::cuda::rows::Divisor;
use crate::cuda::{Cuda, codes};
use crate::error::{Error, Result, text};
use crate::problem::qk_norm_rope::{Backward, Heads};
use crate::problem::{Plan, Plans};
use crate::tensor::{RawTensor, Scratch};

const OP: &str = "qk_norm_rope_backward";

struct Form {
    kernel: Kernel<Arguments>,
    /// Blocks that the device runs at once.
    resident: usize,
}

pub(in crate::cuda) struct Kernels(Vec<Form>);

pub(in crate::cuda) fn kernels(resources: &Resources) -> Result<Kernels> {
    let mut forms = Vec::new();
    for kernel in resources.kernels::<Arguments>()? {
        let form = Form {
            resident: resources.resident_blocks(&kernel)?.max(1),
            kernel,
        };
        push(OP, &mut forms, form)?;
    }
    Ok(Kernels(forms))
}

/// A problem with its kernel.
pub(crate) struct Ready<'a> {
    cuda: &'a Cuda,
    problem: Backward,
    shape: Shape,
    form: &'a Form,
    /// Elements that the kernel moves at a time.
    width: usize,
    /// Blocks of the launch, each of which leaves a share.
    groups: usize,
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
        let dtype = tensors.map(|t| t.dtype as u32).next();
        let style = codes::style(problem.rotation.style).code();
        let mut forms = self.qk_norm_rope_backward.0.iter();
        let form = forms.find(|form| {
            let c = form.kernel.choices;
            (Some(c.dtype), c.style, c.width as usize) == (dtype, style, width)
        });
        let form = form.ok_or_else(|| Error::Internal {
            op: OP,
            message: text!("no kernel of {width} elements per access"),
        })?;
        let groups = match shape.is_empty() {
            true => 0,
            false => shape.tokens().min(form.resident),
        };
        Ok(Ready {
            cuda: self,
            problem,
            shape,
            form,
            width,
            groups,
        })
    }
}

impl Ready<'_> {
    /// Bytes of one weight's shares.
    fn bytes(&self) -> usize {
        let share = self.shape.head_dim.saturating_mul(size_of::<f32>());
        self.groups.saturating_mul(share)
    }

    fn arguments(&self, shares: [u64; 2]) -> Arguments {
        let (p, shape) = (&self.problem, &self.shape);
        let rotation = Rotation::new(&p.rotation, true, self.width);
        let position = Position::new(&p.positions);
        let [q, k] = p.each(|heads| &heads.x);
        let [dq_out, dk_out] = p.each(|heads| &heads.dout);
        let [dq, dk] = p.each(|heads| &heads.dx);
        let [q_weight, k_weight] = p.norms.weights.each_ref().map(Option::as_ref);
        let of = |t| strides_of(t, self.width);
        let tokens_per_batch = Divisor::new(shape.seq.max(1));
        let [of_q, of_dq_out, of_dq] = [of(q), of(dq_out), of(dq)];
        let [of_k, of_dk_out, of_dk] = [of(k), of(dk_out), of(dk)];
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
            groups: self.groups as u32,
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
            q_heads: shape.num_heads[0] as u32,
            k_heads: shape.num_heads[1] as u32,
            head_dim: shape.head_dim as u32,
            lanes_log2: shape.lanes.ilog2(),
            q_weight_dtype: code(q_weight),
            k_weight_dtype: code(k_weight),
            weight_offset: p.norms.weight_offset,
            epsilon: p.norms.epsilon,
            inverse_length: 1.0 / shape.head_dim as f32,
            q_batch: of_q[0],
            q_token: of_q[1],
            q_head: of_q[2],
            dq_out_batch: of_dq_out[0],
            dq_out_token: of_dq_out[1],
            dq_out_head: of_dq_out[2],
            dq_batch: of_dq[0],
            dq_token: of_dq[1],
            dq_head: of_dq[2],
            k_batch: of_k[0],
            k_token: of_k[1],
            k_head: of_k[2],
            dk_out_batch: of_dk_out[0],
            dk_out_token: of_dk_out[1],
            dk_out_head: of_dk_out[2],
            dk_batch: of_dk[0],
            dk_token: of_dk[1],
            dk_head: of_dk[2],
            frequencies: rotation.frequencies,
            ..Arguments::ZERO
        }
    }
}

impl Plan for Ready<'_> {
    fn implementation(&self) -> Implementation {
        Implementation::Cuda
    }

    fn needed(&self) -> usize {
        let count = self.problem.dweights.iter().flatten().count();
        self.bytes().saturating_mul(count)
    }

    fn launch(&self, scratch: Scratch, stream: Stream) -> Result<()> {
        let p = &self.problem;
        // Shares of the gradients that are asked for, one after the other.
        let mut next = scratch.ptr.addr() as u64;
        let begins = p.dweights.map(|gradient| {
            let begin = next;
            next += gradient.map_or(0, |_| self.bytes() as u64);
            begin
        });
        if self.groups > 0 {
            let arguments = self.arguments(begins);
            let (kernel, blocks) = (&self.form.kernel, self.groups as u32);
            // SAFETY: the problem was checked: its tensors have the heads that the arguments
            // describe, and the workspace a share for each block; positions outside a table are seen
            // to by the kernel.
            unsafe { self.cuda.launch(OP, kernel, blocks, &arguments, stream) }?;
        }
        for (gradient, address) in p.dweights.iter().zip(begins) {
            if let Some(gradient) = gradient {
                let shares = Shares {
                    address,
                    rows: self.groups,
                    columns: self.shape.head_dim,
                };
                // SAFETY: the launch above leaves so many shares of `head_dim` sums there.
                unsafe { shares.add(self.cuda, OP, gradient, p.accumulate, stream) }?;
            }
        }
        Ok(())
    }
}
