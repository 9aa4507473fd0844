//! Products of rows of 16 bits by weights in blocks, or of 8-bit floats, on Hopper, both as they are
//! (`kernels/cuda/linear/wide`).
//!
//! Whether they are faster than others, and with which tiles, is a rule from times on an H100 and an H200
//! (`kernels/cuda/linear/wide/LADDER.md`).

use super::{Product, decoded};
use crate::alloc::push;
use crate::backend::Stream;
use crate::cuda::device::{Kernel, Resources};
use crate::cuda::images::linear_wide::Arguments;
use crate::cuda::linear::OP;
use crate::cuda::rows::Matrix;
use crate::cuda::tensor_map::{ALIGNMENT, COLUMNS, MAX_STRIDE, TensorMap};
use crate::cuda::tuning::rules::products::{BLOCKS_TILES_LEAST_ROWS, BLOCKS_TILES_ROWS, E4M3_ROWS};
use crate::cuda::{Cuda, Shape, VECTOR, check_blocks};
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::linear::Weights;
use crate::tensor::{RawTensor, Scratch};

pub(super) type Kernels = Vec<Kernel<Arguments>>;

/// None on other devices than those of Hopper.
pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    let mut kernels = Vec::new();
    for kernel in resources.kernels::<Arguments>()? {
        push(OP, &mut kernels, kernel)?;
    }
    Ok(kernels)
}

/// What a form depends on.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    rows: usize,
    out_features: usize,
    in_features: usize,
    multiprocessors: usize,
    /// Whether blocks have clusters.
    clusters: bool,
    /// Whether the weight is in blocks, not of 8-bit floats.
    blocks: bool,
    /// Of `x`, by blocks: fewer are faster by other kernels, or are to be more exact.
    least_rows: usize,
}

/// How a product is parted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Form {
    /// Of `x`, of a tile.
    rows: usize,
    /// Blocks of a cluster, which part rows of the weight.
    parts: usize,
}

impl Sizes {
    /// Rows of the weight of a tile.
    const COLUMNS: usize = 128;
    /// Weights of a row that the costs below are of.
    const STEP: usize = 256;
    /// More rows are faster by the decoded weight: 4096 by 14336 x 4096 in 8-bit floats took 787 µs, where
    /// decoding takes 76 and the product 622.
    const MOST_ROWS: usize = 3072;

    fn tiles(&self, form: Form) -> usize {
        self.out_features.div_ceil(Self::COLUMNS) * self.rows.div_ceil(form.rows)
    }

    /// Whether tiles are of few rows, of which a multiprocessor can have two blocks.
    fn is_of_few(&self, form: Form) -> bool {
        self.blocks && form.rows <= 64
    }

    /// Whether each block has a multiprocessor of its own. They are in groups, which clusters do not cross
    /// and larger ones do not fill.
    fn is_alone(&self, form: Form) -> bool {
        let multiprocessors = match form.parts {
            1 | 2 => self.multiprocessors,
            4 => self.multiprocessors * 7 / 8,
            _ => self.multiprocessors * 3 / 4,
        };
        !self.is_of_few(form) || self.tiles(form) * form.parts <= multiprocessors
    }

    /// Blocks that the device has at once.
    fn at_once(&self, form: Form) -> usize {
        self.multiprocessors.max(1) * if self.is_alone(form) { 1 } else { 2 }
    }

    /// Nanoseconds that a form takes: of each round of tiles its steps, and what comes before and behind
    /// them. Blocks without a cluster copy the first steps of a tile while they store the one before.
    fn cost(&self, form: Form) -> usize {
        let blocks = self.tiles(form) * form.parts;
        // Clusters of four do not come all at once then.
        let crowded = form.parts == 4 && blocks > self.multiprocessors;
        let (of_step, around, before) = match (form.rows, self.is_alone(form), form.parts) {
            (64, _, 1) if !self.blocks => (1400, 2000, 2000),
            (64, _, _) if !self.blocks => (1400, 5500, 0),
            (32, true, _) => (900, 3200, 0),
            (32, false, 8) => (2400, 8000, 0),
            (32, false, _) => (if crowded { 2700 } else { 1750 }, 4500, 0),
            (64, true, _) => (1050, 4000, 0),
            (64, false, 8) => (2700, 9600, 0),
            (64, false, _) => (if crowded { 3200 } else { 2000 }, 5200, 0),
            (128, _, 1) => (2000, 2000, 2000),
            (128, _, _) => (2000, 5500, 0),
            (_, _, 1) => (2640, 2000, 2000),
            _ => (2640, 5500, 0),
        };
        let rounds = blocks.div_ceil(self.at_once(form));
        let steps = self.in_features.div_ceil(Self::STEP).div_ceil(form.parts);
        before + rounds * (steps * of_step + around)
    }

    /// Nanoseconds that kernels of few rows by 8-bit floats take, which read the weight for each 32 of
    /// them.
    fn cost_of_few(&self) -> usize {
        let million = self.out_features * self.in_features / 1000;
        let of_pass = |rows: usize| match rows {
            0 => 0,
            1..=16 => million * 350 / 1000,
            _ => million * 540 / 1000,
        };
        self.rows / 32 * of_pass(32) + of_pass(self.rows % 32) + 1000
    }

    /// The fastest of the forms with so many rows, if it is faster than what else there is.
    fn form(&self, rows: impl Iterator<Item = usize>) -> Option<Form> {
        let forms = rows.flat_map(|rows| [1, 2, 4, 8].map(|parts| Form { rows, parts }));
        let steps = self.in_features.div_ceil(Self::STEP);
        let fits = |form: &Form| {
            form.parts == 1
                || self.clusters
                    && (form.parts <= 2 || self.is_of_few(*form))
                    // Each block has at least so many steps.
                    && form.parts * if self.is_of_few(*form) { 2 } else { 1 } <= steps
                    && self.tiles(*form) * form.parts <= self.at_once(*form)
        };
        let form = forms
            .filter(fits)
            .min_by_key(|form| (self.cost(*form), form.rows))?;
        let fastest = match self.rows {
            rows if rows > Self::MOST_ROWS => false,
            rows if self.blocks => rows >= self.least_rows,
            rows if rows <= E4M3_ROWS => rows > 8 && self.cost(form) < self.cost_of_few(),
            _ => true,
        };
        fastest.then_some(form)
    }
}

/// A product that these kernels serve, but for where its matrices lie.
struct Tiles<'a> {
    kernel: &'a Kernel<Arguments>,
    form: Form,
    sizes: Sizes,
}

/// A contract's `Blocks`, or 0 for 8-bit floats.
fn code(weight: DType) -> u32 {
    match weight {
        DType::F8E4M3 => 0,
        blocks => blocks as u32,
    }
}

/// Rows of `x` from which on these kernels take weights in blocks. Kernels of fewer rows round no weight, and are
/// those for a weight that asks for exact activations as far as they go.
fn least_rows(weights: &Weights) -> usize {
    match weights.weight.dtype {
        _ if weights.float_activations => BLOCKS_TILES_ROWS + 1,
        // 16 rows by 4096 x 4096 took 16.7 µs, where others take 13.5 (H200).
        DType::Q6K => 17,
        _ => BLOCKS_TILES_LEAST_ROWS,
    }
}

impl<'a> Tiles<'a> {
    /// If they are the fastest for it.
    fn new(cuda: &'a Cuda, p: &Product<'_>, rows: usize) -> Option<Self> {
        let Weights { weight, .. } = p.weights;
        let of_weight = |k: &&Kernel<Arguments>| {
            k.choices.x_dtype == p.x.dtype as u32 && k.choices.format == code(weight.dtype)
        };
        let kernels = || cuda.linear.wide.iter().filter(of_weight);
        let sizes = Sizes {
            rows,
            out_features: weight.layout.dim(0),
            in_features: weight.layout.dim(1),
            multiprocessors: cuda.linear.blocks.multiprocessors(),
            clusters: cuda.resources.launches_early,
            blocks: weight.dtype.is_in_blocks(),
            least_rows: least_rows(p.weights),
        };
        let form = sizes.form(kernels().map(|k| k.choices.rows as usize))?;
        let kernel = kernels().find(|k| k.choices.rows as usize == form.rows)?;
        Some(Tiles {
            kernel,
            form,
            sizes,
        })
    }
    /// Whether the copy engine reaches all of the weight and of equally spaced rows.
    fn reach(&self, p: &Product<'_>, matrix: &Matrix<3>) -> bool {
        let weight = &p.weights.weight;
        let x = p.x.ptr.addr() + matrix.offsets[0] * p.x.dtype.size();
        let strides = [matrix.strides[0] * p.x.dtype.size(), stride_of(weight)];
        let lines = [x, weight.ptr.addr(), strides[0], strides[1]];
        self.sizes.in_features.is_multiple_of(ALIGNMENT)
            && self.sizes.in_features > 0
            && lines.iter().all(|at| at.is_multiple_of(ALIGNMENT))
            && strides
                .iter()
                .all(|stride| *stride > 0 && *stride < MAX_STRIDE)
    }

    /// Queues a product of equally spaced rows that these kernels reach.
    fn multiply(
        &self,
        cuda: &Cuda,
        p: &Product<'_>,
        matrix: &Matrix<3>,
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
        } = self.form;
        let weight = &p.weights.weight;
        let choices = self.kernel.choices;
        let row_tiles = rows.div_ceil(of_tile);
        let tiles = self.sizes.tiles(self.form);
        let blocks = match parts {
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
        let map = |ptr, dtype, [columns, rows]: [usize; 2], stride: usize, counts: [u32; 2]| {
            let driver = cuda.resources.primary.driver;
            let (sizes, strides) = ([columns, rows, 1, 1], [stride, 0, 0]);
            let counts = [counts[0], counts[1], 1, 1];
            TensorMap::new(driver, p.op, ptr, dtype, sizes, &strides, counts)
        };
        // Tensor maps are made in a context, too.
        let _entered = cuda.resources.primary.enter(p.op)?;
        let aligned = [at(p.out, 1).addr(), stride(p.out, 1)];
        let arguments = Arguments {
            x: map(
                at(p.x, 0),
                p.x.dtype,
                [in_features, rows],
                matrix.strides[0],
                [COLUMNS, of_tile as u32],
            )?,
            // Bytes in pairs, which are no numbers.
            weight: map(
                weight.ptr,
                DType::F16,
                [weight.dtype.row_bytes(in_features) / 2, out_features],
                stride_of(weight) / 2,
                [choices.box_bytes / 2, choices.columns],
            )?,
            weight_scale: scales.map_or(0, |scales| scales.ptr.addr() as u64),
            out: at(p.out, 1).addr() as u64,
            bias: bias.map_or(0, |b| b.ptr.addr() as u64),
            residual: at(other, 2).addr() as u64,
            out_stride: stride(p.out, 1) as i64,
            residual_stride: stride(other, 2) as i64,
            rows: rows as u32,
            out_features: out_features as u32,
            steps: in_features.div_ceil(choices.step as usize) as u32,
            rows_of_scale: scales.map_or(1, |scales| out_features / scales.len.max(1)) as u32,
            row_tiles: row_tiles as u32,
            tiles: tiles as u32,
            parts: parts as u32,
            vectors: u32::from(aligned.iter().all(|at| at.is_multiple_of(VECTOR))),
            dtype: p.out.dtype as u32,
            bias_dtype: bias.map_or(0, |b| b.dtype as u32),
            epilogue: epilogue.code(),
            constant: u32::from(p.weights.constant),
        };
        // More than half of a multiprocessor's, where each block is to have one of its own: blocks of kernels
        // that are started early come by twos to some, and others have none.
        let room = self.kernel.room;
        let least = match self.sizes.is_alone(self.form) {
            true => (room / 2 + 1024).min(room),
            false => 0,
        };
        let shape = Shape {
            grid: [blocks, 1, 1],
            block: self.kernel.info.block,
            shared_bytes: choices.needed_bytes.max(least),
            cluster: parts as u32,
        };
        // SAFETY: the problem was checked: its tensors have the rows that the maps and the arguments describe.
        unsafe { cuda.launch_shape(p.op, self.kernel, shape, &arguments, stream) }
    }
}

/// Bytes from one row of a weight to the next.
fn stride_of(weight: &RawTensor) -> usize {
    match weight.layout.dim(0) {
        1 => weight.dtype.row_bytes(weight.layout.dim(1)),
        _ => weight.dtype.row_bytes(weight.layout.stride(0)),
    }
}

/// Queues a product, if these kernels are the fastest for it and reach its matrices. `scratch` has what
/// [`decoded::bytes`] or [`decoded::scratch_size`] said, though nothing is decoded here.
pub(super) fn multiply(
    cuda: &Cuda,
    p: &Product<'_>,
    scratch: Scratch,
    stream: Stream,
) -> Result<bool> {
    let rows = p.rows();
    // The matrices differ in their addresses only.
    let count = rows.matrices().next().map_or(0, |matrix| matrix.rows);
    let Some(tiles) = Tiles::new(cuda, p, count) else {
        return Ok(false);
    };
    if !rows.matrices().all(|matrix| tiles.reach(p, &matrix)) {
        return Ok(false);
    }
    decoded::check(p, scratch)?;
    for matrix in rows.matrices() {
        tiles.multiply(cuda, p, &matrix, stream)?;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(
        blocks: bool,
        rows: usize,
        out_features: usize,
        in_features: usize,
    ) -> Option<(usize, usize)> {
        let sizes = Sizes {
            rows,
            out_features,
            in_features,
            multiprocessors: 132,
            clusters: true,
            blocks,
            least_rows: 9,
        };
        let rows = if blocks {
            [32, 64, 256]
        } else {
            [64, 128, 256]
        };
        let form = sizes.form(rows.into_iter());
        form.map(|form| (form.rows, form.parts))
    }

    /// The fastest that were measured, of 8-bit floats.
    #[test]
    fn forms_are_those_that_were_fastest() {
        for (sizes, expected) in [
            ((8, 14336, 4096), None),
            ((16, 14336, 4096), None),
            ((16, 32768, 4096), None),
            ((32, 4096, 4096), None),
            ((32, 4096, 14336), None),
            ((32, 14336, 4096), Some((64, 1))),
            ((600, 129, 16), Some((64, 1))),
            ((64, 4096, 4096), Some((64, 2))),
            ((64, 14336, 4096), Some((64, 1))),
            ((64, 4096, 14336), Some((64, 2))),
            ((128, 14336, 4096), Some((128, 1))),
            ((128, 4096, 14336), Some((64, 2))),
            ((256, 4096, 4096), Some((128, 2))),
            ((256, 14336, 4096), Some((256, 1))),
            ((512, 4096, 4096), Some((256, 2))),
            ((512, 4096, 14336), Some((256, 2))),
            ((1024, 4096, 4096), Some((256, 1))),
            ((2048, 14336, 4096), Some((256, 1))),
            ((4096, 14336, 4096), None),
        ] {
            let (rows, out_features, in_features) = sizes;
            let found = form(false, rows, out_features, in_features);
            assert_eq!(found, expected, "{sizes:?}");
        }
    }

    /// The same of blocks.
    #[test]
    fn forms_of_blocks_are_those_that_were_fastest() {
        for (sizes, expected) in [
            ((8, 14336, 4096), None),
            ((32, 4096, 4096), Some((32, 2))),
            ((32, 14336, 4096), Some((32, 1))),
            ((32, 4096, 14336), Some((32, 8))),
            ((64, 14336, 4096), Some((64, 1))),
            ((128, 4096, 4096), Some((64, 2))),
            ((128, 14336, 4096), Some((64, 1))),
            ((128, 4096, 14336), Some((64, 2))),
            ((512, 4096, 4096), Some((256, 2))),
            ((512, 14336, 4096), Some((256, 1))),
            ((512, 4096, 14336), Some((256, 2))),
            ((2048, 14336, 4096), Some((256, 1))),
            ((4096, 14336, 4096), None),
        ] {
            let (rows, out_features, in_features) = sizes;
            let found = form(true, rows, out_features, in_features);
            assert_eq!(found, expected, "{sizes:?}");
        }
    }
}
