//! QK-norm and RoPE on the GPU.

pub(super) mod backward;
mod forms;
mod ring;

use contract::qk_norm_rope::{MAX_LANES, SHARE, THREADS};

use super::device::Resources;
use super::images::qk_norm_rope::Arguments;
use super::rotation::{self, Position, Rotation, strides};
use super::rows::Divisor;
use super::{Cuda, Run, VECTOR, check_blocks, codes};
use crate::backend::Stream;
use crate::error::{Error, Result, text};
use crate::problem::qk_norm_rope::Problem;
use crate::problem::rope::{self, Style};
use crate::tensor::RawTensor;
use forms::{Forms, Split, head_counts, quads};

const OP: &str = "qk_norm_rope";

/// The kernels of a pass.
pub(super) struct Kernels {
    /// For any heads.
    portable: Forms<Arguments>,
    ring: ring::Kernels,
}

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    Ok(Kernels {
        portable: Forms::<Arguments>::new(OP, resources, |c| [c.dtype, c.style, c.width])?,
        ring: ring::Kernels::new(OP, resources, false)?,
    })
}

/// What queries and keys are to the kernels of both passes.
#[derive(Clone, Copy, Debug)]
struct Shape {
    batch: usize,
    seq: usize,
    /// Of queries and of keys.
    num_heads: [usize; 2],
    head_dim: usize,
    /// Threads that share a head, a power of two.
    lanes: usize,
}

impl Shape {
    /// Of queries and keys, at least one of which is there; tells why there is no kernel.
    fn new(
        op: &'static str,
        tensors: [Option<&RawTensor>; 2],
        p: &rope::Rotation,
    ) -> Result<Shape> {
        rotation::check(op, p)?;
        let dims = |t: &RawTensor| -> [usize; 4] {
            let rank = t.layout.rank();
            let batch = if rank == 4 { t.layout.dim(0) } else { 1 };
            let [seq, heads, dim] = [3, 2, 1].map(|i| t.layout.dim(rank - i));
            [batch, seq, heads, dim]
        };
        let all = tensors.map(|t| t.map(dims));
        let [batch, seq, _, head_dim] = all.into_iter().flatten().next().unwrap_or([0; 4]);
        let num_heads = all.map(|dims| dims.map_or(0, |[_, _, heads, _]| heads));
        let name = if tensors[0].is_some() { "q" } else { "k" };
        // A thread has parts of a half that turns, or what lies behind both.
        let share = SHARE as usize;
        let shares = match p.style {
            Style::HalfSplit => {
                let halves = (p.rotary_dim / 2).div_ceil(share / 2);
                halves + (head_dim - p.rotary_dim).div_ceil(share)
            }
            Style::Interleaved => head_dim.div_ceil(share),
        };
        if shares > MAX_LANES as usize {
            let problem = text!(
                "has heads of {head_dim} components, which take {shares} threads: the CUDA backend \
                 has {MAX_LANES} for {share} each"
            );
            return Err(Error::unsupported(op, name, problem));
        }
        let shape = Shape {
            batch,
            seq,
            num_heads,
            head_dim,
            lanes: shares.max(1).next_power_of_two(),
        };
        // Both are counted in 32 bits.
        let heads = shape.all_heads();
        if heads > 1 << 24 {
            let problem = text!(
                "has {heads} heads per token, the CUDA backend takes {}",
                1 << 24
            );
            return Err(Error::unsupported(op, name, problem));
        }
        check_blocks(op, name, shape.tokens())?;
        Ok(shape)
    }

    fn all_heads(&self) -> usize {
        self.num_heads[0].saturating_add(self.num_heads[1])
    }

    fn tokens(&self) -> usize {
        self.batch * self.seq
    }

    fn is_empty(&self) -> bool {
        self.tokens() == 0 || self.all_heads() == 0 || self.head_dim == 0
    }

    /// Blocks that have a step of a token's heads of queries each, and of keys.
    fn blocks_per_token(&self) -> [usize; 2] {
        let slots = THREADS as usize / self.lanes;
        self.num_heads.map(|heads| heads.div_ceil(slots))
    }
}

/// Elements per access: whole vectors where heads, and the parts of them that are treated alike,
/// consist of them.
fn width<'t>(
    shape: &Shape,
    p: &rope::Rotation,
    mut tensors: impl Iterator<Item = &'t RawTensor> + Clone,
) -> usize {
    let vector = tensors
        .clone()
        .next()
        .map_or(1, |t| VECTOR / t.dtype.size());
    let fits = rotation::fits(p, shape.head_dim, vector);
    let aligned = tensors.all(|t| rotation::is_aligned(t, vector));
    if fits && aligned { vector } else { 1 }
}

/// The address of a tensor that may be absent.
fn address(t: Option<&RawTensor>) -> u64 {
    t.map_or(0, |t| t.ptr.addr() as u64)
}

/// How far a thread steps from one of its heads to the next: so many tokens and heads.
#[derive(Clone, Copy)]
struct Step {
    tokens: u64,
    heads: u64,
    /// Of a token.
    num_heads: u64,
    tokens_per_batch: u64,
}

impl Shape {
    /// The steps among queries and among keys, which so many blocks share.
    fn steps(&self, parts: [usize; 2]) -> [Step; 2] {
        let slots = THREADS as usize / self.lanes;
        [0, 1].map(|i| {
            let num_heads = self.num_heads[i].max(1);
            let rows = parts[i].max(1) * slots;
            Step {
                tokens: (rows / num_heads) as u64,
                heads: (rows % num_heads) as u64,
                num_heads: num_heads as u64,
                tokens_per_batch: self.seq as u64,
            }
        })
    }
}

/// The strides of heads of a tensor, and what a step adds to a place in it.
#[derive(Clone, Copy, Default)]
struct Strides {
    batch: u64,
    token: u64,
    head: u64,
    step: u64,
    step_token: u64,
    step_batch: u64,
}

/// Those of a tensor that may be absent.
fn strides_of(t: Option<&RawTensor>, width: usize, by: Step) -> Strides {
    let Some([batch, token, head]) = t.map(|t| strides(t, width)) else {
        return Strides::default();
    };
    let times = |stride: u64, count: u64| stride.wrapping_mul(count);
    Strides {
        batch,
        token,
        head,
        step: times(token, by.tokens).wrapping_add(times(head, by.heads)),
        step_token: token.wrapping_sub(times(head, by.num_heads)),
        step_batch: batch.wrapping_sub(times(token, by.tokens_per_batch)),
    }
}

/// The dtype of a weight that may be absent.
fn code(t: Option<&RawTensor>) -> u32 {
    t.map_or(0, |t| t.dtype as u32)
}

impl Problem {
    fn inputs(&self) -> [Option<&RawTensor>; 2] {
        let [q, k] = &self.tensors;
        [q, k].map(|pair| pair.as_ref().map(|(input, _)| input))
    }

    fn outputs(&self) -> [Option<&RawTensor>; 2] {
        let [q, k] = &self.tensors;
        [q, k].map(|pair| pair.as_ref().map(|(_, output)| output))
    }
}

impl Run for Problem {
    fn check(&self) -> Result<()> {
        Shape::new(OP, self.inputs(), &self.rotation).map(drop)
    }

    fn run(&self, cuda: &Cuda, stream: Stream) -> Result<()> {
        let shape = Shape::new(OP, self.inputs(), &self.rotation)?;
        let Some(first) = self.inputs().into_iter().flatten().next() else {
            return Ok(());
        };
        if shape.is_empty() {
            return Ok(());
        }
        let tensors = self.inputs().into_iter().chain(self.outputs()).flatten();
        let width = width(&shape, &self.rotation, tensors);
        let (kernels, dtype) = (&cuda.qk_norm_rope, first.dtype as u32);
        if let Some(form) = kernels.ring.choose(&shape, &self.rotation, dtype, width) {
            let call = ring::Call {
                x: self.inputs(),
                dout: [None; 2],
                to: self.outputs(),
                norms: &self.norms,
                positions: &self.positions,
                rotation: &self.rotation,
                dweights: [0; 2],
                inverse: false,
            };
            let split = form.split(&shape);
            // SAFETY: the problem was checked: its tensors have the heads that the shape has, and
            // they are aligned, by `width`.
            return unsafe { form.launch(cuda, OP, &call, &shape, &split, stream) };
        }
        let style = codes::style(self.rotation.style).code();
        let form = kernels.portable.get([dtype, style, width as u32])?;
        let split = Split::new(
            shape.tokens(),
            quads(&self.rotation),
            form.resident,
            shape.blocks_per_token(),
        );
        let arguments = self.arguments(&shape, width, &split);
        let blocks = check_blocks(OP, "q", split.blocks())?;
        // SAFETY: the problem was checked: its tensors have the heads that the arguments describe;
        // positions outside a table are seen to by the kernel.
        unsafe { cuda.launch(OP, &form.kernel, blocks, &arguments, stream) }
    }
}

impl Problem {
    fn arguments(&self, shape: &Shape, width: usize, split: &Split) -> Arguments {
        let rotation = Rotation::new(&self.rotation, false, width);
        let position = Position::new(&self.positions);
        let ([q, k], [q_out, k_out]) = (self.inputs(), self.outputs());
        let [q_weight, k_weight] = self.norms.weights.each_ref().map(Option::as_ref);
        let [q_step, k_step] = shape.steps(split.parts);
        let [q_in, q_to] = [q, q_out].map(|t| strides_of(t, width, q_step));
        let [k_in, k_to] = [k, k_out].map(|t| strides_of(t, width, k_step));
        let tokens_per_batch = Divisor::new(shape.seq);
        let quads = Divisor::new(quads(&self.rotation).max(1));
        let [q_heads, k_heads] = head_counts(shape);
        Arguments {
            q: address(q),
            k: address(k),
            q_out: address(q_out),
            k_out: address(k_out),
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
            quads: quads.size,
            quads_multiplier: quads.multiplier,
            quads_shift: quads.shift,
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
            weight_offset: self.norms.weight_offset,
            epsilon: self.norms.epsilon,
            inverse_length: 1.0 / shape.head_dim as f32,
            q_batch: q_in.batch,
            q_token: q_in.token,
            q_head: q_in.head,
            q_step: q_in.step,
            q_step_token: q_in.step_token,
            q_step_batch: q_in.step_batch,
            q_out_batch: q_to.batch,
            q_out_token: q_to.token,
            q_out_head: q_to.head,
            q_out_step: q_to.step,
            q_out_step_token: q_to.step_token,
            q_out_step_batch: q_to.step_batch,
            k_batch: k_in.batch,
            k_token: k_in.token,
            k_head: k_in.head,
            k_step: k_in.step,
            k_step_token: k_in.step_token,
            k_step_batch: k_in.step_batch,
            k_out_batch: k_to.batch,
            k_out_token: k_to.token,
            k_out_head: k_to.head,
            k_out_step: k_to.step,
            k_out_step_token: k_to.step_token,
            k_out_step_batch: k_to.step_batch,
            frequencies: rotation.frequencies,
            ..Arguments::ZERO
        }
    }
}
