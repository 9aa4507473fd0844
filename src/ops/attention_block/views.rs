//! Heads, and the views of a workspace that steps work on.

use super::OP;
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::ops::attention;
use crate::ops::parts::Parts;
use crate::tensor::{RawTensor, TensorMut, TensorRef};

/// Heads and their dimensions, known to have a product with the number of tokens that fits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heads {
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub v_head_dim: usize,
}

impl Heads {
    /// Columns of queries, keys and values.
    pub fn columns(&self) -> [usize; 3] {
        [
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
            self.num_kv_heads * self.v_head_dim,
        ]
    }

    /// Columns of queries and keys.
    pub fn turned(&self) -> usize {
        (self.num_heads + self.num_kv_heads) * self.head_dim
    }

    /// Columns of attention's output.
    pub fn attended(&self) -> usize {
        self.num_heads * self.v_head_dim
    }

    pub fn check(&self) -> Result<()> {
        for (name, value) in [
            ("num_heads", self.num_heads),
            ("num_kv_heads", self.num_kv_heads),
        ] {
            // Far above any model, and low enough that products of two fit.
            if !(1..=1 << 20).contains(&value) {
                let problem = text!("is {}, allowed: 1 to {}", set(value), 1 << 20);
                return Err(Error::invalid(OP, name, problem));
            }
        }
        for (name, value) in [("head_dim", self.head_dim), ("v_head_dim", self.v_head_dim)] {
            if !(1..=attention::MAX_HEAD_DIM).contains(&value) {
                let most = attention::MAX_HEAD_DIM;
                let problem = text!("is {}, allowed: 1 to {most}", set(value));
                return Err(Error::invalid(OP, name, problem));
            }
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            let problem = text!(
                "is {}, a multiple of num_kv_heads {} is needed",
                self.num_heads,
                self.num_kv_heads
            );
            return Err(Error::invalid(OP, "num_heads", problem));
        }
        Ok(())
    }
}

/// A size in words: zero is what a caller has who forgot it.
fn set(value: usize) -> String {
    match value {
        0 => text!("0 (not set)"),
        _ => text!("{value}"),
    }
}

/// The tensors that steps work on. They may lie at NULL while steps are only checked.
pub(crate) struct Views {
    /// Queries, keys and values side by side, as the projections give them: `[tokens, columns]`.
    pub qkv: RawTensor,
    /// Queries and keys once they are normalised and rotated, where that is not done in place.
    pub turned: Option<RawTensor>,
    /// Attention's output: `[tokens, columns]`.
    pub attended: RawTensor,
    pub heads: Heads,
    pub batched: Option<(usize, usize)>,
}

impl Views {
    /// In the workspace of these parts.
    pub fn new<const N: usize>(
        heads: Heads,
        num_tokens: usize,
        batched: Option<(usize, usize)>,
        dtype: DType,
        parts: &mut Parts<N>,
    ) -> Result<Views> {
        Views::new_if([true; 2], (heads, num_tokens, batched), dtype, parts)
    }

    /// As [`Views::new`], where queries, keys and values, and attention's output, are needed there.
    pub fn new_if<const N: usize>(
        [qkv, attended]: [bool; 2],
        (heads, num_tokens, batched): (Heads, usize, Option<(usize, usize)>),
        dtype: DType,
        parts: &mut Parts<N>,
    ) -> Result<Views> {
        let columns = heads.columns().iter().sum();
        Ok(Views {
            qkv: parts.take_if(qkv, dtype, [num_tokens, columns])?,
            turned: None,
            attended: parts.take_if(attended, dtype, [num_tokens, heads.attended()])?,
            heads,
            batched,
        })
    }

    pub fn num_tokens(&self) -> usize {
        self.qkv.layout.dim(0)
    }

    /// Queries (0), keys (1) or values (2) of every token: `[tokens, columns]`.
    pub fn flat(&self, which: usize) -> Result<TensorMut<'static>> {
        self.flat_of(&self.qkv, which)
    }

    /// As [`Views::flat`], with heads: `[tokens, heads, dim]`.
    pub fn heads(&self, which: usize) -> Result<TensorMut<'static>> {
        self.with_heads(self.flat(which)?, which)
    }

    /// Queries, keys or values of a tensor that has them side by side, or the first of them.
    pub fn flat_of(&self, all: &RawTensor, which: usize) -> Result<TensorMut<'static>> {
        let columns = self.heads.columns();
        let start = columns[..which].iter().sum();
        // SAFETY: a checked workspace or a tensor of the caller's covers the view, or the view is
        // only described.
        unsafe { view_mut(all) }.narrowed(1, start, columns[which])
    }

    /// As [`Views::flat_of`], with heads.
    pub fn heads_of(&self, all: &RawTensor, which: usize) -> Result<TensorMut<'static>> {
        self.with_heads(self.flat_of(all, which)?, which)
    }

    fn with_heads(&self, t: TensorMut<'static>, which: usize) -> Result<TensorMut<'static>> {
        let h = &self.heads;
        let (num, dim) = [
            (h.num_heads, h.head_dim),
            (h.num_kv_heads, h.head_dim),
            (h.num_kv_heads, h.v_head_dim),
        ][which];
        t.unflattened(1, &[num, dim])
    }

    /// A tensor of tokens in the form that attention without `cu_seqlens` takes: with a batch dimension.
    pub fn batch<'a>(&self, tokens: TensorMut<'a>) -> Result<TensorMut<'a>> {
        let (batch, len) = self.batched.unwrap_or((1, self.qkv.layout.dim(0)));
        tokens.unflattened(0, &[batch, len])
    }

    /// As [`Views::batch`] where `x` has a batch dimension; as it is otherwise.
    pub fn batch_if_any<'a>(&self, tokens: TensorMut<'a>) -> Result<TensorMut<'a>> {
        match self.batched {
            Some(_) => self.batch(tokens),
            None => Ok(tokens),
        }
    }

    /// Attention's output, or what is like it, with heads.
    pub fn attended(&self, like_it: &RawTensor) -> Result<TensorMut<'static>> {
        // SAFETY: as in `flat_of`.
        unsafe { view_mut(like_it) }.unflattened(1, &[self.heads.num_heads, self.heads.v_head_dim])
    }
}

/// # Safety
/// The memory is what the caller lends the block, or is not accessed.
pub(super) unsafe fn view_mut(t: &RawTensor) -> TensorMut<'static> {
    // SAFETY: the caller's promise.
    unsafe { TensorMut::from_raw(t.ptr, t.dtype, t.layout) }
}

/// # Safety
/// As [`view_mut`].
pub(crate) unsafe fn view<'a>(t: &TensorMut<'a>) -> TensorRef<'a> {
    let raw = t.raw();
    // SAFETY: the caller's promise.
    unsafe { TensorRef::from_raw(raw.ptr, raw.dtype, raw.layout) }
}
