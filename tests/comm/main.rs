//! Groups of ranks, and the collectives that run over them: here those of local groups, whose ranks are
//! threads.

#[path = "../common/mod.rs"]
mod common;

mod collectives;
mod context_parallel;
mod failures;
mod group;
mod memory;
mod misuse;
mod normalised;
mod optimizer;
mod parallel;
mod pipeline;
mod shard;
mod stress;
mod tokens;
mod transfers;
