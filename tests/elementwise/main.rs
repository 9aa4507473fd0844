//! What each element is computed by alone, or with its pair: casts, quantisation, the order of codes, rotary embeddings,
//! optimizers.

#[path = "../common/mod.rs"]
mod common;

mod cast;
mod cast_misuse;
mod optimizer;
mod quantize;
mod rope;
mod rope_misuse;
mod weight_repack;
