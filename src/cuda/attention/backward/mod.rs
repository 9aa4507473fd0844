//! The backward pass of attention on the GPU: statistics of every row first, then what is asked for.
//!
//! `dq` is one kernel, `dk` and `dv` another, each in several forms: on tensor cores, and one that takes
//! rows at any address. Tensors whose dtypes differ, and large heads, have kernels of their own, and so has
//! the gradient of the bias.

mod any;
mod bias;

use contract::attention::{Gradient, RowSum, flag};

use super::arguments::{self, address, strides};
use super::hopper::gradients as hopper;
use super::portable::{check_lengths, has_strides_of, is_at};
use crate::alloc::push;
use crate::backend::{Implementation, Stream};
use crate::cuda::device::{Kernel, Resources};
use crate::cuda::images::{attention_backward, attention_backward_rows};
use crate::cuda::table::Table;
use crate::cuda::{Cuda, check_blocks};
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::problem::attention::{Backward, Keys, Problem, Queries, Rows};
use crate::problem::{self, Plans};
use crate::tensor::Scratch;

const OP: &str = "attention_backward";

/// A kernel, and what it is made for.
struct Form {
    kernel: Kernel<attention_backward::Arguments>,
    gradient: u32,
    dtype: u32,
    /// The greatest head dimension.
    head_dim: usize,
    /// Whether scores may have more than a scale and the limits of causality and windows.
    scores: bool,
    /// Elements of an access, which dimensions, strides and addresses must be multiples of.
    width: usize,
    /// Queries or keys of a block.
    rows: usize,
}

/// The kernels, loaded.
pub(super) struct Kernels {
    /// Those with wide accesses and for small heads first.
    forms: Vec<Form>,
    rows: Table<attention_backward_rows::Arguments, 3>,
    bias: bias::Kernels,
    any: any::Kernels,
    hopper: hopper::Kernels,
}

impl Kernels {
    pub fn new(resources: &Resources) -> Result<Kernels> {
        let mut forms = Vec::new();
        for kernel in resources.kernels::<attention_backward::Arguments>()? {
            let choices = *kernel.choices;
            let form = Form {
                gradient: choices.gradient,
                dtype: choices.dtype,
                head_dim: choices.head_dim as usize,
                scores: choices.scores != 0,
                width: choices.width as usize,
                rows: choices.rows as usize,
                kernel,
            };
            push(OP, &mut forms, form)?;
        }
        forms.sort_by_key(|form| (form.width == 1, form.head_dim, form.scores));
        let choices = |c: &attention_backward_rows::Choices| [c.kind, c.out_dtype, c.dtype];
        Ok(Kernels {
            forms,
            rows: Table::new(OP, resources, choices)?,
            bias: bias::Kernels::new(resources)?,
            any: any::Kernels::new(resources)?,
            hopper: hopper::Kernels::new(resources)?,
        })
    }

    /// The first form that serves, if its accesses may be wide or none at all.
    fn find(&self, b: &Backward, gradient: Gradient, any: bool) -> Option<&Form> {
        let mut forms = self.forms.iter();
        forms.find(|form| {
            form.gradient == gradient.code() && !(any && form.width > 1) && form.serves(b)
        })
    }
}

/// The tensors that the kernels read and write in vectors.
fn accessed(b: &Backward) -> impl Iterator<Item = &Rows> {
    let p = &b.forward;
    let gradients = [&b.dq, &b.dk, &b.dv].into_iter().flatten();
    [&p.q, &p.k, &p.v, &b.dout].into_iter().chain(gradients)
}

impl Form {
    /// Whether it computes this, going by shapes, strides and dtypes.
    fn serves(&self, b: &Backward) -> bool {
        let p = &b.forward;
        let dims = [p.head_dim, p.head_dim_v];
        one_dtype(b)
            && self.dtype == p.q.dtype as u32
            && dims.iter().all(|dim| *dim <= self.head_dim)
            && dims.iter().all(|dim| dim.is_multiple_of(self.width))
            && (self.scores || !needs_scores(p))
            && accessed(b).all(|rows| has_strides_of(rows, self.width))
    }

    /// Whether the data lies at addresses that it takes.
    fn reaches(&self, b: &Backward) -> bool {
        accessed(b).all(|rows| is_at(rows, self.width))
    }

    /// Blocks of a head, or of a key head, of a sequence.
    fn row_blocks(&self, b: &Backward) -> usize {
        let rows = match self.gradient == Gradient::Queries.code() {
            true => b.forward.max_seqlen_q,
            false => room(&b.forward),
        };
        rows.div_ceil(self.rows)
    }

    fn blocks(&self, b: &Backward) -> usize {
        let p = &b.forward;
        let heads = match self.gradient == Gradient::Queries.code() {
            true => p.num_heads,
            false => p.num_kv_heads,
        };
        let blocks = self.row_blocks(b).saturating_mul(heads);
        blocks.saturating_mul(p.batch)
    }
}

/// Whether everything that is read and written for each token is of one dtype.
fn one_dtype(b: &Backward) -> bool {
    let p = &b.forward;
    [p.k.dtype, p.v.dtype, b.dout.dtype]
        .iter()
        .all(|dtype| *dtype == p.q.dtype)
}

fn needs_scores(p: &Problem) -> bool {
    p.softcap > 0.0 || p.bias.is_some() || p.mask.is_some() || p.alibi_slopes.is_some()
}

/// Keys of a sequence that get gradients, at most.
fn room(p: &Problem) -> usize {
    match p.keys {
        Keys::Batched { len, .. } => len,
        _ => p.max_seqlen_k,
    }
}

/// Rows of a head.
fn tokens(p: &Problem) -> usize {
    match p.queries {
        Queries::Batched { len } => p.batch * len,
        Queries::Packed { total, .. } => total,
    }
}

/// A kernel's part of a backward pass.
struct Pass<'a> {
    /// For data at good addresses.
    best: &'a Form,
    /// For data at any.
    any: &'a Form,
    /// The flags of what is written.
    flags: u32,
}

impl<'a> Pass<'a> {
    /// If it is wanted.
    fn new(
        b: &Backward,
        wanted: bool,
        best: Option<&'a Form>,
        any: &'a Form,
        flags: u32,
    ) -> Result<Option<Pass<'a>>> {
        if !wanted {
            return Ok(None);
        }
        let best = best.unwrap_or(any);
        for form in [best, any] {
            check_blocks(OP, "q", form.blocks(b))?;
        }
        Ok(Some(Pass { best, any, flags }))
    }
}

/// How a backward pass is run.
pub(crate) struct Plan<'a> {
    cuda: &'a Cuda,
    problem: Backward,
    /// Of `dq`, and of `dk` and `dv`; `None` where no form serves.
    passes: Option<[Option<Pass<'a>>; 3]>,
    bias: Option<bias::Plan<'a>>,
    /// What does it all at addresses that it takes.
    hopper: Option<hopper::Plan<'a>>,
    /// Blocks of the kernel of statistics.
    blocks: u32,
}

impl Plans<Backward> for Cuda {
    type Plan<'a> = Plan<'a>;

    fn plan(&self, problem: Backward) -> Result<Plan<'_>> {
        check(&problem)?;
        let kernels = &self.attention.backward;
        let passes = kernels.passes(&problem)?;
        if passes.is_none() {
            any::check(&kernels.any, &problem)?;
        }
        let bias = problem.dbias.as_ref();
        let bias = bias.map(|dbias| bias::Plan::new(kernels, &problem, dbias));
        // A plane for each row; the kernel's blocks have four at least.
        let rows = tokens(&problem.forward).saturating_mul(problem.forward.num_heads);
        Ok(Plan {
            cuda: self,
            passes,
            bias: bias.transpose()?,
            hopper: kernels.hopper.plan(&problem),
            blocks: check_blocks(OP, "q", rows.div_ceil(ROWS_OF_A_BLOCK))?,
            problem,
        })
    }
}

impl Kernels {
    /// The forms for a problem, if there are any.
    fn passes<'a>(&'a self, b: &Backward) -> Result<Option<[Option<Pass<'a>>; 3]>> {
        use Gradient::{Keys, KeysAndValues, Queries, Values};
        let best = |gradient| self.find(b, gradient, false);
        let any = [Queries, KeysAndValues].map(|gradient| self.find(b, gradient, true));
        let [Some(any_queries), Some(any_keys)] = any else {
            return Ok(None);
        };
        let (dk, dv) = (b.dk.is_some(), b.dv.is_some());
        let flag_of = |wanted: bool, flag: u32| if wanted { flag } else { 0 };
        let flags = flag_of(dk, flag::DK) | flag_of(dv, flag::DV);
        // Two kernels on tensor cores are faster than one without.
        let apart = [Keys, Values].map(best);
        let together = best(KeysAndValues).filter(|form| form.width > 1 || apart[0].is_none());
        let [keys, values] = match (together, apart) {
            (None, [Some(keys), Some(values)]) => [
                Pass::new(b, dk, Some(keys), any_keys, flag::DK)?,
                Pass::new(b, dv, Some(values), any_keys, flag::DV)?,
            ],
            (together, _) => [Pass::new(b, dk || dv, together, any_keys, flags)?, None],
        };
        let queries = Pass::new(b, b.dq.is_some(), best(Queries), any_queries, 0)?;
        Ok(Some([queries, keys, values]))
    }
}

/// Rows of a block of the kernel of statistics.
const ROWS_OF_A_BLOCK: usize = 4;

/// What there are no kernels for.
fn check(b: &Backward) -> Result<()> {
    let p = &b.forward;
    check_lengths(OP, p)?;
    const MAX_KEYS: usize = contract::attention::NO_LIMIT as usize;
    if room(p) > MAX_KEYS {
        let problem = text!(
            "has room for {} keys, the CUDA backend takes {MAX_KEYS}",
            room(p)
        );
        return Err(Error::unsupported(OP, "k", problem));
    }
    Ok(())
}

/// Bytes of the statistics: an LSE and a delta for every row.
fn statistics_size(p: &Problem) -> usize {
    let rows = tokens(p).saturating_mul(p.num_heads);
    rows.saturating_mul(2 * size_of::<f32>())
}

impl problem::Plan for Plan<'_> {
    fn implementation(&self) -> Implementation {
        match self.hopper {
            Some(_) => Implementation::CudaHopper,
            None => Implementation::Cuda,
        }
    }

    fn needed(&self) -> usize {
        let parts = self.bias.as_ref().map_or(0, bias::Plan::needed);
        let needed = statistics_size(&self.problem.forward).saturating_add(parts);
        let hopper = self.hopper.as_ref();
        hopper.map_or(needed, |plan| {
            plan.workspace_size(&self.problem).max(needed)
        })
    }

    fn launch(&self, scratch: Scratch, stream: Stream) -> Result<()> {
        let (cuda, b) = (self.cuda, &self.problem);
        if let Some(hopper) = self.hopper.as_ref().filter(|plan| plan.reaches(b)) {
            return hopper.launch(cuda, b, &scratch, stream);
        }
        let statistics = address(scratch.ptr.cast_const());
        if self.blocks > 0 {
            let kernel = self.of_rows([
                RowSum::Delta.code(),
                b.forward.out.dtype as u32,
                b.dout.dtype as u32,
            ])?;
            let arguments = rows_arguments(b, statistics);
            // SAFETY: the problem was checked: its tensors have the rows that the arguments describe, and the workspace two f32 for each.
            unsafe { cuda.launch(OP, kernel, self.blocks, &arguments, stream) }?;
        }
        match &self.passes {
            Some(passes) => {
                for pass in passes.iter().flatten() {
                    self.launch_pass(pass, statistics, stream)?;
                }
            }
            None => any::launch(cuda, b, statistics, stream)?,
        }
        if let Some(bias) = &self.bias {
            bias.launch(cuda, b, statistics, stream)?;
        }
        if b.dsinks.is_some() {
            let kernel = self.of_rows([RowSum::Sinks.code(), 0, 0])?;
            let blocks = check_blocks(OP, "q", b.forward.num_heads)?;
            // SAFETY: as above; there is an entry for every head.
            unsafe { cuda.launch(OP, kernel, blocks, &rows_arguments(b, statistics), stream) }?;
        }
        Ok(())
    }
}

impl Plan<'_> {
    fn launch_pass(&self, pass: &Pass<'_>, statistics: u64, stream: Stream) -> Result<()> {
        let b = &self.problem;
        let form = match pass.best.reaches(b) {
            true => pass.best,
            false => pass.any,
        };
        let blocks = check_blocks(OP, "q", form.blocks(b))?;
        tracing::trace!(
            "{OP}: gradients of {}, with accesses of {} elements; {blocks} blocks",
            match form.gradient == Gradient::Queries.code() {
                true => "queries",
                false => "keys and values",
            },
            form.width,
        );
        if blocks == 0 {
            return Ok(());
        }
        let arguments = gradient_arguments(b, form, pass.flags, statistics);
        // SAFETY: the problem was checked: its tensors have the rows that the arguments describe, as far as lengths in device memory
        // are what the caller promises; the statistics are written by what was queued before.
        unsafe {
            self.cuda
                .launch(OP, &form.kernel, blocks, &arguments, stream)
        }
    }

    fn of_rows(&self, choices: [u32; 3]) -> Result<&Kernel<attention_backward_rows::Arguments>> {
        self.cuda.attention.backward.rows.get(choices)
    }
}

fn rows_arguments(b: &Backward, statistics: u64) -> attention_backward_rows::Arguments {
    let p = &b.forward;
    let mut a = attention_backward_rows::Arguments {
        out: address(p.out.ptr),
        dout: address(b.dout.ptr),
        statistics,
        num_heads: p.num_heads as u32,
        batch: p.batch as u32,
        seqlen_q: p.max_seqlen_q as u32,
        head_dim_v: p.head_dim_v as u32,
        tokens: tokens(p) as u64,
        ..attention_backward_rows::Arguments::ZERO
    };
    [a.out_outer, a.out_token, a.out_head] = strides(&p.out, 1);
    [a.dout_outer, a.dout_token, a.dout_head] = strides(&b.dout, 1);
    if let Some(lse) = &p.lse {
        a.lse = address(lse.ptr);
        [a.lse_outer, a.lse_token, a.lse_head] = strides(lse, 1);
    }
    if let Some(dlse) = &b.dlse {
        a.flags |= flag::DLSE;
        a.dlse = address(dlse.ptr);
        [a.dlse_outer, a.dlse_token, a.dlse_head] = strides(dlse, 1);
    }
    if let Queries::Packed { cu_seqlens, .. } = p.queries {
        a.flags |= flag::CU_SEQLENS_Q;
        a.cu_seqlens_q = address(cu_seqlens);
    }
    if let (Some(sinks), Some(dsinks)) = (p.sinks, b.dsinks) {
        a.sinks = address(sinks);
        a.dsinks = address(dsinks.cast_const());
    }
    if b.accumulate {
        a.flags |= flag::ACCUMULATE;
    }
    a
}

/// What the kernels of gradients are told alike: all but the tensors of tokens and their blocks. Strides of
/// these are in units of `$width` elements.
macro_rules! described {
    ($arguments:ty, $b:expr, $width:expr, $statistics:expr) => {
        described!(@ $arguments, $b, $width, $statistics;
            cu_seqlens_q, cu_seqlens_k, seq_lens_k, bias_f32, bias_f16, bias_bf16, mask, alibi_slopes, scale, softcap,
            softcap_inverse, num_heads, num_kv_heads, group, seqlen_q, seqlen_k, head_dim, head_dim_v, window_left,
            window_right, flags, bias_dtype, q_outer, q_token, q_head, k_outer, k_token, k_head, v_outer, v_token,
            v_head, bias_outer, bias_head, bias_token, bias_key, mask_outer, mask_head, mask_token, mask_key,
            alibi_outer)
    };
    (@ $arguments:ty, $b:expr, $width:expr, $statistics:expr; $($field:ident),*) => {{
        let (b, width): (&Backward, usize) = ($b, $width);
        let from = arguments::problem(&b.forward, width);
        let mut a = <$arguments>::ZERO;
        $(a.$field = from.$field;)*
        a.statistics = $statistics;
        a.tokens = tokens(&b.forward) as u64;
        a.room = room(&b.forward) as u32;
        [a.dout_outer, a.dout_token, a.dout_head] = strides(&b.dout, width);
        if let Some(dq) = &b.dq {
            [a.dq_outer, a.dq_token, a.dq_head] = strides(dq, width);
        }
        if let Some(dk) = &b.dk {
            [a.dk_outer, a.dk_token, a.dk_head] = strides(dk, width);
        }
        if let Some(dv) = &b.dv {
            [a.dv_outer, a.dv_token, a.dv_head] = strides(dv, width);
        }
        a
    }};
}
use described;

fn gradient_arguments(
    b: &Backward,
    form: &Form,
    flags: u32,
    statistics: u64,
) -> attention_backward::Arguments {
    let p = &b.forward;
    let mut a = described!(attention_backward::Arguments, b, form.width, statistics);
    a.flags |= flags;
    a.row_blocks = form.row_blocks(b) as u32;
    a.q = address(p.q.ptr);
    a.k = address(p.k.ptr);
    a.v = address(p.v.ptr);
    a.dout = address(b.dout.ptr);
    let of = |rows: &Option<Rows>| rows.as_ref().map_or(0, |rows| address(rows.ptr));
    a.dq = of(&b.dq);
    a.dk = of(&b.dk);
    a.dv = of(&b.dv);
    a
}

// Kernels are chosen by the dtypes' values in the C ABI.
const _: () = assert!(DType::F32 as u32 == contract::Float::F32.code());
