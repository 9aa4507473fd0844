//! The two products: who computes them, and their launch.

use contract::linear_backward::{Kind, TILE};

use super::{DIMS, OP, with_rows};
use crate::backend::Stream;
use crate::cuda::images::linear_backward::Arguments;
use crate::cuda::rows::{Matrix, Rows};
use crate::cuda::{Cuda, cublaslt};
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::linear::Gradient;
use crate::tensor::{RawTensor, Scratch};

/// The matrices that a product is cut into for cuBLASLt, at most, where rows are not equally
/// spaced: beyond it a kernel that takes them as they are is faster.
const MOST_MATRICES: usize = 16;

/// `dout W`, or `doutᵀ x`.
pub(super) struct Product<'a> {
    kind: Kind,
    dout: &'a RawTensor,
    by: &'a RawTensor,
    out: &'a RawTensor,
    accumulate: bool,
    /// Of `dout`, and of the tensor that has its rows too: `dx`, or `x`.
    all: Rows<2>,
    rows: usize,
    columns: usize,
    depth: usize,
}

impl<'a> Product<'a> {
    pub fn new(dout: &'a RawTensor, gradient: &'a Gradient, kind: Kind, accumulate: bool) -> Self {
        let Gradient { by, out } = gradient;
        let columns = |t: &RawTensor| t.layout.dim(t.layout.rank().saturating_sub(1));
        let num_rows = dout.layout.num_rows();
        let (other, rows, depth) = match kind {
            Kind::Weight => (by, columns(dout), num_rows),
            _ => (out, num_rows, columns(dout)),
        };
        Product {
            kind,
            dout,
            by,
            out,
            accumulate,
            all: Rows::new([&dout.layout, &other.layout]),
            rows,
            columns: columns(out),
            depth,
        }
    }

    fn is_of_weight(&self) -> bool {
        self.kind == Kind::Weight
    }

    /// Whether cuBLASLt takes it, part by part.
    fn is_for_library(&self) -> bool {
        let of_weight = self.is_of_weight();
        let count = self.all.matrices().take(MOST_MATRICES + 1).count();
        let in_f32 = self.out.dtype == DType::F32;
        let takes = self.out.dtype == self.dout.dtype || (of_weight && in_f32);
        let rounds_once = !of_weight || in_f32 || count == 1;
        // Rows of inputs may overlap, which the library does not take.
        let apart = |t: &RawTensor, stride: usize| {
            stride >= t.layout.dim(t.layout.rank().saturating_sub(1))
        };
        let other = if of_weight { self.by } else { self.out };
        let parameter = if of_weight { self.out } else { self.by };
        self.dout.dtype == self.by.dtype
            && takes
            && rounds_once
            && self.depth > 0
            && count <= MOST_MATRICES
            && apart(parameter, parameter_stride(parameter))
            && self.all.matrices().all(|matrix| {
                let strides = self.strides(&matrix);
                apart(self.dout, strides[0]) && apart(other, strides[1])
            })
    }

    /// Between rows of `dout` and of the tensor that has its rows too; a row alone has any.
    fn strides(&self, matrix: &Matrix<2>) -> [usize; 2] {
        match matrix.rows {
            1 if self.is_of_weight() => [self.rows, self.columns],
            1 => [self.depth, self.columns],
            _ => matrix.strides,
        }
    }

    /// Part `index` of the product, of these rows of `dout`.
    fn part(&self, index: usize, matrix: &Matrix<2>) -> cublaslt::Product {
        let at = |t: &RawTensor, i: usize| t.ptr.addr() + matrix.offsets[i] * t.dtype.size();
        let strides = self.strides(matrix);
        let common = cublaslt::Product {
            dtype: self.dout.dtype,
            out_dtype: self.out.dtype,
            rows: matrix.rows,
            in_features: self.depth,
            out_features: self.columns,
            x: at(self.dout, 0),
            x_stride: strides[0],
            x_by_columns: false,
            weight: self.by.ptr.addr(),
            weight_stride: parameter_stride(self.by),
            weight_by_columns: true,
            bias: None,
            residual: None,
            out: self.out.ptr.addr(),
            out_stride: parameter_stride(self.out),
        };
        if !self.is_of_weight() {
            let out = (at(self.out, 1), strides[1]);
            return cublaslt::Product {
                residual: self.accumulate.then_some(out),
                out: out.0,
                out_stride: out.1,
                ..common
            };
        }
        cublaslt::Product {
            rows: self.rows,
            in_features: matrix.rows,
            x_by_columns: true,
            weight: at(self.by, 1),
            weight_stride: strides[1],
            residual: self.adds(index).then_some((common.out, common.out_stride)),
            ..common
        }
    }

    /// The workspace with which the product is the fastest, in bytes. Data pointers are not looked
    /// at.
    pub fn workspace_size(&self, cuda: &Cuda) -> Result<usize> {
        let Some(library) = &cuda.linear.library else {
            return Ok(0);
        };
        // The matrices differ in their addresses only.
        let first = self.all.matrices().next().filter(|_| self.is_for_library());
        let Some(first) = first else {
            return Ok(0);
        };
        let primary = &cuda.resources.primary;
        let _entered = primary.enter(OP)?;
        let _relaxed = primary.driver.relax_capture(OP)?;
        library.workspace_size(OP, &self.part(0, &first).aligned())
    }

    /// Queues the product. `scratch` may be too small to be of use.
    pub fn queue(&self, cuda: &Cuda, scratch: Scratch, stream: Stream) -> Result<()> {
        if cuda.linear.library.is_none() || !self.is_for_library() {
            let (sizes, strides) = self.all.dims();
            let adds = self.accumulate;
            return self.launch(cuda, [0, 0], (sizes, strides), adds, stream);
        }
        for (i, matrix) in self.all.matrices().enumerate() {
            if self.through_library(cuda, (i, &matrix), scratch, stream)? {
                continue;
            }
            let (mut sizes, mut strides) = ([1; DIMS], [[0; 2]; DIMS]);
            (sizes[0], strides[0]) = (matrix.rows, matrix.strides);
            let adds = self.adds(i);
            self.launch(cuda, matrix.offsets, (sizes, strides), adds, stream)?;
        }
        Ok(())
    }

    /// Whether part `index` is added to what is there.
    fn adds(&self, index: usize) -> bool {
        self.accumulate || (self.is_of_weight() && index > 0)
    }

    /// Queues part `index`, of these rows, on cuBLASLt, if it has an algorithm.
    fn through_library(
        &self,
        cuda: &Cuda,
        (index, matrix): (usize, &Matrix<2>),
        scratch: Scratch,
        stream: Stream,
    ) -> Result<bool> {
        let Some(library) = &cuda.linear.library else {
            return Ok(false);
        };
        let primary = &cuda.resources.primary;
        let _entered = primary.enter(OP)?;
        let _relaxed = primary.driver.relax_capture(OP)?;
        let part = self.part(index, matrix);
        // SAFETY: the problem was checked: its tensors have the rows that the part describes, and
        // the workspace is the caller's.
        unsafe { library.multiply(OP, &part, scratch, true, stream) }
    }

    /// Queues the kernel that takes any dtypes, strides and alignment, for the rows that these
    /// sizes and strides give from `offsets` on.
    fn launch(
        &self,
        cuda: &Cuda,
        offsets: [usize; 2],
        rows: ([usize; DIMS], [[usize; 2]; DIMS]),
        adds: bool,
        stream: Stream,
    ) -> Result<()> {
        let at = |t: &RawTensor, offset: usize| (t.ptr.addr() + offset * t.dtype.size()) as u64;
        let num_rows = rows.0.iter().product::<usize>();
        let [dtype, by, out] = [self.dout, self.by, self.out].map(|t| t.dtype as u32);
        let kernel = (cuda.linear.backward).get([self.kind.code(), dtype, by, out, 1])?;
        let common = Arguments {
            dout: at(self.dout, offsets[0]),
            columns: self.columns as u32,
            accumulate: u32::from(adds),
            ..with_rows(rows, 1)
        };
        let (result_rows, arguments) = match self.is_of_weight() {
            true => {
                let arguments = Arguments {
                    by: at(self.by, offsets[1]),
                    out: at(self.out, 0),
                    rows: self.rows as u32,
                    depth: num_rows as u32,
                    out_stride: parameter_stride(self.out) as u64,
                    ..common
                };
                (self.rows, arguments)
            }
            false => {
                let arguments = Arguments {
                    by: at(self.by, 0),
                    out: at(self.out, offsets[1]),
                    rows: num_rows as u32,
                    depth: self.depth as u32,
                    weight_stride: parameter_stride(self.by) as u64,
                    ..common
                };
                (num_rows, arguments)
            }
        };
        let tiles = |size: usize| size.div_ceil(TILE as usize) as u32;
        let grid = [tiles(result_rows), tiles(self.columns), 1];
        // SAFETY: the problem was checked: its tensors have the rows that the arguments describe.
        unsafe { cuda.launch_grid(OP, kernel, grid, &arguments, stream) }
    }
}

/// Between rows of a matrix; a row alone has any.
fn parameter_stride(matrix: &RawTensor) -> usize {
    match matrix.layout.dim(0) {
        1 => matrix.layout.dim(1),
        _ => matrix.layout.stride(0),
    }
}
