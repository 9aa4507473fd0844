//! Products of few rows with weights of 8 or 2 bits whose scales lie apart: kernels round `x` themselves.

use super::{OP, Product, few};
use crate::alloc::push;
use crate::backend::Stream;
use crate::cuda::device::{Kernel, Resources};
use crate::cuda::images::linear_few_codes::Arguments;
use crate::cuda::rows::Matrix;
use crate::cuda::tuning::rules::products::{
    CODES_OF_I8, CODES_OF_TERNARY, CODES_ROWS, CODES_SMALL,
};
use crate::cuda::{Cuda, Shape, VECTOR};
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::RawTensor;

pub(super) type Kernels = Vec<Kernel<Arguments>>;

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    let mut kernels = Vec::new();
    for kernel in resources.kernels::<Arguments>()? {
        push(OP, &mut kernels, kernel)?;
    }
    Ok(kernels)
}

/// Bytes of the weight for a multiprocessor above which it has two blocks. Of fewer it is better that a block of the
/// next kernel finds room beside this one's, and has its first bytes come.
const MANY_BYTES: usize = 160 * 1024;

/// Bytes of a multiprocessor's shared memory that each block takes beside its own.
const RESERVED: usize = 1024;

/// How a product is parted.
struct Form {
    /// Of 16 rows of the weight.
    tiles: usize,
    blocks: usize,
    /// Bytes from one row of codes of `x` to the next, in shared memory.
    pitch: usize,
    shared_bytes: usize,
}

impl Form {
    /// None where codes and sums do not fit shared memory.
    fn new(
        kernel: &Kernel<Arguments>,
        rows: usize,
        weight: &RawTensor,
        multiprocessors: usize,
    ) -> Option<Form> {
        let choices = &kernel.choices;
        let (out_features, in_features) = (weight.layout.dim(0), weight.layout.dim(1));
        let tiles = out_features.div_ceil(choices.columns as usize);
        // Lanes of two rows read 64 bytes of each at a time, which are to lie in different banks.
        let pitch = in_features.next_multiple_of(choices.unit as usize);
        let pitch = pitch.next_multiple_of(128) + 64;
        let of = |of_multiprocessor: usize| {
            let blocks = tiles.min(of_multiprocessor * multiprocessors).max(1);
            let sums = tiles.div_ceil(blocks) * choices.columns as usize * size_of::<i32>();
            let bytes = choices.first_bytes as usize + rows.saturating_mul(pitch + sums);
            (blocks, bytes)
        };
        let room = kernel.room as usize;
        let is_large =
            out_features * weight.dtype.row_bytes(in_features) > multiprocessors * MANY_BYTES;
        let (blocks, shared_bytes) = match of(2) {
            // `room` is what one block can have; each takes what is reserved beside it.
            (blocks, bytes) if is_large && 2 * (bytes + RESERVED) <= room + RESERVED => {
                (blocks, bytes)
            }
            _ => of(1),
        };
        let fits = rows <= choices.rows as usize && shared_bytes <= room;
        (fits && tiles > 0 && in_features > 0).then_some(Form {
            tiles,
            blocks,
            pitch,
            shared_bytes,
        })
    }
}

/// Whether they are faster than the rounding of some rows in a launch of its own and whole tiles (`wide`).
pub(super) fn are_faster_than_tiles(rows: usize, weight: &RawTensor) -> bool {
    let (out_features, in_features) = (weight.layout.dim(0), weight.layout.dim(1));
    let most = match weight.dtype {
        DType::Ternary => CODES_OF_TERNARY,
        _ => CODES_OF_I8,
    };
    rows == 1
        || rows <= CODES_ROWS && rows * in_features <= most
        || out_features * in_features <= CODES_SMALL
}

/// Queues a product of equally spaced rows, if these kernels are for it.
pub(super) fn multiply(
    cuda: &Cuda,
    p: &Product<'_>,
    matrix: &Matrix<3>,
    stream: Stream,
) -> Result<bool> {
    let weight = &p.weights.weight;
    let ternary = u32::from(weight.dtype == DType::Ternary);
    let mut kernels = cuda.linear.few_codes.iter();
    let kernel =
        kernels.find(|k| k.choices.ternary == ternary && k.choices.x_dtype == p.x.dtype as u32);
    let multiprocessors = cuda.linear.blocks.multiprocessors();
    let form = kernel.and_then(|k| Some((k, Form::new(k, matrix.rows, weight, multiprocessors)?)));
    let Some((kernel, form)) = form else {
        return Ok(false);
    };
    let (out_features, in_features) = (weight.layout.dim(0), weight.layout.dim(1));
    tracing::trace!(
        "{}: {} rows of {in_features} by {out_features} in {}, {} blocks, which round",
        p.op,
        matrix.rows,
        weight.dtype,
        form.blocks,
    );
    let row_bytes = weight.dtype.row_bytes(in_features);
    let weight_stride = few::stride(weight);
    let (other, epilogue) = p.epilogue.parts();
    let other = other.unwrap_or(p.out);
    let at = |t: &RawTensor, i: usize| (t.ptr.addr() + matrix.offsets[i] * t.dtype.size()) as u64;
    let stride = |t: &RawTensor, i: usize| (matrix.strides[i] * t.dtype.size()) as i64;
    let lines = [
        at(p.x, 0) as usize,
        stride(p.x, 0) as usize,
        in_features * p.x.dtype.size(),
        weight.ptr.addr(),
        weight_stride,
        row_bytes,
    ];
    let bias = p.weights.bias.as_ref();
    let scales = p.weights.scales;
    let arguments = Arguments {
        x: at(p.x, 0),
        weight: weight.ptr.addr() as u64,
        weight_scale: scales.map_or(0, |scales| scales.ptr.addr() as u64),
        out: at(p.out, 1),
        bias: bias.map_or(0, |b| b.ptr.addr() as u64),
        residual: at(other, 2),
        x_stride: stride(p.x, 0),
        weight_stride: weight_stride as i64,
        out_stride: stride(p.out, 1),
        residual_stride: stride(other, 2),
        rows: matrix.rows as u32,
        rows_log2: matrix.rows.next_power_of_two().trailing_zeros(),
        in_features: in_features as u32,
        out_features: out_features as u32,
        row_bytes: row_bytes as u32,
        pitch: form.pitch as u32,
        rows_of_scale: scales.map_or(1, |scales| out_features / scales.len.max(1)) as u32,
        tiles_of_block: (form.tiles / form.blocks) as u32,
        one_more: (form.tiles % form.blocks) as u32,
        lines: u32::from(lines.iter().all(|bytes| bytes.is_multiple_of(VECTOR))),
        dtype: p.out.dtype as u32,
        bias_dtype: bias.map_or(0, |b| b.dtype as u32),
        epilogue: epilogue.code(),
        constant: u32::from(p.weights.constant),
    };
    let shape = Shape {
        grid: [form.blocks as u32, 1, 1],
        block: kernel.info.block,
        shared_bytes: form.shared_bytes as u32,
        cluster: 1,
    };
    // SAFETY: the problem was checked: its tensors have the rows that the arguments describe. `Form::new`
    // counted the shared memory of codes and sums.
    unsafe { cuda.launch_shape(p.op, kernel, shape, &arguments, stream)? };
    Ok(true)
}
