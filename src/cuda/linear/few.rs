//! Products of up to eight rows of 16 bits with weights like them on Hopper (`kernels/cuda/linear/few`): also
//! behind a norm of `x`, and of a gate and what it gates in one.

use super::{Epilogue, Product};
use crate::alloc::push;
use crate::backend::Stream;
use crate::cuda::device::{Kernel, Resources};
use crate::cuda::driver::CUdevice_attribute;
use crate::cuda::images::linear_few::Arguments;
use crate::cuda::rows::Matrix;
use crate::cuda::tuning::Server;
use crate::cuda::tuning::rules::products::{FEW_LEAST_ELEMENTS, FEW_ROWS};
use crate::cuda::{Cuda, Shape, VECTOR};
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::linear::Weights;
use crate::problem::rms_norm::OfInput;
use crate::tensor::RawTensor;

pub(super) struct Kernels {
    kernels: Vec<Kernel<Arguments>>,
    multiprocessors: usize,
}

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    let mut kernels = Vec::new();
    for kernel in resources.kernels::<Arguments>()? {
        push(super::OP, &mut kernels, kernel)?;
    }
    let units = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    let multiprocessors = resources.primary.attribute(super::OP, units)? as usize;
    Ok(Kernels {
        kernels,
        multiprocessors: multiprocessors.max(1),
    })
}

/// What is the same in every norm that a product's kernel computes.
pub(super) struct Norm {
    pub gains: u64,
    /// 0 for no norm.
    pub dtype: u32,
    pub offset: f32,
    pub epsilon: f32,
    pub inverse_length: f32,
}

impl Norm {
    /// Vectors of a row at most: the greatest that the kernels of the norm alone keep in registers.
    const MOST_VECTORS: usize = 4096;

    /// Whether a kernel that normalises rows of 16 bits in vectors gives this norm the bits that it has alone.
    pub fn is_in_vectors(norm: &OfInput, x: &RawTensor) -> bool {
        let columns = x.layout.dim(x.layout.rank() - 1);
        let weight = &norm.weight;
        (weight.dtype == x.dtype || weight.dtype == DType::F32)
            && weight.ptr.addr().is_multiple_of(VECTOR)
            && (columns * x.dtype.size()).is_multiple_of(VECTOR)
            && columns * x.dtype.size() <= Self::MOST_VECTORS * VECTOR
    }

    pub fn new(norm: Option<&OfInput>, x: &RawTensor) -> Norm {
        let columns = x.layout.dim(x.layout.rank() - 1);
        Norm {
            gains: norm.map_or(0, |norm| norm.weight.ptr.addr() as u64),
            dtype: norm.map_or(0, |norm| norm.weight.dtype as u32),
            offset: norm.map_or(0.0, |norm| norm.weight_offset),
            epsilon: norm.map_or(0.0, |norm| norm.epsilon),
            inverse_length: 1.0 / columns.max(1) as f32,
        }
    }
}

/// A kernel for a product, and how a block of it is parted.
struct Form<'a> {
    kernel: &'a Kernel<Arguments>,
    columns: usize,
    steps: usize,
    warps: usize,
    slots: usize,
    shared_bytes: usize,
}

impl Kernels {
    /// None where rows are too many for the shared memory, or too long.
    fn form(
        &self,
        dtype: DType,
        rows: usize,
        (columns, in_features): (usize, usize),
    ) -> Option<Form<'_>> {
        /// Warps and slots of their rings: the first that there is room for.
        const PARTS: [[usize; 2]; 4] = [[16, 3], [16, 2], [8, 3], [8, 2]];
        /// Units of a block, which are multiplied by its number of warps in 32 bits.
        const MAX_UNITS: usize = 1 << 24;
        let of_dtype = |k: &&Kernel<Arguments>| {
            k.choices.dtype == dtype as u32 && rows <= k.choices.rows as usize
        };
        let kernel = self.kernels.iter().find(of_dtype)?;
        let choices = kernel.choices;
        let steps = in_features.div_ceil(choices.step as usize);
        let columns = columns.div_ceil(self.multiprocessors).max(1);
        let x_bytes = rows.checked_mul(steps * choices.step as usize * dtype.size())?;
        if columns.saturating_mul(steps) > MAX_UNITS {
            return None;
        }
        PARTS.into_iter().find_map(|[warps, slots]| {
            let rings = warps * slots * choices.unit_bytes as usize;
            let shared_bytes = rings + x_bytes + warps * rows * choices.sums_bytes as usize;
            (shared_bytes <= kernel.room as usize).then_some(Form {
                kernel,
                columns,
                steps,
                warps,
                slots,
                shared_bytes,
            })
        })
    }
}

/// Whether all rows of a matrix begin at, and consist of, whole vectors.
fn in_vectors(w: &Weights) -> bool {
    let weight = &w.weight;
    let bytes = |elements: usize| elements * weight.dtype.size();
    [
        weight.ptr.addr(),
        bytes(stride(weight)),
        bytes(weight.layout.dim(1)),
    ]
    .iter()
    .all(|at| at.is_multiple_of(VECTOR))
}

fn stride(weight: &RawTensor) -> usize {
    match weight.layout.dim(0) {
        1 => weight.layout.dim(1),
        _ => weight.layout.stride(0),
    }
}

/// The kernel for equally spaced rows, if it is for them.
fn form<'a>(cuda: &'a Cuda, p: &Product<'_>, matrix: &Matrix<3>) -> Option<Form<'a>> {
    let (x, weight) = (p.x, &p.weights.weight);
    let sizes = (weight.layout.dim(0), weight.layout.dim(1));
    let x_lies = [
        x.ptr.addr() + matrix.offsets[0] * x.dtype.size(),
        matrix.strides[0] * x.dtype.size(),
    ];
    let mut fits = x.dtype == weight.dtype
        && (1..=FEW_ROWS).contains(&matrix.rows)
        && sizes.0.saturating_mul(sizes.1) >= FEW_LEAST_ELEMENTS
        && in_vectors(p.weights)
        && x_lies.iter().all(|at| at.is_multiple_of(VECTOR))
        && p.norm.is_none_or(|norm| Norm::is_in_vectors(norm, x));
    if let Epilogue::Gated(up, _) = &p.epilogue {
        fits = fits && is_like(&up.weight, weight) && in_vectors(up);
    }
    // One way for what is normalised here and what was normalised before: the same bits.
    let own = |with_workspace| {
        let tuning = &cuda.resources.tuning.linear;
        tuning.server(x.dtype, matrix.rows, sizes.0, sizes.1, with_workspace) == Server::Own
    };
    if !fits || !own(false) || !own(true) {
        return None;
    }
    cuda.linear.few.form(x.dtype, matrix.rows, sizes)
}

/// Whether two matrices lie alike.
pub(super) fn is_like(a: &RawTensor, b: &RawTensor) -> bool {
    a.dtype == b.dtype && a.layout.shape() == b.layout.shape() && stride(a) == stride(b)
}

/// Whether a product, with its norm and what it gates, is one launch of these kernels.
pub(super) fn fuses(cuda: &Cuda, p: &Product<'_>) -> bool {
    p.rows()
        .matrices()
        .all(|matrix| form(cuda, p, &matrix).is_some())
}

/// Queues a product of equally spaced rows if these kernels are for it, or says that they are not.
pub(super) fn multiply(
    cuda: &Cuda,
    p: &Product<'_>,
    matrix: &Matrix<3>,
    stream: Stream,
) -> Result<bool> {
    let Some(form) = form(cuda, p, matrix) else {
        return Ok(false);
    };
    let weight = &p.weights.weight;
    let (out_features, in_features) = (weight.layout.dim(0), weight.layout.dim(1));
    tracing::trace!(
        "{}: {} rows of {in_features} by {out_features} in {}, {} columns a block, {} warps, {} slots",
        p.op,
        matrix.rows,
        weight.dtype,
        form.columns,
        form.warps,
        form.slots,
    );
    let (other, epilogue) = p.epilogue.parts();
    let other = other.unwrap_or(p.out);
    let at = |t: &RawTensor, i: usize| (t.ptr.addr() + matrix.offsets[i] * t.dtype.size()) as u64;
    let bytes = |t: &RawTensor, i: usize| (matrix.strides[i] * t.dtype.size()) as i64;
    let up = match &p.epilogue {
        Epilogue::Gated(up, _) => Some(up),
        _ => None,
    };
    let bias = p.weights.bias.as_ref();
    let up_bias = up.and_then(|up| up.bias.as_ref());
    let address = |t: Option<&RawTensor>| t.map_or(0, |t| t.ptr.addr() as u64);
    let code = |t: Option<&RawTensor>| t.map_or(0, |t| t.dtype as u32);
    let norm = Norm::new(p.norm, p.x);
    let arguments = Arguments {
        x: at(p.x, 0),
        weight: weight.ptr.addr() as u64,
        out: at(p.out, 1),
        bias: address(bias),
        up_bias: address(up_bias),
        residual: at(other, 2),
        norm: norm.gains,
        weight_stride: (stride(weight) * weight.dtype.size()) as i64,
        up_offset: up.map_or(0, |up| offset(weight, &up.weight)),
        x_stride: bytes(p.x, 0),
        out_stride: bytes(p.out, 1),
        residual_stride: bytes(other, 2),
        rows: matrix.rows as u32,
        out_features: out_features as u32,
        lines: (in_features * weight.dtype.size() / VECTOR) as u32,
        steps: form.steps as u32,
        slots: form.slots as u32,
        columns_of_block: form.columns as u32,
        bias_dtype: code(bias),
        up_bias_dtype: code(up_bias),
        epilogue: epilogue.code(),
        gated: u32::from(up.is_some()),
        dtype: p.out.dtype as u32,
        norm_dtype: norm.dtype,
        norm_offset: norm.offset,
        norm_epsilon: norm.epsilon,
        norm_inverse_length: norm.inverse_length,
        constant: u32::from(p.weights.constant && up.is_none_or(|up| up.constant)),
    };
    let shape = Shape {
        grid: [out_features.div_ceil(form.columns) as u32, 1, 1],
        block: [form.warps as u32 * 32, 1, 1],
        shared_bytes: form.shared_bytes as u32,
        cluster: 1,
    };
    // SAFETY: the problem was checked: its tensors have the rows that the arguments describe, and where these
    // lie is as the kernel needs it. `Kernels::form` counted the shared memory of rings, rows and shares.
    unsafe { cuda.launch_shape(p.op, form.kernel, shape, &arguments, stream)? };
    Ok(true)
}

/// Bytes from one matrix to another.
pub(super) fn offset(from: &RawTensor, to: &RawTensor) -> i64 {
    (to.ptr.addr() as i64).wrapping_sub(from.ptr.addr() as i64)
}
