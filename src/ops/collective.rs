//! What collectives have in common: dtypes, counts, and parts of tensors.

use crate::comm::Comm;
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::layout::MAX_RANK;
use crate::ops::check::{Arg, list};
use crate::problem::collective::{Parts, ReduceOp};
use crate::tensor::RawTensor;

/// What can be moved.
pub(crate) const MOVED: [DType; 7] = [
    DType::F32,
    DType::F16,
    DType::Bf16,
    DType::I32,
    DType::I64,
    DType::I8,
    DType::Bool,
];

/// What can be reduced.
pub(crate) const NUMBERS: [DType; 6] = [
    DType::F32,
    DType::F16,
    DType::Bf16,
    DType::I32,
    DType::I64,
    DType::I8,
];

/// A tensor that is moved: contiguous, with rows along its first dimension.
pub(crate) fn moved<'a>(
    op: &'static str,
    name: &'static str,
    tensor: &'a RawTensor,
) -> Result<Arg<'a>> {
    let arg = Arg::new(op, name, tensor).min_rank(1)?;
    one_of(op, name, tensor.dtype, &MOVED)?;
    arg.contiguous()
}

/// A tensor that is reduced.
pub(crate) fn reduced<'a>(
    op: &'static str,
    name: &'static str,
    tensor: &'a RawTensor,
    by: ReduceOp,
) -> Result<Arg<'a>> {
    let arg = Arg::new(op, name, tensor).min_rank(1)?;
    one_of(op, name, tensor.dtype, &NUMBERS)?;
    if by == ReduceOp::Avg && !tensor.dtype.is_float() {
        let problem = text!(
            "has dtype {}, allowed with avg: {}",
            tensor.dtype,
            list(DType::FLOATS)
        );
        return Err(Error::invalid(op, name, problem));
    }
    arg.contiguous()
}

/// The dtype is one of `allowed`. No backend could take another: blocks and codes have no meaning
/// without their rows.
fn one_of(op: &'static str, name: &'static str, dtype: DType, allowed: &[DType]) -> Result<()> {
    if allowed.contains(&dtype) {
        return Ok(());
    }
    let problem = text!("has dtype {dtype}, allowed: {}", list(allowed));
    Err(Error::invalid(op, name, problem))
}

/// Elements of a row.
pub(crate) fn row(tensor: &RawTensor) -> usize {
    tensor.layout.shape().iter().skip(1).product()
}

/// The rows of a tensor divided among the ranks, evenly or by `counts`.
///
/// # Errors
/// They do not divide evenly; counts are not one for each rank, negative, or not as many as the rows.
pub(crate) fn parts<'a>(
    op: &'static str,
    comm: &Comm,
    (name, tensor): (&'static str, &RawTensor),
    (counts_name, counts): (&'static str, Option<&'a [i64]>),
) -> Result<Parts<'a>> {
    let (rows, size) = (tensor.layout.dim(0), comm.size());
    let Some(counts) = counts else {
        if rows.is_multiple_of(size) {
            return Ok(Parts::Even(rows / size));
        }
        let problem = text!("has {rows} rows, which {size} ranks do not share evenly");
        return Err(Error::invalid(op, name, problem));
    };
    if counts.len() != size {
        let problem = text!("has {} entries, comm has {size} ranks", counts.len());
        return Err(Error::invalid(op, counts_name, problem));
    }
    let mut total = 0usize;
    for (rank, count) in counts.iter().enumerate() {
        let sum = usize::try_from(*count)
            .ok()
            .and_then(|count| total.checked_add(count));
        total = sum.ok_or_else(|| {
            let problem = text!("has {count} for rank {rank}, allowed: 0 to {rows}");
            Error::invalid(op, counts_name, problem)
        })?;
    }
    if total != rows {
        let problem = text!("add up to {total}, {name} has {rows} rows");
        return Err(Error::invalid(op, counts_name, problem));
    }
    Ok(Parts::Each(counts))
}

/// A rank's part of a tensor.
///
/// # Errors
/// None, of parts that [`parts`] gave.
pub(crate) fn part_of(tensor: &RawTensor, parts: Parts<'_>, rank: usize) -> Result<RawTensor> {
    tensor.narrowed(0, parts.before(rank), parts.of(rank))
}

/// Whether a tensor is a rank's part of another, by its address: what is in place. Where there is no
/// address only a query is made, whose answer is the same.
pub(crate) fn is_part(part: &RawTensor, whole: &RawTensor, parts: Parts<'_>, rank: usize) -> bool {
    !part.ptr.is_null()
        && part_of(whole, parts, rank).is_ok_and(|own| {
            own.ptr == part.ptr
                && own.dtype == part.dtype
                && own.layout.shape() == part.layout.shape()
                && part.layout.is_contiguous()
        })
}

/// The shape is that of a tensor with `rows` of its rows.
pub(crate) fn rows_of(arg: Arg<'_>, of: &RawTensor, rows: usize) -> Result<()> {
    let mut shape = [0; MAX_RANK];
    let rank = of.layout.rank();
    shape[..rank].copy_from_slice(of.layout.shape());
    shape[0] = rows;
    arg.shape(&shape[..rank]).map(drop)
}
