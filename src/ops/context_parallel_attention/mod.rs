//! Attention over sequences that ranks divide: each has a part of every sequence's queries, keys and values, and
//! gets its queries' part of the output, as if one rank had computed [`attention`].
//!
//! Ranks have equally long parts: in [contiguous order](Order::Contiguous) rank 0 has the first tokens of each sequence,
//! the last rank the last; in [zigzag](Order::Zigzag) each has one of the first chunks and one of the last, so that
//! all have as much to do where attention is causal. [`comm::tokens`](crate::comm::tokens) says which tokens these are.
//! It is a sequence of this library's operations: collectives, copies and attention.
//!
//! [`Method::Ulysses`] (Jacobs et al. 2023, arXiv:2309.14509): the ranks exchange parts of sequences for heads, so
//! that each has all tokens of some heads, attends with these, and gives the output back. What a rank sends
//! and receives is its part of `q`, `k`, `v` and `out`, and does not grow with the number of ranks, which has to
//! divide `Hkv`. A head is computed as on one rank, so that output, `lse` and gradients have the bits that one
//! rank gives them on the CPU.
//!
//! [`Method::AllGather`] (Llama 3, arXiv:2407.21783, 3.3.2): every rank gathers the keys and values of all, and
//! attends to them with its queries. Any number of heads will do, but it takes room for all keys and values. Causal, the
//! last rank has the most to do in contiguous order, and all ranks as much in zigzag. In the backward pass the gradients
//! that a rank's chunks give keys and values, rounded to their dtype, are added up, those of ranks as in a
//! reduce-scatter.
//!
//! [`Method::Ring`] (Liu et al. 2023, arXiv:2310.01889): keys and values travel from rank to rank, and each attends to
//! those that it has with its queries. It takes room for those of two ranks besides its own, with any number of ranks.
//! What they give is [merged](super::attention_merge) in f32, and rounded once. In the backward pass sums of the gradients
//! of keys and values travel along, in f32, from the rank that they are of back to it; what a rank adds to them, and to
//! those of its queries, is rounded to their dtype before. Steps whose keys windows hide from all queries are not taken.
//! Transfers and attention are queued on one stream, one behind the other. The list of what is done in turn lies in
//! memory of the host's, as with many ranks in zigzag.
//!
//! Sequences of different lengths are padded, or packed: then ranks divide the tokens of all of them as one run, which
//! cuts sequences where parts end. By Ulysses the ranks exchange all of it, and sequences are whole again. Of gathered
//! keys a rank's queries see those of their sequences; [`tokens::Packed`](crate::comm::tokens::Packed) says where these are. Packed
//! sequences are in contiguous order, their keys do not travel, and their windows are causal where keys are gathered. Tokens
//! of no sequence get zeros, and LSE −∞.
//!
//! Sinks count once, by every method; their gradient is that of all ranks' queries, on each rank. ALiBi is not for rings, and
//! causal where keys are gathered. Bias and masks of single scores there are none.
//!
//! [`backward`](fn@backward) takes what the forward pass was given and gave, all of it the rank's parts; nothing
//! else is kept. It exchanges all of it, and the gradients back, or gathers or sends keys and values again.
//!
//! All ranks make the same calls. What is wrong with shapes that ranks share is refused on each before any has
//! sent anything; so is too little workspace on the rank that has it, which leaves the others waiting.
//!
//! ```
//! use std::thread;
//! use unsloth::comm::{Comm, Id, Kind, Params};
//! use unsloth::ops::context_parallel_attention as attention;
//! use unsloth::{Buffer, Context, Stream, TensorMut, TensorRef};
//!
//! // Two ranks with two of four tokens each; two heads of one element. A query averages the values up to its own.
//! let id = Id::new(Kind::Local)?;
//! let run = |rank: usize| {
//!     let ctx = Context::cpu()?;
//!     let comm = Comm::new(&ctx, &Params::local(id, rank, 2))?;
//!     let (qk, mut out) = ([0.0f32; 4], [0.0f32; 4]);
//!     let first = 2.0 * rank as f32;
//!     let v = [first, -first, first + 1.0, -first - 1.0];
//!     let shape = [1, 2, 2, 1];
//!     let mut params = attention::Params::new(
//!         &comm,
//!         TensorRef::from_slice(&qk, &shape)?,
//!         TensorRef::from_slice(&qk, &shape)?,
//!         TensorRef::from_slice(&v, &shape)?,
//!         TensorMut::from_slice(&mut out, &shape)?,
//!     );
//!     params.causal = true;
//!     let mut scratch = Buffer::new(&ctx, attention::workspace_size(&ctx, &params)?)?;
//!     params.workspace = scratch.workspace();
//!     attention::forward(&ctx, &params, Stream::DEFAULT)?;
//!     drop(params);
//!     unsloth::Result::Ok(out)
//! };
//! thread::scope(|scope| {
//!     let ranks = [0, 1].map(|rank| scope.spawn(move || run(rank)));
//!     let [first, last] = ranks.map(|rank| rank.join().unwrap());
//!     assert_eq!((first?, last?), ([0.0, 0.0, 0.5, -0.5], [1.0, -1.0, 1.5, -1.5]));
//!     unsloth::Result::Ok(())
//! })?;
//! # Ok::<(), unsloth::Error>(())
//! ```

pub mod backward;
mod blocks;
mod check;
mod exchange;
mod gather;
mod gathered;
mod ring;

pub use backward::backward;

use crate::comm::Comm;
pub use crate::comm::tokens::Order;
use crate::error::Result;
use crate::ops::attention;
use crate::ops::operation::{self, Operation, Tensors};
use crate::ops::parts::{Parts, named};
use crate::tensor::{RawTensor, TensorMut, TensorRef, Workspace};
use exchange::{Group, Of};

const OP: &str = "context_parallel_attention";

/// Sinks and slopes: numbers of heads.
type OfHeads = [Option<RawTensor>; 2];

fn raw(t: &Option<TensorRef<'_>>) -> Option<RawTensor> {
    t.as_ref().map(TensorRef::raw)
}

/// Parts that take no memory of the host's: of every method with few ranks.
const PARTS: usize = 17;

/// How ranks that have parts of sequences attend. The discriminants are those of the C ABI
/// (`UNSLOTH_CONTEXT_METHOD_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Method {
    /// They exchange their parts for heads, and these back.
    #[default]
    Ulysses = 0,
    /// They gather all keys and values.
    AllGather = 1,
    /// Keys and values travel from rank to rank.
    Ring = 2,
}

impl Method {
    /// The method with this C ABI value.
    pub fn from_raw(value: u32) -> Option<Method> {
        [Method::Ulysses, Method::AllGather, Method::Ring]
            .into_iter()
            .find(|method| *method as u32 == value)
    }
}

/// Arguments of [`forward`]. Make one with [`Params::new`], then set what is needed.
#[derive(Debug)]
pub struct Params<'a> {
    /// This rank's part in the group.
    pub comm: &'a Comm,
    /// How ranks attend.
    pub method: Method,
    /// Which tokens of every sequence this rank has: [`Params::fill`](crate::comm::tokens::Params::fill) lists them.
    /// [`Order::Zigzag`] takes an even number of queries and of keys, and not [`Method::Ulysses`].
    pub order: Order,
    /// This rank's queries `[B, Sq, Hq, D]`; f32, f16 or bf16; any strides with a contiguous last dimension,
    /// as of all tensors here. Ranks have as many each.
    pub q: TensorRef<'a>,
    /// Its keys `[B, Sk, Hkv, D]`; any float dtype. By [`Method::Ulysses`] the ranks divide `Hkv` evenly.
    pub k: TensorRef<'a>,
    /// Its values like `k`, with head dimension `Dv`; any float dtype.
    pub v: TensorRef<'a>,
    /// Output, like `q` with head dimension `Dv`; the dtype of `q`, or f32.
    pub out: TensorMut<'a>,
    /// Receives the natural logarithm of the softmax denominator: f32 `[B, Hq, Sq]`.
    pub lse: Option<TensorMut<'a>>,
    /// A logit per query head that takes part in the softmax and has no value: f32 `[Hq]`, the same on all ranks.
    pub sinks: Option<TensorRef<'a>>,
    /// ALiBi slopes, f32 `[Hq]` or `[B, Hq]`, the same on all ranks. Not by [`Method::Ring`]; by [`Method::AllGather`] causal.
    pub alibi_slopes: Option<TensorRef<'a>>,
    /// Where each sequence of packed queries begins, and the last one's end: i32 `[B + 1]`. Ranks then divide the tokens of
    /// all sequences together, in contiguous order and not by [`Method::Ring`], and `q` is `[total_q, Hq, D]`, `k` and `v`
    /// likewise. By [`Method::Ulysses`] these are the places among the tokens of all ranks; by [`Method::AllGather`]
    /// [`tokens::Packed`](crate::comm::tokens::Packed) says what they are for a rank, and windows are causal.
    pub cu_seqlens_q: Option<TensorRef<'a>>,
    /// The same of packed keys; if one is given, both are.
    pub cu_seqlens_k: Option<TensorRef<'a>>,
    /// No sequence has more packed queries than this, of those that one rank attends with. Zero: as many as there are.
    pub max_seqlen_q: usize,
    /// No sequence has more packed keys than this. Zero: as many as all ranks have.
    pub max_seqlen_k: usize,
    /// Factor of the scores; zero for `1 / sqrt(D)`.
    pub scale: f32,
    /// Bound of the scores through `softcap * tanh(s / softcap)`; zero for none.
    pub softcap: f32,
    /// Whether a query sees only keys up to its own position; positions are those in whole sequences,
    /// aligned at the end.
    pub causal: bool,
    /// How many keys a query sees up to and with its own position; zero for all.
    pub window_left: usize,
    /// How many keys a query sees from its own position on, with its own; zero for all.
    pub window_right: usize,
    /// Scratch of [`workspace_size`] bytes, all of which are needed.
    pub workspace: Workspace<'a>,
}

impl<'a> Params<'a> {
    /// Plain attention: every query sees every key, default scale, no workspace.
    pub fn new(
        comm: &'a Comm,
        q: TensorRef<'a>,
        k: TensorRef<'a>,
        v: TensorRef<'a>,
        out: TensorMut<'a>,
    ) -> Self {
        Params {
            comm,
            method: Method::default(),
            order: Order::default(),
            q,
            k,
            v,
            out,
            lse: None,
            sinks: None,
            alibi_slopes: None,
            cu_seqlens_q: None,
            cu_seqlens_k: None,
            max_seqlen_q: 0,
            max_seqlen_k: 0,
            scale: 0.0,
            softcap: 0.0,
            causal: false,
            window_left: 0,
            window_right: 0,
            workspace: Workspace::none(),
        }
    }

    /// Attention of one rank alone over these tensors, with the windows of the whole, packed where that is.
    fn attention<'t>(
        &self,
        tensors: [RawTensor; 4],
        lse: Option<RawTensor>,
        of_heads: OfHeads,
    ) -> attention::Params<'t> {
        // SAFETY: the caller's tensors, which a call with these parameters has lent.
        let read = |t: &Option<TensorRef<'_>>| unsafe { exchange::read_optional(raw(t)) };
        attention::Params {
            causal: self.causal,
            window_left: self.window_left,
            window_right: self.window_right,
            cu_seqlens_q: read(&self.cu_seqlens_q),
            cu_seqlens_k: read(&self.cu_seqlens_k),
            max_seqlen_q: self.max_seqlen_q,
            max_seqlen_k: self.max_seqlen_k,
            ..self.unmasked(tensors, lse, of_heads)
        }
    }

    /// Sinks and slopes of all heads.
    fn of_heads(&self) -> OfHeads {
        [raw(&self.sinks), raw(&self.alibi_slopes)]
    }

    /// The same where every query sees every key.
    fn unmasked<'t>(
        &self,
        [q, k, v, out]: [RawTensor; 4],
        lse: Option<RawTensor>,
        [sinks, alibi_slopes]: OfHeads,
    ) -> attention::Params<'t> {
        // SAFETY: they are the caller's tensors, which a call with these parameters has lent, or lie in
        // its workspace; only parts of that call use them, one after the other.
        unsafe {
            attention::Params {
                lse: lse.map(|lse| exchange::write(&lse)),
                sinks: exchange::read_optional(sinks),
                alibi_slopes: exchange::read_optional(alibi_slopes),
                scale: self.scale,
                softcap: self.softcap,
                ..attention::Params::new(
                    exchange::read(&q),
                    exchange::read(&k),
                    exchange::read(&v),
                    exchange::write(&out),
                )
            }
        }
    }
}

impl<'a> Operation for Params<'a> {
    const NAME: &'static str = OP;
    type Problem = Parts<'a, PARTS>;

    fn problem(&self) -> Result<Self::Problem> {
        let [q, k, v] = [&self.q, &self.k, &self.v].map(TensorRef::raw);
        let out = self.out.raw();
        let lse = self.lse.as_ref().map(TensorMut::raw);
        let cu_seqlens = [&self.cu_seqlens_q, &self.cu_seqlens_k].map(Option::is_some);
        let packed = check::check_forms(OP, [&q, &k, &v], cu_seqlens)?;
        // What one rank's call would refuse is refused here.
        let of_heads = self.of_heads();
        let alone = self.attention([q, k, v, out], lse, of_heads);
        named(OP, alone.problem(), &[])?;
        let group = Group {
            op: OP,
            comm: self.comm,
        };
        if packed {
            let windows = [self.window_left, self.window_right];
            group.check_packed(self.method, self.order, (self.causal, windows))?;
        }
        if self.alibi_slopes.is_some() {
            group.check_slopes(self.method, self.causal)?;
        }
        let mut parts = Parts::new(OP, &self.workspace).exactly().of_any_number();
        match self.method {
            Method::Ulysses => {}
            Method::AllGather if packed => {
                self.push_packed(&group, [q, k, v, out], lse, &mut parts)?;
                return Ok(parts);
            }
            // One rank has all keys.
            Method::Ring if self.comm.size() > 1 => {
                self.push_ring(&group, [q, k, v, out], lse, &mut parts)?;
                return Ok(parts);
            }
            Method::AllGather | Method::Ring => {
                self.push_gathered(&group, [q, k, v, out], lse, &mut parts)?;
                return Ok(parts);
            }
        }
        group.check_order(self.order)?;
        group.check_heads(&k)?;
        let tensors = [
            group.heads_of("q", q, Of::Rows, &mut parts)?,
            group.heads_of("k", k, Of::Rows, &mut parts)?,
            group.heads_of("v", v, Of::Rows, &mut parts)?,
            group.take_heads("out", out, Of::Rows, &mut parts)?,
        ];
        let of_heads = match lse {
            None => None,
            Some(lse) => Some(group.take_heads("lse", lse, Of::Lse, &mut parts)?),
        };
        let mut numbers = self.of_heads();
        for number in numbers.iter_mut().flatten() {
            *number = group.own_heads(*number)?;
        }
        if packed {
            self.push_nothing(tensors, of_heads, &mut parts)?;
        }
        let alone = self.attention(tensors, of_heads, numbers);
        parts.push(alone.problem(), &[])?;
        group.tokens_of("out", tensors[3], out, Of::Rows, &mut parts)?;
        if let (Some(of_heads), Some(lse)) = (of_heads, lse) {
            group.tokens_of("lse", of_heads, lse, Of::Lse, &mut parts)?;
        }
        Ok(parts)
    }

    fn tensors(&self, tensors: &mut Tensors) {
        tensors.read("q", &self.q);
        tensors.read("k", &self.k);
        tensors.read("v", &self.v);
        for (name, tensor) in [
            ("sinks", &self.sinks),
            ("alibi_slopes", &self.alibi_slopes),
            ("cu_seqlens_q", &self.cu_seqlens_q),
            ("cu_seqlens_k", &self.cu_seqlens_k),
        ] {
            tensors.read_optional(name, tensor.as_ref());
        }
        tensors.write("out", &self.out);
        tensors.write_optional("lse", self.lse.as_ref());
    }

    fn workspace(&self) -> Option<&Workspace<'_>> {
        Some(&self.workspace)
    }

    fn comm(&self) -> Option<&Comm> {
        Some(self.comm)
    }
}

operation::functions!();
