//! The kernels for Hopper, f16 and bf16: those of many queries (`kernels/cuda/attention/forward`), and of few.
//!
//! | file | what it is for |
//! |-|-|
//! | `mod.rs` | which problems they serve, with which kernel and which tiles |
//! | [`choose`] | the heuristics |
//! | [`decode`] | the same of few queries (`kernels/cuda/attention/decode`) |
//! | [`gradients`] | the same of the backward pass (`kernels/cuda/attention/backward`) |
//! | [`launch`] | tensor maps, the argument, the launch |

mod choose;
pub(super) mod decode;
pub(super) mod gradients;
mod launch;

use contract::attention::Mask;

use super::OP;
use crate::alloc::push;
use crate::cuda::claims;
use crate::cuda::device::{Kernel, Resources};
use crate::cuda::driver::CUdevice_attribute;
use crate::cuda::images::attention_forward::Arguments;
use crate::cuda::tensor_map;
use crate::cuda::tuning::Hopper;
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::problem::attention::{Keys, Problem, Queries, Rows};
pub(super) use launch::forward;

/// A kernel, and what it is made for.
struct Form {
    kernel: Kernel<Arguments>,
    dtype: u32,
    /// The greatest head dimensions.
    dims: [usize; 2],
    mask: Mask,
    softcap: bool,
    /// Whether it is a sibling that is better for short sequences alone.
    for_short: bool,
    /// Query rows and keys of a tile.
    block: [usize; 2],
}

/// The kernels, loaded.
pub(super) struct Kernels {
    forms: Vec<Form>,
    decode: Vec<decode::Form>,
    multiprocessors: usize,
    tuning: Hopper,
}

impl Kernels {
    /// `None` on other devices, and in builds without them.
    pub fn new(resources: &Resources) -> Result<Option<Kernels>> {
        let mut forms = Vec::new();
        for kernel in resources.kernels::<Arguments>()? {
            let choices = *kernel.choices;
            let mask = Mask::from_code(choices.mask).ok_or_else(|| Error::Internal {
                op: OP,
                message: text!("{:?} is not known", kernel.info),
            })?;
            push(
                OP,
                &mut forms,
                Form {
                    dtype: choices.dtype,
                    dims: [choices.head_dim, choices.head_dim_v].map(|dim| dim as usize),
                    mask,
                    softcap: choices.softcap != 0,
                    for_short: choices.for_short != 0,
                    block: [choices.block_m, choices.block_n].map(|size| size as usize),
                    kernel,
                },
            )?;
        }
        if forms.is_empty() {
            return Ok(None);
        }
        // Forms that waste the least come first: those with fewer columns, then those without masks.
        forms.sort_by_key(|form| (form.dims, form.mask.code()));
        let units = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        Ok(Some(Kernels {
            forms,
            decode: decode::forms(resources)?,
            multiprocessors: resources.primary.attribute(OP, units)? as usize,
            tuning: resources.tuning.hopper,
        }))
    }

    /// How the problem is run, or why not here. Data pointers are not looked at.
    pub fn plan(&self, p: &Problem) -> Result<Plan<'_>, &'static str> {
        if let Some(why) = refusal(p, p.q.dtype) {
            return Err(why);
        }
        const NO_FORM: &str = "Hopper's have no such head dimensions";
        let mask = mask(p);
        let serves = |form: &&Form| {
            form.dtype == p.q.dtype as u32
                && p.head_dim <= form.dims[0]
                && p.head_dim_v <= form.dims[1]
                && hides(form.mask, mask)
                && form.softcap == (p.softcap > 0.0)
        };
        let mut forms = self.forms.iter().filter(serves).peekable();
        let least = forms.peek().map(|form| (form.dims, form.mask));
        let least = least.ok_or(NO_FORM)?;
        let mut alike = forms.take_while(|form| (form.dims, form.mask) == least);
        // Prefers the form that is made for these lengths, and otherwise takes any.
        let any = alike.next().ok_or(NO_FORM)?;
        let suits = |form: &Form| {
            let dim = form.dims[0];
            form.for_short == choose::is_short(&self.tuning, dim, mask, p.max_seqlen_q)
        };
        let form = match suits(any) {
            true => any,
            false => alike.find(|form| suits(form)).unwrap_or(any),
        };
        let plan = Plan::new(self, form, p).ok_or("Hopper's count no so many tiles")?;
        let visible = p.window_left.saturating_add(p.max_seqlen_q);
        let decode = choose::Decode {
            rows: p.max_seqlen_q.saturating_mul(p.num_heads / p.num_kv_heads),
            pairs: p.batch.saturating_mul(p.num_kv_heads),
            head_dim: p.head_dim,
            keys: visible.min(p.max_seqlen_k),
            tiles: plan.tiles,
            ragged: p.ragged,
        };
        match choose::decodes(&self.tuning, self.multiprocessors, &decode) {
            true => Err("queries are few, and split keys are faster"),
            false => Ok(plan),
        }
    }
}

/// Why kernels of queries of 16 bits, and of keys and values of so many or another dtype, do not compute this, if they do not.
fn refusal(p: &Problem, of_keys: DType) -> Option<&'static str> {
    let (queries, keys) = (sizes_of_queries(p), sizes_of_keys(p));
    let rows = [
        (&p.q, queries),
        (&p.out, queries),
        (&p.k, keys),
        (&p.v, keys),
    ];
    // The reference of a row's softmax is its greatest score, and must stay that once scaled.
    let plain_scale = (1e-20..=1e20).contains(&p.scale);
    let bare = p.bias.is_none() && p.mask.is_none() && p.alibi_slopes.is_none();
    let half = matches!(p.q.dtype, DType::F16 | DType::Bf16);
    let even = |dim: &usize| dim.is_multiple_of(UNIT);
    let needs = [
        (
            half && p.out.dtype == p.q.dtype && [&p.k, &p.v].iter().all(|r| r.dtype == of_keys),
            "Hopper's take f16 or bf16, the same for all, and for few queries 8-bit floats as keys and values",
        ),
        (
            (rows.iter()).all(|(r, sizes)| has_fitting_strides(r, *sizes)),
            "the copy engine takes no such strides",
        ),
        (
            [p.head_dim, p.head_dim_v].iter().all(even),
            "Hopper's take head dimensions of whole 16 bytes",
        ),
        (plain_scale, "Hopper's take no such scale"),
        (bare, "Hopper's take no bias, mask or ALiBi slopes"),
        (
            has_fitting_sizes(p),
            "the copy engine takes no such lengths or pages",
        ),
    ];
    needs.iter().find(|(met, _)| !met).map(|(_, why)| *why)
}

/// Elements of 16 bytes, of which rows are made.
const UNIT: usize = tensor_map::ALIGNMENT / 2;

/// Strides that the copy engine takes, of dimensions `[outer, tokens, heads]` with so many entries. Entries that repeat each other it
/// does not know.
fn has_fitting_strides(rows: &Rows, sizes: [usize; 3]) -> bool {
    let element = rows.dtype.size();
    let strides = [rows.outer, rows.token, rows.head];
    strides.into_iter().zip(sizes).all(|(stride, size)| {
        let repeats = stride == 0 && size > 1;
        let bytes = stride.saturating_mul(element);
        !repeats && bytes.is_multiple_of(tensor_map::ALIGNMENT) && bytes < tensor_map::MAX_STRIDE
    })
}

/// Entries of the dimensions `[outer, tokens, heads]` of queries.
fn sizes_of_queries(p: &Problem) -> [usize; 3] {
    match p.queries {
        Queries::Batched { len } => [p.batch, len, p.num_heads],
        Queries::Packed { total, .. } => [1, total, p.num_heads],
    }
}

/// The same of keys.
fn sizes_of_keys(p: &Problem) -> [usize; 3] {
    match p.keys {
        Keys::Batched { len, .. } => [p.batch, len, p.num_kv_heads],
        Keys::Packed { total, .. } => [1, total, p.num_kv_heads],
        Keys::Paged {
            page_size,
            num_pages,
            ..
        } => [num_pages, page_size, p.num_kv_heads],
    }
}

/// Sizes that tensor maps and 32-bit positions allow, none of them zero.
fn has_fitting_sizes(p: &Problem) -> bool {
    if let Keys::Paged {
        page_size,
        table_stride,
        ..
    } = p.keys
        && (page_size < LEAST_PAGE || table_stride > i32::MAX as usize)
    {
        return false;
    }
    let lengths = [p.batch, p.max_seqlen_q, p.max_seqlen_k];
    let mut sizes = sizes_of_queries(p)
        .into_iter()
        .chain(sizes_of_keys(p))
        .chain(lengths);
    sizes.all(|size| (1..1 << 30).contains(&size))
}

/// Smaller pages would be copied in boxes too small to be quick.
const LEAST_PAGE: usize = 16;

/// Whether a kernel with this mask can hide what another does, and nothing else.
fn hides(mask: Mask, other: Mask) -> bool {
    mask == Mask::Window || mask == other
}

fn mask(p: &Problem) -> Mask {
    let unlimited = |window: usize| window >= p.max_seqlen_k.saturating_add(p.max_seqlen_q);
    match (unlimited(p.window_left), p.window_right) {
        (true, 1) => Mask::Causal,
        (true, right) if unlimited(right) => Mask::None,
        _ => Mask::Window,
    }
}

/// How a problem is run.
pub(crate) struct Plan<'a> {
    form: &'a Form,
    mask: Mask,
    /// Query heads of one key head that share a tile: this power of two.
    pack_log2: u32,
    /// Of a sequence and a head, or as many heads as are packed.
    row_blocks: usize,
    /// Another chunk of queries in front of these, whose tiles come behind theirs.
    chunk: Option<Chunk>,
    /// At most, where lengths are on the device.
    tiles: usize,
    /// What is launched.
    blocks: u32,
    /// Whether blocks take tiles from a counter.
    counts: bool,
    multiprocessors: usize,
}

/// A chunk of queries that shares a launch.
#[derive(Clone, Copy)]
struct Chunk {
    row_blocks: usize,
    /// Tiles before its own.
    from: usize,
    /// Tokens from its first one to the first of the others.
    distance: usize,
}

impl<'a> Plan<'a> {
    fn new(kernels: &Kernels, form: &'a Form, p: &Problem) -> Option<Plan<'a>> {
        let block_m = form.block[0];
        let pack_log2 = packing(p);
        let pack = 1 << pack_log2;
        let row_blocks = (p.max_seqlen_q * pack).div_ceil(block_m);
        let per_head = match p.queries {
            Queries::Batched { .. } => row_blocks.checked_mul(p.batch)?,
            // Full blocks, and one of each sequence that is not.
            Queries::Packed { total, .. } => {
                let most = row_blocks.saturating_mul(p.batch);
                most.min(total * pack / block_m + p.batch)
            }
        };
        let tiles = per_head.checked_mul(p.num_heads / pack)?;
        if tiles > i32::MAX as usize / 2 {
            return None;
        }
        let blocks = tiles.min(kernels.multiprocessors);
        Some(Plan {
            form,
            mask: mask(p),
            pack_log2,
            row_blocks,
            chunk: None,
            tiles,
            blocks: blocks as u32,
            counts: tiles > blocks,
            multiprocessors: kernels.multiprocessors,
        })
    }

    /// One launch of `p` and of the chunk of queries so many tokens before it, if tiles of both can be alike and end where the
    /// chunk does: none has rows of the other one, or keys that the chunk does not see.
    pub fn with(
        &self,
        earlier: &Plan<'a>,
        p: &Problem,
        chunk: &Problem,
        distance: usize,
    ) -> Option<Plan<'a>> {
        let [rows, keys] = self.form.block;
        let of_lse = match (&p.lse, &chunk.lse) {
            (Some(later), Some(earlier)) => later.continues(earlier),
            _ => true,
        };
        let alike = std::ptr::eq(self.form, earlier.form)
            && (self.mask, self.pack_log2) == (earlier.mask, earlier.pack_log2)
            && !(p.ragged || chunk.ragged)
            && (p.q.continues(&chunk.q) && p.out.continues(&chunk.out) && of_lse)
            && (p.window_left, p.window_right) == (chunk.window_left, chunk.window_right)
            && distance >= chunk.max_seqlen_q
            && distance.saturating_add(p.max_seqlen_q) < 1 << 30
            && chunk.max_seqlen_k <= p.max_seqlen_k
            && chunk.max_seqlen_q.is_multiple_of(rows >> self.pack_log2)
            && chunk.max_seqlen_k.is_multiple_of(keys);
        let tiles = self.tiles.checked_add(earlier.tiles)?;
        if !alike || tiles > i32::MAX as usize / 2 {
            return None;
        }
        let blocks = tiles.min(self.multiprocessors);
        Some(Plan {
            chunk: Some(Chunk {
                row_blocks: earlier.row_blocks,
                from: self.tiles,
                distance,
            }),
            tiles,
            blocks: blocks as u32,
            counts: tiles > blocks,
            ..*self
        })
    }

    /// In bytes.
    pub fn workspace_size(&self) -> usize {
        if self.counts { claims::COUNTER } else { 0 }
    }

    /// Whether the data lies at addresses that the copy engine takes.
    pub fn reaches(&self, p: &Problem) -> bool {
        are_aligned(p)
    }
}

fn are_aligned(p: &Problem) -> bool {
    let rows = [&p.q, &p.k, &p.v, &p.out];
    rows.iter()
        .all(|r| r.ptr.addr().is_multiple_of(tensor_map::ALIGNMENT))
}

/// How many query heads of a key head share a tile, as a power of two: all of them. Tiles are fuller for it, and never slower.
fn packing(p: &Problem) -> u32 {
    let group = p.num_heads / p.num_kv_heads;
    // A warpgroup has 64 rows, and a tile whole positions.
    if group.is_power_of_two() && group <= 64 {
        group.ilog2()
    } else {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::tensor_map::Fetch;
    use crate::kv_cache::{Config, KvCache};
    use crate::layout::Layout;
    use crate::memory::Buffer;
    use crate::ops::operation::Operation;
    use crate::{Context, Stream};

    /// Windows of any size may be as long as the keys; a causal kernel always hides what is after the query.
    #[test]
    fn no_kernel_hides_more_than_is_asked() {
        let masks = [Mask::None, Mask::Causal, Mask::Window];
        let hiding = |asked| masks.map(|kernel| hides(kernel, asked));
        assert_eq!(hiding(Mask::None), [true, false, true]);
        assert_eq!(hiding(Mask::Causal), [false, true, true]);
        assert_eq!(hiding(Mask::Window), [false, false, true]);
    }

    /// What an engine's prompt asks for, with a cache in pages of 16 tokens. Shapes decide, so a cache on the host will do.
    #[test]
    fn prompts_with_a_cache_are_served() {
        let ctx = Context::cpu().unwrap();
        for dtype in [DType::F16, DType::Bf16] {
            for (heads, kv_heads, head_dim) in [(9, 3, 64), (32, 8, 128)] {
                let config = Config::new(1, kv_heads, head_dim, 64, dtype);
                let mut cache = KvCache::new(&ctx, &config).unwrap();
                let sequence = cache.create_sequence().unwrap();
                for tokens in [124, 500] {
                    cache
                        .extend(&[(sequence, tokens)], Stream::DEFAULT)
                        .unwrap();
                    let layout = Layout::contiguous(&[tokens, heads, head_dim]).unwrap();
                    let q = Buffer::new(&ctx, layout.num_elements() * 2).unwrap();
                    let mut out = Buffer::new(&ctx, layout.num_elements() * 2).unwrap();
                    let q = q.tensor(0, dtype, layout).unwrap();
                    let out = out.tensor_mut(0, dtype, layout).unwrap();
                    let problem = cache.attention(0, q, out).unwrap().problem().unwrap();
                    assert_eq!(
                        refusal(&problem, dtype),
                        None,
                        "{dtype} {heads}x{head_dim} {tokens}"
                    );
                    let prompt = choose::Decode {
                        rows: tokens * heads / kv_heads,
                        pairs: kv_heads,
                        head_dim,
                        keys: tokens,
                        tiles: 1,
                        ragged: problem.ragged,
                    };
                    let none = Hopper {
                        short: &[],
                        together: &[],
                        decoding: &[],
                        decoding_fetch: Fetch::Bytes256,
                    };
                    assert!(!choose::decodes(&none, 132, &prompt));
                }
            }
        }
    }
}
