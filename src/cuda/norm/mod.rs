//! RMSNorm and LayerNorm on the GPU: which kernel a problem gets, and its launch.

pub(super) mod backward;

use std::cmp::Reverse;

use crate::alloc::push;
use crate::backend::Stream;
use crate::cuda::device::{Kernel, Resources};
use crate::cuda::images::norm::Arguments;
use crate::cuda::rows::{Launch, Rows};
use crate::cuda::{Cuda, Run, VECTOR, float_index, is_aligned};
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::problem::{layer_norm, rms_norm};
use crate::tensor::RawTensor;

struct Form {
    kernel: Kernel<Arguments>,
    /// Threads that share a row.
    threads: usize,
    /// The longest row in vectors; 0 for a kernel that takes any row, by elements.
    capacity: usize,
    /// Blocks that the device runs at once.
    resident: usize,
}

/// The operations' kernels, by dtype, centered or not, with a residual or without. Those for short
/// rows come first, and of those for rows of one length that with most threads.
pub(super) struct Kernels([[[Vec<Form>; 2]; 2]; 3]);

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    let mut forms: [[[Vec<Form>; 2]; 2]; 3] = Default::default();
    for kernel in resources.kernels::<Arguments>()? {
        let choices = *kernel.choices;
        let threads = choices.threads as usize;
        let form = Form {
            resident: resources.resident_blocks(&kernel)?,
            kernel,
            threads,
            capacity: threads * choices.vectors as usize,
        };
        let dtype = DType::from_raw(choices.dtype).and_then(float_index);
        let of_dtype = dtype.and_then(|i| forms.get_mut(i));
        let forms = of_dtype
            .and_then(|of| of.get_mut(choices.centered as usize))
            .and_then(|of| of.get_mut(choices.residual as usize))
            .ok_or_else(|| no_kernel("norm"))?;
        push("norm", forms, form)?;
    }
    for forms in forms.iter_mut().flatten().flatten() {
        forms.sort_by_key(|form| (form.capacity, Reverse(form.threads)));
    }
    Ok(Kernels(forms))
}

fn no_kernel(op: &'static str) -> Error {
    Error::Internal {
        op,
        message: text!("a kernel or its dtype is not known"),
    }
}

/// What both operations are to the kernels.
#[derive(Clone, Copy)]
struct Norm {
    op: &'static str,
    centered: bool,
    x: RawTensor,
    out: RawTensor,
    residual: Option<(RawTensor, RawTensor)>,
    weight: Option<RawTensor>,
    bias: Option<RawTensor>,
    weight_offset: f32,
    epsilon: f32,
}

impl From<&layer_norm::Problem> for Norm {
    fn from(p: &layer_norm::Problem) -> Norm {
        Norm {
            op: "layer_norm",
            centered: true,
            x: p.x,
            out: p.out,
            residual: None,
            weight: p.weight,
            bias: p.bias,
            weight_offset: 0.0,
            epsilon: p.epsilon,
        }
    }
}

impl From<&rms_norm::Problem> for Norm {
    fn from(p: &rms_norm::Problem) -> Norm {
        Norm {
            op: "rms_norm",
            centered: false,
            x: p.x,
            out: p.out,
            residual: p.residual,
            weight: p.weight,
            bias: None,
            weight_offset: p.weight_offset,
            epsilon: p.epsilon,
        }
    }
}

macro_rules! run {
    ($($operation:ident),*) => {
        $(impl Run for $operation::Problem {
            fn check(&self) -> Result<()> {
                Norm::from(self).check()
            }

            fn run(&self, cuda: &Cuda, stream: Stream) -> Result<()> {
                Norm::from(self).run(cuda, stream)
            }
        })*
    };
}

run!(layer_norm, rms_norm);

impl Norm {
    fn check(&self) -> Result<()> {
        // The launch counts both in 32 bits, and blocks in 31.
        for (what, size) in [
            ("rows", self.rows().rows_per_launch()),
            ("columns", self.dim()),
        ] {
            if size > i32::MAX as usize {
                let problem = text!("has {size} {what}, the CUDA backend takes {}", i32::MAX);
                return Err(Error::unsupported(self.op, "x", problem));
            }
        }
        Ok(())
    }

    fn run(&self, cuda: &Cuda, stream: Stream) -> Result<()> {
        if self.x.layout.is_empty() {
            return Ok(());
        }
        let rows = self.rows();
        let forms = float_index(self.x.dtype).map(|i| &cuda.norm.0[i][usize::from(self.centered)]);
        let (form, width) = forms
            .and_then(|of| self.choose(&of[usize::from(self.residual.is_some())], &rows))
            .ok_or_else(|| no_kernel(self.op))?;
        let rows_per_block = form.kernel.info.block[0] as usize / form.threads;
        for launch in rows.launches() {
            let blocks = launch.num_rows().div_ceil(rows_per_block) as u32;
            let arguments = self.arguments(&launch, width);
            // SAFETY: the problem was checked: its tensors have the rows that the arguments
            // describe.
            unsafe { cuda.launch(self.op, &form.kernel, blocks, &arguments, stream) }?;
        }
        Ok(())
    }

    fn dim(&self) -> usize {
        self.x.layout.dim(self.x.layout.rank().saturating_sub(1))
    }

    fn rows(&self) -> Rows<4> {
        let (residual, sum) = self.residual.unwrap_or((self.x, self.x));
        Rows::new([
            &self.x.layout,
            &residual.layout,
            &self.out.layout,
            &sum.layout,
        ])
    }

    /// The kernel, and the elements that it moves at a time: vectors, if rows are aligned and short
    /// enough.
    fn choose<'a>(&self, forms: &'a [Form], rows: &Rows<4>) -> Option<(&'a Form, usize)> {
        /// Longer rows get a block each from the kernel that takes any.
        const SHORT: usize = 1024;
        let width = VECTOR / self.x.dtype.size();
        let in_vectors = self.dim().is_multiple_of(width)
            && rows.aligned_to(width)
            && self.tensors().all(|t| is_aligned(t, width))
            && self.parameters_fit();
        let length = self.dim() / width;
        let is_f32 = |t: &RawTensor| t.dtype == DType::F32;
        let wide = !is_f32(&self.x) && self.weight.iter().chain(&self.bias).any(is_f32);
        let mut fitting = forms.iter().filter(|form| {
            let wide = form.kernel.choices.wide == u32::from(wide);
            in_vectors && wide && form.capacity >= length
        });
        let Some(few) = fitting.next() else {
            let mut any = forms.iter().filter(|form| form.capacity == 0);
            let form = match self.dim() <= SHORT {
                true => any.min_by_key(|form| form.threads),
                false => any.next(),
            };
            return form.map(|form| (form, 1));
        };
        // Few rows get more threads each, as long as all of them run at once; sums have the same
        // order.
        let many = fitting.next().filter(|form| form.capacity == few.capacity);
        let many = many.filter(|_| rows.rows_per_launch() > few.resident);
        Some((many.unwrap_or(few), width))
    }

    /// What has the rows.
    fn tensors(&self) -> impl Iterator<Item = &RawTensor> {
        let residual = self.residual.iter().flat_map(|(r, sum)| [r, sum]);
        [&self.x, &self.out].into_iter().chain(residual)
    }

    /// Whether gains and biases may be moved as vectors: aligned, of one dtype, that of x or f32.
    fn parameters_fit(&self) -> bool {
        let mut all = self.weight.iter().chain(&self.bias);
        let dtype = all.clone().next().map_or(self.x.dtype, |t| t.dtype);
        (dtype == self.x.dtype || dtype == DType::F32)
            && all.all(|t| t.dtype == dtype && is_aligned(t, VECTOR / dtype.size()))
    }

    fn arguments(&self, launch: &Launch<4>, width: usize) -> Arguments {
        let at =
            |t: &RawTensor, i: usize| (t.ptr.addr() + launch.offsets[i] * t.dtype.size()) as u64;
        let stride = |dim: usize, i: usize| (launch.strides[dim][i] / width) as u64;
        let (residual, residual_out) = match &self.residual {
            Some((residual, sum)) => (at(residual, 1), at(sum, 3)),
            None => (0, 0),
        };
        let address = |t: &Option<RawTensor>| t.as_ref().map_or(0, |t| t.ptr.addr() as u64);
        let code = |t: &Option<RawTensor>| t.as_ref().map_or(0, |t| t.dtype as u32);
        let [size_1, size_2] = launch.divisors();
        Arguments {
            x: at(&self.x, 0),
            residual,
            weight: address(&self.weight),
            bias: address(&self.bias),
            out: at(&self.out, 2),
            residual_out,
            rows: launch.num_rows() as u32,
            length: (self.dim() / width) as u32,
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
            weight_dtype: code(&self.weight),
            bias_dtype: code(&self.bias),
            weight_offset: self.weight.map_or(0.0, |_| self.weight_offset),
            epsilon: self.epsilon,
            inverse_length: 1.0 / self.dim() as f32,
            ..Arguments::ZERO
        }
    }
}
