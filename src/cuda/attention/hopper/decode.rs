//! The kernels for Hopper of few queries (`kernels/cuda/attention/decode`): f16 and bf16, keys and values being codes of
//! 8-bit floats, too; the heads of a key head packed.
//!
//! One launch: its blocks have equal shares of all keys, and the last one of a sequence and key head to be done joins what the others
//! left in the workspace.

use std::cmp::Reverse;

use super::super::OP;
use super::launch::{whole_rows_of_keys, window};
use super::{Kernels, refusal};
use crate::alloc::push;
use crate::backend::Stream;
use crate::cuda::device::{Kernel, Resources};
use crate::cuda::images::attention_decoding::Arguments;
use crate::cuda::tuning::rules::attention::{
    BYTES_OF_EVEN_SHARE, BYTES_OF_WHOLE_SHARE, FEW_PAIRS_IN_PAGES, LEAST_BYTES_OF_SHARE,
    MANY_PAIRS, SHARE_OF_SHORT_ROWS,
};
use crate::cuda::{Cuda, claims};
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::attention::{HeadScales, Keys, Problem, Queries, Rows};

/// Query rows of a block and key head: `kRows` of the kernels.
const ROWS: usize = 16;
/// Rows of the boxes in which keys are copied that do not begin where a page or a sequence does.
const LEAST_BOX: usize = 16;

/// A kernel, and what it is made for.
pub(super) struct Form {
    kernel: Kernel<Arguments>,
    dtype: u32,
    /// Whether keys and values are codes of 8-bit floats.
    codes: bool,
    head_dim: usize,
    /// Heads of keys that are read together.
    heads: usize,
    /// Keys of a step.
    tile: usize,
    /// Whether it has several small blocks on a multiprocessor, for batches of many pairs.
    for_many: bool,
    /// Blocks of a launch, at most: as many as the device runs at once.
    blocks: usize,
}

pub(super) fn forms(resources: &Resources) -> Result<Vec<Form>> {
    let mut forms = Vec::new();
    for kernel in resources.kernels::<Arguments>()? {
        let choices = *kernel.choices;
        let resident = resources.resident_blocks(&kernel)?;
        push(
            OP,
            &mut forms,
            Form {
                dtype: choices.dtype,
                codes: choices.codes != 0,
                head_dim: choices.head_dim as usize,
                heads: choices.heads as usize,
                tile: choices.tile as usize,
                for_many: choices.blocks > 1,
                blocks: resident.max(1),
                kernel,
            },
        )?;
    }
    // Those of most heads are looked at first, and those for many pairs.
    forms.sort_by_key(|form| Reverse((form.heads, form.for_many)));
    Ok(forms)
}

impl Form {
    fn serves(&self, p: &Problem) -> bool {
        let beside = |rows: &Rows| rows.head < rows.token;
        let together = self.heads == 1
            || p.num_kv_heads.is_multiple_of(self.heads) && beside(&p.k) && beside(&p.v);
        self.dtype == p.q.dtype as u32
            && self.codes == holds_codes(p)
            && !self.reads_short_pieces(p)
            && [p.head_dim, p.head_dim_v] == [self.head_dim; 2]
            && together
    }

    /// Whether heads that could be read together are better read apart: pairs of a sequence and a key head are then in fewer parts, but
    /// memory reads shorter rows. Of codes such rows are served by other kernels.
    fn is_better_apart(&self, p: &Problem) -> bool {
        let pairs = p.batch.saturating_mul(p.num_kv_heads / self.heads);
        let tiles = pairs.saturating_mul(tiles_of_pair(p, self.tile));
        let share = tiles.saturating_mul(self.tile_bytes()) / self.blocks;
        self.heads > 1 && !self.codes && share <= SHARE_OF_SHORT_ROWS
    }

    /// Whether there are pairs of a sequence and a key head for small blocks.
    fn has_enough(&self, p: &Problem) -> bool {
        let pairs = p.batch.saturating_mul(p.num_kv_heads / self.heads);
        !self.for_many || pairs >= MANY_PAIRS
    }

    /// Whether it would read less than 256 bytes of codes at a time, one head of those that lie side by side. Portable kernels, whose
    /// blocks read all heads of a few keys at the same time, then take two thirds of the time.
    fn reads_short_pieces(&self, p: &Problem) -> bool {
        let apart = |rows: &Rows| rows.token > self.head_dim;
        self.codes && self.heads * self.head_dim < 256 && (apart(&p.k) || apart(&p.v))
    }

    /// Of K and V.
    fn tile_bytes(&self) -> usize {
        let element = if self.codes { 1 } else { size_of::<u16>() };
        2 * self.heads * self.tile * self.head_dim * element
    }

    /// Bytes for the parts of pairs: a counter of each block, and two parts. `rows` are a head's.
    fn workspace(&self, blocks: usize, rows: usize) -> usize {
        let of_row = (self.head_dim + SUMS) * size_of::<f32>();
        blocks * (claims::COUNTER + 2 * self.heads * rows * of_row)
    }
}

/// Floats of a partial row beside its values.
const SUMS: usize = 2;

/// How a problem is run.
pub(in crate::cuda::attention) struct Plan<'a> {
    form: &'a Form,
    /// Of a key head.
    rows: usize,
    /// At most, where lengths are on the device.
    tiles: usize,
    least_tiles: usize,
    blocks: usize,
    /// Whether a pair may be cut.
    cuts: bool,
}

impl Kernels {
    /// How a problem of few queries is run, or `None` where others are to run it. Data pointers are not looked at.
    pub fn decode(&self, p: &Problem) -> Option<Plan<'_>> {
        let rows = p.max_seqlen_q.checked_mul(p.num_heads / p.num_kv_heads)?;
        let of_keys = match holds_codes(p) {
            true => DType::F8E4M3,
            false => p.q.dtype,
        };
        if rows > ROWS || refusal(p, of_keys).is_some() {
            return None;
        }
        let mut serving = self.decode.iter().filter(|form| form.serves(p));
        let form = serving.find(|form| !form.is_better_apart(p) && form.has_enough(p))?;
        let of_pair = tiles_of_pair(p, form.tile);
        let pairs = p.batch.checked_mul(p.num_kv_heads / form.heads)?;
        let tiles = pairs.checked_mul(of_pair)?;
        if tiles > i32::MAX as usize / 4 {
            return None;
        }
        let few_in_pages = matches!(p.keys, Keys::Paged { .. }) && pairs <= FEW_PAIRS_IN_PAGES;
        let whole = match few_in_pages {
            true => LEAST_BYTES_OF_SHARE,
            false => BYTES_OF_WHOLE_SHARE,
        };
        let least_tiles = match of_pair.saturating_mul(form.tile_bytes()) {
            bytes if bytes <= whole => of_pair,
            _ => (LEAST_BYTES_OF_SHARE / form.tile_bytes()).max(1),
        };
        let blocks = tiles.div_ceil(least_tiles).clamp(1, form.blocks);
        Some(Plan {
            form,
            rows,
            tiles,
            least_tiles,
            blocks,
            cuts: of_pair > 1 && blocks > 1,
        })
    }

    /// The most workspace that [`Kernels::decode`] asks for, for any problem with these tensors.
    pub fn most_of_decoding(&self, p: &Problem) -> usize {
        let forms = self.decode.iter().filter(|form| form.serves(p));
        let sizes = forms.map(|form| form.workspace(form.blocks, ROWS));
        sizes.max().unwrap_or(0)
    }
}

fn holds_codes(p: &Problem) -> bool {
    p.k.dtype == DType::F8E4M3
}

/// Tiles of the keys that any query of a sequence sees, at most.
fn tiles_of_pair(p: &Problem, tile: usize) -> usize {
    let (keys, queries) = (p.max_seqlen_k, p.max_seqlen_q);
    let seen = p.window_left.saturating_sub(1).saturating_add(queries);
    let hidden = keys.saturating_sub(seen);
    let tiles = match p.ragged {
        false => keys.div_ceil(tile) - hidden / tile,
        // They may begin anywhere in a tile.
        true => keys
            .div_ceil(tile)
            .min(seen.div_ceil(tile).saturating_add(1)),
    };
    tiles.max(1)
}

impl Plan<'_> {
    /// In bytes.
    pub fn workspace_size(&self) -> usize {
        match self.cuts {
            true => self.form.workspace(self.blocks, self.rows),
            false => 0,
        }
    }

    /// Whether the data lies at addresses that the copy engine takes.
    pub fn reaches(&self, p: &Problem) -> bool {
        super::are_aligned(p)
    }
}

/// Queues a problem that [`Plan::reaches`]. `workspace` has the planned size.
pub(in crate::cuda::attention) fn forward(
    cuda: &Cuda,
    plan: &Plan<'_>,
    p: &Problem,
    workspace: *mut u8,
    stream: Stream,
) -> Result<()> {
    let driver = cuda.resources.primary.driver;
    // Tensor maps are made in a context, too.
    let _entered = cuda.resources.primary.enter(OP)?;
    let mut arguments = arguments(plan, p);
    let in_box = [arguments.kv_box_rows as u32, plan.form.heads as u32];
    let fetch = cuda.resources.tuning.hopper.decoding_fetch;
    arguments.k = whole_rows_of_keys(driver, fetch, p, &p.k, p.head_dim, in_box)?;
    arguments.v = whole_rows_of_keys(driver, fetch, p, &p.v, p.head_dim_v, in_box)?;
    if plan.cuts {
        let parts = 2 * plan.blocks * plan.form.heads * plan.rows;
        arguments.counters = workspace.addr() as u64;
        arguments.partial_sums = arguments.counters + (plan.blocks * claims::COUNTER) as u64;
        arguments.partial = arguments.partial_sums + (parts * SUMS * size_of::<f32>()) as u64;
        arguments.launch_tag = claims::tag();
    }
    tracing::trace!(
        "{OP}: Hopper's kernels for few queries: {} tiles of {} keys of {} heads on {} blocks, {} rows of a head",
        plan.tiles,
        plan.form.tile,
        plan.form.heads,
        plan.blocks,
        plan.rows,
    );
    // SAFETY: the problem was checked: its tensors have the rows that the argument describes, as far as lengths and pages in device
    // memory are what the caller promises; the workspace has room for two parts of every block.
    unsafe {
        cuda.launch(
            OP,
            &plan.form.kernel,
            plan.blocks as u32,
            &arguments,
            stream,
        )
    }
}

/// Everything but tensor maps and the workspace.
fn arguments(plan: &Plan<'_>, p: &Problem) -> Arguments {
    let tile = plan.form.tile;
    let mut arguments = Arguments {
        q: p.q.ptr.addr() as u64,
        q_batch_stride: p.q.outer as i64,
        q_sequence_stride: p.q.token as i64,
        q_head_stride: p.q.head as i64,
        o: p.out.ptr.addr() as u64,
        o_batch_stride: p.out.outer as i64,
        o_sequence_stride: p.out.token as i64,
        o_head_stride: p.out.head as i64,
        batch: p.batch as i32,
        heads_kv: p.num_kv_heads as i32,
        group: (p.num_heads / p.num_kv_heads) as i32,
        rows: plan.rows as i32,
        seqlen_q: p.max_seqlen_q as i32,
        seqlen_k: p.max_seqlen_k as i32,
        // What lies behind a sequence of unknown length would be copied in vain.
        kv_box_rows: if p.ragged { LEAST_BOX } else { tile } as i32,
        window_left: window(p.window_left),
        window_right: window(p.window_right),
        least_tiles: plan.least_tiles as i32,
        more_tiles: (BYTES_OF_EVEN_SHARE / plan.form.tile_bytes()) as i32,
        ..Arguments::ZERO
    };
    let factor = match p.softcap > 0.0 {
        true => {
            arguments.softcap_scale = p.scale / p.softcap;
            p.softcap
        }
        false => p.scale,
    };
    let scale = |scales: Option<HeadScales>| match scales {
        Some(scales) => (scales.ptr.addr() as u64, scales.stride as i32),
        None => (0, 0),
    };
    (arguments.k_scale, arguments.k_scale_head) = scale(p.k_scale);
    (arguments.v_scale, arguments.v_scale_head) = scale(p.v_scale);
    arguments.scale_log2 = factor * std::f32::consts::LOG2_E;
    if let Some(lse) = &p.lse {
        arguments.lse = lse.ptr.addr() as u64;
        arguments.lse_batch_stride = lse.outer as i64;
        arguments.lse_head_stride = lse.head as i64;
        arguments.lse_sequence_stride = lse.token as i64;
    }
    if let Some(sinks) = p.sinks {
        arguments.sinks = sinks.addr() as u64;
    }
    if let Queries::Packed { cu_seqlens, .. } = p.queries {
        arguments.cu_seqlens_q = cu_seqlens.addr() as u64;
    }
    match p.keys {
        Keys::Batched { seq_lens, .. } => arguments.seqlens_k = seq_lens.addr() as u64,
        Keys::Packed { cu_seqlens, .. } => arguments.cu_seqlens_k = cu_seqlens.addr() as u64,
        Keys::Paged {
            block_table,
            table_stride,
            page_size,
            seq_lens,
            ..
        } => {
            arguments.seqlens_k = seq_lens.addr() as u64;
            arguments.block_table = block_table.addr() as u64;
            arguments.block_table_stride = table_stride as i32;
            arguments.page_log2 = page_size.ilog2() as i32;
            arguments.kv_box_rows = page_size.min(tile) as i32;
        }
    }
    arguments
}
