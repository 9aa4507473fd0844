//! Products with weights of 8 or 2 bits whose scales lie apart: rows of `x` are rounded to codes in
//! the workspace, and kernels multiply codes. Few rows are rounded by the kernels that multiply (`few_codes`), and
//! on Hopper there are others for many (`wide`).

use super::wide::OfCodes;
use super::{Product, few, few_codes};
use crate::alloc::push;
use crate::backend::Stream;
use crate::cuda::device::{Kernel, Resources};
use crate::cuda::images::linear_codes::Arguments;
use crate::cuda::quantize::{self, Rounded};
use crate::cuda::rows::Matrix;
use crate::cuda::{Cuda, VECTOR};
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

/// Codes of a row that kernels read at a time, from 128 bytes of weights: rows in the workspace are
/// multiples of them.
const fn step(weight: DType) -> usize {
    match weight {
        DType::Ternary => 512,
        _ => 128,
    }
}

/// Bytes of the parts of a workspace: codes of so many rows, their scales, their sums.
fn parts(rows: usize, weights: &Weights) -> [usize; 3] {
    let k = weights.weight.layout.dim(1);
    let codes = k.next_multiple_of(step(weights.weight.dtype));
    let numbers = (rows * size_of::<f32>()).next_multiple_of(VECTOR);
    [rows * codes, numbers, numbers]
}

/// Bytes without which a product of so many rows of `x` is not computed.
pub(super) fn rounded_bytes(x: &RawTensor, weights: &Weights) -> usize {
    let bytes = parts(x.layout.num_rows(), weights)
        .into_iter()
        .sum::<usize>();
    bytes.next_multiple_of(Workspace::ALIGNMENT)
}

/// Queues a product. `scratch` has [`rounded_bytes`].
pub(super) fn multiply(
    cuda: &Cuda,
    p: &Product<'_>,
    scratch: Scratch,
    stream: Stream,
) -> Result<()> {
    let needed = rounded_bytes(p.x, p.weights);
    if scratch.size < needed {
        return Err(Error::WorkspaceTooSmall {
            op: p.op,
            required: needed,
            provided: scratch.size,
        });
    }
    let k = p.weights.weight.layout.dim(1);
    // One after the other on the stream, they share the workspace.
    for matrix in p.rows().matrices() {
        let [codes, scales, _] = parts(matrix.rows, p.weights);
        let rounded = Rounded {
            codes: scratch.ptr,
            stride: k.next_multiple_of(step(p.weights.weight.dtype)),
            scales: scratch.ptr.wrapping_add(codes),
            sums: scratch.ptr.wrapping_add(codes + scales),
        };
        let tiles = OfCodes::new(cuda, p, &matrix, &rounded, scratch.behind(needed));
        let is_for_few =
            tiles.is_none() || few_codes::are_faster_than_tiles(matrix.rows, &p.weights.weight);
        if is_for_few && few_codes::multiply(cuda, p, &matrix, stream)? {
            continue;
        }
        let x = RawTensor {
            ptr: p.x.ptr.wrapping_add(matrix.offsets[0] * p.x.dtype.size()),
            layout: Layout::strided(&[matrix.rows, k], &[matrix.strides[0], 1])?,
            ..*p.x
        };
        quantize::round_rows(cuda, p.op, &x, &rounded, stream)?;
        match tiles {
            Some(tiles) => tiles.multiply(cuda, p, (&matrix, &rounded), stream)?,
            None => multiply_codes(cuda, p, &matrix, &rounded, stream)?,
        }
    }
    Ok(())
}

/// Queues a product of equally spaced rows, whose codes are there.
fn multiply_codes(
    cuda: &Cuda,
    p: &Product<'_>,
    matrix: &Matrix<3>,
    x: &Rounded,
    stream: Stream,
) -> Result<()> {
    let weight = &p.weights.weight;
    let ternary = u32::from(weight.dtype == DType::Ternary);
    // Of both that serve the dtype, the one of few rows where it has all of them.
    let forms = cuda.linear.codes.iter();
    let form = forms
        .filter(|form| form.kernel.choices.ternary == ternary)
        .min_by_key(|form| {
            let of_tile = form.kernel.choices.rows as usize;
            (matrix.rows.div_ceil(of_tile), of_tile)
        });
    let Some(form) = form else {
        return Err(Error::Internal {
            op: p.op,
            message: text!("no kernel for {}", weight.dtype),
        });
    };
    let choices = form.kernel.choices;
    let (out_features, in_features) = (weight.layout.dim(0), weight.layout.dim(1));
    let steps = in_features.div_ceil(choices.step as usize);
    let tiles = out_features.div_ceil(choices.columns as usize);
    // Warps that share a tile: no more than there are steps, unless the device would have nothing
    // else to do.
    let warps = choices.warps as usize;
    let row_tiles = matrix.rows.div_ceil(choices.rows as usize);
    let mut split = steps.max(1).next_power_of_two().min(warps);
    while split < warps && tiles.div_ceil(warps / split) * row_tiles < form.resident {
        split *= 2;
    }
    let groups = tiles.div_ceil(warps / split) * row_tiles;
    // Blocks take groups by turns.
    let grid = groups.min(form.resident) as u32;

    let row_bytes = weight.dtype.row_bytes(in_features);
    let weight_stride = few::stride(weight);
    let (other, epilogue) = p.epilogue.parts();
    let other = other.unwrap_or(p.out);
    let at = |t: &RawTensor, i: usize| (t.ptr.addr() + matrix.offsets[i] * t.dtype.size()) as u64;
    let stride = |t: &RawTensor, i: usize| (matrix.strides[i] * t.dtype.size()) as i64;
    let aligned = |bytes: usize| bytes.is_multiple_of(VECTOR);
    let bias = p.weights.bias.as_ref();
    let scales = p.weights.scales;
    tracing::trace!(
        "{}: {} rows of {in_features} by {out_features} in {}, {split} of {warps} warps to a tile",
        p.op,
        matrix.rows,
        weight.dtype,
    );
    let arguments = Arguments {
        x: x.codes.addr() as u64,
        x_scale: x.scales.addr() as u64,
        x_sum: x.sums.addr() as u64,
        weight: weight.ptr.addr() as u64,
        weight_scale: scales.map_or(0, |scales| scales.ptr.addr() as u64),
        out: at(p.out, 1),
        bias: bias.map_or(0, |b| b.ptr.addr() as u64),
        residual: at(other, 2),
        weight_stride: weight_stride as i64,
        x_stride: x.stride as i64,
        out_stride: stride(p.out, 1),
        residual_stride: stride(other, 2),
        rows: matrix.rows as u32,
        out_features: out_features as u32,
        row_bytes: row_bytes as u32,
        rows_of_scale: scales.map_or(1, |scales| out_features / scales.len.max(1)) as u32,
        steps: steps as u32,
        row_tiles: row_tiles as u32,
        split_log2: split.trailing_zeros(),
        aligned: u32::from(aligned(weight.ptr.addr()) && aligned(weight_stride)),
        dtype: p.out.dtype as u32,
        bias_dtype: bias.map_or(0, |b| b.dtype as u32),
        epilogue: epilogue.code(),
        constant: u32::from(p.weights.constant),
    };
    // SAFETY: the problem was checked: its tensors have the rows that the arguments describe; the
    // workspace has the codes, whole steps of each row.
    unsafe { cuda.launch(p.op, &form.kernel, grid, &arguments, stream) }
}
