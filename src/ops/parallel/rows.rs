//! Rows of all ranks, for the backward pass of a block.

use super::{OF_DOUT, OF_DX, OF_X, Parallel};
use crate::error::Result;
use crate::layout::Layout;
use crate::ops::check::Arg;
use crate::ops::parts::{Names, Parts};
use crate::problem::linear::Backward;
use crate::tensor::{RawTensor, TensorMut, TensorRef};

/// What a block's backward pass computes with: the caller's tensors or, sequence parallel, what was
/// gathered of all ranks'.
pub(crate) struct Rows {
    pub x: RawTensor,
    pub dout: RawTensor,
    /// Takes this rank's part of the sum that is the gradient of `x`.
    pub dx: Option<RawTensor>,
    /// The caller's.
    own_dx: Option<RawTensor>,
}

impl Rows {
    /// Gathers `dout`, and `x` if it is read. Shapes and dtypes are checked, and fit together.
    pub fn new<'a, const N: usize>(
        op: &'static str,
        parallel: &Parallel<'a>,
        (x, reads_x): (RawTensor, bool),
        dout: RawTensor,
        dx: Option<RawTensor>,
        parts: &mut Parts<'a, N>,
    ) -> Result<Rows> {
        if let Some(dx) = &dx {
            Arg::new(op, "dx", dx).contiguous()?;
        }
        let mut rows = Rows {
            x,
            dout,
            dx,
            own_dx: dx,
        };
        if !parallel.sequence {
            return Ok(rows);
        }
        let layout = parallel.whole(op, "x", &x)?;
        rows.x = match reads_x {
            true => parallel.push_gather(op, ("x", OF_X), x, parts)?,
            false => RawTensor { layout, ..x },
        };
        rows.dout = parallel.push_gather(op, ("dout", OF_DOUT), dout, parts)?;
        rows.dx = match dx {
            None => None,
            Some(dx) => Some(take(&dx, layout, parts)?),
        };
        Ok(rows)
    }

    /// Whether the gradient of `x` is added up beside products that do not need it.
    pub fn sums_beside(&self, parallel: &Parallel<'_>) -> bool {
        self.own_dx.is_some_and(|dx| parallel.sums_beside(&dx))
    }

    /// Adds up the gradient of `x`, if it is wanted; beside what follows, which waits with
    /// [`Parallel::push_join_of`] the first, if that is asked for.
    pub fn push_dx<'a, const N: usize>(
        &self,
        op: &'static str,
        (parallel, beside): (&Parallel<'a>, bool),
        parts: &mut Parts<'a, N>,
    ) -> Result<()> {
        let sum = match (self.dx, self.own_dx) {
            (Some(whole), Some(own)) if parallel.sequence => {
                parallel.scatter(op, "dx", [whole, own])?
            }
            (Some(dx), _) => parallel.sum(op, dx),
            _ => return Ok(()),
        };
        match beside {
            true => parts.push_beside(0, sum, OF_DX),
            false => parts.push_collective(sum, OF_DX),
        }
    }

    /// What is read, and the gradient that is written, for the parameters of a part.
    ///
    /// # Safety
    /// They are used by parts of one call alone.
    pub unsafe fn views<'t>(&self) -> (TensorRef<'t>, TensorRef<'t>, Option<TensorMut<'t>>) {
        // SAFETY: the caller's promise; they are the caller's tensors or lie in the workspace.
        unsafe {
            (
                TensorRef::from_raw(self.x.ptr, self.x.dtype, self.x.layout),
                TensorRef::from_raw(self.dout.ptr, self.dout.dtype, self.dout.layout),
                self.dx
                    .map(|dx| TensorMut::from_raw(dx.ptr, dx.dtype, dx.layout)),
            )
        }
    }
}

/// Adds products that give the gradient of `x` together, and those of weights, and the sum of the first, if ranks
/// divide the layer: beside the products of the second, where there are rows enough.
pub(crate) fn push_summed<'a, const N: usize>(
    op: &'static str,
    products: &[(Backward, Names)],
    sum: Option<(&Rows, &Parallel<'a>)>,
    parts: &mut Parts<'a, N>,
) -> Result<()> {
    let of_weights = |p: &Backward| p.dweight.is_some() || p.dbias.is_some();
    let has_both =
        products.iter().any(|(p, _)| of_weights(p)) && products.iter().any(|(p, _)| p.dx.is_some());
    if let Some((rows, parallel)) = sum
        && has_both
        && rows.sums_beside(parallel)
    {
        for (product, names) in products {
            let of_input = Backward {
                dweight: None,
                dbias: None,
                ..*product
            };
            parts.push(Ok(of_input), names)?;
        }
        rows.push_dx(op, (parallel, true), parts)?;
        for (product, names) in products.iter().filter(|(p, _)| of_weights(p)) {
            let of_weight = Backward {
                dx: None,
                ..*product
            };
            parts.push(Ok(of_weight), names)?;
        }
        return parallel.push_join_of(op, 0, parts);
    }
    for (product, names) in products {
        parts.push(Ok(*product), names)?;
    }
    match sum {
        Some((rows, parallel)) => rows.push_dx(op, (parallel, false), parts),
        None => Ok(()),
    }
}

/// Room for a contiguous tensor of another's dtype.
pub(crate) fn take<const N: usize>(
    like: &RawTensor,
    layout: Layout,
    parts: &mut Parts<'_, N>,
) -> Result<RawTensor> {
    let columns = layout.dim(layout.rank() - 1);
    let taken = parts.take(like.dtype, [layout.num_rows(), columns])?;
    Ok(RawTensor { layout, ..taken })
}
