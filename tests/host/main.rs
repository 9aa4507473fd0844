//! What is not of one operation: memory, estimates, tensors of other libraries, empty shapes.

#[path = "../common/mod.rs"]
mod common;

mod dlpack;
mod empty;
mod estimate;
mod estimate_misuse;
mod estimate_step;
#[path = "../../examples/rust/llama/mod.rs"]
mod llama;
mod memory;
