//! The paged KV cache.

#[path = "../common/mod.rs"]
mod common;

mod append;
mod cache;
mod codes;
mod history;
mod misuse;
mod steps;
