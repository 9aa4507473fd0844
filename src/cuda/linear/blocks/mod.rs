//! Products with weights in blocks.
//!
//! Few rows go to kernels that read the blocks as they are, and round `x` to integers of 16 bits; some
//! more, of 16 bits, to such as leave `x` as it is (`kernels/cuda/linear/blocks`). On Hopper one row and
//! two to eight have kernels of their own (`kernels/cuda/linear/one_row`, `few`). All else has the
//! matrix decoded to the dtype of `x`, in the workspace and in parts if it is large, and is a product of
//! floats then.

mod one_row;
mod tiles;

use super::few::{self, Norm, is_like, offset};
use super::{Epilogue, Product};
use crate::alloc::push;
use crate::backend::Stream;
use crate::cuda::device::{Kernel, Resources};
use crate::cuda::images::linear_blocks::Arguments;
use crate::cuda::rows::Matrix;
use crate::cuda::tuning::rules::products::{
    BLOCKS_FEW_COLUMNS, BLOCKS_FEW_ROWS, BLOCKS_TILES_LEAST_ROWS, BLOCKS_TILES_ROWS,
};
use crate::cuda::{Cuda, Shape, VECTOR};
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::problem::linear::Weights;
use crate::tensor::RawTensor;

pub(super) struct Kernels {
    kernels: Vec<Kernel<Arguments>>,
    one_row: one_row::Kernels,
    multiprocessors: usize,
    /// Bytes that memory moves in a microsecond, by its clock.
    bandwidth: usize,
}

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    let mut kernels = Vec::new();
    for kernel in resources.kernels::<Arguments>()? {
        push(super::OP, &mut kernels, kernel)?;
    }
    let properties = resources.primary.properties(super::OP)?;
    Ok(Kernels {
        kernels,
        one_row: one_row::kernels(resources)?,
        multiprocessors: properties.multiprocessors.max(1),
        bandwidth: properties.bandwidth,
    })
}

/// Whether a product with its norm and what it gates is one launch.
pub(super) fn fuses(cuda: &Cuda, p: &Product<'_>) -> bool {
    let weight = &p.weights.weight;
    let halves = matches!(p.x.dtype, DType::F16 | DType::Bf16);
    if few::serves(cuda, p) {
        return true;
    }
    if way(p.x, p.weights) != Way::Integers
        || !p
            .norm
            .is_none_or(|norm| halves && Norm::is_in_vectors(norm, p.x))
    {
        return false;
    }
    let lies_alike = match &p.epilogue {
        Epilogue::Gated(up, _) => way(p.x, up) == Way::Integers && is_like(&up.weight, weight),
        _ => true,
    };
    let up_is_in_lines = match &p.epilogue {
        Epilogue::Gated(up, _) => is_in_lines(&up.weight),
        _ => true,
    };
    lies_alike
        && p.rows().matrices().all(|matrix| {
            let a = arguments(p, &matrix);
            if one_row::serve(cuda, p, &a) {
                return true;
            }
            if !up_is_in_lines {
                return false;
            }
            let Some(form) = cuda.linear.blocks.choose(weight, matrix.rows) else {
                return false;
            };
            // Where shares will be is room for the sums of squares of parts of rows, and for their scales.
            let parts = weight.layout.dim(1).div_ceil(32 * 8) + 1;
            let room = form.warps * form.kernel.choices.sums_bytes as usize;
            let has_room = p.norm.is_none() || form.rows * parts * size_of::<f32>() <= room;
            a.aligned == Aligned::Lines as u32
                && (p.norm.is_none() || a.x_aligned == 2)
                && has_room
                && !is_for_few(cuda, p)
        })
}

/// Whether a product without its norm would be for kernels that do not take it with that.
fn is_for_few(cuda: &Cuda, p: &Product<'_>) -> bool {
    p.norm.is_some() && few::serves(cuda, &Product { norm: None, ..*p })
}

/// Whether rows of a weight in blocks are whole lines of 16 bytes.
fn is_in_lines(weight: &RawTensor) -> bool {
    let row = weight.dtype.row_bytes(weight.layout.dim(1));
    let stride = match weight.layout.dim(0) {
        1 => row,
        _ => weight.dtype.row_bytes(weight.layout.stride(0)),
    };
    [weight.ptr.addr(), stride, row]
        .iter()
        .all(|at| at.is_multiple_of(VECTOR))
}

/// How a product is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// By the blocks as they are, and `x` as integers.
    Integers,
    /// By the blocks and `x` as they are.
    Tiles,
    /// By the decoded weight ([`super::decoded`]).
    Decoded,
}

/// Integers are not for those whose bits of `x` all count, nor for rows that need more shared memory,
/// as integers, than every device has.
fn way(x: &RawTensor, weights: &Weights) -> Way {
    let rows = x.layout.num_rows();
    let halves = matches!(x.dtype, DType::F16 | DType::Bf16);
    let integers = !weights.float_activations()
        && weights.weight.layout.dim(1) <= BLOCKS_FEW_COLUMNS
        && rows <= BLOCKS_FEW_ROWS;
    match (integers, halves && rows <= BLOCKS_TILES_ROWS) {
        (true, tiles) if !tiles || rows < BLOCKS_TILES_LEAST_ROWS => Way::Integers,
        (_, true) => Way::Tiles,
        _ => Way::Decoded,
    }
}

/// Whether the blocks are read as they are.
pub(super) fn are_few_rows(x: &RawTensor, weights: &Weights) -> bool {
    way(x, weights) != Way::Decoded
}

/// A kernel for rows of a weight, and how a block of it is parted.
struct Form<'a> {
    kernel: &'a Kernel<Arguments>,
    /// Rows of `x` that it takes.
    rows: usize,
    warps: usize,
    /// Of a warp's ring: what it has and what it is copying.
    slots: usize,
    shared_bytes: usize,
}

impl Kernels {
    /// Of the device.
    pub fn multiprocessors(&self) -> usize {
        self.multiprocessors
    }

    /// The kernel for so many rows of `x`, which takes as many of them at a time as shared memory has
    /// room for.
    fn choose(&self, weight: &RawTensor, rows: usize) -> Option<Form<'_>> {
        /// Measured on an H200: with more, units are slower to come.
        const SLOTS: usize = 2;
        let of_format = || {
            let format = weight.dtype as u32;
            self.kernels
                .iter()
                .filter(move |k| k.choices.format == format && k.choices.x_dtype == 0)
        };
        let most = of_format().map(|k| k.choices.rows as usize).max()?;
        let mut at_once = rows.next_power_of_two().min(most);
        while at_once > 0 {
            let kernel = of_format()
                .filter(|k| k.choices.rows as usize >= at_once)
                .min_by_key(|k| k.choices.rows)?;
            let choices = kernel.choices;
            let thirty_twos = weight.layout.dim(1).div_ceil(32);
            let digits = thirty_twos * at_once * choices.x_bytes as usize;
            let of_warp = SLOTS * choices.slot_bytes as usize + choices.sums_bytes as usize;
            let most_warps = kernel.info.block[0] as usize / 32;
            // With half of the warps a pass over the weight takes longer, but less than a second pass.
            let fewest = if at_once == 1 { 1 } else { most_warps / 2 };
            let mut warps = most_warps;
            while warps >= fewest.max(1) {
                let shared_bytes = warps * of_warp + digits;
                if shared_bytes <= kernel.room as usize {
                    return Some(Form {
                        kernel,
                        rows: at_once,
                        warps,
                        slots: SLOTS,
                        shared_bytes,
                    });
                }
                warps /= 2;
            }
            at_once /= 2;
        }
        None
    }
}

/// Queues a product of few rows.
pub(super) fn multiply(cuda: &Cuda, p: &Product<'_>, stream: Stream) -> Result<()> {
    let way = way(p.x, p.weights);
    for matrix in p.rows().matrices() {
        let a = arguments(p, &matrix);
        if one_row::multiply(cuda, p, &a, stream)? || few::multiply(cuda, p, &matrix, stream)? {
            continue;
        }
        match way {
            Way::Tiles => tiles::multiply(cuda, p, &matrix, stream)?,
            _ => multiply_few(cuda, p, &matrix, stream)?,
        }
    }
    Ok(())
}

/// Where rows of a weight lie, as kernels are told.
enum Aligned {
    /// Anywhere.
    Bytes = 0,
    /// Where words of blocks may lie.
    Words = 1,
    /// Whole lines of 16 bytes, none of which has bytes of two rows.
    Lines = 2,
}

/// Units of a block of threads, which are multiplied by its number of warps in 32 bits.
const MAX_UNITS: usize = 1 << 24;

/// Queues a product of equally spaced rows.
fn multiply_few(cuda: &Cuda, p: &Product<'_>, matrix: &Matrix<3>, stream: Stream) -> Result<()> {
    let weight = &p.weights.weight;
    let kernels = &cuda.linear.blocks;
    let Some(form) = kernels.choose(weight, matrix.rows) else {
        return Err(Error::Internal {
            op: p.op,
            message: text!("no kernel for {}", weight.dtype),
        });
    };
    let choices = form.kernel.choices;
    let (out_features, in_features) = (weight.layout.dim(0), weight.layout.dim(1));
    let steps = in_features.div_ceil(choices.step as usize);
    let row_tiles = matrix.rows.div_ceil(form.rows);
    // A block for each multiprocessor, unless it had more units than it counts.
    let most_tiles = (MAX_UNITS / steps.max(1)).max(1);
    let columns = out_features
        .div_ceil(kernels.multiprocessors)
        .min(most_tiles * choices.columns as usize)
        .max(1);
    tracing::trace!(
        "{}: {} rows of {in_features} by {out_features} in {}, {} at a time, {columns} columns a block",
        p.op,
        matrix.rows,
        weight.dtype,
        form.rows,
    );
    let arguments = Arguments {
        steps: steps as u32,
        slots: form.slots as u32,
        rows_of_block_log2: form.rows.trailing_zeros(),
        columns_of_block: columns as u32,
        ..arguments(p, matrix)
    };
    let shape = Shape {
        grid: [out_features.div_ceil(columns) as u32, row_tiles as u32, 1],
        block: [form.warps as u32 * 32, 1, 1],
        shared_bytes: form.shared_bytes as u32,
        cluster: 1,
    };
    // SAFETY: the problem was checked: its tensors have the rows that the arguments describe, of whole
    // blocks. `choose` counted the shared memory that so many warps, slots and rows need.
    unsafe { cuda.launch_shape(p.op, form.kernel, shape, &arguments, stream) }
}

/// What kernels are told of a product, but for how it is parted.
fn arguments(p: &Product<'_>, matrix: &Matrix<3>) -> Arguments {
    let weight = &p.weights.weight;
    let (len, block_bytes) = weight.dtype.block();
    let (out_features, in_features) = (weight.layout.dim(0), weight.layout.dim(1));
    let row_bytes = weight.dtype.row_bytes(in_features);
    let weight_stride = match out_features {
        1 => row_bytes,
        _ => weight.dtype.row_bytes(weight.layout.stride(0)),
    };
    let (other, epilogue) = p.epilogue.parts();
    let other = other.unwrap_or(p.out);
    let at = |t: &RawTensor, i: usize| (t.ptr.addr() + matrix.offsets[i] * t.dtype.size()) as u64;
    let stride = |t: &RawTensor, i: usize| (matrix.strides[i] * t.dtype.size()) as i64;
    let (x, x_stride) = (at(p.x, 0), stride(p.x, 0));
    let bias = p.weights.bias.as_ref();
    // Words of blocks lie at multiples of four bytes where blocks do, else at even ones.
    let alignment = if block_bytes.is_multiple_of(4) { 4 } else { 2 };
    let address = weight.ptr.addr();
    let lines = [address, weight_stride, row_bytes];
    let aligned = match address.is_multiple_of(alignment) {
        _ if lines.iter().all(|at| at.is_multiple_of(VECTOR)) => Aligned::Lines,
        true => Aligned::Words,
        false => Aligned::Bytes,
    };
    let x_is_aligned = |bytes: usize| {
        x.is_multiple_of(bytes as u64) && x_stride.cast_unsigned().is_multiple_of(bytes as u64)
    };
    let x_aligned = match x_is_aligned(4 * p.x.dtype.size()) {
        true if x_is_aligned(VECTOR) => 2,
        four => u32::from(four),
    };
    let dtype = if p.is_wide() { DType::F32 } else { p.x.dtype };
    let norm = Norm::new(p.norm, p.x);
    let up = match &p.epilogue {
        Epilogue::Gated(up, _) => Some(up),
        _ => None,
    };
    Arguments {
        x,
        weight: weight.ptr.addr() as u64,
        out: at(p.out, 1),
        bias: bias.map_or(0, |b| b.ptr.addr() as u64),
        residual: at(other, 2),
        weight_bytes: ((out_features - 1) * weight_stride + row_bytes) as u64,
        weight_stride: weight_stride as i64,
        x_stride,
        out_stride: stride(p.out, 1),
        residual_stride: stride(other, 2),
        rows: matrix.rows as u32,
        out_features: out_features as u32,
        blocks: (in_features / len) as u32,
        gapless: u32::from(weight_stride == row_bytes),
        aligned: aligned as u32,
        x_aligned,
        bias_dtype: bias.map_or(0, |b| b.dtype as u32),
        epilogue: epilogue.code(),
        x_dtype: p.x.dtype as u32,
        dtype: dtype as u32,
        steps: 0,
        slots: 0,
        rows_of_block_log2: 0,
        columns_of_block: 0,
        parts: 1,
        across: 0,
        up_bias: up
            .and_then(|up| up.bias.as_ref())
            .map_or(0, |b| b.ptr.addr() as u64),
        norm: norm.gains,
        up_offset: up.map_or(0, |up| offset(weight, &up.weight)),
        up_bias_dtype: up
            .and_then(|up| up.bias.as_ref())
            .map_or(0, |b| b.dtype as u32),
        gated: u32::from(up.is_some()),
        norm_dtype: norm.dtype,
        norm_offset: norm.offset,
        norm_epsilon: norm.epsilon,
        norm_inverse_length: norm.inverse_length,
        constant: u32::from(p.weights.constant && up.is_none_or(|up| up.constant)),
    }
}
