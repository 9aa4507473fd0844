//! Products of up to eight rows of 16 bits on Hopper, with weights like them or in blocks
//! (`kernels/cuda/linear/few`): also behind a norm of `x`, and of a gate and what it gates in one.

mod form;

use self::form::{Form, Sizes};
use super::{Epilogue, Product};
use crate::alloc::push;
use crate::backend::Stream;
use crate::cuda::device::{Kernel, Resources};
use crate::cuda::driver::CUdevice_attribute;
use crate::cuda::images::linear_few::Arguments;
use crate::cuda::rows::Matrix;
use crate::cuda::tuning::Server;
use crate::cuda::tuning::rules::products::{BLOCKS_FEW, FEW_LEAST_ELEMENTS, FEW_ROWS};
use crate::cuda::{Cuda, Shape, VECTOR};
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::rms_norm::OfInput;
use crate::tensor::RawTensor;

pub(super) struct Kernels {
    kernels: Vec<Kernel<Arguments>>,
    multiprocessors: usize,
    /// Whether blocks have clusters.
    clusters: bool,
}

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    let mut kernels = Vec::new();
    for kernel in resources.kernels::<Arguments>()? {
        push(super::OP, &mut kernels, kernel)?;
    }
    // Those that cannot part rows come first.
    kernels.sort_unstable_by_key(|kernel: &Kernel<Arguments>| kernel.choices.in_parts);
    let units = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    let multiprocessors = resources.primary.attribute(super::OP, units)? as usize;
    Ok(Kernels {
        kernels,
        multiprocessors: multiprocessors.max(1),
        clusters: resources.launches_early,
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

/// The kernel that is to run, and how.
type Chosen<'a> = (&'a Kernel<Arguments>, Form);

impl Kernels {
    /// None where rows are too many or too long. `tile_row_bytes`: of a row, where tiles are copied as they lie.
    /// What parts rows is slower where it has one part.
    fn choose(
        &self,
        dtype: DType,
        weight: &RawTensor,
        rows: usize,
        gated: bool,
        tile_row_bytes: Option<usize>,
    ) -> Option<Chosen<'_>> {
        let fits = |k: &&Kernel<Arguments>| {
            k.choices.dtype == dtype as u32
                && k.choices.weight_dtype == weight.dtype as u32
                && rows <= k.choices.rows as usize
        };
        let form = |kernel: &Kernel<Arguments>| {
            let sizes = Sizes {
                rows,
                out_features: weight.layout.dim(0),
                in_features: weight.layout.dim(1),
                gated,
                block_len: weight.dtype.block().0,
                tile_row_bytes,
                multiprocessors: self.multiprocessors,
                clusters: self.clusters,
                room: kernel.room as usize,
                choices: *kernel.choices,
            };
            sizes.form()
        };
        let chosen = |kernel| Some((kernel, form(kernel)?));
        self.kernels.iter().filter(fits).find_map(chosen)
    }
}

/// Whether all rows of a weight begin at, and consist of, whole vectors.
fn is_in_vectors(weight: &RawTensor) -> bool {
    [weight.ptr.addr(), stride(weight), row_bytes(weight)]
        .iter()
        .all(|at| at.is_multiple_of(VECTOR))
}

fn row_bytes(weight: &RawTensor) -> usize {
    weight.dtype.row_bytes(weight.layout.dim(1))
}

/// Bytes from row to row.
pub(super) fn stride(weight: &RawTensor) -> usize {
    match weight.layout.dim(0) {
        1 => row_bytes(weight),
        _ => weight.dtype.row_bytes(weight.layout.stride(0)),
    }
}

/// The kernel for equally spaced rows, if it is for them.
fn choose<'a>(cuda: &'a Cuda, p: &Product<'_>, matrix: &Matrix<3>) -> Option<Chosen<'a>> {
    let (x, weight) = (p.x, &p.weights.weight);
    let x_lies = [
        x.ptr.addr() + matrix.offsets[0] * x.dtype.size(),
        matrix.strides[0] * x.dtype.size(),
    ];
    let mut fits = matches!(x.dtype, DType::F16 | DType::Bf16)
        && x_lies.iter().all(|at| at.is_multiple_of(VECTOR))
        && p.norm.is_none_or(|norm| Norm::is_in_vectors(norm, x));
    let up = match &p.epilogue {
        Epilogue::Gated(up, _) => Some(&up.weight),
        _ => None,
    };
    if let Some(up) = up {
        fits = fits && is_like(up, weight);
    }
    if !fits {
        return None;
    }
    let all = |lies: fn(&RawTensor) -> bool| lies(weight) && up.is_none_or(lies);
    let few = &cuda.linear.few;
    // Each block needs the squares of whole rows.
    let takes_norm = |chosen: &Chosen<'_>| p.norm.is_none() || chosen.1.parts == 1;
    if !weight.dtype.is_in_blocks() {
        let sizes = (weight.layout.dim(0), weight.layout.dim(1));
        // One way for what is normalised here and what was normalised before: the same bits.
        let own = |with_workspace| {
            let tuning = &cuda.resources.tuning.linear;
            tuning.server(x.dtype, matrix.rows, sizes.0, sizes.1, with_workspace) == Server::Own
        };
        let is_for = x.dtype == weight.dtype
            && all(is_in_vectors)
            && (1..=FEW_ROWS).contains(&matrix.rows)
            && sizes.0.saturating_mul(sizes.1) >= FEW_LEAST_ELEMENTS
            && own(false)
            && own(true);
        return is_for
            .then(|| few.choose(x.dtype, weight, matrix.rows, up.is_some(), None))
            .flatten()
            .filter(takes_norm);
    }
    // One row has kernels of its own, which round it.
    let fewest = if p.weights.float_activations() { 1 } else { 2 };
    let begins_in_vectors = |weight: &RawTensor| weight.ptr.addr().is_multiple_of(VECTOR);
    let tile_row_bytes = match all(is_in_vectors) {
        true => None,
        // Of tiles as they lie every eight rows are whole vectors.
        false if all(begins_in_vectors) && stride(weight) == row_bytes(weight) => {
            Some(row_bytes(weight))
        }
        false => return None,
    };
    if !(fewest..=BLOCKS_FEW).contains(&matrix.rows) {
        return None;
    }
    few.choose(x.dtype, weight, matrix.rows, up.is_some(), tile_row_bytes)
        .filter(takes_norm)
}

/// Whether two matrices lie alike.
pub(super) fn is_like(a: &RawTensor, b: &RawTensor) -> bool {
    a.dtype == b.dtype && a.layout.shape() == b.layout.shape() && stride(a) == stride(b)
}

/// Whether a product, with its norm and what it gates, is one launch of these kernels for each of its matrices.
pub(super) fn serves(cuda: &Cuda, p: &Product<'_>) -> bool {
    p.rows()
        .matrices()
        .all(|matrix| choose(cuda, p, &matrix).is_some())
}

/// Queues a product of equally spaced rows if these kernels are for it, or says that they are not.
pub(super) fn multiply(
    cuda: &Cuda,
    p: &Product<'_>,
    matrix: &Matrix<3>,
    stream: Stream,
) -> Result<bool> {
    let Some((kernel, form)) = choose(cuda, p, matrix) else {
        return Ok(false);
    };
    let weight = &p.weights.weight;
    let (out_features, in_features) = (weight.layout.dim(0), weight.layout.dim(1));
    tracing::trace!(
        "{}: {} rows of {in_features} by {out_features} in {}, {form:?}",
        p.op,
        matrix.rows,
        weight.dtype,
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
        weight_stride: stride(weight) as i64,
        up_offset: up.map_or(0, |up| offset(weight, &up.weight)),
        x_stride: bytes(p.x, 0),
        out_stride: bytes(p.out, 1),
        residual_stride: bytes(other, 2),
        rows: matrix.rows as u32,
        out_features: out_features as u32,
        lines: (in_features * p.x.dtype.size() / VECTOR) as u32,
        steps: form.steps as u32,
        units_of_step: form.units_of_step as u32,
        steps_of_chunk: form.steps_of_chunk as u32,
        slots: form.slots as u32,
        in_flight: form.in_flight as u32,
        pitch: form.pitch as u32,
        whole_tiles: u32::from(form.whole_tiles),
        parts: form.parts as u32,
        columns_of_tile: form.columns_of_tile as u32,
        tiles: form.tiles as u32,
        one_more: form.one_more as u32,
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
        grid: [(form.clusters * form.parts) as u32, 1, 1],
        block: kernel.info.block,
        shared_bytes: form.shared_bytes as u32,
        cluster: form.parts as u32,
    };
    // SAFETY: the problem was checked: its tensors have the rows that the arguments describe, and where these
    // lie is as the kernel needs it. `Sizes::form` counted the shared memory of ring, rows and shares.
    unsafe { cuda.launch_shape(p.op, kernel, shape, &arguments, stream)? };
    Ok(true)
}

/// Bytes from one matrix to another.
pub(super) fn offset(from: &RawTensor, to: &RawTensor) -> i64 {
    (to.ptr.addr() as i64).wrapping_sub(from.ptr.addr() as i64)
}
