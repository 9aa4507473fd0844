//! The kernels in CubeCL, which run on every architecture.
//!
//! Three forms share their arguments: `forward` (of f32 `forward_f32`) has a block of queries of one head per cube, `decode` packs
//! the heads that share a key head and may split the keys, both on tensor cores; `simt` is packed and split like `decode` and takes
//! everything. What the parts of split keys give, `attention_combine` joins.

use contract::attention::Kind;

use super::arguments::{combining, first, with_scales};
use super::{Cuda, OP};
use crate::alloc::push;
use crate::backend::Stream;
use crate::cuda::check_blocks;
use crate::cuda::device::{Kernel, Resources};
use crate::cuda::images::{attention, attention_combine, attention_e4m3};
use crate::cuda::table::Table;
pub(super) use crate::cuda::tuning::rules::attention::LEAST_KEYS;
use crate::cuda::tuning::rules::attention::{FEW_QUERIES, MAX_SPLITS, ROUNDS};
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::problem::attention::{Problem, Queries, Rows};

/// Kernels of codes are told their scales beside what the others are.
enum Of {
    Floats(Kernel<attention::Arguments>),
    Codes(Kernel<attention_e4m3::Arguments>),
}

/// A kernel, and what it is made for.
pub(super) struct Form {
    kernel: Of,
    kind: Kind,
    /// Of queries, and of keys and values.
    dtypes: [u32; 2],
    /// The greatest head dimension.
    head_dim: usize,
    /// Whether scores may have more than a scale and the limits of causality and windows.
    scores: bool,
    /// Elements of an access, which dimensions, strides and addresses must be multiples of.
    pub width: usize,
    /// The same of keys and values.
    kv_width: usize,
    /// Query rows of a block.
    rows: usize,
    /// Blocks that the device runs at once.
    resident: usize,
}

/// The operation's portable kernels, loaded.
pub(super) struct Kernels {
    /// Those for small heads first.
    forms: Vec<Form>,
    /// By dtype of the output.
    combine: Table<attention_combine::Arguments, 1>,
}

impl Kernels {
    pub fn new(resources: &Resources) -> Result<Kernels> {
        let mut forms = Vec::new();
        // The two have choices of the same names.
        macro_rules! push_all {
            ($arguments:ty, $of:path, $kv_width:ident) => {
                for kernel in resources.kernels::<$arguments>()? {
                    let resident = resources.resident_blocks(&kernel)?.max(1);
                    let choices = *kernel.choices;
                    let form = Form {
                        kind: Kind::from_code(choices.kind).unwrap_or(Kind::Simt),
                        dtypes: [choices.dtype, choices.kv_dtype],
                        head_dim: choices.head_dim as usize,
                        scores: choices.scores != 0,
                        width: choices.width as usize,
                        kv_width: choices.$kv_width as usize,
                        rows: choices.rows as usize,
                        resident,
                        kernel: $of(kernel),
                    };
                    push(OP, &mut forms, form)?;
                }
            };
        }
        push_all!(attention::Arguments, Of::Floats, width);
        push_all!(attention_e4m3::Arguments, Of::Codes, kv_width);
        forms.sort_by_key(|form| form.head_dim);
        Ok(Kernels {
            forms,
            combine: Table::<attention_combine::Arguments, 1>::new(OP, resources, |c| [c.dtype])?,
        })
    }

    /// The best kernel for the problem's shapes.
    fn best(&self, p: &Problem) -> Option<&Form> {
        let find = |kind| {
            let mut forms = self.forms.iter().filter(|form| form.kind == kind);
            forms.find(|form| form.width > 1 && form.serves(p))
        };
        let simt = find(Kind::Simt);
        // Codes are decoded whatever the number of queries.
        let fast = find(match decodes(p) || p.k.dtype == DType::F8E4M3 {
            true => Kind::Decode,
            false => Kind::Forward,
        });
        // On a small part of the device whole keys are slower than split ones, though the tensor cores are about four times as fast.
        let idles = |form: &&Form| form.kind == Kind::Forward && 4 * form.blocks(p) < form.resident;
        match (fast, simt) {
            (Some(form), Some(simt)) if idles(&form) && simt.splits(p) > 1 => Some(simt),
            (fast, simt) => fast.or(simt),
        }
    }

    /// The most workspace of any problem with these tensors, as many query tokens in all, and no
    /// more sequences; in bytes.
    pub fn most_workspace(&self, p: &Problem) -> usize {
        let (&Queries::Packed { total: tokens, .. }, true) = (&p.queries, combines(p)) else {
            return 0;
        };
        let splitting = self.forms.iter().filter(|form| form.kind != Kind::Forward);
        let rows = splitting.filter(|form| form.serves(p)).map(|form| {
            let most = most_splits(p.max_seqlen_k);
            let heads = (p.num_heads, p.num_kv_heads);
            most_rows(form.rows, form.resident, heads, (p.batch, tokens), most)
        });
        rows.max()
            .unwrap_or(0)
            .saturating_mul(bytes_of_row(p.head_dim_v))
    }

    /// The kernel for any strides and addresses.
    fn any(&self, p: &Problem) -> Option<&Form> {
        let mut forms = self.forms.iter();
        forms.find(|form| form.width == 1 && form.serves(p))
    }
}

impl Form {
    /// Whether it computes this, going by shapes, strides and dtypes.
    fn serves(&self, p: &Problem) -> bool {
        let dims = [p.head_dim, p.head_dim_v];
        self.dtypes == [p.q.dtype as u32, p.k.dtype as u32]
            && dims.iter().all(|dim| *dim <= self.head_dim)
            && (self.scores || !self.needs_scores(p))
            && dims.iter().all(|dim| dim.is_multiple_of(self.kv_width))
            && (self.rows_of(p).iter()).all(|(rows, width)| has_strides_of(rows, *width))
            && has_strides_of(&p.out, self.width)
    }

    /// What is read in accesses of so many elements, of which a multiple of `width` is one.
    fn rows_of<'p>(&self, p: &'p Problem) -> [(&'p Rows, usize); 3] {
        [
            (&p.q, self.width),
            (&p.k, self.kv_width),
            (&p.v, self.kv_width),
        ]
    }

    fn needs_scores(&self, p: &Problem) -> bool {
        // Their hidden scores are scaled too, and are to stay far below all others.
        let plain_scale = (1e-20..=1e20).contains(&p.scale);
        let capped = self.kind == Kind::Forward && p.softcap > 0.0;
        !plain_scale || capped || p.bias.is_some() || p.mask.is_some() || p.alibi_slopes.is_some()
    }

    /// Whether the data lies at addresses that it takes.
    fn reaches(&self, p: &Problem) -> bool {
        let stores_lines = p.out.dtype == p.q.dtype;
        self.rows_of(p)
            .iter()
            .all(|(rows, width)| is_at(rows, *width))
            && (!stores_lines || is_at(&p.out, self.width))
    }

    /// Blocks of query rows per sequence and head, or key head where heads are packed.
    pub fn row_blocks(&self, p: &Problem) -> usize {
        let packed = match self.kind {
            Kind::Forward => 1,
            Kind::Decode | Kind::Simt => p.num_heads / p.num_kv_heads,
        };
        p.max_seqlen_q.saturating_mul(packed).div_ceil(self.rows)
    }

    /// Blocks without splitting.
    fn blocks(&self, p: &Problem) -> usize {
        let heads = match self.kind {
            Kind::Forward => p.num_heads,
            Kind::Decode | Kind::Simt => p.num_kv_heads,
        };
        [heads, p.batch]
            .into_iter()
            .fold(self.row_blocks(p), usize::saturating_mul)
    }

    /// In how many parts to cut the keys: as few as keep the device about as busy as any number would, each with [`LEAST_KEYS`].
    fn splits(&self, p: &Problem) -> usize {
        let blocks = self.blocks(p);
        if self.kind == Kind::Forward || !combines(p) || blocks == 0 {
            return 1;
        }
        let visible = p.window_left.saturating_add(p.max_seqlen_q);
        let keys = visible.min(p.max_seqlen_k);
        splits(blocks, self.resident, most_splits(keys))
    }
}

/// The most partial rows of up to `sequences` sequences that have `tokens` queries in all, with
/// keys in up to `most` parts, by a kernel with blocks of `rows` of which a device runs `resident`
/// at once.
fn most_rows(
    rows: usize,
    resident: usize,
    (num_heads, num_kv_heads): (usize, usize),
    (sequences, tokens): (usize, usize),
    most: usize,
) -> usize {
    let group = num_heads / num_kv_heads;
    // Blocks of a key head: those of the longest sequence times the number of sequences. They have
    // room for every query, and where there are more than this the keys are not split.
    let least = tokens.saturating_mul(group).div_ceil(rows).max(1);
    let greatest = ROUNDS * resident / (2 * num_kv_heads);
    let partial = |blocks: usize| {
        // A sequence has at least one block, and no more queries than there are.
        let room = blocks * rows / group;
        let queries = room.min(tokens.saturating_mul(blocks.min(sequences)));
        match splits(blocks * num_kv_heads, resident, most) {
            1 => 0,
            splits => splits * queries * num_heads,
        }
    };
    (least..=greatest).map(partial).max().unwrap_or(0)
}

/// The most parts of so many keys.
fn most_splits(keys: usize) -> usize {
    keys.div_ceil(LEAST_KEYS).min(MAX_SPLITS)
}

/// In how many parts, up to `most`, to cut the keys of so many blocks.
fn splits(blocks: usize, resident: usize, most: usize) -> usize {
    // Beyond a few rounds of blocks the last one matters little.
    let most = most.min(ROUNDS * resident / blocks).max(1);
    fewest_splits(blocks, resident, most)
}

/// Bytes of a part's row: its result, and the logarithm of its sum.
fn bytes_of_row(head_dim_v: usize) -> usize {
    (head_dim_v + 1) * size_of::<f32>()
}

/// The least number of parts, up to `most`, that keeps the device within a twentieth as busy as any of them would; all of `most` take
/// [`ROUNDS`] at most, unless `most` is 1.
fn fewest_splits(blocks: usize, resident: usize, most: usize) -> usize {
    if most == 1 {
        return 1;
    }
    // Within a round the more parts the busier: the last of each is the best of it. In thousandths of the time of all rounds.
    let last = |round: usize| (round * resident / blocks).min(most);
    let busy = |splits: usize, round: usize| blocks * splits * 1000 / (round * resident);
    let rounds = || (1..=ROUNDS).filter(|round| last(*round) > last(*round - 1));
    let best = rounds().map(|round| busy(last(round), round)).max();
    let enough = (best.unwrap_or(0) * 19).div_ceil(20);
    rounds()
        .map(|round| {
            let splits = (enough * round * resident).div_ceil(1000 * blocks);
            (splits.max(last(round - 1) + 1), round)
        })
        .find(|(splits, round)| *splits <= last(*round))
        .map_or(1, |(splits, _)| splits)
}

/// Whether queries are so few that packing the heads of a key head is worth more than large tiles.
fn decodes(p: &Problem) -> bool {
    p.max_seqlen_q.saturating_mul(p.num_heads / p.num_kv_heads) <= FEW_QUERIES
}

/// Elements of an access of the kernel that joins.
pub(super) const QUAD: usize = 4;

/// Whether the kernel that joins parts can write this output, going by its shape.
fn combines(p: &Problem) -> bool {
    p.head_dim_v.is_multiple_of(QUAD) && has_strides_of(&p.out, QUAD)
}

pub(super) fn has_strides_of(rows: &Rows, width: usize) -> bool {
    let strides = [rows.outer, rows.token, rows.head];
    strides.iter().all(|stride| stride.is_multiple_of(width))
}

pub(super) fn is_at(rows: &Rows, width: usize) -> bool {
    rows.ptr.addr().is_multiple_of(width * rows.dtype.size())
}

/// How a problem is run.
pub(crate) struct Plan<'a> {
    /// For data at good addresses.
    best: &'a Form,
    /// For data at any.
    any: &'a Form,
    splits: usize,
    /// Bytes of a part's results, and of the logarithms of its sums.
    partial: [usize; 2],
}

impl<'a> Plan<'a> {
    /// Data pointers are not looked at.
    pub(super) fn new(kernels: &'a Kernels, p: &Problem) -> Result<Plan<'a>> {
        check_limits(OP, p)?;
        let any = kernels.any(p).ok_or_else(|| Error::Internal {
            op: OP,
            message: text!("no kernel for {} and {}", p.q.dtype, p.k.dtype),
        })?;
        let best = kernels.best(p).unwrap_or(any);
        let splits = best.splits(p);
        for form in [best, any] {
            check_blocks(OP, "q", form.blocks(p).saturating_mul(splits))?;
        }
        let rows = p.batch * p.max_seqlen_q * p.num_heads;
        let partial = [rows * p.head_dim_v, rows].map(|n| n * size_of::<f32>());
        Ok(Plan {
            best,
            any,
            splits,
            partial,
        })
    }

    /// The same in one part, without workspace.
    pub fn without_splits(self) -> Plan<'a> {
        Plan { splits: 1, ..self }
    }

    /// In bytes.
    pub fn workspace_size(&self) -> usize {
        match self.splits {
            1 => 0,
            splits => splits * self.partial.iter().sum::<usize>(),
        }
    }
}

/// What the kernels count in 32 bits.
fn check_limits(op: &'static str, p: &Problem) -> Result<()> {
    const MAX_HEAD_DIM: usize = contract::attention::MAX_HEAD_DIM as usize;
    for (name, head_dim) in [("q", p.head_dim), ("v", p.head_dim_v)] {
        if head_dim > MAX_HEAD_DIM {
            let problem =
                text!("has head_dim {head_dim}, the CUDA backend takes 1 to {MAX_HEAD_DIM}");
            return Err(Error::unsupported(op, name, problem));
        }
    }
    if p.k.dtype != p.v.dtype {
        let problem = text!(
            "has dtype {}, k has {}: the CUDA backend takes one for both",
            p.v.dtype,
            p.k.dtype
        );
        return Err(Error::unsupported(op, "v", problem));
    }
    check_lengths(op, p)
}

/// Lengths, and rows in all.
pub(super) fn check_lengths(op: &'static str, p: &Problem) -> Result<()> {
    // Positions, and distances between them, fit 31 bits.
    const MAX_LENGTH: usize = contract::attention::NO_LIMIT as usize - 1;
    for (name, what, length) in [
        ("q", "queries", p.max_seqlen_q),
        ("k", "keys", p.max_seqlen_k),
    ] {
        if length > MAX_LENGTH {
            let problem = text!(
                "has up to {length} {what} per sequence, the CUDA backend takes {MAX_LENGTH}"
            );
            return Err(Error::unsupported(op, name, problem));
        }
    }
    let rows = [p.max_seqlen_q, p.num_heads]
        .into_iter()
        .try_fold(p.batch, usize::checked_mul)
        .filter(|rows| *rows <= u32::MAX as usize);
    if rows.is_none() {
        let problem = text!(
            "has {} sequences of up to {} queries and {} heads, the CUDA backend takes {} rows in all",
            p.batch,
            p.max_seqlen_q,
            p.num_heads,
            u32::MAX
        );
        return Err(Error::unsupported(op, "q", problem));
    }
    Ok(())
}

/// How a problem is run, addresses known.
pub(super) struct Launch<'a> {
    pub form: &'a Form,
    pub splits: usize,
    pub partial: u64,
    pub partial_lse: u64,
}

pub(super) fn forward(
    cuda: &Cuda,
    plan: &Plan<'_>,
    p: &Problem,
    why: &str,
    workspace: *mut u8,
    stream: Stream,
) -> Result<()> {
    let form = match plan.best.reaches(p) {
        true => plan.best,
        false => plan.any,
    };
    let splits = match is_at(&p.out, QUAD) {
        true => plan.splits,
        false => 1,
    };
    tracing::trace!(
        "{OP}: portable kernels, since {why}: {:?}, with accesses of {} elements; {} blocks where {} run \
         at once, {} keys in {splits} parts",
        form.kind,
        form.width,
        form.blocks(p),
        form.resident,
        p.max_seqlen_k,
    );
    let partial = workspace.addr() as u64;
    let launch = Launch {
        form,
        splits,
        partial,
        partial_lse: partial + (splits * plan.partial[0]) as u64,
    };
    let blocks = check_blocks(OP, "q", form.blocks(p) * splits)?;
    // SAFETY: the problem was checked: its tensors have the rows that the arguments describe, as far as lengths and pages in device
    // memory are what the caller promises; the workspace has room for every part.
    unsafe {
        let arguments = first(p, &launch);
        match &form.kernel {
            Of::Floats(kernel) => cuda.launch(OP, kernel, blocks, &arguments, stream),
            Of::Codes(kernel) => {
                cuda.launch(OP, kernel, blocks, &with_scales(p, &arguments), stream)
            }
        }
    }?;
    if splits == 1 {
        return Ok(());
    }
    let kernel = cuda.attention.portable.combine.get([p.out.dtype as u32])?;
    let rows = p.batch * p.max_seqlen_q * p.num_heads;
    // A plane per row.
    let rows_per_block = kernel.info.block[0].div_ceil(32).max(1) as usize;
    let blocks = check_blocks(OP, "q", rows.div_ceil(rows_per_block))?;
    // SAFETY: as above; the parts are written by what was queued before.
    unsafe { cuda.launch(OP, kernel, blocks, &combining(p, &launch), stream) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_are_those_of_a_search_through_all() {
        let searched = |blocks: usize, resident: usize, most: usize| {
            let busy = |splits: usize| {
                let blocks = blocks * splits;
                blocks * 1000 / (blocks.div_ceil(resident) * resident)
            };
            let best = (1..=most).map(busy).max().unwrap();
            (1..=most).find(|splits| busy(*splits) * 20 >= best * 19)
        };
        for resident in [1, 2, 7, 64, 108, 132, 264, 396, 528, 1056] {
            for blocks in (1..=3 * resident + 1).chain([usize::MAX / 4]) {
                let most = (ROUNDS * resident / blocks).clamp(1, MAX_SPLITS);
                for most in (1..=most).filter(|most| *most < 20 || most % 7 == 0) {
                    let found = fewest_splits(blocks, resident, most);
                    let expected = match most {
                        1 => Some(1),
                        _ => searched(blocks, resident, most),
                    };
                    assert_eq!(Some(found), expected, "{blocks} {resident} {most}");
                }
            }
        }
    }

    /// However queries are spread over sequences, their partial rows are no more than the bound.
    #[test]
    fn no_batch_has_more_partial_rows_than_the_bound() {
        for (resident, rows, heads, kv_heads) in [
            (264, 16, 32, 8),
            (132, 64, 8, 8),
            (528, 64, 9, 3),
            (7, 16, 6, 1),
        ] {
            let group = heads / kv_heads;
            for (sequences, tokens, most) in [
                (1, 1, 256),
                (64, 1, 32),
                (4, 9, 7),
                (16, 70, 256),
                (3, 200, 2),
            ] {
                let batch = (sequences, tokens);
                let bound = most_rows(rows, resident, (heads, kv_heads), batch, most);
                let mut found = 0;
                for used in 1..=sequences {
                    for longest in tokens.div_ceil(used)..=tokens {
                        let blocks = (longest * group).div_ceil(rows) * kv_heads * used;
                        let parts = splits(blocks, resident, most);
                        if parts > 1 {
                            found = found.max(parts * used * longest * heads);
                        }
                    }
                }
                assert!(
                    found <= bound,
                    "{resident} {rows} {sequences} {tokens}: {found} {bound}"
                );
            }
        }
    }
}
