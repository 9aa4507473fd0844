//! Rows of weights in blocks, decoded on the GPU: those that ids name, or a matrix.

use super::device::Resources;
use super::images::blocks_rows::Arguments;
use super::rows::{Divisor, Launch, Rows};
use super::table::Table;
use super::{Cuda, VECTOR, check_blocks};
use crate::backend::Stream;
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::embedding::{self, Slice};
use crate::tensor::RawTensor;

/// The kernels, by format and dtype of what is decoded.
pub(crate) type Kernels = Table<Arguments, 2>;

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    Table::<Arguments, 2>::new("blocks", resources, |c| [c.format, c.dtype])
}

/// Weights that the smallest block of a grid covers.
const LEAST_PER_BLOCK: usize = 1024;
/// Weights of a thread.
const EACH: usize = 8;

/// Whether grids are large enough for `rows` of `columns`; `name` is whose rows they are.
pub(super) fn fit(op: &'static str, name: &'static str, rows: usize, columns: usize) -> Result<()> {
    let blocks = rows.saturating_mul(columns.div_ceil(LEAST_PER_BLOCK));
    check_blocks(op, name, blocks).map(drop)
}

/// Queues the decoding of a table's rows, into a row of `out` for each id. Ids outside the table are
/// seen to by the kernel.
pub(super) fn gather(
    cuda: &Cuda,
    op: &'static str,
    p: &embedding::Problem,
    stream: Stream,
) -> Result<()> {
    let (ids, out) = (&p.ids, &p.out);
    let rows = Rows::of_dims(ids.layout.rank(), [&ids.layout, &out.layout]);
    for launch in rows.launches() {
        let part = Part {
            ids: Some((ids, p.slice)),
            launch,
            vectors: rows.aligned_to_of(1, VECTOR / out.dtype.size()),
        };
        part.queue(cuda, op, &p.table, out, stream)?;
    }
    Ok(())
}

/// Queues the decoding of all rows of a matrix into those of `out`.
pub(super) fn decode(
    cuda: &Cuda,
    op: &'static str,
    matrix: &RawTensor,
    out: &RawTensor,
    stream: Stream,
) -> Result<()> {
    let rows = Rows::new([&out.layout, &out.layout]);
    for launch in rows.launches() {
        let part = Part {
            ids: None,
            launch,
            vectors: rows.aligned_to_of(1, VECTOR / out.dtype.size()),
        };
        part.queue(cuda, op, matrix, out, stream)?;
    }
    Ok(())
}

/// Rows of a launch: of ids, if there are any, and of the output.
struct Part<'a> {
    ids: Option<(&'a RawTensor, Slice)>,
    launch: Launch<2>,
    /// Whether rows of the output lie a multiple of a vector apart.
    vectors: bool,
}

impl Part<'_> {
    fn queue(
        &self,
        cuda: &Cuda,
        op: &'static str,
        table: &RawTensor,
        out: &RawTensor,
        stream: Stream,
    ) -> Result<()> {
        let Part {
            ids,
            launch,
            vectors,
        } = self;
        let kernel = cuda.blocks.get([table.dtype as u32, out.dtype as u32])?;
        let dim = table.layout.dim(1);
        let num_rows = launch.num_rows();
        let blocks_per_row = dim.div_ceil(kernel.choices.per_block as usize);
        let blocks = check_blocks(op, "ids", num_rows * blocks_per_row)?;
        if blocks == 0 {
            return Ok(());
        }
        let per_row = Divisor::new(blocks_per_row);
        let [size_1, size_2] = launch.divisors();
        let out_at = out.ptr.addr() + launch.offsets[1] * out.dtype.size();
        let bytes =
            |t: &RawTensor, dim: usize, i: usize| (launch.strides[dim][i] * t.dtype.size()) as i64;
        let of_ids = |dim: usize| ids.map_or(0, |(ids, _)| bytes(ids, dim, 0));
        let slice = ids.map_or(Slice::whole(table), |(_, slice)| slice);
        let arguments = Arguments {
            table: table.ptr.addr() as u64,
            ids: ids.map_or(0, |(ids, _)| {
                (ids.ptr.addr() + launch.offsets[0] * ids.dtype.size()) as u64
            }),
            out: out_at as u64,
            rows: table.layout.dim(0) as u64,
            begin: slice.begin as u64,
            vocab: slice.vocab as u64,
            table_stride: table.dtype.row_bytes(table.layout.stride(0)) as i64,
            ids_0: of_ids(0),
            ids_1: of_ids(1),
            ids_2: of_ids(2),
            out_0: bytes(out, 0, 1),
            out_1: bytes(out, 1, 1),
            out_2: bytes(out, 2, 1),
            length: (dim / EACH) as u32,
            wide_ids: u32::from(ids.is_some_and(|(ids, _)| ids.dtype == DType::I64)),
            even: u32::from(table.ptr.addr().is_multiple_of(2)),
            vectors: u32::from(*vectors && out_at.is_multiple_of(VECTOR)),
            blocks_per_row: per_row.size,
            blocks_per_row_multiplier: per_row.multiplier,
            blocks_per_row_shift: per_row.shift,
            size_1: size_1.size,
            size_1_multiplier: size_1.multiplier,
            size_1_shift: size_1.shift,
            size_2: size_2.size,
            size_2_multiplier: size_2.multiplier,
            size_2_shift: size_2.shift,
        };
        // SAFETY: the problem was checked: its tensors have the rows that the arguments describe, of
        // whole blocks.
        unsafe { cuda.launch(op, kernel, blocks, &arguments, stream) }
    }
}
