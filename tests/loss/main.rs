//! Losses, and those that are computed with the head's product.

#[path = "../common/mod.rs"]
mod common;

mod cross_entropy;
mod features;
mod linear_cross_entropy;
mod linear_logprob;
