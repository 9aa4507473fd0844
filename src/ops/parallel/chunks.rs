//! Chunks of rows: the sum of one runs beside the product of the next.
//!
//! Which chunks there are follows from what all ranks have alike, as all make the same sums in the same
//! order: the shape of what is added up, the group, and the caller's `chunk_rows`.

use super::Parallel;
use crate::error::Result;
use crate::layout::MAX_RANK;
use crate::problem::collective::MOST_BESIDE;
use crate::problem::{linear, mlp};
use crate::tensor::RawTensor;

/// Rows that are divided into chunks as evenly as they go, the first having more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chunks {
    rows: usize,
    count: usize,
}

impl Chunks {
    /// All rows in one.
    pub fn one(rows: usize) -> Chunks {
        Chunks { rows, count: 1 }
    }

    /// As many as have at least so many rows each.
    fn new(rows: usize, least: usize) -> Chunks {
        let count = (rows / least.max(1)).clamp(1, MOST_BESIDE);
        Chunks { rows, count }
    }

    /// Whether nothing is divided, and nothing runs beside anything.
    pub fn is_one(self) -> bool {
        self.count == 1
    }

    /// The last one's number.
    pub fn last(self) -> usize {
        self.count - 1
    }

    /// The first row and the rows of each.
    pub fn iter(self) -> impl Iterator<Item = (usize, usize)> {
        let (each, more) = (self.rows / self.count, self.rows % self.count);
        (0..self.count).map(move |i| (i * each + i.min(more), each + usize::from(i < more)))
    }
}

impl Parallel<'_> {
    /// The chunks of what ranks add up, of this shape on all of them: of its rows, counted over every
    /// dimension but the last.
    pub(crate) fn chunks(&self, whole: &RawTensor) -> Chunks {
        let rows = whole.layout.num_rows();
        if whole.layout.is_empty() {
            return Chunks::one(rows);
        }
        Chunks::new(rows, self.least_rows(rows, whole))
    }

    /// Those of what ranks add up and divide, of which this is a rank's part: of the rows of its first
    /// dimension, as many of each rank. By counts there is one.
    pub(crate) fn chunks_of_each(&self, own: &RawTensor) -> Chunks {
        let rows = own.layout.dim(0);
        // Chunks have one dimension more, of ranks.
        let has_room = own.layout.rank() < MAX_RANK;
        if own.layout.is_empty() || self.row_counts.is_some() || !has_room {
            return Chunks::one(rows);
        }
        let of_all = self.comm.size().saturating_mul(own.layout.num_rows());
        let least = self.least_rows(of_all, own);
        // Rows of all ranks that go with one of the first dimension.
        Chunks::new(rows, least.div_ceil(of_all / rows))
    }

    /// The same group, and one chunk where the library has the choice.
    pub(crate) fn in_one(self) -> Self {
        let chunk_rows = match self.chunk_rows {
            0 => usize::MAX,
            asked => asked,
        };
        Parallel { chunk_rows, ..self }
    }

    /// Rows of a chunk, at least.
    fn least_rows(&self, rows: usize, like: &RawTensor) -> usize {
        match self.chunk_rows {
            0 => {
                let columns = like.layout.dim(like.layout.rank() - 1);
                let transport = self.comm.transport();
                transport.chunk_rows(rows, columns * like.dtype.size())
            }
            least => least,
        }
    }

    /// Whether a gradient is added up beside the products that do not need it: where it would be made in
    /// chunks. It is a rank's rows of it, or the whole.
    pub(crate) fn sums_beside(&self, own: &RawTensor) -> bool {
        let chunks = match self.sequence {
            true => self.chunks_of_each(own),
            false => self.chunks(own),
        };
        !chunks.is_one()
    }
}

/// A problem that computes each row by itself.
pub(crate) trait ByRows: Sized {
    /// That of `len` rows from `start`, where rows are equally spaced.
    fn of_rows(&self, start: usize, len: usize) -> Result<Option<Self>>;
}

/// Some rows of tensors of as many, unless one of them has rows that are not equally spaced.
pub(crate) fn rows_of<const N: usize>(
    tensors: [RawTensor; N],
    (start, len): (usize, usize),
) -> Result<Option<[RawTensor; N]>> {
    let mut rows = tensors;
    for tensor in &mut rows {
        match tensor.rows(start, len)? {
            Some(of_tensor) => *tensor = of_tensor,
            None => return Ok(None),
        }
    }
    Ok(Some(rows))
}

/// Rows of what is there; the inner `None` is none of what is not.
fn optional_rows(
    t: Option<RawTensor>,
    start: usize,
    len: usize,
) -> Result<Option<Option<RawTensor>>> {
    match t {
        None => Ok(Some(None)),
        Some(t) => Ok(t.rows(start, len)?.map(Some)),
    }
}

macro_rules! by_rows {
    ($($problem:ty),*) => {
        $(impl ByRows for $problem {
            fn of_rows(&self, start: usize, len: usize) -> Result<Option<Self>> {
                let residual = optional_rows(self.residual, start, len)?;
                let rows = (self.x.rows(start, len)?, residual, self.out.rows(start, len)?);
                let (Some(x), Some(residual), Some(out)) = rows else {
                    return Ok(None);
                };
                Ok(Some(Self {
                    x,
                    residual,
                    out,
                    ..*self
                }))
            }
        })*
    };
}

by_rows!(linear::Problem, mlp::Problem);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_have_all_rows_in_order() {
        for (rows, least, expected) in [
            (0, 4, &[(0, 0)][..]),
            (3, 4, &[(0, 3)]),
            (7, 4, &[(0, 7)]),
            (8, 4, &[(0, 4), (4, 4)]),
            (11, 4, &[(0, 6), (6, 5)]),
            (14, 4, &[(0, 5), (5, 5), (10, 4)]),
            (5, usize::MAX, &[(0, 5)]),
            (2, 0, &[(0, 1), (1, 1)]),
        ] {
            let chunks = Chunks::new(rows, least);
            assert!(chunks.iter().eq(expected.iter().copied()), "{rows} {least}");
            assert_eq!(chunks.last() + 1, expected.len());
            assert_eq!(chunks.is_one(), expected.len() == 1);
        }
        let most = Chunks::new(usize::MAX, 1);
        let (mut end, mut count) = (0, 0);
        for (start, len) in most.iter() {
            assert_eq!(start, end);
            (end, count) = (start + len, count + 1);
        }
        assert_eq!((end, count), (usize::MAX, MOST_BESIDE));
    }
}
