//! Attention, forward and backward, and the kernels that each device has of it.

#[path = "../common/mod.rs"]
mod common;

mod attention_merge;
mod backward;
#[cfg(feature = "cuda")]
mod backward_bits;
mod backward_misuse;
mod backward_tiles;
mod codes;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod decode;
mod forward;
#[cfg(feature = "cuda")]
mod hopper;
mod misuse;
mod numerics;
mod properties;
