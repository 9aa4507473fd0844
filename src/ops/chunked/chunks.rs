//! How tokens are cut into chunks.

use arrayvec::ArrayVec;

use crate::error::Result;
use crate::layout::{Layout, MAX_RANK};
use crate::tensor::RawTensor;

/// Tensors of the same tokens, with the `leading` dimensions merged where all of them allow it: at
/// least one is left. A tensor may have one more dimension, its last.
pub(crate) fn merged<const N: usize>(
    leading: &[usize],
    tensors: [Option<RawTensor>; N],
) -> Result<[Option<RawTensor>; N]> {
    let last =
        |t: &RawTensor| (t.layout.rank() > leading.len()).then(|| t.layout.dim(leading.len()));
    // From the innermost outwards.
    let mut sizes = ArrayVec::<usize, MAX_RANK>::new();
    let mut strides = ArrayVec::<[usize; N], MAX_RANK>::new();
    let empty = leading.contains(&0);
    let dims = if empty { &[] } else { leading };
    for (dim, &size) in dims.iter().enumerate().rev().filter(|(_, n)| **n != 1) {
        let here = tensors.map(|t| t.map_or(0, |t| t.layout.stride(dim)));
        match (sizes.last_mut(), strides.last()) {
            (Some(inner), Some(inside)) if (0..N).all(|i| here[i] == *inner * inside[i]) => {
                *inner *= size;
            }
            _ => {
                sizes.push(size);
                strides.push(here);
            }
        }
    }
    // Without tokens, and where there is one, a row follows the other.
    if sizes.is_empty() {
        let rows = |t: &RawTensor| last(t).unwrap_or(1);
        sizes = ArrayVec::from_iter([usize::from(!empty)]);
        strides = ArrayVec::from_iter([tensors.map(|t| t.as_ref().map_or(0, rows))]);
    }
    let mut all = tensors;
    for (i, tensor) in all.iter_mut().enumerate() {
        let Some(tensor) = tensor else { continue };
        let mut dims = ArrayVec::<(usize, usize), { MAX_RANK + 1 }>::new();
        dims.extend(sizes.iter().zip(&strides).rev().map(|(n, s)| (*n, s[i])));
        dims.extend(last(tensor).map(|n| (n, 1)));
        let shape: ArrayVec<usize, { MAX_RANK + 1 }> = dims.iter().map(|dim| dim.0).collect();
        let strides: ArrayVec<usize, { MAX_RANK + 1 }> = dims.iter().map(|dim| dim.1).collect();
        tensor.layout = Layout::strided(&shape, &strides)?;
    }
    Ok(all)
}

/// Tokens in chunks: some entries of one dimension, with all of those inside it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunks {
    /// The dimensions of tokens.
    sizes: [usize; MAX_RANK],
    rank: usize,
    /// The one that is cut, and its entries in a chunk.
    cut: usize,
    step: usize,
    /// Chunks of that dimension.
    parts: usize,
    /// All chunks.
    pub count: usize,
}

impl Chunks {
    /// Chunks of at most `most` tokens; those of a dimension are about of a size, in `multiples` of
    /// tokens where there are as many. Without tokens there is one chunk, which has none.
    pub fn new(dims: &[usize], most: usize, multiples: Option<usize>) -> Chunks {
        let mut sizes = [1; MAX_RANK];
        sizes[..dims.len()].copy_from_slice(dims);
        let most = most.max(1);
        let (mut cut, mut inside) = (dims.len().saturating_sub(1), 1);
        while cut > 0 && inside * sizes[cut] <= most {
            inside *= sizes[cut];
            cut -= 1;
        }
        let size = sizes[cut].max(1);
        let mut step = (most / inside).clamp(1, size);
        if let Some(multiple) = multiples {
            let multiple = (multiple / inside).max(1);
            let even = size.div_ceil(size.div_ceil(step));
            step = even.next_multiple_of(multiple).min(step);
        }
        let parts = size.div_ceil(step);
        Chunks {
            sizes,
            rank: dims.len(),
            cut,
            step,
            parts,
            count: sizes[..cut].iter().product::<usize>() * parts,
        }
    }

    /// The entries of the dimension that is cut.
    fn range(&self, chunk: usize) -> (usize, usize) {
        let first = chunk % self.parts * self.step;
        (first, self.step.min(self.sizes[self.cut] - first))
    }

    /// The dimensions of a chunk's tokens, and then `last`.
    pub fn shape(&self, chunk: usize, last: usize) -> ArrayVec<usize, MAX_RANK> {
        let mut shape = ArrayVec::new();
        shape.push(self.range(chunk).1);
        shape.extend(self.sizes[self.cut + 1..self.rank].iter().copied());
        shape.push(last);
        shape
    }

    /// A chunk of a tensor whose first dimensions are those of the tokens.
    pub fn of(&self, chunk: usize, t: &RawTensor) -> Result<RawTensor> {
        let (layout, (first, len)) = (&t.layout, self.range(chunk));
        let mut offset = first * layout.stride(self.cut);
        let mut outer = chunk / self.parts;
        for dim in (0..self.cut).rev() {
            offset += outer % self.sizes[dim] * layout.stride(dim);
            outer /= self.sizes[dim];
        }
        let mut shape = [0; MAX_RANK];
        let rank = layout.rank() - self.cut;
        shape[..rank].copy_from_slice(&layout.shape()[self.cut..]);
        shape[0] = len;
        Ok(RawTensor {
            // wrapping: the pointer may be NULL in a query, and is then never dereferenced.
            ptr: t.ptr.wrapping_add(offset * t.dtype.size()),
            layout: Layout::strided(&shape[..rank], &layout.strides()[self.cut..])?,
            ..*t
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    fn tensor(layout: Layout) -> RawTensor {
        let (ptr, dtype) = (std::ptr::without_provenance_mut(0x1000), DType::F32);
        RawTensor { ptr, dtype, layout }
    }

    /// Where each row of a tensor is.
    fn rows(t: &RawTensor) -> Vec<usize> {
        let at = |row| t.ptr.addr() + t.layout.row_offset(row) * 4;
        (0..t.layout.num_rows()).map(at).collect()
    }

    /// Chunks have every token once, in order, and as many as allowed at the most.
    #[test]
    fn chunks_cover_the_tokens() {
        let contiguous = |shape: &[usize]| Layout::contiguous(shape).unwrap();
        for (layout, dims) in [
            (contiguous(&[7, 3]), 1),
            (contiguous(&[1, 1, 3]), 1),
            (contiguous(&[2, 5, 3, 4]), 1),
            (contiguous(&[0, 5, 3]), 1),
            (contiguous(&[5, 2, 3]).transposed(0, 1).unwrap(), 2),
            (contiguous(&[5, 4, 2, 3]).transposed(0, 2).unwrap(), 3),
            (Layout::strided(&[4, 1, 5, 3], &[40, 0, 6, 1]).unwrap(), 2),
        ] {
            let leading = &layout.shape()[..layout.rank() - 1];
            let total: usize = leading.iter().product();
            let of_tokens = tensor(contiguous(leading));
            let [x, tokens] = merged(leading, [Some(tensor(layout)), Some(of_tokens)]).unwrap();
            let (x, tokens) = (x.unwrap(), tokens.unwrap());
            assert_eq!(x.layout.rank(), dims + 1, "{layout:?}");
            assert_eq!(rows(&x), rows(&tensor(layout)));
            for most in [1, 2, 3, 4, 7, 8, 100] {
                for multiples in [None, Some(2)] {
                    let chunks = Chunks::new(tokens.layout.shape(), most, multiples);
                    let mut all = (Vec::new(), 0);
                    for i in 0..chunks.count {
                        let (x, tokens) =
                            (chunks.of(i, &x).unwrap(), chunks.of(i, &tokens).unwrap());
                        let shape = chunks.shape(i, x.layout.dim(x.layout.rank() - 1));
                        assert_eq!(x.layout.shape(), &shape[..]);
                        assert!(x.layout.num_rows() <= most && tokens.layout.is_contiguous());
                        assert_eq!(tokens.ptr.addr(), 0x1000 + all.1 * 4);
                        all.1 += tokens.layout.num_elements();
                        all.0.extend(rows(&x));
                    }
                    assert_eq!((all.0, all.1), (rows(&x), total), "{layout:?} {most}");
                    assert!(chunks.count > 0);
                }
            }
        }
        let chunks = Chunks::new(&[1000], 384, Some(128));
        assert_eq!((chunks.count, chunks.step), (3, 384));
        let chunks = Chunks::new(&[8192], 5376, Some(128));
        assert_eq!((chunks.count, chunks.step), (2, 4096));
    }
}
