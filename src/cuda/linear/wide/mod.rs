//! Products of rows of 16 bits by weights in blocks, or of 8-bit floats, and of rows of codes by codes, on
//! Hopper, both as they are (`kernels/cuda/linear/wide`).
//!
//! Rows that would leave most of a last tile empty are a second launch, with tiles of its own, where that is faster. Whether
//! these kernels are faster than others, and with which tiles, is a rule from times on an H100 and an H200
//! (`kernels/cuda/linear/wide/LADDER.md`).

mod form;
mod parts;

use self::form::{Form, Of, Part, Sizes};
use self::parts::Choice;
use super::{Product, few};
use crate::alloc::push;
use crate::backend::Stream;
use crate::cuda::claims;
use crate::cuda::device::{Kernel, Resources};
use crate::cuda::images::linear_wide::Arguments;
use crate::cuda::linear::OP;
use crate::cuda::quantize::Rounded;
use crate::cuda::remembered::Remembered;
use crate::cuda::rows::Matrix;
use crate::cuda::tensor_map::{ALIGNMENT, COLUMNS, MAX_STRIDE, TensorMap};
use crate::cuda::tuning::rules::products::{
    BLOCKS_TILES_LEAST_ROWS, BLOCKS_TILES_ROWS, WIDE_MOST_ROWS, WIDE_MOST_ROWS_Q6_K,
};
use crate::cuda::{Cuda, Shape, VECTOR, check_blocks};
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::linear::Weights;
use crate::tensor::{RawTensor, Scratch};

/// Kernels, and how products were parted.
pub(super) struct Kernels {
    all: Vec<Kernel<Arguments>>,
    chosen: Remembered<Key, Choice>,
}

/// Sizes, and the dtypes of `x` and of the weight.
type Key = (Sizes, DType, DType);

/// None on other devices than those of Hopper.
pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    let mut all = Vec::new();
    for kernel in resources.kernels::<Arguments>()? {
        push(OP, &mut all, kernel)?;
    }
    let chosen = Remembered::new(OP)?;
    Ok(Kernels { all, chosen })
}

/// A product that these kernels serve, but for where its matrices lie.
struct Tiles<'a> {
    kernel: &'a Kernel<Arguments>,
    form: Form,
    sizes: Sizes,
    launch: Launch,
    /// Whether each block has a multiprocessor of its own.
    alone: bool,
}

/// What a launch is of. The values are those that kernels know.
#[derive(Clone, Copy)]
enum Launch {
    All = 0,
    First = 1,
    Rest = 2,
}

/// What kernels are told of a weight's dtype: its value, or 0 for 8-bit floats.
fn code(weight: DType) -> u32 {
    match weight {
        DType::F8E4M3 => 0,
        other => other as u32,
    }
}

/// Rows of `x` as the copy engine finds them.
struct Lines {
    ptr: *mut u8,
    dtype: DType,
    /// Elements of that dtype, as is the stride.
    columns: usize,
    stride: usize,
    /// Of rows that were rounded to codes, their scales and sums.
    scales: u64,
    sums: u64,
}

impl Lines {
    /// Of `x` as it is.
    fn of(p: &Product<'_>, matrix: &Matrix<3>) -> Lines {
        Lines {
            ptr: p.x.ptr.wrapping_add(matrix.offsets[0] * p.x.dtype.size()),
            dtype: p.x.dtype,
            columns: p.x.layout.dim(p.x.layout.rank() - 1),
            stride: matrix.strides[0],
            scales: 0,
            sums: 0,
        }
    }

    /// Of its codes, in pairs, from row `first` on.
    fn of_codes(codes: &Rounded, first: usize) -> Lines {
        let of_rows = (first * size_of::<f32>()) as u64;
        Lines {
            ptr: codes.codes.wrapping_add(first * codes.stride),
            dtype: DType::F16,
            columns: codes.stride / 2,
            stride: codes.stride / 2,
            scales: codes.scales.addr() as u64 + of_rows,
            sums: codes.sums.addr() as u64 + of_rows,
        }
    }
}

/// Rows of `x` from which on these kernels take weights in blocks. Kernels of fewer rows round no weight, and are
/// those for a weight that asks for exact activations as far as they go.
fn least_rows(weights: &Weights) -> usize {
    match weights.float_activations() {
        true => BLOCKS_TILES_ROWS + 1,
        false => BLOCKS_TILES_LEAST_ROWS,
    }
}

/// Rows of `x` up to which these kernels take weights that can be decoded.
fn most_rows(weight: DType) -> usize {
    match weight {
        DType::Q6K => WIDE_MOST_ROWS_Q6_K,
        _ => WIDE_MOST_ROWS,
    }
}

/// The kernels for a product's dtypes.
fn kernels_of<'a>(cuda: &'a Cuda, p: &Product<'_>) -> impl Iterator<Item = &'a Kernel<Arguments>> {
    let weight = p.weights.weight.dtype;
    let x = match Of::new(weight).is_of_codes() {
        true => DType::I8,
        false => p.x.dtype,
    };
    (cuda.linear.wide.all.iter())
        .filter(move |k| k.choices.x_dtype == x as u32 && k.choices.format == code(weight))
}

impl<'a> Tiles<'a> {
    /// By the kernel whose form was chosen for some rows.
    fn new(cuda: &'a Cuda, p: &Product<'_>, part: Part, launch: Launch) -> Option<Self> {
        let Part { sizes, form } = part;
        let mut kernels = kernels_of(cuda, p);
        let kernel = kernels.find(|k| k.choices.rows as usize == form.rows)?;
        Some(Tiles {
            kernel,
            form,
            sizes,
            launch,
            alone: sizes.is_alone(form),
        })
    }

    /// Whether the copy engine reaches all of the weight and of equally spaced rows.
    fn reach(&self, p: &Product<'_>, x: &Lines) -> bool {
        let weight = &p.weights.weight;
        let strides = [x.stride * x.dtype.size(), few::stride(weight)];
        let lines = [x.ptr.addr(), weight.ptr.addr(), strides[0], strides[1]];
        self.sizes.in_features.is_multiple_of(ALIGNMENT)
            && self.sizes.in_features > 0
            && lines.iter().all(|at| at.is_multiple_of(ALIGNMENT))
            && strides
                .iter()
                .all(|stride| *stride > 0 && *stride < MAX_STRIDE)
    }

    /// Queues a product of equally spaced rows that these kernels reach. `scratch` has what the form needs.
    fn multiply(
        &self,
        cuda: &Cuda,
        p: &Product<'_>,
        (matrix, x): (&Matrix<3>, &Lines),
        scratch: Scratch,
        stream: Stream,
    ) -> Result<()> {
        let Sizes {
            rows,
            out_features,
            in_features,
            ..
        } = self.sizes;
        let Form {
            rows: of_tile,
            parts,
            shares,
            ..
        } = self.form;
        let weight = &p.weights.weight;
        let choices = self.kernel.choices;
        let row_tiles = rows.div_ceil(of_tile);
        let tiles = self.sizes.tiles(self.form);
        let blocks = match parts {
            _ if shares != 0 => shares,
            1 => tiles.min(self.sizes.at_once(self.form)),
            _ => tiles.saturating_mul(parts),
        };
        let blocks = check_blocks(p.op, "x", blocks)?;
        tracing::trace!(
            "{}: {rows} rows of {in_features} by {out_features} in {}, as they are, {:?}",
            p.op,
            weight.dtype,
            self.form,
        );
        let at = |t: &RawTensor, i: usize| t.ptr.wrapping_add(matrix.offsets[i] * t.dtype.size());
        let (other, epilogue) = p.epilogue.parts();
        let other = other.unwrap_or(p.out);
        let bias = p.weights.bias.as_ref();
        let scales = p.weights.scales;
        let stride = |t: &RawTensor, i: usize| matrix.strides[i] * t.dtype.size();
        let map = |ptr, dtype, sizes: [usize; 3], strides: [usize; 2], counts: [u32; 3]| {
            let driver = cuda.resources.primary.driver;
            let [columns, rows, more] = sizes;
            let counts = [counts[0], counts[1], counts[2], 1];
            let strides = [strides[0], strides[1], 0];
            TensorMap::new(
                driver,
                p.op,
                ptr,
                dtype,
                [columns, rows, more, 1],
                &strides,
                counts,
            )
        };
        // A row of codes has whole spans of 128 bytes (`codes::step`), and a box may have two of them.
        let span = COLUMNS as usize;
        let (of_x, between) = match self.sizes.of.is_of_codes() {
            true => ([span, rows, x.stride / span], [x.stride, span]),
            false => ([x.columns, rows, 1], [x.stride, 0]),
        };
        // Tensor maps are made in a context, too.
        let _entered = cuda.resources.primary.enter(p.op)?;
        let aligned = [
            at(p.out, 1).addr(),
            stride(p.out, 1),
            at(other, 2).addr(),
            stride(other, 2),
        ];
        let steps = in_features.div_ceil(choices.step as usize);
        let left = shares * size_of::<u64>();
        let (share, one_more) = match shares {
            0 => (0, 0),
            _ => (tiles * steps / shares, tiles * steps % shares),
        };
        let arguments = Arguments {
            x: map(
                x.ptr,
                x.dtype,
                of_x,
                between,
                [COLUMNS, choices.box_rows, choices.box_halves],
            )?,
            // Bytes in pairs, which are no numbers.
            weight: map(
                weight.ptr,
                DType::F16,
                [weight.dtype.row_bytes(in_features) / 2, out_features, 1],
                [few::stride(weight) / 2, 0],
                [choices.box_bytes / 2, choices.columns, 1],
            )?,
            x_scale: x.scales,
            x_sum: x.sums,
            weight_scale: scales.map_or(0, |scales| scales.ptr.addr() as u64),
            out: at(p.out, 1).addr() as u64,
            bias: bias.map_or(0, |b| b.ptr.addr() as u64),
            residual: at(other, 2).addr() as u64,
            // First the tiles that blocks hand over, then a word of each block.
            partial: scratch.ptr.addr() as u64,
            left: scratch
                .ptr
                .wrapping_add(Sizes::shares_bytes(self.form) - left)
                .addr() as u64,
            launch_tag: claims::tag(),
            out_stride: stride(p.out, 1) as i64,
            residual_stride: stride(other, 2) as i64,
            rows: rows as u32,
            out_features: out_features as u32,
            steps: steps as u32,
            rows_of_scale: scales.map_or(1, |scales| out_features / scales.len.max(1)) as u32,
            row_tiles: row_tiles as u32,
            tiles: tiles as u32,
            parts: parts as u32,
            share: share as u32,
            one_more: one_more as u32,
            launch: self.launch as u32,
            vectors: u32::from(aligned.iter().all(|at| at.is_multiple_of(VECTOR))),
            dtype: p.out.dtype as u32,
            bias_dtype: bias.map_or(0, |b| b.dtype as u32),
            epilogue: epilogue.code(),
            constant: u32::from(p.weights.constant),
        };
        // More than half of a multiprocessor's, where each block is to have one of its own: blocks of kernels
        // that are started early come by twos to some, and others have none.
        let room = self.kernel.room;
        let least = match self.alone {
            true => (room / 2 + 1024).min(room),
            false => 0,
        };
        let shape = Shape {
            grid: [blocks, 1, 1],
            block: self.kernel.info.block,
            shared_bytes: choices.needed_bytes.max(least),
            cluster: parts as u32,
        };
        // SAFETY: the problem was checked: its tensors have the rows that the maps and the arguments describe. The
        // form was chosen by the size of the workspace.
        unsafe { cuda.launch_shape(p.op, self.kernel, shape, &arguments, stream) }
    }
}

/// The rows of a product, in one part or two.
struct Parts<'a> {
    first: Tiles<'a>,
    rest: Option<Tiles<'a>>,
}

impl<'a> Parts<'a> {
    /// If these kernels are the fastest for it. `scratch`: bytes of workspace.
    fn new(cuda: &'a Cuda, p: &Product<'_>, rows: usize, scratch: usize) -> Option<Self> {
        let weight = &p.weights.weight;
        let sizes = Sizes {
            rows,
            out_features: weight.layout.dim(0),
            in_features: weight.layout.dim(1),
            multiprocessors: cuda.linear.blocks.multiprocessors(),
            clusters: cuda.resources.launches_early,
            of: Of::new(weight.dtype),
            least_rows: least_rows(p.weights),
            most_rows: most_rows(weight.dtype),
            scratch,
        };
        let whole = || {
            kernels_of(cuda, p).map(|k| Form {
                rows: k.choices.rows as usize,
                blocks: k.choices.blocks as usize,
                parts: 1,
                shares: 0,
            })
        };
        let key = (sizes, p.x.dtype, weight.dtype);
        let chosen = &cuda.linear.wide.chosen;
        let (first, rest) = chosen.or_choose(key, || sizes.parts(whole))?;
        let Some(part) = rest else {
            let first = Tiles::new(cuda, p, first, Launch::All)?;
            return Some(Parts { first, rest: None });
        };
        let mut rest = Tiles::new(cuda, p, part, Launch::Rest)?;
        // Few multiprocessors have all of them.
        rest.alone &= !part.runs_beside(&first);
        Some(Parts {
            first: Tiles::new(cuda, p, first, Launch::First)?,
            rest: Some(rest),
        })
    }

    fn tiles(&self) -> impl Iterator<Item = &Tiles<'a>> {
        std::iter::once(&self.first).chain(&self.rest)
    }

    /// Bytes of workspace, of both, which run at the same time.
    fn scratch(&self) -> usize {
        let bytes = self.tiles().map(|tiles| Sizes::shares_bytes(tiles.form));
        bytes.sum()
    }

    /// Queues a product of equally spaced rows that these kernels reach, which lie where `lines` says of those from some
    /// row on. `scratch` has what the forms need.
    fn multiply(
        &self,
        cuda: &Cuda,
        p: &Product<'_>,
        (matrix, lines): (&Matrix<3>, impl Fn(usize, &Matrix<3>) -> Lines),
        scratch: Scratch,
        stream: Stream,
    ) -> Result<()> {
        let (mut first, mut scratch) = (0, scratch);
        for tiles in self.tiles() {
            let part = matrix.part(first..first + tiles.sizes.rows);
            let x = lines(first, &part);
            tiles.multiply(cuda, p, (&part, &x), scratch, stream)?;
            first += tiles.sizes.rows;
            scratch = scratch.behind(Sizes::shares_bytes(tiles.form));
        }
        Ok(())
    }
}

/// Bytes of workspace with which a product is computed the fastest, or none if these kernels are not for it.
pub(super) fn scratch_size(cuda: &Cuda, p: &Product<'_>) -> usize {
    // The matrices differ in their addresses only.
    let count = p.rows().matrices().next().map_or(0, |matrix| matrix.rows);
    let parts = Parts::new(cuda, p, count, usize::MAX);
    parts.map_or(0, |parts| parts.scratch())
}

/// How a product is parted whose `x` is multiplied as it is, if these kernels are the fastest for it and reach its matrices.
fn parts<'a>(cuda: &'a Cuda, p: &Product<'_>, scratch: Scratch) -> Option<Parts<'a>> {
    let rows = p.rows();
    // The matrices differ in their addresses only.
    let count = rows.matrices().next()?.rows;
    let parts = Parts::new(cuda, p, count, scratch.size)?;
    let reached = |matrix: &Matrix<3>| parts.first.reach(p, &Lines::of(p, matrix));
    rows.matrices()
        .all(|matrix| reached(&matrix))
        .then_some(parts)
}

/// Whether [`multiply`] queues a product.
pub(super) fn serves(cuda: &Cuda, p: &Product<'_>, scratch: Scratch) -> bool {
    parts(cuda, p, scratch).is_some()
}

/// Queues a product, if these kernels are the fastest for it and reach its matrices.
pub(super) fn multiply(
    cuda: &Cuda,
    p: &Product<'_>,
    scratch: Scratch,
    stream: Stream,
) -> Result<bool> {
    let Some(parts) = parts(cuda, p, scratch) else {
        return Ok(false);
    };
    for matrix in p.rows().matrices() {
        let lines = |_, part: &Matrix<3>| Lines::of(p, part);
        parts.multiply(cuda, p, (&matrix, lines), scratch, stream)?;
    }
    Ok(true)
}

/// A product of equally spaced rows that are rounded to codes, and how these kernels part it.
pub(super) struct OfCodes<'a> {
    parts: Parts<'a>,
    scratch: Scratch,
}

impl<'a> OfCodes<'a> {
    /// None where they do not reach its matrices. `scratch` is what there is beside the codes.
    pub fn new(
        cuda: &'a Cuda,
        p: &Product<'_>,
        matrix: &Matrix<3>,
        codes: &Rounded,
        scratch: Scratch,
    ) -> Option<Self> {
        let parts = Parts::new(cuda, p, matrix.rows, scratch.size)?;
        let reached = parts.first.reach(p, &Lines::of_codes(codes, 0));
        reached.then_some(OfCodes { parts, scratch })
    }

    /// Queues the product, behind what writes the codes.
    pub fn multiply(
        &self,
        cuda: &Cuda,
        p: &Product<'_>,
        (matrix, codes): (&Matrix<3>, &Rounded),
        stream: Stream,
    ) -> Result<()> {
        let lines = |first, _: &Matrix<3>| Lines::of_codes(codes, first);
        (self.parts).multiply(cuda, p, (matrix, lines), self.scratch, stream)
    }
}
