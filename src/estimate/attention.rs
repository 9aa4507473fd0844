//! Attention's scratch memory: a plain implementation's against this library's.

use crate::context::Context;
use crate::dtype::DType;
use crate::error::Result;
use crate::layout::Layout;
use crate::ops::attention;
use crate::tensor::{TensorMut, TensorRef};

use super::{float_size, positive, product, sum};

/// The shape of a batched attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// Sequences.
    pub batch_size: u64,
    /// Queries per sequence.
    pub num_queries: u64,
    /// Keys per sequence.
    pub num_keys: u64,
    /// Query heads.
    pub num_heads: u64,
    /// Key and value heads, a divisor of `num_heads`.
    pub num_kv_heads: u64,
    /// Components of a query or key head.
    pub head_dim: u64,
    /// Components of a value head.
    pub v_head_dim: u64,
    /// Of queries, keys, values and output.
    pub dtype: DType,
    /// Queries see keys up to their own position only.
    pub causal: bool,
}

/// Bytes of attention, by use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttentionMemory {
    /// Queries, keys and values.
    pub inputs: u64,
    /// The output.
    pub output: u64,
    /// Scores that a plain implementation stores: `batch_size · num_heads · num_queries · num_keys`
    /// elements.
    pub naive_scores: u64,
    /// Probabilities that it stores beside them: as many.
    pub naive_probabilities: u64,
    /// `inputs + output + naive_scores + naive_probabilities`.
    pub naive_total: u64,
    /// Workspace that [`ops::attention`](crate::ops::attention) asks for: what its query answers.
    pub flash_workspace: u64,
    /// The log-sum-exp kept for the backward pass: `batch_size · num_heads · num_queries` f32
    /// (arXiv:2205.14135, algorithm 1).
    pub flash_lse: u64,
    /// `inputs + output + flash_workspace + flash_lse`.
    pub flash_total: u64,
}

/// What attention of this shape takes on the device of `context`.
///
/// # Errors
/// A size is zero or sizes overflow; the backend has no implementation.
pub fn attention_memory(context: &Context, shape: &AttentionShape) -> Result<AttentionMemory> {
    let size = float_size("dtype", shape.dtype)?;
    let b = positive("batch_size", shape.batch_size)?;
    let (sq, sk) = (
        positive("num_queries", shape.num_queries)?,
        positive("num_keys", shape.num_keys)?,
    );
    let heads = positive("num_heads", shape.num_heads)?;
    let kv_heads = positive("num_kv_heads", shape.num_kv_heads)?;
    let (d, dv) = (
        positive("head_dim", shape.head_dim)?,
        positive("v_head_dim", shape.v_head_dim)?,
    );
    let inputs = sum(
        "inputs",
        &[
            product("q", &[b, sq, heads, d, size])?,
            product("k", &[b, sk, kv_heads, d, size])?,
            product("v", &[b, sk, kv_heads, dv, size])?,
        ],
    )?;
    let output = product("output", &[b, sq, heads, dv, size])?;
    let scores = product("scores", &[b, heads, sq, sk, size])?;
    let workspace = workspace(context, shape)?;
    let lse = product("lse", &[b, heads, sq, 4])?;
    Ok(AttentionMemory {
        inputs,
        output,
        naive_scores: scores,
        naive_probabilities: scores,
        naive_total: sum("naive", &[inputs, output, scores, scores])?,
        flash_workspace: workspace,
        flash_lse: lse,
        flash_total: sum("flash", &[inputs, output, workspace, lse])?,
    })
}

fn workspace(context: &Context, shape: &AttentionShape) -> Result<u64> {
    let dims = |sizes: [u64; 4]| -> Result<Layout> {
        let mut shape = [0; 4];
        for (to, from) in shape.iter_mut().zip(sizes) {
            *to = usize::try_from(from).map_err(|_| super::overflow("workspace"))?;
        }
        Layout::contiguous(&shape)
    };
    let s = shape;
    let layouts = [
        dims([s.batch_size, s.num_queries, s.num_heads, s.head_dim])?,
        dims([s.batch_size, s.num_keys, s.num_kv_heads, s.head_dim])?,
        dims([s.batch_size, s.num_keys, s.num_kv_heads, s.v_head_dim])?,
        dims([s.batch_size, s.num_queries, s.num_heads, s.v_head_dim])?,
    ];
    // SAFETY: queries do not look at data, so NULL may stand for it.
    let [q, k, v] =
        [0, 1, 2].map(|i| unsafe { TensorRef::from_raw(std::ptr::null(), s.dtype, layouts[i]) });
    // SAFETY: as above.
    let out = unsafe { TensorMut::from_raw(std::ptr::null_mut(), s.dtype, layouts[3]) };
    let params = attention::Params {
        causal: s.causal,
        ..attention::Params::new(q, k, v, out)
    };
    let size = attention::workspace_size(context, &params).map_err(|e| e.within(super::OP))?;
    Ok(size as u64)
}
