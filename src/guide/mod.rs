//! Guides: what spans several operations, with examples that run.

#[doc = include_str!("collectives.md")]
pub mod collectives {}

#[doc = include_str!("kv_cache.md")]
pub mod kv_cache {}

#[doc = include_str!("memory.md")]
pub mod memory {}

#[doc = include_str!("performance.md")]
pub mod performance {}

#[doc = include_str!("training.md")]
pub mod training {}
