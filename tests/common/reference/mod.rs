//! Every operation in f64, written from its definition and nothing else.

pub mod attention;
pub mod attention_block;
pub mod attention_merge;
pub mod blocks;
pub mod cross_entropy;
pub mod layer_norm;
pub mod linear;
pub mod logprob;
pub mod mlp;
pub mod norm;
pub mod optimizer;
pub mod qk_norm_rope;
pub mod quantize;
pub mod rms_norm;
pub mod rope;
pub mod swiglu;
