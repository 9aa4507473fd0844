//! A step of decoding: new tokens are put into a cache's pages, and attend to them. One launch where Hopper's kernel for few
//! sequences (`kernels/cuda/attention/step`) serves it; otherwise what each of the two is by itself, one behind the other.
//! The same kernel is for attention alone of one query to few keys.

use super::{Cuda, OP, Plan};
use crate::backend::{Implementation, Stream};
use crate::cuda::device::{Kernel, Resources};
use crate::cuda::images::attention_step::Arguments;
use crate::cuda::rotation::Rotation;
use crate::cuda::tuning::rules::attention::{
    BYTES_OF_NEIGHBOURS, BYTES_OF_STEP, STEP_PAIRS, STEP_ROUNDS,
};
use crate::cuda::{Run, Shape, codes};
use crate::error::Result;
use crate::problem::attention::{Keys, Problem, Queries, Rows, Step};
use crate::problem::kv_cache::Append;
use crate::problem::{self, Plans};
use crate::tensor::{RawTensor, Scratch};
use contract::rotation::Style;

pub(super) type Kernels = Vec<Kernel<Arguments>>;

/// None on other devices than those of Hopper.
pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    match resources.launches_early {
        true => resources.kernels::<Arguments>(),
        // Drivers that give no clusters.
        false => Ok(Vec::new()),
    }
}

/// Blocks of a cluster, at most: what every device has.
const MOST_PARTS: usize = 8;
/// Of a warp's ring: with three, as many bytes are on their way as a multiprocessor can have.
const MOST_SLOTS: usize = 3;
/// Frequencies that fit the argument.
const MOST_PAIRS: usize = 64;
/// Elements of 16 bytes.
const VECTOR: usize = 8;

/// How a step is parted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Form {
    /// Blocks of a cluster.
    parts: usize,
    /// In which a block reads its keys.
    rounds: usize,
    /// Of a warp's ring.
    slots: usize,
}

impl Form {
    /// Of so many pairs of a sequence and a key head, and of keys; `of_block` of these are read at a time by a block.
    fn new(pairs: usize, keys: usize, of_block: usize) -> Option<Form> {
        let rounds = keys.div_ceil(of_block).max(1);
        let mut parts = rounds.next_power_of_two().min(MOST_PARTS);
        while parts > 1 && pairs.saturating_mul(parts) > STEP_PAIRS {
            parts /= 2;
        }
        let rounds = rounds.div_ceil(parts);
        (pairs.saturating_mul(parts) <= STEP_PAIRS && rounds <= STEP_ROUNDS).then_some(Form {
            parts,
            rounds,
            slots: rounds.min(MOST_SLOTS),
        })
    }

    /// Whether each block has a multiprocessor of its own. The first ones that are free would have two otherwise, and others none.
    fn is_alone_on_multiprocessors(&self, p: &Problem) -> bool {
        p.batch * p.num_kv_heads * self.parts <= STEP_PAIRS / 2
    }
}

/// The kernel that is to run, and how.
pub(super) type Chosen<'a> = (&'a Kernel<Arguments>, Form);

/// How a step is run. Plans lie on the stack: the problem of attention is in its plan.
pub(crate) struct StepPlan<'a> {
    append: Append,
    attention: Plan<'a>,
    one: Option<Chosen<'a>>,
}

impl Plans<Step> for Cuda {
    type Plan<'a> = StepPlan<'a>;

    fn plan(&self, step: Step) -> Result<StepPlan<'_>> {
        step.append.check()?;
        Ok(StepPlan {
            one: choose(&self.attention.step, &step),
            append: step.append,
            attention: self.plan(step.attention)?,
        })
    }
}

impl problem::Plan for StepPlan<'_> {
    fn implementation(&self) -> Implementation {
        match self.one {
            Some(_) => Implementation::CudaHopper,
            None => self.attention.implementation(),
        }
    }

    fn needed(&self) -> usize {
        match self.one {
            Some(_) => 0,
            None => self.attention.needed(),
        }
    }

    fn useful_for_any(&self) -> Result<usize> {
        self.attention.useful_for_any()
    }

    fn launch(&self, scratch: Scratch, stream: Stream) -> Result<()> {
        let (cuda, problem) = (self.attention.cuda, &self.attention.problem);
        match &self.one {
            Some((kernel, form)) => {
                launch(cuda, (problem, Some(&self.append)), (kernel, *form), stream)
            }
            None => {
                self.append.run(cuda, stream)?;
                self.attention.launch(scratch, stream)
            }
        }
    }
}

/// The kernel that serves a step, and how; `None` where others are to. Only pages are looked at for where they lie.
fn choose<'a>(kernels: &'a Kernels, step: &Step) -> Option<Chosen<'a>> {
    let (p, append) = (&step.attention, &step.append);
    // Queries turn as keys do, or nothing turns.
    let turns = append.q.is_some() == append.rotation.is_some()
        && (append.rotation.as_ref()).is_none_or(|r| r.rotary_dim <= 2 * MOST_PAIRS);
    let serves = [append.k.dtype, append.v.dtype] == [p.q.dtype; 2]
        && matches!(p.queries, Queries::Packed { .. })
        && turns
        && append.factors.is_none()
        && matches!(p.keys, Keys::Paged { .. })
        && [&append.k_pages, &append.v_pages].into_iter().all(in_lines);
    find(kernels, p).filter(|_| serves)
}

/// The kernel for attention alone; `None` where others are to run it. Data pointers are not looked at.
pub(super) fn alone<'a>(kernels: &'a Kernels, p: &Problem) -> Option<Chosen<'a>> {
    // Of packed ones the device knows which sequences have none.
    let one_each = matches!(p.queries, Queries::Batched { len: 1 });
    let keys = match p.keys {
        Keys::Batched { .. } | Keys::Paged { .. } => p.max_seqlen_k,
        Keys::Packed { .. } => 0,
    };
    let in_lines = |rows: &Rows| {
        [rows.outer, rows.token, rows.head]
            .iter()
            .all(|stride| stride.is_multiple_of(VECTOR))
    };
    let (kernel, form) = find(kernels, p)?;
    let in_pages = matches!(p.keys, Keys::Paged { .. });
    let most = match form.is_alone_on_multiprocessors(p) {
        true => BYTES_OF_STEP,
        false if in_pages => 2 * BYTES_OF_NEIGHBOURS,
        false => BYTES_OF_NEIGHBOURS,
    };
    let serves = one_each
        && form.rounds * kernel.choices.slot_bytes as usize <= most
        && (1..=u32::MAX as usize).contains(&keys)
        && [&p.k, &p.v].into_iter().all(in_lines);
    serves.then_some((kernel, form))
}

/// Whether keys and values lie where that kernel can copy them.
pub(super) fn reaches(p: &Problem) -> bool {
    let mut at = [&p.k, &p.v].into_iter().map(|rows| rows.ptr.addr());
    at.all(|at| at.is_multiple_of(crate::cuda::VECTOR))
}

/// The kernel for such attention.
fn find<'a>(kernels: &'a Kernels, p: &Problem) -> Option<Chosen<'a>> {
    let dtype = p.q.dtype;
    let alike = [p.k.dtype, p.v.dtype, p.out.dtype] == [dtype; 3];
    let plain = p.softcap == 0.0
        && p.window_left == usize::MAX
        && (p.window_right == 1 || p.window_right == usize::MAX)
        && p.bias.is_none()
        && p.mask.is_none()
        && p.alibi_slopes.is_none()
        && p.sinks.is_none();
    let serves = alike && plain && p.batch > 0 && p.head_dim == p.head_dim_v;
    let group = p.num_heads / p.num_kv_heads;
    let kernel = kernels.iter().find(|kernel| {
        let choices = kernel.choices;
        choices.dtype == dtype as u32
            && choices.head_dim as usize == p.head_dim
            && group <= choices.rows as usize
    });
    let kernel = kernel.filter(|_| serves)?;
    let warps = kernel.info.block[0] as usize / 32;
    let of_block = warps * kernel.choices.keys as usize;
    let pairs = p.batch.saturating_mul(p.num_kv_heads);
    // The grid has sequences along its second dimension.
    let form = Form::new(pairs, p.max_seqlen_k, of_block).filter(|_| p.batch <= 0xffff)?;
    Some((kernel, form))
}

/// Whether rows begin at multiples of 16 bytes.
fn in_lines(pages: &RawTensor) -> bool {
    let mut strides = pages.layout.strides()[..3].iter();
    crate::cuda::is_aligned(pages, VECTOR) && strides.all(|stride| stride.is_multiple_of(VECTOR))
}

/// Launches the kernel, with what is put into the cache before if it is a step.
pub(super) fn launch(
    cuda: &Cuda,
    (p, append): (&Problem, Option<&Append>),
    (kernel, form): Chosen<'_>,
    stream: Stream,
) -> Result<()> {
    let choices = kernel.choices;
    tracing::trace!(
        "{OP}: one query each of {} sequences, up to {} keys, {} blocks of each pair, {} slots",
        p.batch,
        p.max_seqlen_k,
        form.parts,
        form.slots,
    );
    let mut shared_bytes = choices.own_bytes + form.slots as u32 * choices.slot_bytes;
    if form.is_alone_on_multiprocessors(p) {
        // More than half of what there is.
        shared_bytes = shared_bytes.max(kernel.room / 2 + 1024);
    }
    let shape = Shape {
        grid: [(p.num_kv_heads * form.parts) as u32, p.batch as u32, 1],
        block: kernel.info.block,
        shared_bytes,
        cluster: form.parts as u32,
    };
    let arguments = match append {
        Some(append) => arguments_of_step(p, append, form),
        None => arguments_alone(p, form),
    };
    // SAFETY: the problems were checked: tensors have the rows that the argument describes. For attention alone the kernel waits for the
    // one before it, then reads. For a step it reads the cache's block table, lengths, positions and older keys before it waits: the cache
    // writes the first three for each batch, and copies pages, by copies that wait for all kernels before them, and so for those that
    // wrote what an earlier batch brought.
    unsafe { cuda.launch_shape(OP, kernel, shape, &arguments, stream) }
}

/// What both have in common.
fn arguments(p: &Problem, form: Form) -> Arguments {
    let sequence = |rows: &Rows| match p.queries {
        Queries::Batched { .. } => rows.outer as u64,
        Queries::Packed { .. } => rows.token as u64,
    };
    Arguments {
        q: p.q.ptr.addr() as u64,
        q_token: sequence(&p.q),
        q_head: p.q.head as u64,
        o: p.out.ptr.addr() as u64,
        o_token: sequence(&p.out),
        o_head: p.out.head as u64,
        lse: p.lse.map_or(0, |lse| lse.ptr.addr() as u64),
        lse_token: p.lse.as_ref().map_or(0, sequence),
        lse_head: p.lse.map_or(0, |lse| lse.head as u64),
        group: (p.num_heads / p.num_kv_heads) as u32,
        parts: form.parts as u32,
        slots: form.slots as u32,
        score_scale_log2: p.scale * std::f32::consts::LOG2_E,
        ..Arguments::ZERO
    }
}

/// Of queries to keys that are there.
fn arguments_alone(p: &Problem, form: Form) -> Arguments {
    let arguments = Arguments {
        k_pages: p.k.ptr.addr() as u64,
        k_page: p.k.outer as u64,
        k_slot: p.k.token as u64,
        k_page_head: p.k.head as u64,
        v_pages: p.v.ptr.addr() as u64,
        v_page: p.v.outer as u64,
        v_slot: p.v.token as u64,
        v_page_head: p.v.head as u64,
        // `alone` has seen that they have 32 bits.
        keys: p.max_seqlen_k as u32,
        append: 0,
        ..arguments(p, form)
    };
    match p.keys {
        Keys::Paged {
            block_table,
            table_stride,
            page_size,
            seq_lens,
            ..
        } => Arguments {
            seqlens: seq_lens.addr() as u64,
            block_table: block_table.addr() as u64,
            block_table_stride: table_stride as u64,
            page_log2: page_size.ilog2(),
            ..arguments
        },
        Keys::Batched { seq_lens, .. } => Arguments {
            seqlens: seq_lens.addr() as u64,
            // All that a sequence may have.
            page_log2: u32::BITS - 1,
            ..arguments
        },
        Keys::Packed { .. } => arguments,
    }
}

/// Of a step: lengths are the cache's, which has room for them.
fn arguments_of_step(p: &Problem, append: &Append, form: Form) -> Arguments {
    let address = |t: &RawTensor| t.ptr.addr() as u64;
    let stride = |t: &RawTensor, dim: usize| t.layout.stride(dim) as u64;
    let mut arguments = Arguments {
        k: address(&append.k),
        k_token: stride(&append.k, 0),
        k_head: stride(&append.k, 1),
        v: address(&append.v),
        v_token: stride(&append.v, 0),
        v_head: stride(&append.v, 1),
        k_pages: address(&append.k_pages),
        k_page: stride(&append.k_pages, 0),
        k_slot: stride(&append.k_pages, 1),
        k_page_head: stride(&append.k_pages, 2),
        v_pages: address(&append.v_pages),
        v_page: stride(&append.v_pages, 0),
        v_slot: stride(&append.v_pages, 1),
        v_page_head: stride(&append.v_pages, 2),
        seqlens: address(&append.seq_lens),
        positions: address(&append.positions),
        block_table: address(&append.block_table),
        block_table_stride: append.block_table.layout.dim(1) as u64,
        page_log2: append.k_pages.layout.dim(1).ilog2(),
        keys: u32::MAX,
        append: 1,
        ..arguments(p, form)
    };
    if let Some(rotation) = &append.rotation {
        let style = codes::style(rotation.style);
        let rotation = Rotation::new(rotation, false, 1);
        arguments.interleaved = u32::from(style == Style::Interleaved);
        arguments.pairs = rotation.pairs;
        arguments.angle_kind = rotation.kind;
        arguments.scale = rotation.scale;
        arguments.direction = rotation.direction;
        arguments.factors = rotation.factors;
        arguments.cos_table = rotation.cos_table;
        arguments.sin_table = rotation.sin_table;
        arguments.table_rows = rotation.table_rows;
        arguments.cos_stride = rotation.cos_stride;
        arguments.sin_stride = rotation.sin_stride;
        let known = &rotation.frequencies[..MOST_PAIRS];
        arguments.frequencies.copy_from_slice(known);
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Warps get turns as long as there are more keys than they have at a time, blocks as long as there are few pairs.
    #[test]
    fn steps_are_parted_by_pairs_and_keys() {
        let of = |pairs, keys| Form::new(pairs, keys, 128).map(|form| (form.parts, form.slots));
        for (pairs, keys, expected) in [
            (8, 0, Some((1, 1))),
            (8, 128, Some((1, 1))),
            (8, 129, Some((2, 1))),
            (8, 440, Some((4, 1))),
            (8, 1024, Some((8, 1))),
            (8, 1025, Some((8, 2))),
            (8, 4096, Some((8, 3))),
            (STEP_PAIRS / 4, 1024, Some((4, 2))),
            (STEP_PAIRS, 200, Some((1, 2))),
            (STEP_PAIRS + 1, 200, None),
            (8, 8 * 128 * STEP_ROUNDS, Some((8, 3))),
            (8, 8 * 128 * STEP_ROUNDS + 1, None),
            (usize::MAX, usize::MAX, None),
        ] {
            assert_eq!(of(pairs, keys), expected, "{pairs} pairs, {keys} keys");
        }
    }
}
