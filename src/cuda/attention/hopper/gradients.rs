//! Gradients by the kernels for Hopper (`kernels/cuda/attention/backward`): f16 and bf16, head dimensions up to 256.
//!
//! Two launches: statistics of every query; the gradients, where blocks of keys add to sums of `dq`, the first of a step storing its part
//! and the last writing `dq`. For head dimensions above 128 there are three: zeros for the sums come with the statistics, and `dq` from
//! its sums. Blocks add as they come, so `dq` is not of the same bits in each call, unless it is asked for: then they wait for each
//! other. Or `dk` and `dv` are one kernel and `dq` is another, which computes the scores again: with a soft cap or ALiBi, and for head
//! dimensions above 128 where queries see few keys.

use contract::attention::{Mask, Part};

use super::launch::{rows_of_keys, window};
use super::{
    UNIT, has_fitting_sizes, has_fitting_strides, hides, mask, sizes_of_keys, sizes_of_queries,
};
use crate::alloc::push;
use crate::backend::Stream;
use crate::cuda::device::{Kernel, Resources};
use crate::cuda::driver::Driver;
use crate::cuda::images::attention_gradients::Arguments;
use crate::cuda::tensor_map::{ALIGNMENT, COLUMNS, TensorMap};
use crate::cuda::{Cuda, check_blocks};
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::problem::attention::{Backward, Keys, Problem, Queries, Rows};
use crate::tensor::Scratch;

const OP: &str = "attention_backward";
/// Queries of a block: `kBlockM` of the kernels.
const BLOCK_M: usize = 64;
/// Queries of the longest step, two blocks: every sequence has whole ones.
const STEP: usize = 2 * BLOCK_M;
/// By the head dimension of kernels by pairs, keys that a query sees from which on sums in memory are worth what it costs to begin and
/// convert them, without a mask and with one. On an H100 (`benches/results/attention_backward_pairs_or_two_h100_2026-11-25.json`) two kernels take
/// less time where a query sees 256 keys. Where it sees 512, pairs take 3 to 5 % less at 192; at 256 3 % more without a mask, 4 % less with a
/// causal one.
const MIN_KEYS_OF_PAIRS: [(usize, [usize; 2]); 2] = [(192, [400, 400]), (256, [600, 400])];
/// Blocks of keys of a sequence that can be counted in any order (`kCame` of the kernels).
const MAX_COUNTED: usize = 1 << 14;
/// Bytes of the statistics of a block of queries: an LSE and a delta of each.
const STATISTICS: usize = 2 * BLOCK_M * size_of::<f32>();
/// Bytes of the terms of a block of queries: eight 16-bit numbers of each.
const TERMS: usize = 8 * BLOCK_M * size_of::<u16>();

/// A kernel, and what it is made for.
struct Form {
    kernel: Kernel<Arguments>,
    part: Part,
    dtype: u32,
    /// The greatest head dimensions, of queries and keys and of values.
    dims: [usize; 2],
    /// Keys of a block, and blocks of threads that take these as a cluster.
    block_keys: usize,
    blocks: usize,
    mask: Mask,
    /// Whether clusters add to sums in order. Blocks do where they are given one.
    in_order: bool,
}

/// The kernels, loaded; none on other devices.
pub(in crate::cuda::attention) struct Kernels {
    forms: Vec<Form>,
}

/// How a problem is run.
pub(in crate::cuda::attention) struct Plan<'a> {
    /// What comes before; all gradients, or `dk` and `dv`; `dq` from sums, where the second does not write it, or by itself.
    forms: [Option<&'a Form>; 3],
    /// The second of these.
    keys: &'a Form,
    /// Whether `dq` is summed in memory, whether blocks of keys tell each other what they have added, and whether they do it in an
    /// order that is the same every time.
    sums: bool,
    counted: bool,
    ordered: bool,
    /// What computes `dsinks`.
    sinks: Option<&'a Form>,
    /// Blocks of queries of the longest sequence, and of all.
    row_blocks: usize,
    blocks_per_head: usize,
    /// Blocks of keys of the longest sequence; of packed sequences, the numbers that all of them have
    /// (`first_number` in the kernels' `work.cuh`).
    key_blocks: usize,
    /// Blocks of each launch.
    blocks: [u32; 3],
}

impl Kernels {
    pub fn new(resources: &Resources) -> Result<Kernels> {
        let mut forms = Vec::new();
        for kernel in resources.kernels::<Arguments>()? {
            let choices = *kernel.choices;
            let (part, mask) = (Part::from_code(choices.part), Mask::from_code(choices.mask));
            let (Some(part), Some(mask)) = (part, mask) else {
                let message = text!("{:?} is not known", kernel.info);
                return Err(Error::Internal { op: OP, message });
            };
            let form = Form {
                part,
                dtype: choices.dtype,
                dims: [choices.head_dim, choices.head_dim_v].map(|dim| dim as usize),
                block_keys: choices.block_keys as usize,
                blocks: choices.blocks as usize,
                mask,
                in_order: choices.in_order != 0,
                kernel,
            };
            push(OP, &mut forms, form)?;
        }
        // Those that waste the least come first.
        forms.sort_by_key(|form| (form.dims, form.mask.code()));
        Ok(Kernels { forms })
    }

    /// How the problem is run, if it is here. Data pointers are not looked at.
    pub fn plan(&self, b: &Backward) -> Option<Plan<'_>> {
        let p = &b.forward;
        if !is_served(b) {
            return None;
        }
        let fitting = || {
            self.forms.iter().filter(|form| {
                let [dim, dim_v] = form.dims;
                form.dtype == p.q.dtype as u32 && p.head_dim <= dim && p.head_dim_v <= dim_v
            })
        };
        let mask = mask(p);
        let scores = p.softcap > 0.0 || p.alibi_slopes.is_some();
        let keys = b.dk.is_some() || b.dv.is_some();
        let sums = b.dq.is_some() && keys && !scores;
        let seen = keys_of_query(p);
        // The smallest head dimension with all kernels that this way needs. For 96 no kernel computes
        // dQ apart from dK and dV.
        let parts_of = |prepare: &Form| {
            let part = |part, wanted| {
                fitting().find(|form| {
                    form.part == part
                        && form.dims == prepare.dims
                        && hides(form.mask, wanted)
                        && (form.blocks == 1 || form.in_order == b.deterministic)
                })
            };
            let is_good =
                |form: &&Form| sums && (form.blocks == 1 || pairs_pay(form.dims[0], mask, seen));
            match part(Part::Gradients, mask).filter(is_good) {
                Some(together) if together.blocks == 1 => Some((together, None)),
                Some(together) => Some((together, Some(part(Part::Finish, Mask::None)?))),
                None => Some((part(Part::Keys, mask)?, Some(part(Part::Queries, mask)?))),
            }
        };
        let mut prepares = fitting().filter(|form| form.part == Part::Prepare);
        let (prepare, (of_keys, of_queries)) =
            prepares.find_map(|form| Some((form, parts_of(form)?)))?;
        let sums = of_keys.part == Part::Gradients;
        let row_blocks = p.max_seqlen_q.div_ceil(STEP) * (STEP / BLOCK_M);
        let blocks_per_head = match p.queries {
            Queries::Batched { .. } => row_blocks.checked_mul(p.batch)?,
            Queries::Packed { total, .. } => {
                p.batch.checked_mul(STEP)?.checked_add(total)? / STEP * (STEP / BLOCK_M)
            }
        };
        let of_rows = blocks_per_head.checked_mul(p.num_heads)?;
        // Those of `dq` alone take two blocks of queries each.
        let of_dq = match sums {
            true => of_rows,
            false => of_rows / 2,
        };
        let block_keys = of_keys.block_keys;
        let (key_blocks, sequences) = match p.keys {
            Keys::Packed { total, .. } => (
                p.batch.checked_mul(block_keys)?.checked_add(total)? / block_keys,
                1,
            ),
            _ => (p.max_seqlen_k.div_ceil(block_keys), p.batch),
        };
        let blocks_of_keys = key_blocks
            .checked_mul(of_keys.blocks)?
            .checked_mul(sequences)?
            .checked_mul(p.num_kv_heads)?;
        let count = |blocks| check_blocks(OP, "q", blocks).ok();
        let ordered = b.deterministic || p.max_seqlen_k.div_ceil(block_keys) > MAX_COUNTED;
        // Who prepares rows sets the numbers to their start, too. Without rows nothing is summed.
        let counted = sums && of_rows > 0 && (of_keys.blocks == 1 || b.deterministic);
        Some(Plan {
            forms: [Some(prepare), Some(of_keys), of_queries],
            keys: of_keys,
            row_blocks,
            blocks_per_head,
            key_blocks,
            blocks: [
                count(of_rows)?,
                if keys { count(blocks_of_keys)? } else { 0 },
                if b.dq.is_some() { count(of_dq)? } else { 0 },
            ],
            sums,
            counted,
            ordered: counted && ordered,
            sinks: match b.dsinks {
                Some(_) => Some(fitting().find(|form| form.part == Part::Sinks)?),
                None => None,
            },
        })
    }
}

/// Whether kernels by pairs of this head dimension take less than two kernels.
fn pairs_pay(dim: usize, mask: Mask, keys: usize) -> bool {
    let masked = usize::from(mask != Mask::None);
    MIN_KEYS_OF_PAIRS
        .iter()
        .any(|&(of, least)| of == dim && keys >= least[masked])
}

/// How many keys a query sees, of the longest sequence about.
fn keys_of_query(p: &Problem) -> usize {
    let seen = match mask(p) {
        Mask::Causal => p.max_seqlen_k / 2,
        _ => p.max_seqlen_k,
    };
    // What both ends of a window cut through is computed as a whole.
    seen.min(p.window_left.saturating_add(p.window_right) / 4 * 3)
}

/// The tensors that the copy engine reads; all others are read and written in units of 16 bytes.
fn copied(b: &Backward) -> [(&Rows, [usize; 3]); 4] {
    let p = &b.forward;
    let (queries, keys) = (sizes_of_queries(p), sizes_of_keys(p));
    [
        (&p.q, queries),
        (&b.dout, queries),
        (&p.k, keys),
        (&p.v, keys),
    ]
}

/// All tensors of heads.
fn accessed(b: &Backward) -> impl Iterator<Item = &Rows> {
    let p = &b.forward;
    let gradients = [&b.dq, &b.dk, &b.dv].into_iter().flatten();
    [&p.q, &p.k, &p.v, &p.out, &b.dout]
        .into_iter()
        .chain(gradients)
}

fn is_served(b: &Backward) -> bool {
    let p = &b.forward;
    let plain_keys = match p.keys {
        Keys::Batched { seq_lens, .. } => seq_lens.is_null(),
        Keys::Packed { .. } => true,
        Keys::Paged { .. } => false,
    };
    let in_units = |rows: &Rows| {
        [rows.outer, rows.token, rows.head]
            .iter()
            .all(|stride| stride.is_multiple_of(UNIT))
    };
    plain_keys
        && matches!(p.q.dtype, DType::F16 | DType::Bf16)
        && accessed(b).all(|rows| rows.dtype == p.q.dtype && in_units(rows))
        && copied(b)
            .iter()
            .all(|(rows, sizes)| has_fitting_strides(rows, *sizes))
        && p.head_dim.is_multiple_of(UNIT)
        && p.head_dim_v.is_multiple_of(UNIT)
        && (1e-20..=1e20).contains(&p.scale)
        && p.bias.is_none()
        && p.mask.is_none()
        && has_fitting_sizes(p)
}

impl Plan<'_> {
    /// Bytes of the statistics and, behind them, of terms, of sums of `dq`, and of what has been added to these.
    fn sizes(&self, b: &Backward) -> [usize; 4] {
        let blocks = self.blocks_per_head.saturating_mul(b.forward.num_heads);
        let columns = self.keys.dims[0].next_multiple_of(COLUMNS as usize);
        let sums = match self.sums {
            true => BLOCK_M * columns * size_of::<f32>(),
            false => 0,
        };
        let terms = if self.has_terms() { TERMS } else { 0 };
        let [statistics, terms, sums] =
            [STATISTICS, terms, sums].map(|size| blocks.saturating_mul(size));
        // Blocks of threads that share keys have numbers of their own.
        let numbers = blocks.saturating_mul(self.keys.blocks);
        let order = match self.counted {
            true => numbers.saturating_add(1).saturating_mul(size_of::<i32>()),
            false => 0,
        };
        [statistics, terms, sums, order]
    }

    /// Whether products add statistics to scores.
    fn has_terms(&self) -> bool {
        self.sums && self.keys.blocks == 1
    }

    /// In bytes.
    pub fn workspace_size(&self, b: &Backward) -> usize {
        self.sizes(b)
            .iter()
            .fold(0, |sum, size| sum.saturating_add(*size))
    }

    /// Whether the data lies at addresses that it takes.
    pub fn reaches(&self, b: &Backward) -> bool {
        accessed(b).all(|rows| rows.ptr.addr().is_multiple_of(ALIGNMENT))
    }

    /// Queues a problem that it reaches.
    pub fn launch(
        &self,
        cuda: &Cuda,
        b: &Backward,
        scratch: &Scratch,
        stream: Stream,
    ) -> Result<()> {
        let arguments = self.arguments(cuda, b, scratch)?;
        tracing::trace!("{OP}: Hopper's kernels: {:?} blocks", self.blocks);
        let sinks = self.sinks.map(|form| (form, b.forward.num_heads as u32));
        let forms = self.forms.into_iter().zip(self.blocks);
        let sinks = sinks.map(|(form, blocks)| (Some(form), blocks));
        for (form, blocks) in forms.chain(sinks) {
            if let Some(form) = form
                && blocks > 0
            {
                // SAFETY: the problem was checked: its tensors have the rows that the argument describes, as far as lengths in device
                // memory are what the caller promises; the workspace has the planned size.
                unsafe { cuda.launch(OP, &form.kernel, blocks, &arguments, stream) }?;
            }
        }
        Ok(())
    }

    fn arguments(&self, cuda: &Cuda, b: &Backward, scratch: &Scratch) -> Result<Arguments> {
        let p = &b.forward;
        let driver = cuda.resources.primary.driver;
        // Tensor maps are made in a context, too.
        let _entered = cuda.resources.primary.enter(OP)?;
        let box_rows = self.keys.block_keys / self.keys.blocks;
        let keys = |rows, dim| rows_of_keys(driver, p, rows, dim, box_rows as u32);
        let statistics = scratch.ptr.addr() as u64;
        let capped = p.softcap > 0.0;
        let scale_log2 = if capped { p.softcap } else { p.scale } * std::f32::consts::LOG2_E;
        let mut a = Arguments {
            q: rows_of_queries(driver, p, &p.q, p.head_dim)?,
            dout: rows_of_queries(driver, p, &b.dout, p.head_dim_v)?,
            k: keys(&p.k, p.head_dim)?,
            v: keys(&p.v, p.head_dim_v)?,
            statistics,
            blocks_per_head: self.blocks_per_head as i64,
            batch: p.batch as i32,
            accumulate: b.accumulate.into(),
            heads_q: p.num_heads as i32,
            heads_kv: p.num_kv_heads as i32,
            group: (p.num_heads / p.num_kv_heads) as i32,
            head_dim: p.head_dim as i32,
            head_dim_v: p.head_dim_v as i32,
            seqlen_q: p.max_seqlen_q as i32,
            seqlen_k: p.max_seqlen_k as i32,
            row_blocks: self.row_blocks as i32,
            key_blocks: self.key_blocks as i32,
            window_left: window(p.window_left),
            window_right: window(p.window_right),
            scale: p.scale,
            scale_log2,
            alibi_factor: std::f32::consts::LOG2_E / scale_log2,
            ..Arguments::ZERO
        };
        let place = |rows: &Rows| {
            (
                rows.ptr.addr() as u64,
                rows.outer as i64,
                rows.token as i64,
                rows.head as i64,
            )
        };
        macro_rules! rows {
            ($rows:expr => $pointer:ident, $batch:ident, $sequence:ident, $head:ident) => {
                if let Some(rows) = $rows {
                    (a.$pointer, a.$batch, a.$sequence, a.$head) = place(rows);
                }
            };
        }
        rows!(Some(&p.out) => out, out_batch_stride, out_sequence_stride, out_head_stride);
        rows!(Some(&b.dout) => dout_pointer, dout_batch_stride, dout_sequence_stride, dout_head_stride);
        rows!(&p.lse => lse, lse_batch_stride, lse_sequence_stride, lse_head_stride);
        rows!(&b.dlse => dlse, dlse_batch_stride, dlse_sequence_stride, dlse_head_stride);
        rows!(&b.dk => dk, dk_batch_stride, dk_sequence_stride, dk_head_stride);
        rows!(&b.dv => dv, dv_batch_stride, dv_sequence_stride, dv_head_stride);
        rows!(&b.dq => dq, dq_batch_stride, dq_sequence_stride, dq_head_stride);
        if let (Some(sinks), Some(dsinks)) = (p.sinks, b.dsinks) {
            (a.sinks, a.dsinks) = (sinks.addr() as u64, dsinks.addr() as u64);
        }
        if capped {
            a.softcap_scale = p.scale / p.softcap;
        }
        if let Some((slopes, stride)) = p.alibi_slopes {
            a.alibi_slopes = slopes.addr() as u64;
            a.alibi_batch_stride = stride as i64;
        }
        let [of_statistics, of_terms, of_sums, _] = self.sizes(b).map(|size| size as u64);
        let terms = statistics + of_statistics;
        if self.has_terms() {
            a.terms = terms;
        }
        if self.sums {
            a.sums = terms + of_terms;
        }
        if self.counted {
            a.order = a.sums + of_sums;
        }
        a.ordered = self.ordered.into();
        if let Queries::Packed { cu_seqlens, .. } = p.queries {
            a.cu_seqlens_q = cu_seqlens.addr() as u64;
        }
        if let Keys::Packed { cu_seqlens, .. } = p.keys {
            a.cu_seqlens_k = cu_seqlens.addr() as u64;
        }
        Ok(a)
    }
}

/// Of queries or `dout`: (dim, tokens, heads, sequences).
fn rows_of_queries(driver: &Driver, p: &Problem, rows: &Rows, dim: usize) -> Result<TensorMap> {
    let [outer, tokens, heads] = sizes_of_queries(p);
    let sizes = [dim, tokens, heads, outer];
    let strides = [rows.token, rows.head, rows.outer];
    let counts = [COLUMNS, BLOCK_M as u32, 1, 1];
    TensorMap::new(driver, OP, rows.ptr, rows.dtype, sizes, &strides, counts)
}
