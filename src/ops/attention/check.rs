//! Validation of attention's arguments.

use super::{MAX_HEAD_DIM, OP, PageLayout, Params};
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::layout::MAX_RANK;
use crate::ops::check::{Arg, finite, with_last};
use crate::ops::operation::{Operation, Tensors};
use crate::problem::attention::{HeadScales, Keys, Problem, Queries, Rows, Scores, page_dims};
use crate::tensor::{RawTensor, Scales, TensorMut, TensorRef, Workspace};

/// The sizes that the forms of queries and keys agree on.
struct Sizes {
    batch: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    head_dim_v: usize,
}

/// What the forward and the backward pass are both given, and what it is called in errors.
pub(super) struct Inputs {
    pub op: &'static str,
    pub q: RawTensor,
    pub k: RawTensor,
    pub v: RawTensor,
    /// What keys and values may be.
    pub kv_dtypes: &'static [DType],
    /// Of keys and of values that are codes.
    pub kv_scales: [Option<Scales>; 2],
    pub out: RawTensor,
    pub lse: Option<RawTensor>,
    pub bias: Option<RawTensor>,
    pub mask: Option<RawTensor>,
    pub alibi_slopes: Option<RawTensor>,
    pub sinks: Option<RawTensor>,
    pub cu_seqlens_q: Option<RawTensor>,
    pub cu_seqlens_k: Option<RawTensor>,
    pub seq_lens_k: Option<RawTensor>,
    pub block_table: Option<RawTensor>,
    pub page_layout: PageLayout,
    pub max_seqlen_q: usize,
    pub max_seqlen_k: usize,
    pub scale: f32,
    pub softcap: f32,
    pub causal: bool,
    pub window_left: usize,
    pub window_right: usize,
}

impl Operation for Params<'_> {
    const NAME: &'static str = OP;
    type Problem = Problem;

    fn tensors(&self, tensors: &mut Tensors) {
        tensors.read("q", &self.q);
        tensors.read("k", &self.k);
        tensors.read("v", &self.v);
        let of_codes = [("k.scales", &self.k), ("v.scales", &self.v)];
        for (name, scales) in of_codes.map(|(name, t)| (name, t.scales())) {
            if let Some(scales) = scales {
                tensors.named_scales(name, scales);
            }
        }
        for (name, tensor) in [
            ("bias", &self.bias),
            ("mask", &self.mask),
            ("alibi_slopes", &self.alibi_slopes),
            ("sinks", &self.sinks),
            ("cu_seqlens_q", &self.cu_seqlens_q),
            ("cu_seqlens_k", &self.cu_seqlens_k),
            ("seq_lens_k", &self.seq_lens_k),
            ("block_table", &self.block_table),
        ] {
            tensors.read_optional(name, tensor.as_ref());
        }
        tensors.write("out", &self.out);
        tensors.write_optional("lse", self.lse.as_ref());
    }

    fn workspace(&self) -> Option<&Workspace<'_>> {
        Some(&self.workspace)
    }

    fn problem(&self) -> Result<Problem> {
        let raw = |tensor: &Option<TensorRef<'_>>| tensor.as_ref().map(TensorRef::raw);
        let inputs = Inputs {
            op: OP,
            q: self.q.raw(),
            k: self.k.raw(),
            v: self.v.raw(),
            kv_dtypes: DType::CACHED,
            kv_scales: [self.k.scales(), self.v.scales()],
            out: self.out.raw(),
            lse: self.lse.as_ref().map(TensorMut::raw),
            bias: raw(&self.bias),
            mask: raw(&self.mask),
            alibi_slopes: raw(&self.alibi_slopes),
            sinks: raw(&self.sinks),
            cu_seqlens_q: raw(&self.cu_seqlens_q),
            cu_seqlens_k: raw(&self.cu_seqlens_k),
            seq_lens_k: raw(&self.seq_lens_k),
            block_table: raw(&self.block_table),
            page_layout: self.page_layout,
            max_seqlen_q: self.max_seqlen_q,
            max_seqlen_k: self.max_seqlen_k,
            scale: self.scale,
            softcap: self.softcap,
            causal: self.causal,
            window_left: self.window_left,
            window_right: self.window_right,
        };
        let problem = inputs.problem()?;
        Arg::new(OP, "out", &inputs.out).writable()?;
        if let Some(lse) = &inputs.lse {
            Arg::new(OP, "lse", lse).writable()?;
        }
        Ok(problem)
    }
}

impl Inputs {
    /// Checks everything but whether what is written may be.
    pub fn problem(&self) -> Result<Problem> {
        let (q, k, v, out) = (self.q, self.k, self.v, self.out);
        self.check_forms()?;
        let queries = self.queries(&q)?;
        let batch = match (&self.cu_seqlens_q, queries) {
            (Some(cu), Queries::Packed { .. }) => cu.layout.dim(0) - 1,
            _ => q.layout.dim(0),
        };
        let q_token = if self.cu_seqlens_q.is_some() { 0 } else { 1 };
        let sizes = self.sizes(batch, q_token, &q, &k, &v)?;
        let [k_scale, v_scale] = self.kv_scales(sizes.num_kv_heads)?;
        let (keys, k_dims) = self.keys(batch, &k, &v)?;

        let allowed = match q.dtype {
            DType::F32 => &[DType::F32][..],
            _ => &[q.dtype, DType::F32],
        };
        Arg::new(self.op, "out", &out)
            .dtype(allowed)?
            .shape(with_last(&q, sizes.head_dim_v, &mut [0; MAX_RANK]))?
            .last_contiguous()?;

        let max_seqlen_q = match queries {
            Queries::Batched { len } => len,
            Queries::Packed { total, .. } => bound(self.max_seqlen_q, total),
        };
        let max_seqlen_k = match keys {
            Keys::Batched { len, seq_lens: _ } if self.seq_lens_k.is_none() => len,
            Keys::Batched { len, .. } => bound(self.max_seqlen_k, len),
            Keys::Packed { total, .. } => bound(self.max_seqlen_k, total),
            Keys::Paged {
                max_pages,
                page_size,
                ..
            } => {
                // The table fits an address space, so this product would only overflow for pages that do not.
                let room = max_pages.saturating_mul(page_size);
                bound(self.max_seqlen_k, room)
            }
        };
        let scores = [batch, sizes.num_heads, max_seqlen_q, max_seqlen_k];

        let q_outer = self.cu_seqlens_q.is_none().then_some(0);
        let (k_outer, k_token, k_head) = k_dims;
        Ok(Problem {
            batch,
            num_heads: sizes.num_heads,
            num_kv_heads: sizes.num_kv_heads,
            head_dim: sizes.head_dim,
            head_dim_v: sizes.head_dim_v,
            q: Rows::new(&q, q_outer, q_token, q_token + 1),
            k: Rows::new(&k, k_outer, k_token, k_head),
            v: Rows::new(&v, k_outer, k_token, k_head),
            out: Rows::new(&out, q_outer, q_token, q_token + 1),
            lse: self.lse(&q, batch, &sizes)?,
            queries,
            keys,
            ragged: self.cu_seqlens_q.is_some()
                || self.cu_seqlens_k.is_some()
                || self.seq_lens_k.is_some(),
            max_seqlen_q,
            max_seqlen_k,
            scale: self.scale(sizes.head_dim)?,
            k_scale,
            v_scale,
            softcap: self.softcap()?,
            window_left: unlimited(self.window_left),
            window_right: if self.causal {
                1
            } else {
                unlimited(self.window_right)
            },
            bias: self.score_tensor("bias", self.bias, DType::FLOATS, &scores)?,
            mask: self.score_tensor("mask", self.mask, &[DType::Bool], &scores)?,
            alibi_slopes: self.alibi_slopes(batch, sizes.num_heads)?,
            sinks: self.sinks(sizes.num_heads)?,
        })
    }
    /// Arguments that exclude or need one another.
    fn check_forms(&self) -> Result<()> {
        let exclude = |a: bool, b: bool, name: &'static str, other: &str| {
            if a && b {
                let problem = text!("is given together with {other}: only one of them is allowed");
                return Err(Error::invalid(self.op, name, problem));
            }
            Ok(())
        };
        let packed = self.cu_seqlens_k.is_some();
        exclude(
            packed,
            self.block_table.is_some(),
            "cu_seqlens_k",
            "block_table",
        )?;
        exclude(
            packed,
            self.seq_lens_k.is_some(),
            "cu_seqlens_k",
            "seq_lens_k",
        )?;
        if self.block_table.is_some() && self.seq_lens_k.is_none() {
            return Err(Error::invalid(
                self.op,
                "seq_lens_k",
                "is absent, block_table needs it",
            ));
        }
        Ok(())
    }

    fn queries(&self, q: &RawTensor) -> Result<Queries> {
        let arg = Arg::new(self.op, "q", q).dtype(DType::FLOATS)?;
        let Some(cu) = &self.cu_seqlens_q else {
            arg.rank_as(4, "because q is batched: cu_seqlens_q is absent")?
                .last_contiguous()?;
            return Ok(Queries::Batched {
                len: q.layout.dim(1),
            });
        };
        arg.rank_as(3, "because q is packed: cu_seqlens_q is there")?
            .last_contiguous()?;
        Ok(Queries::Packed {
            cu_seqlens: self.cu_seqlens("cu_seqlens_q", cu)?,
            total: q.layout.dim(0),
        })
    }

    fn sizes(
        &self,
        batch: usize,
        q_token: usize,
        q: &RawTensor,
        k: &RawTensor,
        v: &RawTensor,
    ) -> Result<Sizes> {
        let packed = self.cu_seqlens_k.is_some();
        let paged = self.block_table.is_some();
        let (rank, reason) = match (packed, paged) {
            (true, _) => (3, "because keys are packed: cu_seqlens_k is there"),
            (_, true) => (4, "because keys are paged: block_table is there"),
            _ => (4, "because keys are batched: cu_seqlens_k is absent"),
        };
        for (name, t) in [("k", k), ("v", v)] {
            Arg::new(self.op, name, t)
                .dtype(self.kv_dtypes)?
                .rank_as(rank, reason)?
                .last_contiguous()?;
        }
        let dim = t_dim(packed);
        let head = match &self.block_table {
            Some(_) => page_dims(self.page_layout).1,
            None => dim - 1,
        };
        let sizes = Sizes {
            batch,
            num_heads: q.layout.dim(q_token + 1),
            num_kv_heads: k.layout.dim(head),
            head_dim: q.layout.dim(q_token + 2),
            head_dim_v: v.layout.dim(dim),
        };
        for (name, head_dim) in [("q", sizes.head_dim), ("v", sizes.head_dim_v)] {
            if !(1..=MAX_HEAD_DIM).contains(&head_dim) {
                let problem = text!("has head_dim {head_dim}, allowed: 1 to {MAX_HEAD_DIM}");
                return Err(Error::invalid(self.op, name, problem));
            }
        }
        if sizes.num_kv_heads == 0 {
            return Err(Error::invalid(
                self.op,
                "k",
                "has 0 heads, at least 1 is needed",
            ));
        }
        if sizes.num_heads == 0 || !sizes.num_heads.is_multiple_of(sizes.num_kv_heads) {
            let heads_first = q_token == 1
                && !packed
                && !paged
                && q.layout.dim(1).is_multiple_of(k.layout.dim(1).max(1));
            let hint = if heads_first {
                ": the layout is [batch, seq, heads, dim], and these look like [batch, heads, seq, dim]"
            } else {
                ""
            };
            let problem = text!(
                "has {} heads, a multiple of the {} of k is needed{hint}",
                sizes.num_heads,
                sizes.num_kv_heads
            );
            return Err(Error::invalid(self.op, "q", problem));
        }
        self.equal("k", "head_dim", k.layout.dim(dim), "q", sizes.head_dim)?;
        Arg::new(self.op, "v", v).shape(with_last(k, sizes.head_dim_v, &mut [0; MAX_RANK]))?;
        if !packed && self.block_table.is_none() {
            let of = if self.cu_seqlens_q.is_some() {
                "cu_seqlens_q"
            } else {
                "q"
            };
            self.equal("k", "batch size", k.layout.dim(0), of, sizes.batch)?;
        }
        Ok(sizes)
    }

    /// The scales of keys and values, which codes alone have, and both are codes if one is.
    fn kv_scales(&self, num_kv_heads: usize) -> Result<[Option<HeadScales>; 2]> {
        let is_codes = |t: &RawTensor| t.dtype == DType::F8E4M3;
        if is_codes(&self.k) != is_codes(&self.v) {
            let (k, v) = (self.k.dtype, self.v.dtype);
            let problem = text!("has dtype {v}, k has {k}: both are f8e4m3, or neither");
            return Err(Error::invalid(self.op, "v", problem));
        }
        let of = |name, t: &RawTensor, scales: Option<Scales>| {
            let Some(scales) = scales else {
                return Ok(None);
            };
            if !is_codes(t) {
                let problem = text!("has scales, which {} has not", t.dtype);
                return Err(Error::invalid(self.op, name, problem));
            }
            if scales.len != 1 && scales.len != num_kv_heads {
                let problem = text!(
                    "has {} scales, allowed: 1, or one for each of its {num_kv_heads} heads",
                    scales.len
                );
                return Err(Error::invalid(self.op, name, problem));
            }
            Ok(Some(HeadScales {
                ptr: scales.ptr.cast_const(),
                stride: usize::from(scales.len > 1),
            }))
        };
        let [k, v] = self.kv_scales;
        Ok([of("k", &self.k, k)?, of("v", &self.v, v)?])
    }

    /// The form of the keys, and where the outer dimension, tokens and heads are in `k` and `v`.
    #[allow(clippy::type_complexity)]
    fn keys(
        &self,
        batch: usize,
        k: &RawTensor,
        v: &RawTensor,
    ) -> Result<(Keys, (Option<usize>, usize, usize))> {
        debug_assert_eq!(k.layout.rank(), v.layout.rank());
        let of = if self.cu_seqlens_q.is_some() {
            "cu_seqlens_q"
        } else {
            "q"
        };
        if let Some(cu) = &self.cu_seqlens_k {
            let cu_seqlens = self.cu_seqlens("cu_seqlens_k", cu)?;
            self.equal(
                "cu_seqlens_k",
                "batch size",
                cu.layout.dim(0) - 1,
                of,
                batch,
            )?;
            let total = k.layout.dim(0);
            return Ok((Keys::Packed { cu_seqlens, total }, (None, 0, 1)));
        }
        let mut seq_lens = std::ptr::null();
        if let Some(lens) = &self.seq_lens_k {
            Arg::new(self.op, "seq_lens_k", lens)
                .dtype(&[DType::I32])?
                .shape(&[batch])?
                .contiguous()?;
            seq_lens = lens.ptr.cast_const().cast();
        }
        let Some(table) = &self.block_table else {
            let len = k.layout.dim(1);
            return Ok((Keys::Batched { len, seq_lens }, (Some(0), 1, 2)));
        };
        Arg::new(self.op, "block_table", table)
            .dtype(&[DType::I32])?
            .rank(&[2])?
            .last_contiguous()?;
        self.equal("block_table", "batch size", table.layout.dim(0), of, batch)?;
        let (token, head) = page_dims(self.page_layout);
        let page_size = k.layout.dim(token);
        if !page_size.is_power_of_two() {
            let problem = text!("has page size {page_size}, a power of two is needed");
            return Err(Error::invalid(self.op, "k", problem));
        }
        let keys = Keys::Paged {
            block_table: table.ptr.cast_const().cast(),
            table_stride: table.layout.stride(0),
            max_pages: table.layout.dim(1),
            num_pages: k.layout.dim(0),
            page_size,
            seq_lens,
        };
        Ok((keys, (Some(0), token, head)))
    }

    fn lse(&self, q: &RawTensor, batch: usize, sizes: &Sizes) -> Result<Option<Rows>> {
        let Some(lse) = &self.lse else {
            return Ok(None);
        };
        let arg = Arg::new(self.op, "lse", lse).dtype(&[DType::F32])?;
        Ok(Some(if self.cu_seqlens_q.is_some() {
            arg.shape(&[sizes.num_heads, q.layout.dim(0)])?;
            Rows::new(lse, None, 1, 0)
        } else {
            arg.shape(&[batch, sizes.num_heads, q.layout.dim(1)])?;
            Rows::new(lse, Some(0), 2, 1)
        }))
    }

    fn scale(&self, head_dim: usize) -> Result<f32> {
        Ok(match finite(self.op, "scale", self.scale)? {
            0.0 => 1.0 / (head_dim as f32).sqrt(),
            scale => scale,
        })
    }

    fn softcap(&self) -> Result<f32> {
        let softcap = finite(self.op, "softcap", self.softcap)?;
        if softcap >= 0.0 {
            return Ok(softcap);
        }
        let problem = text!("is {softcap}, at least 0 is needed");
        Err(Error::invalid(self.op, "softcap", problem))
    }

    fn alibi_slopes(&self, batch: usize, num_heads: usize) -> Result<Option<(*const f32, usize)>> {
        let Some(slopes) = &self.alibi_slopes else {
            return Ok(None);
        };
        let arg = Arg::new(self.op, "alibi_slopes", slopes)
            .dtype(&[DType::F32])?
            .rank(&[1, 2])?
            .last_contiguous()?;
        let stride = if slopes.layout.rank() == 1 {
            arg.shape(&[num_heads])?;
            0
        } else {
            arg.shape(&[batch, num_heads])?;
            slopes.layout.stride(0)
        };
        Ok(Some((slopes.ptr.cast_const().cast(), stride)))
    }

    fn sinks(&self, num_heads: usize) -> Result<Option<*const f32>> {
        let Some(sinks) = &self.sinks else {
            return Ok(None);
        };
        Arg::new(self.op, "sinks", sinks)
            .dtype(&[DType::F32])?
            .shape(&[num_heads])?
            .last_contiguous()?;
        Ok(Some(sinks.ptr.cast_const().cast()))
    }
    fn cu_seqlens(&self, name: &'static str, cu: &RawTensor) -> Result<*const i32> {
        Arg::new(self.op, name, cu)
            .dtype(&[DType::I32])?
            .rank(&[1])?
            .contiguous()?;
        if cu.layout.dim(0) == 0 {
            return Err(Error::invalid(
                self.op,
                name,
                "has 0 entries, at least 1 is needed",
            ));
        }
        Ok(cu.ptr.cast_const().cast())
    }

    fn equal(
        &self,
        name: &'static str,
        what: &str,
        value: usize,
        other: &str,
        expected: usize,
    ) -> Result<()> {
        if value == expected {
            return Ok(());
        }
        let problem = text!("has {what} {value}, {other} has {expected}");
        Err(Error::invalid(self.op, name, problem))
    }

    fn score_tensor(
        &self,
        name: &'static str,
        tensor: Option<RawTensor>,
        dtypes: &[DType],
        sizes: &[usize; 4],
    ) -> Result<Option<Scores>> {
        let Some(raw) = tensor else {
            return Ok(None);
        };
        let arg = Arg::new(self.op, name, &raw).dtype(dtypes)?.rank(&[4])?;
        let shape = raw.layout.shape();
        if shape
            .iter()
            .zip(sizes)
            .any(|(&n, &size)| n != 1 && n != size)
        {
            let problem =
                text!("has shape {shape:?}, allowed: {sizes:?} or 1 in place of any size");
            return Err(Error::invalid(self.op, name, problem));
        }
        if raw.layout.stride(3) != 0 {
            arg.last_contiguous()?;
        }
        Ok(Some(Scores::new(&raw)))
    }
}

/// The place of the head dimension in `k` and `v`.
fn t_dim(packed: bool) -> usize {
    if packed { 2 } else { 3 }
}

/// Zero, the default, means no limit.
fn unlimited(window: usize) -> usize {
    if window == 0 { usize::MAX } else { window }
}

/// A bound on sequence lengths: the caller's, or the room there is if that is tighter.
fn bound(value: usize, room: usize) -> usize {
    if value == 0 { room } else { value.min(room) }
}
