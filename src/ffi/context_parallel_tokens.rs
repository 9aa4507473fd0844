//! Which tokens of sequences a rank holds.

use crate::comm::tokens::{Order, Packed, Params};
use crate::error::{Error, Result, text};
use crate::ffi::params::{self, params};
use crate::ffi::status::unsloth_status;
use crate::ffi::{check_optional_out, check_out, check_pointer, count, flag, guard};

const OP: &str = "context_parallel_tokens_get";

/// Which tokens of every sequence ranks hold.
pub type unsloth_context_order = u32;
/// Rank 0 the first ones, the last rank the last.
pub const UNSLOTH_CONTEXT_ORDER_CONTIGUOUS: unsloth_context_order = 0;
/// Of two chunks for every rank, rank `r` of `n` has chunk `r` and behind it chunk `2n - 1 - r`: one whose queries see
/// little, and one whose queries see much where attention is causal.
pub const UNSLOTH_CONTEXT_ORDER_ZIGZAG: unsloth_context_order = 1;

/// Arguments of `unsloth_context_parallel_tokens_get`: a batch of sequences that ranks divide.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_context_parallel_tokens_params {
    /// `sizeof(unsloth_context_parallel_tokens_params)`.
    pub struct_size: u32,
    /// One of `UNSLOTH_CONTEXT_ORDER_*`.
    pub order: unsloth_context_order,
    /// Which rank, from 0.
    pub rank: i32,
    /// Ranks of the group.
    pub size: i32,
    /// Sequences of the batch.
    pub batch: i64,
    /// Tokens of each, below 2^31; of the longest one where `lengths` says more.
    pub length: i64,
    /// Optional: tokens of every sequence, `batch` of them in the host's memory, none above `length`.
    pub lengths: *const i64,
}
params!(unsloth_context_parallel_tokens_params, []);

/// The order of this value.
pub(crate) fn order(op: &'static str, value: unsloth_context_order) -> Result<Order> {
    Order::from_raw(value).ok_or_else(|| {
        let problem = text!("is {value}, allowed: 0 (contiguous), 1 (zigzag)");
        Error::invalid(op, "order", problem)
    })
}

/// # Safety
/// As [`unsloth_context_parallel_tokens_get`].
unsafe fn get(
    params: *const unsloth_context_parallel_tokens_params,
    tokens: *mut i64,
    (positions, ids): (*mut i32, *mut i64),
    capacity: usize,
) -> Result<()> {
    check_out(OP, "tokens", tokens)?;
    check_optional_out(OP, "positions", positions)?;
    check_optional_out(OP, "ids", ids)?;
    // SAFETY: the caller's promise.
    let p = unsafe { params::read(OP, params)? };
    let number = |name, value| count(OP, name, value);
    let batch = number("batch", p.batch)?;
    let lengths = match p.lengths.is_null() {
        true => None,
        false => {
            check_pointer(OP, "lengths", p.lengths)?;
            if batch > isize::MAX as usize / size_of::<i64>() {
                let problem = text!("is {batch}, more lengths than memory has room for");
                return Err(Error::invalid(OP, "batch", problem));
            }
            // SAFETY: not NULL and aligned; the caller promises as many entries, and they fit memory.
            Some(unsafe { std::slice::from_raw_parts(p.lengths, batch) })
        }
    };
    let of = Params {
        order: order(OP, p.order)?,
        rank: number("rank", p.rank.into())?,
        size: number("size", p.size.into())?,
        batch,
        length: number("length", p.length)?,
        lengths,
    };
    let (of_each, all) = (of.tokens()?, of.each()?);
    if !positions.is_null() || !ids.is_null() {
        if capacity < all.len() {
            let problem = text!("is {capacity}, the rank has {} tokens", all.len());
            return Err(Error::invalid(OP, "capacity", problem));
        }
        for (i, (position, id)) in all.enumerate() {
            // SAFETY: the caller promises room for `capacity` entries, and there are no more.
            unsafe {
                if !positions.is_null() {
                    positions.add(i).write(position);
                }
                if !ids.is_null() {
                    ids.add(i).write(id);
                }
            }
        }
    }
    // SAFETY: not NULL and aligned; the caller promises that it is valid. As many as an i64 has, rounded up.
    unsafe { tokens.write(of_each as i64) };
    Ok(())
}

/// Says which tokens of a batch a rank has where ranks divide sequences for `unsloth_context_parallel_attention_forward`:
/// how many of each sequence to `tokens`, which all ranks have as many of, and where these `[batch, tokens]` are:
/// `positions` in their sequences, for rotary embeddings, and `ids` in the whole batch `[batch, length]`, for inputs and
/// labels. Chunks of a sequence are of one length, so that the last ones may have padding, which has position 0 and
/// id -1. Causal, no token sees the padding behind it.
///
/// It is arithmetic on lengths. With NULL for `positions` and `ids` only `tokens` is written: first ask for the number.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes, `lengths` is NULL or points to `batch` readable
/// entries; `tokens` is NULL or valid for a write; `positions` and `ids` are NULL or valid for writes of
/// `capacity` entries.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_context_parallel_tokens_get(
    params: *const unsloth_context_parallel_tokens_params,
    tokens: *mut i64,
    positions: *mut i32,
    ids: *mut i64,
    capacity: usize,
) -> unsloth_status {
    // SAFETY: the caller's promises.
    guard(OP, || unsafe {
        get(params, tokens, (positions, ids), capacity)
    })
}

/// Arguments of `unsloth_context_parallel_packed_get`: packed sequences, whose tokens ranks divide as one run of them,
/// rank 0 having the first ones.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_context_parallel_packed_params {
    /// `sizeof(unsloth_context_parallel_packed_params)`.
    pub struct_size: u32,
    /// 1 if attention is causal, else 0.
    pub causal: u32,
    /// Which rank, from 0.
    pub rank: i32,
    /// Ranks of the group.
    pub size: i32,
    /// Tokens of each rank; those of all are fewer than 2^31.
    pub tokens: i64,
    /// Sequences.
    pub batch: i64,
    /// Where each begins among the tokens of all ranks, and the last one's end: `batch + 1` entries in the host's
    /// memory. Behind that is padding.
    pub cu_seqlens: *const i32,
}
params!(unsloth_context_parallel_packed_params, []);

/// # Safety
/// As [`unsloth_context_parallel_packed_get`].
unsafe fn get_packed(
    params: *const unsloth_context_parallel_packed_params,
    [cu_seqlens_q, cu_seqlens_k, positions]: [*mut i32; 3],
) -> Result<()> {
    const OP: &str = "context_parallel_packed_get";
    for (name, to) in [
        ("cu_seqlens_q", cu_seqlens_q),
        ("cu_seqlens_k", cu_seqlens_k),
        ("positions", positions),
    ] {
        check_optional_out(OP, name, to)?;
    }
    // SAFETY: the caller's promise.
    let p = unsafe { params::read(OP, params)? };
    let number = |name, value| count(OP, name, value);
    let batch = number("batch", p.batch)?;
    if batch >= isize::MAX as usize / size_of::<i32>() {
        let problem = text!("is {batch}, more than memory has room for");
        return Err(Error::invalid(OP, "batch", problem));
    }
    check_pointer(OP, "cu_seqlens", p.cu_seqlens)?;
    let of = Packed {
        rank: number("rank", p.rank.into())?,
        size: number("size", p.size.into())?,
        tokens: number("tokens", p.tokens)?,
        // SAFETY: not NULL and aligned; the caller promises as many entries, and they fit memory.
        cu_seqlens: unsafe { std::slice::from_raw_parts(p.cu_seqlens, batch + 1) },
        causal: flag(OP, "causal", p.causal)?,
    };
    for (i, (of_queries, of_keys)) in of.each()?.enumerate() {
        for (to, start) in [(cu_seqlens_q, of_queries), (cu_seqlens_k, of_keys)] {
            if !to.is_null() {
                // SAFETY: the caller promises room for an entry for each sequence and one more.
                unsafe { to.add(i).write(start) };
            }
        }
    }
    if !positions.is_null() {
        for (i, position) in of.positions()?.enumerate() {
            // SAFETY: the caller promises room for an entry for each of the rank's tokens.
            unsafe { positions.add(i).write(position) };
        }
    }
    Ok(())
}

/// Says what a rank needs to know where ranks divide packed sequences: where each begins among its queries and among
/// the keys of all ranks, which are `cu_seqlens_q` and `cu_seqlens_k` of `unsloth_context_parallel_attention_forward`
/// by `UNSLOTH_CONTEXT_METHOD_ALL_GATHER`, once they are where the context is; and `positions` of its tokens in their
/// sequences, 0 of padding. Of `cu_seqlens_q` and `cu_seqlens_k` there are `batch + 1` entries, of `positions` `tokens`;
/// what is NULL is not written. It is arithmetic on the host.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes, `cu_seqlens` is NULL or points to `batch + 1`
/// readable entries; `cu_seqlens_q` and `cu_seqlens_k` are NULL or valid for writes of `batch + 1` entries, `positions` of
/// `tokens`, and `cu_seqlens` is none of them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_context_parallel_packed_get(
    params: *const unsloth_context_parallel_packed_params,
    cu_seqlens_q: *mut i32,
    cu_seqlens_k: *mut i32,
    positions: *mut i32,
) -> unsloth_status {
    // SAFETY: the caller's promises.
    guard("context_parallel_packed_get", || unsafe {
        get_packed(params, [cu_seqlens_q, cu_seqlens_k, positions])
    })
}
