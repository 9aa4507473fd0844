//! LayerNorm on the GPU: which kernel a problem gets, and its launch.

use std::cmp::Reverse;

use super::device::{Kernel, Resources};
use super::images::layer_norm::Arguments;
use super::rows::{Launch, Rows};
use super::{Cuda, Run, VECTOR, float_index, is_aligned};
use crate::backend::Stream;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::layer_norm::Problem;
use crate::tensor::RawTensor;

const OP: &str = "layer_norm";

pub(super) struct Form {
    kernel: Kernel<Arguments>,
    /// Threads that share a row.
    threads: usize,
    /// The longest row in vectors; 0 for a kernel that takes any row, by elements.
    capacity: usize,
    /// Blocks that the device runs at once.
    resident: usize,
}

/// By dtype, the kernels for short rows first; of those for rows of one length that with most threads.
pub(super) type Kernels = [Vec<Form>; 3];

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    let mut forms = Kernels::default();
    for kernel in resources.kernels::<Arguments>()? {
        let threads = kernel.choices.threads as usize;
        let form = Form {
            threads,
            capacity: threads * kernel.choices.vectors as usize,
            resident: resources.resident_blocks(&kernel)?,
            kernel,
        };
        let dtype = DType::from_raw(form.kernel.choices.dtype).and_then(float_index);
        dtype
            .and_then(|i| forms.get_mut(i))
            .ok_or_else(no_kernel)?
            .push(form);
    }
    for forms in &mut forms {
        forms.sort_by_key(|form| (form.capacity, Reverse(form.threads)));
    }
    Ok(forms)
}

fn no_kernel() -> Error {
    Error::Internal {
        op: OP,
        message: "a kernel or its dtype is not known".into(),
    }
}

impl Run for Problem {
    fn check(&self) -> Result<()> {
        // The launch counts both in 32 bits, and blocks in 31.
        for (what, size) in [
            ("rows", rows(self).rows_per_launch()),
            ("columns", dim(self)),
        ] {
            if size > i32::MAX as usize {
                let problem = format!("has {size} {what}, the CUDA backend takes {}", i32::MAX);
                return Err(Error::unsupported(OP, "x", problem));
            }
        }
        Ok(())
    }

    fn run(&self, cuda: &Cuda, stream: Stream) -> Result<()> {
        if self.x.layout.is_empty() {
            return Ok(());
        }
        let rows = rows(self);
        let forms = float_index(self.x.dtype).map(|i| &cuda.layer_norm[i]);
        let (form, width) = forms
            .and_then(|f| choose(f, self, &rows))
            .ok_or_else(no_kernel)?;
        let rows_per_block = form.kernel.info.block[0] as usize / form.threads;
        for launch in rows.launches() {
            let blocks = launch.num_rows().div_ceil(rows_per_block) as u32;
            let arguments = arguments(self, &launch, width);
            // SAFETY: the problem was checked: its tensors have the rows that the arguments describe.
            unsafe { cuda.launch(OP, &form.kernel, blocks, &arguments, stream) }?;
        }
        Ok(())
    }
}

fn dim(p: &Problem) -> usize {
    p.x.layout.dim(p.x.layout.rank().saturating_sub(1))
}

fn rows(p: &Problem) -> Rows<2> {
    Rows::new([&p.x.layout, &p.out.layout])
}

/// The kernel, and the elements that it moves at a time: vectors, if rows are aligned and short enough.
fn choose<'a>(forms: &'a [Form], p: &Problem, rows: &Rows<2>) -> Option<(&'a Form, usize)> {
    /// Longer rows get a block each from the kernel that takes any.
    const SHORT: usize = 1024;
    let width = VECTOR / p.x.dtype.size();
    let vector_fits = |t: &Option<RawTensor>| {
        t.as_ref().is_none_or(|t| match t.dtype {
            DType::F32 => is_aligned(t, VECTOR / size_of::<f32>()),
            dtype => dtype == p.x.dtype && is_aligned(t, width),
        })
    };
    let fits = dim(p).is_multiple_of(width)
        && rows.aligned_to(width)
        && is_aligned(&p.x, width)
        && is_aligned(&p.out, width)
        && vector_fits(&p.weight)
        && vector_fits(&p.bias);
    let length = dim(p) / width;
    let mut fitting = forms.iter().filter(|form| fits && form.capacity >= length);
    let Some(few) = fitting.next() else {
        let mut any = forms.iter().filter(|form| form.capacity == 0);
        let form = match dim(p) <= SHORT {
            true => any.min_by_key(|form| form.threads),
            false => any.next(),
        };
        return form.map(|form| (form, 1));
    };
    // Few rows get more threads each, as long as all of them run at once.
    let many = fitting.next().filter(|form| form.capacity == few.capacity);
    let many = many.filter(|_| rows.rows_per_launch() > few.resident);
    Some((many.unwrap_or(few), width))
}

fn arguments(p: &Problem, launch: &Launch<2>, width: usize) -> Arguments {
    let at = |t: &RawTensor, i: usize| (t.ptr.addr() + launch.offsets[i] * t.dtype.size()) as u64;
    let stride = |dim: usize, i: usize| (launch.strides[dim][i] / width) as u64;
    // In the place of what is absent something is read that is there, and not used.
    let vector = |t: &Option<RawTensor>| match t {
        None => (at(&p.x, 0), 0),
        Some(t) => (t.ptr.addr() as u64, t.dtype as u32),
    };
    let ((weight, weight_dtype), (bias, bias_dtype)) = (vector(&p.weight), vector(&p.bias));
    let [size_1, size_2] = launch.divisors();
    Arguments {
        x: at(&p.x, 0),
        weight,
        bias,
        out: at(&p.out, 1),
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
        out_0: stride(0, 1),
        out_1: stride(1, 1),
        out_2: stride(2, 1),
        weight_dtype,
        bias_dtype,
        epsilon: p.epsilon,
        inverse_length: 1.0 / dim(p) as f32,
    }
}
