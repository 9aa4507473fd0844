//! Products with weights that are 8-bit floats whose scales lie apart. Few rows go to kernels that read
//! both as they are (`kernels/cuda/linear/e4m3`); on Hopper, some and many of 16 bits to others
//! ([`super::wide`]). Else the weight is decoded ([`super::decoded`]).

use super::{Product, decoded};
use crate::alloc::push;
use crate::backend::Stream;
use crate::cuda::device::{Kernel, Resources};
use crate::cuda::images::linear_e4m3::Arguments;
use crate::cuda::rows::Matrix;
use crate::cuda::tuning::rules::products::E4M3_ROWS;
use crate::cuda::{Cuda, Shape, VECTOR, check_blocks};
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::tensor::{RawTensor, Scratch};

/// Of few rows, and those that decode.
pub(super) type Kernels = Vec<Kernel<Arguments>>;

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    let mut kernels = Vec::new();
    for kernel in resources.kernels::<Arguments>()? {
        push(super::OP, &mut kernels, kernel)?;
    }
    Ok(kernels)
}

/// Whether the weight is read as it is on every device.
pub(super) fn are_few_rows(x: &RawTensor) -> bool {
    x.layout.num_rows() <= E4M3_ROWS
}

/// What all kernels are told of a weight.
fn of_weight(p: &Product<'_>, weight: &RawTensor) -> Arguments {
    let (out_features, in_features) = (weight.layout.dim(0), weight.layout.dim(1));
    let weight_stride = match out_features {
        1 => in_features,
        _ => weight.layout.stride(0),
    };
    let scales = p.weights.scales;
    let lines = [weight.ptr.addr(), weight_stride];
    Arguments {
        weight: weight.ptr.addr() as u64,
        weight_scale: scales.map_or(0, |scales| scales.ptr.addr() as u64),
        weight_stride: weight_stride as i64,
        out_features: out_features as u32,
        in_features: in_features as u32,
        rows_of_scale: scales.map_or(1, |scales| p.weights.out_features() / scales.len.max(1))
            as u32,
        aligned: u32::from(lines.iter().all(|at| at.is_multiple_of(VECTOR))),
        ..Arguments::ZERO
    }
}

/// Queues the decoding of `matrix`, the weight's rows from `start` on, to `to`, which is contiguous.
pub(super) fn decode(
    cuda: &Cuda,
    p: &Product<'_>,
    (start, matrix): (usize, &RawTensor),
    to: &RawTensor,
    stream: Stream,
) -> Result<()> {
    let mut kernels = cuda.linear.e4m3.iter();
    let kernel = kernels
        .find(|k| k.choices.rows == 0 && k.choices.x_dtype == to.dtype as u32)
        .ok_or_else(|| no_kernel(p, to.dtype))?;
    let (rows, in_features) = (matrix.layout.dim(0), matrix.layout.dim(1));
    let of_row = in_features.div_ceil(kernel.choices.step as usize);
    let blocks = check_blocks(p.op, "weight", rows.saturating_mul(of_row))?;
    if blocks == 0 {
        return Ok(());
    }
    let out_stride = in_features * to.dtype.size();
    let lines = [to.ptr.addr(), out_stride];
    let arguments = Arguments {
        out: to.ptr.addr() as u64,
        out_stride: out_stride as i64,
        first: start as u32,
        x_aligned: u32::from(lines.iter().all(|at| at.is_multiple_of(VECTOR))),
        ..of_weight(p, matrix)
    };
    // SAFETY: the problem was checked: the matrix is rows of the weight, and the workspace has as many.
    unsafe { cuda.launch(p.op, kernel, blocks, &arguments, stream) }
}

/// Queues a product. `scratch` has what [`decoded::bytes`] or [`decoded::scratch_size`] said, whether or not
/// the weight is decoded here.
pub(super) fn multiply(
    cuda: &Cuda,
    p: &Product<'_>,
    scratch: Scratch,
    stream: Stream,
) -> Result<()> {
    decoded::check(p, scratch)?;
    if !are_few_rows(p.x) {
        return decoded::multiply(cuda, p, scratch, stream);
    }
    for matrix in p.rows().matrices() {
        multiply_rows(cuda, p, &matrix, stream)?;
    }
    Ok(())
}

/// The kernel that reads a weight as it is the least often, for so many rows at a time and not many more; of
/// two the one with wide tiles, which load `x` less often, unless narrow ones are no more than multiprocessors.
fn kernel_of_rows<'a>(
    cuda: &'a Cuda,
    p: &Product<'_>,
    rows: usize,
) -> Result<&'a Kernel<Arguments>> {
    let kernels = || {
        let of_rows =
            |k: &&Kernel<Arguments>| k.choices.rows != 0 && k.choices.x_dtype == p.x.dtype as u32;
        cuda.linear.e4m3.iter().filter(of_rows)
    };
    let columns = |k: &Kernel<Arguments>| k.choices.columns as usize;
    let narrow = kernels().map(columns).min().unwrap_or(1);
    let tiles = p.weights.weight.layout.dim(0).div_ceil(narrow);
    let wide = tiles > cuda.linear.blocks.multiprocessors();
    kernels()
        .min_by_key(|k| {
            let of_tile = k.choices.rows as usize;
            let is_other = (columns(k) > narrow) != wide;
            (rows.div_ceil(of_tile), of_tile, is_other)
        })
        .ok_or_else(|| no_kernel(p, p.x.dtype))
}

/// Queues a product of equally spaced rows.
fn multiply_rows(cuda: &Cuda, p: &Product<'_>, matrix: &Matrix<3>, stream: Stream) -> Result<()> {
    let kernel = kernel_of_rows(cuda, p, matrix.rows)?;
    let choices = kernel.choices;
    let (out_features, in_features) = {
        let layout = &p.weights.weight.layout;
        (layout.dim(0), layout.dim(1))
    };
    let row_tiles = matrix.rows.div_ceil(choices.rows as usize);
    // Blocks of as many tiles as others, and no more of them than multiprocessors.
    let tiles = out_features.div_ceil(choices.columns as usize);
    let of_block = tiles.div_ceil(cuda.linear.blocks.multiprocessors()).max(1);
    let mut warps = kernel.info.block[0] as usize / 32;
    let room = kernel.room as usize;
    let shared = |warps: usize| warps * choices.warp_bytes as usize;
    while warps > 1 && shared(warps) > room {
        warps /= 2;
    }
    // More than half of a multiprocessor's: where two blocks fit, those of kernels that are started early come
    // by twos to some multiprocessors, and others have none (1.2 to 1.4 times as long on an H100).
    let shared_bytes = shared(warps).max((room / 2 + 1024).min(room));
    tracing::trace!(
        "{}: {} rows of {in_features} by {out_features} in f8e4m3, {} at a time, {of_block} tiles a block of {warps} warps",
        p.op,
        matrix.rows,
        choices.rows,
    );
    let (other, epilogue) = p.epilogue.parts();
    let other = other.unwrap_or(p.out);
    let at = |t: &RawTensor, i: usize| (t.ptr.addr() + matrix.offsets[i] * t.dtype.size()) as u64;
    let stride = |t: &RawTensor, i: usize| (matrix.strides[i] * t.dtype.size()) as i64;
    let bias = p.weights.bias.as_ref();
    let (x, x_stride) = (at(p.x, 0), stride(p.x, 0));
    let lines = [x, x_stride.cast_unsigned()];
    let arguments = Arguments {
        x,
        out: at(p.out, 1),
        bias: bias.map_or(0, |b| b.ptr.addr() as u64),
        residual: at(other, 2),
        x_stride,
        out_stride: stride(p.out, 1),
        residual_stride: stride(other, 2),
        rows: matrix.rows as u32,
        steps: in_features.div_ceil(choices.step as usize) as u32,
        x_aligned: u32::from(lines.iter().all(|at| at.is_multiple_of(VECTOR as u64))),
        dtype: p.out.dtype as u32,
        bias_dtype: bias.map_or(0, |b| b.dtype as u32),
        epilogue: epilogue.code(),
        constant: u32::from(p.weights.constant),
        ..of_weight(p, &p.weights.weight)
    };
    let shape = Shape {
        grid: [tiles.div_ceil(of_block) as u32, row_tiles as u32, 1],
        block: [warps as u32 * 32, 1, 1],
        shared_bytes: shared_bytes as u32,
        cluster: 1,
    };
    // SAFETY: the problem was checked: its tensors have the rows that the arguments describe. Shared memory
    // has what each warp needs.
    unsafe { cuda.launch_shape(p.op, kernel, shape, &arguments, stream) }
}

fn no_kernel(p: &Product<'_>, dtype: DType) -> Error {
    Error::Internal {
        op: p.op,
        message: text!("no kernel for {dtype} by f8e4m3"),
    }
}
