//! RoPE on the GPU.

use super::device::Resources;
use super::images::rope::Arguments;
use super::rotation::{self, Position, Rotation, strides};
use super::rows::Divisor;
use super::table::Table;
use super::{Cuda, Run, VECTOR, check_blocks, codes};
use crate::backend::Stream;
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::problem::rope::Problem;
use crate::tensor::RawTensor;

const OP: &str = "rope";

/// By dtype, style and elements per access.
pub(super) type Kernels = Table<Arguments, 3>;

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    Kernels::new(OP, resources, |c| [c.dtype, c.style, c.width])
}

impl Run for Problem {
    fn check(&self) -> Result<()> {
        supported(self)
    }

    fn run(&self, cuda: &Cuda, stream: Stream) -> Result<()> {
        forward(cuda, self, stream)
    }
}

/// Whether there is a kernel for the problem.
fn supported(p: &Problem) -> Result<()> {
    rotation::check(OP, &p.rotation)?;
    let Some(shape) = Shape::of(p) else {
        return Ok(());
    };
    // Items of a token are counted in 32 bits.
    let items = shape.num_heads.saturating_mul(shape.head_dim);
    if items > i32::MAX as usize {
        let problem = text!(
            "has {items} components per token, the CUDA backend takes {}",
            i32::MAX
        );
        return Err(Error::unsupported(OP, "q", problem));
    }
    // The most there may be: a pair of components for each thread.
    let blocks_per_token = blocks_per_token(items / 2).max(1);
    let blocks = (shape.batch * shape.seq).saturating_mul(blocks_per_token);
    check_blocks(OP, "q", blocks).map(drop)
}

/// What queries and keys have in common.
struct Shape {
    dtype: DType,
    batch: usize,
    seq: usize,
    /// Of queries and keys together.
    num_heads: usize,
    head_dim: usize,
}

impl Shape {
    fn of(p: &Problem) -> Option<Shape> {
        let mut tensors = p.tensors.iter().flatten().map(|(input, _)| input);
        let first = tensors.next()?;
        let rank = first.layout.rank();
        let heads = |t: &RawTensor| t.layout.dim(rank - 2);
        Some(Shape {
            dtype: first.dtype,
            batch: if rank == 4 { first.layout.dim(0) } else { 1 },
            seq: first.layout.dim(rank - 3),
            num_heads: heads(first) + tensors.map(heads).sum::<usize>(),
            head_dim: first.layout.dim(rank - 1),
        })
    }
}

fn forward(cuda: &Cuda, p: &Problem, stream: Stream) -> Result<()> {
    let Some(shape) = Shape::of(p) else {
        return Ok(());
    };
    let num_tokens = shape.batch * shape.seq;
    if num_tokens * shape.num_heads * shape.head_dim == 0 {
        return Ok(());
    }
    let width = width(p, &shape);
    let style = codes::style(p.rotation.style).code();
    let kernel = cuda.rope.get([shape.dtype as u32, style, width as u32])?;
    let rotation = Rotation::new(&p.rotation, p.inverse, width);
    let items = shape.num_heads * rotation.per_head as usize;
    let blocks_per_token = blocks_per_token(items);
    let arguments = arguments(p, &shape, width, &rotation, blocks_per_token);
    let blocks = check_blocks(OP, "q", num_tokens * blocks_per_token)?;
    // SAFETY: the problem was checked: its tensors have the heads that the arguments describe; positions outside a table are seen to
    // by the kernel.
    unsafe { cuda.launch(OP, kernel, blocks, &arguments, stream) }
}

/// Blocks that share the heads of a token: as many as have work, although each computes the token's angles. Nothing waits twice that way.
fn blocks_per_token(items: usize) -> usize {
    items.div_ceil(contract::rotation::THREADS as usize)
}

/// Elements per access: whole vectors where rows, and the parts of heads that are treated alike, consist of them.
fn width(p: &Problem, shape: &Shape) -> usize {
    let vector = VECTOR / shape.dtype.size();
    let parts = rotation::fits(&p.rotation, shape.head_dim, vector);
    let tensors = p.tensors.iter().flatten().all(|(input, output)| {
        [input, output]
            .into_iter()
            .all(|t| rotation::is_aligned(t, vector))
    });
    if parts && tensors { vector } else { 1 }
}

fn arguments(
    p: &Problem,
    shape: &Shape,
    width: usize,
    rotation: &Rotation,
    blocks_per_token: usize,
) -> Arguments {
    let address = |t: &RawTensor| t.ptr.addr() as u64;
    let mut in_place = true;
    let mut side = |pair: &Option<(RawTensor, RawTensor)>| match pair {
        None => (0, [0; 2], [[0; 3]; 2]),
        Some((input, output)) => {
            in_place &= input.same_as(output);
            (
                input.layout.dim(input.layout.rank() - 2) as u32,
                [address(input), address(output)],
                [strides(input, width), strides(output, width)],
            )
        }
    };
    let [q, k] = &p.tensors;
    let (q_heads, [q, q_out], [q_in, q_to]) = side(q);
    let (k_heads, [k, k_out], [k_in, k_to]) = side(k);
    let position = Position::new(&p.positions);
    let passed = match in_place {
        true => 0,
        false => (shape.head_dim - p.rotation.rotary_dim) / width,
    };
    let [tokens_per_batch, blocks_per_token, per_head] =
        [shape.seq, blocks_per_token, rotation.per_head as usize].map(Divisor::new);
    Arguments {
        q,
        k,
        q_out,
        k_out,
        positions: position.address,
        positions_i64: position.address,
        factors: rotation.factors,
        cos_table: rotation.cos_table,
        sin_table: rotation.sin_table,
        tokens_per_batch: tokens_per_batch.size,
        tokens_per_batch_multiplier: tokens_per_batch.multiplier,
        tokens_per_batch_shift: tokens_per_batch.shift,
        blocks_per_token: blocks_per_token.size,
        blocks_per_token_multiplier: blocks_per_token.multiplier,
        blocks_per_token_shift: blocks_per_token.shift,
        q_heads,
        q_batch: q_in[0],
        q_token: q_in[1],
        q_head: q_in[2],
        q_out_batch: q_to[0],
        q_out_token: q_to[1],
        q_out_head: q_to[2],
        k_heads,
        k_batch: k_in[0],
        k_token: k_in[1],
        k_head: k_in[2],
        k_out_batch: k_to[0],
        k_out_token: k_to[1],
        k_out_head: k_to[2],
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
        per_head: per_head.size,
        per_head_multiplier: per_head.multiplier,
        per_head_shift: per_head.shift,
        per_half: rotation.per_half,
        rotated: rotation.rotated,
        passed: passed as u32,
        frequencies: rotation.frequencies,
        ..Arguments::ZERO
    }
}
