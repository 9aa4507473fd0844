//! Linear layers, SwiGLU and the MLP that is made of them.

#[path = "../common/mod.rs"]
mod common;

mod blocks;
mod blocks_layers;
mod blocks_misuse;
mod constant;
#[cfg(feature = "cuda")]
mod cuda;
mod e4m3;
mod linear;
mod linear_backward;
mod linear_backward_misuse;
mod linear_misuse;
mod mlp;
mod mlp_backward;
mod mlp_misuse;
mod mlp_norm;
mod quantized;
mod swiglu;
mod swiglu_backward;
mod swiglu_misuse;
mod x_norm;
