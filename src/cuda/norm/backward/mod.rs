//! The backward pass of RMSNorm and LayerNorm on the GPU: which kernel a problem gets, its
//! workspace, and its launches: one for the rows, then one that adds the shares of the parameters'
//! gradients, if there are several.

mod ring;

use crate::alloc::push;
use crate::backend::{Implementation, Stream};
use crate::cuda::column_sums::Shares;
use crate::cuda::device::{Kernel, Resources};
use crate::cuda::images::norm_backward::Arguments;
use crate::cuda::rows::{Launch, Rows};
use crate::cuda::{Cuda, VECTOR, is_aligned};
use crate::error::{Error, Result, text};
use crate::problem::norm::Backward;
use crate::problem::{Plan, Plans};
use crate::tensor::{RawTensor, Scratch};

struct Form {
    kernel: Kernel<Arguments>,
    /// Threads that share a row.
    threads: usize,
    /// The longest row in vectors; 0 for the kernel that takes any row, by elements.
    capacity: usize,
    /// Blocks that the device runs at once.
    resident: usize,
}

pub(in crate::cuda) struct Kernels {
    /// Those that take any row first, then by the length of the rows.
    portable: Vec<Form>,
    ring: ring::Kernels,
}

pub(in crate::cuda) fn kernels(resources: &Resources) -> Result<Kernels> {
    let mut forms = Vec::new();
    for kernel in resources.kernels::<Arguments>()? {
        let threads = kernel.choices.threads as usize;
        let form = Form {
            threads,
            capacity: threads * kernel.choices.vectors as usize,
            resident: resources.resident_blocks(&kernel)?.max(1),
            kernel,
        };
        push("norm_backward", &mut forms, form)?;
    }
    forms.sort_by_key(|form| (form.capacity, form.threads));
    Ok(Kernels {
        portable: forms,
        ring: ring::Kernels::new(resources)?,
    })
}

/// A kernel, and how it is launched.
enum Chosen<'a> {
    Ring(ring::Form<'a>),
    Portable {
        form: &'a Form,
        /// Elements that the kernel moves at a time.
        width: usize,
        /// Blocks of a launch.
        groups: usize,
    },
}

impl Chosen<'_> {
    fn groups(&self) -> usize {
        match self {
            Chosen::Ring(form) => form.groups,
            Chosen::Portable { groups, .. } => *groups,
        }
    }
}

/// A problem with its kernel.
pub(crate) struct Ready<'a> {
    cuda: &'a Cuda,
    problem: Backward,
    chosen: Chosen<'a>,
    rows: Rows<4>,
}

impl Plans<Backward> for Cuda {
    type Plan<'a> = Ready<'a>;

    fn plan(&self, problem: Backward) -> Result<Ready<'_>> {
        let rows = rows(&problem);
        // Kernels count both in 32 bits.
        for (what, size) in [("rows", rows.rows_per_launch()), ("columns", problem.dim())] {
            if size > i32::MAX as usize {
                let problem_text = text!("has {size} {what}, the CUDA backend takes {}", i32::MAX);
                return Err(Error::unsupported(op(&problem), "x", problem_text));
            }
        }
        Ok(Ready {
            cuda: self,
            problem,
            chosen: choose(&self.norm_backward, &problem, &rows)?,
            rows,
        })
    }
}

/// The operation's name.
fn op(p: &Backward) -> &'static str {
    match p.centered {
        true => "layer_norm_backward",
        false => "rms_norm_backward",
    }
}

fn rows(p: &Backward) -> Rows<4> {
    let dresidual = p.dresidual.unwrap_or(p.x);
    Rows::new([&p.x, &p.dout, &dresidual, &p.dx].map(|t| &t.layout))
}

/// The kernel: one that moves vectors, if rows are aligned and short enough.
fn choose<'a>(kernels: &'a Kernels, p: &Backward, rows: &Rows<4>) -> Result<Chosen<'a>> {
    let width = VECTOR / p.x.dtype.size();
    let tensors = [&p.x, &p.dout, &p.dx].into_iter().chain(&p.dresidual);
    let in_vectors = p.dim().is_multiple_of(width)
        && rows.aligned_to(width)
        && tensors.into_iter().all(|t| is_aligned(t, width));
    let mut forms = kernels.portable.iter().filter(|form| {
        let choices = form.kernel.choices;
        choices.dtype == p.x.dtype as u32
            && choices.centered == u32::from(p.centered)
            && choices.residual == u32::from(p.dresidual.is_some())
    });
    let any = forms.next().ok_or_else(|| Error::Internal {
        op: op(p),
        message: text!("no kernel for dtype {}", p.x.dtype),
    })?;
    let fitting = forms.find(|form| in_vectors && form.capacity * width >= p.dim());
    let ring = &kernels.ring;
    let rows = rows.rows_per_launch();
    if let Some(form) = ring
        .choose(p, rows, fitting.is_some())
        .filter(|_| in_vectors)
    {
        return Ok(Chosen::Ring(form));
    }
    let (form, width, rows_per_block) = match fitting {
        None => (any, 1, 1),
        Some(form) => {
            let threads = form.kernel.info.block[0] as usize;
            (form, width, threads / form.threads)
        }
    };
    let blocks = rows.div_ceil(rows_per_block);
    Ok(Chosen::Portable {
        form,
        width,
        groups: blocks.min(form.resident),
    })
}

impl Ready<'_> {
    /// Blocks of all launches, each of which leaves a share.
    fn shares(&self) -> usize {
        match self.problem.x.layout.is_empty() {
            true => 0,
            false => self
                .chosen
                .groups()
                .saturating_mul(self.rows.launches().count()),
        }
    }

    /// Whether one block has all rows, and stores the parameters' gradients itself.
    fn is_whole(&self) -> bool {
        matches!(self.chosen, Chosen::Ring(_)) && self.shares() == 1
    }

    /// Bytes of one parameter's shares.
    fn bytes(&self) -> usize {
        if self.is_whole() {
            return 0;
        }
        let row = self.problem.dim().saturating_mul(size_of::<f32>());
        self.shares().saturating_mul(row)
    }

    /// Of a kernel that moves `width` elements at a time.
    fn arguments(
        &self,
        width: usize,
        groups: usize,
        launch: &Launch<4>,
        shares: [u64; 2],
    ) -> Arguments {
        let p = &self.problem;
        let at =
            |t: &RawTensor, i: usize| (t.ptr.addr() + launch.offsets[i] * t.dtype.size()) as u64;
        let stride = |dim: usize, i: usize| (launch.strides[dim][i] / width) as u64;
        let [size_1, size_2] = launch.divisors();
        Arguments {
            x: at(&p.x, 0),
            dout: at(&p.dout, 1),
            dresidual: p.dresidual.as_ref().map_or(0, |t| at(t, 2)),
            weight: p.weight.map_or(0, |w| w.ptr.addr() as u64),
            dx: at(&p.dx, 3),
            dweights: shares[0],
            dbiases: shares[1],
            rows: launch.num_rows() as u32,
            length: (p.dim() / width) as u32,
            groups: groups as u32,
            has_dweight: u32::from(p.parameters.dweight.is_some()),
            has_dbias: u32::from(p.parameters.dbias.is_some()),
            size_1: size_1.size,
            size_1_multiplier: size_1.multiplier,
            size_1_shift: size_1.shift,
            size_2: size_2.size,
            size_2_multiplier: size_2.multiplier,
            size_2_shift: size_2.shift,
            x_0: stride(0, 0),
            x_1: stride(1, 0),
            x_2: stride(2, 0),
            dout_0: stride(0, 1),
            dout_1: stride(1, 1),
            dout_2: stride(2, 1),
            dresidual_0: stride(0, 2),
            dresidual_1: stride(1, 2),
            dresidual_2: stride(2, 2),
            dx_0: stride(0, 3),
            dx_1: stride(1, 3),
            dx_2: stride(2, 3),
            weight_dtype: p.weight.map_or(0, |w| w.dtype as u32),
            weight_offset: p.weight_offset,
            epsilon: p.epsilon,
            inverse_length: 1.0 / p.dim() as f32,
            ..Arguments::ZERO
        }
    }
}

impl Ready<'_> {
    /// Queues the gradients of a launch's rows.
    ///
    /// # Safety
    /// The tensors have these rows, and each block has a share of what is asked for; there are none
    /// where [`Ready::is_whole`].
    unsafe fn rows_of(
        &self,
        launch: &Launch<4>,
        shares: Option<[u64; 2]>,
        stream: Stream,
    ) -> Result<()> {
        let (cuda, p) = (self.cuda, &self.problem);
        match &self.chosen {
            // SAFETY: the caller's promise.
            Chosen::Ring(form) => unsafe { form.launch(cuda, op(p), p, launch, shares, stream) },
            Chosen::Portable {
                form,
                width,
                groups,
            } => {
                let shares = shares.unwrap_or_default();
                let arguments = self.arguments(*width, *groups, launch, shares);
                // SAFETY: the caller's promise.
                unsafe { cuda.launch(op(p), &form.kernel, *groups as u32, &arguments, stream) }
            }
        }
    }
}

impl Plan for Ready<'_> {
    fn implementation(&self) -> Implementation {
        Implementation::Cuda
    }

    fn needed(&self) -> usize {
        let count = self.problem.parameters.iter().count();
        self.bytes().saturating_mul(count)
    }

    fn launch(&self, scratch: Scratch, stream: Stream) -> Result<()> {
        let p = &self.problem;
        let asked = [p.parameters.dweight, p.parameters.dbias];
        // Shares of the gradients that are asked for, one after the other.
        let mut next = scratch.ptr.addr() as u64;
        let begins = asked.map(|gradient| {
            let begin = next;
            next += gradient.map_or(0, |_| self.bytes() as u64);
            begin
        });
        if !p.x.layout.is_empty() {
            let per_launch = (self.chosen.groups() * p.dim() * size_of::<f32>()) as u64;
            for (i, launch) in self.rows.launches().enumerate() {
                let shares = begins.map(|begin| begin + i as u64 * per_launch);
                let shares = (!self.is_whole()).then_some(shares);
                // SAFETY: the problem was checked: its tensors have the rows that the arguments
                // describe, and the workspace a share for each block.
                unsafe { self.rows_of(&launch, shares, stream) }?;
            }
        }
        if self.is_whole() {
            return Ok(());
        }
        let shares = Shares {
            addresses: begins,
            rows: [self.shares(); 2],
            columns: p.dim(),
        };
        // SAFETY: the launches above leave so many shares of `dim` sums there.
        unsafe { shares.add(self.cuda, op(p), asked, p.parameters.accumulate, stream) }
    }
}
