//! Products that are a rank's parts of sums, and the sums.

use super::{ByRows, Chunks, OF_OUT, Parallel, take};
use crate::error::Result;
use crate::layout::{Layout, MAX_RANK};
use crate::ops::check::with_last;
use crate::ops::collective::{parts, row};
use crate::ops::parts::{Names, Parts};
use crate::problem::collective::{self, Kind, ReduceOp};
use crate::problem::linear;
use crate::tensor::RawTensor;

impl<'a> Parallel<'a> {
    /// Adds a product that is this rank's part of a sum, and the sum. Its output and residual are the
    /// caller's, a rank's rows of them where these are divided. What follows waits for the sum with
    /// [`Parallel::push_join`] of the chunks that there are.
    pub(crate) fn push_product<const N: usize>(
        &self,
        op: &'static str,
        product: linear::Problem,
        names: Names,
        to: &mut Parts<'a, N>,
    ) -> Result<Chunks> {
        if self.sequence {
            return self.push_divided(op, product, names, to);
        }
        let chunks = self.chunks(&product.out);
        self.push_in_chunks(op, (self.part(product), names), chunks, to)?;
        Ok(chunks)
    }

    /// This rank's part of a product that is the same on all ranks but for its factors: bias and residual are
    /// added once.
    pub(crate) fn part(&self, product: linear::Problem) -> linear::Problem {
        let mut part = product;
        if self.comm.rank() > 0 {
            part.weights.bias = None;
            part.residual = None;
        }
        part
    }

    /// Adds a product and its sum, in chunks. Sums are the same on every rank; a rank whose rows are not
    /// equally spaced computes all of them first.
    fn push_in_chunks<const N: usize>(
        &self,
        op: &'static str,
        (part, names): (linear::Problem, Names),
        chunks: Chunks,
        to: &mut Parts<'a, N>,
    ) -> Result<()> {
        if chunks.is_one() {
            to.push(Ok(part), names)?;
            return self.push_sum(op, OF_OUT, part.out, to);
        }
        to.let_be_any_number();
        if part.of_rows(0, 0)?.is_none() {
            to.push(Ok(part), names)?;
            return self.push_sums(op, &part.out, chunks, to);
        }
        for (i, (start, len)) in chunks.iter().enumerate() {
            if let Some(rows) = part.of_rows(start, len)? {
                to.push(Ok(rows), names)?;
            }
            self.push_sum_of_rows(op, &part.out, i, (start, len), to)?;
        }
        Ok(())
    }

    /// Adds the sums of chunks of a contiguous tensor, one after the other.
    pub(crate) fn push_sums<const N: usize>(
        &self,
        op: &'static str,
        out: &RawTensor,
        chunks: Chunks,
        to: &mut Parts<'a, N>,
    ) -> Result<()> {
        for (i, rows) in chunks.iter().enumerate() {
            self.push_sum_of_rows(op, out, i, rows, to)?;
        }
        Ok(())
    }

    /// Adds the sum of some rows of a contiguous tensor, beside what follows.
    pub(crate) fn push_sum_of_rows<const N: usize>(
        &self,
        op: &'static str,
        out: &RawTensor,
        number: usize,
        (start, len): (usize, usize),
        to: &mut Parts<'a, N>,
    ) -> Result<()> {
        match out.rows(start, len)? {
            Some(rows) => to.push_beside(number, self.sum(op, rows), OF_OUT),
            None => Ok(()),
        }
    }

    /// Adds a product of which each rank gets the sum of its rows.
    fn push_divided<const N: usize>(
        &self,
        op: &'static str,
        product: linear::Problem,
        names: Names,
        to: &mut Parts<'a, N>,
    ) -> Result<Chunks> {
        let rank = self.comm.rank();
        let mut part = product;
        if rank > 0 {
            part.weights.bias = None;
        }
        let mut room = [0; MAX_RANK];
        let columns = product.weights.out_features();
        let layout = Layout::contiguous(with_last(&product.x, columns, &mut room))?;
        let whole = take(&product.out, layout, to)?;
        let x = ("x", &product.x);
        let divided = parts(op, self.comm, x, ("row_counts", self.row_counts))?;
        let chunks = self.chunks_of_each(&product.out);
        if !chunks.is_one() {
            self.push_divided_chunks(op, (part, names), whole, chunks, to)?;
            return Ok(chunks);
        }
        let (start, len) = (divided.before(rank), divided.of(rank));
        let rows = linear::Problem { out: whole, ..part };
        push_with_residual(rows, names, (start, len), to)?;
        self.push_scatter(op, ("x", OF_OUT), [whole, product.out], to)?;
        Ok(chunks)
    }

    /// The same in chunks, each of as many rows of each rank: these lie behind each other in `whole`, as a sum
    /// that is divided has them.
    fn push_divided_chunks<const N: usize>(
        &self,
        op: &'static str,
        (part, names): (linear::Problem, Names),
        whole: RawTensor,
        chunks: Chunks,
        to: &mut Parts<'a, N>,
    ) -> Result<()> {
        let size = self.comm.size();
        to.let_be_any_number();
        // Ranks are a dimension, which is the first.
        let x = of_ranks(&part.x, size)?;
        for (i, (start, len)) in chunks.iter().enumerate() {
            let chunk = whole.narrowed(0, size * start, size * len)?;
            let own = part.out.narrowed(0, start, len)?;
            let residual = part.residual.map(|all| all.narrowed(0, start, len));
            let rows = linear::Problem {
                x: x.narrowed(1, start, len)?,
                residual: residual
                    .transpose()?
                    .map(|rows| of_ranks(&rows, 1))
                    .transpose()?,
                out: of_ranks(&chunk, size)?,
                ..part
            };
            push_with_residual(rows, names, (self.comm.rank(), 1), to)?;
            let each = collective::Parts::Even(len);
            let sum = self.collective(collective::Problem {
                op,
                kind: Kind::ReduceScatter(ReduceOp::Sum),
                dtype: chunk.dtype,
                row: row(&chunk),
                x: Some(chunk),
                out: Some(own),
                sent: each,
                received: each,
            });
            to.push_beside(i, sum, OF_OUT)?;
        }
        Ok(())
    }
}

/// The first dimension as ranks, and the rows of each.
fn of_ranks(t: &RawTensor, size: usize) -> Result<RawTensor> {
    let layout = t.layout.unflattened(0, &[size, t.layout.dim(0) / size])?;
    Ok(RawTensor { layout, ..*t })
}

/// Adds a product, whose residual is of `len` entries of the first dimension from `start` on.
fn push_with_residual<const N: usize>(
    product: linear::Problem,
    names: Names,
    (start, len): (usize, usize),
    to: &mut Parts<'_, N>,
) -> Result<()> {
    let all = product.out.layout.dim(0);
    let ranges = match product.residual {
        None => [(0, all), (0, 0), (0, 0)],
        // Every rank has the residual of its own rows, and adds it to them.
        Some(_) => [(0, start), (start, len), (start + len, all - start - len)],
    };
    for (i, (start, len)) in ranges.into_iter().enumerate() {
        if len == 0 {
            continue;
        }
        let rows = linear::Problem {
            x: product.x.narrowed(0, start, len)?,
            residual: product.residual.filter(|_| i == 1),
            out: product.out.narrowed(0, start, len)?,
            ..product
        };
        to.push(Ok(rows), names)?;
    }
    Ok(())
}
