//! Equally spaced rows of a product: who computes them, and their launch.

use std::fmt;

use contract::linear::Kind;

use super::{Choices, Epilogue, Product, TILE};
use crate::backend::Stream;
use crate::cuda::images::linear::Arguments;
use crate::cuda::rows::Matrix;
use crate::cuda::tuning::rules::products::{DEEP, MODERATE, NARROW};
use crate::cuda::tuning::{Linear, Server, Why};
use crate::cuda::{Cuda, VECTOR, cublaslt};
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::{RawTensor, Scratch};

/// Sizes of a product.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub rows: usize,
    pub columns: usize,
    pub in_features: usize,
}

impl Sizes {
    /// Whether kernels of this library are the fastest, as far as that depends on sizes.
    pub(in crate::cuda) fn are_few_rows(
        self,
        linear: &Linear,
        x: DType,
        with_workspace: bool,
    ) -> bool {
        let Sizes {
            rows,
            columns,
            in_features,
        } = self;
        linear.server(x, rows, columns, in_features, with_workspace) == Server::Own
    }
}

/// Equally spaced rows of a product.
pub(super) struct Part {
    rows: usize,
    in_features: usize,
    out_features: usize,
    x: usize,
    x_stride: usize,
    weight_stride: usize,
    out: usize,
    out_stride: usize,
    /// Residual or gate.
    other: usize,
    other_stride: usize,
}

impl Part {
    pub fn new(p: &Product<'_>, matrix: &Matrix<3>) -> Part {
        let (other, _) = p.epilogue.parts();
        let other = other.unwrap_or(p.out);
        let at = |t: &RawTensor, i: usize| t.ptr.addr() + matrix.offsets[i] * t.dtype.size();
        let weight = &p.weights.weight.layout;
        Part {
            rows: matrix.rows,
            in_features: weight.dim(1),
            out_features: weight.dim(0),
            x: at(p.x, 0),
            x_stride: matrix.strides[0],
            weight_stride: match weight.dim(0) {
                1 => weight.dim(1),
                _ => weight.stride(0),
            },
            out: at(p.out, 1),
            out_stride: matrix.strides[1],
            other: at(other, 2),
            other_stride: matrix.strides[2],
        }
    }

    /// Whether kernels of this library serve this part better than cuBLASLt.
    pub fn has_few_rows(&self, cuda: &Cuda, p: &Product<'_>, with_workspace: bool) -> bool {
        self.choose(cuda, p, with_workspace).0 == Server::Own
    }

    fn choose(&self, cuda: &Cuda, p: &Product<'_>, with_workspace: bool) -> (Server, Why) {
        let sizes = (self.rows, self.out_features, self.in_features);
        (cuda.resources.tuning.linear).choose(p.x.dtype, sizes, with_workspace)
    }

    /// Tells who computes this part, and why.
    fn tell(&self, p: &Product<'_>, server: &str, why: &dyn fmt::Display) {
        tracing::trace!(
            "{}: {} rows of {} by {} in {} by {server}: {why}",
            p.op,
            self.rows,
            self.in_features,
            self.out_features,
            p.x.dtype,
        );
    }

    /// Queues this part on cuBLASLt, if it serves it best.
    pub fn through_library(
        &self,
        cuda: &Cuda,
        p: &Product<'_>,
        scratch: Scratch,
        stream: Stream,
    ) -> Result<bool> {
        const OWN: &str = "kernels of this library";
        let Some(library) = &cuda.linear.library else {
            self.tell(p, OWN, &"there is no cuBLASLt");
            return Ok(false);
        };
        let (server, why_alone) = self.choose(cuda, p, false);
        let (server_with, why_with) = self.choose(cuda, p, true);
        let alone = server != Server::Own;
        let with = scratch.size > 0 && server_with != Server::Own;
        if !alone && !with {
            self.tell(p, OWN, &why_alone);
            return Ok(false);
        }
        let takes = |p: &cublaslt::Product| p.bias.is_none_or(|b| b.is_multiple_of(VECTOR));
        let Some(product) = self.for_library(p).filter(takes) else {
            self.tell(
                p,
                OWN,
                &"cuBLASLt takes no such dtypes, strides or epilogue",
            );
            return Ok(false);
        };
        let (scratch, why) = match with {
            true => (scratch, why_with),
            false => (Scratch::NONE, why_alone),
        };
        let primary = &cuda.resources.primary;
        let _entered = primary.enter(p.op)?;
        let _relaxed = primary.driver.relax_capture(p.op)?;
        // SAFETY: the problem was checked: its tensors have the rows that the part describes; the workspace was checked too.
        let multiplied = unsafe { library.multiply(p.op, &product, scratch, alone, stream) }?;
        match multiplied {
            true => self.tell(p, "cuBLASLt", &why),
            false => self.tell(p, OWN, &"cuBLASLt has no algorithm within the workspace"),
        }
        Ok(multiplied)
    }

    /// What the library is asked for, if it takes such a part.
    pub fn for_library(&self, p: &Product<'_>) -> Option<cublaslt::Product> {
        let weight = &p.weights.weight;
        let bias = p.weights.bias.as_ref();
        let bias_fits = bias.is_none_or(|b| b.dtype == p.out.dtype);
        let residual = match p.epilogue {
            Epilogue::Store => Some(None),
            Epilogue::Add(_) => Some(Some((self.other, self.other_stride))),
            Epilogue::Gate(..) | Epilogue::Gated(..) => None,
        };
        // Rows of inputs may overlap, which the library does not take.
        let apart = self.x_stride >= self.in_features
            && self.weight_stride >= self.in_features
            && (p.epilogue.parts().0.is_none() || self.other_stride >= self.out_features);
        let fits = self.in_features > 0 && weight.dtype == p.x.dtype && bias_fits && apart;
        residual.filter(|_| fits).map(|residual| cublaslt::Product {
            dtype: p.x.dtype,
            out_dtype: p.out.dtype,
            rows: self.rows,
            in_features: self.in_features,
            out_features: self.out_features,
            x: self.x,
            x_stride: self.x_stride,
            x_by_columns: false,
            weight: weight.ptr.addr(),
            weight_stride: self.weight_stride,
            weight_by_columns: false,
            bias: bias.map(|b| b.ptr.addr()),
            residual,
            out: self.out,
            out_stride: self.out_stride,
        })
    }

    /// Whether rows of x and of the weights can be read in accesses of `width` elements.
    fn in_accesses_of(&self, p: &Product<'_>, width: usize) -> bool {
        let weight = &p.weights.weight;
        self.in_features.is_multiple_of(width)
            && self.x_stride.is_multiple_of(width)
            && self.weight_stride.is_multiple_of(width)
            && self.x.is_multiple_of(width * p.x.dtype.size())
            && weight
                .ptr
                .addr()
                .is_multiple_of(width * weight.dtype.size())
    }

    /// The kernel that serves this part without cuBLASLt.
    fn choices(&self, p: &Product<'_>) -> Choices {
        const LINE: usize = 8;
        let deep = self.in_features >= DEEP;
        let (x, weight) = (p.x.dtype, p.weights.weight.dtype);
        let (kind, rows, width) = if x != DType::F32 && x == weight && self.in_accesses_of(p, LINE)
        {
            match self.rows {
                0..=8 => (Kind::Rows, 8, LINE),
                9..=16 => (Kind::Rows, 16, LINE),
                17..=MODERATE => (Kind::Rows, 32, LINE),
                _ => (Kind::Tiles, TILE, LINE),
            }
        } else if x == DType::F32 && x == weight && self.in_accesses_of(p, 4) {
            match self.rows {
                0..=1 => (Kind::RowsSimt, 1, 4),
                2..=8 if deep => (Kind::RowsDeep, 8, 4),
                2..=8 => (Kind::RowsSimt, 8, 4),
                9..=16 if deep && self.out_features > NARROW => (Kind::RowsDeep, 16, 4),
                9..=128 => (Kind::RowsSimt, 16, 4),
                _ => (Kind::TilesSimt, TILE, 1),
            }
        } else if x == DType::F32 && weight != DType::F32 && self.in_accesses_of(p, LINE) {
            match self.rows {
                0..=1 => (Kind::RowsSimt, 1, LINE),
                2..=8 => (Kind::RowsSimt, 8, LINE),
                9..=32 => (Kind::RowsSimt, 16, LINE),
                _ => (Kind::TilesSimt, TILE, 1),
            }
        } else {
            match self.rows {
                0..=16 => (Kind::RowsSimt, 4, 1),
                _ => (Kind::TilesSimt, TILE, 1),
            }
        };
        Choices {
            kind: kind.code(),
            x: x as u32,
            weight: weight as u32,
            rows: rows as u32,
            width: width as u32,
        }
    }

    pub fn launch(&self, cuda: &Cuda, p: &Product<'_>, stream: Stream) -> Result<()> {
        let choices = self.choices(p);
        let width = choices.width as usize;
        let row_tiles = self.rows.div_ceil(choices.rows as usize);
        let form = (cuda.linear).form(choices, self.out_features, row_tiles)?;
        let column_tiles = self.out_features.div_ceil(form.columns);
        let tiles = [Kind::Tiles, Kind::TilesSimt].map(Kind::code);
        let grid = if tiles.contains(&choices.kind) {
            [row_tiles as u32, column_tiles as u32, 1]
        } else {
            // Blocks take tiles by turns.
            [(row_tiles * column_tiles).min(form.resident) as u32, 1, 1]
        };
        tracing::trace!(
            "{}: {row_tiles} by {column_tiles} tiles of {} rows and {} columns, of which {} run at once",
            p.op,
            choices.rows,
            form.columns,
            form.resident,
        );
        let (_, epilogue) = p.epilogue.parts();
        let bias = p.weights.bias.as_ref();
        let bias_of = |dtype| match bias {
            Some(b) if b.dtype == dtype => b.ptr.addr() as u64,
            _ => 0,
        };
        let arguments = Arguments {
            x: self.x as u64,
            w: p.weights.weight.ptr.addr() as u64,
            out: self.out as u64,
            bias_f32: bias_of(DType::F32),
            bias_f16: bias_of(DType::F16),
            bias_bf16: bias_of(DType::Bf16),
            residual: self.other as u64,
            rows: self.rows as u32,
            in_features: self.in_features as u32,
            out_features: self.out_features as u32,
            bias_dtype: bias.map_or(0, |b| b.dtype as u32),
            epilogue: epilogue.code(),
            constant: u32::from(p.weights.constant),
            x_stride: (self.x_stride / width) as u64,
            w_stride: (self.weight_stride / width) as u64,
            out_stride: self.out_stride as u64,
            residual_stride: self.other_stride as u64,
            ..Arguments::ZERO
        };
        let arguments = match p.is_wide() {
            true => Arguments {
                wide: 1,
                out_f32: arguments.out,
                residual_f32: arguments.residual,
                ..arguments
            },
            false => arguments,
        };
        // SAFETY: the problem was checked: its tensors have the rows that the arguments describe.
        unsafe { cuda.launch_grid(p.op, &form.kernel, grid, &arguments, stream) }
    }
}
