//! Products with weights in blocks.
//!
//! Few rows go to kernels that read the blocks as they are. All else has the matrix decoded to the
//! dtype of `x`, in the workspace and in parts if it is large, and is a product of floats then.

use super::{Epilogue, Product, multiply_floats};
use crate::alloc::push;
use crate::backend::Stream;
use crate::cuda::device::{Kernel, Resources};
use crate::cuda::images::linear_blocks::Arguments;
use crate::cuda::rows::Matrix;
use crate::cuda::tuning::rules::products::{BLOCKS_FEW_ROWS, BLOCKS_PART_BYTES};
use crate::cuda::{Cuda, blocks};
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::layout::Layout;
use crate::problem::linear::Weights;
use crate::tensor::{RawTensor, Scratch, Workspace};

/// A kernel, and how many of its blocks the device runs at once.
pub(super) struct Form {
    kernel: Kernel<Arguments>,
    resident: usize,
}

pub(super) type Kernels = Vec<Form>;

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    let mut forms = Vec::new();
    for kernel in resources.kernels::<Arguments>()? {
        let resident = resources.resident_blocks(&kernel)?.max(1);
        push(super::OP, &mut forms, Form { kernel, resident })?;
    }
    Ok(forms)
}

/// Whether the blocks are read as they are: not for f32 of which all bits count.
pub(super) fn are_few_rows(x: &RawTensor, weights: &Weights) -> bool {
    let rounds = x.dtype != DType::F32 || !weights.float_activations;
    rounds && x.layout.num_rows() <= BLOCKS_FEW_ROWS
}

/// Columns of the output that are computed at a time from decoded weights.
fn columns_of_a_part(x: DType, weight: &RawTensor) -> usize {
    /// Tiles of all kernels for many rows are full.
    const MULTIPLE: usize = 256;
    let row = weight.layout.dim(1) * x.size();
    let most = BLOCKS_PART_BYTES.checked_div(row).unwrap_or(usize::MAX);
    let whole = (most / MULTIPLE * MULTIPLE).max(MULTIPLE);
    whole.min(weight.layout.dim(0))
}

/// Bytes for the decoded weights.
pub(super) fn decoded_bytes(x: &RawTensor, weights: &Weights) -> usize {
    if x.layout.num_rows() == 0 || are_few_rows(x, weights) {
        return 0;
    }
    let weight = &weights.weight;
    let columns = columns_of_a_part(x.dtype, weight);
    (columns * weight.layout.dim(1) * x.dtype.size()).next_multiple_of(Workspace::ALIGNMENT)
}

/// A product by the decoded weights of some columns.
struct Decoded {
    weights: Weights,
    epilogue: Epilogue,
    out: RawTensor,
}

impl Decoded {
    /// `len` columns from `start`; their weights are to lie at `memory`.
    fn new(p: &Product<'_>, start: usize, len: usize, memory: *mut u8) -> Result<Decoded> {
        let columns = |t: &RawTensor| t.narrowed(t.layout.rank() - 1, start, len);
        let in_features = p.weights.weight.layout.dim(1);
        let bias = p.weights.bias.as_ref().map(columns).transpose()?;
        Ok(Decoded {
            weights: Weights {
                weight: RawTensor {
                    ptr: memory,
                    dtype: p.x.dtype,
                    layout: Layout::contiguous(&[len, in_features])?,
                },
                bias,
                ..*p.weights
            },
            epilogue: match &p.epilogue {
                Epilogue::Store => Epilogue::Store,
                Epilogue::Add(residual) => Epilogue::Add(columns(residual)?),
                Epilogue::Gate(gate, activation) => Epilogue::Gate(columns(gate)?, *activation),
            },
            out: columns(p.out)?,
        })
    }

    fn product<'a>(&'a self, p: &Product<'a>) -> Product<'a> {
        Product {
            weights: &self.weights,
            epilogue: self.epilogue,
            out: &self.out,
            ..*p
        }
    }
}

/// As [`super::scratch_size`]: decoded weights, and behind them what their product has use for.
pub(super) fn scratch_size(cuda: &Cuda, p: &Product<'_>) -> Result<usize> {
    let weight = &p.weights.weight;
    let decoded = decoded_bytes(p.x, p.weights);
    if decoded == 0 {
        return Ok(0);
    }
    let columns = columns_of_a_part(p.x.dtype, weight);
    let part = Decoded::new(p, 0, columns, std::ptr::null_mut())?;
    Ok(decoded + super::scratch_size(cuda, &part.product(p))?)
}

/// Queues a product. `scratch` has [`decoded_bytes`], or what [`scratch_size`] said.
pub(super) fn multiply(
    cuda: &Cuda,
    p: &Product<'_>,
    scratch: Scratch,
    stream: Stream,
) -> Result<()> {
    if are_few_rows(p.x, p.weights) {
        for matrix in p.rows().matrices() {
            multiply_few(cuda, p, &matrix, stream)?;
        }
        return Ok(());
    }
    let weight = &p.weights.weight;
    let needed = decoded_bytes(p.x, p.weights);
    if scratch.size < needed {
        return Err(Error::WorkspaceTooSmall {
            op: p.op,
            required: needed,
            provided: scratch.size,
        });
    }
    let rest = Scratch {
        ptr: scratch.ptr.wrapping_add(needed),
        size: scratch.size - needed,
    };
    let out_features = weight.layout.dim(0);
    let at_once = columns_of_a_part(p.x.dtype, weight);
    for start in (0..out_features).step_by(at_once.max(1)) {
        let len = at_once.min(out_features - start);
        let part = Decoded::new(p, start, len, scratch.ptr)?;
        let matrix = weight.narrowed(0, start, len)?;
        blocks::decode(cuda, p.op, &matrix, &part.weights.weight, stream)?;
        multiply_floats(cuda, &part.product(p), rest, stream)?;
    }
    Ok(())
}

/// Queues a product of equally spaced rows.
fn multiply_few(cuda: &Cuda, p: &Product<'_>, matrix: &Matrix<3>, stream: Stream) -> Result<()> {
    let weight = &p.weights.weight;
    let [format, dtype] = [weight.dtype, p.x.dtype].map(|dtype| dtype as u32);
    let found = (cuda.linear.blocks.iter())
        .find(|form| (form.kernel.choices.format, form.kernel.choices.dtype) == (format, dtype));
    let Some(form) = found else {
        return Err(Error::Internal {
            op: p.op,
            message: text!("no kernel for {} by {}", p.x.dtype, weight.dtype),
        });
    };
    let choices = form.kernel.choices;
    let (len, block_bytes) = weight.dtype.block();
    let (out_features, in_features) = (weight.layout.dim(0), weight.layout.dim(1));
    let steps = in_features.div_ceil(choices.step as usize);
    let tiles = out_features.div_ceil(choices.columns as usize);
    // Warps that share a tile: no more than there are steps, unless the device would have nothing
    // else to do.
    let warps = choices.warps as usize;
    let mut split = steps.max(1).next_power_of_two().min(warps);
    while split < warps && tiles.div_ceil(warps / split) < form.resident {
        split *= 2;
    }
    let row_tiles = matrix.rows.div_ceil(choices.rows as usize);
    let groups = tiles.div_ceil(warps / split) * row_tiles;
    // Blocks take groups by turns.
    let grid = groups.min(form.resident) as u32;

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
    let four = 4 * p.x.dtype.size() as u64;
    let x_aligned = x.is_multiple_of(four) && x_stride.cast_unsigned().is_multiple_of(four);
    tracing::trace!(
        "{}: {} rows of {in_features} by {out_features} in {}, {split} of {warps} warps to a tile",
        p.op,
        matrix.rows,
        weight.dtype,
    );
    let arguments = Arguments {
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
        steps: steps as u32,
        row_tiles: row_tiles as u32,
        split_log2: split.trailing_zeros(),
        gapless: u32::from(weight_stride == row_bytes),
        aligned: u32::from(weight.ptr.addr().is_multiple_of(alignment)),
        x_aligned: u32::from(x_aligned),
        bias_dtype: bias.map_or(0, |b| b.dtype as u32),
        epilogue: epilogue.code(),
        wide: u32::from(p.is_wide()),
    };
    // SAFETY: the problem was checked: its tensors have the rows that the arguments describe, of whole
    // blocks.
    unsafe { cuda.launch(p.op, &form.kernel, grid, &arguments, stream) }
}
