//! Operations: for each one its parameters and their validation.
//!
//! Every operation has the same parts. `Params` is what a caller sets; validation makes a problem of it: the
//! sizes and flags that a backend needs, known to be consistent. The context's backend answers a problem with a
//! plan. `supported` and `workspace_size` tell of the plan that `forward` launches; they look at shapes, strides
//! and dtypes but never at data pointers, which may be NULL there.

pub mod all_gather;
pub mod all_reduce;
pub mod all_reduce_rms_norm;
pub mod all_to_all;
pub mod argmax;
pub mod attention;
pub mod attention_block;
pub mod attention_merge;
pub mod broadcast;
pub mod cast;
pub(crate) mod check;
mod chunked;
pub(crate) mod collective;
pub mod context_parallel_attention;
pub mod cross_entropy;
pub mod decoder_layer;
pub mod embedding;
pub mod kv_cache;
pub mod layer_norm;
pub mod linear;
pub mod linear_cross_entropy;
pub mod linear_logprob;
pub mod mlp;
mod norm;
pub(crate) mod operation;
pub mod parallel;
pub(crate) mod parts;
pub mod qk_norm_rope;
pub mod quantize;
pub mod reduce_scatter;
pub mod rms_norm;
pub mod rope;
pub mod send_receive;
pub mod swiglu;
pub mod weight_repack;

pub use crate::backend::Implementation;
