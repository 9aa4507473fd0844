//! RMSNorm on the GPU: which kernel a problem gets, and its launch.

use std::cmp::Reverse;

use contract::norm::Gains;

use super::device::{Kernel, Resources};
use super::images::rms_norm::Arguments;
use super::rows::{Launch, Rows};
use super::{Cuda, Run, VECTOR, float_index, is_aligned};
use crate::backend::Stream;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::rms_norm::Problem;
use crate::tensor::RawTensor;

const OP: &str = "rms_norm";

/// The kernels of one dtype, without or with residual.
#[derive(Default)]
struct Forms {
    /// Rows in vectors, the shortest first; of those for rows of one length that with most threads.
    rows: Vec<Form>,
    /// Any rows, by dtype of the gains; for short and long ones.
    any: [Vec<Form>; 3],
}

struct Form {
    kernel: Kernel<Arguments>,
    /// Threads that share a row.
    threads: usize,
    /// The longest row in vectors; 0 for `any`, which takes all.
    capacity: usize,
    /// Blocks that the device runs at once.
    resident: usize,
}

/// The operation's kernels, loaded.
pub(crate) struct Kernels {
    forms: [[Forms; 2]; 3],
}

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    Kernels::new(resources)
}

impl Kernels {
    fn new(resources: &Resources) -> Result<Kernels> {
        let mut forms: [[Forms; 2]; 3] = Default::default();
        for kernel in resources.kernels::<Arguments>()? {
            let choices = *kernel.choices;
            let index = |dtype| DType::from_raw(dtype).and_then(float_index);
            let has_residual = choices.residual as usize;
            let found = index(choices.dtype).and_then(|i| forms[i].get_mut(has_residual));
            let Some(of_dtype) = found else {
                return Err(Error::Internal {
                    op: OP,
                    message: format!("{:?} is not known", kernel.info),
                });
            };
            let weight = index(choices.weight);
            let threads = choices.threads as usize;
            let vectors = choices.vectors as usize;
            let form = Form {
                resident: resources.resident_blocks(&kernel)?,
                kernel,
                threads,
                capacity: threads * vectors,
            };
            match weight {
                Some(weight) => of_dtype.any[weight].push(form),
                None => of_dtype.rows.push(form),
            }
        }
        for of_dtype in forms.iter_mut().flatten() {
            of_dtype
                .rows
                .sort_by_key(|form| (form.capacity, Reverse(form.threads)));
            for any in &mut of_dtype.any {
                any.sort_by_key(|form| form.threads);
            }
        }
        Ok(Kernels { forms })
    }

    fn forms(&self, p: &Problem) -> Option<&Forms> {
        let [plain, residual] = &self.forms[float_index(p.x.dtype)?];
        Some(if p.residual.is_some() {
            residual
        } else {
            plain
        })
    }
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
    let rows = rows(p).rows_per_launch();
    for (what, size) in [("rows", rows), ("columns", dim(p))] {
        // The launch counts both in 32 bits, and blocks in 31.
        if size > i32::MAX as usize {
            let problem = format!("has {size} {what}, the CUDA backend takes {}", i32::MAX);
            return Err(Error::unsupported(OP, "x", problem));
        }
    }
    Ok(())
}

fn forward(cuda: &Cuda, p: &Problem, stream: Stream) -> Result<()> {
    if p.x.layout.is_empty() {
        return Ok(());
    }
    let no_kernel = || Error::Internal {
        op: OP,
        message: format!("no kernel for {}", p.x.dtype),
    };
    let rows = rows(p);
    let forms = cuda.rms_norm.forms(p).ok_or_else(no_kernel)?;
    let (form, width) = in_vectors(forms, p, &rows)
        .or_else(|| any(forms, p))
        .ok_or_else(no_kernel)?;
    let rows_per_block = form.kernel.info.block[0] as usize / form.threads;
    for launch in rows.launches() {
        let blocks = launch.num_rows().div_ceil(rows_per_block) as u32;
        let arguments = arguments(p, &launch, width);
        // SAFETY: the problem was checked: its tensors have the rows that the arguments describe.
        unsafe { cuda.launch(OP, &form.kernel, blocks, &arguments, stream) }?;
    }
    Ok(())
}

fn dim(p: &Problem) -> usize {
    p.x.layout.dim(p.x.layout.rank().saturating_sub(1))
}

fn rows(p: &Problem) -> Rows<4> {
    let (residual, sum) = match &p.residual {
        Some((residual, sum)) => (&residual.layout, &sum.layout),
        None => (&p.x.layout, &p.x.layout),
    };
    Rows::new([&p.x.layout, residual, &p.out.layout, sum])
}

/// The kernel that moves vectors, and their width in elements, if rows are aligned and short enough for it.
fn in_vectors<'a>(forms: &'a Forms, p: &Problem, rows: &Rows<4>) -> Option<(&'a Form, usize)> {
    let width = VECTOR / p.x.dtype.size();
    let aligned = |t: &RawTensor| is_aligned(t, width);
    let residual = p
        .residual
        .as_ref()
        .is_none_or(|(r, s)| aligned(r) && aligned(s));
    let weight = p.weight.as_ref().is_none_or(|w| match w.dtype {
        DType::F32 => is_aligned(w, VECTOR / size_of::<f32>()),
        dtype => dtype == p.x.dtype && aligned(w),
    });
    let fits = dim(p).is_multiple_of(width) && rows.aligned_to(width);
    if !(fits && weight && residual && aligned(&p.x) && aligned(&p.out)) {
        return None;
    }
    let length = dim(p) / width;
    let mut fitting = forms.rows.iter().filter(|form| form.capacity >= length);
    let few = fitting.next()?;
    // Few rows get more threads each, as long as all of them run at once; the sum's order is the same.
    let many = fitting.next().filter(|form| form.capacity == few.capacity);
    let form = match many {
        Some(many) if rows.rows_per_launch() > few.resident => many,
        _ => few,
    };
    Some((form, width))
}

/// The kernel that takes anything.
fn any<'a>(forms: &'a Forms, p: &Problem) -> Option<(&'a Form, usize)> {
    /// Longer rows get a block each.
    const SHORT: usize = 1024;
    let weight = p.weight.as_ref().map_or(p.x.dtype, |w| w.dtype);
    let any = &forms.any[float_index(weight)?];
    let form = if dim(p) <= SHORT {
        any.first()
    } else {
        any.last()
    };
    Some((form?, 1))
}

fn arguments(p: &Problem, launch: &Launch<4>, width: usize) -> Arguments {
    let at = |t: &RawTensor, i: usize| (t.ptr.addr() + launch.offsets[i] * t.dtype.size()) as u64;
    let stride = |dim: usize, i: usize| (launch.strides[dim][i] / width) as u64;
    let (residual, residual_out) = match &p.residual {
        Some((residual, sum)) => (at(residual, 1), at(sum, 3)),
        None => (0, 0),
    };
    let (weight, weight_kind) = match &p.weight {
        // Read, in the place of gains, and not used.
        None => (at(&p.x, 0), Gains::None),
        Some(w) if w.dtype == p.x.dtype => (w.ptr.addr() as u64, Gains::LikeX),
        Some(w) => (w.ptr.addr() as u64, Gains::F32),
    };
    let [size_1, size_2] = launch.divisors();
    Arguments {
        x: at(&p.x, 0),
        residual,
        weight,
        out: at(&p.out, 2),
        residual_out,
        rows: launch.num_rows() as u32,
        length: (dim(p) / width) as u32,
        size_1: size_1.size,
        size_1_multiplier: size_1.multiplier,
        size_1_shift: size_1.shift,
        size_2: size_2.size,
        size_2_multiplier: size_2.multiplier,
        size_2_shift: size_2.shift,
        x_0: stride(0, 0),
        x_1: stride(1, 0),
        x_2: stride(2, 0),
        residual_0: stride(0, 1),
        residual_1: stride(1, 1),
        residual_2: stride(2, 1),
        out_0: stride(0, 2),
        out_1: stride(1, 2),
        out_2: stride(2, 2),
        residual_out_0: stride(0, 3),
        residual_out_1: stride(1, 3),
        residual_out_2: stride(2, 3),
        weight_kind: weight_kind.code(),
        weight_offset: p.weight_offset,
        epsilon: p.epsilon,
        inverse_length: 1.0 / dim(p) as f32,
        ..Arguments::ZERO
    }
}
