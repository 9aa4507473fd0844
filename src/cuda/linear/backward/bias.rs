//! The bias's gradient: a pass over `dout`, in which every block sums some columns of some rows, and
//! of many rows a second one over what the parts sum to.

use contract::linear_backward::{Kind, LANES};

use super::{OP, with_rows};
use crate::backend::Stream;
use crate::cuda::images::linear_backward::Arguments;
use crate::cuda::rows::Rows;
use crate::cuda::{Cuda, VECTOR, is_aligned};
use crate::dtype::DType;
use crate::error::Result;
use crate::layout::Layout;
use crate::tensor::{RawTensor, Scratch};

/// Blocks that share the rows of a bias's gradient, about, of a device of any size: what is
/// rounded where follows from the shape alone.
const BLOCKS: usize = 512;
/// Columns of a block, as far as the number of parts depends on them.
const STRIP: usize = 256;
/// Rows that a block sums at the least, in steps of which it sums more.
const LEAST_ROWS: usize = 32;

/// The sums of the columns of `dout`.
pub(super) struct Bias<'a> {
    dout: &'a RawTensor,
    out: &'a RawTensor,
    accumulate: bool,
    rows: usize,
    columns: usize,
    /// Rows of a part, and parts.
    chunk: usize,
    chunks: usize,
}

impl<'a> Bias<'a> {
    pub fn new(dout: &'a RawTensor, out: &'a RawTensor, accumulate: bool) -> Self {
        let (rows, columns) = (dout.layout.num_rows(), out.layout.dim(0));
        let wanted = (BLOCKS / columns.div_ceil(STRIP).max(1)).max(1);
        let chunk = rows.div_ceil(wanted).next_multiple_of(LEAST_ROWS);
        let chunk = chunk.max(LEAST_ROWS);
        Bias {
            dout,
            out,
            accumulate,
            rows,
            columns,
            chunk,
            chunks: rows.div_ceil(chunk).max(1),
        }
    }

    /// Bytes of what the parts sum to, f32.
    pub fn needed(&self) -> usize {
        match self.chunks {
            1 => 0,
            chunks => chunks * self.columns * size_of::<f32>(),
        }
    }

    pub fn queue(&self, cuda: &Cuda, scratch: Scratch, stream: Stream) -> Result<()> {
        if self.chunks == 1 {
            let adds = self.accumulate;
            return self.sum(
                cuda,
                (self.dout, self.rows),
                self.chunk,
                (self.out, adds),
                stream,
            );
        }
        let partial = RawTensor {
            ptr: scratch.ptr,
            dtype: DType::F32,
            layout: Layout::contiguous(&[self.chunks, self.columns])?,
        };
        self.sum(
            cuda,
            (self.dout, self.rows),
            self.chunk,
            (&partial, false),
            stream,
        )?;
        let last = (self.out, self.accumulate);
        self.sum(cuda, (&partial, self.chunks), self.chunks, last, stream)
    }

    /// Queues the sums of every `chunk` rows, each of which is a row of the output.
    fn sum(
        &self,
        cuda: &Cuda,
        (from, num_rows): (&RawTensor, usize),
        chunk: usize,
        (to, accumulate): (&RawTensor, bool),
        stream: Stream,
    ) -> Result<()> {
        let rows = Rows::new([&from.layout, &from.layout]);
        let vector = VECTOR / from.dtype.size();
        let in_vectors = self.columns.is_multiple_of(vector)
            && rows.aligned_to(vector)
            && is_aligned(from, vector);
        let width = if in_vectors { vector } else { 1 };
        let (dtype, out) = (from.dtype as u32, to.dtype as u32);
        let choices = [Kind::Bias.code(), dtype, dtype, out, width as u32];
        let kernel = cuda.linear.backward.get(choices)?;
        let arguments = Arguments {
            dout: from.ptr.addr() as u64,
            out: to.ptr.addr() as u64,
            columns: (self.columns / width) as u32,
            depth: num_rows as u32,
            chunk: chunk as u32,
            accumulate: u32::from(accumulate),
            out_stride: self.columns as u64,
            ..with_rows(rows.dims(), width)
        };
        let strips = (self.columns / width).div_ceil(LANES as usize);
        let chunks = num_rows.div_ceil(chunk).max(1);
        let grid = [strips as u32, chunks as u32, 1];
        // SAFETY: the problem was checked: its tensors have the rows that the arguments describe,
        // and the workspace has a row for each part.
        unsafe { cuda.launch_grid(OP, kernel, grid, &arguments, stream) }
    }
}
