//! Products of many rows of 16 bits on Hopper, both as they are (`kernels/cuda/linear/e4m3_tiles`).
//!
//! Whether they are faster than others, and with which tiles, is a rule from times on an H100, of weights
//! of 4096 x 4096, 14336 x 4096, 4096 x 14336 and 32768 x 4096 and 16 to 8192 rows
//! (`kernels/cuda/linear/e4m3/LADDER.md`).

use super::Product;
use crate::alloc::push;
use crate::backend::Stream;
use crate::cuda::device::{Kernel, Resources};
use crate::cuda::images::linear_e4m3_tiles::Arguments;
use crate::cuda::linear::OP;
use crate::cuda::rows::Matrix;
use crate::cuda::tensor_map::{ALIGNMENT, COLUMNS, MAX_STRIDE, TensorMap};
use crate::cuda::{Cuda, Shape, VECTOR, check_blocks};
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::RawTensor;

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
pub(super) struct Sizes {
    pub rows: usize,
    pub out_features: usize,
    pub in_features: usize,
    pub multiprocessors: usize,
    /// Whether blocks have clusters.
    pub clusters: bool,
}

/// How a product is parted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Form {
    /// Of `x`, of a tile.
    rows: usize,
    /// Blocks of a cluster, which part rows of the weight.
    parts: usize,
}

impl Sizes {
    /// Rows of the weight of a tile, and weights of a row of a step.
    const COLUMNS: usize = 128;
    const STEP: usize = 128;
    /// Of those that there are kernels for.
    const ROWS: [usize; 3] = [64, 128, 256];
    /// More rows are faster by the decoded weight: 4096 by 14336 x 4096 took 787 µs, where decoding takes 76
    /// and the product 622.
    const MOST_ROWS: usize = 3072;

    /// Nanoseconds that a form takes: of each round of tiles its steps, and what comes before and behind
    /// them. Blocks without a cluster copy the first steps of a tile while they store the one before.
    fn cost(&self, form: Form) -> usize {
        let of_step = match form.rows {
            64 => 700,
            128 => 1000,
            _ => 1320,
        };
        let (before, around) = match form.parts {
            1 => (2000, 2000),
            _ => (0, 5500),
        };
        let tiles = self.out_features.div_ceil(Self::COLUMNS) * self.rows.div_ceil(form.rows);
        let rounds = (tiles * form.parts).div_ceil(self.multiprocessors.max(1));
        let steps = self.steps().div_ceil(form.parts);
        before + rounds * (steps * of_step + around)
    }

    /// Of a row of the weight.
    fn steps(&self) -> usize {
        self.in_features.div_ceil(Self::STEP)
    }

    /// Nanoseconds that kernels of few rows take, which read the weight for each 32 of them.
    fn cost_of_few(&self) -> usize {
        let million = self.out_features * self.in_features / 1000;
        let of_pass = |rows: usize| match rows {
            0 => 0,
            1..=16 => million * 350 / 1000,
            _ => million * 540 / 1000,
        };
        self.rows / 32 * of_pass(32) + of_pass(self.rows % 32) + 1000
    }

    /// The fastest form, if it is faster than what else there is for so many rows.
    pub fn form(&self, few_rows: usize) -> Option<Form> {
        let forms = Self::ROWS.into_iter().flat_map(|rows| {
            // Clusters of four were slower throughout.
            let parts = match self.clusters && self.steps() > 1 {
                true => 1..=2,
                false => 1..=1,
            };
            parts.map(move |parts| Form { rows, parts })
        });
        let form = forms.min_by_key(|form| (self.cost(*form), form.rows))?;
        let fastest = match self.rows <= few_rows {
            true => self.rows > 8 && self.cost(form) < self.cost_of_few(),
            false => self.rows <= Self::MOST_ROWS,
        };
        fastest.then_some(form)
    }
}

/// A product that these kernels serve, but for where its matrices lie.
pub(super) struct Tiles<'a> {
    kernel: &'a Kernel<Arguments>,
    form: Form,
    sizes: Sizes,
}

impl<'a> Tiles<'a> {
    /// If they are the fastest for it.
    pub fn new(cuda: &'a Cuda, p: &Product<'_>, rows: usize, few_rows: usize) -> Option<Self> {
        let layout = &p.weights.weight.layout;
        let sizes = Sizes {
            rows,
            out_features: layout.dim(0),
            in_features: layout.dim(1),
            multiprocessors: cuda.linear.blocks.multiprocessors(),
            clusters: cuda.resources.launches_early,
        };
        let form = sizes.form(few_rows)?;
        let kernel = cuda.linear.e4m3.tiles.iter().find(|k| {
            k.choices.x_dtype == p.x.dtype as u32 && k.choices.rows as usize == form.rows
        })?;
        Some(Tiles {
            kernel,
            form,
            sizes,
        })
    }

    /// Whether the copy engine reaches all of the weight and of equally spaced rows.
    pub fn reach(&self, p: &Product<'_>, matrix: &Matrix<3>) -> bool {
        let weight = &p.weights.weight;
        let x = p.x.ptr.addr() + matrix.offsets[0] * p.x.dtype.size();
        let strides = [
            matrix.strides[0] * p.x.dtype.size(),
            weight.layout.stride(0),
        ];
        let lines = [x, weight.ptr.addr(), strides[0], strides[1]];
        self.sizes.in_features.is_multiple_of(ALIGNMENT)
            && self.sizes.in_features > 0
            && lines.iter().all(|at| at.is_multiple_of(ALIGNMENT))
            && strides
                .iter()
                .all(|stride| *stride > 0 && *stride < MAX_STRIDE)
    }

    /// Queues a product of equally spaced rows that these kernels reach.
    pub fn multiply(
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
        let row_tiles = rows.div_ceil(of_tile);
        let tiles = out_features
            .div_ceil(Sizes::COLUMNS)
            .saturating_mul(row_tiles);
        let blocks = match parts {
            1 => tiles.min(self.sizes.multiprocessors.max(1)),
            _ => tiles.saturating_mul(parts),
        };
        let blocks = check_blocks(p.op, "x", blocks)?;
        tracing::trace!(
            "{}: {rows} rows of {in_features} by {out_features} in f8e4m3, as they are, {:?}",
            p.op,
            self.form,
        );
        let at = |t: &RawTensor, i: usize| t.ptr.wrapping_add(matrix.offsets[i] * t.dtype.size());
        let (other, epilogue) = p.epilogue.parts();
        let other = other.unwrap_or(p.out);
        let bias = p.weights.bias.as_ref();
        let scales = p.weights.scales;
        let stride = |t: &RawTensor, i: usize| matrix.strides[i] * t.dtype.size();
        let map = |ptr, dtype, [columns, rows]: [usize; 2], stride: usize, count: usize| {
            let driver = cuda.resources.primary.driver;
            let (sizes, strides) = ([columns, rows, 1, 1], [stride, 0, 0]);
            TensorMap::new(
                driver,
                p.op,
                ptr,
                dtype,
                sizes,
                &strides,
                [COLUMNS, count as u32, 1, 1],
            )
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
                of_tile,
            )?,
            // Of pairs of codes.
            weight: map(
                weight.ptr,
                DType::F16,
                [in_features / 2, out_features],
                weight.layout.stride(0) / 2,
                Sizes::COLUMNS,
            )?,
            weight_scale: scales.map_or(0, |scales| scales.ptr.addr() as u64),
            out: at(p.out, 1).addr() as u64,
            bias: bias.map_or(0, |b| b.ptr.addr() as u64),
            residual: at(other, 2).addr() as u64,
            out_stride: stride(p.out, 1) as i64,
            residual_stride: stride(other, 2) as i64,
            rows: rows as u32,
            out_features: out_features as u32,
            steps: self.sizes.steps() as u32,
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
        let shape = Shape {
            grid: [blocks, 1, 1],
            block: self.kernel.info.block,
            shared_bytes: self.kernel.info.shared_bytes,
            cluster: parts as u32,
        };
        // SAFETY: the problem was checked: its tensors have the rows that the maps and the arguments describe.
        unsafe { cuda.launch_shape(p.op, self.kernel, shape, &arguments, stream) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(rows: usize, out_features: usize, in_features: usize) -> Option<(usize, usize)> {
        let sizes = Sizes {
            rows,
            out_features,
            in_features,
            multiprocessors: 132,
            clusters: true,
        };
        sizes.form(64).map(|form| (form.rows, form.parts))
    }

    /// The fastest that were measured.
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
            assert_eq!(form(rows, out_features, in_features), expected, "{sizes:?}");
        }
    }
}
