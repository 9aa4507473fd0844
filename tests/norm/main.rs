//! Norms.

#[path = "../common/mod.rs"]
mod common;

mod backward;
mod layer_norm;
mod qk_norm_rope;
mod qk_norm_rope_misuse;
mod rms_norm;
mod rms_norm_misuse;
